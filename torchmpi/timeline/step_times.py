"""Where the time of each step goes: computing, hidden and exposed communication, waiting for a late rank."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from .aligned_calls import AlignedCall
from .events import BACKGROUND_MESSAGE, OF_DDP, SERVER_CALL
from .trace_reader import MAIN_THREAD, RankTrace, TracedCall

Span = tuple[float, float]


class StepTimes(NamedTuple):
    """The parts of one step of one rank, in seconds. Hidden communication runs during the computing."""

    begin: float
    end: float
    computing: float
    exposed: float
    """The main thread waits for data that move."""
    waiting: float
    """The main thread waits for a rank that has not arrived."""
    hidden: float


def union(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint intervals that cover the same times, in order.

    >>> union([(5, 6), (0, 2), (1, 3)])
    [(0, 3), (5, 6)]
    """
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > begin:
            found.append((begin, end))
    return found


def common(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Return the times that are in both lists of disjoint intervals.

    >>> common([(0, 3), (5, 6)], [(2, 5.5)])
    [(2, 3), (5, 5.5)]
    """
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(spans: Iterable[Span]) -> float:
    """Return the length of disjoint intervals.

    >>> length([(0, 3), (5, 6)])
    4
    """
    return sum(end - begin for begin, end in spans)


def step_spans(trace: RankTrace) -> list[Span]:
    """Return the steps of a rank, from one ``optimizer.step()`` to the next; without any, the whole recording."""
    ends = [each.end for each in trace.intervals("step")]
    if len(ends) > 1:
        return list(pairwise(ends))
    times = [time for call in trace.calls for time in (call.begin, call.end)]
    return [(min(times), max(times))] if times else []


def times_of_steps(trace: RankTrace, aligned: Sequence[AlignedCall]) -> list[StepTimes]:
    """Return the parts of each step of a rank."""
    steps = step_spans(trace)
    own = [each for each in aligned if trace.rank in each.calls]
    blocked = [(call.begin, call.end) for call in trace.calls if _blocks(call)]
    blocked += [(each.begin, each.end) for each in trace.intervals("wait") if each.thread == MAIN_THREAD]
    messages = trace.intervals("message") + trace.intervals(SERVER_CALL)
    blocked += [(each.begin, each.end) for each in messages if each.thread == MAIN_THREAD]
    blocked += _waits_of_reducer(trace.calls, steps)
    messages += trace.intervals(BACKGROUND_MESSAGE)
    moving = union([*((c.begin, c.end) for c in trace.calls), *((each.begin, each.end) for each in messages)])
    waiting = union((each.calls[trace.rank].begin, each.ready(trace.rank)) for each in own)
    blocked = union(blocked)
    idle = common(blocked, waiting)
    return [_parts(step, blocked, idle, moving) for step in steps]


def _parts(step: Span, blocked: list[Span], idle: list[Span], moving: list[Span]) -> StepTimes:
    stopped, waited, moved = (length(common([step], spans)) for spans in (blocked, idle, moving))
    hidden = moved - length(common([step], common(blocked, moving)))
    begin, end = step
    return StepTimes(begin, end, end - begin - stopped, stopped - waited, waited, hidden)


def _blocks(call: TracedCall) -> bool:
    return not call.is_queued and call.details["thread"] == MAIN_THREAD


def _waits_of_reducer(calls: Sequence[TracedCall], steps: Sequence[Span]) -> list[Span]:
    """Return when torch's reducer waits for its buckets, which happens in C++.

    The last bucket is queued when all gradients of the step exist, so nothing is left to compute for backward().
    """
    buckets = sorted(call for call in calls if call.details.get("label", "").endswith(OF_DDP))
    found = []
    for begin, end in steps:
        inside = [call for call in buckets if begin <= call.queued < end]
        if inside:
            found.append((max(call.queued for call in inside), max(call.end for call in inside)))
    return found


class RangeTimes(NamedTuple):
    """The ranges of one name in the main threads; means over the ranks."""

    name: str
    num_per_step: float
    seconds: float
    """In one step."""


def range_times(traces: Sequence[RankTrace]) -> list[RangeTimes]:
    """Return the ranges that lie within the steps, the longest first; an epoch, which lies in none, is left out."""
    counts: dict[str, int] = defaultdict(int)
    sums: dict[str, float] = defaultdict(float)
    num_steps = 0
    for trace in traces:
        steps = step_spans(trace)
        num_steps += len(steps)
        ends = [end for _, end in steps]
        for each in trace.intervals("range"):
            index = bisect_left(ends, each.end)
            if each.thread == MAIN_THREAD and index < len(steps) and steps[index][0] <= each.begin:
                counts[each.name] += 1
                sums[each.name] += each.end - each.begin
    found = [RangeTimes(name, counts[name] / num_steps, sums[name] / num_steps) for name in sums]
    return sorted(found, key=lambda times: -times.seconds)


class LateRank(NamedTuple):
    """How much the other ranks have waited for one rank."""

    rank: int
    num_calls: int
    """The calls at which the rank arrived last."""
    seconds: float
    """The longest wait of another rank, summed over these calls."""


def late_ranks(aligned: Sequence[AlignedCall], error_seconds: float) -> list[LateRank]:
    """Return the ranks for which others have waited longer than the error of the clocks, longest wait first."""
    counts: dict[int, int] = defaultdict(int)
    seconds: dict[int, float] = defaultdict(float)
    for each in aligned:
        waits = [
            (each.ready(rank) - call.begin, awaited)
            for rank, call in each.calls.items()
            if (awaited := each.awaited(rank)) is not None
        ]
        if waits and (longest := max(waits))[0] > error_seconds:
            counts[longest[1]] += 1
            seconds[longest[1]] += longest[0]
    return sorted((LateRank(rank, counts[rank], seconds[rank]) for rank in counts), key=lambda late: -late.seconds)


class CallSite(NamedTuple):
    """All calls of one collective that one line of the program makes; seconds are averages over the ranks."""

    line: str
    collective: str
    backends: str
    """With their algorithms."""
    num_calls: int
    """Of one rank."""
    num_bytes: int
    """Of one call, on average."""
    seconds: float
    waiting: float
    num_ranks: int
    """Of the groups of the calls; 0 if they differ."""
    dtype: str
    """'' if there are several."""

    @property
    def bytes_per_second(self) -> float:
        """The effective bandwidth: bytes of the calls by the time in which their data moved."""
        moving = self.seconds - self.waiting
        return self.num_calls * self.num_bytes / moving if moving > 0 else 0.0


def call_sites(aligned: Sequence[AlignedCall], traces: Sequence[RankTrace]) -> list[CallSite]:
    """Return the lines that make calls, the most expensive first. Steps of hierarchical calls are not counted."""
    steps, num_ranks = {trace.rank: trace.steps for trace in traces}, len(traces)
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    backends: dict[tuple[str, str], set[str]] = defaultdict(set)
    kinds: dict[tuple[str, str], set[tuple[int, str]]] = defaultdict(set)
    for each in aligned:
        for rank, call in each.calls.items():
            line = call.details.get("line", "")
            if not line or (call.group, call.seq) in steps[rank]:
                continue
            total = sums[line, call.collective]
            total[0] += 1
            total[1] += call.num_bytes
            total[2] += call.end - call.begin
            total[3] += each.ready(rank) - call.begin
            kinds[line, call.collective].add((len(each.ranks), call.details.get("dtype", "")))
            if about := [call.details[name] for name in ("backend", "algorithm") if name in call.details]:
                backends[line, call.collective].add(": ".join(about))
    sites = []
    for (line, collective), (count, num_bytes, seconds, waiting) in sums.items():
        names, calls = " + ".join(sorted(backends[line, collective])), max(1, round(count / num_ranks))
        mean_bytes = round(num_bytes / count)
        ranks, dtypes = {size for size, _ in kinds[line, collective]}, {name for _, name in kinds[line, collective]}
        size, dtype = (ranks.pop() if len(ranks) == 1 else 0), (dtypes.pop() if len(dtypes) == 1 else "")
        times = seconds / num_ranks, waiting / num_ranks
        sites.append(CallSite(line, collective, names, calls, mean_bytes, *times, size, dtype))
    return sorted(sites, key=lambda site: -site.seconds)
