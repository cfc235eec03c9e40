"""The training loop for one process; :mod:`torchmpi.engine.allreduce` spreads it over ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchmpi.errors import ArgumentError

from . import checkpoint
from .base import Engine
from .checkpoint import Saved
from .epoch import Epoch, set_epoch
from .evaluate import TestResult, evaluating
from .meters import AverageValueMeter, ClassErrorMeter
from .progressbar import ProgressBar
from .ranks import OneRank
from .run import Run, unpack
from .state import Sample, State, as_sample
from .transfer import Transfer


class SGDEngine(Engine):
    """Trains a network in one process, calling the functions in ``hooks`` at each point of the loop.

    `device` defaults to where the network's parameters are. `prefetch` batches are loaded ahead in a thread;
    0 loads each batch when it is needed. `progress` shows a bar on standard error.

        engine = SGDEngine()
        engine.hooks.on_end_epoch.append(lambda state: print(state.epoch, state.loss.item()))
        engine.train(network=net, criterion=nn.CrossEntropyLoss(), iterator=loader, lr=0.1, max_epochs=5)
    """

    def __init__(self, *, device: torch.device | str | None = None, prefetch: int = 1, progress: bool = True) -> None:
        if prefetch < 0:
            raise ArgumentError(f"prefetch={prefetch}: expected a number of batches, 0 for none")
        super().__init__(OneRank())
        self._device = None if device is None else torch.device(device)
        self._prefetch, self._progress = prefetch, progress

    # --- training ----------------------------------------------------------------------------------------

    def train(
        self,
        *,
        network: nn.Module,
        criterion: Callable[..., Tensor],
        iterator: Iterable[Any],
        lr: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        max_epochs: int = 1,
        resume: str | os.PathLike[str] | None = None,
    ) -> State:
        """Train with plain SGD at `lr`, or with any optimizer; `resume` continues from a checkpoint.

        state = engine.train(network=net, criterion=loss, iterator=loader, lr=0.1, max_epochs=5)
        """
        if (lr is None) == (optimizer is None):
            raise ArgumentError("train() takes either lr=, for plain SGD, or optimizer=")
        if self._run is not None:
            raise ArgumentError("train() while this engine is training: make another engine for it")
        state = State(network, criterion, iterator, optimizer, max_epochs=max_epochs)
        transfer = self._move(state)
        if lr is not None:
            state.optimizer = torch.optim.SGD(_parameters(state), lr=lr)
        saved = None if resume is None else checkpoint.read(Path(resume), self._ranks)
        bar = ProgressBar() if self._progress and self._ranks.rank == 0 else None
        with self._running(Run(state, transfer, bar)) as run:
            self._begin(state)
            network.train()
            self._train(run, saved)
            self._end(state)
        return state

    def _train(self, run: Run, saved: Saved | None) -> None:
        state = run.state
        if saved is not None:
            state.epoch, state.t = saved.common["epoch"], saved.common["t"]
        self.hooks.call("on_start", state)
        self._agree_to_stop(state)
        if saved is not None and not saved.common["in_epoch"]:
            unpack(saved, run, self._kept)
            saved = None
        while state.epoch < state.max_epochs and not state.stop:
            self._train_epoch(run, saved)
            saved = None
        self.hooks.call("on_end", state)

    def _train_epoch(self, run: Run, saved: Saved | None) -> None:
        state = run.state
        set_epoch(state.iterator, state.epoch)
        # Also when resuming in the middle of an epoch: what these hooks prepare (a sampler, a meter) is
        # needed, and what they change is put right by the checkpoint.
        self.hooks.call("on_start_epoch", state)
        place = None if saved is None else unpack(saved, run, self._kept)
        with run.begin_epoch(self._prefetch, place) as epoch:
            if not self._walk(run, epoch):
                return
        run.place = "epoch end"
        self.hooks.call("on_end_epoch", state)
        self._save_if_due(run)
        self._agree_to_stop(state)
        state.epoch += 1
        run.place = "between"

    def _walk(self, run: Run, epoch: Epoch) -> bool:
        """Train on all batches of this epoch; False if it was stopped before the end."""
        state = run.state
        while True:
            sample = epoch.next()
            num_active = self._ranks.count(sample is not None)
            if num_active == 0:
                self._refuse_empty_epoch(state)
                return True
            run.place = "step"
            self._step(state, sample, num_active)
            run.place = "epoch"
            self.hooks.call("on_update", state)
            run.show_progress()
            self._save_if_due(run)
            if self._agree_to_stop(state):
                return False

    def _step(self, state: State, sample: Sample | None, num_active: int) -> None:
        assert state.optimizer is not None
        state.sample, state.output, state.loss = sample, None, None
        self._begin_step(state)
        state.optimizer.zero_grad()
        if sample is not None:
            self._forward(state).backward()
        self._synchronize(state, num_active)
        self.hooks.call("on_backward", state)
        self._apply(state.optimizer)
        state.t += 1
        state.batch += sample is not None

    def _forward(self, state: State) -> Tensor:
        """Compute the loss; what to differentiate is what the hooks leave in ``state.loss``."""
        self.hooks.call("on_sample", state)
        state.sample = as_sample(state.sample)  # hooks may put a pair there
        self._settle()
        state.output = state.network(state.sample.input)
        self.hooks.call("on_forward", state)
        state.loss = state.criterion(state.output, state.sample.target)
        self.hooks.call("on_forward_criterion", state)
        self._settle()
        if state.training:
            self.hooks.call("on_backward_criterion", state)
        assert state.loss is not None
        return state.loss

    # --- testing -----------------------------------------------------------------------------------------

    def test(
        self,
        *,
        network: nn.Module,
        criterion: Callable[..., Tensor],
        iterator: Iterable[Any],
        topk: tuple[int, ...] = (1, 5),
    ) -> TestResult:
        """Measure loss and class error without training. Hooks run with ``state.training`` False. Ranks may
        have different amounts of data, also none: the result is that of all data together.

            result = engine.test(network=net, criterion=nn.CrossEntropyLoss(), iterator=test_loader)
            print(result.loss.value(), result.error.value(1))
        """
        state = State(network, criterion, iterator, training=False)
        result = TestResult(AverageValueMeter(), ClassErrorMeter(topk))
        transfer = self._move(state)
        with evaluating(network), torch.no_grad(), Epoch(iterator, transfer, self._prefetch) as epoch:
            self.hooks.call("on_start", state)
            while not state.stop and (sample := epoch.next()) is not None:
                state.sample = sample
                self._forward(state)
                result.add(state)
                state.batch += 1
            self.hooks.call("on_end", state)
        return self._total(result)

    # --- what an engine for many ranks does differently ----------------------------------------------------

    def _begin(self, state: State) -> None:
        """Before the first epoch."""

    def _begin_step(self, state: State) -> None:
        """Before each update, also on a rank that has no batch for it."""

    def _settle(self) -> None:
        """When the sample is on the device, and when the loss is computed."""

    def _synchronize(self, state: State, num_active: int) -> None:
        """When this rank's gradients are there; `num_active` ranks had a batch."""

    def _apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Change the parameters."""
        optimizer.step()

    def _end(self, state: State) -> None:
        """After training, unless it failed."""

    def _total(self, result: TestResult) -> TestResult:
        """After testing."""
        return result

    def _pick_device(self, network: nn.Module) -> torch.device:
        if self._device is not None:
            return self._device
        return next((parameter.device for parameter in network.parameters()), torch.device("cpu"))

    # --- details -------------------------------------------------------------------------------------------

    def _move(self, state: State) -> Transfer:
        device = self._pick_device(state.network)
        state.network.to(device)
        if isinstance(state.criterion, nn.Module):
            state.criterion.to(device)
        return Transfer(device)

    def _agree_to_stop(self, state: State) -> bool:
        """One rank that wants to stop stops all, else the others would wait for it."""
        state.stop = self._ranks.count(state.stop) > 0
        return state.stop

    def _refuse_empty_epoch(self, state: State) -> None:
        if self._ranks.count(state.batch > 0) == 0:
            raise ArgumentError(
                f"the iterator gave no batch in epoch {state.epoch} (of {state.max_epochs}). A generator can "
                "be walked over only once: give a list, a DataLoader, or an object that makes a new iterator."
            )

    @contextmanager
    def _running(self, run: Run) -> Iterator[Run]:
        self._run = run
        try:
            yield run
        finally:
            self._run = None
            run.close()


def _parameters(state: State) -> list[nn.Parameter]:
    modules = (m for m in (state.network, state.criterion) if isinstance(m, nn.Module))
    # A dict, because a criterion may share parameters with the network.
    return list({p: None for module in modules for p in module.parameters() if p.requires_grad})
