"""The backend `shm`: collectives of the ranks of one host, in memory that they share.

The kernels (:mod:`torchmpi.shared_memory.kernels`) do the work without the GIL. This module turns a collective into
addresses, lengths and one or two calls of kernels, and handles the statuses that they return. Kernels compare the calls
of the ranks when they synchronize, so no other comparison is necessary.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from ..collective_specs import SPECS
from ..communicators import call_log
from ..communicators.call_codes import as_many, call_code
from ..communicators.call_log import Call
from ..communicators.call_queue import Polling
from ..communicators.group import Group, GroupResource
from ..communicators.plan import Run
from ..config import Config
from ..errors import ArgumentError, InternalError
from ..shared_memory import fast_path, kernels, memory_layout, process_vm
from ..shared_memory.kernels import records, reduction
from ..shared_memory.memory_layout import (
    FIELD_BYTES,
    RING_LENGTH,
    Announcement,
    Block,
    CounterFields,
    Entry,
    entry,
)
from ..shared_memory.shared_tensors import SharedHeap
from ..tensors import buffers, dtypes, partition
from .base import Backend, Operation, TensorTable, collectives_of, on_rows
from .job_facts import JobFacts, problem_of_any
from .mpi_messages import destination_for, longest_part, rows_of, unless_overlapping

WHOLE_BYTES = 16 << 10
"""Up to this size a tensor is not divided among the ranks, which saves one synchronization."""

_EAGER_SPINS, _EAGER_YIELDS = 2000, 2000
# With more ranks than cores, or during a computation of the same rank, a polling thread takes cycles from others.
# Beside messages between hosts it gains nothing, and other hosts may share the cores, as containers do.
_CROWDED_SPINS, _POLITE_SPINS, _POLITE_YIELDS = 200, 50, 50
# Two chunks of each rank on a core, and the other operand of their reduction, fit into its second-level cache.
_MAX_CHUNK_BYTES, _CROWDED_CHUNK_BYTES = 256 << 10, 128 << 10
_MOST_PAYLOAD = Entry.FIELDS - Entry.payload
_MAX_DIMS = _MOST_PAYLOAD - 2

_WITHOUT_ERROR = records.UNEVEN, records.COMPARED

Kernels = dict[str, Callable[..., int]]


class SharedMemoryBackend(Backend):
    """Collectives of ranks on one host."""

    name = "shm"
    device_types = ("cpu", "cuda")
    announces = True
    enqueues = False

    def __init__(
        self,
        config: Config,
        heap: SharedHeap,
        processes: Sequence[process_vm.Probe] = (),
    ) -> None:
        """Create the backend; `processes`: the ranks whose memory may be read directly."""
        self.heap, self.problem = heap, ""
        self.kernels: Kernels = {}
        self.reads_directly = False
        if not config.slot_bytes:
            self.problem = "it is switched off (slot_bytes=0)"
            return
        try:
            self.kernels = kernels.load()
        except Exception as error:  # of numba or LLVM: the job runs without shared memory
            self.problem = f"its kernels cannot be compiled here ({type(error).__name__}: {error})"
            return
        self.reads_directly = bool(processes) and config.read_directly and process_vm.can_read(processes)

    @classmethod
    def make(cls, job: JobFacts) -> SharedMemoryBackend:
        """Make the backend of a job."""
        return cls(job.config, job.heap, job.processes)

    def offer(self) -> tuple[str, bool]:
        """Return the problem of this rank, and whether it can read the memory of all others of its host."""
        return self.problem, self.reads_directly

    def agree(self, offers: Sequence[tuple[str, bool]]) -> None:
        """Take the problem of any rank; read directly if all ranks can."""
        self.problem = problem_of_any([problem for problem, _ in offers], self.problem)
        self.reads_directly = all(reads for _, reads in offers)

    @cached_property
    def collectives(self) -> frozenset[str]:
        """Those of its classes."""
        return collectives_of(SharedReduction, SharedMovement)

    def takes(self, device_type: str, collective: str) -> bool:
        """Accept host memory; CUDA tensors are staged."""
        return device_type == "cpu"

    def why_not(self, collective: str, device_type: str, group: Group | None = None) -> str | None:
        """Accept every collective among ranks that share memory."""
        if self.problem:
            return self.problem
        if group is not None and group.status_board is None:
            return "its ranks are on several hosts" if len(group.hosts) > 1 else "its ranks could not share memory"
        return None

    def bind(self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Prepare a collective on a group."""
        self._share(group)
        spec = SPECS[collective]
        calls = (SharedReduction if spec.reduces else SharedMovement)(group, self.kernels, dtype, op)
        run: Run = _or_abort(getattr(calls, collective), calls.shared)
        if isinstance(calls, SharedMovement) and collective == "exchange_parts" and dtype is not None:
            code, even = call_code("alltoall", None, dtypes.info(dtype).code), on_rows(run, group.size)

            def settled(source: Any, destination: Any, root: int) -> Any:
                if isinstance(source, list):  # of which the ranks have compared the sizes
                    return calls.exchange_announced(source, destination)
                return even(source, destination, root)

            settle = _or_abort(settled, calls.shared)
            return Operation(run, cached_call=CallsOfFastPath(calls, "alltoall", code, settle).cached_call)
        if spec.tensors and (collective not in fast_path.COLLECTIVES or dtype is None):
            return Operation(run)
        code = call_code(collective, op, 0 if dtype is None or spec.only_root_passes else dtypes.info(dtype).code)
        on_lists = calls.operations_on_lists().get(collective)
        operation = Operation(run, cached_call=CallsOfFastPath(calls, collective, code, run).cached_call)
        if on_lists is None:
            return operation
        run_list = _or_abort(on_lists, calls.shared)
        cached_list = CallsOfFastPath(calls, collective, as_many(code), run_list).cached_call
        return replace(operation, run_list=run_list, cached_list=cached_list)

    def compared(self, run: Run, group: Group, collective: str, dtype: torch.dtype | None, op: str | None) -> Operation:
        """Return an operation of another backend that compares each call between all ranks before it runs.

        It runs on no rank before all ranks have made the call, and raises on all ranks if they differ.
        """
        self._share(group)
        calls = SharedComparison(group, self.kernels, dtype, None)

        def compare_and_run(source: Any, destination: Any, root: int) -> Any:
            calls.compare()
            return run(source, destination, root)

        if SPECS[collective].flow != "all to all" or (SPECS[collective].tensors and dtype is None):
            return Operation(compare_and_run)
        code = call_code(collective, op, 0 if dtype is None else dtypes.info(dtype).code)
        return Operation(compare_and_run, cached_call=CallsOfFastPath(calls, collective, code, run).cached_call)

    def _share(self, group: Group) -> None:
        with group.binding:
            if group.shared is None:
                group.shared = SharedGroup(group, self.heap)


class SharedGroup(GroupResource):
    """The record of a group for the kernels: its slots, the mapped segments of other ranks, and how to wait."""

    can_expire = True

    def __init__(self, group: Group, heap: SharedHeap) -> None:
        assert group.status_board is not None
        size, status_board, segment = group.size, group.status_board, group.status_board.segment
        self.heap, self.status_board, self.size = heap, status_board, size
        self.mappings = np.zeros((size, records.MAPPINGS_PER_RANK, 2), np.int64)
        self._num_mapped = [0] * size
        num_slots, slots_begin = memory_layout.num_slots(size), memory_layout.slots_begin(size)
        slots_end = segment.ticket.num_bytes - memory_layout.rings_bytes(size)
        self.slot_bytes = (slots_end - slots_begin) // (num_slots * size)
        is_crowded = group.context.is_crowded
        processes = [group.context.processes.get(rank, 0) for rank in group.world_ranks]
        self._processes = np.array(processes, np.int64)
        self.record = records.GroupRecord.new(extra=2 * size).write(
            rank=group.rank,
            size=size,
            blocks=segment.address,
            segment_bytes=segment.ticket.num_bytes,
            slots=segment.address + slots_begin,
            num_slots=num_slots,
            slot_bytes=self.slot_bytes,
            whole_bytes=min(WHOLE_BYTES, self.slot_bytes),
            max_chunk_bytes=_CROWDED_CHUNK_BYTES if is_crowded else _MAX_CHUNK_BYTES,
            crowded=is_crowded,
            own_segments=heap.table.ctypes.data,
            mappings=self.mappings.ctypes.data,
            call_log=group.call_log.address,
            processes=self._processes.ctypes.data if all(processes) else 0,
        )
        polls_less = is_crowded or len(set(group.context.hosts)) > 1
        eager = array("q", (_CROWDED_SPINS if polls_less else _EAGER_SPINS, _EAGER_YIELDS))
        numbers = memoryview(self.record.cells)[records.GroupRecord.spins : records.GroupRecord.yields + 1]
        group.call_queue.polling = Polling(numbers, eager, array("q", (_POLITE_SPINS, _POLITE_YIELDS)))
        numbers[:] = eager
        self._rank, self._call_log = group.rank, group.call_log

    def abort(self) -> None:
        """Publish that this rank does not finish the current call, and set a new chunk count.

        The count follows from the sequence number, so is equal on all ranks, and greater than all before, so
        that the values of the failed call in slots and counters are not taken for new ones.
        """
        if self._call_log.current is None:
            return
        seq = self._call_log.current[0]
        if self._call_log.log_board is not None:
            self._call_log.spoil_entry(call_log.NATIVE ^ memory_layout.signed_chunks(self.record.chunks))
        elif self.record.last_aborted != seq:
            own = self.payload(self._rank, seq) - Entry.payload
            if self.status_board.fields[own + Entry.sequence] == seq:
                self.status_board.fields[own + Entry.signature] ^= call_log.ABORTED
        self.record.last_aborted = seq
        self.status_board.set(self._rank, Block.refused, seq)
        self.record.chunks = seq << memory_layout.CHUNK_BITS
        self.record.violated_check = 0  # not reported as an error of the next call
        self.heap.note_failed_call()

    def expire(self, seq: int) -> None:
        """Make the kernel that waits in this call return with TIMEOUT."""
        self.record.write(expired=seq)

    def payload(self, rank: int, seq: int) -> int:
        """Return the index of the payload of a call in the fields of the status board."""
        return entry(rank, seq & (RING_LENGTH - 1)) + Entry.payload

    def map_segment(self, rank: int, seq: int) -> None:
        """Map the segment in which a rank has announced its tensor."""
        at = self.payload(rank, seq) + Announcement.key
        key, file, num_bytes = self.status_board.fields[at : at + 3]
        index = self._num_mapped[rank] % records.MAPPINGS_PER_RANK
        self._num_mapped[rank] += 1
        self.mappings[rank, index] = 0, self.heap.map(key, file, num_bytes)
        self.mappings[rank, index, 0] = key

    def take_violation(self) -> str:
        """Describe the check that has failed in a kernel of the checked build, and clear its record."""
        record = self.record
        check, record.violated_check = record.violated_check, 0
        return f"{records.CHECKS[check]} (value {record.violation_value}, limit {record.violation_limit})"


def _or_abort(work: Run, shared: SharedGroup) -> Run:
    """Abort the call if it fails, or is interrupted, between two kernels."""

    def run(source: Any, destination: Any, root: int) -> Any:
        try:
            return work(source, destination, root)
        except BaseException:
            shared.abort()
            raise

    return run


class SharedCalls:
    """One collective on one group: runs kernels, and handles the statuses that they return."""

    mark = call_log.NATIVE
    """Set in the signatures of the calls."""
    only_compares = False
    """Whether another backend runs the calls."""

    def __init__(self, group: Group, kernels: Kernels, dtype: torch.dtype | None, op: str | None) -> None:
        self.group, self.call_log, self.call_queue, self.kernels = group, group.call_log, group.call_queue, kernels
        self.shared: SharedGroup = group.shared
        self.rank, self.size = group.rank, group.size
        self.transfers = np.zeros((self.size, records.Transfer.FIELDS), np.int64)
        self.message = np.zeros(Entry.FIELDS - Entry.payload, np.int64)
        self._item_bytes, self._dtype = (dtype.itemsize, dtypes.info(dtype).code) if dtype is not None else (1, 0)
        self._reducer = reduction.address(dtype, op) if dtype is not None and op is not None else 0
        self._records: dict[int, records.KernelCall] = {}
        self.rootless = self.record()
        """The address of the call record of a call without a root."""

    def operations_on_lists(self) -> dict[str, Run]:
        """Return the collectives that reduce tensors at separate addresses."""
        return {}

    def record(self, root: int = -1) -> int:
        """Return the address of the call record for a root."""
        known = self._records.get(root)
        if known is None:
            made = records.KernelCall.new().write(
                group=self.shared.record,
                item_bytes=self._item_bytes,
                reducer=self._reducer,
                root=root,
                transfers=self.transfers.ctypes.data,
                message=self.message.ctypes.data,
                dtype=self._dtype,
            )
            # Another thread may have made one meanwhile, and machine code may have its address: the first one stays.
            known = self._records.setdefault(root, made)
        return int(known)

    @property
    def seq(self) -> int:
        """The sequence number of the current call."""
        return self.call_log.seq

    def run(self, kernel: str, record: int, *arguments: int) -> int:
        """Run the kernel of the current call: 0, UNEVEN or COMPARED; every other status is handled here or raises."""
        assert self.call_log.entered is not None
        seq, code, shape = self.call_log.entered
        signature = (code ^ hash(shape)) ^ self.mark
        self.call_log.time_field = CounterFields.known_ns
        status = self.kernels[kernel](record, seq, signature, *arguments)
        while status and status & records.STATUS_KINDS not in _WITHOUT_ERROR:
            self.settle(status)
            status = self.kernels[kernel](record, seq, signature, *arguments)
        return status

    def settle(self, status: int) -> None:
        """Handle the status of a kernel: return if the kernel can be run again, or raise."""
        kind, rank = status & records.STATUS_KINDS, status & ~records.STATUS_KINDS
        try:
            if kind == records.UNMAPPED:
                self._map(rank)
            elif kind == records.VIOLATION:
                assert self.call_log.current is not None
                problem = f"a check of the kernels failed: {self.shared.take_violation()}"
                raise InternalError(f"{self.group.where}: {Call(*self.call_log.current)}: {problem}.")
            elif kind == records.MISMATCH and self._difference_to(rank) != call_log.ABORTED:
                self.call_log.refuse(rank)
            elif kind == records.TIMEOUT:
                self.call_log.expired()
            elif (other := self._differing()) is not None:
                self.call_log.refuse(other)
            else:
                self.call_log.raise_aborted(rank)
        except BaseException:
            self.shared.abort()
            raise

    def _map(self, rank: int) -> None:
        try:
            self.shared.map_segment(rank, self.seq)
        except OSError:
            if self.shared.status_board.get(rank, Block.refused) >= self.seq:
                self.call_log.raise_aborted(rank)  # so its tensor may have been freed
            raise

    def _differing(self) -> int | None:
        """Return a rank with another call; the rank that aborted may have detected the mismatch first."""
        same = 0, call_log.ABORTED
        return next((rank for rank in range(self.size) if self._difference_to(rank) not in same), None)

    def _difference_to(self, rank: int) -> int:
        """Return the difference of the signatures of this and another rank; 0 if one of them has not arrived."""
        fields, seq = self.shared.status_board.fields, self.seq
        own, other = (entry(block, seq & (RING_LENGTH - 1)) for block in (self.rank, rank))
        if fields[own + Entry.sequence] != seq or fields[other + Entry.sequence] != seq:
            return 0
        difference: int = fields[own + Entry.signature] ^ fields[other + Entry.signature]
        return difference

    def exchange(self, *, is_stream: bool, longest: int, has_sent: bool = False) -> None:
        """Run the transfers, whose lengths may differ; `longest` is the longest length of any rank."""
        arguments = self.transfers.ctypes.data, int(is_stream), longest, int(has_sent)
        status = self.kernels["exchange"](self.record(), *arguments)
        if status:
            self.settle(status)

    def synchronize(self, *payload: int) -> None:
        """Wait for all ranks; the other ranks can read `payload` afterwards."""
        self.message[: len(payload)] = payload
        self.run("barrier", self.record(), self.message.ctypes.data, len(payload) * FIELD_BYTES)

    def payloads(self) -> list[int]:
        """Return the first field of all ranks' payloads of the current call."""
        return [self.shared.status_board.fields[self.shared.payload(rank, self.seq)] for rank in range(self.size)]


class SharedComparison(SharedCalls):
    """The comparison of the calls of another backend."""

    mark = call_log.NATIVE | call_log.COMPARED
    only_compares = True

    def compare(self) -> None:
        """Wait until all ranks have made the current call; raise if the calls differ."""
        try:
            self.run("compare_only", self.rootless)
        except BaseException:
            self.shared.abort()
            raise


class SharedReduction(SharedCalls):
    """Collectives that reduce."""

    def allreduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Reduce in place, on all ranks."""
        self.run("allreduce", self.rootless, buffer.data_ptr(), buffer.numel())
        return buffer

    def operations_on_lists(self) -> dict[str, Run]:
        """Return the collectives that reduce tensors at separate addresses."""
        return {"allreduce": self.allreduce_many}

    def allreduce_many(self, tensors: TensorTable, _: Any, root: int) -> None:
        """Reduce a list of tensors in place, without packing them."""
        if tensors.num_bytes == 0:
            self.run("allreduce", self.rootless, 0, 0)
            return
        table = tensors.table
        self.run("allreduce_list", self.rootless, table.ctypes.data, len(table), tensors.num_bytes)

    def reduce(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Reduce in place on the root; the other ranks' buffers are unchanged."""
        self.run("allreduce", self.record(root), buffer.data_ptr(), buffer.numel())
        return buffer

    def reduce_scatter(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Reduce, and give each rank its part of dim 0."""
        num_rows, row_numel = rows_of(source)
        destination = destination_for(source, partition.part_of(num_rows, self.size, self.rank)[1], destination)
        row_bytes = row_numel * source.element_size()
        self.run("reduce_scatter", self.record(), source.data_ptr(), num_rows, row_bytes, destination.data_ptr())
        return destination


class SharedMovement(SharedCalls):
    """Collectives that move bytes without computing.

    Allgather, gather and alltoall assume that all ranks have the same number of rows, and allocate the result for
    that. If a kernel returns UNEVEN, the lengths are in the payloads, and `exchange` moves the data.
    """

    def barrier(self, source: Any, destination: Any, root: int) -> None:
        """Wait for all ranks."""
        self.run("barrier", self.record(), 0, 0)

    def broadcast(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Copy the root's values to all ranks, in place."""
        self.run("broadcast", self.record(root), buffer.data_ptr(), buffer.numel() * buffer.element_size())
        return buffer

    def allgather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Concatenate all ranks' rows in rank order, on all ranks."""
        num_rows, row_numel = rows_of(source)
        num_bytes = source.numel() * source.element_size()
        if row_numel == 0:  # no bytes to move, but the rows count
            self.synchronize(num_rows)
            return destination_for(source, sum(self.payloads()), destination)
        target = destination_for(source, num_rows * self.size, destination)
        if not self.run("allgather", self.record(), source.data_ptr(), num_bytes, target.data_ptr()):
            return target
        lengths = self.payloads()
        num_rows = sum(lengths) // (row_numel * source.element_size())
        target = destination_for(source, num_rows, unless_overlapping(source, destination))
        self._send([source.data_ptr()] * self.size, [num_bytes] * self.size)
        self._receive(target.data_ptr(), lengths)
        self.exchange(is_stream=True, longest=max(lengths))
        return target

    def gather(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor | None:
        """Concatenate all ranks' rows in rank order, on the root."""
        num_rows, row_numel = rows_of(source)
        row_bytes = row_numel * source.element_size()
        if row_numel == 0:  # no bytes to move, but the rows count
            self.synchronize(num_rows)
            rows, lengths = self.payloads(), [0] * self.size
        else:
            target = destination_for(source, num_rows * self.size, destination) if self.rank == root else None
            arguments = source.data_ptr(), num_rows * row_bytes, 0 if target is None else target.data_ptr()
            if not self.run("allgather", self.record(root), *arguments):
                return target
            lengths = self.payloads()
            rows = [length // row_bytes for length in lengths]
        sent = 0 if self.rank == root else lengths[self.rank]
        self._send([source.data_ptr()] * self.size, [sent] * self.size)
        if self.rank == root:
            destination = destination_for(source, sum(rows), unless_overlapping(source, destination))
            self._receive(destination.data_ptr(), lengths)
        else:
            self._receive(source.data_ptr(), [0] * self.size)
        self.exchange(is_stream=True, longest=max(lengths))
        return destination if self.rank == root else None

    def scatter(self, source: torch.Tensor | None, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Give each rank its part of dim 0 of the root's tensor."""
        if self.rank != root:  # the tensors of other ranks are ignored
            source = None
        if source is not None and source.dim() > _MAX_DIMS:
            raise ArgumentError(
                f"{self.group.where}: scatter: the tensor has {source.dim()} dimensions, more than the {_MAX_DIMS} "
                "that can be announced. Merge some with flatten()."
            )
        num_rows, row_bytes, address = 0, 0, 0
        message: tuple[int, ...] = ()
        if source is not None:
            message = dtypes.info(source.dtype).code, source.dim(), *source.shape
            num_rows, row_numel = rows_of(source)
            row_bytes, address = row_numel * source.element_size(), source.data_ptr()
        self.message[: len(message)] = message
        record, message_bytes = self.record(root), len(message) * FIELD_BYTES
        self.run("offer", record, self.message.ctypes.data, message_bytes, address, num_rows, row_bytes)
        at = self.shared.payload(root, self.seq)
        code, num_dims, *dims = self.shared.status_board.fields[at : at + 2 + _MAX_DIMS].tolist()
        dtype, shape = dtypes.from_code(code), tuple(dims[:num_dims]) or (1,)
        assert dtype is not None
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        like = torch.empty((0, *shape[1:]), dtype=dtype, device="cpu") if source is None else source
        destination = destination_for(like, partition.part_of(shape[0], self.size, self.rank)[1], destination)
        status = self.kernels["take"](record, self.seq, shape[0], row_bytes, address, destination.data_ptr())
        if status:
            self.settle(status)
        return destination

    def alltoall(self, source: torch.Tensor, destination: torch.Tensor | None, root: int) -> torch.Tensor:
        """Send part j of dim 0 to rank j."""
        num_rows, row_numel = rows_of(source)
        row_bytes = row_numel * source.element_size()
        if row_numel == 0:  # no bytes to move, but the rows count
            self.synchronize(num_rows)
        else:
            num_received = partition.part_of(num_rows, self.size, self.rank)[1] * self.size
            target = destination_for(source, num_received, destination)
            if not self.run("alltoall", self.record(), source.data_ptr(), num_rows, row_bytes, target.data_ptr()):
                return target
        rows = self.payloads()
        received = [partition.part_of(count, self.size, self.rank)[1] for count in rows]
        destination = destination_for(source, sum(received), destination)
        spans = partition.even_partition(num_rows, self.size)
        self._send([source.data_ptr() + first * row_bytes for first, _ in spans], [n * row_bytes for _, n in spans])
        self._receive(destination.data_ptr(), [count * row_bytes for count in received])
        self.exchange(is_stream=False, longest=max(-(-count // self.size) for count in rows) * row_bytes)
        return destination

    def exchange_parts(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], root: int) -> None:
        """Send part j of `sources` to rank j, and fill part j of `destinations` from it.

        A rank whose parts are equal and adjacent makes the call of an alltoall, and the others may. Otherwise it
        publishes -1 in the place of the number of elements, and behind it the sizes of its parts if they have room.
        """
        sent, expected = [part.nbytes for part in sources], [part.nbytes for part in destinations]
        source, destination = sources[0].data_ptr(), destinations[0].data_ptr()
        if buffers.are_rows(sources) and buffers.are_rows(destinations) and sent[0] == expected[0]:
            numel = sources[0].numel() * self.size
            if not self.run("alltoall", self.rootless, source, numel, self._item_bytes, destination):
                return
        else:
            sizes = *sent, *expected
            self.synchronize(*((records.PART_SIZES, *sizes) if len(sizes) < _MOST_PAYLOAD else (records.PART_SIZES,)))
        self.exchange_announced(sources, destinations)

    def exchange_announced(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
        """Exchange parts whose sizes the ranks have announced; raise on all of them if two sizes differ."""
        sent, expected = [part.nbytes for part in sources], [part.nbytes for part in destinations]
        all_sizes = self._sizes_of_parts(sent, expected)
        longest = longest_part(all_sizes, self.group.where)
        self._send([part.data_ptr() for part in sources], sent)
        self.transfers[:, records.Transfer.receive_address] = [part.data_ptr() for part in destinations]
        self.transfers[:, records.Transfer.receive_bytes] = expected
        self.exchange(is_stream=False, longest=longest, has_sent=2 * self.size >= _MOST_PAYLOAD)

    def _sizes_of_parts(self, sent: list[int], expected: list[int]) -> np.ndarray:
        """Return the bytes of the parts that each rank sends and expects, which the ranks have announced."""
        size, own = self.size, np.array([sent, expected])
        all_sizes = np.empty((size, 2, size), np.int64)
        if 2 * size >= _MOST_PAYLOAD:
            self._send([own.ctypes.data] * size, [own.nbytes] * size)
            self._receive(all_sizes.ctypes.data, [own.nbytes] * size)
            self.exchange(is_stream=True, longest=own.nbytes)
            return all_sizes
        fields, seq = self.shared.status_board.fields, self.seq
        for rank in range(size):
            at = self.shared.payload(rank, seq)
            if fields[at] == records.PART_SIZES:
                all_sizes[rank].flat = fields[at + 1 : at + 1 + 2 * size]
            else:
                all_sizes[rank] = fields[at] // size * self._item_bytes
        return all_sizes

    def _send(self, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        self.transfers[:, records.Transfer.send_address], self.transfers[:, records.Transfer.send_bytes] = (
            addresses,
            lengths,
        )

    def _receive(self, target: int, lengths: Sequence[int]) -> None:
        addresses = np.cumsum(lengths) - lengths + target
        self.transfers[:, records.Transfer.receive_address], self.transfers[:, records.Transfer.receive_bytes] = (
            addresses,
            lengths,
        )


class CallsOfFastPath:
    """The calls of an operation that the fast path runs (see :mod:`torchmpi.shared_memory.fast_path`)."""

    def __init__(self, calls: SharedCalls, collective: str, code: int, run: Run) -> None:
        self._calls, self._code, self._run, self._is_rooted = calls, code, run, SPECS[collective].is_rooted

    def cached_call(self, root: int, most_bytes: int | None) -> fast_path.CachedCall | None:
        """Return the call with this root for the fast path; None if it is used for a part of the sizes."""
        calls = self._calls
        if most_bytes is not None or calls.group.is_strict:
            return None
        code, record = self._code | root << 32, calls.record(root if self._is_rooted else -1)
        return fast_path.CachedCall(
            record,
            calls.call_log,
            calls.call_queue.run_lock,
            code,
            code ^ calls.mark,
            partial(self._settle, root),
            self._abort,
            only_compares=calls.only_compares,
        )

    def _abort(self, _: object) -> None:
        """Abort a call of the fast path that `_settle` could not begin to handle."""
        calls = self._calls
        calls.call_log.take_over(calls.kernels["read_ticks"]())
        calls.shared.abort()
        calls.call_log.abandon()

    def _settle(self, root: int, status: int, source: torch.Tensor, destination: Any) -> Any:
        """Continue after a kernel of the fast path that returned a status, or end the call with an error."""
        calls = self._calls

        def finish() -> Any:
            if status & records.STATUS_KINDS not in _WITHOUT_ERROR:
                calls.settle(status)
            return self._run(source, destination, root)

        return calls.group.settle(calls.kernels["read_ticks"](), finish)
