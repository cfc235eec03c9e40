"""The line of the program in a stack, for reports."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OWN_FILES = (PACKAGE, os.path.dirname(torch.__file__) + os.sep)


@cache
def installed_files() -> tuple[str, ...]:
    """Return the beginnings of the names of installed files, those of Python included."""
    import sysconfig  # reads all settings with which Python was built: only reports need them

    paths = (sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib", "scripts"))
    return (*_OWN_FILES, *paths, "<frozen ")


@contextmanager
def reading_stacks() -> Iterator[None]:
    """Context manager in which the frames of other threads may be followed outwards.

    Up to Python 3.11, garbage collection may begin when the object of an outer frame is made. A finalizer then lets the
    other thread continue, and if the frame ends, its object refers to freed memory. So there is no collection here.

    >>> with reading_stacks():
    ...     threading.get_ident() in sys._current_frames()
    True
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def location() -> str:
    """Return the line of the program at which the main thread is.

    This is the innermost line outside of installed files; if the program itself is installed, the innermost one
    outside of torchmpi and torch.

    >>> "in" in location()
    True
    """
    with reading_stacks():
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = None if frame is None else traceback.extract_stack(frame)
    return "its main thread has ended" if stack is None else line_of_program(stack)


def line_of_program(stack: traceback.StackSummary) -> str:
    """Return the line of the program in a stack or traceback, as in :func:`location`."""
    for hidden in (installed_files(), _OWN_FILES):
        if shown := [entry for entry in stack if not entry.filename.startswith(hidden)]:
            entry = shown[-1]
            return f"at {entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}".rstrip(": ")
    return "at the end of its program"  # in an exit handler of torchmpi
