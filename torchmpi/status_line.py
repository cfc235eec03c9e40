"""Progress of work that takes long, for people: a bar on a terminal, a line every ten seconds in a file."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar, TextIO

PLAIN_PERIOD_SECONDS = 10.0
TERMINAL_PERIOD_SECONDS = 0.1
VARIABLE = "TORCHMPI_TERMINAL"
"""Set by ``torchmpi run``: the width of the terminal to which the launcher copies what the ranks write."""
_TELL_SECONDS, _QUIET_SECONDS = 0.5, 2.0
_BAR_WIDTH = 20
_DONE_OF_ALL = re.compile(r"(?:.*? )?(\d+)(?:/(\d+)| %),? ")
_columns_of_launcher = os.environ.pop(VARIABLE, "")  # not for programs that this one starts: it may read their output


def offer_terminal() -> None:
    """Tell the ranks that this process starts of its terminal, if standard error is one."""
    if sys.stderr is not None and sys.stderr.isatty():
        os.environ[VARIABLE] = str(shutil.get_terminal_size().columns)


def columns(stream: TextIO | None = None) -> int:
    """Return the width of the terminal on which a stream (None: standard error) ends; 0 if it is none."""
    stream = sys.stderr if stream is None else stream
    if stream is not None and stream.isatty():
        return shutil.get_terminal_size().columns
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none of the system
        mode = os.fstat(stream.fileno()).st_mode
        if _columns_of_launcher.isdecimal() and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return int(_columns_of_launcher)
    return 0


def quiet_seconds() -> float:
    """Return for how long work that is short in most cases shows nothing."""
    return _QUIET_SECONDS if columns() else PLAIN_PERIOD_SECONDS


class StatusLine:
    """Progress on standard error: one line that is drawn again on a terminal, a plain line every ten seconds elsewhere.

    A text with a number such as ``3/12`` or ``25 %`` gets a bar on a terminal.

    Args:
        quiet_seconds: For how long nothing is shown: most work of some kinds is short.
        now: The clock.
    """

    is_drawn: ClassVar[bool] = False
    """Whether the line of the terminal, of which there is one, shows progress."""

    def __init__(self, *, quiet_seconds: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._begun = now, now()
        self._next = self._begun + quiet_seconds

    def begin(self, text: str) -> None:
        """Show the beginning of a part of the work, also if the last line is not old."""
        self._next = min(self._next, self._now())
        self.show(text)

    def show(self, text: str) -> None:
        """Replace the line, or add one if the last one is ten seconds old."""
        if self._now() < self._next:
            return
        width = columns()
        self._next = self._now() + (TERMINAL_PERIOD_SECONDS if width else PLAIN_PERIOD_SECONDS)
        StatusLine.is_drawn = width > 0
        _write(f"\r\x1b[K{with_bar(text)[: width - 1]}" if width else f"{text}\n")

    def clear(self) -> None:
        """Erase the line."""
        if StatusLine.is_drawn:
            StatusLine.is_drawn = False
            _write("\r\x1b[K")

    @property
    def seconds(self) -> float:
        """The time since the work has begun."""
        return self._now() - self._begun


@contextlib.contextmanager
def telling(text: Callable[[float], str]) -> Iterator[None]:
    """Context manager of work that may take long: a thread shows what `text` returns after so many seconds."""
    status, has_ended = StatusLine(quiet_seconds=quiet_seconds()), threading.Event()

    def tell() -> None:
        while not has_ended.wait(_TELL_SECONDS):
            with contextlib.suppress(Exception):  # whatever this thread meets, the work goes on
                status.show(text(status.seconds))

    thread = threading.Thread(target=tell, name="torchmpi progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        status.clear()


def _write(text: str) -> None:
    with contextlib.suppress(Exception):  # as the logger does: a stream that is closed or full must not end the work
        sys.stderr.write(text)
        sys.stderr.flush()


def with_bar(text: str) -> str:
    """Return a text with a bar before it, if it says how much of the work is done.

    >>> with_bar("bench 3/12 allreduce")
    '[#####---------------] bench 3/12 allreduce'
    >>> with_bar("compiling: 50 %, 8 s")
    '[##########----------] compiling: 50 %, 8 s'
    >>> with_bar("waiting")
    'waiting'
    """
    found = _DONE_OF_ALL.match(text)
    if found is None or not 0 < int(found[1]) <= (total := int(found[2] or 100)):
        return text
    done = _BAR_WIDTH * int(found[1]) // total
    return f"[{'#' * done}{'-' * (_BAR_WIDTH - done)}] {text}"
