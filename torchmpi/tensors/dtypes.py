"""Data types: their MPI type, the type in which they are summed, and the operations they support.

The names of MPI types are those of mpi4py; the backends look them up.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from .. import other_names
from ..errors import ArgumentError, DtypeError
from .dtype_codes import CODES
from .operation_specs import OPERATIONS, Combine, Kind, OperationSpec

OPS = tuple(OPERATIONS)
DIVISIBLE_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""The integers of which torch can compute quotients."""


class DtypeInfo(NamedTuple):
    """The properties of a dtype."""

    code: int  # stable number that ranks compare
    mpi_name: str | None  # type in which MPI itself can reduce it
    accumulator: torch.dtype | None  # type in which sums are carried; None = no reductions
    ops: tuple[str, ...]


def _ops_of(kind: Kind) -> tuple[str, ...]:
    return tuple(op for op, spec in OPERATIONS.items() if kind in spec.kinds)


_INTEGER_OPS, _FLOAT_OPS, _COMPLEX_OPS = _ops_of("integer"), _ops_of("float"), _ops_of("complex")
_BOOL_OPS = _ops_of("bool")

_TABLE: dict[torch.dtype, DtypeInfo] = {
    torch.float32: DtypeInfo(CODES["float32"], "FLOAT", torch.float32, _FLOAT_OPS),
    torch.float64: DtypeInfo(CODES["float64"], "DOUBLE", torch.float64, _FLOAT_OPS),
    torch.float16: DtypeInfo(CODES["float16"], None, torch.float32, _FLOAT_OPS),
    torch.bfloat16: DtypeInfo(CODES["bfloat16"], None, torch.float32, _FLOAT_OPS),
    torch.complex64: DtypeInfo(CODES["complex64"], "C_FLOAT_COMPLEX", torch.complex64, _COMPLEX_OPS),
    torch.complex128: DtypeInfo(CODES["complex128"], "C_DOUBLE_COMPLEX", torch.complex128, _COMPLEX_OPS),
    torch.int8: DtypeInfo(CODES["int8"], "INT8_T", torch.int8, _INTEGER_OPS),
    torch.int16: DtypeInfo(CODES["int16"], "INT16_T", torch.int16, _INTEGER_OPS),
    torch.int32: DtypeInfo(CODES["int32"], "INT32_T", torch.int32, _INTEGER_OPS),
    torch.int64: DtypeInfo(CODES["int64"], "INT64_T", torch.int64, _INTEGER_OPS),
    torch.uint8: DtypeInfo(CODES["uint8"], "UINT8_T", torch.uint8, _INTEGER_OPS),
    torch.uint16: DtypeInfo(CODES["uint16"], "UINT16_T", torch.uint16, _INTEGER_OPS),
    torch.uint32: DtypeInfo(CODES["uint32"], "UINT32_T", torch.uint32, _INTEGER_OPS),
    torch.uint64: DtypeInfo(CODES["uint64"], "UINT64_T", torch.uint64, _INTEGER_OPS),
    # One byte, 0 or 1: logical and bitwise agree.
    torch.bool: DtypeInfo(CODES["bool"], "UINT8_T", torch.bool, _BOOL_OPS),
    torch.complex32: DtypeInfo(CODES["complex32"], None, torch.complex64, _COMPLEX_OPS),
    # Eight-bit floats are moved but not summed: there is no agreed definition of their sum.
    torch.float8_e4m3fn: DtypeInfo(CODES["float8_e4m3fn"], None, None, ()),
    torch.float8_e5m2: DtypeInfo(CODES["float8_e5m2"], None, None, ()),
    torch.float8_e4m3fnuz: DtypeInfo(CODES["float8_e4m3fnuz"], None, None, ()),
    torch.float8_e5m2fnuz: DtypeInfo(CODES["float8_e5m2fnuz"], None, None, ()),
}
_BY_CODE = {info.code: dtype for dtype, info in _TABLE.items()}


def info(dtype: torch.dtype) -> DtypeInfo:
    """Return the properties of `dtype`; raise if it cannot be sent.

    >>> info(torch.bfloat16).accumulator
    torch.float32
    """
    try:
        return _TABLE[dtype]
    except KeyError:
        known = ", ".join(short_name(known) for known in _TABLE)
        raise DtypeError(f"{dtype} cannot be sent. Convert the tensor to one of: {known}.") from None


def from_code(code: int) -> torch.dtype | None:
    """Return the dtype of a code read from another rank.

    >>> from_code(info(torch.int16).code)
    torch.int16
    """
    return _BY_CODE.get(code)


def short_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``.

    >>> short_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


@cache
def form(op: str, dtype: torch.dtype) -> OperationSpec:
    """Return the operation as it is computed on a dtype.

    Through a view a bool may hold any byte, and all but 0 are true.

    >>> found = form("max", torch.bool)
    >>> found.prepare, found.combine
    ('truth', 'bor')
    """
    spec = OPERATIONS[op]
    if dtype is not torch.bool:
        return spec
    of_bool: dict[str, Combine] = {"min": "band", "max": "bor"}
    return replace(spec, prepare="truth", combine=of_bool.get(spec.combine, spec.combine))


def check_reduction(dtype: torch.dtype, op: str | None) -> DtypeInfo:
    """Return the properties of `dtype`; raise if it does not support `op`.

    >>> check_reduction(torch.int32, "sum").mpi_name
    'INT32_T'
    """
    if op not in OPS:
        raise ArgumentError(f"op={op!r} is unknown. {other_names.operation_hint(op, OPS)}")
    found = info(dtype)
    if op in found.ops:
        return found
    name = short_name(dtype)
    if not found.ops:
        raise DtypeError(f"op={op!r} cannot be computed on {name}. Convert the tensor to bfloat16 or float32 first.")
    if OPERATIONS[op].finish:
        remedy = "An average of integers is not an integer: use op='sum' and divide, or convert to a floating dtype."
    elif dtype is torch.bool:
        remedy = "Use op='land' or 'lor', or convert to an integer dtype."
    elif OPERATIONS[op].has_order:
        remedy = "Complex numbers have no order: reduce .abs(), or use op='sum'."
    else:
        remedy = "Bitwise and logical operations need integers or bool: pass (tensor != 0), or an integer view."
    raise DtypeError(f"op={op!r} is not defined for {name}. {remedy}")


def may_use_mpi(dtype: torch.dtype, op: str, size: int) -> bool:
    """Return whether MPI may reduce `size` values, because every order gives the same bits.

    True for integers, which wrap around, except in 8 and 16 bits, where Open MPI's vector code (op/avx, 5.0) saturates
    sums. True for a sum of two floating-point values, since a + b = b + a; false for min and max, where the library
    selects among NaNs and zeros, and for complex products, which are fused.

    >>> may_use_mpi(torch.float32, "sum", 2), may_use_mpi(torch.float32, "sum", 3)
    (True, False)
    """
    spec = form(op, dtype)
    if info(dtype).mpi_name is None:
        return False
    if not (dtype.is_floating_point or dtype.is_complex):
        return dtype.itemsize > 2 or spec.is_exact
    return size == 1 or (size == 2 and not spec.is_exact and not (spec.combine == "prod" and dtype.is_complex))
