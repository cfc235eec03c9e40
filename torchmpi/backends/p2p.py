"""Own algorithms over MPI's point-to-point messages, for ranks on different hosts.

What the library sends along rings and adds on the way, its order depending on the size, goes straight from rank to
rank here: whoever owns a part of the vector gets everybody's version of it and combines them in rank order. The bytes
are those of a ring, and the bits depend on the rank order alone. Who sends what to whom is planned in
:mod:`torchmpi.backends.schedule`; this file carries it out, piece by piece, so that one piece is combined while the
next ones
are on the wire.

The messages use the communicator of the group itself under a tag of their own: calls on a group run one at a time and
in one order, and MPI keeps the messages of a pair of ranks in order.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from ..config import Config
from ..shared_memory.kernels import reduction
from ..tensors import buffers, partition
from . import schedule
from .base import Operation
from .mpi import Movement, ReduceScatter, destination_for
from .schedule import Message, Round

_REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
_MOVEMENTS = ("allgather", "broadcast")
_TAG = 2
# Up to this many bytes in all, fewest rounds; above, fewest bytes. Neither changes the bits of a result.
_SHORT_BYTES = 16 << 10
# A broadcast of more than this goes along a chain, in pieces of this size: every link carries the payload once.
_TREE_BYTES = 64 << 10
_CHAIN_PIECE_BYTES = 256 << 10
# Pieces of a reduction: short enough that combining one costs nothing beside sending it, long enough for full speed.
_PIECE_BYTES = 1 << 20
_MOST_AHEAD = 8

Span = tuple[int, int]


class P2PBackend:
    """Reductions in rank order, broadcast and allgather over messages between pairs of ranks; on host memory."""

    name = "p2p"
    announces = False
    enqueues = False

    def __init__(self, config: Config) -> None:
        self.config = config

    def takes(self, device_type: str) -> bool:
        """Host memory; what is on a device is staged."""
        return device_type == "cpu"

    def why_not(self, collective: str, device_type: str, group: Any = None) -> str | None:
        """It has the verbs that training needs between hosts; CUDA tensors are staged."""
        if collective not in _REDUCTIONS + _MOVEMENTS:
            return f"it has no {collective}, only {', '.join(_REDUCTIONS + _MOVEMENTS)}"
        if collective in _REDUCTIONS and importlib.util.find_spec("llvmlite") is None:
            return "its reductions are compiled by llvmlite (a part of numba), which is not installed"
        if device_type == "cuda" and not torch.cuda.is_available():
            return "this torch or this host has no CUDA"
        return None

    def bind(self, group: Any, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a verb on a group."""
        if collective in _MOVEMENTS:
            operation: Operation = getattr(DirectMovement(group, self.config.message_bytes), collective)
            return operation
        assert dtype is not None and op is not None
        direct = DirectReduction(group, dtype, op, self.config)
        bound: Operation = (
            ReduceScatter(group, direct).run if collective == "reduce_scatter" else getattr(direct, collective)
        )
        return bound


class Combiner:
    """Combines vectors of one dtype and operation, in their order."""

    def __init__(self, dtype: torch.dtype, op: str) -> None:
        self._reduce = reduction.called(reduction.address(dtype, op))

    def __call__(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine `parts`, flat and as long as `out`, into `out`, which may be one of them."""
        self._reduce([out.data_ptr()], [part.data_ptr() for part in parts], out.numel())


class Post:
    """Messages of tensors to and from the ranks of a group, in pieces that MPI can count."""

    def __init__(self, group: Any, message_bytes: int) -> None:
        self.MPI, self.comm, self.message_bytes = group.context.MPI, group.comm, message_bytes

    def begin(
        self,
        step: Round,
        outgoing: Callable[[Message], torch.Tensor],
        incoming: Callable[[Message], torch.Tensor],
    ) -> list[Any]:
        """Begin all messages of a round, with these flat tensors in them.

        Receives first: what arrives before its receive costs the library a copy.
        """
        MPI, requests = self.MPI, []
        for message in step.receives:
            for piece in self._pieces(incoming(message)):
                requests.append(self.comm.Irecv((piece, MPI.BYTE), message.peer, _TAG))
        for message in step.sends:
            for piece in self._pieces(outgoing(message)):
                requests.append(self.comm.Isend((piece, MPI.BYTE), message.peer, _TAG))
        return requests

    def finish(self, requests: list[Any]) -> None:
        """Return when all these messages have gone or come."""
        self.MPI.Request.Waitall(requests)

    def swap(self, outgoing: torch.Tensor, target: int, incoming: torch.Tensor, origin: int) -> None:
        """Send and receive one short message each, and return when that is done."""
        MPI = self.MPI
        message = (buffers.as_bytes(MPI, outgoing), MPI.BYTE)
        self.comm.Sendrecv(message, target, _TAG, (buffers.as_bytes(MPI, incoming), MPI.BYTE), origin, _TAG)

    def _pieces(self, tensor: torch.Tensor) -> list[Any]:
        """The memory of a tensor; none of it needs no message, which both sides know."""
        most = max(1, self.message_bytes // tensor.element_size())
        return [
            buffers.as_bytes(self.MPI, tensor[begin : begin + numel])
            for begin, numel in partition.chunks(tensor.numel(), most)
        ]


class Doubling:
    """An allgather of blocks of memory in log2 rounds: the blocks lie in rank order, cyclically from the own one on."""

    def __init__(self, group: Any, post: Post) -> None:
        self.post = post
        self.rounds = schedule.doubling(group.rank, group.size)
        self.places = [(rank - group.rank) % group.size for rank in range(group.size)]
        """Where the block of each rank is."""

    def run(self, memory: torch.Tensor, ends: Sequence[int]) -> None:
        """Fill `memory`, which begins with the own block; `ends` says where the block at each place ends."""
        for step in self.rounds:
            (sent,), (received,) = step
            first = self.places[received.first]
            self.post.swap(
                memory[: ends[sent.num_rows - 1]], sent.peer,
                memory[ends[first - 1] : ends[first + received.num_rows - 1]], received.peer,
            )  # fmt: skip


class DirectReduction:
    """Reductions of one dtype and operation on one group; everything is combined in rank order."""

    def __init__(self, group: Any, dtype: torch.dtype, op: str, config: Config) -> None:
        self.rank, self.size, self.post = group.rank, group.size, Post(group, config.message_bytes)
        self.dtype, self.itemsize = dtype, dtype.itemsize
        self.piece_numel = max(1, min(_PIECE_BYTES, config.pipeline_bytes) // dtype.itemsize)
        self.combine = Combiner(dtype, op)
        self.doubling = Doubling(group, self.post)
        self.received, self.results = Slots(dtype), Slots(dtype)

    def allreduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the result, in place."""
        flat = buffer.detach().view(-1)
        if self._is_short(flat):
            self._gather_all(flat)
        elif self.size <= 2:  # to swap everything takes the same bytes as halves there and back, in one round
            self._pipeline(flat, self._swap_with_peer, self._combine_all)
        else:
            self._pipeline(flat, self._exchange_parts, self._combine_and_spread)
        return buffer

    def reduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """The root gets the result in place; the others' buffers stay as they are."""
        flat = buffer.detach().view(-1)
        step = schedule.collect(self.rank, self.size, root)
        if self.size <= 2 or self._is_short(flat):
            self._pipeline(flat, partial(self._collect_wholes, step), self._combine_all)
        else:
            self._pipeline(flat, self._exchange_parts, partial(self._combine_and_collect, step))
        return buffer

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor, spans: Sequence[Span]) -> None:
        """Each rank gets the result of its span of the flat `source`; nobody else's memory is written."""
        flat, out = source.detach().view(-1), destination.detach().view(-1)
        stretch = max(1, self.piece_numel // self.size)
        # The same stretch of every rank's span: some ranks' spans end earlier.
        pieces = [
            [(offset + min(begin, numel), max(0, min(stretch, numel - begin))) for offset, numel in spans]
            for begin, _ in partition.chunks(max(numel for _, numel in spans), stretch)
        ]
        begin = spans[self.rank][0]
        ahead = self._exchange(flat, pieces[0], 0) if pieces else None
        for k, piece in enumerate(pieces):
            current, ahead = ahead, self._exchange(flat, pieces[k + 1], k + 1) if k + 1 < len(pieces) else None
            assert current is not None
            self.post.finish(current[0])
            offset, numel = piece[self.rank]
            self.combine(current[1], out[offset - begin : offset - begin + numel])

    def _is_short(self, flat: torch.Tensor) -> bool:
        return flat.numel() * self.itemsize * self.size <= _SHORT_BYTES

    def _gather_all(self, flat: torch.Tensor) -> None:
        """Fewest rounds: everybody gets all vectors, and combines all of them."""
        numel = flat.numel()
        memory = self.received.take(0, numel * self.size)
        memory[:numel] = flat
        self.doubling.run(memory, [numel * (place + 1) for place in range(self.size)])
        self.combine([memory[numel * place : numel * (place + 1)] for place in self.doubling.places], flat)

    def _pipeline(self, flat: torch.Tensor, begin: Callable[..., Any], follow: Callable[..., list[Any]]) -> None:
        """Per piece: begin its messages, one piece ahead; when they have come, combine, and begin what follows."""
        pieces = [flat[first : first + numel] for first, numel in partition.chunks(flat.numel(), self.piece_numel)]
        under_way = deque(begin(piece, k) for k, piece in enumerate(pieces[:1]))
        following: deque[list[Any]] = deque()
        for k, piece in enumerate(pieces):
            if k + 1 < len(pieces):
                under_way.append(begin(pieces[k + 1], k + 1))
            requests, parts = under_way.popleft()
            self.post.finish(requests)  # the sends, too: what follows may arrive where they are read
            following.append(follow(piece, parts, k))
            if len(following) > 1:
                self.post.finish(following.popleft())
        for requests in following:
            self.post.finish(requests)

    # Beginnings: messages under way, and the versions, in rank order, that will be there when they have come.

    def _exchange_parts(self, piece: torch.Tensor, k: int) -> tuple[list[Any], list[torch.Tensor]]:
        return self._exchange(piece, partition.even_partition(piece.numel(), self.size), k)

    def _exchange(self, flat: torch.Tensor, spans: Sequence[Span], k: int) -> tuple[list[Any], list[torch.Tensor]]:
        """Everybody's version of my part to me, and mine of theirs to them."""
        offset, numel = spans[self.rank]
        parts = self._versions(flat[offset : offset + numel], k)
        requests = self.post.begin(
            schedule.exchange(self.rank, self.size),
            lambda message: flat.narrow(0, *spans[message.first]),
            lambda message: parts[message.peer],
        )
        return requests, parts

    def _swap_with_peer(self, piece: torch.Tensor, k: int) -> tuple[list[Any], list[torch.Tensor]]:
        parts = self._versions(piece, k)
        step = schedule.spread(self.rank, self.size)
        return self.post.begin(step, lambda _: piece, lambda message: parts[message.peer]), parts

    def _collect_wholes(self, step: Round, piece: torch.Tensor, k: int) -> tuple[list[Any], list[torch.Tensor]]:
        parts = self._versions(piece, k) if not step.sends else []
        return self.post.begin(step, lambda _: piece, lambda message: parts[message.peer]), parts

    def _versions(self, own: torch.Tensor, k: int) -> list[torch.Tensor]:
        """Room for the others' versions of `own`, and itself among them."""
        numel = own.numel()
        memory = self.received.take(k, numel * (self.size - 1))
        parts = [memory[numel * place : numel * (place + 1)] for place in range(self.size - 1)]
        return [*parts[: self.rank], own, *parts[self.rank :]]

    # Endings: combine, and begin what follows.

    def _combine_all(self, piece: torch.Tensor, parts: list[torch.Tensor], k: int) -> list[Any]:
        if parts:
            self.combine(parts, piece)
        return []

    def _combine_and_spread(self, piece: torch.Tensor, parts: list[torch.Tensor], k: int) -> list[Any]:
        mine = parts[self.rank]
        self.combine(parts, mine)
        spans = partition.even_partition(piece.numel(), self.size)
        return self.post.begin(
            schedule.spread(self.rank, self.size),
            lambda _: mine,
            lambda message: piece.narrow(0, *spans[message.first]),
        )

    def _combine_and_collect(self, step: Round, piece: torch.Tensor, parts: list[torch.Tensor], k: int) -> list[Any]:
        mine = parts[self.rank]
        out = self.results.take(k, mine.numel()) if step.sends else mine
        self.combine(parts, out)
        spans = partition.even_partition(piece.numel(), self.size)
        return self.post.begin(step, lambda _: out, lambda message: piece.narrow(0, *spans[message.first]))


class Slots:
    """Memory for the piece at hand and the one ahead, reused by all pieces and all calls."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._scratch = dtype, (buffers.Scratch(), buffers.Scratch())

    def take(self, k: int, numel: int) -> torch.Tensor:
        """A flat tensor for piece `k`, valid until piece `k + 2`."""
        with torch.inference_mode(False):  # memory made in inference mode could not be written outside of it
            return self._scratch[k % 2].take(numel, self.dtype)


class DirectMovement(Movement):
    """The verbs that move bytes, as messages between pairs."""

    def __init__(self, group: Any, message_bytes: int) -> None:
        super().__init__(group, message_bytes)
        self.post = Post(group, message_bytes)
        self.doubling = Doubling(group, self.post)
        self.scratch = Slots(torch.uint8)

    def broadcast(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the root's values, in place."""
        flat = buffer.detach().view(-1)
        if flat.numel() * flat.element_size() > _TREE_BYTES and self.size > 2:
            self._along_a_chain(flat, root)
        else:
            for step in schedule.tree(self.rank, self.size, root):
                self.post.finish(self.post.begin(step, lambda _: flat, lambda _: flat))
        return buffer

    def _along_a_chain(self, flat: torch.Tensor, root: int) -> None:
        sends, receives = schedule.chain(self.rank, self.size, root)
        pieces = flat.split(max(1, _CHAIN_PIECE_BYTES // flat.element_size()))
        incoming = [self._begin_piece(Round(receives=receives), piece) for piece in pieces[:_MOST_AHEAD]]
        outgoing: list[list[Any]] = []
        for k, piece in enumerate(pieces):
            self.post.finish(incoming[k])
            incoming += [self._begin_piece(Round(receives=receives), later) for later in pieces[k + _MOST_AHEAD :][:1]]
            outgoing.append(self._begin_piece(Round(sends=sends), piece))
            if k >= _MOST_AHEAD:
                self.post.finish(outgoing[k - _MOST_AHEAD])
        for requests in outgoing[-_MOST_AHEAD:]:
            self.post.finish(requests)

    def _begin_piece(self, step: Round, piece: torch.Tensor) -> list[Any]:
        return self.post.begin(step, lambda _: piece, lambda _: piece)

    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Everybody's rows in rank order, to everybody."""
        rows, row_bytes = self._rows(source)
        destination = destination_for(source, int(rows.sum()), destination)
        parts = [part.view(-1) for part in destination.detach().split(rows.tolist())]
        mine = source.detach().view(-1)
        if int(rows.sum()) * row_bytes <= _SHORT_BYTES:
            self._gather_by_doubling(mine, parts)
            return destination
        step = schedule.spread(self.rank, self.size)
        requests = self.post.begin(step, lambda _: mine, lambda message: parts[message.peer])
        buffers.overwrite(parts[self.rank], mine)
        self.post.finish(requests)
        return destination

    def _gather_by_doubling(self, mine: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Through memory in which the blocks lie as `Doubling` wants them."""
        by_place = [*parts[self.rank :], *parts[: self.rank]]
        ends = list(accumulate(part.numel() for part in by_place))
        memory = self.scratch.take(0, ends[-1] * mine.element_size()).view(mine.dtype)
        memory[: ends[0]] = mine
        self.doubling.run(memory, ends)
        for end, part in zip(ends, by_place, strict=True):
            buffers.overwrite(part, memory[end - part.numel() : end])
