"""The workers that train together, as an update sees them: ranks, or whatever takes their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import chain, count
from typing import Any, Protocol

import torch

from .. import collectives
from ..communicators.levels import Comm
from ..nn.agreement import check_same_layout
from ..nn.replica import Replica
from ..session import runtime
from .servers import Server, find_awaited, init


class Workers(Protocol):
    """The workers that train together; collective methods are called by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """Number of this worker."""

    @property
    def size(self) -> int:
        """Number of workers."""

    @property
    def names(self) -> Sequence[int]:
        """For each worker, the number by which messages name it."""

    @property
    def where(self) -> str:
        """Which worker this is, for messages."""

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all workers. Collective."""

    def barrier(self) -> None:
        """Return when all workers have called it. Collective."""

    def check_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise unless all workers have tensors of the same shapes and dtypes. Collective."""

    def finds(self, name: str) -> bool:
        """Return whether a server of this name has lived on after a loss, so that `init` returns it by itself."""

    def init(self, tensor: torch.Tensor, name: str | None = None) -> Server:
        """Create a server, as :func:`torchmpi.parameterserver.init`. Collective, unless it `finds` one."""

    def announce(self, update: Any) -> None:
        """Let the metrics of an update be found under its name."""


class RankWorkers:
    """The ranks of a communicator."""

    def __init__(self, comm: Comm = None) -> None:
        self.communicator = runtime.communicator(comm)
        group = self.communicator.intra
        self.rank, self.size, self.names, self.where = group.rank, group.size, group.world_ranks, group.where

    def allgather(self, value: Any) -> list[Any]:
        return collectives.allgather_object(value, comm=self.communicator)

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        collectives.barrier(self.communicator)

    def check_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise unless all ranks have tensors of the same shapes and dtypes. Collective."""
        check_same_layout(Replica(list(tensors)), list(tensors), self.communicator)

    def finds(self, name: str) -> bool:
        """Return whether a server of this name has lived on after a loss."""
        return find_awaited(self.communicator.intra, name) is not None

    def init(self, tensor: torch.Tensor, name: str | None = None) -> Server:
        """Create a server, or return the one that lives on. Collective, unless it `finds` one."""
        return init(tensor, self.communicator, name=name)

    def announce(self, update: Any) -> None:
        """Let :func:`torchmpi.metrics` find an update under its name, with a number if it is taken."""
        updates = runtime.current().context.updates
        names = chain([update.name], (f"{update.name} {number}" for number in count(2)))
        updates[next(name for name in names if (other := updates.get(name)) is None or other.is_finished)] = update


workers_of: ContextVar[Callable[[Comm], Workers]] = ContextVar("workers_of", default=RankWorkers)
"""Makes the workers of a communicator, or of whatever takes its place."""
