"""To whoever loses a host or a link: all ranks end by themselves, and the report names the rank and the host."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.host_jobs import ROOT, Start, hosts_sh, is_openmpi

ASLEEP = r"rank 3, after \d+ calls: at \S+fault_program.py:\d+ in <module>: time.sleep\(3600\)"
LIMIT = 4
"""The setting heartbeat_seconds, in place of 30."""
SECONDS = 150


def unreachable(host: str, ranks: str) -> str:
    return rf"host {host} \(ranks? {ranks}\) has been unreachable for ([4-9]|\d\d+) s"


launchers = pytest.mark.parametrize("torchrun", [False, True], ids=["mpirun", "torchrun"])


@launchers
@pytest.mark.parametrize("direction", ["both", "in"])
def test_a_cut_link_ends_the_ranks_on_both_sides(start: Start, direction: str, torchrun: bool):
    job = start("h0:2,h1:2", heartbeat_seconds=LIMIT, torchrun=torchrun)
    hosts_sh("cut", "h1", *(["in"] if direction == "in" else []))
    job.wait_for_end(SECONDS)
    assert all(job.statuses().values()), job.output()
    assert re.search(unreachable("h1", "2, 3"), job.messages(0)), job.output()
    assert re.search(unreachable("h0", "0, 1"), job.messages(2)), job.output()


@pytest.mark.parametrize("direction", ["both", "in"])
def test_mpirun_ends_after_a_cut_with_the_keepalive_of_the_documentation(start: Start, direction: str):
    """It must be shorter than the heartbeat: the kernel does not probe a connection with unacknowledged data."""
    if not is_openmpi():
        pytest.skip("about Open MPI")
    job = start("h0:2,h1:2", keepalive=(3, 1, 3))
    hosts_sh("cut", "h1", *(["in"] if direction == "in" else []))
    assert None not in job.wait_for_launchers(SECONDS), job.output()
    job.wait_for_end(SECONDS)


def test_a_lost_host_is_reported_once_by_the_others(start: Start):
    job = start("h0:1,h1:2,h2:1", heartbeat_seconds=LIMIT)
    hosts_sh("cut", "h1")
    job.wait_for_end(SECONDS)
    # The connections to the lost host end at different times: the lowest rank that has noticed in a second reports.
    reports = [rank for rank in (0, 3) if re.search(unreachable("h1", "1, 2"), job.messages(rank))]
    assert len(reports) == 1, job.output()
    assert "has ended without mpi.stop()" not in job.output()
    assert all(job.statuses().values()), job.output()


@pytest.mark.parametrize(
    ("layout", "torchrun"), [("h0:2,h1:1", False), ("h0:1,h1:2,h2:1", False), ("h0:1,h1:2,h2:1", True)]
)
def test_a_crashed_host_ends_the_others(start: Start, layout: str, torchrun: bool):
    """All processes of the host vanish, those of the launcher too, which may end the other ranks before they report."""
    job = start(layout, heartbeat_seconds=LIMIT, torchrun=torchrun)
    hosts_sh("crash", "h1")
    job.wait_for_end(SECONDS)
    hosts_sh("revive", "h1")
    assert all(job.statuses().values()), job.output()
    named = re.search(r"on host h1 (has ended without mpi.stop\(\)|is gone)|[Rr]emote .*\bh1\b", job.output())
    if not named and re.search(r"mpiexec@.* assert \(!closed\) failed", job.output()):
        # MPICH's launcher names no host, and was the first to notice: it left the other ranks no time for a report.
        assert not any("torchmpi: rank" in job.messages(rank) for rank in range(job.num_ranks)), job.output()
    else:
        assert named, job.output()


def test_communicators_in_different_orders_are_named(start: Start):
    """The ranks 1 and 2, on different hosts, wait for each other, while the others compute."""
    job = start("h0:2,h1:2", "deadlock", heartbeat_seconds=LIMIT)
    job.wait_for_end(SECONDS)
    assert job.wait_for_launchers(SECONDS) != [0], job.output()
    shown = re.findall(r"rank 1 waits for rank 2, which waits for rank 1, in calls on different", job.output())
    assert len(shown) == 1, job.output()
    for rank in (1, 2):
        pattern = rf"rank {rank}: allreduce\(float32 \[3\], sum\), call #1 on .* at \S+:\d+ in <module>: .*comm=first"
        assert re.search(pattern, job.output()), job.output()


def test_a_process_that_ends_without_a_word_ends_the_job(start: Start):
    """MPICH crashed in a rank that was asked by MPI where the missing rank was."""
    job = start("h0:2,h1:2", "exit", heartbeat_seconds=LIMIT, stall_warning_seconds=2)
    job.wait_for_end(SECONDS)
    assert "Segmentation" not in job.output()
    assert all(status for rank, status in job.statuses().items() if rank != 3), job.output()
    assert job.wait_for_launchers(SECONDS) != [0], job.output()


def test_a_missing_rank_of_another_host_is_named(start: Start):
    job = start("h0:1,h1:2,h2:1", "sleep", heartbeat_seconds=LIMIT, stall_warning_seconds=5, stall_abort_seconds=15)
    job.wait_for_end(SECONDS)
    assert re.search(ASLEEP, job.messages(0)), job.output()


def test_the_records_of_all_hosts_are_dumped_from_one(start: Start, folder: Path):
    """The heartbeat carries the request; the ranks of each host write their records to a folder that all hosts see."""
    job = start("h0:1,h1:2,h2:1", "sleep", heartbeat_seconds=LIMIT, stall_warning_seconds=2)
    job.wait_for_message(0, ASLEEP)
    records, python = folder / "records", [sys.executable, "-m", "torchmpi"]
    environment = ["env", f"PYTHONPATH={ROOT}"]
    hosts_sh("run", "h0", *environment, *python, "dump", job.pid(0), "--out", str(records))
    assert sorted(path.name for path in records.iterdir()) == [f"rank{rank}.flight" for rank in range(4)], job.output()
    found = subprocess.run([*python, "analyze", str(records)], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert found.returncode == 0, found.stderr
    assert re.search(r"Not arrived: rank 3, which ended \w+\(float32", found.stdout), found.stdout
    assert job.processes().keys() == {"h0", "h1", "h2"}, "the job goes on"


def test_a_stopped_host_is_a_stall_and_goes_on(start: Start):
    job = start("h0:2,h1:2", heartbeat_seconds=LIMIT, stall_warning_seconds=2)
    for rank, number in itertools.product((2, 3), ("STOP", "CONT")):
        hosts_sh("run", "h1", "kill", f"-{number}", job.pid(rank))
        if (rank, number) == (2, "STOP"):
            time.sleep(3 * LIMIT)
            job.wait_for_message(0, "rank 3 cannot be asked")
    assert job.processes().keys() == {"h0", "h1"}, job.output()
    assert re.search(r"has waited \d+ s in \w+\((float32 \[|root=0)", job.messages(0)), job.output()
    assert "rank 2 does not reply: it is stopped" in job.messages(0), job.output()
    assert "rank 3 cannot be asked, since rank 2 does not reply" in job.messages(0), job.output()
    assert "on one host" not in job.output() and "across hosts" not in job.output(), "steps are not reported"


@launchers
def test_a_slow_link_is_no_loss(start: Start, torchrun: bool):
    job = start("h0:2,h1:2", heartbeat_seconds=LIMIT, torchrun=torchrun)
    hosts_sh("rate", "10mbit")
    time.sleep(3 * LIMIT)
    hosts_sh("rate", "none")
    assert job.processes().keys() == {"h0", "h1"}, job.output()


def test_a_host_with_a_slow_network_is_named(start: Start):
    job = start("h0:1,h1:1,h2:1")
    hosts_sh("rate", "20mbit", "h1")
    job.wait_for_message(0, "delays the calls of all ranks")
    hosts_sh("rate", "none")
    (line,) = (line for line in job.messages(0).splitlines() if " delays " in line)
    assert re.search(r"host h1 \(rank 1\) delays the calls of all ranks by \d+ % of the time, .* its network: ", line)


def test_torchrun_names_the_rank_that_raised(start: Start):
    job = start("h0:2,h1:2", "raise", torchrun=True)
    job.wait_for_end(SECONDS)
    assert job.wait_for_launchers(SECONDS) == [1, 1], job.output()
    roots = (job.folder / "launcher").read_text().split("Root Cause (first observed failure):")[1:]
    assert len(roots) == 2, job.output()
    assert all("ValueError: bad sample 17" in root for root in roots), job.output()
    assert any("rank      : 3 (local_rank: 1)" in root for root in roots), job.output()
