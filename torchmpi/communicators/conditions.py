"""Conditions: agreement of ranks without gathering Python objects, and waiting without polling a core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

_MIN_SLEEP_SECONDS, _MAX_SLEEP_SECONDS = 20e-6, 1e-3


def on_all(comm: Any, condition: object) -> bool:
    """Return whether a condition is true on all ranks. Collective.

    Gathering the answers as Python objects would cost time and memory on each rank for every rank of the job.
    """
    if not hasattr(comm, "Allreduce"):  # ranks without an MPI library
        return all(comm.allgather(bool(condition)))
    from mpi4py import MPI

    answer = np.array([bool(condition)], np.int64)
    comm.Allreduce(MPI.IN_PLACE, answer, MPI.MIN)
    return bool(answer[0])


def sleep_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; sleep between checks, first for 20 us and at most for 1 ms."""
    seconds = _MIN_SLEEP_SECONDS
    while not condition():
        time.sleep(seconds)
        seconds = min(1.25 * seconds, _MAX_SLEEP_SECONDS)
