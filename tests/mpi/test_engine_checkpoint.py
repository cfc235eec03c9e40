"""Checkpoints of several ranks: a resumed run equals an uninterrupted one bit for bit."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.engine import AllReduceSGDEngine, AverageValueMeter
from torchmpi.errors import CheckpointError

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.once]

MAX_EPOCHS = 2


@pytest.fixture
def path() -> Iterator[Path]:
    """The same on all ranks."""
    directory = Path(mpi.broadcast_object(tempfile.mkdtemp() if mpi.rank() == 0 else None))
    yield directory / "a.ckpt"
    mpi.barrier()
    if mpi.rank() == 0:
        shutil.rmtree(directory)


class Trial:
    """Each rank has its own random numbers, shuffling and batch statistics, and more data than the previous rank."""

    def __init__(self, make_optimizer, *, asynchronous: bool = False, sharded: bool = False) -> None:
        torch.manual_seed(1)
        first = mpinn.MPLinear(4, 8) if sharded else nn.Linear(4, 8)
        self.network = nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
        self.optimizer = make_optimizer(self.network.parameters())
        seed = 10 if sharded else 10 + mpi.rank()
        num_rows = 20 if sharded else 12 + 8 * mpi.rank()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        rows = TensorDataset(torch.randn(num_rows, 4), torch.randint(3, (num_rows,)))
        self.loader = DataLoader(rows, batch_size=4, shuffle=True)
        self.meter = AverageValueMeter()
        self.engine = AllReduceSGDEngine(asynchronous=asynchronous, progress=False)
        self.engine.step_scheduler(torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5), "on_update")
        self.engine.keep(meter=self.meter)
        self.engine.hooks.on_start_epoch.append(lambda state: self.meter.reset())
        self.engine.hooks.on_forward_criterion.append(lambda state: self.meter.add(state.loss))

    def train(self, resume: Path | None = None) -> None:
        self.engine.train(
            network=self.network,
            criterion=nn.CrossEntropyLoss(),
            iterator=self.loader,
            optimizer=self.optimizer,
            max_epochs=MAX_EPOCHS,
            resume=resume,
        )

    def stop_after(self, t: int, path: Path) -> None:
        self.engine.hooks.on_update.append(lambda state: setattr(state, "stop", state.t == t))
        self.engine.hooks.on_end.append(lambda state: self.engine.save_checkpoint(path))
        self.train()

    def bits(self) -> list[Tensor]:
        tensors = [value.clone() for value in self.network.state_dict().values()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return [*tensors, torch.tensor(self.meter.value()), torch.get_rng_state()]


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize(
    ("make_optimizer", "options"),
    [
        (momentum, {}),
        (adam, {}),
        (adam, {"asynchronous": True}),
        (momentum, {"sharded": True}),
    ],
)
def test_resumes_anywhere(agree, path, make_optimizer, options):
    reference = Trial(make_optimizer, **options)
    reference.train()
    expected = reference.bits()
    steps_per_epoch = 5 if options.get("sharded") else 3 + 2 * (mpi.size() - 1)
    # When all ranks have data, when only the last rank has, and when the last batch of an epoch is done.
    for t in (2, steps_per_epoch - 1, steps_per_epoch, steps_per_epoch + 1):
        Trial(make_optimizer, **options).stop_after(t, path)
        resumed = Trial(make_optimizer, **options)
        torch.manual_seed(999)
        resumed.train(resume=path)
        for mine, theirs in zip(resumed.bits(), expected, strict=True):
            agree.equal(mine, theirs, f"after update {t}")


def test_equal_state_is_stored_once(agree, path):
    Trial(adam).stop_after(3, path)
    archive = torch.load(path, weights_only=True)
    agree.equal(archive["size"], mpi.size())
    running = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for rank, entry in enumerate(archive["ranks"]):
        agree(set(entry["trees"]["network"]) <= (running if rank else set()), f"network entries of rank {rank}")
        agree.equal(entry["trees"]["optimizer"], {}, f"optimizer entries of rank {rank}")


def test_errors_are_raised_on_all_ranks(agree, path):
    with pytest.raises(CheckpointError, match="No such file"):
        Trial(adam).train(resume=path)
    trial = Trial(adam)
    trial.engine.checkpoint(path.parent / "missing" / "a.ckpt", every=1)
    with pytest.raises(CheckpointError, match="No such file"):
        trial.train()
    Trial(adam).stop_after(3, path)
    mpi.barrier()
    if mpi.rank() == 0:
        archive = torch.load(path, weights_only=True)
        torch.save({**archive, "size": mpi.size() + 1}, path)
    mpi.barrier()
    with pytest.raises(
        CheckpointError, match=rf"written by {mpi.size() + 1} rank\(s\) and cannot be resumed by {mpi.size()}"
    ):
        Trial(adam).train(resume=path)
    if mpi.rank() == 0:
        path.write_bytes(path.read_bytes()[:-100])
    mpi.barrier()
    with pytest.raises(CheckpointError, match="truncated"):
        Trial(adam).train(resume=path)
