"""Run an experiment that a file describes, continue it where it stopped, and draw what it finds.

    python -m examples.async_sgd examples/async_sgd/findings/staleness.toml

The results are in OUT/results.csv, a row for each point of a curve, and in a plot. Runs that the table has are not
repeated. Experiments with ``ranks = N`` start a job of N ranks for their runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

import torchmpi as mpi

from .experiment import Experiment, ExperimentError, Run
from .results import add_run, describe, draw, read_table
from .training import execute

ROOT = Path(__file__).resolve().parents[2]


def work(experiment: Experiment, runs: list[Run], table: Path, *, writes: bool = True) -> None:
    """Make runs in this process, and add each to the table when it has ended."""
    for number, run in enumerate(runs, 1):
        begin = time.perf_counter()
        points = execute(run, experiment.path.parent)
        if writes:
            add_run(table, run, points)
            end = points[-1]
            took = f"{end['seconds']:.2f} s; took {time.perf_counter() - begin:.1f} s"
            print(f"{number}/{len(runs)} {run}: loss {end['loss']:.4f}, error {end['error']:.2%}, {took}", flush=True)


def work_on_ranks(experiment: Experiment, runs: list[Run], table: Path) -> None:
    """The same, in the job that this process belongs to."""
    with mpi.started(with_cuda=False):
        keys = mpi.broadcast_object([run.key for run in runs if run.settings["ranks"] == mpi.size()])
        chosen = [run for run in experiment.runs if run.key in keys]
        work(experiment, chosen, table, writes=mpi.rank() == 0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m examples.async_sgd", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the experiment, a TOML file")
    parser.add_argument("--out", type=Path, help="folder of the results (default: results/async_sgd/NAME OF THE FILE)")
    parser.add_argument("--plot", type=Path, help="the plot, .png or .svg (default: plot.png among the results)")
    parser.add_argument("--columns", nargs="+", default=[], help="further columns of the table that is printed")
    parser.add_argument("--in-job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        experiment = Experiment(options.file)
        table = (options.out or Path("results/async_sgd", options.file.stem)) / "results.csv"
        rows = read_table(table)
        missing = [run for run in experiment.runs if run.key not in rows]
        if options.in_job:
            work_on_ranks(experiment, missing, table)
            return 0
        print(f"{experiment.path}: {len(experiment.runs)} runs, of which {len(missing)} are to do", flush=True)
        torch.set_num_threads(1)
        work(experiment, [run for run in missing if run.settings["workers"]], table)
        for size in sorted({run.size for run in missing if run.settings["ranks"]}):
            program = [sys.executable, "-m", "torchmpi", "run", "-n", str(size), "-m", "examples.async_sgd"]
            command = [*program, str(options.file), "--out", str(table.parent), "--in-job"]
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            if status := subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode:
                return status
        rows = read_table(table)
    except ExperimentError as error:
        print(f"async_sgd: {error}", file=sys.stderr)
        return 2
    print(describe(experiment, rows, options.columns))
    plot = options.plot or table.with_name("plot.png")
    try:
        draw(experiment, rows, plot)
        print(f"plot: {plot}")
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
    print(f"results: {table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
