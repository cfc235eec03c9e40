"""Verbs over several hosts that work in place: barrier, broadcast, reduce, allreduce.

All go piece by piece, so that the ranks of a host are at work while other pieces are on their way between hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ...communicators import splits
from ...communicators.group import Group
from ...communicators.handle import Handle
from ...tensors import buffers, partition
from ..p2p import Slots
from .steps import Steps, carried_in, divide, pipelined

# Up to this, an allreduce takes the fewest messages between hosts; above, the fewest bytes through each rank. The bits
# are the same: the hosts' sums in order of the hosts.
SHORT_BYTES = 16 << 10

Phases = tuple[tuple[splits.Step, ...], splits.Step | None, tuple[splits.Step, ...]]


class OverHosts:
    """A verb on one group over several hosts."""

    def __init__(self, group: Group, steps: Steps) -> None:
        self.group, self.steps = group, steps

    def inside(self, collective: str, source: Any, destination: Any = None, root: int = 0) -> Any:
        """A step among the ranks of this host."""
        assert self.group.local is not None
        return self.steps.run(self.group.local, collective, source, destination, root)

    def between(self, collective: str, source: Any, destination: Any = None, root: int = 0) -> Any:
        """A step between hosts, within a task of `begin_between`."""
        assert self.group.across is not None
        return self.steps.perform(self.group.across, collective, source, destination, root)

    def begin_between(self, task: Callable[[], Any], num_pieces: int) -> Handle | None:
        """Do something between hosts, in the background if there are other pieces to work on meanwhile."""
        across = self.group.across
        assert across is not None
        if num_pieces > 1:
            return across.call_queue.submit(task, f"{across.where}: {across.name}")
        across.call_queue.run(task)
        return None


class Planned(OverHosts):
    """A verb whose steps :func:`torchmpi.communicators.splits.steps_for` knows."""

    collective: Any

    def __init__(self, group: Group, steps: Steps, *, cartesian: bool = True) -> None:
        super().__init__(group, steps)
        split = splits.plan_split([member.group for member in group.placement.members], cartesian=cartesian)
        self.phases = lru_cache(maxsize=None)(lambda root: _phases(self.collective, group.rank, split, root))
        """By root: the steps inside the host that come first, the one between hosts, and those that come last."""

    def take(self, steps: tuple[splits.Step, ...], tensor: torch.Tensor | None) -> None:
        """Steps inside the host."""
        for step in steps:
            self.inside(step.collective, tensor, root=step.root or 0)


def _phases(collective: splits.CollectiveName, rank: int, split: splits.Split, root: int) -> Phases:
    if collective == "reduce":
        steps = splits.reduce_group_by_group(rank, split, root)
    else:
        steps = splits.steps_for(collective, rank, [split], root=root)
    for index, step in enumerate(steps):
        if step.group == "inter":
            return steps[:index], step, steps[index + 1 :]
    return steps[:1], None, steps[1:]


def pieces_of(buffer: torch.Tensor, piece_numel: int) -> list[torch.Tensor]:
    """The flat tensor, cut."""
    flat = buffer.detach().view(-1)
    return [flat[begin : begin + numel] for begin, numel in partition.chunks(flat.numel(), piece_numel)]


class Barrier(Planned):
    """Return when everybody has come."""

    collective = "barrier"

    def __call__(self, source: Any, destination: Any, root: int) -> None:
        """Run the steps."""
        before, step, after = self.phases(0)
        self.take(before, None)
        if step is not None:
            self.begin_between(lambda: self.between("barrier", None), 1)
        self.take(after, None)


class Broadcast(Planned):
    """The root's values, once to each host, and there to all ranks."""

    collective = "broadcast"

    def __init__(self, group: Group, steps: Steps, piece_numel: int) -> None:
        super().__init__(group, steps)
        self.piece_numel = piece_numel

    def __call__(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """In place."""
        before, step, after = self.phases(root)
        pieces = pieces_of(buffer, self.piece_numel)

        def across(k: int) -> Handle | None:
            if step is None:
                return None
            return self.begin_between(lambda: self.between("broadcast", pieces[k], root=step.root or 0), len(pieces))

        pipelined(len(pieces), lambda k: self.take(before, pieces[k]), across, lambda k: self.take(after, pieces[k]))
        return buffer


class Totals:
    """Sums on their way to a result: what they are carried in, and how they end."""

    def __init__(self, dtype: torch.dtype, op: str, size: int) -> None:
        self.dtype, self.carrier = dtype, carried_in(dtype, op)
        self.is_rounded = self.carrier is not dtype
        self._divisor = size if op == "avg" else 1

    def settle(self, total: torch.Tensor, out: torch.Tensor) -> None:
        """From the sum to the result; `total` is lost."""
        if self._divisor > 1:
            divide(total, self._divisor)
        if total.data_ptr() != out.data_ptr():
            buffers.overwrite(out, total)


class Reduce(Planned):
    """Once from each host, to the root."""

    collective = "reduce"

    def __init__(self, group: Group, steps: Steps, totals: Totals, piece_numel: int) -> None:
        super().__init__(group, steps)
        self.totals, self.piece_numel = totals, piece_numel
        self.work = Slots(totals.carrier)

    def __call__(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """In place at the root; the others' buffers stay as they are."""
        first, step, last = self.phases(root)
        pieces = pieces_of(buffer, self.piece_numel)
        works: dict[int, torch.Tensor] = {}

        def before(k: int) -> None:
            works[k] = self.work.take(k, pieces[k].numel()).copy_(pieces[k])
            self.take(first, works[k])

        def across(k: int) -> Handle | None:
            if step is None:
                return None
            return self.begin_between(lambda: self.between("reduce", works[k], root=step.root or 0), len(pieces))

        def after(k: int) -> None:
            work = works.pop(k)
            self.take(last, work)
            if self.group.rank == root:
                self.totals.settle(work, pieces[k])

        pipelined(len(pieces), before, across, after)
        return buffer


class Allreduce(Planned):
    """On a grid a reduce-scatter inside the host, an allreduce of each slice between hosts, an allgather inside.

    On a tree, and for short ones: a reduce to the first rank, an allreduce between those, a broadcast.
    """

    collective = "allreduce"

    def __init__(self, group: Group, steps: Steps, totals: Totals, piece_numel: int) -> None:
        super().__init__(group, steps, cartesian=False)
        self.totals, self.piece_numel = totals, piece_numel
        self.work, self.slices, self.shares = (Slots(totals.carrier) for _ in range(3))
        self.rounded, self.rounded_shares = Slots(totals.dtype), Slots(totals.dtype)

    def __call__(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """In place."""
        pieces = pieces_of(buffer, self.piece_numel)
        if self.group.is_grid and buffer.numel() * buffer.element_size() > SHORT_BYTES:
            self._in_slices(pieces)
        else:
            self._by_first_ranks(pieces)
        return buffer

    def _in_slices(self, pieces: list[torch.Tensor]) -> None:
        local = self.group.local
        assert local is not None
        slices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def before(k: int) -> None:
            _, numel = partition.part_of(pieces[k].numel(), local.size, local.rank)
            total = self.slices.take(k, numel)
            slices[k] = total, self.rounded.take(k, numel) if self.totals.is_rounded else total
            self.inside("reduce_scatter", self._carried(pieces[k], 0), total)

        def across(k: int) -> Handle | None:
            return self.begin_between(lambda: self._add_hosts(*slices[k]), len(pieces))

        def after(k: int) -> None:
            self.inside("allgather", slices.pop(k)[1], pieces[k])

        pipelined(len(pieces), before, across, after)

    def _by_first_ranks(self, pieces: list[torch.Tensor]) -> None:
        first, step, last = self.phases(0)
        totals: dict[int, torch.Tensor] = {}

        def before(k: int) -> None:
            totals[k] = self._carried(pieces[k], k)
            self.take(first, totals[k])

        def across(k: int) -> Handle | None:
            if step is None:
                return None
            return self.begin_between(lambda: self._add_hosts(totals[k], pieces[k]), len(pieces))

        def after(k: int) -> None:
            del totals[k]
            self.take(last, pieces[k])

        pipelined(len(pieces), before, across, after)

    def _carried(self, piece: torch.Tensor, k: int) -> torch.Tensor:
        return self.work.take(k, piece.numel()).copy_(piece) if self.totals.is_rounded else piece

    def _add_hosts(self, total: torch.Tensor, out: torch.Tensor) -> None:
        """Add up the hosts' totals. Sums travel as they are; results, where that makes them shorter, rounded."""
        across = self.group.across
        assert across is not None
        if not self.totals.is_rounded or total.numel() * total.element_size() <= SHORT_BYTES:
            self.between("allreduce", total)
            self.totals.settle(total, out)
            return
        _, numel = partition.part_of(total.numel(), across.size, across.rank)
        share, rounded = self.shares.take(0, numel), self.rounded_shares.take(0, numel)
        self.between("reduce_scatter", total, share)
        self.totals.settle(share, rounded)
        self.between("allgather", rounded, out)
