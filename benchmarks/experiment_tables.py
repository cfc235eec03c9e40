"""Run experiment files, and write their tables as a page.

    python benchmarks/experiment_tables.py results/findings-2026-11-30.md examples/async_sgd/findings/*.toml

Runs that a file's `results.csv` has are not repeated. Each table has the mean of the seeds at the end of a run, and the
range in brackets.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from examples.async_sgd import __main__ as command  # noqa: E402
from examples.async_sgd.experiment import Experiment  # noqa: E402
from examples.async_sgd.results import describe, read_table  # noqa: E402


def machine(load: float) -> str:
    """Return the line of a page that says where, with what and by which command it was made."""
    model = re.search(r"^model name\s*: *(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return (
        f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores, load {load:.1f} at the begin; torch "
        f"{torch.__version__}, Python {platform.python_version()}, "
        f"{datetime.datetime.now(datetime.timezone.utc).date()}. Made by `{' '.join(['python', *sys.argv])}`."
    )


def main() -> int:
    """Run the experiments and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the page")
    parser.add_argument("files", nargs="+", type=Path, help="experiments")
    options = parser.parse_args()
    text = f"# Experiments with asynchronous SGD\n\n{machine(os.getloadavg()[0])}\n\n"
    text += "Mean of the seeds at the end of a run, and the range in brackets.\n"
    for path in options.files:
        status: int = command.main([str(path)])
        if status:
            return status
        experiment = Experiment(path)
        varied = dict.fromkeys(name for run in experiment.runs for name in run.varied)
        rows = read_table(Path("results/async_sgd", path.stem, "results.csv"))
        table = describe(experiment, rows, [*varied, "mean_staleness"])
        text += f"\n## {path.stem}\n\n{experiment.finding}: `{path}`.\n\n{table}\n"
    options.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
