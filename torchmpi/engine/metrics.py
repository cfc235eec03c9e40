"""Metrics of objects with ``update()`` and ``compute()``, over the data of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from .. import collectives
from ..errors import ArgumentError, kind_of
from ..tensors.numbers import is_number
from .checkpoint import digest
from .coordination import Coordinator
from .meters import ClassErrorMeter


class UpdateCompute(Protocol):
    """A metric in the style of torchmetrics."""

    def reset(self) -> Any:
        """Forget all data."""

    def update(self, output: Any, target: Any, /) -> Any:
        """Count a batch."""

    def compute(self) -> Any:
        """Return the result over the data since ``reset()``."""


Metric = UpdateCompute | ClassErrorMeter


class SummedMetric:
    """A metric over the data of all ranks, computed from sums: ``synchronize()`` adds them over the ranks.

    Args:
        metric: Object with ``reset()``, ``update(output, target)`` and ``compute()``.
        *sums: Names of the attributes of `metric` that are sums over the data: numbers or tensors, which have the same
            shape on all ranks. ``update()`` may change no other public attribute, since that would be local.

    Raises:
        ArgumentError: An object has no such methods, or no attribute is named. By ``update()``: another attribute has
            changed. By ``synchronize()``: an attribute is neither a number nor a tensor.

    Example:
        engine.test(..., metrics={"accuracy": SummedMetric(accuracy, "num_correct", "num_total")})
    """

    def __init__(self, metric: UpdateCompute, *sums: str) -> None:
        _check_methods("SummedMetric", metric)
        if not sums:
            raise ArgumentError("SummedMetric(metric, ...): name the attributes of the metric that are sums")
        self.metric, self.sums = metric, sums

    def reset(self) -> None:
        """Reset the metric."""
        self.metric.reset()

    def update(self, output: Any, target: Any) -> None:
        """Count a batch on this rank."""
        before = self._others()
        self.metric.update(output, target)
        changed = [name for name, value in self._others().items() if value != before.get(name)]
        if changed:
            raise ArgumentError(
                f"SummedMetric: update() of the {type(self.metric).__name__} has changed {', '.join(changed)}, which "
                f"would remain local, besides the sums {', '.join(self.sums)}. Name all attributes that are sums; a "
                "metric with other attributes needs a method synchronize() of its own."
            )

    def synchronize(self) -> None:
        """Replace the sums of this rank by those over all ranks. Collective."""
        for name in self.sums:
            value = getattr(self.metric, name)
            if not (isinstance(value, Tensor) or is_number(value)):
                raise ArgumentError(f"SummedMetric: {name} is {kind_of(value)}, neither a number nor a tensor")
            total = collectives.allreduce(value.detach().clone() if isinstance(value, Tensor) else value)
            setattr(self.metric, name, total)

    def compute(self) -> Any:
        """Return the result of the metric."""
        return self.metric.compute()

    def _others(self) -> dict[str, bytes]:
        kinds = (int, float, Tensor, list, dict, set, np.ndarray, np.generic)
        return {
            name: digest(value.tobytes() if isinstance(value, np.ndarray) else value)
            for name, value in vars(self.metric).items()
            if isinstance(value, kinds) and name not in self.sums and not name.startswith("_")
        }


def _check_methods(where: str, metric: object) -> None:
    missing = [name for name in ("reset", "update", "compute") if not callable(getattr(metric, name, None))]
    if missing or isinstance(metric, type):
        raise ArgumentError(
            f"{where}: expected an object with reset(), update(output, target) and compute(), but a "
            f"{type(metric).__name__} has no {'(), '.join(missing) or 'state, as it is a class'}"
            + ("()" if missing else "")
        )


def check_metrics(metrics: Mapping[str, Metric], coordinator: Coordinator) -> None:
    """Refuse metrics that would measure the data of one rank only. Collective if there are metrics on any rank."""
    for name, metric in metrics.items():
        if isinstance(metric, ClassErrorMeter):
            continue
        _check_methods(f"metrics={{{name!r}: ...}}", metric)
        if coordinator.size > 1 and not callable(getattr(metric, "synchronize", None)):
            raise ArgumentError(
                f"metrics={{{name!r}: ...}}: the {type(metric).__name__} has no synchronize(), so it would measure the "
                f"data of one of the {coordinator.size} ranks only. Name its attributes that are sums over the data: "
                f"SummedMetric(metric, 'num_correct', 'num_total'), or give it a method synchronize()."
            )
    if {"loss", "error"} & metrics.keys():
        raise ArgumentError("metrics: 'loss' and 'error' are the names of the meters that test() returns")
    everywhere = coordinator.gather(list(metrics))
    for rank, theirs in enumerate(everywhere):
        if theirs != everywhere[0]:
            raise ArgumentError(f"metrics: rank 0 has {everywhere[0]}, but rank {rank} has {theirs}")


def update(metric: Metric, output: Any, target: Any) -> None:
    """Count a batch."""
    if isinstance(metric, ClassErrorMeter):
        metric.add(output.cpu(), target.cpu())
    else:
        metric.update(output, target)


def result_of(metric: Metric, size: int) -> Any:
    """Return the result over `size` ranks. Collective."""
    if size > 1:
        metric.synchronize()  # type: ignore[union-attr]  # check_metrics() has found the method
    return metric.value() if isinstance(metric, ClassErrorMeter) else metric.compute()
