"""Exchange of tensors of any length between all ranks, for all_to_all and for gathers of unequal lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backends.base import bind
from ..communicators.call_log import call_code
from ..communicators.group import Group
from ..communicators.plan import Plan
from ..errors import ArgumentError
from ..session import runtime
from ..tensors import buffers, dtypes

_BACKENDS = ("shm", "mpi", "gloo")
"""The backends with the operation ``exchange_parts``."""


def exchange(group: Group, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Send `sources[j]` to rank j, and receive `destinations[j]` from rank j."""
    outgoing = [buffers.plain(source, to_host=True) for source in sources]
    incoming = [
        part.detach()
        if part.device.type == "cpu" and buffers.is_direct(part)
        else torch.empty(part.shape, dtype=part.dtype, device="cpu")
        for part in destinations
    ]
    group.perform(_plan(group, incoming[0].dtype), outgoing, incoming, 0)
    for part, received in zip(destinations, incoming, strict=True):
        if received.data_ptr() != part.data_ptr() or part.device.type != "cpu":
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


def _plan(group: Group, dtype: torch.dtype) -> Plan:
    plan: Plan | None = group.plans.get(("exchange", dtype))
    if plan is None:
        choice = runtime.current().selector.select("alltoall", "cpu", group)[-1].backend
        backend = choice if choice.name in _BACKENDS else runtime.current().selector.network
        operation = bind(backend, group, "exchange_parts", dtype, None)
        plan = Plan("alltoall", call_code("alltoall", None, dtypes.info(dtype).code), operation)
        group.plans["exchange", dtype] = plan
    return plan
