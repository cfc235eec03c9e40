"""To a user of 16-bit gradients: what is sent is rounded once, and added in float32."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.nn_nets import gradients, loss, make, mine, values
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ArgumentError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]
WIRES = pytest.mark.parametrize(("compression", "wire"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
HOW = pytest.mark.parametrize("how", ["sync", "async", "optimizer", "optimizer, async"])


def backward(dtype: torch.dtype = torch.float64) -> nn.Module:
    net, inputs, targets = make("mlp")
    loss(net.to(dtype), mine(inputs).to(dtype), mine(targets)).backward()
    return net


def reduced(net: nn.Module, wire: torch.dtype, op: str = "avg") -> list[torch.Tensor]:
    """The reductions of the gradients, each sent by itself."""
    return [mpi.allreduce(p.grad.to(wire), op=op).to(p.dtype) for p in net.parameters()]


def compare(agree, net: nn.Module, expected: list[torch.Tensor]) -> None:
    for actual, gradient in zip(gradients(net), expected, strict=True):
        agree.equal(actual, gradient)


@WIRES
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_rounded_before_and_after_the_sum(agree, compression, wire, dtype, average):
    net = backward(dtype)
    expected = reduced(net, wire, "avg" if average else "sum")
    mpinn.synchronize_gradients(net, average, compression=compression, bucket_bytes=300)
    compare(agree, net, expected)


@WIRES
@HOW
def test_training_is_close_to_that_without_compression(agree, how, compression, wire):
    results = []
    for kind in (compression, None):
        net, inputs, targets = make("mlp")
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if how == "async":
            mpinn.register_async_backward(net, bucket_bytes=300, compression=kind)
        elif how != "sync":
            optimizer = mpinn.DistributedOptimizer(optimizer, net, asynchronous="async" in how, compression=kind)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss(net, mine(inputs), mine(targets)).backward()
            expected = None if kind is None else reduced(net, wire) if "async" not in how else None
            if how == "sync":
                mpinn.synchronize_gradients(net, compression=kind)
            elif how == "async":
                mpinn.synchronize_gradients_async(net)
            optimizer.step()
            if expected is not None:
                compare(agree, net, expected)
        mpinn.check_with_allreduce(net)
        if "async" in how:
            mpinn.unregister_async_backward(net)
        results.append(values(net))
    agree(not torch.equal(results[0], results[1]) or mpi.size() == 1, "gradients are sent in 16 bits")
    agree.close(results[0], results[1], rtol=0, atol=2 * torch.finfo(wire).eps)


@WIRES
def test_asynchronous_hooks_send_the_same_bits(agree, compression, wire):
    net = backward()
    expected = reduced(net, wire)
    net, inputs, targets = make("mlp")
    mpinn.register_async_backward(net, bucket_bytes=300, compression=compression)
    loss(net, mine(inputs), mine(targets)).backward()
    mpinn.synchronize_gradients_async(net)
    compare(agree, net, expected)
    mpinn.unregister_async_backward(net)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_inside_join(agree, asynchronous):
    net, inputs, targets = make("mlp")
    optimizer = mpinn.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net, asynchronous=asynchronous, compression="bf16"
    )
    with mpinn.join(net, optimizer=optimizer):
        for _ in range(1 + mpi.rank()):
            optimizer.zero_grad()
            loss(net, inputs, targets).backward()  # the same on all ranks that have data
            optimizer.step()
    mpinn.check_with_allreduce(net)
    other, inputs, targets = make("mlp")
    reference = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(mpi.size()):
        reference.zero_grad()
        loss(other, inputs, targets).backward()
        reference.step()
    agree.close(values(net), values(other), rtol=0, atol=2 * torch.finfo(torch.bfloat16).eps)


def test_an_average_does_not_overflow_but_a_value_may(agree):
    net = nn.Linear(2, 1, bias=False)
    for value, expected in ((60000.0, 60000.0), (70000.0, math.inf)):
        net.weight.grad = torch.full((1, 2), value)
        mpinn.synchronize_gradients(net, compression="fp16")
        agree.close(net.weight.grad, torch.full((1, 2), expected), rtol=1e-3, atol=0)


@WIRES
def test_gradients_of_16_bits_sparse_and_missing_ones_are_unchanged(agree, compression, wire):
    nets = []
    for kind in (compression, None):
        torch.manual_seed(2)
        net = nn.ModuleList([nn.Embedding(5, 2, sparse=True), nn.Linear(3, 3).bfloat16(), nn.Linear(2, 2)])
        net[0](torch.tensor([mpi.rank()])).sum().mul(1 / 3).backward()
        net[1](torch.full((2, 3), 0.1 + mpi.rank(), dtype=torch.bfloat16)).square().sum().backward()
        mpinn.synchronize_gradients(net, compression=kind)
        nets.append(net)
    agree.equal(nets[0][0].weight.grad.to_dense(), nets[1][0].weight.grad.to_dense())
    agree.equal(nets[0][1].weight.grad, nets[1][1].weight.grad)
    agree(nets[0][2].weight.grad is None)


@pytest.mark.parametrize("compression", ["fp8", torch.float16, True])
def test_other_values_are_refused(agree, compression):
    net = backward()
    for call in (mpinn.synchronize_gradients, mpinn.register_async_backward):
        with pytest.raises(ArgumentError, match=r"compression.*'fp16'.*'bf16'"):
            call(net, compression=compression)
    for asynchronous in (True, False):
        with pytest.raises(ArgumentError, match=r"compression.*'fp16'.*'bf16'"):
            mpinn.DistributedOptimizer(
                torch.optim.SGD(net.parameters(), lr=0.1), net, asynchronous=asynchronous, compression=compression
            )
