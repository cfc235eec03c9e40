"""Staging areas in memory of the host that processes share, in place of the memory of a GPU.

Operations on host tensors have ended when they return, and so have those that synchronize streams: the host waits.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch

from torchmpi.backends.ipc.staging_areas import CudaDevice, Enqueue
from torchmpi.shared_memory.segments import Segment, Ticket


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

    def operations(self, written: Sequence[int], awaited: Sequence[int]) -> Enqueue:
        published = [ctypes.c_int64.from_address(address) for address in written]
        numbers = [ctypes.c_int64.from_address(address) for address in awaited]

        def run(stream: int, number: int) -> None:
            for each in published:
                each.value = number
            while any(each.value < number for each in numbers):
                time.sleep(0)

        return run

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
