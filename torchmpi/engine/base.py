"""What every engine offers around its loop: hooks, schedulers, and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torchmpi.errors import ArgumentError

from . import checkpoint
from .checkpoint import Stateful
from .hooks import Hook, Hooks
from .ranks import Ranks
from .run import Run, pack
from .state import State

HookT = TypeVar("HookT", bound=Hook)


class Engine:
    """Base of the engines. ``hooks`` holds the functions to call at each point of the loop."""

    def __init__(self, ranks: Ranks) -> None:
        self.hooks = Hooks()
        self._ranks = ranks
        self._kept: dict[str, Stateful] = {}
        self._autosave: tuple[Path, int | None] | None = None
        self._run: Run | None = None

    def on(self, name: str) -> Callable[[HookT], HookT]:
        """Decorator that adds a function to a hook point.

        @engine.on("on_update")
        def count(state):
            print(state.t)
        """
        hooks = self.hooks.at(name)

        def add(hook: HookT) -> HookT:
            hooks.append(hook)
            return hook

        return add

    def step_scheduler(
        self, scheduler: Any, when: str = "on_end_epoch", metric: Callable[[State], float] | None = None
    ) -> None:
        """Step a learning-rate scheduler at a hook point, and keep it in checkpoints.

        `metric` gives what ``ReduceLROnPlateau`` wants to know; it must give the same on all ranks.

            engine.step_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=10))
        """

        def step(state: State) -> None:
            if state.training:
                scheduler.step(*(() if metric is None else (metric(state),)))

        self.hooks.at(when).append(step)
        self.keep(**{f"scheduler {sum(name.startswith('scheduler ') for name in self._kept)}": scheduler})

    def keep(self, **objects: Stateful) -> None:
        """Put the state of meters, schedulers and the like into checkpoints, each rank its own.

        engine.keep(loss=loss_meter)
        """
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ArgumentError(
                    f"keep({name}=...): a {type(value).__name__} has no state_dict() and load_state_dict()"
                )
        self._kept.update(objects)

    def checkpoint(self, path: str | os.PathLike[str], every: int | None = None) -> None:
        """Save a checkpoint after every `every` updates, or after each epoch, when all hooks of that point
        are done.

        engine.checkpoint("run.ckpt", every=500)
        """
        if every is not None and every < 1:
            raise ArgumentError(f"checkpoint(every={every}): expected a number of updates, or None for each epoch")
        self._autosave = Path(path), every

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Save a checkpoint now, from a hook between two updates: on_start_epoch, on_update, on_end_epoch,
        on_end.

        Collective: all ranks call it at the same point. What later hooks of the same point do is not in it.

            engine.hooks.on_end.append(lambda state: engine.save_checkpoint("last.ckpt"))
        """
        if self._run is None or self._run.place == "step":
            where = "outside of train()" if self._run is None else "in the middle of an update"
            raise ArgumentError(
                f"save_checkpoint() {where}: call it in on_start_epoch, on_update, on_end_epoch or on_end"
            )
        checkpoint.write(Path(path), pack(self._run, self._kept), self._ranks)

    def _save_if_due(self, run: Run) -> None:
        if self._autosave is None:
            return
        path, every = self._autosave
        at_end, at_update = run.place == "epoch end", run.place == "epoch"
        if at_end if every is None else at_update and run.state.t % every == 0:
            self.save_checkpoint(path)
