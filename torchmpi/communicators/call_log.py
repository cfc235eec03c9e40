"""The call log of a group: every call with its sequence number and signature, compared between the ranks.

A signature consists of collective, operation, dtype, root and shape. If two ranks use different signatures for one
sequence number, both raise :class:`~torchmpi.errors.MismatchError`. The watchdog reads from the log which ranks have
not arrived.

Within a host the ranks publish their calls on the :mod:`status board <torchmpi.communicators.status_board>`. Writing an
entry and reading those of the two neighbors costs a fraction of a microsecond and no message. Two neighbors suffice:
if every rank equals the next one, all are equal. Of two neighbors the one that arrives later finds the entry of the
other, so every difference is found.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from time import monotonic_ns
from typing import ClassVar, NamedTuple, NoReturn

from ..collective_specs import CODES
from ..errors import MismatchError, StallError
from ..shared_memory.memory_layout import (
    ARRIVED,
    BLAMED_RANK_BITS,
    BLOCK_FIELDS,
    DIFFERENT,
    EXIT_STATUS,
    MAX_LOG_DIMS,
    NEIGHBOR,
    NOT_ARRIVED,
    RECORD_LENGTH,
    RING_LENGTH,
    Block,
    CounterFields,
    Entry,
    LogFields,
    entry,
)
from ..timeline import events
from .call_codes import ON_DEVICE, CallNumber, call_code, call_names, describe
from .conditions import sleep_until
from .flight_record import STARTS, WRITERS, Ring
from .mismatches import mismatch_error, mismatch_message
from .rank_status import RankStatus, await_answers
from .status_board import BoardQuestion, StatusBoard

_LAST = RECORD_LENGTH - 1
_POLL_SECONDS = 0.0001
_SHORT_NS = 20_000
"""The time of calls in which waits for other ranks are not looked for, as that would take a part of it."""
_STATUS_SECONDS = 3.0
NATIVE = 1 << 61
"""Set in the signature of calls that kernels run, so that a different choice of backend is found."""
COMPARED = 1 << 59
"""Set in the signature of calls that a kernel only compares, and another backend runs."""
ABORTED = 1 << 60
"""Flipped in the signature of an aborted call, so that ranks that arrive later reject the entry."""


class Call(NamedTuple):
    """One entry of the call log."""

    seq: int
    code: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{describe(self.code, self.shape)}, call #{self.seq}"


@lru_cache(maxsize=256)
def _slots_of(rank: int, neighbors: tuple[int, ...]) -> Sequence[tuple[int, Sequence[int]]]:
    return tuple((entry(rank, i), tuple(entry(other, i) for other in neighbors)) for i in range(RING_LENGTH))


class CallLog:
    """The calls of this rank on one group, in order.

    >>> log = CallLog("example", rank=0, size=1)
    >>> log.enter(call_code("barrier"), ())
    >>> log.leave() > 0
    True
    >>> log.seq
    1
    """

    publish: ClassVar[Callable[..., int] | None] = None
    """The kernel `announce`, when kernels have been loaded; only with it there is an order on weak memory."""

    def __init__(
        self, name: str, rank: int, size: int, log_board: StatusBoard | None = None, ring: Ring | None = None
    ) -> None:
        self.name, self.rank, self.size, self.log_board = name, rank, size, log_board
        self.ring = Ring.private() if ring is None else ring
        """The part of the flight record with the calls on this group."""
        self.log_fields = array("q", bytes(8 * LogFields.FIELDS))
        """The number of the last call, whether the fast path has entered it, and counters of the ended ones."""
        self.log_fields[LogFields.record] = self.ring.address
        self.address, _ = self.log_fields.buffer_info()
        self.entered: tuple[int, int, tuple[int, ...]] | None = None
        self.free = RING_LENGTH if log_board is not None else sys.maxsize
        """Calls up to this number may be entered without overwriting entries that other ranks have not compared."""
        self.begin = 0
        """When the current call began."""
        self._chunks_since = 0, 0
        """The number of the last call that was a later chunk of a call of the program, and when that began."""
        self.time_field = CounterFields.ns
        """The counter of the time of the current call: COUNTED_KNOWN_NS if its waits for other ranks are measured."""
        self._fields = log_board.fields if log_board is not None else None
        self._neighbors = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
        self._slots = _slots_of(rank, tuple(self._neighbors))
        """The positions of each entry of the ring: of this rank, and of its neighbors."""
        neighbors = [log_board.block_address(other) for other in self._neighbors] if log_board is not None else []
        self._blocks = None if log_board is None else (log_board.block_address(rank), *neighbors, 0, 0)[:3]
        """The addresses of the blocks of this rank and of its neighbors, 0 for none; None when they are unmapped."""
        self._missing: tuple[int, ...] = ()
        """Positions of the entries of neighbors that had not arrived when this rank announced its call."""
        self.ended_seq = 0
        """The call up to which no call waits any longer: it takes too long, or a rank has been lost."""
        self.last_aborted = 0
        """The last call that has failed on this rank."""
        self._spoiled = 0
        """The last call whose entry this rank has invalidated."""
        self.report_when_late = ""
        """The report of the watchdog on the current call, raised if the call times out."""

    @property
    def seq(self) -> int:
        """The sequence number of the last call that was entered."""
        return self.log_fields[LogFields.sequence]

    @property
    def current(self) -> tuple[int, int, tuple[int, ...]] | None:
        """The call that is running: sequence number, code, shape."""
        return self.entered or self._fast_path_call()

    def _fast_path_call(self) -> tuple[int, int, tuple[int, ...]] | None:
        """Return the call that the fast path has entered, perhaps in another thread that writes at the same time."""
        log_fields = self.log_fields
        while seq := log_fields[LogFields.active]:
            call = self.ring.read(seq)
            if call is not None and log_fields[LogFields.active] == seq:
                return seq, call.code, CallNumber(call.shape) if call.is_number else call.shape
        return None

    def take_over(self, ticks: int) -> None:
        """Continue in Python the call that the fast path has entered. `ticks`: the time of the fast path now."""
        seq, self.entered = self.log_fields[LogFields.active], None
        if seq:
            code, shape, is_number, began = self.ring.begun(seq)
            self.entered = seq, code, CallNumber(shape) if is_number else shape
        self.begin, self.time_field = monotonic_ns(), CounterFields.known_ns
        if (waited := self.log_fields[LogFields.waited]) < 0:
            self.begin, self.time_field, self.log_fields[LogFields.waited] = -waited, CounterFields.ns, 0
        elif seq:
            counters = LogFields.counters + (code & 0xFF) * CounterFields.FIELDS
            self.log_fields[counters + CounterFields.ticks] += ticks - abs(began)
        self.log_fields[LogFields.active] = 0

    def enter(self, code: int, shape: tuple[int, ...]) -> None:
        """Enter the next call; the other ranks see it after `announce`."""
        seq = self.log_fields[0] = self.log_fields[0] + 1
        self.begin = begin = monotonic_ns()
        self.time_field = CounterFields.ns
        if seq > self.free:
            self.wait_for_room(seq, code, shape)
        self.entered = (seq, code, shape)
        num_dims, ring = len(shape), self.ring
        if num_dims > MAX_LOG_DIMS or type(shape) is CallNumber:
            ring.enter(seq, code, shape, is_number=type(shape) is CallNumber)
        else:  # on the path of every call
            WRITERS[num_dims](ring.memory, STARTS[seq & _LAST], seq, code, num_dims, -begin, 0, *shape)

    def enter_next_chunk(self) -> None:
        """End a chunk of a call of the program, of which only the time is counted, and enter the next one."""
        assert self.current is not None
        (_, code, shape), begun = self.current, self.begun
        self.leave(num_calls=0)
        self.enter(code, shape)
        self._chunks_since = self.seq, begun

    @property
    def begun(self) -> int:
        """When the current call of the program began; `begin` is that of its chunk."""
        seq, begun = self._chunks_since
        return begun if seq == self.seq else self.begin

    def announce(self) -> None:
        """Publish the call that was entered and compare it with the neighbors, as kernels also do."""
        # On the path of every call.
        if self._fields is None or self.entered is None:
            return
        seq, code, shape = self.entered
        signature, arrived = code ^ hash(shape), 0
        if not code & ON_DEVICE:  # where calls may end when they are enqueued
            arrived, self.time_field = self.begin, CounterFields.known_ns
        publish, blocks = type(self).publish, self._blocks
        if publish is None or blocks is None:
            found = self._publish(seq, signature, arrived)
        else:
            own, one, other = blocks
            found = publish(own, one, other, seq, signature, arrived)
        if found:
            for slot in self._slots[seq & (RING_LENGTH - 1)][1]:
                if found & NOT_ARRIVED:
                    self._missing += (slot,)
                elif found & DIFFERENT:
                    self._refuse_entry(slot)
                found //= NEIGHBOR

    def _publish(self, seq: int, signature: int, arrived: int) -> int:
        """Publish a call as the kernel `announce` does, but for the order of the stores, and return the same."""
        fields = self._fields
        assert fields is not None
        own, _ = self._slots[seq & (RING_LENGTH - 1)]
        if arrived:
            fields[own + ARRIVED] = arrived
        fields[own + Entry.signature] = signature
        fields[own + Entry.sequence] = seq  # last: until then the entry has the number of an old call
        fields[self.rank * BLOCK_FIELDS + Block.entered] = seq
        return self._compared(seq, signature)

    def _compared(self, seq: int, signature: int) -> int:
        """Compare a call with the neighbors: NOT_ARRIVED or DIFFERENT, with another factor for each."""
        assert self._fields is not None
        found, unit = 0, 1
        for slot in self._slots[seq & (RING_LENGTH - 1)][1]:
            if self._fields[slot + Entry.sequence] != seq:
                found += NOT_ARRIVED * unit
            elif self._fields[slot + Entry.signature] != signature:
                found += DIFFERENT * unit
            unit *= NEIGHBOR
        return found

    def wait_for_room(self, seq: int, code: int, shape: tuple[int, ...]) -> None:
        """Wait for ranks that are a whole ring behind: the root of a broadcast waits for no rank and may run ahead."""
        assert self.log_board is not None
        self.entered = (seq, code, shape)  # read by the watchdog
        others = [rank for rank in range(self.size) if rank != self.rank]
        while seq > self.free:
            # One less than the ring: a rank that has entered a call may not have compared it yet.
            self.free = min((self.log_board.get(rank, Block.entered) for rank in others), default=seq) + RING_LENGTH - 1
            if seq > self.free:
                if self.ended_seq >= seq:
                    self.expired()
                time.sleep(_POLL_SECONDS)

    def sleep_until_all_arrive(self) -> None:
        """Sleep until all ranks have announced the current call, if there is a status board."""
        if self.log_board is not None and self.entered is not None:
            sleep_until(partial(self._have_all_arrived, self.log_board, self.entered[0]))
            self.count_wait()

    def count_wait(self) -> None:
        """Count the time of the current call until now as waited, since all ranks are known to have entered the call.

        Calls on device tensors may end when they are enqueued: of these, no waits are counted.
        """
        if self.entered is not None and not self.entered[1] & ON_DEVICE:
            self.log_fields[LogFields.waited], self.time_field = monotonic_ns() - self.begin, CounterFields.known_ns

    def _have_all_arrived(self, log_board: StatusBoard, seq: int) -> bool:
        if self.ended_seq >= seq:
            self.expired()
        # Not ENTERED: kernels publish it before the entry that `compare` reads.
        slots = (entry(rank, seq & (RING_LENGTH - 1)) for rank in range(self.size))
        return all(log_board.fields[slot + Entry.sequence] >= seq for slot in slots)

    def leave(self, num_bytes: int = 0, *, num_calls: int = 1) -> int:
        """End the call, count it, and compare it with the neighbors that had not arrived when it began.

        Args:
            num_bytes: The size of the tensor that this rank has passed.
            num_calls: 0 for a part of a call of the program, of which only the time is counted.

        Returns:
            The time of the end, in nanoseconds.
        """
        if self._missing:
            try:
                self.compare()
            except BaseException:
                self.abandon()
                raise
            self._missing = ()
        if self._fields is not None:
            self._fields[self.rank * BLOCK_FIELDS + Block.left] = self.log_fields[0]
        end, fields = self.ring.leave(self.log_fields[0]), self.log_fields
        if self.entered is not None:
            counters = LogFields.counters + (self.entered[1] & 0xFF) * CounterFields.FIELDS
            fields[counters + CounterFields.calls] += num_calls
            fields[counters + CounterFields.num_bytes] += num_bytes
            duration = end - self.begin
            fields[counters + self.time_field] += duration
            if duration > _SHORT_NS and not fields[LogFields.waited]:
                fields[LogFields.waited] = self._waited_until(end)
            if waited := fields[LogFields.waited]:
                fields[counters + CounterFields.waited_ns] += waited
                fields[LogFields.waited] = 0
        self.entered = None
        return end

    def _waited_until(self, end: int) -> int:
        """Return how long this rank has waited for others in the call that ends; 0 if it has not announced the call."""
        assert self.entered is not None
        seq, code, _ = self.entered
        if self._fields is None or self._fields[self._slots[seq & (RING_LENGTH - 1)][0] + ARRIVED] != self.begin:
            return 0
        collective, _, _, root = call_names(code)
        awaited = events.awaited_ranks(collective, self.rank, root, range(self.size))
        slots = [entry(rank, seq & (RING_LENGTH - 1)) for rank in awaited]
        times = [self._fields[slot + ARRIVED] for slot in slots if self._fields[slot + Entry.sequence] == seq]
        return max(0, min(max(times, default=0), end) - self.begin)

    def count_stall(self, code: int) -> None:
        """Count a call that waits too long; called by the watchdog, the only thread that writes this counter."""
        self.log_fields[LogFields.counters + (code & 0xFF) * CounterFields.FIELDS + CounterFields.stalls] += 1

    def counters(self) -> list[tuple[str, list[int]]]:
        """Return the counters of each collective that has been called (fields of memory_layout)."""
        fields, length = self.log_fields, CounterFields.FIELDS
        starts = range(LogFields.counters, LogFields.counters + length * len(CODES), length)
        return [
            (name, fields[at : at + length].tolist())
            for name, at in zip(CODES, starts, strict=True)
            if fields[at + CounterFields.calls] or fields[at + CounterFields.stalls]
        ]

    def compare(self) -> None:
        """Compare the call with the neighbors that had not arrived when it began."""
        call, publish, blocks = self.current, type(self).publish, self._blocks
        if self._fields is None or call is None:
            return
        seq, code, shape = call
        signature = code ^ hash(shape)
        if publish is None or blocks is None:
            found = self._compared(seq, signature)
        else:
            _, one, other = blocks
            found = publish(0, one, other, seq, signature, 0)
        if found:
            for slot in self._slots[seq & (RING_LENGTH - 1)][1]:
                if found & DIFFERENT and slot in self._missing:
                    self._refuse_entry(slot)
                found //= NEIGHBOR

    def abandon(self) -> None:
        """End the call with an error, so that waiting ranks abort the call.

        This rank may have done its part in the call, so its entry stays valid.
        """
        if self.current is not None:
            self.ring.fail(self._abort(has_done_its_part=True).seq)
        self.entered, self._missing, self.log_fields[LogFields.waited] = None, (), 0

    def _refuse_entry(self, slot: int) -> None:
        assert self._fields is not None and self.current is not None
        seq, code, shape = self.current
        time.sleep(0.001)  # processors may show the writes of another core out of order: read again before raising
        difference = self._fields[slot + Entry.signature] ^ code ^ hash(shape)
        if self._fields[slot + Entry.sequence] == seq and difference:
            if difference == ABORTED:
                self.raise_aborted(slot // BLOCK_FIELDS)
            self.refuse(slot // BLOCK_FIELDS)

    def refuse(self, other: int) -> None:
        """Raise because another rank made a different call with the number of the current one."""
        call = self._abort()
        if isinstance(call.shape, CallNumber):  # the comparison of the larger call names the calls of all ranks
            raise MismatchError(f"The step {call} belongs to different calls on ranks {self.rank} and {other}.")
        theirs = self._describe_call_of(other, call.seq)
        calls = {self.rank: str(call), other: theirs}
        fields = {} if self.log_board is None else {rank: self.log_board.get(rank, Block.exited) for rank in calls}
        left = {rank: how_it_left(field) for rank, field in fields.items() if field}
        message = mismatch_message(self.name, calls, left)
        if theirs == str(call):
            message = (
                f"The ranks of communicator {self.name} agree on {call}, but chose different transports, or an earlier "
                f"call failed on one of them: ranks {self.rank} and {other}. Pass the same backend= on all ranks, give "
                "them the same selector table, or call it either synchronously or asynchronously on all of them."
            )
        raise mismatch_error(message, calls)

    def _abort(self, *, has_done_its_part: bool = False) -> Call:
        assert self.current is not None
        call = Call(*self.current)
        self.last_aborted = call.seq
        if self.log_board is not None:
            if not has_done_its_part:
                self.spoil_entry()
            self.log_board.set(self.rank, Block.refused, call.seq)
        return call

    def spoil_entry(self, kernel: int = 0) -> None:
        """Invalidate this rank's entry of an aborted call, so that ranks that arrive later reject the entry.

        `kernel`: the number that kernels add to a signature; this rank's kernel may not have written its entry yet.
        """
        assert self._fields is not None and self.current is not None
        call = Call(*self.current)
        own, _ = self._slots[call.seq & (RING_LENGTH - 1)]
        if self._fields[own + Entry.sequence] != call.seq:
            self._fields[own + Entry.signature] = call.code ^ hash(call.shape) ^ kernel ^ ABORTED
            self._fields[own + Entry.sequence] = call.seq
        elif call.seq != self._spoiled:
            self._fields[own + Entry.signature] ^= ABORTED
        self._spoiled = call.seq

    def raise_aborted(self, other: int) -> None:
        """Raise because another rank has aborted the current call."""
        first = self._first_to_abort(other)
        call = self._abort()
        error = MismatchError(
            f"{call} on communicator {self.name} cannot end on rank {self.rank}: rank {first} has aborted it, after an "
            f"error there or because a third rank made a different call. The message of rank {first} has the reason."
        )
        error.reason_is_elsewhere = True
        raise error

    def _first_to_abort(self, other: int) -> int:
        """Return the rank that aborted the current call first, according to another rank, and publish it."""
        if self.log_board is None or self.current is None:
            return other
        seq = self.current[0]
        blamed = self.log_board.get(other, Block.blames)
        first = blamed & (1 << BLAMED_RANK_BITS) - 1 if blamed >> BLAMED_RANK_BITS == seq else other
        self.log_board.set(self.rank, Block.blames, seq << BLAMED_RANK_BITS | first)
        return first

    def expired(self) -> NoReturn:
        """Raise because the current call has taken longer than the timeout of the group."""
        report = self.report_when_late
        call = self._abort()
        raise StallError(
            report or f"rank {self.rank} of communicator {self.name} has waited longer than allowed in {call}."
        )

    def _describe_call_of(self, other: int, seq: int) -> str:
        """Describe the call of another rank, as reported by its watchdog: the board has only a signature."""
        if self.log_board is None:
            return f"something else, call #{seq}"
        question = BoardQuestion(self.log_board, self.rank, [other])
        answers = await_answers(question, _STATUS_SECONDS)
        marker = f"#{seq}: "
        for call in answers[other].recent if other in answers else ():
            if call.startswith(marker):
                return f"{call[len(marker) :]}, call #{seq}"
        return f"something else, call #{seq} (no reply from its watchdog: stopped, or busy outside Python)"

    def recent(self, most: int = 8) -> list[Call]:
        """Return the last calls, oldest first."""
        current, last = self.current, self.seq  # the watchdog reads while other threads make calls
        read = [self.ring.read(seq) for seq in range(max(last - most, 0) + 1, last + 1)]
        calls = [Call(*call[:2], CallNumber(call.shape) if call.is_number else call.shape) for call in read if call]
        if current is not None and calls and calls[-1].seq == current[0]:
            calls[-1] = Call(*current)  # also the dimensions for which an entry has no room
        return calls

    def recent_in_words(self) -> tuple[str, ...]:
        """Describe the last calls for other ranks, newest first."""
        return tuple(f"#{call.seq}: {describe(call.code, call.shape)}" for call in reversed(self.recent()))

    def close(self) -> None:
        """Publish the last calls for ranks that are still in a call that this rank has aborted."""
        if self.log_board is not None:
            status = RankStatus(line="has freed this communicator", recent=self.recent_in_words())
            self.log_board.write_status(self.rank, status)
            self.log_board.set(self.rank, Block.closed, 1)
        self._blocks = None


def is_stopping(board: StatusBoard, rank: int) -> bool:
    """Return whether a rank of this host has entered ``stop()``, according to the status board of the world."""
    entered = board.get(rank, Block.entered)
    at = entry(rank, entered & (RING_LENGTH - 1))
    return bool(
        entered > board.get(rank, Block.left)
        and board.fields[at + Entry.sequence] == entered
        and board.fields[at + Entry.signature] == call_code("stop") ^ hash(())
    )


def how_it_left(field: int) -> str:
    """Describe the end of the program of a rank, given the field EXITED of its status block.

    >>> how_it_left(EXIT_STATUS + 3), how_it_left(1)
    ('left by sys.exit(3)', 'reached the end of its program')
    """
    return f"left by sys.exit({field - EXIT_STATUS})" if field >= EXIT_STATUS else "reached the end of its program"
