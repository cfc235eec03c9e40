"""Status texts that ranks of a host ask each other for, in memory that they share."""

from __future__ import annotations

from types import SimpleNamespace

from torchmpi.communicators.status_board import StatusBoard, request_status, request_statuses
from torchmpi.shared_memory import memory_layout as layout
from torchmpi.shared_memory.memory_layout import BLOCK_BYTES, TEXT_START_BYTES, Block


def board(size: int) -> StatusBoard:
    return StatusBoard(SimpleNamespace(memory=bytearray(size * BLOCK_BYTES), close=lambda: None), size)  # type: ignore


def test_a_text_is_cut_to_the_block_of_its_rank():
    shared, room = board(2), BLOCK_BYTES - TEXT_START_BYTES - 1
    shared.write_text(1, "next")
    for text in ("", "short", room * "x", (room + 9) * "x"):
        shared.write_text(0, text)
        assert shared.read_text(0) == text[:room]
        assert shared.read_text(1) == "next" and shared.get(1, 0) == 0


def test_the_texts_of_ranks_that_answer_or_have_closed():
    """Rank 1 answers when it is asked, rank 2 has closed before, rank 3 does neither."""
    shared, asked = board(4), []
    shared.write_text(2, "the last of rank 2")
    shared.write_text(3, "an old one of rank 3")
    shared.set(2, Block.closed, 1)

    def answer() -> None:
        asked.append(shared.get(0, Block.asked))
        shared.write_text(1, "of rank 1")
        shared.set(1, Block.answered, 1)

    texts = request_statuses(shared, 0, [1, 2, 3], patience_seconds=0.1, meanwhile=answer)
    assert texts == {1: "of rank 1", 2: "the last of rank 2"} and set(asked) == {1}
    assert request_status(shared, 0, 2, patience_seconds=60) == "the last of rank 2"
    assert request_status(shared, 0, 1, patience_seconds=0) == ""  # not the old answer
    assert shared.get(0, Block.asked) == 3


def test_the_parts_of_a_block_lie_beside_each_other_in_cache_lines_of_their_own():
    """What a rank writes while others read the neighboring part."""
    parts = {
        "calls": range(layout.Block.completed + 1),
        "ready": range(layout.Block.ready, layout.Block.ready + 1),
        "reduced": range(layout.Block.reduced, layout.Block.unread + 1),
        "ring": range(layout.Block.ring, layout.Block.ring + layout.RING_LENGTH * layout.Entry.FIELDS),
        "text": range(TEXT_START_BYTES // layout.FIELD_BYTES, layout.BLOCK_FIELDS),
    }
    lines = {name: {field * layout.FIELD_BYTES // 128 for field in fields} for name, fields in parts.items()}
    assert sum(map(len, lines.values())) == len(set().union(*lines.values()))
    assert layout.Block.ready < layout.Block.reduced < layout.Block.kept < layout.Block.unread < layout.Block.ring
    assert layout.Entry.FIELDS * layout.FIELD_BYTES % 128 == 0 and TEXT_START_BYTES < BLOCK_BYTES
