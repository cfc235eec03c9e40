"""To ranks that share cores: which of the others a rank waits for first."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from helpers.kernel_rig import compiled, group_fields

from torchmpi.shared_memory import memory_layout
from torchmpi.shared_memory.compiler import compilation
from torchmpi.shared_memory.kernels import arrival, intrinsics, records

kernel = compiled(arrival.wait_same_core, arrival.begin, arrival.has_aborted, arrival.arrive)

CALL = 7
ELSEWHERE = -5  # no core has this number


@pytest.fixture
def fields() -> tuple[np.ndarray, np.ndarray]:
    """The fields of rank 0 of 3, whose timeout has passed, and the blocks of all; no rank has arrived."""
    rows = np.zeros((3, memory_layout.BLOCK_FIELDS), np.int64)
    rows[:, memory_layout.Block.core] = ELSEWHERE
    own = group_fields(3)
    own[records.GroupRecord.size], own[records.GroupRecord.blocks] = 3, rows.ctypes.data
    own[records.GroupRecord.current_seq] = own[records.GroupRecord.expired] = CALL
    own[records.GroupRecord.crowded] = 1
    return own, rows


def wait_same_core(own: np.ndarray) -> int:
    return int(kernel.wait_same_core(own.ctypes.data, memory_layout.Block.ready, 1))


def test_wait_for_a_rank_on_the_same_core(fields):
    own, rows = fields
    assert wait_same_core(own) == 0, "all are elsewhere"
    late = []
    for _ in range(100):  # until both looks find the same core
        rows[2, memory_layout.Block.core] = ctypes.CDLL(None).sched_getcpu()
        late.append(wait_same_core(own))
        if late[-1]:
            break
    assert late[-1] == records.TIMEOUT
    rows[2, memory_layout.Block.ready] = 1
    assert wait_same_core(own) == 0, "it has come"


@pytest.mark.parametrize("seed", ("", "1"))
def test_delays_are_compiled_on_request_only(monkeypatch, seed):
    monkeypatch.setattr(intrinsics, "DELAYS", seed)
    function = compilation.inner(arrival.has_aborted.py_func)
    text = str(compilation.link("delays_", [compilation.plain("delays_check", function)]))
    assert ("usleep" in text, "torchmpi_delay" in text) == (seed != "", seed != "")


def test_core_of_the_rank_is_published(fields):
    own, rows = fields
    rows[0, memory_layout.Block.core] = ELSEWHERE
    wait_same_core(own)
    assert rows[0, memory_layout.Block.core] >= 0


def test_cores_are_not_compared_without_oversubscription(fields):
    own, rows = fields
    own[records.GroupRecord.crowded] = 0
    rows[:, memory_layout.Block.core] = ctypes.CDLL(None).sched_getcpu()
    before = rows.copy()
    assert wait_same_core(own) == 0 and (rows == before).all()


class Crowd:
    """Rank 0 of 2 in a call whose timeout has passed, and the blocks of both ranks."""

    def __init__(self) -> None:
        self.rows = np.zeros((2, memory_layout.BLOCK_FIELDS), np.int64)
        self.own = group_fields(2)
        self.own[records.GroupRecord.size], self.own[records.GroupRecord.blocks] = 2, self.rows.ctypes.data
        self.own[records.GroupRecord.current_seq] = self.own[records.GroupRecord.expired] = CALL
        self.own[records.GroupRecord.free_until] = CALL + 1
        self.address = self.own.ctypes.data

    def announce(self, rank: int, signature: int) -> None:
        at = memory_layout.entry(rank, CALL & (memory_layout.RING_LENGTH - 1)) - rank * memory_layout.BLOCK_FIELDS
        self.rows[rank, at + memory_layout.Entry.sequence], self.rows[rank, at + memory_layout.Entry.signature] = (
            CALL,
            signature,
        )


@pytest.mark.parametrize("seq", (1, 256, 512, 1 << 20))
def test_roots_that_differ_by_as_much_as_the_chunks_of_an_aborted_call(seq):
    """Regression: a rank that had aborted a call counts its chunks in the bits of the root; two roots seemed equal."""
    crowd = Crowd()
    chunks = seq << memory_layout.CHUNK_BITS
    crowd.own[records.GroupRecord.chunks] = chunks
    crowd.announce(1, chunks)  # another root, and no aborted call
    assert kernel.arrive(crowd.address, CALL, 0) == records.MISMATCH + 1
    crowd.announce(1, memory_layout.signed_chunks(chunks))  # the same root, and the same aborted call
    assert kernel.arrive(crowd.address, CALL, 0) == 0


def test_slots_are_not_reused_until_all_ranks_have_left_an_aborted_call():
    """Regression: a rank still in the aborted call read data of the next call, and returned them."""
    ranks = Crowd()
    assert kernel.begin(ranks.address, CALL) == 0
    ranks.own[records.GroupRecord.last_aborted] = CALL - 1
    ranks.rows[1, memory_layout.Block.entered] = CALL - 1
    assert kernel.begin(ranks.address, CALL) == records.TIMEOUT, "it is still in that call"
    assert ranks.rows[0, memory_layout.Block.entered] == CALL, "two ranks that aborted wait for each other"
    ranks.rows[1, memory_layout.Block.entered] = CALL
    assert kernel.begin(ranks.address, CALL) == 0
    assert ranks.own[records.GroupRecord.last_aborted] == 0, "once is enough"


def test_a_wait_can_end_while_it_yields():
    """Regression: beside other programs a yield takes milliseconds, so that aborts were noticed after many seconds."""
    ranks = Crowd()
    ranks.own[records.GroupRecord.yields] = 1 << 40
    ranks.own[records.GroupRecord.last_aborted] = CALL - 1
    assert kernel.begin(ranks.address, CALL) == records.TIMEOUT


@pytest.mark.parametrize(
    ("refused", "signature", "is_over"),
    ((CALL - 1, 5, False), (CALL, 5, True), (CALL + 1, 5, False), (CALL + 1, 6, True), (CALL + 1, None, True)),
)
def test_a_rank_that_aborts_two_consecutive_calls(refused, signature, is_over):
    """Regression: the second abort hid the first from a rank that had not polled, which then waited forever."""
    ranks = Crowd()
    ranks.announce(0, 5)
    if signature is not None:
        ranks.announce(1, signature)
    ranks.rows[1, memory_layout.Block.refused] = refused
    assert bool(kernel.has_aborted(ranks.address, 1)) is is_over
