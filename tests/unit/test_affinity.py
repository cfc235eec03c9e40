"""To whoever shares a machine: ranks are bound to their cores, and the CPU limit of a container counts."""

from __future__ import annotations

import math
import os
import subprocess
import threading
from pathlib import Path

import pytest

from torchmpi.launch import affinity


def test_binding_moves_every_thread_and_can_be_undone():
    before = affinity.current()
    one = frozenset({min(before)})
    seen = []
    gate = threading.Event()
    thread = threading.Thread(target=lambda: (gate.wait(), seen.append(affinity.current())))
    thread.start()
    try:
        assert affinity.bind(one)
        gate.set()
        thread.join()
        assert affinity.current() == one and seen == [one]
    finally:
        affinity.bind(before)
    assert affinity.current() == before


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/user/job", {"cpu.max": "max 10000", "user/cpu.max": "15000 10000", "user/job/cpu.max": "max 10000"}, 1.5),
        ("0::/docker/3f", {"cpu.max": "50000 100000"}, 0.5),  # the container sees its own group only
        ("3:memory:/a\n2:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "30", "cpu/a/cpu.cfs_period_us": "10"}, 3.0),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "10"}, math.inf),
    ],
)
def test_the_least_cpu_limit_of_all_groups_around_a_process_counts(tmp_path, own, limits, expected):
    """Regression: only that of the outermost visible group was read, which is that of a container."""
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(f"{own}\n")
    assert affinity.cpu_quota(tmp_path, tmp_path / "own") == expected


def test_processes_of_different_sessions_are_in_several_autogroups():
    setting = Path("/proc/sys/kernel/sched_autogroup_enabled")
    is_enabled = setting.exists() and setting.read_text().strip() == "1"
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        try:
            assert affinity.in_several_autogroups([os.getpid(), other.pid]) == is_enabled
        finally:
            other.kill()
    assert not affinity.in_several_autogroups([os.getpid()])
