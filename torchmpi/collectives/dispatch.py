"""From a collective with its arguments to a call in the order of the group's call queue, and to the fast path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import other_names
from ..collective_specs import IN_PLACE, SPECS
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.levels import Comm, used
from ..communicators.plan import PLAIN, Plan, PlanKey
from ..errors import DtypeError
from ..session import runtime
from ..shared_memory import fast_path
from ..tensors import bucket_plan
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
    group, plan, given, root, finish = checked = check_call(collective, tensor, out, root, op, comm, backend)
    may_be_cached = plan.cached_call is not None or given is None  # the plan of a call with None has no dtype
    if may_be_cached and backend is None and (comm is None or type(comm) in _LASTING):
        cache_call(group, collective, (given, out, root), op, comm)
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


def cache_call(group: Group, collective: str, arguments: tuple[Any, Any, int], op: str | None, comm: Comm) -> None:
    """Cache a call for the fast path, so that the next equal call does not run Python code."""
    tensor, out, root = arguments
    which, is_root, given = collective, group.rank == root, out if tensor is None else tensor
    if out is not None and collective in IN_PLACE:
        which = f"{collective}_into"
    if which == "gather" and not is_root:
        which = "give"
    elif which == "scatter" and tensor is None:
        which = "receive"
    if given is None or (which in ("gather", "give") and is_root == (out is None)):
        return
    if which == "scatter" and not is_root:  # the tensor of a receiver is ignored
        return
    name = root if op is None else fast_path.joint_key(op, root) if which == "reduce" else op, given.dtype, comm
    key = PlanKey(collective, op, given.dtype, PLAIN)
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


def _cache(which: str, name: fast_path.Name, group: Group, root: int, comm: Comm, key: PlanKey) -> None:
    plan: Plan | None = group.plans.get(key)
    if plan is not None and plan.cached_call is not None:
        fast_path.cache_call(which, name, partial(_cached_call, group, plan, root, comm, key))


def _cached_call(group: Group, plan: Plan, root: int, comm: Comm, key: PlanKey) -> fast_path.CachedCall | None:
    is_meant = comm is not None or (used.get() is None and runtime.communicator(None).intra is group)
    is_meant = is_meant and group.plans.get(key) is plan  # another thread may have changed the table meanwhile
    if not is_meant or group.call_queue.closed or plan.cached_call is None:
        return None
    cached_call: fast_path.CachedCall | None = plan.cached_call(root, None)
    return cached_call
