"""Staging areas on GPUs, which all ranks of a group open by CUDA IPC, and the numbers that synchronize their streams.

A group makes its areas in its first call and frees them with the group. An area is a tensor of torch's allocator, which
opens and counts the handles of the memory. The numbers lie in page-locked host memory that the ranks share: for each
rank a row with one number of each other rank, so that a rank can end the waits of its own streams from the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ...communicators.group import share
from ...errors import BackendUnavailableError
from ...shared_memory.segments import Segment
from ...tensors import streams
from ..rank_order import combination
from . import area_kernels, driver, stream_memory

Reduction = Callable[[torch.Tensor, int], None]
"""``reduction(out, stream)``: enqueues the combination of some areas into a flat tensor."""

_NUM_HALVES = 2
_DEVICE_FIELD = 6
"""Of the arguments of `rebuild_cuda_tensor`: the index of the device, which may have another number in this process."""
_REF_COUNTER_FIELDS = slice(11, 13)
"""Of the same: where torch counts the users of the memory."""
_TRIAL_BYTES = 4096
_TRIAL_NUMBER = 1
_PAGE_BYTES = 4096
_NUMBER_BYTES, _LINE_BYTES = 8, 128  # a row has lines of its own
_RELEASE_SECONDS = 0.01
_LAST_NUMBER = 1 << 62
"""Ends all waits."""
_of_failed_devices: list[object] = []
"""Memory of other processes that is never closed: torch ends the process if that fails."""


class CudaDevice:
    """The memory and streams of a GPU; handles of its memory can be pickled."""

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

    def page_lock(self, memory: torch.Tensor) -> None:
        """Page-lock host memory, so that streams can write and read it."""
        if not streams.pin(memory):
            raise RuntimeError(f"cudaHostRegister refuses to page-lock {memory.nbytes} bytes that the ranks share")

    def unlock(self, memory: torch.Tensor) -> None:
        """Undo `page_lock`."""
        streams.unpin(memory)

    def operations(self, written: Sequence[int], awaited: Sequence[int]) -> stream_memory.StreamOperations:
        """Return a function that enqueues writes of a number to some addresses, and waits for it at others."""
        return stream_memory.StreamOperations(written, awaited)

    def kernels(self, dtype: torch.dtype, op: str, size: int) -> area_kernels.AreaKernels | None:
        """Return the kernels for the areas of `size` ranks; None if there are none."""
        return area_kernels.area_kernels(dtype, op, size, self.device.index)

    def reduction(self, areas: Sequence[torch.Tensor], op: str) -> Reduction:
        """Return a function that enqueues the combination of some areas in their order."""
        kernels = self.kernels(areas[0].dtype, op, len(areas))
        if kernels is not None:
            return area_kernels.SumOfAreas(kernels, areas)
        combine = combination(areas, op)
        return lambda out, stream: combine(out)

    def driver_functions(self) -> tuple[int, int]:
        """Return the addresses of the functions that enqueue operations of streams and launch kernels."""
        return driver.address(*driver.STREAM_OPERATIONS), driver.address(*driver.LAUNCH)

    def is_capturing(self) -> bool:
        """Return whether the current stream is captured in a CUDA graph."""
        return streams.is_capturing()

    def current_stream(self) -> int:
        """Return the address of the current stream of the GPU."""
        return streams.address_of_current(self.device.index)

    def finish(self) -> None:
        """Wait until the GPU has finished all enqueued work."""
        torch.cuda.synchronize(self.device)

    def collect(self) -> None:
        """Release memory that other processes have closed."""
        torch.cuda.ipc_collect()


class Staging:
    """The areas and numbers of all ranks of a group, opened by this rank."""

    def __init__(self, comm: Any, device: CudaDevice, half_bytes: int) -> None:
        """Make, open and test the areas of all ranks. Collective; if one rank fails, all raise and free everything."""
        self.comm, self.device, self.half_bytes = comm, device, half_bytes
        self._areas: dict[int, torch.Tensor] = {}
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._unopened: dict[int, Any] = {}
        """The handles of other ranks' areas."""
        self._row_bytes = _rounded(comm.size * _NUMBER_BYTES, _LINE_BYTES)
        self._segment: Segment | None = share(comm, "stages", _rounded(comm.size * self._row_bytes, _PAGE_BYTES))
        self._closing = threading.Lock()
        self.is_released = False
        """Whether the waits for other ranks were ended, so that results of calls are undefined."""
        self.num_ended_blocks: torch.Tensor
        """Of the kernel that fills the area of this rank; 0 between kernels."""
        self._numbers: torch.Tensor | None = None
        """The memory of the segment, when it is page-locked."""
        with torch.inference_mode(False):  # otherwise only calls in inference mode could write to the areas
            try:
                self._agree(*_tried(self._make))
                self._agree(*_tried(self._open))
                self._agree(*_tried(self._write))
                self._agree(*_tried(self._read))
            except BackendUnavailableError:  # on all ranks
                self._free()
                raise
            except BaseException:
                self._free_numbers()
                raise

    def areas(self, dtype: torch.dtype, half: int) -> list[torch.Tensor]:
        """Return a half of each rank's area as a flat tensor of a dtype."""
        if dtype not in self._views:
            ranges = [slice(half * self.half_bytes, (half + 1) * self.half_bytes) for half in range(_NUM_HALVES)]
            areas = [self._areas[rank] for rank in range(self.comm.size)]
            self._views[dtype] = [[area[place].view(dtype) for area in areas] for place in ranges]
        return self._views[dtype][half]

    def operations(self, *, publishes: bool = False, awaits: Sequence[int] = ()) -> stream_memory.StreamOperations:
        """Return a function that enqueues the publication of a number, and waits for that number of other ranks."""
        base, own = self._opened_segment.address, self.comm.rank
        written = self.addresses_of_numbers() if publishes else []
        return self.device.operations(written, [base + self._offset(own, writer) for writer in awaits])

    def addresses_of_numbers(self) -> list[int]:
        """Return the addresses to which this rank publishes its numbers: one for each other rank."""
        base, own = self._opened_segment.address, self.comm.rank
        return [base + self._offset(reader, own) for reader in self._others]

    def release_waits(self) -> None:
        """End the waits of this rank for others, from any thread. The results of these calls are undefined."""
        with self._closing:
            self.is_released = True
            for writer in self._others if self._segment is not None else ():
                self._set(self.comm.rank, writer, _LAST_NUMBER)

    def close(self) -> None:
        """Free everything. Collective."""
        try:
            self._finish()
        except RuntimeError:  # the device has failed, in work that may have nothing to do with this group
            _of_failed_devices.append(dict(self._areas))
        self._free()

    def _finish(self) -> None:
        """Wait until the device has finished; if the waits were released, release those that follow, too."""
        if not self.is_released:
            self.device.finish()
            return
        errors: list[str] = []
        # A stream of another rank may still publish a smaller number.
        thread = threading.Thread(target=lambda: errors.append(_tried(self.device.finish)[1]), daemon=True)
        thread.start()
        while thread.is_alive():
            self.release_waits()
            thread.join(_RELEASE_SECONDS)
        if errors != [""]:
            raise RuntimeError(*errors)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.comm.size) if rank != self.comm.rank]

    @property
    def _opened_segment(self) -> Segment:
        if self._segment is None:
            raise OSError("the system provides no shared memory, or the ranks cannot open that of others")
        return self._segment

    def _offset(self, reader: int, writer: int) -> int:
        """Return the position of a writer's number in the row of a reader."""
        return reader * self._row_bytes + writer * _NUMBER_BYTES

    def _set(self, reader: int, writer: int, number: int) -> None:
        memoryview(self._opened_segment.memory).cast("q")[self._offset(reader, writer) // _NUMBER_BYTES] = number

    def _get(self, reader: int, writer: int) -> int:
        return memoryview(self._opened_segment.memory).cast("q")[self._offset(reader, writer) // _NUMBER_BYTES]

    def _make(self) -> tuple[Any, ...]:
        """Make the area of this rank; return the handles with which the other ranks open it, one for each rank."""
        device, rank = self.device, self.comm.rank
        numbers = torch.frombuffer(self._opened_segment.memory, dtype=torch.uint8)
        device.page_lock(numbers)
        self._numbers = numbers
        area = self._areas[rank] = device.allocate(_NUM_HALVES * self.half_bytes)
        self.num_ended_blocks = torch.zeros(1, dtype=torch.int32, device=device.device)
        return tuple(None if other == rank else device.share(area) for other in range(self.comm.size))

    def _open(self) -> None:
        for rank, area in list(self._unopened.items()):
            self._areas[rank] = self.device.open(area)
            del self._unopened[rank]

    def _write(self) -> None:
        own = self.comm.rank
        self._areas[own][:_TRIAL_BYTES] = _pattern(own, self._areas[own].device)
        self.operations(publishes=True)(self.device.current_stream(), _TRIAL_NUMBER)
        self.device.finish()

    def _read(self) -> None:
        """Compare the numbers and bytes of all ranks with the expected ones: by a kernel, and after a copy."""
        if any(self._get(self.comm.rank, writer) != _TRIAL_NUMBER for writer in self._others):
            raise RuntimeError("a number that a stream has written to host memory was not read there")
        self.operations(awaits=self._others)(self.device.current_stream(), _TRIAL_NUMBER)
        for rank, area in self._areas.items():
            expected, memory = _pattern(rank, area.device), area[:_TRIAL_BYTES]
            if bool((memory != expected).any()) or not torch.equal(torch.empty_like(expected).copy_(memory), expected):
                raise RuntimeError(f"the memory of rank {rank} of the group was opened, but other bytes were read")

    def _agree(self, handles: tuple[Any, ...] | None, problem: str) -> None:
        """Take the handles of the other ranks; raise the same error on all ranks if one has a problem."""
        gathered = self.comm.allgather((handles, problem))
        own = self.comm.rank
        self._unopened |= {
            rank: handles[own] for rank, (handles, _) in enumerate(gathered) if handles is not None and rank != own
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
        for rank in [rank for rank in self._areas if rank != own]:
            del self._areas[rank]
        for area in self._unopened.values():
            self.device.decline(area)
        self._unopened.clear()
        try:
            self.comm.Barrier()
        finally:
            self._areas.clear()
            self._free_numbers()
        with suppress(RuntimeError):  # the device has failed
            self.device.collect()

    def _free_numbers(self) -> None:
        if self._numbers is not None:
            with suppress(RuntimeError):
                self.device.unlock(self._numbers)
            self._numbers = None
        with self._closing:
            if self._segment is not None:
                self._segment.close()
                self._segment = None


def _rounded(num_bytes: int, unit: int) -> int:
    """Return a size as a multiple of a unit.

    >>> _rounded(5, 4)
    8
    """
    return -(-num_bytes // unit) * unit


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
