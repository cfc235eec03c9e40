"""To a user of checkpoints: a resumed run of several ranks equals an uninterrupted one, bit for bit."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchmpi as mpi
import torchmpi.nn as mpinn
from torchmpi.engine import AllReduceSGDEngine, AverageValueMeter, EarlyStop, checkpoint
from torchmpi.engine.all_ranks import AllRanks
from torchmpi.errors import CheckpointError

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]

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
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    del metadata["engine.digests"]
    num_bytes = [metadata.pop(f"engine.rank{rank}").size.numel() for rank in range(mpi.size())]
    agree(all(name.startswith(("network.", "optimizer.state.")) for name in metadata), str(list(metadata)))
    # The statistics of batch norm are tensors of 36 and 8 bytes; a file of torch.save() adds less than 700 to each.
    agree(max(num_bytes) < num_bytes[0] + 3 * 700, str(num_bytes))


def test_dtypes_that_torch_does_not_pickle(agree, path):
    """Regression: reading failed on rank 0, where pickle.dumps() raised an AttributeError."""
    coordinator, raw = AllRanks(), torch.arange(8, dtype=torch.uint8)
    tensors = {str(dtype): raw.view(dtype) for dtype in (torch.uint16, torch.uint64, torch.float8_e5m2)}
    saver = checkpoint.Saver(coordinator)
    saver.save(path, checkpoint.Content({}, {"kept": tensors}, {"network": tensors}))
    saver.close()
    saved = checkpoint.read(path, coordinator)
    for found in (saved.trees["network"], *(own["kept"] for own in saved.ranks)):
        for name, tensor in tensors.items():
            agree.equal(found[name].dtype, tensor.dtype)
            agree.equal(found[name].view(torch.uint8), raw, name)


class Counted:
    """Each row once per epoch: the ranks take turns in an order that depends on the epoch only."""

    num_rows, batch_size = 96, 2

    def __init__(self) -> None:
        self.epoch, self.taken = 0, []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows // mpi.size() // self.batch_size

    def __iter__(self):
        order = torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(self.epoch))
        for rows in order[mpi.rank() :: mpi.size()].split(self.batch_size):
            yield rows.float().unsqueeze(1).expand(-1, 4), rows % 3


def resharded(max_epochs: int, path: Path | None = None, stop: tuple[int, Path] | None = None):
    """Train on the current communicator; return the engine's state, and what was observed."""
    torch.manual_seed(5)
    network = nn.Sequential(mpinn.MPLinear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    torch.manual_seed(50 + mpi.communicator(0).rank)
    engine, meter = AllReduceSGDEngine(progress=False), AverageValueMeter()
    engine.keep(meter=meter)
    seen: dict[str, list[Any]] = {"rows": [], "state": [], "random": []}

    @engine.on("on_sample")
    def observe(state):
        if not seen["state"]:
            momentum = state.optimizer.state.get(network[0].weight, {}).get("momentum_buffer")
            gathered = [] if momentum is None else [network[0].gather_columns(momentum)]
            seen["state"] += [network[0].full_weight(), network[1].running_mean.clone(), network[2].bias.clone()]
            seen["state"] += [*gathered, torch.tensor(mpi.allreduce(meter.num_samples))]
            seen["random"] = torch.rand(4).tolist()  # as dropout would draw them
        rows = state.sample.input[:, 0].long()
        seen["rows"] += rows.tolist()
        meter.add(1.0, len(rows))
        # MPLinear needs the same batch on all ranks.
        state.sample = torch.ones(2, 4) * torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1])

    if stop is not None:
        engine.hooks.on_update.append(lambda state: setattr(state, "stop", state.t == stop[0]))
        engine.hooks.on_end.append(lambda state: engine.save_checkpoint(stop[1]))
    state = engine.train(
        network=network,
        criterion=nn.CrossEntropyLoss(),
        iterator=Counted(),
        optimizer=momentum(network.parameters()),
        max_epochs=max_epochs,
        resume=path,
    )
    return state, seen


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("grows", [False, True])
def test_resumes_on_another_number_of_ranks(agree, path, grows):
    """A run of all ranks on the groups {0} and {1, ...}, and a run of rank 0 on all ranks."""
    groups = mpi.push_communicator(mpi.rank() > 0)
    mpi.set_communicator(0)
    first, second = (groups, 0) if grows else (0, groups)
    num_updates = 12 if grows else 6  # divisible by each number of ranks
    saving = path if mpi.rank() == 0 or not grows else path.with_name("unused")
    with mpi.use(first):
        resharded(1, stop=(num_updates, saving))
        _, expected = resharded(1, path=saving)  # on the same ranks: the state at the checkpoint
        left = sorted(mpi.allgather(torch.tensor(expected["rows"])).tolist())
    expected, left = mpi.broadcast_object((expected["state"], left))
    with mpi.use(second):
        state, seen = resharded(1, path=path)
        rows = sorted(mpi.allgather(torch.tensor(seen["rows"])).tolist())
        num_ranks, t = mpi.size(), state.t
        drawn = {tuple(numbers) for numbers in mpi.allgather_object(seen["random"])}
    agree.equal(len(drawn), num_ranks, "ranks that draw numbers of their own")
    agree.equal(len(seen["state"]), 5)
    for mine, theirs in zip(seen["state"], expected, strict=True):
        agree.equal(mine, theirs, "state at the beginning of the resumed run")
    agree.equal(rows, left, "rows that were not done before")
    agree.equal(t, num_updates + len(left) // Counted.batch_size // num_ranks, "number of updates")


def test_best_weights_are_stored_once_and_divided_anew(agree, path):
    def run(max_epochs, **options):
        torch.manual_seed(5)
        layer, engine = mpinn.MPLinear(4, 8), AllReduceSGDEngine(progress=False)
        weights = []
        engine.hooks.on_end_epoch.append(lambda state: weights.append(layer.full_weight()))
        if not options:
            engine.checkpoint(path)
        batches = [(torch.ones(2, 4), torch.tensor([0, 1]))]
        engine.train(
            network=nn.Sequential(layer, nn.Linear(8, 3)),
            criterion=nn.CrossEntropyLoss(),
            iterator=batches,
            lr=0.1,
            max_epochs=max_epochs,
            validate=batches,
            stop_early=EarlyStop(patience=9, mode="max", keep_best=True),  # the first epoch is the best
            **options,
        )
        return weights, layer.full_weight()

    weights, best = run(2)
    agree.equal(best, weights[0])
    agree(not torch.equal(weights[0], weights[1]), "the second epoch changes nothing")
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = [f"best.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")]
    agree.equal([name for name in metadata if "best" in name], names)
    groups = mpi.push_communicator(mpi.rank() > 0)
    mpi.set_communicator(0)
    with mpi.use(groups):
        _, again = run(3, resume=path)
    agree.equal(again, best)


def test_errors_are_raised_on_all_ranks(agree, path):
    with pytest.raises(CheckpointError, match="No such file"):
        Trial(adam).train(resume=path)
    for asynchronous in (False, True):
        trial = Trial(adam)
        trial.engine.checkpoint(path.parent / "missing" / "a.ckpt", every=1, asynchronous=asynchronous)
        with pytest.raises(CheckpointError, match="No such file"):
            trial.train()
    Trial(adam).stop_after(3, path)
    mpi.barrier()
    if mpi.rank() == 0:
        data = path / "__0_0.distcp"
        data.write_bytes(data.read_bytes()[:-100])
    mpi.barrier()
    with pytest.raises(CheckpointError, match="truncated"):
        Trial(adam).train(resume=path)
