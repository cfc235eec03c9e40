"""The status board of a group: shared memory in which the ranks of one host publish their calls and their state."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any

from ..shared_memory.memory_layout import (
    BLOCK_BYTES,
    BLOCK_FIELDS,
    TEXT_START_BYTES,
    Block,
    MessageRing,
    rings_bytes,
)
from ..shared_memory.segments import Segment
from .rank_status import LastCall, RankStatus

_NOTE_BYTES = 1024
_TEXT_BYTES = BLOCK_BYTES - TEXT_START_BYTES - _NOTE_BYTES


class StatusBoard:
    """The status blocks of the ranks of a group, in memory that the ranks of one host share.

    Each rank writes only its own block. The layout is described in :mod:`torchmpi.shared_memory.memory_layout`.
    """

    def __init__(self, segment: Segment, num_blocks: int) -> None:
        self.segment = segment
        self.fields = memoryview(segment.memory).cast("q")
        self.num_blocks = num_blocks

    def get(self, rank: int, field: int) -> int:
        """Return a field of the head of a rank's block."""
        return self.fields[rank * BLOCK_FIELDS + field]

    def set(self, rank: int, field: int, value: int) -> None:
        """Write a field of the head of this rank's block."""
        self.fields[rank * BLOCK_FIELDS + field] = value

    def block_address(self, rank: int) -> int:
        """Return the address of a rank's block in this process."""
        return self.segment.address + rank * BLOCK_BYTES

    def last_call(self, rank: int) -> LastCall:
        entered = self.get(rank, Block.entered)
        return LastCall(entered, entered > self.get(rank, Block.left))

    def write_status(self, rank: int, status: RankStatus) -> None:
        """Write the status of this rank to its block."""
        start = rank * BLOCK_BYTES + TEXT_START_BYTES
        data = status.packed_text(_TEXT_BYTES - 1)
        self.segment.memory[start : start + len(data) + 1] = data + b"\0"

    def read_status(self, rank: int) -> RankStatus | None:
        """Return the status in a rank's block; None if there is none, or if the rank writes another one now."""
        start = rank * BLOCK_BYTES + TEXT_START_BYTES
        text = self.segment.memory[start : start + _TEXT_BYTES].split(b"\0", 1)[0]
        try:
            return RankStatus.unpacked(json.loads(text))
        except ValueError:
            return None

    def write_note(self, rank: int, values: list[Any]) -> bool:
        """Write what this rank tells without being asked, in types of JSON; return False if there is no room."""
        text = json.dumps(values).encode()
        data = b"%08x%s" % (zlib.crc32(text), text)
        if len(data) < _NOTE_BYTES:
            end = (rank + 1) * BLOCK_BYTES
            self.segment.memory[end - _NOTE_BYTES : end] = data.ljust(_NOTE_BYTES, b"\0")
        return len(data) < _NOTE_BYTES

    def read_note(self, rank: int) -> Any:
        """Return what a rank tells; None if that is nothing, or if the rank writes now."""
        end = (rank + 1) * BLOCK_BYTES
        data = self.segment.memory[end - _NOTE_BYTES : end].rstrip(b"\0")
        return json.loads(data[8:]) if data and data[:8] == b"%08x" % zlib.crc32(data[8:]) else None

    def has_been_left(self, seq: int) -> bool:
        """Return whether all ranks have left a call that all have entered; some may have cleared their blocks since."""
        return all(
            [
                self.get(rank, Block.entered) != seq or self.get(rank, Block.left) >= seq
                for rank in range(self.num_blocks)
            ]
        )

    def clear(self, rank: int) -> None:
        """Remove what the last group has left of a rank: its block, and how far the messages of its rings had got."""
        start = rank * BLOCK_BYTES
        self.segment.memory[start : start + BLOCK_BYTES] = bytes(BLOCK_BYTES)
        rings = self.segment.ticket.num_bytes - rings_bytes(self.num_blocks)
        length = rings_bytes(self.num_blocks) // self.num_blocks**2
        for number in range(rank * self.num_blocks, (rank + 1) * self.num_blocks):
            start = rings + number * length
            self.segment.memory[start : start + MessageRing.BYTES] = bytes(MessageRing.BYTES)

    def release(self) -> Segment:
        """Return the memory, which the board does not use any more."""
        self.fields.release()
        return self.segment

    def close(self) -> None:
        """Unmap the memory."""
        self.release().close()


class BoardQuestion:
    """A question to other ranks of this host for their status, which their watchdogs answer."""

    def __init__(self, board: StatusBoard, rank: int, others: Iterable[int]) -> None:
        self._board = board
        self._before = {other: board.get(other, Block.answered) for other in others}
        self._answers: dict[int, RankStatus] = {}
        board.set(rank, Block.asked, board.get(rank, Block.asked) + 1)

    def is_answered(self) -> bool:
        """Return whether all ranks have answered, or have closed the group and left a status."""
        return len(self.answers()) == len(self._before)

    def answers(self) -> dict[int, RankStatus]:
        """Return the status of the ranks that have answered."""
        board = self._board
        for other, before in self._before.items():
            has_answered = board.get(other, Block.answered) != before or board.get(other, Block.closed)
            if other not in self._answers and has_answered and (status := board.read_status(other)) is not None:
                self._answers[other] = status
        return self._answers
