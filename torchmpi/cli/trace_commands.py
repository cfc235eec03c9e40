"""The command ``torchmpi timeline``: report on the timeline of a job, or merge the traces of its ranks."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from ..errors import ArgumentError, TorchMPIError
from ..files import printable
from ..timeline.bench_times import BenchTimes
from ..timeline.merging import merge
from ..timeline.step_report import StepReport
from ..timeline.trace_reader import WRONG_EVENTS, read_folder
from .bench import bench_report


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    try:
        return _run(options)
    except TorchMPIError:
        raise
    except WRONG_EVENTS as error:
        raise ArgumentError(f"{options.folder} has traces with events that no rank has written: {error!r}.") from error


def _run(options: argparse.Namespace) -> int:
    traces = read_folder(options.folder)
    if options.action == "merge":
        path = options.out or options.folder / "merged.json.gz"
        print(f"{merge(traces, path)} events of {len(traces)} ranks: {path}")
        return 0
    report = StepReport.of(traces, None if options.bench is None else _bench_times(options.bench))
    print("\n".join(map(printable, report.text().split("\n"))))  # names in traces may come from anywhere
    if find_spec("matplotlib") is None:
        print("\nNo picture of the steps: install matplotlib.")
    else:
        path = options.plot or options.folder / "steps.png"
        report.plot(path)
        print(f"\nThe steps of all ranks: {path}")
    return 0


def _bench_times(path: str) -> BenchTimes:
    measured = bench_report.load(path)
    if measured["kind"] != "collectives":
        raise ArgumentError(f"{path} has no times of collectives. Use a file of `torchmpi bench collectives --json`.")
    return BenchTimes(measured["rows"])
