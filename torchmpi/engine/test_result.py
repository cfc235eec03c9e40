"""The result of ``test()``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import ArgumentError, kind_of
from .meters import AverageValueMeter, ClassErrorMeter


@dataclass(frozen=True)
class TestResult:
    """Result of ``SGDEngine.test()``, over the data of all ranks.

    Args:
        loss: Meter of the loss per example.
        error: Meter of the class error; empty unless outputs and targets are those of a classification.
        metrics: Results of the metrics, by name.

    Example:
        result = engine.test(network=net, criterion=nn.CrossEntropyLoss(), iterator=loader)
        print(result.loss.value(), result.error.value(1))
    """

    __test__ = False  # pytest would collect a class of this name

    loss: AverageValueMeter
    error: ClassErrorMeter
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """Return a measured number.

        Args:
            name: "loss", "error" (for the first k), or the name of a metric.

        Returns:
            The number, equal on all ranks.

        Raises:
            ArgumentError: There is no such metric, or its result is no number.

        Example:
            print(result.value("loss"))
        """
        if name in self.metrics:
            value = self.metrics[name]
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if not isinstance(value, (int, float)):
                raise ArgumentError(f"the metric {name!r} is {kind_of(value)}, not a number")
            return float(value)
        if name == "loss":
            return self.loss.value()
        if name == "error" and self.error.num_samples:
            return self.error.value()
        raise ArgumentError(
            f"no metric {name!r}; there are {', '.join(['loss', 'error', *self.metrics])}"
            + (", but outputs and targets are not those of a classification" if name == "error" else "")
        )
