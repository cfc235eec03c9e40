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


def exact(value: Any, op: str | None = None, num_values: int = 1) -> tuple[torch.dtype, Any]:
    """Return the dtype that holds a number exactly, bool, int64, float64 or complex128, and the number in its type.

    Sums of bool count the true values; averages are those of floats. An integer is refused if a sum of `num_values`
    such integers would not fit.

    >>> exact(3), exact(True, "sum"), exact(True, "lor"), exact(True, "avg")
    ((torch.int64, 3), (torch.int64, 1), (torch.bool, True), (torch.float64, 1.0))
    """
    if type(value) is float:  # the most frequent one, without the checks below
        return torch.float64, value
    spec = OPERATIONS.get(op or "")
    if isinstance(value, (bool, np.bool_)) and (spec is None or "bool" in spec.kinds):
        return torch.bool, bool(value)
    if isinstance(value, (numbers.Integral, np.bool_)):
        number = int(value)
        if not -(1 << 63) <= number < 1 << 63:
            raise DtypeError(
                f"the integer {value} does not fit into 64 bits. Send it with broadcast_object or allgather_object."
            )
        if spec is not None and "integer" not in spec.kinds:
            return torch.float64, float(number)
        if spec is not None and spec.combine == "sum" and not -(1 << 63) <= number * num_values < 1 << 63:
            raise DtypeError(
                f"the sum of {num_values} integers like {value} does not fit into 64 bits. Add them in Python, which "
                "is exact: sum(mpi.allgather_object(number)); or pass a float."
            )
        return torch.int64, number
    if isinstance(value, numbers.Real):
        return torch.float64, float(value)
    return torch.complex128, complex(value)


def as_tensor(value: Any, what: str) -> torch.Tensor:
    """Return a 0-dim tensor that holds a number exactly; `what`: the call in messages.

    >>> as_tensor(3, "send"), as_tensor(True, "send")
    (tensor(3), tensor(True))
    """
    try:
        dtype, number = exact(value)
    except DtypeError as error:
        raise DtypeError(f"{what}: {error}") from None
    return torch.tensor(number, dtype=dtype, device="cpu")


def restore(result: torch.Tensor) -> Any:
    """Return the number, or the list of numbers, in a result.

    >>> restore(torch.tensor(3)), restore(torch.tensor([3, 4]))
    (3, [3, 4])
    """
    return result.tolist()
