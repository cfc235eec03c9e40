"""``torchmpi bench parallel``: forms of parallelism against one process and PyTorch's, by the size of the model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torchmpi

from ...collective_specs import SPECS
from ...errors import ArgumentError
from ..formatting import counted, table
from .bench_job import BenchJob, job_facts
from .bench_report import Row, grouped, has_figure, page, timing_of, titled
from .collective_bench import cost
from .contestants import open_group, why_absent
from .decoding import decoders
from .divided_training import trainings
from .divided_work import ONE_PROCESS, ParallelContestant
from .mixtures import mixtures
from .sequences import sequences
from .timing import MIN_BATCHES, TimedCall, timed_rows

_POLL_SECONDS = 1e-3
_BATCH_SECONDS = 0.1
"""At most, of a batch of steps: the first one finds the caches full of what another contestant has used."""


class ParallelWorkload(NamedTuple):
    """Work that several forms of parallelism can do."""

    title: str
    step: str
    """What a step is, a noun."""
    make: Callable[[BenchJob, int, int, Mapping[str, Any]], list[ParallelContestant]]
    """Makes the contestants for a width and a batch, with process groups of torch.distributed by name. Collective."""
    batches: tuple[int, ...] = ()
    """Fixed ones; empty if the options give them."""


WORKLOADS: Mapping[str, ParallelWorkload] = {
    "decoding": ParallelWorkload("generation, batch 1, 4 layers of width {}", "token", decoders, (1,)),
    "experts": ParallelWorkload("training, 2 experts of width {} and {} tokens on each rank", "step", mixtures, (512,)),
    "training": ParallelWorkload("training, blocks of width {}, batch {}", "step", trainings),
    "sequence": ParallelWorkload("causal attention of width {}, 512 tokens on each rank", "step", sequences, (1,)),
}
"""What is measured; the first contestant of each is the base of the ratios."""


def measure(job: BenchJob, options: argparse.Namespace) -> dict[str, Any]:
    """Return rows of times for each workload and size. Collective."""
    uneven = [batch for batch in options.batches if batch % job.size]
    if "training" in options.workloads and uneven:
        raise ArgumentError(
            f"--batches {uneven[0]}: {job.size} ranks cannot have equal parts of it. Pass multiples of {job.size}."
        )
    names = ("torchmpi",) if job.agreed(why_absent("gloo")) else ("gloo", "torchmpi")
    groups = {name: open_group(name, job.resources) for name in names}
    tasks = [
        (f"{name}, width {size}, batch {batch}", float(size) ** 2, partial(_rows, job, name, size, batch, groups))
        for name in options.workloads
        for size in options.widths
        for batch in WORKLOADS[name].batches or options.batches
    ]
    return {"facts": job_facts(job.comm), "rows": job.run_in_turn(tasks, options.seconds)}


def _rows(
    job: BenchJob, workload: str, size: int, batch: int, groups: Mapping[str, Any], seconds: float
) -> list[dict[str, Any]]:
    contestants = WORKLOADS[workload].make(job, size, batch, groups)
    why_not = {each.name: job.agreed(each.why_not) for each in contestants}
    why_not["gloo"] = job.agreed(why_absent("gloo"))
    found = [each for each in contestants if why_not[each.name] is None]
    own = {
        each.name: {
            "held_bytes": max(job.comm.allgather(each.held_bytes)),
            "sent_bytes": 0 if each.alone else _sent(job, each),
        }
        for each in found
    }
    timed = [
        TimedCall(each.name, (each.step,), lambda: None, partial(_alone, job, each.step) if each.alone else None)
        for each in found
    ]
    head = {"ranks": job.size, "workload": workload, "size": size, "batch": batch}
    batch_seconds = min(_BATCH_SECONDS, seconds / (MIN_BATCHES * max(1, len(timed))))
    rows = timed_rows(job, timed, why_not, seconds, head, batch_seconds)
    return [row | own.get(row["contestant"], {}) for row in rows]


def _sent(job: BenchJob, contestant: ParallelContestant) -> int:
    """Run a step; return the bytes that the busiest rank sends by the usual algorithms of its calls. Collective."""
    before = _bytes_so_far(job.size)
    contestant.step()
    return max(map(int, job.comm.allgather(_bytes_so_far(job.size) - before)))


def _bytes_so_far(size: int) -> int:
    found = torchmpi.metrics()
    sent = sum(each["bytes"] for kinds in found["messages"].values() for kind, each in kinds.items() if kind != "recv")
    for kinds in found["calls"].values():
        for name, each in kinds.items():
            payload = each["bytes"] * (size if SPECS[name].grows > 0 else 1)  # of the larger tensor
            sent += cost(name, size, payload).sent_bytes
    return int(sent)


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
    f"{ONE_PROCESS}, which has one thread, while the other ranks sleep. held: parameters, gradients and state of the",
    "optimizer between steps, on the rank that has most; sent: by the busiest rank in a step, if the calls of torchmpi",
    "that were counted are rings. messages: the same without computing; products: the weights are multiplied only.",
)


def as_text(report: Mapping[str, Any]) -> str:
    """Format the header, and a table for each workload, size and number of ranks."""
    lines: list[str] = []
    for (ranks, name, size, batch), rows in grouped(report["rows"], ("ranks", "workload", "size", "batch")):
        workload = WORKLOADS[name]
        title = f"{workload.title.format(size, batch)}, {counted(ranks, 'rank')}"
        lines += titled(title, _table(rows, workload))
    return page(report, lines, _LEGEND, "size")


def _table(rows: Sequence[Row], workload: ParallelWorkload) -> list[str]:
    times = {row["contestant"]: row["median_us"] for row in rows if has_figure(row)}
    base = times.get(ONE_PROCESS)
    lines = [["", "ms", "spread", f"{workload.step}s/s", f"x {ONE_PROCESS}", "MB held", "sent"]]
    for row in filter(has_figure, rows):
        timing = timing_of(row)
        ratio = "-" if base is None else f"{base / timing.median_us:.2f}"
        per_second = f"{1e6 / timing.median_us:.0f}"
        megabytes = [f"{row[name] / 1e6:.3g}" if row[name] else "-" for name in ("held_bytes", "sent_bytes")]
        milliseconds = f"{timing.median_us / 1e3:.2f}"
        lines.append([row["contestant"], milliseconds, f"{timing.spread:.0%}", per_second, ratio, *megabytes])
    return table(lines)
