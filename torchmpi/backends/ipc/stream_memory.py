"""Operations of a CUDA stream on numbers in memory: write one, wait for others.

With these operations streams of different processes synchronize, at a fraction of the price of events. PyTorch has
none, so this module calls one function of the CUDA driver. While a stream waits, it occupies no multiprocessor.

Streams may share a queue of the hardware, in which a wait also stops the work of the others. So a wait is enqueued
after the write that ends it: otherwise two processes that use two communicators in different orders would wait forever.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ...shared_memory.kernels.records import StreamOperation
from . import driver

_WAIT_64, _WRITE_64 = 4, 5  # CU_STREAM_MEM_OP_*; the default flags wait for >=, and write after all earlier work


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


class StreamOperations:
    """Writes a number to some addresses, then waits until others hold this number or a larger one.

    The memory must be page-locked for CUDA.
    """

    __slots__ = ("_enqueue", "_operations", "_positions", "_words", "address", "count")

    def __init__(self, written: Sequence[int], awaited: Sequence[int]) -> None:
        self._enqueue: Any = driver.function(*driver.STREAM_OPERATIONS)
        self._enqueue.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
        self._prepare(written, awaited)

    def _prepare(self, written: Sequence[int], awaited: Sequence[int]) -> None:
        operations = [_Operation(_WRITE_64, address) for address in written]
        operations += [_Operation(_WAIT_64, address) for address in awaited]
        self.count = len(operations)
        self._operations = (_Operation * self.count)(*operations)
        self.address = ctypes.addressof(self._operations)
        """Of the operations, as CUDA takes them."""
        self._words = (ctypes.c_uint64 * (StreamOperation.FIELDS * self.count)).from_buffer(self._operations)
        self._positions = range(StreamOperation.value, StreamOperation.FIELDS * self.count, StreamOperation.FIELDS)

    def __call__(self, stream: int, number: int) -> None:
        """Enqueue the operations on a stream, given by its address.

        Raises:
            RuntimeError: The driver refuses them, for example because the device has failed.
        """
        if not self.count:
            return
        words = self._words
        for position in self._positions:
            words[position] = number
        status = self._enqueue(stream, self.count, self.address, 0)
        if status == driver.NO_CONTEXT:
            driver.make_context(stream)
            status = self._enqueue(stream, self.count, self.address, 0)
        if status:
            driver.fail("synchronize streams by numbers in memory", status)
