"""The observer of the calls and steps of this process: a recorder, or a simulation with simulated time.

Without one, each place that reports to it costs one comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
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

    @property
    def sent_version(self) -> float:
        """Of the last send."""

    @property
    def sent_staleness(self) -> float:
        """Of the last send."""

    @property
    def received_version(self) -> float:
        """Of the last receive."""


class ObservedRule(Protocol):
    """What observers read of a rule."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """All numbers on which its result depends."""


class ObservedRequest(Protocol):
    """What observers read of a request."""

    @property
    def server(self) -> ObservedServer:
        """Its server."""

    @property
    def rule(self) -> ObservedRule | None:
        """The rule of a send; None of a receive."""


class CallsInOrder(Protocol):
    """An order of the calls of all ranks."""

    def run(self, server: ObservedServer, task: Callable[[], T]) -> T:
        """Run a call when it is its turn."""

    def begin(self, server: ObservedServer, rule: ObservedRule | None, data: torch.Tensor) -> None:
        """Begin the request whose turn it is: a send, or without a rule a receive."""

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

    def begin(self, request: ObservedRequest, data: torch.Tensor) -> Callable[[], None]:
        """Begin a request; return what ends it."""
        if self.order is not None:
            self.order.begin(request.server, request.rule, data)
        return partial(self._end, request, data, self.now())

    def _end(self, request: ObservedRequest, data: torch.Tensor, begin: int) -> None:
        server, rule, end = request.server, request.rule, self.now()
        kind, name, version, staleness = RECEIVE, "", server.received_version, NO_NUMBER
        if rule is not None:
            kind, name, version, staleness = SEND, rule.name, server.sent_version, server.sent_staleness
        mark = NOT_ORDERED if self.order is None else self.order.end(data)
        norm = self._norm_of(data) if self.norms and rule is not None else NO_NUMBER
        place = kind, server.world_rank, server.label, name, begin, end, version
        self.events.append((*place, staleness, data.nbytes, norm, *mark))

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
when_changed: list[Callable[[], None]] = []
"""Called when `active` has changed."""


def observe(observer: RunObserver | None) -> None:
    """Let an observer see the calls and steps of this process, or none."""
    global active
    active = observer
    for change in when_changed:
        change()
