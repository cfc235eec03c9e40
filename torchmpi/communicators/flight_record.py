"""The flight record of a rank: its last calls, in memory that other processes can read, and that survives the process.

A record is a file: in a folder that the user names, or an anonymous one in memory, which ``torchmpi dump`` reads while
the process exists, also if it is stopped. Each group has a *ring* of entries, one per call, written by Python and by
the machine code of the fast path. The fields are 64-bit numbers:

============ ======================================================================================================
head         MAGIC, NUM_RINGS, two readings of the processor's ticks and of the monotonic clock, the wall clock, ENDED,
             REQUEST, the group and the number of the call in which the rank is blocked (`RankStatus.blocked`); from
             TEXT_BYTES a JSON object: rank, size, host, process, program; on the second page another one: the request
             of ``torchmpi dump`` with the number in REQUEST; until when ``torchmpi top`` looks, in LOOK, and on the
             third page what the rank tells it; then the last steps (:mod:`.progress`); in the second half, on rank 0,
             what the ranks of a job with other hosts tell ``torchmpi top``
each ring    one page with STATE, KEY, KIND and a JSON object: name and ranks of the group; then RECORD_LENGTH entries,
             of calls, of channels (:mod:`.message_record`), or of the sends or receives to a parameter server, whose
             entries are like those of channels
============ ======================================================================================================

The fields of an entry are those of :class:`torchmpi.shared_memory.memory_layout.RecordFields`.
docs/design/flight-record.md has the reasons.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from .. import files
from ..errors import TorchMPIError
from ..log import logger
from ..shared_memory.memory_layout import FIELD_BYTES, MAX_LOG_DIMS, RECORD_IS_NUMBER, RECORD_LENGTH, RecordFields
from . import progress
from .message_record import LoggedMessages, messages_in

if TYPE_CHECKING:
    import numpy.typing as npt

FILE_NAME = "torchmpi-flight-record"
SUFFIX = ".flight"
MAGIC = int.from_bytes(b"tmpiFR02", "little")
_MAGIC, _NUM_RINGS, FIRST_TICKS, FIRST_NS, LAST_TICKS, LAST_NS, _WALL_NS, _ENDED, _REQUEST, _GROUP, _CALL = range(11)
_LOOK = 11
_STATE, _KEY, _KIND = range(3)
_IN_USE, _FREED = 1, 2
OF_CALLS, OF_MESSAGES, OF_REQUESTS = range(3)
"""Kinds of rings."""
_TEXT_BYTES = 128
_PAGE_BYTES = 4096
_ENTRY_BYTES = RecordFields.FIELDS * FIELD_BYTES
_RING_BYTES = _PAGE_BYTES + RECORD_LENGTH * _ENTRY_BYTES
_HEAD_BYTES = 1 << 16  # the largest size of a page, at whose multiples mappings begin
_ANSWER_START, _PROGRESS_START, _ALL_START = 2 * _PAGE_BYTES, 3 * _PAGE_BYTES, _HEAD_BYTES // 2
_MOST_LOOK_NS = 60_000_000_000
"""For how long one request has the rank tell where it is: a reader that has been killed costs nothing after it."""
_RINGS_PER_BLOCK = 16  # mapped together, since each mapping of Python holds a descriptor; a multiple of 64 KB
_MOST_RANKS = 1 << 20
"""Of a job, and of all groups in a file, where each set of ranks counts once."""
MOST_BYTES = 256 << 20
"""The largest record that is read: that of about 2,000 groups that exist at the same time."""
_CUT = ("program", "name", "ranks")  # in a text that is too long; the other values are short
_NEAR_NS, _MOST_READINGS = 2000, 8
"""Two readings of the clock that are as near are of one moment, and how many are made until two are."""
_HAS_FAILED = 1 << 33
"""Added to `num_dims` of a call that has ended with an error."""
STARTS = tuple(_PAGE_BYTES + index * _ENTRY_BYTES for index in range(RECORD_LENGTH))
"""The position of each entry in a ring, in bytes."""
_ENDS = tuple(start // FIELD_BYTES + RecordFields.end for start in STARTS)
"""The position of the field `end` of each entry, in fields."""
WRITERS = tuple(struct.Struct(f"<{RecordFields.dims + num_dims}q").pack_into for num_dims in range(MAX_LOG_DIMS + 1))
"""Functions that write an entry, by the number of dimensions."""


class Ring:
    """The entries of one group.

    >>> ring = Ring.private()
    >>> ring.enter(1, 7, (3, 4))
    >>> ring.leave(1) > 0
    True
    >>> [(call.seq, call.code, call.shape, call.end >= call.begin > 0) for call in ring.calls()]
    [(1, 7, (3, 4), True)]
    """

    def __init__(self, memory: memoryview) -> None:
        self.memory, self.fields = memory, memory.cast("q")
        self.address = int(np.frombuffer(memory, np.uint8, 1).ctypes.data) + _PAGE_BYTES
        """The address of the first entry."""
        self._last = RECORD_LENGTH

    @classmethod
    def private(cls) -> Ring:
        """Return a ring in the memory of this process."""
        return cls(memoryview(mmap.mmap(-1, _RING_BYTES)))

    def describe(self, key: int, name: str, ranks: Sequence[int], kind: int) -> None:
        """Write the group to which the ring belongs."""
        _write_text(self.memory[:_PAGE_BYTES], {"name": name, "ranks": as_ranges(ranks)})
        self.fields[_KEY], self.fields[_KIND], self.fields[_STATE] = key, kind, _IN_USE

    def enter(self, seq: int, code: int, shape: tuple[int, ...], *, is_number: bool = False) -> None:
        """Write the entry of a call that begins now. `CallLog.enter` does the same for most calls."""
        num_dims = min(len(shape), MAX_LOG_DIMS)
        about = num_dims | RECORD_IS_NUMBER if is_number else num_dims
        begin = -time.monotonic_ns()
        WRITERS[num_dims](self.memory, STARTS[seq & (RECORD_LENGTH - 1)], seq, code, about, begin, 0, *shape[:num_dims])

    def leave(self, seq: int) -> int:
        """Write that a call has ended; return the time, in nanoseconds."""
        end = time.monotonic_ns()
        self.fields[_ENDS[seq & (RECORD_LENGTH - 1)]] = -end
        return end

    def fail(self, seq: int) -> None:
        """Write that a call has ended with an error."""
        start = STARTS[seq & (RECORD_LENGTH - 1)] // FIELD_BYTES
        if self.fields[start + RecordFields.sequence] == seq:  # a call that found no room has no entry
            self.fields[start + RecordFields.num_dims] |= _HAS_FAILED
            self.leave(seq)

    def read(self, seq: int) -> LoggedCall | None:
        """Return the entry of a call; None if it has been overwritten."""
        start = _PAGE_BYTES // FIELD_BYTES + (seq & (RECORD_LENGTH - 1)) * RecordFields.FIELDS
        call = _as_call(self.fields[start : start + RecordFields.FIELDS].tolist(), abs)
        return call if call is not None and call.seq == seq else None

    def begun(self, seq: int) -> tuple[int, tuple[int, ...], bool, int]:
        """Return code, shape, whether that is a number, and begin of the call that this thread has entered."""
        start, fields = _PAGE_BYTES // FIELD_BYTES + (seq & (RECORD_LENGTH - 1)) * RecordFields.FIELDS, self.fields
        flags, dims = fields[start + RecordFields.num_dims], start + RecordFields.dims
        shape = tuple(fields[dims : dims + (flags & (RECORD_IS_NUMBER - 1))])
        begin: int = fields[start + RecordFields.begin]
        return fields[start + RecordFields.code], shape, bool(flags & RECORD_IS_NUMBER), begin

    def calls(self) -> list[LoggedCall]:
        """Return all entries, oldest first; times are in nanoseconds only if Python wrote them."""
        return _calls_in(self.fields.tolist(), abs)

    def free(self, last: int) -> None:
        """Mark the ring as that of a freed group, with the number of its last call."""
        self.fields[_STATE], self._last = _FREED, last

    def clear(self) -> None:
        """Remove all entries."""
        end = STARTS[self._last + 1] if self._last + 1 < RECORD_LENGTH else _RING_BYTES
        self.memory[:end] = bytes(end)

    def release(self) -> None:
        """Give up the memory; no call may follow."""
        self.fields.release()
        self.memory.release()


class LoggedCall(NamedTuple):
    """A call in a flight record."""

    seq: int
    code: int
    shape: tuple[int, ...]
    is_number: bool
    begin: float
    """Nanoseconds of the monotonic clock."""
    end: float
    """0 while the call has not ended."""
    has_failed: bool = False
    """Whether the call has ended with an error."""


class GroupCalls(NamedTuple):
    """The last calls of a rank on one group."""

    key: int
    name: str
    ranks: tuple[int, ...]
    is_freed: bool
    calls: list[LoggedCall]


class RankCalls(NamedTuple):
    """The flight record of a rank, as read from a file."""

    rank: int
    about: dict[str, Any]
    """Rank, size, host, process and program."""
    has_ended: bool
    """Whether the rank has reached the end of stop()."""
    wall_ns: int
    """What to add to times of the monotonic clock to get the time since 1970."""
    groups: list[GroupCalls]
    last_ns: int = 0
    """The monotonic clock at the last reading, of which a process makes one a second."""
    messages: Sequence[LoggedMessages] = ()
    blocked: tuple[int, int] = (0, 0)
    """The group and the number of the last call in which the main thread has waited for seconds, see `RankStatus`. That
    call may have ended."""
    requests: Sequence[LoggedMessages] = ()
    """Those to parameter servers: the tag is the number of a server."""


class FlightRecord:
    """The flight record of this process.

    Args:
        folder: The folder for the file; '' for an anonymous file in memory.
        about: Rank, size, host, process and program.

    Raises:
        TorchMPIError: The file cannot be written.
    """

    def __init__(self, folder: str, about: dict[str, Any]) -> None:
        self._rank = about["rank"]
        self.path = Path(folder) / f"rank{self._rank}{SUFFIX}" if folder else None
        self._file = self._open()
        self._maps: list[mmap.mmap] = []
        self._rings: list[Ring] = []
        self._unused: list[Ring] = []
        self._freed: list[Ring] = []
        self._lock = threading.Lock()
        """Of rings and file: any thread may make a ring with the first message, or save a copy."""
        self.read_ticks: Callable[[], int] | None = None
        """Reads the ticks with which the fast path measures time."""
        self._head = memoryview(bytearray(_HEAD_BYTES)) if self._file is None else self._map_head()
        _write_text(self._head[:_PAGE_BYTES], about)
        self._fields = self._head.cast("q")
        self._fields[FIRST_NS] = self._fields[LAST_NS] = now = time.monotonic_ns()
        self._fields[_WALL_NS] = time.time_ns() - now
        self._fields[_MAGIC] = MAGIC
        self._request = 0
        progress.progress.attach(self._head[_PROGRESS_START : _PROGRESS_START + progress.NUM_BYTES])

    def _open(self) -> int | None:
        """Open the file; None if there is no memory for an anonymous one."""
        if self.path is None:
            try:
                file = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
                os.ftruncate(file, _HEAD_BYTES)
            except (AttributeError, OSError):  # an old system, a sandbox, or a limit on the size of files
                return None
            return file
        try:
            files.make_folder(self.path.parent)
            with contextlib.suppress(FileNotFoundError):
                self.path.rename(self.path.with_suffix(f"{SUFFIX}.previous"))  # of the job that this one repeats
            return files.create(self.path, mode=0o600)
        except OSError as error:
            raise TorchMPIError(self._problem(error)) from error

    def _problem(self, error: OSError) -> str:
        return (
            f"The flight record cannot be written to {self.path}: {error.strerror}. Name a folder that exists on all "
            "hosts, that this user may write to, and that has room for 3 MB per rank, or unset TORCHMPI_FLIGHT_RECORD."
        )

    def _map_head(self) -> memoryview:
        """Map the first page, and raise if the disk is full."""
        try:
            return self._map(0, _HEAD_BYTES)
        except OSError as error:
            assert self._file is not None
            os.close(self._file)
            if self.path is not None:
                self.path.unlink()
            raise TorchMPIError(self._problem(error)) from error

    def _map(self, start: int, num_bytes: int) -> memoryview:
        assert self._file is not None
        if self.path is not None:
            os.posix_fallocate(self._file, start, num_bytes)  # a full disk is an error here, and not a SIGBUS later
        else:
            os.ftruncate(self._file, start + num_bytes)
        self._maps.append(mmap.mmap(self._file, num_bytes, offset=start))
        return memoryview(self._maps[-1])

    def ring(self, key: int, name: str, ranks: Sequence[int], kind: int = OF_CALLS) -> Ring:
        """Return a ring for a group; one in the memory of this process if there is no room in the file.

        The rings of freed groups are kept as long as there are unused ones.
        """
        with self._lock:
            if self._file is None:
                return Ring.private()
            if not self._unused and self._freed:
                ring = self._freed.pop(0)
                ring.clear()
            else:
                try:
                    ring = self._next()
                except OSError as error:
                    if self.path is not None:
                        logger.warning(f"the calls on communicator {name} are not in {self.path}: {error.strerror}")
                    return Ring.private()
            ring.describe(key, name, ranks, kind)
            return ring

    def _next(self) -> Ring:
        if not self._unused:
            begin = _HEAD_BYTES + len(self._rings) * _RING_BYTES
            block = self._map(begin, _RINGS_PER_BLOCK * _RING_BYTES)
            starts = range(0, len(block), _RING_BYTES)
            self._unused = [Ring(block[start : start + _RING_BYTES]) for start in starts]
            block.release()
        ring = self._unused.pop(0)
        self._rings.append(ring)
        self._fields[_NUM_RINGS] = len(self._rings)
        return ring

    def free(self, ring: Ring, last: int = RECORD_LENGTH) -> None:
        """Keep the ring of a freed group, to be read, or to be used again; `last`: the number of its last call."""
        with self._lock:
            ring.free(last)
            if ring in self._rings:
                self._freed.append(ring)

    def note_ticks(self) -> None:
        """Read ticks and clock together: readers compute the times of the fast path from the first and last reading.

        The last one also tells them until when the rank has certainly waited.
        """
        ticks, now = (0, time.monotonic_ns()) if self.read_ticks is None else read_together(self.read_ticks)
        if not self._fields[FIRST_TICKS]:
            self._fields[FIRST_TICKS], self._fields[FIRST_NS] = ticks, now
        self._fields[LAST_TICKS], self._fields[LAST_NS] = ticks, now

    def note_blocked(self, blocked: tuple[int, int]) -> None:
        """Write in which call the rank is blocked. Readers compare it with the ring, which knows when the call ends."""
        self._fields[_GROUP], self._fields[_CALL] = blocked

    def take_request(self) -> dict[str, Any]:
        """Return the last request of :func:`ask_for_records`, the first time that this is called after it; else {}.

        Other programs can write to the file: a request that is damaged is left out.
        """
        request = self._fields[_REQUEST]
        if request == self._request:
            return {}
        self._request = request
        values = _read_text(bytes(self._head[: 2 * _PAGE_BYTES]), _PAGE_BYTES)
        folder, number = values.get("folder"), values.get("number")
        is_valid = isinstance(folder, str) and isinstance(number, int)
        return {"folder": folder, "number": number} if is_valid else {}

    def is_looked_at(self) -> bool:
        """Return whether ``torchmpi top`` looks at this rank (:func:`look`)."""
        return 0 < self._fields[_LOOK] - time.monotonic_ns() < _MOST_LOOK_NS

    def tell(self, values: dict[str, Any]) -> None:
        """Write what those see who look at this rank."""
        _write_text(self._head[_ANSWER_START : _ANSWER_START + _PAGE_BYTES], values)

    def tell_of_all(self, values: dict[str, Any]) -> None:
        """Write what all ranks tell those who look at rank 0; if there is no room, not that of the last ranks."""
        room, kept = _HEAD_BYTES - _ALL_START - _TEXT_BYTES, {}
        for rank, value in values.items():
            room -= len(json.dumps({rank: value}))  # two braces here, a comma and a space there
            if room < 0:
                break
            kept[rank] = value
        _write_text(self._head[_ALL_START:], kept)

    def save(self, folder: Path) -> None:
        """Write a copy to a folder, unless the record itself is there, or has been closed.

        Raises:
            OSError: That is not possible.
            ValueError: The name of the folder is none.
        """
        with self._lock:
            if self._file is None:
                return
            about = os.fstat(self._file)
            data = os.pread(self._file, about.st_size, 0)
        path = folder / f"rank{self._rank}{SUFFIX}"
        if not (path.exists() and os.path.samestat(about, path.stat())):
            write_copy(path, io.BytesIO(data))

    def seconds_per_tick(self) -> float:
        """Return the length of a tick; 0 if there is no fast path, or if the clock has not advanced.

        It is negative where ticks are the monotonic clock with a minus (`intrinsics.ticks`).
        """
        if self.read_ticks is None:
            return 0.0
        ticks, now = read_together(self.read_ticks)
        ticks -= self._fields[FIRST_TICKS]
        return (now - self._fields[FIRST_NS]) / ticks / 1e9 if ticks else 0.0

    def close(self) -> None:
        """End the record: the rank has called stop(), and all groups are freed."""
        self.note_ticks()
        with self._lock:
            if self._file is None:
                return
            self._fields[_ENDED] = 1
            progress.progress.detach()
            self._fields.release()
            self._head.release()
            for ring in (*self._rings, *self._unused):
                ring.release()
            for mapping in self._maps:
                mapping.close()
            os.close(self._file)
            self._file = None


def read_together(read_ticks: Callable[[], int], clock: Callable[[], int] = time.monotonic_ns) -> tuple[int, int]:
    """Return ticks and nanoseconds of one moment: the closest of a few readings.

    Where the core is shared, the kernel may stop this thread between the two readings, for milliseconds. All times of
    the fast path would then be wrong by that part of the time since the first reading.

    >>> moments, ticks = iter([0, 9_000_000, 9_000_100, 9_000_200]), iter([5, 12])  # stopped in the first reading
    >>> read_together(ticks.__next__, moments.__next__)
    (12, 9000150)
    """
    readings: list[tuple[int, int, int]] = []
    while not readings or (readings[-1][0] > _NEAR_NS and len(readings) < _MOST_READINGS):
        before, ticks, after = clock(), read_ticks(), clock()
        readings.append((after - before, ticks, (before + after) // 2))
    return min(readings)[1:]


def read(path: Path) -> RankCalls:
    """Read the flight record of a rank.

    Raises:
        TorchMPIError: The file is none.
    """
    try:
        with files.open_input(path, MOST_BYTES) as file:
            return parse(file, str(path))
    except OSError as error:
        raise TorchMPIError(f"{path} cannot be read: {error.strerror}.") from error


def write_copy(path: Path, record: BinaryIO) -> None:
    """Write a copy of a flight record; readers find a complete file, or none, also if several processes write one.

    Raises:
        OSError: That is not possible.
    """
    with files.replacing(path, mode=0o600, make_folder=True) as copy:
        shutil.copyfileobj(record, copy)


def ask_for_records(record: BinaryIO, folder: Path, request: int) -> None:
    """Ask the rank with this flight record for those of the other hosts, which their ranks write to a folder.

    Args:
        record: The flight record, opened to write.
        folder: The folder.
        request: A number that no earlier request has had; equal ones are answered once.

    Raises:
        OSError: The file cannot be written.
        TorchMPIError: The name of the folder is too long.
    """
    values = {"folder": str(folder), "number": request}
    if len(json.dumps(values)) > _PAGE_BYTES - _TEXT_BYTES:
        raise TorchMPIError(f"The ranks of other hosts cannot be told the folder {folder}: its name is too long.")
    page = memoryview(bytearray(_PAGE_BYTES))
    _write_text(page, values)
    # Not by a mapping: the process of the record may shorten the file meanwhile.
    os.pwrite(record.fileno(), page, _PAGE_BYTES)
    os.pwrite(record.fileno(), request.to_bytes(FIELD_BYTES, "little"), _REQUEST * FIELD_BYTES)


def look(record: BinaryIO, seconds: float) -> None:
    """Have the rank with this flight record tell for some seconds where it is.

    Args:
        record: The flight record, opened to write.
        seconds: For how long, at most a minute.

    Raises:
        OSError: The file cannot be written.
    """
    until = time.monotonic_ns() + int(1e9 * seconds)
    os.pwrite(record.fileno(), until.to_bytes(FIELD_BYTES, "little"), _LOOK * FIELD_BYTES)


class LiveGroup(NamedTuple):
    """The last calls of a rank on one group, one row per call, by their numbers."""

    key: int
    name: str
    ranks: tuple[int, ...]
    seq: npt.NDArray[np.int64]
    code: npt.NDArray[np.int64]
    shape: npt.NDArray[np.int64]
    """`num_dims` as in the entry, and the dimensions."""
    begin: npt.NDArray[np.float64]
    """Nanoseconds of the monotonic clock."""
    end: npt.NDArray[np.float64]
    """Infinite while the call has not ended."""


class LiveRank(NamedTuple):
    """What a rank is doing, as read from its flight record while it runs."""

    about: dict[str, Any]
    has_ended: bool
    groups: list[LiveGroup]
    steps: progress.Steps
    told: dict[str, Any]
    """The last answer to :func:`look`; {} without one."""
    since_ns: int = 0
    """When the record begins, on the monotonic clock."""
    told_of_all: Mapping[str, Any] = MappingProxyType({})
    """Of rank 0 of a job on several hosts: what all ranks have told it while somebody looks, by rank."""
    has_messages: bool = False
    """Whether it has sent or received messages, which are in no group."""


def read_live(record: BinaryIO, *, most_groups: int = 64) -> LiveRank:
    """Read the flight record of a running rank as arrays, for readers that do so again and again.

    Args:
        record: The flight record.
        most_groups: The number of groups that are read; the world and its parts are among the first ones. Freed groups
            are read after the end of the rank only.

    Raises:
        OSError: The file cannot be read.
        TorchMPIError: It is no flight record.
    """
    file = record.fileno()
    data = os.pread(file, _HEAD_BYTES, 0)
    head, about = _begin_of(data, "The file")
    groups: list[LiveGroup] = []
    known: dict[str, tuple[int, ...]] = {}
    has_messages = False
    for index in range(min(max(head[_NUM_RINGS], 0), MOST_BYTES // _RING_BYTES)):
        start = _HEAD_BYTES + index * _RING_BYTES
        about_ring = os.pread(file, _PAGE_BYTES, start)
        if len(groups) == most_groups or len(about_ring) < _PAGE_BYTES:
            break
        state, key, kind = np.frombuffer(about_ring, "<i8", 3).tolist()
        has_messages |= kind == OF_MESSAGES and state == _IN_USE
        is_read = kind == OF_CALLS and (state == _IN_USE or (state == _FREED and head[_ENDED]))
        text = _shown(_read_text(about_ring, 0)) if is_read else {}
        entries = os.pread(file, _RING_BYTES - _PAGE_BYTES, start + _PAGE_BYTES) if "name" in text else b""
        if len(entries) == _RING_BYTES - _PAGE_BYTES:
            ranks = _ranks(str(text.get("ranks", "")), known)
            groups.append(_live_group(key, str(text["name"]), ranks, entries, head))
    steps, told = progress.steps_in(data[_PROGRESS_START:]), _shown(_read_text(data, _ANSWER_START))
    told_of_all = _read_text(data, _ALL_START, _HEAD_BYTES)
    return LiveRank(about, bool(head[_ENDED]), groups, steps, told, head[FIRST_NS], told_of_all, has_messages)


def _live_group(key: int, name: str, ranks: tuple[int, ...], entries: bytes, head: Sequence[int]) -> LiveGroup:
    fields = np.frombuffer(entries, "<i8").reshape(RECORD_LENGTH, RecordFields.FIELDS)
    fields = fields[fields[:, RecordFields.sequence] > 0]
    fields = fields[np.argsort(fields[:, RecordFields.sequence], kind="stable")]
    ticks, nanoseconds = head[LAST_TICKS] - head[FIRST_TICKS], head[LAST_NS] - head[FIRST_NS]
    begin, end = (
        np.where(
            (stored <= 0) | (ticks <= 0),
            np.abs(stored).astype(np.float64),
            head[LAST_NS] + (stored - head[LAST_TICKS]) * (nanoseconds / max(ticks, 1)),
        )
        for stored in (fields[:, RecordFields.begin], fields[:, RecordFields.end])
    )
    end = np.where(fields[:, RecordFields.end] == 0, np.inf, np.maximum(begin, end))
    shape = fields[:, [RecordFields.num_dims, *range(RecordFields.dims, RecordFields.dims + MAX_LOG_DIMS)]]
    return LiveGroup(
        key, name, ranks, fields[:, RecordFields.sequence], fields[:, RecordFields.code], shape, begin, end
    )


def parse(record: BinaryIO, name: str) -> RankCalls:
    """Return the calls in a flight record, which may be cut off; `name` is for the error.

    Texts are returned with escapes for characters that would control a terminal.

    Raises:
        TorchMPIError: The file is no flight record.
    """
    record.seek(0)
    head, about = _begin_of(record.read(_HEAD_BYTES), name)
    groups: list[GroupCalls] = []
    messages: dict[int, list[LoggedMessages]] = {OF_MESSAGES: [], OF_REQUESTS: []}
    known: dict[str, tuple[int, ...]] = {}
    for _ in range(min(max(head[_NUM_RINGS], 0), MOST_BYTES // _RING_BYTES)):
        data = record.read(_RING_BYTES)
        if len(data) < _RING_BYTES:
            break
        state, key, kind = np.frombuffer(data, "<i8", 3).tolist()
        text = _shown(_read_text(data, 0)) if state else {}
        if "name" not in text:
            continue
        fields = np.frombuffer(data, "<i8").tolist()
        if kind in messages:
            messages[kind] += messages_in(key, str(text["name"]), fields) if state == _IN_USE else []
        else:
            ranks = _ranks(str(text.get("ranks", "")), known)
            groups.append(GroupCalls(key, str(text["name"]), ranks, state == _FREED, _calls_in(fields, _clock(head))))
    numbers, blocked = (head[_WALL_NS], groups, head[LAST_NS]), (head[_GROUP], head[_CALL])
    listed = messages[OF_MESSAGES], blocked, messages[OF_REQUESTS]
    return RankCalls(about["rank"], about, bool(head[_ENDED]), *numbers, *listed)


def _begin_of(data: bytes, name: str) -> tuple[list[int], dict[str, Any]]:
    """Return the numbers and the description at the begin of a flight record; raise if they are none."""
    if len(data) == _HEAD_BYTES:
        head: list[int] = np.frombuffer(data, "<i8", _TEXT_BYTES // FIELD_BYTES).tolist()
        about = _shown(_read_text(data, 0))
        numbers = about.get("rank"), about.setdefault("size", 0)
        if head[_MAGIC] == MAGIC and all(type(each) is int and 0 <= each <= _MOST_RANKS for each in numbers):
            return head, about
    raise TorchMPIError(f"{name} is no flight record of this version of torchmpi.")


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    texts = {name: files.printable(each) for name, each in values.items() if isinstance(each, str)}
    return {files.printable(name): texts.get(name, each) for name, each in values.items()}


def _ranks(text: str, known: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return ranks written by `as_ranges`; none if a damaged file has ever more of them."""
    if text not in known and sum(map(len, known.values())) <= _MOST_RANKS:
        known[text] = from_ranges(text)
    return known.get(text, ())


def _clock(head: Sequence[int]) -> Callable[[int], float]:
    """Return the function from a time in an entry to nanoseconds of the monotonic clock."""
    ticks, nanoseconds = head[LAST_TICKS] - head[FIRST_TICKS], head[LAST_NS] - head[FIRST_NS]

    def time_of(stored: int) -> float:
        if stored <= 0 or ticks <= 0:
            return float(abs(stored))
        return head[LAST_NS] + (stored - head[LAST_TICKS]) * nanoseconds / ticks

    return time_of


def _calls_in(fields: Sequence[int], time_of: Callable[[int], float]) -> list[LoggedCall]:
    first = _PAGE_BYTES // FIELD_BYTES
    entries = (fields[at : at + RecordFields.FIELDS] for at in range(first, len(fields), RecordFields.FIELDS))
    calls = [call for entry in entries if (call := _as_call(entry, time_of)) is not None]
    return sorted(calls, key=lambda call: call.seq)


def _as_call(entry: Sequence[int], time_of: Callable[[int], float]) -> LoggedCall | None:
    """Return the call of an entry; None for an empty one, or one that is being written."""
    seq, flags = entry[RecordFields.sequence], entry[RecordFields.num_dims]
    num_dims = flags & (RECORD_IS_NUMBER - 1)
    if seq <= 0 or num_dims > MAX_LOG_DIMS:
        return None
    shape = tuple(entry[RecordFields.dims : RecordFields.dims + num_dims])
    begin, end = time_of(entry[RecordFields.begin]), time_of(entry[RecordFields.end])
    is_number, has_failed = bool(flags & RECORD_IS_NUMBER), bool(flags & _HAS_FAILED)
    return LoggedCall(seq, entry[RecordFields.code], shape, is_number, begin, end, has_failed)


def _write_text(memory: memoryview, values: dict[str, Any]) -> None:
    data, room = json.dumps(values).encode(), len(memory) - _TEXT_BYTES
    if len(data) > room:  # names and lists of any length
        short = {key: value[:500] if key in _CUT else value for key, value in values.items()}
        data = json.dumps(short).encode()
    memory[_TEXT_BYTES:] = data[:room].ljust(room, b"\0")


def _read_text(data: bytes, start: int, end: int = 0) -> dict[str, Any]:
    try:
        values = files.parse_json(data[start + _TEXT_BYTES : end or start + _PAGE_BYTES].partition(b"\0")[0])
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def is_step(name: str) -> bool:
    """Return whether the calls on a group are steps of hierarchical calls, by its name."""
    return name.endswith((" on one host", " across hosts"))


def as_ranges(ranks: Sequence[int]) -> str:
    """Write ranks as ranges, in their order.

    >>> as_ranges([0, 1, 2, 5, 4])
    '0-2,5,4'
    """
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def from_ranges(text: str) -> tuple[int, ...]:
    """Read ranks written by `as_ranges`; parts that are none are left out.

    >>> from_ranges("0-2,5,4")
    (0, 1, 2, 5, 4)
    """
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal() and int(first) < _MOST_RANKS:
            ranks += range(int(first), min(int(last or first), int(first) + _MOST_RANKS - len(ranks)) + 1)
    return tuple(ranks)
