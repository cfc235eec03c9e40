"""To a user of long tensors: the faster of cached and non-temporal copies is chosen, from given times."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.kernel_rig import compiled, group_fields
from hypothesis import given
from hypothesis import strategies as st

from torchmpi.shared_memory import memory_layout
from torchmpi.shared_memory.kernels import access, chunk_loop, copying, records

kernel = compiled(
    copying.begin_measuring,
    copying.note_best,
    copying.note_chunk,
    copying.end_measuring,
    access.slot_of,
    access.transfer_slot_of,
    chunk_loop.divide_stream,
    chunk_loop.exchange,
)

CHUNK_BYTES = 512 << 10
FAST, SLOW = 100, 600  # nanoseconds for a KB
MANY = 64  # chunks of earlier calls: the slots have been used


class Rank:
    """One of two ranks: its fields, and the status blocks of both."""

    def __init__(self, num_slots: int = 2) -> None:
        self.rows = np.zeros((2, memory_layout.BLOCK_FIELDS), np.int64)
        self.fields = group_fields(2)
        self.fields[records.GroupRecord.size], self.fields[records.GroupRecord.blocks] = 2, self.rows.ctypes.data
        self.fields[records.GroupRecord.chunks], self.fields[records.GroupRecord.num_slots] = MANY, num_slots
        self.address = self.fields.ctypes.data

    def call(self, *paces: int, sequence: int = 1, always_past: bool = False) -> list[int]:
        """Make a call whose chunks are copied at these paces; return the kind of copy of each."""
        self.fields[records.GroupRecord.current_seq] = sequence
        kernel.begin_measuring(self.address, len(paces), always_past)
        ways = []
        for index, pace in enumerate(paces):
            ways.append(int(self.fields[records.GroupRecord.cache_bypass]))
            kernel.note_best(self.address, records.GroupRecord.put_pace, index, pace * CHUNK_BYTES // 1024, CHUNK_BYTES)
            kernel.note_chunk(self.address, index, 0)
        kernel.end_measuring(self.address)
        return ways

    @property
    def says_slow(self) -> bool:
        return bool(self.rows[0, memory_layout.Block.fetches_slowly])


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", (2, 4))
def test_copies_are_slow_if_slow_from_the_second_use_of_the_slots(num_slots):
    """Regression: the fastest of all chunks was used, and the first chunks of slots outside the caches were fast. A
    broadcast of 64 MB therefore took five times as long."""
    rank = Rank(num_slots)
    ways = rank.call(*[FAST] * num_slots, *[SLOW] * 8)
    assert rank.says_slow
    assert ways == [0] * 6 + [1] * (2 + num_slots), "known after six chunks"
    assert rank.call(*[FAST] * 4) == [1] * 4
    assert rank.says_slow, "non-temporal copies do not measure the caches"


@pytest.mark.parametrize("num_chunks", (4, 5, 6, 7))
def test_copies_of_a_short_call_on_two_ranks_are_slow(num_chunks):
    """With four slots for each rank none of the first uses was left out in a call of fewer than eight chunks."""
    rank = Rank(4)
    rank.call(FAST, FAST, *[SLOW] * (num_chunks - 2))
    assert rank.says_slow


@pytest.mark.parametrize(
    "paces", ([FAST] * 8, [FAST, FAST, SLOW, SLOW, FAST, SLOW, SLOW], [SLOW, SLOW, SLOW, FAST], [SLOW, FAST, SLOW])
)
def test_one_fast_chunk_overrides_slow_chunks(paces):
    rank = Rank()
    assert not any(rank.call(*paces)) and not rank.says_slow


def test_fragmented_calls_are_not_judged():
    """Most of the time is spent between the fragments."""
    rank = Rank()
    rank.fields[records.GroupRecord.current_seq] = 1
    kernel.begin_measuring(rank.address, 1, False)
    rank.fields[records.GroupRecord.fragmented] = 1
    kernel.note_best(rank.address, records.GroupRecord.put_pace, 0, SLOW * CHUNK_BYTES // 1024, CHUNK_BYTES)
    kernel.note_chunk(rank.address, 0, CHUNK_BYTES)
    kernel.end_measuring(rank.address)
    assert not rank.says_slow
    rank.call(SLOW)
    assert rank.says_slow, "the next call may be judged"


@pytest.mark.parametrize("paces", ([SLOW], [SLOW, SLOW], [SLOW, SLOW, SLOW], [FAST, FAST, SLOW, SLOW]))
def test_short_calls_are_judged_at_their_end(paces):
    rank = Rank()
    assert not any(rank.call(*paces)) and rank.says_slow


def test_a_successful_trial_clears_the_count():
    rank = Rank()
    rank.call(*[SLOW] * 8)
    sequence = next(number for number in range(1, 1000) if rank.call(*[FAST] * 4, sequence=number)[0] == 0)
    assert not rank.says_slow, f"call {sequence} tried, and was fast"


@pytest.mark.parametrize(
    ("num_chunks", "every"), ((1, 128), (31, 128), (32, 8), (64, 4), (128, 2), (129, 2), (256, 1), (999, 1))
)
def test_interval_of_trials(num_chunks, every):
    """Trials take about the same share of the time for all sizes."""
    rank = Rank()
    rank.rows[1, memory_layout.Block.fetches_slowly] = 7
    assert trials_of(rank, num_chunks) == pytest.approx(128 * 64 / every, rel=0.2)


def trials_of(rank: Rank, num_chunks: int) -> int:
    trials = 0
    for sequence in range(128 * 64):
        rank.fields[records.GroupRecord.current_seq] = sequence
        kernel.begin_measuring(rank.address, num_chunks, False)
        trials += int(rank.fields[records.GroupRecord.cache_bypass] == 0)
    return trials


def test_first_trial_follows_soon():
    """Regression: page faults of new memory made one call slow, and the next 127 calls used slower copies."""
    rank, tried = Rank(), []
    for times in range(1, 9):
        sequence = next(number for number in range(1, 10_000) if rank.call(*[SLOW] * 4, sequence=number)[0] == 0)
        assert rank.rows[0, memory_layout.Block.fetches_slowly] == min(times, 7), sequence
        tried.append(128 * 64 / trials_of(rank, 1))
    assert tried == pytest.approx([2, 4, 8, 16, 32, 64, 128, 128], rel=0.2)
    next(number for number in range(1, 10_000) if rank.call(*[FAST] * 4, sequence=number)[0] == 0)
    assert not rank.says_slow, "one fast trial is enough"


def test_slower_non_temporal_copies_are_rejected():
    """Regression: other virtual machines used the memory bandwidth, so all copies were slow, non-temporal ones slower
    than cached ones. A call of 64 MB took 22 ms instead of 14."""
    rank = Rank()
    ways = rank.call(*[SLOW] * 6, *[SLOW + 100] * 14)
    assert ways == [0] * 6 + [1] * 7 + [0] * 7 and not rank.says_slow
    judged = [sequence for sequence in range(2, 1000) if calls_it_slow(rank, sequence)]
    assert len(judged) == pytest.approx(500, rel=0.2), "not in every call from now on"
    while rank.fields[records.GroupRecord.rejected] < 7:
        sequence = next(number for number in range(1, 10_000) if calls_it_slow(rank, number))
        assert rank.call(*[SLOW] * 6, *[SLOW + 100] * 14, sequence=sequence)[-1] == 0
    rank.call(*[FAST] * 8)
    rank.call(*[SLOW] * 8)
    assert rank.says_slow, "a fast call resets the rejections"


def test_short_calls_after_rejections_bypass_the_caches():
    """Regression: each rejection cleared the count, and calls too short for a comparison used slow cached copies."""
    rank = Rank()
    rank.fields[records.GroupRecord.rejected] = 7
    ways = [way for sequence in range(4000) for way in rank.call(*[SLOW] * 4, sequence=sequence)]
    assert sum(ways) > 0.9 * len(ways)


def test_non_temporal_copies_must_be_clearly_faster():
    rank = Rank()
    assert rank.call(*[SLOW] * 7, *[SLOW - 20] * 13)[-1] == 0


def test_faster_non_temporal_copies_reset_the_rejections():
    rank = Rank()
    rank.fields[records.GroupRecord.rejected] = 3
    sequence = next(number for number in range(1, 1000) if calls_it_slow(rank, number))
    assert rank.call(*[SLOW] * 7, *[FAST] * 6, sequence=sequence)[-1] == 1
    assert rank.fields[records.GroupRecord.rejected] == 0


def test_fast_ranks_follow_slow_ranks():
    rank = Rank()
    rank.rows[1, memory_layout.Block.fetches_slowly] = 1
    assert rank.call(*[FAST] * 20)[6:] == [1] * 14
    assert not rank.says_slow and rank.fields[records.GroupRecord.rejected] == 0


def calls_it_slow(rank: Rank, sequence: int) -> bool:
    """Return whether the rank would report slow copies, without a change of its state."""
    fields, rows = rank.fields.copy(), rank.rows.copy()
    rank.call(*[SLOW] * 8, sequence=sequence)
    says_slow = rank.says_slow
    rank.fields[:], rank.rows[:] = fields, rows
    return says_slow


def test_non_temporal_copies_are_kept_if_faster():
    rank = Rank()
    assert rank.call(*[SLOW] * 7, *[FAST] * 13) == [0] * 6 + [1] * 14
    assert rank.says_slow


def test_calls_that_always_bypass_the_caches():
    rank = Rank()
    assert rank.call(*[SLOW] * 8, always_past=True) == [2] * 8
    assert not rank.says_slow, "the copies do not measure the caches"


@given(st.integers(1, 64), st.integers(64, 1 << 20), st.integers(1, 1 << 26), st.sampled_from((128 << 10, 384 << 10)))
def test_a_stream_is_divided_into_chunks_that_fit_into_a_slot(size, slot_bytes, num_bytes, most_bytes):
    fields = group_fields(size)
    fields[records.GroupRecord.size], fields[records.GroupRecord.slot_bytes] = size, slot_bytes // 64 * 64
    num_rounds = kernel.divide_stream(fields.ctypes.data, num_bytes, most_bytes)
    piece = fields[records.GroupRecord.chunk_bytes]
    assert 0 < piece <= min(slot_bytes, most_bytes) and piece % 64 == 0
    assert (num_rounds - 1) * piece < num_bytes <= num_rounds * piece
    assert fields[records.GroupRecord.spacing] == 0
    assert piece in (fields[records.GroupRecord.slot_bytes], most_bytes) or num_rounds <= 8


@pytest.mark.parametrize("size", (1, 2, 3, 4, 64))
def test_no_two_ranks_and_no_two_chunks_in_a_row_have_a_slot_in_common(size):
    """For any collectives; chunk c - 2 and earlier ones have been read when chunk c is written."""
    fields = group_fields(size)
    fields[records.GroupRecord.size], fields[records.GroupRecord.slot_bytes] = size, 1
    fields[records.GroupRecord.num_slots] = num_slots = memory_layout.num_slots(size)
    ways = kernel.slot_of, kernel.transfer_slot_of
    for chunk in range(MANY, MANY + 4 * num_slots):
        before, now = (
            [{where(fields.ctypes.data, rank, number) for rank in range(size)} for where in ways]
            for number in (chunk, chunk + 1)
        )
        for slots in (*before, *now):
            assert len(slots) == size and slots <= set(range(size * num_slots))
        assert not (before[0] | before[1]) & (now[0] | now[1])


def test_two_ranks_reuse_the_slots_they_have_read():
    rank = Rank(4)
    rank.fields[records.GroupRecord.slot_bytes] = 1
    for chunk in range(MANY, MANY + 8):
        read_by_rank_0 = kernel.transfer_slot_of(rank.address, 1, chunk)
        assert kernel.transfer_slot_of(rank.address, 0, chunk + 4) == read_by_rank_0


def test_an_exchange_waits_for_earlier_transfers_of_its_call():
    """Regression: the sizes of the parts of seven ranks use the slots too, and were overwritten while being read."""
    rank = Rank()
    slots, table = np.zeros(4 * CHUNK_BYTES, np.uint8), np.zeros((2, 4), np.int64)
    sent, received = np.ones(4 * CHUNK_BYTES, np.uint8), np.zeros(4 * CHUNK_BYTES, np.uint8)
    table[1] = sent.ctypes.data, sent.nbytes, received.ctypes.data, received.nbytes
    rank.fields[records.GroupRecord.slots], rank.fields[records.GroupRecord.slot_bytes] = slots.ctypes.data, CHUNK_BYTES
    rank.fields[records.GroupRecord.current_seq] = rank.fields[records.GroupRecord.expired] = (
        5  # no rank arrives, and the timeout has passed
    )
    plan = np.zeros(records.KernelCall.FIELDS, np.int64)
    plan[records.KernelCall.group] = rank.address
    arguments = plan.ctypes.data, table.ctypes.data, 0, 4 * CHUNK_BYTES, 1
    assert kernel.exchange(*arguments) == records.TIMEOUT and not slots.any()
    rank.rows[1, memory_layout.Block.reduced] = MANY
    assert kernel.exchange(*arguments) == records.TIMEOUT and slots.any(), "everybody had fetched"
