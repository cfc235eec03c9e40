"""To whoever exports metrics: the table at ``stop()`` is right, and files remain of ranks that were killed."""

from __future__ import annotations

import pytest

TABLE = "torchmpi: calls of 3 ranks; the ranks named are those with the least and the most seconds:\n"
START = """
import os, signal, time
import torch
import torchmpi as mpi
mpi.start()
rank = mpi.rank()
for _ in range(20):
    mpi.allreduce(torch.ones(250))
"""


@pytest.mark.any_mpi
def test_the_table_is_written_once_and_the_export_leaves_nothing(job, tmp_path):
    code = """
def wait_for(rank, name, value):
    path = f"{os.environ['TORCHMPI_METRICS']}/torchmpi_rank{rank}.prom"
    def is_reached():
        lines = open(path).read().splitlines() if os.path.exists(path) else []
        found = [float(line.split()[-1]) for line in lines if line.startswith(f"torchmpi_{name}{{")]
        return max(found, default=0) >= value
    while not is_reached():
        time.sleep(0.01)

if rank == 2:  # the others wait, and their files say so
    for other in (0, 1):
        wait_for(other, "stalls_total", 1)
        wait_for(other, "calls_in_flight", 1)
mpi.allreduce(torch.ones(250))
wait_for(rank, "calls_total", 21)
mpi.stop()
"""
    folder = tmp_path / "metrics"
    env = {"TORCHMPI_SUMMARY": "1", "TORCHMPI_METRICS": str(folder), "TORCHMPI_METRICS_SECONDS": "0.05"}
    env |= {"TORCHMPI_STALL_WARNING_SECONDS": "0.5", "TORCHMPI_WATCHDOG_PERIOD_SECONDS": "0.1"}
    result = job(3, START + code, env=env)
    assert result.returncode == 0, result.output
    assert result.stderr.count(TABLE) == 1, result.output
    lines = result.stderr.partition(TABLE)[2].splitlines()
    head = ["communicator", "call", "calls", "MB", "s:", "min", "mean", "max", "waited", "moved", "stalls", "ranks"]
    assert lines[0].split() == head
    (allreduce,) = [line.split() for line in lines if line.startswith("world         allreduce ")]
    assert allreduce[2:4] == ["21", "0.063"]
    assert float(allreduce[4]) <= float(allreduce[5]) <= float(allreduce[6])
    assert float(allreduce[7]) > 0.3  # two of three ranks wait for half a second at least, until the watchdog says so
    assert int(allreduce[9]) >= 2  # a rank that starts late makes more of them
    assert list(folder.iterdir()) == []


@pytest.mark.any_mpi
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('on purpose')"])
def test_without_a_rank_there_is_no_table_and_no_hang(job, end):
    result = job(3, f"{START}if rank == 1:\n    {end}\nmpi.stop()\n", env={"TORCHMPI_SUMMARY": "1"})
    assert result.returncode != 0, result.output
    assert "calls of 3 ranks" not in result.output


@pytest.mark.any_mpi
def test_the_table_is_wanted_by_all_ranks_or_none(job):
    code = """
import os
import torchmpi as mpi
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
mpi.start(config=mpi.Config(summary=rank == 1))
"""
    result = job(2, code)
    assert result.returncode != 0
    assert "summary is False on rank 0 and True on rank 1" in result.stderr, result.output
