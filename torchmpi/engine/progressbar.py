"""A progress bar on standard error: an updated line on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from torch import Tensor

WIDTH = 24
TERMINAL_PERIOD_S = 0.1
PLAIN_PERIOD_S = 10.0


class ProgressBar:
    """Progress of a run, one line per epoch on a terminal.

    bar = ProgressBar()
    bar.begin("epoch 1/5", total=100)
    bar.update(1, loss)
    bar.close()
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._shown = time.monotonic()
        self._pending: str | None = None
        self.begin("", None)

    def begin(self, title: str, total: int | None) -> None:
        """Start an epoch on a new line. `total` is the number of batches, None if unknown."""
        self._end_line()
        self._title, self._total = title, total
        self._begin = time.monotonic()
        self._width = 0

    def update(self, done: int, loss: Tensor | float | None) -> None:
        """Set the number of batches done. Draws at most once per period."""
        now = time.monotonic()
        is_due = now - self._shown >= (TERMINAL_PERIOD_S if self._is_terminal else PLAIN_PERIOD_S)
        if is_due or done == self._total:
            # Reading a loss makes the host wait for a GPU, so it is read only to be shown.
            number = loss.item() if isinstance(loss, Tensor) else loss
            self._pending = self.line(done, number, now - self._begin)
        if is_due or (self._is_terminal and done == self._total):
            self._draw(now)

    def close(self) -> None:
        """Draw the last line and end it."""
        if not self._is_terminal and self._pending is not None:
            self._draw(time.monotonic())
        self._end_line()

    def line(self, done: int, loss: float | None, seconds: float) -> str:
        """Return the text of the bar.

        >>> bar = ProgressBar(); bar.begin("epoch 1/2", 4); bar.line(2, 0.5, 1.0)
        'epoch 1/2 [############............] 2/4, 2.0 batches/s, loss 0.5000'
        """
        parts = [f"{done}/{self._total}" if self._total else str(done)]
        if seconds > 0:
            parts.append(f"{done / seconds:.1f} batches/s")
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        filled = min(WIDTH, WIDTH * done // self._total) if self._total else 0
        drawn = f" [{'#' * filled}{'.' * (WIDTH - filled)}]" if self._total else ""
        return f"{self._title}{drawn} {', '.join(parts)}"

    def _draw(self, now: float) -> None:
        assert self._pending is not None
        # Spaces overwrite the end of a longer line.
        self._stream.write("\r" + self._pending.ljust(self._width) if self._is_terminal else self._pending + "\n")
        self._stream.flush()
        self._width, self._shown, self._pending = len(self._pending), now, None

    def _end_line(self) -> None:
        if self._is_terminal and getattr(self, "_width", 0):
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0
