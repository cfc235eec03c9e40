"""The end of a run whose validation does not improve any more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ..argument_types import checks_types
from ..errors import ArgumentError


@checks_types
@dataclass(frozen=True)
class EarlyStop:
    """When the validation of ``train()`` ends the run. The metric is equal on all ranks, and so is the decision.

    Args:
        patience: Number of epochs in succession without improvement after which the run ends.
        metric: "loss", "error", or the name of a metric of ``train(metrics=)``.
        mode: Whether the smallest ("min") or the largest ("max") value is the best.
        min_delta: Smallest difference that counts as an improvement.
        keep_best: Load the weights of the best epoch into the network when the run ends.

    Raises:
        ArgumentError: A value is out of range.

    Example:
        engine.train(..., validate=loader, stop_early=EarlyStop(patience=5, metric="error", keep_best=True))
    """

    patience: int = 3
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    keep_best: bool = False

    def __post_init__(self) -> None:
        if self.patience < 1 or not self.min_delta >= 0:
            raise ArgumentError(
                f"EarlyStop(patience={self.patience}, min_delta={self.min_delta}): expected a number of epochs from 1, "
                "and a difference from 0"
            )
        if self.mode not in ("min", "max"):
            raise ArgumentError(f"EarlyStop(mode={self.mode!r}): expected 'min' or 'max'")


class BestEpoch:
    """The best epoch so far."""

    def __init__(self, rule: EarlyStop | None) -> None:
        self._rule = rule or EarlyStop()
        self._limit = math.inf if rule is None else rule.patience
        self.value: float | None = None
        self.epoch: int | None = None
        self._num_worse = 0

    @property
    def is_over(self) -> bool:
        """Whether the run is to end."""
        return self._num_worse >= self._limit

    def add(self, value: float, epoch: int) -> bool:
        """Count an epoch, and return whether it is the best. A value that is nan is no improvement."""
        best, rule = self.value, self._rule
        gain = math.inf if best is None else (best - value) * (1 if rule.mode == "min" else -1)
        if math.isnan(value) or not gain > rule.min_delta:  # the difference of two infinite values is nan
            self._num_worse += 1
            return False
        self.value, self.epoch, self._num_worse = value, epoch, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "epoch": self.epoch, "num_worse": self._num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict()``."""
        self.value, self.epoch, self._num_worse = state["value"], state["epoch"], state["num_worse"]
