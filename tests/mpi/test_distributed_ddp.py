"""To a user of DDP: for all options, training is that of one process on all the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.distributed_rig import (
    SMALL_BUCKETS,
    TIGHT,
    adam,
    batch,
    gradients,
    loss_of,
    net,
    same_everywhere,
    sgd,
    share,
    train,
    trained_alone,
    values,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = [
    pytest.mark.quick,
    pytest.mark.any_mpi,
    pytest.mark.ranks(1, 3),
    pytest.mark.usefixtures("default_group"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": SMALL_BUCKETS,
    "view": {**SMALL_BUCKETS, "gradient_as_bucket_view": True},
    "static": {**SMALL_BUCKETS, "static_graph": True},
    "static view": {**SMALL_BUCKETS, "static_graph": True, "gradient_as_bucket_view": True},
    "unused": {**SMALL_BUCKETS, "find_unused_parameters": True},
}


def differing() -> nn.Sequential:
    """A net that starts with other values on each rank: DDP must broadcast that of rank 0."""
    return net(seed=3 + dist.get_rank())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_equals_one_process(agree, options):
    model = DDP(differing(), **options)
    train(model, sgd(model.parameters()), share())
    agree.close(values(model), values(trained_alone()), **TIGHT)
    agree(same_everywhere(values(model)), "ranks differ")
    facts = model._get_ddp_logging_data()  # buckets are made anew after the first step, but not with unused parameters
    num_buckets = len(facts.get("rebuilt_bucket_sizes", facts["bucket_sizes"]).split(","))
    agree(num_buckets == 1 if options == {} else num_buckets > 2, f"{num_buckets} buckets")


class Branches(nn.Module):
    """Even ranks leave one branch out, and no rank uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.sometimes, self.never = net(), nn.Linear(6, 4).double(), nn.Linear(2, 2).double()

    def forward(self, x: Tensor, with_branch: bool) -> Tensor:
        result: Tensor = self.trunk(x)
        return result + self.sometimes(x) if with_branch else result


def test_unused_parameters(agree):
    model, alone = DDP(Branches(), find_unused_parameters=True, **SMALL_BUCKETS), Branches()
    x, _ = batch(0, slice(0, 3))
    size = dist.get_world_size()
    model(x, dist.get_rank() % 2 == 1).square().mean().backward()
    for rank in range(size):
        (alone(x, rank % 2 == 1).square().mean() / size).backward()
    agree.close(gradients(model.module.trunk), gradients(alone.trunk), **TIGHT)
    if size > 1:
        agree.close(gradients(model.module.sometimes), gradients(alone.sometimes), **TIGHT)
    agree(model.module.never.weight.grad is None, "an unused parameter has got a gradient")


class Words(nn.Module):
    """Gradients of three kinds: sparse, complex and plain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(20, 4, sparse=True).double()
        self.phases = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.out = nn.Linear(4, 2).double()

    def forward(self, fields: Tensor) -> Tensor:
        result: Tensor = self.out((self.table(fields).mean(1) * self.phases).abs())
        return result


def test_sparse_and_complex_gradients(agree):
    fields = torch.randint(20, (12, 3), generator=torch.Generator().manual_seed(3))
    model, alone = DDP(Words()), Words()
    for module, rows in ((model, fields[share()]), (alone, fields)):
        module(rows).square().mean().backward()
    table = model.module.table.weight.grad
    agree(table.is_sparse, "the gradient of the table is dense")
    agree.close(table.to_dense(), alone.table.weight.grad.to_dense(), **TIGHT)
    agree.close(model.module.phases.grad, alone.phases.grad, **TIGHT)
    agree.close(model.module.out.weight.grad, alone.out.weight.grad, **TIGHT)


def test_several_groups(agree):
    """The even ranks train together, as do the odd ones; another group sums over all ranks."""
    size, parity = dist.get_world_size(), dist.get_rank() % 2
    groups = [dist.new_group([rank for rank in range(size) if rank % 2 == p]) for p in (0, 1) if p < size]
    members = [rank for rank in range(size) if rank % 2 == parity]
    model, alone = DDP(differing(), process_group=groups[parity], **SMALL_BUCKETS), net(seed=3 + parity)
    optimizer, other = sgd(model.parameters()), sgd(alone.parameters())
    sums = []
    for _ in range(3):
        count = torch.ones(1)
        pending = dist.all_reduce(count, async_op=True)
        train(model, optimizer, share(), steps=1)
        pending.wait()
        sums.append(count.item())
        other.zero_grad()
        for rank in members:
            (loss_of(alone, 0, slice(rank, None, size)) / len(members)).backward()
        other.step()
    agree.equal(sums, [float(size)] * 3)
    agree.close(values(model), values(alone), **TIGHT)
    for group in groups[: parity + 1][-1:]:
        dist.destroy_process_group(group)


def test_training_continues_during_an_async_save(agree, tmp_path):
    """Regression: both used the default group, and the order of their calls differed between the ranks."""
    paths = [tmp_path]
    dist.broadcast_object_list(paths)
    (folder,) = paths
    model = DDP(net())
    optimizer = adam(model.parameters())
    saves = []
    for number in range(3):
        saves.append(dcp.async_save({"model": model.module.state_dict()}, checkpoint_id=folder / str(number)))
        train(model, optimizer, share())
        saves[-1].result()
    restored = {"model": net(seed=8).state_dict()}
    dcp.load(restored, checkpoint_id=folder / "0")
    agree(same_everywhere(values(model)), "ranks differ")
    for name, saved in net().state_dict().items():
        agree.equal(restored["model"][name], saved)
