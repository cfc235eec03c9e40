"""Prepared plans: a collective with its checks done, bound to a backend.

A :class:`PreparedPlan` is made once per group for each combination of collective, operation, dtype, device, layout,
backend and mode. A plan holds the operation of the selected backend, and the copies before and after the operation. A
call then costs a dictionary lookup, and a comparison where the choice of the backend depends on the size.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..backend_specs import HIERARCHICAL
from ..backends.base import Backend, Operation, announced, bind, by_size
from ..backends.hierarchical.spans import SpanCollective, is_composed
from ..backends.hierarchical.steps import StepRunner
from ..collective_specs import IN_PLACE, SPECS
from ..communicators import call_parts
from ..communicators.call_log import ON_DEVICE, as_many, call_code
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.plan import Backends, Plan, Shape, no_shape
from ..errors import ArgumentError, DtypeError
from ..log import logger
from ..session.runtime import Runtime
from ..tensors import bucket_plan, buffers, dtypes, streams
from . import device_staging

CHECKSUM_MODULUS = 1_000_000
"""Of the checksum of the shapes of a list of tensors."""

PlanKey = tuple[str, str | None, torch.dtype | None, str, bool, str | None, bool]
"""Collective, operation, dtype, device type, whether the tensor is direct and in place, backend, asynchronous."""


class PreparedPlan(Plan):
    """A collective on tensors, bound to a backend.

    Attributes:
        bare: The same call without the copies around the operation of the backend, for contiguous host memory.
        enqueues: Whether the call enqueues its work on the device of its tensors and returns.
        cached_call: Returns the :class:`~torchmpi.shared_memory.fast_path.CachedCall` for a root, or None.
        is_on_device: Whether the tensors are on a device, so that the caller's stream matters.
        is_simple: Whether `bare` may be used for contiguous host tensors that are not part of an autograd graph.
        many: The allreduce of a :class:`~torchmpi.collectives.tensor_lists.TensorList`, if the backend reduces tensors
            at separate addresses.
    """

    __slots__ = ("bare", "cached_call", "enqueues", "is_on_device", "is_simple", "many")

    def __init__(self, collective: str, code: int, run: Callable[[Any, Any, int], Any]) -> None:
        super().__init__(collective, code, run, _compared_shape(collective))
        self.bare = self
        self.cached_call: Callable[[int], Any] = no_cached_call
        self.enqueues = self.is_on_device = self.is_simple = False
        self.many: Plan | None = None

    def for_many(self, shapes: tuple[Shape, ...]) -> PreparedPlan:
        """Return the plan of an allreduce of a flat tensor that packs tensors of these shapes."""
        plan = copy.copy(self)
        plan.collective, plan.code = "allreduce_many", as_many(self.code)
        checksum = hash(shapes) % CHECKSUM_MODULUS
        plan.shape_of = lambda tensor: (tensor.numel(), len(shapes), checksum)
        return plan

    def announcing(self, dtype: torch.dtype, *shape: int) -> PreparedPlan:
        """Return the same plan with a dtype and shape to compare that this rank expects."""
        plan = copy.copy(self)
        plan.code = call_code(self.collective, None, dtypes.info(dtype).code)
        plan.shape_of = lambda tensor: shape
        return plan


def _compared_shape(collective: str) -> Callable[[Any], Shape] | None:
    return {"shape": None, "rows": _row_shape, "nothing": no_shape}[SPECS[collective].compared]


def _row_shape(tensor: torch.Tensor) -> Shape:
    return tensor.shape[1:]


def no_cached_call(root: int) -> None:
    """Return no call: the fast path cannot run it."""
    return None


def prepare(runtime: Runtime, communicator: Communicator, key: PlanKey) -> PreparedPlan:
    """Make the plan for a key, or raise if no backend can run it."""
    collective, op, dtype, device_type, direct, wanted, asynchronous = key
    group, mode = communicator.intra, "async" if asynchronous else "sync"
    chosen_by = _chosen_by(runtime, collective, device_type, wanted)
    device_type = chosen_by if dtype is None and device_type == "cpu" else device_type
    where = f"{group.where}: {collective}"
    if dtype is not None:
        row = checked_dtype(collective, dtype, op, where)
    choices = runtime.selector.select(collective, chosen_by, group, dtype=dtype, op=op, wanted=wanted, mode=mode)
    bound: list[tuple[int | None, Operation, Backend]]
    if wanted != HIERARCHICAL and is_composed(runtime.communicators, communicator, collective):
        composed = _composition(runtime, collective, dtype, op, wanted=wanted, mode=mode)
        # Each step selects its backend; the last one determines which tensors are staged.
        bound = [(None, announced(group, composed), choices[-1].backend)]
        names: tuple[tuple[int | None, str], ...] = ((None, HIERARCHICAL),)
    else:
        bound = [(limit, bind(backend, group, collective, dtype, op), backend) for limit, backend in choices]
        names = tuple((limit, backend.name) for limit, backend in choices)
    logger.debug("%s(%s, %s) on %s, %s: %s", collective, dtype, op, group.name, device_type, _in_words(names))
    operations = [(limit, operation) for limit, operation, _ in bound]
    around = partial(_runner, runtime, collective, group=group, device_type=device_type, direct=direct)
    runners = [(limit, around(operation, backend)) for limit, operation, backend in bound]
    is_everywhere = SPECS[collective].is_everywhere  # else dtype and device are no part of the signature
    code = call_code(collective, op, row.code if dtype is not None and is_everywhere else 0)
    code |= ON_DEVICE if device_type != "cpu" and is_everywhere else 0
    plan = PreparedPlan(collective, code, by_size(runners, dtype))
    plan.backends = names
    plan.is_on_device = device_type != "cpu"
    plan.enqueues = plan.is_on_device and names[-1][1] != HIERARCHICAL and all(each.enqueues for _, _, each in bound)
    if direct or collective not in IN_PLACE:
        plan.bare = PreparedPlan(collective, code, by_size(operations, dtype))
        plan.bare.backends = names
        if direct and collective == "allreduce" and device_type == "cpu":
            run = _operation_on_lists(operations, dtype)
            if run is not None:
                plan.many = Plan("allreduce_many", as_many(code), run, operator.attrgetter("signature"))
                plan.many.backends = names
    is_known = not is_everywhere if dtype is None else not dtype.is_complex
    if device_type == "cpu" and is_known and not asynchronous:
        plan.is_simple = plan.bare is not plan
        plan.bare.cached_call = getattr(plan.bare.run, "cached_call", no_cached_call)
    return plan


def _in_words(names: tuple[tuple[int | None, str], ...]) -> str:
    """Name the backends of a call.

    >>> _in_words(((4096, "shm"), (None, "p2p")))
    'shm up to 4096 bytes, then p2p'
    """
    return ", then ".join(name if limit is None else f"{name} up to {limit} bytes" for limit, name in names)


def _operation_on_lists(operations: list[tuple[int | None, Operation]], dtype: torch.dtype | None) -> Operation | None:
    """Return an operation on tensor lists, if the backend of the longest lists has one; short lists may be packed."""
    if getattr(operations[-1][1], "many", None) is None:
        return None
    return by_size([(limit, getattr(each, "many", None) or _packing(each)) for limit, each in operations], dtype)


def _packing(operation: Operation) -> Operation:
    """Return an operation on tensor lists that packs them for an operation on a flat tensor."""

    def run(tensors: Any, _: None, root: int) -> None:
        flat = bucket_plan.pack(tensors.work)
        operation(flat, None, root)
        bucket_plan.unpack(flat, tensors.work)

    return run


def checked_dtype(collective: str, dtype: torch.dtype, op: str | None, where: str) -> dtypes.DtypeInfo:
    """Return the properties of a dtype; raise if the collective does not take it."""
    try:
        return dtypes.check_reduction(dtype, op) if SPECS[collective].reduces else dtypes.info(dtype)
    except (DtypeError, ArgumentError) as error:
        raise type(error)(f"{where}: {error}") from None


def _chosen_by(runtime: Runtime, collective: str, device_type: str, wanted: str | None) -> str:
    """Return the device type for which the backend is chosen; it must be the same on all ranks."""
    if not SPECS[collective].only_root_passes:
        return device_type
    # Ranks that pass None have no device: use that of the host, unless a backend is given.
    backend = runtime.selector.backends.get(wanted or "")
    return "cpu" if backend is None or backend.takes("cpu", collective) else "cuda"


def _composition(
    runtime: Runtime, collective: str, dtype: torch.dtype | None, op: str | None, *, wanted: str | None, mode: str
) -> Operation:
    runner = StepRunner(op, partial(_step, runtime, wanted, mode), variant=(wanted, mode))
    return SpanCollective(runtime.communicators, collective, dtype, op, runner, cartesian=runtime.cartesian)


def _step(
    runtime: Runtime,
    wanted: str | None,
    mode: str,
    group: Group,
    collective: str,
    dtype: torch.dtype | None,
    op: str | None,
    device_type: str,
) -> tuple[Operation, Backends]:
    around = None
    if device_type != "cpu":
        around = partial(_runner, runtime, collective, group=group, device_type=device_type, direct=True)
    return runtime.selector.bind(group, collective, dtype, op, device_type, wanted=wanted, mode=mode, around=around)


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
    """Wrap an operation of a backend into a collective on tensors of the user."""
    if not SPECS[collective].tensors:
        return operation
    takes = backend.takes(device_type, collective)
    if not takes and collective in IN_PLACE:
        return device_staging.StagedOperation(collective, operation, group, _pool(runtime))
    if takes and device_type != "cpu":
        if direct and backend.enqueues and collective in IN_PLACE:
            return _direct_in_order(operation, group)
        operation = in_order(operation, group) if backend.enqueues else _settled(operation)
    if collective not in IN_PLACE:
        return _producing(operation, takes=takes)
    return _direct(operation) if direct and takes else _copying(collective, operation, group)


_pools: dict[Runtime, device_staging.StagingPool] = {}
_orders: weakref.WeakKeyDictionary[Group, streams.Order] = weakref.WeakKeyDictionary()


def _pool(runtime: Runtime) -> device_staging.StagingPool:
    """Return the buffers between devices and backends that take host memory; they live until stop()."""
    pool = _pools.get(runtime)
    if pool is None:
        # Shared with the other ranks if possible: then reductions within a host work on the buffers directly.
        allocate = partial(_shared_bytes, runtime)
        pool = _pools[runtime] = device_staging.StagingPool(runtime.config.pipeline_bytes, allocate, pinned=True)
        runtime.resources.callback(lambda: _pools.pop(runtime).close())
    return pool


def _shared_bytes(runtime: Runtime, num_bytes: int) -> torch.Tensor:
    return runtime.empty_shared((num_bytes,), torch.uint8)


def in_order(operation: Operation, group: Group) -> Operation:
    """Keep the operations that a group enqueues on its device in order, although the callers' streams may differ."""
    order = _orders.setdefault(group, streams.Order())

    def run(source: Any, destination: Any, root: int) -> Any:
        tensor = destination if source is None else source
        with streams.on_device(tensor):
            order.enter(tensor)
            return operation(source, destination, root)

    return run


def _settled(operation: Operation) -> Operation:
    """Wait for the device first: the operation takes device memory without regard to streams."""

    def run(source: Any, destination: Any, root: int) -> Any:
        for tensor in (source, destination):
            if tensor is not None:
                streams.settle(tensor)
        return operation(source, destination, root)

    return run


def _direct_in_order(operation: Operation, group: Group) -> Operation:
    """Return `_direct` of `in_order` in one function, since this is the path of every short call."""
    ordered, is_kept_by = in_order(operation, group), _orders[group].is_kept_by

    def run(tensor: torch.Tensor, out: None, root: int) -> torch.Tensor:
        (operation if is_kept_by(tensor) else ordered)(tensor, None, root)
        try:  # buffers.touch without a call
            buffers.increment_version((tensor,))
        except RuntimeError:
            buffers.touch(tensor)
        return tensor

    return run


def _direct(operation: Operation) -> Operation:
    def run(tensor: torch.Tensor, out: None, root: int) -> torch.Tensor:
        operation(tensor, None, root)
        buffers.touch(tensor)
        return tensor

    return run


def _copying(collective: str, operation: Operation, group: Group) -> Operation:
    spec = SPECS[collective]

    def run(tensor: torch.Tensor, out: torch.Tensor | None, root: int) -> torch.Tensor:
        receives = spec.receives(group.rank == root)
        target = tensor if out is None else out
        begin = call_parts.begin()
        work = buffers.plain(tensor, to_host=False)
        if out is not None and receives and work.data_ptr() == tensor.data_ptr():
            work = work.clone()
        if begin and work.data_ptr() != tensor.data_ptr():
            call_parts.end("staging", begin)
        operation(work, None, root)
        if not receives:
            return tensor
        if work.data_ptr() != target.data_ptr() or not buffers.is_direct(target):
            begin = call_parts.begin()
            buffers.overwrite(target, work)
            call_parts.end("staging", begin)
        else:
            buffers.touch(target)
        return target

    return run


def _producing(operation: Operation, *, takes: bool) -> Operation:
    """Run into a new tensor, or into `out`; through the host as a whole if the backend does not take device memory.

    The lengths may differ between ranks, so chunks would not be the same on all of them.
    """

    def run(tensor: torch.Tensor | None, out: torch.Tensor | None, root: int) -> torch.Tensor | None:
        begin = call_parts.begin()
        source = None if tensor is None else buffers.plain(tensor, to_host=not takes)
        if begin and tensor is not None and source is not None and source.data_ptr() != tensor.data_ptr():
            call_parts.end("staging", begin)
        given: torch.Tensor | None = None
        if out is not None and not takes:
            given = torch.empty(out.shape, dtype=out.dtype, device="cpu", pin_memory=out.device.type != "cpu")
        elif out is not None and buffers.is_direct(out) and (source is None or not buffers.overlap(out, source)):
            given = out.detach()
        # The backend determines the shape of the result. If `out` does not fit, the backend allocates memory, so that
        # the call ends on all ranks before this rank raises.
        result: torch.Tensor | None = operation(source, given, root)
        if result is None:
            return None
        begin = call_parts.begin()
        target = out
        if target is None:
            target = result if tensor is None else result.to(tensor.device)
        elif result.data_ptr() != target.data_ptr() or result.shape != target.shape or result.dtype != target.dtype:
            buffers.copy_result(result, target)
        if begin and result.data_ptr() != target.data_ptr():
            call_parts.end("staging", begin)
        if out is not None:
            buffers.touch(out)
        return target

    return run
