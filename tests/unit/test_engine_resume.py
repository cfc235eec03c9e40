"""To a user of checkpoints: a resumed run equals an uninterrupted one bit for bit, wherever it was interrupted."""

from __future__ import annotations

import multiprocessing
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torchmpi.engine import AverageValueMeter, SGDEngine, State
from torchmpi.errors import CheckpointError

NUM_ROWS, BATCH_SIZE = 44, 8  # six batches, the last one shorter
NUM_BATCHES, MAX_EPOCHS = 6, 3


class Augmented(Dataset):
    """Draws from all three global generators while loading."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.rows[index]
        return x + torch.randn(4) * 0.1 + random.random() * 0.1 + np.random.rand() * 0.1, y


class Resumable:
    """An iterator that saves its position, and shuffles with its own generator."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows, self.epoch, self.position = rows, 0, 0

    def __iter__(self):
        order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(self.epoch))
        while self.position < NUM_ROWS:
            chosen = order[self.position : self.position + BATCH_SIZE]
            self.position += BATCH_SIZE
            yield self.rows[chosen]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(NUM_ROWS, 4, generator=generator), torch.randint(3, (NUM_ROWS,), generator=generator)
    )


def shuffled() -> DataLoader:
    return DataLoader(rows(), batch_size=BATCH_SIZE, shuffle=True)


def own_generator() -> DataLoader:
    return DataLoader(rows(), batch_size=BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(5))


def augmented() -> DataLoader:
    return DataLoader(Augmented(rows()), batch_size=BATCH_SIZE, shuffle=True)


def resumable() -> Resumable:
    return Resumable(rows())


def two_workers() -> DataLoader:
    return DataLoader(Augmented(rows()), batch_size=BATCH_SIZE, shuffle=True, num_workers=2)


class Trial:
    """An engine with all kinds of state: dropout, batch norm, optimizer, scheduler, meter."""

    def __init__(self, make_iterator, make_optimizer, prefetch: int = 1) -> None:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        self.network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
        self.optimizer = make_optimizer(self.network.parameters())
        self.iterator = make_iterator()
        self.meter = AverageValueMeter()
        self.means: list[float] = []
        self.seen: list[int] = []
        self.final_rng = torch.empty(0)
        self.engine = SGDEngine(prefetch=prefetch, progress=False)
        self.engine.step_scheduler(torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [5, 9]), "on_update")
        self.engine.keep(meter=self.meter)
        hooks = self.engine.hooks
        hooks.on_start_epoch.append(lambda state: self.meter.reset())
        hooks.on_forward_criterion.append(lambda state: self.meter.add(state.loss))
        hooks.on_end_epoch.append(lambda state: self.means.append(self.meter.value()))
        hooks.on_update.append(lambda state: self.seen.append(state.t))

    def train(self, resume: Path | None = None) -> State:
        return self.engine.train(
            network=self.network,
            criterion=nn.CrossEntropyLoss(),
            iterator=self.iterator,
            optimizer=self.optimizer,
            max_epochs=MAX_EPOCHS,
            resume=resume,
        )

    def stop_after(self, t: int, path: Path) -> None:
        def stop(state: State) -> None:
            state.stop = state.t == t

        self.engine.hooks.on_update.append(stop)
        self.engine.hooks.on_end.append(lambda state: self.engine.save_checkpoint(path))
        self.train()

    def bits(self) -> list[Tensor]:
        tensors = list(self.network.state_dict().values())
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return tensors


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def assert_same(resumed: Trial, reference: Trial) -> None:
    assert all(torch.equal(a, b) for a, b in zip(resumed.bits(), reference.bits(), strict=True))
    assert resumed.means == reference.means[len(reference.means) - len(resumed.means) :]
    assert resumed.optimizer.param_groups[0]["lr"] == reference.optimizer.param_groups[0]["lr"]
    assert torch.equal(torch.get_rng_state(), reference.final_rng)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_iterator", "make_optimizer"),
    [(shuffled, momentum), (own_generator, adam), (augmented, momentum), (resumable, adam)],
)
def test_resumes_anywhere(make_iterator, make_optimizer, tmp_path):
    reference = Trial(make_iterator, make_optimizer)
    reference.train()
    reference.final_rng = torch.get_rng_state()
    # After the first batch, in the middle, after the last batch of an epoch but before its end, in epoch 1.
    for t in (1, 4, NUM_BATCHES, NUM_BATCHES + 3):
        first = Trial(make_iterator, make_optimizer)
        first.stop_after(t, tmp_path / "a.ckpt")
        assert first.seen == list(range(1, t + 1))
        second = Trial(make_iterator, make_optimizer)
        torch.manual_seed(999)  # the state of the new process must not matter
        random.seed(999)
        np.random.seed(999)
        state = second.train(resume=tmp_path / "a.ckpt")
        assert second.seen == list(range(t + 1, NUM_BATCHES * MAX_EPOCHS + 1))
        assert (state.t, state.epoch) == (NUM_BATCHES * MAX_EPOCHS, MAX_EPOCHS)
        assert_same(second, reference)


def test_prefetching_does_not_change_results():
    for make_iterator in (shuffled, own_generator, augmented, resumable):
        plain = Trial(make_iterator, adam, prefetch=0)
        plain.train()
        plain.final_rng = torch.get_rng_state()
        ahead = Trial(make_iterator, adam, prefetch=3)
        ahead.train()
        assert_same(ahead, plain)


@pytest.mark.parametrize("make_iterator", [shuffled, resumable])
@pytest.mark.parametrize(("every", "asynchronous"), [(None, False), (4, False), (2, True)])
def test_automatic_checkpoints(make_iterator, every, asynchronous, tmp_path):
    """Each automatic checkpoint leads to the same end; hooks registered after it are included."""
    path = tmp_path / "auto.ckpt"
    reference = Trial(make_iterator, momentum)
    reference.engine.checkpoint(path, every=every, asynchronous=asynchronous)
    kept: list[Path] = []

    @reference.engine.on("on_start_epoch")
    def keep(state: State) -> None:
        if path.exists() and not asynchronous:
            kept.append(shutil.copytree(path, tmp_path / f"copy {len(kept)}"))

    reference.train()
    reference.final_rng = torch.get_rng_state()
    for copy in (*kept, path):
        resumed = Trial(make_iterator, momentum)
        resumed.train(resume=copy)
        assert_same(resumed, reference)


@pytest.mark.slow
def test_resumes_with_loader_processes(tmp_path):
    reference = Trial(two_workers, momentum)
    reference.train()
    reference.final_rng = torch.get_rng_state()
    stopped = Trial(two_workers, momentum)
    stopped.stop_after(NUM_BATCHES + 2, tmp_path / "a.ckpt")
    assert not multiprocessing.active_children(), "a stopped run leaves no processes to the garbage collector"
    resumed = Trial(two_workers, momentum)
    resumed.train(resume=tmp_path / "a.ckpt")
    assert_same(resumed, reference)


@pytest.mark.parametrize("between_renames", [False, True])
def test_lr_mode_resumes(tmp_path, between_renames):
    """Also from the previous checkpoint, if the job has ended between the two renames of a save."""

    def train(engine: SGDEngine, network: nn.Module, **options) -> None:
        engine.train(network=network, criterion=nn.CrossEntropyLoss(), iterator=shuffled(), lr=0.1, **options)

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    whole, part, rest = network(), network(), network()
    network()  # the same random numbers for the data of both runs
    train(SGDEngine(progress=False), whole, max_epochs=2)
    network()
    engine = SGDEngine(progress=False)
    engine.checkpoint(tmp_path / "a.ckpt")
    train(engine, part, max_epochs=1)
    if between_renames:
        (tmp_path / "a.ckpt").rename(tmp_path / ".a.ckpt.previous")
    engine.checkpoint(tmp_path / "a.ckpt", resume=True)
    train(engine, rest, max_epochs=2)
    assert torch.equal(whole.weight, rest.weight)


class Versioned(nn.Linear):
    """Loads state dicts of two versions only, as modules of torch and of quantization do."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *arguments):
        assert local_metadata.get("version") in (1, 2)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
def test_versions_of_modules_are_saved(is_compiled, tmp_path):
    def network() -> nn.Module:
        net = nn.Sequential(Versioned(4, 3))
        return torch.compile(net, backend="eager") if is_compiled else net

    for max_epochs in (1, 2):
        engine = SGDEngine(progress=False)
        engine.checkpoint(tmp_path / "a.ckpt", resume=True)
        iterator = [rows()[:8]]
        engine.train(
            network=network(), criterion=nn.CrossEntropyLoss(), iterator=iterator, lr=0.1, max_epochs=max_epochs
        )


def keep_another(trial: Trial) -> None:
    trial.engine.keep(more=AverageValueMeter())


def change_network(trial: Trial) -> None:
    trial.network[4] = nn.Linear(8, 5)


def change_optimizer(trial: Trial) -> None:
    trial.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def three_batches() -> list[tuple[Tensor, Tensor]]:
    return [rows()[:8]] * 3


@pytest.mark.parametrize(
    ("saved_iterator", "iterator", "change", "message"),
    [
        (shuffled, three_batches, None, "after 5 batches of this epoch, but the iterator ended after 3"),
        (resumable, three_batches, None, "no load_state_dict"),
        (own_generator, shuffled, None, r"1 generator.s. of a DataLoader, but the iterator has 0"),
        (shuffled, shuffled, keep_another, r"has the state of \['meter', 'scheduler 0'\]"),
        (shuffled, shuffled, change_network, "does not fit this network"),
        (shuffled, shuffled, change_optimizer, "does not fit this optimizer"),
    ],
)
def test_a_run_of_another_kind_is_refused(saved_iterator, iterator, change, message, tmp_path):
    Trial(saved_iterator, momentum).stop_after(5, tmp_path / "a.ckpt")
    other = Trial(iterator, momentum)
    if change is not None:
        change(other)
    with pytest.raises(CheckpointError, match=message):
        other.train(resume=tmp_path / "a.ckpt")
