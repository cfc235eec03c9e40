"""The way of a call, from a verb to a plan that runs: what is asked of its arguments, and the short way past that.

Every verb of :mod:`torchmpi.collectives` ends here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..communicators import device_calls
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.levels import Comm, used
from ..errors import ArgumentError, DeviceError, DtypeError
from ..session import runtime
from ..shared_memory import fast_path
from ..tensors import buffers
from ..tensors.numbers import as_tensor, is_number, restore
from . import prepared

_Tensor = torch.Tensor
_STRIDED = torch.strided


def is_simple(tensor: Any) -> bool:
    """Whether this is contiguous memory of the host and nothing else."""
    return (
        type(tensor) is _Tensor
        and tensor.is_cpu
        and tensor.layout is _STRIDED
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.requires_grad)
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)
    )


def _simple(collective: str, tensor: Any, out: Any, root: Any, op: str | None, where: tuple[Comm, str | None]) -> Any:
    """A call like one before, on simple tensors: the short way past all checks. _OTHERWISE if it is not that."""
    comm, backend = where
    if is_simple(tensor):
        dtype = tensor.dtype
    elif tensor is None and collective == "scatter" and (out is None or (is_simple(out) and not out.dtype.is_complex)):
        dtype = None
    else:
        return _OTHERWISE
    group = runtime.communicator(comm).intra
    plan = group.plans.get((collective, op, dtype, backend))
    if plan is None or type(root) is not int or not 0 <= root < group.size or (dtype is None and root == group.rank):
        return _OTHERWISE
    if collective in fast_path.COLLECTIVES and backend is None and (comm is None or type(comm) is Communicator):
        _cache_call(group, collective, (tensor, out, root), op, comm)
    if out is None:
        result = group.call(plan, tensor, None, root)
        if result is tensor:
            buffers.touch(tensor)
        return result
    if tensor is not None and not _is_apart(out, tensor, collective):
        return _OTHERWISE
    result = group.call(plan, tensor, out, root)
    if result is None:  # gathered by another rank
        return None
    if result is not out:
        buffers.copy_result(result, out)
    buffers.touch(out)
    return out


_OTHERWISE = object()


def _is_apart(out: Any, tensor: _Tensor, collective: str) -> bool:
    """Whether this is as simple a place for the result, which has no memory in common with the tensor."""
    is_like_it = is_simple(out) and out.dtype is tensor.dtype
    return is_like_it and collective not in prepared.IN_PLACE and not buffers.overlap(out, tensor)


def _cache_call(group: Group, collective: str, arguments: tuple[Any, Any, int], op: str | None, comm: Comm) -> None:
    """Let the next call like this one go past Python, if there is a gate for what this rank does in it."""
    tensor, out, root = arguments
    which, is_root, given = collective, group.rank == root, out if tensor is None else tensor
    if which == "gather" and not is_root:
        which = "give"
    elif which == "scatter" and tensor is None:
        which = "receive"
    if given is None or (which in ("gather", "give") and is_root == (out is None)):
        return
    if which == "scatter" and not is_root:  # what it has passed is of no concern
        return
    name = root if op is None else fast_path.joint_key(op, root) if which == "reduce" else op, given.dtype, comm
    key = collective, op, given.dtype, None
    if which == "receive" and key not in group.plans:  # the plan of a call with None knows of no dtype
        try:
            plan_for(runtime.communicator(comm), (collective, op, given.dtype, "cpu", False, None, False))
        except DtypeError:  # to be refused when the call has ended on all ranks
            return
    plan = group.plans.get(key)
    if plan is not None:
        fast_path.cache_call(which, name, partial(_cached_call, group, plan, root, comm, key))


def _cached_call(group: Group, plan: prepared.Plan, root: int, comm: Comm, key: Any) -> fast_path.CachedCall | None:
    """The way past Python into a call like this one."""
    is_meant = comm is not None or (used.get() is None and runtime.communicator(None).intra is group)
    is_meant = is_meant and group.plans.get(key) is plan  # another thread may have changed the table since
    return plan.cached_call(root) if is_meant and not group.call_queue.closed else None


def call(
    collective: str,
    tensor: Any,
    out: _Tensor | None,
    *,
    root: int = 0,
    op: str | None = None,
    comm: Comm = None,
    backend: str | None = None,
    asynchronous: bool = False,
    packed: tuple[tuple[int, ...], ...] = (),
) -> Any:
    """`packed`: the shapes of what a flat tensor carries, always asynchronous."""
    if not (asynchronous or packed):
        result = _simple(collective, tensor, out, root, op, (comm, backend))
        if result is not _OTHERWISE:
            return result
    communicator = runtime.communicator(comm)
    group = communicator.intra
    what = f"{group.where}: {collective}"
    asynchronous = asynchronous or bool(packed)
    finish: Callable[[Any], Any] | None = None
    if is_number(tensor):
        _refuse_number(collective, out, what)
        tensor, finish = as_tensor(tensor, op), _number_result
    if collective in _ROOTED:
        root = check_root(group, root, collective)
    if tensor is None and not (collective == "scatter" and group.rank != root):
        buffers.check(tensor, what)
    plan = plan_of(communicator, collective, tensor, out, op=op, backend=backend, asynchronous=asynchronous)
    if packed:
        return _submit(group, plan.for_many(packed), (tensor, out, root), None)
    if plan.is_on_device and not asynchronous:
        return device_calls.take(group, partial(group.perform, plan, tensor, out, root), what, _subject(tensor, out))
    if not asynchronous:
        result = group.call(plan, tensor, out, root)
        return result if finish is None else finish(result)
    return _submit(group, plan, (tensor, out, root), finish)


def plan_of(
    communicator: Communicator,
    collective: str,
    tensor: _Tensor | None,
    out: _Tensor | None = None,
    *,
    op: str | None = None,
    backend: str | None = None,
    asynchronous: bool = False,
) -> prepared.Plan:
    """The plan of a call with these tensors, or a refusal. None is what others than the root scatter."""
    what = f"{communicator.intra.where}: {collective}"
    if tensor is None:
        device_type = "cpu" if out is None else out.device.type
        key: tuple[Any, ...] = (collective, op, None, device_type, False, backend, asynchronous)
    else:
        buffers.check(tensor, what, written=out is None and collective in prepared.IN_PLACE)
        direct = out is None and buffers.is_direct(tensor)
        key = (collective, op, tensor.dtype, tensor.device.type, direct, backend, asynchronous)
    if out is not None:
        _check_out(collective, tensor, out, what)
    return plan_for(communicator, key)


def _submit(
    group: Group, plan: prepared.Plan, arguments: tuple[Any, Any, int], finish: Callable[[Any], Any] | None
) -> Handle:
    if plan.is_on_device:
        task = partial(group.perform, plan, *arguments)
        return device_calls.queue(group, task, f"{group.where}: {plan.collective}", _subject(*arguments[:2]))
    if finish is None:
        return group.submit(plan, *arguments)

    def number() -> Any:
        return finish(group.perform(plan, *arguments))

    return group.call_queue.submit(number, f"{group.where}: {plan.collective}")


def _subject(tensor: Any, out: Any) -> Any:
    """A tensor on the device of a call on a device; who scatters nothing has the device of the rank."""
    if tensor is None and out is None:
        return torch.empty(0, device=runtime.current().device)
    return out if tensor is None else tensor


def plan_for(communicator: Communicator, key: tuple[Any, ...]) -> prepared.Plan:
    known = communicator.intra.plans
    plan: prepared.Plan | None = known.get(key)
    if plan is None:
        plan = known[key] = prepared.prepare(runtime.current(), communicator, key)
        collective, op, dtype, _, _, backend, _ = key
        if plan.is_simple:
            known[collective, op, dtype, backend] = plan.bare
    return plan


_ROOTED = ("reduce", "broadcast", "gather", "scatter")


def check_root(group: Group, root: Any, collective: str) -> int:
    try:
        number = -1 if isinstance(root, bool) else operator.index(root)  # numpy's integers too
    except TypeError:
        number = -1
    if not 0 <= number < group.size:
        raise ArgumentError(
            f"{group.where}: {collective}: root={root!r} is not a rank of communicator {group.name}. Use 0 to "
            f"{group.size - 1}."
        )
    return number


def _check_out(collective: str, tensor: Any, out: Any, what: str) -> None:
    buffers.check(out, f"{what}: out", written=True)
    if tensor is None:
        return
    if out.dtype is not tensor.dtype:
        raise DtypeError(f"{what}: out is {out.dtype}, the tensor {tensor.dtype}. Make out of the same dtype.")
    if out.device != tensor.device:
        raise DeviceError(f"{what}: out is on {out.device}, the tensor on {tensor.device}. Put both on one device.")
    if collective in prepared.IN_PLACE and out.shape != tensor.shape:
        raise ArgumentError(
            f"{what}: out has shape {list(out.shape)}, the tensor {list(tensor.shape)}. They must be equal."
        )


def _refuse_number(collective: str, out: Any, what: str) -> None:
    if collective in ("scatter", "reduce_scatter", "alltoall"):
        raise DtypeError(f"{what}: a number cannot be split over ranks. Pass a tensor with one row per rank.")
    if out is not None:
        raise ArgumentError(f"{what}: a number has no out=. Use the returned value, or pass a tensor.")


def _number_result(result: Any) -> Any:
    return restore(result) if isinstance(result, torch.Tensor) else result
