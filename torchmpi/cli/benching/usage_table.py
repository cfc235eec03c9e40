"""The tables of ``torchmpi bench starts``, ``leaks`` and ``memory``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import short_size
from .model import gigabytes_per_second
from .report import Row, has_figure, header, microseconds, numeric_table, reasons

# A start at less than this share of the median speed has met what this command looks for.
SLOW_SHARE = 0.6
_MIB = 1 << 20
_MEMORY = ("resident_bytes", "shared_resident_bytes", "segment_bytes")


def starts_as_text(report: Mapping[str, Any]) -> str:
    """One line for each start, and whether one of them was slow."""
    lines = [*header(report), ""]
    measured = [(row, job) for row, job in zip(report["rows"], report["jobs"], strict=True) if has_figure(row)]
    rows = [["start", "us", "GB/s", "cores"]]
    for row, job in measured:
        rows.append([str(row["start"]), microseconds(row["median_us"]), _speed(row), " | ".join(job["facts"]["cores"])])
    lines += [*numeric_table(rows), ""] if measured else []
    return "\n".join([*lines, *reasons(report["rows"], "start"), starts_verdict([row for row, _ in measured])])


def _speed(row: Row) -> str:
    return f"{gigabytes_per_second(row['payload_bytes'], row['median_us']):.2f}"


def starts_verdict(rows: Sequence[Row]) -> str:
    """One sentence.

    >>> starts_verdict([{"median_us": time, "bytes": 1 << 20} for time in (100, 110, 300)])
    'allreduce of 1M: median 110 us, slowest 300 us; 1 of 3 starts is far slower than the median.'
    """
    if not rows:
        return "No start was measured."
    times = [row["median_us"] for row in rows]
    median = statistics.median(times)
    num_slow = sum(time > median / SLOW_SHARE for time in times)
    verdict = f"{num_slow or 'none'} of {len(rows)} starts {'is' if num_slow == 1 else 'are'}"
    return (
        f"allreduce of {short_size(rows[0]['bytes'])}: median {microseconds(median)} us, slowest "
        f"{microseconds(max(times))} us; {verdict} far slower than the median."
    )


def leaks_as_text(report: Mapping[str, Any]) -> str:
    """What has grown on each rank."""
    rows = [["rank", "size", "calls", "s", "resident KiB", "descriptors", "threads", "segments KiB", "/dev/shm KiB"]]
    for row in report["rows"]:
        kib = [f"{row[f'{name}_growth'] / 1024:+.0f}" for name in ("resident_bytes", "segment_bytes", "dev_shm_bytes")]
        counts = [f"{row[f'{name}_growth']:+d}" for name in ("descriptors", "threads")]
        head = [str(row["rank"]), row["part"], str(row["calls"]), f"{row['seconds']:.1f}"]
        rows.append([*head, kib[0], *counts, *kib[1:]])
    note = "Growth over the calls, after some to warm up. /dev/shm: of all processes of this machine."
    return "\n".join([*header(report), "", *numeric_table(rows), "", note])


def memory_as_text(report: Mapping[str, Any]) -> str:
    """What each stage adds, on each rank."""
    rows = [["rank", "after", "resident MiB", "added", "of it shared", "shared segments mapped MiB"]]
    for row in report["rows"]:
        resident, shared, segments = (row[name] / _MIB for name in _MEMORY)
        added, added_shared = (row[f"{name}_added"] / _MIB for name in _MEMORY[:2])
        rows.append([str(row["rank"]), row["part"], f"{resident:.0f}", f"{added:+.1f}", f"{added_shared:+.1f}",
                     f"{segments:.1f}"])  # fmt: skip
    note = "added: by this stage; the last line of a rank: by torchmpi as a whole."
    return "\n".join([*header(report), "", *numeric_table(rows), "", note])


def memory_rows(ranks: int, rank: int, stages: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    """One row for each stage, and one for all that came after the first."""
    rows: list[dict[str, Any]] = []
    names = list(stages)
    pairs = list(zip(names[1:], names, strict=False))
    for name, before in [(names[0], None), *pairs]:
        rows.append(_stage_row(ranks, rank, name, stages[name], stages[before] if before else None))
    rows.append(_stage_row(ranks, rank, "torchmpi altogether", stages[names[-1]], stages[names[0]]))
    return rows


def _stage_row(
    ranks: int, rank: int, name: str, now: Mapping[str, int], before: Mapping[str, int] | None
) -> dict[str, Any]:
    added = {f"{key}_added": now[key] - (before[key] if before else 0) for key in _MEMORY}
    return {"ranks": ranks, "rank": rank, "part": name, **{key: now[key] for key in _MEMORY}, **added}
