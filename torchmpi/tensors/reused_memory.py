"""Short host memory that calls use again and again, as a NumPy array and as a tensor.

Numbers and bytes get in and out through the array, which costs a tenth of making a tensor of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import modes

_NUMPY_DTYPES = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int64: np.int64,
    torch.float64: np.float64,
    torch.complex128: np.complex128,
}


class ReusedMemory:
    """Zeros, or what the last user has left.

    Attributes:
        array: The memory as an array.
        tensor: The same memory as a tensor.
    """

    __slots__ = ("_unused", "array", "tensor")

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], unused: list[ReusedMemory]) -> None:
        self.array: np.ndarray[Any, Any] = np.zeros(shape, _NUMPY_DTYPES[dtype])
        self.tensor = torch.from_numpy(self.array)
        self._unused = unused

    def give_back(self) -> None:
        """Let others take the memory. After an error of a call it is not given back: the call may still use it."""
        self._unused.append(self)


_unused: dict[tuple[torch.dtype, tuple[int, ...]], list[ReusedMemory]] = {}


def take(dtype: torch.dtype, *shape: int) -> ReusedMemory:
    """Return memory that nobody else uses until it is given back: a call may be made beside, and within, another one.

    >>> memory = take(torch.float64)
    >>> memory.array[()] = 2.5
    >>> memory.tensor
    tensor(2.5000, dtype=torch.float64)
    >>> memory.give_back()
    >>> take(torch.float64) is memory, take(torch.float64) is memory
    (True, False)
    """
    if modes.are_active():  # a tensor that is made now may be one of that mode
        return ReusedMemory(dtype, shape, [])
    unused = _unused.setdefault((dtype, shape), [])
    return unused.pop() if unused else ReusedMemory(dtype, shape, unused)
