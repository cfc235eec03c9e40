"""Supervision of a job by ``torchmpi run``: its time limit, and restarts after failures, without lost hosts."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import psutil

from ..launch import fault_tolerance, network
from ..log import logger
from .job import Job

RESTARTS = "TORCHMPI_RESTARTS"
"""Variable with the number of restarts before this start of the job; not set at the first start."""
TIME_LIMIT_STATUS = 124
_ALL_KILLED_STATUS = 128 + signal.SIGKILL
_ANSWER_SECONDS = 10.0
_RETURN_SECONDS = 60.0
_TERMINATION_SECONDS = 10.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_USER = (signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_LIBC = ctypes.CDLL(None)
OnSignal = Callable[[int, FrameType | None], None]


def handle_signals(handler: OnSignal, numbers: Sequence[int] = (*ENDING, *_USER)) -> dict[int, Any]:
    """Install a handler of signals, and return the previous ones. Ignored signals, as with ``nohup``, remain ignored.

    The processes that are started ignore them too then.
    """
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in caught}


class GroupSignals:
    """Distinguish signals to the process group, such as Ctrl-C in a terminal, from those to this process alone.

    The other processes of the group have got the former already. A second one would end mpirun without its ranks, and
    interrupt the end of a rank. Signals that end a job stay pending in a process of the group that blocks them.
    """

    def __enter__(self) -> GroupSignals:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            # It ends with this process, however that ends.
            command = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def has_reached_group(self, number: int) -> bool:
        """Return whether the other processes of the group have got a signal too. False for SIGUSR1 and SIGUSR2."""
        with suppress(OSError):  # it has been killed, or has ended after the job
            status = Path(f"/proc/{self._process.pid}/status").read_text()
            if pending := re.search(r"^ShdPnd:\s*(\w+)$", status, re.MULTILINE):
                return bool(int(pending[1], 16) >> (number - 1) & 1)
        return False


class Limits(NamedTuple):
    """What the supervisor allows a job."""

    restarts: int
    min_ranks: int
    """Smallest number of ranks with which the job is restarted after hosts are lost."""
    seconds: float | None
    """Time limit of all starts together; None: no limit."""


def _end_with_parent() -> None:
    """Let the system end mpirun, and with it the ranks, when this process is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Supervisor:
    """Starts a job, and starts it again after a failure.

    Signals are passed on to mpirun, unless it has got them too. After SIGINT, SIGTERM or SIGHUP there is no restart.
    """

    def __init__(self, job: Job, limits: Limits) -> None:
        self._job, self._limits = job, limits
        self._deadline = None if limits.seconds is None else time.monotonic() + limits.seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._received: int | None = None

    def run(self) -> int:
        """Run the job to its end and return its exit status."""
        folder = tempfile.TemporaryDirectory(prefix="torchmpi-run-")
        with GroupSignals() as self._signals, folder as name:
            self._running_file = Path(name, "running")
            handle_signals(self._pass_on)
            return self._run()

    def _run(self) -> int:
        lost: list[str] = []
        for attempt in range(self._limits.restarts + 1):
            began = time.monotonic()
            status = self._run_once(lost, {} if attempt == 0 else {RESTARTS: str(attempt)})
            if status == TIME_LIMIT_STATUS and self._is_over():
                logger.error("torchmpi run: the job was ended at its time limit of %g s.", self._limits.seconds)
                return status
            gone = [] if self._received is not None else self._lost_hosts()
            silent = [name for name in gone if name not in lost]
            if self._received is not None or (status == 0 and not silent):
                return status
            # Open MPI's mpirun returns 0 after the loss of a host.
            cause = f"ended with status {status} after {time.monotonic() - began:.0f} s"
            if silent:
                cause += f"; no answer from {', '.join(silent)}"
            if attempt == self._limits.restarts:
                left = f" No restart is left of {attempt}." if attempt else ""
                logger.error("torchmpi run: the job %s.%s", cause, left)
                return status or 1
            lost = self._wait_for_hosts(gone)
            if self._received is not None:
                return status or 128 + self._received
            num_ranks = self._job.ranks_without(lost)
            if num_ranks < self._limits.min_ranks:
                logger.error(
                    "torchmpi run: the job %s. The other hosts have room for %d ranks, fewer than --min-ranks %d.",
                    cause, num_ranks, self._limits.min_ranks,
                )  # fmt: skip
                return status or 1
            logger.warning(
                "torchmpi run: the job %s. Restart %d of %d, with %d ranks.",
                cause, attempt + 1, self._limits.restarts, num_ranks,
            )  # fmt: skip
        raise AssertionError("unreachable")

    def _run_once(self, lost: Sequence[str], variables: Mapping[str, str]) -> int:
        self._running_file.unlink(missing_ok=True)
        if self._job.continues and not self._job.hosts:  # other hosts cannot remove the file
            variables = {fault_tolerance.RUNNING_VARIABLE: str(self._running_file)} | dict(variables)
        self._process = subprocess.Popen(self._job.command(lost, variables), preexec_fn=_end_with_parent)
        if self._received is not None:  # it came before there was a process
            self._process.send_signal(self._received)
        try:
            remaining = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            status = self._process.wait(remaining)
        except subprocess.TimeoutExpired:
            self._terminate()
            return TIME_LIMIT_STATUS
        if status == 0 and self._running_file.exists():
            logger.error("torchmpi run: all ranks have been killed.")
            return _ALL_KILLED_STATUS
        return status if status >= 0 else 128 - status

    def _is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _terminate(self) -> None:
        """End mpirun, and with it the ranks; all of them by SIGKILL if a hung job makes mpirun ignore SIGTERM."""
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(_TERMINATION_SECONDS)
        except subprocess.TimeoutExpired:
            ranks = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            for process in ranks:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if number in ENDING:
            self._received = number
        if self._process is not None and not self._signals.has_reached_group(number):
            self._process.send_signal(number)

    def _lost_hosts(self) -> list[str]:
        """Return the hosts on which no command can be run."""
        names = [host.name for host in self._job.hosts]
        if not names:
            return []
        with ThreadPoolExecutor(len(names)) as pool:
            answers = list(pool.map(self._answers, names))
        return [name for name, answer in zip(names, answers, strict=True) if not answer]

    def _answers(self, host: str) -> bool:
        if network.is_own(host):  # launchers start processes of this host without ssh, which it may not have
            return True
        try:
            command = [*self._job.agent(host), "true"]
            quiet = subprocess.DEVNULL
            done = subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_ANSWER_SECONDS)
        except (subprocess.TimeoutExpired, OSError):
            return False
        return done.returncode == 0

    def _wait_for_hosts(self, lost: list[str]) -> list[str]:
        """Wait for hosts that boot again, unless enough others are left; return those that are still lost."""
        end = time.monotonic() + _RETURN_SECONDS
        while self._job.ranks_without(lost) < self._limits.min_ranks and time.monotonic() < end:
            if self._is_over() or self._received is not None:
                break
            time.sleep(1.0)
            lost = self._lost_hosts()
        return lost
