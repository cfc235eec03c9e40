"""Conditions: agreement of ranks without gathering Python objects, and waiting without polling a core."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

T = TypeVar("T")

_MIN_SLEEP_SECONDS, _MAX_SLEEP_SECONDS = 20e-6, 1e-3
_SHORT_BYTES, _LENGTH_BYTES = 256, 4
_MOST = (1 << 63) - 1
_MOST_SET_SECONDS = 0.02
"""So long an alarm counts as set: the wait may end before the thread that sets it has noted that."""
_library = ctypes.PyDLL(None, use_errno=True)  # whose functions keep the GIL, as they do not wait


def on_all(comm: Any, condition: object) -> bool:
    """Return whether a condition is true on all ranks. Collective."""
    if not hasattr(comm, "Allreduce"):
        return all(comm.allgather(bool(condition)))
    from mpi4py import MPI

    least = np.array([bool(condition)], np.int64)
    comm.Allreduce(MPI.IN_PLACE, least, MPI.MIN)
    return bool(least[0])


Reduce = Callable[[list[int], Literal["min", "sum"]], list[int]]
"""Returns the least of each of some numbers over the ranks, or the sum. Collective."""


_REDUCE: dict[str, Callable[[Iterable[int]], int]] = {"min": min, "sum": sum}


def reduce_by_mpi(comm: Any, numbers: list[int], op: Literal["min", "sum"]) -> list[int]:
    """Return the least of each of some numbers over the ranks, or the sum. Collective."""
    if not hasattr(comm, "Allreduce"):
        return list(map(_REDUCE[op], zip(*comm.allgather(numbers), strict=True)))
    from mpi4py import MPI

    reduced = np.array(numbers, np.int64)
    comm.Allreduce(MPI.IN_PLACE, reduced, getattr(MPI, op.upper()))
    result: list[int] = reduced.tolist()
    return result


def common(reduce: Reduce, *numbers: int | None) -> list[int | None]:
    """Return each number if all ranks that do not pass None pass the same one, else None. Collective.

    Gathering the numbers as Python objects would cost time and memory on each rank for every rank of the job.
    """
    least = reduce([_MOST if each is None else sign * each for each in numbers for sign in (1, -1)], "min")
    return [low if low == -high else None for low, high in zip(least[::2], least[1::2], strict=True)]


def gather_unless_equal(comm: Any, value: Any) -> list[Any]:
    """Return the values of all ranks, whose texts are gathered only if they are not all the same. Collective."""
    (is_equal,) = common(partial(reduce_by_mpi, comm), digest(value))
    return list(comm.allgather(value)) if is_equal is None else [value] * comm.size


def digest(value: Any) -> int:
    """Return a number that stands for the text of a value."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "little")


def broadcast_short(comm: Any, value: Any) -> Any:
    """Return an object of rank 0 on all ranks, in one message if its pickle is short; mpi4py needs two. Collective."""
    if not hasattr(comm, "Allreduce"):
        return comm.bcast(value)
    packed = pickle.dumps(value) if comm.rank == 0 else b""
    packed = packed if len(packed) <= _SHORT_BYTES - _LENGTH_BYTES else b""
    message = bytearray((len(packed).to_bytes(_LENGTH_BYTES, "little") + packed).ljust(_SHORT_BYTES, b"\0"))
    comm.Bcast(message, 0)
    num_bytes = int.from_bytes(message[:_LENGTH_BYTES], "little")
    return pickle.loads(message[_LENGTH_BYTES:][:num_bytes]) if num_bytes else comm.bcast(value)


def from_rank_0(rank: int, broadcast: Callable[[Any], Any], action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result, or raise its error, on all ranks. Collective.

    >>> from_rank_0(0, lambda outcome: outcome, lambda: 1)
    1
    """
    outcome: tuple[T | None, Exception | None] = (None, None)
    if rank == 0:
        try:
            outcome = (action(), None)
        except Exception as error:  # of any kind: the other ranks wait for the outcome
            outcome = (None, error)
    result: T
    result, failure = broadcast(outcome)
    if failure is not None:
        raise failure
    return result


def sleep_until(condition: Callable[[], bool], limit: float = float("inf")) -> bool:
    """Wait until a condition is true, at most `limit` seconds, and return whether it is.

    The checks are 20 us apart at first and later 1 ms.
    """
    seconds, end = _MIN_SLEEP_SECONDS, time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(seconds)
        seconds = min(1.25 * seconds, _MAX_SLEEP_SECONDS)
    return True


class Alarm:
    """A timer of the system for which a thread waits; others set it without waking that thread.

    Attributes:
        ring: Let it ring now. This and the next one are no functions of Python, where an interrupt could come before
            the timer is set.
        ring_later: Let it ring later, instead of when it would have.

    Args:
        seconds: After how long it rings later.

    >>> alarm = Alarm(0.001)
    >>> alarm.set_once()
    >>> alarm.wait()
    >>> _ = alarm.ring()
    >>> alarm.wait()
    >>> alarm.close()
    """

    def __init__(self, seconds: float) -> None:
        self._file = _library.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._file < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: the system gives no timer")
        self.ring: Callable[[], object] = self._setter(0)
        self.ring_later: Callable[[], object] = self._setter(seconds)
        self._set_at = 0.0
        """When `set_by` has set it, if nobody has waited for it since."""

    def _setter(self, seconds: float) -> Callable[[], object]:
        times = (ctypes.c_long * 4)(0, 0, 0, max(1, int(seconds * 1e9)))  # without an interval
        return partial(_library.timerfd_settime, self._file, 0, times, None)

    def set(self, seconds: float) -> None:
        """Let it ring after so long, less than a second, instead of when it would have."""
        self._setter(seconds)()

    def set_once(self) -> None:
        """Let it ring later, unless this has been called since the last wait: most calls only read a clock."""
        now = time.monotonic()
        if now - self._set_at > _MOST_SET_SECONDS:
            self.ring_later()
            self._set_at = now  # behind the call: an interrupt in between leaves a timer that is set again

    def wait(self) -> None:
        """Wait until it rings; what has been done before a `set_once` is seen afterwards."""
        os.read(self._file, 8)
        self._set_at = 0.0

    def close(self) -> None:
        """Free the timer; no thread waits for it."""
        os.close(self._file)
