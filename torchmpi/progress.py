"""What every rank of a group is doing: the ledger of calls, and the board on which ranks of one host show it.

Each call on a group has a sequence number and a signature (verb, operation, dtype, root, shape). Ranks that call
different things under one number are told so (:class:`~torchmpi.errors.MismatchError`), and the watchdog reads from
the same place who has not arrived.

Within a host the ledger is one shared page per rank, the *board*: writing to it and reading the two neighbours' rows
costs a fraction of a microsecond and no message. Neighbours suffice: if everybody equals the next one, all are equal.
Whoever of two neighbours arrives later finds the other's entry, so no disagreement passes unseen.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .dtypes import OPS, from_code, short_name
from .errors import MismatchError

VERBS = (
    "barrier", "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall",
    "stop", "split", "allreduce_many",
)  # fmt: skip
_NO_OP = len(OPS)

# A row of the board, in 64-bit words.
ENTERED, LEFT, REFUSED, ASKED, ANSWERED, DYING = range(6)
_RING_START = 8
_RING_LENGTH = 64  # calls remembered; a power of two
_ENTRY_WORDS = 2  # sequence number, signature
_CATCH_UP_SECONDS = 0.0001
_ASK_SECONDS = 3.0
_TEXT_START = (_RING_START + _RING_LENGTH * _ENTRY_WORDS) * 8
ROW_BYTES = 4096
_ROW_WORDS = ROW_BYTES // 8


def _slot(row: int, index: int) -> int:
    return row * _ROW_WORDS + _RING_START + index * _ENTRY_WORDS


def call_code(verb: str, op: str | None = None, dtype_code: int = 0) -> int:
    """The part of a signature that does not change between calls, as one number (the root is added above bit 32).

    >>> call_code("barrier") != call_code("allreduce", "sum", 1)
    True
    """
    return VERBS.index(verb) | (OPS.index(op) if op else _NO_OP) << 8 | dtype_code << 16


def as_many(code: int) -> int:
    """The code of an allreduce as that of the packed one.

    >>> describe(as_many(call_code("allreduce", "sum", 1)), (5, 2, 77))
    'allreduce_many(2 tensors of 5 float32 in all, shapes #77, sum)'
    """
    return code & ~0xFF | VERBS.index("allreduce_many")


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
    verb = VERBS[code & 0xFF]
    op, dtype, root = (code >> 8) & 0xFF, from_code((code >> 16) & 0xFFFF), code >> 32
    parts = []
    if verb == "allreduce_many" and shape is not None and dtype is not None:
        numel, num_tensors, checksum = shape
        parts.append(f"{num_tensors} tensors of {numel} {short_name(dtype)} in all, shapes #{checksum}")
    elif dtype is not None:
        parts.append(short_name(dtype) + (f" {list(shape)}" if shape is not None else ""))
    if op != _NO_OP:
        parts.append(OPS[op])
    if verb in ("broadcast", "reduce", "gather", "scatter"):
        parts.append(f"root={root}")
    return f"{verb}({', '.join(parts)})"


class Board:
    """One page per rank of a group, shared by the ranks of one host and gone from the file system once all have it."""

    def __init__(self, path: str, num_rows: int) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), num_rows * ROW_BYTES)
        self.words = memoryview(self._map).cast("q")
        self.num_rows = num_rows

    @staticmethod
    def create_file(num_rows: int) -> str:
        """Make the file that all ranks then open; readable by this user alone."""
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, path = tempfile.mkstemp(prefix="torchmpi-board-", dir=folder)  # mode 0600
        try:
            os.posix_fallocate(
                descriptor, 0, num_rows * ROW_BYTES
            )  # a full /dev/shm is an error now, not a SIGBUS later
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        return path

    def get(self, row: int, word: int) -> int:
        """One word of the head of a row."""
        return self.words[row * _ROW_WORDS + word]

    def set(self, row: int, word: int, value: int) -> None:
        """Write one word of the head of a row; only its owner does."""
        self.words[row * _ROW_WORDS + word] = value

    def write_text(self, row: int, text: str) -> None:
        """Leave a message for the others."""
        data = text.encode(errors="replace")[: ROW_BYTES - _TEXT_START - 1]
        start = row * ROW_BYTES + _TEXT_START
        self._map[start : start + len(data) + 1] = data + b"\0"

    def read_text(self, row: int) -> str:
        """The message of another rank."""
        start = row * ROW_BYTES + _TEXT_START
        return self._map[start : (row + 1) * ROW_BYTES].split(b"\0", 1)[0].decode(errors="replace")

    def close(self) -> None:
        """Unmap."""
        self.words.release()
        self._map.close()


class Ledger:
    """The calls of this rank on one group, in order.

    >>> ledger = Ledger("example", rank=0, size=1)
    >>> ledger.leave(ledger.enter(call_code("barrier"), ()))
    >>> ledger.seq
    1
    """

    __slots__ = (
        "_base",
        "_free",
        "_neighbours",
        "_slots",
        "_words",
        "board",
        "current",
        "history",
        "name",
        "rank",
        "seq",
        "size",
    )

    def __init__(self, name: str, rank: int, size: int, board: Board | None = None) -> None:
        self.name, self.rank, self.size, self.board = name, rank, size, board
        self.seq = 0
        self.current: tuple[int, int, tuple[int, ...]] | None = None
        """What this rank is in the middle of: sequence number, code, shape."""
        self.history: list[tuple[int, int, tuple[int, ...]] | None] = [None] * _RING_LENGTH
        self._words = board.words if board is not None else None
        self._base = rank * _ROW_WORDS
        self._free = _RING_LENGTH if board is not None else sys.maxsize
        """Calls up to this number may be entered without covering one that a neighbour has not compared."""
        self._neighbours = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
        self._slots = [(_slot(rank, i), tuple(_slot(row, i) for row in self._neighbours)) for i in range(_RING_LENGTH)]
        """Where each entry of the ring is: this rank's own, and those of the neighbours."""

    def enter(self, code: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Note that this rank has arrived at its next call; gives the entries of neighbours that have not yet."""
        # On the path of every call: no helper functions here, and each look at the board is 40 ns.
        seq = self.seq = self.seq + 1
        if seq > self._free:
            self._wait_for_room(seq, code, shape)
        index = seq & (_RING_LENGTH - 1)
        self.history[index] = self.current = (seq, code, shape)
        words = self._words
        if words is None:
            return ()
        own, others = self._slots[index]
        signature = code ^ hash(shape)
        words[own + 1] = signature
        words[own] = seq  # last: until then the slot still bears the number of a call long past
        words[self._base] = seq  # ENTERED
        missing: tuple[int, ...] = ()
        for slot in others:
            if words[slot] != seq:
                missing += (slot,)
            elif words[slot + 1] != signature:
                self._refuse(slot, seq, code, shape)
        return missing

    def _wait_for_room(self, seq: int, code: int, shape: tuple[int, ...]) -> None:
        """Let neighbours that are a whole ring behind catch up: a root waits for nobody, and may run far ahead."""
        assert self.board is not None
        self.current = (seq, code, shape)  # for the watchdog
        while seq > self._free:
            # One less than the ring: a neighbour that has entered a call may still be about to compare it.
            self._free = min((self.board.get(row, ENTERED) for row in self._neighbours), default=seq) + _RING_LENGTH - 1
            if seq > self._free:
                time.sleep(_CATCH_UP_SECONDS)

    def leave(self, missing: tuple[int, ...] = ()) -> None:
        """Note that the call has ended, and look at the neighbours that were not there when it began."""
        call, self.current = self.current, None
        words = self._words
        if words is not None:
            words[self._base + LEFT] = self.seq
            if missing and call is not None:
                self._compare(missing, *call)

    def compare(self, missing: tuple[int, ...]) -> None:
        """Look once more at those that were not there when the call began, which has failed."""
        if self.current is not None and self._words is not None:
            self._compare(missing, *self.current)

    def _compare(self, missing: tuple[int, ...], seq: int, code: int, shape: tuple[int, ...]) -> None:
        words = self._words
        assert words is not None
        for slot in missing:
            if words[slot] == seq and words[slot + 1] != code ^ hash(shape):
                self._refuse(slot, seq, code, shape)

    def abandon(self) -> None:
        """Note that the call has ended with an error here: whoever is still in it would wait in vain."""
        if self.current is not None and self.board is not None:
            self.board.set(self.rank, REFUSED, self.current[0])
        self.current = None

    def _refuse(self, slot: int, seq: int, code: int, shape: tuple[int, ...]) -> None:
        assert self._words is not None and self.board is not None
        time.sleep(0.001)  # processors may show another core's writes out of order: look again before accusing
        if self._words[slot] != seq or self._words[slot + 1] == code ^ hash(shape):
            return
        self.current = (seq, code, shape)  # still in it, for those who watch
        self.board.set(self.rank, REFUSED, seq)
        other = slot // _ROW_WORDS
        theirs = self._ask_call(other, seq)
        raise MismatchError(mismatch_message(self.name, {self.rank: str(Call(seq, code, shape)), other: theirs}))

    def _ask_call(self, other: int, seq: int) -> str:
        """The other rank's call in words, from its watchdog: the board has only a signature."""
        assert self.board is not None
        answer = ask(self.board, self.rank, other, patience_seconds=_ASK_SECONDS)
        marker = f"#{seq}: "
        for line in answer.splitlines():
            if line.startswith(marker):
                return f"{line[len(marker) :]}, call #{seq}"
        return f"something else, call #{seq} (it does not say what: stopped, or busy outside Python)"

    def recent(self, most: int = 8) -> list[Call]:
        """The last calls, oldest first."""
        known = sorted(entry for entry in self.history if entry is not None)
        return [Call(*entry) for entry in known[-most:]]


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


def ask(
    board: Board, rank: int, other: int, *, patience_seconds: float, meanwhile: Callable[[], object] = lambda: None
) -> str:
    """Have the watchdog of another rank on this host write down what that rank is doing; '' if it does not answer.

    A watchdog that asks passes as `meanwhile` how it answers: the other may be asking it at this very moment.
    """
    ticket = board.get(rank, ASKED) + 1
    before = board.get(other, ANSWERED)
    board.set(rank, ASKED, ticket)
    limit = time.monotonic() + patience_seconds
    while board.get(other, ANSWERED) == before:
        if time.monotonic() > limit:
            return ""
        meanwhile()
        time.sleep(0.02)
    return board.read_text(other)
