"""Gradients that are changed or used before they are synchronized, and nets that are moved while registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from nn_nets import loss, make, mine, values
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import GradientError

pytestmark = pytest.mark.usefixtures("world")
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
        with pytest.raises(
            GradientError, match=r"gradient of '0.weight'.* changed .*synchronize_gradients_async\(net\)"
        ):
            mpinn.synchronize_gradients_async(net)
        net.zero_grad()
        loss(net, inputs, targets).backward()
        agree(mpinn.synchronize_gradients_async(net), "afterwards training can continue")


def test_a_change_on_one_rank_is_refused_on_all(agree):
    with registered() as (net, _, _):
        if mpi.rank() == mpi.size() - 1:
            net[2].bias.grad.mul_(2)
        with pytest.raises(GradientError, match=r"gradient of '2.bias' changed on some rank"):
            mpinn.synchronize_gradients_async(net)


def test_a_change_of_a_sparse_gradient_is_refused(agree):
    net = nn.Embedding(5, 2, sparse=True)
    mpinn.register_async_backward(net)
    net(torch.tensor([1])).sum().backward()
    net.weight.grad.mul_(2)
    with pytest.raises(GradientError, match="'weight'"):
        mpinn.synchronize_gradients_async(net)
    mpinn.unregister_async_backward(net)


def test_a_change_before_an_early_synchronization_is_refused(agree):
    with registered(sync_gradient_frequency=3) as (net, _, _):
        first(net).grad.mul_(2)
        with pytest.raises(GradientError, match=r"'0.weight'"):
            mpinn.synchronize_gradients_async(net, flush=True)


def test_reads_and_changes_afterwards_are_allowed(agree):
    with registered() as (net, inputs, targets):
        for _ in range(2):  # without zero_grad: autograd adds to the averages
            first(net).grad.norm()
            mpinn.synchronize_gradients_async(net)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            loss(net, inputs, targets).backward()
        mpinn.synchronize_gradients_async(net)
    agree.equal(values(net), values(make("mlp")[0]))


@pytest.mark.parametrize("passes", [1, 2])
def test_the_distributed_optimizer_refuses_changed_gradients(agree, passes):
    net, inputs, targets = make("mlp")
    optimizer = mpinn.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net, backward_passes_per_step=passes
    )
    loss(net, mine(inputs), mine(targets)).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    with pytest.raises(GradientError, match=r"'0.weight' and 3 others changed .*synchronize\(\)"):
        optimizer.step()


# --- steps before the synchronization ------------------------------------------------------------------


def test_a_step_before_the_synchronization_is_refused(agree):
    with registered() as (net, _, _):
        optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, make("mlp")[0]))
        before = values(net)
        other.step()  # of other parameters
        with pytest.raises(GradientError, match=r"step\(\) uses gradients of SGD that are not synchronized"):
            optimizer.step()
        agree.equal(values(net), before)
        mpinn.synchronize_gradients_async(net)
        optimizer.step()


def test_a_step_after_too_few_passes_is_refused(agree):
    with registered(sync_gradient_frequency=2) as (net, _, _):
        agree(not mpinn.synchronize_gradients_async(net))
        with pytest.raises(GradientError, match="not synchronized"):
            torch.optim.Adam(net.parameters()).step()


def test_the_wrapped_optimizer_may_not_step_by_itself(agree):
    net, inputs, targets = make("mlp")
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = mpinn.DistributedOptimizer(inner, net)
    loss(net, mine(inputs), mine(targets)).backward()
    with pytest.raises(GradientError, match="DistributedOptimizer"):
        inner.step()
    with pytest.raises(GradientError, match="not synchronized"), optimizer.skip_synchronize():
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


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_a_scaler_before_the_synchronization_is_refused(agree, call, fused):
    net, inputs, targets = make("mlp")
    inner = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = mpinn.DistributedOptimizer(inner, net)
    scaler.scale(loss(net, mine(inputs), mine(targets))).backward()
    for each in (optimizer, inner):
        with pytest.raises(GradientError, match=r"not synchronized.* synchronize\(\) before a GradScaler"):
            getattr(scaler, call)(each)
    optimizer.synchronize()
    getattr(scaler, call)(optimizer)


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
