"""The tables of ``torchmpi bench train``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..layout import counted
from .report import Row, grouped, has_figure, header, numeric_table, reasons, sample_of

_GROUP = ("ranks", "model", "part")
_BASES = {"step": "ddp", "communication": "ddp's way on gloo"}
_ALONE = "no communication"


def as_text(report: Mapping[str, Any]) -> str:
    """Header, and a table for each model and number of ranks."""
    lines = header(report)
    for (ranks, model, part), rows in grouped(report["rows"], _GROUP):
        what = f"{model}: training step" if part == "step" else "161 gradients of ResNet-50: communication alone"
        lines += ["", f"{what}, {counted(ranks, 'rank')}", "", *(f"  {line}" for line in _table(rows, part))]
    lines += ["", *_LEGEND]
    missing = reasons(report["rows"], "model")
    return "\n".join([*lines, *(["", "no figures", *(f"  {line}" for line in missing)] if missing else [])])


_LEGEND = (
    "ms: median over batches, spread: half the distance of the quartiles. communication: share of the step that the",
    "same step without communication does not take. x: time of DistributedDataParallel (or of what it does on gloo)",
    "over that of this line.",
)


def _table(rows: Sequence[Row], part: str) -> list[str]:
    times = {row["contestant"]: row["median_us"] for row in rows if has_figure(row)}
    base, alone = times.get(_BASES[part]), times.get(_ALONE)
    heading = ["", "ms", "spread", *(["communication"] if part == "step" else []), f"x {_BASES[part]}"]
    lines = [heading]
    for row in filter(has_figure, rows):
        sample = sample_of(row)
        line = [row["contestant"], f"{sample.median_us / 1e3:.2f}", f"{sample.spread:.0%}"]
        if part == "step":
            line.append("-" if alone is None else f"{max(0.0, 1 - alone / sample.median_us):.0%}")
        lines.append([*line, "-" if base is None else f"{base / sample.median_us:.2f}"])
    return numeric_table(lines)
