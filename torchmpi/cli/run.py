"""The command ``torchmpi run``: start a program on several ranks, by the mpirun of the MPI that this Python loads."""

from __future__ import annotations

import argparse
import os
import shlex

from .. import status_line
from ..errors import LaunchError
from ..launch import launcher
from . import separate_ranks
from .job import Job, on_lost_rank, program_of
from .rank_start import execute
from .supervision import Limits, Supervisor


def run(options: argparse.Namespace) -> int:
    """Start a job. Without options for failures this process is replaced by mpirun.

    ``options.refuse(message)`` prints the usage and ends the process.
    """
    if launcher.is_rank():
        raise LaunchError("this process is a rank of a job already. Start jobs from a shell outside any job.")
    if options.ranks is None and options.hosts is None and options.hostfile is None:
        options.refuse("-n N, the number of ranks, is needed without --hosts and --hostfile")
    if options.min_ranks is not None and not options.restarts:
        options.refuse("--min-ranks is for restarts: add --restarts N")
    if options.spares and (options.without_mpi or options.on_lost_rank != "continue" or options.ranks is None):
        options.refuse("--spares is for Open MPI, with --on-lost-rank continue and -n N, the number of the other ranks")
    if options.respawns and (not options.without_mpi or options.on_lost_rank != "continue"):
        options.refuse(
            "--respawns is for ranks without MPI: add --without-mpi --on-lost-rank continue. Processes that Open MPI "
            "starts later (MPI_Comm_spawn) do not survive losses; there --spares K starts ranks that wait"
        )
    launcher.open_standard_streams()  # MPICH's mpirun does not start without
    if options.log_dir is None:
        status_line.offer_terminal()
    if options.report is not None and not options.dry_run:
        from .top.run_report import RunReport  # with an HTTP server

        with RunReport(options.report):
            return _run(options)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    if options.without_mpi:
        os.environ.update(on_lost_rank(options))
        return separate_ranks.run(options, [*program_of(options), *options.arguments])
    job = Job(options)
    command = job.command()
    if options.dry_run or options.verbose:
        print(shlex.join(command), flush=True)
    if options.dry_run:
        return 0
    if options.restarts or options.timeout is not None or job.continues or options.report is not None:
        limits = Limits(options.restarts, options.min_ranks or job.num_ranks - options.spares, options.timeout)
        return Supervisor(job, limits).run()
    execute(command)
