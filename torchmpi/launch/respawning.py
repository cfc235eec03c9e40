"""A new rank in place of a lost one, under Open MPI: started by one rank while all go on, and joined to them later.

The process that starts it and the new one have an intercommunicator of their own, the bridge, for three messages: the
new rank is ready; it is to join, or is not needed; the others have agreed that it has joined, or that it has not.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Mapping
from typing import Any

from ..log import log_fatal, logger

COMMAND_VARIABLE = "TORCHMPI_RESPAWN_COMMAND"
"""The command of a rank, in the notation of the shell."""
LIMIT_VARIABLE = "TORCHMPI_RESPAWNS"
"""How many ranks may be started in place of lost ones."""
NEWCOMER_VARIABLE = "TORCHMPI_NEWCOMER"
"""Set in a rank that was started in place of a lost one."""
READY_TAG, ORDER_TAG, VERDICT_TAG, JOIN_TAG = range(11, 15)
_PASSED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "MASTER_ADDR", "MASTER_PORT")
_PASSED_PREFIXES = ("TORCHMPI_", "TORCH_", "PYTHON", "OMP_", "MKL_", "NUMBA_", "GLOO_", "NCCL_", "UCX_", "FI_")
_OF_OPEN_MPI = ("coll", "mpi_ft_", "mpi_yield_when_idle", "btl")
_SECRETS = ("TORCHMPI_JOB_KEY",)
"""Other users of a host can read commands."""
_START_SECONDS = 300.0
"""After this time without a connection, a new process ends, and the rank that has started it gives it up: the other one
may be lost in MPI_Init or in MPI_Comm_spawn, which then have no end."""


def limit() -> int:
    """Return how many ranks may be started in place of lost ones."""
    return int(os.environ.get(LIMIT_VARIABLE) or 0)


def is_newcomer() -> bool:
    """Return whether this process was started in place of a lost rank."""
    return NEWCOMER_VARIABLE in os.environ


def is_passed(name: str) -> bool:
    """Return whether all ranks of a job get a variable, those of other hosts too.

    >>> is_passed("TORCHMPI_CHECK"), is_passed("PATH"), is_passed("HOSTNAME")
    (True, True, False)
    """
    return name in _PASSED or name.startswith(_PASSED_PREFIXES)


def command(environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts a rank on any host of the job.

    Open MPI passes no variables to processes that a rank starts on other hosts, not even those of ``mpirun -x``.

    >>> command({"TORCHMPI_RESPAWN_COMMAND": "python 'my program.py'", "PATH": "/bin", "HOSTNAME": "a"})[-3:]
    ['TORCHMPI_RESPAWN_COMMAND=python 'my program.py'", 'python', 'my program.py']
    """
    of_open_mpi = tuple(f"OMPI_MCA_{name}" for name in _OF_OPEN_MPI)
    own = {
        name: value
        for name, value in environment.items()
        if (is_passed(name) or name.startswith(of_open_mpi)) and name not in _SECRETS
    } | {NEWCOMER_VARIABLE: "1"}
    return ["env", *(f"{name}={own[name]}" for name in sorted(own)), *shlex.split(environment[COMMAND_VARIABLE])]


class Respawn:
    """A process that this rank starts in place of a lost one, in a thread."""

    def __init__(self, MPI: Any) -> None:
        self._MPI, self.problem, self._is_ready = MPI, "", False
        self._lock, self._began = threading.Lock(), time.monotonic()
        self.hangs = False
        """Whether MPI_Comm_spawn has no end: then no other one may be called."""
        self.bridge: Any = None
        self._thread = threading.Thread(target=self._run, name="torchmpi respawn", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        MPI, (program, *arguments) = self._MPI, command(os.environ)
        try:
            bridge = MPI.COMM_SELF.Spawn(program, arguments, 1)
            bridge.Set_errhandler(MPI.ERRORS_RETURN)
            self.bridge = bridge
        except MPI.Exception as error:
            self.problem = str(error)
            logger.warning("no rank could be started in place of a lost one: %s", error)

    def is_ready(self) -> bool:
        """Return whether the new rank waits to join, and note if it has ended."""
        if self.bridge is None and not self.problem and time.monotonic() > self._began + _START_SECONDS:
            self.hangs, self.problem = True, f"it has not come within {_START_SECONDS:g} s"
            logger.warning("a rank that was started in place of a lost one has no connection: %s", self.problem)
        with self._lock:  # threads ask at any time, and one of them must take the message
            if self.bridge is not None and not self.problem:
                try:
                    if self.bridge.Iprobe(0, READY_TAG):
                        self.bridge.recv(None, 0, READY_TAG)
                        self._is_ready = True
                except self._MPI.Exception as error:
                    self.problem = str(error)
        return self._is_ready and not self.problem

    def release(self, seconds: float) -> None:
        """Tell the new rank that it is not needed, after it has been started."""
        self._thread.join(seconds)
        if self.bridge is not None:
            with contextlib.suppress(self._MPI.Exception):
                self.bridge.send(None, 0, ORDER_TAG)


def end_if_never_met() -> threading.Timer:
    """End this process, which was started in place of a lost rank, unless the returned timer is cancelled in time."""

    def end() -> None:
        log_fatal(f"a new rank has no connection to the others after {_START_SECONDS:g} s, and ends")
        os._exit(1)

    timer = threading.Timer(_START_SECONDS, end)
    timer.daemon = True
    timer.start()
    return timer
