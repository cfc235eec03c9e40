"""Comparison of the calls of ranks on several hosts, by short messages that may carry the payload of the call.

Each rank has a number that stands for its call. :class:`NumberExchange` finds out whether the numbers of all ranks are
equal, in log2 rounds of messages. A short allreduce sends its vectors in the same messages, or among many ranks the
blocks of a relayed allreduce: its comparison needs none of its own. All calls of a group begin with these messages,
whichever backend runs them: different calls meet in the first one, and no rank waits for a message that another rank
does not send.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..tensors import buffers, schedule
from .rank_order import Combiner

_TAG = 3
_HEADER_BYTES, _MOST_ITEM_BYTES = 16, 16
# Vectors are gathered up to this size of all together: with more bytes, further rounds of shorter messages take less
# time. Two ranks send no more than they would in parts, in fewer messages.
_MOST_BYTES_OF_TWO, _MOST_BYTES = 256 << 10, 48 << 10
# Longer vectors are relayed in blocks, up to the first size; totals of hosts with several ranks, up to the second one.
_MOST_RELAYED_BYTES, _MOST_RELAYED_BYTES_OF_HOSTS = 64 << 10, 128 << 10
_LOWEST, _HIGHEST = -1 << 63, (1 << 63) - 1


def most_carried(size: int, *, in_steps: bool = False) -> int:
    """Return the size of the longest vectors that `size` ranks send in these messages.

    `in_steps`: the ranks are the first ones of their hosts, and send the totals of the hosts.

    >>> most_carried(2) >> 10, most_carried(3) >> 10, most_carried(3, in_steps=True) >> 10
    (256, 64, 128)
    """
    return max(most_gathered(size), _MOST_RELAYED_BYTES_OF_HOSTS if in_steps else _MOST_RELAYED_BYTES)


def most_gathered(size: int) -> int:
    """Return the size of the longest vectors that `size` ranks gather in these messages.

    >>> most_gathered(2), most_gathered(3), most_gathered(8)
    (262144, 16384, 6144)
    """
    return _MOST_BYTES // size if size > 2 else _MOST_BYTES_OF_TWO


class NumberExchange:
    """Compare a number between all ranks of a communicator, and send vectors of equal length in the same messages.

    A message begins with the lowest and the highest number of which its sender knows. Vectors follow only while these
    are equal. Every rank receives into memory for the longest message, so lengths need not agree.
    """

    tag = _TAG

    def __init__(self, MPI: Any, comm: Any) -> None:
        self.MPI, self.comm, self.rank, self.size = MPI, comm, comm.rank, comm.size
        self.rounds = [
            (sent.peer, sent.num_blocks, received.peer, (received.first - self.rank) % self.size)
            for (sent,), (received,) in schedule.doubling(self.rank, self.size)
        ]
        self.most_gathered = most_gathered(self.size)
        # Pages are used when they are first written, so this memory costs what the longest message needs.
        blocks_bytes = most_carried(self.size, in_steps=True) + self.size * _MOST_ITEM_BYTES  # the last ones are padded
        self._memory = np.empty(_HEADER_BYTES + max(self.size * self.most_gathered, blocks_bytes), np.uint8)
        self._incoming, self._blocks = np.empty_like(self._memory), np.empty(blocks_bytes, np.uint8)
        self._address, self._incoming_address = int(self._memory.ctypes.data), int(self._incoming.ctypes.data)
        self._known = self._memory[:_HEADER_BYTES].view(np.int64).data
        self._heard = self._incoming[:_HEADER_BYTES].view(np.int64).data
        self._receive = (MPI.buffer.fromaddress(self._incoming_address, self._incoming.nbytes), MPI.BYTE)
        self._vectors: tuple[Any, list[torch.Tensor]] = (None, [])

    @property
    def memory(self) -> tuple[int, int, int]:
        """Addresses of the memory to send and to receive, and the length of the latter."""
        return self._address, self._incoming_address, self._incoming.nbytes

    @property
    def blocks_address(self) -> int:
        """Address of the memory for the blocks of a relayed vector."""
        return int(self._blocks.ctypes.data)

    def agree(self, number: int | None, num_bytes: int = 0) -> bool:
        """Return whether all ranks pass the same number; never if one passes None. Collective.

        Vectors of `num_bytes` are gathered in cyclic rank order behind the header, this rank's own first.
        """
        self._begin_comparison(number)
        for target, count, origin, position in self.rounds:
            if self._swap(target, count * num_bytes, origin) and num_bytes:
                begin = self._address + _HEADER_BYTES + position * num_bytes
                ctypes.memmove(begin, self._incoming_address + _HEADER_BYTES, count * num_bytes)
        return bool(self._known[0] == self._known[1])

    def _begin_comparison(self, number: int | None) -> None:
        self._known[0], self._known[1] = (_LOWEST, _HIGHEST) if number is None else (number, number)

    def _swap(self, target: int, num_bytes: int, origin: int) -> bool:
        """Exchange what is known, with bytes behind it; return whether all numbers that are known are equal."""
        known, heard = self._known, self._heard
        length = _HEADER_BYTES + (num_bytes if known[0] == known[1] else 0)
        message = (self.MPI.buffer.fromaddress(self._address, length), self.MPI.BYTE)
        self.comm.Sendrecv(message, target, _TAG, self._receive, origin, _TAG)
        is_equal: bool = known[0] == heard[0] == heard[1] == known[1]
        if not is_equal:
            known[0], known[1] = _LOWEST, _HIGHEST
        return is_equal

    def allreduce(
        self, number: int | None, vector: torch.Tensor, combine: Combiner, arrived: Callable[[], object]
    ) -> bool:
        """Combine the vectors of all ranks in rank order, in place; return False if their numbers differ.

        `arrived` is called when all vectors have arrived. The kernel `allreduce_over_hosts` sends the same messages.
        """
        if vector.nbytes > self.most_gathered:
            return self._allreduce_in_relays(number, vector, combine, arrived)
        vectors = self.gather(number, vector)
        if vectors is None:
            return False
        arrived()
        combine(vectors, vector)
        return True

    def _allreduce_in_relays(
        self, number: int | None, vector: torch.Tensor, combine: Combiner, arrived: Callable[[], object]
    ) -> bool:
        rank, size, numel = self.rank, self.size, vector.numel()
        width = -(-numel // size)
        block_bytes = width * vector.itemsize
        with torch.inference_mode(False):
            memory, incoming = (torch.from_numpy(each)[_HEADER_BYTES:] for each in (self._memory, self._incoming))
            blocks = torch.from_numpy(self._blocks)[: size * block_bytes].view(size, block_bytes)
        # Position j has the block for the rank j before this one; in the end, that of the rank j after it.
        for position, block in enumerate(blocks.view(vector.dtype)):
            part = vector[(rank - position) % size * width :][:width]
            block[: part.numel()] = part
        if number is not None:
            number ^= vector.nbytes
        self._begin_comparison(number)
        for target, origin, positions in schedule.relayed_exchange(rank, size, backward=True):
            moved, length = list(positions), len(positions) * block_bytes
            memory[:length].view(-1, block_bytes).copy_(blocks[moved])
            if self._swap(target, length, origin):
                blocks[moved] = incoming[:length].view(-1, block_bytes)
        if self._known[0] != self._known[1]:
            return False
        arrived()
        versions = [blocks[(source - rank) % size].view(vector.dtype) for source in range(size)]
        combine(versions, memory[:block_bytes].view(vector.dtype))
        self.agree(number, block_bytes)
        results = memory[: size * block_bytes].view(size, block_bytes)
        # Joined before they are copied, since `vector` may be in the same memory.
        in_order = torch.cat([results[(owner - rank) % size] for owner in range(size)]).view(vector.dtype)
        buffers.overwrite(vector, in_order[:numel])
        return True

    def own_vector(self, like: torch.Tensor) -> torch.Tensor:
        """Return the memory of this rank's own vector, of the length and dtype of another tensor."""
        with torch.inference_mode(False):
            return torch.from_numpy(self._memory)[_HEADER_BYTES : _HEADER_BYTES + like.nbytes].view(like.dtype)

    def gather(self, number: int | None, vector: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the vectors of all ranks in rank order, valid until the next call; None if the numbers differ."""
        num_bytes = vector.nbytes
        ctypes.memmove(self._address + _HEADER_BYTES, vector.data_ptr(), num_bytes)
        # Ranks that gather another length, or nothing, have another number.
        if not self.agree(None if number is None else number ^ num_bytes, num_bytes):
            return None
        key = vector.dtype, num_bytes
        if self._vectors[0] != key:
            with torch.inference_mode(False):
                memory = torch.from_numpy(self._memory)[_HEADER_BYTES : _HEADER_BYTES + self.size * num_bytes]
                blocks = memory.view(self.size, num_bytes).unbind()
            in_order = [blocks[(rank - self.rank) % self.size].view(vector.dtype) for rank in range(self.size)]
            self._vectors = key, in_order
        return self._vectors[1]
