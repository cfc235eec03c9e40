"""The measurement of ``test()`` in progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .meters import AverageValueMeter, ClassErrorMeter
from .metrics import Metric, result_of, update
from .state import State
from .test_result import TestResult


class Measurement:
    """The measurement of ``test()`` in progress, with the data of this rank."""

    def __init__(self, topk: Sequence[int], metrics: Mapping[str, Metric]) -> None:
        self._loss, self._error, self._metrics = AverageValueMeter(), ClassErrorMeter(topk), metrics
        for metric in metrics.values():
            metric.reset()

    def add(self, state: State) -> None:
        """Count the current batch."""
        assert state.sample is not None and state.loss is not None
        num_rows, output, target = state.sample.num_rows, state.output, state.sample.target
        if num_rows == 0:
            return  # the mean over no rows is nan
        self._loss.add(state.loss.item() / (num_rows if adds_rows(state.criterion) else 1), num_rows)
        if _is_classification(output, target):
            self._error.add(output.cpu(), target.cpu())
        for metric in self._metrics.values():
            update(metric, output, target)

    def result(self, size: int) -> TestResult:
        """Return the result over all ranks. Collective."""
        if size > 1:
            self._loss.synchronize()
            self._error.synchronize()
        return TestResult(
            self._loss, self._error, {name: result_of(metric, size) for name, metric in self._metrics.items()}
        )


def adds_rows(criterion: object) -> bool:
    """Return whether a criterion returns the sum over the rows of a batch, instead of their mean.

    >>> import torch
    >>> adds_rows(torch.nn.MSELoss(reduction="sum")), adds_rows(torch.nn.functional.mse_loss)
    (True, False)
    """
    return getattr(criterion, "reduction", "mean") == "sum"


def _is_classification(output: object, target: object) -> bool:
    return (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and output.dim() == 2
        and target.shape == output.shape[:1]
        and not target.is_floating_point()
    )
