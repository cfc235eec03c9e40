"""Draw the recorded benchmarks of training steps and of several hosts, from the tables of the documentation.

python scripts/draw_benchmarks.py    # writes docs/images/bench_train.png and docs/images/bench_hosts.png
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COLORS = {
    "no communication": "lightgray",
    "synchronize_gradients": "tab:blue",
    "ddp on torchmpi": "tab:cyan",
    "ddp": "tab:orange",
    "MPI library": "tab:orange",
    "torchmpi": "tab:blue",
}
LABELS = {"synchronize_gradients": "torchmpi.nn", "ddp": "ddp on gloo"}


def training_steps() -> dict[str, dict[str, float]]:
    """Return milliseconds by network and contestant."""
    page = (ROOT / "results" / "benchmark-tables.md").read_text()
    steps = {}
    for name, table in re.findall(r"^(\w+): training step, 2 ranks\n\n.*\n((?:  .+\n)+)", page, re.MULTILINE):
        rows = re.findall(r"^  (\S.*?) +([0-9.]+) +\d+%", table, re.MULTILINE)
        steps[name] = {contestant: float(ms) for contestant, ms in rows if contestant in COLORS}
    return steps


def several_hosts() -> dict[str, dict[str, dict[str, float]]]:
    """Return milliseconds by library, placement and contestant."""
    page = (ROOT / "docs" / "design" / "hierarchy.md").read_text()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for placement, library, bare, steps in re.findall(
        r"^\| ([^|]+) \| (Open MPI|MPICH) \| (\d+) \([^|]*\) \| (\d+) \(", page, re.MULTILINE
    ):
        found.setdefault(library, {})[placement] = {"MPI library": float(bare), "torchmpi": float(steps)}
    return found


def bars(panel: Any, rows: dict[str, dict[str, float]], labels: list[str]) -> None:
    """Draw a group of horizontal bars for each row, the first row on top."""
    contestants = list(next(iter(rows.values())))
    height = 0.8 / len(contestants)
    for i, contestant in enumerate(contestants):
        values = [row[contestant] for row in rows.values()]
        places = [row + (i - (len(contestants) - 1) / 2) * height for row in range(len(rows))]
        label = LABELS.get(contestant, contestant)
        drawn = panel.barh(places, values, height * 0.92, color=COLORS[contestant], label=label)
        panel.bar_label(drawn, fmt="%.0f", padding=2, fontsize=7)
    panel.set_yticks(range(len(rows)), labels)
    panel.tick_params(axis="y", length=0)
    panel.invert_yaxis()
    panel.margins(x=0.1)
    panel.set_xlabel("ms")
    panel.spines[["top", "right"]].set_visible(False)


def figure_of(num_panels: int, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, num_panels, squeeze=False)[0]


def main() -> None:
    steps = training_steps()
    figure, panels = figure_of(len(steps), 11, 2.6)
    for panel, (name, values) in zip(panels, steps.items(), strict=True):
        bars(panel, {name: values}, [""])
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("ms per step")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(IMAGES / "bench_train.png", dpi=110)

    hosts = several_hosts()
    figure, panels = figure_of(len(hosts), 11, 3.2)
    for panel, (library, rows) in zip(panels, hosts.items(), strict=True):
        bars(panel, rows, [f"{place} ranks" if place[0] == "2" and "," in place[:2] else place for place in rows])
        panel.set_title(library, fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(IMAGES / "bench_hosts.png", dpi=110)


if __name__ == "__main__":
    main()
