"""To a user of SyncBatchNorm: the same as nn.BatchNorm in one process that has the batches of all ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ArgumentError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]
TIGHT = {"rtol": 1e-9, "atol": 1e-11}
KINDS: dict[int, type[nn.Module]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def rows(sizes: str) -> list[int]:
    """The batch size of each rank."""
    every = range(mpi.size())
    return {
        "even": [4 for _ in every],
        "uneven": [2 * rank + 2 for rank in every],
        "empty": [0 if rank == 0 and mpi.size() > 1 else 3 for rank in every],
    }[sizes]


def mine(whole: torch.Tensor, sizes: str) -> torch.Tensor:
    return whole.split(rows(sizes))[mpi.rank()]


def batch(sizes: str, dims: int, step: int = 0, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * dims + step)
    whole = torch.randn(sum(rows(sizes)), 3, *range(4, 2 + dims), generator=generator, dtype=torch.float64)
    return (whole * 2 + torch.arange(len(whole)).view(-1, *[1] * (dims - 1))).to(**options)


def pair(dims: int = 2, **options: Any) -> tuple[mpinn.SyncBatchNorm, nn.Module]:
    whole = KINDS[dims](3, **{"dtype": torch.float64, **options})
    for parameter in whole.parameters():
        nn.init.uniform_(parameter, 1, 2, generator=torch.Generator().manual_seed(1))
    return mpinn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole)), whole


@pytest.mark.parametrize("sizes", ["even", "uneven", "empty"])
@pytest.mark.parametrize("dims", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_outputs_statistics_and_gradients_are_those_of_the_complete_batch(agree, sizes, dims, options):
    layer, whole = pair(dims, **options)
    for step in range(3):
        x = batch(sizes, dims, step).requires_grad_()
        expected = whole(x)
        factor = torch.linspace(1, 3, x.numel(), dtype=x.dtype).view_as(x)
        (expected * factor).sin().sum().backward()
        part = mine(x.detach(), sizes).clone().requires_grad_()
        output = layer(part)
        (output * mine(factor, sizes)).sin().sum().backward()
        agree.close(output, mine(expected, sizes), f"output {step}", **TIGHT)
        agree.close(part.grad, mine(x.grad, sizes), f"gradient of the input {step}", **TIGHT)
    for name, buffer in whole.named_buffers():
        agree.close(getattr(layer, name), buffer, name, **TIGHT)
    for name, parameter in whole.named_parameters():
        agree.close(mpi.allreduce(getattr(layer, name).grad), parameter.grad, f"gradient of {name}", **TIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", ["float32", "16 bits"])
def test_16_bit_inputs_are_normalized_in_float32(agree, dtype, parameters):
    layer, whole = pair(4, dtype=torch.float32 if parameters == "float32" else dtype)
    reference = copy.deepcopy(whole).float()
    x = batch("uneven", 4, dtype=dtype)
    part = mine(x, "uneven").clone().requires_grad_()
    exact = x.float().requires_grad_()
    expected = reference(exact)
    factor = batch("uneven", 4, step=1, dtype=dtype)
    expected.backward(factor.float())
    output = layer(part)
    output.backward(mine(factor, "uneven"))
    agree.equal((output.dtype, part.grad.dtype, layer.weight.grad.dtype), (dtype, dtype, layer.weight.dtype))
    rounding = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    agree.close(output, mine(expected, "uneven").to(dtype), "output", **rounding)
    agree.close(part.grad.float(), mine(exact.grad, "uneven"), "gradient", **rounding)
    rounding["rtol"] = torch.finfo(layer.running_mean.dtype).eps
    agree.close(layer.running_mean.float(), reference.running_mean, "mean", **rounding)


def test_evaluation_does_not_communicate(agree):
    layer, whole = pair()
    layer(mine(batch("even", 2), "even"))
    whole(batch("even", 2))
    if mpi.rank() == 0:
        x = batch("uneven", 2)
        agree.close(layer.eval()(x), whole.eval()(x), **TIGHT)


def test_on_a_communicator_of_its_own(agree):
    rank = mpi.rank()
    level = mpi.push_communicator(f"parity {rank % 2}")
    mpi.set_communicator(0)
    parts = batch("even", 2).split(4)
    group = parts[rank % 2 :: 2]
    expected = nn.BatchNorm1d(3, dtype=torch.float64)(torch.cat(group)).split(4)[rank // 2]
    layer = mpinn.SyncBatchNorm(3, comm=level, dtype=torch.float64)
    for each in (layer, copy.deepcopy(layer)):
        agree.close(each(parts[rank]), expected, "given", **TIGHT)
    with mpi.use(level):
        agree.close(mpinn.SyncBatchNorm(3).double()(parts[rank]), expected, "current", **TIGHT)
    restored = pickle.loads(pickle.dumps(layer))
    whole = nn.BatchNorm1d(3).double()(torch.cat(parts))
    agree.close(restored(parts[rank]), whole.split(4)[rank], "from a pickle", **TIGHT)


def test_conversion_keeps_objects_parameters_and_state(agree):
    shared = nn.BatchNorm2d(4, eps=0.5, momentum=None)
    net = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.SyncBatchNorm(2)), "c": nn.BatchNorm1d(2).eval()})
    before, parameters = net.state_dict(), list(net.parameters())
    assert mpinn.SyncBatchNorm.convert_sync_batchnorm(net) is net
    agree(all(type(layer) is mpinn.SyncBatchNorm for layer in (net["a"], net["b"][1], net["c"])), "kinds")
    agree(net["a"] is net["b"][0] is shared, "a shared layer stays one layer")
    agree.equal((shared.eps, shared.momentum, net["c"].training), (0.5, None, False))
    agree(all(a is b for a, b in zip(parameters, net.parameters(), strict=True)), "parameters")
    agree.equal(list(net.state_dict()), list(before))
    plain = nn.ModuleDict({"a": nn.BatchNorm2d(4), "b": nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(2))})
    plain["c"] = nn.BatchNorm1d(2)
    plain.load_state_dict(net.state_dict())
    mpinn.synchronize_parameters(net)


def test_layers_with_a_forward_pass_of_their_own_are_refused(agree):
    class Special(nn.BatchNorm1d):
        pass

    for layer in (Special(2), nn.LazyBatchNorm1d()):
        net = nn.Sequential(nn.BatchNorm1d(2), layer)
        agree.raises(
            ArgumentError, lambda net=net: mpinn.SyncBatchNorm.convert_sync_batchnorm(net), "'1'", type(layer).__name__
        )
        agree(type(net[0]) is nn.BatchNorm1d, "nothing is converted")


def test_refused_inputs(agree):
    layer, _ = pair()
    agree.raises(ArgumentError, lambda: layer(torch.zeros(2, 4)), "[2, 4]", "3 channels")
    agree.raises(ArgumentError, lambda: layer(torch.zeros(3)), "[3]")
    one_value = torch.zeros(int(mpi.rank() == 0), 3, dtype=torch.float64)
    agree.raises(ArgumentError, lambda: layer(one_value), "one value per channel")
    agree.equal(layer(one_value[:0]).shape, (0, 3), "all batches empty")
    agree.equal(int(layer.num_batches_tracked), 0)
    x = mine(batch("even", 2), "even").requires_grad_()
    output = layer(x).sum()
    agree.raises(ArgumentError, lambda: torch.autograd.grad(output, x, create_graph=True), "no second derivatives")


def test_sync_batchnorm_of_torch_is_refused(agree):
    net = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    calls = [
        mpinn.synchronize_parameters,
        mpinn.synchronize_gradients,
        mpinn.register_async_backward,
        lambda net: mpinn.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net),
    ]
    for call in calls:
        agree.raises(ArgumentError, lambda call=call: call(net), "'1'", "convert_sync_batchnorm")
    mpinn.synchronize_parameters(mpinn.SyncBatchNorm.convert_sync_batchnorm(net))
