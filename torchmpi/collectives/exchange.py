"""Exchange of tensors of any length between all ranks, for all_to_all and for gathers of unequal lengths."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from ..backend_specs import BACKENDS
from ..backends.base import bind, on_rows
from ..communicators.call_log import ON_DEVICE, call_code
from ..communicators.group import Group
from ..communicators.plan import Plan, PlanKey, Run
from ..errors import ArgumentError
from ..session import runtime
from ..tensors import buffers, dtypes
from ..tensors.numbers import is_number
from .dispatch import check_out, refuse_number
from .prepared import checked_dtype, in_order

T = TypeVar("T")
ANY_PARTS, _MATCHING_PARTS = "exchange_parts", "exchange_matching_parts"
"""The operations of exchanges: the first one compares the sizes of all parts."""


def exchange(
    group: Group,
    sources: Sequence[torch.Tensor],
    destinations: Sequence[torch.Tensor],
    operation: str = ANY_PARTS,
) -> None:
    """Send `sources[j]` to rank j, and receive `destinations[j]` from rank j."""
    devices = {part.device.type for part in (*sources, *destinations)}
    plan = _plan(group, destinations[0].dtype, devices.pop() if len(devices) == 1 else "cpu", operation)
    on_device = plan.is_on_device
    outgoing = [buffers.plain(source, to_host=not on_device) for source in sources]
    incoming = [
        part.detach()
        if (on_device or part.device.type == "cpu") and buffers.is_direct(part)
        else torch.empty(part.shape, dtype=part.dtype, device=part.device if on_device else "cpu")
        for part in destinations
    ]
    group.perform(plan, _apart(outgoing, incoming), incoming, 0)
    for part, received in zip(destinations, incoming, strict=True):
        if received.data_ptr() != part.data_ptr() or received.device != part.device:
            buffers.overwrite(part, received)
        else:
            buffers.touch(part)


def are_plain(source: torch.Tensor, destination: torch.Tensor) -> bool:
    """Return whether parts of two tensors can be exchanged as they are: by :func:`exchange_plain`, without a check."""
    are_alike = source.dtype is destination.dtype and buffers.is_plain(source) and buffers.is_plain(destination)
    return are_alike and not buffers.overlap(source, destination)


def exchange_plain(group: Group, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Run :func:`exchange` on contiguous parts of host tensors that share no memory."""
    group.perform(_plan(group, sources[0].dtype, "cpu", ANY_PARTS), sources, destinations, 0)


def _apart(outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the parts to send; copies of those whose memory is received into before all ranks have read it."""
    written = {part.untyped_storage().data_ptr() for part in incoming}
    if written.isdisjoint([part.untyped_storage().data_ptr() for part in outgoing]):
        return outgoing
    # One copy for all ranks, if all get the same tensor.
    copies = {
        (part.data_ptr(), part.numel()): part.clone()
        for part in {(each.data_ptr(), each.numel()): each for each in outgoing}.values()
        if any(buffers.overlap(part, each) for each in incoming)
    }
    return [copies.get((part.data_ptr(), part.numel()), part) for part in outgoing]


def check(
    group: Group,
    sources: Sequence[torch.Tensor],
    destinations: Sequence[torch.Tensor],
    collective: str,
) -> None:
    """Raise if the tensors cannot be exchanged."""
    what = f"{group.where}: {collective}"
    for kind, parts in (("input", sources), ("output", destinations)):
        if len(parts) != group.size:
            raise ArgumentError(f"{what}: {len(parts)} {kind} tensors for {group.size} ranks. Pass one for each.")
        for part in parts:
            buffers.check(part, what, written=kind == "output")
    kinds = {part.dtype for part in (*sources, *destinations)}
    if len(kinds) > 1:
        raise ArgumentError(f"{what}: tensors of different dtypes ({', '.join(map(str, kinds))}). Convert them to one.")
    checked_dtype("alltoall", kinds.pop(), None, what)
    own = group.rank
    if sources[own].numel() != destinations[own].numel():
        raise ArgumentError(
            f"{what}: this rank sends itself {sources[own].numel()} elements, but has room for "
            f"{destinations[own].numel()}. Make the two equal."
        )


def check_splits(group: Group, tensor: torch.Tensor, splits: Iterable[int]) -> list[int]:
    """Return how many rows of dim 0 each rank gets, as integers; raise if they are not all rows of the tensor."""
    what = f"{group.where}: alltoall"
    buffers.check(tensor, what)
    checked_dtype("alltoall", tensor.dtype, None, what)
    num_rows = tensor.shape[0] if tensor.dim() else 0
    try:
        numbers = [operator.index(each) for each in splits]
    except TypeError:
        raise ArgumentError(f"{what}: splits={splits!r} is no list of integers. Pass one number per rank.") from None
    if not tensor.dim() or len(numbers) != group.size or min(numbers) < 0 or sum(numbers) != num_rows:
        raise ArgumentError(
            f"{what}: splits={numbers} does not divide {num_rows} rows over {group.size} ranks. Pass one number of "
            "rows for each rank, which add up to the length of dim 0."
        )
    return numbers


def exchange_rows(group: Group, tensor: torch.Tensor, splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """Send `splits[j]` rows to rank j; return the received rows in rank order, and their number from each rank.

    Runs in the call queue of the group.
    """
    counts = torch.tensor(splits, dtype=torch.int64, device="cpu")
    received_counts = torch.empty_like(counts)
    group.perform(_counts_plan(group, tensor), list(counts.split(1)), list(received_counts.split(1)), 0)
    received: list[int] = received_counts.tolist()
    rows = torch.empty((sum(received), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    exchange(group, torch.split(tensor.detach(), list(splits)), torch.split(rows, received), _MATCHING_PARTS)
    return rows, received


def rows_task(
    group: Group, tensor: torch.Tensor, splits: Iterable[int], out: torch.Tensor | None, backend: str | None
) -> Callable[[], torch.Tensor]:
    """Return the task of an alltoall of uneven parts."""
    if backend is not None:
        raise ArgumentError(
            f"{group.where}: alltoall: the backend of a call with splits cannot be chosen. Omit backend={backend!r}."
        )
    what = f"{group.where}: alltoall"
    if is_number(tensor):
        refuse_number("alltoall", out, what)
    numbers = check_splits(group, tensor, splits)
    if out is not None:
        check_out("alltoall", tensor, out, what)

    def task() -> torch.Tensor:
        rows, _ = exchange_rows(group, tensor, numbers)
        if out is None:
            return rows
        buffers.copy_result(rows, out)
        return out

    return shown(group, task, tensor)


def shown(group: Group, task: Callable[[], T], tensor: torch.Tensor) -> Callable[[], T]:
    """Return a task that torch.profiler shows as one alltoall of parts that are not even, also of their lengths."""
    return group.shown(task, group.described, ("alltoall", "", dtypes.short_name(tensor.dtype), -1), [tensor])


def _counts_plan(group: Group, tensor: torch.Tensor) -> Plan:
    """Return the plan of the exchange of numbers of rows, with which the ranks compare dtype and shape of the rows."""
    plan = _plan(group, torch.int64, "cpu", _MATCHING_PARTS)
    code = call_code("alltoall_splits", None, dtypes.info(tensor.dtype).code)
    counts = Plan("alltoall_splits", code, plan.run, lambda _: tuple(tensor.shape[1:]))
    counts.backends = plan.backends
    return counts


def _plan(group: Group, dtype: torch.dtype, device_type: str, name: str) -> Plan:
    """Return the plan of an exchange; it takes the memory of the device, or else tensors are staged."""
    key = PlanKey(name, None, dtype, device_type)
    plan: Plan | None = group.plans.get(key)
    if plan is None:
        selector, code = runtime.current().selector, call_code("alltoall", None, dtypes.info(dtype).code)
        backend = selector.select("alltoall", device_type, group)[-1].backend
        on_device = BACKENDS[backend.name].on_device
        if not on_device:
            backend = selector.select("alltoall", "cpu", group)[-1].backend
            backend = backend if name in backend.collectives else selector.network
        operation = bind(backend, group, name, dtype, None)
        run = _in_order(operation.run, group) if on_device else operation.run
        plan = Plan("alltoall", code | ON_DEVICE if on_device else code, run)
        plan.backends, plan.is_on_device = ((None, backend.name),), on_device
        plan.cached_call = operation.cached_call
        group.plans[key] = plan
    return plan


def rows_plan(group: Group, dtype: torch.dtype) -> Plan:
    """Return the plan of an exchange of equal parts of two plain host tensors; other ranks may call `exchange`."""
    plan = copy.copy(_plan(group, dtype, "cpu", ANY_PARTS))
    work = on_rows(plan.run, group.size)

    def run(source: torch.Tensor, destination: torch.Tensor, root: int) -> None:
        work(source, destination, root)
        buffers.touch(destination)

    plan.run = run
    return plan


def _in_order(work: Run, group: Group) -> Run:
    ordered = in_order(lambda _, parts, root: work(parts[0], parts[1], root), group)
    return lambda outgoing, incoming, root: ordered(outgoing[0], (outgoing, incoming), root)
