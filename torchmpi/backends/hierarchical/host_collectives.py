"""Collectives over the hosts of a group.

Tensors are processed in chunks: while one chunk is sent between hosts, the ranks of a host work on others. Barrier,
broadcast, reduce and allreduce are plans of steps. Allgather and reduce-scatter order rows by rank, wherever the ranks
are placed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch

from ...collective_specs import SPECS
from ...communicators import algorithms, splits
from ...communicators.group import Group
from ...communicators.handle import Handle
from ...communicators.plan import Run
from ...config import Config
from ...shared_memory.memory_layout import LogFields
from ...tensors import buffers, partition
from ..base import Operation
from ..compared_calls import with_comparison
from ..mpi_messages import destination_for, row_counts, rows_of
from ..pipeline import ChunkBuffers, run_pipelined
from ..rank_order import PartialResults
from .steps import BindStep, StepRunner, Steps, StepSequence

# Up to this size, an allreduce sends the fewest messages between hosts; above, the fewest bytes through each rank. The
# bits are the same: the totals of the hosts, combined in order of the hosts.
_SHORT_BYTES = 16 << 10


def prepare(
    group: Group, collective: str, dtype: torch.dtype | None, op: str | None, bind_step: BindStep, config: Config
) -> Operation:
    """Prepare a collective over the hosts of a group."""
    longer = _of_long_tensors(group, collective, dtype, op, StepRunner(op, bind_step), config.pipeline_bytes)
    return with_comparison(group, collective, dtype, op, longer, config.message_bytes, by_host=True)


def _of_long_tensors(
    group: Group, collective: str, dtype: torch.dtype | None, op: str | None, runner: StepRunner, chunk_bytes: int
) -> Run:
    spec = SPECS[collective]
    if spec.gathers:
        return HostAllgather(group, runner).run
    chunk_numel = 1 if dtype is None else max(1, chunk_bytes // dtype.itemsize)
    partial_results = None if op is None or dtype is None else PartialResults(dtype, op, group.size)
    if spec.divides:
        assert partial_results is not None
        return HostReduceScatter(group, runner, partial_results, chunk_numel).run
    return StepSequence(
        collective,
        group.rank,
        {(1, "intra"): group.intra_host, (1, "inter"): group.inter_host},
        _plan(group, collective, partial_results, chunk_numel),
        runner,
        partial_results=partial_results,
        chunk_numel=chunk_numel,
    ).run


def _plan(
    group: Group, collective: str, partial_results: PartialResults | None, chunk_numel: int
) -> Callable[[int, int], Steps]:
    """Return the plan of a collective in place: ``plan(root, numel)``."""
    split, rank, spec = group.placement, group.rank, SPECS[collective]
    if partial_results is None or not spec.reduces_to_all:
        name = cast(splits.CollectiveName, collective)

        @cache
        def steps_to(root: int) -> Steps:
            if spec.reduces_to_root:
                return splits.reduce_group_by_group(rank, split, root)
            return splits.steps_for(name, rank, [split], root=root)

        return lambda root, _: steps_to(root)
    steps_by = {algorithm: splits.allreduce_over_hosts(algorithm, rank, split) for algorithm in splits.ALLREDUCES}
    dtype, accumulator, is_rounded = partial_results.dtype, partial_results.accumulator, partial_results.is_rounded
    ranks_of_host = len(split.members[rank].intra)

    def allreduce_of(_: int, numel: int) -> Steps:
        in_slices = group.is_grid and numel * dtype.itemsize > _SHORT_BYTES
        algorithm = algorithms.SLICES if in_slices else algorithms.FIRST_RANKS
        group.call_log.log_fields[LogFields.algorithm] = algorithm
        between = min(numel, chunk_numel) // (ranks_of_host if in_slices else 1) * accumulator.itemsize
        return steps_by[algorithm, is_rounded and between > _SHORT_BYTES]

    return allreduce_of


def _intra(group: Group) -> Group:
    assert group.intra_host is not None
    return group.intra_host


def _note_algorithm(group: Group) -> None:
    """Store the algorithm of the current call of a group."""
    group.call_log.log_fields[LogFields.algorithm] = algorithms.SLICES if group.is_grid else algorithms.FIRST_RANKS


class HostAllgather:
    """Allgather over hosts; no byte is sent to a host twice.

    On a grid: inter allgather, intra allgather. On a tree: intra gather, inter allgather, intra broadcast. Rows of one
    length on a grid whose ranks are placed host by host do not come here: see :mod:`torchmpi.backends.long_calls`.
    """

    def __init__(self, group: Group, runner: StepRunner) -> None:
        self.group, self.runner = group, runner
        hosts = group.placement.groups
        self.order = [rank for ranks in (zip(*hosts, strict=True) if group.is_grid else hosts) for rank in ranks]
        """The order in which the rows of the ranks are gathered."""

    def run(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Concatenate the rows of all ranks, in rank order, on all ranks."""
        _note_algorithm(self.group)
        rows = row_counts(self.group, source)
        destination = destination_for(source, sum(rows), destination)
        row_bytes = rows_of(source)[1] * source.element_size()
        result = buffers.byte_view(destination)
        in_order = self.order == sorted(self.order)
        gathered = result if in_order else torch.empty_like(result)
        if self.group.is_grid:
            self._over_grid(buffers.byte_view(source), gathered)
        else:
            self._over_tree(buffers.byte_view(source), gathered)
        if not in_order:
            targets = result.split_with_sizes([count * row_bytes for count in rows])
            parts = gathered.split_with_sizes([rows[rank] * row_bytes for rank in self.order])
            for rank, part in zip(self.order, parts, strict=True):
                buffers.overwrite(targets[rank], part)
        return destination

    def _over_grid(self, own: torch.Tensor, gathered: torch.Tensor) -> None:
        assert self.group.inter_host is not None
        column = self.runner.run(self.group.inter_host, "allgather", own)
        self.runner.run(_intra(self.group), "allgather", column, gathered)

    def _over_tree(self, own: torch.Tensor, gathered: torch.Tensor) -> None:
        intra, inter = self.group.intra_host, self.group.inter_host
        of_host = own if intra is None else self.runner.run(intra, "gather", own)
        if inter is not None:
            self.runner.run(inter, "allgather", of_host, gathered)
        if intra is not None:
            self.runner.run(intra, "broadcast", gathered)


class HostReduceScatter:
    """Reduce-scatter over hosts.

    On a grid: intra reduce-scatter, inter reduce-scatter. On a tree: intra reduce, inter reduce-scatter, intra scatter.
    A chunk is the same section of every rank's part. The sections are ordered so that even splits send each one to its
    rank, and have equal lengths: short sections, and missing ranks of a host, are padded.
    """

    def __init__(self, group: Group, runner: StepRunner, partial_results: PartialResults, chunk_numel: int) -> None:
        self.group, self.runner, self.partial_results = group, runner, partial_results
        self.section_numel = max(1, chunk_numel // group.size)
        hosts = group.placement.groups
        max_ranks = max(len(ranks) for ranks in hosts)
        padded = [[*ranks, *[None] * (max_ranks - len(ranks))] for ranks in hosts]
        columns = zip(*padded, strict=True) if group.is_grid else padded
        self.order = [rank for ranks in columns for rank in ranks]
        """The rank whose section is at each position, None for padding."""
        accumulator, dtype = partial_results.accumulator, partial_results.dtype
        self.work, self.slices, self.shares = (ChunkBuffers(accumulator) for _ in range(3))
        self.rounded, self.own = ChunkBuffers(dtype), ChunkBuffers(dtype)

    def run(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Reduce the rows of `source`, split dim 0 evenly, and return this rank's rows of the result."""
        _note_algorithm(self.group)
        num_rows, row_numel = rows_of(source)
        rows = partition.even_partition(num_rows, self.group.size)
        destination = destination_for(source, rows[self.group.rank][1], destination)
        flat, out = source.detach().view(-1), destination.detach().view(-1)
        parts = [flat[first * row_numel : (first + count) * row_numel] for first, count in rows]
        sections = partition.chunks(parts[0].numel(), self.section_numel)
        sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def reduce_intra(k: int) -> None:
            begin, numel = sections[k]
            total = self._sum_intra(self._assemble([part[begin : begin + numel] for part in parts], numel, k), k)
            sums[k] = total, self.shares.take(k, total.numel() // len(self.group.placement.groups))

        def start_inter(k: int) -> Handle[Any] | None:
            inter = self.group.inter_host
            if inter is None:
                return None
            return self.runner.start(
                inter, lambda run_step: run_step(inter, "reduce_scatter", *sums[k]), in_background=len(sections) > 1
            )

        def distribute(k: int) -> None:
            begin, numel = sections[k]
            self._distribute(sums.pop(k)[1], out[begin : begin + numel], numel, k)

        run_pipelined(len(sections), reduce_intra, start_inter, distribute)
        return destination

    def _assemble(self, sections: list[torch.Tensor], numel: int, k: int) -> torch.Tensor:
        """Return the sections in the order of the positions, each padded to `numel`."""
        work = self.work.take(k, len(self.order) * numel)
        for position, rank in zip(torch.split(work, numel), self.order, strict=True):
            length = 0 if rank is None else sections[rank].numel()
            if rank is not None:
                position[:length] = sections[rank]
            position[length:] = 0
        return work

    def _sum_intra(self, work: torch.Tensor, k: int) -> torch.Tensor:
        """Return the sums of this host: this rank's column on a grid, everything at the first rank of a tree."""
        intra = self.group.intra_host
        if self.group.is_grid:
            column = self.slices.take(k, work.numel() // _intra(self.group).size)
            self.runner.run(_intra(self.group), "reduce_scatter", work, column)
            return column
        if intra is not None:
            self.runner.run(intra, "reduce", work)
        return work

    def _distribute(self, share: torch.Tensor, out: torch.Tensor, numel: int, k: int) -> None:
        """Write this rank's section of the sums to `out`, which may be shorter than `numel`."""
        if self.group.is_grid:
            self.partial_results.finish(share[: out.numel()], out)
            return
        intra, rounded = self.group.intra_host, None
        if self.group.inter_host is not None:
            total = share[: numel if intra is None else intra.size * numel]
            rounded = self.rounded.take(k, total.numel()) if self.partial_results.is_rounded else total
            self.partial_results.finish(total, rounded)
        if intra is None:
            assert rounded is not None
            own = rounded
        else:
            own = self.own.take(k, numel)
            self.runner.run(intra, "scatter", rounded, own)
        buffers.overwrite(out, own[: out.numel()])
