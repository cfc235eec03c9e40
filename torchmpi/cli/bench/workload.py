"""The buffers of one collective, dtype and size, with values by which results can be checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

REDUCING = ("allreduce", "reduce", "reduce_scatter")
WITH_OUT = ("allreduce", "broadcast", "reduce")
"""In place unless `out` is given; the other collectives that return a tensor of their own are always out of place."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
_SAME_SHAPE = (*WITH_OUT, "sendreceive", "barrier")
_SMALL_SOURCE = ("allgather", "gather")
_SMALL_TARGET = ("reduce_scatter", "scatter")
# A prime, so that a chunk at a wrong offset is detected; small values, so that 16-bit sums are exact up to 64 ranks.
_PERIOD, _VALUES = 1021, 4
_CPU = torch.device("cpu")

Allocate = Callable[[int, torch.dtype], torch.Tensor]


class BenchCase(NamedTuple):
    """One case to measure."""

    collective: str
    dtype: str
    num_bytes: int
    """The requested size; :attr:`Workload.payload_bytes` is rounded so that it divides evenly."""
    out_of_place: bool = False
    """Whether a collective that may work in place has a second tensor for the result."""


class Workload:
    """Source and target of a collective on one rank; the larger of the two has about the requested size.

    >>> work = Workload(BenchCase("allgather", "float32", 16), rank=0, size=2)
    >>> work.source.shape, work.target.shape, work.payload_bytes
    (torch.Size([2]), torch.Size([4]), 16)
    """

    def __init__(
        self, case: BenchCase, *, rank: int, size: int, allocate: Allocate | None = None, device: torch.device = _CPU
    ) -> None:
        allocate = allocate or partial(_plain, device)
        self.collective, self.rank, self.size = case.collective, rank, size
        self.is_in_place = self.collective in _SAME_SHAPE and not (case.out_of_place and case.collective in WITH_OUT)
        self.dtype: torch.dtype = getattr(torch, case.dtype or "uint8")
        numel = case.num_bytes // self.dtype.itemsize or int(case.collective != "barrier")
        if self.collective not in _SAME_SHAPE:
            numel = max(1, numel // size) * size
        self.numel, part = numel, numel // size
        self.payload_bytes = numel * self.dtype.itemsize
        self.source = allocate(part if self.collective in _SMALL_SOURCE else numel, self.dtype)
        self.target = self.source
        if not self.is_in_place:
            self.target = allocate(part if self.collective in _SMALL_TARGET else numel, self.dtype)
        self.touch()

    def touch(self) -> None:
        """Write zeros to every page: repeated sums of other values would overflow."""
        self.source.zero_()
        if self.target is not self.source:
            self.target.zero_()

    def fill(self) -> None:
        """Fill the source with the test pattern, and the target with zeros."""
        self.touch()
        if self.collective in ("reduce_scatter", "alltoall", "scatter"):
            for index, part in enumerate(self.source.chunk(self.size)):
                _write(part, self._pattern(self.rank + index))
        else:
            _write(self.source, self._pattern(self.rank))

    def is_right(self, root: int) -> bool:
        """Return whether the target has the result of the collective."""
        if self.collective == "barrier" or (self.collective in ("reduce", "gather") and self.rank != root):
            return True
        if self.collective in ("allgather", "gather", "alltoall"):
            shift = self.rank if self.collective == "alltoall" else 0
            parts = self.target.chunk(self.size)
            return all(_equals(part, self._pattern(index + shift)) for index, part in enumerate(parts))
        if self.collective in REDUCING:
            shift = self.rank if self.collective == "reduce_scatter" else 0
            total = torch.stack([self._pattern(rank + shift).to(torch.int64) for rank in range(self.size)]).sum(0)
            return _equals(self.target, total.to(self.dtype))
        source = {"broadcast": root, "scatter": root + self.rank, "sendreceive": (self.rank - 1) % self.size}
        return _equals(self.target, self._pattern(source[self.collective]))

    def _pattern(self, shift: int) -> torch.Tensor:
        return ((torch.arange(_PERIOD) + shift) % _VALUES).to(self.source.device, self.dtype)


def _plain(device: torch.device, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _rows_and_rest(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a tensor into whole periods, as rows of a matrix, and the rest."""
    whole = tensor.numel() // _PERIOD * _PERIOD
    return tensor[:whole].view(-1, _PERIOD), tensor[whole:]


def _write(tensor: torch.Tensor, pattern: torch.Tensor) -> None:
    rows, rest = _rows_and_rest(tensor)
    rows.copy_(pattern)
    rest.copy_(pattern[: rest.numel()])


def _equals(tensor: torch.Tensor, pattern: torch.Tensor) -> bool:
    rows, rest = _rows_and_rest(tensor)
    return bool((rows == pattern).all()) and torch.equal(rest, pattern[: rest.numel()])
