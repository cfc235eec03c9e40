"""The resources of a process, to detect leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Set
from pathlib import Path

_LIMIT_SECONDS, _CALM_SECONDS = 60, 0.1


def in_use(expected: dict[str, int] | None = None) -> dict[str, int]:
    """Open files, threads, and mapped shared memory, when they are constant or, if it is given, no more than expected.

    A joined thread ends a moment later, on a busy machine after an interval without a change: it may be one of those
    that are expected, which are returned where there are less.
    """
    limit, found = time.monotonic() + _LIMIT_SECONDS, _count()
    while time.monotonic() < limit:
        if expected is not None and all(found[kind] <= number for kind, number in expected.items()):
            return expected
        time.sleep(_CALM_SECONDS)
        before, found = found, _count()
        if expected is None and found == before:
            break
    return found


def shared_files() -> set[str]:
    """Return the names of torchmpi's files in shared memory, of all jobs of this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("torchmpi-")}


def left_files(before: Set[str] = frozenset()) -> set[str]:
    """Return the files in shared memory that remain. Those of other jobs go when these end."""
    limit, left = time.monotonic() + _LIMIT_SECONDS, shared_files() - before
    while left and time.monotonic() < limit:
        time.sleep(_CALM_SECONDS)
        left &= shared_files()
    return left


def open_files() -> int:
    """Return the number of descriptors.

    Those of /proc come and go: on a busy machine, where a rank may be late, a thread looks for seconds where it is.
    """
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, as that of this list
            found += not os.readlink(f"/proc/self/fd/{number}").startswith("/proc/")
    return found


def _count() -> dict[str, int]:
    gc.collect()  # all generations: cycles of earlier tests would otherwise be freed at any moment
    maps = Path("/proc/self/maps").read_text().splitlines()
    looking = sum(thread.name == "torchmpi stack looks" for thread in threading.enumerate())
    return {
        "files": open_files(),
        "threads": len(list(Path("/proc/self/task").iterdir())) - looking,
        "Python threads": threading.active_count() - looking,
        "shared memory": sum("/dev/shm" in line or "memfd:" in line for line in maps),
    }
