"""From the arguments of a collective to its plan, and to a call in the order of the group's call queue."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import other_names
from ..collective_specs import IN_PLACE, SPECS, CollectiveSpec, spec_of
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.levels import Comm, used
from ..communicators.plan import PLAIN, PLAIN_ON, Place, Plan, PlanKey
from ..errors import ArgumentError, DeviceError, DtypeError
from ..session import runtime
from ..shared_memory import fast_path
from ..tensors import bucket_plan, buffers, writable
from ..tensors.dtypes import OPS
from ..tensors.numbers import as_tensor, is_number, restore
from ..tensors.operation_specs import OPERATIONS
from .prepared import prepare

_Tensor = torch.Tensor
_get_tracing_state = torch._C._get_tracing_state  # bound once: every call that the fast path does not run uses it
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
    """Check the arguments of a collective and find its plan: with few checks if the tensors are plain."""
    running = runtime.running
    if comm is None and running is not None and used.get() is None:  # the most frequent case, without a call
        communicator = running.communicators.default
    else:
        communicator = runtime.communicator(comm)
    group, spec = communicator.intra, SPECS[collective]
    place = classify(spec, tensor, out) if _get_tracing_state() is None else None
    is_root = root == group.rank
    is_known = type(root) is int and 0 <= root < group.size and (tensor is not None or not spec.passes(is_root))
    if place is None or not is_known:
        return _check_others(communicator, spec, tensor, out, root, op, backend, mode)
    key = collective, op, None if tensor is None else tensor.dtype, place, backend, mode
    plan: Plan | None = group.plans.get(key)
    if plan is None:
        plan = plan_for(communicator, PlanKey(*key))
    if out is None:
        refuse_read_only(group, collective, tensor, root)
    elif spec.receives(is_root):
        writable.refuse_read_only(out, group.where, f"{collective}: out")
    return CheckedCall(group, plan, tensor, root, None)


def _check_others(
    communicator: Communicator,
    spec: CollectiveSpec,
    tensor: Any,
    out: _Tensor | None,
    root: Any,
    op: str | None,
    backend: str | None,
    mode: str,
) -> CheckedCall:
    """Check a number, a tensor that is not plain, or anything else that may have been passed."""
    group = communicator.intra
    what = f"{group.where}: {spec.name}"
    buffers.refuse_tracing(what)
    finish: Callable[[Any], Any] | None = None
    if out is not None and not isinstance(out, _Tensor):
        raise DtypeError(f"{what}: {_not_out(out)}")
    if is_number(tensor):
        refuse_number(spec.name, out, what)
        tensor, finish = _checked_number(tensor, op, spec.name, group), _number_result
    if spec.is_rooted:
        root = check_root(group, root, spec.name)
    is_root = group.rank == root
    if tensor is None and spec.passes(is_root):
        buffers.check(tensor, what, or_number=not spec.divides)
    receives = spec.receives(is_root)
    plan = plan_of(communicator, spec.name, tensor, out, op=op, backend=backend, mode=mode, receives=receives)
    if out is None:
        refuse_read_only(group, spec.name, tensor, root)
    return CheckedCall(group, plan, tensor, root, finish)


def classify(spec: CollectiveSpec, tensor: Any, out: Any = None) -> Place | None:
    """Return the place of tensors that need no further checks; None for all others.

    `tensor` is None where only the root passes one. Memory for the result, `out`, is plain if it is apart from the
    tensor, and of the same dtype; if the result replaces the tensor, of the same shape too.
    """
    if tensor is None:
        return PLAIN if spec.only_root_passes and (out is None or buffers.is_plain(out)) else None
    if buffers.is_plain(tensor):
        if out is None:
            return PLAIN
        is_apart = buffers.is_plain(out) and out.dtype is tensor.dtype and not buffers.overlap(out, tensor)
        return PLAIN if is_apart and (out.shape == tensor.shape or not spec.in_place) else None
    return PLAIN_ON["cuda"] if out is None and buffers.is_plain_on_gpu(tensor) else None


def _checked_number(value: Any, op: str | None, collective: str, group: Group) -> _Tensor:
    """Return a number as a tensor; raise if it does not fit, or if as many such integers as there are ranks do not."""
    what = f"{group.where}: {collective}"
    try:
        tensor = as_tensor(value, op)
    except DtypeError as error:
        raise DtypeError(f"{what}: {error}") from None
    is_sum = op in OPERATIONS and OPERATIONS[op].combine == "sum"
    if is_sum and tensor.dtype is torch.int64 and not -(1 << 63) <= int(value) * group.size < 1 << 63:
        raise DtypeError(
            f"{what}: the sum of {group.size} integers like {value} does not fit into 64 bits. Add them in Python, "
            "which is exact: sum(mpi.allgather_object(number)); or pass a float."
        )
    return tensor


def refuse_read_only(group: Group, collective: str, tensor: _Tensor | None, root: int) -> None:
    """Raise if a collective writes to the tensor of this rank, which is in memory that cannot be written."""
    if tensor is None or not SPECS[collective].changed_by[root == group.rank]:
        return
    if not writable.is_writable(tensor):  # else no name of the rank is needed
        writable.refuse_read_only(tensor, group.where, collective)


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
    receives: bool = True,
) -> Plan:
    """Return the plan of a call with these tensors, or raise if they cannot be sent.

    `tensor` is None on the ranks other than the root of a scatter. `out` is not used on a rank that does not receive.
    """
    group, spec = communicator.intra, SPECS[collective]
    place: str | None = classify(spec, tensor, out)
    if place is None and tensor is not None:
        what = f"{group.where}: {collective}"
        buffers.check(tensor, what, written=out is None and spec.in_place, or_number=not spec.divides)
        is_usable = out is None and buffers.is_direct(tensor)
        place = PLAIN_ON[tensor.device.type] if is_usable else tensor.device.type
    elif place is None:
        place = "cpu" if out is None else out.device.type
    if out is not None and receives:
        check_out(collective, tensor, out, f"{group.where}: {collective}")
    key = collective, op, None if tensor is None else tensor.dtype, place, backend, mode
    plan: Plan | None = group.plans.get(key)
    return plan_for(communicator, PlanKey(*key)) if plan is None else plan


def plan_for(communicator: Communicator, key: PlanKey) -> Plan:
    """Return the plan for a key, made on first use."""
    known = communicator.intra.plans
    plan: Plan | None = known.get(key)
    if plan is None:
        plan = known[key] = prepare(runtime.current(), communicator, key)
    return plan


def check_root(group: Group, root: Any, collective: str) -> int:
    """Return a root as an integer, or raise if it is not a rank of the group."""
    try:
        number = -1 if isinstance(root, bool) else operator.index(root)  # numpy's integers too
    except TypeError:
        number = -1
    if not 0 <= number < group.size:
        op = other_names.known_operation(root, OPS) if spec_of(collective).reduces else None
        remedy = f"Use 0 to {group.size - 1}" if op is None else f"Pass the operation by keyword: op={op!r}"
        raise ArgumentError(
            f"{group.where}: {collective}: root={root!r} is not a rank of communicator {group.name}. {remedy}."
        )
    return number


def check_out(collective: str, tensor: Any, out: Any, what: str) -> None:
    """Raise if the result of a collective cannot be written to `out`."""
    buffers.check(out, f"{what}: out", written=True)
    writable.refuse_read_only(out, what, "out")
    if tensor is None:
        return
    if out.dtype is not tensor.dtype:
        raise DtypeError(f"{what}: out is {out.dtype}, the tensor {tensor.dtype}. Make out of the same dtype.")
    if out.device != tensor.device:
        raise DeviceError(f"{what}: out is on {out.device}, the tensor on {tensor.device}. Put both on one device.")
    if collective in IN_PLACE and out.shape != tensor.shape:
        raise ArgumentError(
            f"{what}: out has shape {list(out.shape)}, the tensor {list(tensor.shape)}. They must be equal."
        )


def _not_out(value: Any) -> str:
    op = other_names.known_operation(value, OPS)
    remedy = "Pass a tensor" if op is None else f"Pass the operation by keyword: op={op!r}"
    return f"out={value!r} is of type {type(value).__name__}, but the result is written to a tensor. {remedy}."


def refuse_number(collective: str, out: Any, what: str) -> None:
    """Raise if a collective does not take a number, or none with `out`."""
    if SPECS[collective].divides:
        raise DtypeError(f"{what}: a number cannot be split over ranks. Pass a tensor with one row per rank.")
    if out is not None:
        raise ArgumentError(f"{what}: a number has no out=. Use the returned value, or pass a tensor.")


def _number_result(result: Any) -> Any:
    return restore(result) if isinstance(result, torch.Tensor) else result


# --- the fast path ----------------------------------------------------------------


def cache_call(group: Group, collective: str, arguments: tuple[Any, Any, int], op: str | None, comm: Comm) -> None:
    """Cache a call for the fast path, so that the next equal call does not run Python code."""
    if group.is_strict and collective != "allreduce":  # its calls are compared by messages
        return
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
