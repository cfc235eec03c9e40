"""The backend for GPUs of one host: collectives through staging areas that all ranks can read by CUDA IPC.

:mod:`torchmpi.backends.ipc.chunk_plan` plans the steps; this module enqueues them on torch's current stream and does
not wait for the device. The processes synchronize in shared memory (:mod:`torchmpi.backends.ipc.stage_sync`), since an
event of another process can be awaited only after it has been recorded. Reductions are operations of torch in rank
order (:func:`torchmpi.backends.rank_order.combine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

from ...communicators.group import Group
from ...config import Config
from ...errors import BackendUnavailableError, DeviceError
from ...tensors import partition
from ..base import Operation
from ..gpus import Devices
from ..mpi_messages import destination_for, row_counts, rows_of
from ..rank_order import combine
from . import chunk_plan
from .chunk_plan import EMPTIED, Await, Fill, Publish, Record, ReduceAreas, Room, Step, Take
from .stage_sync import StageSync
from .staging_areas import CudaDevice, Staging

COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
_ONE_SHOT_BYTES = 256 << 10  # not measured yet


class IpcBackend:
    """Collectives of ranks that share a GPU, or whose GPUs can access each other."""

    name = "ipc"
    announces = False
    enqueues = True

    def __init__(self, config: Config, devices: Devices, problem: str = "") -> None:
        """Create the backend; `problem`: the reason why its processes cannot share GPU memory; '' if they can."""
        self.config, self.devices, self.problem = config, devices, problem
        self.make_device: Callable[[torch.device], CudaDevice] = CudaDevice
        self.refused: dict[int, str] = {}
        """Why the staging areas of a group could not be allocated, by the key of the group; equal on all its ranks."""

    def takes(self, device_type: str, collective: str) -> bool:
        """Return whether the device is a GPU."""
        return device_type == "cuda"

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Return why a call is refused: it has reductions, broadcast and allgather, on one host with peer access."""
        if device_type != "cuda":
            return "it is for CUDA tensors"
        if collective not in COLLECTIVES:
            return f"it has no {collective}"
        if not torch.cuda.is_available():
            return "this torch or this host has no CUDA"
        if not self.config.staging_bytes:
            return "it is switched off (staging_bytes=0)"
        return self.problem or (None if group is None else self._why_not_among(group))

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
            return "its ranks have no shared memory to synchronize in (slot_bytes=0, or the system provides none)"
        return self.refused.get(group.key)

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a collective on a group."""
        with group.binding:
            staged = next((item for item in group.attachments if isinstance(item, StagedGroup)), None)
            if staged is None:
                staged = StagedGroup(self, group)
                group.attachments.append(staged)
        operation: Operation = getattr(IpcCollectives(staged, op), collective)

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
        self._device: torch.device | None = None
        self._last_use = [0, 0]
        """The stage that a rank publishes when it has read the last chunk of a half."""

    def begin(self, tensor: torch.Tensor) -> None:
        """Enter a call. Collective if the call is the first."""
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                "a collective of backend ipc cannot be captured in a CUDA graph, because processes wait for each other "
                "on the host. Call it outside of the capture, or pass backend='nccl'."
            )
        if self.staging is None:
            self.staging, self._device = self._make_staging(tensor.device), tensor.device
        elif tensor.device != self._device:
            raise DeviceError(
                f"{self.group.where}: the tensor is on {tensor.device}, but communicator {self.group.name} has its "
                f"staging areas on {self._device}. Keep the tensors of a communicator on one GPU."
            )
        self.sync.begin()

    def _make_staging(self, device: torch.device) -> Staging:
        group, backend = self.group, self.backend
        try:
            return Staging(group.comm, backend.make_device(device), self.half_bytes)
        except BackendUnavailableError as error:
            backend.refused[group.key] = str(error)
            group.plans.clear()  # the next call selects another backend, on all ranks
            raise

    def abort(self) -> None:
        """Abort the call on all ranks; later calls on any stream come after the work that was enqueued."""
        self.sync.abort()
        if self.staging is not None:
            with suppress(RuntimeError):  # the device may have failed
                for half in (0, 1):
                    self.staging.event(self.rank, EMPTIED, half).record()

    def expire(self, seq: int) -> None:
        """End the wait of this call for other processes."""
        self.sync.expired_seq = seq

    def wait_for_entry(self) -> None:
        """Wait until all ranks have entered the call; raise if one has aborted it."""
        self.sync.wait_for(self.others, self.sync.number(0))

    def run(self, chunks: Iterable[list[Step]], source: torch.Tensor, out: torch.Tensor, op: str = "") -> None:
        """Enqueue a plan that reads from one flat tensor and writes to another."""
        assert self.staging is not None
        with torch.inference_mode(out.is_inference()):
            for index, steps in enumerate(chunks):
                half = (self.sync.seq + index) & 1
                areas = self.staging.areas(source.dtype, half)
                for step in steps:
                    if isinstance(step, Fill):
                        areas[self.rank][step.area : step.area + step.numel] = _range(source, step.source, step.numel)
                    elif isinstance(step, Take):
                        _range(out, step.out, step.numel).copy_(_range(areas[step.rank], step.area, step.numel))
                    elif isinstance(step, ReduceAreas):
                        parts = [_range(area, step.area, step.numel) for area in areas]
                        combine(parts, op, _range(out, step.out, step.numel))
                    else:
                        self._synchronize(step, self.staging, index, half)
                self._last_use[half] = self.sync.number(chunk_plan.stage(index, EMPTIED))

    def _synchronize(self, step: Step, staging: Staging, index: int, half: int) -> None:
        sync = self.sync
        if isinstance(step, Room):
            # After the other ranks have enqueued all reads of the last chunk of the half. This rank's own event is
            # included, since the chunk before may have used another stream.
            sync.wait_for(self.others, self._last_use[half])
            for rank in range(self.size):
                staging.event(rank, EMPTIED, half).wait()
        elif isinstance(step, Await):
            sync.wait_for(step.ranks, sync.number(chunk_plan.stage(index, step.event)))
            for rank in step.ranks:
                staging.event(rank, step.event, half).wait()
        else:
            assert isinstance(step, Record | Publish)
            if isinstance(step, Record):
                staging.event(self.rank, step.event, half).record()
            sync.publish(chunk_plan.stage(index, step.event))

    def close(self) -> None:
        """Free the staging areas. Collective."""
        if self.staging is not None:
            self.staging.close()
            self.staging = None


class IpcCollectives:
    """The collectives of one operation on a group. Reductions work on elements, the others on bytes."""

    def __init__(self, staged: StagedGroup, op: str | None) -> None:
        self.staged, self.op = staged, op or ""
        self.rank, self.size, self.half_bytes = staged.rank, staged.size, staged.half_bytes

    def allreduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Reduce in place on all ranks."""
        shots = 1 if self.size <= 2 or buffer.nbytes <= _ONE_SHOT_BYTES else 2
        plan = chunk_plan.allreduce(self.rank, self.size, buffer.numel(), self._half(buffer), shots=shots)
        self.staged.run(plan, _flat(buffer), _flat(buffer), self.op)
        return buffer

    def reduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Reduce in place on the root; the buffers of other ranks are unchanged."""
        plan = chunk_plan.reduce(self.rank, self.size, buffer.numel(), self._half(buffer), root=root)
        self.staged.run(plan, _flat(buffer), _flat(buffer), self.op)
        return buffer

    def broadcast(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Copy the root's values to all ranks, in place."""
        plan = chunk_plan.broadcast(self.rank, self.size, buffer.nbytes, self.half_bytes, root=root)
        self.staged.run(plan, _bytes(buffer), _bytes(buffer))
        return buffer

    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Concatenate the rows of all ranks on all ranks."""
        self.staged.wait_for_entry()  # before a call of MPI, which would not detect that a rank has aborted
        rows, row_bytes = row_counts(self.staged.group, source), rows_of(source)[1] * source.element_size()
        destination = destination_for(source, sum(rows), destination)
        out, own = _bytes(destination), _bytes(source)
        lengths = [count * row_bytes for count in rows]
        with torch.inference_mode(out.is_inference()):
            _range(out, sum(lengths[: self.rank]), own.numel()).copy_(own)
        self.staged.run(chunk_plan.allgather(self.rank, self.size, lengths, self.half_bytes), own, out)
        return destination

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Reduce the rows of `source`, split dim 0 evenly, and return this rank's rows of the result."""
        num_rows, row_numel = rows_of(source)
        rows = partition.rows(num_rows, self.size)
        destination = destination_for(source, rows[self.rank][1], destination)
        ranges = [(first * row_numel, count * row_numel) for first, count in rows]
        plan = chunk_plan.reduce_scatter(self.rank, self.size, ranges, self._half(source))
        self.staged.run(plan, _flat(source), _flat(destination), self.op)
        return destination

    def _half(self, tensor: torch.Tensor) -> int:
        return self.half_bytes // tensor.element_size()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return _flat(tensor).view(torch.uint8)


def _range(tensor: torch.Tensor, begin: int, numel: int) -> torch.Tensor:
    return tensor[begin : begin + numel]
