"""The coordinator of a training loop: everything that depends on other ranks is a question to this object."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..nn import DistributedOptimizer
from .state import State


class Coordinator(Protocol):
    """What a loop asks about the ranks that train together. All but `rank`, `size` and `device` are collective."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    # --- agreement -----------------------------------------------------------------------------------------

    def count(self, number: int) -> int:
        """Return the sum over the ranks; for a condition, the number of ranks on which it holds."""

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the object of one rank on all ranks."""

    def gather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order."""

    def collect(self, rows: Tensor) -> Tensor | None:
        """Return the rows of all ranks, in rank order, on rank 0; None on the others."""

    # --- training ------------------------------------------------------------------------------------------

    def device(self, network: nn.Module) -> torch.device:
        """Return the device of network, criterion and batches."""

    def begin(self, state: State) -> None:
        """Make network and criterion equal on all ranks, before the first epoch."""

    def begin_update(self, state: State, num_active: int) -> None:
        """Prepare an update, also on a rank without a batch. `num_active` ranks have one."""

    def next_batch(self, state: State, has_batch: bool) -> None:
        """Check the next batch of an update of several; a rank may have no more."""

    def average_gradients(self, state: State) -> None:
        """Average the gradients over all ranks, after the backward passes of an update."""

    def clip_norm(self, parameters: list[Tensor], limit: float) -> Tensor:
        """Scale the averaged gradient to at most this norm, and return its norm before."""

    def end(self, *, failed: bool = False) -> None:
        """Clean up after training; without communication if it has failed."""


class SingleProcess:
    """A process without other ranks; needs no MPI.

    >>> SingleProcess().count(True)
    1
    """

    rank = 0
    size = 1

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def count(self, number: int) -> int:
        return int(number)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def collect(self, rows: Tensor) -> Tensor:
        return rows

    def device(self, network: nn.Module) -> torch.device:
        """Return the given device, or that of the parameters."""
        if self._device is not None:
            return self._device
        return next((parameter.device for parameter in network.parameters()), torch.device("cpu"))

    def begin(self, state: State) -> None:
        """Refuse an optimizer that communicates."""
        if isinstance(state.optimizer, DistributedOptimizer):
            raise ArgumentError("SGDEngine trains in one process; with a DistributedOptimizer use AllReduceSGDEngine")

    def begin_update(self, state: State, num_active: int) -> None:
        """Do nothing."""

    def next_batch(self, state: State, has_batch: bool) -> None:
        """Do nothing."""

    def average_gradients(self, state: State) -> None:
        """Do nothing."""

    def clip_norm(self, parameters: list[Tensor], limit: float) -> Tensor:
        """Clip as torch does."""
        return nn.utils.clip_grad_norm_(parameters, limit)

    def end(self, *, failed: bool = False) -> None:
        """Do nothing."""


def refuse_differences(coordinator: Coordinator, **options: Any) -> None:
    """Raise on all ranks if an option of ``train()`` differs between them. Collective.

    >>> refuse_differences(SingleProcess(), lr=0.1)
    """
    everywhere = coordinator.gather(options)
    for rank, theirs in enumerate(everywhere):
        for name, value in everywhere[0].items():
            if theirs[name] != value:
                raise ArgumentError(f"train(): {name} is {value} on rank 0, but {theirs[name]} on rank {rank}")
