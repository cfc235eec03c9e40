"""Running averages that add up exactly over ranks: they keep sums and counts, never means of means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchmpi import collectives
from torchmpi.errors import ArgumentError

MeterT = TypeVar("MeterT", bound="Meter")


class Meter:
    """What all meters share: float64 sums, and their total over ranks."""

    def __init__(self, num_sums: int) -> None:
        self._sums = torch.zeros(num_sums, dtype=torch.float64)
        self._is_global = False

    def reset(self) -> None:
        """Forget everything.

        >>> meter = AverageValueMeter(); meter.add(1.0); meter.reset(); meter.num_samples
        0
        """
        self._sums.zero_()
        self._is_global = False

    def synchronize(self: MeterT, comm: Any = None) -> MeterT:
        """Replace this rank's sums by those of all ranks, and return the meter. Collective.

        Afterwards the meter is read-only until ``reset()``, so that nothing is counted twice; to look at
        totals and count on, synchronize a copy: ``copy.deepcopy(meter).synchronize()``.

            error = meter.synchronize().value()
        """
        self._refuse_if_global("synchronize")
        self._sums = collectives.allreduce(self._sums, comm=comm)
        self._is_global = True
        return self

    def state_dict(self) -> dict[str, Any]:
        """The sums, for a checkpoint.

        >>> sorted(AverageValueMeter().state_dict())
        ['is_global', 'sums']
        """
        return {"sums": self._sums.clone(), "is_global": self._is_global}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` gave.

        >>> meter = AverageValueMeter(); meter.load_state_dict(meter.state_dict())
        """
        if state["sums"].shape != self._sums.shape:
            raise ArgumentError("the saved meter has another number of sums: it was made with other options")
        self._sums = state["sums"].clone()
        self._is_global = bool(state["is_global"])

    def _accumulate(self, sums: Sequence[float]) -> None:
        self._refuse_if_global("add")
        self._sums += torch.tensor(sums, dtype=torch.float64)

    def _refuse_if_global(self, call: str) -> None:
        if self._is_global:
            raise ArgumentError(f"{call}() on a meter that holds the totals of all ranks: call reset() first")


class AverageValueMeter(Meter):
    """Mean and standard deviation of numbers.

    >>> meter = AverageValueMeter()
    >>> meter.add(2.0); meter.add(5.0, num=2)
    >>> meter.value()
    4.0
    """

    def __init__(self) -> None:
        super().__init__(3)

    def add(self, value: float | Tensor, num: int = 1) -> None:
        """Count `value` in `num` times: the mean loss of a batch with its number of rows, for example.

        >>> AverageValueMeter().add(0.5, num=64)
        """
        number = value.item() if isinstance(value, Tensor) else value
        self._accumulate((number * num, number * number * num, num))

    @property
    def num_samples(self) -> int:
        """How many numbers went in."""
        return int(self._sums[2])

    def value(self) -> float:
        """The mean; nan if nothing went in.

        >>> AverageValueMeter().value()
        nan
        """
        total, _, num = self._sums.tolist()
        return total / num if num else math.nan

    def std(self) -> float:
        """The standard deviation (of a sample: divided by n - 1); nan for fewer than two numbers.

        >>> meter = AverageValueMeter(); meter.add(1.0); meter.add(3.0); round(meter.std(), 4)
        1.4142
        """
        total, squares, num = self._sums.tolist()
        return math.sqrt(max(squares - total * total / num, 0.0) / (num - 1)) if num > 1 else math.nan


class ClassErrorMeter(Meter):
    """Percentage of examples whose class is not among the k highest outputs, for each k in `topk`.

    With ``accuracy=True`` it is the percentage of those whose class is. More outputs than classes count as
    all classes.

    >>> meter = ClassErrorMeter(topk=(1, 2))
    >>> meter.add(torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.1, 0.3]]), torch.tensor([1, 2]))
    >>> meter.value(1), meter.value(2)
    (50.0, 0.0)
    """

    def __init__(self, topk: Sequence[int] = (1, 5), accuracy: bool = False) -> None:
        if not topk or any(k < 1 for k in topk):
            raise ArgumentError(f"topk={topk!r}: expected one or more whole numbers from 1, such as topk=(1, 5)")
        self.topk = tuple(topk)
        self.accuracy = accuracy
        super().__init__(len(self.topk) + 1)

    def add(self, output: Tensor, target: Tensor) -> None:
        """Count a batch: `output` has a row of scores per example, `target` the right classes.

        >>> ClassErrorMeter(topk=(1,)).add(torch.eye(10), torch.arange(10))
        """
        if output.dim() == 1:
            output = output.unsqueeze(0)
        target = target.reshape(-1)
        if output.dim() != 2 or len(output) != len(target):
            raise ArgumentError(
                f"output of shape {tuple(output.shape)} and {len(target)} targets: expected one row of class "
                "scores per target"
            )
        num_classes = output.shape[1]
        best = output.detach().topk(min(max(self.topk), num_classes), dim=1).indices
        hits = (best == target.unsqueeze(1)).double().sum(0).cumsum(0).tolist()
        self._accumulate([len(target) - hits[min(k, num_classes) - 1] for k in self.topk] + [len(target)])

    @property
    def num_samples(self) -> int:
        """How many examples went in."""
        return int(self._sums[-1])

    def value(self, k: int | None = None) -> float:
        """The percentage for one k (default: the first of `topk`); nan if nothing went in.

        >>> ClassErrorMeter().value(5)
        nan
        """
        k = self.topk[0] if k is None else k
        if k not in self.topk:
            raise ArgumentError(f"k={k}: this meter was made with topk={self.topk}")
        if not self.num_samples:
            return math.nan
        error = 100.0 * float(self._sums[self.topk.index(k)]) / self.num_samples
        return 100.0 - error if self.accuracy else error
