"""Verbs over several hosts that gather or split rows. Ranks may be placed in any order: rows are put in theirs."""

from __future__ import annotations

import numpy as np
import torch

from ...communicators.group import Group
from ...communicators.handle import Handle
from ...tensors import buffers, partition
from ..mpi import destination_for, rows_of
from ..p2p import Slots
from .in_place import OverHosts, Totals
from .steps import Steps, pipelined


class Allgather(OverHosts):
    """On a grid between hosts, each rank with its peers there, then inside; no byte goes to a host twice.

    On a tree to the first rank of each host, between those, and to all.
    """

    def __init__(self, group: Group, steps: Steps) -> None:
        super().__init__(group, steps)
        hosts = group.placement.groups
        self.order = [rank for ranks in (zip(*hosts, strict=True) if group.is_grid else hosts) for rank in ranks]
        """In which order the rows of the ranks come out."""

    def __call__(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Everybody's rows in rank order, to everybody."""
        rows = self._rows(source)
        destination = destination_for(source, sum(rows), destination)
        row_bytes = rows_of(source)[1] * source.element_size()
        result = _as_bytes(destination)
        in_order = self.order == sorted(self.order)
        gathered = result if in_order else torch.empty_like(result)
        parts = gathered.split([rows[rank] * row_bytes for rank in self.order])
        if self.group.is_grid:
            self._over_grid(_as_bytes(source), gathered)
        else:
            self._over_tree(_as_bytes(source), gathered, parts)
        if not in_order:
            places = result.split([num_rows * row_bytes for num_rows in rows])
            for rank, part in zip(self.order, parts, strict=True):
                buffers.overwrite(places[rank], part)
        return destination

    def _rows(self, source: torch.Tensor) -> list[int]:
        """How many rows each rank has: one small message more for everybody, and the rest is known."""
        MPI, rows = self.group.context.MPI, np.empty(self.group.size, np.int64)
        mine = np.array([rows_of(source)[0]], np.int64)
        self.group.comm.Allgather((mine, MPI.INT64_T), (rows, MPI.INT64_T))
        counts: list[int] = rows.tolist()
        return counts

    def _over_grid(self, mine: torch.Tensor, gathered: torch.Tensor) -> None:
        assert self.group.across is not None
        column: list[torch.Tensor] = []
        self.begin_between(lambda: column.append(self.between("allgather", mine)), 1)
        self.inside("allgather", column[0], gathered)

    def _over_tree(self, mine: torch.Tensor, gathered: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
        at_first = mine
        if self.group.local is not None:
            at_first = self.inside("gather", mine)
        if self.group.across is not None:
            self.begin_between(lambda: self.between("allgather", at_first, gathered), 1)
        if self.group.local is not None:
            self.inside("broadcast", gathered)


class ReduceScatter(OverHosts):
    """A reduce-scatter inside the host, then between hosts; on a tree a reduce, and a scatter in the end.

    The same stretch of every rank's part makes a piece. The parts in a piece lie in the order in which even splits send
    them where they belong, and are of one length: what is missing at the end, or in a host with fewer ranks, is
    filled up.
    """

    def __init__(self, group: Group, steps: Steps, totals: Totals, piece_numel: int) -> None:
        super().__init__(group, steps)
        self.totals, self.piece_numel = totals, piece_numel
        hosts = group.placement.groups
        self.most_ranks = max(len(ranks) for ranks in hosts)
        padded = [[*ranks, *[None] * (self.most_ranks - len(ranks))] for ranks in hosts]
        columns = zip(*padded, strict=True) if group.is_grid else padded
        self.order = [rank for ranks in columns for rank in ranks]
        """Whose part is at each place, None for nobody's."""
        self.work, self.slices, self.shares = (Slots(totals.carrier) for _ in range(3))
        self.rounded, self.mine = Slots(totals.dtype), Slots(totals.dtype)

    def __call__(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Split dim 0 of `source` evenly and give each rank the reduced rows that are its."""
        num_rows, row_numel = rows_of(source)
        rows = partition.rows(num_rows, self.group.size)
        destination = destination_for(source, rows[self.group.rank][1], destination)
        flat, out = source.detach().view(-1), destination.detach().view(-1)
        parts = [flat[first * row_numel : (first + count) * row_numel] for first, count in rows]
        stretches = partition.chunks(parts[0].numel(), max(1, self.piece_numel // self.group.size))
        sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def before(k: int) -> None:
            begin, numel = stretches[k]
            here = self._add_inside(self._assemble([part[begin : begin + numel] for part in parts], numel, k), k)
            sums[k] = here, self.shares.take(k, here.numel() // len(self.group.placement.groups))

        def across(k: int) -> Handle | None:
            if self.group.across is None:
                return None
            return self.begin_between(lambda: self.between("reduce_scatter", *sums[k]), len(stretches))

        def after(k: int) -> None:
            begin, numel = stretches[k]
            self._hand_out(sums.pop(k)[1], out[begin : begin + numel], numel, k)

        pipelined(len(stretches), before, across, after)
        return destination

    def _assemble(self, parts: list[torch.Tensor], numel: int, k: int) -> torch.Tensor:
        """The parts in the order of the places, each filled up to `numel`."""
        work = self.work.take(k, len(self.order) * numel)
        for place, rank in zip(work.split(numel), self.order, strict=True):
            length = 0 if rank is None else parts[rank].numel()
            if rank is not None:
                place[:length] = parts[rank]
            place[length:] = 0
        return work

    def _add_inside(self, work: torch.Tensor, k: int) -> torch.Tensor:
        """The sums of this host: of my column on a grid, of everything at the first rank of a tree."""
        local = self.group.local
        if self.group.is_grid:
            assert local is not None
            column = self.slices.take(k, work.numel() // local.size)
            self.inside("reduce_scatter", work, column)
            return column
        if local is not None:
            self.inside("reduce", work)
        return work

    def _hand_out(self, share: torch.Tensor, out: torch.Tensor, numel: int, k: int) -> None:
        """From the sums of this host's parts to `out`, which may be shorter than the `numel` of a place."""
        if self.group.is_grid:
            self.totals.settle(share[: out.numel()], out)
            return
        local, rounded = self.group.local, None
        if self.group.across is not None:
            total = share[: numel if local is None else local.size * numel]
            rounded = self.rounded.take(k, total.numel()) if self.totals.is_rounded else total
            self.totals.settle(total, rounded)
        if local is not None:
            mine = self.mine.take(k, numel)
            self.inside("scatter", rounded, mine)
        else:
            assert rounded is not None
            mine = rounded
        buffers.overwrite(out, mine[: out.numel()])


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Of one element any stride is in order for torch, but not for a view as bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
