"""Operations that have been started: their handles, which are numbers, and their names.

Calls are matched by their order, not by name; names only serve to refuse a name that is in flight, and in the timeline.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ..communicators.handle import Handle
from . import timeline
from .exceptions import internal_errors
from .process_sets import ProcessSet

T = TypeVar("T")
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


def start_operation(
    collective: str,
    name: str | None,
    process_set: ProcessSet,
    tensors: Sequence[Tensor],
    start: Callable[[], Handle[Any]],
    finish: Callable[[Any], Any],
) -> int:
    """Start an operation and return its number."""
    number = next(_numbers)
    key = _key(collective, name, process_set, number)
    _refuse_repeated(key)
    with internal_errors():
        handle = start()
    if (end := timeline.begin_call(key[1], collective.removeprefix("grouped_"), tensors)) is not None:
        handle.when_done(end)
    _started[number] = _Started(handle, finish, key, time.monotonic())
    _by_key[key] = number
    return number


def run_operation(
    collective: str, name: str | None, process_set: ProcessSet, tensors: Sequence[Tensor], run: Callable[[], T]
) -> T:
    """Run an operation in this thread, which is what `synchronize` does with one that has just been started."""
    key = _key(collective, name, process_set, next(_numbers))
    if name is not None:
        _refuse_repeated(key)
    end = timeline.begin_call(key[1], collective.removeprefix("grouped_"), tensors)
    with internal_errors():
        result = run()
    if end is not None:
        end()
    return result


def _key(collective: str, name: str | None, process_set: ProcessSet, number: int) -> tuple[int | None, str]:
    return process_set.process_set_id, f"{collective}.noname.{number}" if name is None else f"{collective}.{name}"


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
