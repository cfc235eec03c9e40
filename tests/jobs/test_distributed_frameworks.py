"""To a user of other libraries: their programs, which choose the backend themselves, run under mpirun on torchmpi.

Also: workers at the end of a job, and torch.compile to machine code.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from helpers.launching import free_port, is_open_mpi, job_environment, search_path

pytestmark = pytest.mark.any_mpi

COMMON = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH = 64, 16
x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0)).double()
data = TensorDataset(x, x.sum(1, keepdim=True))
"""

WORKERS = """
dist.init_process_group("torchmpi")
batches = DataLoader(data, batch_size=BATCH, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
total = sum(x.sum() for x, _ in batches)
dist.all_reduce(total)
torch.testing.assert_close(total, x.sum() * dist.get_world_size())
print(f"rank {dist.get_rank()} on {dist.get_backend()}: like one process", flush=True)
dist.destroy_process_group()  # the workers are still there, and wait for the next epoch
"""

COMPILED = """
import os
import time
from pathlib import Path

import torch._inductor.config
import torch.distributed._functional_collectives as funcol

# Both take longer than this one function.
torch._inductor.config.cpp_cache_precompile_headers = torch._inductor.config.cpp.vec_isa_ok = False
dist.init_process_group("torchmpi")

def step(x):
    total = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
    return (total + 1) * x

x = torch.arange(6.0) + dist.get_rank()
compiled = torch.compile(step, fullgraph=True)
while dist.get_rank() and not list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so")):
    time.sleep(0.1)  # rank 0 compiles for both
assert torch.equal(compiled(x), step(x))
print(f"rank {dist.get_rank()} on {dist.get_backend()}: like one process", flush=True)
dist.destroy_process_group()
"""


def check(job, script: str, num_ranks: int = 2, **options: object) -> None:
    result = job(num_ranks, textwrap.dedent(COMMON + script), **options)
    assert result.returncode == 0, result.output
    for rank in range(num_ranks):
        assert f"rank {rank} on torchmpi: like one process" in result.stdout, result.output


PROGRAMS = Path(__file__).with_name("frameworks")
"""Programs for gloo; scripts/test_frameworks.py runs all, under each launcher."""
UNCHANGED = {"TORCHMPI_AS_GLOO": "1", "OMP_NUM_THREADS": "1"}

# Importing Transformers takes longer than both of its programs.
IN_TURN = """
import os, runpy, sys
for command in COMMANDS:
    sys.argv, sys.path[0] = command, os.path.dirname(command[0])
    runpy.run_path(command[0], run_name="__main__")
"""


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed here: install the extra frameworks")


@pytest.mark.release
def test_lightning_runs_unchanged(launch):
    """Under mpirun, without addresses. The program compares its parameters with those of one process."""
    skip_without("lightning")
    result = launch(2, [PROGRAMS / "lightning_trainer.py"], env=UNCHANGED)
    assert result.returncode == 0, result.output
    assert result.stdout.count(": lightning_trainer like one process") == 2, result.output
    assert "(TORCHMPI_AS_GLOO): torchmpi, 2 ranks on 1 host" in result.stderr, result.output


@pytest.mark.release
def test_transformers_run_unchanged(job):
    """The same: with a tensor parallel plan the tokens and logits of the undivided model; then with its Trainer."""
    skip_without("transformers")
    divided = [str(Path(__file__).parents[2] / "examples" / "llm" / "tp_transformers.py")]
    divided += ["--width", "256", "--depth", "2", "--tokens", "6", "--rounds", "1"]
    commands = [divided, [str(PROGRAMS / "trainer.py")]]
    result = job(2, IN_TURN.replace("COMMANDS", repr(commands)), env=UNCHANGED)
    assert result.returncode == 0, result.output
    assert "2 ranks: the logits of one process" in result.stdout, result.output
    assert result.stdout.count(": trainer like one process") == 2, result.output
    assert result.stderr.count("(TORCHMPI_AS_GLOO): torchmpi, 2 ranks on 1 host") == 2, result.output


def test_accelerate_launch_with_a_configuration_file(mpirun, warm_python, tmp_path):
    """Accelerate starts mpirun itself, and gives the ranks an address for torch's store."""
    skip_without("accelerate")
    (tmp_path / "hosts").write_text("localhost slots=2\n" if is_open_mpi(mpirun[0]) else "localhost:2\n")
    port = f"--main_process_port={free_port()}"
    config = f"--config_file={PROGRAMS / 'accelerate.yaml'}"
    program = [*warm_python, "-m", "accelerate.commands.launch", config, port, PROGRAMS / "accelerate_ddp.py"]
    environment = job_environment(UNCHANGED | search_path())
    result = subprocess.run(program, capture_output=True, text=True, timeout=400, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": accelerate_ddp like one process") == 2, result.stdout + result.stderr
    assert "(TORCHMPI_AS_GLOO): torchmpi, 2 ranks on 1 host" in result.stderr, result.stdout + result.stderr


def test_remaining_workers_do_not_keep_the_job(job):
    check(job, WORKERS)


@pytest.mark.release
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: no g++")
def test_compiled_to_machine_code(job, tmp_path):
    """tests/mpi checks only the graphs, since compilation takes ten seconds of a core for each rank."""
    check(job, COMPILED, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"})
