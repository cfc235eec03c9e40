"""To a user of compressors: what is lost in a step is added later, and all ranks get the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import compressors
from helpers.nn_nets import gradients, loss, make, mine, values
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.engine.checkpoint import digest
from torchmpi.errors import ArgumentError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]
KINDS = {
    "8 bit": lambda: mpinn.EightBit(within_hosts=True),
    "top k": lambda: mpinn.TopK(0.1, within_hosts=True),
    "PowerSGD": lambda: mpinn.PowerSGD(1, within_hosts=True),
}
KIND = pytest.mark.parametrize("kind", KINDS)
NUM_STEPS = 60


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A matrix, a kernel, vectors, and a matrix that is not contiguous."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(20, 30), nn.Conv2d(6, 8, 3).to(memory_format=torch.channels_last)).to(dtype)
    net.register_parameter("alone", nn.Parameter(torch.zeros((), dtype=dtype)))
    return net


def fill(net: nn.Module, step: int) -> None:
    """Give each parameter a gradient that depends on the rank and the step."""
    torch.manual_seed(100 * step + mpi.rank())
    for parameter in net.parameters():
        gradient = torch.empty_like(parameter)
        parameter.grad = gradient.copy_(torch.randn(parameter.shape) * 0.1 + 0.01 * (1 + mpi.rank()))


def check_that_it_is_kept(agree, compressor, parameters, lacking, largest, divisor, rounded=None) -> None:
    """Compare what the sums of steps lack with what the ranks keep of each parameter; no gradient is above largest."""
    # A step adds and rounds a few numbers in float32, of which none is above 2.
    exact = NUM_STEPS * 4 * torch.finfo(torch.float32).eps
    for index, (total, parameter) in enumerate(zip(lacking, parameters, strict=True)):
        kept, limit = compressors.kept(compressor, parameter), 0.0
        if isinstance(compressor, mpinn.EightBit):
            kept, limit = torch.zeros_like(kept), compressors.most_kept_by_8_bits(largest, mpi.size())
        excess = (total - kept / divisor).abs() - limit / divisor - exact - (rounded[index] if rounded else 0.0)
        agree(excess.max() <= 0, f"parameter {index}: {excess.max()} above the limit")


@pytest.mark.parametrize(
    ("kind", "dtype", "average"),
    [(kind, *options) for kind in KINDS for options in ((torch.float32, False), (torch.bfloat16, True))]
    + [("PowerSGD", torch.float64, True)],
)
def test_what_the_sums_of_many_steps_lack_is_kept_for_the_next_one(agree, kind, dtype, average):
    """Without feedback, the errors of the steps would add up."""
    net, compressor, divisor = layers(dtype), KINDS[kind](), mpi.size() if average else 1
    parameters = list(net.parameters())
    lacking = [torch.zeros(parameter.shape, dtype=torch.float64) for parameter in parameters]
    rounded, largest = [each.clone() for each in lacking], 0.0
    for step in range(NUM_STEPS // 2):
        fill(net, step)
        largest = max(largest, *(gradient.abs().max().item() for gradient in gradients(net)))
        for total, gradient in zip(lacking, gradients(net), strict=True):
            total += mpi.allreduce(gradient.double(), op="avg" if average else "sum")
        mpinn.synchronize_gradients(net, average, compression=compressor, bucket_bytes=3000)
        for total, rounding, gradient in zip(lacking, rounded, gradients(net), strict=True):
            total -= gradient.double()
            rounding += gradient.double().abs() * (torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else 0)
        mpinn.check_with_allreduce(gradients(net))
    check_that_it_is_kept(agree, compressor, parameters, lacking, max(mpi.allgather_object(largest)), divisor, rounded)


@KIND
def test_one_rank_and_one_host_are_exact(agree, kind):
    """Without within_hosts, ranks of one host exchange what they would exchange anyway."""
    net, other = layers(), layers()
    compressor = {"8 bit": mpinn.EightBit, "top k": mpinn.TopK, "PowerSGD": mpinn.PowerSGD}[kind]()
    fill(net, 0), fill(other, 0)
    mpinn.synchronize_gradients(net, compression=compressor)
    mpinn.synchronize_gradients(other)
    if mpi.communicator(0).num_nodes == 1:
        for one, two in zip(gradients(net), gradients(other), strict=True):
            agree.equal(one, two)
        agree.equal(compressor.payload_bytes, 0)


def test_bytes(agree):
    size = mpi.size()
    net = nn.Linear(64, 64 * size, bias=False)
    numel = net.weight.numel()
    expected = {
        "8 bit": (numel + numel // 64) + (numel + numel // 64) // size,
        "top k": 8 * math.ceil(0.1 * numel),
        "PowerSGD": 4 * (2 * 64 * size + 64),
    }
    for kind, make_one in KINDS.items():
        compressor = make_one()
        net.weight.grad = torch.randn(net.weight.shape)
        mpinn.synchronize_gradients(net, compression=compressor)
        agree.equal(compressor.payload_bytes, expected[kind] if size > 1 else 0, kind)


@pytest.mark.ranks(2)  # one rank compresses nothing (test_bytes)
@pytest.mark.parametrize(("kind", "how"), [("8 bit", "optimizer"), ("top k", "sync"), ("PowerSGD", "optimizer, async")])
def test_what_the_steps_of_training_lack_is_kept_for_the_next_one(agree, kind, how):
    (net, inputs, targets), compressor, largest = make("mlp"), KINDS[kind](), 0.0
    same, parameters = make("mlp")[0], list(net.parameters())
    lacking = [torch.zeros(parameter.shape, dtype=torch.float64) for parameter in parameters]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.05)
    if how != "sync":
        optimizer = mpinn.DistributedOptimizer(optimizer, net, asynchronous="async" in how, compression=compressor)
    for step in range(NUM_STEPS):
        same.load_state_dict(net.state_dict())
        for each in (same, net):
            each.zero_grad(set_to_none=step % 2 == 0)
            loss(each, mine(inputs), mine(targets)).backward()
        if how == "sync":
            mpinn.synchronize_gradients(net, compression=compressor, bucket_bytes=300)
        optimizer.step()
        for total, own, synchronized in zip(lacking, gradients(same), gradients(net), strict=True):
            total += mpi.allreduce(own.double(), op="avg") - synchronized.double()
            largest = max(largest, own.abs().max().item())
    mpinn.check_with_allreduce(net)
    if "async" in how:
        mpinn.unregister_async_backward(net)
    check_that_it_is_kept(agree, compressor, parameters, lacking, max(mpi.allgather_object(largest)), mpi.size())
    agree(loss(net, inputs, targets).item() < loss(*make("mlp")).item(), "it learns")


@KIND
def test_a_run_continues_with_the_same_bits_from_a_checkpoint(agree, kind):
    net, compressor = layers(), KINDS[kind]()

    def step(number: int) -> list[torch.Tensor]:
        fill(net, number)
        mpinn.synchronize_gradients(net, compression=compressor)
        return [gradient.clone() for gradient in gradients(net)]

    for number in range(3):
        step(number)
    saved = compressor.state_dict()
    expected = step(3)
    compressor = KINDS[kind]()
    compressor.load_state_dict(saved)
    for one, other in zip(step(3), expected, strict=True):
        agree.equal(one, other)
    if mpi.size() > 1:
        with pytest.raises(ArgumentError, match="Load the state before training"):
            compressor.load_state_dict(saved)


@KIND
def test_an_overflow_ends_with_its_step(agree, kind):
    """A GradScaler leaves out the step; its errors are not kept, and the next gradients must be finite again."""
    net, compressor = layers(), KINDS[kind]()
    for step in range(3):
        fill(net, step)
        if step == 1 and mpi.rank() == mpi.size() - 1:
            net[0].weight.grad[3, 4] = math.inf
            net[0].bias.grad[1] = math.nan
        before = compressor.state_dict()
        mpinn.synchronize_gradients(net, compression=compressor)
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients(net))
        agree.equal(finite, step != 1, f"step {step}")
        is_kept = step == 1 or mpi.size() == 1
        agree.equal(digest(compressor.state_dict()) == digest(before), is_kept, f"errors of step {step}")


@KIND
def test_gradients_that_are_missing_in_some_steps(agree, kind):
    net, compressor = layers(), KINDS[kind]()
    for step in range(4):
        fill(net, step)
        if step % 2:
            net[0].weight.grad = None
        if step == 2 and mpi.rank():
            net[1].weight.grad = None
        mpinn.synchronize_gradients(net, compression=compressor)
        agree.equal(net[0].weight.grad is None, step % 2 == 1)
        mpinn.check_with_allreduce([p.grad for p in net.parameters() if p.grad is not None])


@KIND
@pytest.mark.parametrize("how", ["synchronize_gradients", "hooks"])
def test_buckets_without_values(agree, kind, how):
    """The parameters of a dtype may all be empty."""
    net = nn.ParameterList([torch.ones(3), torch.ones(0, dtype=torch.float64)])
    if how == "hooks":
        mpinn.register_async_backward(net, compression=KINDS[kind]())
    (net[0].sum() + net[1].sum()).backward()
    if how == "hooks":
        mpinn.unregister_async_backward(net)
    else:
        mpinn.synchronize_gradients(net, compression=KINDS[kind]())
    agree.equal(net[1].grad.numel(), 0)
    mpinn.check_with_allreduce([each.grad for each in net])


def test_join_and_wrong_options_are_refused(agree):
    net, inputs, targets = make("mlp")
    with mpinn.join(net):
        loss(net, inputs, targets).backward()
        with pytest.raises(ArgumentError, match="inside join"):
            mpinn.synchronize_gradients(net, compression=mpinn.EightBit())
        mpinn.synchronize_gradients(net)
    agree(len(values(net)) > 0)
    for wrong in (lambda: mpinn.TopK(0), lambda: mpinn.TopK(1.5), lambda: mpinn.PowerSGD(0)):
        with pytest.raises(ArgumentError):
            wrong()


def test_a_loaded_state_is_saved_before_the_first_step(agree):
    """Regression: the errors were lost if a job was resumed and saved without a step in between."""
    compressor = KINDS["top k"]()
    compressor.load_state_dict({"parameters": [{"error": torch.ones(2)}]})
    agree.equal(compressor.state_dict()["parameters"][0]["error"], torch.ones(2))
