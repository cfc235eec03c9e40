"""To a user of BlockSequential: one collective per block synchronizes it."""

from __future__ import annotations

import pytest
import torch
from helpers.nn_nets import gradients, loss, make, mine, values
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ArgumentError, ReplicaError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]


def blocks_and_plain(
    partitions: int = 2,
) -> tuple[mpinn.BlockSequential, nn.Module, torch.Tensor, torch.Tensor]:
    plain, x, y = make("mlp")
    net = mpinn.BlockSequential(partitions, *make("mlp")[0])
    return net, plain, mine(x), mine(y)


def num_calls() -> int:
    """Collectives so far on the current communicator."""
    return mpi.communicator().intra.call_log.seq


def test_parameters_are_sent_in_blocks(agree):
    torch.manual_seed(mpi.rank())
    net = mpinn.BlockSequential(2, *[nn.Linear(3, 3) for _ in range(6)])
    before = num_calls()
    mpinn.synchronize_parameters(net)
    agree.equal(num_calls() - before, 3, "one exchange to compare, two blocks")
    torch.manual_seed(0)
    agree.equal(values(net), values(nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)])))


def test_gradients_are_sent_in_blocks(agree):
    net, plain, x, y = blocks_and_plain()
    for n in (net, plain):
        loss(n, x, y).backward()
    before = num_calls()
    mpinn.synchronize_gradients(net)
    agree.equal(num_calls() - before, 3, "one exchange to agree, two blocks")
    mpinn.synchronize_gradients(plain)
    for actual, expected in zip(gradients(net), gradients(plain), strict=True):
        agree.equal(actual, expected)


def test_asynchronous_backward_uses_the_same_blocks(agree):
    net, plain, x, y = blocks_and_plain()
    blocks = [block.data_ptr() for block in net.gradient_blocks()]
    mpinn.register_async_backward(net)
    for n in (net, plain):
        n.zero_grad()
        loss(n, x, y).backward()
    mpinn.synchronize_gradients_async(net)
    mpinn.synchronize_gradients(plain)
    mpinn.unregister_async_backward(net)
    for actual, expected in zip(gradients(net), gradients(plain), strict=True):
        agree.equal(actual, expected)
    agree.equal([block.data_ptr() for block in net.gradient_blocks()], blocks)


def test_inside_a_larger_net(agree):
    torch.manual_seed(0)
    inner = mpinn.BlockSequential(1, nn.Linear(3, 3), nn.Linear(3, 3))
    net = nn.Sequential(nn.Linear(3, 3), inner, nn.Linear(3, 1))
    net(torch.full((1, 3), mpi.rank() + 1.0)).sum().backward()
    expected = gradients(net)
    for gradient in expected:
        mpi.allreduce(gradient, op="avg")
    mpinn.synchronize_gradients(net)
    for actual, naive in zip(gradients(net), expected, strict=True):
        agree.equal(actual, naive)


def test_frozen_block_is_not_sent(agree):
    net = mpinn.BlockSequential(2, nn.Linear(3, 3), nn.Linear(3, 3))
    net[0].requires_grad_(False)
    net(torch.ones(1, 3)).sum().backward()
    before = num_calls()
    mpinn.synchronize_gradients(net)
    agree.equal(num_calls() - before, 2, "one exchange to agree, one block")
    agree(net[0].weight.grad is None)


def test_missing_gradients_in_a_block(agree):
    net = mpinn.BlockSequential(1, nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
    if mpi.rank() == 0:
        net[0](torch.ones(1, 1)).backward()
    net[1](torch.ones(1, 1)).backward()
    mpinn.synchronize_gradients(net)
    agree.close(net[0].weight.grad, torch.tensor([[1 / mpi.size()]]))
    agree.equal(net[1].weight.grad, torch.ones(1, 1))
    agree(net[2].weight.grad is None)


def test_two_that_share_a_parameter_are_refused(agree):
    """Regression: a sum of its gradients was multiplied by the number of ranks."""
    first = mpinn.BlockSequential(1, nn.Linear(3, 3))
    second = mpinn.BlockSequential(1, nn.Linear(3, 3))
    second[0].weight = first[0].weight
    net = nn.Sequential(first, second)
    net(torch.ones(1, 3)).sum().backward()
    for call in (mpinn.synchronize_parameters, mpinn.synchronize_gradients, mpinn.register_async_backward):
        with pytest.raises(ArgumentError, match="share a parameter"):
            call(net)
    agree(True)


@pytest.mark.min_ranks(2)
def test_other_strides_on_some_rank_are_refused(agree):
    """Regression: blocks were copied as they are in memory, in another order on a rank with channels_last."""
    net = mpinn.BlockSequential(1, nn.Conv2d(2, 3, 3))
    if mpi.rank():
        net = net.to(memory_format=torch.channels_last)
    if mpi.size() == 1:
        mpinn.synchronize_parameters(net)
    else:
        agree.raises(ReplicaError, lambda: mpinn.synchronize_parameters(net), "with strides")
