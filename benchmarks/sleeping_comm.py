"""A communicator whose barrier sleeps instead of polling."""

from __future__ import annotations

import time
from typing import Any

_POLL_SECONDS = 2e-4


class SleepingComm:
    """The calls of a communicator that timing needs, for work that involves threads of other ranks.

    MPI waits by polling: a rank that has finished would occupy a core that the server threads of other ranks need.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size

    def Barrier(self) -> None:  # named as in mpi4py
        """Sleep until all ranks have arrived, then leave together."""
        request = self._comm.Ibarrier()
        while not request.Test():
            time.sleep(_POLL_SECONDS)
        self._comm.Barrier()

    def Allreduce(self, mine: Any, result: Any, op: Any) -> None:
        """Call MPI's Allreduce after the barrier."""
        self.Barrier()
        self._comm.Allreduce(mine, result, op=op)

    def allgather(self, value: Any) -> list[Any]:
        """Call MPI's allgather after the barrier."""
        self.Barrier()
        found: list[Any] = self._comm.allgather(value)
        return found
