"""Reductions that add in rank order, over MPI's data movement.

An MPI library picks its allreduce algorithm by message size, and each algorithm adds in an order of its own: the
same gradient summed alone or inside a bucket may differ in its last bits, and 16-bit floats are not in MPI at all. Here
every element is computed once, by one rank, as ((r0 + r1) + r2) + ..., in an accumulator of at least 32 bits, rounded
once and then passed on. The bits depend on the values and the rank order, on nothing else.

The bytes sent are those of a ring allreduce, 2 (p-1)/p of the payload per rank: each rank receives its part of
everybody's vector (alltoall), combines, and hands its part to everybody (allgather).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..tensors import buffers, dtypes, partition

# Up to this many bytes in all, everybody fetches everything and computes all of it: one round instead of two.
_GATHER_ALL_BYTES = 16 << 10


def _multiply(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """Product, by its definition: torch's own complex product fuses roundings in whole vectors but not at their ends,
    so that the bits of an element would depend on where in the buffer it is.
    """
    if not a.is_complex():
        torch.mul(a, b, out=out)
        return
    real = a.real * b.real - a.imag * b.imag
    imaginary = a.real * b.imag + a.imag * b.real
    torch.complex(real, imaginary, out=out)


_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": _multiply,
    "min": torch.minimum,
    "max": torch.maximum,
}


def combine(parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
    """Combine `parts` in their order into `out`, which may be none of them.

    >>> result = torch.empty(2)
    >>> combine([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])], "avg", result)
    >>> result
    tensor([2., 4.])
    """
    if out.dtype is torch.uint16:  # torch does not compute on it, and sums that wrap around have the same bits signed
        out, parts = out.view(torch.int16), [part.view(torch.int16) for part in parts]
    if out.is_complex() and op in ("sum", "avg"):
        # Part by part: torch's complex sum multiplies by (1+0j) first, which makes NaN of an infinite part.
        out, parts = torch.view_as_real(out), [torch.view_as_real(part) for part in parts]
    accumulator_dtype = dtypes.info(out.dtype).accumulator
    assert accumulator_dtype is not None
    step = _COMBINE[op]
    accumulator = out if accumulator_dtype is out.dtype else torch.empty_like(out, dtype=accumulator_dtype)
    accumulator.copy_(parts[0])
    for part in parts[1:]:
        step(accumulator, part.to(accumulator_dtype), out=accumulator)
    if op == "avg":
        accumulator.div_(len(parts))
    if accumulator is not out:
        out.copy_(accumulator)


class OrderedReduction:
    """Rank-ordered reductions of one dtype and operation on one group."""

    def __init__(self, group: Any, dtype: torch.dtype, op: str, *, pipeline_bytes: int) -> None:
        self.MPI, self.comm = group.context.MPI, group.comm
        self.rank, self.size = group.rank, group.size
        self.dtype, self.op = dtype, op
        self.itemsize = dtype.itemsize
        self.piece_numel = max(1, pipeline_bytes // self.itemsize)
        self.scratch = buffers.Scratch()
        self.is_all_mpi = False

    def allreduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the result, in place."""
        flat = buffer.view(-1)
        if flat.numel() * self.itemsize * self.size <= _GATHER_ALL_BYTES:
            self._gather_all(flat)
            return buffer
        for begin, numel in partition.chunks(flat.numel(), self.piece_numel):
            piece = flat[begin : begin + numel]
            spans = partition.even_partition(numel, self.size)
            mine = self._my_part(piece, spans)
            counts, offsets = self._in_bytes(spans)
            own_begin, own_numel = spans[self.rank]
            piece[own_begin : own_begin + own_numel] = mine
            self.comm.Allgatherv(self.MPI.IN_PLACE, (buffers.as_bytes(self.MPI, piece), counts, offsets, self.MPI.BYTE))
        return buffer

    def reduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """The root gets the result in place; the others' buffers stay as they are."""
        MPI = self.MPI
        flat = buffer.view(-1)
        for begin, numel in partition.chunks(flat.numel(), self.piece_numel):
            piece = flat[begin : begin + numel]
            spans = partition.even_partition(numel, self.size)
            mine = self._my_part(piece, spans)
            counts, offsets = self._in_bytes(spans)
            target = (buffers.as_bytes(MPI, piece), counts, offsets, MPI.BYTE) if self.rank == root else None
            self.comm.Gatherv((buffers.as_bytes(MPI, mine), MPI.BYTE), target, root=root)
        return buffer

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Each rank gets the result of its span of the flat `source`; nobody else's memory is written."""
        flat, out = source.view(-1), destination.view(-1)
        longest = max(numel for _, numel in spans)
        piece_numel = max(1, self.piece_numel // self.size)
        for begin, _ in partition.chunks(longest, piece_numel):
            # The same stretch of every rank's span: some ranks' spans end earlier.
            pieces = [(offset + min(begin, numel), max(0, min(piece_numel, numel - begin))) for offset, numel in spans]
            mine = self._my_part(flat, pieces)
            out[begin : begin + mine.numel()] = mine

    def _my_part(self, flat: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Send everybody their span of my vector, and combine what I get of mine."""
        MPI = self.MPI
        numel = spans[self.rank][1]
        received = self.scratch.take(numel * (self.size + 1), self.dtype)
        parts, result = received[: numel * self.size], received[numel * self.size :]
        part_bytes = numel * self.itemsize
        counts, offsets = self._in_bytes(spans)
        self.comm.Alltoallv(
            (buffers.as_bytes(MPI, flat), counts, offsets, MPI.BYTE),
            (
                buffers.as_bytes(MPI, parts),
                [part_bytes] * self.size,
                [part_bytes * rank for rank in range(self.size)],
                MPI.BYTE,
            ),
        )
        combine(parts.view(self.size, numel).unbind(), self.op, result)
        return result

    def _gather_all(self, flat: torch.Tensor) -> None:
        MPI = self.MPI
        everything = self.scratch.take(flat.numel() * self.size, self.dtype)
        self.comm.Allgather((buffers.as_bytes(MPI, flat), MPI.BYTE), (buffers.as_bytes(MPI, everything), MPI.BYTE))
        combine(everything.view(self.size, -1).unbind(), self.op, flat)

    def _in_bytes(self, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        return [numel * self.itemsize for _, numel in spans], [begin * self.itemsize for begin, _ in spans]
