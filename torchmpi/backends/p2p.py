"""The collectives of the backend `p2p`: by MPI point-to-point messages, for ranks on different hosts.

An MPI library adds along rings or trees, in an order that depends on the size. Here each rank owns a part of the
vector, receives that part of every other vector, and combines all of them in rank order: the bytes are those of a ring,
and the bits depend on the rank order only. :mod:`torchmpi.tensors.schedule` plans the messages; this file sends them
chunk by chunk, so that one chunk is combined while the next ones are on the network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import accumulate
from typing import Any, Protocol, TypeVar, cast

import torch

from ..collective_specs import SPECS
from ..communicators import algorithms
from ..communicators.group import Group
from ..config import Config
from ..shared_memory.memory_layout import LogFields
from ..tensors import buffers, partition, schedule
from ..tensors.schedule import Round
from . import range_reduction
from .base import Operation
from .compared_calls import with_comparison
from .mpi_messages import Range, destination_for, row_counts, rows_of
from .pipeline import ChunkBuffers
from .plan_cost import most_relayed_bytes
from .rank_order import Combiner, combiner
from .round_messages import CompiledAllreduce, CompiledPieces, Requests, RoundMessages, TensorOf, messages_of

_Method = TypeVar("_Method", bound=Callable[..., Any])
Exchange = tuple[Requests, list[torch.Tensor]]
"""The messages of an exchange, and the versions of this rank's part in rank order."""

# Up to this many bytes in all, the fewest rounds; above, the fewest bytes. The bits are the same.
SHORT_BYTES = 16 << 10
# Two ranks swap vectors of up to this size in one message each.
SWAP_BYTES = 64 << 10
# A longer broadcast goes along a chain, in chunks of the second size: every link carries the payload once.
_TREE_BYTES = 64 << 10
_CHAIN_CHUNK_BYTES = 256 << 10
_MAX_CHAIN_CHUNKS = 8  # in progress
# Chunks of a reduction: short enough that combining a chunk takes much less time than sending, long enough for full
# speed.
_CHUNK_BYTES = 1 << 20
# With many ranks, chunks are longer, so that the part of a rank is not shorter than this.
_MESSAGE_BYTES = 16 << 10


def prepare(config: Config, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
    """Prepare a collective on a group."""
    if SPECS[collective].reduces:
        assert dtype is not None and op is not None
        longer = range_reduction.operation(group, P2PReduction(group, dtype, op, config), collective).run
    else:
        longer = getattr(P2PMovement(group, config.message_bytes), collective)
    return with_comparison(group, collective, dtype, op, longer, config.message_bytes)


def chunk_bytes(size: int, most: int) -> int:
    """Return the size of the chunks of a reduction.

    >>> chunk_bytes(8, 4 << 20) >> 20, chunk_bytes(128, 4 << 20) >> 20, chunk_bytes(1024, 4 << 20) >> 20
    (1, 2, 4)
    """
    return min(max(_CHUNK_BYTES, size * _MESSAGE_BYTES), most)


class _Sender(Protocol):
    group: Group
    senders: tuple[RoundMessages, ...]


def _keeps_memory(method: _Method) -> _Method:
    """Let no call of a method follow one that has left messages, which may arrive yet; keep the memory of these."""

    @wraps(method)
    def run(self: _Sender, source: torch.Tensor, *others: Any) -> Any:
        self.group.check_messages()
        try:
            return method(self, source, *others)
        except BaseException:  # of MPI, or an interrupt
            if any(each.are_open for each in self.senders):
                self.group.give_up(self, source)
            raise

    return cast(_Method, run)


class DoublingAllgather:
    """An allgather of blocks of memory in log2 rounds; the blocks lie in cyclic rank order, this rank's own first."""

    def __init__(self, group: Group, messages: RoundMessages) -> None:
        self.messages = messages
        self.rounds = schedule.doubling(group.rank, group.size)
        self.positions = [(rank - group.rank) % group.size for rank in range(group.size)]
        """The position of the block of each rank."""

    def run(self, memory: torch.Tensor, ends: Sequence[int]) -> None:
        """Fill `memory`, which begins with the own block; `ends[i]` is the end of the block at position i."""
        for step in self.rounds:
            (sent,), (received,) = step
            first = self.positions[received.first]
            self.messages.swap(
                memory[: ends[sent.num_blocks - 1]], sent.peer,
                memory[ends[first - 1] : ends[first + received.num_blocks - 1]], received.peer,
            )  # fmt: skip


class RelayedAllreduce:
    """An allreduce in 2 log2 rounds of one message each: for vectors that are short for the number of ranks.

    Blocks are relayed to the ranks that combine them in rank order, and the results are gathered by doubling.
    """

    def __init__(self, group: Group, messages: RoundMessages, dtype: torch.dtype, combine: Combiner) -> None:
        self.rank, self.size, self.messages, self.combine = group.rank, group.size, messages, combine
        self.doubling = DoublingAllgather(group, messages)
        self.rounds = [
            (relay.target, relay.origin, torch.tensor(relay.positions, device="cpu"))
            for relay in schedule.relayed_exchange(group.rank, group.size)
        ]
        self.scratch = ChunkBuffers(dtype)

    def run(self, flat: torch.Tensor) -> None:
        numel, rank, size = flat.numel(), self.rank, self.size
        width = -(-numel // size)
        memory = self.scratch.take(0, 2 * size * width)
        blocks, moving = memory.view(2, size, width).unbind()
        # Blocks of equal length in cyclic rank order, this rank's own first; the last ones are padded.
        first = min(rank * width, numel)
        places = blocks.view(-1)
        places[: numel - first] = flat[first:]
        places[size * width - rank * width :][:first] = flat[:first]
        rows, outgoing = blocks.view(torch.uint8), moving.view(torch.uint8)  # torch cannot index every dtype
        for target, origin, positions in self.rounds:
            sent, received = outgoing[: len(positions)], self.scratch.take(1, len(positions) * width).view(torch.uint8)
            torch.index_select(rows, 0, positions, out=sent)
            self.messages.swap(sent.view(-1), target, received, origin)
            rows.index_copy_(0, positions, received.view(len(positions), -1))
        versions = [blocks[(rank - source) % size] for source in range(size)]
        gathered = moving.view(-1)
        self.combine(versions, gathered[:width])
        self.doubling.run(gathered, [width * (position + 1) for position in range(size)])
        buffers.overwrite(flat[first:], gathered[: numel - first])
        buffers.overwrite(flat[:first], gathered[size * width - rank * width :][:first])


class Messages(Protocol):
    """Messages between pairs of ranks, by any library."""

    def begin(self, step: Round, outgoing: TensorOf, incoming: TensorOf) -> Requests:
        """Begin all messages of a round with these flat tensors, and return the requests."""

    def finish(self, requests: Requests) -> None:
        """Return when all these messages have been sent or received."""


class PipelinedReduction(ABC):
    """Reductions of one dtype and operation on one group, combined in rank order."""

    def __init__(self, group: Group, messages: Messages, dtype: torch.dtype, op: str, chunk_bytes: int) -> None:
        self.rank, self.size, self.messages = group.rank, group.size, messages
        self.log = group.call_log.log_fields
        self.itemsize = dtype.itemsize
        self.chunk_numel = max(1, chunk_bytes // dtype.itemsize)
        self.combine = combiner(dtype, op)
        self.received, self.results = ChunkBuffers(dtype), ChunkBuffers(dtype)

    def allreduce(self, buffer: torch.Tensor, _: object, root: int) -> torch.Tensor:
        flat = buffer.detach().view(-1)
        if self._is_short(flat):
            self.log[LogFields.algorithm] = algorithms.WHOLE_TO_ALL
            self._gather_all(flat)
        elif self.size <= 2:  # whole vectors: as many bytes as two exchanges of halves, in one round
            self.log[LogFields.algorithm] = algorithms.SWAP
            self._pipeline(flat, self._swap_with_peer, self._combine_all)
        else:
            self.log[LogFields.algorithm] = algorithms.PARTS
            self._pipeline(flat, self._exchange_parts, self._combine_and_spread)
        return buffer

    def reduce(self, buffer: torch.Tensor, _: object, root: int) -> torch.Tensor:
        flat = buffer.detach().view(-1)
        step = schedule.collect(self.rank, self.size, root)
        if self.size <= 2 or self._is_short(flat):
            self.log[LogFields.algorithm] = algorithms.WHOLE_TO_ROOT
            self._pipeline(flat, partial(self._collect_wholes, step), self._combine_all)
        else:
            self.log[LogFields.algorithm] = algorithms.PARTS
            self._pipeline(flat, self._exchange_parts, partial(self._combine_and_collect, step))
        return buffer

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor, ranges: Sequence[Range]) -> None:
        flat, out = source.detach().view(-1), destination.detach().view(-1)
        self.log[LogFields.algorithm] = algorithms.PARTS
        section = max(1, self.chunk_numel // self.size)
        # A chunk is the same section of every rank's range; some ranges end earlier.
        chunks = [
            [(offset + min(begin, numel), max(0, min(section, numel - begin))) for offset, numel in ranges]
            for begin, _ in partition.chunks(max(numel for _, numel in ranges), section)
        ]
        begin = ranges[self.rank][0]
        ahead = self._exchange(flat, chunks[0], 0) if chunks else None
        for k, chunk in enumerate(chunks):
            current, ahead = ahead, self._exchange(flat, chunks[k + 1], k + 1) if k + 1 < len(chunks) else None
            assert current is not None
            self.messages.finish(current[0])
            offset, numel = chunk[self.rank]
            self.combine(current[1], out[offset - begin : offset - begin + numel])

    def _is_short(self, flat: torch.Tensor) -> bool:
        return bool(flat.numel() * self.itemsize * self.size <= SHORT_BYTES)

    @abstractmethod
    def _gather_all(self, flat: torch.Tensor) -> None:
        """Gather and combine all vectors on every rank: the fewest rounds."""

    def _pipeline(self, flat: torch.Tensor, begin: Callable[..., Exchange], follow: Callable[..., Requests]) -> None:
        """Exchange and combine chunk by chunk.

        `begin` starts the messages of a chunk, one chunk ahead; `follow` combines the received parts and starts the
        messages that follow.
        """
        chunks = [flat[first : first + numel] for first, numel in partition.chunks(flat.numel(), self.chunk_numel)]
        exchanges = deque(begin(chunk, k) for k, chunk in enumerate(chunks[:1]))
        following: deque[Requests] = deque()
        for k, chunk in enumerate(chunks):
            if k + 1 < len(chunks):
                exchanges.append(begin(chunks[k + 1], k + 1))
            requests, parts = exchanges.popleft()
            self.messages.finish(requests)  # the sends, too: later messages may overwrite the memory that they read
            following.append(follow(chunk, parts, k))
            if len(following) > 1:
                self.messages.finish(following.popleft())
        for requests in following:
            self.messages.finish(requests)

    # Values of `begin`.

    def _exchange_parts(self, chunk: torch.Tensor, k: int) -> Exchange:
        return self._exchange(chunk, partition.even_partition(chunk.numel(), self.size), k)

    def _exchange(self, flat: torch.Tensor, ranges: Sequence[Range], k: int) -> Exchange:
        """Send each rank its range of this rank's vector, and receive this rank's range of the other vectors."""
        parts = self._versions(flat.narrow(0, *ranges[self.rank]), k)
        requests = self.messages.begin(
            schedule.exchange(self.rank, self.size),
            lambda message: flat.narrow(0, *ranges[message.first]),
            lambda message: parts[message.peer],
        )
        return requests, parts

    def _swap_with_peer(self, chunk: torch.Tensor, k: int) -> Exchange:
        parts = self._versions(chunk, k)
        step = schedule.spread(self.rank, self.size)
        return self.messages.begin(step, lambda _: chunk, lambda message: parts[message.peer]), parts

    def _collect_wholes(self, step: Round, chunk: torch.Tensor, k: int) -> Exchange:
        parts = self._versions(chunk, k) if not step.sends else []
        return self.messages.begin(step, lambda _: chunk, lambda message: parts[message.peer]), parts

    def _versions(self, own: torch.Tensor, k: int) -> list[torch.Tensor]:
        """Return memory for every rank's version of `own`, in rank order; for this rank, `own` itself."""
        numel = own.numel()
        memory = self.received.take(k, numel * (self.size - 1))
        parts = [memory[numel * index : numel * (index + 1)] for index in range(self.size - 1)]
        return [*parts[: self.rank], own, *parts[self.rank :]]

    # Values of `follow`: combine, and return the requests of the messages that follow.

    def _combine_all(self, chunk: torch.Tensor, parts: list[torch.Tensor], k: int) -> Requests:
        if parts:
            self.combine(parts, chunk)
        return []

    def _combine_and_spread(self, chunk: torch.Tensor, parts: list[torch.Tensor], k: int) -> Requests:
        own = parts[self.rank]
        self.combine(parts, own)
        ranges = partition.even_partition(chunk.numel(), self.size)
        return self.messages.begin(
            schedule.spread(self.rank, self.size),
            lambda _: own,
            lambda message: chunk.narrow(0, *ranges[message.first]),
        )

    def _combine_and_collect(self, step: Round, chunk: torch.Tensor, parts: list[torch.Tensor], k: int) -> Requests:
        own = parts[self.rank]
        out = self.results.take(k, own.numel()) if step.sends else own
        self.combine(parts, out)
        ranges = partition.even_partition(chunk.numel(), self.size)
        return self.messages.begin(step, lambda _: out, lambda message: chunk.narrow(0, *ranges[message.first]))


class P2PReduction(PipelinedReduction):
    """Reductions over MPI's messages."""

    def __init__(self, group: Group, dtype: torch.dtype, op: str, config: Config) -> None:
        messages = messages_of(group, config.message_bytes)
        super().__init__(group, messages, dtype, op, chunk_bytes(group.size, config.pipeline_bytes))
        self.group, self.senders = group, (messages,)
        swap_bytes = config.message_bytes if group.context.sends_whole else min(config.message_bytes, SWAP_BYTES)
        self.swap_numel = min(self.chunk_numel, swap_bytes // dtype.itemsize) if group.size == 2 else 0
        self.swap = messages.swap
        self.doubling = DoublingAllgather(group, messages)
        self.relayed = RelayedAllreduce(group, messages, dtype, self.combine)
        self.relayed_bytes = most_relayed_bytes(group.size, min(_CHUNK_BYTES, config.message_bytes))
        self.compiled: CompiledAllreduce | None = None
        if isinstance(messages, CompiledPieces) and group.size > 1:
            self.compiled = CompiledAllreduce(group, messages, dtype, op, self.chunk_numel, self.received)

    reduce = _keeps_memory(PipelinedReduction.reduce)
    reduce_scatter = _keeps_memory(PipelinedReduction.reduce_scatter)

    @_keeps_memory
    def allreduce(self, buffer: torch.Tensor, _: object, root: int) -> torch.Tensor:
        """Reduce in place on all ranks; two ranks swap short vectors whole."""
        flat = buffer.detach().view(-1)
        if not self._is_short(flat) and flat.nbytes <= self.relayed_bytes:
            self.log[LogFields.algorithm] = algorithms.RELAYED
            self.relayed.run(flat)
            return buffer
        if not 0 < flat.numel() <= self.swap_numel:
            if self.compiled is None or self._is_short(flat):
                return super().allreduce(buffer, None, root)
            self.log[LogFields.algorithm] = algorithms.SWAP if self.size == 2 else algorithms.PARTS
            self.compiled.run(flat)
            return buffer
        other = self.received.take(0, flat.numel())
        self.log[LogFields.algorithm] = algorithms.SWAP
        self.swap(flat, 1 - self.rank, other, 1 - self.rank)
        self.combine((other, flat) if self.rank else (flat, other), flat)
        return buffer

    def _gather_all(self, flat: torch.Tensor) -> None:
        numel = flat.numel()
        memory = self.received.take(0, numel * self.size)
        memory[:numel] = flat
        self.doubling.run(memory, [numel * (position + 1) for position in range(self.size)])
        parts = [memory[numel * position : numel * (position + 1)] for position in self.doubling.positions]
        self.combine(parts, flat)


class P2PMovement:
    """Broadcast and allgather as messages between pairs of ranks."""

    def __init__(self, group: Group, message_bytes: int) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.log = group.call_log.log_fields
        self.messages, self.parts = RoundMessages(group, message_bytes), messages_of(group, message_bytes)
        self.senders = self.messages, self.parts
        self.doubling = DoublingAllgather(group, self.messages)
        self.scratch = ChunkBuffers(torch.uint8)

    @_keeps_memory
    def broadcast(self, buffer: torch.Tensor, _: object, root: int) -> torch.Tensor:
        flat = buffer.detach().view(-1)
        if flat.numel() * flat.element_size() > _TREE_BYTES and self.size > 2:
            self.log[LogFields.algorithm] = algorithms.CHAIN
            self._along_chain(flat, root)
        else:
            self.log[LogFields.algorithm] = algorithms.TREE
            for step in schedule.tree(self.rank, self.size, root):
                self.messages.finish(self.messages.begin(step, lambda _: flat, lambda _: flat))
        return buffer

    def _along_chain(self, flat: torch.Tensor, root: int) -> None:
        sends, receives = schedule.chain(self.rank, self.size, root)
        chunks = torch.split(flat, max(1, _CHAIN_CHUNK_BYTES // flat.element_size()))
        incoming = [self._begin(Round(receives=receives), chunk) for chunk in chunks[:_MAX_CHAIN_CHUNKS]]
        outgoing: list[Requests] = []
        for k, chunk in enumerate(chunks):
            self.messages.finish(incoming[k])
            incoming += [self._begin(Round(receives=receives), later) for later in chunks[k + _MAX_CHAIN_CHUNKS :][:1]]
            outgoing.append(self._begin(Round(sends=sends), chunk))
            if k >= _MAX_CHAIN_CHUNKS:
                self.messages.finish(outgoing[k - _MAX_CHAIN_CHUNKS])
        for requests in outgoing[-_MAX_CHAIN_CHUNKS:]:
            self.messages.finish(requests)

    def _begin(self, step: Round, chunk: torch.Tensor) -> Requests:
        return self.messages.begin(step, lambda _: chunk, lambda _: chunk)

    @_keeps_memory
    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        rows = row_counts(self.group, source)
        destination = destination_for(source, sum(rows), destination)
        parts = [part.view(-1) for part in destination.detach().split_with_sizes(rows)]
        own = source.detach().view(-1)
        if sum(rows) * rows_of(source)[1] * source.element_size() <= SHORT_BYTES:
            self.log[LogFields.algorithm] = algorithms.DOUBLING
            self._gather_by_doubling(own, parts)
            return destination
        self.log[LogFields.algorithm] = algorithms.DIRECT
        step, width = schedule.spread(self.rank, self.size), max(1, _CHUNK_BYTES // source.element_size())
        buffers.overwrite(parts[self.rank], own)

        def begin(first: int) -> Requests:
            last = first + width
            return self.parts.begin(step, lambda _: own[first:last], lambda message: parts[message.peer][first:last])

        ahead: Requests = []
        for first in range(0, max(part.numel() for part in parts), width):
            requests, ahead = ahead, begin(first)
            self.parts.finish(requests)
        self.parts.finish(ahead)
        return destination

    def _gather_by_doubling(self, own: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Gather through scratch memory in which the blocks lie in cyclic rank order."""
        by_position = [*parts[self.rank :], *parts[: self.rank]]
        ends = list(accumulate(part.numel() for part in by_position))
        memory = self.scratch.take(0, ends[-1] * own.element_size()).view(own.dtype)
        memory[: ends[0]] = own
        self.doubling.run(memory, ends)
        for end, part in zip(ends, by_position, strict=True):
            buffers.overwrite(part, memory[end - part.numel() : end])
