"""Reductions of backends that divide the flat tensor among the ranks: their collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..collective_specs import SPECS
from ..communicators.group import Group
from ..tensors import partition
from .base import Operation
from .mpi_messages import Range, destination_for, rows_of


class RangeReduction(Protocol):
    """A reduction whose result is split into ranges of the flat tensor, one for each rank."""

    def allreduce(self, buffer: torch.Tensor, _: None, root: int) -> torch.Tensor:
        """Reduce in place on all ranks."""

    def reduce(self, buffer: torch.Tensor, _: None, root: int) -> torch.Tensor:
        """Reduce in place on the root; the buffers of other ranks are unchanged."""

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor, ranges: Sequence[Range]) -> None:
        """Write the result of this rank's range of the flat `source` to `destination`."""


def operation(group: Group, reduction: RangeReduction, collective: str) -> Operation:
    """Return the operation of a collective that reduces."""
    if SPECS[collective].divides:
        return Operation(RowReduceScatter(group, reduction).run)
    return Operation(getattr(reduction, collective))


class RowReduceScatter:
    """Reduce-scatter along dim 0, by a reduction that splits flat tensors."""

    def __init__(self, group: Group, reduction: RangeReduction) -> None:
        self.rank, self.size, self.reduction = group.rank, group.size, reduction

    def run(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Reduce the rows of `source`, split dim 0 evenly, and return this rank's rows of the result."""
        num_rows, row_numel = rows_of(source)
        rows = partition.even_partition(num_rows, self.size)
        destination = destination_for(source, rows[self.rank][1], destination)
        ranges = [(first * row_numel, count * row_numel) for first, count in rows]
        with torch.inference_mode(destination.is_inference()):  # otherwise torch refuses to write to such a tensor
            self.reduction.reduce_scatter(source, destination, ranges)
        return destination
