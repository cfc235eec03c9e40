"""To a program with threads: whichever thread needs a plan first makes it, and it is made once."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import torchmpi as mpi
from torchmpi.backends import shm
from torchmpi.session import runtime
from torchmpi.shared_memory import fast_path

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(2), pytest.mark.usefixtures("world")]


def test_threads_that_prepare_calls_concurrently_share_the_state_of_the_group(agree, monkeypatch):
    """Regression: each thread made its own state, with its own count of chunks, and first calls sometimes failed."""
    made = []

    def make_slowly(*arguments):
        made.append(shared := real(*arguments))
        time.sleep(0.05)
        return shared

    real = shm.SharedGroup
    monkeypatch.setattr(shm, "SharedGroup", make_slowly)
    level = mpi.push_communicator(0, name="prepared twice")
    group, backend = mpi.communicator(level).intra, runtime.current().selector.backends["shm"]
    if backend.why_not("allreduce", "cpu", group) is None:
        collectives = (("allreduce", torch.float32, "sum"), ("barrier", None, None), ("alltoall", torch.float32, None))
        threads = [threading.Thread(target=backend.bind, args=(group, *collective)) for collective in collectives]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        agree.equal(len(made), 1)
    mpi.set_communicator(0)


def test_a_call_that_two_threads_make_is_cached_once(agree):
    """Regression: the second cached call replaced the first one, whose address machine code had."""
    backend, group = runtime.current().selector.backends["shm"], mpi.communicator(0).intra
    if backend.why_not("broadcast", "cpu", group) is not None:
        pytest.skip("no shared memory among these ranks")
    calls, unused, asked = backend.bind(group, "broadcast", torch.float32, None), object(), []

    def find():
        asked.append(1)
        time.sleep(0.05)
        return calls.cached_call(0, None)

    name = fast_path.Name(0, torch.float32, unused)
    threads = [threading.Thread(target=fast_path.cache_call, args=("broadcast", name, find)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fast_path.invalidate()
    agree(len(asked) <= 1, f"{len(asked)} cached calls")


def test_threads_that_cache_a_call_get_the_same_plan(agree, monkeypatch):
    """A plan that was replaced by another thread's was freed while machine code still had its address."""
    backend = runtime.current().selector.backends["shm"]
    group = mpi.communicator(0).intra
    if backend.why_not("broadcast", "cpu", group) is not None:
        pytest.skip("no shared memory among these ranks")
    calls = backend.bind(group, "broadcast", torch.float32, None)
    zeros = shm.np.zeros

    def slowly(*arguments):
        time.sleep(0.05)
        return zeros(*arguments)

    monkeypatch.setattr(shm.np, "zeros", slowly)
    plans = []
    threads = [threading.Thread(target=lambda: plans.append(calls.cached_call(0, None).record)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    agree.equal(len(set(plans)), 1)
