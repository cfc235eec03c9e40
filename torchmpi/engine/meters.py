"""Averages over samples, and their exact totals over ranks: meters keep sums and counts, not means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import collectives
from ..argument_types import checks_types
from ..communicators.levels import Comm
from ..errors import ArgumentError

MeterT = TypeVar("MeterT", bound="Meter")


class Meter:
    """Base of the meters: float64 sums, and their total over ranks."""

    def __init__(self, num_sums: int) -> None:
        self._sums = torch.zeros(num_sums, dtype=torch.float64, device="cpu")
        self._is_global = False

    def reset(self) -> None:
        """Set all sums to zero.

        Example:
            >>> meter = AverageValueMeter(); meter.add(1.0); meter.reset(); meter.num_samples
            0
        """
        self._sums.zero_()
        self._is_global = False

    def synchronize(self: MeterT, comm: Comm = None) -> MeterT:
        """Replace this rank's sums by the sums over all ranks. Collective.

        The meter is then read-only until ``reset()``, so that nothing is counted twice. To read totals while counting
        continues, synchronize a copy: ``copy.deepcopy(meter).synchronize()``.

        Args:
            comm: Communicator, group or level; default: the current communicator.

        Returns:
            The meter itself.

        Raises:
            ArgumentError: The meter holds totals already.

        Example:
            error = meter.synchronize().value()
        """
        self._refuse_if_global("synchronize")
        self._sums = collectives.allreduce(self._sums, comm=comm)
        self._is_global = True
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, for a checkpoint.

        Returns:
            A dict of plain values and one tensor.

        Example:
            >>> sorted(AverageValueMeter().state_dict())
            ['is_global', 'sums']
        """
        return {"sums": self._sums.clone(), "is_global": self._is_global}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums from a checkpoint.

        Args:
            state: Result of ``state_dict()``.

        Raises:
            ArgumentError: The state belongs to a meter with other options.

        Example:
            >>> meter = AverageValueMeter(); meter.load_state_dict(meter.state_dict())
        """
        if state["sums"].shape != self._sums.shape:
            raise ArgumentError("the saved meter has another number of sums, from other options")
        self._sums = state["sums"].clone()
        self._is_global = bool(state["is_global"])

    def divided(self, states: list[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return the state of one rank for a run that is resumed on another number of ranks.

        Args:
            states: The ``state_dict()`` of all ranks that saved.
            rank: Rank that loads the state.

        Returns:
            The sums over all states on rank 0, and zeros on other ranks.

        Example:
            >>> meter = AverageValueMeter(); meter.add(1.0); both = [meter.state_dict()] * 2
            >>> meter.divided(both, 0)["sums"].tolist(), meter.divided(both, 1)["sums"].tolist()
            ([2.0, 2.0, 2.0], [0.0, 0.0, 0.0])
        """
        if states[0]["is_global"]:
            return states[0]
        sums = torch.stack([state["sums"] for state in states]).sum(0)
        return {"sums": sums if rank == 0 else torch.zeros_like(sums), "is_global": False}

    def _accumulate(self, sums: Sequence[float]) -> None:
        self._refuse_if_global("add")
        self._sums += torch.tensor(sums, dtype=torch.float64, device="cpu")

    def _refuse_if_global(self, call: str) -> None:
        if self._is_global:
            raise ArgumentError(f"{call}() on a meter that holds the totals of all ranks: call reset() first")


class AverageValueMeter(Meter):
    """Mean and standard deviation of numbers.

    Example:
        >>> meter = AverageValueMeter()
        >>> meter.add(2.0); meter.add(5.0, num=2)
        >>> meter.value()
        4.0
    """

    def __init__(self) -> None:
        super().__init__(3)

    def add(self, value: float | Tensor, num: int = 1) -> None:
        """Count `value` `num` times.

        Args:
            value: A number or a tensor of one element, such as the mean loss of a batch.
            num: Weight of the value, such as the number of rows of the batch.

        Raises:
            ArgumentError: The meter holds the totals of all ranks.

        Example:
            >>> AverageValueMeter().add(0.5, num=64)
        """
        number = value.item() if isinstance(value, Tensor) else value
        self._accumulate((number * num, number * number * num, num))

    @property
    def num_samples(self) -> int:
        """Sum of the weights added."""
        return int(self._sums[2])

    def value(self) -> float:
        """Return the mean.

        Returns:
            The mean; nan if nothing was added.

        Example:
            >>> AverageValueMeter().value()
            nan
        """
        total, _, num = self._sums.tolist()
        return total / num if num else math.nan

    def std(self) -> float:
        """Return the sample standard deviation, with the divisor n - 1.

        Returns:
            The standard deviation; nan for fewer than two samples.

        Example:
            >>> meter = AverageValueMeter(); meter.add(1.0); meter.add(3.0); round(meter.std(), 4)
            1.4142
        """
        total, squares, num = self._sums.tolist()
        return math.sqrt(max(squares - total * total / num, 0.0) / (num - 1)) if num > 1 else math.nan


@checks_types
class ClassErrorMeter(Meter):
    """Percentage of examples whose class is not among the k highest scores, for each k in `topk`.

    Args:
        topk: Values of k. A k above the number of classes counts as the number of classes.
        accuracy: Measure the percentage of examples whose class is among the k highest scores instead.

    Raises:
        ArgumentError: `topk` is empty or contains a number below 1.

    Example:
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
        """Count a batch.

        Args:
            output: Scores of shape (examples, classes), or (classes,) for one example.
            target: Class of each example.

        Raises:
            ArgumentError: The shapes do not match, or the meter holds the totals of all ranks.

        Example:
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
        """Number of examples added."""
        return int(self._sums[-1])

    def value(self, k: int | None = None) -> float:
        """Return the percentage for one k.

        Args:
            k: One of `topk`; default: the first.

        Returns:
            The percentage; nan if nothing was added.

        Raises:
            ArgumentError: `k` is not in `topk`.

        Example:
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
