"""What all commands that start jobs, or may run in one, have in common."""

from __future__ import annotations

import os

# Launchers that torchmpi does not know by name tell their processes at least this.
_RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK", "PALS_RANKID", "FLUX_TASK_RANK")


def is_rank(launcher: str | None, num_ranks: int) -> bool:
    """Whether a launcher started this process. The shell of an interactive Slurm job is a step of one task.

    >>> is_rank("Slurm's srun", 1), is_rank("Slurm's srun", 2)
    (False, True)
    """
    if launcher == "Slurm's srun":
        return num_ranks > 1
    return launcher is not None or any(name in os.environ for name in _RANK_VARIABLES)


def environment() -> dict[str, str]:
    """For jobs of ours. As root, Open MPI's mpirun does nothing without two of them."""
    return os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
