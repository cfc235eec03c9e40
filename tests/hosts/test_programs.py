"""A program of torchrun on several hosts: all collectives, messages, training and parameter servers."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT, Start

PROGRAM = ROOT / "tests" / "jobs" / "launcherless_program.py"
LIMIT_SECONDS = 300


@pytest.mark.parametrize("layout", ["h0:1,h1:1", "h0:2,h1:1", "h0:1,h1:1,h2:2"])
def test_torchrun_runs_all_collectives(start: Start, layout: str):
    """The contract over gloo and p2p with placements of equal and different sizes."""
    job = start(layout, torchrun=True, program=PROGRAM)
    num_hosts = layout.count("h")
    assert job.wait_for_launchers(LIMIT_SECONDS) == [0] * num_hosts, job.output()
    reports = re.findall(r"compared (\d+), wrong (.*), hosts (\d+), digest", job.output())
    assert len(reports) == 1, job.output()
    num_compared, wrong, hosts = reports[0]
    assert int(num_compared) > 200 and wrong == "[]" and int(hosts) == num_hosts, job.output()
