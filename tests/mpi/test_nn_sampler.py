"""To a user of mpinn.DistributedSampler: the parts of the ranks cover the data."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi import errors

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]

DATA = torch.arange(23)


@pytest.mark.parametrize("drop_last", [False, True])
def test_without_arguments_it_has_the_ranks_of_the_communicator(agree, drop_last):
    sampler = mpinn.DistributedSampler(DATA, drop_last=drop_last)
    expected = TorchSampler(DATA, mpi.size(), mpi.rank(), drop_last=drop_last)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected.set_epoch(epoch)
        epochs.append(torch.cat(list(DataLoader(DATA, batch_size=4, sampler=sampler))))
        agree.equal(epochs[-1], DATA[list(expected)])
    everything = mpi.allgather(epochs[0])
    agree.equal(len(everything.unique()), len(DATA) // mpi.size() * mpi.size() if drop_last else len(DATA))
    agree(not torch.equal(*epochs), "the order of the epochs is the same")


def test_it_uses_the_current_communicator_and_comm(agree):
    level = mpi.push_communicator(mpi.rank() % 2)
    sampler = mpinn.DistributedSampler(DATA)
    inside = sampler.num_replicas, sampler.rank
    mpi.set_communicator(0)
    given = mpinn.DistributedSampler(DATA, comm=level)
    agree.equal(inside, (mpi.communicator(level).size, mpi.communicator(level).rank))
    agree.equal((given.num_replicas, given.rank), inside)
    agree.equal(mpinn.DistributedSampler(DATA, num_replicas=7, rank=3).num_replicas, 7)


def test_an_invalid_communicator_is_refused(agree):
    agree.raises(errors.CommunicatorError, lambda: mpinn.DistributedSampler(DATA, comm=99), "from 0 to")
