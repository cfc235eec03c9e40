"""Learning-rate schedulers of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from ..errors import ArgumentError, kind_of
from .checkpoint import Stateful
from .updates import unwrapped

SchedulerStep = Literal["epoch", "step"]


class Scheduler(Stateful, Protocol):
    """A learning-rate scheduler of torch."""

    @property
    def step(self) -> Callable[..., Any]:
        """Function that changes the learning rate."""


MakeScheduler = Callable[[torch.optim.Optimizer], Scheduler]


class Schedule:
    """The scheduler of ``train(scheduler=)``, which may be a function that makes it for the optimizer."""

    def __init__(
        self,
        scheduler: Scheduler | MakeScheduler | None,
        when: SchedulerStep,
        optimizer: torch.optim.Optimizer,
        *,
        is_validated: bool,
    ) -> None:
        if when not in ("epoch", "step"):
            raise ArgumentError(f"scheduler_step={when!r}: expected 'epoch' or 'step'")
        made: Any = scheduler
        if scheduler is not None and not hasattr(scheduler, "step"):
            made = scheduler(unwrapped(optimizer))
            if not hasattr(made, "step"):
                raise ArgumentError(f"scheduler= is a function that has returned {made!r}, which has no step()")
        self.scheduler: Scheduler | None = made
        self._when = when
        target = getattr(made, "optimizer", optimizer)
        if target is not optimizer and target is not unwrapped(optimizer):
            raise ArgumentError(
                f"scheduler= is {kind_of(made)} of another optimizer, so it would not change the learning "
                "rate of this run. Create it with this optimizer, or pass a function: scheduler=lambda optimizer: ..."
            )
        self._takes_metric = isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if self._takes_metric and not (is_validated and when == "epoch"):
            raise ArgumentError(
                "scheduler= is a ReduceLROnPlateau, which needs a metric of each epoch: pass validate= and "
                'scheduler_step="epoch", or use engine.step_scheduler(scheduler, metric=...)'
            )

    def step(self, when: SchedulerStep, metric: float | None = None) -> None:
        """Step the scheduler if it is due."""
        if self.scheduler is not None and when == self._when:
            self.scheduler.step(*((metric,) if self._takes_metric else ()))
