"""Starting torchmpi with slots so small that short tensors take every path; lengths and tensors for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import torchmpi as mpi
from helpers import contract
from torchmpi.backends import shm
from torchmpi.session import runtime
from torchmpi.shared_memory import memory_layout

PAGE_SLOTS, LARGE_SLOTS = 4096, 64 << 10
BY_PYTHON: Any = "".join(("sh", "m"))
"""The name of the backend as another object: fast paths compare addresses, so that Python runs each call."""


def start(**settings: object) -> None:
    """Start torchmpi with the watchdog settings of these tests, and the given settings."""
    mpi.start(config=dataclasses.replace(mpi.Config.from_environment(), verbose=False, **settings))
    problem = runtime.current().selector.backends["shm"].why_not("allreduce", "cpu", mpi.communicator(0).intra)
    if problem is not None:
        pytest.skip(f"no shared memory: {problem}")


@pytest.fixture(scope="module", params=(PAGE_SLOTS, LARGE_SLOTS), ids=("slots of a page", "slots of 64 KB"))
def slots(request):
    """torchmpi, started with slots of this size; the start of the session is restored afterwards."""
    was_running = runtime.is_running()
    mpi.stop()
    start(slot_bytes=request.param)
    yield request.param
    mpi.stop()
    if was_running:
        mpi.start()


any_slots = pytest.mark.parametrize("slots", (PAGE_SLOTS,), indirect=True, ids=("slots of a page",))
"""For tests of `slots` that do not depend on the length of the slots: one length suffices."""


@pytest.fixture
def stopped():
    """Stop torchmpi, for tests that start it with other settings."""
    before = runtime.current().config if runtime.is_running() else None
    mpi.stop()
    yield
    mpi.stop()
    if before is not None:
        mpi.start(config=before)


def numels(itemsize: int, slot_bytes: int) -> list[int]:
    """Lengths on both sides of every limit."""
    size = mpi.size()
    borders = [
        0,
        memory_layout.PAYLOAD_BYTES - 8,
        memory_layout.PAYLOAD_BYTES,
        size * (memory_layout.PAYLOAD_BYTES - 8),
        shm.WHOLE_BYTES,
        slot_bytes,
        slot_bytes * size,
        2 * slot_bytes,
        5 * slot_bytes + 64,
    ]
    around = {border // itemsize + more for border in borders for more in (-1, 0, 1)}
    return sorted(numel for numel in around | {7, 3001} if numel >= 0)


def shared(values: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """The same values in shared memory, at this offset in elements."""
    memory = mpi.empty_shared(values.numel() + offset + 3, dtype=values.dtype)
    return memory[offset : offset + values.numel()].view(values.shape).copy_(values)


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [contract.values(shape, dtype, rank, seed) for rank in range(mpi.size())]
