"""Exchange of tensors of any length between all ranks, for all_to_all and for gathers of unequal lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backends.base import Operation, bind
from ..collectives.prepared import in_order
from ..communicators.call_log import ON_DEVICE, call_code
from ..communicators.group import Group
from ..communicators.plan import Plan
from ..errors import ArgumentError
from ..session import runtime
from ..tensors import buffers, dtypes

_BACKENDS = ("shm", "mpi", "gloo")
"""The backends in host memory with the operation ``exchange_parts``."""


def exchange(group: Group, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Send `sources[j]` to rank j, and receive `destinations[j]` from rank j."""
    devices = {part.device.type for part in (*sources, *destinations)}
    plan, on_device = _plan(group, destinations[0].dtype, devices.pop() if len(devices) == 1 else "cpu")
    outgoing = [buffers.plain(source, to_host=not on_device) for source in sources]
    incoming = [
        part.detach()
        if (on_device or part.device.type == "cpu") and buffers.is_direct(part)
        else torch.empty(part.shape, dtype=part.dtype, device=part.device if on_device else "cpu")
        for part in destinations
    ]
    group.perform(plan, outgoing, incoming, 0)
    for part, received in zip(destinations, incoming, strict=True):
        if received.data_ptr() != part.data_ptr() or received.device != part.device:
            buffers.overwrite(part, received)
        else:
            buffers.touch(part)


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
    own = group.rank
    if sources[own].numel() != destinations[own].numel():
        raise ArgumentError(
            f"{what}: this rank sends itself {sources[own].numel()} elements, but has room for "
            f"{destinations[own].numel()}. Make the two equal."
        )


def _plan(group: Group, dtype: torch.dtype, device_type: str) -> tuple[Plan, bool]:
    """Return the plan of an exchange, and whether it takes the memory of the device; other tensors are staged."""
    key = ("exchange", dtype, device_type)
    if key not in group.plans:
        selector, code = runtime.current().selector, call_code("alltoall", None, dtypes.info(dtype).code)
        backend = selector.select("alltoall", device_type, group)[-1].backend
        on_device = backend.name == "nccl"
        if not on_device:
            backend = selector.select("alltoall", "cpu", group)[-1].backend
            backend = backend if backend.name in _BACKENDS else selector.network
        operation = bind(backend, group, "exchange_parts", dtype, None)
        if on_device:
            operation, code = _in_order(operation, group), code | ON_DEVICE
        group.plans[key] = Plan("alltoall", code, operation), on_device
    found: tuple[Plan, bool] = group.plans[key]
    return found


def _in_order(operation: Operation, group: Group) -> Operation:
    ordered = in_order(lambda _, parts, root: operation(parts[0], parts[1], root), group)
    return lambda outgoing, incoming, root: ordered(outgoing[0], (outgoing, incoming), root)
