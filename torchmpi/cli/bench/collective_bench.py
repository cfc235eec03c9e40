"""``torchmpi bench collectives``: time all contestants on the same buffers, for each collective, dtype and size."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ...collective_specs import IN_PLACE, SPECS
from ..formatting import counted, table
from .bench_job import BenchJob, job_facts
from .bench_report import Row, grouped, has_figure, microseconds, page, time_and_spread, timing_of, titled
from .contestants import COPY, LAUNCH, Contestant, Copy, find_peers, our_contestants, through
from .options import CPU_PEERS, NATIVE, PEERS, short_size
from .timing import BATCH_SECONDS, MIN_BATCHES, TimedCall, timed_on, timed_rows
from .workload import BenchCase, Workload

_ASSUMED_BYTES_PER_SECOND = 2e9  # the speed of a slow contestant, to divide the time among sizes


def measure(job: BenchJob, options: argparse.Namespace) -> dict[str, Any]:
    """Return rows of times, or of reasons why there are none, for each case and contestant. Collective."""
    asynchronous, device = options.asynchronous, job.device.type
    peers = (*options.peers, "nccl") if device != "cpu" and tuple(options.peers) == CPU_PEERS else options.peers
    contestants: list[Contestant] = []
    for interface in options.through:
        if interface == NATIVE:
            contestants += our_contestants(options.backends, options.memory, asynchronous=asynchronous, device=device)
        else:
            contestants.append(through(interface, job, asynchronous=asynchronous))
    contestants += [*find_peers(peers, job, asynchronous=asynchronous), Copy()]
    tasks = []
    for case in cases(options):
        batch_seconds = max(BATCH_SECONDS, job.size * case.num_bytes / _ASSUMED_BYTES_PER_SECOND)
        title = " ".join(filter(None, (case.collective, case.dtype, short_size(case.num_bytes))))
        measurement = CaseMeasurement(job, case, asynchronous)
        tasks.append((title, len(contestants) * MIN_BATCHES * batch_seconds, partial(measurement.rows, contestants)))
    return {"facts": job_facts(job.comm), "rows": job.run_in_turn(tasks, options.seconds)}


def cases(options: argparse.Namespace) -> list[BenchCase]:
    """Return the cases to measure; a barrier has neither dtype nor size."""
    out_of_place = getattr(options, "out_of_place", False)
    found = (
        BenchCase(collective, dtype, size, out_of_place) if SPECS[collective].tensors else BenchCase(collective, "", 0)
        for collective in options.verbs
        for dtype in options.dtypes
        for size in options.sizes
    )
    return list(dict.fromkeys(found))


class CaseMeasurement:
    """All contestants on one collective, dtype and size."""

    def __init__(self, job: BenchJob, case: BenchCase, asynchronous: bool) -> None:
        self.job, self.case, self.asynchronous = job, case, asynchronous

    def _workload(self, contestant: Contestant | None = None) -> Workload:
        allocate = None if contestant is None else contestant.allocate()
        job = self.job
        return Workload(self.case, rank=job.rank, size=job.size, allocate=allocate, device=job.device)

    def rows(self, contestants: list[Contestant], seconds: float) -> list[dict[str, Any]]:
        """Return one row for each contestant: its times, or the reason why there are none."""
        plain = self._workload()
        bound = {contestant.name: self._bind(contestant, plain) for contestant in contestants}
        timed = [call for call in bound.values() if isinstance(call, TimedCall)]
        steps, sent_bytes = cost(self.case.collective, self.job.size, plain.payload_bytes)
        mode = "async" if self.asynchronous else "sync"
        mode += " out of place" if self.case.out_of_place and self.case.collective in IN_PLACE else ""
        head = {
            "ranks": self.job.size,
            "verb": self.case.collective,
            "dtype": self.case.dtype,
            "mode": mode + ("" if self.job.device.type == "cpu" else " on cuda"),
            "bytes": self.case.num_bytes,
            "payload_bytes": plain.payload_bytes,
            "model_steps": steps,
            "model_bytes": sent_bytes,
        }
        why_not = {name: call for name, call in bound.items() if isinstance(call, str)}
        return timed_rows(self.job, timed, why_not, seconds, head)

    def _bind(self, contestant: Contestant, work: Workload) -> TimedCall | str:
        """Return a call that has given the correct result for every root, or the reason why there is none."""
        reason = self.job.agreed(contestant.why_not(self.case.collective, self.case.dtype))
        if reason is not None:
            return reason
        roots = range(self.job.size if SPECS[self.case.collective].is_rooted else 1)
        calls = []
        try:
            if contestant.allocate() is not None:
                work = self._workload(contestant)
            calls = [contestant.bind(work, root) for root in roots]
        except Exception as error:  # other libraries may raise any exception
            reason = f"{type(error).__name__}: {error}"
        reason = self.job.agreed(reason) or self.job.agreed(self._check(contestant, work, calls))
        if reason is not None:
            return reason
        timed = timed_on(self.job, calls, is_launch=contestant.name == LAUNCH)
        return TimedCall(contestant.name, tuple(calls), work.touch, timed)

    def _check(self, contestant: Contestant, work: Workload, calls: list[Any]) -> str | None:
        reason = None
        for root, call in enumerate(calls):  # also after an error: the other ranks make all calls
            work.fill()
            try:
                result = call()
                if contestant.name == LAUNCH:
                    result.wait()
                is_right = contestant.name == COPY or work.is_right(root)
                found = None if is_right else f"wrong result on rank {self.job.rank}, root {root}"
            except Exception as error:
                found = f"{type(error).__name__}: {error}".partition("\n")[0]
            reason = reason or found
        return reason


# --- table --------------------------------------------------------------------------------------------------

_GROUP = ("ranks", "verb", "dtype", "mode")
_LEGEND = (
    "us: median over batches, spread: half the distance of the quartiles. steps, sent: messages in a row, and bytes",
    "from the busiest rank, of the usual algorithm. GB/s: payload over time of the first column of times; bus: speed",
    "of the busiest link. x: time of the fastest peer over that of torchmpi. of copy: speed of torchmpi over that of",
    "plain copies of the payload by all ranks concurrently. shared: on tensors made with mpi.empty_shared.",
)


def as_text(report: Mapping[str, Any], *, details: bool) -> str:
    """Format the header, a table for each collective, dtype and number of ranks, and missing results."""
    lines: list[str] = []
    for (ranks, collective, dtype, mode), rows in grouped(report["rows"], _GROUP):
        title = ", ".join([f"{collective} {dtype}".strip(), counted(ranks, "rank"), *_words(mode)])
        lines += titled(f"{title}: us (spread)", (_details if details else _overview)(rows))
    return page(report, lines, () if details else _LEGEND, "verb")


def _words(mode: str) -> list[str]:
    words = {"async": "asynchronous", "out of place": "out of place", "on cuda": "on cuda"}
    return [text for name, text in words.items() if name in mode]


def best_peer(cell: Sequence[Row]) -> Row | None:
    """Return the fastest of the other libraries in one cell of the table."""
    peers = [row for row in cell if row["contestant"] in PEERS and has_figure(row)]
    return min(peers, key=lambda row: row["median_us"], default=None)


def _comparisons(cell: Sequence[Row], row: Row) -> list[str]:
    """Format the time of the fastest peer over that of a row, and the speed of the row over that of the copy."""
    copy = next((other for other in cell if other["contestant"] == COPY and has_figure(other)), None)
    peer = best_peer(cell)
    return [
        f"{peer['median_us'] / row['median_us']:.2f}" if peer is not None and has_figure(row) else "-",
        f"{copy['median_us'] / row['median_us']:.0%}" if copy is not None and has_figure(row) else "-",
    ]


def _overview(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(row["contestant"] for row in rows if has_figure(row)))
    ours = [name for name in names if name not in (*PEERS, COPY)]
    compared = ours[:1] + [name for name in ours[1:] if name.endswith(" shared")]
    lines = [["bytes", "steps", "sent", *names, *(["GB/s", "bus"] if compared else [])]]
    for name in compared:
        prefix = "shared " if name.endswith(" shared") else ""
        lines[0] += [f"{prefix}x", f"{prefix}of copy"]
    for (num_bytes,), cell in grouped(rows, ("bytes",)):
        by_name = {row["contestant"]: row for row in cell}
        line = [short_size(num_bytes), str(cell[0]["model_steps"]), short_size(cell[0]["model_bytes"])]
        line += [time_and_spread(by_name[name]) for name in names]
        line += _speeds(by_name[compared[0]]) if compared else []
        lines.append(line + [text for name in compared for text in _comparisons(cell, by_name[name])])
    return table(lines)


def _details(rows: Sequence[Row]) -> list[str]:
    lines = [["bytes", "contestant", "steps", "sent", "us", "spread", "batches", "GB/s", "bus", "x", "of copy"]]
    for (num_bytes,), cell in grouped(rows, ("bytes",)):
        for row in cell:
            line = [short_size(num_bytes), row["contestant"], str(row["model_steps"]), short_size(row["model_bytes"])]
            if has_figure(row):
                timing = timing_of(row)
                line += [microseconds(timing.median_us), f"{timing.spread:.0%}", str(timing.num_batches)]
            else:
                line += ["-"] * 3
            lines.append([*line, *_speeds(row), *_comparisons(cell, row)])
    return table(lines)


def _speeds(row: Row) -> list[str]:
    if not has_figure(row) or not row["payload_bytes"]:
        return ["-", "-"]
    speed = gigabytes_per_second(row["payload_bytes"], row["median_us"])
    return [f"{speed:.2f}", f"{speed * bus_factor(row['verb'], row['ranks']):.2f}"]


# --- model --------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Cost of a collective on the busiest rank."""

    steps: int
    """Number of messages, one after another."""
    sent_bytes: int


def cost(collective: str, size: int, payload_bytes: int) -> Cost:
    """Return the cost of the usual algorithm: a ring, or a tree for broadcast, reduce and barrier.

    >>> cost("allreduce", 4, 1000), cost("broadcast", 4, 1000)
    (Cost(steps=6, sent_bytes=1500), Cost(steps=2, sent_bytes=1000))
    """
    spec = SPECS[collective]
    if spec.flow == "neighbor":
        steps = 1
    elif not spec.tensors or (spec.in_place and spec.is_rooted):
        steps = math.ceil(math.log2(size))
    else:
        steps = (size - 1) * (2 if spec.in_place else 1)
    return Cost(steps, round(bus_factor(collective, size) * payload_bytes))


def bus_factor(collective: str, size: int) -> float:
    """Return the bytes on the busiest link per byte of payload, which makes different numbers of ranks comparable.

    >>> bus_factor("allreduce", 2), bus_factor("allgather", 4)
    (1.0, 0.75)
    """
    spec = SPECS[collective]
    if spec.in_place and spec.flow != "all to all":
        return 1.0 if size > 1 else 0.0
    return (2 if spec.in_place else 1) * (size - 1) / size


def gigabytes_per_second(num_bytes: float, microseconds: float) -> float:
    """Return the speed.

    >>> gigabytes_per_second(1000, 1)
    1.0
    """
    return num_bytes / microseconds / 1e3 if microseconds else math.inf
