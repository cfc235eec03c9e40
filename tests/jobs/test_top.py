"""To a user of torchmpi top: another process names the late rank and its line, and the run leaves its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import job_environment, search_path

from torchmpi.cli.top.watched_job import WatchedJob, find_jobs

PROGRAM = """
import os, sys, time
from pathlib import Path
from mpi4py import MPI
os.environ["TORCHMPI_HOST_NAME"] = "ab"[MPI.COMM_WORLD.rank]
import torch
import torchmpi as mpi

def load(rank):
    if rank == 1:
        time.sleep(0.1)

mpi.start()
folder = Path(sys.argv[1])
for step in range(2000):
    load(mpi.rank())
    mpi.report_progress(samples=4, loss=1.0)
    ends = mpi.allreduce(torch.tensor([float((folder / "done").exists())]), op="max")
    if step == 20 and mpi.rank() == 0:
        (folder / "ready").touch()
    if ends.item():
        break
mpi.stop()
"""


@pytest.mark.any_mpi
def test_the_late_rank_is_named_while_the_job_runs_and_in_its_report(alone, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    report = tmp_path / "report.html"
    command = [sys.executable, "-m", "torchmpi", "run", "-n", "2", "--timeout", "150", "--report", str(report)]
    job = subprocess.Popen(
        [*command, str(tmp_path / "train.py"), str(tmp_path)],  # forked ranks are no children of the launcher
        env=job_environment(search_path()), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not (tmp_path / "ready").exists() and job.poll() is None:
            time.sleep(0.05)
        view = {"late": None}  # on a busy machine the other rank is late too for some time
        while view["late"] is None and job.poll() is None:
            seen = alone("-m", "torchmpi", "top", "--json", job.pid)
            (view,) = json.loads(seen.stdout)
        told = told_to_first(job.pid)
    finally:
        (tmp_path / "done").touch()
        _, errors = job.communicate(timeout=160)
    assert job.returncode == 0, errors
    assert seen.returncode == 0, seen.output
    assert (view["job"]["size"], view["job"]["seen"], view["job"]["elsewhere"]) == (2, 2, [])
    assert view["late"]["rank"] == 1, seen.stdout
    by_rank = {each["rank"]: each for each in view["ranks"]}
    assert by_rank[0]["waiting"] > by_rank[1]["waiting"]
    assert by_rank[1]["step"] > 10 and by_rank[1]["loss"] == 1.0 and by_rank[1]["memory_bytes"] > 1 << 20
    assert re.match(r"at .*train\.py:\d+ in (load|<module>)", by_rank[1]["line"]), seen.stdout
    assert set(told) == {"0", "1"} and told["0"][2] == {}
    host, _, of_far = told["1"]
    assert host == "b" and of_far["step"] > 10 and of_far["loss"] == 1.0 and "train.py:" in of_far["line"]
    assert of_far["memory_bytes"] > 1 << 20 and of_far["ran"] > 0
    assert_is_page_of_run(report)


def told_to_first(launcher: int) -> Mapping[str, Any]:
    """Look at rank 0 until it shows what the rank of the other host has told."""
    (ranks,) = find_jobs(launcher).values()
    watched = WatchedJob(("", ""), ranks)
    while watched.read() and not (told := watched.ranks[0].live.told_of_all).get("1", ({},) * 3)[2]:
        time.sleep(0.2)
    watched.close()
    return told


def assert_is_page_of_run(report: Path) -> None:
    (data,) = re.findall(r'id="data">(.*?)</script>', report.read_text())
    (page,) = json.loads(data)
    assert page["late"] is None or page["late"]["rank"] == 1  # in the last seconds
    waits = page["waits"]["seconds"]
    assert waits[0][1] > waits[1][0]
    assert {"allreduce", "stop"} <= {each["call"] for each in page["calls"]}
