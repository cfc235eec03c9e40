"""Staging areas on GPUs and their events, which all ranks of a group open: CUDA IPC by PyTorch.

A group makes its areas in its first call and frees them with the group. An area is a tensor of torch's allocator, which
opens and counts the handles of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ...errors import BackendUnavailableError
from ...tensors import streams
from .chunk_plan import FILLED, NUM_EVENTS

_NUM_HALVES = 2
_DEVICE_FIELD = 6
"""Of the arguments of `rebuild_cuda_tensor`: the index of the device, which may have another number in this process."""
_REF_COUNTER_FIELDS = slice(11, 13)
"""Of the same: where torch counts the users of the memory."""
_TRIAL_BYTES = 4096
_of_failed_devices: list[object] = []
"""Memory of other processes that is never closed: torch ends the process if that fails."""


class CudaDevice:
    """The memory and events of a GPU; their handles can be pickled."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory; torch shares the block of its allocator in which the memory lies."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def share(self, area: torch.Tensor) -> Any:
        """Return a handle for one other process: torch counts the processes that have opened one."""
        return reduce_tensor(area)[1]

    def open(self, handle: Any) -> torch.Tensor:
        """Open memory of another process for the use of this rank's GPU, wherever the memory lies."""
        arguments = list(handle)
        arguments[_DEVICE_FIELD] = self.device.index
        area: torch.Tensor = rebuild_cuda_tensor(*arguments)
        return area

    def decline(self, handle: Any) -> None:
        """Give up a handle that is not opened: its owner could never free the memory otherwise."""
        torch.UntypedStorage._release_ipc_counter(*handle[_REF_COUNTER_FIELDS], device=self.device.index)

    def make_event(self) -> torch.cuda.Event:
        """Make an event for all processes of the host."""
        return torch.cuda.Event(interprocess=True)

    def share_event(self, event: torch.cuda.Event) -> Any:
        """Return the handle of an event."""
        return event.ipc_handle()

    def open_event(self, handle: Any) -> torch.cuda.Event:
        """Open an event of another process."""
        event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(self.device, handle)
        return event

    def current_stream(self) -> Any:
        """Return the current stream of the GPU."""
        return streams.current(self.device)

    def is_capturing(self) -> bool:
        """Return whether work is recorded in a CUDA graph instead of being enqueued."""
        return torch.cuda.is_current_stream_capturing()

    def finish(self) -> None:
        """Wait until the GPU has finished all enqueued work."""
        torch.cuda.synchronize(self.device)

    def collect(self) -> None:
        """Release memory that other processes have closed."""
        torch.cuda.ipc_collect()


class _Ticket(NamedTuple):
    """The handles with which the other ranks open the area, one for each rank, and the events of a rank."""

    areas: tuple[Any, ...]
    events: tuple[Any, ...]


class Staging:
    """The areas and events of all ranks of a group, opened by this rank."""

    def __init__(self, comm: Any, device: CudaDevice, half_bytes: int) -> None:
        """Make, open and test the areas of all ranks. Collective; if one rank fails, all raise and free everything."""
        self.comm, self.device, self.half_bytes = comm, device, half_bytes
        self._areas: dict[int, torch.Tensor] = {}
        self._events: dict[int, list[torch.cuda.Event]] = {}
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._unopened: dict[int, Any] = {}
        """The handles of other ranks' areas."""
        with torch.inference_mode(False):  # otherwise only calls in inference mode could write to the areas
            try:
                self._agree(*_tried(self._make))
                self._agree(*_tried(self._open))
                self._agree(*_tried(self._write))  # all events are recorded
                self._agree(*_tried(self._read))
            except BackendUnavailableError:  # on all ranks
                self._free()
                raise

    def areas(self, dtype: torch.dtype, half: int) -> list[torch.Tensor]:
        """Return a half of each rank's area as a flat tensor of a dtype."""
        if dtype not in self._views:
            ranges = [slice(half * self.half_bytes, (half + 1) * self.half_bytes) for half in range(_NUM_HALVES)]
            areas = [self._areas[rank] for rank in range(self.comm.size)]
            self._views[dtype] = [[area[place].view(dtype) for area in areas] for place in ranges]
        return self._views[dtype][half]

    def event(self, rank: int, event: int, half: int) -> torch.cuda.Event:
        """Return an event of a rank."""
        return self._events[rank][NUM_EVENTS * half + event]

    def close(self) -> None:
        """Free everything. Collective."""
        try:
            self.device.finish()
        except RuntimeError:  # the device has failed, in work that may have nothing to do with this group
            _of_failed_devices.append((dict(self._areas), dict(self._events)))
        self._free()

    def _make(self) -> _Ticket:
        device, rank = self.device, self.comm.rank
        area = self._areas[rank] = device.allocate(_NUM_HALVES * self.half_bytes)
        events = self._events[rank] = [device.make_event() for _ in range(_NUM_HALVES * NUM_EVENTS)]
        handles = tuple(None if other == rank else device.share(area) for other in range(self.comm.size))
        return _Ticket(handles, tuple(device.share_event(event) for event in events))

    def _open(self) -> None:
        for rank, (area, events) in list(self._unopened.items()):
            self._areas[rank] = self.device.open(area)
            del self._unopened[rank]
            self._events[rank] = [self.device.open_event(handle) for handle in events]

    def _write(self) -> None:
        own = self.comm.rank
        self._areas[own][:_TRIAL_BYTES] = _pattern(own, self._areas[own].device)
        self.event(own, FILLED, 0).record()

    def _read(self) -> None:
        """Compare the bytes of all ranks with the expected ones: by a kernel that reads them, and after a copy."""
        for rank, area in self._areas.items():
            self.event(rank, FILLED, 0).wait()
            expected, memory = _pattern(rank, area.device), area[:_TRIAL_BYTES]
            if bool((memory != expected).any()) or not torch.equal(torch.empty_like(expected).copy_(memory), expected):
                raise RuntimeError(f"the memory of rank {rank} of the group was opened, but other bytes were read")

    def _agree(self, ticket: _Ticket | None, problem: str) -> None:
        """Take the tickets of the other ranks; raise the same error on all ranks if one has a problem."""
        gathered = self.comm.allgather((ticket, problem))
        own = self.comm.rank
        self._unopened |= {
            rank: (ticket.areas[own], ticket.events)
            for rank, (ticket, _) in enumerate(gathered)
            if ticket is not None and rank != own
        }
        problems = [f"rank {rank} of the group: {problem}" for rank, (_, problem) in enumerate(gathered) if problem]
        if problems:
            raise BackendUnavailableError(
                f"GPU memory cannot be shared between the processes here ({'; '.join(problems)}). Pass another "
                "backend=, or take ipc out of TORCHMPI_GPU_BACKENDS. Ranks in several containers must share IPC and "
                "PID namespaces."
            )

    def _free(self) -> None:
        """Collective: memory may be freed only when no rank has it open."""
        own = self.comm.rank
        self._views.clear()
        self._events.clear()
        for rank in [rank for rank in self._areas if rank != own]:
            del self._areas[rank]
        for area, _ in self._unopened.values():
            self.device.decline(area)
        self._unopened.clear()
        self.comm.Barrier()
        self._areas.clear()
        with suppress(RuntimeError):  # the device has failed
            self.device.collect()


def _pattern(rank: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(_TRIAL_BYTES, device=device) * (2 * rank + 1) + rank).to(torch.uint8)


def _tried(action: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result and an empty string, or None and the error."""
    try:
        return action(), ""
    except (RuntimeError, OSError) as error:
        return None, str(error)


def trial(comm: Any, device: CudaDevice) -> str:
    """Return the reason why the ranks of a communicator cannot read each other's GPU memory, or ''. Collective."""
    try:
        staging = Staging(comm, device, _TRIAL_BYTES)
    except BackendUnavailableError as error:
        return str(error)
    staging.close()
    return ""
