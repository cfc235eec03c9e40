"""What this rank tells of its pace: its time in calls and out of them, what the kernel counts, and where it is."""

from __future__ import annotations

import contextlib
import gc
import linecache
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

from .. import files
from ..communicators.group import GroupContext
from ..communicators.progress import progress
from ..launch import affinity
from ..shared_memory.kernels import no_garbage_collection
from .lateness import BACKWARD, ELSEWHERE, ENGINE, FORWARD, LOADING, OPTIMIZER, SAVING, SEPARATOR, Looks, Pace
from .program_lines import PACKAGE, activity, installed_files
from .status_exchange import NO_CALL, StatusExchange

_MOST_PLACES, _MOST_CHARACTERS = 4, 60
"""The lines that a rank tells, and the characters of each: a note has room for a thousand."""
_PHASES = {
    (os.path.join("torch", "utils", "data", "dataloader.py"), ""): LOADING,
    (os.path.join("torchmpi", "engine", "data_loading.py"), ""): LOADING,
    (os.path.join("torch", "optim", ""), ""): OPTIMIZER,
    (os.path.join("torch", "autograd", ""), "backward"): BACKWARD,
    (os.path.join("torch", "autograd", "graph.py"), ""): BACKWARD,
    (os.path.join("torch", "serialization.py"), "save"): SAVING,
    (os.path.join("torchmpi", "engine", "checkpoint.py"), ""): SAVING,
    (os.path.join("torchmpi", "engine", ""), ""): ENGINE,
    (os.path.join("torch", "nn", "modules", "module.py"), "_call_impl"): FORWARD,
}
"""The phase of a program by a part of the file of a function, and by the name of the function ('': all)."""


class PaceReader:
    """Reads the pace of this rank; the descriptors are kept open, as a reading must cost nothing."""

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._limits = _opened(affinity.statistics_of_limits())
        self._collecting, self._collection_began = 0, 0
        gc.callbacks.append(self._note_collection)

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._note_collection)
        if self._limits is not None:
            os.close(self._limits)
            self._limits = None

    def _note_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began = time.monotonic_ns()
        else:
            self._collecting += time.monotonic_ns() - self._collection_began

    def read(self) -> Pace:
        record = self._context.flight_record
        calls, ticks, inside, waited = self._context.call_counts.totals()
        if ticks and record is not None:
            inside += int(ticks * record.seconds_per_tick() * 1e9)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return Pace(
            now=time.monotonic_ns(),
            calls=calls,
            inside=inside,
            waited=waited,
            throttled=throttled_ns(_read(self._limits)),
            in_kernel=int(usage.ru_stime * 1e9),
            faults=usage.ru_minflt,
            disk_faults=usage.ru_majflt,
            collecting=self._collecting,
        )


def _opened(path: str | Path | None) -> int | None:
    """Open a file of the kernel; None if it cannot be read."""
    try:
        return None if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _read(file: int | None) -> str:
    try:
        return "" if file is None else os.pread(file, 4096, 0).decode()
    except OSError:
        return ""


def ran_ns(schedule: str) -> int:
    """Return for how long a thread has run, given its `schedstat`.

    >>> ran_ns("5 7 2"), ran_ns("")
    (5, 0)
    """
    return int((*schedule.split(), "0")[0])


def queued_ns(schedule: str) -> int:
    """Return for how long a thread could have run and had no core, given its `schedstat`.

    >>> queued_ns("5 7 2"), queued_ns("")
    (7, 0)
    """
    return int((*schedule.split(), "0", "0")[1])


def throttled_ns(statistics: str) -> int:
    r"""Return for how long a control group has been stopped by its limit, given its `cpu.stat`.

    >>> throttled_ns("nr_periods 10\nnr_throttled 2\nthrottled_usec 30\n"), throttled_ns("throttled_time 7\n")
    (30000, 7)
    """
    values = dict(line.split(" ", 1) for line in statistics.splitlines() if " " in line)
    return 1000 * int(values.get("throttled_usec", 0)) + int(values.get("throttled_time", 0))


# --- where the main thread is -----------------------------------------------------------------------------------------


class StackLooks:
    """Looks at the main thread again and again, in a thread of its own, for a time.

    `seconds`: for how long; `interval`: the time between two looks.
    """

    def __init__(self, seconds: float, interval: float) -> None:
        self._num_looks, self._queued, self._begin = 0, 0.0, time.monotonic_ns()
        self._counts: dict[tuple[str, str, int, str], int] = {}
        self._duration = 0
        self._end, self._interval = time.monotonic() + seconds, interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchmpi stack looks", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether there will be no more looks."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        main = threading.main_thread()
        ident, schedule = main.ident or 0, _opened(f"/proc/self/task/{main.native_id}/schedstat")
        last, was_outside = queued_ns(_read(schedule)), False
        while time.monotonic() < self._end and not self._stopped.wait(self._interval):
            with no_garbage_collection():  # as in `program_lines.location`
                place = place_of(sys._current_frames().get(ident))
            queued, self._num_looks = queued_ns(_read(schedule)), self._num_looks + 1
            # A thread that waits in a call yields its core, and is queued too: this says nothing of its pace.
            self._queued += (queued - last) * (was_outside + (place is not None)) / 2
            last, was_outside = queued, place is not None
            if place is not None:
                self._counts[place] = self._counts.get(place, 0) + 1
        self._duration = time.monotonic_ns() - self._begin
        if schedule is not None:
            os.close(schedule)

    def result(self) -> Looks:
        """Return what has been seen; of the least frequent lines only the phase."""
        counts = sorted(self._counts.copy().items(), key=lambda item: -item[1])
        found: dict[str, int] = {}
        for index, ((phase, file, line, name), count) in enumerate(counts):
            place = phase + SEPARATOR + (_describe(file, line, name) if file and index < _MOST_PLACES else "")
            found[place] = found.get(place, 0) + count
        duration = self._duration or time.monotonic_ns() - self._begin
        return Looks(self._num_looks, self._queued / duration, found)


def place_of(frame: FrameType | None) -> tuple[str, str, int, str] | None:
    """Return phase, file, line and function of the innermost frame of the program; None inside of a call of torchmpi.

    >>> place_of(sys._getframe())[0]
    'a line of the program'
    """
    if frame is None:
        return None
    phase, hidden = "", installed_files()
    outer: FrameType | None = frame
    line = "", 0, ""
    while outer is not None:
        code = outer.f_code
        phase = phase or _phase_of(code.co_filename, code.co_name)
        if not line[0]:
            if not phase and code.co_filename.startswith(PACKAGE):
                return None
            if not code.co_filename.startswith(hidden):
                line = code.co_filename, outer.f_lineno, code.co_name
        outer = outer.f_back
    return phase or ELSEWHERE, *line


@cache
def _phase_of(file: str, function: str) -> str:
    matches = (phase for (part, name), phase in _PHASES.items() if f"{os.sep}{part}" in file and name in ("", function))
    return next(matches, "")


def _describe(file: str, line: int, name: str) -> str:
    text = linecache.getline(file, line).strip()
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS - 3]}..."
    return f"at {file[-60:]}:{line} in {name}: {text}".rstrip(": ")


def account(exchange: StatusExchange) -> dict[str, Any]:
    """Return what this rank tells those who look at the job from another host, in types of JSON.

    Its last step, samples and loss; its call, and for how long; the line of the program and the kind of work; memory,
    cores, and for how long (in nanoseconds) its main thread has run, and waited for a core.
    """
    step, samples, loss = progress.last()
    call, call_seconds = exchange.doing()
    main = threading.main_thread()
    schedule = files.text_of(f"/proc/self/task/{main.native_id}/schedstat")
    pages = (*files.text_of("/proc/self/statm").split(), "0", "0")[1]
    seen = activity()
    return {
        "step": step, "samples": samples, "loss": loss if math.isfinite(loss) else None,
        "call": call if call != NO_CALL else "", "call_seconds": call_seconds,
        "line": seen["line"], "work": seen["work"],
        "is_inside": seen["is_inside"], "memory_bytes": int(pages) * resource.getpagesize(),
        "cores": sorted(os.sched_getaffinity(0)), "ran": ran_ns(schedule), "queued": queued_ns(schedule),
    }  # fmt: skip


class Note(NamedTuple):
    """What a rank tells of itself.

    >>> note = Note(Pace(1, 2), Looks(4, 0.5, {"a": 3}), 5)
    >>> Note.unpacked(note.packed()) == note, Note.unpacked("?")
    (True, None)
    """

    pace: Pace
    looks: Looks = Looks()
    wanted: int = 0
    """The number of the last request for looks."""
    is_watched: bool = False
    """Whether ``torchmpi top`` looks at rank 0, and the ranks of this other host are to tell more."""
    told: Mapping[str, Any] = MappingProxyType({})
    """What they tell then (:func:`account`)."""
    round_trip: int = 0
    """Of the first rank of a host: that to the next host (:meth:`Heartbeat.ask_round_trip`)."""

    def packed(self) -> list[Any]:
        """Return the note in types of JSON."""
        looks = [self.looks.num, self.looks.queued, dict(self.looks.places)]
        return [list(self.pace), looks, self.wanted, self.is_watched, dict(self.told), self.round_trip]

    def without_lines(self) -> Note:
        r"""Return the note with the phases alone, for where there is no room.

        >>> dict(Note(Pace(), Looks(9, 0.0, {f"a{SEPARATOR}x": 1, f"a{SEPARATOR}y": 2})).without_lines().looks.places)
        {'a\t': 3}
        """
        places: dict[str, int] = {}
        for place, count in self.looks.places.items():
            phase = place.partition(SEPARATOR)[0] + SEPARATOR
            places[phase] = places.get(phase, 0) + count
        return self._replace(looks=self.looks._replace(places=places), told={})

    @classmethod
    def unpacked(cls, values: Any) -> Note | None:
        """Return the note of which `packed` has returned this; None if it is none."""
        try:
            pace, (num, queued, places), wanted, is_watched, told, trip = values
            looks = Looks(num, queued, dict(places))
            return cls(Pace(*map(int, pace)), looks, wanted, bool(is_watched), dict(told), int(trip))
        except (TypeError, ValueError):
            return None
