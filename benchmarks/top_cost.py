"""Measure what `torchmpi top` costs the job that it looks at: a job, with rounds in which somebody looks and others.

    torchmpi run -n 2 benchmarks/top_cost.py

The ranks make short steps: some arithmetic, an allreduce, and a report of the step. Rank 0 starts a process that looks
as `torchmpi top` does, once a second, in every second round; it is started before, so that its start is not measured.
Reported are the medians of the step times of both kinds of rounds, the median of the ratios of neighboring rounds, the
time of a core that the looking process takes, and the time of one report of a step. Leave a core free for that process:
on a full machine it takes its time from the ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import timeit
from statistics import median

import torch

import torchmpi as mpi
from torchmpi.cli.top.job_view import view_of
from torchmpi.cli.top.watched_job import WatchedJob, find_jobs

_LOOKER = "--look"


def main() -> None:
    """Measure, or look."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each kind (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round (default: %(default)s)")
    parser.add_argument(_LOOKER, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.look is not None:
        look(given.look)
    else:
        measure(given.rounds, given.seconds)


def look(process: int) -> None:
    """Look at a job while the last line of standard input says so; print the time that it took at the end."""
    ((name, ranks),) = find_jobs(process).items()
    job = WatchedJob(name, ranks)
    looked, begin = 0.0, time.process_time()
    print("ready", flush=True)
    for line in sys.stdin:
        end = time.monotonic() + float(line)
        looked += float(line)
        while time.monotonic() < end:
            job.read()
            view_of(job)
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
        print("done", flush=True)
    print((time.process_time() - begin) / looked)


def steps(seconds: float) -> float:
    """Make steps for a time; return the median of their times."""
    matrix, number, times = torch.rand(200, 200), torch.zeros(1), []
    end = time.monotonic() + seconds
    while True:
        begin = time.perf_counter()
        for _ in range(5):
            matrix = (matrix @ matrix).clamp_(0, 1)
        number[0] = time.monotonic() < end
        mpi.allreduce(number, op="min")
        mpi.report_progress(samples=1, loss=0.5)
        times.append(time.perf_counter() - begin)
        if not number.item():
            return median(times)


def measure(rounds: int, seconds: float) -> None:
    """Measure in all ranks; rank 0 reports its own."""
    mpi.start()
    looker = None
    if mpi.rank() == 0:
        command = [sys.executable, __file__, _LOOKER, str(os.getppid() if mpi.size() > 1 else os.getpid())]
        looker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert looker.stdout is not None and looker.stdout.readline() == "ready\n"
    alone: list[float] = []
    seen: list[float] = []
    for index in range(2 * rounds):
        is_seen = index % 2 == 1
        mpi.barrier()
        if looker is not None and is_seen:
            assert looker.stdin is not None
            looker.stdin.write(f"{seconds}\n")
            looker.stdin.flush()
        (seen if is_seen else alone).append(steps(seconds))
        if looker is not None and is_seen:
            assert looker.stdout is not None
            looker.stdout.readline()
    if looker is not None:
        share = float(looker.communicate()[0])
        ratios = [one / other for one, other in zip(seen, alone, strict=True)]
        print(f"{mpi.size()} ranks, {rounds} rounds of {seconds:g} s of each kind")
        print(f"step, nobody looks     {1e6 * median(alone):9.1f} us")
        print(f"step, somebody looks   {1e6 * median(seen):9.1f} us  ({100 * (median(ratios) - 1):+.2f} %)")
        print(f"the looking process    {100 * share:9.2f} % of a core")
        times = timeit.repeat(mpi.report_progress, number=10_000, repeat=20)
        print(f"report of a step       {100 * min(times):9.2f} us")
    mpi.stop()


if __name__ == "__main__":
    main()
