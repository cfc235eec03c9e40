"""Exchange of tensors of any length between all ranks, for all_to_all and for gathers of unequal lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.plan import PLAIN, Plan, PlanKey
from ..errors import ArgumentError
from ..shared_memory.kernels.records import FLAT
from ..tensors import buffers
from .bound_calls import BoundCall
from .call_arguments import check_splits
from .prepared import checked_dtype, plan_for

__all__ = ["PartsExchange", "are_plain", "check", "check_splits", "exchange", "rows_task"]

T = TypeVar("T")
ANY_PARTS, _MATCHING_PARTS = "exchange_parts", "exchange_matching_parts"
"""The operations of exchanges: the first one compares the sizes of all parts."""


def exchange(group: Group, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Send `sources[j]` to rank j, and receive `destinations[j]` from rank j."""
    devices = {part.device.type for part in (*sources, *destinations)}
    plan = _plan(group, ANY_PARTS, destinations[0].dtype, devices.pop() if len(devices) == 1 else "cpu")
    group.perform(plan, list(sources), list(destinations), 0)


def are_plain(source: torch.Tensor, destination: torch.Tensor) -> bool:
    """Return whether parts of two tensors can be exchanged as they are, without a check."""
    are_alike = source.dtype is destination.dtype and buffers.is_plain(source) and buffers.is_plain(destination)
    return are_alike and not buffers.overlap(source, destination)


class PartsExchange(BoundCall):
    """Exchanges of tensors of one dtype whose parts may differ in length.

    Its readable twin, :func:`exchange`, makes what machine code cannot: the first calls, and those of other memory.
    """

    num_rows = (FLAT, FLAT)

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        super().__init__(group, _plan(group, ANY_PARTS, dtype, PLAIN), "exchange", dtype)

    @staticmethod
    def known(group: Group, dtype: torch.dtype) -> PartsExchange | None:
        """Return the exchanges of a group, if there has been one."""
        found: PartsExchange | None = group.plans.get(("exchange of parts", dtype))
        return found

    @classmethod
    def of(cls, group: Group, dtype: torch.dtype) -> PartsExchange:
        """Return the exchanges of a group."""
        found = cls.known(group, dtype)
        if found is None:
            found = group.plans["exchange of parts", dtype] = cls(group, dtype)
        return found

    def perform(self, given: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
        """Run a call in Python; the caller holds the run lock."""
        exchange(self.group, given, out)


def _plan(group: Group, operation: str, dtype: torch.dtype, place: str) -> Plan:
    return plan_for(Communicator.of(group), PlanKey(operation, None, dtype, place))


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


def rows_task(
    group: Group, tensor: torch.Tensor, splits: Sequence[int], finish: Callable[[torch.Tensor, list[int]], T]
) -> Callable[[], T]:
    """Return a task for the call queue, an alltoall that sends `splits[j]` rows of a checked tensor to rank j.

    The task returns ``finish(rows, lengths)``: the received rows in rank order, and their number from each rank.
    torch.profiler shows it as one call.
    """
    rows_plan = _plan(group, _MATCHING_PARTS, tensor.dtype, tensor.device.type)
    # With the numbers of rows the ranks compare dtype and shape of the rows.
    counts_plan = _plan(group, _MATCHING_PARTS, torch.int64, "cpu")
    counts_plan = counts_plan.announcing(tensor.dtype, *tensor.shape[1:], collective="alltoall_splits")

    def task() -> T:
        counts = torch.tensor(splits, dtype=torch.int64, device="cpu")
        received_counts = torch.empty_like(counts)
        group.perform(counts_plan, list(counts.split(1)), list(received_counts.split(1)), 0)
        lengths: list[int] = received_counts.tolist()
        rows = torch.empty((sum(lengths), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        group.perform(rows_plan, list(tensor.detach().split(list(splits))), list(rows.split(lengths)), 0)
        return finish(rows, lengths)

    return group.shown(task, group.described_call, rows_plan, [tensor], None, 0)
