"""Messages between the ranks of the test suite, on a communicator that the tests do not use."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import TypeVar

from mpi4py import MPI

Value = TypeVar("Value")
STATUS_AFTER_FAILURE = 3


class Channel:
    """Barriers and exchanges that sleep while they wait, since ranks may outnumber cores."""

    def __init__(self, logs: Path) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        # Separate, since a rank that fails in a test leaves the others waiting at the barriers of that test.
        self._test_comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        self._pids = self._comm.allgather(os.getpid())
        self._stacks = (logs / f"stacks-rank{self.rank}.txt").open("w")
        faulthandler.register(signal.SIGUSR1, self._stacks)

    def barrier(self) -> None:
        self._synchronize(self._comm, None)

    def barrier_of_test(self, timeout: float) -> None:
        self._synchronize(self._test_comm, timeout)

    def exchange(self, value: Value, timeout: float | None = None) -> list[Value]:
        """Return the values of all ranks on every rank."""
        self._synchronize(self._comm, timeout)
        return self._comm.allgather(value)

    def _synchronize(self, comm: MPI.Intracomm, timeout: float | None) -> None:
        begin = time.monotonic()
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(0.001)
            if timeout is not None and time.monotonic() > begin + timeout:
                self._end_job(f"a rank has not arrived within {timeout:g} s")

    def limit_seconds(self, seconds: int) -> None:
        """After a time write the stacks, and three seconds later end the process, even if C code holds the GIL."""
        faulthandler.dump_traceback_later(seconds, file=self._stacks)
        signal.alarm(seconds + 3)

    def lift_limit(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)

    def _end_job(self, why: str) -> None:
        """Let every rank of this host write its stacks, then end the job."""
        print(f"rank {self.rank}: {why}", file=sys.stderr, flush=True)
        for pid in self._pids:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(1)
        self.abort()

    def abort(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(STATUS_AFTER_FAILURE)
