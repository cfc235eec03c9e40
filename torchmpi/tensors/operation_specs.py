"""The facts about each reduction operation, one row each: prepare every tensor, combine them in order, finish.

Whoever computes reductions knows the few values of `prepare`, `combine` and `finish`, and no operation by name. A new
operation of known parts is a row of :data:`OPERATIONS` and a name in :data:`torchmpi.config.Operation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["bool", "integer", "float", "complex"]
Prepare = Literal["", "truth"]
"""``truth``: 1 for every value but 0. What is prepared stays as it is if it is prepared again."""
Combine = Literal["sum", "prod", "min", "max", "band", "bor", "bxor"]
Finish = Literal["", "divide"]
"""``divide``: by the number of tensors."""

_NUMBERS: tuple[Kind, ...] = ("integer", "float", "complex")
_ORDERED: tuple[Kind, ...] = ("bool", "integer", "float")
_BITS: tuple[Kind, ...] = ("bool", "integer")


@dataclass(frozen=True)
class OperationSpec:
    """One operation.

    >>> OPERATIONS["lor"].mpi_name, OPERATIONS["avg"].partial, OPERATIONS["max"].is_exact
    ('LOR', 'sum', True)
    """

    name: str
    combine: Combine
    kinds: tuple[Kind, ...]
    """The kinds of numbers for which it is defined."""
    prepare: Prepare = ""
    finish: Finish = ""

    @cached_property
    def is_exact(self) -> bool:
        """Whether nothing is rounded, so that no wider type is needed."""
        return self.combine not in ("sum", "prod")

    @cached_property
    def has_order(self) -> bool:
        """Whether it compares numbers."""
        return self.combine in ("min", "max")

    @cached_property
    def partial(self) -> str:
        """The operation of partial results, which `finish` completes."""
        steps = self.prepare, self.combine, ""
        return next(row.name for row in OPERATIONS.values() if (row.prepare, row.combine, row.finish) == steps)

    @cached_property
    def mpi_name(self) -> str:
        """The operation of MPI that prepares and combines."""
        names = {"": self.combine.upper(), "truth": f"L{self.combine[1:].upper()}"}  # LAND, LOR, LXOR
        return names[self.prepare]


_Row = OperationSpec
OPERATIONS = {row.name: row for row in (
    _Row("sum", "sum", _NUMBERS),
    _Row("avg", "sum", ("float", "complex"), finish="divide"),
    _Row("prod", "prod", _NUMBERS),
    _Row("min", "min", _ORDERED),
    _Row("max", "max", _ORDERED),
    _Row("band", "band", _BITS),
    _Row("bor", "bor", _BITS),
    _Row("bxor", "bxor", _BITS),
    _Row("land", "band", _BITS, prepare="truth"),
    _Row("lor", "bor", _BITS, prepare="truth"),
)}  # fmt: skip
"""All operations by name, in the order of their codes."""
