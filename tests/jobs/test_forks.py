"""Ranks that fork: their children are no ranks, and neither end the job nor finalize MPI."""

from __future__ import annotations

import signal

import pytest


@pytest.fixture(scope="module")
def after_forks(launch, tmp_path_factory):
    """A job of two ranks that fork in several ways and end without stop()."""
    code = """
import os, signal, sys, time
import torch
import torchmpi as mpi
mpi.start()

child = os.fork()
if child == 0:
    try:
        mpi.rank()
    except mpi.TorchMPIError as error:
        print("refused:", "forked" in str(error), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
pid, status = os.waitpid(child, 0)
print("child ended by", os.WTERMSIG(status), flush=True)

child = os.fork()
if child == 0:
    sys.exit(0)
print("child ended with", os.waitpid(child, 0)[1], flush=True)

data = torch.utils.data.TensorDataset(torch.arange(64.0))
total = torch.zeros(())
for epoch in range(2):
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork"):
        total += mpi.allreduce(batch.sum())
print("total", total.item(), flush=True)
"""
    script = tmp_path_factory.mktemp("forks") / "job.py"
    script.write_text(code)
    return launch(2, [script], timeout=60)


def test_a_forked_process_is_no_rank_and_ends_quietly(after_forks):
    assert after_forks.stdout.count("refused: True") == 2, after_forks.output
    assert after_forks.stdout.count(f"child ended by {int(signal.SIGTERM)}") == 2, after_forks.output
    assert "received SIGTERM" not in after_forks.stderr, after_forks.output


def test_a_forked_child_that_ends_normally_does_not_finalize_mpi(after_forks):
    """Regression: its exit handlers called MPI_Finalize, which waited for the other ranks."""
    assert after_forks.stdout.count("child ended with 0") == 2, after_forks.output


def test_dataloader_workers_by_fork(after_forks):
    assert after_forks.stdout.count(f"total {2 * 2 * sum(range(64)):.1f}") == 2, after_forks.output


def test_a_program_without_stop_succeeds(after_forks):
    assert after_forks.returncode == 0, after_forks.output
