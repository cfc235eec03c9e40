"""A timeline of the calls of rank 0, in the format of Chrome's trace viewer, as Horovod writes it.

Each operation is a process of the trace. Calls are not negotiated, so ``NEGOTIATE_*`` has no length; the other event
lasts from the call to the end of the operation.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from ..communicators.handle import Handle
from .process_sets import world


class _Timeline:
    """An open file, which is complete JSON after every event."""

    def __init__(self, path: str, mark_cycles: bool) -> None:
        self._lock = threading.Lock()  # calls end in the threads of the call queues
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115, closed by stop_timeline()
        self._file.write("[\n]\n")
        self._is_empty, self._mark_cycles = True, mark_cycles
        self._start = time.monotonic()
        self._numbers: dict[str, int] = {}
        microseconds = int(time.time() * 1e6)
        self._write({"ph": "M", "name": "process_name", "args": {"start_time_since_epoch_in_micros": microseconds}})
        self._write({"ph": "M", "name": "process_sort_index", "args": {"sort_index": 0}})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.seek(self._file.tell() - 2)
        self._file.write(("" if self._is_empty else ",\n") + json.dumps({"pid": 0, **event}) + "\n]\n")
        self._file.flush()
        self._is_empty = False

    def _now(self) -> int:
        return int((time.monotonic() - self._start) * 1e6)

    def record(self, key: str, collective: str, rank: int, handle: Handle[Any], description: dict[str, str]) -> None:
        """Write the events of a call that has just been made."""
        with self._lock:
            if self._file.closed:
                return
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self._numbers) + 1
                self._write({"ph": "M", "name": "process_name", "pid": number, "args": {"name": key}})
                self._write({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
            name, common = collective.upper(), {"pid": number, "ts": self._now()}
            if self._mark_cycles:
                self._write({"ph": "i", "s": "g", "name": "CYCLE_START", "ts": common["ts"]})
            self._write({"ph": "B", "name": f"NEGOTIATE_{name}", **common})
            self._write({"ph": "X", "name": str(rank), "dur": 0, **common})
            self._write({"ph": "E", **common})
            self._write({"ph": "B", "name": name, **common})
        handle.when_done(lambda: self._end(number, description))

    def _end(self, number: int, description: dict[str, str]) -> None:
        with self._lock:
            if not self._file.closed:
                self._write({"ph": "E", "pid": number, "ts": self._now(), "args": description})

    def close(self) -> None:
        """Close the file; operations that end later are not recorded."""
        with self._lock:
            self._file.close()


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
        mark_cycles: Mark the begin of each call by an event ``CYCLE_START``.

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


def record(key: str, collective: str, handle: Handle[Any], tensors: list[Any]) -> None:
    """Record a call, if there is a timeline."""
    timeline = _current.get("timeline")
    if timeline is not None:
        first = tensors[0] if tensors else None
        description = {} if first is None else {"dtype": str(first.dtype), "shape": str(list(first.shape))}
        timeline.record(key, collective, 0, handle, description)
