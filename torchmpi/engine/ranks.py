"""What an engine needs to know of other ranks, for one process and for many: the same loop runs on both."""

from __future__ import annotations

from typing import Any, Protocol

from torchmpi import collectives
from torchmpi.session import api


class Ranks(Protocol):
    """The ranks that train together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def count(self, flag: bool) -> int:
        """On how many ranks `flag` is true."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's object, on all ranks."""

    def gather(self, value: Any) -> list[Any]:
        """The objects of all ranks, in rank order."""


class OneRank:
    """A process on its own; needs no MPI.

    >>> OneRank().count(True)
    1
    """

    rank = 0
    size = 1

    def count(self, flag: bool) -> int:
        return int(flag)

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]


class AllRanks:
    """The ranks of the current communicator.

    num_ready = AllRanks().count(is_ready)
    """

    @property
    def rank(self) -> int:
        return api.rank()

    @property
    def size(self) -> int:
        return api.size()

    def count(self, flag: bool) -> int:
        return int(collectives.allreduce(int(flag)))

    def broadcast(self, value: Any) -> Any:
        return collectives.broadcast_object(value)

    def gather(self, value: Any) -> list[Any]:
        return list(collectives.allgather_object(value))
