"""What the hooks of an engine are given: the whole state of a run, by name and with types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchmpi.errors import ArgumentError


class Sample(NamedTuple):
    """One batch: what the network is given and what the criterion compares its output with."""

    input: Any
    target: Any

    @property
    def num_rows(self) -> int:
        """How many examples the batch holds, by the length of its target.

        >>> Sample(torch.zeros(3, 8), torch.zeros(3)).num_rows
        3
        """
        for part in (self.target, self.input):
            if isinstance(part, Tensor):
                return len(part) if part.dim() else 1
        return 1


def as_sample(batch: Any) -> Sample:
    """Read what an iterator gave as a :class:`Sample`: a pair, or a mapping with ``input`` and ``target``.

    >>> as_sample(("x", "y")).target
    'y'
    """
    if isinstance(batch, Mapping) and {"input", "target"} <= batch.keys():
        return Sample(batch["input"], batch["target"])
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return Sample(*batch)
    length = f" of length {len(batch)}" if hasattr(batch, "__len__") else ""
    raise ArgumentError(
        f"the iterator, or a hook, gave a {type(batch).__name__}{length} as a batch; an engine takes a pair "
        "(input, target) or a mapping with these two keys. Wrap the iterator to make such pairs."
    )


@dataclass
class State:
    """A run as its hooks see it. Hooks may change it: ``lr``, ``sample``, ``loss`` and ``stop`` among others.

    ``t`` counts the updates of the whole run, ``batch`` the batches that this rank has done in this epoch.
    """

    network: nn.Module
    criterion: Callable[..., Tensor]
    iterator: Iterable[Any]
    optimizer: torch.optim.Optimizer | None = None
    training: bool = True
    max_epochs: int = 1
    epoch: int = 0
    t: int = 0
    batch: int = 0
    sample: Sample | None = None
    output: Any = None
    loss: Tensor | None = None
    stop: bool = False

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer's first group; setting it sets all groups."""
        if self.optimizer is None:
            raise ArgumentError("this state has no optimizer, so no learning rate: it belongs to test()")
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        if self.optimizer is None:
            raise ArgumentError("this state has no optimizer, so no learning rate: it belongs to test()")
        for group in self.optimizer.param_groups:
            group["lr"] = value
