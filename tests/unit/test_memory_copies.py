"""To whoever loses a rank: those that are left return to the last copy in memory that all of them have."""

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
            saved = copies.last_common(run, coordinator)  # type: ignore[arg-type]
            assert len(saved.ranks) == 3 and saved.ranks[0]["iterator"] is None
            found.append(summary(saved))
        run.t, run.weights = saved.common["t"], saved.trees["network"]["weights"]
        run.update(copies)
        found.append(summary(copies.last_common(run, coordinator)))  # type: ignore[arg-type]
        return found

    expected = [(4, [4.0, 4.0], 4), (4, [4.0, 4.0], 4), (5, [5.0, 5.0], 5)]
    assert coordinator.run(lose_and_continue) == [expected] * 3


def test_a_rank_is_lost_before_the_first_copy():
    run = Run()
    assert summary(MemoryCopies().last_common(run, SingleProcess())) == (0, [0.0, 0.0], 0)  # type: ignore[arg-type]


def test_the_rest_of_an_epoch_is_divided_among_the_ranks_that_are_left():
    """Three of four ranks are left after 4 of 10 batches each: of the 40, 16 are done, so 4 of 10 by each."""
    runs, copies = [Run(in_epoch=True) for _ in range(3)], [MemoryCopies() for _ in range(3)]
    for run, own in zip(runs, copies, strict=True):
        for _ in range(4):
            run.update(own)

    def batches(size: int, iterator: Any) -> list[int]:
        coordinator = Threads(size)

        def lose(rank: int) -> int:
            runs[rank].state.iterator = iterator
            saved = copies[rank].last_common(runs[rank], coordinator)  # type: ignore[arg-type]
            return saved.ranks[rank]["batch"]

        return coordinator.run(lose)

    assert batches(3, range(13)) == [13 * 16 // 40] * 3  # 40 batches by three
    # Regression: another loss before the next copy, with iterators of unknown length; four ranks had done the 16.
    assert batches(2, iter(())) == [16 // 2] * 2


def test_the_rest_of_an_epoch_is_divided_among_the_ranks_when_a_new_one_joins():
    """Three ranks have taken a copy after 4 of 10 batches each: 12 of 30 are done."""
    coordinator = Threads(4)

    def join(rank: int) -> int:
        run, copies, is_newcomer = Run(in_epoch=True), MemoryCopies(), rank == 3
        for _ in range(0 if is_newcomer else 4):
            run.update(copies, 3)
        run.state.iterator = range(8)
        return copies.last_common(run, coordinator, is_newcomer=is_newcomer).ranks[rank]["batch"]  # type: ignore[arg-type]

    assert coordinator.run(join) == [8 * 12 // 30] * 4
