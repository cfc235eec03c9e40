"""Functional collectives, collectives with gradients, and coalesced calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from helpers.distributed_rig import everybodys, of_rank

from torchmpi.errors import MismatchError

# Newer versions have other names for some collectives, which older ones do not know.
pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.ranks(1, 2),
    pytest.mark.usefixtures("default_group"),
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),
]


def test_functional_all_to_all_uneven(agree):
    """Rank r sends (r + 2 j) modulo 3 rows to rank j."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def rows(source: int, target: int) -> int:
        return (source + 2 * target) % 3

    incoming, outgoing = [rows(r, rank) for r in range(size)], [rows(rank, r) for r in range(size)]
    result = funcol.all_to_all_single(of_rank(rank, sum(outgoing), 2), incoming, outgoing, dist.group.WORLD)
    parts = []
    for source in range(size):
        theirs = [rows(source, target) for target in range(size)]
        parts.append(of_rank(source, sum(theirs), 2).split(theirs)[rank])
    agree.equal(funcol.wait_tensor(result), torch.cat(parts))


def test_functional_coalesced(agree):
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    mine = [of_rank(rank, size, 2), of_rank(rank, 3 * size)]
    everybody = [everybodys(size, 2), everybodys(3 * size)]
    sums = funcol.all_reduce_coalesced(mine, "sum", group)
    wholes = funcol.all_gather_into_tensor_coalesced(mine, group)
    parts = funcol.reduce_scatter_tensor_coalesced(mine, "sum", [0, 0], group)
    # Regression: the operation of the first dtype was used for all, and the list was refused.
    mixed = funcol.all_reduce_coalesced([of_rank(rank, 3), torch.tensor([rank == 0, False])], "sum", group)
    agree.equal(funcol.wait_tensor(mixed[0]), sum(everybodys(3)), "float beside bool")
    agree.equal(funcol.wait_tensor(mixed[1]), torch.tensor([True, False]), "bool beside float")
    for index, theirs in enumerate(everybody):
        agree.equal(funcol.wait_tensor(sums[index]), sum(theirs), "all_reduce")
        agree.equal(funcol.wait_tensor(wholes[index]), torch.cat(theirs), "all_gather")
        agree.equal(funcol.wait_tensor(parts[index]), sum(theirs).chunk(size)[rank], "reduce_scatter")


def test_gradients_go_through_functional_collectives(agree):
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x = of_rank(rank, size, 2).requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(x, 0, group)
    scattered = funcol.reduce_scatter_tensor_autograd(gathered * (rank + 1), "sum", 0, group)
    exchanged = funcol.all_to_all_single_autograd(scattered, [1] * size, [1] * size, group)
    (exchanged * (rank + 1)).sum().backward()
    # x is multiplied by the sum of all factors, and its row r by the factor of rank r.
    factor = size * (size + 1) / 2
    agree.equal(x.grad, factor * torch.arange(1.0, size + 1).double()[:, None].expand(size, 2))


def test_a_coalescing_manager_waits_for_every_call_and_raises_their_errors(agree):
    """With a device, it gets one work for the block."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(50_000)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.isend(torch.full((50_000,), rank + 1.0), (rank + 1) % size)
        dist.irecv(received, (rank - 1) % size)
    manager.wait()
    agree.equal(received, torch.full((50_000,), (rank - 1) % size + 1.0), "irecv")
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(torch.ones(3 + rank))
    if size > 1:
        agree.raises(MismatchError, manager.wait, "allreduce")


def test_gradients_go_through_the_older_functions(agree):
    """``torch.distributed.nn.functional``; the loss of a rank is (rank + 1) times the sum of its result."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weights, last = torch.arange(1.0, size + 1).double(), size - 1
    total = weights.sum().item()

    def gradient_of(call) -> torch.Tensor:
        x = of_rank(rank, size, 2).requires_grad_()
        result = call(x)
        (sum(part.sum() for part in result) * weights[rank]).backward()
        return x.grad

    def room(rows: int) -> torch.Tensor:
        return torch.empty(rows, 2).double()

    ones = torch.ones(size, 2).double()
    found = {
        "all_reduce": gradient_of(differentiable.all_reduce),
        "all_gather": gradient_of(differentiable.all_gather),
        "broadcast": gradient_of(lambda x: differentiable.broadcast(x, last)),
        "reduce": gradient_of(lambda x: differentiable.reduce(x, last)),
        "reduce_scatter": gradient_of(lambda x: differentiable.reduce_scatter(room(1), list(x.split(1)))),
        "all_to_all": gradient_of(lambda x: differentiable.all_to_all(list(room(size).split(1)), list(x.split(1)))),
        "all_to_all_single": gradient_of(lambda x: differentiable.all_to_all_single(room(size), x)),
    }
    by_row = weights[:, None] * ones
    expected = {
        "all_reduce": total * ones,
        "all_gather": total * ones,
        "broadcast": total * ones if rank == last else 0 * ones,
        "reduce": weights[last] * ones,
        "reduce_scatter": by_row,
        "all_to_all": by_row,
        "all_to_all_single": by_row,
    }
    for name, gradient in found.items():
        agree.equal(gradient, expected[name], name)
