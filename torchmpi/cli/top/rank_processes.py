"""What /proc says of the processes of ranks: memory, cores, and what keeps a process from running."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OTHERS_SECONDS = 2.0
"""The least time between two readings of all processes."""
_BUSY = 0.1
"""The share of a core from which a process counts as busy."""


class RankProcess(NamedTuple):
    """A process of a rank. Shares are those of the time since the last look, None at the first one."""

    state: str = ""
    """As in /proc: R, S, D, T, ..."""
    memory_bytes: int | None = None
    cores: frozenset[int] = frozenset()
    busy: float | None = None
    """The time that its threads ran: 1 is one core."""
    main_busy: float | None = None
    """The same of its main thread."""
    main_delayed: float | None = None
    """The share of the time in which the main thread could have run, and another thread had its core."""
    faults_per_second: float | None = None
    """Pages that were read from a disk, because they were swapped out or dropped."""
    neighbors: int | None = None
    """Other busy processes that may run on its cores; None while they are not looked for."""


class _Counters(NamedTuple):
    at: float
    cpu_seconds: float
    main_cpu: float
    main_delay: float
    faults: int


class _Stat(NamedTuple):
    state: str
    faults: int
    cpu_seconds: float
    memory_bytes: int


class ProcessWatch:
    """Looks at processes again and again."""

    def __init__(self) -> None:
        self._before: dict[int, _Counters] = {}
        self._others: dict[int, float] = {}
        self._others_at = 0.0
        self._busy: dict[int, frozenset[int]] | None = None
        """The cores of each busy process of this host, as far as they have been looked for."""

    def look(self, processes: Iterable[int]) -> dict[int, RankProcess]:
        """Return the facts of those processes that exist."""
        wanted, now = list(processes), time.monotonic()
        found: dict[int, RankProcess] = {}
        counters: dict[int, _Counters] = {}
        for pid in wanted:
            stat, (main_cpu, main_delay) = _stat_of(pid), _schedule_of(pid)
            if stat is None:
                continue
            counters[pid] = _Counters(now, stat.cpu_seconds, main_cpu, main_delay, stat.faults)
            own, before = _cores_of(pid), self._before.get(pid)
            facts = RankProcess(stat.state, stat.memory_bytes, own)
            if before is not None and now > before.at:
                _, busy, main_busy, delayed, faults = (
                    (new - old) / (now - before.at) for new, old in zip(counters[pid], before, strict=True)
                )
                facts = RankProcess(stat.state, stat.memory_bytes, own, busy, main_busy, delayed, faults)
            found[pid] = facts
        self._before = counters
        # Reading all processes takes longer than all else, and only a rank that may be late for that has a use for it.
        delays = sorted(facts.main_delayed or 0.0 for facts in found.values())
        if delays and delays[-1] >= least_delay(delays[:-1]):
            if now - self._others_at >= _OTHERS_SECONDS:
                used = self._used_by_all(now)
                self._busy = {pid: _cores_of(pid) for pid, share in used.items() if share >= _BUSY} if used else None
            if (busy_ones := self._busy) is not None:
                for pid, facts in found.items():
                    neighbors = sum(pid != other and bool(each & facts.cores) for other, each in busy_ones.items())
                    found[pid] = facts._replace(neighbors=neighbors)
        return found

    def _used_by_all(self, now: float) -> dict[int, float]:
        """Return the share of a core that each process of this host has used since this was called before."""
        stats = {int(entry): _stat_of(int(entry)) for entry in os.listdir("/proc") if entry.isdecimal()}
        seconds = {pid: stat.cpu_seconds for pid, stat in stats.items() if stat is not None}
        passed = now - self._others_at
        used = {pid: (each - self._others[pid]) / passed for pid, each in seconds.items() if pid in self._others}
        self._others, self._others_at = seconds, now
        return used


def least_delay(others: Sequence[float]) -> float:
    """Return the share of the time of waiting for a core from which that may make a rank late, given those of others.

    >>> least_delay([0.4, 0.5, 0.4]), least_delay([0.0])
    (0.8, 0.1)
    """
    return max(0.1, 2 * median(others)) if others else 0.1


def _stat_of(pid: int) -> _Stat | None:
    text = _text_of(f"/proc/{pid}/stat")
    if not text:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may have spaces and parentheses
    cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS
    return _Stat(fields[0], int(fields[9]), cpu_seconds, int(fields[21]) * _PAGE_BYTES)


def _text_of(path: str) -> str:
    """Return the text of a file of the kernel, '' without it; a path of pathlib would take half of the time."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _schedule_of(pid: int) -> tuple[float, float]:
    """Return for how long the main thread has run, and waited for a core."""
    with contextlib.suppress(ValueError):  # a kernel without this file
        ran, delayed, _ = _text_of(f"/proc/{pid}/task/{pid}/schedstat").split()
        return int(ran) / 1e9, int(delayed) / 1e9
    return 0.0, 0.0


def _cores_of(pid: int) -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(pid))
    except OSError:
        return frozenset()
