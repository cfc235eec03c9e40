"""What runs in the ranks that ``torchmpi bench`` starts, and in those that mpirun starts as ``torchmpi bench``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...session import mpi_library
from .job import started_job
from .jobs import relay_to

_MODULES = {
    "collectives": ".collective_job",
    "starts": ".collective_job",
    "train": ".train_job",
    "leaks": ".leak_job",
    "ps": ".ps_job",
}


def main(task: str) -> None:
    """Measure what a file says; rank 0 writes the result beside it."""
    path = Path(task)
    options = argparse.Namespace(**json.loads(path.read_text()))
    # MPI is initialised here to know who is rank 0; start() adopts it.
    MPI, _ = mpi_library.initialise()
    is_first = MPI.COMM_WORLD.rank == 0
    result = measure_job(options, relay_to(path.parent) if is_first else _silent)
    if is_first:
        path.with_name("result.json").write_text(json.dumps(result))


def measure_job(options: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Measure in this job. Collective; the rows are complete on all ranks."""
    os.environ.update(getattr(options, "settings", {}))
    module = importlib.import_module(_MODULES[options.kind], __package__)
    with started_job(show, getattr(options, "device", "cpu")) as job:
        result: dict[str, Any] = module.measure_job(job, options)
    return result


def _silent(text: str) -> None:
    pass
