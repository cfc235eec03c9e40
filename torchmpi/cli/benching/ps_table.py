"""The tables of ``torchmpi bench ps``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..layout import counted
from .arguments import short_size
from .contestants import COPY
from .model import gigabytes_per_second
from .ps_rpc import FORMS
from .ps_speed import OURS
from .report import Row, grouped, has_figure, header, microseconds, numeric_table, reasons, sample_of

_MIB = 1 << 20
_SPEED_LEGEND = (
    "us: median over batches, spread: half the distance of the quartiles. rpc, rpc script: torch.distributed.rpc, two",
    "calls of Python and of TorchScript functions; rpc one call: one TorchScript function that does both. GB/s: the",
    "tensor twice, over the time. x: time of that form of rpc over ours. of copy: bytes moved per second (the tensor",
    "twice, a copy: once) against plain copies by as many ranks.",
)


def as_text(report: Mapping[str, Any]) -> str:
    """Header, and a table for each part."""
    lines = header(report)
    for (part,), rows in grouped(report["rows"], ("part",)):
        lines += ["", *_TABLES[part](rows)]
    return "\n".join(lines)


def _speed(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (ranks, collective, dtype), found in grouped(rows, ("ranks", "verb", "dtype")):
        lines += [
            f"{collective}, {dtype}, {counted(ranks, 'rank')}: us (spread)",
            "",
            *_indented(_speed_table(found)),
            "",
        ]
    lines += _SPEED_LEGEND
    missing = reasons(rows, "bytes")
    return [*lines, "", "no figures", *_indented(missing)] if missing else lines


def _speed_table(rows: Sequence[Row]) -> list[str]:
    names = [name for (name,), group in grouped(rows, ("contestant",)) if any(map(has_figure, group))]
    table = [["bytes", *names, "GB/s", *(f"x {name}" for name in names if name in FORMS), "of copy"]]
    for (num_bytes,), cell in grouped(rows, ("bytes",)):
        measured = {row["contestant"]: row for row in cell if has_figure(row)}
        times = [_time(measured.get(name)) for name in names]
        ours = measured.get(OURS)
        speed = "-" if ours is None else f"{gigabytes_per_second(ours['payload_bytes'], ours['median_us']):.2f}"
        verdicts = [_number(ratio(measured, name), "{:.1f}") for name in names if name in FORMS]
        table.append([short_size(num_bytes), *times, speed, *verdicts, _number(share_of_copy(measured), "{:.0%}")])
    return numeric_table(table)


def ratio(measured: Mapping[str, Row], name: str) -> float | None:
    """How many times faster we are than another.

    >>> ratio({"torchmpi": {"median_us": 2}, "rpc": {"median_us": 9}}, "rpc")
    4.5
    """
    if not {OURS, name} <= set(measured):
        return None
    return float(measured[name]["median_us"] / measured[OURS]["median_us"])


def share_of_copy(measured: Mapping[str, Row]) -> float | None:
    """Bytes that we move per second, over those of the plain copy.

    >>> share_of_copy({"torchmpi": {"median_us": 8, "payload_bytes": 2}, "copy": {"median_us": 2, "payload_bytes": 1}})
    0.5
    """
    if not {OURS, COPY} <= set(measured):
        return None
    ours, copy = (measured[name]["payload_bytes"] / measured[name]["median_us"] for name in (OURS, COPY))
    return float(ours / copy)


def _time(row: Row | None) -> str:
    return "-" if row is None else f"{microseconds(row['median_us'])} ({sample_of(row).spread:.0%})"


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _idle(rows: Sequence[Row]) -> list[str]:
    table = [["idle", "ranks", "s", "% of a core, each rank"]]
    for (what, ranks, seconds), found in grouped(rows, ("what", "ranks", "seconds")):
        table.append([what, str(ranks), f"{seconds:g}", "  ".join(f"{100 * row['share']:.2f}" for row in found)])
    return numeric_table(table)


def _storm(rows: Sequence[Row]) -> list[str]:
    table = [["storm", "ranks", "s", "updates", "updates/s", "sum", "resident MiB before", "after"]]
    for row in rows:
        memory = [f"{row[f'resident_bytes_{when}'] / _MIB:.1f}" for when in ("before", "after")]
        head = [short_size(row["bytes"]), str(row["ranks"]), f"{row['seconds']:.1f}", str(row["updates"])]
        table.append([*head, f"{row['updates_per_second']:.0f}", "exact" if row["is_exact"] else "WRONG", *memory])
    return [*numeric_table(table), "", "Memory: of the rank where it grew most, after some updates to warm up."]


def _link(rows: Sequence[Row]) -> list[str]:
    left_out = list(dict.fromkeys(row["why_not"] for row in rows if "why_not" in row))
    if left_out:
        return [f"link: {reason}" for reason in left_out]
    table = [["link", "ranks", "MB", "MB/s", "quartiles", "of link"]]
    for row in rows:
        low, median, high = (row[name] / 1e6 for name in ("low", "bytes_per_second", "high"))
        share = "-" if row["gbit"] is None else f"{8 * row['bytes_per_second'] / (row['gbit'] * 1e9):.0%}"
        what = row["what"] if row["is_exact"] else f"{row['what']}: WRONG"
        table.append([what, str(row["ranks"]), f"{row['bytes'] / 1e6:.1f}", f"{median:.1f}",
                      f"{low:.1f} to {high:.1f}", share])  # fmt: skip
    return numeric_table(table)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


_TABLES = {"speed": _speed, "idle": _idle, "storm": _storm, "link": _link}
