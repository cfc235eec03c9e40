"""A rank of memory.py: import and start torchmpi step by step, and record the resources after each step.

Started by its path, in a process that has not imported torch or torchmpi before.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from usage import usage


def main(package_parent: str, folder: str) -> None:
    """Import and start torchmpi, and write the resources after each step to the folder."""
    import torch
    from mpi4py import rc

    rc.initialize = False
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    MPI.COMM_WORLD.Barrier()
    stages = {"torch and mpi4py": usage()}
    sys.path.append(package_parent)
    import torchmpi

    stages["import torchmpi"] = usage()
    os.environ["TORCHMPI_VERBOSE"] = "0"
    torchmpi.start(with_cuda=False)
    stages["start()"] = usage()
    for numel in (1, 1 << 18):
        torchmpi.allreduce(torch.ones(numel))
        torchmpi.broadcast(torch.ones(numel))
        torchmpi.allreduce_async(torch.ones(numel)).wait()
    stages["first calls"] = usage()
    _write(Path(folder), stages)
    torchmpi.stop()
    MPI.Finalize()


def _write(folder: Path, stages: dict[str, dict[str, int]]) -> None:
    """Write the result. These imports come after the measurement, so that they do not count."""
    from memory import memory_rows
    from mpi4py import MPI

    from torchmpi.cli.bench.bench_job import job_facts

    facts = job_facts(MPI.COMM_WORLD)
    of_ranks = MPI.COMM_WORLD.allgather(stages)
    if MPI.COMM_WORLD.rank == 0:
        rows = [row for rank, found in enumerate(of_ranks) for row in memory_rows(len(of_ranks), rank, found)]
        (folder / "result.json").write_text(json.dumps({"facts": facts, "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
