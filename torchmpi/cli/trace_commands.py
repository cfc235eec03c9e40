"""The command ``torchmpi timeline``: report on the timeline of a job, or merge the traces of its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from ..errors import ArgumentError, TorchMPIError
from ..files import printable
from ..timeline.bench_times import BenchTimes
from ..timeline.merging import merge
from ..timeline.step_report import StepReport
from ..timeline.trace_reader import WRONG_EVENTS, read_folder
from .bench import bench_report


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.action == "merge":
        path = options.out or options.folder / "merged.json.gz"
        with _explained(options.folder):
            traces = read_folder(options.folder)
            print(f"{merge(traces, path)} events of {len(traces)} ranks: {path}")
        return 0
    report, text = report_on(options.folder, options.bench)
    print(text)
    if find_spec("matplotlib") is None:
        print("\nNo picture of the steps: install matplotlib.")
    else:
        path = options.plot or options.folder / "steps.png"
        report.plot(path)
        print(f"\nThe steps of all ranks: {path}")
    return 0


def report_on(folder: Path, bench: str | None) -> tuple[StepReport, str]:
    """Return the report on the traces in a folder, and its text; `bench` is a file with times to compare with.

    Raises:
        ArgumentError: There are no traces, or a file is damaged.
        OSError: A file cannot be read.
    """
    with _explained(folder):
        report = StepReport.of(read_folder(folder), None if bench is None else _bench_times(bench))
        return report, "\n".join(map(printable, report.text().split("\n")))  # the names may come from anywhere


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Context manager that turns what damaged events raise into an error that names the folder."""
    try:
        yield
    except TorchMPIError:
        raise
    except WRONG_EVENTS as error:
        raise ArgumentError(f"{folder} has traces with events that no rank has written: {error!r}.") from error


def _bench_times(path: str) -> BenchTimes:
    measured = bench_report.load(path)
    if measured["kind"] != "collectives":
        raise ArgumentError(f"{path} has no times of collectives. Use a file of `torchmpi bench collectives --json`.")
    return BenchTimes(measured["rows"])
