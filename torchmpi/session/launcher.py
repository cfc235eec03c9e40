"""Detection of the launcher that started this process, from environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

# Name, and the variables for: number of ranks, rank on the host, rank, number of ranks on the host.
_LAUNCHER_VARIABLES = (
    ("Open MPI's mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "LOCAL_RANK", "RANK", "LOCAL_SIZE"))),
    ("MPICH's mpiexec", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_RANK", "MPI_LOCALNRANKS"),
    ("MVAPICH's mpirun", *(f"MV2_COMM_WORLD_{name}" for name in ("SIZE", "LOCAL_RANK", "RANK", "LOCAL_SIZE"))),
    ("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_PROCID", ""),
)
# Launchers that are not in the table above set at least one of these.
_RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK", "PALS_RANKID", "FLUX_TASK_RANK")

RUN_VARIABLE = "TORCHMPI_RUN_PID"
"""The process id of a rank that ``torchmpi run`` started."""


class Launcher(NamedTuple):
    """The launcher of a process; `name` is None if none was detected. Numbers that it does not give are None."""

    name: str | None
    num_ranks: int
    local_rank: int | None
    rank: int | None = None
    local_size: int | None = None


def detect(environment: Mapping[str, str] | None = None) -> Launcher:
    """Detect the launcher of this process.

    >>> detect({"PMI_SIZE": "4", "MPI_LOCALRANKID": "1"})
    Launcher(name="MPICH's mpiexec", num_ranks=4, local_rank=1, rank=None, local_size=None)
    >>> detect({}).name is None
    True
    """
    environment = os.environ if environment is None else environment
    for name, *variables in _LAUNCHER_VARIABLES:
        num_ranks, *others = (_number(environment.get(variable, "")) for variable in variables)
        if num_ranks is not None:
            return Launcher(name, num_ranks, *others)
    return Launcher(None, 1, None)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def is_rank() -> bool:
    """Return whether a launcher started this process as a rank of a job.

    The shell of an interactive Slurm job is a step with one task, and counts as not launched.
    """
    found = detect()
    if found.name == "Slurm's srun":
        return found.num_ranks > 1
    return found.name is not None or any(name in os.environ for name in _RANK_VARIABLES)


def announcement() -> str:
    """Return the line that precedes the messages of the launcher when the job is aborted; '' without a launcher."""
    name = detect().name
    return "" if name is None else f"torchmpi: The lines below are from {name}."


def is_started_by_run() -> bool:
    """Return whether ``torchmpi run`` started this process as a rank; a child process of a rank does not count."""
    return os.environ.get(RUN_VARIABLE) == str(os.getpid())


def family(name: str) -> str | None:
    """Return the family of a launcher or library; only members of one family work together.

    >>> family("Open MPI's mpirun"), family("Intel MPI 2021.9"), family("Slurm's srun")
    ('Open MPI', 'MPICH', None)
    """
    if name.startswith("Open MPI"):
        return "Open MPI"
    return "MPICH" if name.startswith(("MPICH", "Intel MPI", "MVAPICH")) else None


def are_incompatible(launcher: str | None, library: str) -> bool:
    """Return whether a launcher is known to belong to another family than the library.

    >>> are_incompatible("Open MPI's mpirun", "MPICH 5.0.2"), are_incompatible(None, "MPICH 5.0.2")
    (True, False)
    """
    families = family(launcher or ""), family(library)
    return None not in families and families[0] != families[1]
