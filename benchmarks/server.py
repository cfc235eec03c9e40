"""Measure the parameter server: its speed against torch.distributed.rpc, idle, under a load of updates, over a link.

speed: send('add') and receive, each followed by wait(), by all ranks concurrently and by one, against a parameter
server with torch.distributed.rpc (rank 0 serves; two calls of Python or of TorchScript functions, or one call for
both), one-sided MPI and plain copies, interleaved. rows: the same for random rows of a table of 25.6 MB. idle: the
share of a core that idle servers use. storm: all ranks add integers as fast as they can; the sum must be exact, memory
must not grow. link: bytes per second to ranks of other hosts, in a job that mpirun has started on several.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rpc_peer import FORMS
from server_parts import OURS, RMA, measure_idle, measure_link, measure_rows, measure_speed, measure_storm

from torchmpi.cli.bench import options as parsing
from torchmpi.cli.bench.bench_job import BenchJob, job_facts
from torchmpi.cli.bench.bench_report import (
    Row,
    grouped,
    has_figure,
    header,
    microseconds,
    reasons,
    timing_of,
)
from torchmpi.cli.bench.collective_bench import gigabytes_per_second
from torchmpi.cli.bench.command import MORE_SECONDS, TIMES, measure_and_print, run_job, run_script
from torchmpi.cli.bench.contestants import COPY
from torchmpi.cli.formatting import counted, table
from torchmpi.errors import ArgumentError

_SIZES = "4K,64K,1M,16M,100M"
_EXAMPLES = """examples:
  python benchmarks/server.py
  python benchmarks/server.py --parts speed --sizes 4K,1M -n 2,4 --json --plot
  python benchmarks/server.py --parts storm --seconds 10 --storm-ranks 8
  mpirun -n 2 --hostfile hosts python benchmarks/server.py --parts link --gbit 1"""

PARTS = ("speed", "rows", "idle", "storm", "link")
STORM = "storm"
WITHOUT_SHARED_MEMORY = {"TORCHMPI_SLOT_BYTES": "0"}
"""With these settings each rank has a server thread, as between hosts."""
_DEFAULT_RANKS = (2,)
_NUM_IDLE = 3  # without a server, with one, and the peer


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--parts", type=parsing.names(PARTS, "part"), default=PARTS, metavar="LIST",
           help=f"among {', '.join(PARTS)} (default: all)")  # fmt: skip
    option("--sizes", type=parsing.sizes, default=parsing.sizes(_SIZES), metavar="SIZES",
           help=f"of the tensor: a list, or a range of powers of 4 (default: {_SIZES})")  # fmt: skip
    option("-n", dest="ranks", type=parsing.ranks, default=None, metavar="LIST",
           help="numbers of ranks, one job each (default: 2)")  # fmt: skip
    option("--seconds", type=parsing.seconds, default=parsing.DEFAULT_SECONDS, metavar="N",
           help="of speed, of rows, and of the storm (default: %(default)g); at least seven batches each")  # fmt: skip
    option("--idle", type=parsing.seconds, default=10.0, metavar="N", help="seconds of idling (default: 10)")
    option("--storm-ranks", type=parsing.count, default=4, metavar="N", help="ranks of the storm (default: 4)")
    option("--gbit", type=parsing.gigabits, default=None, metavar="R",
           help="speed of the link in Gbit/s, to compare with")  # fmt: skip
    option("--peers", type=parsing.names(("rpc", parsing.NONE), "peer"), default=("rpc",), metavar="LIST",
           help="rpc, or none (default: rpc)")  # fmt: skip
    parsing.add_json(option, "ps")
    parsing.add_plot(option, "ps")
    parser.set_defaults(kind="ps", script=__file__, settings={})
    return parser


def run(options: argparse.Namespace) -> int:
    """Measure, print and save the results."""
    if options.plot and not {"speed", "rows"} & set(options.parts):
        raise ArgumentError("--plot draws the results of --parts speed or rows. Add one, or leave --plot out.")
    return measure_and_print(options, as_text, start_jobs=_run_jobs, title="benchmarks/server.py")


def _run_jobs(options: argparse.Namespace, show: Callable[[str], None]) -> list[dict[str, Any]]:
    return [
        run_job(job.task, job.ranks, show, limit_seconds=MORE_SECONDS + TIMES * job.seconds)
        for job in planned_jobs(options)
    ]


def measure(job: BenchJob, options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of all requested parts. Collective."""
    rows = [row for part in options.parts for row in _MEASURES[part](job, options)]
    return {"facts": job_facts(job.comm), "rows": rows}


_MEASURES = {
    "speed": measure_speed, "rows": measure_rows, "idle": measure_idle, "storm": measure_storm, "link": measure_link,
}  # fmt: skip


# --- jobs ----------------------------------------------------------------------------------------------------


class PlannedJob(NamedTuple):
    """A job to launch."""

    ranks: int
    task: argparse.Namespace
    seconds: float
    """Expected duration, without the start."""


def planned_jobs(options: argparse.Namespace) -> list[PlannedJob]:
    """Plan one job for each number of ranks, one more with server threads on one host, and one for the storm.

    >>> options = argparse.Namespace(parts=PARTS, ranks=None, seconds=60.0, idle=10.0, storm_ranks=4)
    >>> [(job.ranks, job.task.parts, job.seconds) for job in planned_jobs(options)]
    [(2, ('speed', 'rows', 'idle', 'link'), 150.0), (2, ('idle',), 10.0), (4, ('storm',), 60.0)]
    """
    quiet_parts = tuple(part for part in options.parts if part != STORM)
    planned = []
    for number in options.ranks or _DEFAULT_RANKS:
        if quiet_parts:
            planned.append(_plan(options, number, quiet_parts, {}))
        if "idle" in quiet_parts:
            planned.append(_plan(options, number, ("idle",), WITHOUT_SHARED_MEMORY))
    if STORM in options.parts:
        planned.append(_plan(options, options.storm_ranks, (STORM,), {}))
    return planned


def _plan(options: argparse.Namespace, ranks: int, parts: tuple[str, ...], settings: dict[str, str]) -> PlannedJob:
    task = argparse.Namespace(**vars(options) | {"parts": parts, "settings": settings})
    durations = dict.fromkeys(("speed", "rows", "storm"), options.seconds)
    durations |= {"link": 0.0, "idle": _NUM_IDLE * options.idle}
    if settings:
        durations["idle"] = options.idle
    return PlannedJob(ranks, task, sum(durations[part] for part in parts))


# --- tables --------------------------------------------------------------------------------------------------

_MIB = 1 << 20
_PEERS = RMA, *FORMS
_SPEED_LEGEND = (
    "us: median over batches, spread: half the distance of the quartiles. mpi rma: one-sided MPI, Accumulate and Get,",
    "each with a flush. rpc, rpc script: torch.distributed.rpc, two calls of Python and of TorchScript functions; rpc",
    "one call: one TorchScript function that does both. GB/s: what is sent, twice, over the time. x: time of a",
    "contestant over that of torchmpi. of copy: bytes moved per second (sent and received, a copy: once) against plain",
    "copies by as many ranks.",
)


def as_text(report: Mapping[str, Any]) -> str:
    """Format the header, and a table for each part."""
    lines = header(report)
    for (part,), rows in grouped(report["rows"], ("part",)):
        lines += ["", *_TABLES[part](rows)]
    return "\n".join(lines)


def _speed(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for (ranks, operation, dtype), found in grouped(rows, ("ranks", "verb", "dtype")):
        lines += [
            f"{operation}, {dtype}, {counted(ranks, 'rank')}: us (spread)",
            "",
            *_indented(_speed_table(found)),
            "",
        ]
    lines += _SPEED_LEGEND
    missing = reasons(rows, "bytes")
    return [*lines, "", "no figures", *_indented(missing)] if missing else lines


def _speed_table(rows: Sequence[Row]) -> list[str]:
    names = [name for (name,), group in grouped(rows, ("contestant",)) if any(map(has_figure, group))]
    lines = [["bytes", *names, "GB/s", *(f"x {name}" for name in names if name in _PEERS), "of copy"]]
    for (num_bytes,), cell in grouped(rows, ("bytes",)):
        measured = {row["contestant"]: row for row in cell if has_figure(row)}
        times = [_time(measured.get(name)) for name in names]
        ours = measured.get(OURS)
        speed = "-" if ours is None else f"{gigabytes_per_second(ours['payload_bytes'], ours['median_us']):.2f}"
        verdicts = [_number(ratio(measured, name), "{:.1f}") for name in names if name in _PEERS]
        lines.append(
            [parsing.short_size(num_bytes), *times, speed, *verdicts, _number(share_of_copy(measured), "{:.0%}")]
        )
    return table(lines)


def ratio(measured: Mapping[str, Row], name: str) -> float | None:
    """Return the time of a contestant over that of torchmpi.

    >>> ratio({"torchmpi": {"median_us": 2}, "rpc": {"median_us": 9}}, "rpc")
    4.5
    """
    if not {OURS, name} <= set(measured):
        return None
    return float(measured[name]["median_us"] / measured[OURS]["median_us"])


def share_of_copy(measured: Mapping[str, Row]) -> float | None:
    """Return the bytes that torchmpi moves per second over those of the plain copy.

    >>> share_of_copy({"torchmpi": {"median_us": 8, "payload_bytes": 2}, "copy": {"median_us": 2, "payload_bytes": 1}})
    0.5
    """
    if not {OURS, COPY} <= set(measured):
        return None
    ours, copy = (measured[name]["payload_bytes"] / measured[name]["median_us"] for name in (OURS, COPY))
    return float(ours / copy)


def _time(row: Row | None) -> str:
    return "-" if row is None else f"{microseconds(row['median_us'])} ({timing_of(row).spread:.0%})"


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _idle(rows: Sequence[Row]) -> list[str]:
    lines = [["idle", "ranks", "s", "% of a core, each rank"]]
    for (what, ranks, seconds), found in grouped(rows, ("what", "ranks", "seconds")):
        lines.append([what, str(ranks), f"{seconds:g}", "  ".join(f"{100 * row['share']:.2f}" for row in found)])
    return table(lines)


def _storm(rows: Sequence[Row]) -> list[str]:
    lines = [["storm", "ranks", "s", "updates", "updates/s", "sum", "resident MiB before", "after"]]
    for row in rows:
        memory = [f"{row[f'resident_bytes_{when}'] / _MIB:.1f}" for when in ("before", "after")]
        head = [parsing.short_size(row["bytes"]), str(row["ranks"]), f"{row['seconds']:.1f}", str(row["updates"])]
        lines.append([*head, f"{row['updates_per_second']:.0f}", "exact" if row["is_exact"] else "WRONG", *memory])
    return [*table(lines), "", "Memory: of the rank where it grew most, after warm-up updates."]


def _link(rows: Sequence[Row]) -> list[str]:
    omitted = list(dict.fromkeys(row["why_not"] for row in rows if "why_not" in row))
    if omitted:
        return [f"link: {reason}" for reason in omitted]
    lines = [["link", "ranks", "MB", "MB/s", "quartiles", "of link"]]
    for row in rows:
        low, median, high = (row[name] / 1e6 for name in ("low", "bytes_per_second", "high"))
        share = "-" if row["gbit"] is None else f"{8 * row['bytes_per_second'] / (row['gbit'] * 1e9):.0%}"
        what = row["what"] if row["is_exact"] else f"{row['what']}: WRONG"
        lines.append([what, str(row["ranks"]), f"{row['bytes'] / 1e6:.1f}", f"{median:.1f}",
                      f"{low:.1f} to {high:.1f}", share])  # fmt: skip
    return table(lines)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


_TABLES = {"speed": _speed, "rows": _speed, "idle": _idle, "storm": _storm, "link": _link}


if __name__ == "__main__":
    sys.exit(run_script(make_parser(), run))
