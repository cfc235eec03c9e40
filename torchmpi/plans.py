"""From a verb and a tensor to a prepared call.

A :class:`Plan` is made once for each (verb, operation, dtype, device, layout, backend) on a group and kept there: it
holds the checks that passed, the backend's bound operation, and the copies needed around it. A call then costs a
dictionary look-up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from . import buffers, dtypes, hierarchy, streams
from .backends import Backend, Operation
from .communicator import Communicator, Group
from .errors import DtypeError
from .progress import as_many, call_code
from .runtime import Runtime

REDUCING = ("allreduce", "reduce", "reduce_scatter")
IN_PLACE = ("allreduce", "reduce", "broadcast")
_WHOLE_SHAPE = ("allreduce", "reduce", "broadcast", "reduce_scatter")
"""Verbs whose tensors agree in shape on all ranks; for the others, dim 0 may differ."""


class Plan:
    """A verb, ready to run on a group: ``run(tensor, out, root)``."""

    __slots__ = ("bare", "code", "is_whole", "run", "shape_of", "verb")

    def __init__(self, verb: str, code: int, run: Callable[[Any, Any, int], Any]) -> None:
        self.verb, self.code, self.run = verb, code, run
        self.bare = self
        """The same call without what is around the backend's operation, for callers who see to that themselves."""
        self.is_whole = verb in _WHOLE_SHAPE
        """Whether the whole shape is part of the signature; otherwise `shape_of` tells which."""
        self.shape_of: Callable[[Any], tuple[int, ...]] = _nothing if verb in ("scatter", "barrier") else _row_shape

    def for_many(self, shapes: tuple[tuple[int, ...], ...]) -> Plan:
        """An allreduce with a signature that tells what is packed into the flat tensor."""
        plan = copy.copy(self)
        plan.verb, plan.code = "allreduce_many", as_many(self.code)
        checksum = hash(shapes) % 1_000_000
        plan.is_whole, plan.shape_of = False, lambda tensor: (tensor.numel(), len(shapes), checksum)
        return plan


def _row_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.shape[1:]


def _nothing(tensor: Any) -> tuple[int, ...]:
    return ()


def prepare(runtime: Runtime, communicator: Communicator, key: tuple[Any, ...]) -> Plan:
    """Make the plan for a key ``(verb, op, dtype, device type, direct, backend)``, or refuse."""
    verb, op, dtype, device_type, direct, backend_name = key
    group = communicator.intra
    where = f"{group.where}: {verb}"
    if dtype is not None:
        row = _checked(dtype, op, where)
    backend = runtime.selector.choose(verb, device_type, backend_name, group.where)
    if hierarchy.is_composed(runtime.communicators, communicator, verb):
        operation: Operation = _composition(runtime, verb, op, backend)
    else:
        operation = backend.bind(group, verb, dtype, op)
    # Only the root knows what it scatters, so the dtype is no part of that signature.
    code = call_code(verb, op, row.code if dtype is not None and verb != "scatter" else 0)
    plan = Plan(verb, code, _runner(verb, operation, group, backend, direct=direct))
    if direct:
        plan.bare = Plan(verb, code, operation)
    return plan


def _checked(dtype: torch.dtype, op: str | None, where: str) -> dtypes.DtypeInfo:
    try:
        return dtypes.info(dtype) if op is None else dtypes.check_reduction(dtype, op)
    except (DtypeError, dtypes.ArgumentError) as error:
        raise type(error)(f"{where}: {error}") from None


def _composition(runtime: Runtime, verb: str, op: str | None, backend: Backend) -> Operation:
    step_op = "sum" if op == "avg" else op

    def run_step(group: Group, step_verb: str, tensor: torch.Tensor | None, root: int) -> None:
        dtype = tensor.dtype if tensor is not None else None
        op_of_step = step_op if step_verb in REDUCING else None
        key = ("step", step_verb, op_of_step, dtype, backend.name)
        plan = group.plans.get(key)
        if plan is None:
            step_code = call_code(step_verb, op_of_step, dtypes.info(dtype).code if dtype is not None else 0)
            plan = group.plans[key] = Plan(step_verb, step_code, backend.bind(group, step_verb, dtype, op_of_step))
        group.call(plan, tensor, None, root)

    return hierarchy.Composition(runtime.communicators, verb, op, cartesian=runtime.cartesian, run=run_step)


def _runner(verb: str, operation: Operation, group: Group, backend: Backend, *, direct: bool) -> Operation:
    if verb == "barrier":
        return operation
    if verb not in IN_PLACE:
        return _producing(operation, backend)
    if direct and backend.takes("cpu"):
        return _direct(operation)
    return _staged(verb, operation, group, backend)


def _direct(operation: Operation) -> Operation:
    """In place on memory the backend takes as it is."""

    def run(tensor: torch.Tensor, out: None, root: int) -> torch.Tensor:
        operation(tensor, None, root)
        buffers.touch(tensor)
        return tensor

    return run


def _staged(verb: str, operation: Operation, group: Group, backend: Backend) -> Operation:
    """In place, or into `out`, through a plain copy where one is needed."""

    def run(tensor: torch.Tensor, out: torch.Tensor | None, root: int) -> torch.Tensor:
        receives = verb != "reduce" or group.rank == root
        target = tensor if out is None else out
        work = buffers.plain(tensor, to_host=not backend.takes(tensor.device.type))
        if out is not None and receives and work.data_ptr() == tensor.data_ptr():
            work = work.clone()
        streams.settle(work)
        operation(work, None, root)
        if not receives:
            return tensor
        if work.data_ptr() != target.data_ptr() or not buffers.is_direct(target):
            buffers.overwrite(target, work)
        else:
            buffers.touch(target)
        return target

    return run


def _producing(operation: Operation, backend: Backend) -> Operation:
    """Into a new tensor, or into `out`."""

    def run(tensor: torch.Tensor | None, out: torch.Tensor | None, root: int) -> torch.Tensor | None:
        source = None if tensor is None else buffers.plain(tensor, to_host=not backend.takes(tensor.device.type))
        if source is not None:
            streams.settle(source)
        usable = (
            out is not None
            and backend.takes(out.device.type)
            and buffers.is_direct(out)
            and (source is None or not buffers.overlap(out, source))
        )
        # The backend alone knows the shape of the result: where `out` does not fit it takes memory of its own, so that
        # the call ends on all ranks before this one refuses.
        result: torch.Tensor | None = operation(source, out.detach() if usable and out is not None else None, root)
        if result is None:
            return None
        if out is None:
            return result if tensor is None else result.to(tensor.device)
        if result.data_ptr() != out.data_ptr() or result.shape != out.shape or result.dtype != out.dtype:
            _copy_result(result, out)
        buffers.touch(out)
        return out

    return run


def _copy_result(result: torch.Tensor, out: torch.Tensor) -> None:
    if out.dtype != result.dtype:
        raise DtypeError(f"out is {out.dtype}, but the result is {result.dtype}. Pass out=None to have it made.")
    if out.shape != result.shape:
        raise dtypes.ArgumentError(
            f"out has shape {list(out.shape)}, but the result has {list(result.shape)}. Pass out=None to have it made."
        )
    buffers.overwrite(out, result)
