"""Timelines of rank 0 that Horovod's variables and functions ask for, in one file as Horovod names it.

They are timelines of :mod:`torchmpi.timeline`, with a row for each name of an operation. Calls are not negotiated, so
``NEGOTIATE_*`` takes the time of the call only; the other event lasts from the call to the end of the operation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..session import runtime
from ..timeline import events
from ..timeline.clocks import ClockSample
from ..timeline.trace_writer import TraceWriter
from .process_sets import world

_FLUSH_SECONDS = 0.02
"""Programs read the file while it is written, as Horovod writes each event at once."""


class _Timeline(TraceWriter):
    """A file that is being written; operations that end after its end are not recorded."""

    def __init__(self, path: str, mark_cycles: bool) -> None:
        self.mark_cycles = mark_cycles
        job = {"rank": 0, "size": world().size, "host": runtime.current().host_name}
        super().__init__(Path(path), job, [ClockSample(0, 0, 0)], _FLUSH_SECONDS)
        self.attach()


_current: dict[str, _Timeline] = {}


def begin(rank: int) -> None:
    """Start the timeline that the environment asks for."""
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if rank == 0 and path not in ("", "DYNAMIC"):
        _current["timeline"] = _Timeline(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES") == "1")


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline of the calls of rank 0 from now on; a running one is closed.

    Args:
        file_path: The file, which is overwritten.
        mark_cycles: Mark the start of each call by an event ``CYCLE_START``.

    Raises:
        ValueError: ``init()`` was not called, or the environment variable ``HOROVOD_TIMELINE`` is not set.

    Example:
        hvd.start_timeline("timeline.json")     # mpirun -x HOROVOD_TIMELINE=DYNAMIC ...
    """
    rank = world().rank
    if "HOROVOD_TIMELINE" not in os.environ:
        raise ValueError("start_timeline() needs HOROVOD_TIMELINE=DYNAMIC in the environment.")
    stop_timeline()
    if rank == 0:
        _current["timeline"] = _Timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Close the timeline, if there is one.

    Example:
        hvd.stop_timeline()
    """
    timeline = _current.pop("timeline", None)
    if timeline is not None:
        timeline.close()


def begin_call(key: str, collective: str, tensors: Sequence[Any]) -> Callable[[], None] | None:
    """Record a call that is made now, if there is a timeline, also one of torchmpi; return what records its end."""
    recorder = events.recorder
    if recorder is None:
        return None
    name, begin, timeline = collective.upper(), events.now(), _current.get("timeline")
    if timeline is not None and timeline.mark_cycles:
        recorder.slice("CYCLE_START", "cycle", begin)
    recorder.slice(f"NEGOTIATE_{name}", "horovod", begin, key)
    first = tensors[0] if tensors else None
    description = {} if first is None else {"dtype": str(first.dtype), "shape": str(list(first.shape))}

    def end() -> None:
        if events.recorder is not None:
            events.recorder.slice(name, "horovod", begin, key, **description)

    return end
