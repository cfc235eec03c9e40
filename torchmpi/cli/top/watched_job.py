"""The jobs of this host that the user may see, and one of them while it is watched."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...communicators.flight_record import from_ranges, look, read_live
from ...errors import TorchMPIError
from ..open_records import opened, records_of
from .far_ranks import FarRank
from .job_history import JobHistory
from .rank_processes import ProcessWatch, RankProcess

_LOOK_SECONDS = 5.0
"""For how long one request has the ranks tell where they are."""
_KEPT_LOOKS, _FIRST_LOOKS = 40, 5


class FoundRank(NamedTuple):
    """A rank of a job, as it was found."""

    rank: int
    process: int
    path: Path
    is_own: bool
    """Whether the process that has the record open is the rank itself, and not a process that it has started."""


def find_jobs(process: int | None = None) -> dict[tuple[str, str], list[FoundRank]]:
    """Return the ranks of each running job on this host, by job and program.

    Args:
        process: A rank or a launcher, for the jobs in the processes that it has started; None for all of this host.

    Raises:
        TorchMPIError: The process does not exist.
    """
    jobs: dict[tuple[str, str], dict[int, FoundRank]] = defaultdict(dict)
    for path in records_of(process):
        with contextlib.suppress(OSError, TorchMPIError), opened(path) as file:
            found = read_live(file, most_groups=0)
            if not found.has_ended:
                about, pid = found.about, int(path.parts[2])
                rank = FoundRank(about["rank"], pid, path, about.get("process") == pid)
                ranks = jobs[str(about.get("job")), str(about.get("program", ""))]
                if rank.rank not in ranks or rank.is_own:
                    ranks[rank.rank] = rank
    return {job: [ranks[rank] for rank in sorted(ranks)] for job, ranks in sorted(jobs.items())}


class LookClock:
    """Says how long to wait until the next look: a second, and longer if looks take more than 1 % of a core.

    A job whose ranks wait for each other may lose that part of its time, if no core is idle. The first looks, of which
    all rates need several, are not delayed.

    >>> clock = LookClock()
    >>> [clock.pause(0.03) for _ in range(5)], clock.pause(0.003), LookClock(10.0).pause(0.03)
    ([1.0, 1.0, 1.0, 1.0, 3.0], 1.0, 10.0)
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._used, self._num_looks = time.process_time(), 0

    def pause(self, used: float | None = None) -> float:
        """Return the time; `used`: the CPU seconds of a look (None: those of this process since the last one)."""
        before, self._used = self._used, time.process_time()
        used = self._used - before if used is None else used
        self._num_looks += 1
        if self._seconds or self._num_looks < _FIRST_LOOKS:
            return self._seconds or 1.0
        return min(max(1.0, 100 * used), _LOOK_SECONDS)


class WatchedRank:
    """The open flight record of a rank, and what it has told at the last looks."""

    def __init__(self, found: FoundRank) -> None:
        self.process = found.process
        self._file = opened(found.path)
        self._writable: BinaryIO | None = None
        with contextlib.suppress(OSError):  # of another user, which root may read but this process not change
            self._writable = opened(found.path, is_changed=True)
        self._about = os.fstat(self._file.fileno())
        self.live = read_live(self._file)
        self.looks: deque[tuple[str, str]] = deque(maxlen=_KEPT_LOOKS)
        """The line and the work of the main thread, when it was in no call."""
        self._told_at: object = None

    def read(self) -> bool:
        """Read the record again, and ask where the rank is; return whether the rank still runs."""
        try:
            self.live = read_live(self._file)
            if self._writable is not None:
                look(self._writable, _LOOK_SECONDS)
        except (OSError, TorchMPIError):
            return False
        told = self.live.told
        if told and told.get("at") != self._told_at:
            self._told_at = told.get("at")
            if not told.get("is_inside"):
                self.looks.append((str(told.get("line", "")), str(told.get("work", ""))))
        return not self.live.has_ended and os.path.exists(f"/proc/{self.process}")

    def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._writable):
            if file is not None:
                file.close()


class WatchedJob:
    """The ranks of one job on this host.

    Args:
        name: Job and program.
        ranks: Those that were found.
        keeps_ended: Whether to keep what the ranks that end have been, for a report.
        **keeping: How much is kept; see :class:`JobHistory`.
    """

    def __init__(
        self, name: tuple[str, str], ranks: Iterable[FoundRank], *, keeps_ended: bool = False, **keeping: Any
    ) -> None:
        self.name, self._keeps_ended = name, keeps_ended
        self.ranks: dict[int, WatchedRank] = {}
        self.facts: dict[int, RankProcess] = {}
        for found in ranks:
            with contextlib.suppress(OSError, TorchMPIError):  # it has ended meanwhile
                self.ranks[found.rank] = WatchedRank(found)
        if not self.ranks:
            raise TorchMPIError("The job has ended.")
        self.first: dict[str, Any] = next(iter(self.ranks.values())).live.about
        self.size = int(self.first.get("size") or 0) or 1 + max(self.ranks)
        here = {rank for each in self.ranks.values() for rank in from_ranges(str(each.live.about.get("on_host", "")))}
        self.elsewhere = sorted(set(range(self.size)) - here - self.ranks.keys())
        """The ranks of the job that are on other hosts, as far as the ranks here know."""
        self.told: dict[int, FarRank] = {}
        """What rank 0 tells of all ranks, if some are elsewhere."""
        self.history = JobHistory([*self.ranks, *self.elsewhere], **keeping)
        self._processes = ProcessWatch()
        self.now = 0.0

    def read(self) -> bool:
        """Look at all ranks; return whether some still run. Those that have ended are left out, unless all are kept."""
        self.now = float(time.monotonic_ns())
        ended = [number for number, rank in self.ranks.items() if not rank.read()]
        if self.elsewhere and 0 in self.ranks:
            for text, told in self.ranks[0].live.told_of_all.items():
                if text.isdecimal() and (rank := int(text)) in self.history.ranks:
                    self.told.setdefault(rank, FarRank(rank)).take(told, self.now)
        times = {number: told.times() for number, told in self.told.items()}
        self.history.add({number: rank.live for number, rank in self.ranks.items()}, self.now, times)
        if len(ended) == len(self.ranks):
            return False
        for number in () if self._keeps_ended else ended:
            self.ranks.pop(number).close()
        facts = self._processes.look(rank.process for rank in self.ranks.values())
        before = self.facts if self._keeps_ended else {}
        self.facts = before | {number: self.told[number].facts() for number in self.elsewhere if number in self.told}
        for number, seen in self.ranks.items():
            if seen.process in facts and facts[seen.process].memory_bytes:  # none while the process ends
                self.facts[number] = facts[seen.process]
        return True

    def looks(self, rank: int) -> Sequence[tuple[str, str]]:
        """Return the line and the work of the main thread of a rank, at the looks at which it was in no call."""
        seen = self.ranks.get(rank) or self.told.get(rank)
        return () if seen is None else seen.looks

    def close(self) -> None:
        """Close the files."""
        for rank in self.ranks.values():
            rank.close()
