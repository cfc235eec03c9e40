"""Detection of backward passes that fail, from a hook within the pass."""

from __future__ import annotations

import weakref
from functools import partial

import torch


class AutogradRun:
    """The run of the autograd engine in which this object was created, to detect later whether the run has failed.

    The engine holds the callback, and with it the token, until the end of the run, and calls the callback only if the
    run succeeds. A token that was released without a call therefore means that the run has failed.
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
        """Whether the run ended with an error."""
        return not self._has_ended and self._token() is None

    def _end(self, _: _Token) -> None:
        self._has_ended = True


class _Token:
    """An object that can be weakly referenced."""
