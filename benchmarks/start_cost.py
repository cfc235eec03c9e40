"""Measure start() and the memory of a rank for several numbers of ranks, against MPI_Init and a barrier of mpi4py.

    python benchmarks/start_cost.py -n 2,8,16,32,64 --repeats 3

Both programs import torch, and wait for each other in a folder, so that they start with all modules imported. Printed
are the medians of the seconds from there until the last rank has started, of those of the whole job, and of the largest
resident memory of a rank, with the part of it that is shared. Ranks on several hosts need a clock and a folder in
common, as network namespaces of one machine have: --launcher is the command that starts them, with N for their number.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

from usage import usage

from torchmpi.cli.launching import find_programs, launch_command, run_limited

_LIMIT_SECONDS = 900.0
_POLL_SECONDS = 0.02
_COLUMNS = ("ranks", "program", "start s", "of mpi4py", "job s", "resident MiB", "of it shared")
_LINE = "{:>6} {:10} {:>8} {:>10} {:>8} {:>13} {:>13}"
_PROGRAMS = ("mpi4py", "torchmpi")


def run_rank(program: str, ranks: int, folder: Path) -> None:
    """Start as one rank of a job, and write times and memory into the folder."""
    import torch  # noqa: F401

    if program == "torchmpi":
        import torchmpi as mpi
    ready = folder / "ready"
    ready.mkdir(exist_ok=True)
    tempfile.mkstemp(dir=ready)
    while sum(1 for _ in ready.iterdir()) < ranks:
        time.sleep(_POLL_SECONDS)
    begin = time.monotonic()
    if program == "torchmpi":
        mpi.start(with_cuda=False)
    else:
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()
    result = {"begin": begin, "end": time.monotonic(), **usage()}
    Path(tempfile.mkstemp(suffix=".json", dir=folder)[1]).write_text(json.dumps(result))
    if program == "torchmpi":
        mpi.stop()


def measured(command: list[str], program: str, ranks: int) -> tuple[float, float, float, float]:
    """Return the seconds of the start and of the job, and the resident and the shared MiB of the largest rank."""
    with tempfile.TemporaryDirectory() as name:
        begin = time.monotonic()
        arguments = [sys.executable, __file__, "-n", str(ranks), "--rank", program, "--folder", name]
        job = run_limited([*command, *arguments], seconds=_LIMIT_SECONDS)
        seconds = time.monotonic() - begin
        results = [json.loads(file.read_text()) for file in Path(name).glob("*.json")]
        if job.status != 0 or len(results) != ranks:
            raise SystemExit(f"a job of {ranks} ranks failed:\n{job.stdout}{job.stderr}")
    start = max(result["end"] for result in results) - min(result["begin"] for result in results)
    largest = max(results, key=lambda result: result["resident_bytes"])
    return start, seconds, largest["resident_bytes"] / (1 << 20), largest["shared_resident_bytes"] / (1 << 20)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--ranks", default="2,8,16", help="numbers of ranks, with commas (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="jobs of each program (default %(default)s)")
    parser.add_argument("--launcher", help='command in place of mpirun, such as "mpirun --hostfile hosts -n N"')
    parser.add_argument("--rank", choices=_PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rank, int(options.ranks), options.folder)
        return
    if not options.launcher and not find_programs():
        raise SystemExit("neither mpirun nor mpiexec is on PATH or beside this Python")
    print(_LINE.format(*_COLUMNS))
    for ranks in map(int, options.ranks.split(",")):
        if options.launcher:
            command = [str(ranks) if word == "N" else word for word in shlex.split(options.launcher)]
        else:
            command = launch_command(find_programs()[0], ranks)
        found: dict[str, list[tuple[float, float, float, float]]] = {program: [] for program in _PROGRAMS}
        for _ in range(options.repeats):
            for program in _PROGRAMS:
                found[program].append(measured(command, program, ranks))
        ratio = statistics.median(own[0] / bare[0] for bare, own in zip(*found.values(), strict=True))
        for program, results in found.items():
            start, job, resident, shared = map(statistics.median, zip(*results, strict=True))
            times = f"{start:.2f}", f"{ratio:.2f}" if program == "torchmpi" else "", f"{job:.1f}"
            print(_LINE.format(ranks, program, *times, f"{resident:.0f}", f"{shared:.0f}"), flush=True)


if __name__ == "__main__":
    main()
