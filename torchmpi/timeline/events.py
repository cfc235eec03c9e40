"""The recorder: the one place to which all calls of a rank are reported, and the readers that receive them.

A call is reported by :meth:`torchmpi.communicators.group.Group.perform` when it ends, a message by
:mod:`torchmpi.collectives.point_to_point`, a wait by :class:`torchmpi.communicators.handle.Handle`. Without a reader,
:data:`recorder` is None, and each of these places costs one comparison. docs/design/timeline.md has the reasons.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch

_OWN_FOLDERS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)
_MOST_LINES = 10_000
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


Backends = tuple[tuple[int | None, str], ...]
"""The backends of a call, each with the largest size in bytes for which it is used (None: any)."""
PlainCall = tuple[Any, ...]
"""A collective that has ended, as it is recorded: :func:`call_record` makes a CallRecord of it."""


def call_record(plain: PlainCall) -> CallRecord:
    """Return what a plain record contains. The thread of the call has no time for this; that of a reader has."""
    group, seq, names, num_bytes, backends, begin, end, thread, origin, error = plain
    collective, op, dtype, root = names
    return CallRecord(
        group, seq, collective, op, dtype, root, num_bytes, backend_for(num_bytes, backends), begin, end, thread,
        Origin(*origin), error,
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
    ) -> None:
        """Report a collective that ends now; without an origin, it is the line that makes the call."""
        end = now()
        record = (
            group, seq, names, num_bytes, backends, begin, end, threading.get_ident(),
            origin or (0, program_line(3), _labels.label), error,
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
when_switched: list[Callable[[bool], None]] = []
"""Functions to call when the first reader is added (True) and when the last one is removed (False)."""
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
    """Pass all further events to a reader, which any thread may call."""
    global recorder
    with _changing:
        is_first = recorder is None
        current = recorder or Recorder()
        current.readers = (*current.readers, reader)
        recorder = current
        for switched in when_switched if is_first else ():
            switched(True)


def remove_reader(reader: Reader) -> None:
    """Pass no further events to a reader."""
    global recorder
    with _changing:
        if recorder is None:
            return
        recorder.readers = tuple(each for each in recorder.readers if each != reader)
        if not recorder.readers:
            recorder = None
            for switched in when_switched:
                switched(False)


def in_forked_child() -> None:
    """Stop to record in a forked process, which is no rank."""
    global recorder, _changing, show_call, show_task
    recorder, show_call, show_task, _changing = None, None, None, threading.Lock()


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
    frame = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        own = _own_code.get(id(code))
        if own is None:
            own = _note_code(code)
        if not own[1]:
            key = id(code), frame.f_lasti
            line = _lines.get(key)
            if line is None:
                if len(_lines) > _MOST_LINES:
                    _lines.clear()
                line = _lines[key] = f"{code.co_filename}:{frame.f_lineno}"
            return line
        frame = frame.f_back  # type: ignore[assignment]
    return ""


# By the ids of code objects, which are kept: hashing a code object takes longer than the rest of the search.
_own_code: dict[int, tuple[CodeType, bool]] = {}
_lines: dict[tuple[int, int], str] = {}


def _note_code(code: CodeType) -> tuple[CodeType, bool]:
    if len(_own_code) > _MOST_LINES:
        _own_code.clear()
        _lines.clear()
    is_own = code.co_filename.startswith(_OWN_FOLDERS) or code.co_filename == threading.__file__
    known = _own_code[id(code)] = (code, is_own)
    return known
