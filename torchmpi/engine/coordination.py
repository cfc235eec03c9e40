"""Communication of the training loop: the same loop runs in one process and on all ranks of a communicator."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from .. import collectives
from ..session import api


class Coordinator(Protocol):
    """Operations by which the ranks that train together agree. All are collective."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def count(self, number: int) -> int:
        """Return the sum over the ranks; for a condition, the number of ranks on which it holds."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's object on all ranks."""

    def gather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order."""

    def collect(self, rows: Tensor) -> Tensor | None:
        """Return the rows of all ranks, in rank order, on rank 0; None on the others."""


class SingleProcess:
    """A process without other ranks; needs no MPI.

    >>> SingleProcess().count(True)
    1
    """

    rank = 0
    size = 1

    def count(self, number: int) -> int:
        """Return `number`."""
        return int(number)

    def broadcast(self, value: Any) -> Any:
        """Return `value`."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return a list of `value` only."""
        return [value]

    def collect(self, rows: Tensor) -> Tensor:
        """Return `rows`."""
        return rows


class AllRanks:
    """The ranks of the current communicator."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return api.rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return api.size()

    def count(self, number: int) -> int:
        """Return the sum over the ranks; for a condition, the number of ranks on which it holds."""
        return int(collectives.allreduce(int(number)))

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's object on all ranks."""
        return collectives.broadcast_object(value)

    def gather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order."""
        return list(collectives.allgather_object(value))

    def collect(self, rows: Tensor) -> Tensor | None:
        """Return the rows of all ranks, in rank order, on rank 0; None on the others."""
        return collectives.gather(rows)
