"""The backend that every rank has: the collectives of the MPI library.

Broadcast, gather, scatter, alltoall and allgather move bytes. The MPI library computes a reduction if every order of
addition gives the same bits; other reductions exchange their parts through MPI and combine them in rank order. Messages
longer than MPI's 32-bit counts are sent in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch

from ..collective_specs import SPECS
from ..communicators import algorithms
from ..communicators.group import Group
from ..config import Config
from ..shared_memory.memory_layout import LogFields
from ..tensors import buffers, dtypes, partition, streams
from ..tensors.operation_specs import OperationSpec
from ..tensors.writable import is_writable
from . import range_reduction
from .base import Backend, Operation, collectives_of
from .compared_calls import with_comparison
from .comparing import compared
from .job_facts import JobFacts
from .mpi_messages import (
    PARTS_TAG,
    Range,
    broadcast_header,
    check_part_sizes,
    counts_and_offsets,
    destination_for,
    exchange,
    messages,
    row_counts,
    rows_of,
)
from .range_reduction import RangeReduction
from .rank_order import combiner, divide
from .shm import SharedMemoryBackend

# Up to this many bytes in all, every rank gathers all vectors and combines them: one round instead of two.
_GATHER_ALL_BYTES = 16 << 10


class MPIBackend(Backend):
    """Collectives of the MPI library, on host memory; a CUDA-aware library also moves device memory."""

    name = "mpi"
    device_types = ("cpu", "cuda")
    announces = True
    enqueues = False

    def __init__(
        self,
        config: Config,
        *,
        is_cuda_aware: bool = False,
        problem: str = "",
        shared: SharedMemoryBackend | None = None,
    ) -> None:
        """Create the backend; `shared`: in whose memory the ranks of a host compare their calls."""
        self.config, self.is_cuda_aware, self.problem, self.shared = config, is_cuda_aware, problem, shared

    @classmethod
    def make(cls, job: JobFacts) -> MPIBackend:
        return cls(
            job.config,
            is_cuda_aware=job.is_cuda_aware,
            problem=job.problem_of_mpi,
            shared=job.backend(SharedMemoryBackend),
        )

    @cached_property
    def collectives(self) -> frozenset[str]:
        """Those of its classes, and messages."""
        return collectives_of(OrderedReduction, MPIMovement).union(
            row.name for row in SPECS.values() if row.kind == "message"
        )

    def takes(self, device_type: str, collective: str) -> bool:
        """Accept host memory; device memory if the library is CUDA-aware and the collective does not compute."""
        return device_type == "cpu" or (device_type == "cuda" and self.is_cuda_aware and not SPECS[collective].reduces)

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Accept every collective of an MPI job, and messages."""
        return None if SPECS[collective].kind == "message" else self.problem or None

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        return compared(self._bind(group, collective, dtype, op), group, collective, dtype, op, self.shared)

    def _bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        if not SPECS[collective].reduces:
            longer = getattr(MPIMovement(group, self.config.message_bytes), collective)
            # The tensors of a CUDA-aware library may be on a device.
            if self.is_cuda_aware:
                return Operation(longer)
            return with_comparison(group, collective, dtype, op, longer, self.config.message_bytes)
        assert dtype is not None and op is not None
        reduction: RangeReduction
        if dtypes.may_use_mpi(dtype, op, group.size):
            reduction = NativeReduction(group, dtype, op, self.config)
        else:
            reduction = OrderedReduction(group, dtype, op, self.config)
        return range_reduction.operation(group, reduction, collective)


class NativeReduction:
    """Reductions that the MPI library computes."""

    def __init__(self, group: Group, dtype: torch.dtype, op: str, config: Config) -> None:
        MPI = group.context.MPI
        name, spec = dtypes.info(dtype).mpi_name, dtypes.form(op, dtype)
        assert name is not None
        self.MPI, self.comm, self.rank, self.size = MPI, group.comm, group.rank, group.size
        self.type, self.op = getattr(MPI, name), getattr(MPI, spec.mpi_name)
        self.in_place, self.fromaddress = MPI.IN_PLACE, MPI.buffer.fromaddress
        # MPI_Reduce of MPICH 4.0.3 crashes with IN_PLACE on a root other than 0 (1000 floats); 4.1.3 does not.
        vendor, version = MPI.get_vendor()
        self.can_reduce_in_place = vendor != "MPICH" or version[:2] != (4, 0)
        self.itemsize = dtype.itemsize
        self.finish = _finish_for(spec, group.size)
        # Chunks that stay in the cache inside the library, and are divided while they are there.
        self.chunk_numel = max(1, min(config.pipeline_bytes, config.message_bytes) // self.itemsize)

    def allreduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        numel = buffer.numel()
        if numel <= self.chunk_numel:
            memory = (self.fromaddress(buffer.data_ptr(), numel * self.itemsize), numel, self.type)
            self.comm.Allreduce(self.in_place, memory, self.op)
            if self.finish is not None:
                self.finish(buffer)
        else:
            flat = buffer.detach().view(-1)
            for begin, count in partition.chunks(numel, self.chunk_numel):
                self.allreduce(flat[begin : begin + count], None, root)
        return buffer

    def reduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        flat = buffer.detach().view(-1)
        for begin, count in partition.chunks(flat.numel(), self.chunk_numel):
            chunk = flat[begin : begin + count]
            memory = (buffers.as_bytes(self.MPI, chunk), count, self.type)
            if self.rank == root:
                source: Any = self.in_place
                if not self.can_reduce_in_place:
                    copied = chunk.clone()
                    source = (buffers.as_bytes(self.MPI, copied), count, self.type)
                self.comm.Reduce(source, memory, self.op, root)
                if self.finish is not None:
                    self.finish(chunk)
            else:
                self.comm.Reduce(memory, None, self.op, root)
        return buffer

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor, ranges: Sequence[Range]) -> None:
        flat, out = source.detach().view(-1), destination.detach().view(-1)
        if flat.numel() <= self.chunk_numel:
            counts = [numel for _, numel in ranges]
            self.comm.Reduce_scatter(
                (buffers.as_bytes(self.MPI, flat), flat.numel(), self.type),
                (buffers.as_bytes(self.MPI, out), out.numel(), self.type),
                counts,
                self.op,
            )
            if self.finish is not None:
                self.finish(out)
            return
        for owner, (offset, numel) in enumerate(ranges):  # too long for one count: a reduce to each owner
            for begin, count in partition.chunks(numel, self.chunk_numel):
                chunk = flat[offset + begin : offset + begin + count]
                if owner == self.rank:
                    chunk = out[begin : begin + count].copy_(chunk)
                self.reduce(chunk, None, owner)


def _finish_for(spec: OperationSpec, size: int) -> Callable[[torch.Tensor], None] | None:
    """Return the operation that completes MPI's result, if one is needed."""
    if spec.finish == "divide":
        return partial(divide, size=size)
    if size == 1 and spec.prepare == "truth":  # MPI returns the operand unchanged: 7 instead of 1
        return lambda result: buffers.overwrite(result, result != 0)
    return None


class OrderedReduction:
    """Reductions in rank order, whose bytes the collectives of MPI move.

    Each rank receives its part of every vector (alltoall), combines the parts, and sends the result to all ranks
    (allgather): 2 (p-1)/p of the payload per rank, as in a ring allreduce.
    """

    def __init__(self, group: Group, dtype: torch.dtype, op: str, config: Config) -> None:
        self.MPI, self.comm, self.rank, self.size = group.context.MPI, group.comm, group.rank, group.size
        self.log = group.call_log.log_fields
        self.dtype, self.itemsize = dtype, dtype.itemsize
        self.combine = combiner(dtype, op)
        self.chunk_numel = max(1, config.pipeline_bytes // self.itemsize)
        self.message_bytes = config.message_bytes
        self.scratch = buffers.Scratch()

    def allreduce(self, buffer: torch.Tensor, _: None, root: int) -> torch.Tensor:
        flat = buffer.detach().view(-1)
        if flat.numel() * self.itemsize * self.size <= _GATHER_ALL_BYTES:
            self._gather_all(flat)
            return buffer
        for begin, numel in partition.chunks(flat.numel(), self.chunk_numel):
            chunk = flat[begin : begin + numel]
            ranges = partition.even_partition(numel, self.size)
            self._allgather(self._own_part(chunk, ranges), chunk, ranges)
        return buffer

    def reduce(self, buffer: torch.Tensor, _: None, root: int) -> torch.Tensor:
        flat = buffer.detach().view(-1)
        for begin, numel in partition.chunks(flat.numel(), self.chunk_numel):
            chunk = flat[begin : begin + numel]
            ranges = partition.even_partition(numel, self.size)
            own = self._bytes_of(self._own_part(chunk, ranges))
            self.comm.Gatherv(own, self._parts_of(chunk, ranges) if self.rank == root else None, root)
        return buffer

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor, ranges: Sequence[Range]) -> None:
        flat, out = source.detach().view(-1), destination.detach().view(-1)
        longest = max(numel for _, numel in ranges)
        chunk_numel = max(1, self.chunk_numel // self.size)
        for begin, _ in partition.chunks(longest, chunk_numel):
            # The same section of every rank's range; some ranges end earlier.
            sections = [
                (offset + min(begin, numel), max(0, min(chunk_numel, numel - begin))) for offset, numel in ranges
            ]
            if flat.nbytes <= self.message_bytes:
                own = self._own_part(flat, sections)
            else:  # MPI's offsets have 32 bits
                lengths = [numel for _, numel in sections]
                packed = torch.cat([flat[offset : offset + numel] for offset, numel in sections])
                own = self._own_part(packed, list(zip(accumulate(lengths, initial=0), lengths, strict=False)))
            out[begin : begin + own.numel()] = own

    def _own_part(self, flat: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
        self.log[LogFields.algorithm] = algorithms.PARTS
        received, result = self._take_memory(ranges[self.rank][1])
        rows = partition.even_partition(received.numel(), self.size)
        self.comm.Alltoallv(self._parts_of(flat, ranges), self._parts_of(received, rows))
        self.combine(received.unbind(), result)
        return result

    def _gather_all(self, flat: torch.Tensor) -> None:
        self.log[LogFields.algorithm] = algorithms.WHOLE_TO_ALL
        received, result = self._take_memory(flat.numel())
        self._allgather(flat, received, partition.even_partition(received.numel(), self.size))
        self.combine(received.unbind(), result)
        buffers.overwrite(flat, result)

    def _take_memory(self, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return host memory for the vectors of all ranks, and for their combination."""
        memory = self.scratch.take(numel * (self.size + 1), self.dtype)
        return memory[: numel * self.size].view(self.size, numel), memory[numel * self.size :]

    def _allgather(self, own: torch.Tensor, target: torch.Tensor, ranges: Sequence[Range]) -> None:
        """Write the `own` tensor of each rank to its range of `target` on all ranks."""
        self.comm.Allgatherv(self._bytes_of(own), self._parts_of(target, ranges))

    def _bytes_of(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return buffers.as_bytes(self.MPI, tensor), self.MPI.BYTE

    def _parts_of(self, tensor: torch.Tensor, ranges: Sequence[Range]) -> tuple[Any, ...]:
        counts = [numel * self.itemsize for _, numel in ranges]
        offsets = [begin * self.itemsize for begin, _ in ranges]
        return buffers.as_bytes(self.MPI, tensor), counts, offsets, self.MPI.BYTE


def are_equal(rows: Sequence[int]) -> bool:
    """Return whether all ranks have as many rows, so that MPI's simpler collectives can move them.

    >>> are_equal([3, 3]), are_equal([3, 4])
    (True, False)
    """
    return len(set(rows)) == 1


class MPIMovement:
    """Collectives that move bytes and compute nothing."""

    def __init__(self, group: Group, message_bytes: int) -> None:
        self.group, self.message_bytes = group, message_bytes
        self.MPI, self.comm, self.rank, self.size = group.context.MPI, group.comm, group.rank, group.size

    def barrier(self, source: Any, destination: Any, root: int) -> None:
        self.comm.Barrier()

    def broadcast(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        # In shared memory, MPICH writes to the buffer of the root too.
        source = buffer.clone() if self.rank == root and not is_writable(buffer) else buffer
        for message in self._messages(source):
            self.comm.Bcast((message, self.MPI.BYTE), root)
        return buffer

    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        rows, row_bytes = self._rows(source)
        destination = destination_for(source, sum(rows), destination)
        counts, offsets = counts_and_offsets([count * row_bytes for count in rows])
        if sum(counts) <= self.message_bytes:
            self.comm.Allgatherv(self._memory(source), self._memory(destination, counts, offsets))
            return destination
        for rank, part in enumerate(destination.split_with_sizes(rows)):
            if rank == self.rank:
                buffers.overwrite(part, source)
                streams.settle(part)  # MPI reads device memory without regard to streams
            self.broadcast(part, None, rank)
        return destination

    def gather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor | None:
        rows, row_bytes = self._rows(source)
        if self.rank == root:
            destination = destination_for(source, sum(rows), destination)
        counts, offsets = counts_and_offsets([count * row_bytes for count in rows])
        if sum(counts) <= self.message_bytes:
            parts = () if are_equal(rows) else (counts, offsets)
            target = self._memory(destination, *parts) if self.rank == root and destination is not None else None
            (self.comm.Gatherv if parts else self.comm.Gather)(self._memory(source), target, root)
        elif self.rank != root:
            self._send(source, root)
        else:
            assert destination is not None
            for rank, part in enumerate(destination.split_with_sizes(rows)):
                if rank == root:
                    buffers.overwrite(part, source)
                else:
                    self._receive(part, rank)
        return destination if self.rank == root else None

    def scatter(self, source: torch.Tensor | None, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        source = source if self.rank == root else None  # the tensors of other ranks are ignored
        shape, dtype = broadcast_header(self.group, source, root)
        rows = [num_rows for _, num_rows in partition.even_partition(shape[0], self.size)]
        like = torch.empty((0, *shape[1:]), dtype=dtype, device="cpu") if source is None else source
        destination = destination_for(like, rows[self.rank], destination)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        has_frame = self.group.scattered[0] == self.group.call_log.seq  # machine code then sends a message to each rank
        if shape[0] * row_bytes <= self.message_bytes and not has_frame:
            message = None
            if source is not None:
                counts, offsets = counts_and_offsets([count * row_bytes for count in rows])
                message = (buffers.as_bytes(self.MPI, source), counts, offsets, self.MPI.BYTE)
            self.comm.Scatterv(message, (buffers.as_bytes(self.MPI, destination), self.MPI.BYTE), root)
        elif source is None:
            self._receive(destination, root)
        else:
            for rank, part in enumerate(source.reshape(shape).split_with_sizes(rows)):
                if rank == root:
                    buffers.overwrite(destination, part)
                else:
                    self._send(part, rank)
        return destination

    def alltoall(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        num_rows, row_numel = rows_of(source)
        row_bytes = row_numel * source.element_size()
        sent = [count for _, count in partition.even_partition(num_rows, self.size)]
        all_rows = row_counts(self.group, source)
        received = [partition.part_of(count, self.size, self.rank)[1] for count in all_rows]
        destination = destination_for(source, sum(received), destination)
        # The most that any rank sends or receives: rank 0 receives no fewer rows than the others.
        most_rows = max(*all_rows, sum(partition.part_of(count, self.size, 0)[1] for count in all_rows))
        if most_rows * row_bytes <= self.message_bytes:
            if are_equal(all_rows) and num_rows % self.size == 0:
                self.comm.Alltoall(self._memory(source), self._memory(destination))
            else:
                outgoing, incoming = (counts_and_offsets([n * row_bytes for n in rows]) for rows in (sent, received))
                self.comm.Alltoallv(self._memory(source, *outgoing), self._memory(destination, *incoming))
            return destination
        self._exchange(
            source.reshape(num_rows, row_numel).split_with_sizes(sent),
            destination.view(sum(received), row_numel).split_with_sizes(received),
        )
        return destination

    def exchange_parts(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], root: int) -> None:
        check_part_sizes(self.group, sources, destinations)
        self._exchange(sources, destinations)

    def _exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        self.group.call_log.log_fields[LogFields.algorithm] = algorithms.DIRECT
        own = incoming[self.rank]  # of as many elements as the other one, but perhaps of another shape
        buffers.overwrite(own, outgoing[self.rank].view(own.shape))
        others = [(self.rank + shift) % self.size for shift in range(1, self.size)]
        received = [(rank, incoming[rank]) for rank in reversed(others)]
        exchange(self.group, received, [(rank, outgoing[rank]) for rank in others], self.message_bytes)

    def _rows(self, source: torch.Tensor) -> tuple[list[int], int]:
        return row_counts(self.group, source), rows_of(source)[1] * source.element_size()

    def _memory(self, tensor: torch.Tensor, *parts: list[int]) -> tuple[Any, ...]:
        """Return the memory of a tensor as mpi4py takes it; `parts`: counts and offsets, if they are not equal."""
        return buffers.as_bytes(self.MPI, tensor), *parts, self.MPI.BYTE

    def _messages(self, tensor: torch.Tensor) -> list[Any]:
        return messages(self.MPI, tensor, self.message_bytes)

    def _send(self, tensor: torch.Tensor, target: int) -> None:
        for message in self._messages(tensor):
            self.comm.Send((message, self.MPI.BYTE), target, PARTS_TAG)

    def _receive(self, tensor: torch.Tensor, origin: int) -> None:
        for message in self._messages(tensor):
            self.comm.Recv((message, self.MPI.BYTE), origin, PARTS_TAG)
