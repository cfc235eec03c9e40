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
Reader = Callable[["CallRecord | SliceRecord"], None]


class Recorder:
    """Passes what a rank does to the readers. Reported from any thread."""

    def __init__(self) -> None:
        self.readers: tuple[Reader, ...] = ()

    def origin(self, queued: int, depth: int = 2) -> Origin:
        """Return where the program makes the current call."""
        return Origin(queued, program_line(depth + 1), getattr(_labels, "label", ""))

    def call(
        self,
        group: GroupInfo,
        seq: int,
        names: Names,
        num_bytes: int,
        backend: str,
        begin: int,
        origin: Origin,
        error: str = "",
    ) -> None:
        """Report a collective that ends now."""
        self.end_event()
        record = CallRecord(group, seq, *names, num_bytes, backend, begin, now(), threading.get_ident(), origin, error)
        for read in self.readers:
            read(record)

    def begin(self, group: GroupInfo, names: Names, numel: int, *, is_queued: bool) -> int:
        """Report a collective that begins now, which `call` ends in the same thread; return the time."""
        open_events, begin_event = _calls.events, show_call
        if begin_event is None or is_queued or any(open_events):  # the last: a step of a hierarchical call
            open_events.append(None)
        else:
            open_events.append(begin_event(group, names, numel))
        return now()

    def end_event(self) -> None:
        """End the event of torch.profiler that `begin` has begun, if it has."""
        event = _calls.events.pop()
        if event is not None:
            event.__exit__(None, None, None)

    def slice(self, name: str, category: str, begin: int, track: str = "", **details: Any) -> None:
        """Report an interval that ends now."""
        record = SliceRecord(name, category, track, begin, now(), threading.get_ident(), details)
        for read in self.readers:
            read(record)


recorder: Recorder | None = None
"""The recorder while there is a reader, else None."""
when_switched: list[Callable[[bool], None]] = []
"""Functions to call when the first reader is added (True) and when the last one is removed (False)."""
show_call: Callable[[GroupInfo, Names, int], Any] | None = None
"""Begins an event of torch.profiler while one runs, else None."""
show_task: Callable[[str, Callable[[], Any]], Callable[[], Any]] | None = None
"""Returns a task for another thread whose time from now to its end is an event, while a profiler runs, else None."""


class _OpenCalls(threading.local):
    """The events of torch.profiler of the calls that this thread is in, innermost last; None for calls without."""

    def __init__(self) -> None:
        self.events: list[Any] = []


_calls = _OpenCalls()
_labels = threading.local()
_changing = threading.Lock()


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
    before = getattr(_labels, "label", "")
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
