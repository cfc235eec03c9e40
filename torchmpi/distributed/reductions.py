"""torch's reduction operations in torchmpi's words."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from .torch_names import ReduceOp

_NAMES = {
    ReduceOp.SUM: "sum", ReduceOp.AVG: "avg", ReduceOp.PRODUCT: "prod", ReduceOp.MIN: "min", ReduceOp.MAX: "max",
    ReduceOp.BAND: "band", ReduceOp.BOR: "bor", ReduceOp.BXOR: "bxor", ReduceOp.PREMUL_SUM: "sum",
}  # fmt: skip
_OF_BOOL = {"sum": "lor", "prod": "land"}


def name_of(op: Any, dtype: torch.dtype) -> str:
    """The operation by its name here; on bool a sum is a logical or, as torch itself adds them.

    >>> name_of(ReduceOp(ReduceOp.PRODUCT), torch.float32), name_of(ReduceOp(ReduceOp.SUM), torch.bool)
    ('prod', 'lor')
    """
    try:
        name = _NAMES[op.op]
    except KeyError:
        raise ArgumentError(f"{op.op} is not known. Use one of: {', '.join(str(known) for known in _NAMES)}.") from None
    if is_scaled(op) and not (dtype.is_floating_point or dtype.is_complex):
        raise ArgumentError(f"PREMUL_SUM needs floating point tensors, this one is {dtype}. Use SUM.")
    return _OF_BOOL.get(name, name) if dtype is torch.bool else name


def is_scaled(op: Any) -> bool:
    """Whether a factor comes with the operation."""
    return bool(op.op == ReduceOp.PREMUL_SUM)


def scaled(tensor: torch.Tensor, op: Any) -> torch.Tensor:
    """What PREMUL_SUM adds up: the tensor times the factor that came with the operation; otherwise the tensor itself.

    >>> scaled(torch.ones(2), ReduceOp(ReduceOp.SUM))
    tensor([1., 1.])
    """
    return tensor.detach() * op.factor if is_scaled(op) else tensor
