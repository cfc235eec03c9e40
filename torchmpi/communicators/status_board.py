"""The status board of a group: shared memory in which the ranks of one host publish their calls and their state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..shared_memory.memory_layout import BLOCK_BYTES, BLOCK_FIELDS, TEXT_START_BYTES, Block
from ..shared_memory.segments import Segment

_POLL_SECONDS = 0.02


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

    def write_text(self, rank: int, text: str) -> None:
        """Write the text of this rank's block, cut to its length."""
        data = text.encode(errors="replace")[: BLOCK_BYTES - TEXT_START_BYTES - 1]
        start = rank * BLOCK_BYTES + TEXT_START_BYTES
        self.segment.memory[start : start + len(data) + 1] = data + b"\0"

    def read_text(self, rank: int) -> str:
        """Return the text of a rank's block."""
        start = rank * BLOCK_BYTES + TEXT_START_BYTES
        return self.segment.memory[start : (rank + 1) * BLOCK_BYTES].split(b"\0", 1)[0].decode(errors="replace")

    def close(self) -> None:
        """Unmap the memory."""
        self.fields.release()
        self.segment.close()


def request_status(
    board: StatusBoard,
    rank: int,
    other: int,
    *,
    patience_seconds: float,
    meanwhile: Callable[[], object] = lambda: None,
) -> str:
    """Return the status text of another rank, as `request_statuses`; '' if there was no answer in time."""
    texts = request_statuses(board, rank, [other], patience_seconds=patience_seconds, meanwhile=meanwhile)
    return texts.get(other, "")


def request_statuses(
    board: StatusBoard,
    rank: int,
    others: Sequence[int],
    *,
    patience_seconds: float,
    meanwhile: Callable[[], object] = lambda: None,
) -> dict[int, str]:
    """Return the status texts that the watchdogs of other ranks on this host write on request.

    Args:
        board: The status board of a group with these ranks.
        rank: This rank.
        others: The ranks whose status is requested.
        patience_seconds: How long to wait for the answers.
        meanwhile: Called while waiting. A watchdog passes the function that answers requests of other ranks, since
            the other rank may be waiting for this one.

    Returns:
        The texts of the ranks that have answered in time.
    """
    before = {other: board.get(other, Block.answered) for other in others}
    board.set(rank, Block.asked, board.get(rank, Block.asked) + 1)
    limit = time.monotonic() + patience_seconds
    waiting = set(others)
    while True:
        waiting = {
            each
            for each in waiting
            if board.get(each, Block.answered) == before[each] and not board.get(each, Block.closed)
        }
        if not waiting or time.monotonic() > limit:
            return {other: board.read_text(other) for other in others if other not in waiting}
        meanwhile()
        time.sleep(_POLL_SECONDS)
