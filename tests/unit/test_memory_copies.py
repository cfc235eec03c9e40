"""Copies of a run in memory: the ranks that are left return to the last one that all of them have."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchmpi.engine.checkpoint import Content, Saved
from torchmpi.engine.coordination import SingleProcess
from torchmpi.engine.memory_copies import MemoryCopies

WAIT_SECONDS = 60


class Threads(SingleProcess):
    """A coordinator of ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._values: dict[int, Any] = {}
        self._own = threading.local()

    @property
    def rank(self) -> int:
        return self._own.rank

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(WAIT_SECONDS)
        values = [self._values[rank] for rank in range(self.size)]
        self._barrier.wait(WAIT_SECONDS)
        return values

    def broadcast(self, value: Any, root: int = 0) -> Any:
        return self.gather(value)[root]

    def run(self, function: Any) -> list[Any]:
        def as_rank(rank: int) -> Any:
            self._own.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(as_rank, range(self.size)))


class Run:
    """A run whose state is the number of its updates; each rank has ten batches."""

    def __init__(self, in_epoch: bool = False) -> None:
        self.t, self.weights, self.in_epoch = 0, torch.zeros(2), in_epoch
        self.state = SimpleNamespace(iterator=range(10))

    def content(self) -> Content:
        own = {"batch": self.t, "num_batches": 10, "iterator": "position", "kept": {}, "rng": None}
        return Content({"t": self.t, "in_epoch": self.in_epoch}, own, {"network": {"weights": self.weights}})

    def update(self, copies: MemoryCopies, num_ranks: int = 4) -> None:
        self.t += 1
        self.weights += 1
        copies.take(self, num_ranks)  # type: ignore[arg-type]


def summary(saved: Saved) -> tuple[int, list[float], int]:
    own = saved.ranks[0]
    return saved.common["t"], saved.trees["network"]["weights"].tolist(), own["batch"]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_ranks_return_to_the_last_copy_that_all_have(ahead):
    """A rank may be one copy ahead of the others when another one is lost."""
    coordinator = Threads(3)

    def lose_and_continue(rank: int) -> list[tuple[int, list[float], int]]:
        run, copies, found = Run(), MemoryCopies(), []
        for _ in range(4 + (rank == ahead)):
            run.update(copies)
        for _ in range(2):  # the second loss comes before another copy
            saved = copies.last_common(run, 4, coordinator)  # type: ignore[arg-type]
            assert len(saved.ranks) == 3 and saved.ranks[0]["iterator"] is None
            found.append(summary(saved))
        run.t, run.weights = saved.common["t"], saved.trees["network"]["weights"]
        run.update(copies)
        found.append(summary(copies.last_common(run, 4, coordinator)))  # type: ignore[arg-type]
        return found

    expected = [(4, [4.0, 4.0], 4), (4, [4.0, 4.0], 4), (5, [5.0, 5.0], 5)]
    assert coordinator.run(lose_and_continue) == [expected] * 3


def test_a_rank_is_lost_before_the_first_copy():
    run = Run()
    assert summary(MemoryCopies().last_common(run, 4, SingleProcess())) == (0, [0.0, 0.0], 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_before", "is_newcomer", "length", "expected"),
    [
        (4, [False] * 3, 13, 13 * 16 // 40),  # of 40 batches, 16 are done
        (4, [True, False, False, False], 10, 4),  # a spare rank takes the place of a lost one
        (3, [False, False, False, True], 8, 8 * 12 // 30),  # a new rank joins, when fewer have taken the copy
    ],
)
def test_the_rest_of_an_epoch_is_divided_among_the_present_ranks(num_before, is_newcomer, length, expected):
    """After 4 of 10 batches of each rank; and again after a further loss before the next copy, by the same number."""
    coordinator = Threads(len(is_newcomer))

    def lose(rank: int) -> list[int]:
        run, copies = Run(in_epoch=True), MemoryCopies()
        for _ in range(0 if is_newcomer[rank] else 4):
            run.update(copies, num_before)
        run.state.iterator = range(length)
        return [
            copies.last_common(run, num_before, coordinator, is_newcomer=is_new).ranks[rank]["batch"]  # type: ignore[arg-type]
            for is_new in (is_newcomer[rank], False)
        ]

    assert coordinator.run(lose) == [[expected, expected]] * len(is_newcomer)
