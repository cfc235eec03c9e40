"""Programs on several hosts without an MPI launcher: all collectives, messages, training and parameter servers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, Start

JOBS = ROOT / "tests" / "jobs"
PROGRAM = JOBS / "launcherless_program.py"
DRIVER = JOBS / "distributed_support" / "driver.py"
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


def test_torchrun_supports_torch_distributed(start: Start, folder: Path):
    """Two hosts support the features that two ranks of one host support; which these are is tested in tests/jobs."""
    rows = []
    for layout in ("h0:2", "h0:1,h1:1"):
        own = folder / layout
        own.mkdir()
        job = start(layout, "torchmpi", own, "^(?!Starting)", torchrun=True, program=DRIVER)
        assert job.wait_for_launchers(LIMIT_SECONDS) == [0] * layout.count("h"), job.output()
        rows.append({(section, name): answer for section, name, answer in json.loads((own / "rows.json").read_text())})
    assert len(rows[0]) > 100 and list(rows[0].values()).count("") > 100, rows[0]
    differences = {name: (rows[0][name], rows[1][name]) for name in rows[0] if rows[0][name] != rows[1].get(name)}
    assert not differences
