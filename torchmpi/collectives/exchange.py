"""Exchange of tensors of any length between all ranks, for all_to_all and for gathers of unequal lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..backends.base import on_rows
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.plan import PLAIN, Plan, PlanKey
from ..errors import ArgumentError
from ..shared_memory import fast_path
from ..shared_memory.kernels.records import FLAT
from ..tensors import buffers
from .call_arguments import check_splits
from .dispatch import BoundCode
from .prepared import checked_dtype, plan_for

__all__ = [
    "ANY_PARTS", "PartsExchange", "are_plain", "check", "check_splits", "exchange", "rows_plan", "rows_task",
]  # fmt: skip

T = TypeVar("T")
ANY_PARTS, _MATCHING_PARTS = "exchange_parts", "exchange_matching_parts"
"""The operations of exchanges: the first one compares the sizes of all parts."""


def exchange(group: Group, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Send `sources[j]` to rank j, and receive `destinations[j]` from rank j."""
    devices = {part.device.type for part in (*sources, *destinations)}
    plan = _plan(group, ANY_PARTS, destinations[0].dtype, devices.pop() if len(devices) == 1 else "cpu")
    group.perform(plan, list(sources), list(destinations), 0)


def are_plain(source: torch.Tensor, destination: torch.Tensor) -> bool:
    """Return whether parts of two tensors can be exchanged as they are: by :func:`rows_plan`, without a check."""
    are_alike = source.dtype is destination.dtype and buffers.is_plain(source) and buffers.is_plain(destination)
    return are_alike and not buffers.overlap(source, destination)


def rows_plan(group: Group, dtype: torch.dtype) -> Plan:
    """Return the plan of an exchange of two lists of parts, or of equal parts of two tensors, all of plain host memory.

    Other ranks may call `exchange`.
    """
    plan = copy.copy(_plan(group, ANY_PARTS, dtype, PLAIN))
    work = on_rows(plan.run, group.size)

    def run(source: Any, destination: Any, root: int) -> None:
        work(source, destination, root)
        buffers.touch_all(destination if isinstance(destination, list) else [destination])

    plan.run = run
    return plan


class PartsExchange:
    """Exchanges of checked tensors of one dtype whose parts may differ in length, repeated by machine code.

    Its readable twin, :func:`exchange`, makes what machine code cannot: the first calls, and those of other memory.
    """

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        self._group, self._plan = group, rows_plan(group, dtype)
        self._code = BoundCode(group, "exchange", dtype, self._cached_call)

    @classmethod
    def of(cls, group: Group, dtype: torch.dtype) -> PartsExchange:
        """Return the exchanges of a group, made at the first call."""
        key = "exchange of parts", dtype
        found: PartsExchange | None = group.plans.get(key)
        if found is None:
            found = group.plans[key] = cls(group, dtype)
        return found

    def run(self, sources: list[torch.Tensor], parts: list[torch.Tensor], subject: torch.Tensor) -> None:
        """Send `sources[j]` to rank j, and receive `parts[j]` from rank j, after the calls made before.

        Args:
            sources: What this rank sends; parts of `subject`.
            parts: Memory for what it receives.
            subject: The tensor that calls show.
        """
        if self._code.run(sources, parts) is None:
            self._code.cache()
            self._group.call_queue.run(exchange, self._group, sources, parts, subject=subject)

    def _cached_call(self) -> fast_path.CachedCall | None:
        find = self._plan.cached_call
        cached: fast_path.CachedCall | None = None if find is None else find(0, None)
        return None if cached is None else cached._replace(rows=(FLAT, FLAT))


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
