"""To a user of check_with_allreduce(): it names tensors whose bits differ, and the ranks that agree."""

from __future__ import annotations

import pytest
import torch
from helpers.outcomes import error_of
from torch import nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.errors import ArgumentError
from torchmpi.nn import check_with_allreduce as check

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def block() -> nn.Module:
    """The last view begins at an offset of 4 bytes."""
    torch.manual_seed(1)
    return mpinn.BlockSequential(1, nn.Linear(4, 1), nn.Linear(1, 4))


@pytest.mark.parametrize("make", (net, block, nn.ReLU), ids=("equal", "block", "nothing to check"))
def test_equal_replicas_pass(agree, make):
    agree.equal(error_of(check, make()), "")


@pytest.mark.min_ranks(2)
def test_one_bit_on_one_rank_is_reported_on_all_ranks(agree):
    replica = net()
    if mpi.rank() == mpi.size() - 1:
        replica[0].weight.detach()[1, 2] *= -1
    message = error_of(check, replica)
    agree("'0.weight'" in message and "'0.bias'" not in message, message)
    if mpi.size() > 2:
        agree(f"agree; rank {mpi.size() - 1} differs" in message, message)


def test_same_mean_and_variance_are_not_enough(agree):
    replica = net()
    with torch.no_grad():
        replica[0].weight.copy_(replica[0].weight.roll(mpi.rank(), dims=1))
    agree(("'0.weight'" in error_of(check, replica)) == (mpi.size() > 1))


def test_comparison_of_buffers_is_optional(agree):
    replica = net()
    replica[1].running_mean += mpi.rank()
    agree(("'1.running_mean'" in error_of(check, replica)) == (mpi.size() > 1))
    agree.equal(error_of(check, replica, buffers=False), "")


@pytest.mark.min_ranks(2)
def test_different_shapes_are_reported_first(agree):
    agree("'weight' float32 [2, 3]" in error_of(check, nn.Linear(3, 2 + mpi.rank())))


def test_sparse_and_expanded_buffers_are_refused_by_name(agree):
    replica = net()
    replica.register_buffer("table", torch.eye(3).to_sparse() if mpi.rank() == 0 else torch.eye(3))
    if mpi.size() > 1:
        agree("'table' sparse_coo float32 [3, 3] on rank 0, but 'table' float32 [3, 3] on" in error_of(check, replica))
    replica.table = torch.eye(3).to_sparse()
    for each in (check, mpinn.synchronize_parameters):
        with pytest.raises(ArgumentError, match="'table': the tensor is sparse"):
            each(replica)
    replica.table = torch.ones(1).expand(4)
    agree.equal(error_of(check, replica), "")
    with pytest.raises(ArgumentError, match="'table': the tensor is expanded"):
        mpinn.synchronize_parameters(replica)
