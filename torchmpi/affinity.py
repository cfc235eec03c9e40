"""The cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

# Quota and period: in one file of cgroup v2, in two of v1.
_QUOTA_FILES = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


def current() -> frozenset[int]:
    """Cores this process may run on (all of them where the system does not say).

    >>> len(current()) >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def bind(cores: frozenset[int]) -> bool:
    """Move all threads of this process to `cores`; whether the system allowed it.

    Threads that already run (the OpenMP pool, MPI's progress thread) keep their own mask unless moved one by one.
    """
    if not hasattr(os, "sched_setaffinity"):
        return False
    try:
        for thread in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(thread.name), cores)
            except ProcessLookupError:
                continue  # that thread has just ended
    except OSError:
        return False
    return True


def physical_cores() -> dict[int, tuple[int, ...]] | None:
    """(package, core) of each CPU, to tell the hardware threads of a core; None where Linux does not say."""
    cores = {}
    for cpu in current():
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores[cpu] = tuple(int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
        except (OSError, ValueError):
            return None
    return cores


def cpu_quota() -> float:
    """CPUs' worth of time this container may use; infinity where there is no limit. A mask does not show it.

    >>> cpu_quota() > 0
    True
    """
    for paths in _QUOTA_FILES:
        try:
            quota, period = " ".join(Path(path).read_text() for path in paths).split()
            return int(quota) / int(period) if quota not in ("max", "-1") else math.inf
        except (OSError, ValueError):
            continue
    return math.inf
