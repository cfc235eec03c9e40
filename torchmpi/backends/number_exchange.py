"""Comparison of the calls of ranks on several hosts, by short messages that may carry the payload of the call.

Each rank has a number that stands for its call. :class:`NumberExchange` finds out whether the numbers of all ranks are
equal, in log2 rounds of messages. A short allreduce sends its vectors in the same messages, or among many ranks the
blocks of a relayed allreduce: its comparison needs none of its own. All calls of a group begin with these messages,
whichever backend runs them: different calls meet in the first one, and no rank waits for a message that another rank
does not send.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
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
# Of rows, the blocks of all ranks together. Fewer of those that more than two hosts relay, and of those that are each
# for one rank: the first rank of a host copies these several times, while its neighbors wait.
_MOST_ROWS_BYTES, _MOST_PASSED_ROWS_BYTES = 256 << 10, 128 << 10
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


def most_together(size: int, *, divides: bool = False, gathers: bool = False) -> int:
    """Return the size of all blocks together that `size` ranks send in these messages, if they are rows.

    `divides`: each rank gets a part of the rows. `gathers`: a rank gets rows of all ranks.

    >>> most_together(8) >> 10, most_together(2, divides=True) >> 10, most_together(8, divides=True) >> 10
    (256, 256, 128)
    >>> most_together(2, divides=True, gathers=True) >> 10
    128
    """
    return _MOST_PASSED_ROWS_BYTES if divides and (gathers or size > 2) else _MOST_ROWS_BYTES


class NumberExchange:
    """Compare a number between all ranks of a communicator, and send vectors of equal length in the same messages.

    A message begins with the lowest and the highest number of which its sender knows. Vectors follow only while these
    are equal. Every rank receives into memory for the longest message, so lengths need not agree.
    """

    tag = _TAG

    def __init__(self, MPI: Any, comm: Any) -> None:
        self.MPI, self.comm, self.rank, self.size = MPI, comm, comm.rank, comm.size
        self.rounds = schedule.carried(self.rank, self.size, "all to all", 0)
        self.most_gathered = most_gathered(self.size)
        # Pages are used when they are first written, so this memory costs what the longest message needs.
        most_blocks = max(most_carried(self.size, in_steps=True), most_together(self.size))
        blocks_bytes = most_blocks + self.size * _MOST_ITEM_BYTES  # the last ones are padded
        self._memory = np.empty(_HEADER_BYTES + max(self.size * self.most_gathered, blocks_bytes), np.uint8)
        self._incoming, self._blocks = np.empty_like(self._memory), np.empty(blocks_bytes, np.uint8)
        self._address, self._incoming_address = int(self._memory.ctypes.data), int(self._incoming.ctypes.data)
        self._known = self._memory[:_HEADER_BYTES].view(np.int64).data
        self._heard = self._incoming[:_HEADER_BYTES].view(np.int64).data
        self._receive = (MPI.buffer.fromaddress(self._incoming_address, self._incoming.nbytes), MPI.BYTE)

    @property
    def memory(self) -> tuple[int, int, int]:
        """Addresses of the memory to send and to receive, and the length of the latter."""
        return self._address, self._incoming_address, self._incoming.nbytes

    @property
    def blocks_address(self) -> int:
        """Address of the memory for the blocks of a relayed vector."""
        return int(self._blocks.ctypes.data)

    def agree(self, number: int | None, num_bytes: int = 0, rounds: Sequence[schedule.Carried] = ()) -> bool:
        """Return whether all ranks pass the same number; never if one passes None. Collective.

        Blocks of `num_bytes` are moved in these `rounds` behind the header, by default to all ranks: then they lie in
        cyclic rank order, this rank's own first.
        """
        self._begin_comparison(number)
        for step in rounds or self.rounds:
            received = step.num_received * num_bytes
            if self._swap(step.target, step.num_sent * num_bytes, step.origin) and received:
                begin = self._address + _HEADER_BYTES + step.position * num_bytes
                ctypes.memmove(begin, self._incoming_address + _HEADER_BYTES, received)
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
        self,
        number: int | None,
        vector: torch.Tensor,
        combine: Combiner,
        arrived: Callable[[], object],
        out: torch.Tensor | None,
        rounds: Sequence[schedule.Carried] = (),
    ) -> bool:
        """Combine the vectors of all ranks in rank order into `out`; return False if their numbers differ.

        `arrived` is called when all vectors have arrived. With `rounds` to a root, `out` is None on the other ranks.
        The kernel `over_hosts` sends the same messages.
        """
        if vector.nbytes > self.most_gathered:
            return self._allreduce_in_relays(number, vector, combine, arrived, out, rounds)
        vectors = self.gather(number, vector, rounds)
        if vectors is None:
            return False
        arrived()
        if out is not None:
            combine(vectors, out)
        return True

    def _allreduce_in_relays(
        self,
        number: int | None,
        vector: torch.Tensor,
        combine: Combiner,
        arrived: Callable[[], object],
        out: torch.Tensor | None,
        rounds: Sequence[schedule.Carried],
    ) -> bool:
        rank, size, numel = self.rank, self.size, vector.numel()
        width = -(-numel // size)
        block_bytes = width * vector.itemsize
        blocks = self.blocks(block_bytes)
        for owner in range(size):
            part = vector[owner * width :][:width]
            blocks[(rank - owner) % size].view(vector.dtype)[: part.numel()] = part
        if not self.relay(number, blocks):
            return False
        arrived()
        memory = self.own_memory(size * block_bytes)
        versions = [blocks[(source - rank) % size].view(vector.dtype) for source in range(size)]
        combine(versions, memory[:block_bytes].view(vector.dtype))
        self.agree(number, block_bytes, rounds)
        if out is not None:
            results = memory.view(size, block_bytes)
            # Joined before they are copied, since `out` may be in the same memory.
            in_order = torch.cat([results[(owner - rank) % size] for owner in range(size)]).view(vector.dtype)
            buffers.overwrite(out, in_order[:numel])
        return True

    def blocks(self, block_bytes: int) -> torch.Tensor:
        """Return memory for blocks to relay, by position: at j that for the rank j before this one."""
        with torch.inference_mode(False):
            return torch.from_numpy(self._blocks)[: self.size * block_bytes].view(self.size, block_bytes)

    def relay(self, number: int | None, blocks: torch.Tensor) -> bool:
        """Compare a number, and bring these blocks to the ranks for which they are: at j that of the rank j after it.

        Return False if the numbers of the ranks differ.
        """
        size, block_bytes = blocks.shape
        with torch.inference_mode(False):
            memory, incoming = (torch.from_numpy(each)[_HEADER_BYTES:] for each in (self._memory, self._incoming))
        self._begin_comparison(number)
        for target, origin, positions in schedule.relayed_exchange(self.rank, size, backward=True):
            moved, length = list(positions), len(positions) * block_bytes
            memory[:length].view(-1, block_bytes).copy_(blocks[moved])
            if self._swap(target, length, origin):
                blocks[moved] = incoming[:length].view(-1, block_bytes)
        return bool(self._known[0] == self._known[1])

    def own_memory(self, num_bytes: int) -> torch.Tensor:
        """Return the memory of the blocks, this rank's own first."""
        with torch.inference_mode(False):
            return torch.from_numpy(self._memory)[_HEADER_BYTES : _HEADER_BYTES + num_bytes]

    def gather(
        self, number: int | None, vector: torch.Tensor, rounds: Sequence[schedule.Carried] = ()
    ) -> list[torch.Tensor] | None:
        """Return the vectors of all ranks in rank order, valid until the next call; None if the numbers differ."""
        num_bytes = vector.nbytes
        ctypes.memmove(self._address + _HEADER_BYTES, vector.data_ptr(), num_bytes)
        if not self.agree(number, num_bytes, rounds):
            return None
        blocks = self.own_memory(self.size * num_bytes).view(self.size, num_bytes)
        return [blocks[(rank - self.rank) % self.size].view(vector.dtype) for rank in range(self.size)]
