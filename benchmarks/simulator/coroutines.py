"""Functions that run by turns, each until it waits for others: threads of which one runs at a time."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

_STACK_BYTES = 1 << 20


class DeadlockError(RuntimeError):
    """All functions that have not ended wait."""


class _StoppedError(BaseException):
    """Ends a function because another one has failed."""


class Event:
    """Something that functions wait for."""

    def __init__(self, description: str) -> None:
        self.description, self.is_done, self.time = description, False, 0.0
        self.waiting: list[_Turn] = []


class _Turn:
    """One function: its thread, and the events for which it waits."""

    def __init__(self, function: Callable[[], Any], clock: float) -> None:
        self.function, self.result, self.clock = function, None, clock
        self.may_run = threading.Lock()
        self.may_run.acquire()
        self.num_missing = 0
        self.events: Sequence[Event] = ()


class Turns:
    """Runs functions, one at a time: in a random order, or if `timed` in the order of their clocks in virtual time."""

    def __init__(self, seed: int = 0, *, timed: bool = False) -> None:
        self._random, self._timed = random.Random(seed), timed
        self._numbers = itertools.count()
        self._runnable: list[tuple[float, int, _Turn]] = []
        self._timers: list[tuple[float, int, Callable[[float], object]]] = []
        self._current: _Turn | None = None
        self._unfinished: set[_Turn] = set()
        self._over = threading.Lock()
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the results of all functions; raise the first error, or DeadlockError."""
        self._over.acquire()
        stack = threading.stack_size(_STACK_BYTES)
        try:
            turns = [self._add(function) for function in functions]
            self._pass_on()
            self._over.acquire()
        finally:
            threading.stack_size(stack)
            self._over.release()
        if self._error is not None:
            raise self._error
        return [turn.result for turn in turns]

    @property
    def clock(self) -> float:
        """The virtual time of the function that runs."""
        assert self._current is not None
        return self._current.clock

    def advance(self, seconds: float) -> None:
        """Let the function that runs use time."""
        assert self._current is not None
        self._current.clock += seconds

    def at(self, time: float, action: Callable[[float], object]) -> None:
        """Call ``action(time)`` when no function has an earlier clock."""
        heapq.heappush(self._timers, (time, next(self._numbers), action))

    def start(self, function: Callable[[], Any]) -> None:
        """Add a function to those that run."""
        self._add(function)

    def wait(self, events: Sequence[Event]) -> None:
        """Return when all these events have happened."""
        turn = self._current
        assert turn is not None
        turn.events = [event for event in events if not event.is_done]
        turn.num_missing = len(turn.events)
        if not turn.num_missing:
            turn.clock = max([turn.clock, *(event.time for event in events)])
            return
        for event in turn.events:
            event.waiting.append(turn)
        self._pass_on()
        turn.may_run.acquire()
        if self._error is not None:
            raise _StoppedError
        turn.clock = max([turn.clock, *(event.time for event in events)])

    def finish(self, event: Event, time: float = 0.0) -> None:
        """Let an event happen."""
        event.is_done, event.time = True, time
        for turn in event.waiting:
            turn.num_missing -= 1
            if not turn.num_missing:
                self._make_runnable(turn)
        event.waiting.clear()

    def _add(self, function: Callable[[], Any]) -> _Turn:
        turn = _Turn(function, 0.0 if self._current is None else self._current.clock)
        self._unfinished.add(turn)
        self._make_runnable(turn)
        threading.Thread(target=self._work, args=(turn,), daemon=True).start()
        return turn

    def _make_runnable(self, turn: _Turn) -> None:
        time = max([turn.clock, *(event.time for event in turn.events)])
        heapq.heappush(self._runnable, (time if self._timed else self._random.random(), next(self._numbers), turn))

    def _work(self, turn: _Turn) -> None:
        turn.may_run.acquire()
        if self._error is None:
            try:
                turn.result = turn.function()
            except _StoppedError:
                pass
            except BaseException as error:
                self._error = error
        self._unfinished.discard(turn)
        self._pass_on()

    def _pass_on(self) -> None:
        """Let another function run; the one that calls this has ended or waits."""
        while self._timers and not (self._runnable and self._runnable[0][0] < self._timers[0][0]):
            time, _, action = heapq.heappop(self._timers)
            action(time)
        if self._unfinished and not self._runnable and self._error is None:
            waits = [", ".join(event.description for event in turn.events) for turn in self._unfinished]
            self._error = DeadlockError(f"{len(waits)} functions wait for each other: {'; '.join(sorted(waits)[:8])}")
        if self._error is not None:
            self._runnable = [(0.0, next(self._numbers), turn) for turn in self._unfinished]  # each ends with an error
        if not self._runnable:
            self._over.release()
            return
        _, _, self._current = heapq.heappop(self._runnable)
        self._current.may_run.release()
