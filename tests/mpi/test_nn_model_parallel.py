"""To a user of MPLinear: the same as nn.Linear, with its input features on several ranks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ArgumentError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 4), pytest.mark.usefixtures("world")]
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def both(in_features: int = 7, bias: bool = True) -> tuple[mpinn.MPLinear, nn.Linear]:
    torch.manual_seed(4)
    parallel = mpinn.MPLinear(in_features, 5, bias=bias, dtype=torch.float64)
    torch.manual_seed(4)
    return parallel, nn.Linear(in_features, 5, bias=bias, dtype=torch.float64)


def batch(in_features: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(3, 2, in_features, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_features", [8, 7, 2, 1])
def test_output_and_gradients_are_those_of_linear(agree, in_features, bias):
    parallel, whole = both(in_features, bias)
    inputs = [batch(in_features).requires_grad_() for _ in range(2)]
    outputs = [layer(x) for layer, x in zip((parallel, whole), inputs, strict=True)]
    for output in outputs:
        output.square().sum().backward()
    agree.close(outputs[0], outputs[1], "output", **TIGHT)
    agree.close(inputs[0].grad, inputs[1].grad, "gradient of the input", **TIGHT)
    gathered = mpi.allgather(parallel.weight.grad.t().contiguous()).t()
    agree.close(gathered, whole.weight.grad, "gradient of the weight", **TIGHT)
    if bias:
        agree.close(parallel.bias.grad, whole.bias.grad, "gradient of the bias", **TIGHT)


def test_weight_is_that_of_linear_with_the_same_seed_and_divided(agree):
    parallel, whole = both()
    agree.equal(parallel.full_weight(), whole.weight.detach())
    agree.equal(mpi.allreduce(parallel.weight.numel()), 35)
    agree(parallel.weight.shape[1] in (7 // mpi.size(), 7 // mpi.size() + 1))


def test_the_generator_state_is_that_after_linear(agree):
    states = []
    for layer in (mpinn.MPLinear, nn.Linear):
        torch.manual_seed(4)
        layer(7, 5)
        states.append(torch.get_rng_state())
    agree.equal(states[0], states[1])


def test_trains_like_linear_in_the_middle_of_a_net(agree):
    parallel, whole = both()
    results = []
    for layer in (parallel, whole):
        torch.manual_seed(6)
        net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), layer, nn.Tanh(), nn.Linear(5, 1)).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            net(batch(4)).square().mean().backward()
            optimizer.step()
        results.append(torch.cat([net[index].weight.detach().reshape(-1) for index in (0, 4)]))
    agree.close(results[0], results[1], **TIGHT)
    agree.close(parallel.full_weight(), whole.weight.detach(), **TIGHT)


def test_synchronization_ignores_shards(agree):
    parallel, _ = both()
    net = nn.Sequential(parallel, nn.Linear(5, 2).double())
    shard = parallel.weight.detach().clone()
    mpinn.synchronize_parameters(net)
    agree.equal(parallel.weight.detach(), shard, "shards are unchanged")
    mpinn.register_async_backward(net)
    net(batch()).sum().backward()
    local = parallel.weight.grad.clone()
    mpinn.synchronize_gradients_async(net)
    mpinn.unregister_async_backward(net)
    agree.equal(parallel.weight.grad, local, "gradients of shards are unchanged")
    mpinn.check_with_allreduce(net)


def test_can_be_differentiated_twice(agree):
    parallel, whole = both()
    results = []
    for layer in (parallel, whole):
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        results.append((x.grad, layer.bias.grad))
    agree.close(results[0][0], results[1][0], "input", **TIGHT)
    agree.close(results[0][1], results[1][1], "bias", **TIGHT)


def test_copies_and_pickles_stay_sharded(agree):
    parallel, _ = both()
    expected = parallel(batch())
    for other in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
        agree(mpinn.sharding_of(other.weight))
        agree.equal(other(batch()), expected)


def test_on_a_communicator_of_its_own(agree):
    level = mpi.push_communicator(f"parity {mpi.rank() % 2}")
    mpi.set_communicator(0)
    with mpi.use(level):
        parallel, whole = both()
    agree.close(parallel(batch()), whole(batch()), **TIGHT)


def test_an_incomplete_input_is_refused(agree):
    parallel, _ = both()
    with pytest.raises(ArgumentError, match="the complete input, with 7 features"):
        parallel(batch(3))


def test_tensors_of_the_host_are_compared_whatever_the_default_device_is(agree):
    (parallel, whole), x = both(), batch()
    torch.set_default_device("meta")
    try:
        output = parallel(x)
    finally:
        torch.set_default_device(None)
    agree.close(output, whole(x), **TIGHT)
    with torch.autocast("cpu", torch.bfloat16):
        agree.equal(parallel.float()(x.float()).dtype, whole.float()(x.float()).dtype)
