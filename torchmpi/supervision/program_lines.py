"""The line of the program in a stack, for reports."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from functools import cache
from importlib.util import find_spec
from typing import Any

from ..shared_memory.kernels import no_garbage_collection

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = find_spec("torch")  # not loaded here: commands that only name lines need not wait for it
_OWN_FILES = (PACKAGE, os.path.dirname((_TORCH and _TORCH.origin) or "") + os.sep)
_ENGINE = os.path.join("torchmpi", "engine") + os.sep
_WORK = (
    ("torch/utils/data/", "data loading"),
    ("torchmpi/engine/data_loading", "data loading"),
    ("torchmpi/engine/checkpoint", "saving a checkpoint"),
    ("torch/serialization", "loading or saving a file"),
)
"""Parts of names of files in a stack, and what the thread does if it is there."""


@cache
def installed_files() -> tuple[str, ...]:
    """Return the beginnings of the names of installed files, those of Python included."""
    import sysconfig  # reads all settings with which Python was built: only reports need them

    paths = (sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib", "scripts"))
    return (*_OWN_FILES, *paths, "<frozen ")


def location() -> str:
    """Return the line of the program at which the main thread is.

    This is the innermost line outside of installed files; if the program itself is installed, the innermost one
    outside of torchmpi and torch.

    >>> "in" in location()
    True
    """
    stack = _stack_of_main_thread()
    return "its main thread has ended" if stack is None else line_of_program(stack)


def activity() -> dict[str, Any]:
    """Return where the main thread is, for those who look at a running rank.

    Returns:
        When this was (``at``, in nanoseconds), the ``line`` of the program, the ``work`` if the stack shows a kind of
        it, and whether the thread is in a function of torchmpi (``is_inside``) without such work.
    """
    stack, at = _stack_of_main_thread(), time.monotonic_ns()
    if stack is None:
        return {"at": at, "line": "its main thread has ended", "work": "", "is_inside": False}
    work = next((name for entry in reversed(stack) for part, name in _WORK if part in entry.filename), "")
    # What follows the last line of the program; before it may be `torchmpi run`, or the loop of an engine.
    last = max(
        (index for index, entry in enumerate(stack) if not entry.filename.startswith(installed_files())), default=0
    )
    inner = (entry.filename for entry in stack[last + 1 :])
    is_inside = any(name.startswith(PACKAGE) and _ENGINE not in name and name != __file__ for name in inner)
    return {"at": at, "line": line_of_program(stack), "work": work, "is_inside": is_inside and not work}


def _stack_of_main_thread() -> traceback.StackSummary | None:
    # Making the object of an outer frame may collect garbage in Python 3.11. A finalizer then lets the other thread
    # continue, and if the frame ends, its object refers to freed memory.
    with no_garbage_collection():
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = None if frame is None else traceback.extract_stack(frame)
        del frame  # in the main thread a cycle
    return stack


def line_of_program(stack: traceback.StackSummary) -> str:
    """Return the line of the program in a stack or traceback, as in :func:`location`."""
    for hidden in (installed_files(), _OWN_FILES):
        if shown := [entry for entry in stack if not entry.filename.startswith(hidden)]:
            entry = shown[-1]
            return f"at {entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}".rstrip(": ")
    return "at the end of its program"  # in an exit handler of torchmpi
