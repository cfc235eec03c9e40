"""The buffers of one verb, dtype and size, with values that tell right results from wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

IN_PLACE = ("allreduce", "broadcast", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
_SMALL_SOURCE = ("allgather", "gather")
_SMALL_TARGET = ("reduce_scatter", "scatter")
# A prime, so that a piece in the wrong place shows; small values, so that sums are exact in 16 bits up to 64 ranks.
_PERIOD, _VALUES = 1021, 4
_CPU = torch.device("cpu")

Allocate = Callable[[int, torch.dtype], torch.Tensor]


class Shape(NamedTuple):
    """What is to be measured: one cell of the table."""

    collective: str
    dtype: str
    num_bytes: int
    """As asked for; :attr:`Workload.payload_bytes` is what divides evenly."""


class Workload:
    """Source and target of a verb on one rank; the larger of the two has (about) the size asked for.

    >>> work = Workload(Shape("allgather", "float32", 16), rank=0, size=2)
    >>> work.source.shape, work.target.shape, work.payload_bytes
    (torch.Size([2]), torch.Size([4]), 16)
    """

    def __init__(
        self, shape: Shape, *, rank: int, size: int, allocate: Allocate | None = None, device: torch.device = _CPU
    ) -> None:
        allocate = allocate or partial(_plain, device)
        self.collective, self.rank, self.size = shape.collective, rank, size
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        numel = max(1, shape.num_bytes // self.dtype.itemsize)
        if self.collective not in IN_PLACE:
            numel = max(1, numel // size) * size
        self.numel, part = numel, numel // size
        self.payload_bytes = numel * self.dtype.itemsize
        self.source = allocate(part if self.collective in _SMALL_SOURCE else numel, self.dtype)
        self.target = self.source
        if self.collective not in IN_PLACE:
            self.target = allocate(part if self.collective in _SMALL_TARGET else numel, self.dtype)
        self.touch()

    def touch(self) -> None:
        """Write to every page. With zeros: repeated sums of anything else would run into infinities."""
        self.source.zero_()
        if self.target is not self.source:
            self.target.zero_()

    def fill(self) -> None:
        """Give the source its values, and the target none."""
        self.touch()
        if self.collective in ("reduce_scatter", "alltoall", "scatter"):
            for index, part in enumerate(self.source.chunk(self.size)):
                _write(part, self._pattern(self.rank + index))
        else:
            _write(self.source, self._pattern(self.rank))

    def is_right(self, root: int) -> bool:
        """Whether the target has what the verb should have made of the sources of all ranks."""
        if self.collective in ("reduce", "gather") and self.rank != root:
            return True
        if self.collective in ("allgather", "gather", "alltoall"):
            shift = self.rank if self.collective == "alltoall" else 0
            parts = self.target.chunk(self.size)
            return all(_equals(part, self._pattern(index + shift)) for index, part in enumerate(parts))
        if self.collective in ("broadcast", "scatter"):
            return _equals(self.target, self._pattern(root + (self.rank if self.collective == "scatter" else 0)))
        shift = self.rank if self.collective == "reduce_scatter" else 0
        total = torch.stack([self._pattern(rank + shift).to(torch.int64) for rank in range(self.size)]).sum(0)
        return _equals(self.target, total.to(self.dtype))

    def _pattern(self, shift: int) -> torch.Tensor:
        return ((torch.arange(_PERIOD) + shift) % _VALUES).to(self.source.device, self.dtype)


def _plain(device: torch.device, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole periods, as rows, and the rest."""
    whole = tensor.numel() // _PERIOD * _PERIOD
    return tensor[:whole].view(-1, _PERIOD), tensor[whole:]


def _write(tensor: torch.Tensor, pattern: torch.Tensor) -> None:
    rows, rest = _pieces(tensor)
    rows.copy_(pattern)
    rest.copy_(pattern[: rest.numel()])


def _equals(tensor: torch.Tensor, pattern: torch.Tensor) -> bool:
    rows, rest = _pieces(tensor)
    return bool((rows == pattern).all()) and torch.equal(rest, pattern[: rest.numel()])
