"""The tables of ``torchmpi bench collectives``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..layout import counted
from .arguments import PEERS, short_size
from .contestants import COPY
from .model import bus_factor, gigabytes_per_second
from .report import Row, grouped, has_figure, header, microseconds, numeric_table, reasons, sample_of

_GROUP = ("ranks", "verb", "dtype", "mode")


def as_text(report: Mapping[str, Any], *, details: bool) -> str:
    """Header, a table for each verb, dtype and number of ranks, and what could not be measured."""
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


_MODES = {"async": ", asynchronous", "sync on cuda": ", on cuda", "async on cuda": ", asynchronous, on cuda"}
_LEGEND = (
    "us: median over batches, spread: half the distance of the quartiles. steps, sent: messages in a row, and bytes",
    "from the busiest rank, of the usual algorithm. GB/s: payload over time of the first column of times; bus: what",
    "the busiest link carries. x: time of the fastest peer over ours. of copy: ours against plain copies of the",
    "payload by all ranks at once. shared: on tensors made with mpi.empty_shared.",
)


def best_peer(cell: Sequence[Row]) -> Row | None:
    """The fastest of the others in one cell."""
    peers = [row for row in cell if row["contestant"] in PEERS and has_figure(row)]
    return min(peers, key=lambda row: row["median_us"], default=None)


def is_ours(row: Row) -> bool:
    """Whether torchmpi was measured, not a peer nor the copy."""
    return row["contestant"] not in (*PEERS, COPY)


def ratio(cell: Sequence[Row], row: Row) -> float | None:
    """How many times faster than the best peer a row is."""
    peer = best_peer(cell)
    return peer["median_us"] / row["median_us"] if peer is not None and has_figure(row) else None


def share_of_copy(cell: Sequence[Row], row: Row) -> float | None:
    """The speed of a row over that of the plain copy."""
    copy = next((other for other in cell if other["contestant"] == COPY and has_figure(other)), None)
    return copy["median_us"] / row["median_us"] if copy is not None and has_figure(row) else None


def _overview(rows: Sequence[Row]) -> list[str]:
    """One line for each size, one column for each contestant."""
    names = [name for (name,), group in grouped(rows, ("contestant",)) if any(map(has_figure, group))]
    ours = [name for (name,), group in grouped([row for row in rows if is_ours(row)], ("contestant",)) if name in names]
    led = ours[:1] + [name for name in ours[1:] if name.endswith(" shared")]
    verdicts = [text for name in led for text in (f"{_suffix(name)}x", f"{_suffix(name)}of copy")]
    lines = [["bytes", "steps", "sent", *names, *(["GB/s", "bus"] if led else []), *verdicts]]
    for (num_bytes,), cell in grouped(rows, ("bytes",)):
        by_name = {row["contestant"]: row for row in cell}
        line = [short_size(num_bytes), str(cell[0]["model_steps"]), short_size(cell[0]["model_bytes"])]
        line += [_time(by_name[name]) for name in names]
        if led:
            line += _speeds(by_name[led[0]])
        for name in led:
            line += [_times(ratio(cell, by_name[name])), _percent(share_of_copy(cell, by_name[name]))]
        lines.append(line)
    return numeric_table(lines)


def _details(rows: Sequence[Row]) -> list[str]:
    """One line for each size and contestant."""
    heading = ["bytes", "contestant", "steps", "sent", "us", "spread", "batches", "GB/s", "bus", "x", "of copy"]
    lines = [heading]
    for (num_bytes,), cell in grouped(rows, ("bytes",)):
        for row in cell:
            line = [short_size(num_bytes), row["contestant"], str(row["model_steps"]), short_size(row["model_bytes"])]
            if has_figure(row):
                sample = sample_of(row)
                line += [microseconds(sample.median_us), f"{sample.spread:.0%}", str(sample.num_batches)]
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
    sample = sample_of(row)
    return f"{microseconds(sample.median_us)} ({sample.spread:.0%})"


def _speeds(row: Row) -> list[str]:
    if not has_figure(row):
        return ["-", "-"]
    speed = gigabytes_per_second(row["payload_bytes"], row["median_us"])
    return [f"{speed:.2f}", f"{speed * bus_factor(row['verb'], row['ranks']):.2f}"]


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
