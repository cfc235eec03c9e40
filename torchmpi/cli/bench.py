"""``torchmpi bench``: measure, report, compare."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError, TorchMPIError
from ..session import affinity, mpi_library, runtime
from .benching import collective_table, ps_plan, ps_table, train_table, usage_table
from .benching import options as defaults
from .benching.arguments import sizes
from .benching.child import measure_job
from .benching.compare import compare_files
from .benching.job import StatusLine
from .benching.jobs import is_rank, run_job
from .benching.plot import check_can_plot, draw
from .benching.report import new_report, save

_INTERRUPTED = 130  # as shells have it
# To a job's time for measuring: starting it, results to check, and seven batches where they take longer than that.
_MORE_SECONDS, _TIMES = 180.0, 4.0
# For a call of `bench leaks`, many times what it takes on a machine that is not overloaded.
_SMALL_SECONDS, _LARGE_SECONDS = 5e-4, 2e-2
_START_SECONDS = 1.0


def run(options: argparse.Namespace) -> int:
    """Run one of the commands of ``bench``."""
    try:
        return _COMMANDS[options.kind](options)
    except KeyboardInterrupt:
        StatusLine().clear()
        return _INTERRUPTED


def _collectives(options: argparse.Namespace) -> int:
    if options.sizes is None:
        options.sizes = sizes(defaults.QUICK_SIZES if options.quick else defaults.DEFAULT_SIZES)
    if options.seconds is None:
        options.seconds = defaults.QUICK_SECONDS if options.quick else defaults.DEFAULT_SECONDS
    return _measure_and_print(options, partial(collective_table.as_text, details=options.details))


def _measure_and_print(options: argparse.Namespace, as_text: Callable[[dict[str, Any]], str]) -> int:
    _check_files(options)
    if getattr(options, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: this torch or this host has no CUDA (`torchmpi doctor`). Leave it out.")
    report = _measured(options)
    if report is not None:
        print(as_text(report), flush=True)
        _write_files(report, options)
    return int(report is not None and any(row.get("is_exact") is False for row in report["rows"]))


def _measured(options: argparse.Namespace) -> dict[str, Any] | None:
    """The report of this job, or of jobs that are started for it; None on all ranks but the first."""
    status = StatusLine()
    if is_rank():
        _check_can_run_in_a_job(options)
        MPI, _ = mpi_library.initialise()
        result = _measured_here(options, status.show)
        jobs = [result] if MPI.COMM_WORLD.rank == 0 else []
    else:
        jobs = _run_jobs(options, status.show)
    status.clear()
    return new_report(options.kind, jobs, vars(options)) if jobs else None


def _measured_here(options: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    try:
        return measure_job(options, show)
    except TorchMPIError as error:
        if runtime.is_running():  # then it may be this rank's alone, and the others would wait for it
            print(f"torchmpi bench: {error}", file=sys.stderr, flush=True)
            mpi_library.load().COMM_WORLD.Abort(1)
        raise


def _check_can_run_in_a_job(options: argparse.Namespace) -> None:
    if options.kind in _STARTING:
        raise ArgumentError(f"`bench {options.kind}` starts jobs of its own. Run it without mpirun.")
    if options.ranks is not None:
        raise ArgumentError("-n is for starting jobs; here the launcher has decided. Leave it out.")


def _run_jobs(options: argparse.Namespace, show: Callable[[str], None]) -> list[dict[str, Any]]:
    if options.kind == "ps":
        return [
            run_job(task, number, show, limit_seconds=_MORE_SECONDS + _TIMES * seconds)
            for number, task, seconds in ps_plan.jobs(options)
        ]
    numbers = options.ranks or _default_ranks()
    share = argparse.Namespace(**vars(options))
    limit = _MORE_SECONDS
    if hasattr(options, "seconds"):
        share.seconds = options.seconds / len(numbers)
        limit += _TIMES * share.seconds
    if options.kind == "leaks":
        limit += options.small * _SMALL_SECONDS + options.large * _LARGE_SECONDS
    return [run_job(share, number, show, limit_seconds=limit) for number in numbers]


def _default_ranks() -> tuple[int, ...]:
    """Two ranks, and one for each core up to eight."""
    return tuple(sorted({2, max(2, min(8, len(affinity.current())))}))


def _check_files(options: argparse.Namespace) -> None:
    """Refuse what could not be written before time is spent."""
    if getattr(options, "plot", None):
        check_can_plot()
    for path in filter(None, (options.json, getattr(options, "plot", None))):
        if not Path(path).resolve().parent.is_dir():
            raise ArgumentError(f"there is no folder for {path}. Make it, or name another file.")


def _write_files(report: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        save(report, options.json)
        print(f"\nfigures: {options.json}")
    if getattr(options, "plot", None):
        draw(report, options.plot)
        print(f"plot: {options.plot}")


def _train(options: argparse.Namespace) -> int:
    if options.seconds is None:
        options.seconds = defaults.DEFAULT_SECONDS
    return _measure_and_print(options, train_table.as_text)


def _starts(options: argparse.Namespace) -> int:
    """Short jobs of the kind that `collectives` runs, one after another."""
    _check_files(options)
    status = StatusLine()
    if is_rank():
        _check_can_run_in_a_job(options)
    task = argparse.Namespace(
        kind="starts", verbs=("allreduce",), dtypes=("float32",), sizes=(options.size,), backends=("auto",),
        memory=("plain",), peers=(), asynchronous=False, seconds=_START_SECONDS,
    )  # fmt: skip
    jobs = []
    for number in range(1, options.count + 1):
        status.show(f"start {number} of {options.count}")
        job = run_job(task, 2, _silent, limit_seconds=_MORE_SECONDS)
        ours = [row | {"start": number} for row in job["rows"] if row["contestant"] == "auto"]
        jobs.append(job | {"rows": ours})
    status.clear()
    report = new_report("starts", jobs, vars(options))
    print(usage_table.starts_as_text(report), flush=True)
    _write_files(report, options)
    return 0


def _silent(text: str) -> None:
    pass


def _leaks(options: argparse.Namespace) -> int:
    return _measure_and_print(options, usage_table.leaks_as_text)


def _memory(options: argparse.Namespace) -> int:
    return _measure_and_print(options, usage_table.memory_as_text)


def _ps(options: argparse.Namespace) -> int:
    if options.plot and "speed" not in options.parts:
        raise ArgumentError("--plot draws what --parts speed measures. Add that part, or leave --plot out.")
    return _measure_and_print(options, ps_table.as_text)


def _compare(options: argparse.Namespace) -> int:
    print(compare_files(options.before, options.after), flush=True)
    return 0


_STARTING = ("starts", "memory")
_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "collectives": _collectives,
    "train": _train,
    "compare": _compare,
    "starts": _starts,
    "leaks": _leaks,
    "memory": _memory,
    "ps": _ps,
}
