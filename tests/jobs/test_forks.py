"""To a program that forks: children of a rank are no ranks, and neither end the job nor finalize MPI."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from helpers.launching import is_open_mpi, launcher


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
    return launch(2, [script])


def test_a_forked_process_is_no_rank_and_ends_quietly(after_forks):
    assert after_forks.stdout.count("refused: True") == 2, after_forks.output
    assert after_forks.stdout.count(f"child ended by {int(signal.SIGTERM)}") == 2, after_forks.output
    assert "received SIGTERM" not in after_forks.stderr, after_forks.output


def test_a_forked_child_that_ends_normally_does_not_finalize_mpi(after_forks):
    """Regression: its exit handlers called MPI_Finalize, which waited for the other ranks."""
    assert after_forks.stdout.count("child ended with 0") == 2, after_forks.output


def test_dataloader_workers_by_fork(after_forks):
    assert after_forks.stdout.count(f"total {2 * 2 * sum(range(64)):.1f}") == 2, after_forks.output


@pytest.mark.any_mpi
def test_workers_of_every_start_method_get_one_message(job):
    """A call in the dataset, and start() in worker_init_fn, which made a second job; on rank 0 only, it waited."""
    code = """
import torch
import torchmpi as mpi

class Squares(torch.utils.data.Dataset):
    def __init__(self, call):
        self.call = call
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if self.call:
            mpi.rank()
        return index * index

def begin(worker):
    mpi.start()

if __name__ == "__main__":
    mpi.start()
    # Workers that are no forks import torch.
    cases = (("fork", True), ("fork", False), ("spawn", True), ("forkserver", False))
    for method, call in cases if mpi.rank() == 0 else ():
        loader = torch.utils.data.DataLoader(
            Squares(call), num_workers=1, multiprocessing_context=method, worker_init_fn=None if call else begin
        )
        try:
            print(method, "loaded", list(loader), flush=True)
        except Exception as error:
            text = str(error)
            is_meant = "forked or spawned by rank 0, as a DataLoader worker" in text and "main process only" in text
            print("refused" if is_meant else text, method, flush=True)
    mpi.barrier()
    print("total", sum(torch.utils.data.DataLoader(Squares(False), num_workers=1)).item(), mpi.allreduce(1), flush=True)
    mpi.stop()
"""
    result = job(2, code)
    assert result.returncode == 0, result.output
    refused = [f"refused {method}" for method in ("fork", "fork", "spawn", "forkserver")]
    assert [line for line in result.stdout.splitlines() if "fork" in line or "spawn" in line] == refused, result.output
    assert result.stdout.count("total 14 2") == 2, result.output


@pytest.mark.any_mpi
def test_a_rank_that_is_ended_removes_the_semaphores_of_its_workers(job):
    """Open MPI's launcher sends SIGTERM to the rank, and then SIGKILL to the process that would remove them."""
    if not is_open_mpi(launcher()):
        pytest.skip("MPICH's launcher sends SIGKILL to the ranks too")
    code = """
import multiprocessing
import torchmpi as mpi
mpi.start()
if mpi.rank() == 0:
    lock = multiprocessing.get_context("spawn").Lock()
    print("semaphore", lock._semlock.name, flush=True)
mpi.barrier()
if mpi.rank() == 1:
    raise RuntimeError("enough")
mpi.barrier()
"""
    result = job(2, code, env={"PYTHONHASHSEED": "1"})  # read at the start: the ranks are no forks of one process
    assert result.returncode != 0, result.output
    (name,) = (line.split("/")[1] for line in result.stdout.splitlines() if line.startswith("semaphore"))
    assert not Path(f"/dev/shm/sem.{name}").exists(), result.output


def test_a_program_without_stop_succeeds(after_forks):
    assert after_forks.returncode == 0, after_forks.output
