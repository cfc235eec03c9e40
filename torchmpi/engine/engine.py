"""Hooks, kept objects and checkpoints of an engine, which are set before training."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .. import timeline
from ..errors import ArgumentError
from .checkpoint import Stateful
from .hooks import Hook, HookName, Hooks
from .scheduling import Scheduler
from .state import State
from .training_run import TrainingRun

HookT = TypeVar("HookT", bound=Hook)
CallbackT = TypeVar("CallbackT")


class Engine:
    """Base of the engines: what a program adds to the training loop.

    Attributes:
        hooks: The :class:`Hooks` of this engine.
    """

    def __init__(self) -> None:
        self.hooks = Hooks()
        self._kept: dict[str, Stateful] = {}
        self._autosave: tuple[Path, int | None, bool] | None = None
        self._resumes = False
        self._run: TrainingRun | None = None

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
        self._autosave = Path(path), every, asynchronous
        self._resumes = resume

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
            self._run.save(Path(path), self._kept | self._run.kept, asynchronous)

    def _save_if_due(self, run: TrainingRun) -> None:
        if self._autosave is None:
            return
        path, every, asynchronous = self._autosave
        at_end, at_update = run.phase == "epoch end", run.phase == "between updates"
        if at_end if every is None else at_update and run.state.t % every == 0:
            self.save_checkpoint(path, asynchronous=asynchronous)
