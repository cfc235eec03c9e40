"""To a user of LBFGS and its like: all ranks call the closure as often, and take the same steps."""

from __future__ import annotations

import pytest
import torch
from helpers.nn_nets import loss, make, mine

import torchmpi.nn as mpinn
from torchmpi.errors import GradientError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_local_loss_is_refused(agree, asynchronous):
    """Without a line search all ranks make the same number of calls here, and the same steps, by chance."""
    net, inputs, targets = make("mlp")
    if asynchronous:
        mpinn.register_async_backward(net)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        result = loss(net, mine(inputs), mine(targets))
        result.backward()
        if asynchronous:
            mpinn.synchronize_gradients_async(net)
        else:
            mpinn.synchronize_gradients(net)
        return result

    with pytest.raises(GradientError, match=r"closure of LBFGS.step\(\).* 3 calls and loss .* loss averaged"):
        optimizer.step(closure)


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
