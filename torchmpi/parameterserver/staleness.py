"""Staleness of a client's values: measured by a meter, bounded by a clock."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..argument_types import checks_types
from ..communicators.levels import Comm
from ..errors import ArgumentError, StallError
from ..log import logger
from ..session import runtime
from .runs import observed_run
from .runs.run_record import CLOCK
from .servers import receive, refuse_continuing, send
from .workers import RankWorkers, Workers

__all__ = ["Clock", "StalenessMeter"]

_FINISHED = torch.iinfo(torch.int64).max
_MIN_SLEEP_SECONDS, _MAX_SLEEP_SECONDS = 0.0005, 0.01


class StalenessMeter:
    """Last, mean and largest of the values that were added.

    Attributes:
        last: The last value; nan before the first.
        mean: The mean; nan before the first value.
        max: The largest value; nan before the first.
        count: Number of values.

    Example:
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
        """The mean; nan before the first value."""
        return self._sum / self.count if self.count else math.nan

    def add(self, value: float) -> None:
        """Add a value."""
        self.max = max(value, self.max) if self.count else value
        self.last = value
        self._sum += value
        self.count += 1

    def __repr__(self) -> str:
        return f"<staleness: last {self.last:g}, mean {self.mean:g}, max {self.max:g}, count {self.count}>"

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"last": self.last, "max": self.max, "count": self.count, "sum": self._sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        self.last, self.max = float(state["last"]), float(state["max"])
        self.count, self._sum = int(state["count"]), float(state["sum"])


@checks_types
class Clock:
    """Counts the rounds of each rank, and blocks ranks that are too far ahead of the slowest (bounded staleness).

    Only the constructor is collective. A rank must call :meth:`finish` when it leaves its loop, also early;
    otherwise other ranks wait for that rank. Used as a context manager, the clock calls :meth:`finish` at the end.

    Args:
        max_staleness: How many rounds a rank may be ahead of the slowest one; ``math.inf`` for no bound.
        comm: Communicator, or its level. Default: the current communicator.
        participates: False for a rank that no rank waits for.
        initial: Number of rounds that this rank has completed before, when resuming.
        workers: The workers of an update, in the place of `comm`.

    Attributes:
        value: Number of rounds that this rank has completed.
        num_waits: How often :meth:`wait` has blocked.
        waited_seconds: Seconds for which :meth:`wait` has blocked.
        is_finished: Whether this rank has finished.

    Raises:
        ArgumentError: `max_staleness` is negative or not a number.

    Example:
        with ps.Clock(max_staleness=2) as clock:
            for batch in my_data:
                clock.wait()            # returns when no rank is more than two rounds behind
                train(batch)
                clock.advance()
    """

    def __init__(
        self,
        max_staleness: float,
        comm: Comm = None,
        *,
        participates: bool = True,
        initial: int = 0,
        workers: Workers | None = None,
    ) -> None:
        check_max_staleness(max_staleness)
        refuse_continuing("Clock", "there is no limit of staleness (max_staleness), as all would wait for a lost rank")
        self._workers: Workers = RankWorkers(comm) if workers is None else workers
        workers = self._workers
        self.max_staleness, self.value = max_staleness, initial
        self.num_waits, self.waited_seconds = 0, 0.0
        self.is_finished = not participates
        self.server = workers.init(torch.zeros(workers.size, dtype=torch.int64), CLOCK)
        self.server.is_saved = False  # each rank restores its own rounds: see `initial`
        self._values = torch.zeros(workers.size, dtype=torch.int64)
        self._publish(initial if participates else _FINISHED)
        workers.barrier()  # all ranks have published their first value

    def advance(self) -> None:
        """Complete a round. All sends of the round must have been waited for, so that other ranks receive them."""
        if self.is_finished:
            raise ArgumentError(f"{self._workers.where}: advance() on a clock that this rank has finished.")
        self.value += 1
        self._publish(self.value)

    def finish(self) -> None:
        """Leave the clock: no rank waits for this one any more. Further calls have no effect."""
        if not self.is_finished:
            self.is_finished = True
            self._publish(_FINISHED)

    def read(self) -> list[int | None]:
        """Return the number of rounds of each rank; None for ranks that have finished."""
        return _rounds(receive(self.server, self._values).wait())

    def wait(self) -> None:
        """Block until no rank is more than `max_staleness` rounds behind this one.

        Raises:
            StallError: After ``stall_abort_seconds``; the message names the slowest ranks.
        """
        if math.isinf(self.max_staleness) or self.is_finished or not (behind := self._behind()):
            return
        context = self.server.context
        begin, seconds, warned = context.time(), _MIN_SLEEP_SECONDS, False
        observer = observed_run.active
        noted = 0 if observer is None else observer.now()
        self.num_waits += 1
        config = runtime.current().config
        while behind:
            context.pause(self.server, seconds, lambda values: not self._behind(_rounds(values)))
            seconds = min(1.5 * seconds, _MAX_SLEEP_SECONDS)
            behind, waited = self._behind(), context.time() - begin
            if behind and waited >= config.stall_abort_seconds > 0:
                raise StallError(
                    f"{self._report(behind, waited)} The wait exceeds stall_abort_seconds, which ends the job."
                )
            if behind and waited >= config.stall_warning_seconds and not warned:
                warned = True
                logger.warning(self._report(behind, waited))
        self.waited_seconds += context.time() - begin
        if observer is not None:
            observer.note_wait(self.server.world_rank, noted)

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def _publish(self, value: int) -> None:
        own = torch.zeros(self._workers.size, dtype=torch.int64)
        own[self._workers.rank] = value
        send(self.server, own, "max").wait()

    def _behind(self, rounds: list[int | None] | None = None) -> dict[int, int]:
        """Return the world ranks that this rank has to wait for, and their rounds; `rounds` are those of all ranks."""
        limit = self.value - self.max_staleness
        pairs = zip(self._workers.names, self.read() if rounds is None else rounds, strict=True)
        return {rank: value for rank, value in pairs if value is not None and value < limit}

    def _report(self, behind: dict[int, int], waited: float) -> str:
        slowest = min(behind.values())
        ranks = ", ".join(str(rank) for rank, value in behind.items() if value == slowest)
        return (
            f"{self._workers.where} has completed {self.value} rounds and waited {waited:.0f} s for rank {ranks} "
            f"at round {slowest}: max_staleness={self.max_staleness:g} allows no more. A rank that leaves its "
            "loop early must call finish()."
        )


def _rounds(values: torch.Tensor) -> list[int | None]:
    """Return the rounds of the ranks from the values of the server; None for ranks that have finished."""
    return [None if value == _FINISHED else value for value in values.tolist()]


def check_max_staleness(max_staleness: float) -> None:
    """Raise an ArgumentError unless `max_staleness` is a number of rounds.

    >>> check_max_staleness(-1)
    Traceback (most recent call last):
    torchmpi.errors.ArgumentError: max_staleness=-1: expected a number of rounds from 0, or math.inf for no bound.
    """
    if not isinstance(max_staleness, (int, float)) or isinstance(max_staleness, bool) or not max_staleness >= 0:
        raise ArgumentError(
            f"max_staleness={max_staleness!r}: expected a number of rounds from 0, or math.inf for no bound."
        )
