"""To a user of functional and coalesced collectives: results and gradients are right."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from helpers.distributed_rig import everybodys, of_rank

from torchmpi.errors import MismatchError

# Newer versions have other names for some collectives, which older ones do not know.
pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.ranks(1, 2),
    pytest.mark.usefixtures("default_group"),
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),
]


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
