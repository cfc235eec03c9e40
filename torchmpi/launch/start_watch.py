"""Detection of ranks that do not call ``start()``, or have ended before.

MPI_Init and the first collectives of ``start()`` wait for all ranks, without a limit; without an MPI launcher, the
rendezvous waits for minutes. A rank that has not arrived there has no watchdog and shares no memory with the others. A
thread of each rank in ``start()`` therefore looks in /proc at the processes that the launcher has started on this host.
The name of that thread, which is visible in /proc, marks the processes that are in ``start()``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from .. import files
from ..config import Config
from ..errors import ConfigError
from ..log import log_fatal, logger
from ..status_line import StatusLine, quiet_seconds, telling
from . import launcher, mpi_library, respawning

_PERIOD_SECONDS = 0.5
# The ranks of a host divide the work of reading /proc, which takes longer the more of them there are.
_RANKS_PER_PERIOD = 4
_THREAD_NAME = "torchmpi start"  # at most 15 characters, the limit of Linux
# The lowest rank in start() of each host reports; the others do so only if the job has not ended after this time.
_GRACE_SECONDS = 10.0
_REPORT_SECONDS = 1.0
_MOST_RANKS = 20
_WAITS = "torchmpi: start() waits for the other ranks"
_STATES = {"T": ", stopped by a signal", "t": ", stopped by a debugger", "D": ", waiting for a disk"}
_ZOMBIE = "Z"


class _Process(NamedTuple):
    """A process of this host, as described in /proc."""

    pid: int
    state: str
    parent: int


class _Ranks(NamedTuple):
    """The ranks of this host whose processes exist: those in ``start()``, and the processes of the others."""

    starting: list[int]
    others: dict[int, _Process]

    @property
    def all(self) -> set[int]:
        return {*self.starting, *self.others}


class StartWatch:
    """A context in which a thread watches for ranks that do not call ``start()``; `config` as passed to that."""

    def __init__(self, config: Config | None = None) -> None:
        try:
            self._config = config or Config.from_environment()
        except ConfigError:  # raised by start() on all ranks
            self._config = Config()
        self._launcher = launcher.detect()
        self._num_ranks = self._launcher.num_ranks or 1
        self._has_started = threading.Event()
        self._has_warned = False
        self._lowest = self._launcher.rank or 0
        """The lowest rank of this host that has been seen in ``start()``, which reports, and may have ended since."""
        self._thread: threading.Thread | None = None
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> None:
        has_ranks = self._num_ranks > 1 and self._launcher.rank is not None
        is_watched = mpi_library.notices_ended_ranks()
        if has_ranks and not (is_watched or mpi_library.is_apart_from_launcher()):  # /proc would not show the others
            self._thread = threading.Thread(target=self._watch, name=_THREAD_NAME, daemon=True)
            self._thread.start()
        elif has_ranks and self._config.verbose and not self._launcher.local_rank:
            self._resources.enter_context(telling(lambda seconds: f"{_WAITS}, for {seconds:.0f} s"))

    def __exit__(self, *_: object) -> None:
        self._has_started.set()
        if self._thread is not None:
            self._thread.join()
        self._resources.close()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/thread-self/comm").write_text(_THREAD_NAME)
        begin, ended_since, existing = time.monotonic(), None, set[int]()
        status = StatusLine(quiet_seconds=quiet_seconds())
        period = _PERIOD_SECONDS * max(1.0, (self._launcher.local_size or 1) / _RANKS_PER_PERIOD)
        while not self._has_started.wait(period):
            ranks, now = _ranks_of_host(), time.monotonic()
            self._lowest = min([self._lowest, *ranks.starting])
            if self._config.verbose and self._lowest == self._launcher.rank:
                arrived = f"{len(ranks.starting)}/{self._launcher.local_size} ranks of this host are there"
                told = f"torchmpi: start(): {arrived}," if ranks.all else f"{_WAITS}, for"
                status.show(f"{told} {status.seconds:.0f} s")
            if not (self._has_ended(ranks) and self._config.abort_on_exception):
                ended_since = None
            elif ended_since is None:
                ended_since, existing = now, ranks.all  # the others end too, after _REPORT_SECONDS
            elif self._reports(now - ended_since):
                reason = f"{self._ended(existing)}, in which rank {self._launcher.rank} waits. That ends the job."
                self._end_job(reason)
            elif not self._launcher.has_mpi_interface and now - ended_since > _REPORT_SECONDS:
                mpi_library.abort(1)  # the end of the lowest rank, which has reported, does not end this one
            if ended_since is None and now - begin >= self._config.stall_warning_seconds:
                self._check_late(ranks, now - begin)
        status.clear()

    def _reports(self, late_seconds: float) -> bool:
        return self._lowest == self._launcher.rank or late_seconds > _GRACE_SECONDS

    def _has_ended(self, ranks: _Ranks) -> bool:
        return bool(ranks.all) and len(ranks.all) < (self._launcher.local_size or 0)

    def _ended(self, existing: set[int]) -> str:
        """Describe ranks of this host that have ended. Across hosts it is not known which ranks should be here."""
        ended = sorted(set(range(self._num_ranks)) - existing)
        who = f"rank {', '.join(map(str, ended[:_MOST_RANKS]))}"
        if self._launcher.local_size != self._num_ranks:
            who = "a rank of this host"
        return f"{who} ended before all ranks had called start()"

    def _check_late(self, ranks: _Ranks, waited: float) -> None:
        """Warn of missing ranks, and end the job after ``stall_abort_seconds``."""
        limit = self._config.stall_abort_seconds
        is_over = waited >= limit > 0
        if (self._has_warned and not is_over) or not self._reports(waited - limit if is_over else 0):
            return
        self._has_warned = True
        report = f"rank {self._launcher.rank} has waited {waited:.0f} s in start(). {self._about_late(ranks)}"
        if is_over:
            self._end_job(f"{report}\nThe wait exceeds stall_abort_seconds, which ends the job.")
        logger.warning(report)

    def _about_late(self, ranks: _Ranks) -> str:
        lines = [
            f"  rank {rank}: process {process.pid}{_STATES.get(process.state, '')}"
            for rank, process in sorted(ranks.others.items())
        ]
        if lines:
            more = [f"  and {len(lines) - _MOST_RANKS} others"] if len(lines) > _MOST_RANKS else []
            return "\n".join(["Not arrived:", *lines[:_MOST_RANKS], *more])
        if not ranks.all:
            return "Which ranks have not arrived is not known."
        if self._has_ended(ranks):
            return f"{self._ended(ranks.all)}."
        if len(ranks.all) == self._num_ranks:
            return "All ranks have arrived."
        return "All ranks of this host have arrived. Ranks of other hosts have not, or the network between them fails."

    def _end_job(self, message: str) -> None:
        log_fatal(f"{message}\n{launcher.announcement()}".rstrip())
        launcher.write_error_file(message)
        mpi_library.abort(1)


def _ranks_of_host() -> _Ranks:
    """Return the ranks of this job on this host; empty if the processes of the launcher are not visible.

    The children of the daemon of the launcher are the ranks, or scripts that have started them.
    """
    processes, ranks = _all_processes(), _Ranks([], {})
    daemon = os.getpid()
    while daemon in processes and _rank_of(daemon) is not None:
        daemon = processes[daemon].parent
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    job = os.environ.get("PMIX_NAMESPACE")
    for pid in children.get(daemon, ()):
        rank = _rank_of(pid, job)
        if rank is None or processes[pid].state == _ZOMBIE:
            continue
        if _is_in_start(pid, children):
            ranks.starting.append(rank)
        else:
            ranks.others[rank] = processes[pid]
    return ranks if launcher.detect().rank in ranks.starting else _Ranks([], {})


def _all_processes() -> dict[int, _Process]:
    processes = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if fields := files.text_of(f"/proc/{name}/stat").rpartition(")")[2].split():
            processes[int(name)] = _Process(int(name), fields[0], int(fields[1]))
    return processes


def _rank_of(pid: int, job: str | None = None) -> int | None:
    """Return the rank in the environment of a process; None if it is of no job, or of another one than `job`."""
    entries = files.text_of(f"/proc/{pid}/environ").split("\0")
    environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    if job is not None and environment.get("PMIX_NAMESPACE") != job:
        return None
    if respawning.NEWCOMER_VARIABLE in environment:  # the number of the rank that it replaces is there too
        return None
    found = launcher.detect(environment)
    # In a Slurm job, the daemon of mpirun is itself a task of srun.
    return found.rank if found.name == launcher.detect().name else None


def _is_in_start(pid: int, children: dict[int, list[int]]) -> bool:
    """Return whether a process, or one that it has started, is in ``start()``."""
    with contextlib.suppress(OSError):  # it has ended
        folder = f"/proc/{pid}/task"
        if any(files.text_of(f"{folder}/{thread}/comm") == _THREAD_NAME for thread in os.listdir(folder)):
            return True
    return any(_is_in_start(child, children) for child in children.get(pid, ()))
