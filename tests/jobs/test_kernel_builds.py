"""To whoever starts a job for the first time: kernels are compiled once, for all ranks and for later jobs.

All of them use the build with checks, which is compiled once: into an empty cache, by the first job.
"""

from __future__ import annotations

import os
import re
import shutil

import pytest

START = """
import sys
import torch
import torchmpi as mpi
mpi.start()
rank, size = mpi.rank(), mpi.size()
"""
# Prints "right" on each rank with correct sums.
SUM = """
tensor = mpi.allreduce(torch.arange(300_000.0))
assert torch.equal(tensor, torch.arange(300_000.0) * size)
print("right", flush=True)
"""
NONE = "no shared memory between ranks"
CHECKED = {"TORCHMPI_KERNEL_CHECKS": "1"}
pytestmark = pytest.mark.any_mpi


# --- compiling


@pytest.fixture(scope="module")
def first(launch, tmp_path_factory):
    """A job with an empty cache, and the cache; compiling everything takes ten seconds of a core.

    Not of forks: the ranks end with their destructors.
    """
    folder = tmp_path_factory.mktemp("first")
    code = "import sys\nprint('compiled' if 'numba' in sys.modules else 'loaded')\n"
    (folder / "job.py").write_text(START + SUM + code)
    # Regression: ranks that compile were taken for ranks that do not arrive in start().
    env = CHECKED | {"NUMBA_CACHE_DIR": str(folder / "cache"), "TORCHMPI_STALL_ABORT_SECONDS": "5"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHMPI_TEST_COLD", "1")
        result = launch(3, [folder / "job.py"], env=env | {"TORCHMPI_LOG": "info"})
    return result, folder / "cache"


@pytest.fixture(scope="module")
def checked(first) -> dict[str, str]:
    """The environment of a job that loads the kernels of the first one."""
    return CHECKED | {"NUMBA_CACHE_DIR": str(first[1])}


def test_two_ranks_compile_for_all_and_for_the_next_job(job, first, checked):
    """Regression: announced twice, "once per machine"; and a process that had compiled crashed when Python ended."""
    result, _ = first
    assert result.returncode == 0 and result.stdout.count("right") == 3, result.output
    assert result.stdout.count("compiled") == 2, result.output
    (line,) = (line for line in result.stderr.splitlines() if "kernels, once per machine" in line)
    assert "about 8 s" in line, "the expected time"
    locks = (first[1]).glob("torchmpi_collectives_*.lock")
    assert [lock.read_text().split()[1] for lock in locks] == ["100", "100"], "percent, for the rank that tells"
    code = "import sys\nprint('compiler' if {'numba', 'llvmlite.binding'} & set(sys.modules) else 'nothing else')\n"
    second = job(2, START + SUM + code, env=checked)
    assert second.returncode == 0 and second.stdout.count("right") == 2, second.output
    assert second.stdout.count("nothing else") == 2 or os.uname().machine != "x86_64", second.output
    assert "compiling" not in second.stderr and NONE not in second.stderr, second.output


# Starts with the kernels of the first job, and compiles those of the parameter server, in two parts.
SERVER = """
import torchmpi.parameterserver as ps
from torchmpi.parameterserver import shards
names = shards.SHARDING.names
shards.SHARDING = shards.SHARDING._replace(parts=(names[:1], names[1:]))
server = ps.init(torch.zeros(1000))
print("compiled" if "numba" in sys.modules else "loaded", flush=True)
ps.send(server, torch.ones(1000)).wait()
mpi.barrier()
assert torch.equal(ps.receive(server).wait(), torch.full((1000,), float(size)))
print("right", flush=True)
"""


def compile_for_a_server(job, first, tmp_path, start: str, *, num_compilers: int) -> int:
    """Run a job of two ranks; return the number of parts of the parameter server that it leaves in the cache."""
    shutil.copytree(first[1], tmp_path / "cache")
    result = job(2, start + SERVER, env=CHECKED | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")})
    assert result.returncode == 0 and result.stdout.count("right") == 2, result.output
    assert result.stdout.count("compiled") >= num_compilers and NONE not in result.stderr, result.output
    return len(list((tmp_path / "cache").glob("torchmpi_sharding_*.native")))


def test_a_part_whose_compiler_has_ended_is_compiled_by_the_others(job, first, tmp_path):
    """Another process holds the lock of the second part, and ends without a file."""
    code = f"""
import subprocess
if rank == 0:
    lock = {str(tmp_path / "cache" / "torchmpi_sharding_1.lock")!r}
    holder = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); "
    other = subprocess.Popen([sys.executable, "-c", holder + "time.sleep(3)", lock], stdout=subprocess.PIPE)
    other.stdout.readline()
mpi.barrier()
"""
    assert compile_for_a_server(job, first, tmp_path, START + code, num_compilers=1) == 2


def test_kernels_are_compiled_even_if_they_cannot_be_cached(job, first, tmp_path):
    """For rank 0 the folder is read-only; rank 1 can neither lock nor write files."""
    code = """
import errno, fcntl, os
from mpi4py import MPI
from torchmpi import files

def no_locks(*arguments):
    raise OSError(errno.ENOLCK, "no locks available")

def no_room(*arguments, **options):
    raise OSError(errno.ENOSPC, "no space left on device")

if MPI.COMM_WORLD.rank == 0:
    os.access = lambda *arguments: False
else:
    fcntl.flock, files.write = no_locks, no_room
"""
    assert compile_for_a_server(job, first, tmp_path, code + START, num_compilers=2) == 0, "a file was written"


# --- the checked build of the kernels

COLLECTIVES = """
from torchmpi import errors
from torchmpi.session import runtime
from torchmpi.shared_memory import memory_layout
from torchmpi.shared_memory.kernels import kernel_sets, records

assert kernel_sets.ENABLE_CHECKS

def every_collective(numel, root):
    mine = torch.arange(numel, dtype=torch.float32) + rank
    everything = torch.stack([torch.arange(numel, dtype=torch.float32) + other for other in range(size)])
    for tensor in (mine.clone(), mpi.empty_shared(numel).copy_(mine)):
        assert torch.equal(mpi.allreduce(tensor), everything.sum(0)), ("allreduce", numel)
    assert torch.equal(mpi.allreduce_many([mine.clone(), mine[:7].clone()])[0], everything.sum(0))
    assert torch.equal(mpi.broadcast(mine.clone(), root), everything[root])
    assert torch.equal(mpi.allgather(mine), everything.reshape(-1))
    uneven = torch.cat([row[: numel - other] for other, row in enumerate(everything)])
    assert torch.equal(mpi.allgather(mine[: numel - rank]), uneven)
    reduced = mpi.reduce(mine.clone(), root)
    assert rank != root or torch.equal(reduced, everything.sum(0))
    gathered = mpi.gather(mine, root)
    assert rank != root or torch.equal(gathered, everything.reshape(-1))
    parts = everything[0].tensor_split(size)
    assert torch.equal(mpi.scatter(everything[0].clone() if rank == root else None, root), parts[rank])
    assert torch.equal(mpi.reduce_scatter(mine), everything.sum(0).tensor_split(size)[rank])
    assert torch.equal(mpi.alltoall(mine), torch.cat([row.tensor_split(size)[rank] for row in everything]))
    mpi.barrier()
"""


def test_collectives_pass_the_checks_of_the_kernels(job, checked):
    code = f"""{START}{COLLECTIVES}
for numel in (8, 28, 29, 3000, 40_000, 100_000, 700_001):
    for root in range(size):
        for _ in range(3):
            every_collective(numel, root)
try:  # counters begin anew after a call that failed
    mpi.allreduce(torch.ones(40_000 + rank))
except errors.MismatchError:
    every_collective(40_000, 0)
    print("right", flush=True)
"""
    result = job(3, code, env=checked, timeout=240)
    assert result.returncode == 0 and result.stdout.count("right") == 3, result.output


PLANTED = {
    "counters": ("fields[records.GroupRecord.chunks] -= 3", 40_000, "the counters ready and reduced ascend"),
    "slots": ("fields[records.GroupRecord.slots] += 1 << 40", 40_000, "slots within the shared segment"),
    "sequence": ("fields[records.GroupRecord.current_seq] += 10", 1, "sequence numbers ascend"),
    "another rank": ("if rank == 0: board[memory_layout.Block.reduced] += 3", 1, "reduced of a rank is at most two"),
    "first chunk": ("if rank == 0: board[memory_layout.Block.ready] += 3", 1, "ready of a rank is at most two"),
}


@pytest.fixture(scope="module")
def violations(launch, checked, tmp_path_factory):
    """A job that violates each check once; every call after a violation must succeed."""
    code = f"""from mpi4py import MPI
{START}{COLLECTIVES}
for what, (plant, numel, _) in {PLANTED!r}.items():
    for _ in range(3):  # the last ones by the fast path
        mpi.allreduce(torch.ones(numel))
    shared = runtime.current().world.shared
    fields, board, slots = shared.record.cells, shared.status_board.fields, shared.record.slots
    MPI.COMM_WORLD.Barrier()  # afterwards no rank is inside a kernel
    exec(plant)
    try:
        mpi.allreduce(torch.ones(numel))
    except (errors.InternalError, errors.MismatchError) as error:
        fields[records.GroupRecord.slots] = slots
        print(f"{{what}}:", error, flush=True)
    assert torch.equal(mpi.allreduce(torch.ones(40_000)), torch.full((40_000,), float(size)))
    print("right", flush=True)
"""
    script = tmp_path_factory.mktemp("violations") / "job.py"
    script.write_text(code)
    return launch(2, [script], env=checked, timeout=240)


@pytest.mark.parametrize("what", PLANTED)
def test_a_violated_check_raises_on_every_rank(violations, what):
    """A rank raises InternalError, or MismatchError if the other rank has aborted first; the next call works."""
    assert violations.returncode == 0 and violations.stdout.count("right") == 2 * len(PLANTED), violations.output
    output = "\n".join(line for line in violations.stdout.splitlines() if line.startswith(f"{what}:"))
    found = [
        rf"rank {rank}: allreduce.*, call #\d+: a check of the kernels failed: {PLANTED[what][2]}" for rank in (0, 1)
    ]
    aborted = [rf"cannot end on rank {rank}: rank {1 - rank} has aborted it" for rank in (0, 1)]
    assert any(re.search(text, output) for text in found), violations.output
    assert all(re.search(f"{one}|{other}", output) for one, other in zip(found, aborted, strict=True)), (
        violations.output
    )
