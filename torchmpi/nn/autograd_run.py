"""One run of the autograd engine, as seen from a hook within it."""

from __future__ import annotations

import weakref
from functools import partial

import torch


class AutogradRun:
    """Knows later whether the run in which it was made came to its end.

    The engine keeps the callback, and with it the token, until the run is over; it calls it only if the run
    succeeds. So a token that died without the call tells of a run that broke off.
    """

    def __init__(self) -> None:
        token = _Token()
        self._token = weakref.ref(token)
        self._has_ended = False
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._end, token))

    current = staticmethod(torch._C._current_graph_task_id)
    """The number of the run that the calling hook belongs to; torch.utils.checkpoint uses the same private function."""

    @property
    def has_failed(self) -> bool:
        """Whether the run is over without having come to its end."""
        return not self._has_ended and self._token() is None

    def _end(self, _: _Token) -> None:
        self._has_ended = True


class _Token:
    """Something that can be weakly referenced."""
