"""For whom a rank waits first where several share a core."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from torchmpi import layout
from torchmpi.kernels import context, meeting

CALL = 7
ELSEWHERE = -5  # no core has this number


@pytest.fixture
def words() -> tuple[np.ndarray, np.ndarray]:
    """Of rank 0 of 3, which has no time to wait, and the rows of all: nobody has come yet."""
    rows = np.zeros((3, layout.ROW_WORDS), np.int64)
    rows[:, layout.CORE] = ELSEWHERE
    own = np.zeros(context.context_words(3), np.int64)
    own[context.SIZE], own[context.ROWS] = 3, rows.ctypes.data
    own[context.SEQUENCE] = own[context.EXPIRED] = CALL
    own[context.CROWDED] = 1
    return own, rows


def wait_beside(own: np.ndarray) -> int:
    return int(meeting.wait_beside(own.ctypes.data, layout.READY * 8, 1))


def test_a_rank_on_this_core_is_waited_for(words):
    own, rows = words
    assert wait_beside(own) == 0, "all are elsewhere"
    late = []
    for _ in range(100):  # until both looks find the same core
        rows[2, layout.CORE] = ctypes.CDLL(None).sched_getcpu()
        late.append(wait_beside(own))
        if late[-1]:
            break
    assert late[-1] == context.LATE
    rows[2, layout.READY] = 1
    assert wait_beside(own) == 0, "it has come"


def test_the_own_core_is_told(words):
    own, rows = words
    rows[0, layout.CORE] = ELSEWHERE
    wait_beside(own)
    assert rows[0, layout.CORE] >= 0


def test_where_each_rank_has_its_core_nobody_looks(words):
    own, rows = words
    own[context.CROWDED] = 0
    rows[:, layout.CORE] = ctypes.CDLL(None).sched_getcpu()
    before = rows.copy()
    assert wait_beside(own) == 0 and (rows == before).all()
