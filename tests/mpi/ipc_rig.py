"""Staging areas in memory of the host that processes share, in place of the memory of a GPU.

Operations on host tensors have ended when they return, and so have those that synchronize streams: the host waits.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch

from torchmpi.backends import rank_order
from torchmpi.backends.ipc.staging_areas import CudaDevice
from torchmpi.backends.ipc.stream_memory import StreamOperations
from torchmpi.backends.ipc.sum_kernels import SumKernel
from torchmpi.shared_memory.kernels.records import OPERATION_FIELDS, OPERATION_VALUE
from torchmpi.shared_memory.segments import Segment, Ticket

_IS_WAIT = 4
_FUNCTIONS = {"copy": 4, "operate": 4, "launch": 11}
"""Of the CUDA driver, with the number of their arguments."""


class HostOperations(StreamOperations):
    """Operations of streams that have ended when they return."""

    __slots__ = ()

    def __init__(self, written: Sequence[int], awaited: Sequence[int]) -> None:
        self._enqueue = lambda stream, count, address, flags: operate(stream, count, address, flags)
        self._prepare(written, awaited)


def copy(target: int, source: int, num_bytes: int, stream: int) -> int:
    ctypes.memmove(target, source, num_bytes)
    return 0


def operate(stream: int, count: int, address: int, flags: int) -> int:
    """Run the operations at an address, as cuStreamBatchMemOp takes them."""
    words = (ctypes.c_int64 * (OPERATION_FIELDS * count)).from_address(address)
    for first in range(0, OPERATION_FIELDS * count, OPERATION_FIELDS):
        place, number = ctypes.c_int64.from_address(words[first + 1]), words[first + OPERATION_VALUE]
        if words[first] & 0xFFFFFFFF != _IS_WAIT:
            place.value = number
        while place.value < number:
            time.sleep(0)
    return 0


class HostDevice(CudaDevice):
    """The device that the backend ipc uses, with memory of the host."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"))
        self.segments: list[Segment] = []

    def _keep(self, segment: Segment, num_bytes: int) -> torch.Tensor:
        self.segments.append(segment)
        memory = (ctypes.c_uint8 * num_bytes).from_address(segment.address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return self._keep(Segment.create("ipc", num_bytes), num_bytes)

    def share(self, area: torch.Tensor) -> Any:
        return tuple(self.segments[0].ticket), area.numel()

    def open(self, handle: Any) -> torch.Tensor:
        ticket, num_bytes = handle
        return self._keep(Segment.open(Ticket(*ticket)), num_bytes)

    def decline(self, handle: Any) -> None:
        """Do nothing: nobody counts the users of a segment."""

    def page_lock(self, memory: torch.Tensor) -> None:
        """Do nothing: the host needs no page-locked memory."""

    def unlock(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def operations(self, written: Sequence[int], awaited: Sequence[int]) -> StreamOperations:
        return HostOperations(written, awaited)

    def sum_kernel(self, dtype: torch.dtype, op: str, size: int) -> SumKernel | None:
        """Return None: operations of torch combine."""
        return None

    def is_capturing(self) -> bool:
        """Return False: there are no graphs of host memory."""
        return False

    def current_stream(self) -> int:
        """Return 0: host tensors have no streams."""
        return 0

    def finish(self) -> None:
        """Do nothing: operations on host tensors have ended."""

    def collect(self) -> None:
        for segment in self.segments:
            segment.withdraw()
            segment.close()
        self.segments.clear()


class HostDriver(HostDevice):
    """The same with kernels that add, which machine code launches by functions in place of those of the CUDA driver."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device)
        self.kernels: list[tuple[torch.dtype, str, int]] = [(torch.float32, "", 0)]
        functions = {"copy": copy, "operate": operate, "launch": self.launch}
        self.called = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_int64,) * _FUNCTIONS[name])(function)
            for name, function in functions.items()
        }
        self.num_launches = 0

    def sum_kernel(self, dtype: torch.dtype, op: str, size: int) -> SumKernel | None:
        if not dtype.is_floating_point or dtype.itemsize == 1 or op not in ("sum", "avg"):
            return None
        self.kernels.append((dtype, op, size))
        return SumKernel(len(self.kernels) - 1, 8, 1024)

    def reduction(self, areas: Sequence[torch.Tensor], op: str) -> Any:
        combine = rank_order.combination(areas, op)
        return lambda out, stream: combine(out)

    def driver_functions(self) -> tuple[int, int, int]:
        copies, operates, launches = (ctypes.cast(self.called[name], ctypes.c_void_p).value or 0 for name in _FUNCTIONS)
        return copies, operates, launches

    def launch(self, kernel: int, *arguments: int) -> int:
        """Run a kernel as cuLaunchKernel would."""
        dtype, op, size = self.kernels[kernel]
        table, out, count = (ctypes.c_int64.from_address(arguments[-2] + 8 * index).value for index in range(3))
        numel = ctypes.c_int64.from_address(count).value
        addresses = [*(ctypes.c_int64 * size).from_address(table), ctypes.c_int64.from_address(out).value]
        *areas, result = (_at(address, numel, dtype) for address in addresses)
        rank_order.combine(areas, op, result)
        self.num_launches += 1
        return 0


def _at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    memory = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
