"""The recorder: the one place to which all calls of a rank are reported, and the readers that receive them.

A call is reported by :meth:`torchmpi.communicators.group.Group.perform` when it ends, a message by
:mod:`torchmpi.collectives.point_to_point`, a wait by :class:`torchmpi.communicators.handle.Handle`. Without a reader,
:data:`recorder` is None, and each of these places costs one comparison. docs/design/timeline.md has the reasons.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import torch
import typing_extensions

from ..collective_specs import spec_of
from .clocks import TickClock

_OWN_FOLDERS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)
_BETWEEN = tuple(module.__file__ for module in (contextlib, threading, typing_extensions, warnings))
"""Files of other modules whose functions call those of this package and of torch, or are called by them."""
_MOST_LINES = 10_000
MOST_EVENTS = 1 << 17
"""The most records in a queue."""
_frame_at, _this_thread = sys._getframe, threading.get_ident
_FAST_NUMBERS, _ORIGIN_FIELDS = struct.Struct("4q8xq"), struct.Struct("3q")
OF_DDP = "of DistributedDataParallel"
"""The end of the labels of the calls that torch's reducer makes, for whose ends it waits at the end of backward()."""
SERVER_CALL, SERVER_REQUEST, SERVED = "server call", "server request", "served"
"""Categories of the parameter server: calls of a client, its requests to one rank, and requests that a rank serves."""
BACKGROUND_MESSAGE = "background message"
"""The category of messages that have begun in one call and end while the program runs, or waits for them."""
PART = "part"
"""The category of parts of the call that a thread runs: `combining`, and `staging`, copies before and after it."""
now = time.monotonic_ns
"""The clock of all events, in nanoseconds; the processes of a host share it."""


class GroupInfo(NamedTuple):
    """The group of a call, as the readers see it."""

    key: int
    """The same number on all ranks of the group."""
    name: str
    rank: int
    ranks: tuple[int, ...]
    """The ranks of the group, as numbers in the world."""
    num_hosts: int


class Origin(NamedTuple):
    """Where and when the program has made a call."""

    queued: int
    """When the call was queued; 0 if it ran in the thread of the caller."""
    line: str
    label: str
    """What the call is for: the bucket and its parameters, for example."""


class CallRecord(NamedTuple):
    """A collective that has ended."""

    group: GroupInfo
    seq: int
    collective: str
    op: str
    dtype: str
    root: int
    """The root in the group; -1 if the collective has none."""
    num_bytes: int
    backend: str
    algorithm: str
    """How the backend has moved the data; '' if it is not known."""
    begin: int
    end: int
    thread: int
    origin: Origin
    error: str


class FastCallInfo(NamedTuple):
    """The properties that all calls of one kind on the fast path share."""

    group: GroupInfo
    names: Names
    backend: str
    algorithm: Callable[[int, str], str]
    """As of :class:`CallPlan`."""
    clock: TickClock


class FastMessageInfo(NamedTuple):
    """The properties that all messages of one kind on the fast path share."""

    name: str
    track: str
    details: dict[str, Any]
    clock: TickClock


class EventQueue(deque[Any]):
    """Records that wait for a reader; those that find no room are counted and dropped."""

    num_lost = 0

    def put(self, record: PlainCall | SliceRecord) -> None:
        """Add a record, in the thread that made the call."""
        if len(self) < MOST_EVENTS:
            self.append(record)
        else:
            self.num_lost += 1


Backends = tuple[tuple[int | None, str], ...]
"""The backends of a call, each with the largest size in bytes for which it is used (None: any)."""
PlainOrigin = tuple[int, CodeType | None, int, str] | bytes
"""When a call was queued, code and offset of the line that has made it, label; machine code packs the time, the id of
the code and the offset (records.ORIGIN_FIELDS). :func:`origin_of` makes an Origin."""
PlainCall = tuple[Any, ...]
"""A collective that has ended, as it is recorded: :func:`call_record` makes a CallRecord of it, or a SliceRecord of a
message of the fast path or of an interval. The first item, of which those of intervals are strings, determines the
others."""
WAIT = "wait"
"""The category of the times in which a thread waits for a handle."""


class CallPlan(Protocol):
    """The properties of a call that do not change."""

    backends: Backends

    def names(self, code: int) -> Names:
        """Return what a signature means."""

    def algorithm(self, number: int, backend: str) -> str:
        """Return the name of an algorithm."""


class FastNotes(Protocol):
    """The calls noted by machine code that wait for :func:`collect`."""

    note: Callable[[GroupInfo, CallPlan, PlainOrigin | None, int, int, int], int]
    """Notes a call that Python has run: group, plan, origin, depth, bytes, address of the call log; 0 if it cannot."""
    note_interval: Callable[[str, str, int], int]
    """Notes an interval that ends now: category, text, begin; 0 if it cannot."""
    note_origin: Callable[[int], bytes | None]
    """Returns the origin of a call that is queued now by the frame at a depth; None if it cannot."""

    def know(self, code: CodeType, is_own: bool) -> None:
        """Have calls of this code noted, or those of its callers if it is own code: of torchmpi or torch."""

    def num_waiting(self) -> int:
        """Return the number of notes."""

    def take(self) -> list[PlainCall]:
        """Return some notes; none if there are none."""


def call_record(plain: PlainCall) -> CallRecord | SliceRecord:
    """Convert a plain record. The thread of a reader does this, so that the thread of the call need not."""
    if isinstance(plain[0], str):
        category, text, begin, end, thread = plain
        name, details = (WAIT, {"call": text}) if category == WAIT else (text, {})
        return SliceRecord(name, category, "", begin, end, thread, details)
    if type(plain[0]) is not GroupInfo:
        return _fast_record(*plain)
    group, seq, plan, code, num_bytes, algorithm, begin, end, thread, origin, error = plain
    collective, op, dtype, root = plan.names(code)
    backend = backend_for(num_bytes, plan.backends)
    return CallRecord(
        group, seq, collective, op, dtype, root, num_bytes, backend, plan.algorithm(algorithm, backend), begin, end,
        thread, origin_of(origin), error,
    )  # fmt: skip


def origin_of(plain: PlainOrigin) -> Origin:
    """Return the origin of a call, given as it was recorded."""
    if isinstance(plain, bytes):
        queued, address, offset = _ORIGIN_FIELDS.unpack(plain)
        return Origin(queued, _line_at(_program_code[address], offset), "")
    queued, code, offset, label = plain
    return Origin(queued, "" if code is None else _line_at(code, offset), label)


def _fast_record(
    info: FastCallInfo | FastMessageInfo,
    seq: int,
    begin: int,
    end: int,
    num_bytes: int,
    algorithm: int,
    thread: int,
    code: CodeType | None,
    offset: int,
    label: str = "",
) -> CallRecord | SliceRecord:
    line = "" if code is None else _line_at(code, offset)
    begin, end = info.clock.nanoseconds(begin), info.clock.nanoseconds(end)
    if isinstance(info, FastMessageInfo):
        details = {**info.details, "bytes": num_bytes, "line": line, **_message_numbers(algorithm)}
        return SliceRecord(info.name, "message", info.track, begin, end, thread, details)
    collective, op, dtype, root = info.names
    return CallRecord(
        info.group, seq, collective, op, dtype, root, num_bytes, info.backend, info.algorithm(algorithm, info.backend),
        begin, end, thread, Origin(0, line, label), "",
    )  # fmt: skip


def awaited_ranks(collective: str, rank: int, root: int, ranks: Sequence[int]) -> Sequence[int]:
    """Return the ranks, of all `ranks` of a call, without which it cannot end on a rank.

    A rank of a broadcast needs the root only, and the ranks of a reduce or gather other than the root need nobody.

    >>> awaited_ranks("allreduce", 1, -1, (0, 1, 2)), awaited_ranks("scatter", 1, 2, (0, 1, 2))
    ((0, 1, 2), (2,))
    """
    spec = spec_of(collective)
    if spec.flow == "root to all" and rank == root:
        return ()
    return spec.sources(rank, root, ranks) if spec.is_rooted or spec.flow == "none" else ranks


def _message_numbers(numbers: int) -> dict[str, int]:
    """Return the numbers of the messages of an exchange in their channels, as machine code packs them.

    >>> _message_numbers(3 << 32 | 2)
    {'sent': 2, 'received': 3}
    """
    return {"sent": numbers & 0xFFFFFFFF, "received": numbers >> 32}


def backend_for(num_bytes: int, backends: Backends) -> str:
    """Return the name of the backend that runs a call of this size; '' if there is only one way.

    >>> backend_for(8, ((8, "shm"), (None, "p2p"))), backend_for(9, ((8, "shm"), (None, "p2p")))
    ('shm', 'p2p')
    """
    return next((name for limit, name in backends if limit is None or num_bytes <= limit), "")


class SliceRecord(NamedTuple):
    """An interval of one thread or queue that is no collective: a message, a wait, or a range of the program."""

    name: str
    category: str
    track: str
    """The row of the trace, '' for that of the thread."""
    begin: int
    end: int
    thread: int
    details: dict[str, Any]


Names = tuple[str, str, str, int]
"""Collective, operation, dtype and root of a call; '' or -1 for none."""
Reader = Callable[[PlainCall | SliceRecord], None]


class Recorder:
    """Passes what a rank does to the readers. Reported from any thread."""

    def __init__(self) -> None:
        self.readers: tuple[Reader, ...] = ()
        self.others: tuple[Reader, ...] = ()
        """The readers without a queue."""
        self.note: Callable[..., int] = _note_nothing
        self.note_interval: Callable[..., int] = _note_nothing
        self.note_origin: Callable[[int], bytes | None] = _no_origin
        """The functions of :class:`FastNotes`, if all readers are queues."""

    def origin(self, queued: int, depth: int = 2) -> PlainOrigin:
        """Return where the program makes the current call; the first `depth` frames are of this package."""
        label = labels.get(_this_thread(), "") if labels else ""
        # On the path of every call: no function, and one frame, of which CPython makes an object.
        try:
            frame = _frame_at(depth)
        except ValueError:  # a thread of autograd, for example, has fewer frames
            return queued, None, 0, label
        code = frame.f_code
        if id(code) in _program_code:
            _know(code, False)
            return queued, code, frame.f_lasti, label
        return queued, *_place_of_call(depth + 1), label

    def call(
        self,
        group: GroupInfo,
        seq: int,
        plan: CallPlan,
        code: int,
        num_bytes: int,
        algorithm: int,
        begin: int,
        end: int,
        origin: PlainOrigin,
        error: str = "",
    ) -> None:
        """Report a collective."""
        collect()  # the parts of the call come first
        record = group, seq, plan, code, num_bytes, algorithm, begin, end, _this_thread(), origin, error
        for queue in _queues:
            if len(queue) < MOST_EVENTS:
                queue.append(record)
            else:
                queue.num_lost += 1
        for read in self.others:
            read(record)

    def interval(self, category: str, text: str, begin: int, end: int | None = None) -> None:
        """Report an interval that machine code cannot note: a wait, or a part of a call; without `end` it ends now."""
        end = now() if end is None else end
        collect()  # the parts of a call in their order
        for read in self.readers:
            read((category, text, begin, end, _this_thread()))

    def slice(self, name: str, category: str, begin: int, track: str = "", **details: Any) -> None:
        """Report an interval that ends now."""
        self.report(SliceRecord(name, category, track, begin, now(), threading.get_ident(), details))

    def report(self, record: SliceRecord | CallRecord) -> None:
        """Report something that has ended."""
        for read in self.readers:
            read(record)


def _note_nothing(*arguments: object) -> int:
    """Leave a call to :meth:`Recorder.call`."""
    return 0


def _no_origin(depth: int) -> None:
    """Leave the search for the line to :meth:`Recorder.origin`."""


def _know_nothing(code: CodeType, is_own: bool) -> None:
    """Stand in for `FastNotes.know`."""


recorder: Recorder | None = None
"""The recorder while there is a reader, else None."""
when_changed: list[Callable[[], None]] = []
"""Functions to call when a reader has been added or removed."""


class ShownCall(NamedTuple):
    """What torch.profiler shows of a call."""

    group: GroupInfo
    names: Names
    sent: int | None
    """The elements that this rank passes; None if that is not known."""
    received: int | None


show_call: Callable[[ShownCall, str], Any] | None = None
"""Begins an event of torch.profiler while one runs, else None; "task": of a queued call, in its own thread."""
show_task: Callable[[str, Callable[[], Any]], Callable[[], Any]] | None = None
"""Begins an event of a call that is queued now and returns the task that also ends it; None without a profiler."""


class _OpenCalls(threading.local):
    """Whether this thread is in a call that is an event of torch.profiler."""

    has_event = False


fast_notes: FastNotes | None = None
"""The notes of the fast path, set by the package that has one."""
_calls = _OpenCalls()
labels: dict[int, str] = {}
"""The labels of the calls that threads make, always the same object; machine code notes only those in origins."""
_changing = threading.Lock()
_queues: tuple[EventQueue, ...] = ()
_know: Callable[[CodeType, bool], None] = _know_nothing


def has_event() -> bool:
    """Return whether this thread is in a call that is an event of torch.profiler."""
    return _calls.has_event


def begin_event(call: ShownCall, *, is_task: bool) -> Any:
    """Begin an event of torch.profiler for a call that begins now; None without a profiler.

    The steps of a hierarchical call, and the calls of a task that is an event, are no events of their own.
    """
    show = show_call
    if show is None or _calls.has_event:
        return None
    _calls.has_event = True
    return show(call, "task" if is_task else "")


def end_event(event: Any) -> None:
    """End what :func:`begin_event` has returned, in the same thread."""
    if event is not None:
        _calls.has_event = False
        event.__exit__(None, None, None)


def add_reader(reader: Reader) -> None:
    """Pass all further events to a reader, which any thread may call.

    If all readers are queues (:meth:`EventQueue.put`), the fast path reports its calls too; otherwise it is off.
    """
    with _changing:
        _set_readers((*(() if recorder is None else recorder.readers), reader))


def remove_reader(reader: Reader) -> None:
    """Pass no further events to a reader."""
    with _changing:
        if recorder is not None:
            _set_readers(tuple(each for each in recorder.readers if each != reader))


def _set_readers(readers: tuple[Reader, ...]) -> None:
    global recorder, _queues, _know
    collect()  # for the readers that there have been
    owners = [getattr(each, "__self__", None) for each in readers]
    queues = tuple(each for each in owners if isinstance(each, EventQueue))
    if readers:
        recorder = recorder or Recorder()
        others = (read for read, owner in zip(readers, owners, strict=True) if not isinstance(owner, EventQueue))
        recorder.readers, recorder.others = readers, tuple(others)
        notes = None if recorder.others else fast_notes
        recorder.note = _note_nothing if notes is None else notes.note
        recorder.note_interval = _note_nothing if notes is None else notes.note_interval
        recorder.note_origin = _no_origin if notes is None else notes.note_origin
        _know = _know_nothing if notes is None else notes.know
    else:
        recorder = None
    _queues = queues
    for changed in when_changed:
        changed()
    if not queues:
        collect()  # what other threads have noted meanwhile is of no timeline


def note_fast_call(info: FastCallInfo | FastMessageInfo, numbers: bytes) -> None:
    """Report a call of the fast path that has ended and that machine code cannot note (:class:`FastNotes`).

    Called by machine code in the public function of the call.

    `numbers`: number of the call, begin and end in ticks, bytes, code, algorithm.
    """
    thread = _this_thread()
    record = info, *_FAST_NUMBERS.unpack(numbers), thread, *_place_of_call(2), labels.get(thread, "")
    for queue in _queues:
        queue.put(record)


def collect() -> None:
    """Pass the calls that the fast path has noted until now to the queues."""
    num_waiting = 0 if fast_notes is None else fast_notes.num_waiting()
    while fast_notes is not None and num_waiting > 0 and (taken := fast_notes.take()):
        num_waiting -= len(taken)  # the program may note calls as fast as they are taken
        for queue in _queues:
            for record in taken:
                queue.put(record)


def in_forked_child() -> None:
    """Stop to record in a forked process, which is no rank."""
    global recorder, _changing, _queues, show_call, show_task
    recorder, show_call, show_task, _changing, _queues = None, None, None, threading.Lock(), ()
    labels.clear()


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Label the calls that this thread makes in a block."""
    thread = _this_thread()
    before = labels.get(thread)
    labels[thread] = label
    try:
        yield
    finally:
        if before is None:
            del labels[thread]
        else:
            labels[thread] = before


def _place_of_call(depth: int) -> tuple[CodeType | None, int]:
    """Return code and offset of the innermost line of this thread outside of torchmpi and torch; None if none is."""
    try:
        frame: FrameType | None = _frame_at(depth)
    except ValueError:  # the thread has fewer frames
        return None, 0
    while frame is not None:
        code = frame.f_code
        is_own = id(code) in _own_code or (id(code) not in _program_code and not _note_code(code))
        if id(code) in (_own_code if is_own else _program_code):
            _know(code, is_own)
        if not is_own:
            return code, frame.f_lasti
        frame = frame.f_back
    return None, 0


def _line_at(code: CodeType, offset: int) -> str:
    """Return the line of an instruction."""
    key = id(code), offset
    line = _lines.get(key)
    if line is None:
        numbers = (number for begin, end, number in code.co_lines() if begin <= offset < end and number is not None)
        line = f"{code.co_filename}:{next(numbers, code.co_firstlineno)}"
        if len(_lines) < _MOST_LINES and id(code) in _program_code:
            _lines[key] = line
    return line


# By the ids of code objects, which are kept: hashing a code object takes longer than the rest of the search.
_own_code: dict[int, CodeType] = {}
_program_code: dict[int, CodeType] = {}
_lines: dict[tuple[int, int], str] = {}


def _note_code(code: CodeType) -> bool:
    """Remember whether code is of the program, which it returns, or of torchmpi, torch, and the start of a thread."""
    is_own = code.co_filename.startswith(_OWN_FOLDERS) or code.co_filename in _BETWEEN
    known = _own_code if is_own else _program_code
    if len(known) < _MOST_LINES:  # a program that makes code for ever must not fill memory
        known[id(code)] = code
    return not is_own
