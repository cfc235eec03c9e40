"""The backend every rank has: the MPI library's own collectives.

Movement (broadcast, gathers, alltoall) goes as bytes. A reduction goes to MPI where any order of adding gives the same
bits, and otherwise to :mod:`torchmpi.backends.rank_order`. Messages longer than MPI's 32-bit counts go in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..config import Config
from ..errors import MismatchError
from ..tensors import buffers, dtypes, partition
from .base import Operation
from .rank_order import OrderedReduction

_MPI_OPS = {
    "sum": "SUM", "avg": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX",
    "band": "BAND", "bor": "BOR", "bxor": "BXOR", "land": "LAND", "lor": "LOR",
}  # fmt: skip
_BOOL_OPS = {"min": "LAND", "max": "LOR", "band": "LAND", "bor": "LOR", "bxor": "LXOR", "land": "LAND", "lor": "LOR"}
_REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
_PIECE_TAG = 1


class MPIBackend:
    """Collectives of the MPI library, on memory of the host or, where it is CUDA-aware, of the device."""

    name = "mpi"
    announces = False
    enqueues = False

    def __init__(self, config: Config, *, is_cuda_aware: bool = False) -> None:
        self.config, self.is_cuda_aware = config, is_cuda_aware

    def takes(self, device_type: str) -> bool:
        """Host memory always; device memory if the library says so."""
        return device_type == "cpu" or (device_type == "cuda" and self.is_cuda_aware)

    def why_not(self, collective: str, device_type: str, group: Any = None) -> str | None:
        """It has every verb; CUDA tensors are staged if need be."""
        if device_type == "cuda" and not torch.cuda.is_available():
            return "this torch or this host has no CUDA"
        return None

    def bind(self, group: Any, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a verb on a group."""
        if collective not in _REDUCTIONS:
            operation: Operation = getattr(Movement(group, self.config.message_bytes), collective)
            return operation
        assert dtype is not None and op is not None
        if dtypes.may_use_mpi(dtype, op, group.size):
            reduction: Any = NativeReduction(group, dtype, op, self.config)
        else:
            reduction = OrderedReduction(group, dtype, op, pipeline_bytes=self.config.pipeline_bytes)
        if collective == "reduce_scatter":
            return ReduceScatter(group, reduction).run
        bound: Operation = getattr(reduction, collective)
        return bound if reduction.is_all_mpi else _outside_autograd(bound)


def _outside_autograd(operation: Operation) -> Operation:
    """What torch computes in place here is no part of any graph, and allowed on every tensor."""

    def run(buffer: torch.Tensor, destination: Any, root: int) -> torch.Tensor:
        with torch.inference_mode(buffer.is_inference()):
            operation(buffer.detach(), destination, root)
        return buffer

    return run


class NativeReduction:
    """Reductions that MPI does itself."""

    def __init__(self, group: Any, dtype: torch.dtype, op: str, config: Config) -> None:
        MPI = group.context.MPI
        name = dtypes.info(dtype).mpi_name
        assert name is not None
        self.MPI, self.comm, self.rank, self.size = MPI, group.comm, group.rank, group.size
        # A view may have made a bool of any byte: only the logical operations take 2 and 1 for equal.
        names = _BOOL_OPS if dtype is torch.bool else _MPI_OPS
        self.type, self.op = getattr(MPI, name), getattr(MPI, names[op])
        self.in_place, self.fromaddress = MPI.IN_PLACE, MPI.buffer.fromaddress
        self.itemsize = dtype.itemsize
        self.finish = _finish_for(op, group.size, is_bool=dtype is torch.bool)
        self.is_all_mpi = self.finish is None
        # Pieces that stay in the cache on the way through the library, and are divided while they are there.
        self.piece_numel = max(1, min(config.pipeline_bytes, config.message_bytes) // self.itemsize)

    def allreduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the result, in place."""
        numel = buffer.numel()
        if numel <= self.piece_numel:
            memory = (self.fromaddress(buffer.data_ptr(), numel * self.itemsize), numel, self.type)
            self.comm.Allreduce(self.in_place, memory, self.op)
            if self.finish is not None:
                self.finish(buffer)
        else:
            flat = buffer.detach().view(-1)
            for begin, count in partition.chunks(numel, self.piece_numel):
                self.allreduce(flat[begin : begin + count], None, root)
        return buffer

    def reduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """The root gets the result in place; the others' buffers stay as they are."""
        flat = buffer.detach().view(-1)
        for begin, count in partition.chunks(flat.numel(), self.piece_numel):
            piece = flat[begin : begin + count]
            memory = (buffers.as_bytes(self.MPI, piece), count, self.type)
            if self.rank == root:
                self.comm.Reduce(self.MPI.IN_PLACE, memory, self.op, root)
                if self.finish is not None:
                    self.finish(piece)
            else:
                self.comm.Reduce(memory, None, self.op, root)
        return buffer

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Each rank gets the result of its span of the flat `source`."""
        flat, out = source.view(-1), destination.view(-1)
        if flat.numel() <= self.piece_numel:
            counts = [numel for _, numel in spans]
            self.comm.Reduce_scatter(
                (buffers.as_bytes(self.MPI, flat), flat.numel(), self.type),
                (buffers.as_bytes(self.MPI, out), out.numel(), self.type),
                counts,
                self.op,
            )
            if self.finish is not None:
                self.finish(out)
            return
        for owner, (offset, numel) in enumerate(spans):  # too long for one count: a reduce to each owner
            for begin, count in partition.chunks(numel, self.piece_numel):
                piece = flat[offset + begin : offset + begin + count]
                if owner == self.rank:
                    piece = out[begin : begin + count].copy_(piece)
                self.reduce(piece, None, owner)


def _finish_for(op: str, size: int, *, is_bool: bool) -> Callable[[torch.Tensor], Any] | None:
    """What is left to do once MPI is done, if anything."""
    if op == "avg":
        return lambda result: (torch.view_as_real(result) if result.is_complex() else result).div_(size)
    if size == 1 and (is_bool or op in ("land", "lor")):  # with nobody to combine with, MPI would hand back 7 and not 1
        return lambda result: result.copy_(result != 0)
    return None


class ReduceScatter:
    """The verb around either reduction: rows, not elements, are what is split."""

    def __init__(self, group: Any, reduction: Any) -> None:
        self.rank, self.size, self.reduction = group.rank, group.size, reduction

    def run(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Split dim 0 of `source` evenly and give each rank the reduced rows that are its."""
        rows, row_numel = rows_of(source)
        spans = partition.rows(rows, self.size)
        destination = destination_for(source, spans[self.rank][1], destination)
        spans = [(first * row_numel, num_rows * row_numel) for first, num_rows in spans]
        with torch.inference_mode(destination.is_inference()):  # or torch would not let its own operations write there
            self.reduction.reduce_scatter(source, destination, spans)
        return destination


class Movement:
    """Verbs that move bytes and compute nothing."""

    def __init__(self, group: Any, message_bytes: int) -> None:
        self.MPI, self.comm, self.rank, self.size = group.context.MPI, group.comm, group.rank, group.size
        self.message_bytes = message_bytes
        self.where = group.where

    def barrier(self, source: Any, destination: Any, root: int) -> None:
        """Return when everybody has come."""
        self.comm.Barrier()

    def broadcast(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the root's values, in place."""
        for piece in self._pieces(buffer):
            self.comm.Bcast((piece, self.MPI.BYTE), root)
        return buffer

    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Everybody's rows in rank order, to everybody."""
        rows, row_bytes = self._rows(source)
        destination = destination_for(source, int(rows.sum()), destination)
        counts, offsets = _spans(rows * row_bytes)
        if sum(counts) <= self.message_bytes:
            target = (buffers.as_bytes(self.MPI, destination), counts, offsets, self.MPI.BYTE)
            self.comm.Allgatherv((buffers.as_bytes(self.MPI, source), self.MPI.BYTE), target)
            return destination
        for rank, part in enumerate(destination.split(rows.tolist())):
            if rank == self.rank:
                part.copy_(source)
            self.broadcast(part, None, rank)
        return destination

    def gather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor | None:
        """Everybody's rows in rank order, to the root."""
        rows, row_bytes = self._rows(source)
        if self.rank == root:
            destination = destination_for(source, int(rows.sum()), destination)
        counts, offsets = _spans(rows * row_bytes)
        if sum(counts) <= self.message_bytes:
            target = None
            if self.rank == root:
                assert destination is not None
                target = (buffers.as_bytes(self.MPI, destination), counts, offsets, self.MPI.BYTE)
            self.comm.Gatherv((buffers.as_bytes(self.MPI, source), self.MPI.BYTE), target, root)
        elif self.rank != root:
            self._send(source, root)
        else:
            assert destination is not None
            for rank, part in enumerate(destination.split(rows.tolist())):
                if rank == root:
                    part.copy_(source)
                else:
                    self._receive(part, rank)
        return destination if self.rank == root else None

    def scatter(self, source: torch.Tensor | None, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """The root's rows, split evenly: each rank gets its part."""
        source = source if self.rank == root else None  # what another rank passes is of no concern
        shape, dtype = self._announce(source, root)
        spans = partition.rows(shape[0], self.size)
        like = torch.empty((0, *shape[1:]), dtype=dtype, device="cpu") if source is None else source
        destination = destination_for(like, spans[self.rank][1], destination)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        if shape[0] * row_bytes <= self.message_bytes:
            message = None
            if source is not None:
                counts, offsets = _spans(np.array([num_rows for _, num_rows in spans]) * row_bytes)
                message = (buffers.as_bytes(self.MPI, source), counts, offsets, self.MPI.BYTE)
            self.comm.Scatterv(message, (buffers.as_bytes(self.MPI, destination), self.MPI.BYTE), root)
        elif source is None:
            self._receive(destination, root)
        else:
            for rank, part in enumerate(source.reshape(shape).split([num_rows for _, num_rows in spans])):
                if rank == root:
                    destination.copy_(part)
                else:
                    self._send(part, rank)
        return destination

    def alltoall(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Part j of everybody's rows goes to rank j."""
        num_rows, row_numel = rows_of(source)
        row_bytes = row_numel * source.element_size()
        sent = np.array([count for _, count in partition.rows(num_rows, self.size)], np.int64)
        received = np.empty(self.size, np.int64)
        self.comm.Alltoall((sent, self.MPI.INT64_T), (received, self.MPI.INT64_T))
        destination = destination_for(source, int(received.sum()), destination)
        largest = int(self.comm.allreduce(max(sent.sum(), received.sum()) * row_bytes, self.MPI.MAX))
        if largest <= self.message_bytes:
            self.comm.Alltoallv(
                (buffers.as_bytes(self.MPI, source), *_spans(sent * row_bytes), self.MPI.BYTE),
                (buffers.as_bytes(self.MPI, destination), *_spans(received * row_bytes), self.MPI.BYTE),
            )
            return destination
        outgoing = source.reshape(num_rows, -1).split(sent.tolist())
        incoming = destination.view(int(received.sum()), -1).split(received.tolist())
        incoming[self.rank].copy_(outgoing[self.rank])
        for shift in range(1, self.size):
            target, origin = (self.rank + shift) % self.size, (self.rank - shift) % self.size
            requests = [
                self.comm.Isend((piece, self.MPI.BYTE), target, _PIECE_TAG) for piece in self._pieces(outgoing[target])
            ]
            self._receive(incoming[origin], origin)
            self.MPI.Request.Waitall(requests)
        return destination

    def exchange_parts(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], root: int) -> None:
        """Part j of `sources` goes to rank j; part j of `destinations` is filled by it."""
        sizes = torch.tensor([[part.nbytes for part in parts] for parts in (sources, destinations)], device="cpu")
        everybody = torch.empty((self.size, 2, self.size), dtype=torch.int64, device="cpu")
        self.comm.Allgather((sizes.numpy(), self.MPI.INT64_T), (everybody.numpy(), self.MPI.INT64_T))
        longest_part(everybody, self.where)
        destinations[self.rank].detach().copy_(sources[self.rank])
        requests = []
        for shift in range(1, self.size):
            target, origin = (self.rank + shift) % self.size, (self.rank - shift) % self.size
            for piece in self._pieces(destinations[origin]):
                requests.append(self.comm.Irecv((piece, self.MPI.BYTE), origin, _PIECE_TAG))
            for piece in self._pieces(sources[target]):
                requests.append(self.comm.Isend((piece, self.MPI.BYTE), target, _PIECE_TAG))
        self.MPI.Request.Waitall(requests)

    def _rows(self, source: torch.Tensor) -> tuple[np.ndarray, int]:
        """How many rows each rank has, and the bytes of one."""
        num_rows, row_numel = rows_of(source)
        rows = np.empty(self.size, np.int64)
        self.comm.Allgather((np.array([num_rows], np.int64), self.MPI.INT64_T), (rows, self.MPI.INT64_T))
        return rows, row_numel * source.element_size()

    def _announce(self, source: torch.Tensor | None, root: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Tell everybody the shape and dtype of what the root scatters."""
        header = None
        if self.rank == root:
            assert source is not None
            header = (tuple(source.shape) or (1,), dtypes.info(source.dtype).code)
        shape, code = self.comm.bcast(header, root)
        dtype = dtypes.from_code(code)
        assert dtype is not None
        return shape, dtype

    def _pieces(self, tensor: torch.Tensor) -> list[Any]:
        """The memory of a tensor in messages MPI can count."""
        flat = tensor.view(-1)
        piece_numel = max(1, self.message_bytes // tensor.element_size())
        return [
            buffers.as_bytes(self.MPI, flat[begin : begin + count])
            for begin, count in partition.chunks(flat.numel(), piece_numel)
        ]

    def _send(self, tensor: torch.Tensor, target: int) -> None:
        for piece in self._pieces(tensor):
            self.comm.Send((piece, self.MPI.BYTE), target, _PIECE_TAG)

    def _receive(self, tensor: torch.Tensor, origin: int) -> None:
        for piece in self._pieces(tensor):
            self.comm.Recv((piece, self.MPI.BYTE), origin, _PIECE_TAG)


def rows_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Rows along dim 0 and elements in one; a 0-dim tensor is one row of one element.

    >>> rows_of(torch.ones(3, 4)), rows_of(torch.tensor(1.0))
    ((3, 4), (1, 1))
    """
    if tensor.dim() == 0:
        return 1, 1
    return tensor.shape[0], math.prod(tensor.shape[1:])


def destination_for(source: torch.Tensor, num_rows: int, given: torch.Tensor | None) -> torch.Tensor:
    """The tensor that receives `num_rows` rows like those of `source`: the one given, if it fits, or a new one."""
    shape = (num_rows, *source.shape[1:])
    if given is None or given.shape != shape or given.dtype != source.dtype:
        return torch.empty(shape, dtype=source.dtype, device=source.device)
    return given


def longest_part(sizes: torch.Tensor, where: str) -> int:
    """Bytes of the longest part that any rank sends, or a refusal, the same on all ranks.

    `sizes[i, 0, j]` is what rank i sends to rank j, `sizes[i, 1, j]` the room that it has for what comes from there.

    >>> longest_part(torch.tensor([[[4, 8], [4, 2]], [[2, 4], [8, 4]]]), "rank 0")
    8
    """
    wrong = (sizes[:, 0] != sizes[:, 1].T).nonzero().tolist()
    if wrong:
        sender, receiver = wrong[0]
        sent, room = int(sizes[sender, 0, receiver]), int(sizes[receiver, 1, sender])
        raise MismatchError(
            f"{where}: rank {sender} of the group sends {sent} bytes to rank {receiver}, which has room for {room}. "
            "Make the sizes that ranks send the ones that the others expect."
        )
    return int(sizes[:, 0].max())


def _spans(counts: np.ndarray) -> tuple[list[int], list[int]]:
    """Counts and the offsets they add up to, as Python lists for mpi4py."""
    offsets = np.concatenate(([0], np.cumsum(counts)[:-1]))
    return counts.tolist(), offsets.tolist()
