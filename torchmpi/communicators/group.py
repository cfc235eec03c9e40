"""Groups of ranks.

Collectives run on a :class:`Group`: an MPI communicator with a call queue (order of calls), a call log (comparison of
calls) and, within a host, shared memory.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NoReturn, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch

from ..errors import MismatchError, RankLostError, StallError, TorchMPIError, TransportError
from ..log import logger
from ..shared_memory import fast_path
from ..shared_memory.memory_layout import CALL_NUMBER_BITS, LogFields, num_slots, segment_bytes
from ..shared_memory.segments import Segment
from ..timeline import events
from . import splits
from .call_codes import call_code, call_names
from .call_counts import CallCounts
from .call_log import Call, CallLog, how_it_left
from .call_queue import CallQueue, ShownTask
from .conditions import broadcast_short, on_all, reduce_by_mpi
from .flight_record import OF_MESSAGES, FlightRecord, Ring, as_ranges
from .handle import Handle
from .message_record import Channels
from .mismatches import mismatch_error, mismatch_message
from .observed_calls import ObservedCall, describe
from .plan import Plan, Run
from .release import FAILURE, FreedGroup, FreedGroups, MessageCounter, register, retire
from .status_board import StatusBoard

T = TypeVar("T")
_HEADER_DIMS = 12
_NOTICE_SECONDS, _POLL_SECONDS = 2.0, 0.01
_END_PERIOD_SECONDS = 0.005
_SLOTS_BYTES = 16 << 20  # of all ranks of a group together
_MOST_KEPT_RANKS = 8  # of a freed group whose memory is kept: each ring that is cleared takes a page


class Comparison(Protocol):
    """The comparison of the calls of a strict group, which finds whether they differ, but not in what."""

    def agree(self, number: int) -> bool:
        """Return whether all ranks pass the same number. Collective."""


_kept: list[object] = []
"""Memory of messages that MPI has not ended."""


class GroupResource:
    """What a backend or a service keeps for a group, until the group is freed."""

    can_expire = False
    """Whether its calls can be ended before all ranks arrive."""

    def expire(self, seq: int) -> None:
        """End the call with this number with an error, if it still waits."""

    def abort_device_work(self) -> None:
        """End the work on a device that waits for other ranks."""

    def refuse_work(self) -> None:
        """Begin no further work, as a rank is lost. Another thread calls it, again and again."""

    def close(self) -> None:
        """End its use, in the order opposite to that in which the attachments were made."""


class Group:
    """Ranks that call collectives together.

    Attributes:
        comm: The MPI communicator.
        side_comm: A duplicate for point-to-point messages, which must not be received by a collective.
        messages: Counts the messages on `side_comm`.
        unfinished: The number of the call whose messages on `comm` MPI has not ended; None if there is none.
        channels: Records the messages on `side_comm`.
        plans: Plans made on this group, by the arguments of the calls that select them.
        status_board: The shared memory of the group: a status block for each rank, and slots for data. None if the
            ranks are on several hosts, or have no shared memory.
        log_board: The status board, if calls are compared on it (``checking == "board"``); None if they are compared
            with messages, not at all, or if there is no status board.
        even_seq: The last call whose ranks have been found to have equal numbers of rows, or whose parts have the sizes
            that their receivers expect.
        scattered: The last scatter whose tensor all ranks know, and its shape and dtype.
        checking: How calls are compared: ``board``, ``strict`` (with a message before each call) or ``off``.
        shared: State of the shared-memory backend, made by that backend.
        binding: Held while a backend makes its state of the group: plans are made by the caller's thread and by the
            helper of the call queue, and there must be one count of calls.
        key: A number that is the same on all ranks of the group and differs from those of other groups, freed ones too.
        info: The description of the group for readers of recorded calls.
        timeout_seconds: The timeout of calls in shared memory; 0 for none.
        transport: What carries messages, made for the first one.
        open_messages: Messages of `send` and `recv` that have not ended.
        attachments: Objects to close before the group.
        communicator: The communicator of which this is the intra group; None until a call needs one.
        placement: Which ranks share a host.
        intra_host: The ranks on this host; None if there is no other one. See `inter_host`.
        inter_host: The group between hosts: on a grid the ranks with the same position on each host, otherwise the
            first rank of each host; None on other ranks. Both groups are None if all ranks are on one host, or each on
            its own host.
    """

    def __init__(
        self,
        comm: Any,
        name: str,
        world_ranks: tuple[int, ...],
        context: GroupContext,
        *,
        check: str | None = None,
        is_step: bool = False,
        freed: FreedGroup | None = None,
    ) -> None:
        """Make the group; `freed`: one whose memory and communicators all ranks take. Collective."""
        self.comm = comm
        self.name = name
        self.world_ranks = world_ranks
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.context = context
        self.hosts = sorted({context.hosts[rank] for rank in world_ranks})
        if freed is None:
            self._retirement_key, self.side_comm = register(comm, world_ranks), comm.Dup()
            self.status_board = _board(self)
        else:
            self._retirement_key, self.side_comm = freed.key, freed.side_comm
            self.status_board = None if freed.segment is None else StatusBoard(freed.segment, self.size)
        self.messages = MessageCounter()
        self.unfinished: int | None = None
        self.plans: dict[Hashable, Any] = {}
        self.checking = _how_to_check(self, context.check if check is None else check)
        self.is_strict = self.checking == "strict"
        self.log_board = self.status_board if self.checking == "board" else None
        number = context.num_made[world_ranks, name]
        context.num_made[world_ranks, name] += 1
        self.key = zlib.crc32(repr((world_ranks, name, number)).encode())
        self.info = events.GroupInfo(self.key, name, self.rank, world_ranks, len(self.hosts))
        record = context.flight_record
        ring = None if record is None else record.ring(self.key, name, world_ranks)
        self.call_log = CallLog(name, self.rank, self.size, self.log_board, ring)
        self.channels = Channels(partial(self.record_memory, OF_MESSAGES))
        context.call_counts.add(name, is_step, self.call_log)
        self.shared: Any = None
        self.binding = threading.Lock()
        self.call_queue = CallQueue(name, threaded=context.threaded)
        self.peer_queues: dict[tuple[str, int], CallQueue] = {}
        self.transport: Any = None
        self.open_messages: set[Handle[Any]] = set()
        self.timeout_seconds = 0.0
        self.attachments: list[GroupResource] = []
        self.communicator: Any = None
        self._compared, self.even_seq = 0, -1
        self.scattered: tuple[int, tuple[tuple[int, ...], Any] | None] = -1, None
        self.placement = splits.plan_split([context.hosts[rank] for rank in world_ranks], cartesian=True)
        self.intra_host, self.inter_host = _split_by_host(self, freed)
        context.groups.append(self)
        logger.debug("communicator %s of ranks %s, compared by %s", name, as_ranges(world_ranks), self.checking)

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    def call(self, plan: Plan, tensor: Any = None, out: Any = None, root: int = 0) -> Any:
        """Run a plan in the order of the call queue, in the calling thread if the queue is idle."""
        return self.call_queue.run(self.perform, plan, tensor, out, root, describe=self.described_call)

    def call_action(self, collective: str, action: Callable[[], T]) -> T:
        """Run `action`, a collective operation without tensors, as a call that the ranks compare."""

        def run(*_: Any) -> T:
            self.announce()
            return action()

        result: T = self.call(Plan(collective, call_code(collective), run))
        return result

    def call_exchange(self, collective: str, action: Callable[[], T]) -> T:
        """Run `action`, which calls :meth:`reduce` first, as a call that the ranks compare."""
        result: T = self.call(Plan(collective, call_code(collective), lambda *_: action()))
        return result

    def reduce(self, numbers: list[int], op: Literal["min", "sum"]) -> list[int]:
        """Return the least of each of some numbers over the ranks, or the sum; part of a call, which this compares.

        Over hosts the numbers are in the messages of the comparison.
        """
        if not self.is_strict:
            self.announce()
            return reduce_by_mpi(self.comm, numbers, op)
        run: Run | None = self.plans.get(("reduce", op))
        if run is None:
            run = self.plans["reduce", op] = self.context.make_reduction(self, op)
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        run(tensor, None, 0)
        result: list[int] = tensor.tolist()
        return result

    def perform(self, plan: Plan, tensor: Any, out: Any, root: int) -> Any:
        """Run a plan: begin its record, run it, end its record. The caller holds the run lock of the call queue."""
        call_log = self.call_log
        code = plan.code | root << 32 if root else plan.code
        shape = tensor.shape if plan.shape_of is None else plan.shape_of(tensor)
        num_bytes = bytes_of(out if tensor is None else tensor)
        observed = (
            None
            if events.recorder is None
            else ObservedCall(self.info, call_log, self.call_queue, plan, code, tensor, out)
        )
        try:
            call_log.enter(code, shape)
            result = plan.run(tensor, out, root)
            if tensor is None and out is None:
                num_bytes = bytes_of(result)
            end = call_log.leave(num_bytes)
        except BaseException as error:
            try:
                self._raise_reason(error)
            finally:
                if observed is not None:
                    observed.end(num_bytes, events.now(), type(error).__name__)
        if observed is not None:
            observed.end(num_bytes, end)
        return result

    def _raise_reason(self, error: BaseException) -> NoReturn:
        """End the record of the current call, which has failed with an error, and raise the error of the program."""
        call_log = self.call_log
        call = None if call_log.current is None else Call(*call_log.current)
        if not isinstance(error, (self.context.MPI.Exception, TransportError)):
            call_log.abandon()
            if (lost := self.context.loss_behind(error)) is not None:
                raise lost from error
            raise error
        try:
            if (lost := self.context.loss_behind(error)) is None:
                call_log.compare()  # raises MismatchError if that is the reason
        finally:
            call_log.abandon()
        raise lost or TransportError(f"{self.where}: {call} failed: {error}.") from error

    def described_call(self, plan: Plan, tensor: Any, out: Any, root: int) -> events.ShownCall:
        """Return what torch.profiler shows of a call of :meth:`perform`."""
        return describe(self.info, call_names(plan.code | root << 32), tensor, out)

    def described(self, names: events.Names, given: Any = None, out: Any = None) -> events.ShownCall:
        """Return what torch.profiler shows of a call in which this rank passes `given` and receives in `out`."""
        return describe(self.info, names, given, out)

    def shown(
        self, task: Callable[[], T], describe: Callable[..., events.ShownCall], *arguments: Any
    ) -> Callable[[], T]:
        """Return a task that torch.profiler shows as one call, `describe(*arguments)`, whatever calls it makes.

        Without a profiler, that is the task itself.
        """
        return task if events.show_call is None else ShownTask(self.call_queue, task, describe(*arguments))

    def settle(self, ticks: int, finish: Callable[[], T]) -> T:
        """End a call that the fast path has entered: take it over, and finish it or raise its error.

        `ticks`: the time of the fast path now.
        """
        call_log = self.call_log
        call_log.take_over(ticks)
        try:
            result = finish()
        except BaseException as error:
            self._raise_reason(error)
        call_log.leave(call_log.log_fields[LogFields.num_bytes])
        return result

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the group, as numbers in the world and in the order of their numbers in the group."""
        return self.world_ranks

    @property
    def is_grid(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return self.placement.is_cartesian

    @property
    def where(self) -> str:
        """``rank 3``, the rank in the world: the prefix of messages."""
        return f"rank {self.world_ranks[self.rank]}"

    def peer_queue(self, direction: str, peer: int) -> CallQueue:
        """Return the queue of messages to (``send``) or from (``receive``) one rank."""
        call_queue = self.peer_queues.get((direction, peer))
        if call_queue is None:
            call_queue = CallQueue(f"{self.name} {direction} {peer}", threaded=self.context.threaded)
            call_queue = self.peer_queues.setdefault((direction, peer), call_queue)
        return call_queue

    def record_memory(self, kind: int) -> Ring:
        """Return memory of the flight record for messages or requests of this group."""
        record = self.context.flight_record
        if record is None or self not in self.context.groups:  # without a record, or freed
            return Ring.private()
        return record.ring(self.key, self.name, self.world_ranks, kind)

    @cached_property
    def comparison(self) -> Comparison | None:
        """How the calls of a strict group are compared; None if by headers."""
        make = self.context.make_comparison
        return make(self) if make is not None and self.is_strict else None

    @property
    def call_number(self) -> int:
        """A number that stands for the current call: equal on two ranks only if their calls are the same."""
        return hash(self.call_log.entered) & ((1 << CALL_NUMBER_BITS) - 1)

    def announce(self) -> None:
        """Publish the current call, and in a strict group compare it, unless that has been done.

        With `sleeps_before_mpi`, it returns when all ranks of the host have published the call.
        """
        call_log = self.call_log
        if not self.is_strict:
            call_log.announce()
            if self.context.sleeps_before_mpi:
                call_log.sleep_until_all_arrive()
        elif call_log.entered is not None and self._compared != call_log.seq:
            self._compared = call_log.seq
            if self.comparison is None:
                self.compare_headers(self.comm, *call_log.entered[1:])
            elif not self.comparison.agree(self.call_number):
                self.refuse_call()
            call_log.count_wait()

    def refuse_call(self, kind: int = 0) -> None:
        """Raise, naming the calls of all ranks, because the comparison has found a difference. Collective.

        If the calls have no difference, the ranks have chosen different transports; or, where all pass the same `kind`,
        which is not 0, they differ only in lengths that need not be equal: then it returns.
        """
        assert self.call_log.entered is not None
        kinds = self.compare_headers(self.comm, *self.call_log.entered[1:], kind)
        if kind and kinds == {kind}:
            return
        call = Call(*self.call_log.entered)
        raise MismatchError(
            f"{self.where}: the ranks of communicator {self.name} agree on {call}, but chose different transports. "
            "Pass the same backend= on all ranks, and give them the same selector table."
        )

    def compare_headers(self, comm: Any, code: int, shape: tuple[int, ...], kind: int = 0) -> set[int]:
        """Exchange the signatures of the current call on `comm`, and raise on all ranks if they differ.

        Return the kinds that the ranks pass.
        """
        MPI = self.context.MPI
        header = np.zeros(4 + _HEADER_DIMS + 1, np.int64)
        header[: 4 + len(shape)] = self.context.exit_field, self.call_log.seq, code, len(shape), *shape[:_HEADER_DIMS]
        header[-1] = kind
        headers = np.empty((self.size, header.size), np.int64)
        comm.Allgather((header, MPI.INT64_T), (headers, MPI.INT64_T))
        kinds, headers = set(headers[:, -1].tolist()), headers[:, :-1]
        if (headers[:, 1:] == header[1:-1]).all():
            return kinds
        calls = {
            rank: str(Call(seq, code, tuple(dims[:num_dims])))
            for rank, (_, seq, code, num_dims, *dims) in enumerate(headers.tolist())
        }
        left = {rank: how_it_left(field) for rank, field in enumerate(headers[:, 0].tolist()) if field}
        error = mismatch_error(f"{self.where}: {mismatch_message(self.name, calls, left)}", calls)
        error.exited = {self.world_ranks[rank]: field for rank, field in enumerate(headers[:, 0].tolist()) if field}
        raise error

    @property
    def can_expire(self) -> bool:
        """Whether the calls of the group can be ended before all ranks arrive: those in shared memory."""
        return bool(self._expirable())

    def end_call(self, seq: int | None = None, report: str = "") -> None:
        """End the current call with an error, if it waits in shared memory, or for ranks to arrive there.

        `seq`: its number, if no other one is to be ended; `report`: the message of the error.
        """
        current = self.call_log.current
        if current is not None and seq in (None, current[0]):
            self.call_log.report_when_late = report or self.call_log.report_when_late
            self.call_log.ended_seq = current[0]
            for item in self._expirable():
                item.expire(current[0])

    def _expirable(self) -> list[GroupResource]:
        return [item for item in (self.shared, *self.attachments) if item is not None and item.can_expire]

    def abort_device_work(self) -> None:
        """End the work on a device that waits for other ranks. Later calls on the same connections fail."""
        for item in list(self.attachments):
            item.abort_device_work()

    def duplicate(self, name: str) -> Group:
        """Return a group of the same ranks with a separate call queue and call log. Collective."""
        return Group(self.comm.Dup(), name, self.world_ranks, self.context)

    def give_up(self, *memory: object) -> None:
        """Send no further messages on `comm`, since MPI has not ended those of the current call; keep their memory.

        They may arrive yet: in this memory, or in place of those of the next call.
        """
        if self.unfinished is None:
            self.unfinished = self.call_log.seq
            self.messages.add(FAILURE)  # the communicator is not freed, after which MPI may use its number again
        self.keep(*memory)
        self.forget_plans()

    def keep(self, *memory: object) -> None:
        """Keep memory of the current call, if it has been given up."""
        if self.unfinished == self.call_log.seq:
            _kept.append(memory)

    def check_messages(self) -> None:
        """Raise if a call has been given up: its messages would be taken for those of the next one."""
        if self.unfinished is not None:
            raise StallError(
                f"{self.where}: call #{self.unfinished} of this group was ended before the messages of other ranks had "
                "arrived, so the group cannot be used any more. Create a new one, or end the job."
            )

    def forget_plans(self) -> None:
        """Discard all plans, because a value that they depend on has changed."""
        self.plans.clear()
        fast_path.invalidate()  # last: calls are cached for existing plans

    def drain(self) -> None:
        """Wait until all queued calls, and the messages of `send` and `recv`, have ended."""
        for call_queue in (self.call_queue, *self.peer_queues.values()):
            call_queue.drain()
        self.finish_messages()

    def finish_messages(self) -> None:
        """Wait until the messages of `send` and `recv` have ended."""
        if self.transport is not None:
            self.transport.begin_deferred()
        for message in list(self.open_messages):
            message.run_here()

    def free(self, *, together: bool = False) -> None:
        """Free the group. Collective.

        `together`: no rank still uses the group, no call has failed, and all messages have been received, so the next
        group of the same ranks may have the communicators of MPI, or they are freed at once.
        """
        is_known = self.status_board is not None or not getattr(self.comm, "has_unique_context", False)
        keeps = together and self.size <= _MOST_KEPT_RANKS and is_known
        if kept := self._end(together=together, keeps=keeps):
            self.context.freed.keep(kept)

    def _end(self, *, together: bool, keeps: bool) -> FreedGroup | None:
        """End the use of the group, and return what is kept of it."""
        self.finish_messages()
        for call_queue in (self.call_queue, *self.peer_queues.values()):
            call_queue.close()
            self.context.failed += [handle for handle in call_queue.failed if handle.unseen_error is not None]
        for attachment in reversed(self.attachments):
            attachment.close()
        if together:  # other groups keep their calls, of which none has been made by this one as the default
            self.plans.clear()
            fast_path.forget(self, self.communicator)
        else:
            self.forget_plans()
        inter, intra = (
            None if part is None else part._end(together=together, keeps=keeps)
            for part in (self.inter_host, self.intra_host)
        )
        self.context.groups.remove(self)
        self.call_log.close()
        self.context.call_counts.free(self.call_log)
        if self.context.flight_record is not None:
            self.context.flight_record.free(self.call_log.ring, self.call_log.seq)
            for ring in self.channels.close():
                self.context.flight_record.free(ring)
        if keeps:
            segment = None if self.status_board is None else self.status_board.release()
            return FreedGroup(self._retirement_key, segment, self.comm, self.side_comm, self.call_log.seq, intra, inter)
        if self.status_board is not None:
            self.status_board.close()
        if together:
            self.side_comm.Free()
            self.comm.Free()
        else:
            retire(self._retirement_key, self.messages, self.side_comm, self.comm)
        return None


class GroupContext:
    """The context of all groups of a runtime."""

    def __init__(self, MPI: Any, hosts: Sequence[int], *, check: str, threaded: bool, slot_bytes: int) -> None:
        self.MPI = MPI
        self.slot_bytes = slot_bytes
        """The largest size of a slot in shared memory; 0 = no shared memory."""
        self.flight_record: FlightRecord | None = None
        """Where the calls of all groups are recorded; None: each group has a record that no other process can read."""
        self.call_counts = CallCounts()
        self.num_stalls = 0
        """Calls and messages of this rank that have waited longer than `stall_warning_seconds`."""
        self.updates: WeakValueDictionary[str, Any] = WeakValueDictionary()
        """Updates with parameter servers, by name, whose metrics are those of the job as well."""
        self.job = 0
        """A random number that all ranks of the job know."""
        self.is_crowded = False
        """Whether this host has more ranks than cores for them."""
        self.sleeps_before_mpi = False
        """Whether ranks sleep until the others have arrived before they call MPI, because MPI's polling would take the
        cores of other ranks: threads of the awaited rank were not scheduled for seconds."""
        self.sends_whole = False
        """Whether long messages between hosts are sent whole, since all hosts have a network other than Ethernet."""
        self.processes: dict[int, int] = {}
        """The process of each world rank on this host, if they can read each other's memory."""
        self.problems: set[str] = set()
        """Problems with shared memory, reported by start()."""
        self.hosts = tuple(hosts)
        """The number of the host of each world rank."""
        self.check = check
        self.threaded = threaded
        """Whether several threads may call MPI at the same time."""
        self.make_comparison: Callable[[Group], Comparison] | None = None
        """Makes the comparison of a strict group, when there are backends."""
        self.make_reduction: Callable[[Group, Literal["min", "sum"]], Run]
        """Makes the operation that reduces some numbers over the ranks of a strict group, and compares the call."""
        self.exit_field = 0
        """The field EXITED of the status block of this rank, also for ranks of other hosts."""
        self.failure = ""
        """The error because of which this rank ends, for the report of another rank."""
        self.loss = ""
        """Why the calls of all groups fail, if a rank has been lost and the job continues without it."""
        self.raises_lost_ranks = False
        """Whether the loss of a rank raises an error instead of ending the job."""
        self.groups: list[Group] = []
        """All groups that have not been freed."""
        self.freed = FreedGroups()
        self.num_made: Counter[tuple[tuple[int, ...], str]] = Counter()
        """The number of groups made, freed ones too, by ranks and name: the same on all ranks of these groups."""
        self.failed: list[Handle[Any]] = []
        """Failed asynchronous calls on freed groups, if no thread had called ``wait()`` when the group was freed."""

    def loss_behind(self, error: BaseException) -> RankLostError | None:
        """Return the error for a call that has failed because a rank is lost; None if that is not the reason.

        The loss may become known after its consequences, such as a call that another rank has aborted.
        """
        if not self.raises_lost_ranks or isinstance(error, RankLostError):
            return None
        is_elsewhere = isinstance(error, TorchMPIError) and error.reason_is_elsewhere
        if not (is_elsewhere or isinstance(error, (self.MPI.Exception, TransportError, StallError))):
            return None
        loss = self.await_loss()
        return RankLostError(f"{loss}. Continue with recover().") if loss else None

    def await_loss(self) -> str:
        """Return `loss`, which may become known a moment after its consequences."""
        limit = time.monotonic() + _NOTICE_SECONDS
        while not self.loss and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
        return self.loss

    def finish_collectives(self) -> None:
        """Wait until the collectives queued on any group have ended. Queued messages may wait for later calls."""
        for group in list(self.groups):
            group.call_queue.drain()


def end_calls(groups: Sequence[Group], is_over: Callable[[], bool]) -> None:
    """End the calls on groups that wait for other ranks, and those that begin meanwhile, until `is_over`."""
    while not is_over():
        for group in list(groups):
            group.end_call()
            group.abort_device_work()
            for item in list(group.attachments):
                item.refuse_work()
        time.sleep(_END_PERIOD_SECONDS)


def bytes_of(tensors: Any) -> int:
    """Return the size of what a rank passes to a call or receives: a tensor, a list of tensors, or something else."""
    if isinstance(tensors, list):  # an alltoall of several tensors
        return sum(getattr(each, "nbytes", 0) for each in tensors)
    return getattr(tensors, "nbytes", 0)


def _split_by_host(group: Group, freed: FreedGroup | None) -> tuple[Group | None, Group | None]:
    """Return `Group.intra_host` and `Group.inter_host`, on which hierarchical collectives run. Collective.

    They have the communicators and the memory that those of `freed` had, if it is given.

    These groups are not split again: all ranks of one are on the same host, all ranks of the other on different hosts.
    """
    split, ranks, undefined = group.placement, group.world_ranks, group.context.MPI.UNDEFINED
    if len(split.groups) in (1, group.size):
        return None, None
    member = split.members[group.rank]
    intra = inter = None
    old_intra, old_inter = (None, None) if freed is None else (freed.intra, freed.inter)
    if freed is None:
        comm = group.comm.Split(member.group if len(member.intra) > 1 else undefined, group.rank)
    if len(member.intra) > 1:
        members = tuple(ranks[rank] for rank in member.intra)
        within = comm if old_intra is None else old_intra.comm
        intra = Group(within, f"{group.name} on one host", members, group.context, is_step=True, freed=old_intra)
    if freed is None:
        comm = group.comm.Split(undefined if member.inter is None else member.intra_rank, member.group)
    if member.inter is not None:
        members, name = tuple(ranks[rank] for rank in member.inter), f"{group.name} across hosts"
        between = comm if old_inter is None else old_inter.comm
        # The ranks have compared the call of which this is a step.
        inter = Group(between, name, members, group.context, check="off", is_step=True, freed=old_inter)
    return intra, inter


def _board(group: Group) -> StatusBoard | None:
    """Allocate the shared memory of a group if its ranks are on one host. Collective."""
    context, size = group.context, group.size
    if len(group.hosts) > 1 or not context.slot_bytes:
        return None
    segment = share(group.comm, "group", segment_bytes(size, slot_bytes(size, context.slot_bytes)))
    if segment is not None:
        return StatusBoard(segment, size)
    reason = "neither anonymous files nor room in /dev/shm, or ranks in containers that cannot open each other's"
    context.problems.add(f"the system provides none ({reason})")
    return None


def share(comm: Any, name: str, num_bytes: int) -> Segment | None:
    """Return zeroed memory that all ranks of a communicator have mapped; None if one of them cannot. Collective."""
    segment = _try(partial(Segment.create, name, num_bytes)) if comm.rank == 0 else None
    ticket = broadcast_short(comm, None if segment is None else segment.ticket)
    if comm.rank != 0 and ticket is not None:
        segment = _try(partial(Segment.open, ticket))
    is_shared = on_all(comm, segment is not None)
    if segment is not None:
        segment.withdraw()  # all have opened it, so that its name can be removed
        if not is_shared:
            segment.close()
    return segment if is_shared else None


def slot_bytes(size: int, most: int) -> int:
    """Return the size of the slots of a rank: `most`, or less if many ranks share a host.

    The size is a multiple of the page size, with at least a cache line for each rank.

    >>> slot_bytes(2, 1 << 20), slot_bytes(64, 1 << 20), slot_bytes(2, 5000), slot_bytes(512, 1 << 20)
    (1048576, 131072, 4096, 32768)
    """
    least = -(-64 * size // 4096) * 4096
    return max(least, min(most, _SLOTS_BYTES // (num_slots(size) * size)) & -4096)


def _how_to_check(group: Group, check: str) -> str:
    if group.size == 1 or check == "off":
        return "off"
    if check == "strict":
        return "strict"
    if group.status_board is not None:
        return "board"
    return "off" if check == "board" else "strict"


def _try(action: Callable[[], Any]) -> Any:
    """Return the result of an action, or None if the system does not allow it."""
    try:
        return action()
    except OSError:
        return None
