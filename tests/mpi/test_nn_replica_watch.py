"""To a user of watch_replicas(): a flipped bit is named on all ranks within some steps, and mended."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.distributed import replica_checks
from torchmpi.errors import ArgumentError, ReplicaError
from torchmpi.log import logger
from torchmpi.session import runtime

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step like any other: the same batch on all ranks."""
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 15).view(5, 3)).square().mean().backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def flip(tensor: Tensor, rank: int) -> None:
    """Flip a bit of an element on one rank, which no step rounds away."""
    if mpi.rank() == rank:
        tensor.detach().view(-1)[1:2].view(torch.int32).bitwise_xor_(1 << 20)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    found: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        if "tensors differ" in record.getMessage():
            found.append(record.getMessage())
        return True

    logger.addFilter(note)
    yield found
    logger.removeFilter(note)


def test_equal_replicas_cost_one_call_of_a_number(agree):
    model = net()
    optimizer = sgd(model)
    watch = mpinn.watch_replicas(model, optimizer, every=2, state=True)
    before = {name: dict(each) for name, each in mpi.metrics()["calls"].get("world", {}).items()}
    for _ in range(5):
        step(model, optimizer)
    calls = mpi.metrics()["calls"].get("world", {})
    made = {name: each["calls"] - before.get(name, {"calls": 0})["calls"] for name, each in calls.items()}
    agree.equal({name: num for name, num in made.items() if num}, {"allgather": 2})
    sent = calls["allgather"]["bytes"] - before.get("allgather", {"bytes": 0})["bytes"]
    agree.equal((sent, watch.num_steps, watch.different), (2 * 16, 5, {}))
    watch.remove()
    watch.remove()
    step(model, optimizer)
    agree.equal(watch.num_steps, 5)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("wraps", [False, True], ids=["optimizer", "DistributedOptimizer"])
def test_a_flipped_bit_is_named_with_its_step_on_all_ranks(agree, wraps):
    model, last = net(), mpi.size() - 1
    optimizer: torch.optim.Optimizer = sgd(model)
    if wraps:
        optimizer = mpinn.DistributedOptimizer(optimizer, model)
    mpinn.watch_replicas(model, optimizer, every=2)
    for _ in range(3):
        step(model, optimizer)
    flip(model[2].bias, last)
    optimizer.param_groups[0]["lr"] = 0.0  # so that the step does not spread it
    ranks = "all ranks differ" if last == 1 else "ranks 0, 1 agree; rank 2 differs"
    words = f"rank {mpi.rank()}: 1 of 6 tensors differ", "after step 4 (equal after step 2):", f"'2.bias': {ranks}"
    agree.raises(ReplicaError, lambda: step(model, optimizer), *words)
    if wraps:
        mpinn.unregister_async_backward(model)


@pytest.mark.min_ranks(2)
def test_a_warning_is_written_once_and_known_on_all_ranks(agree, warnings):
    model = net()
    optimizer = sgd(model)
    watch = mpinn.watch_replicas(model, optimizer, every=1, check="warn")
    flip(model[2].weight, 1)
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(3):
        step(model, optimizer)
    agree.equal([*watch.different], ["2.weight"])
    agree.equal(len(warnings), int(mpi.rank() == 0))
    agree(
        all("1 of 6 tensors differ between the ranks after step 1 (not compared before)" in each for each in warnings)
    )


@pytest.mark.min_ranks(2)
def test_differences_are_mended_with_the_tensors_of_most_ranks(agree, warnings):
    model, alone = net(), net()
    optimizer, optimizer_alone = sgd(model), sgd(alone)
    watch = mpinn.watch_replicas(model, optimizer, every=2, check="mend", state=True)
    for _ in range(3):
        step(model, optimizer)
        step(alone, optimizer_alone)
    # Of two ranks the lower one is right, of three the two that agree.
    wrong = 1 if mpi.size() == 2 else 0
    flip(model[0].weight, wrong)
    flip(optimizer.state[model[2].weight]["momentum_buffer"], wrong)
    for _ in range(3):
        step(model, optimizer)
        step(alone, optimizer_alone)
    for name, value in alone.named_parameters():
        agree.bits(model.get_parameter(name).detach(), value.detach(), name)
        momentum = optimizer.state[model.get_parameter(name)]["momentum_buffer"]
        agree.bits(momentum, optimizer_alone.state[value]["momentum_buffer"], f"{name}: momentum_buffer")
    agree.equal(watch.different, {})
    if mpi.rank() == 0:
        agree.equal(len(warnings), 1)
        agree("'0.weight'" in warnings[0] and "The ranks that differ have got" in warnings[0], str(warnings))


@pytest.mark.min_ranks(2)
def test_a_state_that_a_rank_has_not_cannot_be_mended(agree):
    model = net()
    optimizer = sgd(model)
    mpinn.watch_replicas(model, optimizer, every=2, check="mend", state=True)
    step(model, optimizer)
    if mpi.rank() == 1:
        model[2].bias.requires_grad_(False)
        del optimizer.state[model[2].bias]
    agree.raises(ReplicaError, lambda: step(model, optimizer), "'2.bias: momentum_buffer'", "after step 2")


@pytest.mark.ranks(4)
def test_shards_are_compared_and_mended_among_the_ranks_that_hold_them(agree):
    """Ranks 0 and 2 have one half of a layer, ranks 1 and 3 the other one."""
    rank = mpi.rank()
    model_level = mpi.push_communicator(f"model {rank // 2}")
    mpi.set_communicator(0)
    data_level = mpi.push_communicator(f"data {rank % 2}")
    mpi.set_communicator(0)
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(rank % 2)
        layer.bias.zero_()
    mpinn.set_sharded(layer.weight, comm=model_level, data_comm=data_level)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    watch = mpinn.watch_replicas(layer, optimizer, every=1, check="mend")
    flip(layer.weight, 3)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    agree.equal(layer.weight.detach(), torch.full((2, 2), float(rank % 2)))
    agree.equal((watch.num_steps, watch.different), (1, {}))


def test_wrong_arguments_are_refused(agree):
    model = net()
    agree.raises(ArgumentError, lambda: mpinn.watch_replicas(model, sgd(model), every=0), "every=0")
    agree.raises(ArgumentError, lambda: mpinn.watch_replicas(model, sgd(model), check="stop"), "raise, warn, mend")  # type: ignore[arg-type]


@pytest.mark.min_ranks(2)
def test_ddp_is_watched_if_the_setting_asks_for_it(agree, monkeypatch):
    config = dataclasses.replace(runtime.current().config, replica_check_steps=2)
    monkeypatch.setattr(runtime.current(), "config", config)
    torch.distributed.init_process_group("torchmpi")
    try:
        model, other = nn.parallel.DistributedDataParallel(net()), net()
        optimizer, of_other = sgd(model), sgd(other)
        for _ in range(3):
            step(model, optimizer)
            flip(other[0].weight, 0)  # no replica of DDP: each rank may have its own
            step(other, of_other)
        flip(model.module[0].weight, 0)
        agree.raises(ReplicaError, lambda: step(model, optimizer), "'0.weight'", "after step 4 (equal after step 2)")
        agree.equal(replica_checks._watches[of_other], None)
    finally:
        torch.distributed.destroy_process_group()
