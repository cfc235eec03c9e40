"""To a user of a DataLoader: its workers may fork while ranks communicate, and samplers divide the data."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from helpers.distributed_rig import net, same_everywhere, sgd, values
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("default_group")]

ITEMS = 24


class Rows(Dataset[tuple[int, Tensor]]):
    """Item i, and a tensor computed by torch."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        assert get_worker_info() is not None, "not in a worker"
        return index, torch.full((6,), index / ITEMS).sin().double()


def loader(**options: object) -> tuple[DataLoader[tuple[int, Tensor]], DistributedSampler[tuple[int, Tensor]]]:
    sampler: DistributedSampler[tuple[int, Tensor]] = DistributedSampler(Rows(), shuffle=True, seed=4)
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    return DataLoader(Rows(), batch_size=2, sampler=sampler, **workers, **options), sampler


@pytest.mark.parametrize("persistent", [False, True], ids=["each epoch anew", "persistent"])
def test_training_with_workers(agree, persistent):
    """Workers are forked in the middle of an all_reduce, and end in the middle of others."""
    batches, sampler = loader(persistent_workers=persistent)
    model = DDP(net(seed=dist.get_rank()))
    optimizer = sgd(model.parameters())
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        count, seen = torch.zeros(200_000), []
        pending = [dist.all_reduce(count, async_op=True) for _ in range(3)]
        for indices, x in batches:
            seen += indices.tolist()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        for work in pending:
            work.wait()
        everywhere: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everywhere, seen)
        orders.append(everywhere)
    agree(same_everywhere(values(model)), "ranks differ")
    for everywhere in orders:
        agree.equal(sorted(itertools.chain(*everywhere)), list(range(ITEMS)), "items")
    agree(orders[0] != orders[1], "the epochs have the same order")
