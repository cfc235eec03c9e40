"""The calls of all ranks side by side: which rank arrived last, and how long the others waited for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from .clocks import IntArray
from .events import awaited_ranks
from .trace_reader import Flags, Floats, RankTrace, TracedCall


class AlignedCall(NamedTuple):
    """One call of a group, with the times of all its ranks."""

    ranks: tuple[int, ...]
    """The ranks of the group, as numbers in the world."""
    calls: dict[int, TracedCall]
    """The call of each rank that has recorded it."""
    waits: dict[int, tuple[int | None, float]]

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
        return self.waits[rank][0]

    def ready(self, rank: int) -> float:
        """Return when the ranks for which a rank waits had arrived, from which on data moves."""
        return self.waits[rank][1]


class AlignedCalls(Sequence[AlignedCall]):
    """The calls of all groups in the order of their first begin, as the parts of the calls on all ranks.

    Attributes:
        traces: The traces of the ranks.
        groups: The ranks of each group, by its key.
        kinds: The kinds of the calls of all ranks.
        starts: For each call the index of its first part; its further parts follow, in the order of ranks.
        rank, begin, end: Of each part.
        awaited: The index of the part for which a part waits last, -1 if it waits for nobody.
        ready: When the ranks for which a part waits had arrived, from which on data moves.
    """

    def __init__(self, traces: Sequence[RankTrace]) -> None:
        self.traces = traces
        self.groups: dict[str, tuple[int, ...]] = {}
        for trace in traces:
            self.groups.update({key: tuple(group["ranks"]) for key, group in trace.groups.items()})
        self.kinds = [kind for trace in traces for kind in trace.calls.kinds]
        self._traces = {trace.rank: trace for trace in traces}
        lengths = [len(trace.calls) for trace in traces]
        self._first_of = dict(zip(self._traces, np.cumsum([0, *lengths[:-1]]), strict=True))
        self._source: IntArray = np.arange(sum(lengths))
        numbers = {key: number for number, key in enumerate(self.groups)}
        group = self.of_kinds([numbers[kind.group] for kind in self.kinds])
        rank, seq = np.repeat([trace.rank for trace in traces], lengths), self.column("seq")
        order = np.lexsort((rank, seq, group))
        first = _differs(seq[order]) | _differs(group[order])
        number = np.cumsum(first) - 1
        begin = self.column("begin")[order]
        begins = np.minimum.reduceat(begin, np.flatnonzero(first)) if len(begin) else begin
        place = np.empty(len(begins), np.int64)
        place[np.argsort(begins, kind="stable")] = np.arange(len(begins))
        again = np.argsort(place[number], kind="stable")
        self._source = order[again]
        self.call = place[number][again]
        """For each part the index of its call."""
        self.starts = np.flatnonzero(_differs(self.call))
        self.rank, self.begin, self.end = rank[self._source], begin[again], self.column("end")
        self.awaited = self._awaited()
        arrived = np.minimum(np.maximum(self.begin, self.begin[self.awaited]), self.end)
        self.ready = np.where(self.awaited < 0, self.begin, arrived)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return for each part a field of :class:`torchmpi.timeline.trace_reader.Calls`."""
        return np.concatenate([getattr(trace.calls, name) for trace in self.traces])[self._source]

    @property
    def kind(self) -> IntArray:
        """For each part the index of its kind among those of all ranks."""
        before = np.cumsum([0, *(len(trace.calls.kinds) for trace in self.traces)])
        kinds = [trace.calls.kind + first for trace, first in zip(self.traces, before, strict=False)]
        return np.concatenate(kinds)[self._source]

    def of_kinds(self, values: Sequence[Any]) -> npt.NDArray[Any]:
        return np.array(values or np.empty(0, np.int64))[self.kind]

    def wait_error(self) -> Floats:
        """Return for each part the bound of the error of its wait in seconds, by the clocks of the hosts."""
        leaders = [trace.job.get("leader", trace.rank) for trace in self.traces]
        leader = np.repeat(leaders, [len(trace.calls) for trace in self.traces])[self._source]
        error = self.column("clock_error")
        found: Floats = np.where(leader == leader[self.awaited], 0, error + error[self.awaited])
        return found

    def largest(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return for each call the largest value of its parts."""
        return np.maximum.reduceat(values, self.starts) if len(values) else values

    def _awaited(self) -> IntArray:
        is_whole = self.of_kinds([len(self.groups[kind.group]) for kind in self.kinds]) == self._num_parts()
        roots = [self.groups[kind.group][kind.details["root"]] if "root" in kind.details else -1 for kind in self.kinds]
        awaited = [
            awaited_ranks(kind.collective, trace.rank, root, self.groups[kind.group])
            for (trace, kind), root in zip(
                ((trace, kind) for trace in self.traces for kind in trace.calls.kinds), roots, strict=True
            )
        ]
        last = self._part_of_call(self.begin == self.largest(self.begin)[self.call])
        of_root = self._part_of_call(self.rank == self.of_kinds(roots))
        found = np.where(self.of_kinds([len(ranks) == 1 for ranks in awaited]), of_root, last)
        waits = [
            bool(ranks) and len(self.groups[kind.group]) > 1 for ranks, kind in zip(awaited, self.kinds, strict=True)
        ]
        return np.where(is_whole & self.of_kinds(waits), found, -1)

    def _num_parts(self) -> IntArray:
        found: IntArray = np.diff(np.append(self.starts, len(self.call)))[self.call]
        return found

    def _part_of_call(self, flags: Flags) -> IntArray:
        """Return for each part the index of the first part of its call with a flag; -1 if there is none."""
        parts = np.full(len(self.starts), -1)
        flagged = np.flatnonzero(flags)[::-1]
        parts[self.call[flagged]] = flagged  # of several, the last assignment counts
        found: IntArray = parts[self.call]
        return found

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> AlignedCall: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[AlignedCall]: ...
    def __getitem__(self, index: int | slice) -> AlignedCall | Sequence[AlignedCall]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        calls, waits = {}, {}
        for part in np.flatnonzero(self.call[(first := self.starts[index]) :][: len(self.traces)] == self.call[first]):
            rank, awaited = int(self.rank[first + part]), self.awaited[first + part]
            calls[rank] = self._traces[rank].calls[self._source[first + part] - self._first_of[rank]]
            waits[rank] = (None if awaited < 0 else int(self.rank[awaited])), float(self.ready[first + part])
        return AlignedCall(self.groups[next(iter(calls.values())).group], calls, waits)


def _differs(values: npt.NDArray[Any]) -> Flags:
    """Return which values differ from the one before.

    >>> _differs(np.array([3, 3, 4])).tolist()
    [True, False, True]
    """
    return np.append(np.ones(min(1, len(values)), bool), values[1:] != values[:-1])


def earliest_result(aligned: AlignedCalls) -> float:
    """Return the smallest time between the last arrival at a call and its end on any rank, in seconds.

    It is negative only if the clocks are not aligned: no rank has a result before all have arrived.
    """
    waits = aligned.awaited >= 0
    return float((aligned.end - aligned.begin[aligned.awaited])[waits].min(initial=np.inf)) if waits.any() else 0.0
