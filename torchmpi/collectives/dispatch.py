"""From a collective with its arguments to a call in the order of the group's call queue, and to the fast path."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from .. import other_names
from ..collective_specs import SPECS, CollectiveSpec
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.levels import Comm, used
from ..communicators.plan import PLAIN, Plan, PlanKey
from ..errors import DtypeError
from ..session import runtime
from ..shared_memory import fast_path
from ..shared_memory.memory_layout import MOST_COPIED_BYTES, LockFields
from ..tensors import buffers
from . import call_arguments
from .bound_calls import FAST_PATHS, BoundCall, memory_for_result
from .call_arguments import check_root
from .prepared import plan_for

__all__ = ["BARRIER", "cache_barrier", "call", "check_root", "plan_for", "plan_of", "submit"]

_Tensor = torch.Tensor
BARRIER = PlanKey("barrier", None, None, PLAIN)


Bind = Callable[[Plan], BoundCall]
_LASTING = (Communicator, Group)
"""Types of ``comm=`` whose objects the fast path may remember; equal numbers may be different objects."""


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
    if not (backend is None or type(backend) is str):
        backend = str(backend)  # which no backend has as its name, if this is no string
    running = runtime.running
    if comm is None and running is not None and used.get() is None:  # the most frequent case, without a call
        communicator = running.communicators.default
    else:
        communicator = runtime.communicator(comm)
    group, spec, finish = communicator.intra, SPECS[collective], None
    if type(tensor) is not _Tensor and tensor is not None:
        tensor, finish = call_arguments.from_number(group, spec, tensor, out, op)
    if out is None and spec.is_everywhere:
        calls = group.call_queue
        fields = calls.run_lock.fields
        is_behind_others = fields[LockFields.pending] != fields[LockFields.ended] and calls.finish_earlier()
        if is_behind_others or finish is not None or not spec.in_place:
            has_run, result = _run_fast(group, spec, tensor, root, op, comm, backend)
            if has_run:
                return result if finish is None else finish(result)
    plan, root = _check_call(communicator, spec, tensor, out, root, op, backend)
    # The plan of a call with None has no dtype, that of a tensor with gaps no call for the fast path, which packs it.
    may_be_cached = plan.cached_call is not None or tensor is None or _is_packed(spec, tensor, out)
    if may_be_cached and (comm is None or type(comm) in _LASTING):
        cache_call(group, spec, (tensor, out, root), op, comm, backend)
    subject = _on_device(tensor, out) if plan.is_on_device else None
    describe = group.described_call
    result = group.call_queue.run(group.perform, plan, tensor, out, root, subject=subject, describe=describe)
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
    begun = begin(collective, tensor, out, root, op, comm, backend)
    if begun is not None:
        return begun
    op, spec, finish = other_names.operation(op), SPECS[collective], None
    backend = None if backend is None else str(backend)
    communicator = runtime.communicator(comm)
    group = communicator.intra
    if type(tensor) is not _Tensor and tensor is not None:
        tensor, finish = call_arguments.from_number(group, spec, tensor, out, op)
        begun = None if finish is None else begin(collective, tensor, out, root, op, comm, backend, finish)
        if begun is not None:
            return begun
    plan, root = _check_call(communicator, spec, tensor, out, root, op, backend, "async")
    if comm is None or type(comm) in _LASTING:
        cache_call(group, spec, (tensor, out, root), op, comm, backend)
    found = _fast_call(spec, root == group.rank, tensor, out, root, op, comm, backend)
    which, dtype = (None, None) if found is None else (found[0], found[1].dtype)
    if which == "receive" and buffers.is_plain(out):
        plan = _plain_plan(group, PlanKey(collective, op, dtype, PLAIN, backend, "async")) or plan
    subject = _on_device(tensor, out) if plan.is_on_device else None
    return _bind(group, plan, which, root, dtype).begin(tensor, out, finish, subject)


def begin(
    collective: str,
    tensor: Any,
    out: _Tensor | None,
    root: Any,
    op: Any,
    comm: Comm,
    backend: str | None,
    finish: Callable[[Any], Any] | None = None,
) -> Handle[Any] | None:
    """Begin an asynchronous call like an earlier one; return None if Python must check its arguments.

    `finish` converts the result.
    """
    if type(root) is not int or not (op is None or type(op) is str):
        return None
    key = root if op is None else fast_path.joint_key(op, root) if SPECS[collective].is_rooted else op
    for find in fast_path.finders.get((collective, tensor is not None, out is not None), ()):
        bound: BoundCall | None = find(tensor, out, key, comm, backend)
        if bound is not None:
            return bound.begin(tensor, out, finish)
    return None


def _check_call(
    communicator: Communicator,
    spec: CollectiveSpec,
    tensor: Any,
    out: _Tensor | None,
    root: Any,
    op: str | None,
    backend: str | None,
    mode: str = "sync",
) -> tuple[Plan, int]:
    """Check the arguments of a collective, of which a number has become a tensor; return plan and root."""
    group = communicator.intra
    root, place = call_arguments.check(group, spec, tensor, out, root)
    key = spec.name, op, None if tensor is None else tensor.dtype, place, backend, mode
    plan: Plan | None = group.plans.get(key)
    return plan_for(communicator, PlanKey(*key)) if plan is None else plan, root


def _on_device(tensor: _Tensor | None, out: _Tensor | None) -> _Tensor:
    """Return a tensor on the device of a call; a rank that scatters nothing has the device of the process."""
    given = out if tensor is None else tensor
    return torch.empty(0, device=runtime.current().device) if given is None else given


def plan_of(
    communicator: Communicator,
    collective: str,
    tensor: _Tensor,
    *,
    op: str | None = None,
    backend: str | None = None,
    mode: str = "sync",
) -> Plan:
    """Return the plan of a call with a tensor, or raise if it cannot be sent."""
    place = call_arguments.place_of(communicator.intra, SPECS[collective], tensor, is_root=True)
    return plan_for(communicator, PlanKey(collective, op, tensor.dtype, place, backend, mode))


# --- the fast path ----------------------------------------------------------------


def _fast_call(
    spec: CollectiveSpec,
    is_root: bool,
    tensor: Any,
    out: Any,
    root: Any,
    op: str | None,
    comm: Comm,
    backend: str | None,
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
    return which, fast_path.Name(key, given.dtype, comm, backend)


def _run_fast(
    group: Group, spec: CollectiveSpec, tensor: Any, root: Any, op: str | None, comm: Comm, backend: str | None
) -> tuple[bool, Any]:
    """Run a call by the fast path, with memory made for a result of another shape; return whether that was possible."""
    if spec.in_place:  # of a number, in memory that is made for it, or behind other calls
        key = root if op is None else fast_path.joint_key(op, root) if spec.is_rooted else op
        result = fast_path.entry(spec.name)(tensor, None, key, comm, backend) if type(root) is int else None
        return result is not None, result
    if type(tensor) is not _Tensor:
        return False, None
    found = _fast_call(spec, root == group.rank, tensor, None, root, op, comm, backend)
    run = None if found is None else fast_path.function_for(*found)
    if found is None or run is None or not tensor.is_cpu or tensor.is_nested:  # which has no shape
        return False, None
    which, name = found
    made = memory_for_result(spec, group, tensor) if which.endswith(fast_path.MADE) else None
    result = run(tensor, made, name.key, comm, backend)
    return result is not None, None if made is None else result


def cache_call(
    group: Group,
    spec: CollectiveSpec,
    arguments: tuple[Any, Any, int],
    op: str | None,
    comm: Comm,
    backend: str | None,
) -> None:
    """Cache a call for the fast path, so that the next equal call does not run Python code."""
    tensor, out, root = arguments
    found = _fast_call(spec, group.rank == root, tensor, out, root, op, comm, backend)
    if found is None:
        return
    which, name = found
    key = PlanKey(spec.name, op, name.dtype, PLAIN, backend)
    is_made = key in group.plans or not (which == "receive" or _is_packed(spec, tensor, out))
    if not is_made and _plain_plan(group, key) is None:
        return
    _cache(which, group, comm, key, name.key, lambda plan: _bind(group, plan, which, root, key.dtype))


def _is_packed(spec: CollectiveSpec, tensor: _Tensor | None, out: _Tensor | None) -> bool:
    """Return whether the fast path packs such a tensor, if it has gaps between its elements."""
    is_short = spec.in_place and tensor is not None and tensor.is_cpu and tensor.nbytes <= MOST_COPIED_BYTES
    return is_short and out is None


def _plain_plan(group: Group, key: PlanKey) -> Plan | None:
    """Return the plan of a call on plain memory; None for a dtype, which a rank expects, that cannot be sent."""
    try:
        return plan_for(runtime.communicator(group), key)
    except DtypeError:  # raised when the call has ended on all ranks
        return None


def _bind(group: Group, plan: Plan, which: str | None, root: int, dtype: torch.dtype | None) -> BoundCall:
    """Return a plan bound to a root, and to the fast path of this name if machine code can run its calls."""
    known, key = plan.bound, (which, root, dtype)
    if key not in known:
        has_code = which is not None and which.removesuffix(fast_path.MADE) in FAST_PATHS
        has_code = has_code and plan.cached_call is not None and plan.cached_call(root, None) is not None
        known[key] = BoundCall(group, plan, which if which is not None and has_code else "", dtype, root)
    bound: BoundCall = known[key]
    return bound


def cache_barrier(group: Group, comm: Comm) -> None:
    """Cache the barrier of a group for the fast path."""
    _cache("barrier", group, comm, BARRIER, None, lambda plan: _bind(group, plan, "barrier", 0, None))


def cache_list(group: Group, key: PlanKey, comm: Comm, bind: Bind) -> None:
    """Cache the allreduce of a list for the fast path; `bind` returns the calls of the plan with lists."""
    _cache("allreduce_many", group, comm, key, key.op, bind)


def _cache(which: str, group: Group, comm: Comm, key: PlanKey, call_key: Hashable, bind: Bind) -> None:
    plan: Plan | None = group.plans.get(key)
    if plan is not None and plan.cached_call is not None and (comm is None or type(comm) in _LASTING):
        name = fast_path.Name(call_key, key.dtype, comm, key.backend)
        fast_path.cache_call(which, name, partial(_cached_call, group, plan, comm, key, bind))


def _cached_call(group: Group, plan: Plan, comm: Comm, key: PlanKey, bind: Bind) -> fast_path.CachedCall | None:
    is_meant = comm is not None or (used.get() is None and runtime.communicator(None).intra is group)
    is_meant = is_meant and group.plans.get(key) is plan  # another thread may have changed the table meanwhile
    bound = bind(plan) if is_meant and not group.call_queue.closed else None
    cached = None if bound is None else bound.cached_call()
    if cached is None or not SPECS[key.collective].has_async:
        return cached
    is_same = plan_for(runtime.communicator(group), key._replace(mode="async")) is plan
    return cached._replace(bound=bound) if is_same else cached
