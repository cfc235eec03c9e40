"""Conditions: agreement of ranks without gathering Python objects, and waiting without polling a core."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

_MIN_SLEEP_SECONDS, _MAX_SLEEP_SECONDS = 20e-6, 1e-3
_SHORT_BYTES, _LENGTH_BYTES = 256, 4


def on_all(comm: Any, condition: object) -> bool:
    """Return whether a condition is true on all ranks. Collective."""
    return true_and_same(comm, bool(condition), 0)[0]


def true_and_same(comm: Any, condition: bool, number: int) -> tuple[bool, bool]:
    """Return whether a condition is true on all ranks, and whether a number is the same on all. Collective.

    Gathering the answers as Python objects would cost time and memory on each rank for every rank of the job.
    """
    if not hasattr(comm, "Allreduce"):
        answers = comm.allgather((condition, number))
        return all(answer for answer, _ in answers), len({each for _, each in answers}) == 1
    from mpi4py import MPI

    least = np.array([condition, number, -number], np.int64)
    comm.Allreduce(MPI.IN_PLACE, least, MPI.MIN)
    return bool(least[0]), bool(least[1] == -least[2])


def sum_of_all(comm: Any, number: int) -> int:
    """Return the sum of the numbers of all ranks. Collective."""
    if not hasattr(comm, "Allreduce"):
        return sum(comm.allgather(number))
    from mpi4py import MPI

    total = np.array([number], np.int64)
    comm.Allreduce(MPI.IN_PLACE, total, MPI.SUM)
    return int(total[0])


def gather_unless_equal(comm: Any, value: Any) -> list[Any]:
    """Return the values of all ranks, whose texts are gathered only if they are not all the same. Collective."""
    digest = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "little")
    _, are_equal = true_and_same(comm, True, digest)
    return [value] * comm.size if are_equal else list(comm.allgather(value))


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


def sleep_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; sleep between checks, first for 20 us and at most for 1 ms."""
    seconds = _MIN_SLEEP_SECONDS
    while not condition():
        time.sleep(seconds)
        seconds = min(1.25 * seconds, _MAX_SLEEP_SECONDS)
