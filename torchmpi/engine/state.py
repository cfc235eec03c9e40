"""The state of a run and the lists of hooks that receive it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, kind_of
from .test_result import TestResult


class Sample(NamedTuple):
    """One batch of data.

    Attributes:
        input: Argument of the network: a tensor, or nested tuples, lists and mappings of tensors.
        target: Second argument of the criterion, of the same kinds.

    Example:
        >>> Sample(torch.zeros(3, 8), torch.zeros(3)).num_rows
        3
    """

    input: Any
    target: Any

    @property
    def num_rows(self) -> int:
        """Number of examples in the batch: the length of the target, or of the input if the target is no tensor."""
        for part in (self.target, self.input):
            if isinstance(part, Tensor):
                return len(part) if part.dim() else 1
        return 1


def as_sample(batch: Any) -> Sample:
    """Convert a pair, or a mapping with the keys ``input`` and ``target``, to a :class:`Sample`.

    >>> as_sample(("x", "y")).target
    'y'
    """
    if isinstance(batch, Mapping) and {"input", "target"} <= batch.keys():
        return Sample(batch["input"], batch["target"])
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return Sample(*batch)
    length = f" of length {len(batch)}" if hasattr(batch, "__len__") else ""
    raise ArgumentError(
        f"the iterator, or a hook, gave {kind_of(batch)}{length} as a batch; an engine takes a pair "
        "(input, target) or a mapping with these two keys. Wrap the iterator so that it yields such pairs."
    )


@dataclass
class State:
    """State of a run, passed to every hook. Hooks may change ``lr``, ``sample``, ``loss`` and ``stop``.

    Args:
        network: Network that is trained or tested.
        criterion: Loss function or module, called as ``criterion(output, target)``.
        iterator: Iterable over the batches of an epoch.
        optimizer: Optimizer of the run; None in ``test()``.
        training: False in ``test()``.
        max_epochs: Number of epochs of the run.
        epoch: Current epoch, from 0.
        accumulate: Number of batches per update, on each rank.
        t: Number of updates since the beginning of the run, including those that a GradScaler has skipped.
        batch: Number of batches that this rank has processed in this epoch.
        autocast: Data type of automatic mixed precision in network and criterion; None without it.
        grad_norm: Norm of the averaged gradient before clipping, with ``clip_grad_norm``.
        sample: Current batch, or the last one of an update; None on a rank that has no batch for this update.
        output: Output of the network for `sample`.
        loss: Output of the criterion for `sample`. The backward pass starts from this tensor.
        validation: Result of ``test()`` after the last epoch, with ``validate``.
        best_epoch: Epoch with the best validation so far.
        stop: Ends the run after the current update or epoch, on all ranks, when one rank sets it.

    Example:
        >>> state = State(nn.Linear(2, 1), nn.MSELoss(), [])
        >>> state.t, state.training
        (0, True)
    """

    network: nn.Module
    criterion: Callable[..., Tensor]
    iterator: Iterable[Any]
    optimizer: torch.optim.Optimizer | None = None
    training: bool = True
    max_epochs: int = 1
    epoch: int = 0
    accumulate: int = 1
    t: int = 0
    batch: int = 0
    autocast: torch.dtype | None = None
    grad_norm: Tensor | None = None
    sample: Sample | None = None
    output: Any = None
    loss: Tensor | None = None
    validation: TestResult | None = None
    best_epoch: int | None = None
    stop: bool = False

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer's first parameter group. Assignment sets the rate of all groups.

        Raises:
            ArgumentError: The state has no optimizer.
        """
        return float(self._param_groups()[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self._param_groups():
            group["lr"] = value

    def _param_groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            raise ArgumentError("this state has no optimizer, so no learning rate: it belongs to test()")
        return self.optimizer.param_groups
