"""Functions (threads of which one runs at a time) and generators that run by turns, each until it waits for others."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        self.waiting: list[EventWaiter] = []


class EventWaiter:
    """What waits for events, with its virtual time."""

    def __init__(self, clock: float) -> None:
        self.clock, self.num_missing = clock, 0
        self.events: Sequence[Event] = ()

    def must_wait_for(self, events: Sequence[Event]) -> bool:
        """Wait for those of the events that have not happened; return whether there are any, else set the clock."""
        self.events, self.num_missing = events, 0
        for event in events:
            if not event.is_done:
                event.waiting.append(self)
                self.num_missing += 1
        if not self.num_missing:
            self.pass_time()
        return bool(self.num_missing)

    def pass_time(self) -> None:
        """Set the clock to the last of the events, which have happened, if that is later."""
        self.clock = self.ready_at

    @property
    def ready_at(self) -> float:
        """The time at which it can continue, once the events have happened."""
        return max([self.clock, *(event.time for event in self.events)])


class RunOrder:
    """Events, and who runs next: in a random order, or if `timed` in the order of the clocks in virtual time."""

    def __init__(self, seed: int = 0, *, timed: bool = False) -> None:
        self._random, self._timed = random.Random(seed), timed
        self._numbers = itertools.count()
        self._runnable: list[tuple[float, int, Any]] = []
        self._timers: list[tuple[float, int, Callable[[float], object]]] = []
        self._current: Any = None

    @property
    def clock(self) -> float:
        """The virtual time of what runs."""
        clock: float = self._current.clock
        return clock

    def advance(self, seconds: float) -> None:
        """Let what runs use time."""
        self._current.clock += seconds

    def at(self, time: float, action: Callable[[float], object]) -> None:
        """Call ``action(time)`` when no function has an earlier clock."""
        heapq.heappush(self._timers, (time, next(self._numbers), action))

    def finish(self, event: Event, time: float = 0.0) -> None:
        """Let an event happen."""
        event.is_done, event.time = True, time
        for turn in event.waiting:
            turn.num_missing -= 1
            if not turn.num_missing:
                self._make_runnable(turn)
        event.waiting.clear()

    def _make_runnable(self, turn: EventWaiter) -> None:
        key = turn.ready_at if self._timed else self._random.random()
        heapq.heappush(self._runnable, (key, next(self._numbers), turn))

    def _act(self) -> None:
        """Take the actions that come before the next function."""
        while self._timers and not (self._runnable and self._runnable[0][0] < self._timers[0][0]):
            time, _, action = heapq.heappop(self._timers)
            action(time)


class Programs(RunOrder):
    """Runs generators in virtual time; each yields lists of events, and continues when these have happened."""

    def __init__(self) -> None:
        super().__init__(timed=True)

    def run(self, programs: Sequence[Iterator[Sequence[Event]]]) -> list[float]:
        """Return the times at which the generators end; raise DeadlockError if they wait for each other."""
        waiters = {EventWaiter(0.0): program for program in programs}
        unfinished = set(waiters)
        for waiter in waiters:
            self._make_runnable(waiter)
        while unfinished:
            self._act()
            if not self._runnable:
                raise _deadlock(unfinished)
            self._current = waiter = heapq.heappop(self._runnable)[2]
            waiter.pass_time()
            for events in waiters[waiter]:
                if waiter.must_wait_for(events):
                    break
            else:
                unfinished.discard(waiter)
        return [waiter.clock for waiter in waiters]


class _Function(EventWaiter):
    """One function: its thread, and the events for which it waits."""

    def __init__(self, function: Callable[[], Any], clock: float) -> None:
        super().__init__(clock)
        self.function, self.result = function, None
        self.may_run = threading.Lock()
        self.may_run.acquire()


class Turns(RunOrder):
    """Runs functions, one at a time."""

    stack_bytes = _STACK_BYTES
    """Size of the stacks of the threads."""

    def __init__(self, seed: int = 0, *, timed: bool = False) -> None:
        super().__init__(seed, timed=timed)
        self._unfinished: set[_Function] = set()
        self._over = threading.Lock()
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the results of all functions; raise the first error, or DeadlockError."""
        self._over.acquire()
        stack = threading.stack_size(self.stack_bytes)
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

    def start(self, function: Callable[[], Any]) -> None:
        """Add a function to those that run."""
        self._add(function)

    def wait(self, events: Sequence[Event]) -> None:
        """Return when all these events have happened."""
        turn = self._current
        if turn.must_wait_for(events):
            self._let_others_run(turn)
            turn.pass_time()

    def sleep(self, seconds: float) -> None:
        """Let time pass, and others run."""
        turn = self._current
        turn.clock, turn.events = turn.clock + seconds, ()
        self._make_runnable(turn)
        self._let_others_run(turn)

    def _let_others_run(self, turn: _Function) -> None:
        self._pass_on()
        turn.may_run.acquire()
        if self._error is not None:
            raise _StoppedError

    def _add(self, function: Callable[[], Any]) -> _Function:
        turn = _Function(function, 0.0 if self._current is None else self._current.clock)
        self._unfinished.add(turn)
        self._make_runnable(turn)
        threading.Thread(target=self._work, args=(turn,), daemon=True).start()
        return turn

    def _work(self, turn: _Function) -> None:
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
        self._act()
        if self._unfinished and not self._runnable and self._error is None:
            self._error = _deadlock(self._unfinished)
        if self._error is not None:
            self._runnable = [(0.0, next(self._numbers), turn) for turn in self._unfinished]  # each ends with an error
        if not self._runnable:
            self._over.release()
            return
        _, _, self._current = heapq.heappop(self._runnable)
        self._current.may_run.release()


def _deadlock(waiters: Iterable[EventWaiter]) -> DeadlockError:
    waits = [", ".join(event.description for event in waiter.events if not event.is_done) for waiter in waiters]
    counts = Counter(waits)
    shown = [text if counts[text] == 1 else f"{counts[text]} for {text}" for text in sorted(counts)[:8]]
    return DeadlockError(f"{len(waits)} functions wait for each other: {'; '.join(shown)}")
