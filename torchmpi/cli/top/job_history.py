"""What the ranks of a job have done lately, gathered from their flight records at each look."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ...collective_specs import CODES
from ...communicators.flight_record import LiveGroup, LiveRank, is_step
from ...shared_memory.memory_layout import RECORD_LENGTH
from .call_waits import Floats, shared_out, split_calls

SECOND = 1e9
_TOLD_LATER_SECONDS = 1.5
"""So old what a rank of another host has told may be: it does so twice a second, through the first rank of its host."""


class CallSum(NamedTuple):
    """The calls of one collective on one group that were seen, of all ranks together."""

    calls: int = 0
    num_bytes: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0


class Shares(NamedTuple):
    """Seconds of each rank (rows) in each part of the time (columns)."""

    known: Floats
    communicating: Floats
    waiting: Floats

    @property
    def computing(self) -> Floats:
        """The rest: the rank is in no call."""
        return np.maximum(0.0, self.known - self.communicating - self.waiting)


class JobHistory:
    """The time of each rank, in parts of equal length, and whom the ranks waited for.

    Args:
        ranks: The ranks, whose rows in all results have this order.
        part_seconds: The length of a part.
        most_parts: How many parts are kept.
        merges: Whether to keep all of the time, in longer parts, instead of the end of it.
    """

    def __init__(
        self, ranks: Iterable[int], *, part_seconds: float = 0.5, most_parts: int = 120, merges: bool = False
    ) -> None:
        self.ranks, self.part_seconds = tuple(sorted(ranks)), part_seconds
        self._row = {rank: row for row, rank in enumerate(self.ranks)}
        self._most, self._merges = most_parts, merges
        self._times = np.zeros((3, len(self.ranks), 0))
        self.until = 0.0
        """The end of the last part, in nanoseconds of the monotonic clock."""
        self._waits: deque[tuple[float, Floats]] = deque()
        self.calls: dict[tuple[str, str], CallSum] = defaultdict(CallSum)
        """By group and collective."""

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return self._times.shape[2]

    def shares(self, seconds: float | None = None) -> Shares:
        """Return the times of the last seconds, or all of them."""
        if seconds is None:
            return Shares(*self._times)
        return Shares(*self._times[:, :, -max(1, round(seconds / self.part_seconds)) :])

    def waits(self, seconds: float | None = None) -> Floats:
        """Return how many seconds each rank (row) waited for each other one (column)."""
        since = -np.inf if seconds is None else self.until - seconds * SECOND
        return sum((matrix for until, matrix in self._waits if until > since), np.zeros((len(self.ranks),) * 2))

    def add(self, ranks: Mapping[int, LiveRank], now: float, told: Mapping[int, Floats] = MappingProxyType({})) -> None:
        """Add what has happened since the last look.

        Args:
            ranks: The records of the ranks of this host.
            now: A time before the first of these records was read.
            told: What ranks have told of their times (:meth:`FarRank.times`). If ranks are on other hosts, the records
                here do not say how long this host waited for those. The times that are told are shown later, by
                _TOLD_LATER_SECONDS.
        """
        part = self.part_seconds * SECOND
        ranks = {rank: found for rank, found in ranks.items() if rank in self._row}
        if not self.until:
            begun = min((each.since_ns for each in ranks.values()), default=now)
            self.until = now - part * min(self._most, max(1, (now - begun) // part))
        num_parts = int((now - self.until) // part)
        if self._merges:
            num_parts -= (self.num_parts + num_parts) % 2  # so that all have a neighbor to be merged with
        if num_parts < 1:
            return
        edges: Floats = self.until + part * np.arange(num_parts + 1, dtype=np.float64)
        times, waits = np.zeros((3, len(self.ranks), num_parts)), np.zeros((len(self.ranks),) * 2)
        for rank, found in ranks.items():
            known = max([float(found.since_ns), *(_known_since(group) for group in found.groups)])
            times[0, self._row[rank]] = np.diff(np.maximum(edges, known))
        by_key: dict[int, list[tuple[int, LiveGroup]]] = defaultdict(list)
        for rank, found in ranks.items():
            for group in found.groups:
                if not is_step(group.name):
                    by_key[group.key].append((rank, group))
        for parts in by_key.values():
            calls = split_calls(parts, edges[0], edges[-1])
            for rank in np.unique(calls.rank).tolist():
                own = calls.rank == rank
                begin, arrived, end = calls.begin[own], calls.arrived[own], calls.end[own]
                times[1, self._row[rank]] += shared_out(arrived, end, edges)
                times[2, self._row[rank]] += shared_out(begin, arrived, edges)
            is_wait = np.isin(calls.awaited, self.ranks)
            begin, arrived = (np.clip(each[is_wait], edges[0], edges[-1]) for each in (calls.begin, calls.arrived))
            rows = tuple(np.searchsorted(self.ranks, each[is_wait]) for each in (calls.rank, calls.awaited))
            np.add.at(waits, rows, arrived - begin)
            ended = calls.has_ended & (calls.end <= edges[-1])
            for code in np.unique(calls.code[ended] & 0xFF).tolist():
                of_code = ended & (calls.code & 0xFF == code)
                name = CODES[code] if code < len(CODES) else "unknown call"
                before = self.calls[parts[0][1].name, name]
                self.calls[parts[0][1].name, name] = CallSum(
                    before.calls + int(of_code.sum()),
                    before.num_bytes + float(calls.num_bytes[of_code].sum()),
                    before.seconds + float((calls.end - calls.begin)[of_code].sum()) / SECOND,
                    before.waited + float((calls.arrived - calls.begin)[of_code].sum()) / SECOND,
                )
        for rank, known_times in told.items():
            times[:, self._row[rank]] = _in_parts(known_times, edges - _TOLD_LATER_SECONDS * SECOND)
        in_calls = times[1] + times[2]
        # Calls on several groups may overlap.
        factor = np.minimum(1.0, times[0] / np.where(in_calls > 0, in_calls, 1.0))
        times[1:] *= factor
        self._keep(times / SECOND, waits / SECOND, float(edges[-1]))

    def _keep(self, times: Floats, waits: Floats, until: float) -> None:
        self._times, self.until = np.concatenate((self._times, times), axis=2), until
        if self._merges:
            if self.num_parts > self._most:
                self._times = self._times.reshape(3, len(self.ranks), -1, 2).sum(axis=3)
                self.part_seconds *= 2
            total = self._waits.popleft()[1] if self._waits else 0.0
            self._waits.append((until, total + waits))
            return
        self._times = self._times[:, :, -self._most :]
        self._waits.append((until, waits))
        while self._waits[0][0] <= until - self._most * self.part_seconds * SECOND:
            self._waits.popleft()


def _in_parts(rows: Floats, edges: Floats) -> Floats:
    """Return the times of a rank between edges, from what it has told: known, moving data in calls, waiting in calls.

    >>> _in_parts(np.array([[0, 0, 0, 0], [10, 20, 8, 6]]), np.array([-5.0, 0.0, 5.0, 10.0])).tolist()
    [[0.0, 10.0, 10.0], [0.0, 1.0, 1.0], [0.0, 3.0, 3.0]]
    """
    if not len(rows):
        return np.zeros((3, len(edges) - 1))
    known, inside, waited = (np.diff(np.interp(edges, rows[:, 0], rows[:, column])) for column in (1, 2, 3))
    return np.stack([known, np.maximum(0.0, inside - waited), waited])


def _known_since(group: LiveGroup) -> float:
    """Return the time since which the calls of a group are known: older ones may have been overwritten."""
    is_full = len(group.seq) == RECORD_LENGTH or (len(group.seq) and group.seq[0] > 1)
    return float(group.begin[0]) if is_full else -np.inf


class StepPace(NamedTuple):
    """How fast a rank goes."""

    step: int | None = None
    """Its last step; None if nothing reports steps."""
    step_seconds: float | None = None
    samples_per_second: float | None = None
    loss: float | None = None


def pace_of(rank: LiveRank, now: float) -> StepPace:
    """Return how fast a rank goes, over the last ten seconds, or the last few steps if they take longer."""
    steps = rank.steps
    if not len(steps.ns):
        return StepPace()
    first = min(int(np.searchsorted(steps.ns, now - 10 * SECOND)), max(0, len(steps.ns) - 3))
    took = (steps.ns[-1] - steps.ns[first]) / SECOND
    num_steps, samples = int(steps.step[-1] - steps.step[first]), int(steps.samples[-1] - steps.samples[first])
    loss = float(steps.loss[-1])
    return StepPace(
        int(steps.step[-1]),
        took / num_steps if num_steps > 0 else None,
        samples / took if samples > 0 and took > 0 else None,
        loss if np.isfinite(loss) else None,
    )
