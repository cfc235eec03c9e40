"""The command ``torchmpi top``: find the jobs, and show them once, as JSON, in the terminal or in a browser."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time

from ...errors import TorchMPIError
from . import top_text
from .job_view import view_of
from .watched_job import WatchedJob, find_jobs

_LOOKS, _LOOK_SECONDS = 5, 0.5
"""Looks of ``--once``: a rank tells twice a second where it is, and a cause needs several of these places."""


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.web:
        from . import top_server  # with an HTTP server

        return top_server.serve(watch(options.job), options.port, options.seconds)
    is_live = not (options.once or options.json) and sys.stdin.isatty() and sys.stdout.isatty()
    jobs = watch(options.job)
    if is_live:
        from .top_screen import Screen

        return Screen(jobs, options.seconds).run()
    for _ in range(_LOOKS):
        jobs = [job for job in jobs if job.read()]
        time.sleep(_LOOK_SECONDS)
    views = [view_of(job) for job in jobs if job.read()]
    if not views:
        raise TorchMPIError("The job has ended.")
    if options.json:
        print(json.dumps(views, indent=1))
    else:
        width = shutil.get_terminal_size((80, 24)).columns
        print("\n\n".join(top_text.page(view, width) for view in views))
    return 0


def watch(process: int | None) -> list[WatchedJob]:
    """Return the jobs to show, each with its ranks.

    Raises:
        TorchMPIError: There is none.
    """
    jobs = []
    for name, ranks in find_jobs(process).items():
        with contextlib.suppress(TorchMPIError):  # it has ended meanwhile
            jobs.append(WatchedJob(name, ranks))
    if not jobs:
        where = "on this host" if process is None else f"among process {process} and those that it has started"
        raise TorchMPIError(
            f"There is no rank between mpi.start() and mpi.stop() {where} that this user may read. Call it on a host "
            "of the job, as the user of the job or as root, in the same container."
        )
    return jobs
