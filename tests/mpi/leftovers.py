"""The resources of a process, to detect leaks."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

_LIMIT_SECONDS, _CALM_SECONDS = 5, 0.1


def in_use() -> dict[str, int]:
    """Open files, threads, and mapped shared memory, when constant: a joined thread ends a moment later."""
    limit, found = time.monotonic() + _LIMIT_SECONDS, _count()
    while time.monotonic() < limit:
        time.sleep(_CALM_SECONDS)
        before, found = found, _count()
        if found == before:
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
