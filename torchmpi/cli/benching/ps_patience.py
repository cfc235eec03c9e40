"""A communicator whose barrier sleeps."""

from __future__ import annotations

import time
from typing import Any

_NAP_SECONDS = 2e-4


class Patient:
    """What the clock needs of a communicator, for work in which other ranks' threads have a part.

    MPI waits by looking all the time: a rank that has finished would take the core from the thread that serves those
    who have not.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size

    def Barrier(self) -> None:  # named as in mpi4py
        """Sleep until all are here, then leave together."""
        request = self._comm.Ibarrier()
        while not request.Test():
            time.sleep(_NAP_SECONDS)
        self._comm.Barrier()

    def Allreduce(self, mine: Any, result: Any, op: Any) -> None:
        """MPI's, once all are here."""
        self.Barrier()
        self._comm.Allreduce(mine, result, op=op)

    def allgather(self, value: Any) -> list[Any]:
        """MPI's, once all are here."""
        self.Barrier()
        found: list[Any] = self._comm.allgather(value)
        return found
