"""Plans of collectives: the checks that do not depend on the values are done, and the backends bound.

A plan is made once per group for each :class:`~torchmpi.communicators.plan.PlanKey`. It holds the operations of the
selected backends, and the copies before and after them. A call then costs a dictionary lookup, and a comparison where
the choice of the backend depends on the size.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial

import torch

from ..backend_specs import BACKENDS, HIERARCHICAL
from ..backends.base import Backend, Operation, announced, bind, by_size
from ..backends.hierarchical.spans import span_collective
from ..backends.hierarchical.steps import StepRunner
from ..collective_specs import SPECS, CollectiveSpec
from ..communicators.call_codes import ON_DEVICE, as_many, call_code
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.plan import PLAIN, PLAIN_ON, Backends, Plan, PlanKey, compared_shape
from ..errors import ArgumentError, DtypeError
from ..log import logger
from ..session import runtime
from ..session.runtime import Runtime
from ..tensors import dtypes
from . import copies, device_staging


def plan_for(communicator: Communicator, key: PlanKey) -> Plan:
    """Return the plan for a key, made on first use; raise if no backend can run it."""
    known = communicator.intra.plans
    plan: Plan | None = known.get(key)
    if plan is None:
        plan = known[key] = _prepare(runtime.current(), communicator, key)
    return plan


def _prepare(running: Runtime, communicator: Communicator, key: PlanKey) -> Plan:
    collective, op, dtype, _, wanted, mode = key
    spec, group, selector = SPECS[collective], communicator.intra, running.selector
    name = spec.form_of or collective
    dtype_code = 0 if dtype is None else checked_dtype(name, dtype, op, f"{group.where}: {name}").code
    if spec.kind == "exchange" and not key.is_plain:  # on the device if its backend is, else all parts are staged
        backend = selector.select(collective, key.device_type, group)[-1].backend
        key = key._replace(place="cuda" if BACKENDS[backend.name].on_device else "cpu")
    chosen_by = _chosen_by(running, spec, key.device_type, wanted)
    if dtype is None and key.device_type == "cpu" != chosen_by:
        key = key._replace(place=chosen_by)
    choices = selector.select(collective, chosen_by, group, dtype=dtype, op=op, wanted=wanted, mode=str(mode))
    runner = StepRunner(op, partial(_step, running, wanted, str(mode)), variant=(wanted, mode))
    in_steps = None
    if wanted != HIERARCHICAL:
        stack, cartesian = running.communicators, running.cartesian
        in_steps = span_collective(stack, communicator, collective, dtype, op, runner, cartesian=cartesian)
    blocking = selector.select(collective, chosen_by, group, dtype=dtype, op=op, wanted=wanted)
    is_on_host = key.device_type == "cpu"  # memory for staging has a stream
    if mode == "async" and is_on_host and in_steps is None and choices == blocking:
        return plan_for(communicator, key._replace(mode="sync"))
    bound: list[tuple[int | None, Operation, Backend]]
    if in_steps is not None:
        # Each step selects its backend; the last one determines which tensors are staged.
        bound = [(None, announced(group, Operation(in_steps.run)), choices[-1].backend)]
        names: Backends = ((None, HIERARCHICAL),)
    else:
        bound = [(limit, bind(backend, group, collective, dtype, op), backend) for limit, backend in choices]
        names = tuple((limit, backend.name) for limit, backend in choices)
    logger.debug("%s(%s, %s) on %s, %s: %s", collective, dtype, op, group.name, key.device_type, _in_words(names))
    around = partial(_on_tensors, running, group, key)
    operation = by_size([(limit, around(each, backend)) for limit, each, backend in bound], dtype)
    code = call_code(name, op, dtype_code if spec.is_everywhere else 0)
    plan = Plan(name, code, operation.run, compared_shape(collective))
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
            if plan.many is not None:
                plan.many.cached_call = operation.cached_list
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
    if not spec.tensors or (spec.kind == "exchange" and key.is_plain):
        return operation
    if spec.kind == "exchange":
        return Operation(copies.exchanging(run, group, on_device=key.device_type != "cpu"))
    takes = backend.takes(key.device_type, key.collective)
    if not takes and spec.in_place:
        return Operation(device_staging.StagedOperation(spec, run, group, _pool(runtime)).run)
    if takes and key.device_type != "cpu":
        if key.is_plain and backend.enqueues and spec.in_place:
            return Operation(copies.plain_in_order(run, group))
        run = copies.in_order(run, group) if backend.enqueues else copies.settled(run)
    if spec.in_place:
        run = copies.plain_in_place(spec, run, group) if key.is_plain and takes else copies.copying(spec, run, group)
    else:
        run = copies.plain_producing(spec, run) if key.place == PLAIN else copies.producing(spec, run, takes=takes)
    return replace(operation, run=run)


_pools: dict[Runtime, device_staging.StagingPool] = {}


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
