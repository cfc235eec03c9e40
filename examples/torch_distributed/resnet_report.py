"""Figures of ``resnet.py``: printed, collected in a JSON file by the number of ranks, and shown in a chart."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

SETTINGS = ("model", "batch_size", "image_size", "classes", "data", "bf16", "backend")
"""Options that must be equal in runs that share a chart."""


def summary(seconds: list[float], num_images: int) -> dict[str, float]:
    """Return the median of the step times, their first and last decile, and images per second.

    Images per second refer to the median, since on a shared machine a few steps may take far longer than the others.
    """
    milliseconds = [1000 * second for second in seconds]
    tenths = quantiles(milliseconds, n=10, method="inclusive") if len(milliseconds) > 1 else milliseconds
    middle = median(milliseconds)
    return {"median_ms": middle, "low_ms": tenths[0], "high_ms": tenths[-1], "images_per_s": 1000 * num_images / middle}


class Report:
    """The runs of earlier jobs, from the JSON file if it exists, and this run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.settings = {name: getattr(options, name) for name in SETTINGS}
        self.runs: dict[int, dict[str, Any]] = {}
        if options.json and Path(options.json).exists():
            self.read(Path(options.json))

    def read(self, path: Path) -> None:
        record = json.loads(path.read_text())
        for name, wanted in self.settings.items():
            if record["settings"][name] != wanted:
                found = record["settings"][name]
                raise SystemExit(f"{path} has figures for {name} {found}, not {wanted}: give another file with --json")
        self.runs = {int(ranks): run for ranks, run in record["runs"].items()}

    def add(self, ranks: int, together: list[float], alone: list[float]) -> None:
        """Add the step times of all ranks and of rank 0 alone; print the figures, save file and chart if requested."""
        batch_size = self.options.batch_size
        run = {"together": summary(together, ranks * batch_size), "alone": summary(alone, batch_size)}
        # Rank 0 alone has the images of one rank, so with ideal scaling both take the same time for a step.
        efficiency = run["alone"]["median_ms"] / run["together"]["median_ms"]
        self.runs[ranks] = {**run, "efficiency": efficiency, "threads": torch.get_num_threads()}
        for name, figures in ((f"{ranks} rank{'s' * (ranks > 1)}", run["together"]), ("rank 0 alone", run["alone"])):
            spread = f"({figures['low_ms']:.2f} to {figures['high_ms']:.2f})"
            print(f"{name:<14}{figures['median_ms']:.2f} ms per step {spread}, {figures['images_per_s']:.2f} images/s")
        print(f"scaling efficiency against one rank: {100 * efficiency:.1f} %", flush=True)
        if self.options.json:
            runs = {str(number): self.runs[number] for number in sorted(self.runs)}
            Path(self.options.json).write_text(json.dumps({"settings": self.settings, "runs": runs}, indent=1))
        if self.options.plot:
            self.draw(Path(self.options.plot))

    def draw(self, path: Path) -> None:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            print("no plot: matplotlib is not installed (pip install matplotlib)", flush=True)
            return
        figure = Figure(figsize=(9, 3.5), layout="constrained")
        FigureCanvasAgg(figure)
        rates, efficiencies = figure.subplots(1, 2)
        numbers = sorted(self.runs)
        runs = [self.runs[number] for number in numbers]
        names = [f"{number}\nthreads of each: {run['threads']}" for number, run in zip(numbers, runs, strict=True)]
        ideal = [number * run["alone"]["images_per_s"] for number, run in zip(numbers, runs, strict=True)]
        rates.bar(names, ideal, fill=False, linestyle="--", label="rank 0 alone, times ranks")
        measured = [run["together"]["images_per_s"] for run in runs]
        rates.bar_label(rates.bar(names, measured, color="tab:blue", label="measured"), fmt="%.3g")
        rates.set(title="images per second", xlabel="ranks", ylim=(0, 1.35 * max(ideal + measured)))
        rates.legend(loc="upper left")
        percent = [100 * run["efficiency"] for run in runs]
        efficiencies.bar_label(efficiencies.bar(names, percent, color="tab:green"), fmt="%.0f %%")
        efficiencies.axhline(100, color="gray", linestyle="--", linewidth=1)
        efficiencies.set(title="scaling efficiency, %", xlabel="ranks", ylim=(0, 1.15 * max(100, *percent)))
        about = self.settings
        size = f"{about['image_size']}x{about['image_size']}{', bfloat16' if about['bf16'] else ''}"
        title = f"{about['model']}, {about['batch_size']} images of {size} per rank, {about['backend']}"
        figure.suptitle(title, fontsize="medium")
        figure.savefig(path, dpi=120)
        print(f"chart saved in {path.resolve()}", flush=True)
