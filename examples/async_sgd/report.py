"""Results of the runs: a table in Markdown and CSV, and all curves in JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean


@dataclass(frozen=True)
class Point:
    """A point of a curve: samples of all ranks, seconds, megabytes sent by each rank, error."""

    samples: int
    seconds: float
    megabytes: float
    error: float


@dataclass(frozen=True)
class Run:
    """Results of a run; `period` is 0 for methods without one."""

    method: str
    period: int
    lr: float
    seed: int
    staleness: float
    curve: list[Point]


@dataclass(frozen=True)
class Row:
    """Means over the seeds of a method, period and learning rate, and the lowest and highest error."""

    method: str
    period: int
    lr: float
    error: float
    lowest: float
    highest: float
    seconds: float
    megabytes: float
    staleness: float


def rows(runs: Sequence[Run]) -> list[Row]:
    groups: dict[tuple[str, int, float], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.method, run.period, run.lr), []).append(run)
    table = []
    for key, members in groups.items():
        ends = [run.curve[-1] for run in members]
        errors = [end.error for end in ends]
        seconds, megabytes = mean(end.seconds for end in ends), mean(end.megabytes for end in ends)
        staleness = mean(run.staleness for run in members)
        table.append(Row(*key, mean(errors), min(errors), max(errors), seconds, megabytes, staleness))
    return table


def markdown(table: Sequence[Row]) -> str:
    lines = [
        "| method | period | lr | error, % | lowest to highest | seconds | MB sent by each rank | staleness |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        errors = f"{100 * row.error:.2f} | {100 * row.lowest:.2f} to {100 * row.highest:.2f}"
        figures = f"{row.seconds:.2f} | {row.megabytes:.3g} | {row.staleness:.1f}"
        lines.append(f"| {row.method} | {row.period or ''} | {row.lr:g} | {errors} | {figures} |")
    return "\n".join(lines) + "\n"


def best_rates(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """For each method and period the learning rate with the lowest error.

    The mean over the seeds and the last quarter of each curve, because single errors on a small set are noisy.
    """
    errors: dict[tuple[str, int, float], list[float]] = {}
    for run in runs:
        last = run.curve[-max(1, len(run.curve) // 4) :]
        errors.setdefault((run.method, run.period, run.lr), []).extend(point.error for point in last)
    rates: dict[str, dict[int, float]] = {}
    for method, period, lr in sorted(errors, key=lambda key: mean(errors[key])):
        rates.setdefault(method, {}).setdefault(period, lr)
    return rates


def save(runs: Sequence[Run], folder: Path) -> str:
    """Write everything, and return the table."""
    folder.mkdir(parents=True, exist_ok=True)
    table = rows(runs)
    (folder / "table.md").write_text(markdown(table))
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(map(asdict, table))
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))
    return markdown(table)


def load(path: Path) -> list[Run]:
    """Read the runs of a ``runs.json``."""
    records = json.loads(path.read_text())
    return [Run(**{**record, "curve": [Point(**point) for point in record["curve"]]}) for record in records]
