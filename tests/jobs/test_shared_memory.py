"""To whoever shares a host with a job: nothing is left in /dev/shm, waiting is cheap, and other ways take over."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from helpers.launching import job_environment
from helpers.leftovers import left_files, shared_files

START = """
import os, resource, signal, sys, threading, time
import torch
import torchmpi as mpi
mpi.start()
rank, size = mpi.rank(), mpi.size()
"""
# Prints "right" on each rank with correct sums.
SUM = """
tensor = mpi.allreduce(torch.arange(300_000.0))
assert torch.equal(tensor, torch.arange(300_000.0) * mpi.size())
print("right", flush=True)
"""
NONE = "no shared memory between ranks"
any_mpi = pytest.mark.any_mpi


# --- without shared memory


@pytest.mark.parametrize(
    "contents",
    (
        ("raise ImportError('not built for this Python')",) * 2,
        pytest.param(("raise SystemError('initialization failed')", "config = None"), marks=any_mpi),
    ),
    ids=("not installed", "broken on rank 0 and another package on rank 1"),
)
def test_without_numba_mpi_moves_everything(job, tmp_path, contents):
    (tmp_path / "fake" / "numba").mkdir(parents=True)
    rank = 'int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])'
    (tmp_path / "fake" / "numba" / "__init__.py").write_text(f"import os\nexec({contents!r}[{rank}])\n")
    path = f"import sys\nsys.path.insert(0, {str(tmp_path / 'fake')!r})\n"
    # Kernels that another job has compiled need no numba.
    result = job(2, path + START + SUM, env={"NUMBA_CACHE_DIR": str(tmp_path / "cache")})
    check_done_by_mpi(result, "its kernels cannot be compiled here", 2)


@any_mpi
def test_one_rank_without_numba_is_named(job, tmp_path):
    code = f"""
from mpi4py import MPI
import os, sys
if MPI.COMM_WORLD.rank == 1:
    sys.modules["numba"] = None
    os.environ["NUMBA_CACHE_DIR"] = {str(tmp_path)!r}
"""
    result = job(2, code + START + SUM)
    check_done_by_mpi(result, "rank 1 cannot: its kernels cannot be compiled here", 2)


def test_without_memory_for_segments_mpi_moves_everything(job):
    code = """
import resource
from mpi4py import MPI
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
"""
    refused = """
try:
    mpi.allreduce(torch.ones(3), backend="shm")
except mpi.TorchMPIError as error:
    print("refused:", error, flush=True)
tensor = mpi.empty_shared(300_000).fill_(1.0)
assert mpi.allreduce(tensor)[0] == size
"""
    result = job(2, code + START + refused + SUM)
    check_done_by_mpi(result, "the system provides none", 2)
    assert result.stdout.count("refused:") == 2 and "could not share memory" in result.stdout, result.output


def check_done_by_mpi(result, reason: str, n: int) -> None:
    assert result.returncode == 0 and result.stdout.count("right") == n, result.output
    said = [line for line in result.stderr.splitlines() if NONE in line]
    assert len(said) == 1 and reason in said[0] and "all data are sent through MPI" in said[0], result.output
    assert "Traceback" not in result.stderr, result.output


@any_mpi
@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode
    != 0,
    reason="containers are made with unshare, which needs root, and a root folder that is a mount",
)
@pytest.mark.parametrize("num_hosts", (2, 1), ids=("one for each rank", "one for the job"))
def test_ranks_in_containers_under_one_host_name(mpirun, tmp_path, num_hosts):
    """A rank sees only its own processes and its own /dev/shm, as in containers that share a network.

    Regression: with the launcher inside the container, and only the leader of the session outside, each rank counted as
    a host.
    """
    script = tmp_path / "script.py"
    script.write_text(
        """
import torch, torchmpi as mpi
from torchmpi.session import runtime
mpi.start()
total = mpi.allreduce(torch.arange(100000.0))
right = torch.equal(total, 2 * torch.arange(100000.0))
current = runtime.current()
print("right", right, "hosts", current.num_hosts, "local rank", mpi.local_rank(), mpi.local_size(), flush=True)
"""
    )
    inside = 'mount -t tmpfs -o size=64m shm /dev/shm && exec "$@"'
    container = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]
    ranks, contained = [*mpirun, "-n", "2"], [*container, inside, "-"]
    launch = [*ranks, *contained] if num_hosts == 2 else [*contained, *ranks]
    environment = {name: value for name, value in job_environment({}).items() if name != "OMPI_MCA_btl"}
    done = subprocess.run(
        ["timeout", "-k", "5", "100", *launch, sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"right True hosts {num_hosts} local rank") == 2, done.stdout + done.stderr
    assert {"local rank 0 2", "local rank 1 2"} == set(re.findall(r"local rank \d \d", done.stdout)), done.stdout
    assert ("each counts as a host" in done.stderr) == (num_hosts == 2)


def test_a_library_that_takes_each_rank_for_alone(job):
    """Regression: each rank was taken for a host of its own. MPICH 5.0 of Debian does so without the variable."""
    code = """
from torchmpi.session import runtime
print("hosts", runtime.current().num_hosts, "local rank", mpi.local_rank(), "of", mpi.local_size(), flush=True)
mpi.stop()
"""
    result = job(2, START + code, env={"MPIR_CVAR_NOLOCAL": "1"})
    assert result.returncode == 0, result.output
    assert sorted(result.stdout.splitlines()) == [f"hosts 1 local rank {rank} of 2" for rank in (0, 1)], result.output


def test_a_shared_tensor_without_memory_for_it_is_private(job):
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
if rank == 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
tensor = mpi.empty_shared(1_000_000).fill_(1.0)
assert mpi.allreduce(tensor)[-1] == size
print("shared" if "torchmpi-tensor" in open("/proc/self/maps").read() else "private", flush=True)
mpi.stop()
"""
    result = job(2, START + code)
    assert result.returncode == 0, result.output
    assert sorted(result.stdout.split()) == ["private", "shared"], result.output


# --- leftovers


@pytest.mark.quick
@pytest.mark.parametrize(("files", "n"), (("anonymous", 2), pytest.param("in /dev/shm", 3, marks=any_mpi)))
def test_a_killed_rank_ends_the_job_and_leaves_nothing(job, tmp_path, files, n):
    before = shared_files()
    code = "import os\n" + ("del os.memfd_create\n" if files != "anonymous" else "") + START
    code += """
from torchmpi.session import runtime
assert runtime.current().selector.backends["shm"].why_not("allreduce", "cpu", mpi.communicator(0).intra) is None
tensors = torch.ones(1_000_000), mpi.empty_shared(1_000_000)
for tensor in tensors:
    mpi.allreduce(tensor, op="max")
open(__file__ + ".running", "w").close()  # launchers drop output that they have not read when a rank dies
if rank == 1:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
while True:
    for tensor in tensors:
        mpi.allreduce(tensor, op="max")
"""
    result = job(n, code)
    assert result.returncode != 0 and (tmp_path / "job.py.running").exists(), result.output
    assert left_files(before) == set(), result.output


# --- waiting


@any_mpi
def test_waiting_for_a_late_rank_takes_little_processor_time(job):
    code = """
tensors = {"short": torch.ones(3), "long": torch.ones(100_000), "shared": mpi.empty_shared(100_000).fill_(1.0)}
ways = {
    "sync": lambda tensor: mpi.allreduce(tensor, op="max"),
    "async": lambda tensor: mpi.allreduce_async(tensor, op="max").wait(),
}
for tensor in tensors.values():
    for call in ways.values():
        call(tensor)
mpi.gather(tensors["long"])
for way, name in (("sync", "short"), ("async", "long"), ("sync", "shared")):
    mpi.barrier()
    if rank == 1:
        time.sleep(1.5)
    begin = time.process_time()
    ways[way](tensors[name])
    print("rank", rank, way, name, "took", time.process_time() - begin, flush=True)
mpi.stop()
"""
    result = job(2, START + code)
    assert result.returncode == 0, result.output
    taken = [float(seconds) for seconds in re.findall(r"rank 0 .* took (\S+)", result.stdout)]
    assert len(taken) == 3 and max(taken) < 0.5, result.output


@pytest.mark.quick
@any_mpi
def test_more_ranks_than_cores_finish(job):
    code = """
for number in range(200):
    numel = (1, 30, 3000, 50_000)[number % 4]
    assert mpi.allreduce(torch.full((numel,), float(rank + number)))[-1] == sum(range(size)) + size * number
    assert mpi.broadcast(torch.full((numel,), float(rank)), number % size)[-1] == number % size
    assert mpi.allgather(torch.full((numel,), float(rank)))[numel * (size - 1)] == size - 1
print("right", flush=True)
mpi.stop()
"""
    result = job(8, START + code)
    assert result.returncode == 0 and result.stdout.count("right") == 8, result.output


# --- mismatched calls


def test_different_transports_are_an_error(job):
    code = """
mpi.allreduce(torch.ones(3))
mpi.allreduce(torch.ones(3), backend="mpi" if rank == 1 else "shm")
mpi.barrier()
"""
    result = job(2, START + code)
    assert result.returncode != 0, result.output
    assert "agree on allreduce(float32 [3], sum)" in result.stderr, result.output
    assert "different transports" in result.stderr, result.output


@any_mpi
def test_a_job_continues_after_a_caught_mismatch(job):
    code = """
try:
    mpi.allreduce(torch.ones(3 if rank == 2 else 50_000))
except mpi.TorchMPIError as error:
    print("caught:", error, flush=True)
"""
    result = job(3, START + code + SUM + "mpi.stop()")
    assert result.returncode == 0 and result.stdout.count("right") == 3, result.output
    assert result.stdout.count("caught:") == 3, result.output
    assert "float32 [3]" in result.stdout and "float32 [50000]" in result.stdout, result.output
