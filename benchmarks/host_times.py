"""Measure every call between the hosts of a job, native, asynchronous and through torch.distributed, against MPI.

    mpirun --hostfile hosts -n 4 python benchmarks/host_times.py [--only alltoall,gather] [--peers gloo] [--json FILE]

Prints, for each call and size, the median time of batches in microseconds, in alternating order; in brackets over that
of the MPI library's call in the same run, and how many Python functions of the package rank 0 enters in a call: 0 to 3
if it is machine code. Rooted collectives have each rank as their root in turn. With ``--hosts abab`` the ranks of one
machine have these names of hosts; MPI then goes through shared memory, so compare ratios before and after a change
alone.

Hosts that are namespaces of one machine share its cores, which their ranks cannot see. Where there are more ranks than
cores, make them with ``HOSTS_CORES=shared scripts/hosts.sh up N``, and give Open MPI ``--mca mpi_yield_when_idle 1``:
otherwise a rank that waits keeps the core of another one, in torchmpi and in the MPI library.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import torchmpi as mpi
from torchmpi.cli.bench import bench_report, call_bench, options
from torchmpi.cli.bench.bench_job import BenchJob, job_facts
from torchmpi.cli.bench.contestants import Contestant, MPI4Py, Ours, TorchDistributed, open_group
from torchmpi.cli.bench.timing import TimedCall, measure_calls
from torchmpi.cli.bench.workload import BenchCase, Workload
from torchmpi.collective_specs import COLLECTIVES, SPECS

PACKAGE = str(Path(mpi.__file__).parent)
NUM_WARMUPS, NUM_COUNTS = 6, 5
MESSAGES = ("round trip", "exchange", "all_gather, list", "reduce_scatter, list", "all_to_all, list",
            "all_to_all, unequal")  # fmt: skip
OF_MPI = "mpi4py"


def functions_entered(calls: tuple[Callable[[], object], ...]) -> int:
    """Return how many functions of the package a call enters in this thread, the least of some counts."""
    counts: Counter[int] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        counts[0] += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    found = []
    for number in range(NUM_WARMUPS + NUM_COUNTS):
        counts.clear()
        for call in calls:
            if number >= NUM_WARMUPS:
                sys.setprofile(note)
            try:
                call()
            finally:
                sys.setprofile(None)
        found.append(round(counts[0] / len(calls)))
    return min(found[NUM_WARMUPS:])


def of_collective(contestants: list[Contestant], name: str, work: Workload) -> list[TimedCall]:
    """Return the calls of one collective."""
    roots = range(work.size if SPECS[name].is_rooted else 1)
    found = []
    for contestant in contestants:
        if contestant.why_not(name, str(work.dtype).removeprefix("torch.")) is None:
            found.append(TimedCall(contestant.name, tuple(contestant.bind(work, root) for root in roots), work.touch))
    return found


def extra_calls(work: Workload, comm: Any) -> dict[str, list[TimedCall]]:
    """Return allreduces of averages and of 16-bit floats, which MPI lacks: a sum of as many bytes stands for both."""
    wide, narrow = work.target, work.target.view(torch.bfloat16)
    of_mpi = TimedCall(OF_MPI, (lambda: comm.Allreduce(wide.numpy().copy(), wide.numpy()),), work.touch)
    return {
        "allreduce, average": [TimedCall("auto", (lambda: mpi.allreduce(wide, op="avg"),), work.touch), of_mpi],
        "allreduce, bfloat16": [TimedCall("auto", (lambda: mpi.allreduce(narrow),), work.touch), of_mpi],
    }


def main() -> None:
    """Print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=options.sizes, default=options.sizes("1K,32K,1M"))
    parser.add_argument("--only", default="", help="parts of the names of calls, with commas between them")
    peers = options.names(("gloo", options.NONE), "peer")
    parser.add_argument("--peers", type=peers, default=(), help="gloo: beside torch.distributed on it")
    parser.add_argument("--hosts", help="the letter of the host of each rank, for ranks of one machine")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each call and size, default %(default)s")
    parser.add_argument("--json", help="a file for the rows")
    chosen = parser.parse_args()
    if chosen.hosts:
        from mpi4py import MPI

        os.environ["TORCHMPI_HOST_NAME"] = f"host {chosen.hosts[MPI.COMM_WORLD.rank]}"
    resources = ExitStack()
    job = BenchJob(resources, print)
    groups = {options.DIST: open_group("torchmpi", resources)}
    groups |= {name: open_group(name, resources) for name in chosen.peers}
    contestants: list[Contestant] = []
    for asynchronous in (False, True):
        suffix = " async" if asynchronous else ""
        contestants += [
            Ours(None, "plain", asynchronous=asynchronous, name=f"auto{suffix}"),
            TorchDistributed(f"dist{suffix}", groups[options.DIST], asynchronous=asynchronous),
        ]
    contestants += [TorchDistributed(name, groups[name], asynchronous=False) for name in chosen.peers]
    contestants.append(MPI4Py(job.comm, asynchronous=False))
    names = [each.name for each in contestants] + ["mpi4py in place"]
    rows: list[dict[str, Any]] = []
    facts = job_facts(job.comm)

    def measure(title: str, num_bytes: int, calls: list[TimedCall]) -> None:
        entered = {call.name: functions_entered(call.calls) for call in calls}
        found = measure_calls(calls, job.comm, seconds=chosen.seconds, one_clock=job.one_clock)
        times = {call.name: summary.median_us for call, summary in zip(calls, found, strict=True)}
        rows.append({"call": title, "bytes": num_bytes, "us": times, "entered": entered})
        cells = {
            name: f"{time:.1f}" + ("" if name == OF_MPI else f" ({time / times[OF_MPI]:.2f}, {entered[name]})")
            for name, time in times.items()
        }
        show(title, options.short_size(num_bytes), [cells.get(name, "-") for name in names])

    def show(title: str, size: str, cells: list[str]) -> None:
        if job.rank == 0:
            print(title.ljust(20), size.rjust(5), *(cell.rjust(18) for cell in cells), flush=True)

    def is_chosen(title: str) -> bool:
        return not chosen.only or any(part in title for part in chosen.only.split(","))

    if job.rank == 0:
        report = bench_report.new_report("hosts", [{"facts": facts, "rows": []}], {})
        print(*bench_report.header(report | {"title": "benchmarks/host_times.py"}), "", sep="\n")
    show("call", "bytes", names)
    for num_bytes in chosen.sizes:
        for name in (name for name in COLLECTIVES if is_chosen(name)):
            if SPECS[name].tensors or num_bytes == chosen.sizes[0]:
                work = Workload(BenchCase(name, "float32", num_bytes), rank=job.rank, size=job.size)
                measure(name, num_bytes, of_collective(contestants, name, work))
        work = Workload(BenchCase("allreduce", "float32", num_bytes), rank=job.rank, size=job.size)
        for title, calls in extra_calls(work, job.comm).items():
            if is_chosen(title):
                measure(title, num_bytes, calls)
        for title in (title for title in MESSAGES if is_chosen(title)):
            at = call_bench.Buffers(job, groups, num_bytes)
            made = call_bench.CALLS[title].make(at)
            measure(title, num_bytes, [TimedCall(name, (call,), at.touch) for name, call in made.items()])
    if chosen.json and job.rank == 0:
        Path(chosen.json).write_text(json.dumps({"facts": facts, "rows": rows}))
    resources.close()


if __name__ == "__main__":
    main()
