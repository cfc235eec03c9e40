"""Exchange of tensors of any length between all ranks, for all_to_all and for gathers of unequal lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.plan import PLAIN, Plan, PlanKey
from ..errors import ArgumentError
from ..shared_memory import fast_path
from ..shared_memory.kernels.records import FLAT
from ..tensors import buffers
from .bound_calls import BoundCall
from .call_arguments import check_splits
from .prepared import checked_dtype, plan_for

__all__ = [
    "PartsExchange", "alltoall_rows", "are_plain", "check", "check_splits", "exchange", "submit_alltoall_rows",
]  # fmt: skip

T = TypeVar("T")


def exchange(group: Group, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Send `sources[j]` to rank j, and receive `destinations[j]` from rank j."""
    devices = {part.device.type for part in (*sources, *destinations)}
    plan = _plan(group, destinations[0].dtype, devices.pop() if len(devices) == 1 else "cpu")
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
        super().__init__(group, _plan(group, dtype, PLAIN), "exchange", dtype)

    @staticmethod
    def known(group: Group, dtype: torch.dtype) -> PartsExchange | None:
        """Return the exchanges of a group, if there has been one."""
        found: PartsExchange | None = group.plans.get((PartsExchange, dtype))
        return found

    @classmethod
    def of(cls, group: Group, dtype: torch.dtype) -> PartsExchange:
        """Return the exchanges of a group."""
        return _of_group(cls, group, dtype)

    def perform(self, given: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
        """Run a call in Python; the caller holds the run lock."""
        exchange(self.group, given, out)


def _of_group(kind: Callable[[Group, torch.dtype], T], group: Group, dtype: torch.dtype) -> T:
    """Return the calls of a kind on tensors of a dtype, one object for each group."""
    found: T | None = group.plans.get((kind, dtype))
    if found is None:
        found = group.plans[kind, dtype] = kind(group, dtype)
    return found


def _plan(group: Group, dtype: torch.dtype, place: str) -> Plan:
    return plan_for(Communicator.of(group), PlanKey("exchange_parts", None, dtype, place))


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


def alltoall_rows(
    group: Group, tensor: torch.Tensor, splits: list[int], out: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Send `splits[j]` rows of a checked tensor to rank j.

    Returns:
        The received rows in rank order, in `out` if given, and their number from each rank.
    """
    call = _RowsCall(group, tensor, splits, out)
    if not call.run_fast():
        group.call_queue.run(call.task(), subject=tensor)
    return call.result()


def submit_alltoall_rows(
    group: Group,
    tensor: torch.Tensor,
    splits: list[int],
    finish: Callable[[torch.Tensor, list[int]], T],
    out: torch.Tensor | None = None,
) -> Handle[T]:
    """Run :func:`alltoall_rows` in the background; the handle has ``finish(rows, numbers)``."""
    call = _RowsCall(group, tensor, splits, out)
    task = call.task(lambda: finish(*call.result()))
    return group.call_queue.submit(task, f"{group.where}: alltoall", tensor, in_any_thread=True)


class _RowsCall:
    """An alltoall with splits: an alltoall of the numbers of rows, then an exchange of the rows.

    With the numbers the ranks compare dtype and shape of the rows, so the sizes of all parts match.
    """

    def __init__(self, group: Group, tensor: torch.Tensor, splits: list[int], out: torch.Tensor | None) -> None:
        self._group, self._tensor, self._splits, self._out = group, tensor, splits, out
        self._numbers = torch.tensor([splits, splits], dtype=torch.int64, device="cpu")
        """How many rows this rank sends to each rank, and receives from each."""
        self._code = _of_group(_RowNumbers, group, tensor.dtype)
        self._exchange = PartsExchange.of(group, tensor.dtype)
        self._received: list[int] | None = None

    def result(self) -> tuple[torch.Tensor, list[int]]:
        """Return the received rows, and their number from each rank."""
        assert self._received is not None
        if self._out is not None and self._rows is not self._out:
            buffers.copy_result(self._rows, self._out, "alltoall")
        return (self._rows if self._out is None else self._out), self._received

    def run_fast(self) -> bool:
        """Run what machine code can in this thread; return whether that is all."""
        if self._received is None:
            if self._code.run_fast(self._tensor, self._numbers) is None:
                return False
            self._make_room()
        if self._exchange.run_fast(self._sources, self._parts) is None:
            return False
        if self._rows is self._out:
            buffers.touch(self._rows)
        return True

    def task(self, finish: Callable[[], T] | None = None) -> Callable[[], T | None]:
        """Return a task for the call queue that runs the rest. torch.profiler shows it as one call."""

        def task() -> T | None:
            if not self.run_fast():
                self._run()
            return None if finish is None else finish()

        group, tensor = self._group, self._tensor
        plan = _plan(group, tensor.dtype, tensor.device.type)
        return group.shown(task, group.described_call, plan, [tensor], None, 0)

    def _run(self) -> None:
        if self._received is None:
            self._code.cache()
            sent, received = self._numbers
            self._group.perform(_plan_of_numbers(self._group, self._tensor), sent, received, 0)
            self._make_room()
        self._exchange.run_through_python(self._sources, self._parts)

    def _make_room(self) -> None:
        tensor, out, received = self._tensor, self._out, self._numbers[1].tolist()
        shape = sum(received), *tensor.shape[1:]
        if out is not None and out.shape == shape and are_plain(tensor, out):
            self._rows = out
        else:
            self._rows = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        self._sources, self._parts = list(tensor.detach().split(self._splits)), list(self._rows.split(received))
        self._received = received
        self._group.even_seq = self._group.call_log.seq + 1  # backends need not compare the sizes again


def _plan_of_numbers(group: Group, rows: torch.Tensor | None) -> Plan:
    """Return the plan by which ranks tell each other how many rows they send."""
    plan = plan_for(Communicator.of(group), PlanKey("alltoall", None, torch.int64, PLAIN))
    return plan if rows is None else plan.announcing(rows.dtype, *rows.shape[1:], collective="alltoall_splits")


class _RowNumbers(BoundCall):
    """The calls by which ranks tell each other how many rows of a dtype they send: on the rows, and on the numbers."""

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        super().__init__(group, _plan_of_numbers(group, None), "alltoall_splits", dtype)

    def cached_call(self) -> fast_path.CachedCall | None:
        """Return the call for machine code, whose signature has dtype and shape of the rows."""
        cached = super().cached_call()
        if cached is None:
            return None
        assert self._dtype is not None
        end, code = cached.settle, self.plan.announcing(self._dtype, collective="alltoall_splits").code
        # Over hosts, which are strict, the signature is the hash of the shape alone.
        signed_code = 0 if self.group.is_strict else cached.signed_code ^ cached.code ^ code

        def settle(status: int, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            sent, received = numbers
            end(status, sent, received)
            return numbers

        return cached._replace(code=code, signed_code=signed_code, settle=settle)
