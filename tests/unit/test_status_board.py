"""To whoever reads a report: the status of ranks is text of limited size, and ranks answer in shared memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchmpi.communicators import release
from torchmpi.communicators.rank_status import LastCall, RankStatus, await_answers
from torchmpi.communicators.status_board import BoardQuestion, StatusBoard
from torchmpi.shared_memory import memory_layout as layout
from torchmpi.shared_memory.memory_layout import BLOCK_BYTES, TEXT_START_BYTES, Block


def board(size: int) -> StatusBoard:
    num_bytes = size * BLOCK_BYTES + layout.rings_bytes(size)
    ticket = SimpleNamespace(num_bytes=num_bytes)
    return StatusBoard(SimpleNamespace(memory=bytearray(num_bytes), ticket=ticket, close=lambda: None), size)  # type: ignore


def status_with(num_groups: int, num_recent: int = 0, line: str = "at train.py:7") -> RankStatus:
    calls = {2**32 - key: LastCall(10**9 + key, True) for key in range(1, num_groups + 1)}
    recent = tuple(f"#{number}: allreduce(float32 [{number}], sum)" for number in range(num_recent))
    return RankStatus("barrier()", 2.5, line, calls=calls, blocked=(2**32 - 1, 3), recent=recent)


@pytest.mark.parametrize(
    ("told", "read"),
    [
        (status_with(50, 8), status_with(50, 8)),
        (status_with(70, 30), status_with(70, 1)),
        (status_with(1000, 8), status_with(0, 1)),
        (status_with(0, line=9000 * "\0"), RankStatus("barrier()", 2.5, 200 * "\0")),
        (status_with(0, line="at обучение.py:7"), status_with(0, line="at обучение.py:7")),
        (RankStatus(line="\udcff"), RankStatus(line="?")),  # of a name that is no UTF-8
    ],
    ids=["fits", "few recent calls", "without calls", "cut", "letters of two bytes", "no letter"],
)
def test_a_status_that_is_too_long_loses_what_matters_least(told, read):
    shared = board(3)
    shared.write_status(2, status_with(1))
    shared.write_status(1, told)
    assert shared.read_status(1) == read
    assert (
        shared.read_status(2) == status_with(1) and shared.get(1, 0) == 0
    )  # the neighboring block, and the own fields


def test_a_status_that_is_being_written_is_none():
    shared = board(2)
    assert shared.read_status(0) is None
    shared.write_status(0, status_with(3))
    shared.segment.memory[TEXT_START_BYTES + 20] = 0
    assert shared.read_status(0) is None


def test_the_status_of_ranks_that_answer_or_have_closed():
    """Rank 1 answers when it is asked, rank 2 has closed before, rank 3 does neither."""
    shared, asked = board(4), []
    for rank in (2, 3):
        shared.write_status(rank, RankStatus(f"of rank {rank}"))
    shared.set(2, Block.closed, 1)

    def answer() -> None:
        asked.append(shared.get(0, Block.asked))
        shared.write_status(1, RankStatus("of rank 1"))
        shared.set(1, Block.answered, 1)

    def ask(*ranks: int, patience_seconds: float) -> dict[int, RankStatus]:
        return await_answers(BoardQuestion(shared, 0, ranks), patience_seconds, answer)

    expected = {1: RankStatus("of rank 1"), 2: RankStatus("of rank 2")}
    assert ask(1, 2, 3, patience_seconds=0.1) == expected and set(asked) == {1}
    assert ask(2, patience_seconds=60) == {2: RankStatus("of rank 2")}
    assert ask(1, patience_seconds=0) == {}  # not the old answer
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


def test_a_group_is_not_used_again_if_a_rank_was_lost_in_its_last_call(monkeypatch):
    monkeypatch.setattr(release, "_LEAVE_SECONDS", 0.0)
    shared = board(2)
    comm = SimpleNamespace(rank=0, size=2)
    freed = release.FreedGroup(((0, 1), 0), shared.segment, comm, comm, 5, None, None)
    for rank, left in ((0, 5), (1, 4)):
        shared.set(rank, Block.entered, 5)
        shared.set(rank, Block.left, left)
    assert not freed.clear() and shared.get(0, Block.entered) == 5
    shared.set(1, Block.left, 5)
    assert freed.clear() and (shared.get(0, Block.entered), shared.get(1, Block.entered)) == (0, 5)
