"""To whoever shares a network: strangers that connect while ranks look for each other learn and delay nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.host_jobs import ROOT, Start

PROGRAM = Path(__file__).parent / "stranger_programs.py"
ANSWER_BYTES = 48
"""What a rank says before the other end has proved anything: a random number, and a proof about both numbers."""


@pytest.mark.parametrize("launcher", ["mpirun", "srun", "torchrun"])
def test_strangers_of_another_host_are_told_nothing_and_delay_nobody(start: Start, folder: Path, launcher: str):
    """Regression: two silent connections turned the heartbeat off, and each delayed the ranks by 2 seconds."""
    strangers = subprocess.Popen(
        [ROOT / "scripts" / "hosts.sh", "run", "h2", sys.executable, PROGRAM, "strangers", folder]
    )
    try:
        job = start(
            "h0:2,h1:1",
            "ranks",
            folder,
            program=PROGRAM,
            torchrun=launcher == "torchrun",
            separate=launcher == "srun",
            log="debug",
            job_key="0123456789abcdef" if launcher == "torchrun" else "",
        )
        job.wait_for_launchers(150)
        (folder / "over").touch()
        assert strangers.wait(150) == 0
    finally:
        strangers.kill()
        strangers.wait()
    assert job.statuses() == {0: 0, 1: 0, 2: 0}, job.output()
    assert (folder / "total").read_text() == "[3.0, 3.0, 3.0]"
    num_visited, most_said = map(int, (folder / "strangers").read_text().split())
    assert num_visited >= 1
    assert most_said <= ANSWER_BYTES
    assert "has not connected" not in job.output() and "cannot reach" not in job.output()
