"""To a user of GPUs: many calls and many starts leave no memory behind, and nothing reads or writes beyond its own.

The ranks may share the GPU, but nothing else may run on it: CUDA counts its memory for all processes together.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers.launching import job_environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.any_mpi,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False here"),
]
# CUDA cannot be used in a fork of a process that has used it: ranks are new processes, because of this variable.
COLD = {"PYTHONFAULTHANDLER": "1"}

CALLS = """
    import sys, torch, torchmpi as mpi

    def calls(number):
        for index in range(number):
            numel = (1, 1000, 100_000)[index % 3]
            tensor = torch.ones(numel, device=mpi.device())
            mpi.allreduce(tensor)
            mpi.broadcast(tensor)
            handle = mpi.allreduce_async(tensor)
            mpi.allgather(tensor)
            mpi.reduce_scatter(tensor)
            handle.wait()

    def used():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the allocator keeps what calls in progress needed at the same time
        mpi.barrier()
        free, total = torch.cuda.mem_get_info()
        mpi.barrier()
        return (total - free) >> 20, torch.cuda.memory_allocated()
"""


@pytest.mark.parametrize("backends", ("ipc", "none"))
def test_memory_is_constant_over_ten_thousand_collectives(job, backends):
    code = """
    mpi.start(with_cuda=True)
    calls(200)
    before = used()
    calls(2000)  # five collectives each
    found = mpi.allgather_object((before, used()))
    if mpi.rank() == 0:
        print(all(before == after for before, after in found), found)
    mpi.stop()
    """
    result = job(2, CALLS + code, env=COLD | {"TORCHMPI_GPU_BACKENDS": backends})
    assert result.returncode == 0, result.output
    assert result.stdout.startswith("True"), result.output


def test_a_hundred_starts_give_device_memory_back(job):
    code = """
    def cycle():
        mpi.start(with_cuda=True)
        calls(3)
        found = used()[0]
        mpi.stop()
        return found

    found = [cycle() for _ in range(100)]
    print(max(found[50:]) - max(found[:10]), found)
    """
    result = job(2, CALLS + code, env=COLD | {"TORCHMPI_GPU_BACKENDS": "ipc"}, timeout=300)
    assert result.returncode == 0, result.output
    assert all(int(line.split()[0]) <= 0 for line in result.stdout.splitlines()), result.output


def test_a_benchmark_of_asynchronous_calls(mpirun):
    command = [sys.executable, "-m", "torchmpi", "bench", "--async", "--device", "cuda", "--sizes", "4K,1M"]
    done = subprocess.run(
        ["timeout", "-k", "5", "200", *mpirun, "-n", "2", *command, "--peers", "mpi4py,nccl", "--seconds", "4"],
        env=job_environment({}) | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "auto launch" in done.stdout, done.stdout
    if torch.cuda.device_count() == 1:
        assert "ranks 0 and 1 share a GPU, which NCCL refuses" in done.stdout, done.stdout


def test_symmetric_memory_of_torch_on_a_group_of_gloo(job):
    # C++ finds no store in a group that is implemented in Python, and torch ends with a segmentation fault.
    code = """
    import torch, torch.distributed as dist, torchmpi as mpi, torchmpi.distributed
    import torch.distributed._symmetric_memory as symmetric

    torchmpi.distributed.register()  # unless the package is installed, torch does not know it
    mpi.start(with_cuda=True)
    dist.init_process_group("torchmpi")
    group = dist.new_group(backend="gloo").group_name
    buffer = symmetric.empty(1024, device="cuda")
    symmetric.rendezvous(buffer, group)
    buffer.fill_(dist.get_rank() + 1)
    result = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group)
    assert result.tolist() == [3.0] * 1024
    dist.destroy_process_group()
    mpi.stop()
    """
    # The variable allows ranks that share a GPU.
    result = job(2, code, env=COLD | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"})
    assert result.returncode == 0, result.output


def test_memory_checker_of_cuda_finds_nothing(mpirun, tmp_path):
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        pytest.skip("there is no compute-sanitizer on PATH")
    script = tmp_path / "job.py"
    script.write_text(
        "import torch, torchmpi as mpi\n"
        "mpi.start(with_cuda=True)\n"
        "for numel in (1, 1000, 3_000_001):\n"
        "    tensor = torch.ones(numel, device=mpi.device())\n"
        "    mpi.allreduce(tensor)\n"
        "    mpi.broadcast(tensor, 1)\n"
        "    mpi.reduce_scatter(mpi.allgather(tensor))\n"
        "    handle = mpi.allreduce_async(tensor)\n"
        "    assert handle.wait().tolist() == [4.0] * numel\n"
        "mpi.stop()\n"
    )
    checked = [checker, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(script)]
    done = subprocess.run(
        ["timeout", "-k", "5", "280", *mpirun, "-n", "2", *checked],
        env=job_environment({"TORCHMPI_GPU_BACKENDS": "ipc"}) | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ERROR SUMMARY: 0 errors") == 2, done.stdout
