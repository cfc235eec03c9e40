"""The observer of the calls and steps of this process: a recorder, or a simulation with simulated time.

Without one, each place that reports to it costs one comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

SEND, RECEIVE, WAIT, STEP = range(4)
KINDS = ("send", "receive", "wait", "step")
"""The names of the kinds of events."""
NO_NUMBER = float("nan")


class RunObserver:
    """Keeps the events of this process in memory.

    Args:
        now: The clock, in nanoseconds.
        norms: Whether to compute the norms of sent values.

    >>> observer = RunObserver(iter(range(9)).__next__)
    >>> observer.note_wait(2, observer.now())
    >>> observer.events[0][:6]
    (2, 2, '', '', 0, 1)
    """

    def __init__(self, now: Callable[[], int] = time.monotonic_ns, *, norms: bool = False) -> None:
        self.now, self.norms = now, norms
        self.events: list[tuple[int, int, str, str, int, int, float, float, int, float]] = []
        """Kind, rank, server, rule, begin and end, version (of a step its number), staleness, bytes, norm. Plain
        tuples, which take half of the time of named ones; numbers that are not known are NaN."""

    def norm_of(self, data: torch.Tensor) -> float:
        """Return the norm of sent values, if it was asked for; of integers there is none."""
        if not self.norms or not data.is_floating_point():
            return NO_NUMBER
        return float(torch.linalg.vector_norm(data, dtype=torch.promote_types(data.dtype, torch.float32)))

    def note_wait(self, rank: int, begin: int) -> None:
        """Note that a rank has waited until now."""
        self.events.append((WAIT, rank, "", "", begin, self.now(), NO_NUMBER, NO_NUMBER, 0, NO_NUMBER))

    def begin_step(self, update: Any, rank: int) -> int:
        """Begin the step of an update, after its computation; return the time."""
        return self.now()

    def end_step(self, rank: int, step: int, begin: int) -> None:
        """End a step: the next computation begins."""
        self.events.append((STEP, rank, "", "", begin, self.now(), float(step), NO_NUMBER, 0, NO_NUMBER))

    def begin_training(self, update: Any, rank: int) -> None:
        """Take note that the servers of an update exist."""


active: RunObserver | None = None
