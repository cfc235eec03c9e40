"""To whoever changes gradients too early, or moves a registered net: an error names the parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from helpers.nn_nets import loss, make, mine, values
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ArgumentError, GradientError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]
BUCKETS = pytest.mark.parametrize("bucket_bytes", [4, 1 << 20])
"""Several buckets, of which some are launched before the last gradient is computed, and one."""


@contextmanager
def registered(**options) -> Iterator[tuple[nn.Module, torch.Tensor, torch.Tensor]]:
    """A registered net with a batch on which backward has run."""
    net, inputs, targets = make("mlp")
    mpinn.register_async_backward(net, **options)
    loss(net, mine(inputs), mine(targets)).backward()
    yield net, mine(inputs), mine(targets)
    mpinn.unregister_async_backward(net)


def first(net: nn.Module) -> nn.Parameter:
    return next(net.parameters())


def replace(net: nn.Module) -> None:
    first(net).grad = first(net).grad * 2


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "clip the norm": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1),
    "clip the norm, one by one": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=False),
    "clip values": lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.1),
    "write in place": lambda net: first(net).grad.mul_(2),
    "write to a view": lambda net: first(net).grad.view(-1)[0].zero_(),
    "replace": replace,
    "clear": lambda net: net.zero_grad(),
    "set to zero": lambda net: net.zero_grad(set_to_none=False),
}


@BUCKETS
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_before_the_synchronization_is_refused(agree, change, bucket_bytes):
    with registered(bucket_bytes=bucket_bytes) as (net, inputs, targets):
        CHANGES[change](net)
        with pytest.raises(GradientError, match=r"some rank has changed or used the gradient of '0.weight'"):
            mpinn.synchronize_gradients_async(net)
        net.zero_grad()
        loss(net, inputs, targets).backward()
        agree(mpinn.synchronize_gradients_async(net), "afterwards training can continue")


def test_a_change_on_one_rank_is_refused_on_all(agree):
    with registered() as (net, _, _):
        if mpi.rank() == mpi.size() - 1:
            net[2].bias.grad.mul_(2)
        with pytest.raises(GradientError, match=r"some rank has changed or used the gradient of '2.bias' before"):
            mpinn.synchronize_gradients_async(net)


def test_a_change_of_a_sparse_gradient_is_refused(agree):
    net = nn.Embedding(5, 2, sparse=True)
    mpinn.register_async_backward(net)
    net(torch.tensor([1])).sum().backward()
    net.weight.grad.mul_(2)
    with pytest.raises(GradientError, match="'weight'"):
        mpinn.synchronize_gradients_async(net)
    mpinn.unregister_async_backward(net)


def test_reads_and_changes_afterwards_are_allowed(agree):
    with registered() as (net, inputs, targets):
        for _ in range(2):  # without zero_grad: autograd adds to the averages
            first(net).grad.norm()
            mpinn.synchronize_gradients_async(net)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            loss(net, inputs, targets).backward()
        mpinn.synchronize_gradients_async(net)
    agree.equal(values(net), values(make("mlp")[0]))


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("passes", [1, 2])
def test_the_distributed_optimizer_refuses_changed_gradients(agree, passes, asynchronous):
    net, inputs, targets = make("mlp")
    optimizer = mpinn.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net, asynchronous=asynchronous, backward_passes_per_step=passes
    )
    loss(net, mine(inputs), mine(targets)).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    with pytest.raises(GradientError, match=r"'0.weight' and 3 others before .*synchronize\(\)"):
        optimizer.step()


# --- steps before the synchronization ------------------------------------------------------------------


def test_a_step_after_too_few_passes_is_refused(agree):
    with registered(sync_gradient_frequency=2) as (net, _, _):
        agree(not mpinn.synchronize_gradients_async(net))
        with pytest.raises(GradientError, match="before it is synchronized"):
            torch.optim.Adam(net.parameters()).step()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_wrapped_optimizer_may_not_step_by_itself(agree, asynchronous):
    net, inputs, targets = make("mlp")
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = mpinn.DistributedOptimizer(inner, net, asynchronous=asynchronous)
    loss(net, mine(inputs), mine(targets)).backward()
    with pytest.raises(GradientError, match="DistributedOptimizer"):
        inner.step()
    with pytest.raises(GradientError, match="before it is synchronized"), optimizer.skip_synchronize():
        optimizer.step()
    optimizer.step()
    mpinn.check_with_allreduce(net)


def test_a_closure_without_synchronization_is_refused(agree):
    with registered() as (net, inputs, targets):
        mpinn.synchronize_gradients_async(net)

        def closure() -> torch.Tensor:
            result = loss(net, inputs, targets)
            result.backward()
            return result

        with pytest.raises(GradientError, match="closure"):
            torch.optim.SGD(net.parameters(), lr=0.1).step(closure)


# --- conversion while registered -----------------------------------------------------------------------


@BUCKETS
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_conversion_while_registered_is_refused_on_all_ranks(agree, dtype, set_to_none, bucket_bytes):
    with registered(bucket_bytes=bucket_bytes) as (net, inputs, targets):
        mpinn.synchronize_gradients_async(net)
        net.zero_grad(set_to_none=set_to_none)
        converts = mpi.rank() == 0
        if converts:
            net.to(dtype)
        inputs = inputs.to(first(net).dtype)
        with suppress(GradientError):
            loss(net, inputs, targets).backward()
            agree(not converts, "backward raises")
        with pytest.raises(GradientError, match=r"register_async_backward\(net\) after" if converts else "on another"):
            mpinn.synchronize_gradients_async(net)


def test_conversion_between_backward_and_synchronization_is_refused(agree):
    with registered() as (net, _, _):
        net.float()
        with pytest.raises(GradientError, match=r"register_async_backward\(net\) after"):
            mpinn.synchronize_gradients_async(net)


# --- synchronize_gradients(), which has no hooks ---------------------------------------------------------


def compute(net: nn.Module, *places: int) -> None:
    """Backward, for the layers at `places` only; by default for all."""
    _, inputs, targets = make("mlp")
    for index, layer in enumerate(net):
        layer.requires_grad_(not places or index in places)
    loss(net, mine(inputs), mine(targets)).backward()
    net.requires_grad_(True)


def test_gradients_of_another_optimizer_are_synchronized_after_a_step(agree):
    """As in a GAN that is one module: the gradients that the first step has used are synchronized a second time."""
    net, _, _ = make("mlp")
    optimizers = [torch.optim.SGD(net[index].parameters(), lr=0.1) for index in (0, 2)]
    for set_to_none in (True, False):
        for _ in range(3):
            for optimizer, index in zip(optimizers, (0, 2), strict=True):
                optimizer.zero_grad(set_to_none)
                compute(net, index)
                mpinn.synchronize_gradients(net)
                nn.utils.clip_grad_norm_(net[index].parameters(), 0.1)
                optimizer.step()
    mpinn.check_with_allreduce(net)


# --- DistributedOptimizer(asynchronous=False), which has hooks that only watch ---------------------------


def test_discarded_gradients_and_new_parameters_are_no_changes(agree):
    net, inputs, targets = make("mlp")
    optimizer = mpinn.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, asynchronous=False)
    for clear in (net.zero_grad, optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False)):
        loss(net, mine(inputs), mine(targets)).backward()
        clear()
        optimizer.step()
    net.append(nn.Linear(4, 4).double())
    mpinn.synchronize_parameters(net)
    optimizer.add_param_group({"params": list(net[-1].parameters())})
    for _ in range(2):  # the first step finds the parameters
        optimizer.zero_grad()
        loss(net, mine(inputs), mine(targets)).backward()
        optimizer.step()
    loss(net, mine(inputs), mine(targets)).backward()
    net[-1].weight.grad.mul_(2)
    with pytest.raises(GradientError, match=r"'3.weight'"):
        optimizer.step()


def test_the_watch_ends_with_the_optimizer(agree):
    net, inputs, targets = make("mlp")
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    for asynchronous in (False, True):
        optimizer = mpinn.DistributedOptimizer(inner, net, asynchronous=False)
        if asynchronous:
            mpinn.register_async_backward(net)  # instead of the optimizer
        else:
            del optimizer
        loss(net, mine(inputs), mine(targets)).backward()
        if asynchronous:
            mpinn.synchronize_gradients_async(net)
        inner.step()
    mpinn.unregister_async_backward(net)
    agree(all(not each._post_accumulate_grad_hooks for each in net.parameters()), "hooks are left")


# --- sums -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hooks", "optimizer", "optimizer, async"])
def test_a_sum_is_not_added_again(agree, how):
    """Neither by a second call, nor by a step after another one: of this optimizer, or of a second one on the net."""
    net, inputs, targets = make("mlp")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if how == "hooks":
        mpinn.register_async_backward(net, average=False)
    else:
        options = {"average": False, "asynchronous": how.endswith("async")}
        optimizer = mpinn.DistributedOptimizer(optimizer, net, **options)
    second = optimizer if how != "optimizer" else mpinn.DistributedOptimizer(optimizer.optimizer, net, **options)
    if mpi.rank() == 0:
        loss(net, inputs, targets).backward()
    for _ in range(2):
        mpinn.clip_grad_norm_(net, 1e9)
        mpinn.synchronize_gradients_async(net) if how == "hooks" else optimizer.synchronize()
    optimizer.step()
    other, inputs, targets = make("mlp")
    loss(other, inputs, targets).backward()
    expected = torch.optim.SGD(other.parameters(), lr=0.1)
    expected.step()
    agree.equal(values(net), values(other))
    optimizer.step()
    second.step()
    expected.step()
    expected.step()
    agree.equal(values(net), values(other))
    if how != "optimizer":
        mpinn.unregister_async_backward(net)


# --- parameters of two nets -------------------------------------------------------------------------------


def test_parameters_of_two_registered_nets_are_refused(agree):
    body = nn.Linear(2, 2)
    nets = [nn.Sequential(body, nn.Linear(2, 1)) for _ in range(2)]
    mpinn.register_async_backward(nets[0])
    with pytest.raises(ArgumentError, match=r"'0.weight', '0.bias' belong to another net.*ModuleList"):
        mpinn.register_async_backward(nets[1])
    mpinn.unregister_async_backward(nets[0])
    mpinn.register_async_backward(nets[1])
    mpinn.unregister_async_backward(nets[1])
