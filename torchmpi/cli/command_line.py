"""The parser of the command line. The module of a command is imported only when the command runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import _version
from ..errors import TorchMPIError
from ..files import printable
from ..log import log_fatal
from .bench import options as bench_options

_ALL = "Start programs; report on, check and benchmark torchmpi, its MPI library and this machine."
_RUN = """Start a program on several ranks with the mpirun of the MPI library that this Python loads, and with the
options it needs: Open MPI refuses root without --allow-run-as-root, and more ranks than cores without --oversubscribe.
Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun. The exit
status is that of mpirun."""
_RUN_EXAMPLES = """examples:
  torchmpi run -n 4 train.py --epochs 10
  torchmpi run -n 4 -m package.train
  torchmpi run -n 4 --as gloo train.py
  torchmpi run --hosts node1:2,node2:2 train.py
  torchmpi run -n 16 --hostfile hosts --restarts 3 train.py
  torchmpi run -n 2 -m torchmpi doctor"""
_INFO = """Report versions, MPI library, ranks, cores, devices, backends and settings. Under mpirun, rank 0
reports for all ranks."""
_TOP_KEYS = "keys: q ends; r, w, c, s, m and h sort; arrows scroll; n shows the next job; space stops and continues."
_DOCTOR = """Check for common problems, and print remedies. Without mpirun it starts two ranks with the mpirun on
PATH and checks that they work together; under mpirun it checks the ranks of that job. The exit status is 0 if
there is no problem, and 1 otherwise."""


def main(arguments: Sequence[str] | None = None, *, program: str = "torchmpi") -> int:
    """Run a command and return its exit status; an invalid command line ends the process with status 2.

    main(["doctor", "--json"])
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(program).parse_args(bench_options.with_default_command(given))
    command = COMMANDS[options.command]
    run: Callable[[argparse.Namespace], int] = importlib.import_module(command.module, __package__).run
    try:
        return run(options)
    except TorchMPIError as error:
        log_fatal(f"{program} {options.command}: {_shown(error, command)}")
        return 1
    except BrokenPipeError:  # as in `torchmpi info | head`: avoid a second error when Python flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if not command.reads_files:
            raise
        log_fatal(f"{program} {options.command}: {_shown(error, command)}")
        return 1


def _shown(error: Exception, command: Command) -> str:
    """Return the text of an error; names of files and texts in them cannot control the terminal."""
    lines = str(error).split("\n")
    return "\n".join(map(printable, lines) if command.reads_files else lines)


class _ShowVersion(argparse.Action):
    """Asks git for the commit, if the package was not built from one, only when the version is wanted."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        commit = _version.commit()
        print(f"torchmpi {_version.__version__}" + (f" (commit {commit})" if commit else ""))
        parser.exit()


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=_ALL)
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and the commit, and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS.values():
        command.add_to(commands)
    return parser


def _add_info(commands: Any) -> None:
    summary = "versions, MPI library, ranks, cores, devices, backends and settings"
    info = commands.add_parser("info", help=summary, description=_INFO)
    info.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="check for common problems, and print remedies", description=_DOCTOR)
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.add_argument(
        "--recovery", action="store_true",
        help="also kill a rank of a trial job, and check that the others continue; not in a job",
    )  # fmt: skip
    doctor.add_argument(
        "--timeout", type=bench_options.seconds, default=60.0, metavar="SECONDS",
        help="time limit of the trial, or of the test in a job (default: %(default)g)",
    )  # fmt: skip


def _add_dump(commands: Any) -> None:
    summary = "save the last calls of the ranks of a running job, and compare them"
    dump = commands.add_parser("dump", help=summary, description=f"{summary.capitalize()}. The ranks may be stopped.")
    dump.add_argument("process", type=bench_options.count, help="process of a rank, or of the launcher of all of them")
    dump.add_argument("--out", dest="folder", type=Path, metavar="DIR", help="default: torchmpi-dump-PROCESS")
    _add_forms_of_records(dump)


def _add_top(commands: Any) -> None:
    summary = "show what the ranks of a running job do: steps, waits, the late rank and why"
    top = commands.add_parser("top", help=summary, description=f"{summary.capitalize()}.", epilog=_TOP_KEYS)
    option = top.add_argument
    option(
        "job",
        nargs="?",
        type=bench_options.count,
        metavar="PROCESS",
        help="process of a rank, or of a launcher (default: all jobs of this host that you may read)",
    )
    how = top.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print the state once, as text")
    how.add_argument("--json", action="store_true", help="print the state once, as JSON")
    how.add_argument("--web", action="store_true", help="show it as a page at an address of this host")
    option("--port", type=bench_options.count, metavar="PORT", help="port of the page (default: any that is free)")
    option("--seconds", type=bench_options.seconds, metavar="S",
           help="time between two looks (default: 1, and up to 5 if looks take more than 1 %% of a core)")  # fmt: skip


def _add_analyze(commands: Any) -> None:
    summary = "compare the last calls of all ranks: where they part"
    analyze = commands.add_parser("analyze", help=summary, description=f"{summary.capitalize()}.")
    analyze.add_argument("folder", type=Path, help="folder of `torchmpi dump`, or of TORCHMPI_FLIGHT_RECORD")
    _add_forms_of_records(analyze)


def _add_forms_of_records(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print findings and calls as JSON")
    command.add_argument(
        "--torch", type=Path, metavar="DIR", help="also write the records for torch's reader, torchfrtrace"
    )


def _add_timeline(commands: Any) -> None:
    summary = "say where the time of a job went, or merge the traces of its ranks"
    parser = commands.add_parser("timeline", help=summary, description=f"{summary.capitalize()}.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    report = actions.add_parser("report", help="where the time of each step went, and what to do about it")
    merging = actions.add_parser("merge", help="one trace of all ranks, for https://ui.perfetto.dev")
    for action in (report, merging):
        action.add_argument("folder", type=Path, help="folder with the trace files of a job")
    report.add_argument("--plot", type=Path, metavar="FILE", help="PNG of the steps (default: FOLDER/steps.png)")
    report.add_argument(
        "--bench", metavar="FILE",
        help="compare the calls with a file of `torchmpi bench --json`, measured on the same ranks",
    )  # fmt: skip
    merging.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: FOLDER/merged.json.gz)")


def _add_staleness(commands: Any) -> None:
    summary = "say how stale the updates of an asynchronous run were, and who waited"
    parser = commands.add_parser("staleness", help=summary, description=f"{summary.capitalize()}.")
    parser.add_argument("file", type=Path, help="file of torchmpi.parameterserver.record() or simulate()")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a PNG; needs matplotlib")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write all events as a table")


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="start a program on several ranks",
        description=_RUN,
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(refuse=parser.error)
    option = parser.add_argument
    # fmt: off
    option("-n", "-np", dest="ranks", type=bench_options.count, metavar="N",
           help="number of ranks (default: the sum over the hosts)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="LIST", help="hosts, with the number of ranks on each: node1:2,node2:2")
    where.add_argument("--hostfile", "-hostfile", metavar="FILE",
                       help="file with a host per line: node1, node1 slots=2 or node1:2")
    option("--interface", metavar="NAME",
           help="network interface between the hosts, such as eth0, or a network such as 192.168.1.0/24")
    option("--rsh", metavar="PROGRAM", help="program that runs a command on a host, instead of ssh")
    option("--restarts", type=bench_options.count, default=0, metavar="N",
           help="start the job again after a failure, at most N times; the program continues from its last checkpoint")
    option("--min-ranks", type=bench_options.count, metavar="N",
           help="continue on the hosts that still answer, with at least N ranks (default: all ranks)")
    option("--without-mpi", action="store_true",
           help="start the ranks of this host without MPI: if one is killed, the others may continue")
    option("--on-lost-rank", choices=["end", "continue"],
           help="what the others do when a rank is killed: end too, or raise RankLostError, after which they may "
                "recover (Open MPI 5, and --without-mpi)")
    option("--spares", type=bench_options.count, default=0, metavar="K",
           help="also start K ranks that wait, and take the places of killed ranks; with --on-lost-rank continue")
    option("--respawns", type=bench_options.count, default=0, metavar="N",
           help="start a new rank in place of a killed one, at most N times, while the others go on; it joins them "
                "at a commit; with --without-mpi --on-lost-rank continue")
    option("--as", dest="stands_for", choices=["mpi", "gloo"],
           help="run the program unchanged: its backend of this name is torchmpi")
    option("--timeout", type=bench_options.seconds, metavar="SECONDS",
           help="end the job after this time, with status 124")
    option("--log-dir", metavar="DIR", help="append the output of rank N to DIR/rankN.log; only rank 0 is shown")
    option("--report", type=Path, metavar="FILE",
           help="write a page at the end: where the time of the ranks of this host went (HTML, readable offline)")
    option("--option", action="append", default=[], metavar="WORDS", help="more options for mpirun; may be repeated")
    option("-v", "--verbose", action="store_true", help="print the command, then run it")
    option("--dry-run", action="store_true", help="print the command instead of running it")
    # fmt: on
    option("-m", dest="is_module", action="store_true", help="the program is a module, as in `python -m`")
    option("program", help="a Python file (*.py), which this Python runs; with -m a module; otherwise any program")
    option("arguments", nargs=argparse.REMAINDER, help="arguments of the program")


class Command(NamedTuple):
    """A command: the module with its function `run`, and the function that adds its parser to the others."""

    module: str
    add_to: Callable[[Any], None]
    reads_files: bool = False
    """Whether it is a command of one process, whose files may not be readable or writable."""


COMMANDS = {
    "run": Command(".run", _add_run),
    "info": Command(".info", _add_info),
    "doctor": Command(".doctor.diagnosis", _add_doctor),
    "bench": Command(".bench.command", bench_options.add_to),
    "timeline": Command(".trace_commands", _add_timeline, reads_files=True),
    "staleness": Command(".staleness_report", _add_staleness, reads_files=True),
    "dump": Command(".flight_commands", _add_dump, reads_files=True),
    "top": Command(".top.top_command", _add_top, reads_files=True),
    "analyze": Command(".flight_commands", _add_analyze, reads_files=True),
}
"""All commands, in the order of the help."""
