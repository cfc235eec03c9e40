"""To a user of local SGD and DiLoCo: steps of each rank alone, and averages of all ranks as in plain torch."""

from __future__ import annotations

import copy
import time
from functools import partial

import pytest
import torch
from helpers.outcomes import refusal
from helpers.updates_rig import LR, make_net, quadratic_step
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ArgumentError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


def train(net: nn.Module, update, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + mpi.rank())
        quadratic_step(net, torch.randn(4, 6, generator=generator))
        optimizer.step()
        update.update()


def test_local_sgd_averages_at_its_steps(agree):
    net = make_net()
    update = mpinn.LocalSGDUpdate(net, update_frequency=3, init_delay=1)
    changed = []
    for step in range(9):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(float(10 * step + mpi.rank()))
        changed.append(update.update())
        value = 10 * step + ((mpi.size() - 1) / 2 if changed[-1] else mpi.rank())
        for parameter in net.parameters():
            agree.equal(parameter.detach(), torch.full_like(parameter, value), f"step {step}")
    agree.equal([step for step, was in enumerate(changed) if was], [3, 6])
    with torch.no_grad():
        net[0].bias.fill_(float(mpi.rank()))
    update.finish()  # two steps are left over
    agree.equal(net[0].bias.detach(), torch.full((8,), (mpi.size() - 1) / 2), "averaged a last time")
    num_bytes = 3 * sum(parameter.nbytes for parameter in net.parameters())
    agree.equal((update.num_integrations, update.bytes_sent, update.bytes_received), (3, num_bytes, num_bytes))


def test_local_sgd_every_step_is_data_parallel_training(agree):
    net, twin = make_net(), make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    train(net, mpinn.LocalSGDUpdate(net, update_frequency=1), optimizer, range(5))
    other = torch.optim.SGD(twin.parameters(), lr=LR)
    for step in range(5):
        generator = torch.Generator().manual_seed(1000 * step + mpi.rank())
        quadratic_step(twin, torch.randn(4, 6, generator=generator))
        mpinn.synchronize_gradients(twin)
        other.step()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        agree.close(ours.detach(), theirs.detach())
    mpinn.check_with_allreduce(net)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_diloco_is_torch_sgd_on_the_average_change(agree, nesterov, momentum):
    net, twin = make_net(), make_net()
    update = mpinn.DiLoCoUpdate(net, update_frequency=3, outer_momentum=momentum, nesterov=nesterov)
    inner, other = torch.optim.SGD(net.parameters(), lr=LR), torch.optim.SGD(twin.parameters(), lr=LR)
    anchor = copy.deepcopy(twin)
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=momentum, nesterov=nesterov and momentum > 0)
    for step in range(9):
        train(net, update, inner, range(step, step + 1))
        generator = torch.Generator().manual_seed(1000 * step + mpi.rank())
        quadratic_step(twin, torch.randn(4, 6, generator=generator))
        other.step()
        if (step + 1) % 3 == 0:
            for held, own in zip(anchor.parameters(), twin.parameters(), strict=True):
                held.grad = mpi.allreduce((held - own).detach(), op="avg")
            outer.step()
            twin.load_state_dict(anchor.state_dict())
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            agree.close(ours.detach(), theirs.detach(), f"step {step}")
    mpinn.check_with_allreduce(net)


@pytest.mark.parametrize("overlap_steps", [1, 2, 3])
def test_overlapped_diloco_adds_the_steps_of_the_exchange_to_the_anchor(agree, overlap_steps):
    net, twin = make_net(), make_net()
    update = mpinn.DiLoCoUpdate(net, update_frequency=3, overlap_steps=overlap_steps, compression="bf16")
    inner, other = torch.optim.SGD(net.parameters(), lr=LR), torch.optim.SGD(twin.parameters(), lr=LR)
    anchor, begun = copy.deepcopy(twin), None
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def take_outer_step() -> None:
        outer.step()
        with torch.no_grad():
            for new, start, own in zip(anchor.parameters(), begun.parameters(), twin.parameters(), strict=True):
                own.copy_(new + (own - start))

    for step in range(10):
        train(net, update, inner, range(step, step + 1))
        mpi.allreduce(torch.ones(3))  # calls of the program during the exchange
        generator = torch.Generator().manual_seed(1000 * step + mpi.rank())
        quadratic_step(twin, torch.randn(4, 6, generator=generator))
        other.step()
        if begun is not None and (step + 1) % 3 == overlap_steps % 3:
            take_outer_step()
        if (step + 1) % 3 == 0:
            begun = copy.deepcopy(twin)
            for held, own in zip(anchor.parameters(), twin.parameters(), strict=True):
                held.grad = mpi.allreduce((held - own).detach().bfloat16(), op="avg").float()
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            agree.close(ours.detach(), theirs.detach(), f"step {step}")
        for ours, theirs in zip(update.anchor, anchor.parameters(), strict=True):
            agree.close(ours, theirs.detach(), f"anchor at step {step}")
    update.finish()
    mpinn.check_with_allreduce(net)
    for ours, theirs in zip(update.anchor, net.parameters(), strict=True):
        agree.equal(ours, theirs.detach())
    num_bytes = 4 * sum(parameter.nbytes for parameter in net.parameters()) // 2  # three times, and at the end
    agree.equal((update.num_sends, update.num_integrations, update.bytes_sent), (4, 4, num_bytes))


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_compressed_diloco_converges_like_the_exact_one(agree, overlap_steps):
    settings = {"update_frequency": 4, "outer_lr": 0.5, "outer_momentum": 0.0, "overlap_steps": overlap_steps}
    results = []
    for compression in (None, mpinn.EightBit(within_hosts=True)):
        net = make_net()
        with mpinn.DiLoCoUpdate(net, **settings, compression=compression) as update:
            train(net, update, torch.optim.SGD(net.parameters(), lr=LR), range(40))
        mpinn.check_with_allreduce(net)
        results.append(torch.cat([parameter.detach().flatten() for parameter in net.parameters()]))
    exact, compressed = results
    start = torch.cat([parameter.detach().flatten() for parameter in make_net().parameters()])
    if mpi.size() > 1:
        agree.equal(update.bytes_sent, compression.payload_bytes)
    agree(bool((compressed - exact).norm() < 0.02 * (exact - start).norm()), f"{(compressed - exact).norm()}")


def test_diloco_without_outer_optimizer_is_local_sgd(agree):
    net, twin = make_net(), make_net()
    with mpinn.DiLoCoUpdate(net, update_frequency=4, outer_lr=1.0, outer_momentum=0.0) as update:
        train(net, update, torch.optim.SGD(net.parameters(), lr=LR), range(10))
    with mpinn.LocalSGDUpdate(twin, update_frequency=4) as other:
        train(twin, other, torch.optim.SGD(twin.parameters(), lr=LR), range(10))
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        agree.close(ours.detach(), theirs.detach())
    agree.equal((update.num_sends, update.bytes_sent), (other.num_sends, other.bytes_sent))


def test_diloco_starts_with_the_network_of_rank_0_after_the_delay(agree):
    net = make_net(seed=mpi.rank())
    update = mpinn.DiLoCoUpdate(net, update_frequency=2, init_delay=3, outer_lr=0.5, outer_momentum=0.0)
    values = [8.0 + mpi.rank() + step for step in range(5)]
    for value in values:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(value)
        update.update()
    anchor, mean = 8.0 + 2, 8.0 + (mpi.size() - 1) / 2 + 4
    for parameter in net.parameters():
        agree.close(parameter.detach(), torch.full_like(parameter, (anchor + mean) / 2))


def test_diloco_has_an_anchor_if_steps_are_skipped(agree):
    net = make_net()
    update = mpinn.DiLoCoUpdate(net, update_frequency=2, init_delay=2, outer_lr=0.5, outer_momentum=0.0)
    changed = []
    for step in range(3, 7):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(float(step))
        changed.append(update.update(step))
        if step == 5:
            agree.equal(net[0].bias.detach(), torch.full((8,), 4.0), "the mean of 3 and 5")
    agree.equal(changed, [False, False, True, False])


def test_invalid_outer_options_are_rejected(agree):
    wrong = (
        {"outer_lr": 0.0},
        {"outer_momentum": 1.0},
        {"overlap_steps": 101},
        {"overlap_steps": -1},
        {"compression": "x"},
    )
    for options in wrong:
        agree(ArgumentError.__name__ in refusal(lambda options=options: mpinn.DiLoCoUpdate(make_net(), **options)))
    agree("no trainable parameters" in refusal(lambda: mpinn.LocalSGDUpdate(nn.Tanh())))


# --- resuming


@pytest.mark.parametrize(
    "make", [mpinn.LocalSGDUpdate, mpinn.DiLoCoUpdate, partial(mpinn.DiLoCoUpdate, overlap_steps=4)]
)
@pytest.mark.parametrize("init_delay", [0, 2])
def test_resumed(agree, make, init_delay):
    settings = {"update_frequency": 4, "init_delay": init_delay}
    whole, first = make_net(), make_net()  # equal bits at the end also show that runs are reproducible
    update = make(whole, **settings)
    train(whole, update, torch.optim.SGD(whole.parameters(), lr=LR), range(13))
    before = make(first, **settings)
    train(first, before, torch.optim.SGD(first.parameters(), lr=LR), range(7))
    state, second = before.state_dict(), make_net(seed=5)
    second.load_state_dict(first.state_dict())
    after = make(second, **settings)
    after.load_state_dict(state)
    train(second, after, torch.optim.SGD(second.parameters(), lr=LR), range(7, 13))
    for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        agree.equal(ours.detach(), theirs.detach())
    agree.equal(after.metrics(), pytest.approx(update.metrics(), nan_ok=True))
    if state.get("begun_at") is not None:
        unlike = mpinn.DiLoCoUpdate(make_net(), **settings)
        agree("the same overlap_steps" in refusal(lambda: unlike.load_state_dict(state)))


def test_diloco_returns_to_a_state_during_an_exchange(agree):
    net = make_net()
    update = mpinn.DiLoCoUpdate(net, update_frequency=4, overlap_steps=4)
    inner = torch.optim.SGD(net.parameters(), lr=LR)
    train(net, update, inner, range(2))
    state, weights = update.state_dict(), copy.deepcopy(net.state_dict())
    train(net, update, inner, range(2, 7))
    if mpi.rank() == mpi.size() - 1:
        time.sleep(0.3)  # the other ranks load the state before their exchange has ended
    train(net, update, inner, range(7, 8))
    expected = copy.deepcopy(net)
    update.load_state_dict(state)
    net.load_state_dict(weights)
    train(net, update, inner, range(2, 8))
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        agree.equal(ours.detach(), theirs.detach())
