"""The backend for GPUs of one host: collectives through staging areas that all ranks can read by CUDA IPC.

:mod:`torchmpi.backends.ipc.chunk_plan` plans the steps; this module enqueues them on torch's current stream and does
not wait for the device. The processes synchronize in shared memory (:mod:`torchmpi.backends.ipc.stage_sync`), since an
event of another process can be awaited only after it has been recorded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ...communicators.group import Group
from ...config import Config
from ...errors import BackendUnavailableError, CudaError, DeviceError
from ...tensors import partition
from ..base import Operation
from ..gpus import Devices
from ..mpi_messages import destination_for, rows_of
from . import chunk_plan
from .chunk_plan import ARRIVED, EMPTIED, SENT_LENGTH, Await, Fill, Publish, Record, ReduceAreas, Room, Step, Take
from .cuda_reduction import Reducer
from .stage_sync import StageSync
from .staging_areas import CudaDevice, Staging, StagingDevice

COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
_REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
_ONE_SHOT_BYTES = 256 << 10  # not measured yet


class IpcBackend:
    """Collectives of ranks that share a GPU, or whose GPUs can access each other."""

    name = "ipc"
    announces = False
    enqueues = True

    def __init__(self, config: Config, devices: Devices, problem: str = "") -> None:
        """Create the backend; `problem`: why the processes of this job cannot share GPU memory; '' if they can."""
        self.config, self.devices, self.problem = config, devices, problem
        self.make_device: Callable[[Any], StagingDevice] = CudaDevice
        self.refused: dict[int, str] = {}
        """Reasons by the keys of groups whose staging areas could not be made; the same on all ranks of a group."""

    def takes(self, device_type: str) -> bool:
        """Accept GPU memory."""
        return device_type == "cuda"

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Accept reductions, broadcast and allgather among ranks of one host whose GPUs can access each other."""
        if device_type != "cuda":
            return "it is for CUDA tensors"
        if collective not in COLLECTIVES:
            return f"it has no {collective}"
        if not torch.cuda.is_available():
            return "this torch or this host has no CUDA"
        if not self.config.staging_bytes:
            return "it is switched off (staging_bytes=0)"
        if self.problem:
            return self.problem
        if collective in _REDUCTIONS and importlib.util.find_spec("numba_cuda") is None:
            return "its kernels need numba-cuda, which is not installed (pip install torchmpi[cuda])"
        return None if group is None else self._why_not_among(group)

    def _why_not_among(self, group: Group) -> str | None:
        devices, ranks = self.devices, group.world_ranks
        if len({devices.hosts[rank] for rank in ranks}) > 1:
            return "its ranks are on several hosts"
        for rank in ranks:
            if not devices.uuids[rank]:
                return f"rank {rank} has no GPU"
        for index, rank in enumerate(ranks):
            for other in ranks[:index]:
                if not (devices.reaches(rank, other) and devices.reaches(other, rank)):
                    return f"the GPUs of ranks {other} and {rank} cannot reach each other"
        if group.status_board is None:
            return "its ranks have no shared memory to synchronize in (slot_bytes=0, or the system gives none)"
        return self.refused.get(group.key)

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a collective on a group."""
        with group.binding:
            staged = next((item for item in group.attachments if isinstance(item, StagedGroup)), None)
            if staged is None:
                staged = StagedGroup(self, group)
                group.attachments.append(staged)
        operation: Operation = getattr(IpcCollectives(staged, dtype, op), collective)

        def run(source: Any, destination: Any, root: int) -> Any:
            try:
                staged.begin(source)
                return operation(source, destination, root)
            except BaseException:
                staged.abort()
                raise

        return run


class StagedGroup:
    """The staging areas of a group, made by its first call, and the execution of plans on them."""

    def __init__(self, backend: IpcBackend, group: Group) -> None:
        self.backend, self.group = backend, group
        self.rank, self.size = group.rank, group.size
        self.others = chunk_plan.others(group.rank, group.size)
        self.half_bytes = chunk_plan.half_bytes(backend.config.staging_bytes, group.size)
        self.sync = StageSync(group)
        self.staging: Staging | None = None
        self._reducers: dict[tuple[torch.dtype, str], Reducer] = {}
        self._last_use = [0, 0]
        """The stage that a rank publishes when it has read the last chunk of a half."""
        uuids = {backend.devices.uuids[rank] for rank in group.world_ranks}
        self.is_one_device = len(uuids) == 1

    def begin(self, tensor: torch.Tensor) -> None:
        """Enter a call. Collective if the call is the first."""
        device = self._prepared(tensor.device).device
        if tensor.device.index != device.index:
            raise DeviceError(
                f"{self.group.where}: the tensor is on {tensor.device}, but communicator {self.group.name} has its "
                f"staging on device {device.index}. Keep the tensors of a communicator on one GPU."
            )
        self.sync.begin(ARRIVED)

    def abort(self) -> None:
        """Abort the call on all ranks; later calls on any stream come after the work that was enqueued."""
        self.sync.abort()
        if self.staging is not None:
            with suppress(CudaError):  # the device may have failed
                self._record_emptied(self.staging)

    def _record_emptied(self, staging: Staging) -> None:
        staging.device.enter()
        try:
            stream = staging.device.stream()
            for half in (0, 1):
                staging.device.record(staging.event(self.rank, EMPTIED, half), stream)
        finally:
            staging.device.leave()

    def expire(self, seq: int) -> None:
        """End the waiting of this call for other processes."""
        self.sync.expired_seq = seq

    def reducer(self, dtype: torch.dtype, op: str) -> Reducer:
        """Return the kernel that combines the areas of all ranks."""
        found = self._reducers.get((dtype, op))
        if found is None:
            assert self.staging is not None
            device = self.staging.device
            device.enter()
            try:
                found = self._reducers[dtype, op] = device.reducer(dtype, op, self.size)
            finally:
                device.leave()
        return found

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Enqueue the copy of this rank's own data to its result."""
        assert self.staging is not None
        device = self.staging.device
        device.enter()
        try:
            device.copy(target, source, num_bytes, device.stream())
        finally:
            device.leave()

    def lengths(self, own: int) -> list[int]:
        """Gather one number of each rank."""
        sync = self.sync
        # Ranks that have entered this call have read the numbers of the one before.
        sync.wait_for(self.others, sync.number(ARRIVED))
        sync.set_length(own)
        sync.publish(SENT_LENGTH)
        sync.wait_for(self.others, sync.number(SENT_LENGTH))
        return sync.lengths()

    def run(self, chunks: Iterable[list[Step]], source: int, out: int, reduce: Reducer | None = None) -> None:
        """Enqueue a plan that reads from one address and writes to another."""
        staging = self.staging
        assert staging is not None
        staging.device.enter()
        try:
            stream = staging.device.stream()
            for index, steps in enumerate(chunks):
                half = (self.sync.seq + index) & 1
                chunk_run = _ChunkRun(self, staging, index, half, stream)
                for step in steps:
                    chunk_run.do(step, source, out, reduce)
                self._last_use[half] = self.sync.number(chunk_plan.stage(index, EMPTIED))
        finally:
            staging.device.leave()

    def wait_for_room(self, half: int) -> None:
        """Return when the other ranks have enqueued everything that reads the last chunk of a half."""
        self.sync.wait_for(self.others, self._last_use[half])

    def close(self) -> None:
        """Free the staging areas. Collective."""
        if self.staging is not None:
            self.staging.close()
            self.staging = None
            self._reducers.clear()

    def _prepared(self, device: torch.device) -> Staging:
        if self.staging is None:
            group, backend = self.group, self.backend
            try:
                self.staging = Staging(group.comm, partial(backend.make_device, device.index), self.half_bytes)
            except BackendUnavailableError as error:
                backend.refused[group.key] = str(error)
                group.plans.clear()  # the next call selects another backend, on all ranks
                raise
        return self.staging


class _ChunkRun:
    """Runs the steps of one chunk on one half of the areas."""

    __slots__ = ("_device", "_group", "_half", "_index", "_staging", "_stream")

    def __init__(self, group: StagedGroup, staging: Staging, index: int, half: int, stream: int) -> None:
        self._group, self._staging, self._device = group, staging, staging.device
        self._index, self._half, self._stream = index, half, stream

    def do(self, step: Step, source: int, out: int, reduce: Reducer | None) -> None:
        """Enqueue a step."""
        staging, device, stream, half = self._staging, self._device, self._stream, self._half
        rank = self._group.rank
        if isinstance(step, Record):
            device.record(staging.event(rank, step.event, half), stream)
            self._publish(step.event)
        elif isinstance(step, Publish):
            self._publish(step.event)
        elif isinstance(step, Await):
            sync = self._group.sync
            sync.wait_for(step.ranks, sync.number(chunk_plan.stage(self._index, step.event)))
            for other in step.ranks:
                device.wait(staging.event(other, step.event, half), stream)
        elif isinstance(step, Fill):
            device.copy(staging.area(rank, half) + step.area, source + step.source, step.num_bytes, stream)
        elif isinstance(step, Take):
            device.copy(out + step.out, staging.area(step.rank, half) + step.area, step.num_bytes, stream)
        elif isinstance(step, ReduceAreas):
            assert reduce is not None
            areas = [staging.area(other, half) + step.area for other in range(self._group.size)]
            reduce(areas, areas[rank] if step.out is None else out + step.out, step.num_bytes, stream)
        else:
            assert isinstance(step, Room)
            self._make_room()

    def _publish(self, event: int) -> None:
        self._group.sync.publish(chunk_plan.stage(self._index, event))

    def _make_room(self) -> None:
        self._group.wait_for_room(self._half)
        # This rank's own event too: the chunk before may have used another stream.
        for rank in range(self._group.size):
            self._device.wait(self._staging.event(rank, EMPTIED, self._half), self._stream)


class IpcCollectives:
    """The collectives of one dtype and operation on a group."""

    def __init__(self, staged: StagedGroup, dtype: torch.dtype | None, op: str | None) -> None:
        self.staged, self.dtype, self.op = staged, dtype, op
        self.rank, self.size, self.half = staged.rank, staged.size, staged.half_bytes

    def allreduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Reduce in place on all ranks."""
        shots = 1 if self.size <= 2 or buffer.nbytes <= _ONE_SHOT_BYTES else 2
        plan = chunk_plan.allreduce(self.rank, self.size, buffer.nbytes, self.half, shots=shots)
        return self._in_place(plan, buffer, self._kernel())

    def reduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Reduce in place on the root; the buffers of other ranks are unchanged."""
        # On one GPU all ranks read at the same speed, and one shot reads and writes the least.
        shots = 1 if self.size <= 2 or self.staged.is_one_device or buffer.nbytes <= _ONE_SHOT_BYTES else 2
        plan = chunk_plan.reduce(self.rank, self.size, buffer.nbytes, self.half, root=root, shots=shots)
        return self._in_place(plan, buffer, self._kernel())

    def broadcast(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Copy the root's values to all ranks, in place."""
        return self._in_place(chunk_plan.broadcast(self.rank, self.size, buffer.nbytes, self.half, root=root), buffer)

    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Concatenate the rows of all ranks on all ranks."""
        num_rows, row_numel = rows_of(source)
        row_bytes = row_numel * source.element_size()
        rows = self.staged.lengths(num_rows)
        destination = destination_for(source, sum(rows), destination)
        lengths = [count * row_bytes for count in rows]
        if source.nbytes:
            begin = sum(lengths[: self.rank])
            self.staged.copy(source.data_ptr(), destination.data_ptr() + begin, source.nbytes)
        plan = chunk_plan.allgather(self.rank, self.size, lengths, self.half)
        self.staged.run(plan, source.data_ptr(), destination.data_ptr())
        return destination

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Reduce the rows of `source`, split dim 0 evenly, and return this rank's rows of the result."""
        num_rows, row_numel = rows_of(source)
        row_bytes = row_numel * source.element_size()
        rows = partition.rows(num_rows, self.size)
        destination = destination_for(source, rows[self.rank][1], destination)
        ranges = [(first * row_bytes, count * row_bytes) for first, count in rows]
        plan = chunk_plan.reduce_scatter(self.rank, self.size, ranges, self.half)
        self.staged.run(plan, source.data_ptr(), destination.data_ptr(), self._kernel())
        return destination

    def _in_place(
        self, plan: Iterable[list[Step]], buffer: torch.Tensor, reduce: Reducer | None = None
    ) -> torch.Tensor:
        self.staged.run(plan, buffer.data_ptr(), buffer.data_ptr(), reduce)
        return buffer

    def _kernel(self) -> Reducer:
        assert self.dtype is not None and self.op is not None
        return self.staged.reducer(self.dtype, self.op)
