"""To a user of large tensors: direct reads are chosen where they are faster, and their failures are seen."""

from __future__ import annotations

import os

import numpy as np
import pytest
from helpers.kernel_rig import compiled, group_fields
from hypothesis import given
from hypothesis import strategies as st

from torchmpi.shared_memory import memory_layout, process_vm
from torchmpi.shared_memory.kernels import peer_memory, records

kernel = compiled(peer_memory.prefers_reading, peer_memory.read_all, peer_memory.note_pace, peer_memory.paces_of)

LEAST, TOO_MANY = 32 << 10, 16 << 20
SLOTS, DIRECTLY = 0, 1
SEQUENCE = 5
must_be_allowed = pytest.mark.skipif(
    not process_vm.can_read([process_vm.probe()]), reason="this system lets no process read another one's memory"
)


class Rank:
    """Rank 0 of two, both of them in this process."""

    def __init__(self) -> None:
        self.rows = np.zeros((2, memory_layout.BLOCK_FIELDS), np.int64)
        self.fields = group_fields(2)
        self.processes = np.full(2, os.getpid(), np.int64)
        self.fields[records.GroupRecord.size], self.fields[records.GroupRecord.blocks] = 2, self.rows.ctypes.data
        self.fields[records.GroupRecord.processes] = self.processes.ctypes.data
        self.fields[records.GroupRecord.current_seq] = SEQUENCE
        self.address = self.fields.ctypes.data
        self.call = records.KernelCall.new().write(group=self.address)
        self.paces = int(records.GroupRecord(self.address).allgather_paces)

    def is_for_it(self, num_bytes: int) -> float:
        """Return the share of the calls that use direct reads."""
        answers = []
        for sequence in range(1, 4097):
            self.fields[records.GroupRecord.current_seq] = sequence
            answers.append(kernel.prefers_reading(self.address, self.paces, num_bytes))
        return sum(answers) / len(answers)

    def read(self, theirs: np.ndarray, *, refuses: bool = False) -> tuple[int, np.ndarray]:
        """Make a call in which the other rank publishes this memory, and has read already."""
        chunk = int(self.fields[records.GroupRecord.chunks])
        mine, target = np.zeros_like(theirs), np.zeros(2 * len(theirs), theirs.dtype)
        for rank, tensor in enumerate((mine, theirs)):
            start = memory_layout.entry(0, SEQUENCE)
            self.rows[rank, start : start + 4] = SEQUENCE, 7, tensor.nbytes, tensor.ctypes.data
        self.rows[1, memory_layout.Block.reduced] = chunk + 1
        self.rows[1, memory_layout.Block.refused] = SEQUENCE if refuses else 0
        arguments = int(self.call), SEQUENCE, mine.ctypes.data, 0, mine.nbytes, target.ctypes.data
        return kernel.read_all(*arguments), target[len(theirs) :]


def test_short_and_long_tensors_are_not_read_directly():
    rank = Rank()
    for num_bytes in (0, LEAST - 1, TOO_MANY, 1 << 40):
        kernel.note_pace(rank.paces, num_bytes, DIRECTLY, 1)
        assert rank.is_for_it(num_bytes) == 0
    rank.fields[records.GroupRecord.processes] = 0
    assert rank.is_for_it(LEAST) == 0


@given(st.integers(LEAST, TOO_MANY - 1), st.integers(LEAST, TOO_MANY - 1))
def test_similar_lengths_share_measurements(first, second):
    rank = Rank()
    one, other = kernel.paces_of(rank.paces, first), kernel.paces_of(rank.paces, second)
    assert (one == other) == ((first // LEAST).bit_length() == (second // LEAST).bit_length())
    assert rank.paces <= one < int(records.GroupRecord(rank.address).alltoall_paces)


def test_the_faster_transfer_is_selected():
    rank = Rank()
    assert 0.4 < rank.is_for_it(LEAST) < 0.6
    kernel.note_pace(rank.paces, LEAST, SLOTS, 1000)
    assert 0.4 < rank.is_for_it(LEAST) < 0.6, "the other transfer has not been measured yet"
    for _ in range(14):
        kernel.note_pace(rank.paces, LEAST, DIRECTLY, 2000)
    assert 0.4 < rank.is_for_it(LEAST) < 0.6, "the first calls count for little: memory may have been new"
    kernel.note_pace(rank.paces, LEAST, DIRECTLY, 2000)
    assert 0 < rank.is_for_it(LEAST) < 0.02
    kernel.note_pace(rank.paces, LEAST, DIRECTLY, 500)
    assert 0.98 < rank.is_for_it(LEAST) < 1, "the faster call is used immediately"
    for _ in range(3):
        kernel.note_pace(rank.paces, LEAST, DIRECTLY, 2000)
    assert rank.is_for_it(LEAST) > 0.98, "slow ones may have been disturbed"
    for _ in range(30):
        kernel.note_pace(rank.paces, LEAST, DIRECTLY, 2000)
    assert rank.is_for_it(LEAST) < 0.02
    assert 0.4 < rank.is_for_it(4 * LEAST) < 0.6, "other lengths have their own paces"


@must_be_allowed
def test_memory_of_another_process_is_read():
    rank, theirs = Rank(), np.random.default_rng(1).integers(0, 255, LEAST, np.uint8)
    status, found = rank.read(theirs)
    assert status == 0 and (found == theirs).all()
    assert rank.fields[records.GroupRecord.chunks] == rank.rows[0, memory_layout.Block.reduced] == 1
    assert rank.fields[records.GroupRecord.processes] != 0


@pytest.mark.parametrize("process", (-1, 1 << 22))
def test_a_refused_read_is_published_and_not_repeated(process):
    rank = Rank()
    rank.processes[1] = process
    status, _ = rank.read(np.ones(LEAST, np.uint8))
    assert status == records.UNREADABLE
    assert (
        rank.rows[0, memory_layout.Block.unread]
        == rank.fields[records.GroupRecord.chunks]
        == rank.rows[0, memory_layout.Block.reduced]
        == 1
    )
    assert rank.fields[records.GroupRecord.processes] == 0


@must_be_allowed
def test_a_refused_read_of_another_rank_has_the_same_effect():
    rank = Rank()
    rank.rows[1, memory_layout.Block.unread] = 1
    status, _ = rank.read(np.ones(LEAST, np.uint8))
    assert status == records.UNREADABLE
    assert rank.fields[records.GroupRecord.processes] != 0, "this rank may; the other one will not be for it again"


def test_data_read_from_a_rank_that_aborted_are_discarded():
    """The other rank may have continued, and overwritten the memory."""
    status, _ = Rank().read(np.ones(LEAST, np.uint8), refuses=True)
    assert status == records.ABORTED + 1


@must_be_allowed
def test_the_trial_at_start_compares_the_value():
    own = process_vm.probe()
    assert process_vm.can_read([own, own]) and process_vm.can_read([])
    assert not process_vm.can_read([own, own._replace(value=own.value ^ 1)])
    assert not process_vm.can_read([own._replace(address=8)])
    assert not process_vm.can_read([own._replace(process=1 << 22)])
