"""From a collective with its arguments to a call in the order of the group's call queue, and to the fast path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import other_names
from ..backends.mpi_messages import destination_for, rows_of
from ..collective_specs import SPECS, CollectiveSpec
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.levels import Comm, used
from ..communicators.plan import PLAIN, Plan, PlanKey
from ..errors import DtypeError
from ..session import runtime
from ..shared_memory import fast_path
from ..tensors import bucket_plan, partition
from . import call_arguments
from .call_arguments import check_root
from .prepared import plan_for

__all__ = [
    "BARRIER", "cache_barrier", "call", "check_root", "plan_for", "plan_of", "run_packed", "submit", "submit_packed",
]  # fmt: skip

_Tensor = torch.Tensor
BARRIER = PlanKey("barrier", None, None, PLAIN)


_LASTING = (Communicator, Group)
"""Types of ``comm=`` whose objects the fast path may remember; equal numbers may be different objects."""


class CheckedCall(NamedTuple):
    """A collective call with checked arguments."""

    group: Group
    plan: Plan
    tensor: _Tensor | None
    root: int
    finish: Callable[[Any], Any] | None
    """Converts the result, if the argument was a number."""

    def subject(self, out: _Tensor | None) -> _Tensor | None:
        """Return a tensor on the device of a call on device tensors, else None."""
        if not self.plan.is_on_device:
            return None
        if self.tensor is None and out is None:  # a rank that scatters nothing has the device of the process
            return torch.empty(0, device=runtime.current().device)
        return out if self.tensor is None else self.tensor


def call(
    collective: str,
    tensor: Any,
    out: _Tensor | None,
    root: Any = 0,
    op: str | None = None,
    comm: Comm = None,
    backend: str | None = None,
) -> Any:
    """Run a collective, and let the fast path run the next equal call."""
    if not (op is None or type(op) is str):  # an operation of torch.distributed or mpi4py
        op = other_names.operation(op)
    spec, finish = SPECS[collective], None
    if out is None and backend is None and spec.is_everywhere:
        if type(tensor) is not _Tensor:
            tensor, finish = call_arguments.from_number(runtime.communicator(comm).intra, spec, tensor, out, op)
        if finish is not None or not spec.in_place:
            has_run, result = _run_fast(spec, tensor, root, op, comm)
            if has_run:
                return result if finish is None else finish(result)
    group, plan, given, root, _ = checked = check_call(collective, tensor, out, root, op, comm, backend)
    may_be_cached = plan.cached_call is not None or given is None  # the plan of a call with None has no dtype
    if may_be_cached and backend is None and (comm is None or type(comm) in _LASTING):
        cache_call(group, spec, (given, out, root), op, comm)
    subject = checked.subject(out) if plan.is_on_device else None
    describe = group.described_call
    result = group.call_queue.run(group.perform, plan, given, out, root, subject=subject, describe=describe)
    return result if finish is None else finish(result)


def submit(
    collective: str,
    tensor: Any,
    out: _Tensor | None = None,
    *,
    root: int = 0,
    op: str | None = None,
    comm: Comm = None,
    backend: str | None = None,
) -> Handle[Any]:
    """Run a collective in the background."""
    checked = check_call(collective, tensor, out, root, other_names.operation(op), comm, backend, "async")
    group, plan, given, root, finish = checked

    def task() -> Any:
        result = group.perform(plan, given, out, root)
        return result if finish is None else finish(result)

    return group.call_queue.submit(
        task,
        f"{group.where}: {collective}",
        checked.subject(out),
        call=partial(group.described_call, plan, given, out, root),
        in_any_thread=not plan.is_on_device,
    )


def check_call(
    collective: str,
    tensor: Any,
    out: _Tensor | None,
    root: Any,
    op: str | None,
    comm: Comm,
    backend: str | None,
    mode: str = "sync",
) -> CheckedCall:
    """Check the arguments of a collective and find its plan."""
    running = runtime.running
    if comm is None and running is not None and used.get() is None:  # the most frequent case, without a call
        communicator = running.communicators.default
    else:
        communicator = runtime.communicator(comm)
    group = communicator.intra
    tensor, root, place, finish = call_arguments.check(group, SPECS[collective], tensor, out, root, op)
    key = collective, op, None if tensor is None else tensor.dtype, place, backend, mode
    plan: Plan | None = group.plans.get(key)
    return CheckedCall(group, plan_for(communicator, PlanKey(*key)) if plan is None else plan, tensor, root, finish)


def submit_packed(communicator: Communicator, parts: Sequence[_Tensor], op: str, backend: str | None) -> Handle[Any]:
    """Run the allreduce of several tensors of one dtype and device, packed into one, in the background."""
    group = communicator.intra
    flat, plan = _packed(communicator, parts, op, backend, "async")

    def task() -> None:
        group.perform(plan, flat, None, 0)
        bucket_plan.unpack(flat, parts)

    shown = group.shown(task, group.described_call, plan, flat, None, 0)
    return group.call_queue.submit(shown, f"{group.where}: {plan.collective}", flat)


def run_packed(communicator: Communicator, parts: Sequence[_Tensor], op: str, backend: str | None) -> None:
    """Run the call of `submit_packed` on the current stream, for a backend that enqueues its work on a device."""
    group = communicator.intra
    flat, plan = _packed(communicator, parts, op, backend, "sync")
    group.call_queue.run(group.perform, plan, flat, None, 0, subject=flat)
    bucket_plan.unpack(flat, parts)


def _packed(
    communicator: Communicator, parts: Sequence[_Tensor], op: str, backend: str | None, mode: str
) -> tuple[_Tensor, Plan]:
    flat, shapes = bucket_plan.pack(parts), tuple([part.shape for part in parts])
    plan = plan_of(communicator, "allreduce", flat, op=op, backend=backend, mode=mode)
    return flat, plan.for_many(shapes)


def plan_of(
    communicator: Communicator,
    collective: str,
    tensor: _Tensor | None,
    out: _Tensor | None = None,
    *,
    op: str | None = None,
    backend: str | None = None,
    mode: str = "sync",
) -> Plan:
    """Return the plan of a call with these tensors, or raise if they cannot be sent.

    `tensor` is None on the ranks other than the root of a scatter.
    """
    group = communicator.intra
    place = call_arguments.place_of(group, SPECS[collective], tensor, out, is_root=tensor is not None)
    key = collective, op, None if tensor is None else tensor.dtype, place, backend, mode
    plan: Plan | None = group.plans.get(key)
    return plan_for(communicator, PlanKey(*key)) if plan is None else plan


# --- the fast path ----------------------------------------------------------------


def _fast_call(
    spec: CollectiveSpec, is_root: bool, tensor: Any, out: Any, root: Any, op: str | None, comm: Comm
) -> tuple[str, fast_path.Name] | None:
    """Return the fast path for a call, and the identity of the call; None if there is none."""
    which, given = spec.name, out if tensor is None else tensor
    if given is None or type(root) is not int:
        return None
    if spec.only_root_passes and not is_root:
        if tensor is not None:  # which is ignored
            return None
        which = "receive"
    elif not (spec.in_place or spec.receives(is_root)):
        if out is not None:
            return None
        which = "give"
    elif spec.in_place == (out is not None):
        which += fast_path.INTO if spec.in_place else fast_path.MADE
    key = root if op is None else fast_path.joint_key(op, root) if spec.is_rooted else op
    return which, (key, given.dtype, comm)


def _run_fast(spec: CollectiveSpec, tensor: Any, root: Any, op: str | None, comm: Comm) -> tuple[bool, Any]:
    """Run a call by the fast path, with memory made for a result of another shape; return whether that was possible."""
    group = runtime.communicator(comm).intra
    found = _fast_call(spec, root == group.rank, tensor, None, root, op, comm) if type(tensor) is _Tensor else None
    if found is None or not (fast_path.knows(*found) and tensor.is_cpu):
        return False, None
    which, (key, *_) = found
    made = _memory_for_result(spec, group, tensor) if which.endswith(fast_path.MADE) else None
    result = fast_path.entry(which)(tensor, made, key, comm, None)
    return result is not None, result if spec.in_place or made is not None else None


def _memory_for_result(spec: CollectiveSpec, group: Group, tensor: _Tensor) -> _Tensor:
    """Return memory for the rows of this rank, if all ranks pass as many."""
    num_rows, _ = rows_of(tensor)
    if spec.divides:
        num_rows = partition.part_of(num_rows, group.size, group.rank)[1]
    return destination_for(tensor, num_rows * group.size if spec.gathers else num_rows, None)


def cache_call(group: Group, spec: CollectiveSpec, arguments: tuple[Any, Any, int], op: str | None, comm: Comm) -> None:
    """Cache a call for the fast path, so that the next equal call does not run Python code."""
    tensor, out, root = arguments
    found = _fast_call(spec, group.rank == root, tensor, out, root, op, comm)
    if found is None:
        return
    which, name = found
    key = PlanKey(spec.name, op, name[1], PLAIN)
    if which == "receive" and key not in group.plans:
        try:
            plan_for(runtime.communicator(comm), key)
        except DtypeError:  # raised when the call has ended on all ranks
            return
    _cache(which, name, group, root, comm, key)


def cache_barrier(group: Group, comm: Comm) -> None:
    """Cache the barrier of a group for the fast path."""
    if comm is None or type(comm) in _LASTING:
        _cache("barrier", (None, None, comm), group, 0, comm, BARRIER)


def cache_list(group: Group, key: PlanKey, comm: Comm, settle_by: Callable[[Plan, Any], Any]) -> None:
    """Cache the allreduce of a list for the fast path.

    `settle_by(plan, settle)` returns what continues it with the list, given what continues it with a `TensorTable`.
    """
    if comm is None or type(comm) in _LASTING:
        _cache("allreduce_many", (key.op, key.dtype, comm), group, 0, comm, key, settle_by)


def _cache(
    which: str,
    name: fast_path.Name,
    group: Group,
    root: int,
    comm: Comm,
    key: PlanKey,
    settle_by: Callable[[Plan, Any], Any] | None = None,
) -> None:
    plan: Plan | None = group.plans.get(key)
    if plan is not None and plan.cached_call is not None:
        fast_path.cache_call(which, name, partial(_cached_call, group, plan, root, comm, key, settle_by))


def _cached_call(
    group: Group, plan: Plan, root: int, comm: Comm, key: PlanKey, settle_by: Callable[[Plan, Any], Any] | None
) -> fast_path.CachedCall | None:
    is_meant = comm is not None or (used.get() is None and runtime.communicator(None).intra is group)
    is_meant = is_meant and group.plans.get(key) is plan  # another thread may have changed the table meanwhile
    chosen = plan if settle_by is None else plan.many
    if not is_meant or group.call_queue.closed or chosen is None or chosen.cached_call is None:
        return None
    cached: fast_path.CachedCall | None = chosen.cached_call(root, None)
    return cached if cached is None or settle_by is None else cached._replace(settle=settle_by(plan, cached.settle))
