"""A progress bar on standard error: an updated line on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import threading
from typing import TextIO

from torch import Tensor
from tqdm import tqdm

from ..status_line import PLAIN_PERIOD_SECONDS, TERMINAL_PERIOD_SECONDS, columns
from .data_loading import num_batches
from .state import State


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    monitor_interval = 0  # no second thread that draws
    loss: Tensor | float | None = None

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or write a line if the stream is no terminal."""
        if self.loss is not None:
            # Reading a loss makes the host wait for a GPU, so it is read only to be shown.
            number = self.loss.item() if isinstance(self.loss, Tensor) else self.loss
            self.set_postfix_str(f"loss {number:.4f}", refresh=False)
        if columns(self.fp):
            return bool(super().display(msg, pos))
        if msg is None:
            self.fp.write(f"{self}\n")
            self.fp.flush()
        return False


_Bar.set_lock(threading.RLock())  # the default is a lock of multiprocessing, which needs a semaphore of the system


class ProgressBar:
    """Progress of a run, one line per epoch on a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._columns = columns(self._stream)
        self._is_terminal = self._columns > 0
        self._bar: _Bar | None = None

    def begin_epoch(self, state: State) -> None:
        """Start the present epoch on a new line."""
        shown = None if self._bar is None else self._bar.last_print_t
        self._end()
        self._bar = _Bar(
            desc=f"epoch {state.epoch + 1}/{state.max_epochs}",
            total=num_batches(state.iterator),
            initial=state.batch,
            unit=" batches",
            file=self._stream,
            ncols=None if self._stream.isatty() else self._columns or None,
            leave=self._is_terminal,
            mininterval=TERMINAL_PERIOD_SECONDS if self._is_terminal else PLAIN_PERIOD_SECONDS,
            miniters=1,
            delay=0 if self._is_terminal else 1e-9,  # with a delay, tqdm does not display the bar at once
        )
        if not self._is_terminal and shown is not None:
            self._bar.last_print_t = shown  # the period continues over short epochs

    def update(self, state: State) -> None:
        """Set the number of batches done. Draws at most once per period."""
        assert self._bar is not None
        self._bar.loss = state.loss
        self._bar.update(state.batch - self._bar.n)

    def close(self) -> None:
        """Draw the last line and end it."""
        if self._bar is not None and not self._is_terminal and self._bar.n > self._bar.last_print_n:
            self._bar.refresh()
        self._end()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
