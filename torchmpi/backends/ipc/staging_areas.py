"""Staging areas on GPUs, and the events around them, opened by all ranks of a group.

An area is an allocation of its own, by the driver. Torch's allocator could not give one: what it hands out are pieces
of large blocks, an IPC handle opens the whole block, with everybody's tensors in it, and with `expandable_segments`
there is no such handle. What is made here is made once for a group, with its first call, and goes with it.
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
    """What is asked of a device; :class:`torchmpi.backends.ipc.cuda_driver.Device` is one."""

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
    """A GPU with the streams of torch and the kernels of this package."""

    def stream(self) -> int:
        """The stream that is torch's current one on this device, in this thread."""
        if torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                "a collective by ipc cannot be captured in a CUDA graph: the hosts meet in it. Call it outside of the "
                "capture, or pass backend='nccl'."
            )
        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def reducer(self, dtype: torch.dtype, op: str, num_sources: int) -> cuda_reduction.Reducer:
        """The kernel that combines so many areas."""
        return cuda_reduction.reducer(self, dtype, op, num_sources)


class _Ticket(NamedTuple):
    """What the others need."""

    area: bytes
    events: tuple[bytes, ...]


class Staging:
    """The areas and events of all ranks of a group, as one of them sees them."""

    def __init__(self, comm: Any, make_device: Callable[[], StagingDevice], half_bytes: int) -> None:
        """Collective. A rank that cannot have its part makes it an error on all, which leaves nothing behind."""
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
            self._give_back()
            raise
        finally:
            self.device.leave()

    def area(self, rank: int, half: int) -> int:
        """Where a half of a rank's area begins."""
        return self._areas[rank] + half * self.half_bytes

    def event(self, rank: int, event: int, half: int) -> int:
        """An event of a rank."""
        return self._events[rank][NUM_EVENTS * half + event]

    def close(self) -> None:
        """Give everything back. Collective."""
        self.device.enter()
        try:
            self.device.finish()
            self._give_back()
        finally:
            self.device.leave()
            self.device.release()

    def _make(self) -> _Ticket:
        """The own area and events."""
        device, rank = self.device, self.comm.rank
        self._areas[rank] = device.allocate(_NUM_HALVES * self.half_bytes)
        events = self._events[rank] = []
        for _ in range(_NUM_HALVES * NUM_EVENTS):
            events.append(device.make_event())
        return _Ticket(device.share(self._areas[rank]), tuple(device.share_event(event) for event in events))

    def _open(self, tickets: Sequence[_Ticket]) -> None:
        """Everybody else's."""
        for rank, ticket in enumerate(tickets):
            if rank != self.comm.rank:
                self._areas[rank] = self.device.open(ticket.area)
                events = self._events[rank] = []
                for handle in ticket.events:
                    events.append(self.device.open_event(handle))

    def _agree(self, result: Any, problem: str) -> list[Any]:
        """What all ranks have come to, or the same error on all."""
        everybody = self.comm.allgather((result, problem))
        problems = [f"rank {rank} of the group: {problem}" for rank, (_, problem) in enumerate(everybody) if problem]
        if problems:
            raise BackendUnavailableError(
                f"GPU memory cannot be shared between the processes here ({'; '.join(problems)}). Pass another "
                "backend=, or set staging_bytes to 0. Ranks in several containers must share IPC and PID namespaces."
            )
        return [result for result, _ in everybody]

    def _give_back(self) -> None:
        """Collective: memory may go only when nobody has it open any more."""
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
    """What came of it, or what was wrong."""
    try:
        return action(), ""
    except TorchMPIError as error:
        return None, str(error)


def trial(comm: Any, make_device: Callable[[], StagingDevice]) -> str:
    """Why the ranks of a communicator cannot share memory and events of their GPUs; '' if they can. Collective."""
    try:
        staging = Staging(comm, make_device, 1 << 20)
    except BackendUnavailableError as error:
        return str(error)
    staging.close()
    return ""
