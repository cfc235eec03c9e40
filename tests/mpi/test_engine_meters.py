"""To who reads a metric: meters that are summed over ranks have the value of one meter with all data."""

from __future__ import annotations

import copy

import pytest
import torch

import torchmpi as mpi
from torchmpi.engine import AverageValueMeter, ClassErrorMeter
from torchmpi.errors import ArgumentError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]


def test_average_is_not_the_mean_of_means(agree):
    meter, everything = AverageValueMeter(), AverageValueMeter()
    for rank in range(mpi.size()):
        for value in range(2**rank):
            everything.add(value / 7, num=rank + 1)
            if rank == mpi.rank():
                meter.add(value / 7, num=rank + 1)
    local = copy.deepcopy(meter)
    agree(meter.synchronize() is meter, "synchronize() returns the meter")
    agree(abs(meter.value() - everything.value()) < 1e-12, "mean")
    agree(abs(meter.std() - everything.std()) < 1e-12 or everything.num_samples < 2, "deviation")
    agree.equal(meter.num_samples, everything.num_samples)
    agree.equal(set(mpi.allgather_object(meter.value())), {meter.value()}, "the same on all ranks")
    agree.equal(local.num_samples, 2 ** mpi.rank() * (mpi.rank() + 1), "the copy still counts this rank alone")


def test_class_error_over_ranks(agree):
    meter = ClassErrorMeter(topk=(1, 2))
    if mpi.rank() == 0:  # the other ranks add no value
        meter.add(torch.tensor([[3.0, 2.0, 1.0]] * 4), torch.tensor([0, 1, 1, 2]))
    meter.synchronize()
    agree.equal((meter.value(1), meter.value(2), meter.num_samples), (75.0, 25.0, 4))


def test_totals_are_not_counted_twice(agree):
    meter = AverageValueMeter()
    meter.add(1.0)
    meter.synchronize()
    with pytest.raises(ArgumentError, match="reset"):
        meter.synchronize()
    with pytest.raises(ArgumentError, match="reset"):
        meter.add(1.0)
    restored = AverageValueMeter()
    restored.load_state_dict(meter.state_dict())
    with pytest.raises(ArgumentError, match="reset"):
        restored.add(1.0)
    meter.reset()
    meter.add(5.0)
    agree.equal(meter.value(), 5.0)


def test_over_a_part_of_the_ranks(agree):
    level = mpi.push_communicator(mpi.rank() % 2)
    mpi.set_communicator(0)
    meter = AverageValueMeter()
    meter.add(float(mpi.rank()))
    meter.synchronize(comm=level)
    same_parity = [rank for rank in range(mpi.size()) if rank % 2 == mpi.rank() % 2]
    agree.equal((meter.value(), meter.num_samples), (sum(same_parity) / len(same_parity), len(same_parity)))
