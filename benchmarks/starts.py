"""Start two ranks many times without binding by the launcher, and report the speed of a large allreduce in each.

Ranks that share a core although others are free would show as slow starts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torchmpi.cli.bench import options as parsing
from torchmpi.cli.bench.bench_report import Row, has_figure, header, microseconds, reasons
from torchmpi.cli.bench.collective_bench import gigabytes_per_second
from torchmpi.cli.bench.command import MORE_SECONDS, check_files, print_report, run_job, run_script
from torchmpi.cli.formatting import table
from torchmpi.errors import ArgumentError
from torchmpi.launch import launcher
from torchmpi.status_line import StatusLine

# A start is slow if its speed is less than this share of the median.
SLOW_SHARE = 0.6
_START_SECONDS = 1.0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  python benchmarks/starts.py --count 20",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=parsing.count, default=20, help="number of starts (default: %(default)s)")
    parser.add_argument("--size", type=parsing.size, default=16 << 20, help="size of the allreduce (default: 16M)")
    parsing.add_json(parser.add_argument, "starts")
    parser.set_defaults(kind="starts", ranks=(2,))
    return parser


def run(options: argparse.Namespace) -> int:
    """Start the jobs one after another, print and save the results."""
    if launcher.is_rank():
        raise ArgumentError("this script starts jobs of its own. Run it without mpirun.")
    check_files(options)
    task = argparse.Namespace(
        kind="collectives", verbs=("allreduce",), dtypes=("float32",), sizes=(options.size,), backends=("auto",),
        memory=("plain",), peers=(), asynchronous=False, seconds=_START_SECONDS,
    )  # fmt: skip
    status, jobs = StatusLine(), []
    for number in range(1, options.count + 1):
        status.show(f"start {number} of {options.count}")
        job = run_job(task, 2, lambda text: None, limit_seconds=MORE_SECONDS, unbound=True)
        ours = [row | {"start": number} for row in job["rows"] if row["contestant"] == "auto"]
        jobs.append(job | {"rows": ours})
    status.clear()
    print_report(options, jobs, as_text, title="benchmarks/starts.py")
    return 0


def as_text(report: Mapping[str, Any]) -> str:
    """Format one line for each start, and the number of slow starts."""
    lines = [*header(report), ""]
    measured = [(row, job) for row, job in zip(report["rows"], report["jobs"], strict=True) if has_figure(row)]
    rows = [["start", "us", "GB/s", "cores"]]
    for row, job in measured:
        rows.append([str(row["start"]), microseconds(row["median_us"]), _speed(row), " | ".join(job["facts"]["cores"])])
    lines += [*table(rows), ""] if measured else []
    return "\n".join([*lines, *reasons(report["rows"], "start"), verdict([row for row, _ in measured])])


def _speed(row: Row) -> str:
    return f"{gigabytes_per_second(row['payload_bytes'], row['median_us']):.2f}"


def verdict(rows: Sequence[Row]) -> str:
    """Summarize the starts in one sentence.

    >>> verdict([{"median_us": time, "bytes": 1 << 20} for time in (100, 110, 300)])
    'allreduce of 1M: median 110 us, slowest 300 us; 1 of 3 starts is far slower than the median.'
    """
    if not rows:
        return "No start was measured."
    times = [row["median_us"] for row in rows]
    median = statistics.median(times)
    num_slow = sum(time > median / SLOW_SHARE for time in times)
    slow = f"{num_slow or 'none'} of {len(rows)} starts {'is' if num_slow == 1 else 'are'}"
    return (
        f"allreduce of {parsing.short_size(rows[0]['bytes'])}: median {microseconds(median)} us, slowest "
        f"{microseconds(max(times))} us; {slow} far slower than the median."
    )


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), run))
