"""Short calls over hosts, whose values are sent with the comparison of the call.

Every such call takes the same way: a step within each host, messages between the first ranks of the hosts, in which the
numbers of the calls are compared too, and a step within each host again (:func:`.splits.steps_around_messages`,
:func:`.schedule.carried`). What lies where follows from hosts, ranks and lengths (:class:`Blocks`).

Repeated calls are those of the fast path: :meth:`ComparedCall.cached_call` makes the record of the kernel `over_hosts`,
which does the same, and :meth:`ComparedCall.run` the rest of calls that fail there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..collective_specs import SPECS
from ..communicators import splits
from ..communicators.call_codes import call_code
from ..communicators.group import Group
from ..communicators.plan import Run
from ..shared_memory import fast_path, kernels, memory_layout
from ..shared_memory.kernels import records, reduction
from ..shared_memory.memory_layout import WITH_COMPARISON, CounterFields, LogFields
from ..tensors import buffers, dtypes, partition, schedule
from ..tensors.operation_specs import OPERATIONS
from .base import Operation, on_rows
from .call_comparison import CallComparison, CompiledSteps, Settle
from .long_calls import LongCall
from .mpi_messages import (
    NONBLOCKING,
    PARTS_TAG,
    STATUS_BYTES,
    destination_for,
    kernel_fields,
    longest_part,
    rows_of,
    unless_overlapping,
)
from .number_exchange import NumberExchange, most_together
from .pipeline import ChunkBuffers
from .rank_order import PartialResults, combiner

_KINDS = "collective", "exchange"
_WITHOUT_ROOT = (1 << 32) - 1
_OF_ROWS = 1
"""The kind of calls whose ranks may differ in the number of rows: see `Group.refuse_call`."""
_MOST_DIMS = records.DESCRIPTION_BYTES // memory_layout.FIELD_BYTES - records.TensorMessage.shape
_MOST_VALUES = 1 << 10
"""The bytes of values that a frame has room for: a call sends as many, however short or long its parts are."""


def with_comparison(
    group: Group,
    collective: str,
    dtype: torch.dtype | None,
    op: str | None,
    longer: Run,
    message_bytes: int,
    *,
    by_host: bool = False,
) -> Operation:
    """Return a collective that sends short values with the comparison, if the group compares so; others are `longer`.

    `message_bytes`: the longest message of values that are not short. `by_host`: a reduction adds within the hosts
    first, where several ranks share one.
    """
    comparison, spec = group.comparison, SPECS[collective]
    if spec.kind not in _KINDS or not isinstance(comparison, CallComparison):
        return Operation(longer)
    if spec.kind == "exchange":
        longer = on_rows(longer, group.size)
    if spec.reduces and comparison.in_steps != by_host:
        return Operation(longer)
    call = ComparedCall(group, comparison, collective, dtype, op, longer, message_bytes=message_bytes)
    return Operation(call.run, compares=True, cached_call=call.cached_call)


class Blocks(NamedTuple):
    """How long the parts of a call are. Their unit is the tensor of a rank, or the longest part of it for one rank."""

    unit_bytes: int
    """As it is sent between hosts: partial results may be wider than the tensor."""
    block_bytes: int
    """What a host sends to another one."""
    together: int
    """The blocks of all hosts, by which the length of a call is limited; of a vector its length."""
    passed_bytes: int
    """What the first rank of a host passes on."""


class ComparedCall:
    """A collective whose short values are sent with the comparison of the call."""

    def __init__(
        self,
        group: Group,
        comparison: CallComparison,
        collective: str,
        dtype: torch.dtype | None,
        op: str | None,
        longer: Run,
        *,
        message_bytes: int = 0,
        code: int | None = None,
        mark: int = 0,
    ) -> None:
        """Prepare the calls of a group.

        `message_bytes`: the longest message of values; 0 for calls that send frames, which have this `code` and `mark`.
        """
        self.group, self.comparison, self.longer, self.op, self.mark = group, comparison, longer, op, mark
        self.takes_part = SPECS[collective].only_root_passes
        """Whether all ranks get the whole tensor, of which each takes its part: a scatter."""
        self.spec = SPECS["broadcast" if self.takes_part else collective]
        self.runner = comparison.runner(op)
        self.dtype = self.sent_dtype = torch.uint8 if dtype is None else dtype
        name, has_dtype = SPECS[collective].form_of or collective, not (dtype is None or self.takes_part)
        dtype_code = dtypes.info(self.dtype).code if has_dtype else 0
        self.code = call_code(name, op, dtype_code) if code is None else code
        self.has_parts = self.spec.kind == "exchange"
        """Whether a rank may pass lists of parts, which may differ in length: short calls have equal parts."""
        self.kind = _OF_ROWS if self.spec.compared == "rows" or self.has_parts else 0
        self.partial_results, self.divides = None, False
        if op is not None:
            if comparison.in_steps:
                self.partial_results = PartialResults(self.dtype, op, group.size)
                self.divides = OPERATIONS[op].finish == "divide"
                self.sent_dtype, op = self.partial_results.accumulator, OPERATIONS[op].partial
            self.combine, self.op = combiner(self.sent_dtype, op), op
        self.memory = ChunkBuffers(self.sent_dtype)
        split = comparison.split
        self.hosts, member = split.groups, split.members[group.rank]
        self.own_host, self.place, self.most_ranks = member.group, member.intra_rank, max(map(len, split.groups))
        self.host_of = [each.group for each in split.members]
        self.steps = cache(partial(splits.steps_around_messages, self.spec.name, group.rank, split))
        self.rounds = cache(
            lambda root: schedule.carried(self.own_host, len(self.hosts), self.spec.flow, self.host_of[root])
        )
        self.is_vector = not (self.spec.gathers or self.spec.divides)
        together = most_together(len(self.hosts), divides=self.spec.divides, gathers=self.spec.gathers)
        self.most_bytes = comparison.most_carried if self.is_vector else together
        rows, parts = int(self.spec.gathers), int(self.spec.divides)
        self.block_units = self.most_ranks ** (rows + parts)
        self.passed_units = group.size**rows * len(member.intra) ** parts
        self._made = cache(lambda root: self.kernel_call(root, None))
        self.long_calls = LongCall.of(self, message_bytes)
        self.frames: _Frames | None = None
        """How calls are made whose ranks do not know all lengths."""
        if self.takes_part:
            self.frames = _Described(self, message_bytes)
        elif self.has_parts:
            self.frames = _Parts.of(self, message_bytes)

    def blocks_of(self, source: torch.Tensor | None) -> Blocks:
        """Return the lengths of a call with this tensor."""
        if source is None:
            return Blocks(0, 0, 0, 0)
        num_rows, row_numel = rows_of(source)
        if self.spec.divides:
            _, num_rows = partition.part_of(num_rows, self.group.size, 0)
        numel = num_rows * row_numel
        unit_bytes = numel * self.sent_dtype.itemsize
        block_bytes = unit_bytes * self.block_units
        together = unit_bytes if self.is_vector else block_bytes * len(self.hosts)
        return Blocks(unit_bytes, block_bytes, together, numel * self.dtype.itemsize * self.passed_units)

    def run(self, source: Any, destination: Any, root: int) -> Any:
        """Run a call on a tensor, or on parts; in place if the collective is."""
        if self.frames is not None and self._sends_frames(source, destination):
            return self.frames.run(source, destination, root)
        call = self.call(source, destination, root)
        if self.is_long(call):
            assert self.long_calls is not None
            made = self._made(call.root) if fast_path.takes_calls() else None
            is_equal = self.long_calls.run(call) if made is None or made.long is None else made.run_long(call)
        elif self.spec.tensors and not self.is_carried(call):
            self._compare_long(source)
            return self.longer(source, destination, root)
        else:
            is_equal = self.perform(call)
        return self._result(call, is_equal, source, destination)

    def is_carried(self, call: _Call) -> bool:
        """Return whether the values of a call are sent with the comparison."""
        return 0 < call.blocks.together <= self.most_bytes

    def is_long(self, call: _Call) -> bool:
        """Return whether the values of a call are sent in one message to each other host."""
        source = call.source
        has_messages = self.long_calls is not None and source is not None and self.long_calls.takes(source)
        return has_messages and not self.is_carried(call)

    def perform(self, call: _Call) -> bool:
        """Run a call, in machine code if possible; return whether all ranks make it."""
        made = self._made(call.root) if fast_path.takes_calls() and not self.takes_part else None
        if made is not None:
            return made.run(call)
        self.group.call_log.log_fields[LogFields.algorithm] = WITH_COMPARISON
        return self.comparison.run(call.number, call.before, call.between, call.after)

    def call(self, source: Any, destination: Any, root: int) -> _Call:
        """Return a call on a tensor, or on a copy of parts; without a tensor if these differ in length."""
        if isinstance(source, (list, tuple)):
            are_equal = len({part.numel() for part in (*source, *destination)}) == 1
            source = torch.cat([part.detach().reshape(-1) for part in source]) if are_equal else None
            destination = None
        elif self.takes_part:
            if self.group.rank != root:
                num_bytes = destination.nbytes * self.group.size
                with torch.inference_mode(False):
                    source = torch.from_numpy(self.comparison.rows_memory[0])[:num_bytes].view(self.dtype)
            destination = None
        elif self.has_parts:
            source, destination = source.view(-1), destination.view(-1)
        return _Call(self, self.blocks_of(source), source, destination, root)

    def is_even_and_short(self, source: Any, destination: Any) -> bool:
        """Return whether an exchange is an alltoall whose values are sent with the comparison."""
        sources, destinations = self.parts_of(source, destination)
        lengths = {part.numel() for part in (*sources, *destinations)}
        together = lengths.pop() * self.dtype.itemsize * self.block_units * len(self.hosts)
        return not lengths and 0 < together <= self.most_bytes

    def parts_of(self, source: Any, destination: Any) -> tuple[Any, Any]:
        """Return the parts of an exchange of lists, or of two tensors."""
        if isinstance(source, (list, tuple)):
            return source, destination
        shape = self.group.size, source.numel() // self.group.size
        return source.view(shape).unbind(), destination.view(shape).unbind()

    def _sends_frames(self, source: Any, destination: Any) -> bool:
        """Return whether lengths are not known, or too long; those of a scatter are if the ranks compare the dtype."""
        if not self.takes_part:
            return not self.is_even_and_short(source, destination)
        entered = self.group.call_log.entered
        is_compared = entered is not None and entered[1] & _WITHOUT_ROOT != self.code
        return not (is_compared and 0 < destination.nbytes * self.group.size <= self.most_bytes)

    def _compare_long(self, source: Any) -> None:
        """Compare a call that is too long for these messages, and find out whether all ranks have as many rows."""
        group = self.group
        num_rows = rows_of(source)[0] if self.kind and not self.has_parts else 0
        if not self.kind:
            group.announce()
        elif not self.comparison.agree(group.call_number ^ (records.OF_ROWS | num_rows)):
            group.refuse_call(self.kind)
        elif not self.has_parts:
            group.even_seq = group.call_log.seq
        group.call_log.count_wait()

    def finish(self, made: _KernelCall, status: int, source: Any, destination: Any, root: int) -> Any:
        """Run the rest of a call of the fast path, from the step that has failed."""
        compiled = made.compiled
        if made.frames is not None and self.frames is not None and self._sends_frames(source, destination):
            return self.frames.finish(made.frames.compiled, status, source, destination, root)
        call = self.call(source, destination, root)
        if self.is_long(call):
            assert self.long_calls is not None and made.long is not None
            is_equal = self.long_calls.finish(call, made.long, status)
        else:
            is_equal = self.comparison.finish(call.number, compiled, status, call.before, call.between, call.after)
        return self._result(call, is_equal, source, destination)

    def _result(self, call: _Call, is_equal: bool, source: Any, destination: Any) -> Any:
        """Return the result; raise on all ranks if the calls differ, and take the longer way if only lengths do."""
        if not is_equal:
            self.group.refuse_call(self.kind)
            if not self.has_parts:
                destination = unless_overlapping(source, destination)
            return self.longer(source, destination, call.root)
        if self.comparison.exchange is None:  # the other hosts have arrived when the result has
            self.group.call_log.count_wait()
        if self.takes_part:
            assert call.target is not None
            part = call.target.view(self.group.size, -1)[self.group.rank]
            buffers.overwrite(destination, part.view(destination.shape))
            return destination
        if isinstance(destination, (list, tuple)):
            assert call.target is not None
            for part, row in zip(destination, call.target.chunk(len(destination)), strict=True):
                buffers.overwrite(part, row.view(part.shape))
        return destination if self.has_parts else call.target

    # --- the fast path ---------------------------------------------------------------------------------------

    def cached_call(self, root: int, most_bytes: int | None) -> fast_path.CachedCall | None:
        """Return the call for the fast path; None if the fast path cannot run it."""
        made = self.kernel_call(root, most_bytes)
        return None if made is None else made.cached_call()

    def kernel_call(self, root: int, most_bytes: int | None) -> _KernelCall | None:
        """Return the call in machine code; None if that is not possible."""
        if not self.comparison.has_kernels:
            return None
        intra, planned = self.comparison.intra, self.steps(root)
        found = [self._cached_step(intra, step) for step in planned if intra is not None]
        steps = [step for step in found if step is not None]
        if len(steps) < len(planned):  # the ranks of the host share no memory
            return None
        return _KernelCall(self, root, most_bytes, steps)

    def _cached_step(self, intra: Group, step: splits.Step) -> fast_path.CachedCall | None:
        """Return a step within the host for the fast path."""
        spec = SPECS[step.collective]
        tensor = torch.empty(0, dtype=self.sent_dtype if spec.reduces else torch.uint8) if spec.tensors else None
        return self.runner.cached_call(intra, step.collective, tensor, step.root or 0)


class _Call:
    """One call on this rank: its memory, and the three parts of its way."""

    def __init__(
        self,
        plan: ComparedCall,
        blocks: Blocks,
        source: torch.Tensor | None,
        destination: torch.Tensor | None,
        root: int,
    ) -> None:
        self.plan, self.blocks, self.source, self.destination, self.root = plan, blocks, source, destination, root
        self.spec, self.group, self.exchange = plan.spec, plan.group, plan.comparison.exchange
        self.num_bytes = 0 if source is None else source.numel() * plan.sent_dtype.itemsize
        self.number = plan.group.call_number ^ self.num_bytes ^ plan.mark
        """What is compared: that of the call, and its length."""
        self.is_root, self.is_home = self.group.rank == root, plan.own_host == plan.host_of[root]
        self.steps = plan.steps(root)
        self.flat = torch.empty(0, dtype=torch.uint8, device="cpu") if source is None else buffers.byte_view(source)
        self.target = source if self.spec.in_place else None
        """The result of this rank; None if it gets none."""
        if source is not None and not self.spec.in_place and self.spec.receives(self.is_root):
            num_rows, _ = rows_of(source)
            if self.spec.divides:
                _, num_rows = partition.part_of(num_rows, self.group.size, self.group.rank)
            num_rows *= self.group.size if self.spec.gathers else 1
            self.target = destination_for(source, num_rows, destination)

    def _own(self, num_bytes: int) -> torch.Tensor:
        """Return memory in which the first rank of a host collects what the host sends; of other ranks theirs."""
        return self._scratch(num_bytes) if self.exchange is None else self.exchange.own_memory(num_bytes)

    def _scratch(self, num_bytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(self.plan.comparison.scratch)[:num_bytes]

    def _passed(self) -> torch.Tensor | None:
        """Return the memory of what the first rank of a host passes on to the others; None if the host gets nothing."""
        if self.spec.divides:
            return self._own(self.blocks.passed_bytes)
        if self.spec.receives(self.is_root):
            return self.flat if self.target is None else buffers.byte_view(self.target)
        return self._scratch(self.blocks.passed_bytes) if self.is_home else None

    def _run_step(self, number: int, settle: Settle | None, source: Any, destination: Any = None) -> None:
        """Run a step within the host, or end one that the fast path has begun."""
        if settle is not None:
            settle(source, destination)
        elif self.steps:
            step, intra = self.steps[number], self.plan.comparison.intra
            assert intra is not None
            self.plan.runner.run(intra, step.collective, source, destination, step.root or 0)

    def before(self, settle: Settle | None = None) -> None:
        """Bring what the host sends to its first rank."""
        step, is_first = SPECS[self.steps[0].collective] if self.steps else None, self.exchange is not None
        if self.spec.reduces:
            values = self.flat.view(self.plan.dtype)
            # A copy at the first rank of a host, which is not to change the tensor of a call that differs.
            partial_results = self.plan.partial_results
            is_copied = partial_results is not None and (partial_results.is_rounded or is_first)
            self.work = self.plan.memory.take(0, values.numel()).copy_(values) if is_copied else values
            self._run_step(0, settle, self.work)
        elif step is not None and step.gathers:
            num_bytes = self.num_bytes * len(self.plan.hosts[self.plan.own_host])
            self._run_step(0, settle, self.flat, self._own(num_bytes) if is_first else None)
        elif (
            step is not None and step.tensors
        ):  # a broadcast from the root to the other ranks of its host, which keep their tensors
            self._run_step(0, settle, self.flat if self.is_root else self._own(self.num_bytes))
        else:
            if is_first and (self.is_root or self.spec.flow != "root to all"):
                self._own(self.num_bytes).copy_(self.flat)
            self._run_step(0, settle, None)

    def between(self, exchange: NumberExchange, number: int | None) -> bool:
        """Move the values between the hosts, to the memory that is passed on; return False if the numbers differ."""
        if self.spec.divides:
            return self._send_parts(exchange, number)
        if self.spec.reduces:
            return self._send_vectors(exchange, number)
        if not exchange.agree(number, self.blocks.block_bytes, self.plan.rounds(self.root)):
            return False
        self.group.call_log.count_wait()
        passed = self._passed()
        if passed is not None and self.spec.gathers:
            self._write_rows(exchange, passed)
        elif passed is not None and not self.is_root:
            buffers.overwrite(passed, self._own(self.num_bytes))
        return True

    def _send_vectors(self, exchange: NumberExchange, number: int | None) -> bool:
        """Combine the vectors of the hosts."""
        plan, passed = self.plan, self._passed()
        result = None if passed is None else passed.view(plan.dtype)
        out = result if result is None or plan.partial_results is None else self.work
        arrived = self.group.call_log.count_wait
        if not exchange.allreduce(number, self.work, plan.combine, arrived, out, plan.rounds(self.root)):
            return False
        if result is not None and plan.partial_results is not None:
            plan.partial_results.finish(self.work, result)
        return True

    def _write_rows(self, exchange: NumberExchange, passed: torch.Tensor) -> None:
        """Copy the rows of all ranks to their places."""
        plan, size = self.plan, len(self.plan.hosts)
        gathered = exchange.own_memory(self.blocks.together).view(size, plan.most_ranks, self.num_bytes)
        rows = passed.view(self.group.size, self.num_bytes)
        for host, ranks in enumerate(plan.hosts):
            for place, rank in enumerate(ranks):
                buffers.overwrite(rows[rank], gathered[(host - plan.own_host) % size, place])

    def _parts(self) -> list[tuple[int, int]]:
        """Return offset and length of the part of the tensor that is for each rank, in bytes as they are sent."""
        assert self.source is not None
        num_rows, row_numel = rows_of(self.source)
        row_bytes = row_numel * self.plan.sent_dtype.itemsize
        return [(first * row_bytes, n * row_bytes) for first, n in partition.even_partition(num_rows, self.group.size)]

    def _send_parts(self, exchange: NumberExchange, number: int | None) -> bool:
        """Send each host the parts for its ranks."""
        plan, size, unit_bytes, parts = self.plan, len(self.plan.hosts), self.blocks.unit_bytes, self._parts()
        num_sources = len(plan.hosts[plan.own_host]) if self.spec.gathers else 1
        own = buffers.byte_view(self.work) if self.spec.reduces else self._own(num_sources * self.num_bytes)
        blocks = exchange.blocks(self.blocks.block_bytes)
        # By position, rank that sends, and rank that receives.
        placed = blocks.view(size, -1, plan.most_ranks, unit_bytes)
        for host, ranks in enumerate(plan.hosts):
            for index, source in enumerate(own.view(num_sources, self.num_bytes)):
                for place, rank in enumerate(ranks):
                    first, length = parts[rank]
                    placed[(plan.own_host - host) % size, index, place, :length] = source[first : first + length]
        if not exchange.relay(number, blocks):
            return False
        self.group.call_log.count_wait()
        from_hosts = [placed[(host - plan.own_host) % size] for host in range(size)]
        if self.spec.reduces:
            self._combine_parts(from_hosts)
            return True
        rows = self._own(self.blocks.passed_bytes).view(-1, self.group.size * unit_bytes)
        for place, rank in enumerate(plan.hosts[plan.own_host]):
            _, length = parts[rank]
            for host, ranks in enumerate(plan.hosts):
                for index, origin in enumerate(ranks):
                    rows[place, origin * length :][:length] = from_hosts[host][index, place, :length]
        return True

    def _combine_parts(self, from_hosts: list[torch.Tensor]) -> None:
        """Combine what the hosts have sent to the ranks of this one."""
        plan, result = self.plan, self._own(self.blocks.passed_bytes).view(self.plan.dtype)
        numel, partial_results = result.numel(), plan.partial_results
        vectors = [each.view(-1).view(plan.sent_dtype)[:numel] for each in from_hosts]
        total = result if partial_results is None or not partial_results.is_rounded else plan.memory.take(1, numel)
        plan.combine(vectors, total)
        if partial_results is not None:
            partial_results.finish(total, result)

    def after(self, settle: Settle | None = None) -> None:
        """Pass on to the ranks of the host what is theirs."""
        is_passed = not self.steps or SPECS[self.steps[1].collective].tensors
        passed = self._passed() if is_passed else None
        self._run_step(1, settle, passed)
        if self.spec.divides:
            assert passed is not None and self.target is not None
            _, length = self._parts()[self.group.rank]
            length = length // self.plan.sent_dtype.itemsize * self.plan.dtype.itemsize
            stride = passed.numel() // max(1, len(self.plan.hosts[self.plan.own_host]))
            length *= self.group.size if self.spec.gathers else 1
            buffers.overwrite(buffers.byte_view(self.target), passed[self.plan.place * stride :][:length])
        elif not is_passed and self.spec.flow == "root to all" and not self.is_root and self.exchange is None:
            buffers.overwrite(self.flat, self._own(self.num_bytes))


class _Frames(ABC):
    """Calls whose ranks do not know all lengths.

    Frames are sent with the comparison: they have what the ranks must know, and the values if these are few. Other
    values follow in messages of their own.
    """

    def __init__(self, plan: ComparedCall, collective: str, frame_bytes: int, message_bytes: int) -> None:
        """Prepare the calls of a plan, whose frames are gathered or broadcast; `message_bytes`: as for `plan`."""
        self._plan, self._group, self._comparison = plan, plan.group, plan.comparison
        self._frame_bytes, self._message_bytes = frame_bytes, message_bytes
        self._frames = ComparedCall(
            plan.group, plan.comparison, collective, None, None, plan.longer, code=plan.code, mark=records.OF_FRAMES
        )
        with torch.inference_mode(False):
            self._given, self._received = map(torch.from_numpy, plan.comparison.rows_memory)

    def run(self, source: Any, destination: Any, root: int) -> Any:
        """Run a call, and return its result."""
        return self._end(self._frames.perform(self._call(source, destination, root)), source, destination, root)

    def finish(self, compiled: CompiledSteps, status: int, source: Any, destination: Any, root: int) -> Any:
        """Run the rest of a call of the fast path, from the step that has failed."""
        is_equal = True
        if compiled.record.failed_step != records.STEP_PARTS:
            call = self._call(source, destination, root)
            is_equal = self._comparison.finish(call.number, compiled, status, call.before, call.between, call.after)
        elif status != records.UNEVEN:
            self._comparison.wait.give_up(status, compiled, source, destination)
        return self._end(is_equal, source, destination, root)

    def _end(self, is_equal: bool, source: Any, destination: Any, root: int) -> Any:
        """Take the values from the frames, or exchange them; raise on all ranks if the calls differ."""
        if not is_equal:
            self._group.refuse_call(self._plan.kind)
            return self._plan.longer(source, destination, root)
        if self._comparison.exchange is None:
            self._group.call_log.count_wait()
        return self._read(source, destination, root)

    @abstractmethod
    def _call(self, source: Any, destination: Any, root: int) -> _Call:
        """Write the frame of this rank, and return the call on frames."""

    @abstractmethod
    def _read(self, source: Any, destination: Any, root: int) -> Any:
        """Return the result of a call whose frames have arrived."""

    def kernel_call(self, call: records.KernelCall, root: int) -> _KernelCall | None:
        """Complete the record of a call in machine code; return that of the frames, None if there is none."""
        made = self._frames.kernel_call(root, None)
        if made is not None:
            made.send_parts_of(call, self._message_bytes)
            call.hosts.write(frames=made.record, frame_bytes=self._frame_bytes)
        return made


class _Described(_Frames):
    """Scatters of which the root alone knows the tensor, or whose values have no room in the comparison."""

    def __init__(self, plan: ComparedCall, message_bytes: int) -> None:
        super().__init__(plan, "broadcast", records.DESCRIPTION_BYTES + _MOST_VALUES, message_bytes)

    def _frame(self, root: int) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
        """Return memory for the frame, and in it the description and the values."""
        frame = (self._given if self._group.rank == root else self._received)[: self._frame_bytes]
        description, values = frame.split_with_sizes([records.DESCRIPTION_BYTES, _MOST_VALUES])
        return frame, description.numpy().view(np.int64), values

    def _call(self, source: torch.Tensor | None, destination: torch.Tensor | None, root: int) -> _Call:
        frame, description, values = self._frame(root)
        if self._group.rank == root:
            assert source is not None
            shape, first = tuple(source.shape) or (1,), records.TensorMessage.shape
            description[:first] = 0
            if len(shape) <= _MOST_DIMS:
                description[: first + len(shape)] = dtypes.info(source.dtype).code, len(shape), *shape
                if source.nbytes <= _MOST_VALUES:
                    values[: source.nbytes] = buffers.byte_view(source)
        return _Call(self._frames, self._frames.blocks_of(frame), frame, None, root)

    def _read(self, source: torch.Tensor | None, destination: torch.Tensor | None, root: int) -> Any:
        group, (_, description, values) = self._group, self._frame(root)
        code, num_dims, *dims = description.tolist()
        if num_dims == 0:
            return self._plan.longer(source, destination, root)
        dtype, shape = dtypes.from_code(code), tuple(dims[:num_dims])
        assert dtype is not None
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > _MOST_VALUES:
            group.scattered = group.call_log.seq, (shape, dtype)
            return self._plan.longer(source, destination, root)
        whole = values[:num_bytes].view(dtype).view(shape)
        first, num_rows = partition.part_of(shape[0], group.size, group.rank)
        destination = destination_for(whole, num_rows, destination)
        buffers.overwrite(destination, whole[first : first + num_rows])
        return destination


class _Parts(_Frames):
    """Exchanges of parts of any length.

    The frame of a rank has the sizes of the parts that it sends and expects. So all ranks know all sizes, and whether
    any two differ.
    """

    def __init__(self, plan: ComparedCall, values_bytes: int, message_bytes: int) -> None:
        self._sizes_bytes = 2 * plan.group.size * memory_layout.FIELD_BYTES
        super().__init__(plan, "allgather", self._sizes_bytes + values_bytes, message_bytes)

    @classmethod
    def of(cls, plan: ComparedCall, message_bytes: int) -> _Parts | None:
        """Return the exchanges of a group; None if it has too many ranks for frames."""
        num_blocks = len(plan.hosts) * plan.most_ranks
        room = most_together(len(plan.hosts)) // num_blocks - 2 * plan.group.size * memory_layout.FIELD_BYTES
        return cls(plan, min(room, _MOST_VALUES), message_bytes) if room >= 0 else None

    def _sizes(self) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Return the frame of this rank, those of all ranks, and the sizes in these."""
        size = self._group.size
        frames = self._received[: size * self._frame_bytes].view(size, self._frame_bytes)
        sizes = frames[:, : self._sizes_bytes].numpy().view(np.int64).reshape(size, 2, size)
        return self._given[: self._frame_bytes], frames, sizes

    def _call(self, source: Any, destination: Any, root: int) -> _Call:
        sources, destinations = self._plan.parts_of(source, destination)
        frame, frames, _ = self._sizes()
        sizes, values = frame.split_with_sizes([self._sizes_bytes, self._frame_bytes - self._sizes_bytes])
        sizes.numpy().view(np.int64)[:] = [part.nbytes for part in (*sources, *destinations)]
        others = [part for rank, part in enumerate(sources) if rank != self._group.rank]
        if sum(part.nbytes for part in others) <= len(values):
            for part in others:
                values[: part.nbytes] = buffers.byte_view(part)
                values = values[part.nbytes :]
        return _Call(self._frames, self._frames.blocks_of(frame), frame, frames.view(-1), 0)

    def _read(self, source: Any, destination: Any, root: int) -> Any:
        group, (sources, destinations) = self._group, self._plan.parts_of(source, destination)
        _, frames, sizes = self._sizes()
        longest_part(sizes, group.where)
        sent = sizes[:, 0].copy()
        np.fill_diagonal(sent, 0)
        if sent.sum(1).max() > self._frame_bytes - self._sizes_bytes:
            group.even_seq = group.call_log.seq
            self._plan.longer(sources, destinations, root)
            return destination
        for rank, part in enumerate(destinations):
            begin = self._sizes_bytes + int(sent[rank, : group.rank].sum())
            own = buffers.byte_view(sources[rank])
            values = own if rank == group.rank else frames[rank, begin : begin + part.nbytes]
            buffers.overwrite(buffers.byte_view(part), values)
        return destination


class _KernelCall:
    """The record of the kernel `over_hosts`, and the memory to which it points."""

    def __init__(
        self, plan: ComparedCall, root: int, most_bytes: int | None, steps: Sequence[fast_path.CachedCall]
    ) -> None:
        """Prepare the calls of a group.

        Args:
            plan: The same in Python.
            root: The root.
            most_bytes: The size of the longest call, if not all sizes are made so.
            steps: The steps within the host; none on ranks without them.
        """
        group, spec, hosts, own_host = plan.group, plan.spec, plan.hosts, plan.own_host
        self._plan, self._group, self._root = plan, group, root
        self._read_ticks, self._run = (kernels.load()[name] for name in ("read_ticks", "call_over_hosts"))
        names = [step.collective for step in plan.steps(root)]
        self.compiled = CompiledSteps(plan.comparison, steps, names, rounds=plan.rounds(root))
        is_root, is_first = group.rank == root, plan.comparison.exchange is not None
        self._code = plan.code | root << 32 if spec.is_rooted else plan.code
        self._ranks = np.full((len(hosts), plan.most_ranks), -1, np.int64)
        for host, ranks in enumerate(hosts):
            self._ranks[host, : len(ranks)] = ranks
        self.compiled.record.write(
            value_bytes=plan.most_bytes if most_bytes is None else min(most_bytes, plan.most_bytes),
            call_log=group.call_log.address,
            mark=plan.mark,
            sent_item_bytes=plan.sent_dtype.itemsize,
            widen=reduction.converter(plan.dtype, plan.sent_dtype),
            finish=reduction.converter(plan.sent_dtype, plan.dtype, divides=plan.divides),
            divisor=group.size,
            reduces=spec.reduces,
            divides=spec.divides,
            gathers=spec.gathers,
            copies=is_first and (is_root or spec.flow != "root to all") and not (names and SPECS[names[0]].gathers),
            receives=spec.receives(is_root),
            is_root=is_root and spec.is_rooted,
            is_home=own_host == plan.host_of[root],
            ranks=self._ranks.ctypes.data,
            most_ranks=plan.most_ranks,
            num_local=len(hosts[own_host]),
            place=plan.place,
            block_units=plan.block_units,
            passed_units=plan.passed_units,
            takes_part=plan.takes_part,
            given_memory=plan.comparison.rows_memory[0].ctypes.data,
            received_memory=plan.comparison.rows_memory[1].ctypes.data,
        )
        self._ranks_of_group = records.GroupRecord.new().write(rank=group.rank, size=group.size)
        self.record = records.KernelCall.new().write(
            group=self._ranks_of_group,
            item_bytes=plan.dtype.itemsize,
            reducer=0 if plan.op is None else reduction.address(plan.sent_dtype, plan.op),
            root=root if spec.is_rooted else -1,
            message=plan.comparison.rows_memory[0].ctypes.data,
            dtype=dtypes.info(plan.dtype).code,
            hosts=self.compiled.record,
        )
        self.frames = None if plan.frames is None else plan.frames.kernel_call(self.record, root)
        self.long = None if plan.long_calls is None or most_bytes is not None else self._long_calls(plan.long_calls)

    def _long_calls(self, long_calls: LongCall) -> CompiledSteps | None:
        """Write to the record how values follow the comparison, and return its steps; None if not possible."""
        plan, comparison = self._plan, self._plan.comparison
        tensor = torch.empty(0, dtype=plan.sent_dtype if plan.spec.reduces else torch.uint8)
        names = [long_calls.step if plan.spec.reduces else None, long_calls.step]
        steps = [
            plan.runner.cached_call(comparison.intra, name or "barrier", None if name is None else tensor, 0)
            for name in names
            if comparison.intra is not None
        ]
        found = [step for step in steps if step is not None]
        if len(found) < len(steps):
            return None
        kinds = ["gather" if SPECS[name or "barrier"].gathers else name or "barrier" for name in names]
        compiled = CompiledSteps(comparison, found, kinds)
        self._run_long = kernels.load()["call_long_over_hosts"]
        self.send_parts_of(self.record, long_calls.message_bytes)
        self.compiled.record.write(
            long=compiled.record,
            most_long=long_calls.most_bytes,
            memory=comparison.long_memory.ctypes.data,
            algorithm=long_calls.algorithm,
        )
        return compiled

    def send_parts_of(self, call: records.KernelCall, message_bytes: int) -> None:
        """Write to the record of a call how parts are sent in messages of their own."""
        group, comparison = self._group, self._plan.comparison
        MPI, size = group.context.MPI, group.size
        self._transfers = np.zeros((size, records.Transfer.FIELDS), np.int64)
        self._requests, self._status = np.zeros(2 * size, np.int64), np.zeros(STATUS_BYTES, np.uint8)
        self._messages = records.Hosts.new().write(
            wait=comparison.wait.record,
            eager=comparison.wait.eager,
            **kernel_fields(MPI, group.comm, self._status, NONBLOCKING),
            tag=PARTS_TAG,
            received_bytes=message_bytes,
            requests=self._requests.ctypes.data,
        )
        call.write(transfers=self._transfers.ctypes.data)
        call.hosts.write(parts=self._messages)

    def run(self, call: _Call) -> bool:
        """Run a call that Python has entered; return whether all ranks make it."""
        comparison = self._plan.comparison
        steps = call.before, call.between, call.after
        finish = lambda status: comparison.finish(call.number, self.compiled, status, *steps)  # noqa: E731
        return self._run_kernel(self._run, call, call.number, finish)

    def run_long(self, call: _Call) -> bool:
        """Run a call whose values are sent in one message to each other host; return whether all ranks make it."""
        long_calls, compiled = self._plan.long_calls, self.long
        assert long_calls is not None and compiled is not None
        finish = partial(long_calls.finish, call, compiled)
        return self._run_kernel(self._run_long, call, long_calls.number(call), finish)

    def _run_kernel(self, kernel: Callable[..., int], call: _Call, number: int, finish: Callable[[int], bool]) -> bool:
        source, target, call_log = call.source, call.target, self._group.call_log
        self._group.check_messages()
        num_bytes, row_bytes = 0, 0
        if source is not None:
            num_bytes, row_bytes = source.nbytes, rows_of(source)[1] * source.itemsize
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (source, target)]
        arguments = call_log.seq, number, addresses[0], num_bytes, row_bytes, addresses[1]
        try:
            status = kernel(int(self.record), *arguments)
            if status == 0:
                call_log.time_field = CounterFields.known_ns
                return True
            call_log.log_fields[LogFields.waited] = 0
            return finish(status)
        except BaseException:
            self.compiled.abort()
            raise

    def cached_call(self) -> fast_path.CachedCall:
        """Return the call for the fast path."""
        call_log, run_lock = self._group.call_log, self._group.call_queue.run_lock
        return fast_path.CachedCall(int(self.record), call_log, run_lock, self._code, 0, self._settle, self._abort)

    def _settle(self, status: int, source: Any, destination: Any) -> Any:
        finish = partial(self._plan.finish, self, status, source, destination, self._root)
        return self._group.settle(self._read_ticks(), finish)

    def _abort(self, _: object) -> None:
        self.compiled.abort()
        if self.frames is not None:
            self.frames.compiled.abort()
        self._group.call_log.take_over(self._read_ticks())
        self._group.call_log.abandon()
