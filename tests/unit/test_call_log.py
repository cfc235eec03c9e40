"""To whoever debugs a job: calls that differ between ranks are found, and named, whichever rank comes first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmpi import errors
from torchmpi.collective_specs import CODES
from torchmpi.communicators import call_log
from torchmpi.communicators.group import Group
from torchmpi.communicators.status_board import StatusBoard
from torchmpi.shared_memory import kernels, memory_layout
from torchmpi.shared_memory.segments import Segment
from torchmpi.tensors import dtypes


@pytest.fixture(params=["in Python", "by a kernel"])
def board_of_two(request, monkeypatch):
    publish = kernels.load()["announce"] if request.param == "by a kernel" else None
    monkeypatch.setattr(call_log.CallLog, "publish", publish)
    first = Segment.create("test", 2 * memory_layout.BLOCK_BYTES)
    boards = [StatusBoard(first, 2), StatusBoard(Segment.open(first.ticket), 2)]
    first.withdraw()
    yield [call_log.CallLog("test", rank, 2, boards[rank]) for rank in range(2)]
    for log_board in boards:
        log_board.close()


def arrive(call_log, code, shape):
    call_log.enter(code, shape)
    call_log.announce()


ALLREDUCE, BARRIER = call_log.call_code("allreduce", "sum", 1), call_log.call_code("barrier")


def test_equal_calls_pass_in_either_order(board_of_two):
    for order in ((0, 1), (1, 0)) * 100:  # more calls than the ring has entries
        first, second = (board_of_two[rank] for rank in order)
        arrive(first, ALLREDUCE, (3,))
        arrive(second, ALLREDUCE, (3,))
        first.leave()
        second.leave()
    assert board_of_two[0].seq == board_of_two[1].seq == 200


def test_a_wait_for_ranks_that_have_not_arrived_can_be_ended(board_of_two):
    """Regression: only the loss of a rank ended it, not the timeout of the group."""
    first, second = board_of_two
    group = SimpleNamespace(call_log=first, _expirable=lambda: [])
    arrive(first, BARRIER, ())
    Group.end_call(group, 2, "the report on another call")
    assert first.ended_seq == 0
    Group.end_call(group, 1, "too late")
    with pytest.raises(errors.StallError, match="too late"):
        first.sleep_until_all_arrive()
    first.abandon()
    Group.end_call(group)  # there is no call
    second.enter(BARRIER, ())
    second.leave()
    for log in (second, first):
        arrive(log, BARRIER, ())
    first.sleep_until_all_arrive()  # the next call is not ended
    assert [log.leave() > 0 for log in (first, second)] == [True, True]


@pytest.mark.parametrize(
    ("code", "shape"),
    [(BARRIER, ()), (ALLREDUCE, (4,)), (ALLREDUCE | 1 << 32, (3,)), (call_log.call_code("allreduce", "max", 1), (3,))],
)
def test_the_later_rank_finds_the_difference(board_of_two, monkeypatch, code, shape):
    monkeypatch.setattr(call_log, "_STATUS_SECONDS", 0.1)  # no watchdog answers
    first, second = board_of_two
    arrive(first, ALLREDUCE, (3,))
    with pytest.raises(errors.MismatchError, match="rank 0 called") as caught:
        arrive(second, code, shape)
    assert f"rank 1 called {call_log.describe(code, shape)}" in str(caught.value)
    with pytest.raises(errors.MismatchError):
        first.leave()


def test_the_rank_that_failed_first_is_named():
    """Regression: a slow rank named a rank that had aborted the call because of the first one."""
    segment = Segment.create("test", 4 * memory_layout.BLOCK_BYTES)
    log_board = StatusBoard(segment, 4)
    segment.withdraw()
    call_logs = [call_log.CallLog("test", rank, 4, log_board) for rank in range(4)]
    for round_ in range(2):
        for own in call_logs:
            own.enter(call_log.call_code("barrier"), ())
        call_logs[2 * round_].abandon()  # a different one in each round
        first = 2 * round_
        for rank, told_by in ((1, first), (3, 1)):
            with pytest.raises(errors.MismatchError, match=f"cannot end on rank {rank}: rank {first} has aborted it"):
                call_logs[rank].raise_aborted(told_by)
    log_board.close()


def test_a_rank_that_runs_ahead_is_no_mismatch(board_of_two):
    """The root of a broadcast does not wait: its later calls must not be compared with earlier calls of this rank."""
    first, second = board_of_two
    code = call_log.call_code("broadcast", None, 1)
    for _ in range(10):
        arrive(first, code, (3,))
        first.leave()
    for _ in range(10):
        arrive(second, code, (3,))
        second.leave()
    assert (first.seq, second.seq) == (10, 10)


@given(
    st.sampled_from([collective for collective in CODES if collective != "allreduce_many"]),
    st.sampled_from([*dtypes.OPS, None]),
    st.integers(0, 63),
)
def test_descriptions_of_signatures(collective, op, root):
    text = call_log.describe(call_log.call_code(collective, op, 1) | root << 32, (2, 3))
    assert text.startswith(f"{collective}(float32 [2, 3]")
    assert op is None or op in text
