"""To a user of the asynchronous backward: hooks, buckets and accumulation give the averages of the plain way."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from helpers.nn_nets import KINDS, gradients, loss, make, mine, values, whole_batch_gradients
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ArgumentError, GradientError, ReplicaError
from torchmpi.nn.channel import close_private
from torchmpi.nn.sync import ASYNC_BACKWARD

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]


@contextmanager
def registered(*nets: nn.Module, **options) -> Iterator[None]:
    for net in nets:
        mpinn.register_async_backward(net, **options)
    yield
    for net in nets:
        mpinn.unregister_async_backward(net)


def linear(value: float = 1.0) -> nn.Linear:
    """y = value * x, on all ranks."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, value)
    return net


def x(value: float) -> torch.Tensor:
    return torch.tensor([[value]])


def rank_plus_one() -> torch.Tensor:
    return x(mpi.rank() + 1.0)


def mean() -> torch.Tensor:
    return x((mpi.size() + 1) / 2)


def step(net: nn.Module, *args: str) -> bool:
    """Run backward on the input of this rank, and synchronize the gradients."""
    net(rank_plus_one(), *args).backward()
    return mpinn.synchronize_gradients_async(net)


# --- the right numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_split_batch_gives_the_gradients_of_the_whole(agree, kind):
    net, inputs, targets = make(kind)
    with registered(net, bucket_bytes=2000):
        for _ in range(2):  # the second time the gradients are in the buckets already
            net.zero_grad()
            loss(net, mine(inputs), mine(targets)).backward()
            mpinn.synchronize_gradients_async(net)
    for index, (actual, expected) in enumerate(zip(gradients(net), whole_batch_gradients(kind), strict=True)):
        agree.close(actual, expected, f"parameter {index}", rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_has_the_bits_of_synchronous_training(agree, set_to_none):
    results = []
    for asynchronous in (False, True):
        net, inputs, targets = make("mlp")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        if asynchronous:
            mpinn.register_async_backward(net, bucket_bytes=300)
        for _ in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss(net, mine(inputs), mine(targets)).backward()
            if asynchronous:
                mpinn.synchronize_gradients_async(net)
            else:
                mpinn.synchronize_gradients(net)
            optimizer.step()
        if asynchronous:
            mpinn.unregister_async_backward(net)
        results.append(values(net))
    agree.equal(results[1], results[0])


def test_sum_instead_of_average(agree):
    net = linear()
    with registered(net, average=False):
        step(net)
    agree.equal(net.weight.grad, mean() * mpi.size())


def test_gradients_are_views_of_few_flat_tensors(agree):
    net, inputs, targets = make("mlp")
    with registered(net):
        loss(net, mine(inputs), mine(targets)).backward()
        mpinn.synchronize_gradients_async(net)
        storages = {p.grad.untyped_storage().data_ptr() for p in net.parameters()}
        agree.equal(len(storages), 1)
        before = [p.grad.data_ptr() for p in net.parameters()]
        net.zero_grad(set_to_none=True)
        loss(net, mine(inputs), mine(targets)).backward()
        mpinn.synchronize_gradients_async(net)
        agree.equal([p.grad.data_ptr() for p in net.parameters()], before, "seated again")


def test_channels_last_gradients_keep_their_strides(agree):
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with registered(net):
        net(torch.ones(1, 3, 5, 5)).sum().backward()
        mpinn.synchronize_gradients_async(net)
        agree.equal(net.weight.grad.stride(), net.weight.stride())
        agree.equal(net.weight.grad, torch.full((4, 3, 3, 3), 9.0))


def test_mixed_dtypes(agree):
    net = nn.ModuleList([linear(), linear().double(), linear()])
    with registered(net):
        for part in net:
            part(rank_plus_one().to(part.weight.dtype)).backward()
        mpinn.synchronize_gradients_async(net)
    for part in net:
        agree.equal(part.weight.grad, mean().to(part.weight.dtype))


def test_evaluation_in_between_changes_nothing(agree):
    net = linear()
    with registered(net):
        net(rank_plus_one()).backward()
        with torch.no_grad():
            net(x(9.0))
        torch.autograd.grad(net(x(9.0)), net.weight)
        mpinn.synchronize_gradients_async(net)
    agree.equal(net.weight.grad, mean())


def test_gradients_accumulate_over_steps(agree):
    net = linear()
    with registered(net):
        for _ in range(3):  # no zero_grad: averages accumulate
            step(net)
    agree.close(net.weight.grad, 3 * mean())


# --- parameters that are used unusually ------------------------------------------------------------------


class Branches(nn.Module):
    """Uses `left`, `right` or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = linear(), linear()

    def forward(self, value: torch.Tensor, *names: str) -> torch.Tensor:
        return sum(getattr(self, name)(value) for name in names)


def test_unused_everywhere_in_some_steps_stays_none(agree):
    net = Branches()
    with registered(net):
        for names in [("left",), ("left", "right"), ("right",)]:
            net.zero_grad()
            step(net, *names)
            for name in ("left", "right"):
                gradient = getattr(net, name).weight.grad
                agree(torch.equal(gradient, mean()) if name in names else gradient is None, f"{names}: {name}")


def test_ranks_may_use_their_parameters_in_different_order(agree):
    net = Branches()
    nn.init.constant_(net.left.weight, 2.0)
    nn.init.constant_(net.right.weight, 3.0)
    with registered(net, bucket_bytes=4):
        value = x(1.0)
        for name in ["left", "right"][:: 1 if mpi.rank() % 2 else -1]:
            value = getattr(net, name)(value)
        value.backward()
        mpinn.synchronize_gradients_async(net)
    agree.equal(net.left.weight.grad, x(3.0))
    agree.equal(net.right.weight.grad, x(2.0))


def test_a_rank_without_a_backward_contributes_zeros(agree):
    net = linear()
    with registered(net):
        if mpi.rank() == 0:
            net(x(1.0)).backward()
        mpinn.synchronize_gradients_async(net)
    agree.close(net.weight.grad, x(1 / mpi.size()))


def test_two_nets_in_one_backward(agree):
    generator, critic = nn.Sequential(linear(), linear()), nn.Sequential(linear(), linear())
    with registered(generator, critic, bucket_bytes=4):
        for _ in range(3):
            for net in (generator, critic):
                net.zero_grad()
            # Rank 0 uses one parameter more, so it would launch the buckets of the two nets in another order.
            hidden = generator(rank_plus_one())
            (critic(hidden) if mpi.rank() == 0 else critic[0](hidden)).backward()
            mpinn.synchronize_gradients_async(critic)
            mpinn.synchronize_gradients_async(generator)
    agree.equal(generator[0].weight.grad, mean())
    agree.equal(critic[0].weight.grad, mean())
    agree.close(critic[1].weight.grad, x(1 / mpi.size()))


def test_own_collectives_between_backward_and_synchronization(agree):
    net = linear()
    with registered(net):
        result = net(rank_plus_one())
        if mpi.rank() == 0:
            result.backward()  # before the other ranks' collective here ...
        total = mpi.allreduce(result.detach().clone())
        if mpi.rank() != 0:
            result.backward()  # ... and after it there
        mpinn.synchronize_gradients_async(net)
    agree.equal(total, mean() * mpi.size())
    agree.equal(net.weight.grad, mean())


# --- accumulation ----------------------------------------------------------------------------------------


def test_only_every_kth_backward_communicates(agree):
    net = linear()
    with registered(net, sync_gradient_frequency=3):
        done = []
        for _ in range(6):
            done.append(step(net))
            if not done[-1]:
                agree(net.weight.grad.item() % (mpi.rank() + 1) == 0, "local until then")
            else:
                agree.equal(net.weight.grad, 3 * mean())
                net.zero_grad()
    agree.equal(done, [False, False, True] * 2)


def test_a_rank_that_leaves_a_pass_out_reduces_with_the_others(agree):
    """Regression: it waited for its second pass, while the others waited for it."""
    net = linear()
    with registered(net, sync_gradient_frequency=2):
        results = []
        for number in range(4):
            if not (number % 2 and mpi.rank() == mpi.size() - 1):
                net(x(1.0)).backward()
            results.append(mpinn.synchronize_gradients_async(net))
    agree.equal(results, [False, True, False, True])
    agree.close(net.weight.grad, x(4 - 2 / mpi.size()))


def test_flush_sends_what_has_been_accumulated(agree):
    net = linear()
    with registered(net, sync_gradient_frequency=4):
        net(rank_plus_one()).backward()
        agree(mpinn.synchronize_gradients_async(net, flush=True))
    agree.equal(net.weight.grad, mean())


def accumulate(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Two passes that only accumulate, and one that synchronizes."""
    with mpinn.no_sync(net):
        for _ in range(2):
            net(rank_plus_one()).backward()
            if optimizer is None:
                assert not mpinn.synchronize_gradients_async(net)
    net(rank_plus_one()).backward()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync_accumulates(agree, set_to_none):
    net = linear()
    with registered(net):
        for _ in range(2):
            net.zero_grad(set_to_none=set_to_none)
            accumulate(net)
            agree(mpinn.synchronize_gradients_async(net))
            agree.close(net.weight.grad, 3 * mean())


def test_no_sync_does_not_communicate(agree):
    net = linear()
    with registered(net):
        with mpinn.no_sync(net):
            if mpi.rank() == 0:  # would wait for the others
                net(rank_plus_one()).backward()
        agree.equal(net.weight.grad, rank_plus_one() if mpi.rank() == 0 else None)
        mpinn.synchronize_gradients_async(net)
        agree.close(net.weight.grad, x(1 / mpi.size()))


def test_no_sync_with_the_optimizer(agree):
    net = linear()
    optimizer = mpinn.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net)
    accumulate(net, optimizer)
    with mpinn.no_sync(net):
        for refused in (optimizer.step, optimizer.synchronize, lambda: mpinn.clip_grad_norm_(net, 1.0)):
            with pytest.raises(ArgumentError, match="after the block"):
                refused()
    optimizer.step()
    agree.close(net.weight.detach(), 1 - 3 * mean())


def test_no_sync_after_the_pass_that_synchronizes_is_an_error(agree):
    net = linear()
    with registered(net):
        net(rank_plus_one()).backward()
        with mpinn.no_sync(net), pytest.raises(GradientError, match="backward number 2 adds to"):
            net(rank_plus_one()).backward()
        with pytest.raises(GradientError, match="backward number 2 adds to"):
            mpinn.synchronize_gradients_async(net)


def test_a_step_after_no_sync_is_refused(agree):
    net = linear()
    with registered(net):
        with mpinn.no_sync(net):
            net(rank_plus_one()).backward()
        with pytest.raises(GradientError, match="before it is synchronized"):
            torch.optim.SGD(net.parameters(), lr=1.0).step()


def test_no_sync_of_another_net_has_no_effect(agree):
    net = linear()
    with mpinn.no_sync(net):
        net(rank_plus_one()).backward()
    mpinn.synchronize_gradients(net)
    agree.equal(net.weight.grad, mean())


# --- misuse and failures ---------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Raises in backward, on ranks where this is requested."""

    @staticmethod
    def forward(ctx, tensor, fails):
        ctx.fails = fails
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ValueError("no gradient today")
        return gradient, None


def failing_backward(net: nn.Sequential, fails: bool) -> None:
    """net[1] gets its gradient, then backward fails."""
    with suppress(ValueError):
        net[1](Fails.apply(net[0](rank_plus_one()), fails)).backward()


def test_failure_before_anything_was_sent_resets(agree):
    net = nn.Sequential(linear(), linear())
    with registered(net):  # one bucket: not complete when backward fails
        failing_backward(net, fails=True)
        net.zero_grad()
        step(net)
    agree.equal(net[0].weight.grad, mean())


def test_failure_on_one_rank_is_an_error_on_all(agree):
    net = nn.Sequential(linear(), linear())
    fails = mpi.rank() == mpi.size() - 1
    with registered(net, bucket_bytes=4):  # the first bucket has been sent when backward fails
        failing_backward(net, fails)
        with pytest.raises(GradientError, match="on this rank" if fails else "on another rank"):
            mpinn.synchronize_gradients_async(net)
        net.zero_grad()
        step(net)
    agree.equal(net[0].weight.grad, mean(), "afterwards all is well again")


def test_backward_after_an_incomplete_reduction_is_refused(agree):
    net = nn.Sequential(linear(), linear())
    with registered(net, bucket_bytes=4):
        failing_backward(net, fails=True)
        with pytest.raises(GradientError, match="failed when part of its gradients had been sent"):
            net(rank_plus_one()).backward()
        with pytest.raises(GradientError):
            mpinn.synchronize_gradients_async(net)


def test_unregistering_completes_launched_reductions(agree):
    net = linear()
    mpinn.register_async_backward(net)
    if mpi.rank() == 0:
        net(x(1.0)).backward()
    mpinn.unregister_async_backward(net)
    agree.close(net.weight.grad, x(1 / mpi.size()))


def test_a_registered_net_is_freed_when_it_is_dropped(agree):
    net = linear()
    mpinn.register_async_backward(net)
    step(net)
    reference, private = weakref.ref(net), net.__dict__[ASYNC_BACKWARD].comm
    del net
    gc.collect()
    agree(reference() is None, "the hooks keep the net")
    close_private(private)


def test_unregistered_nets_are_refused(agree):
    for call in (mpinn.synchronize_gradients_async, mpinn.unregister_async_backward):
        with pytest.raises(ArgumentError, match="register_async_backward"):
            call(linear())


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (mpinn.register_async_backward, "registered already"),
        (mpinn.synchronize_gradients, "synchronize_gradients_async"),
    ],
)
def test_calls_on_a_registered_net_are_refused(agree, call, remedy):
    net = linear()
    with registered(net), pytest.raises(ArgumentError, match=remedy):
        call(net)


def test_after_unregistering_backward_is_local_again(agree):
    net = linear()
    with registered(net):
        pass
    net(rank_plus_one()).backward()
    net(rank_plus_one()).backward()
    agree.equal(net.weight.grad, 2 * rank_plus_one())


@pytest.mark.min_ranks(2)
def test_different_nets_are_an_error_on_all_ranks(agree):
    with pytest.raises(ReplicaError, match="tensor 0 is 'weight'"):
        mpinn.register_async_backward(nn.Linear(2, 3 if mpi.rank() else 2))


def test_parameters_frozen_later_are_left_out(agree):
    net = Branches()
    with registered(net):
        net.right.weight.requires_grad_(False)
        step(net, "left", "right")
    agree.equal(net.left.weight.grad, mean())
    agree(net.right.weight.grad is None)


def test_undeclared_sparse_gradients_are_refused(agree):
    net = linear()
    with registered(net):
        table = nn.functional.embedding(torch.tensor([0]), net.weight, sparse=True)
        with pytest.raises(GradientError, match="is sparse"):
            table.sum().backward()


def test_copies_and_pickles_are_not_registered(agree):
    net = linear()
    with registered(net):
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
            for _ in range(2):
                other(rank_plus_one()).backward()
            agree.equal(other.weight.grad, 2 * rank_plus_one())
            with registered(other):
                pass


@pytest.mark.parametrize("average", [True, False])
def test_a_dense_gradient_of_a_sparse_embedding_is_reduced(agree, average):
    """Regression: it remained local if the weight was also used otherwise, here by weight decay; sums were doubled."""
    net = nn.ModuleList([nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2, sparse=True)])
    mpinn.synchronize_parameters(net)
    with registered(net, average=average):
        used = net[0](torch.tensor([mpi.rank() % 4])).sum() + (mpi.rank() + 1) * net[0].weight.square().sum()
        (used + net[1](torch.tensor([1])).sum()).backward()
        expected = [mpi.allreduce(each.to_dense().clone(), op="avg" if average else "sum") for each in gradients(net)]
        for _ in range(2):
            mpinn.synchronize_gradients_async(net)
            for actual, each in zip(gradients(net), expected, strict=True):
                agree.close(actual.to_dense(), each)
