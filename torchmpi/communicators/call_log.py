"""What every rank of a group is doing: the ledger of calls, and the board on which ranks of one host show it.

Each call on a group has a sequence number and a signature (verb, operation, dtype, root, shape). Ranks that call
different things under one number are told so (:class:`~torchmpi.errors.MismatchError`), and the watchdog reads from
the same place who has not arrived.

Within a host the ledger is one row of shared memory per rank, the *board*: writing to it and reading the neighbours'
rows costs a fraction of a microsecond and no message. Two neighbours suffice: if everybody equals the next one, all are
equal. Whoever of two neighbours arrives later finds the other's entry, so no disagreement passes unseen.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import MismatchError, StallError
from ..shared_memory.memory_layout import (
    BLAMED_RANK_BITS,
    BLAMES,
    BLOCK_FIELDS,
    CLOSED,
    ENTERED,
    LEFT,
    LOG_ACTIVE,
    LOG_CODE,
    LOG_DIMS,
    LOG_FIELDS,
    LOG_NUM_DIMS,
    LOG_SEQUENCE,
    REFUSED,
    RING_LENGTH,
    SEQUENCE,
    SIGNATURE,
    entry,
)  # fmt: skip
from ..tensors.dtypes import OPS, from_code, short_name
from .status_board import StatusBoard, request_status

COLLECTIVES = (
    "barrier", "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall",
    "stop", "split", "allreduce_many", "server_init", "server_free",
    "server_save", "server_load",
)  # fmt: skip
_NO_OP = len(OPS)

_CATCH_UP_SECONDS = 0.0001
_ASK_SECONDS = 3.0
NATIVE = 1 << 61
"""Set in the signature of calls that kernels run, so that ranks which chose different transports notice."""
ON_DEVICE = 1 << 31
"""Set in the code of calls on tensors of a device: they are cut elsewhere, and may take other transports."""
ABORTED = 1 << 60
"""Turned in the signature of a call that a rank has given up, so that nobody who comes later takes it for valid."""


def call_code(collective: str, op: str | None = None, dtype_code: int = 0) -> int:
    """The part of a signature that does not change between calls, as one number (the root is added above bit 32).

    >>> call_code("barrier") != call_code("allreduce", "sum", 1)
    True
    """
    return COLLECTIVES.index(collective) | (OPS.index(op) if op else _NO_OP) << 8 | dtype_code << 16


def as_many(code: int) -> int:
    """The code of an allreduce as that of the packed one.

    >>> describe(as_many(call_code("allreduce", "sum", 1)), (5, 2, 77))
    'allreduce_many(2 tensors of 5 float32 in all, shapes #77, sum)'
    """
    return code & ~0xFF | COLLECTIVES.index("allreduce_many")


class Call(NamedTuple):
    """One entry of the ledger."""

    seq: int
    code: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{describe(self.code, self.shape)}, call #{self.seq}"


def describe(code: int, shape: Sequence[int] | None = None) -> str:
    """A signature in words.

    >>> describe(call_code("broadcast", None, 1) | 2 << 32, (3, 4))
    'broadcast(float32 [3, 4], root=2)'
    """
    collective = COLLECTIVES[code & 0xFF]
    op, dtype, root = (code >> 8) & 0xFF, from_code((code >> 16) & 0x7FFF), code >> 32
    parts = []
    if collective == "allreduce_many" and shape is not None and dtype is not None:
        numel, num_tensors, checksum = shape
        parts.append(f"{num_tensors} tensors of {numel} {short_name(dtype)} in all, shapes #{checksum}")
    elif dtype is not None:
        parts.append(short_name(dtype) + (f" {list(shape)}" if shape is not None else ""))
    if op != _NO_OP:
        parts.append(OPS[op])
    if code & ON_DEVICE:
        parts.append("on cuda")
    if collective in ("broadcast", "reduce", "gather", "scatter"):
        parts.append(f"root={root}")
    return f"{collective}({', '.join(parts)})"


class CallLog:
    """The calls of this rank on one group, in order.

    >>> ledger = Ledger("example", rank=0, size=1)
    >>> ledger.enter(call_code("barrier"), ())
    >>> ledger.leave()
    >>> ledger.seq
    1
    """

    __slots__ = (
        "_fields",
        "_missing",
        "_neighbours",
        "_slots",
        "_spoiled",
        "entered",
        "free",
        "history",
        "log_board",
        "log_fields",
        "name",
        "rank",
        "report_when_late",
        "size",
    )  # fmt: skip

    def __init__(self, name: str, rank: int, size: int, log_board: StatusBoard | None = None) -> None:
        self.name, self.rank, self.size, self.log_board = name, rank, size, log_board
        self.log_fields = array("q", bytes(8 * LOG_FIELDS))
        """The number of the last call, and what machine code writes down of a call that it enters."""
        self.entered: tuple[int, int, tuple[int, ...]] | None = None
        self.history: list[tuple[int, int, tuple[int, ...]] | None] = [None] * RING_LENGTH
        self.free = RING_LENGTH if log_board is not None else sys.maxsize
        """Calls up to this number may be entered without covering one that another rank has not compared."""
        self._fields = log_board.fields if log_board is not None else None
        self._neighbours = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
        self._slots = [(entry(rank, i), tuple(entry(row, i) for row in self._neighbours)) for i in range(RING_LENGTH)]
        """Where each entry of the ring is: this rank's own, and those of the neighbours."""
        self._missing: tuple[int, ...] = ()
        """Entries of neighbours that had not arrived when this rank announced its call."""
        self._spoiled = 0
        """The last call that this rank gave up."""
        self.report_when_late = ""
        """What to say if the current call is ended for taking too long; left by the watchdog."""

    @property
    def seq(self) -> int:
        """The number of the last call that was entered."""
        return self.log_fields[LOG_SEQUENCE]

    @property
    def current(self) -> tuple[int, int, tuple[int, ...]] | None:
        """What this rank is in the middle of: sequence number, code, shape."""
        return self.entered or self._fast_path_call()

    def _fast_path_call(self) -> tuple[int, int, tuple[int, ...]] | None:
        """The call that was entered the shortest way, perhaps by another thread, which may write meanwhile."""
        log_fields = self.log_fields
        while seq := log_fields[LOG_ACTIVE]:
            first, code = LOG_DIMS, log_fields[LOG_CODE]
            shape = tuple(log_fields[first : first + log_fields[LOG_NUM_DIMS]])
            if log_fields[LOG_ACTIVE] == seq:
                return seq, code, shape
        return None

    def take_over(self) -> None:
        """Go on in Python with the call that was entered the shortest way."""
        self.entered = self._fast_path_call()
        self.log_fields[LOG_ACTIVE] = 0

    def enter(self, code: int, shape: tuple[int, ...]) -> None:
        """Note that this rank has arrived at its next call, which still has to be announced to the others."""
        seq = self.log_fields[0] = self.log_fields[0] + 1
        if seq > self.free:
            self.wait_for_room(seq, code, shape)
        self.history[seq & (RING_LENGTH - 1)] = self.entered = (seq, code, shape)

    def announce(self) -> None:
        """Show the others what was entered, and look at the neighbours. Kernels do that by themselves."""
        # On the path of every call: no helper functions here, and each look at the board is 40 ns.
        fields = self._fields
        if fields is None or self.entered is None:
            return
        seq, code, shape = self.entered
        own, others = self._slots[seq & (RING_LENGTH - 1)]
        signature = code ^ hash(shape)
        fields[own + SIGNATURE] = signature
        fields[own + SEQUENCE] = seq  # last: until then the slot still bears the number of a call long past
        fields[self.rank * BLOCK_FIELDS + ENTERED] = seq
        for slot in others:
            if fields[slot + SEQUENCE] != seq:
                self._missing += (slot,)
            elif fields[slot + SIGNATURE] != signature:
                self._refuse_entry(slot)

    def wait_for_room(self, seq: int, code: int, shape: tuple[int, ...]) -> None:
        """Let ranks that are a whole ring behind catch up: a root waits for nobody, and may run far ahead."""
        assert self.log_board is not None
        self.entered = (seq, code, shape)  # for the watchdog
        others = [row for row in range(self.size) if row != self.rank]
        while seq > self.free:
            # One less than the ring: a rank that has entered a call may still be about to compare it.
            self.free = min((self.log_board.get(row, ENTERED) for row in others), default=seq) + RING_LENGTH - 1
            if seq > self.free:
                time.sleep(_CATCH_UP_SECONDS)

    def leave(self) -> None:
        """Note that the call has ended, and look at the neighbours that were not there when it began."""
        if self._missing:
            self.compare()
            self._missing = ()
        if self._fields is not None:
            self._fields[self.rank * BLOCK_FIELDS + LEFT] = self.log_fields[0]
        self.entered = None

    def compare(self) -> None:
        """Look once more at those that were not there when the call began."""
        fields, call = self._fields, self.current
        if fields is None or call is None:
            return
        seq, code, shape = call
        for slot in self._missing:
            if fields[slot + SEQUENCE] == seq and fields[slot + SIGNATURE] != code ^ hash(shape):
                self._refuse_entry(slot)

    def abandon(self) -> None:
        """Note that the call has ended with an error here: whoever is still in it would wait in vain.

        This rank may have done its part in it before, so what it has said of it stays.
        """
        if self.current is not None:
            self._abort(has_done_its_part=True)
        self.entered, self._missing = None, ()

    def _refuse_entry(self, slot: int) -> None:
        assert self._fields is not None and self.current is not None
        seq, code, shape = self.current
        time.sleep(0.001)  # processors may show another core's writes out of order: look again before accusing
        difference = self._fields[slot + SIGNATURE] ^ code ^ hash(shape)
        if self._fields[slot + SEQUENCE] == seq and difference:
            if difference == ABORTED:
                self.raise_aborted(slot // BLOCK_FIELDS)
            self.refuse(slot // BLOCK_FIELDS)

    def refuse(self, other: int) -> None:
        """Raise because another rank called something else under the number of the current call."""
        call = self._abort()
        theirs = self._ask_call(other, call.seq)
        message = mismatch_message(self.name, {self.rank: str(call), other: theirs})
        if theirs == str(call):
            message = (
                f"The ranks of communicator {self.name} agree on {call}, but chose different transports, or an earlier "
                f"call failed on one of them: ranks {self.rank} and {other}. Pass the same backend= on all ranks, give "
                "them the same selector table, or call it either synchronously or asynchronously on all of them."
            )
        raise MismatchError(message)

    def _abort(self, *, has_done_its_part: bool = False) -> Call:
        assert self.current is not None
        call = Call(*self.current)
        self.history[call.seq & (RING_LENGTH - 1)] = self.current  # the shortest way into the kernels does not
        if self.log_board is not None:
            if not has_done_its_part:
                self.spoil_entry()
            self.log_board.set(self.rank, REFUSED, call.seq)
        return call

    def spoil_entry(self, kernel: int = 0) -> None:
        """What a rank has said of a call that it gives up must not pass for its part in it with latecomers.

        `kernel`: what kernels add to a signature; this rank's may not have come so far.
        """
        assert self._fields is not None and self.current is not None
        call = Call(*self.current)
        own, _ = self._slots[call.seq & (RING_LENGTH - 1)]
        if self._fields[own + SEQUENCE] != call.seq:
            self._fields[own + SIGNATURE] = call.code ^ hash(call.shape) ^ kernel ^ ABORTED
            self._fields[own + SEQUENCE] = call.seq
        elif call.seq != self._spoiled:
            self._fields[own + SIGNATURE] ^= ABORTED
        self._spoiled = call.seq

    def raise_aborted(self, other: int) -> None:
        """Raise because another rank will not finish the current call."""
        first = self._first_to_abort(other)
        call = self._abort()
        error = MismatchError(
            f"{call} on communicator {self.name} cannot end on rank {self.rank}: rank {first} has given it up, after "
            "an error there or because a third rank called something else. Its own message says what was wrong."
        )
        error.reason_is_elsewhere = True
        raise error

    def _first_to_abort(self, other: int) -> int:
        """Whom another rank blames for giving up the current call, or that rank; known to those who look here."""
        if self.log_board is None or self.current is None:
            return other
        seq = self.current[0]
        blamed = self.log_board.get(other, BLAMES)
        first = blamed & (1 << BLAMED_RANK_BITS) - 1 if blamed >> BLAMED_RANK_BITS == seq else other
        self.log_board.set(self.rank, BLAMES, seq << BLAMED_RANK_BITS | first)
        return first

    def expired(self) -> None:
        """Raise because the current call has taken longer than the group allows."""
        report = self.report_when_late
        call = self._abort()
        raise StallError(
            report or f"rank {self.rank} of communicator {self.name} has waited longer than allowed in {call}."
        )

    def _ask_call(self, other: int, seq: int) -> str:
        """The other rank's call in words, from its watchdog: the board has only a signature."""
        if self.log_board is None:
            return f"something else, call #{seq}"
        answer = request_status(self.log_board, self.rank, other, patience_seconds=_ASK_SECONDS)
        marker = f"#{seq}: "
        for line in answer.splitlines():
            if line.startswith(marker):
                return f"{line[len(marker) :]}, call #{seq}"
        return f"something else, call #{seq} (it does not say what: stopped, or busy outside Python)"

    def recent(self, most: int = 8) -> list[Call]:
        """The last calls, oldest first."""
        current = self.current  # which the watchdog's thread may find gone at any moment
        known = sorted({entry for entry in (*self.history, current) if entry is not None})
        return [Call(*entry) for entry in known[-most:]]

    def recent_in_words(self) -> list[str]:
        """The last calls as this rank tells others of them, the newest first."""
        return [f"#{call.seq}: {describe(call.code, call.shape)}" for call in reversed(self.recent())]

    def close(self) -> None:
        """Leave word for ranks that are still in a call which this one has refused, and ask when it has gone."""
        if self.log_board is not None:
            self.log_board.write_text(self.rank, "\n".join(["has given this group up", *self.recent_in_words()]))
            self.log_board.set(self.rank, CLOSED, 1)


def is_stopping(world: Any, rank: int) -> bool:
    """Whether a rank of this host has come to ``stop()``, as the board of the world shows."""
    entered = world.log_board.get(rank, ENTERED)
    at = entry(rank, entered & (RING_LENGTH - 1))
    return bool(
        entered > world.log_board.get(rank, LEFT)
        and world.log_board.fields[at + SEQUENCE] == entered
        and world.log_board.fields[at + SIGNATURE] == call_code("stop") ^ hash(())
    )


def mismatch_message(name: str, calls: dict[int, str]) -> str:
    """What to tell ranks that called different things.

    >>> mismatch_message("world", {0: "barrier()", 1: "allreduce(float32 [2], sum)"})[:45]
    'The ranks of communicator world called differ'
    """
    listing = "; ".join(f"rank {rank} called {call}" for rank, call in sorted(calls.items()))
    return (
        f"The ranks of communicator {name} called different things: {listing}. All ranks must make the same calls "
        "in the "
        "same order, with the same shape, dtype, operation and root: look for a call under `if rank == ...`, or for a "
        "rank that ran out of data (torchmpi.nn.join)."
    )
