"""The command ``torchmpi bench``: run a measurement in this job or in jobs of its own, print and save the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import ArgumentError, TorchMPIError
from ...session import affinity, launcher, mpi_library, runtime
from . import collective_bench, training
from . import options as defaults
from .compare import compare_files
from .job import StatusLine, measure_job
from .launch import run_job
from .options import sizes
from .report import check_can_plot, draw, new_report, save

Show = Callable[[str], None]
RunJobs = Callable[[argparse.Namespace, Show], list[dict[str, Any]]]

MORE_SECONDS, TIMES = 180.0, 4.0
"""Time limit of a job, besides its time for measuring: for starting and checking, and for at least seven batches."""
_INTERRUPTED = 130  # the exit status of shells


def run(options: argparse.Namespace) -> int:
    """Run one of the commands of ``bench``."""
    return _interruptible(_COMMANDS[options.kind], options)


def _interruptible(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command; Ctrl-C ends it with status 130 and no traceback."""
    try:
        return command(options)
    except KeyboardInterrupt:
        StatusLine().clear()
        return _INTERRUPTED


def _collectives(options: argparse.Namespace) -> int:
    if options.sizes is None:
        options.sizes = sizes(defaults.QUICK_SIZES if options.quick else defaults.DEFAULT_SIZES)
    if options.seconds is None:
        options.seconds = defaults.QUICK_SECONDS if options.quick else defaults.DEFAULT_SECONDS
    return measure_and_print(options, partial(collective_bench.as_text, details=options.details))


def _train(options: argparse.Namespace) -> int:
    if options.seconds is None:
        options.seconds = defaults.DEFAULT_SECONDS
    return measure_and_print(options, training.as_text)


def _compare(options: argparse.Namespace) -> int:
    print(compare_files(options.before, options.after), flush=True)
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "collectives": _collectives,
    "train": _train,
    "compare": _compare,
}


# --- also used by the scripts in benchmarks/ ---------------------------------------------------------------


def run_script(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]) -> int:
    """Parse the command line of a script, run it, and return the exit status."""
    options = parser.parse_args()
    try:
        return _interruptible(command, options)
    except TorchMPIError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def run_jobs(
    options: argparse.Namespace, show: Show, *, more_seconds: float = 0.0, program: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Run one job for each number of ranks, and return their results. For `program` see :func:`run_job`."""
    numbers = options.ranks or _default_ranks()
    share = argparse.Namespace(**vars(options))
    limit = MORE_SECONDS + more_seconds
    if hasattr(options, "seconds"):
        share.seconds = options.seconds / len(numbers)
        limit += TIMES * share.seconds
    return [run_job(share, number, show, limit_seconds=limit, program=program) for number in numbers]


def measure_and_print(
    options: argparse.Namespace,
    as_text: Callable[[dict[str, Any]], str],
    *,
    start_jobs: RunJobs = run_jobs,
    title: str = "",
) -> int:
    """Measure, print the report on rank 0, write its files, and return the exit status.

    In a job, its ranks are measured; otherwise `start_jobs` starts jobs. Status 1 means that a result was wrong.
    """
    check_files(options)
    if getattr(options, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: this torch or this host has no CUDA (`torchmpi doctor`). Leave it out.")
    status = StatusLine()
    jobs = (_measure_here if launcher.is_rank() else start_jobs)(options, status.show)
    status.clear()
    if not jobs:
        return 0
    report = print_report(options, jobs, as_text, title=title)
    return int(any(row.get("is_exact") is False for row in report["rows"]))


def print_report(
    options: argparse.Namespace,
    jobs: Sequence[dict[str, Any]],
    as_text: Callable[[dict[str, Any]], str],
    *,
    title: str = "",
) -> dict[str, Any]:
    """Print the report of some jobs, and write its files."""
    report = new_report(options.kind, jobs, vars(options))
    print(as_text(report | ({"title": title} if title else {})), flush=True)
    if options.json:
        save(report, options.json)
        print(f"\nfigures: {options.json}")
    if getattr(options, "plot", None):
        draw(report, options.plot)
        print(f"plot: {options.plot}")
    return report


def check_files(options: argparse.Namespace) -> None:
    """Raise before measuring if a file could not be written afterwards."""
    if getattr(options, "plot", None):
        check_can_plot()
    for path in filter(None, (options.json, getattr(options, "plot", None))):
        if not Path(path).resolve().parent.is_dir():
            raise ArgumentError(f"there is no folder for {path}. Make it, or name another file.")


def _measure_here(options: argparse.Namespace, show: Show) -> list[dict[str, Any]]:
    """Measure the job of this process; the result is on rank 0."""
    if options.ranks is not None:
        raise ArgumentError("-n is for starting jobs; here the launcher has decided. Leave it out.")
    MPI, _ = mpi_library.initialise()
    try:
        result = measure_job(options, show)
    except TorchMPIError as error:
        if runtime.is_running():  # the other ranks may not have failed, and would wait for this one
            print(f"torchmpi bench: {error}", file=sys.stderr, flush=True)
            MPI.COMM_WORLD.Abort(1)
        raise
    return [result] if MPI.COMM_WORLD.rank == 0 else []


def _default_ranks() -> tuple[int, ...]:
    """Return two, and one per core up to eight."""
    return tuple(sorted({2, max(2, min(8, len(affinity.current())))}))
