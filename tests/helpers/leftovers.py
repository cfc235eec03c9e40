"""The resources of a process, to detect leaks."""

from __future__ import annotations

import contextlib
import gc
import os
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
