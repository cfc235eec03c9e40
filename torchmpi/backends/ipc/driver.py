"""Functions of the CUDA driver for which PyTorch has no interface."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch

LAUNCH = "cuLaunchKernel", "4.0"
STREAM_OPERATIONS = "cuStreamBatchMemOp_v2", "11.7"
"""Functions, and the release of CUDA with which each came."""
_LOAD, _GET_FUNCTION = ("cuModuleLoadData", "2.1"), ("cuModuleGetFunction", "2.0")
NO_CONTEXT, _NOT_SUPPORTED = 201, 801
"""CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_NOT_SUPPORTED."""


@cache
def function(name: str, came_with: str) -> Any:
    """Return a function of the driver, which returns the number of an error.

    Raises:
        RuntimeError: The driver is older than the release of CUDA with which the function came.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")[name]  # torch has loaded the library
    except AttributeError:
        raise RuntimeError(
            f"the CUDA driver has no {name}, which came with CUDA {came_with}. Update the driver"
        ) from None


def address(name: str, came_with: str) -> int:
    """Return the address of a function of the driver."""
    return ctypes.cast(function(name, came_with), ctypes.c_void_p).value or 0


def load_functions(module: bytes, names: Sequence[str]) -> list[int]:
    """Load compiled kernels on the current GPU for the life of the process, and return their CUfunctions.

    Raises:
        RuntimeError: The driver refuses them.
    """
    torch.cuda.current_stream().query()  # the first call of CUDA in a thread makes its context
    handle, found = ctypes.c_void_p(), ctypes.c_void_p()
    status = function(*_LOAD)(ctypes.byref(handle), module)
    functions: list[int] = []
    for name in names:
        status = status or function(*_GET_FUNCTION)(ctypes.byref(found), handle, name.encode())
        functions.append(found.value or 0)
    if status:
        fail("load kernels", status)
    return functions


def make_context(stream: int) -> None:
    """Give this thread the context of a stream, given by its address: it has none before its first call of CUDA."""
    torch.cuda.ExternalStream(stream).query()


def fail(action: str, status: int) -> NoReturn:
    """Raise for an error of the driver."""
    reason = "this GPU or its driver does not support it" if status == _NOT_SUPPORTED else f"error {status}"
    raise RuntimeError(f"the CUDA driver cannot {action}: {reason}")
