"""Detection of the launcher that started this process, from environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

# Variables that each launcher sets: (name, number of ranks, rank on the host).
_LAUNCHER_VARIABLES = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPICH's mpiexec", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("MVAPICH's mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
# Launchers that are not in the table above set at least one of these.
_RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK", "PALS_RANKID", "FLUX_TASK_RANK")


class Launcher(NamedTuple):
    """The launcher of a process; `name` is None if none was detected."""

    name: str | None
    num_ranks: int
    local_rank: int | None


def detect(environment: Mapping[str, str] | None = None) -> Launcher:
    """Detect the launcher of this process.

    >>> detect({"PMI_SIZE": "4", "MPI_LOCALRANKID": "1"})
    Launcher(name="MPICH's mpiexec", num_ranks=4, local_rank=1)
    >>> detect({}).name is None
    True
    """
    environment = os.environ if environment is None else environment
    for name, size_variable, local_variable in _LAUNCHER_VARIABLES:
        size = environment.get(size_variable, "")
        if size.isdigit():
            local = environment.get(local_variable, "")
            return Launcher(name, int(size), int(local) if local.isdigit() else None)
    return Launcher(None, 1, None)


def is_rank() -> bool:
    """Return whether a launcher started this process as a rank of a job.

    The shell of an interactive Slurm job is a step with one task, and counts as not launched.
    """
    found = detect()
    if found.name == "Slurm's srun":
        return found.num_ranks > 1
    return found.name is not None or any(name in os.environ for name in _RANK_VARIABLES)


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
