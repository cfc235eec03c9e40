"""Agreement of ranks on a condition, without gathering Python objects."""

from __future__ import annotations

from typing import Any

import numpy as np


def on_all(comm: Any, condition: object) -> bool:
    """Return whether a condition is true on all ranks. Collective.

    Gathering the answers as Python objects would cost time and memory on each rank for every rank of the job.
    """
    if not hasattr(comm, "Allreduce"):  # ranks without an MPI library
        return all(comm.allgather(bool(condition)))
    from mpi4py import MPI

    answer = np.array([bool(condition)], np.int64)
    comm.Allreduce(MPI.IN_PLACE, answer, MPI.MIN)
    return bool(answer[0])
