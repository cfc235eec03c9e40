"""The training loop. What depends on other ranks it asks the coordinator; features are calls at its points."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from .. import timeline
from ..communicators.progress import BY_PROGRAM, progress
from ..errors import ArgumentError, TorchMPIError
from .checkpoint import Saved
from .coordination import Coordinator
from .data_loading import Epoch, set_epoch
from .hooks import Hooks
from .memory_copies import Recovery
from .state import Sample, State, as_sample
from .training_run import TrainingRun
from .updates import GradientUpdate, UpdateOptions


@dataclass(frozen=True)
class Points:
    """What features do at the points of the loop, in the order of the lists."""

    before_epoch: list[Callable[[], Any]]
    """Not called when a run is resumed within an epoch."""
    epoch_begun: list[Callable[[], Any]]
    """The position in the data is known."""
    after_update: list[Callable[[], Any]]
    after_epoch: list[Callable[[], Any]]
    """Not called when a run is stopped within an epoch."""


class ForwardPass:
    """Network and criterion of a state, moved to a device, on one batch: the same in training and in a test."""

    def __init__(self, state: State, hooks: Hooks, device: torch.device, *, waits_for_gpu: bool) -> None:
        self._state, self._hooks, self.device = state, hooks, device
        self._waits = waits_for_gpu and device.type == "cuda"
        state.network.to(device)
        if isinstance(state.criterion, nn.Module):
            state.criterion.to(device)

    def __call__(self) -> Tensor:
        """Return the loss, including changes that hooks make to ``state.loss``."""
        state = self._state
        self._hooks.call("on_sample", state)
        state.sample = as_sample(state.sample)  # a hook may have assigned a pair
        if self._waits:
            torch.cuda.synchronize(self.device)
        autocast = nullcontext() if state.autocast is None else torch.autocast(self.device.type, state.autocast)
        with timeline.range("forward"), autocast:
            state.output = state.network(state.sample.input)
        self._hooks.call("on_forward", state)
        with timeline.range("criterion"), autocast:
            state.loss = state.criterion(state.output, state.sample.target)
        self._hooks.call("on_forward_criterion", state)
        if self._waits:
            torch.cuda.synchronize(self.device)
        if state.training:
            self._hooks.call("on_backward_criterion", state)
        assert state.loss is not None
        return state.loss


@dataclass(frozen=True)
class TrainingLoop:
    """The loop of one call of ``train()``."""

    run: TrainingRun
    options: UpdateOptions
    coordinator: Coordinator
    hooks: Hooks
    forward: ForwardPass
    points: Points
    prefetch: int
    recovery: Recovery | None

    def train(self, saved: Saved | None) -> None:
        """Train from the beginning, or from a checkpoint, to the end."""
        run, state = self.run, self.run.state
        if self.recovery is not None and self.recovery.joins:
            saved = self.recovery.join(run)
        else:
            self.coordinator.begin(state)
        if not state.network.training:  # otherwise some modules may be in evaluation mode on purpose
            state.network.train()
        if saved is not None:
            run.go_to(saved)
        self.hooks.call("on_start", state)
        while True:
            try:
                self._train_epochs(saved)
                if self.recovery is not None:
                    self.recovery.confirm()
                break
            except TorchMPIError as error:
                if self.recovery is None:
                    raise
                saved = self.recovery.return_to_copy(run, error)
                run.go_to(saved)
        self.hooks.call("on_end", state)
        run.saver.wait()
        self.coordinator.end()

    def _train_epochs(self, saved: Saved | None) -> None:
        run, state = self.run, self.run.state
        self._agree_to_stop()
        if saved is not None and not saved.common["in_epoch"]:
            run.restore(saved)
            saved = None
        while state.epoch < state.max_epochs and not state.stop:
            if saved is None:
                _call(self.points.before_epoch)
            with timeline.range(f"epoch {state.epoch + 1}"):
                self._train_epoch(saved)
            saved = None

    def _train_epoch(self, saved: Saved | None) -> None:
        run, state = self.run, self.run.state
        set_epoch(state.iterator, state.epoch)
        # Also when resuming within an epoch: the hooks prepare objects for the epoch (a sampler, a meter), and the
        # checkpoint then restores the state of these objects.
        self.hooks.call("on_start_epoch", state)
        position = None if saved is None else run.restore(saved)
        with run.begin_epoch(self.prefetch, position) as batches:
            _call(self.points.epoch_begun)
            while True:
                sample = batches.next()
                num_active = self.coordinator.count(sample is not None)
                if num_active == 0:
                    break
                run.phase = "update"
                self._update(batches, sample, num_active)
                run.phase = "between updates"
                _call(self.points.after_update)
                if self._agree_to_stop():
                    return
            self._refuse_empty_epoch()
        run.phase = "epoch end"
        _call(self.points.after_epoch)
        self._agree_to_stop()
        state.epoch += 1
        run.phase = "between epochs"

    def _update(self, batches: Epoch, sample: Sample | None, num_active: int) -> None:
        """Update the parameters once; `sample` is the first of the batches, and `num_active` ranks have one."""
        state, options, coordinator = self.run.state, self.options, self.coordinator
        assert state.optimizer is not None
        update = GradientUpdate(options, state.optimizer, self.run.scaler)
        state.sample, state.output, state.loss = None, None, None
        coordinator.begin_update(state, num_active)
        state.optimizer.zero_grad()
        num_rows = 0
        while sample is not None:
            state.sample = sample
            loss = self.forward()
            num_rows += state.sample.num_rows
            with timeline.range("backward"):
                update.backward(loss, state.sample)
            sample = None
            if not update.is_full:
                sample = batches.next()
                coordinator.next_batch(state, sample is not None)
            state.batch += sample is not None
        total_weight = num_active if options.weighs_ranks_equally else coordinator.count(update.weight)
        with timeline.range("synchronize gradients"):
            coordinator.average_gradients(state)
        update.complete(total_weight, coordinator.size)
        self.hooks.call("on_backward", state)
        state.grad_norm = update.clip(coordinator.clip_norm)
        with timeline.range("optimizer step"):
            was_taken = update.step()
        if was_taken:
            self.run.schedule.step("step")
        state.t += 1
        state.batch += update.num_batches > 0
        # A loss on a device is not read: that would wait for the device.
        loss_here = state.loss is not None and state.loss.device.type == "cpu"
        progress.note(BY_PROGRAM, state.t, num_rows, state.loss.item() if loss_here and state.loss is not None else nan)

    def _agree_to_stop(self) -> bool:
        """Stop all ranks if one rank stops, since the others would wait for that rank; raise if a save has failed."""
        state, saver = self.run.state, self.run.saver
        state.stop = self.coordinator.count(state.stop or saver.has_failed) > 0
        if state.stop:
            saver.wait()
        return state.stop

    def _refuse_empty_epoch(self) -> None:
        state = self.run.state
        if self.coordinator.count(state.batch > 0) == 0:
            raise ArgumentError(
                f"the iterator returned no batch in epoch {state.epoch} (of {state.max_epochs}). A generator can "
                "be iterated only once: pass a list, a DataLoader, or an object that makes a new iterator."
            )


def _call(functions: list[Callable[[], Any]]) -> None:
    for function in functions:
        function()
