"""Exchange at the beginning of each synchronization inside ``join``: which ranks still have data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import ArgumentError, MismatchError, rank_prefix
from .error_feedback import GradientCompressor
from .gradient_reduction import Compression, GradientReduction, transport
from .replica import Attachment, Net, attached

JOIN_STATE = "torchmpi_join"
DIRECT, HOOKS = 1, 2
"""The two kinds of synchronization: synchronize_gradients, and the asynchronous backward."""
_COMPRESSIONS: Sequence[Compression | None] = (None, "fp16", "bf16")
_DIVISORS = ("active", "size")


class JoinRound(NamedTuple):
    """One synchronization of gradients, with the options that the active ranks have passed."""

    kind: int
    average: bool
    bucket_bytes: int
    compression: Compression | None
    num_active: int


class JoinState(Attachment):
    """Attached to a net while it is inside ``join``."""

    def __init__(self, comm: Communicator, divide_by: str) -> None:
        if divide_by not in _DIVISORS:
            raise ArgumentError(f"{rank_prefix()}join: divide_by={divide_by!r} is not one of {', '.join(_DIVISORS)}.")
        self.comm = comm
        self.divide_by = divide_by
        self.num_rounds = 0
        """Rounds in which this rank had data."""

    def announce_active(
        self, kind: int, average: bool, bucket_bytes: int, compression: Compression | None
    ) -> JoinRound:
        """Announce a synchronization of this rank, which has data."""
        if isinstance(compression, GradientCompressor):
            raise ArgumentError(
                f"{rank_prefix()}compression={type(compression).__name__} inside join(): ranks without data would have "
                "no gradients to which its error feedback belongs. Use 'fp16', 'bf16' or None."
            )
        self.num_rounds += 1
        joint = self._exchange([1, kind, int(average), bucket_bytes, _COMPRESSIONS.index(compression)])
        assert joint is not None  # this rank is active
        return joint

    def announce_finished(self) -> JoinRound | None:
        """Announce that this rank has no more data; return the round to take part in, or None if no rank has data."""
        return self._exchange([0, 0, 0, 0, 0])

    def reduction(self, joint: JoinRound) -> GradientReduction:
        size, wire = self.comm.size, transport(joint.compression).wire
        if not joint.average:
            return GradientReduction(1, size, wire)
        return GradientReduction(joint.num_active if self.divide_by == "active" else size, size, wire)

    def _exchange(self, announcement: list[int]) -> JoinRound | None:
        announcements = collectives.allgather(torch.tensor([announcement]), comm=self.comm).tolist()
        calls = {rank: tuple(options) for rank, (is_active, *options) in enumerate(announcements) if is_active}
        if not calls:
            return None
        if len(set(calls.values())) > 1:
            text = "; ".join(f"rank {rank}: {_describe(*options)}" for rank, options in calls.items())
            raise MismatchError(f"rank {self.comm.rank}: the ranks differ in their calls inside join: {text}.")
        kind, average, bucket_bytes, compression = next(iter(calls.values()))
        return JoinRound(kind, bool(average), bucket_bytes, _COMPRESSIONS[compression], len(calls))


def _describe(kind: int, average: int, bucket_bytes: int, compression: int) -> str:
    name = "synchronize_gradients" if kind == DIRECT else "synchronize_gradients_async"
    return f"{name}(average={bool(average)}, bucket_bytes={bucket_bytes}, compression={_COMPRESSIONS[compression]!r})"


def refuse_inside_join(net: Net, call: str) -> None:
    """Raise inside ``join``, where ranks without data would not take part in the collective `call`."""
    if attached(net, JOIN_STATE) is not None:
        raise ArgumentError(
            f"{call}(): the net is inside join(), where ranks without data take part in the synchronization of "
            "gradients only. Call this function after the join block."
        )
