"""Comparison of the calls of a group over several hosts: within each host in shared memory, then between the hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

import numpy as np
import torch

from ..communicators import splits
from ..communicators.call_codes import CallNumber
from ..communicators.group import Group, GroupResource
from ..communicators.plan import Backends
from ..errors import MismatchError
from ..shared_memory import fast_path, kernels
from ..shared_memory.kernels import records
from ..shared_memory.kernels.records import MISMATCH, STEP_AFTER, STEP_BEFORE, STEP_BETWEEN, TIMEOUT
from ..shared_memory.memory_layout import LogFields
from ..tensors import schedule
from .base import Backend, Operation, bind, refusal
from .hierarchical.steps import StepRunner
from .mpi_messages import NONBLOCKING, STATUS_BYTES, can_call_from_kernels, kernel_fields
from .number_exchange import NumberExchange, most_carried, most_together

Settle = Callable[[Any, Any], Any]
"""``settle(source, destination)`` ends a step that machine code has begun."""

# Longer than a message takes: on a core that another program wants, a rank that yields waits for the next turn. But not
# much longer: ranks of other hosts may share its cores, as virtual hosts do, and would wait as long.
_EAGER_NANOSECONDS = 100_000
MOST_LONG_BYTES = 4 << 20
"""The size of the longest tensors that are divided among the ranks in one piece, as they are sent."""
_DIFFERENT = 0
"""Passed on instead of the number of the call by a rank that has heard of a difference."""


def long_memory_bytes(num_hosts: int) -> int:
    """Return the length of the memory for long calls: a tensor, two blocks for each host, and whole cache lines.

    >>> long_memory_bytes(2) - 3 * MOST_LONG_BYTES
    512
    """
    return 3 * MOST_LONG_BYTES + 256 * num_hosts


class CallComparison:
    """Three steps: within each host, between the first ranks of the hosts, and within each host again.

    The calls of a step within a host are compared by its kernels, with the number of the call of the whole group in
    place of a shape. A rank that finds a difference takes part in the remaining steps with another number, so that all
    other ranks find it too and none waits. Where each rank is on its own host, or the ranks of a host share no memory,
    all ranks take part in the step between.

    Attributes:
        in_steps: Whether there are steps within the hosts.
        intra: The group of these steps; None if this rank takes no part in them.
        exchange: The messages between the hosts; None if this rank sends none.
        split: The hosts that send messages, each of one rank if there are no steps within hosts.
        most_carried: The size of the longest vectors that are sent between the hosts in the messages of a comparison,
            to be combined.
        scratch: Memory of this rank for such blocks.
        rows_memory: Memory of this rank for rows in the place of lists of tensors: given and received ones.
        wait: The wait of machine code for messages of other hosts.
    """

    def __init__(self, group: Group, shared: Backend, network: Backend) -> None:
        """Prepare the comparison for a group.

        Args:
            group: The group.
            shared: The backend for ranks that share memory.
            network: The backend for the ranks of a host that do not.
        """
        self.group, self._shared, self._network = group, shared, network
        num_hosts = len(group.placement.groups)
        self.in_steps = num_hosts not in (1, group.size) and refusal(shared, "barrier", "cpu") is None
        self.intra = group.intra_host if self.in_steps else None
        sends = not self.in_steps or group.placement.members[group.rank].intra_rank == 0
        between = group.inter_host if self.in_steps else group
        self.exchange = NumberExchange(group.context.MPI, between.comm) if sends and between is not None else None
        self.split = group.placement if self.in_steps else splits.plan_split(range(group.size), cartesian=False)
        size = len(self.split.groups)
        self.most_carried = most_carried(size, in_steps=self.in_steps)
        self.scratch = np.empty(max(self.most_carried, most_together(size)), np.uint8)
        self.rows_memory = np.empty((2, most_together(size)), np.uint8)
        self._number = CallNumber()  # in place of the shape in the steps of the current call
        self._waiting = self.runner(None)
        self.wait = _Wait(group, self.intra)
        group.attachments.append(self.wait)

    def runner(self, op: str | None) -> StepRunner:
        """Return a runner of steps within the host that belong to the current call."""
        return StepRunner(op, self._bind, variant="compared", shape_of=lambda _: self._number)

    def _bind(
        self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None, device_type: str
    ) -> tuple[Operation, Backends]:
        # Not by the selector: among kernels, any two calls that differ end with an error.
        has_memory = refusal(self._shared, collective, device_type, group) is None
        backend = self._shared if has_memory else self._network
        return bind(backend, group, collective, dtype, op), ((None, backend.name),)

    @cached_property
    def long_memory(self) -> np.ndarray:
        """Memory of this rank for what long calls send and receive; its pages are used when they are first written."""
        return np.empty(long_memory_bytes(len(self.split.groups)), np.uint8)

    @cached_property
    def _compiled(self) -> CompiledSteps | None:
        """The comparison in machine code; None if that is not possible."""
        intra = self.intra
        step = None if intra is None else self._waiting.cached_call(intra, "barrier", None, 0)
        if not self.has_kernels or (intra is not None and step is None):
            return None
        try:
            compare = kernels.load()["compare_over_hosts"]
            return CompiledSteps(self, [] if step is None else [step, step], ["barrier"] * 2, compare)
        except (ImportError, OSError, RuntimeError):  # no LLVM, or none for this processor
            return None

    @property
    def has_kernels(self) -> bool:
        """Whether machine code can send the messages."""
        return can_call_from_kernels(self.group) and self.group.unfinished is None

    def agree(self, number: int) -> bool:
        """Return whether all ranks pass the same number. Collective."""
        self.group.check_messages()
        compiled = self._compiled
        if compiled is None:
            return self.run(number, self.synchronize, lambda exchange, number: exchange.agree(number), self.synchronize)
        status = compiled.run(number)
        return status == 0 or self.finish(
            number, compiled, status, self.synchronize, NumberExchange.agree, self.synchronize
        )

    def set_number(self, number: int) -> None:
        """Let the ranks of a host compare this number in the following steps."""
        self._number = CallNumber((number,))

    def finish(
        self,
        number: int,
        compiled: CompiledSteps,
        status: int,
        before: Callable[..., object],
        between: Callable[[NumberExchange, int | None], bool],
        after: Callable[..., object],
    ) -> bool:
        """Run the rest of a call of machine code from the step that has failed, and return what `run` would.

        `before` and `after` get a function that ends the step which has failed.
        """
        failed = compiled.record.failed_step
        if failed == STEP_BETWEEN and status != MISMATCH:
            self.wait.give_up(status, self.exchange, compiled)
        if failed == STEP_BEFORE:
            return self.run(number, partial(before, partial(compiled.steps[0].settle, status)), between, after)
        ended = partial(after, partial(compiled.steps[1].settle, status)) if failed == STEP_AFTER else _nothing
        return self.run(number, _nothing, lambda *_: failed == STEP_AFTER, ended)

    def run(
        self,
        number: int,
        before: Callable[[], object],
        between: Callable[[NumberExchange, int | None], bool],
        after: Callable[[], object],
    ) -> bool:
        """Compare a number in the steps of a call, and return whether it is the same on all ranks. Collective.

        `before` and `after` run a step within the host, if this rank has one. ``between(exchange, number)`` exchanges
        the number between the hosts, in which None differs from all others, and returns whether it is equal.
        """
        self.group.check_messages()
        is_equal = self._step(number, before)
        if self.exchange is not None:
            is_equal = between(self.exchange, number if is_equal else None)
        if is_equal:
            is_equal = self._step(number, after)
        else:
            self._step(_DIFFERENT, self.synchronize)
        return is_equal

    def _step(self, number: int, step: Callable[[], object]) -> bool:
        self.set_number(number)
        try:
            step()
        except MismatchError as error:
            if error.reason_is_elsewhere:  # a rank of this host has given up, and does not compare the calls
                raise
            return False
        return True

    def synchronize(self, settle: Settle | None = None) -> None:
        """Wait for the ranks of this host, or end a wait that machine code has begun."""
        if settle is not None:
            settle(None, None)
        elif self.intra is not None:
            self._waiting.run(self.intra, "barrier", None)


class _Wait(GroupResource):
    """Ends calls whose machine code waits for messages of other hosts, or for ranks of this one.

    A call through Python waits inside MPI, and cannot be ended.

    Attributes:
        record: Where the machine code says that it waits.
        eager: How many nanoseconds machine code waits before other ranks may have the core.
    """

    def __init__(self, group: Group, intra: Group | None) -> None:
        self._group, self._intra = group, intra
        self.record = records.HostsWait.new()
        self.eager = 0 if group.context.is_crowded else _EAGER_NANOSECONDS

    @property
    def can_expire(self) -> bool:  # type: ignore[override]
        """Whether the current call can be ended now."""
        intra, is_polling = self._intra, self.record.cells[records.HostsWait.polling] != 0
        return is_polling or (intra is not None and intra.call_log.current is not None)

    def expire(self, seq: int) -> None:
        """End the call with this number with an error, if it still waits."""
        self.record.write(expired=seq)
        if self._intra is not None:
            self._intra.end_call(report=self._group.call_log.report_when_late)

    def give_up(self, status: int, *memory: object) -> NoReturn:
        """Raise for a call that has been ended with TIMEOUT, or by an error of MPI; keep the memory of its messages."""
        self._group.give_up(*memory)
        if status == TIMEOUT:
            self._group.call_log.expired()
        raise self._group.context.MPI.Exception(status)


def _nothing() -> None:
    """Stand for a step that has ended."""


class CompiledSteps:
    """The record of calls over hosts in machine code, and the memory to which it points.

    Attributes:
        record: The record.
        steps: The steps within the host, before the messages and after them; none on ranks without them.
    """

    def __init__(
        self,
        comparison: CallComparison,
        steps: Sequence[fast_path.CachedCall],
        names: Sequence[str],
        compare: Callable[..., int] | None = None,
        rounds: Sequence[schedule.Carried] = (),
    ) -> None:
        """Prepare the record.

        Args:
            comparison: The same in Python.
            steps: The steps within the host.
            names: Their collectives.
            compare: The kernel of a comparison alone.
            rounds: Which blocks the messages carry, if not those of all hosts.
        """
        self.steps, self._compare, exchange = steps, compare, comparison.exchange
        self._call_log = comparison.group.call_log
        size = len(comparison.split.groups)
        self._status, self._operands = np.zeros(STATUS_BYTES, np.uint8), np.zeros(size, np.int64)
        scratch = int(comparison.scratch.ctypes.data)
        self.record = records.Hosts.new().write(
            own=scratch,
            scratch=scratch,
            num_hosts=size,
            own_host=comparison.split.members[comparison.group.rank].group,
            operands=self._operands.ctypes.data,
        )
        if exchange is not None:
            sent, received, received_bytes = exchange.memory
            self._rounds = np.array(rounds or exchange.rounds, np.int64)
            self.record.write(
                wait=comparison.wait.record,
                eager=comparison.wait.eager,
                **kernel_fields(comparison.group.context.MPI, exchange.comm, self._status, NONBLOCKING),
                most_gathered=exchange.most_gathered,
                relayed_blocks=exchange.blocks_address,
                sent=sent,
                own=sent + records.ComparedNumber.BYTES,
                received=received,
                received_bytes=received_bytes,
                tag=exchange.tag,
                rounds=self._rounds.ctypes.data,
                num_rounds=len(exchange.rounds),
            )
        for of_step, step, name in zip((self.record.before, self.record.after), steps, names, strict=False):
            self.record.write(intra_log=step.call_log.address)
            kind = records.STEPS.index(name)
            of_step.write(kind=kind, call=step.record, code=step.code, signed_code=step.signed_code)

    def run(self, number: int) -> int:
        """Compare a number; return 0, or the status of the step that has failed."""
        assert self._compare is not None
        try:
            return self._compare(int(self.record), self._call_log.seq, number)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Abort the step that runs."""
        for step in self.steps:
            if step.call_log.log_fields[LogFields.active]:
                step.abort(None)
