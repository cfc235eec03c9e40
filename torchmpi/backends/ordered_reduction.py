"""Reductions in rank order over any backend that moves ranges of tensors between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..communicators import algorithms
from ..communicators.group import Group
from ..config import Config
from ..shared_memory.memory_layout import LOG_ALGORITHM
from ..tensors import buffers, partition
from .base import Operation
from .mpi_messages import Range, destination_for, rows_of
from .rank_order import combiner

REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
# Up to this many bytes in all, every rank gathers all vectors and combines them: one round instead of two.
_GATHER_ALL_BYTES = 16 << 10


class Transport(Protocol):
    """Movement of ranges of flat tensors between the ranks of a group."""

    def send_ranges(self, source: torch.Tensor, ranges: Sequence[Range], received: torch.Tensor) -> None:
        """Send each rank its range of `source`; row j of `received` is the range that rank j sends to this rank."""

    def allgather_ranges(self, own: torch.Tensor, target: torch.Tensor, ranges: Sequence[Range]) -> None:
        """Write the `own` tensor of each rank to its range of `target` on all ranks."""

    def gather_ranges(self, own: torch.Tensor, target: torch.Tensor, ranges: Sequence[Range], root: int) -> None:
        """Write the `own` tensor of each rank to its range of `target` on the root."""


class RangeReduction(Protocol):
    """A reduction whose result is split into ranges of the flat tensor, one for each rank."""

    def allreduce(self, buffer: torch.Tensor, _: None, root: int) -> torch.Tensor:
        """Reduce in place on all ranks."""

    def reduce(self, buffer: torch.Tensor, _: None, root: int) -> torch.Tensor:
        """Reduce in place on the root; the buffers of other ranks are unchanged."""

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor, ranges: Sequence[Range]) -> None:
        """Write the result of this rank's range of the flat `source` to `destination`."""


def operation(group: Group, reduction: RangeReduction, collective: str) -> Operation:
    """Return the operation of a collective that reduces."""
    if collective == "reduce_scatter":
        return RowReduceScatter(group, reduction).run
    return reduction.allreduce if collective == "allreduce" else reduction.reduce


class RowReduceScatter:
    """Reduce-scatter along dim 0, by a reduction that splits flat tensors."""

    def __init__(self, group: Group, reduction: RangeReduction) -> None:
        self.rank, self.size, self.reduction = group.rank, group.size, reduction

    def run(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Reduce the rows of `source`, split dim 0 evenly, and return this rank's rows of the result."""
        num_rows, row_numel = rows_of(source)
        rows = partition.rows(num_rows, self.size)
        destination = destination_for(source, rows[self.rank][1], destination)
        ranges = [(first * row_numel, count * row_numel) for first, count in rows]
        with torch.inference_mode(destination.is_inference()):  # otherwise torch refuses to write to such a tensor
            self.reduction.reduce_scatter(source, destination, ranges)
        return destination


class OrderedReduction:
    """Reductions in rank order.

    Each rank receives its part of every vector (alltoall), combines the parts, and sends the result to all ranks
    (allgather): 2 (p-1)/p of the payload per rank, as in a ring allreduce.
    """

    def __init__(self, group: Group, transport: Transport, dtype: torch.dtype, op: str, config: Config) -> None:
        self.transport, self.rank, self.size = transport, group.rank, group.size
        self.log = group.call_log.log_fields
        self.dtype, self.itemsize = dtype, dtype.itemsize
        self.combine = combiner(dtype, op)
        self.chunk_numel = max(1, config.pipeline_bytes // self.itemsize)
        self.scratch = buffers.Scratch()

    def allreduce(self, buffer: torch.Tensor, _: None, root: int) -> torch.Tensor:
        """Reduce in place on all ranks."""
        flat = buffer.detach().view(-1)
        if flat.numel() * self.itemsize * self.size <= _GATHER_ALL_BYTES:
            self._gather_all(flat)
            return buffer
        for begin, numel in partition.chunks(flat.numel(), self.chunk_numel):
            chunk = flat[begin : begin + numel]
            ranges = partition.even_partition(numel, self.size)
            self.transport.allgather_ranges(self._own_part(chunk, ranges), chunk, ranges)
        return buffer

    def reduce(self, buffer: torch.Tensor, _: None, root: int) -> torch.Tensor:
        """Reduce in place on the root; the buffers of other ranks are unchanged."""
        flat = buffer.detach().view(-1)
        for begin, numel in partition.chunks(flat.numel(), self.chunk_numel):
            chunk = flat[begin : begin + numel]
            ranges = partition.even_partition(numel, self.size)
            self.transport.gather_ranges(self._own_part(chunk, ranges), chunk, ranges, root)
        return buffer

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor, ranges: Sequence[Range]) -> None:
        """Write the result of this rank's range of the flat `source` to `destination`."""
        flat, out = source.detach().view(-1), destination.detach().view(-1)
        longest = max(numel for _, numel in ranges)
        chunk_numel = max(1, self.chunk_numel // self.size)
        for begin, _ in partition.chunks(longest, chunk_numel):
            # The same section of every rank's range; some ranges end earlier.
            sections = [
                (offset + min(begin, numel), max(0, min(chunk_numel, numel - begin))) for offset, numel in ranges
            ]
            own = self._own_part(flat, sections)
            out[begin : begin + own.numel()] = own

    def _own_part(self, flat: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
        self.log[LOG_ALGORITHM] = algorithms.PARTS
        received, result = self._take_memory(ranges[self.rank][1])
        self.transport.send_ranges(flat, ranges, received)
        self.combine(received.unbind(), result)
        return result

    def _gather_all(self, flat: torch.Tensor) -> None:
        self.log[LOG_ALGORITHM] = algorithms.WHOLE_TO_ALL
        numel = flat.numel()
        received, result = self._take_memory(numel)
        ranges = [(rank * numel, numel) for rank in range(self.size)]
        self.transport.allgather_ranges(flat, received.view(-1), ranges)
        self.combine(received.unbind(), result)
        buffers.overwrite(flat, result)

    def _take_memory(self, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return host memory for the vectors of all ranks, and for their combination."""
        memory = self.scratch.take(numel * (self.size + 1), self.dtype)
        return memory[: numel * self.size].view(self.size, numel), memory[numel * self.size :]
