"""Allreduce of lists of tensors.

Tensors of one dtype and device form one :class:`TensorList`. If the backend reduces tensors at separate addresses (as
`shm` does), a list is one call and nothing is packed; otherwise tensors are packed into messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from ..argument_types import check_types
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.handle import Handle, JoinedHandle
from ..communicators.levels import Comm
from ..communicators.plan import PLAIN, PLAIN_ON, Plan, PlanKey
from ..config import BackendName, Operation
from ..errors import ArgumentError
from ..other_names import operation, refuses_keywords, unknown_keyword
from ..session import runtime
from ..shared_memory import fast_path
from ..shared_memory.memory_layout import CHECKSUM_MODULUS
from ..tensors import bucket_plan, buffers, writable
from ..timeline import events
from . import dispatch, reductions
from .bound_calls import BoundCall

__all__ = ["allreduce_many", "allreduce_many_async"]

_Tensor = torch.Tensor

_LIST = "allreduce_many"
_LINE_BYTES = 64
_OFFSET, _ADDRESS, _LENGTH = range(3)


class TensorList:
    """Tensors of one dtype on one device, and the plan that reduces them.

    A backend that reduces tensors at separate addresses treats them as one stream of bytes, described by `table`. It
    works in the memory of the tensors, or in copies of tensors that are not contiguous or that overlap; `write_back`
    copies these back.

    Attributes:
        tensors: The tensors, in the order of the list they were taken from.
        plan: The plan of an allreduce of one of them.
        work: The tensors to reduce in place, set by `begin`.
        table: For each tensor that is not empty its offset in the stream, address and length in bytes.
        num_bytes: The length of the stream.
        signature: The numbers that the ranks compare: elements in all, number of tensors, checksum of the shapes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tensors: list[_Tensor] = []
        self._shapes: list[torch.Size] = []
        self._rows: list[tuple[int, int, int]] = []
        self._is_direct = True
        self._known_addresses: NDArray[np.int64] | None = None

    def add(self, tensor: _Tensor, *, is_direct: bool) -> None:
        """Add a tensor; `is_direct`: it can be reduced where it is."""
        self.tensors.append(tensor)
        self._shapes.append(tensor.shape)
        self._rows.append((0, tensor.data_ptr(), tensor.nbytes))
        self._is_direct = self._is_direct and is_direct

    def begin(self) -> None:
        """Determine the memory to reduce."""
        tensors = self.work = self.tensors
        if not self._is_direct:
            self._work_on([each if buffers.is_direct(each) else buffers.plain(each, to_host=False) for each in tensors])
        if self._have_overlaps():
            # Memory that belongs to two tensors would be reduced twice.
            self._work_on([each.detach().clone(memory_format=torch.contiguous_format) for each in self.work])
        table = self._addresses()
        ends = np.cumsum(-(-table[:, _LENGTH] // _LINE_BYTES) * _LINE_BYTES)
        table[1:, _OFFSET] = ends[:-1]
        self.table, self.num_bytes = table, int(table[-1, _OFFSET] + table[-1, _LENGTH]) if len(table) else 0
        numel = int(table[:, _LENGTH].sum()) // tensors[0].element_size()
        self.signature = (numel, len(tensors), hash(tuple(self._shapes)) % CHECKSUM_MODULUS)

    def may_overlap(self) -> bool:
        """Return whether two tensors may share memory."""
        return self._have_overlaps() if self._is_direct else len(self.tensors) > 1

    def _have_overlaps(self) -> bool:
        table = self._addresses()
        by_address = table[table[:, _ADDRESS].argsort()]
        return bool((by_address[:-1, _ADDRESS] + by_address[:-1, _LENGTH] > by_address[1:, _ADDRESS]).any())

    def _addresses(self) -> NDArray[np.int64]:
        """Return the rows of the tensors that are not empty, made once."""
        if self._known_addresses is None:
            table = np.array(self._rows, np.int64).reshape(-1, 3)
            self._known_addresses = table[table[:, _LENGTH] > 0]
        return self._known_addresses

    def _work_on(self, work: list[_Tensor]) -> None:
        self.work, self._known_addresses = work, None
        self._rows = [(0, each.data_ptr(), each.nbytes) for each in work]

    @property
    def is_plain(self) -> bool:
        """Whether it has several tensors, and the fast path can run their call."""
        return self._is_direct and len(self.tensors) > 1 and self.tensors[0].is_cpu

    @property
    def nbytes(self) -> int:
        """The length of the stream, as of a tensor."""
        return self.num_bytes

    def numel(self) -> int:
        """Return the number of elements in all."""
        return self.signature[0]

    def write_back(self) -> None:
        """Copy results out of the copies, and notify autograd that the tensors have changed."""
        if self.work is self.tensors:
            buffers.touch_all(self.tensors)
            return
        for tensor, work in zip(self.tensors, self.work, strict=True):
            if work is tensor:
                buffers.touch(tensor)
            else:
                buffers.overwrite(tensor, work)


def tensor_lists(
    tensors: Iterable[_Tensor], comm: Communicator, op: str, backend: str | None = None, mode: str = "sync"
) -> list[TensorList]:
    """Group tensors by dtype and device, in the order of their first occurrence: the same lists on all ranks.

    Each tensor is inspected once, and the plan of each list is looked up once.

    Raises:
        ArgumentError: A tensor cannot be sent, or the operation does not support its dtype.
    """
    lists: dict[tuple[torch.dtype, torch.device], TensorList] = {}
    backend = None if backend is None else str(backend)
    for tensor in tensors:
        is_direct = buffers.is_plain(tensor) or buffers.is_plain_on_gpu(tensor)
        if not is_direct:
            buffers.check(tensor, f"{comm.intra.where}: allreduce_many", written=True)
            is_direct = buffers.is_direct(tensor)
        dtype, device = tensor.dtype, tensor.device
        members = lists.get((dtype, device))
        if members is None:
            key = PlanKey("allreduce", op, dtype, PLAIN_ON[device.type], backend, mode)
            plan: Plan | None = comm.intra.plans.get(key)
            members = lists[dtype, device] = TensorList(dispatch.plan_for(comm, key) if plan is None else plan)
        members.add(tensor, is_direct=is_direct)
    return list(lists.values())


def enqueues(tensor: _Tensor, comm: Communicator) -> bool:
    """Return whether an allreduce of such a tensor enqueues its work on a device and returns."""
    return dispatch.plan_of(comm, "allreduce", tensor, op="sum").enqueues


def reduce_fast(tensors: Sequence[_Tensor], comm: Communicator, op: str) -> bool:
    """Reduce a list in place by the fast path; return whether that was possible."""
    return fast_path.allreduce_many(list(tensors), None, op, comm, None) is not None


def reduce_unpacked(lists: Sequence[TensorList], comm: Communicator, op: str) -> None:
    """Reduce lists with plans that need no packing, in place, and let the fast path run the next ones."""
    group = comm.intra
    _cache(lists, group, op, comm, None)
    for members in lists:
        _run_unpacked(members, group)


def _run_unpacked(members: TensorList, group: Group) -> None:
    assert members.plan.many is not None
    members.begin()
    group.call_queue.run(group.perform, members.plan.many, members, None, 0)
    members.write_back()


def _cache(lists: Sequence[TensorList], group: Group, op: str, comm: Comm, backend: str | None) -> None:
    """Let the fast path run the next call with a list of this dtype."""
    if len(lists) == 1 and lists[0].is_plain:
        dtype = lists[0].tensors[0].dtype
        key = PlanKey("allreduce", op, dtype, PLAIN, backend)
        dispatch.cache_list(group, key, comm, partial(_bind, group, dtype))


def _bind(group: Group, dtype: torch.dtype, plan: Plan) -> _BoundLists:
    """Return the calls of a plan with lists."""
    bound: _BoundLists = plan.bound.setdefault("list", _BoundLists(group, plan, _LIST, dtype, name=_LIST))
    return bound


def _table_of(plan: Plan, tensors: list[_Tensor]) -> TensorList:
    members = TensorList(plan)
    for tensor in tensors:
        members.add(tensor, is_direct=buffers.is_direct(tensor))
    members.begin()
    return members


class _BoundLists(BoundCall):
    """Calls with lists of host tensors of one dtype."""

    def cached_call(self) -> fast_path.CachedCall | None:
        """Return the call for machine code, given that with a table of the tensors."""
        find = None if self.plan.many is None else self.plan.many.cached_call
        of_table: fast_path.CachedCall | None = None if find is None else find(0, None)
        return None if of_table is None else of_table._replace(settle=partial(self._settle, of_table.settle))

    def _settle(self, settle: Callable[..., Any], status: int, tensors: list[_Tensor], _: None) -> list[_Tensor]:
        table: Any = _table_of(self.plan, tensors)
        settle(status, table, None)
        return tensors

    def perform(self, given: list[_Tensor], out: _Tensor | None) -> list[_Tensor]:
        """Run a call in Python; the caller holds the run lock."""
        members = _table_of(self.plan, given)
        assert self.plan.many is not None
        self.group.perform(self.plan.many, members, None, 0)
        members.write_back()
        return given

    def described_call(self, given: list[_Tensor], out: None) -> events.ShownCall:
        """Return what the profiler shows of a call."""
        assert self.plan.many is not None
        return self.group.described_call(self.plan.many, given, out, self.root)


@refuses_keywords
def allreduce_many(
    tensors: Iterable[_Tensor],
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> list[_Tensor]:
    """Run :func:`~torchmpi.allreduce` on many tensors with few messages, in place.

    The results have the same bits as those of one call per tensor.

    Args:
        tensors: Tensors of any shapes, dtypes and devices; the same on every rank. No tensor may occur
            twice or overlap another one.
        op: Reduction operation, as for :func:`~torchmpi.allreduce`.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

    Returns:
        The list of the tensors.

    Raises:
        ArgumentError: A tensor cannot be used; no tensor has been changed then.
        MismatchError: The ranks made different calls; raised on all ranks.

    Example:
        mpi.allreduce_many([p.grad for p in model.parameters()], op="avg")
    """
    if _unknown:
        raise unknown_keyword(allreduce_many, _unknown)
    tensors = _listed(allreduce_many, tensors)
    if fast_path.allreduce_many(tensors, None, op, comm, backend) is not None:
        return tensors
    if started := _start(tensors, op, comm, backend, asynchronous=False):
        JoinedHandle(started, tensors, "allreduce_many").wait()
    return tensors


@refuses_keywords
def allreduce_many_async(
    tensors: Iterable[_Tensor],
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Handle[list[_Tensor]]:
    """Run :func:`~torchmpi.allreduce_many` in the background, with the same parameters.

    Messages are sent while the next ones are packed.

    Returns:
        A handle whose ``wait()`` returns the list of the tensors.

    Raises:
        ArgumentError: A tensor cannot be used. Errors of the call itself are raised by ``wait()``.

    Example:
        handle = mpi.allreduce_many_async([p.grad for p in model.parameters()], op="avg")
        handle.wait()
    """
    if _unknown:
        raise unknown_keyword(allreduce_many_async, _unknown)
    tensors = _listed(allreduce_many_async, tensors)
    begun = dispatch.begin("allreduce_many", tensors, None, 0, op, comm, backend)
    if begun is not None:
        return begun
    started = _start(tensors, op, comm, backend, asynchronous=True)
    return JoinedHandle(started, tensors, f"{runtime.communicator(comm).intra.where}: allreduce_many")


def _listed(function: Callable[..., Any], tensors: Iterable[_Tensor]) -> list[_Tensor]:
    try:
        return list(tensors)
    except TypeError:
        check_types(function, tensors=tensors)
        raise


def _start(
    tensors: list[_Tensor], op: Operation, comm: Comm, backend: BackendName | None, *, asynchronous: bool
) -> list[Handle[Any]]:
    """Run or submit the calls, each with writing its results back; return the handles of the submitted ones."""
    communicator = runtime.communicator(comm)
    group = communicator.intra
    # All plans before the first call: a list that is rejected leaves the tensors unchanged.
    op = operation(op)
    where = group.where
    buffers.refuse_tracing(f"{where}: allreduce_many")
    lists = tensor_lists(tensors, communicator, op, backend, "async" if asynchronous else "sync")
    writable.refuse_read_only(where, "allreduce", *tensors)
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ArgumentError(
            f"{where}: allreduce_many: a tensor is in the list twice, and would be reduced once. Pass each tensor once."
        )
    for members in lists:
        if members.may_overlap() and buffers.overlap_of_any(members.tensors):
            raise ArgumentError(
                f"{where}: allreduce_many: two tensors share memory, which could be reduced twice. Pass views "
                "that do not overlap, or copies."
            )
    _cache(lists, group, op, comm, backend)
    started: list[Handle[Any]] = []
    for members in lists:
        if len(members.tensors) == 1 or members.plan.many is None:
            started += _start_packed(members, communicator, op, backend, asynchronous=asynchronous)
        elif asynchronous:
            started.append(_bind(group, members.tensors[0].dtype, members.plan).begin(members.tensors, None))
        else:
            _run_unpacked(members, group)
    return started


def _start_packed(
    members: TensorList, comm: Communicator, op: Operation, backend: BackendName | None, *, asynchronous: bool
) -> list[Handle[Any]]:
    """Pack the tensors into messages; one is sent while the next is packed, unless the device does both in order."""
    started: list[Handle[Any]] = []
    is_queued = asynchronous or not (members.plan.enqueues or len(members.tensors) == 1)
    bucket_bytes = runtime.current().config.bucket_bytes_on(members.tensors[0].device.type)
    for indices in bucket_plan.plan_buckets(members.tensors, bucket_bytes):
        parts = [members.tensors[index] for index in indices]
        if len(parts) == 1 and is_queued:
            started.append(dispatch.submit("allreduce", parts[0], op=op, comm=comm, backend=backend))
        elif len(parts) == 1:
            reductions.allreduce(parts[0], op=op, comm=comm, backend=backend)
        else:
            flat, task = _packed(comm, parts, op, backend, "async" if is_queued else "sync")
            call_queue = comm.intra.call_queue
            if is_queued:
                started.append(call_queue.submit(task, f"{comm.intra.where}: {_LIST}", flat))
            else:
                call_queue.run(task, subject=flat)
    return started


def _packed(
    comm: Communicator, parts: Sequence[_Tensor], op: str, backend: str | None, mode: str
) -> tuple[_Tensor, Callable[[], None]]:
    """Pack tensors into one; return it, and a task that reduces it and unpacks it into the tensors."""
    group, flat = comm.intra, bucket_plan.pack(parts)
    plan = dispatch.plan_of(comm, "allreduce", flat, op=op, backend=backend, mode=mode)
    plan = plan.for_many(tuple([part.shape for part in parts]))

    def task() -> None:
        group.perform(plan, flat, None, 0)
        bucket_plan.unpack(flat, parts)

    return flat, group.shown(task, group.described_call, plan, flat, None, 0)
