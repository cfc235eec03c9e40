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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from .clocks import TickClock

_OWN_FOLDERS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)
_BETWEEN = (threading.__file__, contextlib.__file__)
"""Files of the standard library whose functions call those of this package, or are called by them."""
_MOST_LINES = 10_000
MOST_EVENTS = 1 << 17
"""The most records in a queue."""
_frame_at, _this_thread = sys._getframe, threading.get_ident
_FAST_NUMBERS = struct.Struct("4q")
DDP_BUCKET = "bucket of DistributedDataParallel"
"""The label of the calls that torch's reducer makes, for whose ends it waits at the end of backward()."""
SERVER_CALL, SERVER_REQUEST, SERVED = "server call", "server request", "served"
"""Categories of the parameter server: calls of a client, its requests to one rank, and requests that a rank serves."""
BACKGROUND_MESSAGE = "background message"
"""The category of messages that have begun in one call and end while the program runs, or waits for them."""
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
PlainCall = tuple[Any, ...]
"""A collective that has ended, as it is recorded: :func:`call_record` makes a CallRecord of it. The fast path records
the info of these calls, numbers and thread, then either code and offset of the line, or line and label.
A message of the fast path becomes a SliceRecord."""


def call_record(plain: PlainCall) -> CallRecord | SliceRecord:
    """Convert a plain record. The thread of a reader does this, so that the thread of the call need not."""
    if type(plain[0]) is not GroupInfo:
        return _fast_record(*plain)
    group, seq, names, num_bytes, backends, begin, end, thread, origin, error = plain
    collective, op, dtype, root = names
    return CallRecord(
        group, seq, collective, op, dtype, root, num_bytes, backend_for(num_bytes, backends), begin, end, thread,
        Origin(*origin), error,
    )  # fmt: skip


def _fast_record(
    info: FastCallInfo | FastMessageInfo, numbers: bytes, thread: int, where: Any, offset: Any
) -> CallRecord | SliceRecord:
    seq, begin, end, num_bytes = _FAST_NUMBERS.unpack(numbers)
    line, label = (where, offset) if isinstance(where, str) else (_line_at(where, offset), "")
    begin, end = info.clock.nanoseconds(begin), info.clock.nanoseconds(end)
    if isinstance(info, FastMessageInfo):
        details = {**info.details, "bytes": num_bytes, "line": line}
        return SliceRecord(info.name, "message", info.track, begin, end, thread, details)
    collective, op, dtype, root = info.names
    return CallRecord(
        info.group, seq, collective, op, dtype, root, num_bytes, info.backend, begin, end, thread,
        Origin(0, line, label), "",
    )  # fmt: skip


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
        self.queues: tuple[EventQueue, ...] | None = ()
        """The queues of the readers; None if a reader has none."""

    def origin(self, queued: int, depth: int = 2) -> Origin:
        """Return where the program makes the current call."""
        return Origin(queued, program_line(depth + 1), _labels.label)

    def call(
        self,
        group: GroupInfo,
        seq: int,
        names: Names,
        num_bytes: int,
        backends: Backends,
        begin: int,
        origin: Origin | None,
        error: str = "",
        end: int = 0,
    ) -> None:
        """Report a collective, which ends now if `end` is 0; without an origin, it is the line that makes the call."""
        # The two callers of the function that reports are of this package: looking at a frame is most of the cost.
        record = (
            group, seq, names, num_bytes, backends, begin, end or now(), _this_thread(),
            origin or (0, program_line(5), _labels.label), error,
        )  # fmt: skip
        for read in self.readers:
            read(record)

    def slice(self, name: str, category: str, begin: int, track: str = "", **details: Any) -> None:
        """Report an interval that ends now."""
        record = SliceRecord(name, category, track, begin, now(), threading.get_ident(), details)
        for read in self.readers:
            read(record)


recorder: Recorder | None = None
"""The recorder while there is a reader, else None."""
when_changed: list[Callable[[], None]] = []
"""Functions to call when a reader has been added or removed."""
show_call: Callable[[GroupInfo, Names, int, str], Any] | None = None
"""Begins an event of torch.profiler while one runs, else None; "task": of a queued call, in its own thread."""
show_task: Callable[[str, Callable[[], Any]], Callable[[], Any]] | None = None
"""Begins an event of a call that is queued now and returns the task that also ends it; None without a profiler."""


class _OpenCalls(threading.local):
    """Whether this thread is in a call that is an event of torch.profiler."""

    has_event = False


class _Labels(threading.local):
    """The label of the calls that this thread makes."""

    label = ""


_calls = _OpenCalls()
_labels = _Labels()
_changing = threading.Lock()
_queues: tuple[EventQueue, ...] = ()
_last_code: object = object()
"""The code of the program that made the last call on the fast path."""


def begin_event(group: GroupInfo, names: Names, numel: int, *, is_task: bool) -> Any:
    """Begin an event of torch.profiler for a call that begins now; None without a profiler.

    The steps of a hierarchical call are no events of their own.
    """
    show = show_call
    if show is None or _calls.has_event:
        return None
    _calls.has_event = True
    return show(group, names, numel, "task" if is_task else "")


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
    global recorder, _queues
    owners = (getattr(each, "__self__", None) for each in readers)
    queues = tuple(each for each in owners if isinstance(each, EventQueue))
    if readers:
        recorder = recorder or Recorder()
        recorder.readers, recorder.queues = readers, queues if len(queues) == len(readers) else None
    else:
        recorder = None
    _queues = queues
    for changed in when_changed:
        changed()


def note_fast_call(info: FastCallInfo | FastMessageInfo, numbers: bytes) -> None:
    """Report a call of the fast path that has ended; called by machine code in the public function of the call.

    `numbers`: number of the call, begin and end in ticks, bytes.
    """
    code = None
    try:
        frame = _frame_at(2)
    except ValueError:  # the public function was called by no Python code
        pass
    else:
        code = frame.f_code
    # On the path of every call: the search for a line of the program is left out if the last call had the same code.
    if code is _last_code or (code is not None and _is_of_program(code)):
        record = info, numbers, _this_thread(), code, frame.f_lasti
    else:
        record = info, numbers, _this_thread(), program_line(2), _labels.label  # type: ignore[assignment]
    for queue in _queues:
        if len(queue) < MOST_EVENTS:
            queue.append(record)
        else:
            queue.num_lost += 1


def _is_of_program(code: CodeType) -> bool:
    """Return whether code is neither of torchmpi nor of torch, and remember it in that case."""
    global _last_code
    if id(code) in _own_code or not (id(code) in _program_code or _note_code(code)):
        return False
    _last_code = code
    return True


def in_forked_child() -> None:
    """Stop to record in a forked process, which is no rank."""
    global recorder, _changing, _queues, show_call, show_task
    recorder, show_call, show_task, _changing, _queues = None, None, None, threading.Lock(), ()


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Label the calls that this thread makes in a block."""
    before = _labels.label
    _labels.label = label
    try:
        yield
    finally:
        _labels.label = before


def program_line(depth: int) -> str:
    """Return the innermost line of this thread outside of torchmpi and torch, as ``file:number``; '' if none is."""
    frame: FrameType | None = _frame_at(depth)
    while frame is not None:
        while id(frame.f_code) in _own_code:  # most frames of a call, on the path of every call
            frame = frame.f_back
            if frame is None:
                return ""
        code = frame.f_code
        if id(code) in _program_code or _note_code(code):
            key = id(code), frame.f_lasti
            line = _lines.get(key)
            if line is None:
                if len(_lines) > _MOST_LINES:
                    _lines.clear()
                line = _lines[key] = f"{code.co_filename}:{frame.f_lineno}"
            return line
        frame = frame.f_back
    return ""


def _line_at(code: CodeType, offset: int) -> str:
    """Return the line of an instruction."""
    key = id(code), offset
    line = _lines.get(key)
    if line is None:
        numbers = (number for begin, end, number in code.co_lines() if begin <= offset < end and number is not None)
        line = _lines[key] = f"{code.co_filename}:{next(numbers, code.co_firstlineno)}"
    return line


# By the ids of code objects, which are kept: hashing a code object takes longer than the rest of the search.
_own_code: dict[int, CodeType] = {}
_program_code: dict[int, CodeType] = {}
_lines: dict[tuple[int, int], str] = {}


def _note_code(code: CodeType) -> bool:
    """Remember whether code is of the program, which it returns, or of torchmpi, torch, and the begin of a thread."""
    is_own = code.co_filename.startswith(_OWN_FOLDERS) or code.co_filename in _BETWEEN
    known = _own_code if is_own else _program_code
    if len(known) > _MOST_LINES:
        known.clear()
        _lines.clear()
    known[id(code)] = code
    return not is_own
