"""From a verb and a tensor to a prepared call.

A :class:`Plan` is made once for each (verb, operation, dtype, device, layout, backend, mode) on a group and kept
there: it holds the checks that passed, the bound operation of the backend that the selector chose, and the copies
needed around it. A call then costs a dictionary look-up, and a comparison where the choice depends on the size.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..backends import hierarchical
from ..backends.base import Backend, Operation, announced, bind, by_size
from ..backends.selection_table import BY_SIZE, HIERARCHICAL
from ..communicators.call_log import ON_DEVICE, as_many, call_code
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..errors import DtypeError
from ..session.runtime import Runtime
from ..tensors import buffers, dtypes, streams
from ..tensors.tensor_lists import Pieces, packed
from . import staging

IN_PLACE = ("allreduce", "reduce", "broadcast")


class Plan:
    """A verb, ready to run on a group: ``run(tensor, out, root)``."""

    __slots__ = (
        "bare",
        "cached_call",
        "code",
        "collective",
        "is_on_device",
        "is_simple",
        "is_whole",
        "many",
        "run",
        "shape_of",
    )

    def __init__(self, collective: str, code: int, run: Callable[[Any, Any, int], Any]) -> None:
        self.collective, self.code, self.run = collective, code, run
        self.bare = self
        """The same call without what is around the backend's operation, for callers who see to that themselves."""
        self.is_on_device = False
        """Whether its tensors are on a device, so that the caller's stream matters."""
        self.is_simple = False
        """Whether `bare` will do for contiguous memory of the host that is no part of a graph."""
        self.cached_call: Callable[[int], Any] = _no_cached_call
        """What contiguous memory of the host needs to enter the kernel by itself, for a root; None if it cannot."""
        self.many: Callable[[Any, Any, int], Any] | None = None
        """The same for :class:`~torchmpi.tensors.tensor_lists.Pieces`, if the transport need not have them packed."""
        self.is_whole = collective in BY_SIZE
        """Whether the whole shape is part of the signature; otherwise `shape_of` tells which."""
        self.shape_of: Callable[[Any], tuple[int, ...]] = (
            _nothing if collective in ("scatter", "barrier") else _row_shape
        )

    def for_many(self, shapes: tuple[tuple[int, ...], ...]) -> Plan:
        """An allreduce with a signature that tells what is packed into the flat tensor."""
        plan = copy.copy(self)
        plan.collective, plan.code = "allreduce_many", as_many(self.code)
        checksum = hash(shapes) % 1_000_000
        plan.is_whole, plan.shape_of = False, lambda tensor: (tensor.numel(), len(shapes), checksum)
        return plan

    def for_pieces(self, pieces: Pieces) -> Plan:
        """The same for tensors that are not packed."""
        plan = self.for_many(pieces.shapes)
        assert self.many is not None
        plan.run = self.many
        return plan

    def announcing(self, dtype: torch.dtype, *shape: int) -> Plan:
        """The same call with a signature that tells what this rank expects, where the plan itself leaves it open."""
        plan = copy.copy(self)
        plan.code = call_code(self.collective, None, dtypes.info(dtype).code)
        plan.is_whole, plan.shape_of = False, lambda tensor: shape
        return plan


def _row_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.shape[1:]


def _nothing(tensor: Any) -> tuple[int, ...]:
    return ()


def _no_cached_call(root: int) -> None:
    return None


def prepare(runtime: Runtime, communicator: Communicator, key: tuple[Any, ...]) -> Plan:
    """Make the plan for a key ``(verb, op, dtype, device type, direct, backend, asynchronous)``, or refuse."""
    collective, op, dtype, device_type, direct, wanted, asynchronous = key
    group, mode = communicator.intra, "async" if asynchronous else "sync"
    chosen_by = _chosen_by(runtime, collective, device_type, wanted)
    device_type = chosen_by if dtype is None and device_type == "cpu" else device_type
    where = f"{group.where}: {collective}"
    if dtype is not None:
        row = _checked(dtype, op, where)
    choices = runtime.selector.select(collective, chosen_by, group, dtype=dtype, op=op, wanted=wanted, mode=mode)
    bound: list[tuple[int | None, Operation, Backend]]
    if wanted != HIERARCHICAL and hierarchical.is_composed(runtime.communicators, communicator, collective):
        composed = _composition(runtime, collective, dtype, op, wanted=wanted, mode=mode)
        # Each step chooses anew; this one decides what is staged.
        bound = [(None, announced(group, composed), choices[-1].backend)]
    else:
        bound = [(limit, bind(backend, group, collective, dtype, op), backend) for limit, backend in choices]
    operations = [(limit, operation) for limit, operation, _ in bound]
    around = partial(_runner, runtime, collective, group=group, device_type=device_type, direct=direct)
    runners = [(limit, around(operation, backend)) for limit, operation, backend in bound]
    # Only the root knows what it scatters, so dtype and device are no part of that signature.
    code = call_code(collective, op, row.code if dtype is not None and collective != "scatter" else 0)
    code |= ON_DEVICE if device_type != "cpu" and collective != "scatter" else 0
    plan = Plan(collective, code, by_size(runners, dtype))
    plan.is_on_device = device_type != "cpu"
    if direct or collective not in IN_PLACE:
        plan.bare = Plan(collective, code, by_size(operations, dtype))
        if direct and collective == "allreduce" and device_type == "cpu":
            plan.many = _of_many(operations, dtype)
    is_known = collective == "scatter" if dtype is None else not dtype.is_complex  # who gets a part need not know it
    if device_type == "cpu" and is_known and not asynchronous:
        plan.is_simple = plan.bare is not plan
        plan.bare.cached_call = getattr(plan.bare.run, "cached_call", _no_cached_call)
    return plan


def _of_many(
    operations: list[tuple[int | None, Operation]], dtype: torch.dtype | None
) -> Callable[[Any, Any, int], Any] | None:
    """An operation on pieces, if there is one for the longest; short ones may be packed."""
    if getattr(operations[-1][1], "many", None) is None:
        return None
    return by_size([(limit, getattr(each, "many", None) or packed(each)) for limit, each in operations], dtype)


def _checked(dtype: torch.dtype, op: str | None, where: str) -> dtypes.DtypeInfo:
    try:
        return dtypes.info(dtype) if op is None else dtypes.check_reduction(dtype, op)
    except (DtypeError, dtypes.ArgumentError) as error:
        raise type(error)(f"{where}: {error}") from None


def _chosen_by(runtime: Runtime, collective: str, device_type: str, wanted: str | None) -> str:
    """The type of device for which the transport is chosen, which must be the same on all ranks."""
    if collective != "scatter":
        return device_type
    # Those who pass None do not know where the root's tensor is: all go by way of the host, unless the caller knows.
    backend = runtime.selector.backends.get(wanted or "")
    return "cpu" if backend is None or backend.takes("cpu") else "cuda"


def _composition(
    runtime: Runtime, collective: str, dtype: torch.dtype | None, op: str | None, *, wanted: str | None, mode: str
) -> Operation:
    runner = hierarchical.StepRunner(op, partial(_step, runtime, wanted, mode), variant=(wanted, mode))
    return hierarchical.SpanCollective(
        runtime.communicators, collective, dtype, op, runner, cartesian=runtime.cartesian
    )


def _step(
    runtime: Runtime,
    wanted: str | None,
    mode: str,
    group: Group,
    collective: str,
    dtype: torch.dtype | None,
    op: str | None,
    device_type: str,
) -> Operation:
    """Prepare a collective in place on one of the groups of a span."""
    choices = runtime.selector.select(collective, device_type, group, dtype=dtype, op=op, wanted=wanted, mode=mode)
    around = partial(_runner, runtime, collective, group=group, device_type=device_type, direct=True)
    parts = [(limit, backend, bind(backend, group, collective, dtype, op)) for limit, backend in choices]
    if device_type == "cpu":
        return by_size([(limit, operation) for limit, _, operation in parts], dtype)
    return by_size([(limit, around(operation, backend)) for limit, backend, operation in parts], dtype)


def _runner(
    runtime: Runtime,
    collective: str,
    operation: Operation,
    backend: Backend,
    *,
    group: Group,
    device_type: str,
    direct: bool,
) -> Operation:
    """What makes an operation of a backend a verb on the tensors of a user."""
    if collective == "barrier":
        return operation
    takes = backend.takes(device_type)
    if not takes and collective in IN_PLACE:
        return staging.Staged(collective, operation, group, _pool(runtime))
    if takes and device_type != "cpu":
        operation = _in_order(operation, group) if backend.enqueues else _settled(operation)
    if collective not in IN_PLACE:
        return _producing(operation, takes=takes)
    return _direct(operation) if direct and takes else _copying(collective, operation, group)


_pools: weakref.WeakKeyDictionary[Runtime, staging.Pool] = weakref.WeakKeyDictionary()
_orders: weakref.WeakKeyDictionary[Group, streams.Order] = weakref.WeakKeyDictionary()


def _pool(runtime: Runtime) -> staging.Pool:
    """The buffers between devices and transports of the host, until stop()."""
    pool = _pools.get(runtime)
    if pool is None:
        # Shared with the other ranks as far as possible: then reductions within a host combine what lies there.
        allocate = partial(_shared_bytes, runtime)
        pool = _pools[runtime] = staging.Pool(runtime.config.pipeline_bytes, allocate, pinned=True)
        runtime.resources.callback(pool.close)
    return pool


def _shared_bytes(runtime: Runtime, num_bytes: int) -> torch.Tensor:
    return runtime.empty_shared((num_bytes,), torch.uint8)


def _in_order(operation: Operation, group: Group) -> Operation:
    """For operations that enqueue: callers' streams may change, but what a group does on its device stays in order."""
    order = _orders.setdefault(group, streams.Order())

    def run(source: Any, destination: Any, root: int) -> Any:
        tensor = destination if source is None else source
        with streams.on_device(tensor):
            order.enter(tensor)
            return operation(source, destination, root)

    return run


def _settled(operation: Operation) -> Operation:
    """For operations that take memory of a device without regard to streams."""

    def run(source: Any, destination: Any, root: int) -> Any:
        for tensor in (source, destination):
            if tensor is not None:
                streams.settle(tensor)
        return operation(source, destination, root)

    return run


def _direct(operation: Operation) -> Operation:
    """In place on memory the backend takes as it is."""

    def run(tensor: torch.Tensor, out: None, root: int) -> torch.Tensor:
        operation(tensor, None, root)
        buffers.touch(tensor)
        return tensor

    return run


def _copying(collective: str, operation: Operation, group: Group) -> Operation:
    """In place, or into `out`, through a plain copy where one is needed."""

    def run(tensor: torch.Tensor, out: torch.Tensor | None, root: int) -> torch.Tensor:
        receives = collective != "reduce" or group.rank == root
        target = tensor if out is None else out
        work = buffers.plain(tensor, to_host=False)
        if out is not None and receives and work.data_ptr() == tensor.data_ptr():
            work = work.clone()
        operation(work, None, root)
        if not receives:
            return tensor
        if work.data_ptr() != target.data_ptr() or not buffers.is_direct(target):
            buffers.overwrite(target, work)
        else:
            buffers.touch(target)
        return target

    return run


def _producing(operation: Operation, *, takes: bool) -> Operation:
    """Into a new tensor, or into `out`; through the host as a whole where the backend does not take the device's.

    The ranks may differ in length there, so that pieces would not be the same on all of them.
    """

    def run(tensor: torch.Tensor | None, out: torch.Tensor | None, root: int) -> torch.Tensor | None:
        source = None if tensor is None else buffers.plain(tensor, to_host=not takes)
        given: torch.Tensor | None = None
        if out is not None and not takes:
            given = torch.empty(out.shape, dtype=out.dtype, device="cpu", pin_memory=out.device.type != "cpu")
        elif out is not None and buffers.is_direct(out) and (source is None or not buffers.overlap(out, source)):
            given = out.detach()
        # The backend alone knows the shape of the result: where `out` does not fit it takes memory of its own, so that
        # the call ends on all ranks before this one refuses.
        result: torch.Tensor | None = operation(source, given, root)
        if result is None:
            return None
        if out is None:
            return result if tensor is None else result.to(tensor.device)
        if result.data_ptr() != out.data_ptr() or result.shape != out.shape or result.dtype != out.dtype:
            buffers.copy_result(result, out)
        buffers.touch(out)
        return out

    return run
