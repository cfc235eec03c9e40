"""To a user of join: ranks with different numbers of batches train as one process on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from helpers.nn_nets import values
from helpers.small_nets import mlp
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ArgumentError, GradientError, MismatchError
from torchmpi.nn.gradient_reduction import GradientReduction

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


def net() -> nn.Sequential:
    return mlp(2, 4, 1, seed=3).double()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(100 * rank + step)).double()


def num_batches(rank: int) -> int:
    """0, 2, 4, ...: rank 0 has no data."""
    return 2 * rank


def backward(model: nn.Module, rank: int, step: int) -> None:
    model(batch(rank, step)).square().mean().backward()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    synchronize: Callable[[nn.Module], object],
    num_steps: int | None = None,
) -> None:
    """Take a step for each batch of this rank, or `num_steps` steps."""
    for step in range(num_batches(mpi.rank()) if num_steps is None else num_steps):
        optimizer.zero_grad()
        backward(model, mpi.rank(), step)
        synchronize(model)
        optimizer.step()


def simulated(optimizer_of: Callable[..., torch.optim.Optimizer], divide_by: str = "active") -> torch.Tensor:
    """The expected parameters, computed on one rank: the average over the ranks with data."""
    model = net()
    optimizer = optimizer_of(model.parameters())
    for step in range(num_batches(mpi.size() - 1)):
        active = [rank for rank in range(mpi.size()) if step < num_batches(rank)]
        optimizer.zero_grad()
        for rank in active:
            (
                model(batch(rank, step)).square().mean() / (len(active) if divide_by == "active" else mpi.size())
            ).backward()
        optimizer.step()
    return values(model)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


TIGHT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize("divide_by", ["active", "size"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_average_is_over_the_ranks_with_data(agree, asynchronous, divide_by):
    model = net()
    optimizer = sgd(model.parameters())
    synchronize = mpinn.synchronize_gradients_async if asynchronous else mpinn.synchronize_gradients
    if asynchronous:
        mpinn.register_async_backward(model, bucket_bytes=40)
    with mpinn.join(model, divide_by=divide_by):
        train(model, optimizer, synchronize)
    if asynchronous:
        mpinn.unregister_async_backward(model)
    mpinn.check_with_allreduce(model)
    agree.close(values(model), simulated(sgd, divide_by), **TIGHT)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_with_distributed_optimizer(agree, asynchronous):
    model = net()
    optimizer = mpinn.DistributedOptimizer(sgd(model.parameters()), model, asynchronous=asynchronous)
    with mpinn.join(model, optimizer=optimizer):
        train(model, optimizer, lambda _: None)
    agree.close(values(model), simulated(sgd), **TIGHT)


def test_optimizer_state_is_copied_from_a_rank_that_took_part_until_the_end(agree):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with mpinn.join(model, optimizer=optimizer):
        train(model, optimizer, mpinn.synchronize_gradients)
    state = optimizer.state_dict()["state"]
    agree.equal(len(state), 4 if mpi.size() > 1 else 0)
    for index, entry in state.items():
        agree.equal(entry["step"].item(), float(num_batches(mpi.size() - 1)), f"parameter {index}")
        agree.equal(entry["exp_avg"], mpi.broadcast(entry["exp_avg"].clone()), f"parameter {index}")


def test_several_epochs(agree):
    model = net()
    optimizer = sgd(model.parameters())
    for _ in range(3):
        with mpinn.join(model, optimizer=optimizer):
            train(model, optimizer, mpinn.synchronize_gradients)
        mpinn.check_with_allreduce(model)


def test_join_does_not_change_equal_numbers_of_batches(agree):
    results = []
    for context in (contextlib.nullcontext, mpinn.join):
        model = net()
        with context(model):
            train(model, sgd(model.parameters()), mpinn.synchronize_gradients, num_steps=3)
        results.append(values(model))
    agree.equal(results[1], results[0])


def test_no_rank_has_data(agree):
    model = net()
    with mpinn.join(model):
        pass
    agree.equal(values(model), values(net()))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("divide_by", ["active", "size"])
def test_a_sum_in_half_precision_is_rounded_after_it_is_divided(agree, divide_by):
    """The sum over two active ranks of three has no value in float16; their average has."""
    model = nn.Linear(1, 1, bias=False).half()
    with mpinn.join(model, divide_by=divide_by):
        if mpi.rank() < 2:
            model.weight.grad = torch.tensor([[40000.0]], dtype=torch.float16)
            mpinn.synchronize_gradients(model)
            average = torch.tensor(80000.0 / (2 if divide_by == "active" else 3)).half()
            agree.equal(model.weight.grad.item(), average.item())


def test_ranks_without_data_have_no_gradients(agree):
    model = net()
    with mpinn.join(model):
        for step in range(num_batches(mpi.rank())):
            model.zero_grad()
            backward(model, mpi.rank(), step)
            mpinn.synchronize_gradients(model)
    last = mpi.rank() == mpi.size() - 1
    agree(all((p.grad is not None) == (last and mpi.size() > 1) for p in model.parameters()))


def test_accumulation_inside_join(agree):
    model = net()
    mpinn.register_async_backward(model, sync_gradient_frequency=2)
    num_synchronized = 0
    with mpinn.join(model):
        for step in range(num_batches(mpi.rank())):
            backward(model, mpi.rank(), step)
            if mpinn.synchronize_gradients_async(model):
                num_synchronized += 1
                model.zero_grad()
    mpinn.unregister_async_backward(model)
    agree.equal(num_synchronized, mpi.rank())


@pytest.mark.min_ranks(2)
def test_different_synchronizations_are_refused(agree):
    model = net()
    with pytest.raises(MismatchError, match=r"rank 1: synchronize_gradients\(average=False"):
        with mpinn.join(model):
            backward(model, mpi.rank(), 0)
            mpinn.synchronize_gradients(model, average=mpi.rank() != 1)


def test_an_exception_in_the_block_propagates(agree):
    model = net()
    with pytest.raises(ZeroDivisionError):
        with mpinn.join(model):
            raise ZeroDivisionError
    with mpinn.join(model):
        pass


@pytest.mark.parametrize(
    "call",
    [
        mpinn.synchronize_parameters,
        mpinn.check_with_allreduce,
        mpinn.register_async_backward,
        lambda n: mpinn.join(n).__enter__(),
    ],
)
def test_other_collectives_on_the_net_are_refused_inside(agree, call):
    model = net()
    with mpinn.join(model), pytest.raises(ArgumentError, match="inside join"):
        call(model)


def test_refusals(agree):
    with pytest.raises(ArgumentError, match="divide_by='all'"):
        with mpinn.join(net(), divide_by="all"):
            pass
    with pytest.raises(ArgumentError, match="sharded"):
        with mpinn.join(mpinn.MPLinear(4, 2)):
            pass


def test_leaving_between_backward_and_synchronization_is_an_error(agree):
    """Also with gradients that are left of an accumulation over several passes."""
    for frequency in (1, 2):
        model = net()
        mpinn.register_async_backward(model, frequency)
        with pytest.raises(GradientError, match="the end of the join block drops"):
            with mpinn.join(model):
                backward(model, 0, 0)
                if frequency > 1:
                    agree(not mpinn.synchronize_gradients_async(model))
        mpinn.unregister_async_backward(model)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_gradient_that_parameters_share_is_divided_once(agree, dtype):
    """Regression: ranks without data passed one zero per parameter, ranks with data one tensor per gradient."""
    rank, size = mpi.rank(), mpi.size()
    shared = torch.full((3,), 4.0, dtype=dtype)
    tensors = [shared, shared.view(3)] if rank == 0 else [torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype)]
    GradientReduction(divisor=2, size=size + 1).run_many(tensors, mpi.communicator())
    for tensor in tensors:
        agree.equal(tensor, torch.full((3,), 2.0, dtype=dtype))


def test_clipping_inside_join(agree):
    """Regression: only with hooks; otherwise the norms were compared with ranks that had no data."""
    model, norms = net(), []

    def synchronize(model: nn.Module) -> None:
        mpinn.synchronize_gradients(model)
        norms.append(mpinn.clip_grad_norm_(model, 0.1).item())
        mpinn.clip_grad_value_(model, 0.05)

    with mpinn.join(model):
        train(model, sgd(model.parameters()), synchronize)
    mpinn.check_with_allreduce(model)
    agree.equal(mpi.allgather_object(norms)[-1][: len(norms)], norms)
