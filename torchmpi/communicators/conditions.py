"""Conditions: agreement of ranks without gathering Python objects, and waiting without polling a core."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_MIN_SLEEP_SECONDS, _MAX_SLEEP_SECONDS = 20e-6, 1e-3
_SHORT_BYTES, _LENGTH_BYTES = 256, 4


def on_all(comm: Any, condition: object) -> bool:
    """Return whether a condition is true on all ranks. Collective."""
    return each_on_all(comm, condition)[0]


def each_on_all(comm: Any, *conditions: object) -> list[bool]:
    """Return of each condition whether it is true on all ranks. Collective.

    Gathering the answers as Python objects would cost time and memory on each rank for every rank of the job.
    """
    if not hasattr(comm, "Allreduce"):  # ranks without an MPI library
        return [all(answers) for answers in zip(*comm.allgather([*map(bool, conditions)]), strict=True)]
    from mpi4py import MPI

    answers = np.array([*map(bool, conditions)], np.int64)
    comm.Allreduce(MPI.IN_PLACE, answers, MPI.MIN)
    return [bool(answer) for answer in answers]


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
    if not hasattr(comm, "Allreduce"):
        return [value] * comm.size if len(set(comm.allgather(digest))) == 1 else list(comm.allgather(value))
    from mpi4py import MPI

    ends = np.array([digest, -digest], np.int64)
    comm.Allreduce(MPI.IN_PLACE, ends, MPI.MIN)
    return [value] * comm.size if ends[0] == -ends[1] else list(comm.allgather(value))


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


def sleep_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; sleep between checks, first for 20 us and at most for 1 ms."""
    seconds = _MIN_SLEEP_SECONDS
    while not condition():
        time.sleep(seconds)
        seconds = min(1.25 * seconds, _MAX_SLEEP_SECONDS)
