"""To a user of torchrun on several hosts: collectives, messages, training and servers work, and reports name faults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.host_jobs import ROOT, Start, hosts_sh

from torchmpi.timeline.step_report import StepReport
from torchmpi.timeline.trace_reader import read_folder

PROGRAM = ROOT / "tests" / "jobs" / "launcherless_program.py"
SLOW_TRAINING = ROOT / "benchmarks" / "slow_training.py"
LIMIT_SECONDS = 300


@pytest.mark.parametrize("layout", ["h0:1,h1:1", "h0:1,h1:1,h2:2"])
def test_torchrun_runs_all_collectives(start: Start, layout: str):
    """The contract over gloo and p2p with placements of equal and different sizes."""
    job = start(layout, torchrun=True, program=PROGRAM)
    num_hosts = layout.count("h")
    assert job.wait_for_launchers(LIMIT_SECONDS) == [0] * num_hosts, job.output()
    reports = re.findall(r"compared (\d+), wrong (.*), hosts (\d+), digest", job.output())
    assert len(reports) == 1, job.output()
    num_compared, wrong, hosts = reports[0]
    assert int(num_compared) > 200 and wrong == "[]" and int(hosts) == num_hosts, job.output()


@pytest.fixture
def slow_links(folder: Path) -> Iterator[None]:
    hosts_sh("rate", "1gbit")
    yield
    hosts_sh("rate", "none")


@pytest.mark.parametrize(
    ("fault", "layout", "words"),
    [
        ("late", "h0:1,h1:1", "Rank 1 on host h1 is slow"),
        ("buckets", "h0:1,h1:1", "Each step makes 16 calls of 32.2 KB at "),
        ("flat", "h0:2,h1:1", "Calls over several hosts run flat (backend mpi)"),
    ],
)
def test_the_report_names_a_fault_on_hosts(start: Start, folder: Path, slow_links: None, fault, layout, words):
    settings = {"hierarchical": "off"} if fault == "flat" else {}
    arguments = "--rank-of", fault, "--steps", "30"
    job = start(layout, *arguments, program=SLOW_TRAINING, timeline=folder, **settings)
    assert job.wait_for_launchers(LIMIT_SECONDS) == [0], job.output()
    report = StepReport.of(read_folder(folder))
    assert words in report.advice(), report.text()
    assert ("run flat" in report.advice()) == (fault == "flat")
    assert ("the buckets are too small" in report.advice()) == (fault == "buckets")
