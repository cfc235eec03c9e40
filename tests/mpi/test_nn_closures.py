"""Optimizers that call their closure several times, and decide by the loss how often."""

from __future__ import annotations

import pytest
import torch
from nn_nets import loss, make, mine, values
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import GradientError

pytestmark = pytest.mark.usefixtures("world")
MODES = pytest.mark.parametrize("asynchronous", [True, False])


def train(asynchronous: bool, num_steps: int = 2, *, averages: bool, **options) -> nn.Module:
    """Train with a closure that returns the average loss, or that of this rank."""
    net, inputs, targets = make("mlp")
    if asynchronous:
        mpinn.register_async_backward(net)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        result = loss(net, mine(inputs), mine(targets))
        result.backward()
        if asynchronous:
            mpinn.synchronize_gradients_async(net)
        else:
            mpinn.synchronize_gradients(net)
        return mpi.allreduce(result.detach().clone(), op="avg") if averages else result

    for _ in range(num_steps):
        optimizer.step(closure)
    return net


@MODES
def test_an_averaged_loss_trains_like_one_rank(agree, asynchronous):
    options = {"max_iter": 4, "line_search_fn": "strong_wolfe"}
    net = train(asynchronous, averages=True, **options)
    other, inputs, targets = make("mlp")
    reference = torch.optim.LBFGS(other.parameters(), lr=0.5, **options)

    def closure() -> torch.Tensor:
        reference.zero_grad()
        result = loss(other, inputs, targets)
        result.backward()
        return result

    for _ in range(2):
        reference.step(closure)
    agree.close(values(net), values(other), rtol=1e-6, atol=1e-8)


@MODES
def test_a_local_loss_is_refused(agree, asynchronous):
    """Without a line search all ranks make the same number of calls here, and the same steps, by chance."""
    if mpi.size() > 1:
        with pytest.raises(GradientError, match=r"closure of LBFGS.step\(\).* 3 calls and loss .* loss averaged"):
            train(asynchronous, averages=False, max_iter=3)


def test_a_closure_that_is_called_once_may_return_a_local_loss(agree):
    net, inputs, targets = make("mlp")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        result = loss(net, mine(inputs), mine(targets))
        result.backward()
        mpinn.synchronize_gradients(net)
        return result

    optimizer.step(closure)
    mpinn.check_with_allreduce(net)
