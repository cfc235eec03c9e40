"""Collectives among GPUs of one host, through staging areas that all ranks can read by CUDA IPC.

:mod:`torchmpi.backends.ipc.chunk_plan` plans the steps; this module enqueues them on torch's current stream and does
not wait for the device. The streams of the ranks synchronize by numbers in memory
(:mod:`torchmpi.backends.ipc.stream_memory`), after the processes have synchronized
(:mod:`torchmpi.backends.ipc.stage_sync`), since a stream must not wait for work that is not enqueued. Reductions add in
rank order, by kernels (:mod:`torchmpi.backends.ipc.area_kernels`) or by operations of torch
(:func:`torchmpi.backends.rank_order.combination`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from ...collective_specs import SPECS
from ...communicators import algorithms
from ...communicators.group import Group, GroupResource
from ...communicators.plan import Run
from ...errors import BackendUnavailableError, DeviceError, StallError
from ...shared_memory.memory_layout import LogFields
from ...tensors import buffers, partition
from ..base import Operation
from ..mpi_messages import destination_for, row_counts, rows_of
from . import area_kernels, chunk_plan, stream_memory
from .chunk_plan import EMPTIED, FILLED, Chunks, Fill, ReduceAreas, Room, Step, Sync, Take
from .short_allreduce import ShortAllreduce
from .stage_sync import StageSync
from .staging_areas import CudaDevice, Staging

_ONE_SHOT_BYTES, _ONE_SHOT_BYTES_OF_TORCH = 64 << 20, 32 << 20
"""Largest size of the tensors of all ranks together that every rank reduces as a whole, by a kernel and by operations
of torch (benchmarks on one H200)."""
_MOST_PLANS = 256

Action = Callable[[torch.Tensor, torch.Tensor, int], object]
"""A step of a plan: enqueues work on the source and the output of a call on a stream."""


def prepare(staged: StagedGroup, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
    """Prepare a collective on a group."""
    work: Run = getattr(IpcCollectives(staged, dtype, op), collective)

    def run(source: Any, destination: Any, root: int) -> Any:
        try:
            staged.begin(source)
            result = work(source, destination, root)
            staged.sync.complete()
            return result
        except BaseException:
            staged.sync.abort()
            raise

    if not SPECS[collective].reduces_to_all or dtype is None:
        return Operation(run)
    short: ShortAllreduce | None = None
    staging: Staging | None = None  # for which `short` was made, or could not be made

    def run_allreduce(source: Any, destination: Any, root: int) -> Any:
        nonlocal short, staging
        try:
            if staging is not staged.staging and not staged.is_capturing():
                staging = staged.staging
                short = staged.short_allreduce(dtype, op or "")
            if short is not None and not short.staging.is_released and short.run(source):
                staged.check_release()
                return source
        except BaseException:
            staged.sync.abort()
            raise
        return run(source, destination, root)

    return Operation(run_allreduce)


class StagedGroup(GroupResource):
    """The staging areas of a group, made by its first call, and the execution of plans on them."""

    can_expire = True

    def __init__(
        self,
        group: Group,
        staging_bytes: int,
        make_device: Callable[[torch.device], CudaDevice],
        refused: dict[int, str],
    ) -> None:
        """`refused`: where the reason is stored, by the key of the group, if the areas cannot be allocated."""
        self.group, self.make_device, self._refused = group, make_device, refused
        self.rank, self.size = group.rank, group.size
        self.others = chunk_plan.others(group.rank, group.size)
        self.half_bytes = chunk_plan.half_bytes(staging_bytes, group.size)
        self.sync = StageSync(group)
        self.staging: Staging | None = None
        self._device: torch.device | None = None
        self._publish: stream_memory.StreamOperations
        """Publishes a number of this rank."""
        self._await_others: stream_memory.StreamOperations
        """Waits for a number of all other ranks."""
        self._plans: dict[Hashable, list[list[Action]]] = {}
        """The chunks of plans, by the arguments of the plan."""

    def begin(self, tensor: torch.Tensor) -> None:
        """Enter a call. Collective if the call is the first."""
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                "a collective of backend ipc cannot be captured in a CUDA graph, because its streams synchronize by "
                "numbers that differ in each call. Call it outside of the capture, or pass backend='nccl'."
            )
        if self.staging is not None and tensor.device != self._device:
            raise DeviceError(
                f"{self.group.where}: the tensor is on {tensor.device}, but communicator {self.group.name} has its "
                f"staging areas on {self._device}. Keep the tensors of a communicator on one GPU."
            )
        has_failed = self.sync.begin()
        late = (
            self.sync.number(0) if has_failed else self.sync.unpublished
        )  # a failed call may have ended before it published
        if self.staging is not None and late:
            self._publish(self.staging.device.current_stream(), late)
            self.sync.unpublished = 0
        self.sync.publish(0)  # after all checks: a rank that has entered the call takes part in calls of MPI
        if self.staging is None:
            self.wait_for_entry()  # Group.end_call() ends this wait, but not those of MPI in the next line
            self._open_staging(tensor.device)
        self.check_release()

    def is_capturing(self) -> bool:
        """Return whether the current stream is captured in a CUDA graph, so that nothing must be allocated."""
        return self.staging is not None and self.staging.device.is_capturing()

    def short_allreduce(self, dtype: torch.dtype, op: str) -> ShortAllreduce | None:
        """Return the short allreduces of a dtype and operation; None if they cannot run in one call."""
        staging = self.staging
        kernels = None if staging is None else staging.device.kernels(dtype, op, self.size)
        if staging is None or kernels is None:
            return None
        most_bytes = self.half_bytes if self.size <= 2 else min(self.half_bytes, _ONE_SHOT_BYTES // self.size)
        with suppress(
            ImportError, OSError, RuntimeError
        ):  # there is no machine code: no LLVM, or not for this processor
            return ShortAllreduce(self.sync, staging, kernels, dtype, most_bytes)
        return None

    def _open_staging(self, device: torch.device) -> None:
        group = self.group
        try:
            staging = Staging(group.comm, self.make_device(device), self.half_bytes)
        except BackendUnavailableError as error:
            self._refused[group.key] = str(error)
            group.plans.clear()  # the next call selects another backend, on all ranks
            raise
        self._publish = staging.operations(publishes=True)
        self._await_others = staging.operations(awaits=self.others)
        self.sync.open()
        self.staging, self._device = staging, device

    def wait_for_entry(self) -> None:
        """Wait until all ranks have entered the call; raise if one has aborted it."""
        self.sync.wait_for(self.others, self.sync.number(0))

    def abort_device_work(self) -> None:
        """End the waits of the device for other ranks: one is lost, or the group is being freed. From any thread."""
        staging = self.staging
        if staging is not None:
            staging.release_waits()

    def run(
        self, key: Hashable, plan: Callable[[], Chunks], source: torch.Tensor, out: torch.Tensor, op: str = ""
    ) -> None:
        """Enqueue a plan that reads from one flat tensor and writes to another. `key`: the arguments of the plan."""
        assert self.staging is not None
        parity = self.sync.seq & 1
        full_key = (key, op, source.dtype, parity)
        chunks = self._plans.get(full_key)
        if chunks is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            with torch.inference_mode(False):  # otherwise only calls in inference mode could write to these views
                chunks = self._plans[full_key] = [
                    [self._action(step, self.staging, index, index + parity & 1, source.dtype, op) for step in steps]
                    for index, steps in enumerate(plan())
                ]
        stream = self.staging.device.current_stream()
        with _mode_of(out):
            for actions in chunks:
                for action in actions:
                    action(source, out, stream)
        self.check_release()

    def check_release(self) -> None:
        """Raise if streams may have continued before other ranks had filled their areas."""
        if self.staging is not None and self.staging.is_released:
            reason = self.group.context.loss or "its process group was aborted"
            raise StallError(f"{self.group.where}: communicator {self.group.name} cannot be used: {reason}.")

    def _action(self, step: Step, staging: Staging, index: int, half: int, dtype: torch.dtype, op: str) -> Action:
        """Return a step as a function; the ranges of the areas are determined once."""
        areas = staging.areas(dtype, half)
        if isinstance(step, Fill):
            area, begin, numel = _range(areas[self.rank], step.area, step.numel), step.source, step.numel
            return lambda source, out, stream: area.copy_(_range(source, begin, numel))
        if isinstance(step, Take):
            taken, begin, numel = _range(areas[step.rank], step.area, step.numel), step.out, step.numel
            return lambda source, out, stream: _range(out, begin, numel).copy_(taken)
        if isinstance(step, ReduceAreas):
            reduce = staging.device.reduction([_range(area, step.area, step.numel) for area in areas], op)
            begin, numel = step.out, step.numel
            return lambda source, out, stream: reduce(_range(out, begin, numel), stream)
        if isinstance(step, Room):
            return self._room(half, chunk_plan.stage_number(index, EMPTIED))
        return self._synchronization(step, staging, half, chunk_plan.stage_number(index, step.stage))

    def _synchronization(self, step: Sync, staging: Staging, half: int, stage: int) -> Action:
        """Return the publication of a stage, the wait for it, or both."""
        sync, is_free, publishes, ranks = self.sync, self.sync.is_free, step.publishes, step.awaits
        publish, wait = self._publish, staging.operations(awaits=ranks)
        # A rank has enqueued its reads of earlier chunks before it fills its area.
        frees = step.stage == FILLED and len(ranks) == self.size - 1

        def synchronize(source: torch.Tensor, out: torch.Tensor, stream: int) -> None:
            number = sync.number(stage)
            if publishes:
                publish(stream, number)
                sync.publish(stage)
            if ranks:
                sync.wait_for(ranks, number)
                wait(stream, number)
            if frees:
                is_free[1 - half] = True

        return synchronize

    def _room(self, half: int, stage: int) -> Action:
        """Return a wait for the end of the other ranks' reads of the last chunk of a half. `stage`: of this chunk's.

        This rank's own reads come before, whatever their stream: the calls of a group are in one order
        (:class:`~torchmpi.tensors.streams.Order`).
        """
        sync, is_free, last_use = self.sync, self.sync.is_free, self.sync.last_use

        def wait(source: torch.Tensor, out: torch.Tensor, stream: int) -> None:
            if not is_free[half]:
                sync.wait_for(self.others, last_use[half])
                self._await_others(stream, last_use[half])
            last_use[half], is_free[half] = sync.number(stage), False

        return wait

    def close(self) -> None:
        """Free the staging areas. Collective."""
        if self.staging is not None:
            if self.group.context.loss:
                self.staging.release_waits()  # close() would wait for a lost rank
            self._plans.clear()
            self.staging.close()
            self.staging = None


class IpcCollectives:
    """The collectives of one operation on a group. Reductions work on elements, the others on bytes."""

    def __init__(self, staged: StagedGroup, dtype: torch.dtype | None, op: str | None) -> None:
        self.staged, self.op = staged, op or ""
        self.has_kernel = dtype is not None and area_kernels.exist_for(dtype, self.op, staged.size)
        self.rank, self.size, self.half_bytes = staged.rank, staged.size, staged.half_bytes
        self.log = staged.group.call_log.log_fields

    def allreduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        rank, size, numel, half = self.rank, self.size, buffer.numel(), self._half(buffer)
        flat, num_shots = _flat(buffer), shots(size, buffer.nbytes, has_kernel=self.has_kernel)
        self.log[LogFields.algorithm] = algorithms.ONE_SHOT if num_shots == 1 else algorithms.TWO_SHOTS
        self.staged.run(
            ("allreduce", numel),
            lambda: chunk_plan.allreduce(rank, size, numel, half, shots=num_shots),
            flat,
            flat,
            self.op,
        )
        return buffer

    def reduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        rank, size, numel, half = self.rank, self.size, buffer.numel(), self._half(buffer)
        flat = _flat(buffer)
        self.staged.run(
            ("reduce", numel, root), lambda: chunk_plan.reduce(rank, size, numel, half, root=root), flat, flat, self.op
        )
        return buffer

    def broadcast(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        rank, size, numel, half = self.rank, self.size, buffer.nbytes, self.half_bytes
        flat = buffers.byte_view(buffer)
        self.staged.run(
            ("broadcast", numel, root), lambda: chunk_plan.broadcast(rank, size, numel, half, root=root), flat, flat
        )
        return buffer

    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        self.staged.wait_for_entry()  # before a call of MPI, which would not detect that a rank has aborted
        rows, row_bytes = row_counts(self.staged.group, source), rows_of(source)[1] * source.element_size()
        destination = destination_for(source, sum(rows), destination)
        rank, size, half = self.rank, self.size, self.half_bytes
        out, own = buffers.byte_view(destination), buffers.byte_view(source)
        lengths = tuple(count * row_bytes for count in rows)
        with _mode_of(out):
            _range(out, sum(lengths[:rank]), own.numel()).copy_(own)
        self.staged.run(("allgather", lengths), lambda: chunk_plan.allgather(rank, size, lengths, half), own, out)
        return destination

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        num_rows, row_numel = rows_of(source)
        rank, size, half = self.rank, self.size, self._half(source)
        rows = partition.even_partition(num_rows, size)
        destination = destination_for(source, rows[rank][1], destination)
        ranges = tuple((first * row_numel, count * row_numel) for first, count in rows)
        self.staged.run(
            ("reduce_scatter", ranges), lambda: chunk_plan.reduce_scatter(rank, size, ranges, half),
            _flat(source), _flat(destination), self.op,
        )  # fmt: skip
        return destination

    def _half(self, tensor: torch.Tensor) -> int:
        return self.half_bytes // tensor.element_size()


def shots(size: int, num_bytes: int, *, has_kernel: bool) -> int:
    """Return in how many steps `size` ranks reduce tensors of this size: see :mod:`.chunk_plan`.

    >>> [shots(size, 8 << 20, has_kernel=False) for size in (2, 4, 8)]
    [1, 1, 2]
    """
    most_bytes = _ONE_SHOT_BYTES if has_kernel else _ONE_SHOT_BYTES_OF_TORCH
    return 1 if size <= 2 or size * num_bytes <= most_bytes else 2


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def _range(tensor: torch.Tensor, begin: int, numel: int) -> torch.Tensor:
    return tensor if numel == tensor.numel() else tensor[begin : begin + numel]


def _mode_of(out: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context in which `out` may be written: tensors of inference mode only within that mode."""
    mode = out.is_inference()
    return nullcontext() if mode == torch.is_inference_mode_enabled() else torch.inference_mode(mode)
