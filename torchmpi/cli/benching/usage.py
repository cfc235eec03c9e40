"""What a process holds: memory, shared segments, descriptors, threads.

Uses the standard library alone: ``torchmpi bench memory`` runs this file by its path, in processes that have not yet
imported anything, and ``torchmpi bench leaks`` imports it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

_SEGMENT = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+\s+/(?:dev/shm/|memfd:)", flags=re.MULTILINE)


def usage() -> dict[str, int]:
    """This process now; bytes and numbers.

    >>> usage()["resident_bytes"] > 0
    True
    """
    status = Path("/proc/self/status").read_text()
    return {
        "resident_bytes": 1024 * _field(status, "VmRSS"),
        "shared_resident_bytes": 1024 * _field(status, "RssShmem"),
        "segment_bytes": segment_bytes(Path("/proc/self/maps").read_text()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": _field(status, "Threads"),
        "dev_shm_bytes": _dev_shm_bytes(),
    }


def _field(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", status, flags=re.MULTILINE)
    return int(found[1]) if found else 0


def segment_bytes(maps: str) -> int:
    """The size of the shared segments in the text of ``/proc/PID/maps``, touched or not.

    >>> segment_bytes("7f00-7f10 rw-s 00000000 00:19 5    /dev/shm/x (deleted)")
    16
    """
    return sum(int(end, 16) - int(begin, 16) for begin, end in _SEGMENT.findall(maps))


def _dev_shm_bytes() -> int:
    """In use by everybody on this machine."""
    return shutil.disk_usage("/dev/shm").used if os.path.isdir("/dev/shm") else 0


def main(package_parent: str, folder: str) -> None:
    """Import and start step by step, and write what the process holds after each."""
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
    """After the measurement, so that these imports do not count."""
    from mpi4py import MPI

    from torchmpi.cli.benching.job import job_facts
    from torchmpi.cli.benching.usage_table import memory_rows

    facts = job_facts(MPI.COMM_WORLD)
    everybody = MPI.COMM_WORLD.allgather(stages)
    if MPI.COMM_WORLD.rank == 0:
        rows = [row for rank, found in enumerate(everybody) for row in memory_rows(len(everybody), rank, found)]
        (folder / "result.json").write_text(json.dumps({"facts": facts, "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
