"""The parser of the command line. The module of a command is imported only when the command runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from .._version import __version__
from ..errors import TorchMPIError
from .bench import options as bench_options

_DEFAULT_TIMEOUT_SECONDS = 60.0
_MODULES = {"info": ".info", "doctor": ".doctor.diagnosis", "bench": ".bench.command"}
_ALL = "Report on, check and benchmark torchmpi, its MPI library and this machine."
_INFO = """Report versions, MPI library, ranks, cores, devices, backends and settings. Under mpirun, rank 0
reports for all ranks."""
_DOCTOR = """Check for common problems, and print remedies. Without mpirun it starts two ranks with the mpirun on
PATH and checks that they work together; under mpirun it checks the ranks of that job. The exit status is 0 if
there is no problem, and 1 otherwise."""


def main(arguments: Sequence[str] | None = None, *, program: str = "torchmpi") -> int:
    """Run a command and return its exit status; an invalid command line ends the process with status 2.

    main(["doctor", "--json"])
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(program)
    if script := bench_options.moved_to_script(given):
        parser.exit(2, f"{program} bench {given[1]} is now a script of the source tree: python {script}\n")
    options = parser.parse_args(bench_options.with_default_command(given))
    run: Callable[[argparse.Namespace], int] = importlib.import_module(_MODULES[options.command], __package__).run
    try:
        return run(options)
    except TorchMPIError as error:
        print(f"{program} {options.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as in `torchmpi info | head`: avoid a second error when Python flushes at exit
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
        help="check for common problems, and print remedies",
        description=_DOCTOR,
    )
    for command in (info, doctor):
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.add_argument(
        "--timeout",
        type=_seconds,
        default=_DEFAULT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="time limit of the trial, or of the test in a job (default: %(default)g)",
    )
    bench_options.add_to(commands)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time in seconds")
    return value
