"""The view of a job in a terminal, redrawn until a key ends it. Escapes that every terminal since the VT100 has."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence

from . import top_text
from .job_view import view_of
from .top_text import ORDERS, Line
from .watched_job import LookClock, WatchedJob

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_TOP, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down", "\x1b[5~": "page up",
    "\x1b[6~": "page down", "q": "quit", "Q": "quit", "\x03": "quit", "\x1b": "quit", " ": "pause", "n": "next",
}  # fmt: skip
_HELP = "q end  rwcsmh sort  arrows  space stop"


class Screen:
    """Shows jobs, one at a time.

    Args:
        jobs: The jobs.
        seconds: The time between two looks; None for :class:`LookClock`.
    """

    def __init__(self, jobs: Sequence[WatchedJob], seconds: float | None) -> None:
        self._jobs, self._clock = list(jobs), LookClock(seconds)
        self._shown, self._first, self._order = 0, 0, "r"
        self._is_paused = False
        self._color = top_text.wants_color(sys.stdout.isatty())
        self._lines: list[Line] = []
        self._heading: list[Line] = []

    def run(self) -> int:
        """Show until a key ends it or the last job has ended; return the exit status."""
        with _raw_terminal():
            next_look = 0.0
            while self._jobs:
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + self._clock.pause()
                    if not self._is_paused:
                        self._look()
                self._draw()
                key = _read_key(max(0.0, next_look - time.monotonic()))
                if key == "quit":
                    return 0
                self._take(key)
        print("The job has ended.")
        return 0

    def _look(self) -> None:
        self._jobs = [job for job in self._jobs if job.read()]
        self._shown = min(self._shown, max(0, len(self._jobs) - 1))

    def _take(self, key: str) -> None:
        rows = max(1, shutil.get_terminal_size().lines - len(self._heading) - 2)
        steps = {"up": -1, "down": 1, "page up": -rows, "page down": rows}
        if key in steps:
            self._first += steps[key]
        elif key == "pause":
            self._is_paused = not self._is_paused
        elif key == "next":
            self._shown, self._first = (self._shown + 1) % max(1, len(self._jobs)), 0
        elif key in ORDERS:
            self._order, self._first = key, 0

    def _draw(self) -> None:
        if not self._jobs:
            return
        size = shutil.get_terminal_size((80, 24))
        view = view_of(self._jobs[self._shown])
        heading, rows = top_text.table(view, size.columns, self._order)
        self._heading = [*top_text.head(view, size.columns), heading]
        room = max(1, size.lines - len(self._heading) - 1)
        self._first = max(0, min(self._first, len(rows) - room))
        shown = rows[self._first : self._first + room]
        lines = [*self._heading, *shown, *[Line("")] * (room - len(shown)), Line(self._foot(len(rows), len(shown)))]
        text = "\r\n".join(
            top_text.painted(Line(line.text[: size.columns], line.style), color=self._color) + _END_OF_LINE
            for line in lines[: size.lines]
        )
        sys.stdout.write(_TOP + text + _END_OF_SCREEN)
        sys.stdout.flush()

    def _foot(self, num_rows: int, num_shown: int) -> str:
        parts = [f"by {ORDERS[self._order].name}"]
        if num_shown < num_rows:
            parts.append(f"{self._first + 1}-{self._first + num_shown} of {num_rows}")
        if len(self._jobs) > 1:
            parts.append(f"n: job {self._shown + 1} of {len(self._jobs)}")
        if self._is_paused:
            parts.insert(0, "STOPPED")
        return "  ".join([*parts, _HELP])  # what is cut off in a narrow terminal


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Context manager in which keys arrive at once and unseen; the terminal is as before after it, also on a signal."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    handlers = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        tty.setraw(descriptor)
        sys.stdout.write(_ENTER)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _read_key(seconds: float) -> str:
    """Return the next key, as its name or its letter; '' if there is none in time, or if the window changes."""
    try:
        readable, _, _ = select.select([sys.stdin], [], [], seconds)
    except InterruptedError:
        return ""
    if not readable:
        return ""
    data = os.read(sys.stdin.fileno(), 16).decode(errors="replace")
    if not data:  # the terminal is gone
        return "quit"
    return _KEYS.get(data, data[:1])
