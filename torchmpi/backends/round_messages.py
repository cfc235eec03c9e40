"""The messages of a round of the backend `p2p`: whole, or in pieces of which few are in progress.

They use the communicator of the group and a tag of their own: calls on a group run one at a time and in the same order
on all ranks, and MPI keeps the messages between two ranks in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..communicators import call_parts
from ..communicators.group import Group
from ..shared_memory import kernels
from ..shared_memory.kernels import records, reduction
from ..tensors import buffers
from ..tensors.schedule import Message, Round
from .mpi_messages import NONBLOCKING, STATUS_BYTES, can_call_from_kernels, kernel_fields, messages, wait_all
from .pieces import PieceQueue, piece_sizes
from .pipeline import ChunkBuffers

Requests = list[Any]
"""The messages in progress, as the library that carries them describes them."""
TensorOf = Callable[[Message], torch.Tensor]
"""The flat tensor of a message."""

_TAG = 2
# Pieces of a CompiledPieces at first; more are allocated where needed.
_NUM_PIECES = 1 << 8


class RoundMessages:
    """Sends and receives the tensors of a round of messages, whole."""

    def __init__(self, group: Group, message_bytes: int) -> None:
        self.MPI, self.comm, self.message_bytes = group.context.MPI, group.comm, message_bytes
        self._open: list[tuple[Requests, list[torch.Tensor]]] = []
        """The rounds that have begun and not ended, with their tensors, of which requests do not keep the memory."""

    @property
    def are_open(self) -> bool:
        """Whether messages have begun that may not have ended: after an error, or amid a call."""
        return bool(self._open)

    def begin(self, step: Round, outgoing: TensorOf, incoming: TensorOf) -> Requests:
        """Begin all messages of a round with these flat tensors, and return the requests.

        Receives begin first, since the library copies a message that arrives before its receive.
        """
        requests: Requests = []
        if tensors := [*map(incoming, step.receives), *map(outgoing, step.sends)]:
            self._open.append((requests, tensors))  # an interrupt may come after each of their messages
            requests.extend(self._begin(step, tensors))
            if not requests:  # of empty tensors
                self._forget(requests)
        return requests

    def _begin(self, step: Round, tensors: list[torch.Tensor]) -> Requests:
        """Begin the messages of a round, with the tensors that are received first."""
        memory = [self._buffers(tensor) for tensor in tensors]
        receives = [
            [self.comm.Irecv((each, self.MPI.BYTE), message.peer, _TAG) for each in parts]
            for message, parts in zip(step.receives, memory, strict=False)
        ]
        sent = memory[len(step.receives) :]
        sends = [[(each, message.peer) for each in parts] for message, parts in zip(step.sends, sent, strict=True)]
        return self._begin_sends(receives, sends)

    def _buffers(self, tensor: torch.Tensor) -> list[Any]:
        return messages(self.MPI, tensor, self.message_bytes)

    def _begin_sends(self, receives: list[Requests], sends: list[list[tuple[Any, int]]]) -> Requests:
        return [*chain.from_iterable(receives), *map(self._send, chain.from_iterable(sends))]

    def _send(self, sent: tuple[Any, int]) -> Any:
        memory, peer = sent
        return self.comm.Isend((memory, self.MPI.BYTE), peer, _TAG)

    def finish(self, requests: Requests) -> None:
        """Wait until all these messages have been sent or received."""
        if requests:
            self._await(requests)
            self._forget(requests)

    def _await(self, requests: Requests) -> None:
        try:
            wait_all(self.MPI, requests)
        except self.MPI.Exception:
            if not any(requests):  # all have ended, as if one was too long
                self._forget(requests)
            raise

    def _forget(self, requests: Requests) -> None:
        self._open = [each for each in self._open if each[0] is not requests]

    def swap(self, outgoing: torch.Tensor, target: int, incoming: torch.Tensor, origin: int) -> None:
        """Send one short message and receive another."""
        MPI = self.MPI
        message = (buffers.as_bytes(MPI, outgoing), MPI.BYTE)
        self.comm.Sendrecv(message, target, _TAG, (buffers.as_bytes(MPI, incoming), MPI.BYTE), origin, _TAG)


class MessagesInPieces(RoundMessages):
    """Sends messages in pieces, of which few are in progress. A request is the number of the last piece.

    All ranks must begin their rounds, and wait for them, in the same order.
    """

    def __init__(self, group: Group, message_bytes: int) -> None:
        sizes = piece_sizes(group.size, group.context.MPI.get_vendor()[0])
        super().__init__(group, min(message_bytes, sizes.piece))
        self._pieces = PieceQueue(sizes, self._send, lambda sent: int(sent[0].nbytes), self.MPI.Wtime)

    def _begin_sends(self, receives: list[Requests], sends: list[list[tuple[Any, int]]]) -> Requests:
        return [self._pieces.add(receives, sends)]

    def _await(self, requests: Requests) -> None:
        """Wait for the messages of these rounds, and of those before them."""
        for last in requests:
            for in_progress in self._pieces.up_to(last):
                wait_all(self.MPI, in_progress)


class CompiledPieces(RoundMessages):
    """The same as `MessagesInPieces`, but no piece needs the GIL, which other threads of the program may hold.

    The memory of the messages must live until they have been sent or received.
    """

    def __init__(self, group: Group, message_bytes: int, loaded: Mapping[str, Callable[..., int]]) -> None:
        sizes = piece_sizes(group.size, group.context.MPI.get_vendor()[0])
        super().__init__(group, min(message_bytes, sizes.piece))
        self._add, self._finish = loaded["add_pieces"], loaded["finish_pieces"]
        self._status = np.zeros(STATUS_BYTES, np.uint8)
        self._long = np.zeros((2 * group.size, records.LongMessage.FIELDS), np.int64)
        self.queue = records.Queue.new().write(
            **kernel_fields(self.MPI, self.comm, self._status, NONBLOCKING),
            tag=_TAG,
            window_bytes=sizes.fewest,
            least_window=sizes.fewest,
            most_window=sizes.most,
            window_step=sizes.piece,
            messages=self._long.ctypes.data,
        )
        self._cells = self.queue.cells
        self._set_pieces(np.zeros((_NUM_PIECES, records.Piece.FIELDS), np.int64))

    def _set_pieces(self, pieces: np.ndarray) -> None:
        self._pieces = pieces
        self.queue.write(pieces=pieces.ctypes.data, most_pieces=len(pieces))

    @property
    def are_open(self) -> bool:
        """Whether messages have begun that may not have ended, here or in machine code."""
        return super().are_open or self._cells[records.Queue.done] != self._cells[records.Queue.added]

    def _begin(self, step: Round, tensors: list[torch.Tensor]) -> Requests:
        """Begin the messages of a round, and return the number of the last piece."""
        peers = [message.peer for message in chain(step.receives, step.sends)]
        rows = [(peer, tensor.data_ptr(), tensor.nbytes) for peer, tensor in zip(peers, tensors, strict=True)]
        table, piece_bytes = np.array(rows, np.int64), self.piece_bytes(tensors[0].element_size())
        self.make_room(int((-(-table[:, records.LongMessage.num_bytes] // piece_bytes)).sum()))
        address = int(table.ctypes.data)
        self.check(self._add(int(self.queue), address, len(step.receives), len(step.sends), piece_bytes))
        return [self.queue.added]

    def piece_bytes(self, item_bytes: int) -> int:
        """Return the length of a piece of such elements."""
        return max(1, self.message_bytes // item_bytes) * item_bytes

    def make_room(self, num_pieces: int) -> None:
        """Allocate the records of more pieces, unless there are enough."""
        done, added = self._cells[records.Queue.done], self._cells[records.Queue.added]
        num_pieces += added - done
        if num_pieces > len(self._pieces):
            larger = np.zeros((1 << (num_pieces - 1).bit_length(), records.Piece.FIELDS), np.int64)
            numbers = np.arange(done, added)
            larger[numbers % len(larger)] = self._pieces[numbers % len(self._pieces)]
            self._set_pieces(larger)

    def _await(self, requests: Requests) -> None:
        """Wait for the messages of these rounds, and of those before them."""
        for last in requests:
            self.check(self._finish(int(self.queue), last))

    def check(self, error: int) -> None:
        """Raise the error that a kernel has returned, unless it is 0."""
        if error:
            raise self.MPI.Exception(error)


class CompiledAllreduce:
    """Allreduces of long vectors by such messages, without the GIL from the first piece to the last.

    The readable form is `PipelinedReduction.allreduce` of :mod:`torchmpi.backends.p2p`.
    """

    def __init__(
        self,
        group: Group,
        messages: CompiledPieces,
        dtype: torch.dtype,
        op: str,
        chunk_numel: int,
        chunks: ChunkBuffers,
    ) -> None:
        self._messages, self._size, self._chunks, self._chunk_numel = messages, group.size, chunks, chunk_numel
        self._kernel = kernels.load()["allreduce_in_pieces"]
        self._operands = np.zeros(group.size, np.int64)
        piece_bytes = messages.piece_bytes(dtype.itemsize)
        self._record = records.Chunks.new().write(
            queue=messages.queue,
            item_bytes=dtype.itemsize,
            reducer=reduction.address(dtype, op),
            numel=chunk_numel,
            piece_bytes=piece_bytes,
            rank=group.rank,
            size=group.size,
            operands=self._operands.ctypes.data,
        )
        self._address, self._cells = int(self._record), self._record.cells
        # Of the two exchanges and the two rounds of results that are in progress together.
        part_numel = chunk_numel if group.size == 2 else -(-chunk_numel // group.size)
        self._most_pieces = 4 * (group.size - 1) * -(-part_numel * dtype.itemsize // piece_bytes)

    def run(self, flat: torch.Tensor) -> None:
        """Reduce in place on all ranks."""
        numel, cells = flat.numel(), self._cells
        for number in range(2):
            part = min(self._chunk_numel, max(0, numel - number * self._chunk_numel))
            memory = self._chunks.take(number, part + self._size)  # the lengths of the parts of all ranks, rounded up
            cells[records.Chunks.memory + number] = memory.data_ptr()
        self._messages.make_room(self._most_pieces)
        times = np.zeros((-(-numel // self._chunk_numel), 2) if call_parts.begin() else (0, 2), np.int64)
        cells[records.Chunks.times] = times.ctypes.data if len(times) else 0
        self._messages.check(self._kernel(self._address, flat.data_ptr(), numel))
        call_parts.add("combining", times.tolist())


def messages_of(group: Group, message_bytes: int) -> RoundMessages:
    """Return what sends long messages between the ranks of a group, in pieces unless the network is not TCP."""
    if group.context.sends_whole:
        return RoundMessages(group, message_bytes)
    if can_call_from_kernels(group):
        with contextlib.suppress(ImportError, OSError, RuntimeError):  # no LLVM, or none for this processor
            return CompiledPieces(group, message_bytes, kernels.load())
    return MessagesInPieces(group, message_bytes)
