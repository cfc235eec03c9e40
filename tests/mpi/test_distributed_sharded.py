"""State that is spread over the ranks: ZeroRedundancyOptimizer, and distributed checkpoints, on torchmpi."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.distributed_rig import LOOSE, adam, net, same_everywhere, sharded, share, train, trained_alone, values
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("default_group")]

ADAM = {"lr": 0.01, "eps": 1e-3}


def zero(model: nn.Module, **options: object) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, **ADAM, **options)


@pytest.mark.parametrize("as_view", [False, True], ids=["parameters", "buckets"])
def test_zero_equals_adam_and_shards_its_state(agree, as_view):
    model = DDP(net())
    optimizer = zero(model, parameters_as_bucket_view=as_view)
    train(model, optimizer, share())
    num_own, num_all = len(optimizer.optim.state), len(list(model.parameters()))
    agree.close(values(model), values(trained_alone(adam)), **LOOSE)
    agree(same_everywhere(values(model)), "ranks differ")
    size = dist.get_world_size()
    agree(num_own < num_all if size > 1 else num_own == num_all, f"state of {num_own} of {num_all} parameters")


class Training(Stateful):
    """Model and optimizer, sharded, as in the tutorial on distributed checkpoints."""

    def __init__(self, seed: int) -> None:
        self.model = sharded(net(seed))
        self.optimizer = adam(self.model.parameters())

    def state_dict(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, object]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The same on all ranks."""
    paths = [str(tmp_path)]
    dist.broadcast_object_list(paths)
    yield Path(paths[0])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async save"])
def test_checkpoint_round_trip(agree, folder, asynchronous):
    first, second = Training(3), Training(8)
    train(first.model, first.optimizer, share())
    if asynchronous:
        # The save plans in another thread, and therefore needs a separate group.
        group = dist.new_group()
        dcp.async_save({"training": first}, checkpoint_id=folder, process_group=group).result()
        dist.destroy_process_group(group)
    else:
        dcp.save({"training": first}, checkpoint_id=folder)
    dcp.load({"training": second}, checkpoint_id=folder)
    found = values(first.model), values(second.model)
    for training in (first, second):
        train(training.model, training.optimizer, share(), steps=1)
    agree.close(found[0], values(trained_alone(adam)), **LOOSE)
    agree.equal(found[1], found[0])
    agree.equal(values(second.model), values(first.model))
    num_files = len(list(folder.glob("*.distcp")))
    agree.equal(num_files, dist.get_world_size())


def test_training_continues_during_an_async_save(agree, folder):
    """Regression: both used the default group, and the order of their calls differed between the ranks."""
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


def test_checkpoint_of_shards_becomes_an_ordinary_file(agree, folder):
    """Saved on all ranks, and read by one rank without a group into a model without shards."""
    training = Training(3)
    train(training.model, training.optimizer, share())
    dcp.save({"training": training}, checkpoint_id=folder)
    dist.barrier()
    single = net(seed=8)
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder, folder / "whole.pt")
        single.load_state_dict(torch.load(folder / "whole.pt")["training"]["model"])
    found = values(training.model)
    if dist.get_rank() == 0:
        agree.equal(values(single), found)
