"""Start the ranks of one host without MPI, so that the others continue when one is killed."""

from __future__ import annotations

import argparse
import math
import os
import secrets
import subprocess
import time
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType

from ..errors import JobError
from ..launch import launcher, network, respawning
from ..log import logger
from .supervision import ENDING, TIME_LIMIT_STATUS, GroupSignals, handle_signals

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_POLL_SECONDS = 0.05
_TERMINATION_SECONDS = 10.0
_GRACE_SECONDS = 10.0  # after the failure of a rank
_TIMEOUT = timedelta(minutes=5)
# The ranks find each other as under torchrun: through a store in this process.
_AS_TORCHRUN = {"TORCHELASTIC_RUN_ID": launcher.WITHOUT_MPI_ID, "TORCHELASTIC_USE_AGENT_STORE": "True"}


class SeparateRanks:
    """The processes of a job without MPI.

    A rank that is killed is lost, and the others decide whether they continue. A rank that fails after ``start()`` ends
    the others itself. Before ``start()`` it cannot reach them, so they are terminated here.
    """

    def __init__(self, command: Sequence[str], num_ranks: int, respawns: int = 0) -> None:
        self._command, self._num_ranks, self._respawns = list(command), num_ranks, respawns
        self._processes: list[subprocess.Popen[bytes]] = []
        """First those of the ranks, then those that were started in place of lost ones."""
        self._slots: list[int] = []
        """For each process, the rank at the beginning in whose place it is, perhaps after others."""
        self._is_ending = False
        """Whether the job ends, because of a signal or a failure, so that no lost rank is replaced."""
        self._key = secrets.token_hex(32)  # others on this host can read and write the store, but not an environment

    def run(self, seconds: float | None = None) -> int:
        """Run all ranks to their end; return 0 if one rank has ended with 0 and no other one has failed.

        After a time limit, the ranks are ended, and the status is 124.

        Raises:
            JobError: The program cannot be started.
        """
        with GroupSignals() as self._signals:
            return self._run(seconds)

    def _run(self, seconds: float | None) -> int:
        from ..launch import tcp_store  # here, since they import torch, which other jobs do not need
        from ..launch.launcherless import newcomer_store

        address = network.loopback()
        server = network.listen(address, self._num_ranks)
        port = server.getsockname()[1]
        store = tcp_store.open_tcp_store(
            address, port, self._num_ranks, True, _TIMEOUT, master_listen_fd=server.detach()
        )
        handle_signals(self._pass_on)
        try:
            for rank in range(self._num_ranks):
                self._start(rank, address, port)
        except OSError as error:
            self._end(self._processes)
            raise JobError(f"{self._command[0]} cannot be started: {error.strerror}.") from error
        limit = None if seconds is None else time.monotonic() + seconds
        running, statuses = list(self._processes), dict[int, int]()
        new_ranks = newcomer_store.NewcomerStore(store, self._key.encode())

        def waits(process: subprocess.Popen[bytes]) -> bool:
            """Return whether a process is a new rank that has not joined the others."""
            index = self._processes.index(process)
            return index >= self._num_ranks and not new_ranks.has_joined(index)

        failure, failure_limit = "", math.inf
        while running:
            for process in [process for process in running if process.poll() is not None]:
                running.remove(process)
                rank, status = self._processes.index(process), process.returncode
                is_lost = status < 0 or waits(process)
                if is_lost:
                    how = (
                        f"was ended by signal {-status}"
                        if status < 0
                        else f"ended with status {status} and did not join"
                    )
                    logger.warning("torchmpi run: rank %d %s.", rank, how)
                if not waits(process):
                    statuses[rank] = status
                may_replace = not self._is_ending and len(self._processes) < self._num_ranks + self._respawns
                if is_lost and running and may_replace:
                    try:
                        running.append(self._start(self._slots[rank], address, port))
                    except OSError as error:
                        logger.warning("torchmpi run: no process can be started in its place: %s.", error.strerror)
                elif status > 0 and not is_lost and math.isinf(failure_limit):
                    failure_limit = time.monotonic() + _GRACE_SECONDS
                    failure, self._is_ending = f"rank {rank} ended with status {status}", True
            if running and time.monotonic() >= failure_limit:
                ranks = ", ".join(str(self._processes.index(process)) for process in running)
                logger.error("torchmpi run: %s. Ranks that still run are terminated: %s.", failure, ranks)
                self._end(running)
                break
            if limit is not None and time.monotonic() >= limit:
                self._end(running)
                logger.error("torchmpi run: the job was ended at its time limit of %g s.", seconds)
                return TIME_LIMIT_STATUS
            if running and all(map(waits, running)):
                self._end(running)  # new ranks that are not needed
                break
            time.sleep(_POLL_SECONDS)
        del store
        failed = [status for _, status in sorted(statuses.items()) if status > 0]
        if failed:
            return failed[0]
        return 0 if 0 in statuses.values() else 128 - max(statuses.values())

    def _start(self, rank: int, address: str, port: int) -> subprocess.Popen[bytes]:
        """Start a rank, or one in its place, with a number that no other process of the job has had."""
        numbers = dict(zip(_NUMBERS, (rank, self._num_ranks) * 2, strict=True))
        variables = {**_AS_TORCHRUN, "MASTER_ADDR": address, "MASTER_PORT": port, **numbers}
        variables[launcher.JOB_KEY_VARIABLE] = self._key
        if self._respawns:
            variables[respawning.LIMIT_VARIABLE] = self._respawns
        if (number := len(self._processes)) >= self._num_ranks:
            variables[respawning.NEWCOMER_VARIABLE] = number
        environment = os.environ | {name: str(each) for name, each in variables.items()}
        self._processes.append(process := subprocess.Popen(self._command, env=environment))
        self._slots.append(rank)
        return process

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._is_ending |= number in ENDING
        if not self._signals.has_reached_group(number):
            for process in self._processes:
                process.send_signal(number)

    def _end(self, running: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in running:
            process.terminate()
        limit = time.monotonic() + _TERMINATION_SECONDS
        for process in running:
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run ``torchmpi run --without-mpi``."""
    of_mpirun = ("hosts", "hostfile", "interface", "rsh", "restarts", "min_ranks", "log_dir", "option")
    for name in (*of_mpirun, "verbose", "dry_run"):
        if getattr(options, name):
            options.refuse(f"--without-mpi starts ranks on this host only, and has no --{name.replace('_', '-')}")
    if options.ranks is None:
        options.refuse("-n N, the number of ranks, is needed")
    return SeparateRanks(command, options.ranks, options.respawns).run(options.timeout)
