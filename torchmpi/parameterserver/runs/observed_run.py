"""The observer of the calls and steps of this process: a recorder, or a simulation with simulated time.

Without one, each place that reports to it costs one comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

SEND, RECEIVE, WAIT, STEP = range(4)
KINDS = ("send", "receive", "wait", "step")
"""The names of the kinds of events."""
NO_NUMBER = float("nan")
NOT_ORDERED = -1, 0
"""Position and checksum of a call whose order is not recorded."""
T = TypeVar("T")


class ObservedServer(Protocol):
    """What observers read of a server of a client."""

    world_rank: int
    label: str
    sent_version: float
    sent_staleness: float
    received_version: float


class ObservedRule(Protocol):
    """What observers read of a rule."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """All numbers on which its result depends."""


class CallsInOrder(Protocol):
    """An order of the calls of all ranks."""

    def run(self, server: ObservedServer, task: Callable[[], T]) -> T:
        """Run a call when it is its turn."""

    def begin_send(self, server: ObservedServer, rule: ObservedRule, data: torch.Tensor) -> None:
        """Begin the send whose turn it is."""

    def begin_receive(self, server: ObservedServer, data: torch.Tensor) -> None:
        """Begin the receive whose turn it is."""

    def end(self, data: torch.Tensor) -> tuple[int, int]:
        """End the call; return its position, and the checksum of its values."""


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
        self.events: list[tuple[Any, ...]] = []
        """Kind, rank, server, rule, begin and end, version (of a step its number), staleness, bytes, norm, position in
        the order of all calls, checksum of the values. Plain tuples, which take half of the time of named ones; numbers
        that are not known are NaN."""
        self.order: CallsInOrder | None = None
        """The order of all calls of the job, if that is recorded or repeated."""

    def begin_send(self, server: ObservedServer, rule: ObservedRule, data: torch.Tensor) -> int:
        """Begin to apply a rule; return the time."""
        if self.order is not None:
            self.order.begin_send(server, rule, data)
        return self.now()

    def begin_receive(self, server: ObservedServer, data: torch.Tensor) -> int:
        """Begin to read; return the time."""
        if self.order is not None:
            self.order.begin_receive(server, data)
        return self.now()

    def note_send(self, server: ObservedServer, rule: str, data: torch.Tensor, begin: int) -> None:
        """Note that a rule has been applied."""
        place = SEND, server.world_rank, server.label, rule, begin, self.now(), server.sent_version
        mark = NOT_ORDERED if self.order is None else self.order.end(data)
        norm = self._norm_of(data) if self.norms else NO_NUMBER
        self.events.append((*place, server.sent_staleness, data.nbytes, norm, *mark))

    def note_receive(self, server: ObservedServer, data: torch.Tensor, begin: int) -> None:
        """Note that values have been read."""
        place = RECEIVE, server.world_rank, server.label, "", begin, self.now(), server.received_version
        mark = NOT_ORDERED if self.order is None else self.order.end(data)
        self.events.append((*place, NO_NUMBER, data.nbytes, NO_NUMBER, *mark))

    def _norm_of(self, data: torch.Tensor) -> float:
        """Return the norm of sent values; of integers there is none."""
        if not data.is_floating_point():
            return NO_NUMBER
        return float(torch.linalg.vector_norm(data, dtype=torch.promote_types(data.dtype, torch.float32)))

    def note_wait(self, rank: int, begin: int) -> None:
        """Note that a rank has waited until now."""
        self.events.append((WAIT, rank, "", "", begin, self.now(), NO_NUMBER, NO_NUMBER, 0, NO_NUMBER, *NOT_ORDERED))

    def begin_step(self, update: Any, rank: int) -> int:
        """Begin the step of an update, after its computation; return the time."""
        return self.now()

    def end_step(self, rank: int, step: int, begin: int) -> None:
        """End a step: the next computation begins."""
        self.events.append((STEP, rank, "", "", begin, self.now(), float(step), NO_NUMBER, 0, NO_NUMBER, *NOT_ORDERED))

    def begin_training(self, update: Any, rank: int) -> None:
        """Take note that the servers of an update exist."""


active: RunObserver | None = None
