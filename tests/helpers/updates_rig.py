"""Shared by the tests of updates: a network, gradients, and steps in rank order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torchmpi as mpi
import torchmpi.parameterserver as ps

LR = 0.125  # products with it are exact, so that results can be compared bit for bit


@pytest.fixture(scope="module")
def levels(world) -> dict[str, int]:
    """Two more levels: every rank on its own, and ranks in pairs."""
    found = {}
    for name, key in (("alone", mpi.rank()), ("pairs", mpi.rank() // 2)):
        with mpi.use(0):
            found[name] = mpi.push_communicator(f"{name} {key}")
        mpi.set_communicator(0)
    return found


@pytest.fixture(autouse=True)
def no_servers_left() -> Iterator[None]:
    yield
    ps.free_all()


def step_in_turn(update: ps.Update) -> None:
    """Take a step on one rank after the other, and complete its sends and fetches."""
    for turn in range(mpi.size()):
        if mpi.rank() == turn:
            update.update()
            update.settle_send()
            ps.sync_handles(update.servers.fetching)
        mpi.barrier()


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def set_gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randint(-8, 9, parameter.shape, generator=generator).float()


def quadratic_step(net: nn.Module, inputs: torch.Tensor) -> None:
    net.zero_grad()
    net(inputs).square().sum().mul(0.01).backward()
