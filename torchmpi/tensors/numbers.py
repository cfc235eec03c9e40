"""Conversion of Python numbers to 0-dim tensors and back."""

from __future__ import annotations

import numbers
from typing import Any, TypeVar

import numpy as np
import torch

from ..errors import DtypeError
from .operation_specs import OPERATIONS

Number = TypeVar("Number", int, float, complex)
Value = TypeVar("Value", torch.Tensor, bool, int, float, complex)


def is_number(value: object) -> bool:
    """Return whether a value is a Python number or numpy scalar.

    >>> is_number(1.5), is_number(torch.ones(()))
    (True, False)
    """
    return isinstance(value, (numbers.Complex, np.bool_))


def as_tensor(value: Any, op: str | None = None, num_values: int = 1) -> torch.Tensor:
    """Return a 0-dim tensor that holds a number exactly: bool, int64, float64 or complex128.

    Sums of bool count the true values; averages are those of floats. An integer is refused if a sum of `num_values`
    such integers would not fit.

    >>> as_tensor(3), as_tensor(True, "sum"), as_tensor(True, "lor"), as_tensor(True, "avg")
    (tensor(3), tensor(1), tensor(True), tensor(1., dtype=torch.float64))
    """
    spec = OPERATIONS.get(op or "")
    if isinstance(value, (bool, np.bool_)) and (spec is None or "bool" in spec.kinds):
        return _cpu(bool(value))
    if isinstance(value, (numbers.Integral, np.bool_)):
        if not -(1 << 63) <= int(value) < 1 << 63:
            raise DtypeError(
                f"the integer {value} does not fit into 64 bits. Send it with broadcast_object or allgather_object."
            )
        if spec is not None and "integer" not in spec.kinds:
            return _cpu(float(value), torch.float64)
        if spec is not None and spec.combine == "sum" and not -(1 << 63) <= int(value) * num_values < 1 << 63:
            raise DtypeError(
                f"the sum of {num_values} integers like {value} does not fit into 64 bits. Add them in Python, which "
                "is exact: sum(mpi.allgather_object(number)); or pass a float."
            )
        return _cpu(int(value))
    if isinstance(value, numbers.Real):
        return _cpu(float(value), torch.float64)
    return _cpu(complex(value), torch.complex128)


def _cpu(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")


def restore(result: torch.Tensor) -> Any:
    """Return the number, or the list of numbers, in a result.

    >>> restore(torch.tensor(3)), restore(torch.tensor([3, 4]))
    (3, [3, 4])
    """
    return result.tolist()
