"""The cores this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
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


def plan_binding(
    masks: Sequence[frozenset[int]], *, cores: Mapping[int, tuple[int, ...]] | None = None
) -> list[frozenset[int]] | None:
    """Share the CPUs out among the local ranks, or None if there is nothing to do or it is not ours to do.

    `masks` are the affinity masks of the ranks on one host, by local rank. None if a rank is by itself, if
    the masks differ (the launcher, or the user, has bound the ranks), or if there are more ranks than CPUs.
    `cores` gives (package, core) of each CPU: a rank then gets neighbouring cores, and all the hardware
    threads of a core unless there are more ranks than cores.

    >>> plan_binding([frozenset(range(5))] * 2)
    [frozenset({0, 1}), frozenset({2, 3, 4})]
    >>> plan_binding([frozenset({0}), frozenset({1})]) is None
    True
    >>> plan_binding([frozenset(range(4))] * 2, cores={0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1)})
    [frozenset({0, 2}), frozenset({1, 3})]
    """
    num_ranks = len(masks)
    if num_ranks < 2 or len(set(masks)) > 1 or num_ranks > len(masks[0]):
        return None
    units = _by_core(masks[0], cores)
    if len(units) < num_ranks:
        units = [[cpu] for unit in units for cpu in unit]
    ends = [len(units) * i // num_ranks for i in range(num_ranks + 1)]
    return [frozenset(cpu for unit in units[begin:end] for cpu in unit) for begin, end in pairwise(ends)]


def _by_core(mask: frozenset[int], cores: Mapping[int, tuple[int, ...]] | None) -> list[list[int]]:
    """The CPUs of a mask grouped by physical core, cores of one package next to each other."""
    place = {cpu: cores.get(cpu, (cpu,)) if cores else (cpu,) for cpu in mask}
    by_core: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(mask, key=lambda cpu: (place[cpu], cpu)):
        by_core.setdefault(place[cpu], []).append(cpu)
    return list(by_core.values())


def torch_threads(
    mask: frozenset[int], num_ranks_sharing: int = 1, *, cores: Mapping[int, tuple[int, ...]] | None = None
) -> int:
    """How many threads torch should use on a rank that shares the CPUs of `mask` with others: one per core.

    >>> torch_threads(frozenset(range(8)), 2), torch_threads(frozenset({0}), 4)
    (4, 1)
    >>> torch_threads(frozenset(range(4)), cores={0: (0,), 1: (1,), 2: (0,), 3: (1,)})  # two threads per core
    2
    """
    return max(1, len(_by_core(mask, cores)) // max(1, num_ranks_sharing))
