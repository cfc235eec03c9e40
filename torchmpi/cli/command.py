"""Reads the command line and hands over to the module of the command, which is imported only then."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import TorchMPIError
from .benching import options as bench_options

_DEFAULT_TIMEOUT_SECONDS = 60.0
_ALL = "Look at torchmpi, its MPI library and this machine, and measure them."
_INFO = """Report versions, MPI library, ranks, cores, devices, backends and settings. Under mpirun, rank 0
reports for all ranks."""
_DOCTOR = """Check what commonly breaks, and say how to mend it. Alone, it starts two ranks with the mpirun on
PATH to see whether they work together; under mpirun, it checks the ranks of that job. The exit status is 0 if
there is no problem, and 1 otherwise."""


def main(arguments: Sequence[str] | None = None, *, program: str = "torchmpi") -> int:
    """Run a command and return its exit status; a wrong command line ends the process with status 2.

    main(["doctor", "--json"])
    """
    given = bench_options.with_default_command(sys.argv[1:] if arguments is None else arguments)
    options = _parser(program).parse_args(given)
    command = importlib.import_module(f".{options.command}", __package__)
    try:
        return command.run(options)
    except TorchMPIError as error:
        print(f"{program} {options.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as in `torchmpi info | head`: nobody reads on, and nothing may be written at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=_ALL)
    parser.add_argument("--version", action="version", version=f"torchmpi {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    info = commands.add_parser(
        "info",
        help="versions, MPI library, ranks, cores, devices, backends and settings",
        description=_INFO,
    )
    doctor = commands.add_parser(
        "doctor",
        help="check what commonly breaks, and say how to mend it",
        description=_DOCTOR,
    )
    for command in (info, doctor):
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.add_argument(
        "--timeout",
        type=_seconds,
        default=_DEFAULT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="how long the trial, or the test in a job, may take (default: %(default)g)",
    )
    bench_options.add_to(commands)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time in seconds")
    return value
