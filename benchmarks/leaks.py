"""Run many small and many large collectives, and report the growth of memory, descriptors and /dev/shm on each rank."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from usage import usage

from torchmpi import collectives
from torchmpi.cli.bench import options as parsing
from torchmpi.cli.bench.bench_job import BenchJob, job_facts
from torchmpi.cli.bench.bench_report import header
from torchmpi.cli.bench.command import measure_and_print, run_jobs, run_script
from torchmpi.cli.formatting import table

# For the time limit: many times the duration of a call on a machine that is not overloaded.
_SMALL_SECONDS, _LARGE_SECONDS = 5e-4, 2e-2
_SLICES = 10
_WARM_UP_CALLS = 1000
_PARTS = (("4 B", 1), ("1 MB", 1 << 18))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="examples:\n  python benchmarks/leaks.py\n  python benchmarks/leaks.py --small 10000 --large 100 -n 4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--small", type=parsing.count, default=1_000_000, metavar="CALLS", help="4-byte calls (1000000)")
    option("--large", type=parsing.count, default=10_000, metavar="CALLS", help="1 MB calls (10000)")
    parsing.add_ranks(parser.add_argument)
    parsing.add_json(parser.add_argument, "leaks")
    parser.set_defaults(kind="leaks", script=__file__)
    return parser


def run(options: argparse.Namespace) -> int:
    """Measure, print and save the results."""
    more_seconds = options.small * _SMALL_SECONDS + options.large * _LARGE_SECONDS
    start_jobs = partial(run_jobs, more_seconds=more_seconds)
    return measure_and_print(options, as_text, start_jobs=start_jobs, title="benchmarks/leaks.py")


def measure(job: BenchJob, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row for each rank and size of message. Collective."""
    rows: list[dict[str, Any]] = []
    for (part, numel), num_calls in zip(_PARTS, (options.small, options.large), strict=True):
        rows += _run(job, part, numel, num_calls)
    return {"facts": job_facts(job.comm), "rows": rows}


def _run(job: BenchJob, part: str, numel: int, num_calls: int) -> list[dict[str, Any]]:
    calls = itertools.cycle(_calls(numel, job.size))
    _make(calls, min(_WARM_UP_CALLS, num_calls))
    before, begin = usage(), time.monotonic()
    for number in range(_SLICES):
        job.show(f"{part}: {number * num_calls // _SLICES} of {num_calls} calls")
        _make(calls, (number + 1) * num_calls // _SLICES - number * num_calls // _SLICES)
    seconds = time.monotonic() - begin
    after = usage()
    row = {"ranks": job.size, "rank": job.rank, "part": part, "calls": num_calls, "seconds": round(seconds, 3)}
    return list(job.comm.allgather(row | {f"{name}_growth": after[name] - before[name] for name in after}))


def _make(calls: itertools.cycle[Callable[[], object]], number: int) -> None:
    for call in itertools.islice(calls, number):
        call()


def _calls(numel: int, size: int) -> list[Callable[[], object]]:
    """Return several collectives, in place and not, with a newly allocated result, and asynchronous."""
    tensor = torch.zeros(numel)
    whole = torch.zeros(max(size, numel // size * size))
    return [
        lambda: collectives.allreduce(tensor),
        lambda: collectives.broadcast(tensor),
        lambda: collectives.allgather(tensor[: max(1, numel // size)]),
        lambda: collectives.reduce_scatter(whole),
        lambda: collectives.allreduce_async(tensor).wait(),
    ]


def as_text(report: Mapping[str, Any]) -> str:
    """Format the growth on each rank."""
    rows = [["rank", "size", "calls", "s", "resident KiB", "descriptors", "threads", "segments KiB", "/dev/shm KiB"]]
    for row in report["rows"]:
        kib = [f"{row[f'{name}_growth'] / 1024:+.0f}" for name in ("resident_bytes", "segment_bytes", "dev_shm_bytes")]
        counts = [f"{row[f'{name}_growth']:+d}" for name in ("descriptors", "threads")]
        head = [str(row["rank"]), row["part"], str(row["calls"]), f"{row['seconds']:.1f}"]
        rows.append([*head, kib[0], *counts, *kib[1:]])
    note = "Growth over the calls, after warm-up calls. /dev/shm: of all processes of this machine."
    return "\n".join([*header(report), "", *table(rows), "", note])


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), run))
