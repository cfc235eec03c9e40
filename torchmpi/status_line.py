"""Progress of work that takes long, for people: a bar on a terminal, a line every ten seconds in a file."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Callable

PLAIN_PERIOD_SECONDS = 10.0
TERMINAL_PERIOD_SECONDS = 0.1
_BAR_WIDTH = 20
_DONE_OF_ALL = re.compile(r"(?:.*? )?(\d+)/(\d+) ")


class StatusLine:
    """Progress on standard error: one line that is drawn again on a terminal, a plain line every ten seconds elsewhere.

    A text with numbers such as ``3/12`` at its beginning gets a bar on a terminal.

    Args:
        quiet_seconds: For how long nothing is shown: most work of some kinds is short.
        now: The clock.
    """

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
        is_terminal = _is_terminal()
        self._next = self._now() + (TERMINAL_PERIOD_SECONDS if is_terminal else PLAIN_PERIOD_SECONDS)
        if is_terminal:
            width = shutil.get_terminal_size().columns - 1
            _write(f"\r\x1b[K{with_bar(text)[:width]}")
        else:
            _write(f"{text}\n")

    def clear(self) -> None:
        """Erase the line."""
        if _is_terminal():
            _write("\r\x1b[K")

    @property
    def seconds(self) -> float:
        """The time since the work has begun."""
        return self._now() - self._begun


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _write(text: str) -> None:
    with contextlib.suppress(Exception):  # as the logger does: a stream that is closed or full must not end the work
        sys.stderr.write(text)
        sys.stderr.flush()


def with_bar(text: str) -> str:
    """Return a text with a bar before it, if it says how much of the work is done.

    >>> with_bar("bench 3/12 allreduce")
    '[#####---------------] bench 3/12 allreduce'
    >>> with_bar("waiting")
    'waiting'
    """
    found = _DONE_OF_ALL.match(text)
    if found is None or not 0 < int(found[1]) <= int(found[2]):
        return text
    done = _BAR_WIDTH * int(found[1]) // int(found[2])
    return f"[{'#' * done}{'-' * (_BAR_WIDTH - done)}] {text}"
