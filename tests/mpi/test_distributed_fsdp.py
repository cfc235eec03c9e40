"""Fully sharded data parallelism over torchmpi, both of PyTorch's, on the CPU: the same as one process does."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.distributed_rig import (
    LOOSE,
    adam,
    net,
    same_everywhere,
    sgd,
    sharded,
    share,
    train,
    trained_alone,
    values,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 4), pytest.mark.usefixtures("default_group")]

CPU = torch.device("cpu")
WHOLE = StateDictOptions(full_state_dict=True)


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in state.values()])


@pytest.mark.parametrize("optimizer_of", [sgd, adam])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_fsdp2_training_equals_one_process(agree, optimizer_of, reshard):
    model = sharded(net(), reshard_after_forward=reshard)
    size = dist.get_world_size()
    own = sum(p.to_local().numel() for p in model.parameters())
    train(model, optimizer_of(model.parameters()), share())
    expected = values(trained_alone(optimizer_of))
    agree.close(values(model), expected, **LOOSE)
    agree(size == 1 or own < expected.numel(), f"{own} of {expected.numel()} elements on this rank")


def test_hybrid_sharding_on_a_mesh(agree):
    """Sharded over pairs of ranks, replicated over the pairs."""
    size = dist.get_world_size()
    shape = (size // 2, 2) if size % 2 == 0 else (size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = sharded(net(), mesh=mesh)
    train(model, sgd(model.parameters()), share())
    agree.close(values(model), values(trained_alone()), **LOOSE)


def test_fsdp2_full_state_round_trip(agree):
    first, second = sharded(net()), sharded(net(seed=9))
    optimizers = adam(first.parameters()), adam(second.parameters())
    train(first, optimizers[0], share())
    state = get_model_state_dict(first, options=WHOLE)
    # A copy: the two optimizers would count their steps in one tensor.
    optimizer_state = deepcopy(get_optimizer_state_dict(first, optimizers[0], options=WHOLE))
    saved = flat(state)  # now, as setting a state turns its tensors into shards
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    is_first = dist.get_rank() == 0
    set_model_state_dict(second, state if is_first else {}, options=broadcast)
    set_optimizer_state_dict(second, optimizers[1], optimizer_state if is_first else {}, options=broadcast)
    found = [values(first), values(second)]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        train(model, optimizer, share(), steps=2)
        found.append(values(model))
    agree.close(saved, values(trained_alone(adam)), **LOOSE)
    agree.equal(found[1], found[0])
    agree.equal(found[3], found[2])
    agree(not torch.equal(found[2], found[0]), "the model has stood still")


STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


def fsdp1(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    wrap = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(model, auto_wrap_policy=wrap, device_id=CPU, use_orig_params=True, **options)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.filterwarnings("ignore")
def test_fsdp1_training_equals_one_process(agree, strategy):
    model = fsdp1(net(), sharding_strategy=strategy)
    train(model, sgd(model.parameters()), share())
    with FullyShardedDataParallel.summon_full_params(model):
        found = values(model).clone()
    agree.close(found, values(trained_alone()), **LOOSE)
    agree(same_everywhere(found), "ranks differ")


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_states(agree):
    """The whole model on rank 0 only, and the shards of all ranks."""
    whole_kind, shards_kind = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
    model, other = fsdp1(net()), fsdp1(net(seed=7))
    train(model, sgd(model.parameters()), share())
    with FullyShardedDataParallel.state_dict_type(model, whole_kind, FullStateDictConfig(rank0_only=True)):
        on_rank_0 = model.state_dict()
    with FullyShardedDataParallel.state_dict_type(model, shards_kind):
        shards = model.state_dict()
    with FullyShardedDataParallel.state_dict_type(other, shards_kind):
        other.load_state_dict(shards)
    with FullyShardedDataParallel.summon_full_params(other):
        found = values(other).clone()
    agree.close(found, values(trained_alone()), **LOOSE)
    if dist.get_rank() == 0:
        agree.equal(flat(on_rank_0), found)
    else:
        agree.equal(len(on_rank_0), 0)
