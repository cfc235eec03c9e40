"""The collectives over NCCL: its functions with their addresses, lengths and roots.

NCCL knows equal parts only. What is uneven goes as several operations that are begun together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...communicators.group import Group
from ...tensors import buffers, partition
from ..mpi_messages import broadcast_header, check_part_sizes, destination_for, row_counts, rows_of
from .nccl_group import NcclGroup
from .nccl_library import BYTE, DTYPES, OPS, NcclCommunicator
from .recipes import flat, recipe


class NcclReduction:
    """Reductions of one dtype and operation on one group."""

    def __init__(self, end: NcclGroup, dtype: torch.dtype, op: str) -> None:
        self.end, self.rank, self.size = end, end.rank, end.size
        self.carrier, nccl_op, self.encode, self.decode = recipe(dtype, op, end.size)
        self._type, self._op = DTYPES[self.carrier], OPS[nccl_op]

    def allreduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the result, in place."""
        if buffer.numel():
            communicator, stream = self.end.ready(buffer)
            values, sent = self._outgoing(buffer)
            address = sent.data_ptr()
            communicator.run("ncclAllReduce", address, address, sent.numel(), self._type, self._op, stream=stream)
            self._put(values, sent)
        return buffer

    def reduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """The root gets the result in place; the others' buffers stay as they are."""
        if buffer.numel():
            communicator, stream = self.end.ready(buffer)
            values, sent = self._outgoing(buffer)
            is_root = self.rank == root
            target = sent.data_ptr() if is_root else 0
            self._reduce_to(root, communicator, stream, sent, target)
            if is_root:
                self._put(values, sent)
        return buffer

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Split dim 0 of `source` evenly and give each rank the reduced rows that are its."""
        num_rows, _ = rows_of(source)
        spans = partition.rows(num_rows, self.size)
        destination = destination_for(source, spans[self.rank][1], destination)
        if source.numel():
            communicator, stream = self.end.ready(source)
            _, sent = self._outgoing(source)
            values = flat(destination)
            got = values if self.encode is None else torch.empty(values.shape, dtype=self.carrier, device=values.device)
            self._scatter_sums(communicator, stream, sent, got, spans, num_rows)
            self._put(values, got)
        return destination

    def _scatter_sums(
        self,
        communicator: NcclCommunicator,
        stream: int,
        sent: torch.Tensor,
        got: torch.Tensor,
        spans: Sequence[tuple[int, int]],
        num_rows: int,
    ) -> None:
        if num_rows % self.size == 0:
            address, target = sent.data_ptr(), got.data_ptr()
            communicator.run("ncclReduceScatter", address, target, got.numel(), self._type, self._op, stream=stream)
            return
        row_numel = sent.numel() // num_rows
        with communicator.group():  # NCCL knows equal parts only: one reduction to each owner, all at once
            for owner, (first, count) in enumerate(spans):
                if count:
                    part = sent[first * row_numel : (first + count) * row_numel]
                    target = got.data_ptr() if owner == self.rank else 0
                    self._reduce_to(owner, communicator, stream, part, target)

    def _reduce_to(
        self, root: int, communicator: NcclCommunicator, stream: int, sent: torch.Tensor, target: int
    ) -> None:
        arguments = sent.data_ptr(), target, sent.numel(), self._type, self._op, root
        communicator.run("ncclReduce", *arguments, stream=stream)

    def _outgoing(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of a tensor, and what of them NCCL is given, which is the same memory where they go as is."""
        values = flat(buffer)
        return values, values if self.encode is None else self.encode(values)

    def _put(self, values: torch.Tensor, got: torch.Tensor) -> None:
        """The result, where it belongs."""
        if self.decode is not None:
            with torch.inference_mode(got.is_inference()):
                got = self.decode(got)
        if got is not values:
            buffers.overwrite(values, got)


class NcclMovement:
    """Verbs that move bytes and compute nothing. How many rows there are goes by MPI, the rows by NCCL."""

    def __init__(self, group: Group, end: NcclGroup) -> None:
        self.group, self.rank, self.size, self._end = group, group.rank, group.size, end

    def broadcast(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the root's values, in place."""
        if buffer.numel():
            communicator, stream = self._end.ready(buffer)
            address = buffer.data_ptr()
            communicator.run("ncclBroadcast", address, address, buffer.nbytes, BYTE, root, stream=stream)
        return buffer

    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Everybody's rows in rank order, to everybody."""
        rows = row_counts(self.group, source)
        destination = destination_for(source, sum(rows), destination)
        if not destination.nbytes:
            return destination
        communicator, stream = self._end.ready(source)
        address, target = source.data_ptr(), destination.data_ptr()
        if min(rows) == max(rows):
            communicator.run("ncclAllGather", address, target, source.nbytes, BYTE, stream=stream)
            return destination
        with communicator.group():  # NCCL knows equal parts only: one broadcast of each, all at once
            row_bytes = rows_of(source)[1] * source.element_size()
            for origin, num_bytes in enumerate(count * row_bytes for count in rows):
                if num_bytes:
                    communicator.run("ncclBroadcast", address, target, num_bytes, BYTE, origin, stream=stream)
                target += num_bytes
        return destination

    def gather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor | None:
        """Everybody's rows in rank order, to the root."""
        rows = row_counts(self.group, source)
        line = self._end.ready(source)
        if self.rank != root:
            self._exchange(line, {root: source}, {})
            return None
        destination = destination_for(source, sum(rows), destination)
        parts = dict(enumerate(destination.detach().split_with_sizes(rows)))
        own = parts.pop(root)
        buffers.overwrite(own, source.view(own.shape))
        self._exchange(line, {}, parts)
        return destination

    def scatter(self, source: torch.Tensor | None, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """The root's rows, split evenly: each rank gets its part, on its GPU."""
        source = source if self.rank == root else None  # what another rank passes is of no concern
        shape, dtype = broadcast_header(self.group, source, root)
        counts = [num_rows for _, num_rows in partition.rows(shape[0], self.size)]
        like = torch.empty((0, *shape[1:]), dtype=dtype, device=self._end.device) if source is None else source
        destination = destination_for(like, counts[self.rank], destination)
        line = self._end.ready(destination)
        if source is None:
            self._exchange(line, {}, {root: destination})
            return destination
        parts = dict(enumerate(source.view(shape).split_with_sizes(counts)))
        buffers.overwrite(destination, parts.pop(root))
        self._exchange(line, parts, {})
        return destination

    def alltoall(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Part j of everybody's rows goes to rank j."""
        num_rows, _ = rows_of(source)
        sent = [count for _, count in partition.rows(num_rows, self.size)]
        received = [partition.part_of(count, self.size, self.rank)[1] for count in row_counts(self.group, source)]
        destination = destination_for(source, sum(received), destination)
        outgoing = source.view(num_rows, *source.shape[1:]).split_with_sizes(sent)
        incoming = destination.detach().split_with_sizes(received)
        self._swap(outgoing, incoming)
        return destination

    def exchange_parts(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], root: int) -> None:
        """Part j of `sources` goes to rank j; part j of `destinations` is filled by it."""
        check_part_sizes(self.group, sources, destinations)
        self._swap(sources, destinations)

    def _swap(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        line = self._end.ready(outgoing[self.rank])
        sends, receives = dict(enumerate(outgoing)), dict(enumerate(incoming))
        buffers.overwrite(receives.pop(self.rank), sends.pop(self.rank))
        self._exchange(line, sends, receives)

    def _exchange(
        self, line: tuple[NcclCommunicator, int], sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
    ) -> None:
        """Messages to and from ranks, all at once. Empty ones are none, at both ends."""
        communicator, stream = line
        with communicator.group():
            for name, messages in (("ncclRecv", receives), ("ncclSend", sends)):
                for peer, tensor in messages.items():
                    if tensor.nbytes:
                        communicator.run(name, tensor.data_ptr(), tensor.nbytes, BYTE, peer, stream=stream)
