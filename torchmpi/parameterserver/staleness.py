"""How old a client's view is: measured after the fact, and bounded beforehand if wished."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from .. import collectives
from ..communicators.levels import Comm
from ..errors import ArgumentError, StallError
from ..log import logger
from ..session import runtime
from .servers import init, receive, send

_FINISHED = torch.iinfo(torch.int64).max
_SHORTEST_NAP_SECONDS = 0.0005
_LONGEST_NAP_SECONDS = 0.01


class StalenessMeter:
    """Last, mean and largest of the numbers it was given.

    >>> meter = StalenessMeter()
    >>> for value in (0.0, 3.0): meter.add(value)
    >>> meter.last, meter.mean, meter.max, meter.count
    (3.0, 1.5, 3.0, 2)
    """

    def __init__(self) -> None:
        self.last = self.max = math.nan
        self.count = 0
        self._sum = 0.0

    @property
    def mean(self) -> float:
        """The mean; nan if there is nothing yet."""
        return self._sum / self.count if self.count else math.nan

    def add(self, value: float) -> None:
        """Count one more."""
        self.max = max(value, self.max) if self.count else value
        self.last = value
        self._sum += value
        self.count += 1

    def __repr__(self) -> str:
        return f"<staleness: last {self.last:g}, mean {self.mean:g}, max {self.max:g}, count {self.count}>"

    def state_dict(self) -> dict[str, float]:
        """The numbers, for a checkpoint."""
        return {"last": self.last, "max": self.max, "count": self.count, "sum": self._sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` gave.

        >>> meter = StalenessMeter(); meter.add(2.0)
        >>> other = StalenessMeter(); other.load_state_dict(meter.state_dict()); other.mean
        2.0
        """
        self.last, self.max = float(state["last"]), float(state["max"])
        self.count, self._sum = int(state["count"]), float(state["sum"])


class Clock:
    """Counts the rounds of each rank, and holds those back that are too far ahead of the slowest.

    Making one is collective over `comm`; after that nobody has to enter a matching call. `value` is the number of
    rounds this rank has ended. A rank that ends its loop says so with ``finish()``, or the others would wait for it:
    best by ``with``. Ranks with ``participates=False`` are never waited for.

        with ps.Clock(max_staleness=2) as clock:
            for batch in my_data:
                clock.wait()            # returns when nobody is more than two rounds behind
                train(batch)
                clock.advance()
    """

    def __init__(self, max_staleness: float, comm: Comm = None, *, participates: bool = True, initial: int = 0) -> None:
        check_max_staleness(max_staleness)
        communicator = runtime.communicator(comm)
        self.max_staleness, self.value = max_staleness, initial
        self.num_waits, self.waited_seconds = 0, 0.0
        self.is_finished = not participates
        self.group = communicator.intra
        self.server = init(torch.zeros(self.group.size, dtype=torch.int64), comm=communicator)
        self.server.is_saved = False  # rounds belong to these ranks: see `initial`
        self._values = torch.zeros(self.group.size, dtype=torch.int64)
        self._put(initial if participates else _FINISHED)
        collectives.barrier(communicator)  # nobody looks before everybody has said where it begins

    def advance(self) -> None:
        """Note that this rank has ended one more round.

        What it has sent in that round must have been waited for, so that others find it.
        """
        if self.is_finished:
            raise ArgumentError(f"{self.group.where}: advance() on a clock that this rank has finished.")
        self.value += 1
        self._put(self.value)

    def finish(self) -> None:
        """Never be waited for again; a second call is harmless."""
        if not self.is_finished:
            self.is_finished = True
            self._put(_FINISHED)

    def read(self) -> list[int | None]:
        """The rounds of all ranks, None for those that have finished."""
        values = receive(self.server, self._values).wait().tolist()
        return [None if value == _FINISHED else value for value in values]

    def wait(self) -> None:
        """Return when no rank is more than `max_staleness` rounds behind this one.

        Raises :class:`~torchmpi.errors.StallError` after ``stall_abort_seconds``, naming the ranks that are behind.
        """
        if math.isinf(self.max_staleness) or self.is_finished or not (behind := self._behind()):
            return
        begin, nap, warned = time.monotonic(), _SHORTEST_NAP_SECONDS, False
        self.num_waits += 1
        config = runtime.current().config
        while behind:
            time.sleep(nap)
            nap = min(1.5 * nap, _LONGEST_NAP_SECONDS)
            behind, waited = self._behind(), time.monotonic() - begin
            if behind and waited >= config.stall_abort_seconds > 0:
                raise StallError(f"{self._report(behind, waited)} The wait exceeds stall_abort_seconds, which ends the job.")
            if behind and waited >= config.stall_warning_seconds and not warned:
                warned = True
                logger.warning(self._report(behind, waited))
        self.waited_seconds += time.monotonic() - begin

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def _put(self, value: int) -> None:
        own = torch.zeros(self.group.size, dtype=torch.int64)
        own[self.group.rank] = value
        send(self.server, own, "max").wait()

    def _behind(self) -> dict[int, int]:
        """The ranks that this one has to wait for, and their rounds."""
        limit = self.value - self.max_staleness
        values = enumerate(self.read())
        return {self.group.world_ranks[row]: value for row, value in values if value is not None and value < limit}

    def _report(self, behind: dict[int, int], waited: float) -> str:
        slowest = min(behind.values())
        ranks = ", ".join(str(rank) for rank, value in behind.items() if value == slowest)
        return (
            f"{self.group.where} has ended {self.value} rounds and waited {waited:.0f} s for rank {ranks}, which has "
            f"ended {slowest}: max_staleness={self.max_staleness:g} allows no more. A rank that leaves its loop early "
            "must call finish()."
        )


def check_max_staleness(max_staleness: float) -> None:
    """Refuse what is no number of rounds.

    >>> check_max_staleness(-1)
    Traceback (most recent call last):
    torchmpi.errors.ArgumentError: max_staleness=-1: expected a number of rounds from 0, or math.inf for no bound.
    """
    if not isinstance(max_staleness, (int, float)) or isinstance(max_staleness, bool) or not max_staleness >= 0:
        raise ArgumentError(
            f"max_staleness={max_staleness!r}: expected a number of rounds from 0, or math.inf for no bound."
        )
