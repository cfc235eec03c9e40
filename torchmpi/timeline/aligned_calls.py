"""The calls of all ranks side by side: which rank arrived last, and how long the others waited for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from .events import awaited_ranks
from .trace_reader import RankTrace, TracedCall


class AlignedCall(NamedTuple):
    """One call of a group, with the times of all its ranks."""

    ranks: tuple[int, ...]
    """The ranks of the group, as numbers in the world."""
    calls: dict[int, TracedCall]
    """The call of each rank that has recorded it."""

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have recorded the call."""
        return len(self.calls) == len(self.ranks)

    @property
    def last(self) -> int:
        """The rank that arrived last."""
        return max(self.calls, key=lambda rank: self.calls[rank].begin)

    def awaited(self, rank: int) -> int | None:
        """Return the rank for which a rank waited last; None if its part of the call waits for nobody."""
        call = self.calls[rank]
        if not self.is_whole or len(self.ranks) == 1:
            return None
        root = self.ranks[call.details["root"]] if "root" in call.details else -1
        awaited = awaited_ranks(call.collective, rank, root, self.ranks)
        return max(awaited, key=lambda each: self.calls[each].begin, default=None)

    def ready(self, rank: int) -> float:
        """Return when the ranks for which a rank waits had arrived, from which on data moves."""
        call, awaited = self.calls[rank], self.awaited(rank)
        return call.begin if awaited is None else min(max(call.begin, self.calls[awaited].begin), call.end)


def align(traces: Sequence[RankTrace]) -> list[AlignedCall]:
    """Return the calls of all groups with their parts on the ranks, in the order of their first begin."""
    parts: dict[tuple[str, int], dict[int, TracedCall]] = defaultdict(dict)
    ranks: dict[str, tuple[int, ...]] = {}
    for trace in traces:
        ranks.update({key: tuple(group["ranks"]) for key, group in trace.groups.items()})
        for call in trace.calls:
            parts[call.group, call.seq][trace.rank] = call
    aligned = [AlignedCall(ranks[group], calls) for (group, _), calls in parts.items()]
    return sorted(aligned, key=lambda each: min(call.begin for call in each.calls.values()))


def earliest_result(aligned: Sequence[AlignedCall]) -> float:
    """Return the smallest time between the last arrival at a call and its end on any rank, in seconds.

    It is negative only if the clocks are not aligned: no rank has a result before all have arrived.
    """
    times = [
        each.calls[rank].end - each.calls[awaited].begin
        for each in aligned
        for rank in each.calls
        if (awaited := each.awaited(rank)) is not None
    ]
    return min(times, default=0.0)
