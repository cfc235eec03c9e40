"""The buffers of one collective, dtype and size, with values by which results can be checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...collective_specs import IN_PLACE, SPECS

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
        allocate = allocate or (lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device))
        self.collective, self.rank, self.size = case.collective, rank, size
        self.spec = SPECS[case.collective]
        is_divided = self.spec.divides or self.spec.gathers
        self.is_in_place = not is_divided and not (case.out_of_place and case.collective in IN_PLACE)
        self.dtype: torch.dtype = getattr(torch, case.dtype or "uint8")
        numel = case.num_bytes // self.dtype.itemsize or int(self.spec.tensors)
        if is_divided:
            numel = max(1, numel // size) * size
        self.numel, part = numel, numel // size
        self.payload_bytes = numel * self.dtype.itemsize
        self.source = allocate(part if self.spec.grows > 0 else numel, self.dtype)
        self.target = self.source
        if not self.is_in_place:
            self.target = allocate(part if self.spec.grows < 0 else numel, self.dtype)
        self.touch()

    def touch(self) -> None:
        """Write zeros to every page: repeated sums of other values would overflow."""
        self.source.zero_()
        if self.target is not self.source:
            self.target.zero_()

    def fill(self) -> None:
        """Fill the source with the test pattern, and the target with zeros."""
        self.touch()
        if self.spec.divides:
            for index, part in enumerate(self.source.chunk(self.size)):
                _write(part, self._pattern(self.rank + index))
        else:
            _write(self.source, self._pattern(self.rank))

    def is_right(self, root: int) -> bool:
        """Return whether the target has the result of the collective."""
        sources = self.spec.sources(self.rank, root, range(self.size)) if self.spec.tensors else ()
        patterns = [self._pattern(rank + (self.rank if self.spec.divides else 0)) for rank in sources]
        if not patterns:
            return True
        if self.spec.reduces:
            patterns = [torch.stack([pattern.to(torch.int64) for pattern in patterns]).sum(0).to(self.dtype)]
        return all(map(_equals, self.target.chunk(len(patterns)), patterns))

    def _pattern(self, shift: int) -> torch.Tensor:
        return ((torch.arange(_PERIOD) + shift) % _VALUES).to(self.source.device, self.dtype)


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
