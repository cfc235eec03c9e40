"""From the arguments of a collective to a plan: checks, plan lookup, and submission to the call queue."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import other_names
from ..collective_specs import IN_PLACE, SPECS, spec_of
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.levels import Comm, used
from ..communicators.plan import Plan
from ..errors import ArgumentError, DeviceError, DtypeError
from ..session import runtime
from ..shared_memory import fast_path
from ..tensors import bucket_plan, buffers, writable
from ..tensors.dtypes import OPS
from ..tensors.numbers import as_tensor, is_number, restore
from ..tensors.operation_specs import OPERATIONS
from .prepared import PlanKey, PreparedPlan, no_cached_call, prepare

_Tensor = torch.Tensor
_STRIDED = torch.strided


class CheckedCall(NamedTuple):
    """A collective call with checked arguments."""

    group: Group
    plan: PreparedPlan
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


def is_simple(tensor: Any) -> bool:
    """Return whether a value is a contiguous host tensor without further properties."""
    try:
        return (
            type(tensor) is _Tensor
            and tensor.is_cpu
            and tensor.layout is _STRIDED
            and not tensor.is_nested
            and tensor.is_contiguous()
            and not (tensor.is_neg() or tensor.requires_grad)
            and (tensor.data_ptr() != 0 or tensor.numel() == 0)
        )
    except RuntimeError:  # of data_ptr(), for the tensors of torch.func
        return False


def check_call(
    collective: str,
    tensor: Any,
    out: _Tensor | None,
    root: Any,
    op: str | None,
    comm: Comm,
    backend: str | None,
    *,
    asynchronous: bool,
) -> CheckedCall:
    """Check the arguments of a collective and find its plan."""
    communicator = runtime.communicator(comm)
    group = communicator.intra
    buffers.refuse_tracing(f"{group.where}: {collective}")
    op = other_names.operation(op)
    if out is None and type(root) is int and 0 <= root < group.size and buffers.is_simple_on_gpu(tensor):
        known = group.plans.get((collective, op, tensor.dtype, "cuda", True, backend, asynchronous))
        if known is not None:  # a repeated call, which needs no further checks
            return CheckedCall(group, known, tensor, root, None)
    finish: Callable[[Any], Any] | None = None
    if out is not None and not isinstance(out, _Tensor):
        raise DtypeError(f"{group.where}: {collective}: {_not_out(out)}")
    if is_number(tensor):
        refuse_number(collective, out, f"{group.where}: {collective}")
        tensor, finish = _checked_number(tensor, op, collective, group), _number_result
    spec = SPECS[collective]
    if spec.is_rooted:
        root = check_root(group, root, collective)
    is_root = group.rank == root
    if tensor is None and spec.passes(is_root):
        buffers.check(tensor, f"{group.where}: {collective}", or_number=not spec.divides)
    plan = plan_of(
        communicator,
        collective,
        tensor,
        out,
        op=op,
        backend=backend,
        asynchronous=asynchronous,
        receives=spec.receives(is_root),
    )
    if out is None:
        refuse_read_only(group, collective, tensor, root)
    return CheckedCall(group, plan, tensor, root, finish)


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
    if tensor is not None and SPECS[collective].changes(root == group.rank):
        writable.refuse_read_only(tensor, group.where, collective)


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
    call = check_call(collective, tensor, out, root, op, comm, backend, asynchronous=True)
    task = partial(call.group.perform, call.plan, call.tensor, out, call.root)
    description = f"{call.group.where}: {collective}"
    if call.finish is not None:
        finish = call.finish
        finishing = call.group.shown(lambda: finish(task()), call.group.described_call, *task.args)
        return call.group.call_queue.submit(finishing, description, call.subject(out))
    # Three frames of this package: CallQueue.submit, this function, and the one that calls it.
    return call.group.call_queue.submit(task, description, call.subject(out), 3)


def submit_packed(communicator: Communicator, parts: Sequence[_Tensor], op: str, backend: str | None) -> Handle[Any]:
    """Run the allreduce of several tensors of one dtype and device, packed into one, in the background."""
    group = communicator.intra
    flat, plan = _packed(communicator, parts, op, backend, asynchronous=True)

    def task() -> None:
        group.perform(plan, flat, None, 0)
        bucket_plan.unpack(flat, parts)

    shown = group.shown(task, group.described_call, plan, flat, None, 0)
    return group.call_queue.submit(shown, f"{group.where}: {plan.collective}", flat)


def run_packed(communicator: Communicator, parts: Sequence[_Tensor], op: str, backend: str | None) -> None:
    """Run the call of `submit_packed` on the current stream, for a backend that enqueues its work on a device."""
    group = communicator.intra
    flat, plan = _packed(communicator, parts, op, backend, asynchronous=False)
    group.call_queue.run(group.perform, plan, flat, None, 0, subject=flat)
    bucket_plan.unpack(flat, parts)


def _packed(
    communicator: Communicator, parts: Sequence[_Tensor], op: str, backend: str | None, *, asynchronous: bool
) -> tuple[_Tensor, PreparedPlan]:
    flat, shapes = bucket_plan.pack(parts), tuple([part.shape for part in parts])
    plan = plan_of(communicator, "allreduce", flat, op=op, backend=backend, asynchronous=asynchronous)
    return flat, plan.for_many(shapes)


def plan_of(
    communicator: Communicator,
    collective: str,
    tensor: _Tensor | None,
    out: _Tensor | None = None,
    *,
    op: str | None = None,
    backend: str | None = None,
    asynchronous: bool = False,
    receives: bool = True,
) -> PreparedPlan:
    """Return the plan of a call with these tensors, or raise if they cannot be sent.

    `tensor` is None on the ranks other than the root of a scatter. `out` is not used on a rank that does not receive.
    """
    if tensor is None:
        device_type = "cpu" if out is None else out.device.type
        key: PlanKey = (collective, op, None, device_type, False, backend, asynchronous)
    else:
        is_written = out is None and collective in IN_PLACE
        direct = (is_simple(tensor) and not tensor.is_conj()) or buffers.is_simple_on_gpu(tensor)
        if not direct:
            what, or_number = f"{communicator.intra.where}: {collective}", not SPECS[collective].divides
            buffers.check(tensor, what, written=is_written, or_number=or_number)
            direct = buffers.is_direct(tensor)
        direct = direct and out is None
        key = (collective, op, tensor.dtype, tensor.device.type, direct, backend, asynchronous)
    if out is not None and receives:
        check_out(collective, tensor, out, f"{communicator.intra.where}: {collective}")
    plan: PreparedPlan | None = communicator.intra.plans.get(key)
    return plan_for(communicator, key) if plan is None else plan


def plan_for(communicator: Communicator, key: PlanKey) -> PreparedPlan:
    """Return the plan for a key, made on first use."""
    known = communicator.intra.plans
    plan: PreparedPlan | None = known.get(key)
    if plan is None:
        plan = known[key] = prepare(runtime.current(), communicator, key)
        collective, op, dtype, _, _, backend, _ = key
        if plan.is_simple:
            known[collective, op, dtype, backend] = plan.bare
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
    key = collective, op, given.dtype, None
    if which == "receive" and key not in group.plans:  # the plan of a call with None has no dtype
        try:
            plan_for(runtime.communicator(comm), (collective, op, given.dtype, "cpu", False, None, False))
        except DtypeError:  # raised when the call has ended on all ranks
            return
    plan = group.plans.get(key)
    if plan is not None and plan.cached_call is not no_cached_call:
        fast_path.cache_call(which, name, partial(_cached_call, group, plan, root, comm, key))


def cache_barrier(group: Group, plan: Plan, comm: Comm) -> None:
    """Cache the barrier of a group for the fast path."""
    key = "barrier", None, None, None
    bare: Plan | None = getattr(plan, "bare", None)
    is_known = group.plans.get(key) is bare
    if bare is not None and is_known:
        fast_path.cache_call("barrier", (None, None, comm), partial(_cached_call, group, bare, 0, comm, key))


def _cached_call(group: Group, plan: Plan, root: int, comm: Comm, key: Any) -> fast_path.CachedCall | None:
    is_meant = comm is not None or (used.get() is None and runtime.communicator(None).intra is group)
    is_meant = is_meant and group.plans.get(key) is plan  # another thread may have changed the table meanwhile
    if not is_meant or group.call_queue.closed or not isinstance(plan, PreparedPlan):
        return None
    cached_call: fast_path.CachedCall | None = plan.cached_call(root)
    return cached_call
