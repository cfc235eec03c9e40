"""Turns of the calls of all ranks, of which one runs at a time: in the order in which they come, or a recorded one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from ..communicators import group_of_ranks
from ..communicators.group import Group
from ..errors import StallError
from ..session import runtime
from .rules import PreparedRule
from .runs.call_order import ComparedCalls, NumberedCalls, RecordedRows
from .runs.observed_run import ObservedServer
from .server_requests import ServerRequest
from .servers import Server, init

T = TypeVar("T")
_MIN_SLEEP_SECONDS, _MAX_SLEEP_SECONDS = 20e-6, 1e-3


class CallNumbers:
    """Two numbers that all ranks share: of the calls that have a number, and of those that have ended.

    A number is the version of a server of one element: a send adds one to it, and finds the number before. So it does
    not matter whether the ranks share memory. The constructor and :meth:`close` are collective.
    """

    def __init__(self, world: Group) -> None:
        # A communicator of its own: its client is not that of a call which waits or runs.
        self._communicator = group_of_ranks.make(world, range(world.size), "order of calls")
        self._given, self._ended = (
            init(torch.zeros(1, dtype=torch.int64), self._communicator, name=name) for name in ("given", "ended")
        )
        self._given.is_internal = self._ended.is_internal = True
        self._add_one = self._given.prepared("zero")
        self._lock = threading.Lock()  # of the threads of this rank, which share the client
        self._limit_seconds = runtime.current().config.stall_abort_seconds

    def take(self) -> int:
        """Return the number of the next call."""
        return self._request(self._given, self._add_one)

    @contextmanager
    def turn(self, number: int, describe: Callable[[int], str]) -> Iterator[None]:
        """Wait until all calls before a number have ended; this one ends with the block.

        `describe` returns the message of a StallError, for the number of the call that does not end.
        """
        seconds, begin = _MIN_SLEEP_SECONDS, time.monotonic()
        while (ended := self._request(self._ended, None)) != number:
            time.sleep(seconds)
            seconds = min(1.5 * seconds, _MAX_SLEEP_SECONDS)
            if time.monotonic() - begin >= self._limit_seconds > 0:
                raise StallError(f"{describe(ended)}, which has not been made for {self._limit_seconds:.0f} s.")
        try:
            yield
        finally:  # a call that fails has a number too
            self._request(self._ended, self._add_one)

    def _request(self, server: Server, rule: PreparedRule | None) -> int:
        """Make a request that is no call of the run: neither recorded nor ordered; return the version that it finds."""
        values = torch.zeros(1, dtype=torch.int64)
        with self._lock:
            return ServerRequest(server, values, rule, server.label).visit(values).versions

    def close(self) -> None:
        """Free the servers."""
        self._communicator.free()


class RecordedCalls(NumberedCalls):
    """Gives each call of the job the next number."""

    def __init__(self, numbers: CallNumbers) -> None:
        super().__init__()
        self._numbers = numbers

    def run(self, server: ObservedServer, task: Callable[[], T]) -> T:
        """Run a call when no other one runs."""
        number = self._numbers.take()
        with self._numbers.turn(
            number, lambda ended: f"rank {server.world_rank}: the recording waits for the end of call {ended}"
        ):
            self.position = number
            return task()


class RepeatedCalls(ComparedCalls):
    """Lets each call wait for its turn in a recorded order."""

    def __init__(self, numbers: CallNumbers, rows: RecordedRows) -> None:
        super().__init__(rows)
        self._numbers = numbers

    def run(self, server: ObservedServer, task: Callable[[], T]) -> T:
        """Run a call when all calls before it have run."""
        number, row = self.rows.take(server)
        with self._numbers.turn(
            number, lambda ended: f"rank {server.world_rank}: the replay waits for {self.rows.describe(ended)}"
        ):
            self.set(number, row)
            return task()
