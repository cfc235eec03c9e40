"""DistributedDataParallel over torchmpi: the same as one process on all the data, for all options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.distributed_rig import (
    SMALL_BUCKETS,
    TIGHT,
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


def test_no_sync_accumulates_locally_and_sends_once(agree):
    model, alone = DDP(net(), **SMALL_BUCKETS), net()
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    with model.no_sync():
        loss_of(model, 0, share()).backward()
    local, num_calls = gradients(model).clone(), group._get_sequence_number_for_group() - before
    loss_of(model, 1, share()).backward()
    mine = net()
    loss_of(mine, 0, share()).backward()
    for step in (0, 1):
        loss_of(alone, step).backward()
    agree.equal(local, gradients(mine))
    agree.equal(num_calls, 0)
    agree.close(gradients(model), gradients(alone), **TIGHT)


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


def num_batches(rank: int) -> int:
    return 2 * rank + 1


@pytest.mark.parametrize("divide_by_initial_world_size", [True, False], ids=["by all", "by active"])
def test_join_of_uneven_inputs(agree, divide_by_initial_world_size):
    rank, size = dist.get_rank(), dist.get_world_size()
    model, alone = DDP(net(), **SMALL_BUCKETS), net()
    optimizer, other = sgd(model.parameters()), sgd(alone.parameters())
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        train(model, optimizer, share(), num_batches(rank))
    for step in range(num_batches(size - 1)):
        active = [r for r in range(size) if step < num_batches(r)]
        other.zero_grad()
        for r in active:
            divisor = size if divide_by_initial_world_size else len(active)
            (loss_of(alone, step, slice(r, None, size)) / divisor).backward()
        other.step()
    agree.close(values(model), values(alone), **TIGHT)
    agree(same_everywhere(values(model)), "ranks differ")


@pytest.mark.min_ranks(2)
def test_join_raises_on_all_ranks_if_requested(agree):
    model = DDP(net())
    message = ""
    try:
        with model.join(throw_on_early_termination=True):
            train(model, sgd(model.parameters()), share(), num_batches(dist.get_rank()))
    except RuntimeError as error:
        message = str(error)
    if dist.get_world_size() > 1:
        agree("exhausted" in message, message or "nothing was raised")
