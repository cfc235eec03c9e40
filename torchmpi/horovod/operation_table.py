"""Operations that have been started: their handles, which are numbers, and their names.

Calls are matched by their order, not by name; names only serve to refuse a name that is in flight, and in the timeline.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..communicators.handle import Handle
from ..errors import TorchMPIError
from ..timeline import events
from . import timeline
from .exceptions import internal_errors, refuse
from .process_sets import ProcessSet

_SECONDS_IN_FLIGHT = 1e-3
"""The least time for which a name counts as in flight: a cycle of Horovod, so that repeated names are refused."""


class _Started(NamedTuple):
    """An operation that `synchronize` has not been called for."""

    handle: Handle[Any]
    finish: Callable[[Any], Any]
    """Converts the result, in the thread that waits."""
    key: tuple[int | None, str]
    time: float


_started: dict[int, _Started] = {}
_by_key: dict[tuple[int | None, str], int] = {}
_numbers = itertools.count()


def forget() -> None:
    """Forget all operations, and begin to count anew."""
    global _numbers
    _started.clear()
    _by_key.clear()
    _numbers = itertools.count()


def first(results: Sequence[Tensor]) -> Tensor:
    """Return the result of an operation on one tensor."""
    return results[0]


class NamedOperation:
    """An operation on tensors, to be started or run under a name; a subclass makes its calls.

    Args:
        collective: Its name in Horovod.
        process_set: The ranks that take part.
        tensors: What this rank passes.
    """

    def __init__(self, collective: str, process_set: ProcessSet, tensors: list[Tensor]) -> None:
        self._collective, self._process_set, self._tensors = collective, process_set, tensors

    def _call(self) -> Any:
        """Make the calls in this thread."""
        raise NotImplementedError

    def _begin(self) -> Handle[Any]:
        """Make the calls in the background."""
        raise NotImplementedError

    def _results(self, ended: Any) -> list[Tensor]:
        """Convert the result of either into those of the operation, in the thread that waits."""
        raise NotImplementedError

    def start(self, name: str | None, pick: Callable[[Any], Any] = lambda results: results) -> int:
        """Start it and return its number; `synchronize` returns ``pick(results)``."""
        number = next(_numbers)
        key = self._key(name, number)
        _refuse_repeated(key)
        with internal_errors():
            handle = self._begin()
        if (end := self._shown(key)) is not None:
            handle.when_done(end)
        _started[number] = _Started(handle, lambda result: pick(self._results(result)), key, time.monotonic())
        _by_key[key] = number
        return number

    def run(self, name: str | None) -> list[Tensor]:
        """Run it in this thread, which is what `synchronize` does with one that has just been started."""
        number, end = next(_numbers), None
        if (name is not None and _by_key) or events.recorder is not None:  # otherwise nothing needs the name
            key = self._key(name, number)
            if name is not None:
                _refuse_repeated(key)
            end = self._shown(key)
        try:
            results = self._results(self._call())
        except TorchMPIError as error:
            refuse(error)
            raise
        if end is not None:
            end()
        return results

    def _shown(self, key: tuple[int | None, str]) -> Callable[[], None] | None:
        return timeline.begin_call(key[1], self._collective.removeprefix("grouped_"), self._tensors)

    def _key(self, name: str | None, number: int) -> tuple[int | None, str]:
        named = f"{self._collective}.noname.{number}" if name is None else f"{self._collective}.{name}"
        return self._process_set.process_set_id, named


def _refuse_repeated(key: tuple[int | None, str]) -> None:
    earlier = _started.get(_by_key.get(key, -1))
    if earlier is None:
        return
    if not earlier.handle.done() or time.monotonic() - earlier.time < _SECONDS_IN_FLIGHT:
        raise ValueError(
            f"{key[1]}: an operation of this name is in flight already. Synchronize it first, or use another name."
        )


def poll(handle: int) -> bool:
    """Return whether an operation has ended, so that `synchronize` would not wait.

    Args:
        handle: What an ``_async`` function has returned.

    Returns:
        True if it has ended, with or without an error.

    Raises:
        ValueError: The handle is unknown, or `synchronize` was called for it.

    Example:
        hvd.poll(handle)
    """
    if handle not in _started:
        raise ValueError(f"poll({handle}): no such handle, or it has been synchronized.")
    return _started[handle].handle.done()


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result.

    Args:
        handle: What an ``_async`` function has returned.

    Returns:
        The result; None if the handle is unknown or `synchronize` was called for it.

    Raises:
        HorovodInternalError: The ranks made different calls; raised on all ranks.

    Example:
        total = hvd.synchronize(hvd.allreduce_async(tensor))
    """
    operation = _started.pop(handle, None)
    if operation is None:
        return None
    if _by_key.get(operation.key) == handle:
        del _by_key[operation.key]
    with internal_errors():
        result = operation.handle.wait()
    return operation.finish(result)
