"""The resources of a process, to detect leaks."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

_LIMIT_SECONDS, _CALM_SECONDS = 5, 0.1


def in_use(expected: dict[str, int] | None = None) -> dict[str, int]:
    """Open files, threads, and mapped shared memory, when as expected or else constant.

    A joined thread ends a moment later, on a busy machine after an interval without a change.
    """
    limit, found = time.monotonic() + _LIMIT_SECONDS, _count()
    while found != expected and time.monotonic() < limit:
        time.sleep(_CALM_SECONDS)
        before, found = found, _count()
        if expected is None and found == before:
            break
    return found


def _count() -> dict[str, int]:
    gc.collect()  # all generations: cycles of earlier tests would otherwise be freed at any moment
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "Python threads": threading.active_count(),
        "shared memory": sum("/dev/shm" in line or "memfd:" in line for line in maps),
    }
