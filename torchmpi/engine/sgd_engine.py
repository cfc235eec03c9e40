"""The training loop in one process; :mod:`torchmpi.engine.allreduce_engine` runs it on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import timeline
from ..argument_types import checks_types
from ..errors import ArgumentError, CheckpointError, TorchMPIError
from ..nn import DistributedOptimizer
from . import checkpoint
from .checkpoint import Saved
from .coordination import Coordinator, SingleProcess
from .data_loading import DeviceCopy, Epoch, Source, make, set_epoch
from .early_stop import EarlyStop
from .engine import Engine
from .measurement import Measurement, adds_rows
from .metrics import Metric, check_metrics
from .progressbar import ProgressBar
from .scheduling import MakeScheduler, Schedule, Scheduler, SchedulerStep
from .state import Sample, State, as_sample
from .test_result import TestResult
from .training_run import TrainingRun, Validation
from .updates import (
    GradientUpdate,
    UpdateOptions,
    Weight,
    autocast_dtype,
    check_optimizer,
    num_accumulated,
    trained_parameters,
)


@checks_types
class SGDEngine(Engine):
    """Training loop for one process, which calls the functions in ``hooks`` at fixed points.

    Args:
        device: Device of network, criterion and batches; default: the device of the network's parameters.
        prefetch: Number of batches loaded ahead in a thread; 0 loads each batch when it is needed.
        progress: Show a progress bar on standard error.

    Attributes:
        hooks: The :class:`Hooks` of this engine.

    Raises:
        ArgumentError: `prefetch` is negative.

    Example:
        engine = SGDEngine()
        engine.hooks.on_end_epoch.append(lambda state: print(state.epoch, state.loss.item()))
        engine.train(network=net, criterion=nn.CrossEntropyLoss(), iterator=loader, lr=0.1, max_epochs=5)
    """

    def __init__(self, *, device: torch.device | str | None = None, prefetch: int = 1, progress: bool = True) -> None:
        if prefetch < 0:
            raise ArgumentError(f"prefetch={prefetch}: expected a number of batches, 0 for none")
        super().__init__()
        self._coordinator: Coordinator = SingleProcess()
        self._device = None if device is None else torch.device(device)
        self._prefetch, self._progress = prefetch, progress

    # --- training ------------------------------------------------------------------------------------------

    def train(
        self,
        *,
        network: nn.Module,
        criterion: Callable[..., Tensor],
        iterator: Source,
        lr: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        max_epochs: int = 1,
        resume: str | os.PathLike[str] | None = None,
        accumulate: int | None = None,
        weight: Weight = "batch",
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        scheduler: Scheduler | MakeScheduler | None = None,
        scheduler_step: SchedulerStep = "epoch",
        autocast: torch.dtype | bool | None = None,
        scaler: torch.amp.GradScaler | None = None,
        validate: Source | None = None,
        metrics: Mapping[str, Metric] | None = None,
        stop_early: EarlyStop | None = None,
    ) -> State:
        """Train a network.

        Args:
            network: Network to train; moved to the engine's device. If it is in evaluation mode, all of its modules are
                put into training mode; otherwise the modes of its modules remain.
            criterion: Loss function or module, called as ``criterion(output, target)``. Parameters of a module are
                trained too.
            iterator: Iterable that can be iterated once per epoch. It yields pairs ``(input, target)`` or mappings
                with these keys. Or a function without arguments that returns it.
            lr: Learning rate for plain SGD. Give either `lr` or `optimizer`.
            optimizer: Any optimizer of ``torch.optim`` whose ``step()`` needs no closure.
            max_epochs: Number of epochs.
            resume: Checkpoint from which to continue.
            accumulate: Number of batches per update, on each rank: their gradients are averaged, and synchronized once.
                The last update of an epoch may have fewer. Default: 1, or the ``backward_passes_per_step`` of a
                ``DistributedOptimizer``.
            weight: "batch" averages over the batches of an update on all ranks, "example" over their examples, as one
                process on the concatenated batch does; the difference matters for batches of different lengths.
            clip_grad_norm: Scale the averaged gradient of the optimizer's parameters to at most this norm.
            clip_grad_value: Limit the elements of the averaged gradient to this absolute value.
            scheduler: Scheduler of ``torch.optim.lr_scheduler``, or a function that makes one for the optimizer. A
                ``ReduceLROnPlateau`` gets the metric of `stop_early`, by default the loss of the validation.
            scheduler_step: When the scheduler is stepped: after each "epoch", or "step" (update).
            autocast: ``torch.bfloat16`` (or True) or ``torch.float16``: run network and criterion under
                ``torch.autocast``; None changes nothing.
            scaler: Scales the losses against underflow of 16-bit gradients. If a gradient of any rank is not finite,
                all ranks skip the update.
            validate: Batches for ``test()`` after each epoch, before the scheduler, or a function that returns them;
                the result is ``state.validation``.
            metrics: Metrics of the validation, as for ``test()``.
            stop_early: When the validation ends the run, on all ranks.

        Returns:
            The final state.

        Raises:
            ArgumentError: Both or neither of `lr` and `optimizer` are given, an option is invalid or differs between
                ranks, an epoch has no batch, a batch has a wrong type, or the engine is training already.
            CheckpointError: The checkpoint cannot be read or was saved by a run of another kind, or saving has failed.
            GradientError: On all ranks: with `clip_grad_norm` and without `scaler`, the norm is not finite.

        Example:
            state = engine.train(network=net, criterion=loss, iterator=loader, lr=0.1, max_epochs=5)
        """
        if (lr is None) == (optimizer is None):
            raise ArgumentError("train() takes either lr=, for plain SGD, or optimizer=")
        if self._run is not None:
            raise ArgumentError("train() while this engine is training: use another engine")
        if not isinstance(network, nn.Module) or not callable(criterion):
            kinds = f"{type(network).__name__} and a {type(criterion).__name__}"
            raise ArgumentError(f"train(): network= and criterion= are a {kinds}: expected a module and a function")
        if not isinstance(max_epochs, Real):
            raise ArgumentError(f"max_epochs={max_epochs!r}: expected a number of epochs")
        if optimizer is not None:
            check_optimizer(optimizer)
        options = UpdateOptions(
            num_accumulated(optimizer, accumulate),
            weight,
            clip_grad_norm,
            clip_grad_value,
            autocast_dtype(autocast),
            scaler is not None,
        )
        if weight == "example" and adds_rows(criterion):
            raise ArgumentError("weight='example' takes the mean of each batch: use a criterion with reduction='mean'")
        validation = None if validate is None else Validation(validate, dict(metrics or {}), stop_early)
        if validation is None and not (metrics is None and stop_early is None):
            raise ArgumentError(
                "train(): metrics= and stop_early= need validate=, the batches to measure after each epoch"
            )
        self._refuse_different_options(
            **vars(options),
            lr=lr,
            max_epochs=max_epochs,
            scaler=None if scaler is None else scaler.state_dict(),
            scheduler=None if scheduler is None else scheduler_step,
            validate=validation is not None,
            stop_early=stop_early,
        )
        self._check_sources(iterator, *([] if validate is None else [validate]))
        state = State(network, criterion, make(iterator), optimizer, max_epochs=max_epochs)
        state.accumulate, state.autocast = options.accumulate, options.autocast
        device_copy = self._move(state)
        if optimizer is None:
            assert lr is not None
            optimizer = state.optimizer = torch.optim.SGD(trained_parameters(network, criterion), lr=lr)
        schedule = Schedule(scheduler, scheduler_step, optimizer, is_validated=validation is not None)
        saved = self._read_checkpoint(resume)
        bar = ProgressBar() if self._progress and self._coordinator.rank == 0 else None
        run = TrainingRun(state, iterator, options, schedule, scaler, validation, device_copy, bar, self._coordinator)
        with self._running(run):
            self._begin(state)
            if not network.training:  # otherwise some modules may be in evaluation mode on purpose
                network.train()
            self._train(run, saved)
            run.saver.wait()
            self._end(state)
            if validation is not None:
                validation.restore_best(network)
        return state

    def _read_checkpoint(self, resume: str | os.PathLike[str] | None) -> Saved | None:
        """Return the checkpoint `resume`, or else the last one of an earlier start, if checkpoint() asks for that."""
        if resume is None and self._autosave is not None and self._resumes:
            path, *_ = self._autosave
            # Only rank 0 sees the files.
            is_there = self._coordinator.broadcast(self._coordinator.rank == 0 and checkpoint.exists(path))
            resume = path if is_there else None
        return None if resume is None else checkpoint.read(Path(resume), self._coordinator)

    def _train(self, run: TrainingRun, saved: Saved | None) -> None:
        state = run.state
        if saved is not None:
            state.epoch, state.t = saved.common["epoch"], saved.common["t"]
            if saved.common["in_epoch"] and state.epoch >= state.max_epochs:
                raise CheckpointError(
                    f"the checkpoint was saved within epoch {state.epoch + 1}, but max_epochs={state.max_epochs}: "
                    "nothing would be trained or loaded"
                )
        self.hooks.call("on_start", state)
        while True:
            try:
                self._train_epochs(run, saved)
                break
            except TorchMPIError as error:
                saved = self._saved_after_loss(run, error)
                state.epoch, state.t, state.stop = saved.common["epoch"], saved.common["t"], False
        self.hooks.call("on_end", state)

    def _train_epochs(self, run: TrainingRun, saved: Saved | None) -> None:
        state = run.state
        self._agree_to_stop(run)
        if saved is not None and not saved.common["in_epoch"]:
            run.restore(saved, self._kept | run.kept)
            saved = None
            if run.validation is not None:
                state.best_epoch = run.validation.best.epoch
                state.stop = state.stop or run.validation.best.is_over
        while state.epoch < state.max_epochs and not state.stop:
            if saved is None:
                self._copy_state(run)
            with timeline.range(f"epoch {state.epoch + 1}"):
                self._train_epoch(run, saved)
            saved = None

    def _train_epoch(self, run: TrainingRun, saved: Saved | None) -> None:
        state = run.state
        set_epoch(state.iterator, state.epoch)
        # Also when resuming within an epoch: the hooks prepare objects for the epoch (a sampler, a meter), and the
        # checkpoint then restores the state of these objects.
        self.hooks.call("on_start_epoch", state)
        position = None if saved is None else run.restore(saved, self._kept | run.kept)
        with run.begin_epoch(self._prefetch, position) as epoch:
            if not self._train_batches(run, epoch):
                return
        run.phase = "epoch end"
        self._validate(run)
        self.hooks.call("on_end_epoch", state)
        self._save_if_due(run)
        self._agree_to_stop(run)
        state.epoch += 1
        run.phase = "between epochs"

    def _validate(self, run: TrainingRun) -> None:
        """Measure the network after an epoch, step the scheduler, and decide whether to stop, equally on all ranks."""
        state, validation = run.state, run.validation
        if validation is None:
            run.schedule.step("epoch")
            return
        with timeline.range("validation"):
            state.validation = self.test(
                network=state.network,
                criterion=state.criterion,
                iterator=validation.batches,
                metrics=validation.metrics,
                autocast=state.autocast,
            )
        if state.validation.loss.num_samples == 0:
            raise ArgumentError(
                f"validate= returned no batch after epoch {state.epoch}, on any rank. A generator can be iterated only "
                "once: pass a list, a DataLoader, or an object that makes a new iterator."
            )
        value = state.validation.value(validation.metric)
        run.schedule.step("epoch", value)
        validation.add(value, state)
        state.best_epoch = validation.best.epoch
        state.stop = state.stop or validation.best.is_over

    def _train_batches(self, run: TrainingRun, epoch: Epoch) -> bool:
        """Train on all batches of this epoch; return False if the run was stopped before the end."""
        state = run.state
        while True:
            sample = epoch.next()
            num_active = self._coordinator.count(sample is not None)
            if num_active == 0:
                self._refuse_empty_epoch(state)
                return True
            run.phase = "update"
            self._step(run, epoch, sample, num_active)
            run.phase = "between updates"
            self.hooks.call("on_update", state)
            run.show_progress()
            self._copy_state(run)
            self._save_if_due(run)
            if self._agree_to_stop(run):
                return False

    def _step(self, run: TrainingRun, epoch: Epoch, sample: Sample | None, num_active: int) -> None:
        """Update the parameters once; `sample` is the first of the batches, and `num_active` ranks have one."""
        state, options = run.state, run.options
        assert state.optimizer is not None
        update = GradientUpdate(options, state.optimizer, run.scaler)
        state.sample, state.output, state.loss = None, None, None
        self._begin_step(state, num_active)
        state.optimizer.zero_grad()
        while sample is not None:
            state.sample = sample
            loss = self._forward(state)
            with timeline.range("backward"):
                update.backward(loss, state.sample)
            sample = None if update.is_full else self._next_of_update(state, epoch)
            state.batch += sample is not None
        total_weight = num_active if options.weighs_ranks_equally else self._coordinator.count(update.weight)
        with timeline.range("synchronize gradients"):
            self._synchronize(state)
        update.complete(total_weight, self._coordinator.size)
        self.hooks.call("on_backward", state)
        state.grad_norm = update.clip(self._clip_norm)
        with timeline.range("optimizer step"):
            was_taken = update.step()
        if was_taken:
            run.schedule.step("step")
        state.t += 1
        state.batch += update.num_batches > 0

    def _forward(self, state: State) -> Tensor:
        """Return the loss, including changes that hooks make to ``state.loss``."""
        self.hooks.call("on_sample", state)
        state.sample = as_sample(state.sample)  # a hook may have assigned a pair
        device = self._pick_device(state.network)
        self._wait_for(device)
        autocast = nullcontext() if state.autocast is None else torch.autocast(device.type, state.autocast)
        with timeline.range("forward"), autocast:
            state.output = state.network(state.sample.input)
        self.hooks.call("on_forward", state)
        with timeline.range("criterion"), autocast:
            state.loss = state.criterion(state.output, state.sample.target)
        self.hooks.call("on_forward_criterion", state)
        self._wait_for(device)
        if state.training:
            self.hooks.call("on_backward_criterion", state)
        assert state.loss is not None
        return state.loss

    # --- testing -------------------------------------------------------------------------------------------

    def test(
        self,
        *,
        network: nn.Module,
        criterion: Callable[..., Tensor],
        iterator: Iterable[Any],
        topk: tuple[int, ...] = (1, 5),
        metrics: Mapping[str, Metric] | None = None,
        autocast: torch.dtype | bool | None = None,
    ) -> TestResult:
        """Measure loss and class error in evaluation mode, without gradients.

        The hooks on_start, on_sample, on_forward, on_forward_criterion and on_end are called with ``state.training``
        False. Ranks may have different amounts of data, or none; the result covers the data of all ranks.

        Args:
            network: Network to test; moved to the engine's device.
            criterion: Loss function or module.
            iterator: Iterable over batches, as for ``train()``.
            topk: Values of k for which the class error is measured.
            metrics: Objects with ``reset()``, ``update(output, target)`` and ``compute()``, by name. On several ranks
                they also have ``synchronize()``; :class:`SummedMetric` adds it to others. A ``ClassErrorMeter`` is one.
            autocast: As for ``train()``.

        Returns:
            The meters of loss and class error, and the results of `metrics`.

        Raises:
            ArgumentError: A batch has a wrong type, `topk` is empty or contains a number below 1, or a metric would
                measure the data of one rank only.

        Example:
            result = engine.test(network=net, criterion=nn.CrossEntropyLoss(), iterator=test_loader)
            print(result.loss.value(), result.error.value(1))
        """
        state = State(network, criterion, iterator, training=False, autocast=autocast_dtype(autocast))
        metrics = dict(sorted((metrics or {}).items()))  # the same order on all ranks
        check_metrics(metrics, self._coordinator)
        measurement = Measurement(topk, metrics)
        device_copy = self._move(state)
        with _evaluating(network), torch.no_grad(), Epoch(iterator, device_copy, self._prefetch) as epoch:
            self.hooks.call("on_start", state)
            while not state.stop and (sample := epoch.next()) is not None:
                state.sample = sample
                self._forward(state)
                measurement.add(state)
                state.batch += 1
            self.hooks.call("on_end", state)
        return measurement.result(self._coordinator.size)

    # --- overridden by the engine for many ranks -----------------------------------------------------------

    def _begin(self, state: State) -> None:
        """Prepare the run; called before the first epoch."""
        if isinstance(state.optimizer, DistributedOptimizer):
            raise ArgumentError("SGDEngine trains in one process; with a DistributedOptimizer use AllReduceSGDEngine")

    def _begin_step(self, state: State, num_active: int) -> None:
        """Prepare an update; called before each one, also on a rank without a batch. `num_active` ranks have one."""

    def _next_of_update(self, state: State, epoch: Epoch) -> Sample | None:
        """Return the next batch of an update of several; None if this rank has no more."""
        return epoch.next()

    def _check_sources(self, *sources: Source) -> None:
        """Raise if the data cannot be divided anew, but may have to be."""

    def _copy_state(self, run: TrainingRun) -> None:
        """Keep a copy of the state, if it is due; called between two updates."""

    def _saved_after_loss(self, run: TrainingRun, error: TorchMPIError) -> Saved:
        """Return the state from which the remaining ranks continue; raise an error that is not the loss of a rank."""
        raise error

    def _wait_for(self, device: torch.device) -> None:
        """Wait for the device, if requested; called when the sample is on the device, and when the loss is computed."""

    def _synchronize(self, state: State) -> None:
        """Synchronize the gradients after the backward passes."""

    def _clip_norm(self, parameters: list[Tensor], limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, limit)

    def _end(self, state: State) -> None:
        """Clean up after training, unless training has failed."""

    def _fail(self) -> None:
        """Clean up after an error, without communication."""

    def _pick_device(self, network: nn.Module) -> torch.device:
        if self._device is not None:
            return self._device
        return next((parameter.device for parameter in network.parameters()), torch.device("cpu"))

    # --- details -------------------------------------------------------------------------------------------

    def _move(self, state: State) -> DeviceCopy:
        device = self._pick_device(state.network)
        state.network.to(device)
        if isinstance(state.criterion, nn.Module):
            state.criterion.to(device)
        return DeviceCopy(device)

    def _agree_to_stop(self, run: TrainingRun) -> bool:
        """Stop all ranks if one rank stops, since the others would wait for that rank; raise if a save has failed."""
        run.state.stop = self._coordinator.count(run.state.stop or run.saver.has_failed) > 0
        if run.state.stop:
            run.saver.wait()
        return run.state.stop

    def _refuse_different_options(self, **options: Any) -> None:
        everywhere = self._coordinator.gather(options)
        for rank, theirs in enumerate(everywhere):
            for name, value in everywhere[0].items():
                if theirs[name] != value:
                    raise ArgumentError(f"train(): {name} is {value} on rank 0, but {theirs[name]} on rank {rank}")

    def _refuse_empty_epoch(self, state: State) -> None:
        if self._coordinator.count(state.batch > 0) == 0:
            raise ArgumentError(
                f"the iterator returned no batch in epoch {state.epoch} (of {state.max_epochs}). A generator can "
                "be iterated only once: pass a list, a DataLoader, or an object that makes a new iterator."
            )

    @contextmanager
    def _running(self, run: TrainingRun) -> Iterator[None]:
        self._run = run
        try:
            yield
        except BaseException:
            self._fail()
            raise
        finally:
            self._run = None
            run.close()


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    # Module by module, as some may be in evaluation mode permanently.
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
