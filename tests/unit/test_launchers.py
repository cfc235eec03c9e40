"""To a user of any launcher: it is detected by the variables that it sets in each process."""

from __future__ import annotations

import os
import select
import threading

import pytest

from torchmpi.cli import job
from torchmpi.cli.launching import Program, launch_command
from torchmpi.launch import launcher, network

_STEP = "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=5 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=2(x2),1"
_BATCH = "SLURM_JOB_ID=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_TASKS_PER_NODE=2(x2)"
_HYDRA = "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"
_OPEN_MPI = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
_TORCHRUN = "TORCHELASTIC_RUN_ID=x RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"

# Variables; then launcher, number of ranks, local rank, rank, ranks on the host
CASES = {
    _OPEN_MPI: ("Open MPI's mpirun", 4, 1, 3, 2),
    f"{_BATCH} PMIX_RANK=3 {_OPEN_MPI}": ("Open MPI's mpirun", 4, 1, 3, 2),
    "MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2 PMI_RANK=3": (
        "MVAPICH's mpirun", 4, 1, 3, 2,
    ),
    _HYDRA: ("MPICH's mpiexec", 4, 1, 3, 2),
    # The proxies of Hydra are tasks of srun.
    f"{_STEP} {_HYDRA}": ("MPICH's mpiexec", 4, 1, 3, 2),
    "JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2 PMIX_RANK=3": (
        "LSF's jsrun", 4, 1, 3, 2,
    ),
    "FLUX_TASK_RANK=3 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1 PMI_RANK=3 PMI_SIZE=4": ("Flux", 4, 1, 3, None),
    _STEP: ("Slurm's srun", 5, 0, 2, 2),
    f"{_STEP} PMI_RANK=2 PMI_SIZE=5 PMI_FD=11": ("Slurm's srun", 5, 0, 2, 2),
    f"{_STEP} PMIX_RANK=2": ("Slurm's srun", 5, 0, 2, 2),
    "PALS_RANKID=3 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PMI_RANK=3 PMI_SIZE=4": ("PALS's mpiexec", 4, 1, 3, 2),
    "PALS_RANKID=3 PALS_LOCAL_RANKID=1": ("PALS's mpiexec", None, 1, 3, None),
    "PMI_RANK=3 PMI_SIZE=4": ("a launcher with PMI", 4, None, 3, None),
    "PMIX_RANK=3": ("a launcher with PMIx", None, None, 3, None),
    "LSF_PM_TASKID=4 LSB_JOBID=7": ("LSF's blaunch", None, None, 3, None),
    "PBS_VNODENUM=3 PBS_NODENUM=1": ("PBS's pbsdsh", None, None, 3, None),
    "PBS_NODENUM=3": ("PBS's pbsdsh", None, None, 3, None),
    _TORCHRUN: ("torchrun", 2, 1, 1, 2),
    f"{_STEP} {_TORCHRUN}": ("torchrun", 2, 1, 1, 2),
}  # fmt: skip
ALONE = {
    "nothing": "",
    "a batch script of Slurm": _BATCH,
    "a shell of salloc": "SLURM_JOB_ID=5 SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=2",
    "a job script of PBS": "PBS_JOBID=1 PBS_NODENUM=0 PBS_VNODENUM=0 PBS_TASKNUM=1 PBS_NP=4",
    "a job script of LSF": "LSB_JOBID=7 LSB_DJOB_NUMPROC=4 LSF_PM_TASKID=1",
    "RANK of the user": "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1",
    "no number": "PMI_SIZE=many",
}


def _environment(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


@pytest.mark.parametrize("text", CASES)
def test_each_launcher(text):
    found = launcher.detect(_environment(text))
    assert tuple(found) == CASES[text]
    assert found.least_num_ranks == (found.num_ranks or found.rank + 1)


@pytest.mark.parametrize("text", ALONE.values(), ids=ALONE)
def test_no_launcher(text):
    found = launcher.detect(_environment(text))
    assert found.name is None and found.least_num_ranks == 1 and launcher.torch_variables(_environment(text)) == {}


def test_a_step_with_one_task_is_alone():
    assert launcher.detect(_environment("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1")).least_num_ranks == 1


@pytest.mark.parametrize(
    ("more", "expected"),
    [("", False), ("PMI_FD=11", True), ("PMIX_RANK=2", True), ("SLURM_MPI_TYPE=cray", True)],
)
def test_which_interface_srun_offers(monkeypatch, more, expected):
    for name in launcher.MPI_INTERFACES:
        monkeypatch.delenv(name, raising=False)
    for name, value in _environment(f"{_STEP} {more}").items():
        monkeypatch.setenv(name, value)
    assert launcher.detect().has_mpi_interface is expected


def test_variables_of_torch():
    assert launcher.torch_variables(_environment(_HYDRA)) == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip


@pytest.mark.parametrize("text", [f"PMIX_NAMESPACE=prterun-a-7@1 {_OPEN_MPI}", _HYDRA], ids=["Open MPI", "MPICH"])
def test_address_for_programs_that_read_one(text):
    """Of several hosts, ranks do not know the first one."""
    assert launcher.torch_address(_environment(text)) == {}
    one_host = text.replace("LOCAL_SIZE=2", "LOCAL_SIZE=4").replace("LOCALNRANKS=2", "LOCALNRANKS=4")
    address = launcher.torch_address(_environment(one_host))
    assert address["MASTER_ADDR"] == "127.0.0.1" and 20000 <= int(address["MASTER_PORT"]) < 32000
    other_rank = one_host.replace("RANK=3", "RANK=2").replace("LOCALRANKID=1", "LOCALRANKID=0")
    assert launcher.torch_address(_environment(other_rank)) == address


def test_without_a_launcher_there_is_no_address():
    assert launcher.torch_address({}) == launcher.torch_address(_environment(_TORCHRUN)) == {}


@pytest.mark.parametrize(
    ("text", "variable", "remedy"),
    [
        (_OPEN_MPI, "LOCAL_RANK", "TORCHMPI_AS_TORCHRUN=1: then the line `import torch` sets it"),
        (_OPEN_MPI, "MASTER_ADDR", "mpirun -x MASTER_ADDR=HOST"),
        (_HYDRA, "RANK", "`torchmpi run -n 4 PROGRAM`"),
    ],
)
def test_what_to_do_about_a_missing_variable(monkeypatch, text, variable, remedy):
    for name, value in _environment(text).items():
        monkeypatch.setenv(name, value)
    assert remedy in launcher.about_missing(variable) and f"does not set {variable}" in launcher.about_missing(variable)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a1", "a1"), ("a1,b2", "a1"), ("h[0-1]", "h0"), ("n[008-011,20],x7", "n008"), ("r[2-3]n[0-7],z", "r2n0")],
)
def test_first_host_of_a_list(nodes, host):
    assert launcher.first_host(nodes) == host


@pytest.mark.parametrize(
    ("variable", "value"),
    [("SLURM_JOB_NODELIST", "n[1-2]"), ("PBS_NODEFILE", "n1\nn1\nn2\n"), ("PE_HOSTFILE", "n1 2 q <N>\nn2 1 q <N>")],
)
def test_the_hosts_of_a_batch_job_are_used(monkeypatch, tmp_path, variable, value):
    """Regression: with --oversubscribe, Open MPI starts all ranks on the first node, and MASTER_ADDR was 127.0.0.1."""
    program, file = Program("mpirun", "Open MPI 5.0.11", True), tmp_path / "nodes"
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PBS_NODEFILE", str(file))  # of a job that has ended
    assert launch_command(program, 5000) == ["mpirun", "--oversubscribe", "-n", "5000"]
    assert job._master([]).startswith(f"{network.loopback()}:") and job._master([("h0", 2)]).startswith("h0:")
    if variable == "SLURM_JOB_NODELIST":
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv(variable, value)
    else:
        file.write_text(value)
        monkeypatch.setenv(variable, str(file))
    assert launch_command(program, 5000) == ["mpirun", "-n", "5000"]
    assert job._master([]).startswith("n1:")


def test_a_rank_waits_until_its_output_is_read(tmp_path):
    """Regression: MPICH's launcher, when kept from a core for 0.1 s, dropped the reason for the end of a job."""
    reader, writer = os.pipe()
    os.write(writer, b"the reason")
    with open(tmp_path / "file", "ab") as file:
        file.write(b"not a pipe")
        file.flush()
        threading.Timer(0.2, os.read, (reader, 100)).start()
        launcher.wait_until_output_is_read((writer, file.fileno(), 1 << 20), limit_seconds=60)
    assert select.select([reader], [], [], 0)[0] == []
    os.write(writer, b"nobody reads this")
    launcher.wait_until_output_is_read((writer,), limit_seconds=0.1)
    os.close(reader)
    os.close(writer)
