"""Reduction operations of Horovod, and factors before and after a reduction."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import Operation as OperationName
from ..tensors.dtypes import DIVISIBLE_INTEGERS

Average = 0
"""The sum of the tensors of all ranks, divided by the number of ranks."""
Sum = 1
"""The sum of the tensors of all ranks."""
Adasum = 2
"""Horovod's combination of gradients, in pairs of ranks."""
Min = 3
"""The smallest value of each element."""
Max = 4
"""The largest value of each element."""
Product = 5
"""The product of the tensors of all ranks."""
NAMES: dict[int, OperationName] = {Average: "avg", Sum: "sum", Min: "min", Max: "max", Product: "prod"}


def values_of(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory that is not part of a graph."""
    return tensor if type(tensor) is Tensor and not tensor.requires_grad else tensor.detach()


def scaled_copy(tensor: Tensor, factor: float) -> Tensor:
    """Return a contiguous copy, multiplied; integers in float64, truncated toward zero."""
    return scale(tensor.detach().clone(memory_format=torch.contiguous_format), factor)


def scale(tensor: Tensor, factor: float) -> Tensor:
    """Multiply in place."""
    if factor != 1:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.mul_(factor)
        else:
            tensor.copy_(tensor.double().mul_(factor))
    return tensor


def native_op(op: int, tensor: Tensor) -> OperationName:
    """Return the operation of torchmpi; the average of integers is a sum that `finished` divides."""
    return "sum" if op == Average and tensor.dtype in DIVISIBLE_INTEGERS else NAMES[op]


def finished(tensor: Tensor, op: int, size: int, factor: float) -> Tensor:
    """Divide and multiply a result in place."""
    if op == Average and tensor.dtype in DIVISIBLE_INTEGERS:
        if factor == 1:
            return tensor.div_(size, rounding_mode="trunc")
        factor /= size
    return scale(tensor, factor)
