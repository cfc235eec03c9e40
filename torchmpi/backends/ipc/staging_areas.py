"""Staging areas on GPUs and their events, which all ranks of a group open.

An area is an allocation of the driver. Torch's allocator returns parts of large blocks: an IPC handle would open the
whole block with other tensors in it, and with `expandable_segments` there is no such handle. A group makes its areas in
its first call and frees them with the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...errors import BackendUnavailableError, DeviceError, TorchMPIError
from . import cuda_reduction
from .chunk_plan import NUM_EVENTS
from .cuda_driver import Device

_NUM_HALVES = 2


class StagingDevice(Protocol):
    """A device for staging areas; :class:`torchmpi.backends.ipc.cuda_driver.Device` implements it."""

    # ruff: noqa: D102

    index: int

    def enter(self) -> None: ...
    def leave(self) -> None: ...
    def finish(self) -> None: ...
    def release(self) -> None: ...
    def allocate(self, num_bytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def share(self, address: int) -> bytes: ...
    def open(self, handle: bytes) -> int: ...
    def close(self, address: int) -> None: ...
    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None: ...
    def make_event(self) -> int: ...
    def share_event(self, event: int) -> bytes: ...
    def open_event(self, handle: bytes) -> int: ...
    def destroy_event(self, event: int) -> None: ...
    def record(self, event: int, stream: int) -> None: ...
    def wait(self, event: int, stream: int) -> None: ...
    def stream(self) -> int: ...
    def reducer(self, dtype: torch.dtype, op: str, num_sources: int) -> cuda_reduction.Reducer: ...


class CudaDevice(Device):
    """A GPU with torch's streams and the reduction kernels of this package."""

    def stream(self) -> int:
        """Return torch's current stream of this thread on this device."""
        if torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                "a collective by ipc cannot be captured in a CUDA graph: its processes synchronize. Call it outside "
                "of the capture, or pass backend='nccl'."
            )
        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def reducer(self, dtype: torch.dtype, op: str, num_sources: int) -> cuda_reduction.Reducer:
        """Return the kernel that combines `num_sources` areas."""
        return cuda_reduction.reducer(self, dtype, op, num_sources)


class _Ticket(NamedTuple):
    """The handles with which other ranks open the area and events of a rank."""

    area: bytes
    events: tuple[bytes, ...]


class Staging:
    """The areas and events of all ranks of a group, as one of them sees them."""

    def __init__(self, comm: Any, make_device: Callable[[], StagingDevice], half_bytes: int) -> None:
        """Make and open the areas of all ranks. Collective; if one rank fails, all ranks raise and free everything."""
        self.comm, self.half_bytes = comm, half_bytes
        self._areas: dict[int, int] = {}
        self._events: dict[int, list[int]] = {}
        device, problem = _tried(make_device)
        try:
            self._agree(None, problem)
            self.device: StagingDevice = device
            self._connect()
        except BackendUnavailableError:  # on all ranks
            if device is not None:
                device.release()
            raise

    def _connect(self) -> None:
        self.device.enter()
        try:
            tickets = self._agree(*_tried(self._make))
            self._agree(*_tried(lambda: self._open(tickets)))
        except BackendUnavailableError:
            self._free()
            raise
        finally:
            self.device.leave()

    def area(self, rank: int, half: int) -> int:
        """Return the address of a half of a rank's area."""
        return self._areas[rank] + half * self.half_bytes

    def event(self, rank: int, event: int, half: int) -> int:
        """Return an event of a rank."""
        return self._events[rank][NUM_EVENTS * half + event]

    def close(self) -> None:
        """Free everything. Collective."""
        self.device.enter()
        try:
            self.device.finish()
            self._free()
        finally:
            self.device.leave()
            self.device.release()

    def _make(self) -> _Ticket:
        device, rank = self.device, self.comm.rank
        self._areas[rank] = device.allocate(_NUM_HALVES * self.half_bytes)
        events = self._events[rank] = []
        for _ in range(_NUM_HALVES * NUM_EVENTS):
            events.append(device.make_event())
        return _Ticket(device.share(self._areas[rank]), tuple(device.share_event(event) for event in events))

    def _open(self, tickets: Sequence[_Ticket]) -> None:
        for rank, ticket in enumerate(tickets):
            if rank != self.comm.rank:
                self._areas[rank] = self.device.open(ticket.area)
                events = self._events[rank] = []
                for handle in ticket.events:
                    events.append(self.device.open_event(handle))

    def _agree(self, result: Any, problem: str) -> list[Any]:
        """Gather the results of all ranks, or raise the same error on all."""
        gathered = self.comm.allgather((result, problem))
        problems = [f"rank {rank} of the group: {problem}" for rank, (_, problem) in enumerate(gathered) if problem]
        if problems:
            raise BackendUnavailableError(
                f"GPU memory cannot be shared between the processes here ({'; '.join(problems)}). Pass another "
                "backend=, or set staging_bytes to 0. Ranks in several containers must share IPC and PID namespaces."
            )
        return [result for result, _ in gathered]

    def _free(self) -> None:
        """Collective: memory may be freed only when no rank has it open."""
        own = self.comm.rank
        for rank, events in self._events.items():
            for event in events:
                self.device.destroy_event(event)
            if rank != own:
                self.device.close(self._areas[rank])
        self.comm.Barrier()
        if own in self._areas:
            self.device.free(self._areas[own])
        self._areas, self._events = {}, {}


def _tried(action: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result and an empty string, or None and the error."""
    try:
        return action(), ""
    except TorchMPIError as error:
        return None, str(error)


def trial(comm: Any, make_device: Callable[[], StagingDevice]) -> str:
    """Return why the ranks of a communicator cannot share GPU memory and events, or ''. Collective."""
    try:
        staging = Staging(comm, make_device, 1 << 20)
    except BackendUnavailableError as error:
        return str(error)
    staging.close()
    return ""
