"""The backend within a host: collectives in memory that all ranks share.

The kernels (:mod:`torchmpi.shared_memory.kernels`) do the work without the GIL; here each verb becomes addresses,
lengths and one or
two calls of them. The first call compares what the ranks called, from what they publish on arrival anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..communicators.call_log import ABORTED, NATIVE, call_code
from ..config import Config
from ..errors import ArgumentError
from ..shared_memory import fast_path, kernels, memory_layout
from ..shared_memory.kernels import context, reduction
from ..shared_memory.memory_layout import (
    ENTRY_FIELDS,
    FIELD_BYTES,
    PAYLOAD,
    REFUSED,
    RING_LENGTH,
    RUN_LOCK_PENDING,
    SEQUENCE,
    SIGNATURE,
    entry,
)
from ..shared_memory.shared_tensors import SharedHeap
from ..tensors import dtypes, partition
from .base import Operation, TensorTable
from .mpi_messages import destination_for, longest_part, rows_of
from .shm_group import SharedGroup

_MOST_DIMS = ENTRY_FIELDS - PAYLOAD - 2
_PAIR_FIELDS = 4

Kernels = dict[str, Callable[..., int]]


class SharedMemoryBackend:
    """Collectives of ranks on one host."""

    name = "shm"
    announces = True
    enqueues = False

    def __init__(self, config: Config, heap: SharedHeap, announce: Callable[[str], object]) -> None:
        self.heap, self.problem = heap, ""
        self.kernels: Kernels = {}
        if not config.slot_bytes:
            self.problem = "it is switched off (slot_bytes=0)"
            return
        try:
            self.kernels = kernels.load(announce)
        except Exception as error:  # whatever numba or LLVM do not like here: the job runs without them
            self.problem = f"its kernels cannot be compiled here ({type(error).__name__}: {error})"

    def takes(self, device_type: str) -> bool:
        """Host memory."""
        return device_type == "cpu"

    def why_not(self, collective: str, device_type: str, group: Any = None) -> str | None:
        """It has every verb, among ranks that share memory."""
        if device_type == "cuda" and not torch.cuda.is_available():
            return "this torch or this host has no CUDA"
        if self.problem:
            return self.problem
        if group is not None and group.status_board is None:
            return "its ranks are on several hosts" if len(group.hosts) > 1 else "its ranks could not share memory"
        return None

    def bind(self, group: Any, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a verb on a group."""
        with group.binding:
            if group.shared is None:
                group.shared = SharedGroup(group, self.heap)
        kind: Any = {"allreduce": Reduction, "reduce": Reduction, "reduce_scatter": ReduceScatter}.get(
            collective, Movement
        )
        calls = kind(group, self.kernels, dtype, op)
        operation: Operation = getattr(calls, collective)
        if collective not in fast_path.COLLECTIVES or dtype is None:
            return operation if collective == "barrier" else _or_abort(operation, group.shared)
        return Entered(
            calls,
            collective,
            call_code(collective, op, dtypes.info(dtype).code if collective != "scatter" else 0),
            operation,
        )


def _or_abort(operation: Operation, shared: SharedGroup) -> Operation:
    """What may fail on its own between two kernels, or be interrupted there, and then lets the others know."""

    def run(source: Any, destination: Any, root: int) -> Any:
        try:
            return operation(source, destination, root)
        except BaseException:
            shared.abort()
            raise

    return run


class Calls:
    """One verb on one group: runs kernels, and sees to what they cannot do themselves."""

    def __init__(self, group: Any, kernels: Kernels, dtype: torch.dtype | None, op: str | None) -> None:
        self.group, self.call_log, self.call_queue, self.kernels = group, group.call_log, group.call_queue, kernels
        self.shared: SharedGroup = group.shared
        self.rank, self.size = group.rank, group.size
        self.table = np.zeros((self.size, _PAIR_FIELDS), np.int64)
        self.message = np.zeros(ENTRY_FIELDS - PAYLOAD, np.int64)
        self._item_bytes, self._dtype = (dtype.itemsize, dtypes.info(dtype).code) if dtype is not None else (1, 0)
        self._reducer = reduction.address(dtype, op) if dtype is not None and op is not None else 0
        self._plans: dict[int, tuple[np.ndarray, int]] = {}
        self._lock_fields = self.call_queue.run_lock.fields
        self.all_ranks = self.plan()
        """Address of the plan of a call without a root."""

    def plan(self, root: int = -1) -> int:
        """Address of what the kernels know of this verb, for a root."""
        known = self._plans.get(root)
        if known is None:
            fields = np.zeros(context.PLAN_FIELDS, np.int64)
            fields[context.CONTEXT], fields[context.ITEM_BYTES] = self.shared.address, self._item_bytes
            fields[context.REDUCER], fields[context.ROOT] = self._reducer, root
            fields[context.TABLE], fields[context.MESSAGE] = self.table.ctypes.data, self.message.ctypes.data
            fields[context.DTYPE] = self._dtype
            # Another thread may be here as well: what it was given must stay.
            known = self._plans.setdefault(root, (fields, int(fields.ctypes.data)))
        return known[1]

    def run(self, kernel: str, plan: int, *arguments: int) -> int:
        """The call that the ledger has entered: 0, or UNEVEN; anything else is mended or raised."""
        seq, code, shape = self.call_log.entered
        signature = (code ^ hash(shape)) ^ NATIVE
        if self._lock_fields[RUN_LOCK_PENDING] == 0:
            status = self.kernels[kernel](plan, seq, signature, *arguments)
        else:
            status = self._in_kernel(kernel, plan, seq, signature, *arguments)
        while status and status & context.KINDS != context.UNEVEN:
            self.settle(status)
            status = self._in_kernel(kernel, plan, seq, signature, *arguments)
        return status

    def _in_kernel(self, kernel: str, *arguments: int) -> int:
        if self.call_queue.pending == 0:
            return self.kernels[kernel](*arguments)
        self.shared.be_patient(polite=True)
        try:
            return self.kernels[kernel](*arguments)
        finally:
            self.shared.be_patient(polite=False)

    def settle(self, status: int) -> None:
        """Do what a kernel cannot, so that it may be called again, or raise."""
        kind, rank = status & context.KINDS, status & ~context.KINDS
        try:
            if kind == context.UNMAPPED:
                self._map(rank)
            elif kind == context.MISMATCH and self._difference_to(rank) != ABORTED:
                self.call_log.refuse(rank)
            elif kind == context.LATE:
                self.call_log.expired()
            elif (other := self._differing()) is not None:
                self.call_log.refuse(other)
            else:
                self.call_log.raise_aborted(rank)
        except BaseException:
            self.shared.abort()
            raise

    def _map(self, rank: int) -> None:
        seq = self.call_log.current[0]
        try:
            self.shared.map_segment(rank, seq)
        except OSError:
            if self.shared.status_board.get(rank, REFUSED) >= seq:
                self.call_log.raise_aborted(rank)  # and so its tensor may be gone
            raise

    def _differing(self) -> int | None:
        """A rank that has arrived with something else: the one that gave up may have met it before this rank did."""
        return next((rank for rank in range(self.size) if self._difference_to(rank) not in (0, ABORTED)), None)

    def _difference_to(self, rank: int) -> int:
        """Between the signatures of this and another rank in the current call; 0 if one of them has not arrived."""
        fields, seq = self.shared.status_board.fields, self.call_log.current[0]
        own, other = (entry(row, seq & (RING_LENGTH - 1)) for row in (self.rank, rank))
        if fields[own + SEQUENCE] != seq or fields[other + SEQUENCE] != seq:
            return 0
        difference: int = fields[own + SIGNATURE] ^ fields[other + SIGNATURE]
        return difference

    def exchange(self, *, is_stream: bool, longest: int, has_sent: bool = False) -> None:
        """Move what is in the table; `longest` is the longest length in anybody's."""
        arguments = self.table.ctypes.data, int(is_stream), longest, int(has_sent)
        status = self._in_kernel("exchange", self.plan(), *arguments)
        if status:
            self.settle(status)

    def meet(self, *payload: int) -> None:
        """Arrive with some words for the others, and wait for everybody."""
        self.message[: len(payload)] = payload
        self.run("meet", self.plan(), self.message.ctypes.data, len(payload) * FIELD_BYTES)

    def payloads(self, index: int = 0) -> list[int]:
        """A word of everybody's payload of the current call."""
        seq = self.call_log.current[0]
        return [self.shared.status_board.fields[self.shared.payload(rank, seq) + index] for rank in range(self.size)]


class Reduction(Calls):
    """In place, on all ranks or on one."""

    def allreduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the result."""
        self.run("allreduce", self.all_ranks, buffer.data_ptr(), buffer.numel())
        return buffer

    def allreduce_many(self, tensors: TensorTable, _: Any, root: int) -> None:
        """The same for tensors at separate addresses."""
        if tensors.num_bytes == 0:
            self.run("allreduce", self.all_ranks, 0, 0)
            return
        table = tensors.table
        self.run("allreduce_many", self.all_ranks, table.ctypes.data, len(table), tensors.num_bytes)

    def reduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """The root gets the result; the others' buffers stay as they are."""
        self.run("allreduce", self.plan(root), buffer.data_ptr(), buffer.numel())
        return buffer


class Entered:
    """An operation that can also be entered through a gate (see :mod:`torchmpi.shared_memory.fast_path`)."""

    def __init__(self, calls: Calls, collective: str, code: int, operation: Operation) -> None:
        self._calls, self._code, self._operation = calls, code, operation
        self._is_rooted = collective in ("broadcast", "reduce", "gather", "scatter")
        many: Operation | None = getattr(calls, f"{collective}_many", None)
        self.many = None if many is None else _or_abort(many, calls.shared)

    def __call__(self, source: torch.Tensor, destination: Any, root: int) -> Any:
        try:
            return self._operation(source, destination, root)
        except BaseException:  # as _or_abort, which would be another call
            self._calls.shared.abort()
            raise

    def cached_call(self, root: int) -> fast_path.CachedCall | None:
        """The way in for one root, if there is one."""
        calls = self._calls
        if calls.group.is_strict:
            return None
        code, plan = self._code | root << 32, calls.plan(root if self._is_rooted else -1)
        settle = partial(self._settle, root)
        return fast_path.CachedCall(
            plan, calls.call_log, calls.call_queue.run_lock, code, code ^ NATIVE, settle, self._abort
        )

    def _abort(self) -> None:
        """End a call that nobody has settled."""
        calls = self._calls
        calls.call_log.take_over()
        calls.shared.abort()
        calls.call_log.abandon()

    def _settle(self, root: int, status: int, source: torch.Tensor, destination: Any) -> Any:
        """Go on after a kernel that could not finish, or end the call with an error."""
        calls = self._calls
        calls.call_log.take_over()
        try:
            if status & context.KINDS != context.UNEVEN:
                calls.settle(status)
            result = self(source, destination, root)
        except BaseException:
            calls.call_log.abandon()
            raise
        calls.call_log.leave()
        return result


class ReduceScatter(Calls):
    """The sum of which each rank gets its rows."""

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Split dim 0 of `source` evenly and give each rank the reduced rows that are its."""
        num_rows, row_numel = rows_of(source)
        destination = destination_for(source, partition.part_of(num_rows, self.size, self.rank)[1], destination)
        row_bytes = row_numel * source.element_size()
        self.run("reduce_scatter", self.plan(), source.data_ptr(), num_rows, row_bytes, destination.data_ptr())
        return destination


class Movement(Calls):
    """Verbs that move bytes and compute nothing."""

    def barrier(self, source: Any, destination: Any, root: int) -> None:
        """Return when everybody has come."""
        self.run("meet", self.plan(), 0, 0)

    def broadcast(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Everybody gets the root's values, in place."""
        self.run("broadcast", self.plan(root), buffer.data_ptr(), buffer.numel() * buffer.element_size())
        return buffer

    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Everybody's rows in rank order, to everybody."""
        num_rows, row_numel = rows_of(source)
        num_bytes = source.numel() * source.element_size()
        if row_numel == 0:  # nothing to move, but the rows count
            self.meet(num_rows)
            return destination_for(source, sum(self.payloads()), destination)
        # Most often all have as many rows: then there is nothing to ask before the result can be made.
        target = destination_for(source, num_rows * self.size, destination)
        arguments = source.data_ptr(), num_bytes, target.data_ptr()
        if not self.run("allgather", self.plan(), *arguments):
            return target
        lengths = self.payloads()
        target = destination_for(source, sum(lengths) // (row_numel * source.element_size()), destination)
        self._send([source.data_ptr()] * self.size, [num_bytes] * self.size)
        self._receive(target, lengths)
        self.exchange(is_stream=True, longest=max(lengths))
        return target

    def gather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor | None:
        """Everybody's rows in rank order, to the root."""
        num_rows, row_numel = rows_of(source)
        row_bytes = row_numel * source.element_size()
        if row_numel == 0:  # nothing to move, but the rows count
            self.meet(num_rows)
            rows, lengths = self.payloads(), [0] * self.size
        else:
            target = destination_for(source, num_rows * self.size, destination) if self.rank == root else None
            arguments = source.data_ptr(), num_rows * row_bytes, 0 if target is None else target.data_ptr()
            if not self.run("allgather", self.plan(root), *arguments):
                return target
            lengths = self.payloads()
            rows = [length // row_bytes for length in lengths]
        sent = 0 if self.rank == root else lengths[self.rank]
        self._send([source.data_ptr()] * self.size, [sent] * self.size)
        if self.rank == root:
            destination = destination_for(source, sum(rows), destination)
            self._receive(destination, lengths)
        else:
            self._receive(source, [0] * self.size)
        self.exchange(is_stream=True, longest=max(lengths))
        return destination if self.rank == root else None

    def scatter(self, source: torch.Tensor | None, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """The root's rows, split evenly: each rank gets its part."""
        if source is not None and source.dim() > _MOST_DIMS:
            raise ArgumentError(
                f"{self.group.where}: scatter: the tensor has {source.dim()} dimensions, more than the {_MOST_DIMS} "
                "that can be announced. Merge some with flatten()."
            )
        if self.rank != root:  # what another rank passes is of no concern
            source = None
        num_rows, row_bytes, address = 0, 0, 0
        message: tuple[int, ...] = ()
        if source is not None:
            message = dtypes.info(source.dtype).code, source.dim(), *source.shape
            num_rows, row_numel = rows_of(source)
            row_bytes, address = row_numel * source.element_size(), source.data_ptr()
        self.message[: len(message)] = message
        plan = self.plan(root)
        self.run("offer", plan, self.message.ctypes.data, len(message) * FIELD_BYTES, address, num_rows, row_bytes)
        seq = self.call_log.current[0]
        at = self.shared.payload(root, seq)
        code, num_dims, *dims = self.shared.status_board.fields[at : at + 2 + _MOST_DIMS].tolist()
        dtype, shape = dtypes.from_code(code), tuple(dims[:num_dims]) or (1,)
        assert dtype is not None
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        like = torch.empty((0, *shape[1:]), dtype=dtype, device="cpu") if source is None else source
        destination = destination_for(like, partition.part_of(shape[0], self.size, self.rank)[1], destination)
        status = self._in_kernel("take", plan, seq, shape[0], row_bytes, address, destination.data_ptr())
        if status:
            self.settle(status)
        return destination

    def alltoall(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Part j of everybody's rows goes to rank j."""
        num_rows, row_numel = rows_of(source)
        row_bytes = row_numel * source.element_size()
        if row_numel == 0:  # nothing to move, but the rows count
            self.meet(num_rows)
        else:  # most often all have as many rows: then there is nothing to ask before the result can be made
            num_received = partition.part_of(num_rows, self.size, self.rank)[1] * self.size
            target = destination_for(source, num_received, destination)
            if not self.run("alltoall", self.plan(), source.data_ptr(), num_rows, row_bytes, target.data_ptr()):
                return target
        rows = self.payloads()
        received = [partition.part_of(count, self.size, self.rank)[1] for count in rows]
        destination = destination_for(source, sum(received), destination)
        spans = partition.rows(num_rows, self.size)
        self._send([source.data_ptr() + first * row_bytes for first, _ in spans], [n * row_bytes for _, n in spans])
        self._receive(destination, [count * row_bytes for count in received])
        self.exchange(is_stream=False, longest=max(-(-count // self.size) for count in rows) * row_bytes)
        return destination

    def exchange_parts(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], root: int) -> None:
        """Part j of `sources` goes to rank j; part j of `destinations` is filled by it."""
        sizes = torch.tensor([[part.nbytes for part in parts] for parts in (sources, destinations)], device="cpu")
        everybody = torch.empty((self.size, 2, self.size), dtype=torch.int64, device="cpu")
        self.run("allgather", self.plan(), sizes.data_ptr(), sizes.nbytes, everybody.data_ptr())
        longest = longest_part(everybody, self.group.where)
        self._send([part.data_ptr() for part in sources], sizes[0].tolist())
        self.table[:, 2], self.table[:, 3] = [part.data_ptr() for part in destinations], sizes[1]
        # With seven ranks and more the sizes do not fit into the announcements.
        has_sent = sizes.nbytes + FIELD_BYTES > memory_layout.PAYLOAD_BYTES
        self.exchange(is_stream=False, longest=longest, has_sent=has_sent)

    def _send(self, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        """What goes to each rank."""
        self.table[:, 0], self.table[:, 1] = addresses, lengths

    def _receive(self, target: torch.Tensor, lengths: Sequence[int]) -> None:
        """What comes from each rank, one after the other."""
        ends = np.cumsum(lengths)
        self.table[:, 2], self.table[:, 3] = ends - lengths + target.data_ptr(), lengths
