"""The training loop in one process; :mod:`torchmpi.engine.allreduce_engine` runs it on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..nn import DistributedOptimizer
from . import checkpoint
from .checkpoint import Saved, Stateful
from .coordination import Coordinator, SingleProcess
from .data_loading import DeviceCopy, Epoch, set_epoch
from .hooks import Hook, HookName, Hooks
from .meters import AverageValueMeter, ClassErrorMeter, TestResult
from .progressbar import ProgressBar
from .state import Sample, State, as_sample
from .training_run import TrainingRun
from .updates import Update, UpdateOptions, Weight, check_optimizer, num_accumulated, trained_parameters

HookT = TypeVar("HookT", bound=Hook)
CallbackT = TypeVar("CallbackT")


class Scheduler(Stateful, Protocol):
    """A learning-rate scheduler of torch."""

    @property
    def step(self) -> Callable[..., Any]:
        """Function that changes the learning rate."""


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
        self._coordinator: Coordinator = SingleProcess()
        self._device = None if device is None else torch.device(device)
        self._prefetch, self._progress = prefetch, progress
        self._kept: dict[str, Stateful] = {}
        self._autosave: tuple[Path, int | None, bool] | None = None
        self._run: TrainingRun | None = None

    # --- hooks, schedulers and checkpoints -----------------------------------------------------------------

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
                raise ArgumentError(
                    f"keep({name}=...): a {type(value).__name__} has no state_dict() and load_state_dict()"
                )
        self._kept.update(objects)

    def checkpoint(self, path: str | os.PathLike[str], every: int | None = None, *, asynchronous: bool = False) -> None:
        """Save checkpoints during training, after all hooks of the point.

        Args:
            path: Folder that each checkpoint replaces.
            every: Number of updates between checkpoints; None saves one after each epoch.
            asynchronous: As for ``save_checkpoint()``.

        Raises:
            ArgumentError: `every` is less than 1.

        Example:
            engine.checkpoint("run.ckpt", every=500)
        """
        if every is not None and every < 1:
            raise ArgumentError(f"checkpoint(every={every}): expected a number of updates, or None for each epoch")
        self._autosave = Path(path), every, asynchronous

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
        self._run.save(Path(path), self._kept, asynchronous)

    def _save_if_due(self, run: TrainingRun) -> None:
        if self._autosave is None:
            return
        path, every, asynchronous = self._autosave
        at_end, at_update = run.phase == "epoch end", run.phase == "between updates"
        if at_end if every is None else at_update and run.state.t % every == 0:
            self.save_checkpoint(path, asynchronous=asynchronous)

    # --- training ------------------------------------------------------------------------------------------

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
        accumulate: int | None = None,
        weight: Weight = "batch",
    ) -> State:
        """Train a network.

        Args:
            network: Network to train; moved to the engine's device.
            criterion: Loss function or module, called as ``criterion(output, target)``. Parameters of a module are
                trained too.
            iterator: Iterable that can be iterated once per epoch. It yields pairs ``(input, target)`` or mappings
                with these keys.
            lr: Learning rate for plain SGD. Give either `lr` or `optimizer`.
            optimizer: Any optimizer of ``torch.optim`` whose ``step()`` needs no closure.
            max_epochs: Number of epochs.
            resume: Checkpoint from which to continue.
            accumulate: Number of batches per update, on each rank: their gradients are averaged, and synchronized once.
                The last update of an epoch may have fewer. Default: 1, or the ``backward_passes_per_step`` of a
                ``DistributedOptimizer``.
            weight: "batch" averages over the batches of an update on all ranks, "example" over their examples, as one
                process on the concatenated batch does; the difference matters for batches of different lengths.

        Returns:
            The final state.

        Raises:
            ArgumentError: Both or neither of `lr` and `optimizer` are given, an option is invalid or differs between
                ranks, an epoch has no batch, a batch has a wrong type, or the engine is training already.
            CheckpointError: The checkpoint cannot be read or was saved by a run of another kind, or saving has failed.

        Example:
            state = engine.train(network=net, criterion=loss, iterator=loader, lr=0.1, max_epochs=5)
        """
        if (lr is None) == (optimizer is None):
            raise ArgumentError("train() takes either lr=, for plain SGD, or optimizer=")
        if self._run is not None:
            raise ArgumentError("train() while this engine is training: use another engine")
        if optimizer is not None:
            check_optimizer(optimizer)
        options = UpdateOptions(num_accumulated(optimizer, accumulate), weight)
        self._refuse_different_options(options)
        state = State(network, criterion, iterator, optimizer, max_epochs=max_epochs, accumulate=options.accumulate)
        device_copy = self._move(state)
        if lr is not None:
            state.optimizer = torch.optim.SGD(trained_parameters(state), lr=lr)
        saved = None if resume is None else checkpoint.read(Path(resume), self._coordinator)
        bar = ProgressBar() if self._progress and self._coordinator.rank == 0 else None
        with self._running(TrainingRun(state, options, device_copy, bar, self._coordinator)) as run:
            self._begin(state)
            network.train()
            self._train(run, saved)
            run.saver.wait()
            self._end(state)
        return state

    def _train(self, run: TrainingRun, saved: Saved | None) -> None:
        state = run.state
        if saved is not None:
            state.epoch, state.t = saved.common["epoch"], saved.common["t"]
        self.hooks.call("on_start", state)
        self._agree_to_stop(run)
        if saved is not None and not saved.common["in_epoch"]:
            run.restore(saved, self._kept)
            saved = None
        while state.epoch < state.max_epochs and not state.stop:
            self._train_epoch(run, saved)
            saved = None
        self.hooks.call("on_end", state)

    def _train_epoch(self, run: TrainingRun, saved: Saved | None) -> None:
        state = run.state
        set_epoch(state.iterator, state.epoch)
        # Also when resuming within an epoch: the hooks prepare objects for the epoch (a sampler, a meter), and the
        # checkpoint then restores the state of these objects.
        self.hooks.call("on_start_epoch", state)
        position = None if saved is None else run.restore(saved, self._kept)
        with run.begin_epoch(self._prefetch, position) as epoch:
            if not self._train_batches(run, epoch):
                return
        run.phase = "epoch end"
        self.hooks.call("on_end_epoch", state)
        self._save_if_due(run)
        self._agree_to_stop(run)
        state.epoch += 1
        run.phase = "between epochs"

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
            self._save_if_due(run)
            if self._agree_to_stop(run):
                return False

    def _step(self, run: TrainingRun, epoch: Epoch, sample: Sample | None, num_active: int) -> None:
        """Update the parameters once; `sample` is the first of the batches, and `num_active` ranks have one."""
        state, options, update = run.state, run.options, Update(run.options)
        assert state.optimizer is not None
        state.sample, state.output, state.loss = None, None, None
        self._begin_step(state)
        state.optimizer.zero_grad()
        while sample is not None:
            state.sample = sample
            loss = self._forward(state)
            update.backward(loss, state.sample)
            sample = None if update.is_full else epoch.next()
            state.batch += sample is not None
        total_weight = num_active if options.weighs_ranks_equally else self._coordinator.count(update.weight)
        self._synchronize(state)
        update.rescale(state.optimizer, total_weight, self._coordinator.size)
        self.hooks.call("on_backward", state)
        self._apply(state.optimizer)
        state.t += 1
        state.batch += update.num_batches > 0

    def _forward(self, state: State) -> Tensor:
        """Return the loss, including changes that hooks make to ``state.loss``."""
        self.hooks.call("on_sample", state)
        state.sample = as_sample(state.sample)  # a hook may have assigned a pair
        self._wait_for_device()
        state.output = state.network(state.sample.input)
        self.hooks.call("on_forward", state)
        state.loss = state.criterion(state.output, state.sample.target)
        self.hooks.call("on_forward_criterion", state)
        self._wait_for_device()
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
    ) -> TestResult:
        """Measure loss and class error in evaluation mode, without gradients.

        The hooks on_start, on_sample, on_forward, on_forward_criterion and on_end are called with ``state.training``
        False. Ranks may have different amounts of data, or none; the result covers the data of all ranks.

        Args:
            network: Network to test; moved to the engine's device.
            criterion: Loss function or module.
            iterator: Iterable over batches, as for ``train()``.
            topk: Values of k for which the class error is measured.

        Returns:
            The meters of loss and class error.

        Raises:
            ArgumentError: A batch has a wrong type, or `topk` is empty or contains a number below 1.

        Example:
            result = engine.test(network=net, criterion=nn.CrossEntropyLoss(), iterator=test_loader)
            print(result.loss.value(), result.error.value(1))
        """
        state = State(network, criterion, iterator, training=False)
        result = TestResult(AverageValueMeter(), ClassErrorMeter(topk))
        device_copy = self._move(state)
        with _evaluating(network), torch.no_grad(), Epoch(iterator, device_copy, self._prefetch) as epoch:
            self.hooks.call("on_start", state)
            while not state.stop and (sample := epoch.next()) is not None:
                state.sample = sample
                self._forward(state)
                result.add(state)
                state.batch += 1
            self.hooks.call("on_end", state)
        return self._total(result)

    # --- overridden by the engine for many ranks -----------------------------------------------------------

    def _begin(self, state: State) -> None:
        """Prepare the run; called before the first epoch."""
        if isinstance(state.optimizer, DistributedOptimizer):
            raise ArgumentError("SGDEngine trains in one process; with a DistributedOptimizer use AllReduceSGDEngine")

    def _begin_step(self, state: State) -> None:
        """Prepare an update; called before each one, also on a rank without a batch."""

    def _wait_for_device(self) -> None:
        """Wait for the device, if requested; called when the sample is on the device, and when the loss is computed."""

    def _synchronize(self, state: State) -> None:
        """Synchronize the gradients after the backward passes."""

    def _apply(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def _end(self, state: State) -> None:
        """Clean up after training, unless training has failed."""

    def _total(self, result: TestResult) -> TestResult:
        return result

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

    def _refuse_different_options(self, options: UpdateOptions) -> None:
        everywhere = self._coordinator.gather(options)
        for rank, theirs in enumerate(everywhere):
            if theirs != everywhere[0]:
                raise ArgumentError(f"train(): rank 0 has {everywhere[0]}, but rank {rank} has {theirs}")

    def _refuse_empty_epoch(self, state: State) -> None:
        if self._coordinator.count(state.batch > 0) == 0:
            raise ArgumentError(
                f"the iterator returned no batch in epoch {state.epoch} (of {state.max_epochs}). A generator can "
                "be iterated only once: pass a list, a DataLoader, or an object that makes a new iterator."
            )

    @contextmanager
    def _running(self, run: TrainingRun) -> Iterator[TrainingRun]:
        self._run = run
        try:
            yield run
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
