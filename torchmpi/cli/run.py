"""The command ``torchmpi run``: start a program on several ranks, by the mpirun of the MPI that this Python loads."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from ..errors import ArgumentError, LaunchError, MissingMPIError
from ..session import launcher, mpi_library
from .facts import Program
from .launching import find_programs, launch_command


def run(options: argparse.Namespace) -> int:
    """Replace this process by mpirun, or print its command line."""
    if launcher.is_rank():
        raise LaunchError("this process is a rank of a job already. Start jobs from a shell outside any job.")
    if options.hostfile is not None and not Path(options.hostfile).is_file():
        raise ArgumentError(f"--hostfile {options.hostfile}: there is no such file.")
    command = [*_launch(_matching_program(), options), *_program(options), *options.arguments]
    if options.dry_run:
        print(shlex.join(command))
        return 0
    sys.stdout.flush()
    os.execv(command[0], command)


def _launch(program: Program, options: argparse.Namespace) -> list[str]:
    is_open_mpi = program.library.startswith("Open MPI")
    as_root = ["--allow-run-as-root"] if is_open_mpi and os.geteuid() == 0 else []
    if options.hostfile is None:
        path, *more = launch_command(program, options.ranks)
        return [path, *as_root, *more]
    # Not --oversubscribe, with which Open MPI starts all ranks on the first host. It does not pass PATH to other hosts.
    hosts = ["--hostfile", options.hostfile, "-x", "PATH"] if is_open_mpi else ["-f", options.hostfile]
    return [program.path, *as_root, *hosts, "-n", str(options.ranks)]


def _program(options: argparse.Namespace) -> list[str]:
    if options.is_module:
        return [sys.executable, "-m", options.program]
    return [*([sys.executable] if options.program.endswith(".py") else []), options.program]


def _matching_program() -> Program:
    """Return the first launcher that may belong to the MPI library of this Python."""
    library = mpi_library.short_version(mpi_library.load())
    programs = find_programs()
    for program in programs:
        if not launcher.are_incompatible(program.library, library):
            return program
    if programs:
        found = " and ".join(f"{program.path} ({program.library})" for program in programs)
        raise LaunchError(
            f"this Python loads {library}, but found only {found}. Put the mpirun of {library} on PATH, or point "
            "mpi4py to the library of the launcher with MPI4PY_LIBMPI."
        )
    raise MissingMPIError(f"neither mpirun nor mpiexec is on PATH or beside this Python. {mpi_library.HOW_TO_INSTALL}")
