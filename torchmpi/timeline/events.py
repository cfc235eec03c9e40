"""The recorder: the one place to which all calls of a rank are reported, and the readers that receive them.

A call is reported by :meth:`torchmpi.communicators.group.Group.perform` when it ends, a message by
:mod:`torchmpi.collectives.point_to_point`, a wait by :class:`torchmpi.communicators.handle.Handle`. Without a reader,
:data:`recorder` is None, and each of these places costs one comparison. docs/design/timeline.md has the reasons.
"""

from __future__ import annotations

import contextlib
import os
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
OF_DDP = "of DistributedDataParallel"
"""The end of the labels of the calls that torch's reducer makes, for whose ends it waits at the end of backward()."""
SERVER_CALL, SERVER_REQUEST, SERVED = "server call", "server request", "served"
"""Categories of the parameter server: calls of a client, its requests to one rank, and requests that a rank serves."""
MESSAGE, BACKGROUND_MESSAGE = "message", "background message"
"""The categories of messages in trace files; the second one has begun in one call and ends while the program runs, or
waits for it."""
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

    @property
    def name(self) -> str:
        """The collective, as records of all kinds have a name."""
        return self.collective


class MessageNumber(NamedTuple):
    """A message, by its number among those to or from another rank (:mod:`torchmpi.communicators.message_record`)."""

    rank: int
    """The other rank, as a number in the world."""
    number: int


class MessageRecord(NamedTuple):
    """A message that has ended: a send, a receive, or an exchange, which is both."""

    group: GroupInfo
    name: str
    """``send``, ``recv`` or ``sendreceive``."""
    dtype: str
    num_bytes: int
    peer: int
    """The other rank, as a number in the world, of an exchange that from which it receives; -1 if it is not known."""
    sent: MessageNumber | None
    received: MessageNumber | None
    """None also if the numbers are not those of the sender."""
    tag: int
    """The tag of a message of torch.distributed; -1 for others."""
    queue: str
    """The name of the queue to or from the other rank, whose messages end one after the other."""
    is_background: bool
    """Whether the program has made other calls meanwhile: a nonblocking message of torch.distributed."""
    begin: int
    end: int
    thread: int
    origin: Origin
    error: str


class EventQueue(deque[Any]):
    """Records that wait for a reader; those that find no room are counted and dropped."""

    num_lost = 0

    def put(self, record: Reported) -> None:
        """Add a record, in the thread that made the call."""
        if len(self) < MOST_EVENTS:
            self.append(record)
        else:
            self.num_lost += 1


Backends = tuple[tuple[int | None, str], ...]
"""The backends of a call, each with the largest size in bytes for which it is used (None: any)."""
PlainOrigin = tuple[int, CodeType | None, int, str]
"""When a call was queued, code and offset of the line that has made it, label; :func:`origin_of` makes an Origin."""
PlainCall = tuple[Any, ...]
"""A collective that has ended, as it is recorded: :func:`call_record` makes a CallRecord of it."""
WAIT = "wait"
"""The category of the times in which a thread waits for a handle."""


class CallPlan(Protocol):
    """The properties of a call that do not change."""

    backends: Backends

    def names(self, code: int) -> Names:
        """Return what a signature means."""

    def algorithm(self, number: int, backend: str) -> str:
        """Return the name of an algorithm."""


def call_record(plain: PlainCall) -> CallRecord:
    """Convert a plain record. The thread of a reader does this, so that the thread of the call need not."""
    group, seq, plan, code, num_bytes, algorithm, begin, end, thread, origin, error = plain
    collective, op, dtype, root = plan.names(code)
    backend = backend_for(num_bytes, plan.backends)
    return CallRecord(
        group, seq, collective, op, dtype, root, num_bytes, backend, plan.algorithm(algorithm, backend), begin, end,
        thread, origin_of(origin), error,
    )  # fmt: skip


def as_record(reported: Reported) -> Record:
    """Return the record of what a reader was passed."""
    return call_record(reported) if type(reported) is tuple else reported  # type: ignore[return-value]


def origin_of(plain: PlainOrigin) -> Origin:
    """Return the origin of a call, given as it was recorded."""
    queued, code, offset, label = plain
    return Origin(queued, "" if code is None else _line_at(code, offset), label)


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


def backend_for(num_bytes: int, backends: Backends) -> str:
    """Return the name of the backend that runs a call of this size; '' if there is only one way.

    >>> backend_for(8, ((8, "shm"), (None, "p2p"))), backend_for(9, ((8, "shm"), (None, "p2p")))
    ('shm', 'p2p')
    """
    return next((name for limit, name in backends if limit is None or num_bytes <= limit), "")


class SliceRecord(NamedTuple):
    """An interval of one thread or queue that is neither call nor message, such as a wait or a range of the program."""

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
Record = CallRecord | MessageRecord | SliceRecord
Reported = PlainCall | MessageRecord | SliceRecord
Reader = Callable[[Reported], None]


class Recorder:
    """Passes what a rank does to the readers. Reported from any thread."""

    def __init__(self) -> None:
        self.readers: tuple[Reader, ...] = ()

    def origin(self, queued: int) -> PlainOrigin:
        """Return where the program makes the current call: the innermost line outside of torchmpi and torch."""
        return queued, *_place_of_call(2), labels.get(_this_thread(), "") if labels else ""

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
        record = group, seq, plan, code, num_bytes, algorithm, begin, end, _this_thread(), origin, error
        for read in self.readers:
            read(record)

    def slice(self, name: str, category: str, begin: int, track: str = "", **details: Any) -> None:
        """Report an interval that ends now."""
        self.report(SliceRecord(name, category, track, begin, now(), _this_thread(), details))

    def report(self, record: MessageRecord | SliceRecord) -> None:
        """Report something that has ended."""
        for read in self.readers:
            read(record)


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
show_task: Callable[[str, ShownCall | None, Callable[[], Any]], Callable[[], Any]] | None = None
"""Begins an event of a call that is queued now and returns the task that also ends it; None without a profiler."""


class _OpenCalls(threading.local):
    """Whether this thread is in a call that is an event of torch.profiler."""

    has_event = False


_calls = _OpenCalls()
labels: dict[int, str] = {}
"""The labels of the calls that threads make."""
_changing = threading.Lock()


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
    """Pass all further events to a reader, once, which any thread may call."""
    with _changing:
        readers = () if recorder is None else recorder.readers
        if reader not in readers:
            _set_readers((*readers, reader))


def remove_reader(reader: Reader) -> None:
    """Pass no further events to a reader."""
    with _changing:
        if recorder is not None:
            _set_readers(tuple(each for each in recorder.readers if each != reader))


def _set_readers(readers: tuple[Reader, ...]) -> None:
    global recorder
    reporting = recorder or Recorder()
    reporting.readers = readers  # also of calls that are in progress
    recorder = reporting if readers else None
    for changed in when_changed:
        changed()


def in_forked_child() -> None:
    """Stop to record in a forked process, which is no rank."""
    global recorder, _changing, show_call, show_task
    recorder, show_call, show_task, _changing = None, None, None, threading.Lock()
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
        if id(code) in _program_code or (id(code) not in _own_code and _note_code(code)):
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
