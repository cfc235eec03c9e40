"""The table of an experiment, one row for each point of a curve, and its plot."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from torchmpi import plots

from .experiment import RESULTS, Experiment, ExperimentError, Run

Rows = dict[str, list[dict[str, Any]]]
"""The points of each run, by its key."""
NAMES = {
    "samples": "samples of all workers",
    "seconds": "seconds",
    "megabytes": "MB sent by each worker",
    "mean_staleness": "mean staleness",
    "loss": "test loss",
    "error": "test error",
    "distance": "distance of the workers from their mean",
    "reached": "seconds until the error is reached",
    "slow": "how many times as long one worker computes",
    "update_frequency": "period, steps",
}


def read_table(path: Path) -> Rows:
    """Read the runs that a table has; raise ExperimentError with the line of a row that is damaged."""
    rows: Rows = {}
    if not path.exists():
        return rows
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            try:
                point = {name: float(row[name]) for name in RESULTS} | {
                    name: value for name, value in row.items() if name not in RESULTS
                }
                rows.setdefault(point["run"], []).append(point)
            except (KeyError, TypeError, ValueError):
                raise ExperimentError(
                    f"{path}, line {reader.line_num}: no row of results, which have {', '.join(RESULTS)}. Remove the "
                    "row, or the file: what is missing is run again."
                ) from None
    return rows


def add_run(path: Path, run: Run, points: Iterable[dict[str, Any]]) -> None:
    """Add a run to a table, whole or not at all."""
    rows = read_table(path)
    names = {"run": run.key, "label": run.label, "seed": run.settings["seed"], **run.varied}
    rows[run.key] = [{**names, **point} for point in points]
    every = [point for each in rows.values() for point in each]
    columns = dict.fromkeys([*names, *RESULTS, *(name for point in every for name in point)])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), restval="")
        writer.writeheader()
        writer.writerows(every)
    os.replace(partial, path)


Line = list[tuple[float, list[float]]]
"""Its points: x, and y of all seeds."""


def lines_of(experiment: Experiment, rows: Rows, y: str) -> list[tuple[str, Line]]:
    """Return lines with their labels: one for each series, or for each setting of a series if the runs are curves."""
    x = experiment.plot["x"]
    is_curve = x in ("samples", "seconds", "megabytes")
    groups: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
    for run in experiment.runs:
        groups.setdefault((run.label, str(run.varied)), []).append(
            [{**point, **run.varied} for point in (rows[run.key] if is_curve else rows[run.key][-1:])]
        )
    lines: dict[tuple[str, str], Line] = {}
    for (label, varied), members in groups.items():
        line = lines.setdefault((label, varied if is_curve else ""), [])
        for points in zip(*members, strict=True):
            line.append((mean(point[x] for point in points), [point[y] for point in points]))
    return [(label, line) for (label, _), line in lines.items()]


def describe(experiment: Experiment, rows: Rows, columns: Sequence[str] = ()) -> str:
    """Return the last points as a table in Markdown: mean, and lowest to highest of the seeds.

    The columns are those of the plot and `columns`: results, or keys in which the runs differ.
    """
    x = experiment.plot["x"]
    names = [name for name in dict.fromkeys([*columns, x, *experiment.plot["y"]]) if name != "label"]
    text = [f"| series | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in experiment.runs:
        groups.setdefault((run.label, str(run.varied)), []).append({**rows[run.key][-1], **run.varied})
    for (label, _), points in groups.items():
        cells = [interval([point.get(name, "") for point in points]) for name in names]
        text.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(text)


def interval(values: Sequence[Any]) -> str:
    """Return a mean with its range.

    >>> interval([1.0, 2.0, 3.0]), interval([4, 4])
    ('2 (1 to 3)', '4')
    """
    if any(isinstance(value, str) for value in values):
        return str(values[0])
    low, middle, high = (f"{value:.3g}" for value in (min(values), mean(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def draw(experiment: Experiment, rows: Rows, path: Path) -> None:
    """Draw the plot: for each series the mean, and the range of the seeds."""
    x, names = experiment.plot["x"], experiment.plot["y"]
    colors = plots.colors_of(dict.fromkeys(run.label for run in experiment.runs))
    figure, panels = plots.new_figure(1.4 + 4.6 * len(names), 4.4, 1, len(names))
    for panel, y in zip(panels.flat, names, strict=True):
        for label, points in lines_of(experiment, rows, y):
            color, points = colors[label], sorted(points)
            finite = [(at, values) for at, values in points if all(map(math.isfinite, values))]
            at, lists = [each for each, _ in finite], [values for _, values in finite]
            panel.plot(at, list(map(mean, lists)), color=color, label=label, marker="." if len(at) < 30 else None)
            panel.fill_between(at, list(map(min, lists)), list(map(max, lists)), color=color, alpha=0.18, linewidth=0)
        for axis, name in (("x", x), ("y", y)):
            getattr(panel, f"set_{axis}label")(NAMES.get(name, name.replace("_", " ")))
            if name in experiment.plot["logarithmic"]:
                getattr(panel, f"set_{axis}scale")("log")
        if x not in RESULTS:
            ticks = sorted({run.varied[x] for run in experiment.runs})
            panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.set_xticks([], minor=True)
    plots.legend(figure, panels)
    runs = experiment.runs[0].settings
    kind = "ranks" if runs["ranks"] else "simulated workers"
    plots.state(figure, experiment.finding, f"{kind}; lines: mean, bands: range of {len(experiment.seeds)} seeds")
    plots.save(figure, path)
