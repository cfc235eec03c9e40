"""Collectives over the hosts of a group.

Tensors are processed in chunks: while one chunk is sent between hosts, the ranks of a host work on others. Barrier,
broadcast and reduce, and on a tree allreduce, are plans of steps. On a grid an allreduce has a slice of the tensor per
rank of a host. Allgather and reduce-scatter order rows by rank, wherever the ranks are placed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from ...collective_specs import SPECS
from ...communicators import algorithms, splits
from ...communicators.group import Group
from ...communicators.handle import Handle
from ...shared_memory import fast_path
from ...shared_memory.kernels.records import MISMATCH, STEP_ACROSS, STEP_AFTER, STEP_BEFORE
from ...shared_memory.memory_layout import WITH_COMPARISON, LogFields
from ...tensors import buffers, partition
from ...tensors.operation_specs import OPERATIONS
from ..base import Operation
from ..mpi_messages import can_call_from_kernels, destination_for, row_counts, rows_of
from ..number_exchange import FastAllreduce, NumberExchange, most_carried
from ..pipeline import ChunkBuffers, run_pipelined
from ..rank_order import PartialResults, combiner
from .host_comparison import HostComparison
from .steps import BindStep, RunStep, StepRunner, StepSequence, chunks_of

# Up to this size, an allreduce sends the fewest messages between hosts; above, the fewest bytes through each rank. The
# bits are the same: the totals of the hosts, combined in order of the hosts.
_SHORT_BYTES = 16 << 10


def prepare(
    group: Group, collective: str, dtype: torch.dtype | None, op: str | None, bind_step: BindStep, chunk_bytes: int
) -> Operation:
    """Prepare a collective over the hosts of a group."""
    runner, spec = StepRunner(op, bind_step), SPECS[collective]
    if spec.gathers:
        return Operation(HostAllgather(group, runner).run)
    chunk_numel = 1 if dtype is None else max(1, chunk_bytes // dtype.itemsize)
    if op is None or dtype is None:
        return Operation(_sequence(group, collective, runner, chunk_numel).run)
    partial_results = PartialResults(dtype, op, group.size)
    if spec.reduces_to_all:
        allreduce = HostAllreduce(group, runner, partial_results, chunk_numel)
        if isinstance(group.comparison, HostComparison):
            return ComparedHostAllreduce(group, op, partial_results, allreduce).operation()
        return Operation(allreduce.run)
    if spec.divides:
        return Operation(HostReduceScatter(group, runner, partial_results, chunk_numel).run)
    return Operation(_sequence(group, collective, runner, chunk_numel, partial_results=partial_results).run)


def _sequence(
    group: Group, collective: str, runner: StepRunner, chunk_numel: int, *, cartesian: bool = True, **settings: Any
) -> StepSequence:
    name = cast(splits.CollectiveName, collective)
    split = splits.plan_split([member.group for member in group.placement.members], cartesian=cartesian)

    def plan(root: int) -> tuple[splits.Step, ...]:
        if SPECS[collective].reduces_to_root:
            return splits.reduce_group_by_group(group.rank, split, root)
        return splits.steps_for(name, group.rank, [split], root=root)

    groups = {(1, "intra"): group.local, (1, "inter"): group.across}
    return StepSequence(collective, group.rank, groups, plan, runner, chunk_numel=chunk_numel, **settings)


def _inside(group: Group) -> Group:
    assert group.local is not None
    return group.local


class HostAllreduce:
    """Allreduce over hosts.

    On a grid: reduce-scatter inside the host, allreduce of each slice between hosts, allgather inside. On a tree, and
    for short tensors: reduce to the first rank, allreduce between those, broadcast.
    """

    def __init__(self, group: Group, runner: StepRunner, partial_results: PartialResults, chunk_numel: int) -> None:
        self.group, self.runner, self.partial_results = group, runner, partial_results
        self.chunk_numel = chunk_numel
        accumulator, dtype = partial_results.accumulator, partial_results.dtype
        self.work, self.slices, self.shares = (ChunkBuffers(accumulator) for _ in range(3))
        self.rounded_slices, self.rounded_shares = ChunkBuffers(dtype), ChunkBuffers(dtype)
        self.by_first_ranks = _sequence(
            group, "allreduce", runner, chunk_numel, cartesian=False, partial_results=partial_results,
            sum_across=self._sum_across,
        )  # fmt: skip

    def run(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Reduce in place on all ranks."""
        if self.group.is_grid and buffer.numel() * buffer.element_size() > _SHORT_BYTES:
            self.group.call_log.log_fields[LogFields.algorithm] = algorithms.SLICES
            self._in_slices(chunks_of(buffer, self.chunk_numel))
        else:
            self.group.call_log.log_fields[LogFields.algorithm] = algorithms.FIRST_RANKS
            self.by_first_ranks.run(buffer, None, root)
        return buffer

    def _in_slices(self, chunks: list[torch.Tensor]) -> None:
        local, across, is_rounded = _inside(self.group), self.group.across, self.partial_results.is_rounded
        assert across is not None
        slices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def reduce_inside(k: int) -> None:
            chunk = chunks[k]
            _, numel = partition.part_of(chunk.numel(), local.size, local.rank)
            total = self.slices.take(k, numel)
            slices[k] = total, self.rounded_slices.take(k, numel) if is_rounded else total
            work = self.work.take(0, chunk.numel()).copy_(chunk) if is_rounded else chunk
            self.runner.run(local, "reduce_scatter", work, total)

        def start_across(k: int) -> Handle[Any] | None:
            return self.runner.start(
                across, lambda run_step: self._sum_across(run_step, across, *slices[k]), in_background=len(chunks) > 1
            )

        def gather_inside(k: int) -> None:
            self.runner.run(local, "allgather", slices.pop(k)[1], chunks[k])

        run_pipelined(len(chunks), reduce_inside, start_across, gather_inside)

    def _sum_across(self, run_step: RunStep, across: Group, total: torch.Tensor, out: torch.Tensor) -> None:
        """Combine the totals of the hosts; send partial results unrounded, and long results rounded."""
        if not self.partial_results.is_rounded or total.numel() * total.element_size() <= _SHORT_BYTES:
            run_step(across, "allreduce", total)
            self.partial_results.finish(total, out)
            return
        _, numel = partition.part_of(total.numel(), across.size, across.rank)
        share, rounded = self.shares.take(0, numel), self.rounded_shares.take(0, numel)
        run_step(across, "reduce_scatter", total, share)
        self.partial_results.finish(share, rounded)
        run_step(across, "allgather", rounded, out)


def _nothing() -> None:
    """Stand for a step that has ended."""


class ComparedHostAllreduce:
    """An allreduce over hosts whose short partial results are sent with the comparison of the call.

    They are reduced to the first rank of the host, exchanged between those, and the result is broadcast.
    """

    def __init__(self, group: Group, op: str, partial_results: PartialResults, longer: HostAllreduce) -> None:
        assert isinstance(group.comparison, HostComparison)
        self.group, self.comparison, self.longer = group, group.comparison, longer
        self.partial_results, self.op = partial_results, op
        self.runner = self.comparison.runner(op)
        self.combine = combiner(partial_results.accumulator, OPERATIONS[op].partial)
        self.work = ChunkBuffers(partial_results.accumulator)

    def operation(self) -> Operation:
        """Return the operation of the collective."""
        return Operation(self.run, compares=True, cached_call=self.cached_call)

    def run(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Reduce in place on all ranks."""
        if not self.comparison.can_carry(buffer.numel() * self.partial_results.accumulator.itemsize):
            self.group.announce()
            return self.longer.run(buffer, None, root)
        self.group.call_log.log_fields[LogFields.algorithm] = WITH_COMPARISON
        flat = buffer.detach().view(-1)
        # A copy at the first rank, which is not to change the tensor of a call that differs.
        work = flat
        if self.partial_results.is_rounded or self.comparison.exchange is not None:
            work = self.work.take(0, flat.numel()).copy_(flat)
        self._compare(flat, work, partial(self._reduce_inside, work), partial(self._broadcast_inside, flat))
        return buffer

    def _compare(
        self, flat: torch.Tensor, work: torch.Tensor, before: Callable[[], object], after: Callable[[], object]
    ) -> None:
        """Compare the call in its steps, and raise on all ranks if it differs."""

        def sum_across(exchange: NumberExchange, number: int | None) -> bool:
            if not exchange.allreduce(number, work, self.combine, self.group.call_log.count_wait):
                return False
            self.partial_results.finish(work, flat)
            return True

        if not self.comparison.run(self.group.call_number, before, sum_across, after):
            self.group.refuse_call()
        if self.comparison.exchange is None:  # the other hosts have arrived when the result has
            self.group.call_log.count_wait()

    def _reduce_inside(self, work: torch.Tensor) -> None:
        self.runner.run(_inside(self.group), "reduce", work)

    def _broadcast_inside(self, flat: torch.Tensor) -> None:
        self.runner.run(_inside(self.group), "broadcast", flat)

    def cached_call(self, root: int, most_bytes: int | None) -> fast_path.CachedCall | None:
        """Return the call for the fast path; None if the fast path cannot run it."""
        group, local, dtype = self.group, self.group.local, self.partial_results.dtype
        if (
            most_bytes is not None
            or OPERATIONS[self.op].finish
            or self.partial_results.is_rounded
            or not can_call_from_kernels(group)
        ):
            return None
        names = ("reduce", "broadcast") if local is not None else ()
        found = [self.runner.cached_call(_inside(group), name, torch.empty(0, dtype=dtype)) for name in names]
        steps = [step for step in found if step is not None]
        if len(steps) < len(names):  # the ranks of the host share no memory
            return None
        carried, exchange = most_carried(self.comparison.num_hosts, in_steps=True), self.comparison.exchange
        finish = partial(self._finish, steps)
        return FastAllreduce(group, dtype, self.op, carried, exchange, finish, steps).cached_call()

    def _finish(
        self, steps: Sequence[fast_path.CachedCall], failed: int, status: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Run the rest of a call of the fast path, from the step that has failed."""
        flat = tensor.detach().view(-1)
        exchange = self.comparison.exchange
        work = flat if exchange is None else exchange.own_vector(flat)
        if failed == STEP_ACROSS and status != MISMATCH:
            raise self.group.context.MPI.Exception(status)
        if failed == STEP_BEFORE:
            before = partial(steps[0].settle, status, work, None)
            self._compare(flat, work, before, partial(self._broadcast_inside, flat))
        else:
            after = partial(steps[1].settle, status, flat, None) if failed == STEP_AFTER else _nothing
            is_equal = self.comparison.run(self.group.call_number, _nothing, lambda *_: failed == STEP_AFTER, after)
            if not is_equal:
                self.group.refuse_call()
            self.group.call_log.count_wait()
        return tensor


def _note_algorithm(group: Group) -> None:
    """Store the algorithm of the current call of a group."""
    group.call_log.log_fields[LogFields.algorithm] = algorithms.SLICES if group.is_grid else algorithms.FIRST_RANKS


class HostAllgather:
    """Allgather over hosts; no byte is sent to a host twice.

    On a grid: between hosts among the ranks of each position, then inside. On a tree: gather to the first rank of each
    host, allgather between those, broadcast inside.
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
        assert self.group.across is not None
        column = self.runner.run(self.group.across, "allgather", own)
        self.runner.run(_inside(self.group), "allgather", column, gathered)

    def _over_tree(self, own: torch.Tensor, gathered: torch.Tensor) -> None:
        local, across = self.group.local, self.group.across
        of_host = own if local is None else self.runner.run(local, "gather", own)
        if across is not None:
            self.runner.run(across, "allgather", of_host, gathered)
        if local is not None:
            self.runner.run(local, "broadcast", gathered)


class HostReduceScatter:
    """Reduce-scatter over hosts.

    On a grid: inside the host, then between hosts. On a tree: reduce to the first rank, reduce-scatter between those,
    scatter inside. A chunk is the same section of every rank's part. The sections are ordered so that even splits send
    each one to its rank, and have equal lengths: short sections, and missing ranks of a host, are padded.
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

        def reduce_inside(k: int) -> None:
            begin, numel = sections[k]
            total = self._sum_inside(self._assemble([part[begin : begin + numel] for part in parts], numel, k), k)
            sums[k] = total, self.shares.take(k, total.numel() // len(self.group.placement.groups))

        def start_across(k: int) -> Handle[Any] | None:
            across = self.group.across
            if across is None:
                return None
            return self.runner.start(
                across, lambda run_step: run_step(across, "reduce_scatter", *sums[k]), in_background=len(sections) > 1
            )

        def distribute(k: int) -> None:
            begin, numel = sections[k]
            self._distribute(sums.pop(k)[1], out[begin : begin + numel], numel, k)

        run_pipelined(len(sections), reduce_inside, start_across, distribute)
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

    def _sum_inside(self, work: torch.Tensor, k: int) -> torch.Tensor:
        """Return the sums of this host: this rank's column on a grid, everything at the first rank of a tree."""
        local = self.group.local
        if self.group.is_grid:
            column = self.slices.take(k, work.numel() // _inside(self.group).size)
            self.runner.run(_inside(self.group), "reduce_scatter", work, column)
            return column
        if local is not None:
            self.runner.run(local, "reduce", work)
        return work

    def _distribute(self, share: torch.Tensor, out: torch.Tensor, numel: int, k: int) -> None:
        """Write this rank's section of the sums to `out`, which may be shorter than `numel`."""
        if self.group.is_grid:
            self.partial_results.finish(share[: out.numel()], out)
            return
        local, rounded = self.group.local, None
        if self.group.across is not None:
            total = share[: numel if local is None else local.size * numel]
            rounded = self.rounded.take(k, total.numel()) if self.partial_results.is_rounded else total
            self.partial_results.finish(total, rounded)
        if local is None:
            assert rounded is not None
            own = rounded
        else:
            own = self.own.take(k, numel)
            self.runner.run(local, "scatter", rounded, own)
        buffers.overwrite(out, own[: out.numel()])
