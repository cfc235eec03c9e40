"""The code of a call: collective, operation, dtype, device and root, in its signature and in the flight record.

Without torch, which readers of records do not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..collective_specs import CODES, SPECS
from ..tensors.dtype_codes import name_of
from ..tensors.operation_specs import OPERATIONS

_OPS = tuple(OPERATIONS)
ON_DEVICE = 1 << 31
"""Set in the code of calls on device tensors, which use other chunks and possibly another backend."""


def call_code(collective: str, op: str | None = None, dtype_code: int = 0) -> int:
    """Return the part of a signature that does not change between calls; the root is added above bit 32.

    >>> call_code("barrier") != call_code("allreduce", "sum", 1)
    True
    """
    return CODES.index(collective) | (_OPS.index(op) if op else len(_OPS)) << 8 | dtype_code << 16


def as_many(code: int) -> int:
    """Return the code of the allreduce of a list, given that of the allreduce of a tensor.

    >>> describe(as_many(call_code("allreduce", "sum", 1)), (5, 2, 77))
    'allreduce_many(2 tensors of 5 float32 in all, shapes #77, sum)'
    """
    return code & ~0xFF | CODES.index("allreduce_many")


@lru_cache(maxsize=1024)
def call_names(code: int) -> tuple[str, str, str, int]:
    """Return collective, operation, dtype and root of a signature; '' or -1 for none.

    >>> call_names(call_code("broadcast", None, 1) | 2 << 32)
    ('broadcast', '', 'float32', 2)
    """
    collective, op = CODES[code & 0xFF], (code >> 8) & 0xFF
    root = code >> 32 if SPECS[collective].is_rooted else -1
    return collective, "" if op == len(_OPS) else _OPS[op], name_of((code >> 16) & 0x7FFF), root


class CallNumber(tuple[int, ...]):
    """Takes the place of a shape in a step of a larger call: a number that stands for that call."""


def describe(code: int, shape: Sequence[int] | None = None) -> str:
    """Describe a signature.

    >>> describe(call_code("broadcast", None, 1) | 2 << 32, (3, 4))
    'broadcast(float32 [3, 4], root=2)'
    """
    collective, op, dtype, root = call_names(code)
    parts = []
    if collective == "allreduce_many" and shape is not None and dtype:
        numel, num_tensors, checksum = shape
        parts.append(f"{num_tensors} tensors of {numel} {dtype} in all, shapes #{checksum}")
    elif dtype:
        is_shape = shape is not None and not isinstance(shape, CallNumber)
        parts.append(dtype + (f" {list(shape or ())}" if is_shape else ""))
    parts += filter(None, (op, "on cuda" if code & ON_DEVICE else "", f"root={root}" if root >= 0 else ""))
    return f"{collective}({', '.join(parts)})"
