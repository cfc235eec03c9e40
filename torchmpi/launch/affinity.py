"""The CPUs that this process may use, and the plan by which ranks are bound to them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from .. import files

# Quota and period: in one file of cgroup v2, in two of v1.
_QUOTA_FILES_2, _QUOTA_FILES_1 = ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]


def current() -> frozenset[int]:
    """Return the CPUs this process may run on; all CPUs where the system has no affinity masks.

    >>> len(current()) >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def in_several_autogroups(processes: Iterable[int]) -> bool:
    """Return whether Linux schedules processes in different autogroups.

    Each session is an autogroup. `sched_yield` yields the core only to threads of the same autogroup. MPICH starts each
    rank in a session of its own.
    """
    try:
        return has_autogroups() and len({os.getsid(process) for process in processes}) > 1
    except OSError:
        return False


def has_autogroups() -> bool:
    """Return whether Linux divides the cores between sessions, as on most desktops and servers."""
    return files.text_of("/proc/sys/kernel/sched_autogroup_enabled") == "1"


def bind(cores: frozenset[int]) -> bool:
    """Bind all threads of this process to `cores`, and return whether the system permitted it.

    Each thread that already runs (the OpenMP pool, MPI's progress thread) has a separate mask, and is bound too.
    """
    if not hasattr(os, "sched_setaffinity"):
        return False
    try:
        for thread in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(thread.name), cores)
            except ProcessLookupError:
                continue  # the thread has ended
    except OSError:
        return False
    return True


def physical_cores() -> dict[int, tuple[int, ...]] | None:
    """Return (package, core) of each CPU, to identify the hardware threads of a core; None where that is unknown."""
    cores = {}
    for cpu in current():
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores[cpu] = tuple(int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
        except (OSError, ValueError):
            return None
    return cores


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Return the CPU limit of this process in CPUs, which affinity masks do not include; infinity without a limit.

    It is the least of the limits of its control group and of the groups around that, as far as they are visible: a
    container usually sees its own group only, as `root`.

    >>> cpu_quota() > 0
    True
    """
    return min(
        (_quota_of([folder / name for name in names]) for folder, names in _control_groups(root, own)), default=math.inf
    )


def statistics_of_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Path | None:
    """Return the file in which the kernel counts how long the CPU limit has stopped this process; None if unknown."""
    found = (folder / "cpu.stat" for folder, _ in _control_groups(root, own))
    return next((file for file in found if "throttled" in files.text_of(file)), None)


def _control_groups(root: Path, own: Path) -> Iterator[tuple[Path, Sequence[str]]]:
    """Generate the control groups that limit the CPU of this process, from the inside, with the files of limits."""
    for line in files.text_of(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root, _QUOTA_FILES_2
        elif "cpu" in controllers.split(","):
            top, names = root / "cpu", _QUOTA_FILES_1
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, names
            if folder == top:
                break


def _quota_of(paths: Iterable[Path]) -> float:
    try:
        quota, period = " ".join(map(files.text_of, paths)).split()
        return int(quota) / int(period) if quota not in ("max", "-1") else math.inf
    except ValueError:
        return math.inf


def plan_binding(
    masks: Sequence[frozenset[int]], *, cores: Mapping[int, tuple[int, ...]] | None = None
) -> list[frozenset[int]] | None:
    """Divide the CPUs among the ranks of a host.

    `masks` are the affinity masks of the ranks, by local rank. Returns None if there is one rank, if the masks differ
    (the launcher or the user has bound the ranks), or if there are more ranks than CPUs. `cores` gives (package, core)
    of each CPU: a rank then gets neighboring cores, and all hardware threads of a core unless there are more ranks
    than cores.

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
    """Group the CPUs of a mask by physical core, cores of one package next to each other."""
    position = {cpu: cores.get(cpu, (cpu,)) if cores else (cpu,) for cpu in mask}
    by_core: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(mask, key=lambda cpu: (position[cpu], cpu)):
        by_core.setdefault(position[cpu], []).append(cpu)
    return list(by_core.values())


def torch_threads(
    mask: frozenset[int], num_ranks_sharing: int = 1, *, cores: Mapping[int, tuple[int, ...]] | None = None
) -> int:
    """Return the number of torch threads for a rank that shares the CPUs of `mask` with others: one per core.

    >>> torch_threads(frozenset(range(8)), 2), torch_threads(frozenset({0}), 4)
    (4, 1)
    >>> torch_threads(frozenset(range(4)), cores={0: (0,), 1: (1,), 2: (0,), 3: (1,)})  # two threads per core
    2
    """
    return max(1, len(_by_core(mask, cores)) // max(1, num_ranks_sharing))
