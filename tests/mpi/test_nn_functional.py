"""To a user of collectives with gradients: these agree with numerical ones.

``torch.autograd.gradcheck`` compares derivatives in one process. So each collective is made a function from the inputs
of all ranks, which every rank holds, to the results of all ranks: :func:`joint`. All ranks then change the same input
at the same time, and compute the same Jacobian.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import torchmpi as mpi
import torchmpi.nn as mpinn
import torchmpi.nn.functional as F
from torchmpi.errors import ArgumentError, MismatchError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


def joint(function):
    """The function from ``inputs[rank]`` of all ranks to the concatenated results of all ranks."""

    def run(inputs: torch.Tensor) -> torch.Tensor:
        copied = F.linear_map(inputs, torch.clone, lambda gradient: mpi.allreduce(gradient.clone()))
        result = function(copied[mpi.rank()]).reshape(-1)
        lengths = mpi.allgather(result.numel())
        begin = sum(lengths[: mpi.rank()])
        return F.linear_map(
            result,
            lambda values: mpi.allgather(values.detach()),
            lambda gradient: gradient[begin : begin + lengths[mpi.rank()]].clone(),
        )

    return run


def _sizes(sender: int) -> list[int]:
    return [(sender + receiver) % 3 for receiver in range(mpi.size())]


def _uneven_alltoall(rows: torch.Tensor) -> torch.Tensor:
    splits = _sizes(mpi.rank())
    return F.alltoall(rows[: sum(splits)], splits)


FUNCTIONS = {
    "allreduce": F.allreduce,
    "allreduce avg": lambda x: F.allreduce(x, op="avg"),
    "broadcast": lambda x: F.broadcast(x, root=mpi.size() - 1),
    "allgather": F.allgather,
    "allgather of different lengths": lambda x: F.allgather(x[: 2 * mpi.rank()]),
    "allgather of scalars": lambda x: F.allgather(x[0]),
    "reduce_scatter": F.reduce_scatter,
    "reduce_scatter avg": lambda x: F.reduce_scatter(x, op="avg"),
    "alltoall": F.alltoall,
    "alltoall of a number of rows that cannot be divided": lambda x: F.alltoall(x[1:]),
    "alltoall of different lengths": lambda x: F.alltoall(x[mpi.rank() :]),
    "alltoall with splits": _uneven_alltoall,
    "sendreceive": lambda x: F.sendreceive(x, (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_first_and_second_derivatives(agree, name):
    # The square makes the second derivatives differ from zero.
    rows = 2 * mpi.size()
    inputs = torch.randn(mpi.size(), rows, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    inputs.requires_grad_()
    function = joint(lambda x: FUNCTIONS[name](x.square()))
    # In random directions, which are the same on all ranks: each element needs several calls.
    agree(torch.autograd.gradcheck(function, inputs, fast_mode=True), "gradcheck")
    agree(torch.autograd.gradgradcheck(function, inputs, fast_mode=True), "gradgradcheck")


def test_results_are_those_of_the_collectives(agree):
    x = torch.arange(12.0).reshape(6, 2) + 100 * mpi.rank()
    agree.equal(F.allreduce(x), mpi.allreduce(x.clone()))
    agree.equal(F.broadcast(x, 0), mpi.broadcast(x.clone(), 0))
    agree.equal(F.allgather(x), mpi.allgather(x))
    agree.equal(F.reduce_scatter(x, op="avg"), mpi.reduce_scatter(x, op="avg"))
    agree.equal(F.alltoall(x), mpi.alltoall(x))
    agree.equal(x, torch.arange(12.0).reshape(6, 2) + 100 * mpi.rank(), "the input is unchanged")


def test_gradients_follow_the_communicator(agree):
    x = torch.full((3,), 1.0 + mpi.rank(), requires_grad=True)
    with mpi.group([0]) as alone:
        if alone:
            F.allreduce(x, comm=alone).sum().backward()
            agree.equal(x.grad, torch.ones(3))
    F.allreduce(x).sum().backward()
    agree.equal(x.grad, torch.full((3,), float(mpi.size() + (mpi.rank() == 0))))


def test_a_contrastive_loss_has_the_gradient_of_the_whole_batch(agree):
    """The loss of each rank uses the features of all ranks, as with the whole batch in one process."""
    torch.manual_seed(2)
    encoder = torch.nn.Linear(4, 3, dtype=torch.float64)
    batch = torch.randn(mpi.size(), 5, 4, dtype=torch.float64)
    whole = encoder(batch.flatten(0, 1))
    (whole @ whole.t()).logsumexp(1).mean().backward()
    expected = encoder.weight.grad
    encoder.weight.grad = None
    mine = encoder(batch[mpi.rank()])
    (mine @ F.allgather(mine).t()).logsumexp(1).mean().backward()
    mpinn.synchronize_gradients(encoder)
    agree.close(encoder.weight.grad, expected)


def test_graphs_do_not_keep_inputs(agree):
    x = torch.ones(2 * mpi.size(), requires_grad=True)
    for collective in (F.allreduce, F.allgather, F.reduce_scatter):
        tensor = x * 2
        reference = weakref.ref(tensor)
        result = collective(tensor)
        del tensor
        gc.collect()
        agree(reference() is None, f"{collective.__name__} keeps its input")
        result.sum().backward()


def test_refusals(agree):
    x = torch.ones(mpi.size(), requires_grad=True)
    agree.raises(ArgumentError, lambda: F.allreduce(x, op="max"), "'sum' or 'avg'")
    agree.raises(ArgumentError, lambda: F.reduce_scatter(x, op="prod"), "'sum' or 'avg'")
    agree.raises(ArgumentError, lambda: F.alltoall(x, [1] * (mpi.size() + 1)), "one number of rows for each rank")
    agree.raises(ArgumentError, lambda: F.alltoall(x[0]), "one number of rows for each rank")
    if mpi.size() > 1:
        shape = (2,) if mpi.rank() else (3,)
        agree.raises(MismatchError, lambda: F.allreduce(torch.ones(shape, requires_grad=True)))
