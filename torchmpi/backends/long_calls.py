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

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..collective_specs import CollectiveSpec
from ..communicators import algorithms
from ..shared_memory.kernels import records
from ..shared_memory.memory_layout import LogFields
from ..tensors import buffers, partition
from .call_comparison import MOST_LONG_BYTES, Settle
from .mpi_messages import PARTS_TAG, rows_of

if TYPE_CHECKING:
    from .compared_calls import ComparedCall, _Call

_CACHE_LINE = 64
Messages = list[tuple[int, torch.Tensor]]
"""Ranks and contiguous tensors."""


class LongCall:
    """The long calls of a collective on a group.

    Attributes:
        step: The collective of the steps within the host; None if this rank takes part in none.
        message_bytes: The length of the longest message.
        most_bytes: The size of the longest tensor of a rank.
        algorithm: The algorithm that the call log stores.
    """

    def __init__(self, plan: ComparedCall, message_bytes: int) -> None:
        """Prepare the calls; `message_bytes`: the longest message."""
        self._plan, self._group, self._comparison = plan, plan.group, plan.comparison
        has_step = self.in_columns(plan.spec) and self._comparison.intra is not None
        self.step = plan.spec.name if has_step else None
        self.algorithm = algorithms.DIRECT if self.step is None else algorithms.SLICES
        self.message_bytes = self.most_bytes = message_bytes
        if plan.spec.reduces:
            self.most_bytes = min(message_bytes, MOST_LONG_BYTES) // plan.sent_dtype.itemsize * plan.dtype.itemsize
        self._first_byte = 0

    @classmethod
    def of(cls, plan: ComparedCall, message_bytes: int) -> LongCall | None:
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
        return 0 < source.nbytes <= self.most_bytes

    def number(self, source: torch.Tensor) -> int:
        """Return what is compared: the number of the call, and its length."""
        return self._group.call_number ^ records.LONG ^ source.nbytes

    def run(self, call: _Call) -> bool:
        """Run a call; return False if other ranks do not make it."""
        assert call.source is not None
        number = self.number(call.source)
        if not self._comparison.agree(number):
            return False
        self._move(call, number)
        return True

    def finish(self, call: _Call, status: int, of_call: records.Hosts, step: Callable[..., Any] | None) -> bool:
        """Run the rest of a call of machine code from the step that has failed, and return what `run` would.

        `of_call`: the record of the call; `step`: ends the step within the host.
        """
        comparison, compiled = self._comparison, self._comparison.compiled
        assert call.source is not None and compiled is not None
        number = self.number(call.source)
        if compiled.record.failed_step != records.STEP_PARTS:
            if not comparison.finish_comparison(number, compiled, status):
                return False
            self._move(call, number)
        elif of_call.failed_step == records.STEP_OF_HOST:
            assert step is not None
            self._move(call, number, of_call.num_done, partial(step, status))
        elif status == records.TIMEOUT:
            comparison.wait.give_up(call.source, call.target, comparison)
        else:
            raise self._group.context.MPI.Exception(status)
        return True

    def _move(self, call: _Call, number: int, first: int = 0, settle: Settle | None = None) -> None:
        """Move the values, from the step for the host `first` on, which `settle` ends."""
        self._group.call_log.count_wait()
        self._group.call_log.log_fields[LogFields.algorithm] = self.algorithm
        self._comparison.set_number(number)
        spec = self._plan.spec
        if spec.reduces:
            self._reduce_scatter(call, first, settle)
        elif spec.divides:
            self._alltoall(call)
        else:
            self._gather(call, first, settle)

    def _step(self, source: torch.Tensor, destination: torch.Tensor, settle: Settle | None) -> None:
        """Run a step within the host, or end one that machine code has begun."""
        if settle is not None:
            settle(source, destination)
        else:
            intra = self._comparison.intra
            assert intra is not None and self.step is not None
            self._plan.runner.run(intra, self.step, source, destination)

    def _hosts(self) -> Iterable[tuple[int, list[int]]]:
        """Return the hosts and their ranks in the order of the steps: each host begins with itself."""
        hosts = self._plan.hosts
        for index in range(len(hosts)):
            host = (self._plan.own_host + index) % len(hosts)
            yield host, list(hosts[host])

    def _exchange(self, sent: Messages, received: Messages) -> None:
        comm, MPI = self._group.comm, self._group.context.MPI
        begin = [(comm.Irecv, each) for each in received] + [(comm.Isend, each) for each in sent]
        requests = [
            call((buffers.as_bytes(MPI, tensor), MPI.BYTE), peer, PARTS_TAG)
            for call, (peer, tensor) in begin
            if tensor.numel() > 0
        ]
        MPI.Request.Waitall(requests)

    def _gather(self, call: _Call, first: int, settle: Settle | None) -> None:
        plan, size, rank, root = self._plan, self._group.size, self._group.rank, call.root
        rows = None if call.target is None else buffers.byte_view(call.target).view(size, -1)
        if settle is None:
            if plan.spec.is_rooted:
                receivers = {root}
                senders = set(range(size)) if rank == root else set[int]()
            else:
                receivers = senders = {ranks[plan.place] for _, ranks in self._hosts()}
            if rows is not None and rows[rank].data_ptr() != call.flat.data_ptr():
                buffers.overwrite(rows[rank], call.flat)
            received = [(peer, rows[peer]) for peer in senders - {rank}] if rows is not None else []
            self._exchange([(peer, call.flat) for peer in receivers - {rank}], received)
        if self.step is not None:
            assert rows is not None
            for index, (_, ranks) in enumerate(self._hosts()):
                if index >= first:
                    of_host = rows[ranks[0] : ranks[-1] + 1]
                    self._step(of_host[plan.place], of_host.view(-1), settle if index == first else None)

    def _alltoall(self, call: _Call) -> None:
        assert call.source is not None and call.target is not None
        rank, size, num_rows = self._group.rank, self._group.size, rows_of(call.source)[0]
        counts = [count for _, count in partition.even_partition(num_rows, size)]
        given = buffers.byte_view(call.source).view(num_rows, -1).split_with_sizes(counts)
        target = buffers.byte_view(call.target)
        received = target.split_with_sizes([len(target) // size] * size)
        buffers.overwrite(received[rank], given[rank].view(-1))
        others = [other for other in range(size) if other != rank]
        self._exchange([(other, given[other]) for other in others], [(other, received[other]) for other in others])

    def _reduce_scatter(self, call: _Call, first: int, settle: Settle | None) -> None:
        plan, rank = self._plan, self._group.rank
        assert call.source is not None and call.target is not None
        num_rows, row_numel = rows_of(call.source)
        spans, source = partition.even_partition(num_rows, self._group.size), call.source.detach()
        source, self._first_byte = source.view(num_rows, row_numel), 0
        if plan.sent_dtype is not plan.dtype:
            source = self._take(num_rows, row_numel).copy_(source)
        vectors, sent, received = dict[int, torch.Tensor](), Messages(), Messages()
        for index, (host, ranks) in enumerate(self._hosts()):
            peer, sums = ranks[plan.place], source[spans[ranks[0]][0] : sum(spans[ranks[-1]])]
            if self.step is not None:
                rows, sums = sums, self._take(spans[peer][1], row_numel)
                if index >= first:
                    self._step(rows, sums, settle if index == first else None)
            vectors[host] = sums
            if index > 0:
                vectors[host] = self._take(spans[rank][1], row_numel)
                sent.append((peer, sums))
                received.append((peer, vectors[host]))
        self._exchange(sent, received)
        self._combine([vectors[host].view(-1) for host in range(len(vectors))], call.target.detach().view(-1))

    def _take(self, num_rows: int, row_numel: int) -> torch.Tensor:
        """Return the next part of the memory for what is sent and received, for such rows of sums."""
        begin, num_bytes = self._first_byte, num_rows * row_numel * self._plan.sent_dtype.itemsize
        self._first_byte = begin + -(-num_bytes // _CACHE_LINE) * _CACHE_LINE
        with torch.inference_mode(False):
            memory = torch.from_numpy(self._comparison.long_memory)[begin : begin + num_bytes]
            return memory.view(self._plan.sent_dtype).view(num_rows, row_numel)

    def _combine(self, vectors: list[torch.Tensor], result: torch.Tensor) -> None:
        partial_results, total = self._plan.partial_results, result
        if partial_results is not None and partial_results.is_rounded:
            total = self._take(1, result.numel()).view(-1)
        self._plan.combine(vectors, total)
        if partial_results is not None:
            partial_results.finish(total, result)
