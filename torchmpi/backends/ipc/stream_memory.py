"""Operations of a CUDA stream on numbers in memory: write one, wait for others.

With these operations streams of different processes synchronize, at a fraction of the price of events. PyTorch has
none, so this module calls one function of the CUDA driver. While a stream waits, it occupies no multiprocessor.

Streams may share a queue of the hardware, in which a wait also stops the work of the others. So a wait is enqueued
after the write that ends it: otherwise two processes that use two communicators in different orders would wait forever.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

import torch

_WAIT_64, _WRITE_64 = 4, 5  # CU_STREAM_MEM_OP_*; the default flags wait for >=, and write after all earlier work
_VALUE, _NUM_WORDS = 2, 6  # position of the number in the words of an operation
_NO_CONTEXT, _NOT_SUPPORTED = 201, 801  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_NOT_SUPPORTED


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
    )


@cache
def _driver_function() -> Callable[..., int]:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2  # torch has loaded the library
    except AttributeError:
        raise RuntimeError(
            "the CUDA driver has no cuStreamBatchMemOp_v2, which came with CUDA 11.7. Update the driver"
        ) from None
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
    return function


class StreamOperations:
    """Writes a number to some addresses, then waits until others hold this number or a larger one.

    The memory must be page-locked for CUDA.
    """

    __slots__ = ("_address", "_count", "_enqueue", "_operations", "_positions", "_words")

    def __init__(self, written: Sequence[int], awaited: Sequence[int]) -> None:
        operations = [_Operation(_WRITE_64, address) for address in written]
        operations += [_Operation(_WAIT_64, address) for address in awaited]
        self._count = len(operations)
        self._operations = (_Operation * self._count)(*operations)
        self._address = ctypes.addressof(self._operations)
        self._words = (ctypes.c_uint64 * (_NUM_WORDS * self._count)).from_buffer(self._operations)
        self._positions = range(_VALUE, _NUM_WORDS * self._count, _NUM_WORDS)
        self._enqueue: Any = _driver_function()

    def __call__(self, stream: int, number: int) -> None:
        """Enqueue the operations on a stream, given by its address.

        Raises:
            RuntimeError: The driver refuses them, for example because the device has failed.
        """
        if not self._count:
            return
        words = self._words
        for position in self._positions:
            words[position] = number
        status = self._enqueue(stream, self._count, self._address, 0)
        if status == _NO_CONTEXT:  # the first call of CUDA in this thread
            torch.cuda.ExternalStream(stream).query()
            status = self._enqueue(stream, self._count, self._address, 0)
        if status:
            _fail(status)


def _fail(status: int) -> NoReturn:
    reason = "this GPU or its driver does not support it" if status == _NOT_SUPPORTED else f"error {status}"
    raise RuntimeError(f"cuStreamBatchMemOp: the CUDA driver cannot synchronize streams by numbers in memory: {reason}")
