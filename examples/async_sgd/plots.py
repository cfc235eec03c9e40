"""Plots of the error against samples, wall time, bytes and period, or against the learning rate."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from report import Row, Run, rows

AXES = {"samples": "samples, thousands", "seconds": "wall time, s", "megabytes": "MB sent by each rank"}
COLORS = {
    "sequential": "black",
    "allreduce": "tab:gray",
    "downpour": "tab:red",
    "easgd": "tab:blue",
    "eamsgd": "tab:cyan",
    "localsgd": "tab:green",
    "diloco": "tab:orange",
}
REFERENCES = ("sequential", "allreduce")
"""Methods without a period, drawn dashed."""


def style(method: str) -> dict[str, Any]:
    dashes = {"linestyle": "--", "zorder": 3} if method in REFERENCES else {}
    return {"color": COLORS[method], "label": method, "linewidth": 1.2, **dashes}


def draw(runs: list[Run], folder: Path) -> list[Path]:
    """Save all plots and return their paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    periods = sorted({run.period for run in runs if run.period}) or [0]
    table = rows(runs)
    # Several learning rates per method and period: plot the error against them.
    is_tuning = len(table) > len({(row.method, row.period) for row in table})
    paths = []
    for name in ["rates"] if is_tuning else [*AXES, "summary"]:
        num_panels = 2 if name == "summary" else len(periods)
        figure = Figure(figsize=(2.6 * num_panels + 1.8, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, num_panels, sharey=True, squeeze=False)[0]
        if name == "summary":
            draw_summary(panels[0], panels[1], table)
        else:
            for panel, period in zip(panels, periods, strict=True):
                panel.set_title(f"period {period}" if period else "")
                if name == "rates":
                    draw_rates(panel, [row for row in table if row.period in (0, period)])
                else:
                    draw_curves(panel, [run for run in runs if run.period in (0, period)], name)
        finish(figure, panels)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=100)
    return paths


def finish(figure: Any, panels: Any) -> None:
    """Set the error axes, and one legend for all panels."""
    ticks = [1, 2, 3, 5, 10, 20, 50, 100]
    labels: dict[str, Any] = {}
    for panel in panels:
        panel.set_yscale("log")
        limits = panel.get_ylim()  # of the data, not of the ticks
        panel.set_yticks(ticks, list(map(str, ticks)))
        panel.set_yticks([], minor=True)
        panel.set_ylim(limits)
        panel.grid(alpha=0.3)
        lines, names = panel.get_legend_handles_labels()
        labels |= dict(zip(names, lines, strict=True))
    panels[0].set_ylabel("error, %")
    methods = [method for method in COLORS if method in labels]
    figure.legend([labels[method] for method in methods], methods, loc="outside right center", frameon=False)


def draw_curves(panel: Any, runs: list[Run], axis: str) -> None:
    """Mean over the seeds, and the range."""
    for method in dict.fromkeys(run.method for run in runs):
        points = list(zip(*(run.curve for run in runs if run.method == method), strict=True))
        if axis == "megabytes" and not points[0][0].megabytes:
            continue  # nothing sent
        scale = 1000 if axis == "samples" else 1
        x = [mean(getattr(point, axis) for point in row) / scale for row in points]
        errors = [[100 * point.error for point in row] for row in points]
        panel.plot(x, list(map(mean, errors)), **style(method))
        panel.fill_between(
            x, list(map(min, errors)), list(map(max, errors)), color=COLORS[method], alpha=0.12, linewidth=0
        )
    panel.set_xlabel(AXES[axis])
    panel.set_xscale("log" if axis == "megabytes" else "linear")


def draw_rates(panel: Any, table: list[Row]) -> None:
    """Final error against the learning rate."""
    for method in dict.fromkeys(row.method for row in table):
        own = sorted((row.lr, 100 * row.error) for row in table if row.method == method)
        panel.plot(*zip(*own, strict=True), marker=".", **style(method))
    panel.set(xlabel="learning rate", xscale="log")


def draw_summary(by_period: Any, by_bytes: Any, table: list[Row]) -> None:
    """Final error against the period and the bytes sent."""
    for method in dict.fromkeys(row.method for row in table):
        own = sorted((row for row in table if row.method == method), key=lambda row: row.period)
        errors = [100 * row.error for row in own]
        if own[0].period:
            by_period.plot([row.period for row in own], errors, marker=".", **style(method))
        else:
            by_period.axhline(errors[0], **style(method))
        if own[0].megabytes:
            by_bytes.plot([row.megabytes for row in own], errors, marker=".", **style(method))
    periods = sorted({row.period for row in table if row.period})
    by_period.set(xlabel="period, steps", xscale="log")
    by_period.set_xticks(periods, list(map(str, periods)))
    by_period.set_xticks([], minor=True)
    by_bytes.set(xlabel=AXES["megabytes"], xscale="log")
    by_bytes.xaxis.set_minor_formatter("")
