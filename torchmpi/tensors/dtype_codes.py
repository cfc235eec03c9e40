"""The numbers of dtypes in messages and records. Without torch, which readers of records do not need."""

from __future__ import annotations

import re

_NAMES = (
    "float32", "float64", "float16", "bfloat16", "complex64", "complex128", "int8", "int16", "int32", "int64", "uint8",
    "uint16", "uint32", "uint64", "bool", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)  # fmt: skip
"""In the order of their numbers, which begin with 1: a new dtype comes last."""
CODES = {name: code for code, name in enumerate(_NAMES, 1)}


def name_of(code: int) -> str:
    """Return the name of a dtype, given its number; '' if there is none.

    >>> name_of(CODES["bfloat16"]), name_of(0)
    ('bfloat16', '')
    """
    return _NAMES[code - 1] if 0 < code <= len(_NAMES) else ""


def bytes_of(name: str) -> int:
    """Return the size of a number of a dtype.

    >>> bytes_of("bfloat16"), bytes_of("complex128"), bytes_of("float8_e5m2"), bytes_of("bool")
    (2, 16, 1, 1)
    """
    bits = re.search(r"\d+", name)
    return int(bits[0]) // 8 if bits else 1
