"""To a user of DDP: buckets in shared memory give the gradients of private memory, bit for bit."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
import torch.distributed as dist
from helpers.distributed_rig import (
    SMALL_BUCKETS,
    TIGHT,
    gradients,
    loss_of,
    net,
    same_everywhere,
    sgd,
    train,
    trained_alone,
    values,
)
from helpers.distributed_rig import share as rows_of_this_rank
from torch.nn.parallel import DistributedDataParallel as DDP

from torchmpi.distributed import bucket_memory, torch_names
from torchmpi.session import runtime

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2)]

WHO_SHARES = {"nobody": lambda rank: False, "not rank 0": lambda rank: rank > 0, "all": lambda rank: True}


@pytest.fixture(autouse=True)
def small_ones_too(default_group, monkeypatch):
    """The nets of tests have buckets of some hundred bytes."""
    monkeypatch.setattr(bucket_memory, "MIN_BYTES", 1)
    monkeypatch.setattr(dist.group.WORLD, "_may_share", True)


def holds(tensor: torch.Tensor) -> bool:
    return runtime.current().heap.holds(tensor.data_ptr())


def num_shared() -> int:
    gc.collect()
    return len(runtime.current().heap._own)


@pytest.mark.parametrize("view", (False, True), ids=("copied", "view"))
def test_the_same_bits_wherever_buckets_are(agree, monkeypatch, view):
    results = {}
    for who, does_share in WHO_SHARES.items():
        monkeypatch.setattr(dist.group.WORLD, "_may_share", does_share(dist.get_rank()))
        before = num_shared()
        model = DDP(net(), gradient_as_bucket_view=view, **SMALL_BUCKETS)
        train(model, sgd(model.parameters()), rows_of_this_rank())
        shares = does_share(dist.get_rank()) and dist.get_world_size() > 1
        agree.equal(num_shared() - before > 1, shares, f"{who}: {num_shared() - before} buckets are shared")
        in_buckets = [holds(parameter.grad) for parameter in model.parameters()]
        agree.equal(in_buckets, [shares and view] * len(in_buckets), who)
        agree(same_everywhere(values(model)), f"{who}: ranks differ")
        results[who] = values(model)
        del model
        agree.equal(num_shared(), before, f"{who}: what is left of the buckets")
    agree.close(results["nobody"], values(trained_alone()), **TIGHT)
    agree.bits(results["not rank 0"], results["nobody"], "mixed")
    agree.bits(results["all"], results["nobody"], "shared")


def test_gradients_outlive_the_model_and_the_heap_entry(agree):
    model = DDP(net(), gradient_as_bucket_view=True)
    loss_of(model, 0, rows_of_this_rank()).backward()
    expected, kept = gradients(model), [parameter.grad for parameter in model.parameters()]
    del model
    agree(num_shared() >= (dist.get_world_size() > 1), "given back while gradients look into it")
    agree.equal(torch.cat([gradient.reshape(-1) for gradient in kept]), expected)


def test_only_buckets_of_ddp_are_moved(agree):
    """The address of any other tensor may be in use elsewhere."""
    flat, addresses = torch.ones(1000), []

    def reduce_in_hook(_: torch.Tensor) -> None:
        addresses.append(flat.data_ptr())
        dist.all_reduce(flat, async_op=True).wait()
        addresses.append(flat.data_ptr())

    def reduce_in_python(_, bucket):  # torch reads annotations, and not as text
        buffer = bucket.buffer()
        addresses.append(buffer.data_ptr())
        work = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
        addresses.append(buffer.data_ptr())
        return work.get_future().then(lambda future: future.value()[0])

    before = num_shared()
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.register_hook(reduce_in_hook)
    parameter.sum().backward()
    model = DDP(net())
    model.register_comm_hook(None, reduce_in_python)
    loss_of(model, 0, rows_of_this_rank()).backward()
    agree.equal(len(addresses), 4)
    agree.equal(addresses[::2], addresses[1::2], "moved")
    agree.equal(num_shared(), before)


def fails_with(error: Exception):
    def move(*_: object, **__: object) -> None:
        raise error

    return move


NOT_TO_BE_HAD = {
    "no room": lambda patch: patch.setattr(torch_names, "move_to_file", lambda *_, **__: None),
    "torch cannot": lambda patch: patch.setattr(torch_names, "move_to_file", fails_with(RuntimeError("unable to"))),
    "no descriptors": lambda patch: patch.setattr(torch_names, "move_to_file", fails_with(OSError("too many"))),
    "switched off": lambda patch: patch.setattr(
        runtime.current(), "config", dataclasses.replace(runtime.current().config, share_ddp_buckets=False)
    ),
}


@pytest.mark.parametrize("prevent", NOT_TO_BE_HAD.values(), ids=NOT_TO_BE_HAD)
def test_without_shared_memory_they_stay_where_they_are(agree, monkeypatch, prevent):
    before = num_shared()
    prevent(monkeypatch)
    model = DDP(net(), **SMALL_BUCKETS)
    train(model, sgd(model.parameters()), rows_of_this_rank())
    agree.close(values(model), values(trained_alone()), **TIGHT)
    agree.equal(num_shared(), before)
    agree.equal(dist.group.WORLD._may_share, False, "tried again and again")
