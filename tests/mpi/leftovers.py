"""What a process has in use, to see whether something leaves it behind."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

_LIMIT_SECONDS = 5


def in_use() -> dict[str, int]:
    """Open files, threads, and mapped shared memory."""
    gc.collect()  # all: what earlier tests left in cycles would go at some moment in between
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "Python threads": threading.active_count(),
        "shared memory": sum("/dev/shm" in line or "memfd:" in line for line in maps),
    }


def grown(before: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Of what there is more than before, and stays so: a thread that has been waited for takes a moment to go."""
    limit = time.monotonic() + _LIMIT_SECONDS
    while True:
        more = {name: (before[name], number) for name, number in in_use().items() if number > before[name]}
        if not more or time.monotonic() > limit:
            return more
        time.sleep(0.05)
