"""``SGDEngine``: what a program adds to a training loop, training, and tests. The loop itself is in :mod:`.loop`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .. import timeline
from ..argument_types import checks_types
from ..errors import ArgumentError, kind_of
from . import checkpoint
from .checkpoint import Saved, Stateful
from .coordination import Coordinator, SingleProcess, refuse_differences
from .data_loading import DeviceCopy, Epoch, Source, make
from .early_stop import EarlyStop
from .hooks import Hook, HookName, Hooks
from .loop import ForwardPass, Points, TrainingLoop
from .measurement import Measurement, adds_rows
from .memory_copies import Recovery
from .metrics import Metric, check_metrics
from .progressbar import ProgressBar
from .scheduling import MakeScheduler, Schedule, Scheduler, SchedulerStep
from .state import State
from .test_result import TestResult
from .training_run import TrainingRun
from .updates import UpdateOptions, Weight, autocast_dtype, check_optimizer, num_accumulated, trained_parameters
from .validation import Validation

HookT = TypeVar("HookT", bound=Hook)
CallbackT = TypeVar("CallbackT")


class _Autosave(NamedTuple):
    """The arguments of ``checkpoint()``."""

    path: Path
    every: int | None
    asynchronous: bool
    resume: bool


@checks_types
class SGDEngine:
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
        self.hooks = Hooks()
        self._coordinator: Coordinator = SingleProcess(None if device is None else torch.device(device))
        self._recovery: Recovery | None = None
        self._prefetch, self._progress, self._waits_for_gpu = prefetch, progress, False
        self._kept: dict[str, Stateful] = {}
        self._autosave: _Autosave | None = None
        self._run: TrainingRun | None = None

    # --- what a program adds -------------------------------------------------------------------------------

    def on(self, name: HookName) -> Callable[[HookT], HookT]:
        """Return a decorator that appends a function to a hook point.

        Args:
            name: One of ``HOOK_NAMES``.

        Returns:
            A decorator that returns the function unchanged.

        Raises:
            HookError: No hook point has this name.

        Example:
            @engine.on("on_update")
            def count(state):
                print(state.t)
        """
        hooks = self.hooks.at(name)

        def add(hook: HookT) -> HookT:
            hooks.append(hook)
            return hook

        return add

    def add(self, callback: CallbackT) -> CallbackT:
        """Append the methods of an object that are named like hook points, or the functions of a mapping.

        Args:
            callback: An object with methods such as ``on_update(state)``, or a mapping from names to functions.

        Returns:
            `callback`, so that the call can stand where the object is created.

        Raises:
            HookError: A method that begins with ``on_``, or a key, is no hook point; or there is none. The message has
                the nearest name.

        Example:
            class Losses:
                def __init__(self):
                    self.values = []

                def on_update(self, state):
                    self.values.append(state.loss.item())

            losses = engine.add(Losses())
        """
        self.hooks.add(callback)
        return callback

    def step_scheduler(
        self, scheduler: Scheduler, when: HookName = "on_end_epoch", metric: Callable[[State], float] | None = None
    ) -> None:
        """Step a learning-rate scheduler at a hook point of training, and store it in checkpoints.

        Args:
            scheduler: A scheduler of ``torch.optim.lr_scheduler``.
            when: Hook point at which it is stepped.
            metric: Function that returns the argument of ``ReduceLROnPlateau.step()``; its result must be equal on
                all ranks.

        Raises:
            HookError: No hook point has the name `when`.

        Example:
            engine.step_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=10))
        """

        def step(state: State) -> None:
            if state.training:
                scheduler.step(*(() if metric is None else (metric(state),)))

        self.hooks.at(when).append(step)
        self.keep(**{f"scheduler {sum(name.startswith('scheduler ') for name in self._kept)}": scheduler})

    def keep(self, **objects: Stateful) -> None:
        """Store the state of meters and other objects in checkpoints, separately for each rank.

        Args:
            **objects: Objects with ``state_dict()`` and ``load_state_dict()``, by name.

        Raises:
            ArgumentError: An object has no such methods.

        Example:
            engine.keep(loss=loss_meter)
        """
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ArgumentError(f"keep({name}=...): {kind_of(value)} has no state_dict() and load_state_dict()")
        self._kept.update(objects)

    def checkpoint(
        self,
        path: str | os.PathLike[str],
        every: int | None = None,
        *,
        asynchronous: bool = False,
        resume: bool = False,
    ) -> None:
        """Save checkpoints during training, after all hooks of the point.

        Args:
            path: Folder that each checkpoint replaces.
            every: Number of updates between checkpoints; None saves one after each epoch.
            asynchronous: As for ``save_checkpoint()``.
            resume: ``train()`` continues from `path` if rank 0 finds a checkpoint there, as after a restart, unless it
                gets another one by its own ``resume=``.

        Raises:
            ArgumentError: `every` is less than 1.

        Example:
            engine.checkpoint("run.ckpt", every=500)
        """
        if every is not None and every < 1:
            raise ArgumentError(f"checkpoint(every={every}): expected a number of updates, or None for each epoch")
        self._autosave = _Autosave(Path(path), every, asynchronous, resume)

    def save_checkpoint(self, path: str | os.PathLike[str], *, asynchronous: bool = False) -> None:
        """Save a checkpoint from a hook in on_start_epoch, on_update, on_end_epoch or on_end.

        Collective: all ranks call it at the same point. Changes made by later hooks of the same point are not saved.

        Args:
            path: Folder to replace.
            asynchronous: Copy the state, and write it in a thread while training continues. A failure is raised after
                the next update, by the next save, or at the end of ``train()``.

        Raises:
            ArgumentError: Called outside of ``train()`` or in the middle of an update.
            CheckpointError: The folder cannot be written, or an object of ``keep()`` cannot be saved.

        Example:
            engine.hooks.on_end.append(lambda state: engine.save_checkpoint("last.ckpt"))
        """
        if self._run is None or self._run.phase == "update":
            where = "outside of train()" if self._run is None else "in the middle of an update"
            raise ArgumentError(
                f"save_checkpoint() {where}: call it in on_start_epoch, on_update, on_end_epoch or on_end"
            )
        with timeline.range("checkpoint"):
            self._run.saver.save(Path(path), self._run.content(), asynchronous)

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
            kinds = f"{type(network).__name__} and {kind_of(criterion)}"
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
        joins = self._recovery is not None and self._recovery.joins
        if not joins:  # the others are in the middle of their call
            refuse_differences(
                self._coordinator,
                **vars(options),
                lr=lr,
                max_epochs=max_epochs,
                scaler=None if scaler is None else scaler.state_dict(),
                scheduler=None if scheduler is None else scheduler_step,
                validate=validation is not None,
                stop_early=stop_early,
            )
        if self._recovery is not None:
            self._recovery.check(optimizer, [iterator] if validate is None else [iterator, validate])
        state = State(network, criterion, make(iterator), optimizer, max_epochs=max_epochs)
        state.accumulate, state.autocast = options.accumulate, options.autocast
        forward = self._forward_pass(state)
        if optimizer is None:
            assert lr is not None
            optimizer = state.optimizer = torch.optim.SGD(trained_parameters(network, criterion), lr=lr)
        schedule = Schedule(scheduler, scheduler_step, optimizer, is_validated=validation is not None)
        saved = None if joins else self._read_checkpoint(resume)
        run = TrainingRun(state, iterator, forward.device, schedule, scaler, validation, self._kept, self._coordinator)
        bar = ProgressBar() if self._progress and self._coordinator.rank == 0 else None
        points = self._points(run, bar)
        loop = TrainingLoop(
            run, options, self._coordinator, self.hooks, forward, points, self._prefetch, self._recovery
        )
        with self._running(run, bar):
            loop.train(saved)
            if validation is not None:
                validation.restore_best(network)
        return state

    def _points(self, run: TrainingRun, bar: ProgressBar | None) -> Points:
        """Return what is called at the points of the loop, in this order."""
        state, save = run.state, partial(self._save_if_due, run)
        begin, show = ([], []) if bar is None else ([partial(bar.begin_epoch, state)], [partial(bar.update, state)])
        copy = [] if self._recovery is None else [partial(self._recovery.copy_if_due, run)]
        measure: Callable[[], Any] = partial(run.schedule.step, "epoch")
        if run.validation is not None:
            measure = partial(run.validation.measure, self.test, run.schedule, state)
        return Points(
            before_epoch=[*copy],
            epoch_begun=[*begin],
            after_update=[partial(self.hooks.call, "on_update", state), *show, *copy, save],
            after_epoch=[measure, partial(self.hooks.call, "on_end_epoch", state), save],
        )

    @contextmanager
    def _running(self, run: TrainingRun, bar: ProgressBar | None) -> Iterator[None]:
        self._run = run
        try:
            yield
        except BaseException:
            self._coordinator.end(failed=True)
            raise
        finally:
            self._run = None
            run.saver.close()
            if bar is not None:
                bar.close()

    def _read_checkpoint(self, resume: str | os.PathLike[str] | None) -> Saved | None:
        """Return the checkpoint `resume`, or else the last one of an earlier start, if checkpoint() asks for that."""
        if resume is None and self._autosave is not None and self._autosave.resume:
            path = self._autosave.path
            # Only rank 0 sees the files.
            is_there = self._coordinator.broadcast(self._coordinator.rank == 0 and checkpoint.exists(path))
            resume = path if is_there else None
        return None if resume is None else checkpoint.read(Path(resume), self._coordinator)

    def _save_if_due(self, run: TrainingRun) -> None:
        if self._autosave is None:
            return
        path, every, asynchronous, _ = self._autosave
        at_end, at_update = run.phase == "epoch end", run.phase == "between updates"
        if at_end if every is None else at_update and run.state.t % every == 0:
            self.save_checkpoint(path, asynchronous=asynchronous)

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
        forward = self._forward_pass(state)
        device_copy = DeviceCopy(forward.device)
        with _evaluating(network), torch.no_grad(), Epoch(iterator, device_copy, self._prefetch) as epoch:
            self.hooks.call("on_start", state)
            while not state.stop and (sample := epoch.next()) is not None:
                state.sample = sample
                forward()
                measurement.add(state)
                state.batch += 1
            self.hooks.call("on_end", state)
        return measurement.result(self._coordinator.size)

    def _forward_pass(self, state: State) -> ForwardPass:
        device = self._coordinator.device(state.network)
        return ForwardPass(state, self.hooks, device, waits_for_gpu=self._waits_for_gpu)


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
