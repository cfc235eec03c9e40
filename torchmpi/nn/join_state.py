"""Who still has data: the exchange with which every synchronisation inside ``join`` begins."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import ArgumentError, MismatchError
from .reduction import Reduction
from .replica import Attachment, Net, attached

JOIN_STATE = "torchmpi_join"
DIRECT, HOOKS = 1, 2
"""The two kinds of synchronisation: synchronize_gradients, and the asynchronous backward."""
_DIVISORS = ("active", "size")


class JoinRound(NamedTuple):
    """One synchronisation that somebody asked for, as all ranks see it."""

    kind: int
    average: bool
    bucket_bytes: int
    num_active: int


class JoinState(Attachment):
    """Attached to a net while it is inside ``join``."""

    def __init__(self, comm: Communicator, divide_by: str) -> None:
        if divide_by not in _DIVISORS:
            raise ArgumentError(f"join: divide_by={divide_by!r} is not one of {', '.join(_DIVISORS)}.")
        self.comm = comm
        self.divide_by = divide_by
        self.num_rounds = 0
        """Rounds this rank took part in with data of its own."""

    def announce_active(self, kind: int, average: bool, bucket_bytes: int) -> JoinRound:
        """Announce a synchronisation of a rank that has data."""
        self.num_rounds += 1
        wish = self._exchange([1, kind, int(average), bucket_bytes])
        assert wish is not None  # this rank is active
        return wish

    def announce_finished(self) -> JoinRound | None:
        """Announce that this rank has run out; the round to shadow, or None when all have."""
        return self._exchange([0, 0, 0, 0])

    def reduction(self, call: JoinRound) -> Reduction:
        """How the gradients of a round are combined."""
        size = self.comm.size
        if not call.average:
            return Reduction(1, size)
        return Reduction(call.num_active if self.divide_by == "active" else size, size)

    def _exchange(self, row: list[int]) -> JoinRound | None:
        rows = collectives.allgather(torch.tensor([row]), comm=self.comm).tolist()
        wishes = {rank: tuple(row[1:]) for rank, row in enumerate(rows) if row[0]}
        if not wishes:
            return None
        if len(set(wishes.values())) > 1:
            calls = "; ".join(f"rank {rank}: {_describe(*wish)}" for rank, wish in wishes.items())
            raise MismatchError(f"rank {self.comm.rank}: inside join the ranks synchronise differently: {calls}.")
        kind, average, bucket_bytes = next(iter(wishes.values()))
        return JoinRound(kind, bool(average), bucket_bytes, len(wishes))


def _describe(kind: int, average: int, bucket_bytes: int) -> str:
    name = "synchronize_gradients" if kind == DIRECT else "synchronize_gradients_async"
    return f"{name}(average={bool(average)}, bucket_bytes={bucket_bytes})"


def refuse_inside_join(net: Net, call: str) -> None:
    """Refuse a collective that ranks which have run out would not take part in."""
    if attached(net, JOIN_STATE) is not None:
        raise ArgumentError(
            f"{call}(): the net is inside join(), where ranks without data only follow the synchronisation "
            "of gradients. Call it after the join block."
        )
