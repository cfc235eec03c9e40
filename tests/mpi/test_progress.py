"""Steps in the flight record: what counts them, each step once, for `torchmpi top`."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.communicators import flight_record, progress
from torchmpi.session import runtime

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(2)]

RANK = MPI.COMM_WORLD.rank


def steps() -> progress.Steps:
    record = runtime.current().flight_record
    start = flight_record._PROGRESS_START
    return progress.steps_in(bytes(record._head[start : start + progress.NUM_BYTES]))


def backward(net: nn.Module) -> None:
    net.zero_grad()
    net(torch.ones(2, 4)).sum().backward()


@pytest.mark.usefixtures("world")
def test_each_step_is_counted_once_by_whatever_counts_it(agree):
    assert progress.progress._memory is not None
    progress.progress.attach(progress.progress._memory)  # as after start(), which an earlier test may have called
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
