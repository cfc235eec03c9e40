"""Short allreduces over hosts, whose vectors are sent with the comparison of the call.

Repeated calls are those of the fast path: :meth:`ComparedAllreduce.cached_call` makes the record of the kernel
`allreduce_over_hosts`, which does the same, and :meth:`ComparedAllreduce.run` the rest of calls that fail there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..communicators.call_log import call_code
from ..communicators.group import Group
from ..communicators.plan import Run
from ..shared_memory import fast_path, kernels
from ..shared_memory.kernels import records, reduction
from ..shared_memory.kernels.records import MISMATCH, STEP_ACROSS, STEP_AFTER, STEP_BEFORE
from ..shared_memory.memory_layout import WITH_COMPARISON, LogFields
from ..tensors import dtypes
from ..tensors.operation_specs import OPERATIONS
from .base import Operation
from .call_comparison import CallComparison
from .mpi_messages import SENDRECV, STATUS_BYTES, can_call_from_kernels, kernel_fields
from .number_exchange import NumberExchange
from .pipeline import ChunkBuffers
from .rank_order import PartialResults, combiner


def with_comparison(group: Group, dtype: torch.dtype, op: str, longer: Run, *, in_steps: bool = False) -> Operation:
    """Return an allreduce that sends short vectors with the comparison, if the group compares so; others are `longer`.

    `in_steps`: the vectors are added within the hosts first.
    """
    comparison = group.comparison
    if not isinstance(comparison, CallComparison) or comparison.in_steps != in_steps:
        return Operation(longer)
    allreduce = ComparedAllreduce(group, comparison, dtype, op, longer)
    return Operation(allreduce.run, compares=True, cached_call=allreduce.cached_call)


class ComparedAllreduce:
    """An allreduce whose short vectors are sent with the comparison of the call.

    Where several ranks share a host, they are reduced to its first rank, exchanged between those, and the result is
    broadcast.
    """

    def __init__(self, group: Group, comparison: CallComparison, dtype: torch.dtype, op: str, longer: Run) -> None:
        self.group, self.comparison, self.longer = group, comparison, longer
        self.dtype, self.op, self.runner = dtype, op, comparison.runner(op)
        self.partial_results = PartialResults(dtype, op, group.size) if comparison.in_steps else None
        if self.partial_results is None:
            self.sent_dtype, self.combine = dtype, combiner(dtype, op)
        else:
            self.sent_dtype = self.partial_results.accumulator
            self.combine = combiner(self.sent_dtype, OPERATIONS[op].partial)
        self.memory = ChunkBuffers(self.sent_dtype)

    def run(self, buffer: torch.Tensor, _: Any, root: int) -> torch.Tensor:
        """Reduce in place on all ranks."""
        numel, exchange = buffer.numel(), self.comparison.exchange
        if not 0 < numel * self.sent_dtype.itemsize <= self.comparison.most_carried:
            self.group.announce()
            self.longer(buffer, None, root)
            return buffer
        self.group.call_log.log_fields[LogFields.algorithm] = WITH_COMPARISON
        flat = work = buffer if buffer.dim() == 1 and not buffer.requires_grad else buffer.detach().view(-1)
        # A copy at the first rank of a host, which is not to change the tensor of a call that differs.
        if self.partial_results is not None and (self.partial_results.is_rounded or exchange is not None):
            work = self.memory.take(0, numel).copy_(flat)
        self._compare(flat, work, partial(self._reduce, work), partial(self._broadcast, flat))
        return buffer

    def _compare(
        self, flat: torch.Tensor, work: torch.Tensor, before: Callable[[], object], after: Callable[[], object]
    ) -> None:
        """Compare the call in its steps, and raise on all ranks if it differs."""

        def sum_between(exchange: NumberExchange, number: int | None) -> bool:
            if not exchange.allreduce(number, work, self.combine, self.group.call_log.count_wait):
                return False
            if self.partial_results is not None:
                self.partial_results.finish(work, flat)
            return True

        if not self.comparison.run(self.group.call_number, before, sum_between, after):
            self.group.refuse_call()
        if self.comparison.exchange is None:  # the other hosts have arrived when the result has
            self.group.call_log.count_wait()

    def _reduce(self, work: torch.Tensor) -> None:
        assert self.comparison.intra is not None
        self.runner.run(self.comparison.intra, "reduce", work)

    def _broadcast(self, flat: torch.Tensor) -> None:
        assert self.comparison.intra is not None
        self.runner.run(self.comparison.intra, "broadcast", flat)

    # --- the fast path ---------------------------------------------------------------------------------------

    def cached_call(self, root: int, most_bytes: int | None) -> fast_path.CachedCall | None:
        """Return the call for the fast path; None if the fast path cannot run it."""
        group, comparison, dtype = self.group, self.comparison, self.dtype
        partial_results, intra = self.partial_results, comparison.intra
        if partial_results is not None and (partial_results.is_rounded or OPERATIONS[self.op].finish):
            return None  # the kernel does not divide or round after the steps
        if not can_call_from_kernels(group):
            return None
        names = () if intra is None else ("reduce", "broadcast")
        found = [self.runner.cached_call(intra, name, torch.empty(0, dtype=dtype)) for name in names if intra]
        steps = [step for step in found if step is not None]
        if len(steps) < len(names):  # the ranks of the host share no memory
            return None
        carried = comparison.most_carried
        limit = carried if most_bytes is None else min(most_bytes, carried)
        return _KernelCall(self, limit, steps).cached_call()

    def finish(
        self, steps: Sequence[fast_path.CachedCall], failed: int, status: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Run the rest of a call of the fast path, from the step that has failed."""
        if failed == STEP_ACROSS and status != MISMATCH:
            raise self.group.context.MPI.Exception(status)
        flat = tensor.detach().view(-1)
        exchange = self.comparison.exchange
        if failed == STEP_BEFORE:
            work = flat if exchange is None else exchange.own_vector(flat)
            self._compare(flat, work, partial(steps[0].settle, status, work, None), partial(self._broadcast, flat))
            return tensor
        after = partial(steps[1].settle, status, flat, None) if failed == STEP_AFTER else _nothing
        if not self.comparison.run(self.group.call_number, _nothing, lambda *_: failed == STEP_AFTER, after):
            self.group.refuse_call()
        self.group.call_log.count_wait()
        return tensor


def _nothing() -> None:
    """Stand for a step that has ended."""


class _KernelCall:
    """The record of the kernel `allreduce_over_hosts`, and the memory to which it points."""

    def __init__(self, allreduce: ComparedAllreduce, most_bytes: int, steps: Sequence[fast_path.CachedCall]) -> None:
        """Prepare the calls of a group.

        Args:
            allreduce: The same in Python.
            most_bytes: The size of the longest tensor.
            steps: The reduce and the broadcast within the host, with root 0; none on ranks without them.
        """
        group, dtype, op = allreduce.group, allreduce.dtype, allreduce.op
        self._allreduce, self._group, self._steps = allreduce, group, steps
        self._read_ticks = kernels.load()["read_ticks"]
        exchange = allreduce.comparison.exchange
        size = 0 if exchange is None else exchange.size
        self._status, self._operands = np.zeros(STATUS_BYTES, np.uint8), np.zeros(size, np.int64)
        self._rounds = np.array([] if exchange is None else exchange.rounds, np.int64)
        self._code = call_code("allreduce", op, dtypes.info(dtype).code)
        record = self._record = records.Hosts.new().write(
            value_bytes=most_bytes, call_log=group.call_log.address, code=self._code
        )
        if exchange is not None:
            sent, received, received_bytes = exchange.memory
            record.write(
                **kernel_fields(group.context.MPI, exchange.comm, self._status, SENDRECV),
                most_gathered=exchange.most_gathered,
                relayed_blocks=exchange.blocks_address,
                sent=sent,
                received=received,
                received_bytes=received_bytes,
                tag=exchange.tag,
                rounds=self._rounds.ctypes.data,
                num_rounds=len(exchange.rounds),
                num_hosts=size,
                own_host=exchange.comm.rank,
                operands=self._operands.ctypes.data,
            )
        for of_step, step in zip((record.reduce_step, record.broadcast_step), steps, strict=False):
            record.write(local_log=step.call_log.address)
            of_step.write(call=step.record, code=step.code, signed_code=step.signed_code)
        self._call = records.KernelCall.new().write(
            item_bytes=dtype.itemsize, reducer=reduction.address(dtype, op), hosts=record
        )

    def cached_call(self) -> fast_path.CachedCall:
        """Return the call for the fast path."""
        return fast_path.CachedCall(
            int(self._call),
            self._group.call_log,
            self._group.call_queue.run_lock,
            self._code,
            0,
            self._settle,
            self._abort,
        )

    def _settle(self, status: int, tensor: torch.Tensor, _: Any) -> torch.Tensor:
        failed = self._record.failed_step
        return self._group.settle(
            self._read_ticks(), lambda: self._allreduce.finish(self._steps, failed, status, tensor)
        )

    def _abort(self) -> None:
        for step in self._steps:
            if step.call_log.log_fields[LogFields.active]:
                step.abort()
        self._group.call_log.take_over(self._read_ticks())
        self._group.call_log.abandon()
