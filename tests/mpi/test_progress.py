"""To a user of ``torchmpi top``: what counts as a step is in the flight record, each step once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.communicators import flight_record, progress
from torchmpi.session import runtime

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(2)]

RANK = MPI.COMM_WORLD.rank


@pytest.fixture
def steps() -> Callable[[], progress.Steps]:
    """The steps since the test has begun, as after start(), which an earlier test may have called."""
    record = runtime.current().flight_record
    start = flight_record._PROGRESS_START
    progress.progress.attach(record._head[start : start + progress.NUM_BYTES])
    return lambda: progress.steps_in(bytes(record._head[start : start + progress.NUM_BYTES]))


def backward(net: nn.Module) -> None:
    net.zero_grad()
    net(torch.ones(2, 4)).sum().backward()


@pytest.mark.usefixtures("world")
def test_each_step_is_counted_once_by_whatever_counts_it(agree, steps):
    net = nn.Linear(4, 3)
    for _ in range(3):
        backward(net)
        mpinn.synchronize_gradients(net)
    by_gradients = steps().step.tolist()
    optimizer = mpinn.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    for _ in range(2):
        backward(net)
        optimizer.step()
    by_optimizer = steps().step.tolist()
    for loss in (0.5, 0.25):
        backward(net)
        optimizer.step()
        mpi.report_progress(samples=8 + RANK, loss=loss)
    found = steps()
    agree.equal(by_gradients, [1, 2, 3])
    agree.equal(by_optimizer, [1, 2, 3, 4, 5])
    agree.equal(found.step.tolist(), [1, 2, 3, 4, 5, 6, 7])
    agree.equal(found.samples.tolist()[-2:], [8 + RANK, 2 * (8 + RANK)])
    agree.equal(found.loss.tolist()[-2:], [0.5, 0.25])


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("shard", [False, True], ids=["ddp", "fsdp"])
def test_a_step_of_torch_is_one_of_its_optimizer_however_many_passes_it_accumulates(agree, steps, shard):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    net = fully_shard(net) if shard else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(4):
        for last in (False, False, True):
            if shard:
                net.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if shard or last else net.no_sync():
                net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    agree.equal(steps().step.tolist(), [1, 2, 3, 4])
