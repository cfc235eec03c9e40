"""What distinguishes one compiled reduction from another."""

from __future__ import annotations

from typing import NamedTuple


class FunctionKey(NamedTuple):
    """The steps of an operation (see `torchmpi.tensors.operation_specs`) on one kind of lanes."""

    lane: str
    combine: str
    """The step `combine`, with the type of the numbers where that matters: ``umax``, ``cprod``."""
    num_parts: int = 1
    """The number of lanes of an element: 2 for complex numbers."""
    prepare: str = ""
    finish: str = ""
    result: str = ""
    """The kind of lanes of the result of a conversion."""
