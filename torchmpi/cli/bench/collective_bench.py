"""``torchmpi bench collectives``: time all contestants on the same buffers, for each collective, dtype and size."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..formatting import counted
from .contestants import (
    COPY,
    LAUNCH,
    Contestant,
    Copy,
    TorchDistributed,
    find_peers,
    open_group,
    our_contestants,
)
from .job import BenchJob, job_facts, split_seconds
from .options import CPU_PEERS, DIST, PEERS, short_size
from .report import Row, grouped, has_figure, header, microseconds, numeric_table, reasons, timing_of
from .timing import BATCH_SECONDS, MIN_BATCHES, TimedCall, measure_calls, timed_on
from .workload import ROOTED, BenchCase, Workload

_ASSUMED_BYTES_PER_SECOND = 2e9  # a slow contestant's speed, to divide the time among sizes


def measure(job: BenchJob, options: argparse.Namespace) -> dict[str, Any]:
    """Return rows of times, or of reasons why there are none, for each case and contestant. Collective."""
    asynchronous = options.asynchronous
    device = job.device.type
    peers = (*options.peers, "nccl") if device != "cpu" and tuple(options.peers) == CPU_PEERS else options.peers
    contestants: list[Contestant] = [
        *our_contestants(options.backends, options.memory, asynchronous=asynchronous, device=device),
        *_torch_distributed(job, options),
        *find_peers(peers, job, asynchronous=asynchronous),
        Copy(),
    ]
    cases = [
        BenchCase(collective, dtype, size)
        for collective in options.verbs
        for dtype in options.dtypes
        for size in options.sizes
    ]
    weights = [_expected_seconds(case, len(contestants), job.size) for case in cases]
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + options.seconds
    for index, case in enumerate(cases):
        job.show(f"{index + 1}/{len(cases)} {case.collective} {case.dtype} {short_size(case.num_bytes)}")
        left = job.comm.bcast(max(0.0, end - time.monotonic()))
        rows += CaseMeasurement(job, case).rows(contestants, split_seconds(left, weights, index), asynchronous)
    return {"facts": job_facts(job.comm), "rows": rows}


def _torch_distributed(job: BenchJob, options: argparse.Namespace) -> list[Contestant]:
    if DIST not in (options.backends or ()):
        return []
    group = open_group("torchmpi", job.comm, job.resources)
    return [TorchDistributed(DIST, group, asynchronous=options.asynchronous)]


def _expected_seconds(case: BenchCase, num_contestants: int, size: int) -> float:
    return num_contestants * MIN_BATCHES * max(BATCH_SECONDS, size * case.num_bytes / _ASSUMED_BYTES_PER_SECOND)


class CaseMeasurement:
    """All contestants on one collective, dtype and size."""

    def __init__(self, job: BenchJob, case: BenchCase) -> None:
        self.job, self.case = job, case
        self._plain = self._workload(None)

    def _workload(self, contestant: Contestant | None) -> Workload:
        allocate = None if contestant is None else contestant.allocate()
        job = self.job
        return Workload(self.case, rank=job.rank, size=job.size, allocate=allocate, device=job.device)

    def rows(self, contestants: list[Contestant], seconds: float, asynchronous: bool) -> list[dict[str, Any]]:
        """Return one row for each contestant: its times, or the reason why there are none."""
        timed: list[TimedCall] = []
        reasons: dict[str, str] = {}
        for contestant in contestants:
            call, reason = self._bind(contestant)
            if call is None:
                reasons[contestant.name] = reason
            else:
                timed.append(call)
        summaries = measure_calls(timed, self.job.comm, seconds=seconds, one_clock=self.job.one_clock)
        figures = {call.name: summary for call, summary in zip(timed, summaries, strict=True)}
        head = self._head(asynchronous)
        return [
            head
            | {"contestant": name}
            | (dataclasses.asdict(figures[name]) if name in figures else {"why_not": reasons[name]})
            for name in (contestant.name for contestant in contestants)
        ]

    def _head(self, asynchronous: bool) -> dict[str, Any]:
        on_host = self.job.device.type == "cpu"
        steps, sent_bytes = cost(self.case.collective, self.job.size, self._plain.payload_bytes)
        return {
            "ranks": self.job.size,
            "verb": self.case.collective,
            "dtype": self.case.dtype,
            "mode": ("async" if asynchronous else "sync") + ("" if on_host else " on cuda"),
            "bytes": self.case.num_bytes,
            "payload_bytes": self._plain.payload_bytes,
            "model_steps": steps,
            "model_bytes": sent_bytes,
        }

    def _bind(self, contestant: Contestant) -> tuple[TimedCall | None, str]:
        """Return a call that has given the correct result for every root, or the reason why there is none."""
        reason = self.job.agreed(contestant.why_not(self.case.collective, self.case.dtype))
        if reason is not None:
            return None, reason
        roots = range(self.job.size if self.case.collective in ROOTED else 1)
        work, calls = self._plain, []
        try:
            if contestant.allocate() is not None:
                work = self._workload(contestant)
            calls = [contestant.bind(work, root) for root in roots]
        except Exception as error:  # a peer may raise any exception
            reason = f"{type(error).__name__}: {error}"
        reason = self.job.agreed(reason)
        if reason is None:
            reason = self.job.agreed(self._check(contestant, work, calls))
        if reason is not None:
            return None, reason
        timed = timed_on(self.job, calls, is_launch=contestant.name == LAUNCH)
        return TimedCall(contestant.name, tuple(calls), work.touch, timed), ""

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
_MODES = {"async": ", asynchronous", "sync on cuda": ", on cuda", "async on cuda": ", asynchronous, on cuda"}
_LEGEND = (
    "us: median over batches, spread: half the distance of the quartiles. steps, sent: messages in a row, and bytes",
    "from the busiest rank, of the usual algorithm. GB/s: payload over time of the first column of times; bus: speed",
    "of the busiest link. x: time of the fastest peer over that of torchmpi. of copy: speed of torchmpi over that of",
    "plain copies of the payload by all ranks concurrently. shared: on tensors made with mpi.empty_shared.",
)


def as_text(report: Mapping[str, Any], *, details: bool) -> str:
    """Format the header, a table for each collective, dtype and number of ranks, and missing results."""
    lines = header(report)
    for (ranks, collective, dtype, mode), rows in grouped(report["rows"], _GROUP):
        lines += [
            "",
            f"{collective} {dtype}, {counted(ranks, 'rank')}{_MODES.get(mode, '')}: us (spread)",
            "",
        ]
        lines += [f"  {line}" for line in (_details if details else _overview)(rows)]
    if not details:
        lines += ["", *_LEGEND]
    missing = reasons(report["rows"], "verb")
    if missing:
        lines += ["", "no figures", *(f"  {line}" for line in missing)]
    return "\n".join(lines)


def best_peer(cell: Sequence[Row]) -> Row | None:
    """Return the fastest of the other libraries in one cell of the table."""
    peers = [row for row in cell if row["contestant"] in PEERS and has_figure(row)]
    return min(peers, key=lambda row: row["median_us"], default=None)


def is_ours(row: Row) -> bool:
    """Return whether the row is of torchmpi, not of a peer or the copy."""
    return row["contestant"] not in (*PEERS, COPY)


def ratio(cell: Sequence[Row], row: Row) -> float | None:
    """Return the time of the fastest peer over that of a row."""
    peer = best_peer(cell)
    return peer["median_us"] / row["median_us"] if peer is not None and has_figure(row) else None


def share_of_copy(cell: Sequence[Row], row: Row) -> float | None:
    """Return the speed of a row over that of the plain copy."""
    copy = next((other for other in cell if other["contestant"] == COPY and has_figure(other)), None)
    return copy["median_us"] / row["median_us"] if copy is not None and has_figure(row) else None


def _overview(rows: Sequence[Row]) -> list[str]:
    """Format one line for each size, one column for each contestant."""
    names = [name for (name,), group in grouped(rows, ("contestant",)) if any(map(has_figure, group))]
    ours = [name for (name,), group in grouped([row for row in rows if is_ours(row)], ("contestant",)) if name in names]
    compared = ours[:1] + [name for name in ours[1:] if name.endswith(" shared")]
    verdicts = [text for name in compared for text in (f"{_suffix(name)}x", f"{_suffix(name)}of copy")]
    lines = [["bytes", "steps", "sent", *names, *(["GB/s", "bus"] if compared else []), *verdicts]]
    for (num_bytes,), cell in grouped(rows, ("bytes",)):
        by_name = {row["contestant"]: row for row in cell}
        line = [short_size(num_bytes), str(cell[0]["model_steps"]), short_size(cell[0]["model_bytes"])]
        line += [_time(by_name[name]) for name in names]
        if compared:
            line += _speeds(by_name[compared[0]])
        for name in compared:
            line += [_times(ratio(cell, by_name[name])), _percent(share_of_copy(cell, by_name[name]))]
        lines.append(line)
    return numeric_table(lines)


def _details(rows: Sequence[Row]) -> list[str]:
    """Format one line for each size and contestant."""
    heading = ["bytes", "contestant", "steps", "sent", "us", "spread", "batches", "GB/s", "bus", "x", "of copy"]
    lines = [heading]
    for (num_bytes,), cell in grouped(rows, ("bytes",)):
        for row in cell:
            line = [short_size(num_bytes), row["contestant"], str(row["model_steps"]), short_size(row["model_bytes"])]
            if has_figure(row):
                timing = timing_of(row)
                line += [microseconds(timing.median_us), f"{timing.spread:.0%}", str(timing.num_batches)]
                line += [*_speeds(row), _times(ratio(cell, row)), _percent(share_of_copy(cell, row))]
            else:
                line += ["-"] * (len(heading) - len(line))
            lines.append(line)
    return numeric_table(lines)


def _suffix(name: str) -> str:
    return "shared " if name.endswith(" shared") else ""


def _time(row: Row) -> str:
    if not has_figure(row):
        return "-"
    timing = timing_of(row)
    return f"{microseconds(timing.median_us)} ({timing.spread:.0%})"


def _speeds(row: Row) -> list[str]:
    if not has_figure(row):
        return ["-", "-"]
    speed = gigabytes_per_second(row["payload_bytes"], row["median_us"])
    return [f"{speed:.2f}", f"{speed * bus_factor(row['verb'], row['ranks']):.2f}"]


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


# --- model --------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Cost of a collective on the busiest rank."""

    steps: int
    """Number of messages, one after another."""
    sent_bytes: int


def cost(collective: str, size: int, payload_bytes: int) -> Cost:
    """Return the cost of the usual algorithm: a ring, or a tree for broadcast and reduce.

    >>> cost("allreduce", 4, 1000)
    Cost(steps=6, sent_bytes=1500)
    >>> cost("broadcast", 4, 1000)
    Cost(steps=2, sent_bytes=1000)
    """
    others = size - 1
    steps = {
        "allreduce": 2 * others,
        "broadcast": math.ceil(math.log2(size)),
        "reduce": math.ceil(math.log2(size)),
    }.get(collective, others)
    return Cost(steps, round(bus_factor(collective, size) * payload_bytes))


def bus_factor(collective: str, size: int) -> float:
    """Return the bytes on the busiest link per byte of payload, which makes different numbers of ranks comparable.

    >>> bus_factor("allreduce", 2), bus_factor("allgather", 4)
    (1.0, 0.75)
    """
    if collective in ("broadcast", "reduce"):
        return 1.0 if size > 1 else 0.0
    return (2 if collective == "allreduce" else 1) * (size - 1) / size


def gigabytes_per_second(num_bytes: float, microseconds: float) -> float:
    """Return the speed.

    >>> gigabytes_per_second(1000, 1)
    1.0
    """
    return num_bytes / microseconds / 1e3 if microseconds else math.inf
