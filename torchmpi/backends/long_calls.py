"""Calls over hosts that are too long for the messages of the comparison: compared first, then messages follow.

The ranks in the same place of all hosts, a *column*, send each other what their hosts have for each other:

* allgather: each rank its rows. Then the ranks of a host gather the rows of each host.
* reduce_scatter: the ranks of a host first reduce the rows for each host, so that each of them has the sums for the
  rank in its place there. Each combines the sums that it gets, in the order of the hosts.

Where each byte is for one rank, it goes there: each rank of a gather sends its rows to the root, and of an alltoall to
each rank its part. So each byte is sent once to a host, and is received where it belongs, except sums. The kernel
`call_long_over_hosts` does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from ..collective_specs import CollectiveSpec
from ..communicators import algorithms
from ..communicators.group import Group
from ..shared_memory.kernels import records
from ..shared_memory.memory_layout import LogFields
from ..tensors import buffers, partition
from .call_comparison import MOST_LONG_BYTES, CallComparison, CompiledSteps, Settle
from .hierarchical.steps import StepRunner
from .mpi_messages import Messages, exchange, rows_of
from .number_exchange import NumberExchange
from .rank_order import Combiner, PartialResults

_CACHE_LINE = 64


class _Plan(Protocol):
    """What :class:`.compared_calls.ComparedCall` knows of the calls of a collective."""

    group: Group
    comparison: CallComparison
    spec: CollectiveSpec
    runner: StepRunner
    dtype: torch.dtype
    sent_dtype: torch.dtype
    partial_results: PartialResults | None
    combine: Combiner
    own_host: int
    place: int
    has_parts: bool
    takes_part: bool

    @property
    def hosts(self) -> Sequence[Sequence[int]]:
        """The ranks of each host."""


class _Call(Protocol):
    """A call: the tensor of this rank, the same as bytes, the result, and the root."""

    source: torch.Tensor | None
    flat: torch.Tensor
    target: torch.Tensor | None
    root: int


class LongCall:
    """The long calls of a collective on a group.

    Attributes:
        step: The collective of the steps within the host; None if this rank takes part in none.
        message_bytes: The length of the longest message.
        most_bytes: The size of the longest tensor of a rank as it is sent: of one that is divided, as if all ranks got
            as many rows as the first one, since the memory for sums has blocks of that length.
        algorithm: The algorithm that the call log stores.
    """

    def __init__(self, plan: _Plan, message_bytes: int) -> None:
        """Prepare the calls; `message_bytes`: the longest message."""
        self._plan, self._group, self._comparison = plan, plan.group, plan.comparison
        has_step = self.in_columns(plan.spec) and self._comparison.intra is not None
        self.step = plan.spec.name if has_step else None
        self.algorithm = algorithms.DIRECT if self.step is None else algorithms.SLICES
        self.message_bytes = self.most_bytes = message_bytes
        if plan.spec.reduces:
            self.most_bytes = min(message_bytes, MOST_LONG_BYTES)

    @classmethod
    def of(cls, plan: _Plan, message_bytes: int) -> LongCall | None:
        """Return the long calls of a collective; None if it has none, or the hosts are no columns."""
        spec, group, hosts = plan.spec, plan.group, plan.hosts
        if not message_bytes or plan.has_parts or plan.takes_part or not (spec.gathers or spec.divides):
            return None
        in_order = [rank for ranks in hosts for rank in ranks] == list(range(group.size))
        are_columns = in_order and len(set(map(len, hosts))) == 1 and len(hosts) == len(group.placement.groups)
        return cls(plan, message_bytes) if are_columns or not cls.in_columns(spec) else None

    @staticmethod
    def in_columns(spec: CollectiveSpec) -> bool:
        """Return whether the ranks of a host have steps of their own, since more than one needs what a host gets."""
        return spec.flow == "all to all" and not (spec.divides and spec.gathers)

    def takes(self, source: torch.Tensor) -> bool:
        """Return whether a call with this tensor is one of these."""
        num_rows, row_numel = rows_of(source)
        num_rows = padded_rows(num_rows, self._group.size) if self._plan.spec.divides else num_rows
        return 0 < num_rows * row_numel * self._plan.sent_dtype.itemsize <= self.most_bytes

    def number(self, call: _Call) -> int:
        """Return what is compared: the number of the call, and its length."""
        assert call.source is not None
        return self._group.call_number ^ records.LONG ^ call.source.nbytes

    def run(self, call: _Call) -> bool:
        """Run a call; return False if other ranks do not make it."""
        number = self.number(call)
        return self._end(call, self._comparison.run(number, *self._steps(call)))

    def finish(self, call: _Call, compiled: CompiledSteps, status: int) -> bool:
        """Run the rest of a call of machine code from the step that has failed, and return what `run` would."""
        comparison, number, failed = self._comparison, self.number(call), compiled.record.failed_step
        if failed == records.STEP_OF_HOST:
            comparison.set_number(number)
            return self._end(call, True, compiled.record.num_done, partial(compiled.steps[1].settle, status))
        if failed != records.STEP_PARTS:
            return self._end(call, comparison.finish(number, compiled, status, *self._steps(call)))
        comparison.wait.give_up(status, call.source, call.target, compiled, comparison)

    def _steps(self, call: _Call) -> tuple[Callable[..., object], Callable[..., bool], Callable[..., object]]:
        """Return the three parts of the comparison; in the first and the last one a host may move values."""

        def exchange_numbers(exchange: NumberExchange, number: int | None) -> bool:
            is_equal = exchange.agree(number)
            self._group.call_log.count_wait()
            return is_equal

        before = after = self._comparison.synchronize
        if self.step is not None:
            after = partial(self._step, call, int(self._plan.spec.reduces))
            before = partial(self._step, call, 0) if self._plan.spec.reduces else before
        return before, exchange_numbers, after

    def _step(self, call: _Call, index: int, settle: Settle | None = None) -> None:
        """Move the values for one host among the ranks of this host, or end a step that machine code has begun."""
        reduces, ranks = self._plan.spec.reduces, self._ranks_at(index)
        if reduces and index == 0 and settle is None and self._plan.sent_dtype is not self._plan.dtype:
            assert call.source is not None
            wide, _ = self._as_sent(call)
            wide.copy_(call.source.view(wide.shape))
        source, destination = (self._rows_to_reduce if reduces else self._rows_to_gather)(call, index, ranks)
        if settle is not None:
            settle(source, destination)
        else:
            intra = self._comparison.intra
            assert intra is not None and self.step is not None
            self._plan.runner.run(intra, self.step, source, destination)

    def _end(self, call: _Call, is_equal: bool, first: int | None = None, settle: Settle | None = None) -> bool:
        """Move what has not been moved with the comparison; from the step for a host on, which `settle` ends."""
        if not is_equal:
            return False
        self._group.call_log.log_fields[LogFields.algorithm] = self.algorithm
        reduces, num_hosts = self._plan.spec.reduces, len(self._plan.hosts)
        num_steps = num_hosts if self.step is not None else 0
        if first is None and not reduces:
            self._exchange(*self._messages(call))
        for index in range((1 + reduces) if first is None else first, num_steps):
            self._step(call, index, settle if index == first else None)
        if reduces:
            self._exchange(*self._messages(call))
            self._combine(call)
        return True

    def _ranks_at(self, index: int) -> list[int]:
        """Return the ranks of the host whose turn it is: each host begins with itself."""
        hosts = self._plan.hosts
        return list(hosts[(self._plan.own_host + index) % len(hosts)])

    def _rows_to_gather(self, call: _Call, index: int, ranks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the own row, and the memory for those of a host."""
        assert call.target is not None
        rows = buffers.byte_view(call.target).view(self._group.size, -1)[ranks[0] : ranks[-1] + 1]
        return call.flat if index == 0 else rows[self._plan.place], rows.view(-1)

    def _rows_to_reduce(self, call: _Call, index: int, ranks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows for the ranks of a host, and the sums of those for the rank in this place there."""
        source, spans = self._as_sent(call)
        rows = source[spans[ranks[0]][0] : sum(spans[ranks[-1]])]
        peer = spans[ranks[self._plan.place]][1]
        return rows, rows if self.step is None else self._block(source, index, peer)

    def _as_sent(self, call: _Call) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Return the rows of a call as they are sent, and which of them are for each rank."""
        assert call.source is not None
        num_rows, row_numel = rows_of(call.source)
        source, dtype = call.source.detach().view(num_rows, row_numel), self._plan.sent_dtype
        if dtype is not self._plan.dtype:
            source = self._memory[: source.numel() * dtype.itemsize].view(dtype).view(num_rows, row_numel)
        return source, partition.even_partition(num_rows, self._group.size)

    @property
    def _memory(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(self._comparison.long_memory)

    def _block(self, source: torch.Tensor, number: int, num_rows: int) -> torch.Tensor:
        """Return memory for sums: the block of each host to send, and then of each to receive."""
        row_bytes, is_wider = source.shape[1] * source.itemsize, self._plan.sent_dtype is not self._plan.dtype
        memory = self._memory[block_begin(len(source), row_bytes, self._group.size, number, is_wider=is_wider) :]
        return memory[: num_rows * row_bytes].view(source.dtype).view(num_rows, source.shape[1])

    def _messages(self, call: _Call) -> tuple[Messages, Messages]:
        """Return what this rank sends to other ranks, and the memory for what it receives from them."""
        plan, rank, size = self._plan, self._group.rank, self._group.size
        assert call.source is not None
        num_hosts, target = len(plan.hosts), None if call.target is None else buffers.byte_view(call.target)
        if plan.spec.reduces:
            source, spans = self._as_sent(call)
            turns = [(index, self._ranks_at(index)) for index in range(1, num_hosts)]
            sent = [(ranks[plan.place], self._rows_to_reduce(call, index, ranks)[1]) for index, ranks in turns]
            own = spans[rank][1]
            return sent, [(ranks[plan.place], self._block(source, num_hosts + k, own)) for k, ranks in turns]
        rows = None if target is None else target.split_with_sizes([len(target) // size] * size)
        if plan.spec.divides:
            counts = [count for _, count in partition.even_partition(rows_of(call.source)[0], size)]
            given = buffers.byte_view(call.source).view(sum(counts), -1).split_with_sizes(counts)
            sent, origins = [*enumerate(given)], set(range(size))
        elif plan.spec.is_rooted:
            sent, origins = [(call.root, call.flat)], set(range(size))
        else:
            origins = {self._ranks_at(index)[plan.place] for index in range(num_hosts)}
            sent = [(peer, call.flat) for peer in origins]
        own_part = dict(sent).get(rank)
        if own_part is not None and rows is not None and self.step is None:
            buffers.overwrite(rows[rank], own_part.view(-1))
        received = [] if rows is None else [(peer, rows[peer]) for peer in origins - {rank}]
        return [message for message in sent if message[0] != rank], received

    def _exchange(self, sent: Messages, received: Messages) -> None:
        exchange(self._group, received, sent, self.message_bytes)

    def _combine(self, call: _Call) -> None:
        """Combine the sums of all hosts for this rank, in their order, to the result."""
        plan, num_hosts = self._plan, len(self._plan.hosts)
        source, spans = self._as_sent(call)
        assert call.target is not None
        own, result = spans[self._group.rank][1], call.target.detach().view(-1)
        _, sums = self._rows_to_reduce(call, 0, self._ranks_at(0))
        vectors = [
            self._block(source, num_hosts + (host - plan.own_host) % num_hosts, own) for host in range(num_hosts)
        ]
        vectors[plan.own_host] = sums
        is_rounded = plan.partial_results is not None and plan.partial_results.is_rounded
        total = self._block(source, num_hosts, own).view(-1) if is_rounded else result
        plan.combine([vector.view(-1) for vector in vectors], total)
        if plan.partial_results is not None:
            plan.partial_results.finish(total, result)


def padded_rows(num_rows: int, size: int) -> int:
    """Return the number of rows if each rank had as many as the first one.

    >>> padded_rows(5, 4)
    8
    """
    return partition.part_of(num_rows, size, 0)[1] * size


def block_begin(num_rows: int, row_bytes: int, size: int, number: int, *, is_wider: bool) -> int:
    """Return the offset of a block of sums in the memory of a call; wider rows come first.

    >>> block_begin(2, 64, 2, 1, is_wider=False), block_begin(2, 64, 2, 1, is_wider=True)
    (64, 192)
    """
    first = _whole_lines(num_rows * row_bytes) if is_wider else 0
    return first + number * _whole_lines(padded_rows(num_rows, size) // size * row_bytes)


def _whole_lines(num_bytes: int) -> int:
    """Return the length of memory for a block, so that the next one begins at a cache line."""
    return -(-num_bytes // _CACHE_LINE) * _CACHE_LINE
