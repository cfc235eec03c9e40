"""Measure what `torchmpi top` costs the job that it looks at: a job, with rounds in which somebody looks and others.

    torchmpi run -n 2 benchmarks/top_cost.py [--functions]

The ranks make short steps: some arithmetic, an allreduce, and a report of the step. Rank 0 starts a process that looks
as `torchmpi top` does, in every second round. Reported are the time of a step, and CPU times, which depend less on what
else runs: of all threads of the ranks, for each step, and of the threads of torchmpi, which do what a look asks for.
`--functions` counts what these threads of rank 0 enter, and prints what they enter only while somebody looks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
import timeit
from collections import Counter
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any, NamedTuple

import torch

import torchmpi as mpi
from torchmpi.cli.top.job_view import view_of
from torchmpi.cli.top.watched_job import _LOOK_SECONDS, LookClock, WatchedJob, find_jobs
from torchmpi.supervision.pace import ran_ns

PACKAGE = str(Path(mpi.__file__).parent) + os.sep
_LOOKER = "--look"


def main() -> None:
    """Measure, or look."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--functions", action="store_true", help="count what threads of rank 0 enter")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each kind (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round (default: %(default)s)")
    parser.add_argument(_LOOKER, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.look is not None:
        look(given.look)
    else:
        measure(given.rounds, given.seconds, counts=given.functions)


def look(process: int) -> None:
    """Look at a job while the last line of standard input says so; print the time that it took at the end."""
    ((name, ranks),) = find_jobs(process).items()
    job = WatchedJob(name, ranks)
    looked, num_looks, begin, clock = 0.0, 0, time.process_time(), LookClock()
    print("ready", flush=True)
    for line in sys.stdin:
        end = time.monotonic() + float(line)
        looked += float(line)
        while time.monotonic() < end:
            job.read()
            view_of(job)
            num_looks += 1
            time.sleep(min(clock.pause(), max(0.0, end - time.monotonic())))
        print("done", flush=True)
    used = time.process_time() - begin
    print(used / looked, used / num_looks)


class Round(NamedTuple):
    """What all ranks together have done in a round."""

    steps: float
    cpu: float
    """CPU seconds of the processes,"""
    helpers: float
    """and those of the threads of torchmpi among them."""


class Counted:
    """The functions of the package that threads enter which begin after it was made."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls[f"{frame.f_code.co_filename.removeprefix(PACKAGE)}: {frame.f_code.co_name}"] += 1


def helper_seconds() -> float:
    """Return for how long the threads of torchmpi in this process have run."""
    threads = [each.native_id for each in threading.enumerate() if each.name.startswith("torchmpi")]
    return sum(ran_ns(Path(f"/proc/self/task/{each}/schedstat").read_text()) for each in threads) / 1e9


def steps(seconds: float) -> Round:
    """Make steps for a time."""
    matrix, number, count = torch.rand(200, 200), torch.zeros(1), 0
    end, cpu, helpers = time.monotonic() + seconds, time.process_time(), helper_seconds()
    while True:
        for _ in range(5):
            matrix = (matrix @ matrix).clamp_(0, 1)
        number[0] = time.monotonic() < end
        mpi.allreduce(number, op="min")
        mpi.report_progress(samples=1, loss=0.5)
        count += 1
        if not number.item():
            own = count, time.process_time() - cpu, helper_seconds() - helpers
            return Round(*mpi.allreduce(torch.tensor(own, dtype=torch.float64)).tolist())


def percent(ratios: list[float]) -> str:
    """Return what is more than 1 in percent: the median, and half the distance of the quartiles."""
    low, middle, high = quantiles(ratios, n=4)
    return f"{100 * (middle - 1):+.2f} (+- {100 * (high - low) / 2:.2f}) %"


def measure(rounds: int, seconds: float, *, counts: bool) -> None:
    """Measure all ranks; rank 0 reports."""
    counted = Counted() if counts else None
    mpi.start()
    looker = None
    if mpi.rank() == 0:
        command = [sys.executable, __file__, _LOOKER, str(os.getppid() if mpi.size() > 1 else os.getpid())]
        looker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert looker.stdout is not None and looker.stdout.readline() == "ready\n"
    found: tuple[list[Round], list[Round]] = [], []
    entered: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for index in range(2 * rounds):
        is_seen = index % 2 == 1
        time.sleep(_LOOK_SECONDS + 1)  # until the ranks tell no more
        mpi.barrier()
        if counted is not None:
            counted.calls.clear()
        if looker is not None and is_seen:
            assert looker.stdin is not None
            looker.stdin.write(f"{seconds}\n")
            looker.stdin.flush()
        found[is_seen].append(steps(seconds))
        if counted is not None:
            entered[is_seen].update(counted.calls)
        if looker is not None and is_seen:
            assert looker.stdout is not None
            looker.stdout.readline()
    if looker is not None:
        share, of_look = map(float, looker.communicate()[0].split())
        total = mpi.size() * seconds
        print(f"{mpi.size()} ranks, {rounds} rounds of {seconds:g} s of each kind, medians")
        print("                 time of a step   CPU of the ranks per step   of threads of torchmpi per second")
        for name, each in zip(("nobody looks", "somebody looks"), found, strict=True):
            of_step, of_second = median([1e6 * r.cpu / r.steps for r in each]), median([r.helpers for r in each])
            took = median([1e6 * total / r.steps for r in each])
            print(f"{name:<16} {took:11.1f} us {of_step:24.1f} us {1e6 * of_second / total:32.0f} us")
        time_part, cpu_part = (
            percent([part(seen) / seen.steps * alone.steps / part(alone) for alone, seen in zip(*found, strict=True)])
            for part in (lambda _: total, lambda each: each.cpu)
        )
        more = median([(seen.helpers - alone.helpers) / total for alone, seen in zip(*found, strict=True)])
        print(
            f"while somebody looks: {time_part} of the time and {cpu_part} of the CPU time of a step, "
            f"{100 * more:.3f} % of a core a rank"
        )
        print(f"the looking process: {100 * share:.2f} % of a core, {1e3 * of_look:.1f} ms a look")
        print(f"report of a step: {100 * min(timeit.repeat(mpi.report_progress, number=10_000, repeat=20)):.2f} us")
        if counted is not None:
            alone, seen = (each.total() / rounds / seconds for each in entered)
            print(
                f"threads of torchmpi on rank 0 enter {alone:.0f} functions a second, {seen:.0f} while somebody looks:"
            )
            for name in sorted(entered[1].keys() - entered[0].keys()):
                print(f"{entered[1][name] / rounds / seconds:6.1f} a second  {name}")
    mpi.stop()


if __name__ == "__main__":
    main()
