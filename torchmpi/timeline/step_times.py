"""Where the time of each step goes: computing, hidden and exposed communication, waiting for a late rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .aligned_calls import AlignedCalls
from .events import OF_DDP, SERVER_CALL
from .message_waits import MessageWaits
from .trace_reader import MAIN_THREAD, Calls, Flags, Floats, RankTrace, Spans

_ALL = slice(None)
_ROUNDING = 1e-7
"""Shorter waits are those of the rounding of seconds, and of the thread that notes the times."""


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


def union(spans: Spans) -> Spans:
    """Return disjoint intervals that cover the same times, in order.

    >>> union(np.array([(5.0, 6), (0, 2), (1, 3)])).tolist()
    [[0.0, 3.0], [5.0, 6.0]]
    """
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    firsts = np.flatnonzero(np.append(True, spans[1:, 0] > ends[:-1]))
    return np.column_stack((spans[firsts, 0], ends[np.append(firsts[1:], len(ends)) - 1]))


def covered(steps: Spans, spans: Spans) -> Floats:
    """Return how much of each step disjoint intervals cover.

    >>> covered(np.array([(0.0, 4.0), (4.0, 8.0)]), np.array([(1.0, 3.0), (3.5, 6.0)])).tolist()
    [2.5, 2.0]
    """
    if not len(spans):
        return np.zeros(len(steps))
    sums = np.append(0.0, np.cumsum(spans[:, 1] - spans[:, 0]))
    number = np.searchsorted(spans[:, 0], steps)  # of the intervals that have begun
    after = np.where(number > 0, np.maximum(spans[number - 1, 1] - steps, 0.0), 0.0)  # what is left of the last one
    until: Floats = sums[number] - after
    return until[:, 1] - until[:, 0]


def common(first: Spans, second: Spans) -> Spans:
    """Return the times that two sets of disjoint intervals have in common.

    >>> common(np.array([(0.0, 4.0), (5.0, 8.0)]), np.array([(3.0, 6.0)])).tolist()
    [[3.0, 4.0], [5.0, 6.0]]
    """
    edges = np.unique(np.concatenate([first, second]))
    cells = np.column_stack((edges[:-1], edges[1:]))
    is_in_both = np.ones(len(cells), bool)
    for spans in (first, second):
        number = np.searchsorted(spans[:, 0], cells[:, 0], side="right")
        is_in_both &= (number > 0) & (cells[:, 0] < np.append(spans[:, 1], 0.0)[number - 1])
    return union(cells[is_in_both])


def step_spans(trace: RankTrace) -> Spans:
    """Return the steps of a rank, from one ``optimizer.step()`` to the next; without any, the whole recording."""
    ends = trace.intervals("step").end
    if len(ends) > 1:
        return np.column_stack((ends[:-1], ends[1:]))
    begin, end = (np.concatenate((getattr(trace.calls, of), getattr(trace.messages, of))) for of in ("begin", "end"))
    return np.array([(begin.min(), end.max())] if len(begin) else np.empty((0, 2)))


def _blocked(trace: RankTrace) -> Spans:
    """Return when the main thread is in a call or message, or waits for one."""
    calls, messages = trace.calls, trace.messages
    return union(
        np.concatenate([
            np.column_stack((calls.begin, calls.end))[~calls.is_queued & (calls.thread == MAIN_THREAD)],
            _waits_of_reducer(calls, step_spans(trace)),
            messages.spans[~messages.is_background & (messages.thread == MAIN_THREAD)],
            *(trace.intervals(each).spans_of_main_thread for each in ("wait", SERVER_CALL)),
        ])
    )  # fmt: skip


def _waiting(trace: RankTrace, aligned: AlignedCalls, messages: MessageWaits) -> Spans:
    """Return when a call or receive of a rank waits for another rank to arrive."""
    is_own = aligned.rank == trace.rank
    of_calls = np.column_stack((aligned.begin[is_own], aligned.ready[is_own]))
    return union(np.concatenate([of_calls, np.column_stack((trace.messages.begin, messages.ready[trace.rank]))]))


def times_of_steps(trace: RankTrace, aligned: AlignedCalls, messages: MessageWaits) -> list[StepTimes]:
    """Return the parts of each step of a rank."""
    steps, blocked, waiting = step_spans(trace), _blocked(trace), _waiting(trace, aligned, messages)
    of_calls, of_server = np.column_stack((trace.calls.begin, trace.calls.end)), trace.intervals(SERVER_CALL)
    moving = union(np.concatenate([of_calls, trace.messages.spans, of_server.spans]))
    stopped = covered(steps, blocked)
    waited = stopped + covered(steps, waiting) - covered(steps, union(np.concatenate([blocked, waiting])))
    hidden = covered(steps, union(np.concatenate([blocked, moving]))) - stopped
    begin, end = steps.T
    columns = begin, end, end - begin - stopped, stopped - waited, waited, hidden
    return [StepTimes(*row) for row in np.column_stack(columns).tolist()]


def _waits_of_reducer(calls: Calls, steps: Spans) -> Spans:
    """Return when torch's reducer waits for its buckets, which happens in C++.

    The last bucket is queued when all gradients of the step exist, so nothing is left to compute for backward().
    """
    is_bucket = calls.of_kinds([kind.details.get("label", "").endswith(OF_DDP) for kind in calls.kinds]).astype(bool)
    order = np.argsort(calls.queued[is_bucket], kind="stable")
    queued, ends = calls.queued[is_bucket][order], calls.end[is_bucket][order]
    limits = np.searchsorted(queued, steps)
    found = [(queued[last - 1], ends[first:last].max()) for first, last in limits if first < last]
    return np.array(found or np.empty((0, 2)))


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
        steps, ranges = step_spans(trace), trace.intervals("range")
        num_steps += len(steps)
        step = np.searchsorted(steps[:, 1], ranges.end)
        begins = np.append(steps[:, 0], np.inf)[step]
        is_inside = (ranges.thread == MAIN_THREAD) & (begins <= ranges.begin)
        names, seconds = ranges.name[is_inside], (ranges.end - ranges.begin)[is_inside]
        for name in np.unique(names):
            counts[ranges.names[name]] += np.count_nonzero(names == name)
            sums[ranges.names[name]] += float(seconds[names == name].sum())
    found = [RangeTimes(name, counts[name] / num_steps, sums[name] / num_steps) for name in sums]
    return sorted(found, key=lambda times: -times.seconds)


class LateRank(NamedTuple):
    """How much the other ranks have waited for one rank."""

    rank: int
    num_calls: int
    """The calls at which the rank arrived last, and the receives that waited for it."""
    seconds: float
    """The longest wait of another rank, summed over these calls, and the waits in these receives."""


def late_ranks(aligned: AlignedCalls, which: Flags | slice = _ALL) -> list[LateRank]:
    """Return the ranks for which others have waited longer than the error of the clocks then, longest wait first.

    `which`: the calls to look at.
    """
    waits = aligned.ready - aligned.begin
    waits[(aligned.awaited < 0) | (waits <= aligned.wait_error())] = 0
    longest = aligned.largest(waits)
    is_longest = (waits == longest[aligned.call]) & (waits > 0)
    late = aligned.largest(np.where(is_longest, aligned.rank[aligned.awaited], -1))[which]
    longest = longest[which]
    late, longest = late[longest > 0], longest[longest > 0]
    counts, seconds = np.bincount(late), np.bincount(late, weights=longest)
    found = [LateRank(int(rank), int(counts[rank]), float(seconds[rank])) for rank in np.flatnonzero(counts)]
    return sorted(found, key=lambda late: -late.seconds)


def late_senders(
    traces: Sequence[RankTrace], aligned: AlignedCalls, messages: MessageWaits, steps: dict[int, Spans]
) -> list[LateRank]:
    """Return the ranks for whose messages the main threads of others have waited within their steps.

    While a sender itself waited for another rank, it caused no wait: that rank did, and the sender counts its wait.
    """
    blocked = {trace.rank: _blocked(trace) for trace in traces}
    waited = {trace.rank: common(blocked[trace.rank], _waiting(trace, aligned, messages)) for trace in traces}
    counts: dict[int, int] = defaultdict(int)
    sums: dict[int, float] = defaultdict(float)
    for trace in traces:
        own = trace.rank
        is_within = _is_within(trace.messages.begin, steps[own]) & (messages.sender[own] != own)
        for sender in np.unique(messages.sender[own][is_within & (messages.sender[own] >= 0)]).tolist():
            which = is_within & (messages.sender[own] == sender)
            spans = np.column_stack((trace.messages.begin, messages.ready[own]))[which]
            excused = common(blocked[own], waited.get(sender, np.empty((0, 2))))
            seconds = covered(spans, blocked[own]) - covered(spans, excused)
            seconds = seconds[seconds > messages.clock_error[own][which] + _ROUNDING]
            if len(seconds):
                counts[sender] += len(seconds)
                sums[sender] += float(seconds.sum())
    return [LateRank(rank, counts[rank], sums[rank]) for rank in sorted(counts, key=lambda rank: -sums[rank])]


def added(first: Sequence[LateRank], second: Sequence[LateRank]) -> list[LateRank]:
    """Return the ranks of two lists, those for which others waited longest first.

    >>> added([LateRank(1, 2, 3.0)], [LateRank(0, 1, 4.0), LateRank(1, 1, 2.0)])
    [LateRank(rank=1, num_calls=3, seconds=5.0), LateRank(rank=0, num_calls=1, seconds=4.0)]
    """
    found: dict[int, LateRank] = {}
    for rank, num_calls, seconds in (*first, *second):
        before = found.get(rank, LateRank(rank, 0, 0.0))
        found[rank] = LateRank(rank, before.num_calls + num_calls, before.seconds + seconds)
    return sorted(found.values(), key=lambda late: -late.seconds)


def _is_within(begin: Floats, steps: Spans) -> Flags:
    return (begin >= steps[0, 0]) & (begin <= steps[-1, 1]) if len(steps) else np.zeros(len(begin), bool)


class CallSite(NamedTuple):
    """All calls of one collective, or messages, that one line of the program makes; seconds are means of the ranks."""

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


def call_sites(aligned: AlignedCalls, which: Flags | slice = _ALL) -> list[CallSite]:
    """Return the lines that make calls, the most expensive first. Steps of hierarchical calls are not counted.

    `which`: the calls to look at.
    """
    names = [(kind.details.get("line", ""), kind.collective) for kind in aligned.kinds]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name in names if name[0]))}
    is_looked_at = np.zeros(len(aligned), bool)
    is_looked_at[which] = True
    site = aligned.of_kinds([numbers.get(name, -1) for name in names])
    counted = is_looked_at[aligned.call] & ~aligned.column("is_step") & (site >= 0)
    site, num_ranks = site[counted], len(aligned.traces)

    def sums(values: Floats | None = None) -> list[float]:
        weights = None if values is None else values[counted]
        found: list[float] = np.bincount(site, weights, minlength=len(numbers)).tolist()
        return found

    kinds: dict[tuple[str, str], set[int]] = defaultdict(set)
    for each in np.unique(aligned.kind[counted]):
        kinds[names[each]].add(each)
    sites = []
    columns = sums(), sums(aligned.column("num_bytes")), sums(aligned.end - aligned.begin)
    for name, count, num_bytes, seconds, waiting in zip(
        numbers, *columns, sums(aligned.ready - aligned.begin), strict=True
    ):
        if not count:
            continue
        found = [aligned.kinds[each] for each in kinds[name]]
        sizes = {len(aligned.groups[kind.group]) for kind in found}
        dtypes = {kind.details.get("dtype", "") for kind in found}
        about = ([kind.details[key] for key in ("backend", "algorithm") if key in kind.details] for kind in found)
        backends = sorted({": ".join(each) for each in about if each})
        calls, times = max(1, round(count / num_ranks)), (seconds / num_ranks, waiting / num_ranks)
        size, dtype = (sizes.pop() if len(sizes) == 1 else 0), (dtypes.pop() if len(dtypes) == 1 else "")
        sites.append(CallSite(*name, " + ".join(backends), calls, round(num_bytes / count), *times, size, dtype))
    return sorted(sites, key=lambda site: -site.seconds)


def message_sites(traces: Sequence[RankTrace], messages: MessageWaits, steps: dict[int, Spans]) -> list[CallSite]:
    """Return the lines that send and receive messages within the steps, the most expensive first."""
    sums: dict[tuple[str, str], Floats] = defaultdict(lambda: np.zeros(4))
    dtypes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for trace in traces:
        own, is_within = trace.messages, _is_within(trace.messages.begin, steps[trace.rank])
        columns = np.ones(len(own)), own.num_bytes, own.end - own.begin, messages.ready[trace.rank] - own.begin
        totals = [np.bincount(own.kind[is_within], each[is_within], minlength=len(own.kinds)) for each in columns]
        for kind, total in zip(own.kinds, np.column_stack(totals), strict=True):
            if total[0]:
                name = kind.details.get("line", ""), kind.name
                sums[name] += total
                dtypes[name].add(kind.details.get("dtype", ""))
    sites = []
    for name, (count, num_bytes, seconds, waiting) in ((name, each.tolist()) for name, each in sums.items()):
        calls, times = max(1, round(count / len(traces))), (seconds / len(traces), waiting / len(traces))
        dtype = dtypes[name].pop() if len(dtypes[name]) == 1 else ""
        sites.append(CallSite(*name, "", calls, round(num_bytes / count), *times, 2, dtype))
    return sorted(sites, key=lambda site: -site.seconds)
