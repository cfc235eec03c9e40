"""Measure the first start on a machine, which compiles the kernels, and the next start, which loads them.

    python benchmarks/first_start.py -n 2 --repeats 3

Printed are the seconds and the processor seconds of start() on the slowest rank; on idle cores both are nearly equal.
Each repeat uses a new folder for the compiled code.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time

from torchmpi.cli.launching import run_limited

_LIMIT_SECONDS = 300.0
_LINE = "{:>12} {:>13} {:>12} {:>12} {:>12}"


def start() -> None:
    """Start as one rank of a job, and print the duration on rank 0."""
    import torchmpi as mpi

    begin, processor = time.perf_counter(), time.process_time()
    mpi.start()
    spent = (time.perf_counter() - begin, time.process_time() - processor)
    slowest = [mpi.allreduce(seconds, op="max") for seconds in spent]
    if mpi.rank() == 0:
        print(*slowest)
    mpi.stop()


def measured(ranks: int, folder: str) -> list[float]:
    """Return the seconds and the processor seconds of a start with compiled code in a folder."""
    command = ["env", f"NUMBA_CACHE_DIR={folder}", sys.executable, "-m", "torchmpi", "run", "-n", str(ranks), __file__]
    result = run_limited([*command, "--rank"], seconds=_LIMIT_SECONDS)
    if result.status != 0:
        raise SystemExit(f"a job failed:\n{result.stdout}{result.stderr}")
    return [float(number) for number in result.stdout.split()[-2:]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--ranks", type=int, default=2, help="number of ranks (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="number of first starts (default %(default)s)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        start()
        return
    print(_LINE.format("load average", "first start s", "processor s", "next start s", "processor s"))
    for _ in range(options.repeats):
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            figures = [*measured(options.ranks, folder), *measured(options.ranks, folder)]
        print(_LINE.format(f"{load:.1f}", *(f"{figure:.2f}" for figure in figures)), flush=True)


if __name__ == "__main__":
    main()
