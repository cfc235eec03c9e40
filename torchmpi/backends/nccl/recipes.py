"""Conversions of values around the reductions of NCCL, so that the results equal those of the other backends.

NCCL has fewer dtypes and operations than torchmpi, drops a NaN that meets a number in min and max, and rounds 16-bit
floats after each rank. A :class:`Recipe` has the dtype and the operation of NCCL for a reduction, and the conversions
before and after it, in plain torch operations on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ...tensors.dtypes import form
from ...tensors.operation_specs import OPERATIONS, OperationSpec
from .. import rank_order

_Tensor = torch.Tensor
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHORT = (torch.float16, torch.bfloat16)
_OF_TRUTH = {"band": "min", "bor": "max", "bxor": "sum"}


class Recipe(NamedTuple):
    """The reduction of NCCL for one dtype and operation, and the conversions around it."""

    carrier: torch.dtype
    """The dtype that NCCL reduces in."""
    op: str
    """NCCL's operation: sum, prod, min, max, avg."""
    encode: Callable[[_Tensor], _Tensor] | None = None
    """Converts flat values to new ones in the carrier. None: NCCL reduces the values themselves, in place."""
    decode: Callable[[_Tensor], _Tensor] | None = None
    """Converts the reduced carrier to the result, in any dtype that copies without loss. None: no conversion."""


def flat(tensor: _Tensor) -> _Tensor:
    """Return a flat view of a contiguous tensor, with complex numbers as pairs.

    >>> flat(torch.ones(2, 2, dtype=torch.complex64)).shape
    torch.Size([8])
    """
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)


def lacks(dtype: torch.dtype, op: str) -> str | None:
    """Return why NCCL cannot compute a reduction even with conversions, or None.

    >>> lacks(torch.int32, "bxor")
    'NCCL has no bxor of integers'
    >>> lacks(torch.bool, "bxor") is None
    True
    """
    spec = form(op, dtype)
    if spec.combine in _OF_TRUTH and spec.prepare != "truth":
        return f"NCCL has no {op} of integers"
    if spec.combine == "prod" and dtype.is_complex:
        return "NCCL has no product of complex numbers"
    return None


def recipe(dtype: torch.dtype, op: str, size: int) -> Recipe:
    """Return the recipe of a reduction among `size` ranks, for which `lacks` returns None.

    >>> recipe(torch.float32, "sum", 8)
    Recipe(carrier=torch.float32, op='sum', encode=None, decode=None)
    >>> recipe(torch.bfloat16, "sum", 8).carrier, recipe(torch.bfloat16, "sum", 2).carrier
    (torch.float32, torch.bfloat16)
    """
    dtype = _PARTS.get(dtype, dtype)
    spec = form(op, dtype)
    if spec.prepare == "truth":
        return _truth(spec)
    if dtype.is_floating_point:
        return _ordered(dtype, spec.combine) if spec.has_order else _sums(dtype, spec, size)
    if dtype.itemsize == 2:  # NCCL has no integers of 16 bits; their results are the lower halves of longer ones
        return Recipe(torch.int32, spec.combine, lambda values: values.to(torch.int32))
    return _unsigned(dtype, spec.combine) if dtype in (torch.uint32, torch.uint64) else Recipe(dtype, spec.combine)


def _truth(spec: OperationSpec) -> Recipe:
    """Return the recipe of logical operations: any number but 0 is true, and the result is 0 or 1."""

    def encode(values: _Tensor) -> _Tensor:
        # As signed integers: torch has few operations on unsigned ones, and a bool may be a view of any byte.
        return (values.view(_SIGNED[values.itemsize]) != 0).to(torch.uint8)

    op = _OF_TRUTH[spec.combine]
    return Recipe(torch.uint8, op, encode, None if OPERATIONS[op].is_exact else lambda sums: sums.bitwise_and_(1))


def _unsigned(dtype: torch.dtype, op: str) -> Recipe:
    """Return the recipe of integers that torch's process group does not accept: signed ones with the same bits.

    For min and max the highest bit is flipped, which keeps the order.
    """
    signed = _SIGNED[dtype.itemsize]
    flipped = torch.iinfo(signed).min if OPERATIONS[op].has_order else 0
    return Recipe(
        signed, op, lambda values: values.view(signed) ^ flipped, lambda result: (result ^ flipped).view(dtype)
    )


def _sums(dtype: torch.dtype, spec: OperationSpec, size: int) -> Recipe:
    """Return the recipe of sums, means and products of floats.

    16-bit floats are reduced in 32 bits and rounded once. The sum of two is rounded once in any case.
    """
    encode = None
    # For a mean NCCL multiplies by 1/n before it adds, which is exact for powers of two only; even then float16 would
    # lose the last bit of its smallest numbers.
    is_exact = size & (size - 1) == 0
    is_mean = spec.finish == "divide"
    if dtype in _SHORT and (size > 2 or (is_mean and dtype is torch.float16)):
        dtype, encode = torch.float32, lambda values: values.to(torch.float32)
    if is_mean and not is_exact:
        return Recipe(dtype, spec.partial, encode, partial(_divided, size))
    return Recipe(dtype, spec.name, encode)


def _divided(size: int, sums: _Tensor) -> _Tensor:
    rank_order.divide(sums, size)
    return sums


def _ordered(dtype: torch.dtype, op: str) -> Recipe:
    """Return the recipe of min and max of floats: integers in the same order, with -0 below 0; NaN is the result."""
    wide = torch.float32 if dtype in _SHORT else dtype
    integer = _SIGNED[wide.itemsize]
    limits = torch.iinfo(integer)
    nan = limits.min if op == "min" else limits.max

    def turned(numbers: _Tensor) -> _Tensor:
        # The bits of a negative float count downwards as those of an integer.
        return numbers ^ ((numbers >> (limits.bits - 1)) & limits.max)

    def encode(values: _Tensor) -> _Tensor:
        values = values.to(wide)
        return turned(values.view(integer)).masked_fill_(values.isnan(), nan)

    return Recipe(integer, op, encode, lambda numbers: turned(numbers).view(wide))
