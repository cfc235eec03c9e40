"""Reading of trace files: the calls, waits and steps of each rank, on the clock of rank 0.

A file is read event by event. Calls and intervals are kept in arrays, some dozens of bytes each, so that millions of
them fit into memory.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from .. import files
from ..errors import ArgumentError
from .clocks import AlignedClock, ClockSample, IntArray
from .events import BACKGROUND_MESSAGE, MESSAGE, PART
from .trace_writer import FIRST_ROW, FORMAT, QUEUED

Event = dict[str, Any]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Spans = Floats
"""Begins and ends of intervals, in two columns."""
MAIN_THREAD = FIRST_ROW
"""The number of the row of the main thread."""
_COLLECTIVE = "collective"
_PIECE_BYTES = 1 << 20
_MOST_OTHER_LINES = 100  # that begin and end the list of events, or are empty
_MOST_LINE_BYTES = 16 << 20  # that of a group of a million ranks has 8 MB
_MOST_HELD_BYTES = 64 << 20
_MOST_EXPANDED_BYTES, _MOST_EXPANSION = 16 << 20, 100
"""The expanded size that is always read, and by how much more compressed bytes may expand: traces expand ten times."""
WRONG_EVENTS = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What the use of events raises that no rank has written, in a file whose checksums are right."""


class TracedCall(NamedTuple):
    """A collective of one rank; times are seconds on the clock of rank 0."""

    rank: int
    group: str
    seq: int
    collective: str
    num_bytes: int
    begin: float
    end: float
    queued: float
    """When the call was queued; `begin` if it ran in the thread of the caller."""
    is_queued: bool
    """Whether the call ran in the background."""
    details: Event


class Interval(NamedTuple):
    """A wait, a message, a range or the end of a step; times are seconds on the clock of rank 0."""

    name: str
    begin: float
    end: float
    thread: int


class CallKind(NamedTuple):
    """The properties that many calls of a rank share."""

    collective: str
    details: Event

    @property
    def group(self) -> str:
        """The key of the group."""
        group: str = self.details["group"]
        return group


class Calls(Sequence[TracedCall]):
    """The collectives of a rank in the order of their ends.

    Attributes:
        kinds: The different kinds of calls.
        kind: For each call the index of its kind; the further arrays have the fields of :class:`TracedCall`.
        is_step: Whether a call is a step of a hierarchical one: it runs inside another call of its thread.
        clock_error: The bound of the error of `begin` in seconds.
    """

    def __init__(self, rank: int, kinds: Sequence[CallKind], columns: _CallColumns, clock: AlignedClock) -> None:
        order = np.argsort(_integers(columns.end), kind="stable")  # those of the fast path are written apart
        begin, end, queued = (_integers(each)[order] for each in (columns.begin, columns.end, columns.queued))
        self.rank, self.kinds = rank, kinds
        self.begin, self.end = _seconds(clock, begin), _seconds(clock, end)
        self.clock_error = (clock.error(begin) / 1e9).astype(np.float32)
        self.kind, self.seq = _integers(columns.kind)[order].astype(np.int32), _integers(columns.seq)[order]
        self.num_bytes, self.is_queued = _integers(columns.num_bytes)[order], queued >= 0
        self.queued = np.where(self.is_queued, _seconds(clock, queued), self.begin)
        self.thread = self.of_kinds([kind.details["thread"] for kind in kinds])
        self.is_step = _are_inside(begin, end, self.thread)

    def of_kinds(self, values: Sequence[Any]) -> npt.NDArray[Any]:
        return np.array(values or np.empty(0, np.int64))[self.kind]

    def __len__(self) -> int:
        return len(self.seq)

    @overload
    def __getitem__(self, index: int) -> TracedCall: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TracedCall]: ...
    def __getitem__(self, index: int | slice) -> TracedCall | Sequence[TracedCall]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        kind, num_bytes = self.kinds[self.kind[index]], int(self.num_bytes[index])
        return TracedCall(
            self.rank, kind.group, int(self.seq[index]), kind.collective, num_bytes, float(self.begin[index]),
            float(self.end[index]), float(self.queued[index]), bool(self.is_queued[index]),
            {**kind.details, "bytes": num_bytes},
        )  # fmt: skip


class Intervals(Sequence[Interval]):
    """The intervals of one category of a rank, in the order of the file.

    Attributes:
        names: The different names.
        name: For each interval the index of its name; the further arrays have the fields of :class:`Interval`.
    """

    def __init__(self, columns: _IntervalColumns, clock: AlignedClock) -> None:
        self.names = list(columns.names)
        self.name, self.thread = _integers(columns.name), _integers(columns.thread)
        self.begin, self.end = (_seconds(clock, _integers(each)) for each in (columns.begin, columns.end))

    def __len__(self) -> int:
        return len(self.name)

    @overload
    def __getitem__(self, index: int) -> Interval: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Interval]: ...
    def __getitem__(self, index: int | slice) -> Interval | Sequence[Interval]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        name = self.names[self.name[index]]
        return Interval(name, float(self.begin[index]), float(self.end[index]), int(self.thread[index]))

    @property
    def spans(self) -> Spans:
        """Their begins and ends."""
        spans: Spans = np.column_stack((self.begin, self.end))
        return spans

    @property
    def spans_of_main_thread(self) -> Spans:
        """The begins and ends of those in the main thread."""
        spans: Spans = self.spans[self.thread == MAIN_THREAD]
        return spans


class TracedMessages:
    """The messages of a rank.

    Attributes:
        kinds: Category, name and details of the different kinds.
        kind: For each message the index of its kind.
        sent, received: The numbers in its channels, 0 for none.
        is_background: Whether the program went on meanwhile, and waits for it in a ``wait``.
        clock_error: The bound of the error of `begin` in seconds.
    """

    def __init__(self, kinds: Sequence[MessageKind], columns: _MessageColumns, clock: AlignedClock) -> None:
        begin = _integers(columns.begin)
        self.kinds, self.kind = kinds, _integers(columns.kind).astype(np.int32)
        self.begin, self.end = _seconds(clock, begin), _seconds(clock, _integers(columns.end))
        self.sent, self.received = _integers(columns.sent), _integers(columns.received)
        self.num_bytes, self.clock_error = _integers(columns.num_bytes), clock.error(begin) / 1e9
        self.is_background = self.of_kinds([kind.is_background for kind in kinds]).astype(bool)
        self.thread = self.of_kinds([kind.details["thread"] for kind in kinds])

    def of_kinds(self, values: Sequence[Any]) -> npt.NDArray[Any]:
        return np.array(values or np.empty(0, np.int64))[self.kind]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def spans(self) -> Spans:
        """Their begins and ends."""
        spans: Spans = np.column_stack((self.begin, self.end))
        return spans


class MessageKind(NamedTuple):
    """The properties that many messages of a rank share."""

    name: str
    is_background: bool
    details: Event


class _Columns:
    """Times that have been read, in local nanoseconds."""

    def __init__(self) -> None:
        self.begin, self.end = array("q"), array("q")

    def add_times(self, event: Event) -> None:
        begin = round(1000 * event["ts"])
        self.begin.append(begin)
        self.end.append(begin + round(1000 * event["dur"]))


class _CallColumns(_Columns):
    """The calls that have been read."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.seq, self.num_bytes, self.queued = (array("q") for _ in range(4))


class _MessageColumns(_Columns):
    """The messages that have been read."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.sent, self.received, self.num_bytes = (array("q") for _ in range(4))


class _IntervalColumns(_Columns):
    """The intervals of a category that have been read."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, int] = {}
        self.name, self.thread = array("q"), array("q")


class RankTrace:
    """What a rank has recorded.

    Attributes:
        job: Rank, size, host and settings, as given by :meth:`torchmpi.session.runtime.Runtime`.
        samples: The measurements of its clock.
        groups: Name, ranks and number of hosts of each group, by its key.
        calls: All collectives, also those that are steps of other ones.
        messages: All messages.
        num_lost: The number of events that did not fit into memory.
        is_complete: Whether the file has its end: the rank was not killed.
    """

    calls: Calls
    messages: TracedMessages

    def __init__(self, path: Path) -> None:
        """Read a file; :meth:`align` has to be called before times are used."""
        self.path = path
        self.job: dict[str, Any] = {}
        self.groups: dict[str, Event] = {}
        self.samples: list[ClockSample] = []
        self.num_lost, self.is_complete = 0, False
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._call_kinds: list[CallKind] = []
        self._calls: _CallColumns | None = _CallColumns()
        self._message_kinds: dict[tuple[Any, ...], int] = {}
        self._kinds_of_messages: list[MessageKind] = []
        self._messages = _MessageColumns()
        self._intervals: dict[str, _IntervalColumns] = defaultdict(_IntervalColumns)
        try:
            for event in self.events:
                self._read(event)
            is_right = self.job.get("format") == FORMAT and {type(self.job[each]) for each in ("rank", "size")} == {int}
        except ArgumentError:
            raise
        except WRONG_EVENTS as error:
            raise _problem(path, error) from error
        if not is_right:
            raise ArgumentError(f"{path} is no trace file of torchmpi, or one of another version.")
        self.rank: int = self.job["rank"]

    @property
    def events(self) -> Iterator[Event]:
        """The events of the file, with local times in microseconds."""
        return read_events(self.path)

    def _read(self, event: Event) -> None:
        if event["ph"] == "M":
            self._read_metadata(event["name"], event.get("args", {}))
        elif event["ph"] == "X" and event["cat"] == _COLLECTIVE:
            assert self._calls is not None
            self._read_call(event, self._calls)
        elif event["ph"] == "X" and event["cat"] != PART:
            self._read_interval(event)
            if event["cat"] in (MESSAGE, BACKGROUND_MESSAGE):
                self._read_message(event, self._messages)

    def _read_metadata(self, kind: str, details: Event) -> None:
        if kind == "torchmpi_job":
            self.job = details
        elif kind == "torchmpi_clock":
            self.samples += [ClockSample(*each) for each in details["samples"]]
        elif kind == "torchmpi_lost":
            self.num_lost = details["events"]
        elif kind == "torchmpi_group":
            self.groups[f"{details['key']:x}"] = details
        elif kind == "torchmpi_end":
            self.is_complete = True

    def _read_call(self, event: Event, calls: _CallColumns) -> None:
        details = event["args"]
        calls.seq.append(details.pop("call"))
        calls.num_bytes.append(details.pop("bytes"))
        calls.queued.append(round(1000 * details.pop(QUEUED)) if QUEUED in details else -1)
        calls.add_times(event)
        key = event["name"], *details.items()
        kind = self._kinds.setdefault(key, len(self._call_kinds))
        if kind == len(self._call_kinds):
            self._call_kinds.append(CallKind(event["name"], details))
        calls.kind.append(kind)

    def _read_interval(self, event: Event) -> None:
        found = self._intervals[event["cat"]]
        found.name.append(found.names.setdefault(event["name"], len(found.names)))
        found.thread.append(event["args"]["thread"])
        found.add_times(event)

    def _read_message(self, event: Event, messages: _MessageColumns) -> None:
        details = event["args"]
        queued, is_background = details.pop(QUEUED, None), event["cat"] == BACKGROUND_MESSAGE
        messages.add_times(event)
        if queued is not None:  # the slice begins after the message before in its row
            messages.begin[-1], is_background = round(1000 * queued), True
        for name, column in (("sent", messages.sent), ("received", messages.received), ("bytes", messages.num_bytes)):
            column.append(details.pop(name, 0))
        key = event["name"], is_background, *details.items()
        kind = self._message_kinds.setdefault(key, len(self._kinds_of_messages))
        if kind == len(self._kinds_of_messages):
            self._kinds_of_messages.append(MessageKind(event["name"], is_background, details))
        messages.kind.append(kind)

    def align(self, samples: Sequence[ClockSample]) -> None:
        """Convert all times to the clock of rank 0, by measurements of the clock of this host."""
        assert self._calls is not None
        self.clock = AlignedClock(samples)
        columns = [each for each in (self._calls, self._messages, *self._intervals.values()) if each.begin]
        limits = [limit for each in columns for limit in (min(each.begin), max(each.end))]
        self.error_seconds = self.clock.largest_error(min(limits), max(limits)) / 1e9 if limits else 0.0
        """The bound of the error of the times of this rank against those of rank 0."""
        self.calls = Calls(self.rank, self._call_kinds, self._calls, self.clock)
        self._calls = None
        self.messages = TracedMessages(self._kinds_of_messages, self._messages, self.clock)
        self._kinds.clear()

    def seconds(self, microseconds: Sequence[float]) -> Floats:
        """Return times of the clock of rank 0."""
        return _seconds(self.clock, np.rint(1000 * np.array(microseconds)))

    def intervals(self, category: str) -> Intervals:
        """Return the intervals of a category: ``wait``, ``message``, ``range`` or ``step``."""
        return Intervals(self._intervals.get(category) or _IntervalColumns(), self.clock)


def _integers(values: array[int]) -> IntArray:
    return np.frombuffer(values, np.int64) if values else np.empty(0, np.int64)


def _seconds(clock: AlignedClock, local: npt.ArrayLike) -> Floats:
    return clock.aligned(np.asarray(local, np.int64)) / 1e9


def _are_inside(begin: IntArray, end: IntArray, thread: IntArray) -> Flags:
    """Return which calls run inside another call of the same thread.

    >>> _are_inside(np.array([0, 1, 5, 1]), np.array([4, 2, 6, 3]), np.array([1000, 1000, 1000, 1001])).tolist()
    [False, True, False, False]
    """
    inside = np.zeros(len(begin), bool)
    for each in np.unique(thread):
        (own,) = np.nonzero(thread == each)
        own = own[np.lexsort((-end[own], begin[own]))]
        inside[own[1:]] = end[own[1:]] <= np.maximum.accumulate(end[own])[:-1]
    return inside


def read_events(path: Path) -> Iterator[Event]:
    """Return the events of a trace file, up to the place at which a killed rank ended it.

    Raises:
        ArgumentError: The file is damaged, or no trace file.
        OSError: The file cannot be read.
    """
    num_others = 0
    try:
        for line in _lines(path):
            text = line.strip().rstrip(b",")
            if text not in (b"[", b"]", b""):
                event = files.parse_json(text)
                if not isinstance(event, dict):
                    raise ValueError("a line is no event")
                yield event
            elif (num_others := num_others + 1) > _MOST_OTHER_LINES:
                raise ValueError("it has lines without events")
    except (ValueError, zlib.error) as error:
        raise ArgumentError(f"{path} is damaged, or no trace file of torchmpi: {error}.") from error


def _lines(path: Path) -> Iterator[bytes]:
    begun = b""
    for piece in _pieces(path):
        *lines, begun = (begun + piece).split(b"\n")
        yield from lines
        if len(begun) > _MOST_LINE_BYTES:
            raise ValueError("a line is too long")
    yield begun


def _pieces(path: Path) -> Iterator[bytes]:
    """Return the content of the gzip members of a file, each after its checksum was compared.

    A killed rank has written whole members, but a file may have been copied while one was written: it is left out.
    A member that is very long, as when a file was compressed anew, is returned before its end and must have one.
    """
    with files.open_input(path, sys.maxsize) as file:
        rest, num_expanded = b"", 0
        while True:
            member, held, num_held = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16), list[bytes](), 0
            while not member.eof:
                rest = rest or file.read(_PIECE_BYTES)
                if not rest:
                    if num_held > _MOST_HELD_BYTES:
                        raise ValueError("its end is missing")
                    return
                held.append(member.decompress(rest, _PIECE_BYTES))
                rest = member.unconsumed_tail
                num_held += len(held[-1])
                num_expanded += len(held[-1])
                if num_expanded > _MOST_EXPANDED_BYTES + _MOST_EXPANSION * (file.tell() - len(rest)):
                    raise ValueError(f"it expands more than {_MOST_EXPANSION} times")
                if num_held > _MOST_HELD_BYTES:
                    yield from held
                    held.clear()
            yield from held
            rest = member.unused_data


def _problem(path: Path, error: Exception) -> ArgumentError:
    return ArgumentError(f"{path} has an event that no rank has written: {error!r}.")


def read_folder(folder: Path) -> list[RankTrace]:
    """Return the traces of all ranks, in their order.

    Files of an earlier, larger job in the same folder are ignored, and those of ranks that were killed before they had
    written an event.

    Raises:
        ArgumentError: There are none, or one is damaged.
        OSError: A file cannot be read.
    """
    paths = sorted(folder.glob("rank*.json.gz"), key=lambda path: path.stat().st_mtime, reverse=True)
    paths = [path for path in paths if next(read_events(path), None) is not None]
    if not paths:
        raise ArgumentError(
            f"{folder} has no trace files (rankN.json.gz). Record them with TORCHMPI_TIMELINE={folder} in the "
            "environment of the job, or with mpi.timeline.start()."
        )
    traces = [RankTrace(path) for path in paths]
    found = {each.rank: each for each in traces if each.rank < traces[0].job["size"]}
    for trace in found.values():
        try:
            leader = found.get(trace.job.get("leader", trace.rank), trace)  # which measures the clock of the host
            trace.align([*trace.samples, *(leader.samples if leader is not trace else ())])
        except WRONG_EVENTS as error:
            raise _problem(trace.path, error) from error
    return [found[rank] for rank in sorted(found)]
