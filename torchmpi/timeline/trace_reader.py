"""Reading of trace files: the calls, waits and steps of each rank, on the clock of rank 0."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ArgumentError
from .clocks import AlignedClock, ClockSample
from .trace_writer import FIRST_ROW, FORMAT

Event = dict[str, Any]
MAIN_THREAD = FIRST_ROW
"""The number of the row of the main thread."""


class TracedCall(NamedTuple):
    """A collective of one rank; times are seconds on the clock of rank 0."""

    rank: int
    group: str
    seq: int
    collective: str
    num_bytes: int
    begin: float
    end: float
    queued: float
    """When the call was queued; `begin` if it ran in the thread of the caller."""
    details: Event

    @property
    def is_queued(self) -> bool:
        """Whether the call ran in the background."""
        return "queued" in self.details


class Interval(NamedTuple):
    """A wait, a message, a range or the end of a step; times are seconds on the clock of rank 0."""

    name: str
    begin: float
    end: float
    thread: int


class RankTrace:
    """What a rank has recorded.

    Attributes:
        job: Rank, size, host and settings, as given by :meth:`torchmpi.session.runtime.Runtime`.
        clock: Converts its times to those of rank 0.
        groups: Name, ranks and number of hosts of each group, by its key.
        events: The events of the file, with local times in microseconds.
        calls: All collectives, also those that are steps of other ones.
        steps: The calls that are steps of a hierarchical collective, as (group, number).
        num_lost: The number of events that did not fit into memory.
        is_complete: Whether the file has its end: the rank was not killed.
    """

    def __init__(self, path: Path) -> None:
        self.job: dict[str, Any] = {}
        self.groups: dict[str, Event] = {}
        self.events: list[Event] = []
        self.num_lost, self.is_complete = 0, False
        samples: list[ClockSample] = []
        for event in read_events(path):
            details = event.get("args", {})
            kind = event["name"] if event["ph"] == "M" else ""
            if kind == "torchmpi_job":
                self.job = details
            elif kind == "torchmpi_clock":
                samples += [ClockSample(*each) for each in details["samples"]]
            elif kind == "torchmpi_lost":
                self.num_lost = details["events"]
            elif kind == "torchmpi_group":
                self.groups[f"{details['key']:x}"] = details
            elif kind == "torchmpi_end":
                self.is_complete = True
            self.events.append(event)
        if self.job.get("format") != FORMAT:
            raise ArgumentError(f"{path} is no trace file of torchmpi, or one of another version.")
        self.rank: int = self.job["rank"]
        self.clock = AlignedClock(samples)
        calls = (self._call(each) for each in self.events if each.get("cat") == "collective")
        self.calls = sorted(calls, key=lambda call: call.end)  # those of the fast path are written apart
        self.steps = _steps_of_calls(self.calls)

    def seconds(self, microseconds: float) -> float:
        """Return a time of the clock of rank 0."""
        return self.clock.aligned(round(microseconds * 1000)) / 1e9

    @property
    def error_seconds(self) -> float:
        """The bound of the error of the times of this rank against those of rank 0."""
        times = [round(each["ts"] * 1000) for each in self.events if each["ph"] == "X"]
        return max((self.clock.error(each) for each in (min(times), max(times))), default=0) / 1e9 if times else 0.0

    def _call(self, event: Event) -> TracedCall:
        details, begin = event["args"], self.seconds(event["ts"])
        return TracedCall(
            self.rank, details["group"], details["call"], event["name"], details["bytes"], begin,
            begin + event["dur"] / 1e6, self.seconds(details["queued"]) if "queued" in details else begin, details,
        )  # fmt: skip

    def intervals(self, category: str) -> list[Interval]:
        """Return the intervals of a category: ``wait``, ``message``, ``range`` or ``step``."""
        found = [each for each in self.events if each.get("cat") == category]
        begins = [self.seconds(each["ts"]) for each in found]
        return [
            Interval(each["name"], begin, begin + each["dur"] / 1e6, each["args"]["thread"])
            for each, begin in zip(found, begins, strict=True)
        ]


def _steps_of_calls(calls: Sequence[TracedCall]) -> set[tuple[str, int]]:
    """Return the calls that run inside another call of the same thread."""
    steps = set()
    outer: dict[int, TracedCall] = {}
    for call in sorted(calls, key=lambda call: (call.begin, -call.end)):
        around = outer.get(call.details["thread"])
        if around is not None and call.end <= around.end:
            steps.add((call.group, call.seq))
        else:
            outer[call.details["thread"]] = call
    return steps


def read_events(path: Path) -> Iterator[Event]:
    """Return the events of a trace file, up to the place at which a killed rank ended it."""
    with gzip.open(path, "rt", encoding="utf-8") as lines, contextlib.suppress(EOFError, zlib.error, OSError):
        for line in lines:
            text = line.strip().rstrip(",")
            if text not in ("[", "]", ""):
                try:
                    yield json.loads(text)
                except ValueError:  # the line at which the file was cut
                    return


def read_folder(folder: Path) -> list[RankTrace]:
    """Return the traces of all ranks, in their order; raise if there are none.

    Files of an earlier, larger job in the same folder are ignored.
    """
    paths = sorted(folder.glob("rank*.json.gz"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not paths:
        raise ArgumentError(
            f"{folder} has no trace files (rankN.json.gz). Record them with TORCHMPI_TIMELINE={folder} in the "
            "environment of the job, or with mpi.timeline.start()."
        )
    traces = [RankTrace(path) for path in paths]
    return sorted((each for each in traces if each.rank < traces[0].job["size"]), key=lambda trace: trace.rank)
