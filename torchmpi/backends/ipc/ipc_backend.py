"""The backend for GPUs of one host: collectives through staging areas that all ranks can read, by CUDA IPC.

What is done is planned in :mod:`torchmpi.backends.ipc.chunk_plan` and enqueued here, on torch's current stream:
nothing waits
for the device. The hosts meet (:mod:`torchmpi.backends.ipc.stage_sync`), since an event of another process can only be
waited for once it has been recorded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ...config import Config
from ...errors import BackendUnavailableError, CudaError, DeviceError
from ...tensors import partition
from ..base import Operation
from ..mpi_messages import destination_for, rows_of
from . import chunk_plan
from .chunk_plan import ARRIVED, BROUGHT, EMPTIED, Await, Fill, Publish, Record, ReduceAreas, Room, Take
from .stage_sync import StageSync
from .staging_areas import CudaDevice, Staging, StagingDevice

COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
_REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
_ONE_SHOT_BYTES = 256 << 10  # not measured yet


class IpcBackend:
    """Collectives of ranks whose GPUs are one, or reach each other."""

    name = "ipc"
    announces = False
    enqueues = True

    def __init__(self, config: Config, devices: Any, problem: str = "") -> None:
        """`devices` tells of each world rank the GPU and the host: `uuids` ('' without one), `hosts`, `reaches(a, b)`.

        `problem` is why processes of this job cannot share memory of GPUs, if that has been tried.
        """
        self.config, self.devices, self.problem = config, devices, problem
        self.make_device: Callable[[Any], StagingDevice] = CudaDevice
        self.refused: dict[int, str] = {}
        """Groups that could not have their staging, by their keys, and why: the same on all their ranks."""

    def takes(self, device_type: str) -> bool:
        """Memory of the GPU, as it is."""
        return device_type == "cuda"

    def why_not(self, collective: str, device_type: str, group: Any = None) -> str | None:
        """It reduces, broadcasts and gathers, among ranks of one host whose GPUs reach each other."""
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

    def _why_not_among(self, group: Any) -> str | None:
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
            return "its ranks have no shared memory to meet in (slot_bytes=0, or the system gives none)"
        return self.refused.get(group.key)

    def bind(self, group: Any, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a verb on a group."""
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
    """The staging of a group, made by its first call, and the execution of plans over it."""

    def __init__(self, backend: IpcBackend, group: Any) -> None:
        self.backend, self.group = backend, group
        self.rank, self.size = group.rank, group.size
        self.others = chunk_plan.others(group.rank, group.size)
        self.half_bytes = chunk_plan.half_bytes(backend.config.staging_bytes, group.size)
        self.sync = StageSync(group)
        self.staging: Staging | None = None
        self._reducers: dict[tuple[torch.dtype, str], Any] = {}
        self._last_use = [0, 0]
        """What the ranks publish that have done with the chunk that was in a half last."""
        uuids = {backend.devices.uuids[rank] for rank in group.world_ranks}
        self.is_one_device = len(uuids) == 1

    def begin(self, tensor: torch.Tensor) -> None:
        """Be in a call. Collective if it is the first."""
        device = self._prepared(tensor.device).device
        if tensor.device.index != device.index:
            raise DeviceError(
                f"{self.group.where}: the tensor is on {tensor.device}, but communicator {self.group.name} has its "
                f"staging on device {device.index}. Keep the tensors of a communicator on one GPU."
            )
        self.sync.begin(ARRIVED)

    def abort(self) -> None:
        """After an error: let the others know, and let later calls on any stream come after what was enqueued."""
        self.sync.abort()
        if self.staging is not None:
            with suppress(CudaError):  # the device may be what has failed
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
        """End the wait of this call, if it is one for other hosts."""
        self.sync.late = seq

    def reducer(self, dtype: torch.dtype, op: str) -> Any:
        """The kernel for the areas of all ranks."""
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
        """What this rank brings to its own result."""
        assert self.staging is not None
        device = self.staging.device
        device.enter()
        try:
            device.copy(target, source, num_bytes, device.stream())
        finally:
            device.leave()

    def lengths(self, own: int) -> list[int]:
        """A number of each rank."""
        sync = self.sync
        # All have read the numbers of an earlier call when they are in this one.
        sync.wait_for(self.others, sync.number(ARRIVED))
        sync.bring(own)
        sync.publish(BROUGHT)
        sync.wait_for(self.others, sync.number(BROUGHT))
        return sync.brought()

    def run(self, chunks: Iterable[list[Any]], source: int, out: int, reduce: Any = None) -> None:
        """Enqueue a plan between two addresses."""
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
        """Return when the hosts of the others have enqueued all that reads what was in a half."""
        self.sync.wait_for(self.others, self._last_use[half])

    def close(self) -> None:
        """Give the staging back. Collective."""
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
                group.plans.clear()  # from the next call on something else is chosen, on all ranks
                raise
        return self.staging


class _ChunkRun:
    """A chunk on its way through a half."""

    __slots__ = ("_device", "_group", "_half", "_index", "_staging", "_stream")

    def __init__(self, group: StagedGroup, staging: Staging, index: int, half: int, stream: int) -> None:
        self._group, self._staging, self._device = group, staging, staging.device
        self._index, self._half, self._stream = index, half, stream

    def do(self, step: Any, source: int, out: int, reduce: Any) -> None:
        """Enqueue a step."""
        staging, device, stream, half = self._staging, self._device, self._stream, self._half
        rank = self._group.rank
        kind = type(step)
        if kind is Record:
            device.record(staging.event(rank, step.event, half), stream)
            self._publish(step.event)
        elif kind is Publish:
            self._publish(step.event)
        elif kind is Await:
            sync = self._group.sync
            sync.wait_for(step.ranks, sync.number(chunk_plan.stage(self._index, step.event)))
            for other in step.ranks:
                device.wait(staging.event(other, step.event, half), stream)
        elif kind is Fill:
            device.copy(staging.area(rank, half) + step.area, source + step.source, step.num_bytes, stream)
        elif kind is Take:
            device.copy(out + step.out, staging.area(step.rank, half) + step.area, step.num_bytes, stream)
        elif kind is ReduceAreas:
            areas = [staging.area(other, half) + step.area for other in range(self._group.size)]
            reduce(areas, areas[rank] if step.out is None else out + step.out, step.num_bytes, stream)
        else:
            assert kind is Room
            self._make_room()

    def _publish(self, event: int) -> None:
        self._group.sync.publish(chunk_plan.stage(self._index, event))

    def _make_room(self) -> None:
        self._group.wait_for_room(self._half)
        # The own one too: the chunk before may have gone through another stream.
        for rank in range(self._group.size):
            self._device.wait(self._staging.event(rank, EMPTIED, self._half), self._stream)


class IpcCollectives:
    """The verbs, for one dtype and operation on a group."""

    def __init__(self, staged: StagedGroup, dtype: torch.dtype | None, op: str | None) -> None:
        self.staged, self.dtype, self.op = staged, dtype, op
        self.rank, self.size, self.half = staged.rank, staged.size, staged.half_bytes

    def allreduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the result, in place."""
        shots = 1 if self.size <= 2 or buffer.nbytes <= _ONE_SHOT_BYTES else 2
        plan = chunk_plan.allreduce(self.rank, self.size, buffer.nbytes, self.half, shots=shots)
        return self._in_place(plan, buffer, self._kernel())

    def reduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """The root gets the result in place; the others' buffers stay as they are."""
        # On one GPU it makes no difference who reads, and one shot reads and writes least.
        shots = 1 if self.size <= 2 or self.staged.is_one_device or buffer.nbytes <= _ONE_SHOT_BYTES else 2
        plan = chunk_plan.reduce(self.rank, self.size, buffer.nbytes, self.half, root=root, shots=shots)
        return self._in_place(plan, buffer, self._kernel())

    def broadcast(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the root's values, in place."""
        return self._in_place(chunk_plan.broadcast(self.rank, self.size, buffer.nbytes, self.half, root=root), buffer)

    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Everybody's rows in rank order, to everybody."""
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
        """Split dim 0 of `source` evenly and give each rank the reduced rows that are its."""
        num_rows, row_numel = rows_of(source)
        row_bytes = row_numel * source.element_size()
        rows = partition.rows(num_rows, self.size)
        destination = destination_for(source, rows[self.rank][1], destination)
        spans = [(first * row_bytes, count * row_bytes) for first, count in rows]
        plan = chunk_plan.reduce_scatter(self.rank, self.size, spans, self.half)
        self.staged.run(plan, source.data_ptr(), destination.data_ptr(), self._kernel())
        return destination

    def _in_place(self, plan: Iterable[list[Any]], buffer: torch.Tensor, reduce: Any = None) -> torch.Tensor:
        self.staged.run(plan, buffer.data_ptr(), buffer.data_ptr(), reduce)
        return buffer

    def _kernel(self) -> Any:
        assert self.dtype is not None and self.op is not None
        return self.staged.reducer(self.dtype, self.op)
