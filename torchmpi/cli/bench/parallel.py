"""``torchmpi bench parallel``: forms of parallelism against one process and PyTorch's, by the size of the model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..formatting import counted, table
from .bench_job import BenchJob, job_facts
from .bench_report import Row, grouped, has_figure, page, timing_of, titled
from .contestants import open_group, why_absent
from .decoding import decoders
from .divided_work import ONE_PROCESS, ParallelContestant
from .mixtures import mixtures
from .pipelines import pipelines
from .timing import TimedCall, timed_rows

_POLL_SECONDS = 1e-3


class ParallelWorkload(NamedTuple):
    """Work that several forms of parallelism can do."""

    title: str
    step: str
    """What a step is, a noun."""
    make: Callable[[BenchJob, int, Mapping[str, Any]], list[ParallelContestant]]
    """Makes the contestants for a size, with the process groups of torch.distributed by name. Collective."""


WORKLOADS: Mapping[str, ParallelWorkload] = {
    "decoding": ParallelWorkload("generation, batch 1, 4 layers of this width", "token", decoders),
    "experts": ParallelWorkload("training, 2 experts of this width and 512 tokens on each rank", "step", mixtures),
    "pipeline": ParallelWorkload("training, 8 microbatches of 16 rows, blocks of this width", "step", pipelines),
}
"""What is measured; the first contestant of each is the base of the ratios."""


def measure(job: BenchJob, options: argparse.Namespace) -> dict[str, Any]:
    """Return rows of times for each workload and size. Collective."""
    reason = job.agreed(why_absent("gloo"))
    groups = {"gloo": None if reason else open_group("gloo", job.resources)}
    groups["torchmpi"] = open_group("torchmpi", job.resources)
    tasks = [
        (f"{name}, width {size}", float(size) ** 2, partial(_rows, job, name, size, groups))
        for name in options.workloads
        for size in options.widths
    ]
    return {"facts": job_facts(job.comm), "rows": job.run_in_turn(tasks, options.seconds)}


def _rows(job: BenchJob, workload: str, size: int, groups: Mapping[str, Any], seconds: float) -> list[dict[str, Any]]:
    contestants = WORKLOADS[workload].make(job, size, groups)
    why_not = {each.name: job.agreed(each.why_not) for each in contestants}
    timed = [
        TimedCall(each.name, (each.step,), lambda: None, partial(_alone, job, each.step) if each.alone else None)
        for each in contestants
        if why_not[each.name] is None
    ]
    return timed_rows(job, timed, why_not, seconds, {"ranks": job.size, "workload": workload, "size": size})


def _alone(job: BenchJob, step: Callable[[], object], number: int) -> float:
    """Run steps on rank 0, while the others sleep: a rank that waits in MPI would take its core and memory."""
    seconds = 0.0
    if job.rank == 0:
        begin = time.perf_counter()
        for _ in range(number):
            step()
        seconds = time.perf_counter() - begin
    request = job.comm.Ibarrier()
    while not request.Test():
        time.sleep(_POLL_SECONDS)
    return seconds


# --- table --------------------------------------------------------------------------------------------------

_LEGEND = (
    "ms: median over batches, of one step; spread: half the distance of the quartiles. x: how many times faster than",
    f"{ONE_PROCESS}, which has one thread, while the other ranks sleep.",
)


def as_text(report: Mapping[str, Any]) -> str:
    """Format the header, and a table for each workload, size and number of ranks."""
    lines: list[str] = []
    for (ranks, name, size), rows in grouped(report["rows"], ("ranks", "workload", "size")):
        workload = WORKLOADS[name]
        lines += titled(f"{workload.title}: {size}, {counted(ranks, 'rank')}", _table(rows, workload))
    return page(report, lines, _LEGEND, "size")


def _table(rows: Sequence[Row], workload: ParallelWorkload) -> list[str]:
    times = {row["contestant"]: row["median_us"] for row in rows if has_figure(row)}
    base = times.get(ONE_PROCESS)
    lines = [["", "ms", "spread", f"{workload.step}s/s", f"x {ONE_PROCESS}"]]
    for row in filter(has_figure, rows):
        timing = timing_of(row)
        ratio = "-" if base is None else f"{base / timing.median_us:.2f}"
        per_second = f"{1e6 / timing.median_us:.0f}"
        lines.append([row["contestant"], f"{timing.median_us / 1e3:.2f}", f"{timing.spread:.0%}", per_second, ratio])
    return table(lines)
