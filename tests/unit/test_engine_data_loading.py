"""To a user of prefetching: same batches in the same order, errors with their traceback, no thread left."""

from __future__ import annotations

import random
import threading
import traceback

import numpy as np
import pytest
import torch
from helpers.device_model import Model
from torch.nn.utils.rnn import pack_sequence

from torchmpi.engine import data_loading
from torchmpi.engine.data_loading import DeviceCopy, Prefetcher
from torchmpi.engine.state import Sample


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchmpi-prefetch")]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("num", [0, 1, 2, 3, 50])
def test_order(depth, num):
    with Prefetcher(iter(range(num)).__next__, depth) as ahead:
        assert list(ahead) == list(range(num))
        assert list(ahead) == []  # the iterator remains exhausted
    assert not threads()


@pytest.mark.parametrize("depth", [1, 3])
def test_loads_up_to_depth_ahead(depth):
    loaded = []
    enough = threading.Semaphore(0)

    def load():
        loaded.append(len(loaded))
        enough.release()
        return loaded[-1]

    with Prefetcher(load, depth) as ahead:
        for taken in range(2, 10):
            while next(ahead) < taken - 1:
                pass
            while len(loaded) < taken + depth:
                assert enough.acquire(timeout=20)
            assert len(loaded) == taken + depth
    assert not threads()


def test_copies_to_another_gpu_set_no_stream_of_the_first_one(monkeypatch):
    """That would create a context there, of hundreds of MB, for every rank on another GPU."""
    model = Model(0)
    model.install(monkeypatch)
    model.set_device(torch.device("cuda", 1))
    copies = DeviceCopy(torch.device("cuda", 1))
    thread = threading.Thread(target=copies.send, args=(Sample(1, 2),))
    thread.start()
    thread.join()
    assert model.contexts == {1}
    model.set_device(torch.device("cuda", 0))
    copies.send(Sample(1, 2))  # the device of a thread of the user stays
    assert model.current_device() == 0


def fail_at(index):
    for i in range(10):
        if i == index:
            raise ValueError(f"bad row {i}")
        yield i


@pytest.mark.parametrize("index", [0, 1, 2, 7])
def test_errors_keep_their_traceback(index):
    taken = []
    with pytest.raises(ValueError, match=f"bad row {index}") as caught:
        with Prefetcher(fail_at(index).__next__, depth=2) as ahead:
            for item in ahead:
                taken.append(item)
    assert taken == list(range(index))
    assert "fail_at" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert not threads()


def test_early_end_leaves_no_thread():
    with Prefetcher(iter(range(1000)).__next__, depth=4) as ahead:
        for _ in range(5):
            next(ahead)
        assert threads()
    assert not threads()


def test_failed_run_does_not_wait_for_a_hanging_load(monkeypatch):
    monkeypatch.setattr(data_loading, "CLOSE_TIMEOUT_S", 0.1)
    release, count = threading.Event(), iter(range(100))

    def load():
        if next(count) >= 2:
            release.wait(60)
        return 0

    with pytest.raises(KeyError):
        with Prefetcher(load, depth=1) as ahead:
            next(ahead), next(ahead)
            raise KeyError("in a hook")
    left = threads()
    release.set()
    assert left  # the failed run did not wait for the thread


@pytest.mark.parametrize("draw", [lambda: torch.rand(1).item(), random.random, np.random.rand])
def test_loads_that_use_global_generators_stay_in_the_training_thread(draw):
    """Runs would differ if two threads used one generator."""

    def load():
        assert threading.current_thread() is threading.main_thread()
        return draw()

    with Prefetcher(load, depth=2) as ahead:
        for _ in range(5):
            next(ahead)


def test_seeds_drawn_with_the_first_batch_are_allowed():
    def batches():
        random.random()
        while True:
            yield threading.current_thread() is threading.main_thread()

    with Prefetcher(batches().__next__, depth=1) as ahead:
        assert [next(ahead) for _ in range(4)] == [True, True, False, False]


def test_packed_sequences_keep_their_batch_sizes_on_the_host():
    """Regression: torch refused the copy on a GPU."""
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    sent = DeviceCopy(torch.device("meta")).send(Sample(packed, 0)).input
    assert (sent.data.device.type, sent.unsorted_indices.device.type) == ("meta", "meta")
    assert sent.batch_sizes.tolist() == [2, 2, 1]
    alone = DeviceCopy(torch.device("meta")).send(Sample(pack_sequence([torch.ones(2)]), 0)).input
    assert alone.sorted_indices is None
