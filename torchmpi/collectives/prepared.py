"""Plans of collectives: the checks that do not depend on the values are done, and the backends bound.

A plan is made once per group for each :class:`~torchmpi.communicators.plan.PlanKey`. It holds the operations of the
selected backends, and the copies before and after them. A call then costs a dictionary lookup, and a comparison where
the choice of the backend depends on the size.
"""

from __future__ import annotations

import operator
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..backend_specs import HIERARCHICAL
from ..backends.base import Backend, Operation, announced, bind, by_size
from ..backends.hierarchical.spans import is_composed, span_collective
from ..backends.hierarchical.steps import StepRunner
from ..collective_specs import SPECS, CollectiveSpec
from ..communicators import call_parts
from ..communicators.call_log import ON_DEVICE, as_many, call_code
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.plan import PLAIN, PLAIN_ON, Backends, Plan, PlanKey, Run, compared_shape
from ..errors import ArgumentError, DtypeError
from ..log import logger
from ..session.runtime import Runtime
from ..tensors import buffers, dtypes, streams
from . import device_staging


def prepare(runtime: Runtime, communicator: Communicator, key: PlanKey) -> Plan:
    """Make the plan for a key, or raise if no backend can run it."""
    collective, op, dtype, _, wanted, mode = key
    spec, group = SPECS[collective], communicator.intra
    chosen_by = _chosen_by(runtime, spec, key.device_type, wanted)
    if dtype is None and key.device_type == "cpu" != chosen_by:
        key = key._replace(place=chosen_by)
    dtype_code = 0 if dtype is None else checked_dtype(collective, dtype, op, f"{group.where}: {collective}").code
    choices = runtime.selector.select(collective, chosen_by, group, dtype=dtype, op=op, wanted=wanted, mode=str(mode))
    bound: list[tuple[int | None, Operation, Backend]]
    if wanted != HIERARCHICAL and is_composed(runtime.communicators, communicator, collective):
        composed = _composition(runtime, collective, dtype, op, wanted=wanted, mode=str(mode))
        # Each step selects its backend; the last one determines which tensors are staged.
        bound = [(None, announced(group, composed), choices[-1].backend)]
        names: tuple[tuple[int | None, str], ...] = ((None, HIERARCHICAL),)
    else:
        bound = [(limit, bind(backend, group, collective, dtype, op), backend) for limit, backend in choices]
        names = tuple((limit, backend.name) for limit, backend in choices)
    logger.debug("%s(%s, %s) on %s, %s: %s", collective, dtype, op, group.name, key.device_type, _in_words(names))
    around = partial(_on_tensors, runtime, group, key)
    operation = by_size([(limit, around(each, backend)) for limit, each, backend in bound], dtype)
    code = call_code(collective, op, dtype_code if spec.is_everywhere else 0)
    plan = Plan(collective, code, operation.run, compared_shape(collective))
    plan.backends = names
    if key.device_type != "cpu":
        plan.code |= ON_DEVICE if spec.is_everywhere else 0
        plan.is_on_device = True
        plan.enqueues = names[-1][1] != HIERARCHICAL and all(each.enqueues for _, _, each in bound)
    elif key.is_plain:
        if operation.run_list is not None:
            plan.many = Plan("allreduce_many", as_many(code), operation.run_list, operator.attrgetter("signature"))
            plan.many.backends = names
        if mode == "sync" and not (dtype is not None and dtype.is_complex):  # a cached call reads no conjugate bit
            plan.cached_call = operation.cached_call
    return plan


def _in_words(names: tuple[tuple[int | None, str], ...]) -> str:
    """Name the backends of a call.

    >>> _in_words(((4096, "shm"), (None, "p2p")))
    'shm up to 4096 bytes, then p2p'
    """
    return ", then ".join(name if limit is None else f"{name} up to {limit} bytes" for limit, name in names)


def checked_dtype(collective: str, dtype: torch.dtype, op: str | None, where: str) -> dtypes.DtypeInfo:
    """Return the properties of a dtype; raise if the collective does not take it."""
    try:
        return dtypes.check_reduction(dtype, op) if SPECS[collective].reduces else dtypes.info(dtype)
    except (DtypeError, ArgumentError) as error:
        raise type(error)(f"{where}: {error}") from None


def _chosen_by(runtime: Runtime, spec: CollectiveSpec, device_type: str, wanted: str | None) -> str:
    """Return the device type for which the backend is chosen; it must be the same on all ranks."""
    if not spec.only_root_passes:
        return device_type
    # Ranks that pass None have no device: use that of the host, unless a backend is given.
    backend = runtime.selector.backends.get(wanted or "")
    return "cpu" if backend is None or backend.takes("cpu", spec.name) else "cuda"


def _composition(
    runtime: Runtime, collective: str, dtype: torch.dtype | None, op: str | None, *, wanted: str | None, mode: str
) -> Operation:
    runner = StepRunner(op, partial(_step, runtime, wanted, mode), variant=(wanted, mode))
    steps = span_collective(runtime.communicators, collective, dtype, op, runner, cartesian=runtime.cartesian)
    return Operation(steps.run)


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
        around = partial(_on_tensors, runtime, group, PlanKey(collective, op, dtype, PLAIN_ON[device_type]))
    return runtime.selector.bind(group, collective, dtype, op, device_type, wanted=wanted, mode=mode, around=around)


def _on_tensors(runtime: Runtime, group: Group, key: PlanKey, operation: Operation, backend: Backend) -> Operation:
    """Return an operation of a backend that takes the tensors of the program: plain or not, on any device."""
    spec, run = SPECS[key.collective], operation.run
    if not spec.tensors:
        return operation
    takes = backend.takes(key.device_type, key.collective)
    if not takes and spec.in_place:
        return Operation(device_staging.StagedOperation(spec, run, group, _pool(runtime)).run)
    if takes and key.device_type != "cpu":
        if key.is_plain and backend.enqueues and spec.in_place:
            return Operation(_plain_in_order(run, group))
        run = in_order(run, group) if backend.enqueues else _settled(run)
    if spec.in_place:
        run = _plain_in_place(spec, run, group) if key.is_plain and takes else _copying(spec, run, group)
    else:
        run = _plain_producing(run) if key.place == PLAIN else _producing(run, takes=takes)
    return replace(operation, run=run)


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


def in_order(work: Run, group: Group) -> Run:
    """Keep the operations that a group enqueues on its device in order, although the callers' streams may differ."""
    order = _orders.setdefault(group, streams.Order())

    def run(source: Any, destination: Any, root: int) -> Any:
        tensor = destination if source is None else source
        with streams.on_device(tensor):
            order.enter(tensor)
            return work(source, destination, root)

    return run


def _settled(work: Run) -> Run:
    """Wait for the device first: the operation takes device memory without regard to streams."""

    def run(source: Any, destination: Any, root: int) -> Any:
        for tensor in (source, destination):
            if tensor is not None:
                streams.settle(tensor)
        return work(source, destination, root)

    return run


def _plain_in_order(work: Run, group: Group) -> Run:
    """Return `_plain_in_place` of `in_order` in one function, since this is the path of every short call."""
    ordered, is_kept_by = in_order(work, group), _orders[group].is_kept_by

    def run(tensor: torch.Tensor, out: None, root: int) -> torch.Tensor:
        (work if is_kept_by(tensor) else ordered)(tensor, None, root)
        try:  # buffers.touch without a call
            buffers.increment_version((tensor,))
        except RuntimeError:
            buffers.touch(tensor)
        return tensor

    return run


def _plain_in_place(spec: CollectiveSpec, work: Run, group: Group) -> Run:
    """Run on the memory of the tensor, or on that of `out`, into which it is copied: both are plain and equal."""

    def run(tensor: torch.Tensor, out: torch.Tensor | None, root: int) -> torch.Tensor:
        if out is not None and spec.receives(group.rank == root):  # otherwise nothing is changed
            if out.is_inference():
                buffers.overwrite(out, tensor)
            else:
                out.copy_(tensor)  # notifies autograd too
            tensor = out
        work(tensor, None, root)
        try:  # buffers.touch without a call
            buffers.increment_version((tensor,))
        except RuntimeError:
            buffers.touch(tensor)
        return tensor

    return run


def _plain_producing(work: Run) -> Run:
    """Run from plain host memory into `out`, plain too and apart from the tensor, or into a new tensor."""

    def run(tensor: torch.Tensor | None, out: torch.Tensor | None, root: int) -> torch.Tensor | None:
        result: torch.Tensor | None = work(tensor, out, root)
        if out is None or result is None:  # gathered by another rank
            return result
        if result is not out:  # which does not fit: the call has ended on all ranks before this one raises
            buffers.copy_result(result, out)
        buffers.touch(out)
        return out

    return run


def _copying(spec: CollectiveSpec, work: Run, group: Group) -> Run:
    """Run on a plain copy of a tensor that is not plain, or of which the result goes to `out`."""

    def run(tensor: torch.Tensor, out: torch.Tensor | None, root: int) -> torch.Tensor:
        receives = spec.receives(group.rank == root)
        target = tensor if out is None else out
        begin = call_parts.begin()
        copy = buffers.plain(tensor, to_host=False)
        if out is not None and receives and copy.data_ptr() == tensor.data_ptr():
            copy = copy.clone()
        if begin and copy.data_ptr() != tensor.data_ptr():
            call_parts.end("staging", begin)
        work(copy, None, root)
        if not receives:
            return tensor
        if copy.data_ptr() != target.data_ptr() or not buffers.is_direct(target):
            begin = call_parts.begin()
            buffers.overwrite(target, copy)
            call_parts.end("staging", begin)
        else:
            buffers.touch(target)
        return target

    return run


def _producing(work: Run, *, takes: bool) -> Run:
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
        result: torch.Tensor | None = work(source, given, root)
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
