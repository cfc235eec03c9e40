"""To a user of DistributedOptimizer: any torch optimizer, with averaged gradients."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from helpers.nn_nets import gradients, loss, make, mine, values
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ArgumentError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]
TIGHT = {"rtol": 1e-9, "atol": 1e-11}
MODES = pytest.mark.parametrize("asynchronous", [True, False])


def wrapped(asynchronous: bool, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options):
    net, x, y = make("mlp")
    optimizer = mpinn.DistributedOptimizer(kind(net.parameters(), lr=0.1, **options), net, asynchronous=asynchronous)
    return net, optimizer, mine(x), mine(y)


def reference(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options):
    """The same on one rank, with the whole batch."""
    net, x, y = make("mlp")
    return net, kind(net.parameters(), lr=0.1, **options), x, y


def train(net, optimizer, x, y, num_steps: int = 3) -> torch.Tensor:
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss(net, x, y).backward()
        optimizer.step()
    return values(net)


@MODES
@pytest.mark.parametrize("average", [True, False])
def test_a_step_after_synchronize_does_not_synchronize(agree, asynchronous, average):
    net, x, y = make("mlp")
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = mpinn.DistributedOptimizer(inner, net, asynchronous=asynchronous, average=average)
    for explicit in (True, False, True):
        optimizer.zero_grad()
        factor = 1 if average else 1 / mpi.size()
        (loss(net, mine(x), mine(y)) * factor).backward()
        if explicit:
            optimizer.synchronize()
        optimizer.step()
    agree.close(values(net), train(*reference()), **TIGHT)


def test_accumulation_and_a_step_after_fewer_passes(agree):
    net, x, y = make("mlp")
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    ours = net, mpinn.DistributedOptimizer(inner, net, backward_passes_per_step=2), mine(x), mine(y)
    results = []
    for net, optimizer, x, y in (ours, reference()):
        for num_passes in (2, 1):
            optimizer.zero_grad()
            for _ in range(num_passes):
                loss(net, x, y).backward()
            optimizer.step()
        results.append(values(net))
    agree.close(results[0], results[1], **TIGHT)


def test_sum_instead_of_average(agree):
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = mpinn.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net, average=False)
    net(torch.ones(1, 1)).backward()
    optimizer.step()
    agree.equal(net.weight.detach(), torch.full((1, 1), -float(mpi.size())))


def test_schedulers_accept_the_wrapper(agree):
    net, optimizer, x, y = wrapped(True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        train(net, optimizer, x, y, num_steps=1)
        scheduler.step()
    net2, optimizer2, x2, y2 = reference()
    for lr in (0.1, 0.05):
        optimizer2.param_groups[0]["lr"] = lr
        train(net2, optimizer2, x2, y2, num_steps=1)
    agree(isinstance(optimizer, torch.optim.Optimizer))
    agree.equal(optimizer.param_groups[0]["lr"], 0.025)
    agree.close(values(net), values(net2), **TIGHT)


def test_scheduler_made_for_the_inner_optimizer_does_not_bypass_it(agree):
    net, x, y = make("mlp")
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(inner, step_size=1)
    optimizer = mpinn.DistributedOptimizer(inner, net)
    agree.close(train(net, optimizer, mine(x), mine(y)), train(*reference()), **TIGHT)


def test_state_is_shared_with_the_wrapped_optimizer(agree):
    net, optimizer, x, y = wrapped(False, torch.optim.SGD, momentum=0.9)
    train(net, optimizer, x, y)
    inner = optimizer.optimizer
    agree(optimizer.state is inner.state and optimizer.param_groups is inner.param_groups)
    other_net, other, _, _ = wrapped(False, torch.optim.SGD, momentum=0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # loading shares the tensors
    other_net.load_state_dict(net.state_dict())
    agree.equal(train(other_net, other, x, y), train(net, optimizer, x, y))


def test_step_hooks(agree):
    net, optimizer, x, y = wrapped(True)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(net, optimizer, x, y, num_steps=2)
    agree.equal(len(calls), 2)


def test_foreign_parameters_are_refused(agree):
    net, stranger = nn.Linear(2, 2), nn.Linear(3, 1)
    inner = torch.optim.SGD([*net.parameters(), *stranger.parameters()], lr=0.1)
    with pytest.raises(ArgumentError, match=r"parameter 2 of group 0, of shape \[1, 3\]"):
        mpinn.DistributedOptimizer(inner, net)
    optimizer = mpinn.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
    with pytest.raises(ArgumentError, match="group 1"):
        optimizer.add_param_group({"params": list(stranger.parameters())})
    agree.equal(len(optimizer.param_groups), 1)
    mpinn.unregister_async_backward(net)


def test_refusals(agree):
    net = nn.Linear(2, 2)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="backward_passes_per_step=0"):
        mpinn.DistributedOptimizer(inner, net, asynchronous=False, backward_passes_per_step=0)
    optimizer = mpinn.DistributedOptimizer(inner, net, asynchronous=False)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ArgumentError, match="before the optimizer is wrapped"):
            duplicate(optimizer)
    for call in (mpinn.register_async_backward, mpinn.synchronize_gradients):
        with pytest.raises(ArgumentError, match="bucket_bytes=0"):
            call(net, bucket_bytes=0)


def test_a_block_inside_skip_synchronize_does_not_end_it(agree):
    net, optimizer, x, y = wrapped(False)
    with optimizer.skip_synchronize():
        with optimizer.skip_synchronize():
            pass
        loss(net, x, y).backward()
        before = gradients(net)
        optimizer.zero_grad(set_to_none=False)
        for parameter, gradient in zip(net.parameters(), before, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for actual, expected in zip(gradients(net), before, strict=True):
        agree(torch.equal(actual, expected), "the gradients are local")


@MODES
def test_nets_that_share_parameters_are_refused(agree, asynchronous):
    """Regression: without hooks that send, each step raised an error, which named calls that had been made."""
    encoder = nn.Linear(2, 2)
    first, second = nn.Sequential(encoder, nn.Linear(2, 1)), nn.Sequential(encoder, nn.Linear(2, 1))
    both = nn.ModuleList([first, second])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    kept = mpinn.DistributedOptimizer(optimizers[0], first, asynchronous=asynchronous)
    with pytest.raises(ArgumentError, match=r"'0.weight', '0.bias' belong to another net too"):
        mpinn.DistributedOptimizer(optimizers[1], second, asynchronous=False)
    if asynchronous:
        mpinn.unregister_async_backward(first)
        return
    del kept
    gc.collect()
    mpinn.synchronize_parameters(both)
    wrapped = [mpinn.DistributedOptimizer(optimizer, both, asynchronous=False) for optimizer in optimizers]
    for _ in range(2):
        for net, optimizer in zip((first, second), wrapped, strict=True):
            optimizer.zero_grad()
            net(torch.full((1, 2), mpi.rank() + 1.0)).sum().backward()
            optimizer.step()
    mpinn.check_with_allreduce(both)
    agree(True)
