"""Ranks of other hosts, as rank 0 of their job shows them: their times, and what they tell of themselves."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from ... import files
from ...supervision.lateness import Pace
from .call_waits import Floats
from .job_history import SECOND, StepPace
from .rank_processes import RankProcess

_MOST_KEPT = 256
"""Two minutes, as a rank tells of itself twice a second."""


class _Told(NamedTuple):
    """What a rank has told at one time, on its own clock."""

    at: float
    pace: Pace
    step: int | None
    samples: int
    ran: int
    queued: int


class FarRank:
    """A rank of which rank 0 has told.

    >>> rank = FarRank(3)
    >>> told = {"step": 5, "samples": 10, "line": "at train.py:3 in load", "ran": 0, "queued": 0}
    >>> rank.take(["b", [1_000_000_000, 4, 600_000_000, 100_000_000, 0, 0, 0, 0, 0], told], now=5e9)
    >>> rank.take(["b", [2_000_000_000, 6, 800_000_000, 200_000_000, 0, 0, 0, 0, 0], {**told, "step": 7}], now=6e9)
    >>> rank.entry()["host"], rank.pace().step_seconds, rank.times()[-1].tolist()
    ('b', 0.5, [6000000000.0, 2000000000.0, 800000000.0, 200000000.0])
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._host = rank, ""
        self._values: dict[str, Any] = {}
        self._known: deque[tuple[float, _Told]] = deque(maxlen=_MOST_KEPT)
        self.looks: deque[tuple[str, str]] = deque(maxlen=40)
        """The line and the work of the main thread, when it was in no call."""

    def take(self, told: Any, now: float) -> None:
        """Take what rank 0 shows, unless it is what it showed before, or damaged."""
        try:
            host, pace, values = told
            new = Pace(*map(int, pace))
            values = {name: files.printable(v) if isinstance(v, str) else v for name, v in dict(values).items()}
            step = values.get("step")
            entry = _Told(
                float(new.now), new, None if step is None else int(step), int(values.get("samples", 0)),
                int(values.get("ran", 0)), int(values.get("queued", 0)),
            )  # fmt: skip
            cores = frozenset(map(int, values.get("cores", ())))
        except (TypeError, ValueError):
            return
        if self._known and entry.at <= self._known[-1][1].at:
            return
        self._known.append((now, entry))
        self._host, self._values = files.printable(str(host)), {**values, "cores": cores}
        if values and not values.get("is_inside"):
            self.looks.append((str(values.get("line", "")), str(values.get("work", ""))))

    def times(self) -> Floats:
        """Return when it has told (on the clock of this host), its own time, and that in calls, and waiting."""
        rows = [(now, told.at, told.pace.inside, told.pace.waited) for now, told in self._known]
        return np.array(rows, np.float64).reshape(-1, 4)

    def facts(self) -> RankProcess:
        """Return what it tells of its process, as far as :class:`ProcessWatch` sees the same of ranks of this host."""
        memory, cores = self._values.get("memory_bytes"), self._values.get("cores", frozenset())
        facts = RankProcess("", memory if isinstance(memory, int) else None, cores)
        told = [each for _, each in self._known if each.ran][-5:]
        if len(told) < 2:
            return facts
        seconds = (told[-1].at - told[0].at) / SECOND
        ran, queued, faults = (
            told[-1].ran - told[0].ran, told[-1].queued - told[0].queued,
            told[-1].pace.disk_faults - told[0].pace.disk_faults,
        )  # fmt: skip
        return facts._replace(
            main_busy=ran / SECOND / seconds,
            main_delayed=queued / SECOND / seconds,
            faults_per_second=faults / seconds,
        )

    def pace(self, seconds: float = 10.0) -> StepPace:
        """Return how fast it goes."""
        told = [each for _, each in self._known if each.step is not None]
        if not told:
            return StepPace()
        last = told[-1]
        first = next(each for each in told if each.at >= last.at - seconds * SECOND or each is last)
        took, steps = (last.at - first.at) / SECOND, (last.step or 0) - (first.step or 0)
        loss = self._values.get("loss")
        return StepPace(
            last.step,
            took / steps if steps > 0 else None,
            (last.samples - first.samples) / took if last.samples > first.samples and took > 0 else None,
            float(loss) if isinstance(loss, int | float) else None,
        )

    def entry(self) -> dict[str, Any]:
        """Return what is known of it, in the words of the view."""
        facts, pace, values = self.facts(), self.pace(), self._values
        call, line = str(values.get("call", "")), str(values.get("line", ""))
        seconds = values.get("call_seconds", 0.0)
        return {
            "rank": self._rank, "host": self._host, "process": None, "facts": facts, "pace": pace,
            "call": call, "call_seconds": float(seconds) if isinstance(seconds, int | float) else 0.0,
            "line": line, "work": str(values.get("work", "")),
        }  # fmt: skip
