"""To who clips gradients: after synchronization, alone, with GradScaler and DistributedOptimizer, as in one process."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.nn_nets import gradients, loss, make, mine, values
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import GradientError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]
TIGHT = {"rtol": 1e-9, "atol": 1e-11}
ORDERS = pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])


def clipped(norm_type: float = 2.0) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """The clipped gradients of the whole batch, and their norm, on one rank."""
    net, inputs, targets = make("mlp")
    loss(net, inputs, targets).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm_type)
    return gradients(net), norm


def same_on_all(agree, tensor: torch.Tensor) -> None:
    every = mpi.allgather(tensor.detach().reshape(1, -1).clone())
    agree(bool((every == every[0]).all()), f"differs between ranks: {every.tolist()}")


@ORDERS
@pytest.mark.parametrize("mode", ["synchronous", "pending", "finished", "parameters", "synchronous optimizer"])
def test_norm_and_gradients_are_those_of_the_whole_batch(agree, mode, norm_type):
    net, inputs, targets = make("mlp")
    is_registered = not mode.startswith("synchronous")
    if is_registered:
        mpinn.register_async_backward(net, bucket_bytes=300)
    if mode == "synchronous optimizer":
        optimizer = mpinn.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, asynchronous=False)
    loss(net, mine(inputs), mine(targets)).backward()
    if mode == "synchronous":
        mpinn.synchronize_gradients(net)
    if mode == "finished":
        mpinn.synchronize_gradients_async(net)
    norm = mpinn.clip_grad_norm_(net.parameters() if mode == "parameters" else net, 0.1, norm_type)
    expected, expected_norm = clipped(norm_type)
    agree.close(norm, expected_norm, **TIGHT)
    same_on_all(agree, norm)
    for actual, gradient in zip(gradients(net), expected, strict=True):
        agree.close(actual, gradient, **TIGHT)
    if mode == "synchronous optimizer":
        optimizer.step()  # does not synchronize again
        mpinn.check_with_allreduce(net)
    if is_registered:
        mpinn.unregister_async_backward(net)


def test_a_rank_without_gradients_takes_part(agree):
    net, inputs, targets = make("mlp")
    mpinn.register_async_backward(net)
    if mpi.rank() == 0:
        loss(net, inputs, targets).backward()
    norm = mpinn.clip_grad_norm_(net, 0.001)
    mpinn.unregister_async_backward(net)
    agree.close(norm, clipped()[1] / mpi.size(), **TIGHT)


def test_without_gradients(agree):
    agree.equal(mpinn.clip_grad_norm_(make("mlp")[0], 1.0).item(), 0.0)


def test_nonfinite_norms_raise_on_all_ranks(agree):
    net = nn.Linear(1, 1, bias=False)
    net.weight.grad = torch.tensor([[math.inf if mpi.rank() == 0 else 1.0]])
    mpinn.synchronize_gradients(net)
    with pytest.raises(RuntimeError, match="is inf"):
        mpinn.clip_grad_norm_(net, 1.0, error_if_nonfinite=True)
    agree.equal(mpinn.clip_grad_norm_(net, 1.0).item(), math.inf)


def test_sparse_gradients(agree):
    net = nn.Embedding(5, 2, sparse=True)
    net(torch.tensor([mpi.rank(), mpi.rank(), 4])).sum().backward()
    mpinn.synchronize_gradients(net)
    dense = net.weight.grad.to_dense()
    norm = mpinn.clip_grad_norm_(net, 0.5)
    agree.close(norm, dense.norm())
    mpinn.clip_grad_norm_(net, 1000.0)
    agree.close(net.weight.grad.to_dense(), dense * 0.5 / dense.norm())
    mpinn.clip_grad_value_(net, 0.01)
    agree.close(net.weight.grad.to_dense(), (dense * 0.5 / dense.norm()).clamp(max=0.01))


@ORDERS
def test_shards_count_on_all_ranks(agree, norm_type):
    torch.manual_seed(3)
    layer = mpinn.MPLinear(7, 3).double()
    torch.manual_seed(3)
    whole = nn.Linear(7, 3).double()
    inputs = torch.randn(5, 7).double()
    for net in (layer, whole):
        net(inputs).square().sum().backward()
    norm = mpinn.clip_grad_norm_(layer, 0.1, norm_type)
    agree.close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.1, norm_type), **TIGHT)
    agree.close(layer.weight.grad, layer.select_columns(whole.weight.grad), **TIGHT)
    agree.close(layer.bias.grad, whole.bias.grad, **TIGHT)
    same_on_all(agree, norm)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_values_are_clipped_after_the_synchronization(agree, asynchronous):
    net, inputs, targets = make("mlp")
    if asynchronous:
        mpinn.register_async_backward(net)
    loss(net, mine(inputs), mine(targets)).backward()
    if not asynchronous:
        mpinn.synchronize_gradients(net)
    mpinn.clip_grad_value_(net, 0.01)
    other, inputs, targets = make("mlp")
    loss(other, inputs, targets).backward()
    nn.utils.clip_grad_value_(other.parameters(), 0.01)
    for actual, expected in zip(gradients(net), gradients(other), strict=True):
        agree.close(actual, expected, **TIGHT)
    if asynchronous:
        mpinn.unregister_async_backward(net)


# --- with DistributedOptimizer ---------------------------------------------------------------------------

CLIPS = {
    "before the step": lambda net, optimizer: mpinn.clip_grad_norm_(net, 0.1),
    "of torch": lambda net, optimizer: (
        optimizer.synchronize(),
        nn.utils.clip_grad_norm_(net.parameters(), 0.1),
    ),
    "after synchronize_gradients_async": lambda net, optimizer: (
        mpinn.synchronize_gradients_async(net),
        nn.utils.clip_grad_norm_(net.parameters(), 0.1),
    ),
}


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("clip", CLIPS)
def test_steps_with_clipping(agree, clip, average):
    net, inputs, targets = make("mlp")
    optimizer = mpinn.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, average=average)
    for _ in range(3):
        optimizer.zero_grad()
        loss(net, mine(inputs), mine(targets)).backward()
        CLIPS[clip](net, optimizer)
        optimizer.step()
    other, inputs, targets = make("mlp")
    reference = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        reference.zero_grad()
        (loss(other, inputs, targets) * (1 if average else mpi.size())).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        reference.step()
    agree.close(values(net), values(other), **TIGHT)
    mpinn.check_with_allreduce(net)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_grad_scaler_without_unscale(agree, asynchronous):
    """A fused optimizer would get the scale in an attribute of the wrapper, where it does not look for it."""
    net, inputs, targets = make("mlp")
    inner = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    optimizer = mpinn.DistributedOptimizer(inner, net, asynchronous=asynchronous)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss(net, mine(inputs), mine(targets))).backward()
    optimizer.synchronize()
    scaler.step(optimizer)
    other, inputs, targets = make("mlp")
    loss(other, inputs, targets).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    agree.close(values(net), values(other), **TIGHT)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_backward_between_synchronize_and_step(agree, asynchronous):
    net, inputs, targets = make("mlp")
    optimizer = mpinn.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, asynchronous=asynchronous)
    loss(net, mine(inputs), mine(targets)).backward()
    optimizer.synchronize()
    loss(net, mine(inputs), mine(targets)).backward()
    if asynchronous:
        with pytest.raises(GradientError, match="before it is synchronized"):
            optimizer.step()
        return
    optimizer.step()  # synchronizes again: the average of the first pass is the same on all ranks
    other, inputs, targets = make("mlp")
    for _ in range(2):
        loss(other, inputs, targets).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    agree.close(values(net), values(other), **TIGHT)
