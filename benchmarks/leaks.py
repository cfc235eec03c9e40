"""Repeat calls, handles, groups, parameter servers, and start and stop; report the growth of each rank's resources."""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from usage import usage

import torchmpi as mpi
from torchmpi import collectives, parameterserver
from torchmpi.cli.bench import options as parsing
from torchmpi.cli.bench.bench_job import BenchJob, job_facts
from torchmpi.cli.bench.bench_report import header
from torchmpi.cli.bench.command import measure_and_print, run_jobs, run_script
from torchmpi.cli.formatting import table

_SLICES = 10
_WARM_UP_PART, _MOST_WARM_UP = 10, 1000
_HANDLES_AT_ONCE = 100


class Part(NamedTuple):
    """What is repeated."""

    name: str
    option: str
    number: int
    seconds: float
    """For the time limit: many times the duration of a repetition on a machine that is not overloaded."""
    make: Callable[[int], Callable[[], object]]
    """Returns the function that is repeated, given the number of ranks."""
    about: str


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="examples:\n  python benchmarks/leaks.py\n  python benchmarks/leaks.py --scale 0.01 -n 4\n"
        "  mpirun -n 2 python benchmarks/leaks.py --groups 20000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for part in PARTS:
        about = f"{part.about} ({part.number})"
        parser.add_argument(f"--{part.option}", type=parsing.count, metavar="NUMBER", help=about)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the numbers that are not given (1)")
    parsing.add_ranks(parser.add_argument)
    parsing.add_json(parser.add_argument, "leaks")
    parser.set_defaults(kind="leaks", script=__file__)
    return parser


def run(options: argparse.Namespace) -> int:
    """Measure, print and save the results."""
    more_seconds = sum(part.seconds * _count(part, options) for part in PARTS)
    start_jobs = partial(run_jobs, more_seconds=more_seconds)
    return measure_and_print(options, as_text, start_jobs=start_jobs, title="benchmarks/leaks.py")


def _count(part: Part, options: argparse.Namespace) -> int:
    given: int | None = getattr(options, part.option)
    return max(1, round(part.number * options.scale)) if given is None else given


def measure(job: BenchJob, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row for each rank and part. Collective."""
    rows: list[dict[str, Any]] = []
    for part in PARTS:
        rows += _run(job, part, _count(part, options))
    return {"facts": job_facts(job.comm), "rows": rows}


def _run(job: BenchJob, part: Part, count: int) -> list[dict[str, Any]]:
    repeated = part.make(job.size)
    for _ in range(min(_MOST_WARM_UP, -(-count // _WARM_UP_PART))):
        repeated()
    before, begin = _usage(), time.monotonic()
    for number in range(_SLICES):
        job.show(f"{part.name}: {number * count // _SLICES} of {count}")
        for _ in range((number + 1) * count // _SLICES - number * count // _SLICES):
            repeated()
    seconds = time.monotonic() - begin
    after = _usage()
    row = {"ranks": job.size, "rank": job.rank, "part": part.name, "calls": count, "seconds": round(seconds, 3)}
    row |= {"before": before, "after": after}
    return list(job.comm.allgather(row | {f"{name}_growth": after[name] - before[name] for name in after}))


def _usage() -> dict[str, int]:
    gc.collect()
    return usage()


def _calls(numel: int, size: int) -> Callable[[], object]:
    """Return a function that makes one of several collectives: in place and not, with a new result, asynchronous."""
    tensor = torch.zeros(numel)
    whole = torch.zeros(max(size, numel // size * size))
    calls: list[Callable[[], object]] = [
        lambda: collectives.allreduce(tensor),
        lambda: collectives.broadcast(tensor),
        lambda: collectives.allgather(tensor[: max(1, numel // size)]),
        lambda: collectives.reduce_scatter(whole),
        lambda: collectives.allreduce_async(tensor).wait(),
    ]
    following = itertools.cycle(calls)
    return lambda: next(following)()


def _handles(size: int) -> Callable[[], object]:
    """Return a function that begins a call, and once in a hundred times waits for those that were begun."""
    tensor, handles = torch.zeros(1), list[Any]()

    def begin() -> None:
        handles.append(collectives.allreduce_async(tensor.clone()))
        if len(handles) == _HANDLES_AT_ONCE:
            for handle in handles:
                handle.wait()
            handles.clear()

    return begin


def _groups(size: int) -> Callable[[], object]:
    def make_and_free() -> None:
        with mpi.group(range(size)) as group:
            mpi.barrier(comm=group)

    return make_and_free


def _servers(size: int) -> Callable[[], object]:
    def make_and_free() -> None:
        server = parameterserver.init(torch.zeros(1000))
        parameterserver.send(server, torch.ones(1000)).wait()
        parameterserver.free(server)

    return make_and_free


def _starts(size: int) -> Callable[[], object]:
    def stop_and_start() -> None:
        mpi.stop()
        mpi.start(with_cuda=False)

    return stop_and_start


PARTS = (
    Part("4 B", "small", 200_000, 5e-4, partial(_calls, 1), "calls of 4 bytes"),
    Part("1 MB", "large", 10_000, 2e-2, partial(_calls, 1 << 18), "calls of 1 MB"),
    Part("handles", "handles", 20_000, 2e-3, _handles, "asynchronous calls, 100 at a time"),
    Part("groups", "groups", 5000, 5e-2, _groups, "groups made and freed"),
    Part("servers", "servers", 2000, 5e-2, _servers, "parameter servers made and freed"),
    Part("starts", "starts", 300, 1.0, _starts, "times of stop() and start()"),
)


def as_text(report: Mapping[str, Any]) -> str:
    """Format the growth on each rank."""
    names = ("descriptors", "threads", "mappings")
    rows = [["rank", "part", "number", "s", "resident MiB", "KiB more", *names, "segments KiB", "/dev/shm KiB"]]
    for row in report["rows"]:
        kib = [f"{row[f'{name}_growth'] / 1024:+.0f}" for name in ("resident_bytes", "segment_bytes", "dev_shm_bytes")]
        counts = [f"{row['before'][name]}{row[f'{name}_growth']:+d}" for name in names]
        head = [str(row["rank"]), row["part"], str(row["calls"]), f"{row['seconds']:.1f}"]
        rows.append([*head, f"{row['before']['resident_bytes'] / 2**20:.1f}", kib[0], *counts, *kib[1:]])
    note = "Before, and growth, after some repetitions to warm up. /dev/shm: of all processes of this machine."
    return "\n".join([*header(report), "", *table(rows), "", note])


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), run))
