"""Starts processes to see what really happens: one alone, and two with mpirun. Whatever they do, it ends in time."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .facts import Facts, Launch, MPIFacts, ProcessFacts, Program, RankFacts, SelfTest
from .launching import environment
from .probe import BOOTSTRAP, messages

_NAMES = ("mpirun", "mpiexec")
_VERSION_SECONDS = 15.0
_GRACE_SECONDS = 5.0
_TAIL_CHARACTERS = 1500
_TIME_IS_UP = "Timeout ("  # what faulthandler prints in a probe that ends itself


class Ended(NamedTuple):
    """A process that has come to an end, or was brought to it."""

    status: int | None
    """None: it was killed because its time was up."""
    stdout: str
    stderr: str
    seconds: float


def run_limited(command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a command in a process group of its own, which is killed when the time is up.

    >>> run_limited(["echo", "hello"], seconds=5).stdout
    'hello\\n'
    """
    begin = time.monotonic()
    # Files, not pipes: a process that outlives its mpirun would keep a pipe open, and us waiting.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return Ended(127, "", str(error), 0.0)
        status: int | None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            _end(process)
        except BaseException:  # Ctrl-C reaches only our own group
            _end(process)
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(status, texts[0], texts[1], time.monotonic() - begin)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, so that mpirun can take its ranks along; SIGKILL for whoever does not listen."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


# --- launchers ---------------------------------------------------------------------------------------------


def find_programs() -> list[Program]:
    """The first mpirun or mpiexec on PATH, and the one beside this Python: users start the first."""
    found: dict[str, Program] = {}
    for folder in (None, str(Path(sys.executable).parent)):
        path = next(filter(None, (shutil.which(name, path=folder) for name in _NAMES)), None)
        if path is not None and os.path.realpath(path) not in found:
            answer = run_limited([path, "--version"], seconds=_VERSION_SECONDS)
            library = library_of(answer.stdout + answer.stderr)
            found[os.path.realpath(path)] = Program(path, library, is_on_path=folder is None)
    return list(found.values())


def library_of(version_text: str) -> str:
    """Which library a launcher belongs to, from what ``mpirun --version`` prints.

    >>> library_of("mpirun (Open MPI) 5.0.11"), library_of("HYDRA build details:\\n    Version:       4.2.1")
    ('Open MPI 5.0.11', 'MPICH 4.2.1')
    """
    for name, pattern in (
        ("Open MPI", r"\(Open MPI\) (\S+)"),
        ("Intel MPI", r"Intel\(R\) MPI Library.*Version (\S+)"),
        ("MPICH", r"HYDRA build details:\s+Version:\s+(\S+)"),
    ):
        match = re.search(pattern, version_text)
        if match:
            return f"{name} {match[1]}"
    return "of an unknown library"


def _launch_command(program: Program, here: ProcessFacts) -> list[str]:
    command = [program.path]
    if program.library.startswith("Open MPI") and here.num_physical_cores < 2:
        command.append("--oversubscribe")  # its slots are cores; that there is only one is another finding
    return [*command, "-n", "2"]


# --- trials ------------------------------------------------------------------------------------------------


def _probe_command(seconds: float) -> list[str]:
    package_parent = Path(__file__).resolve().parents[2]
    return [sys.executable, "-c", BOOTSTRAP, str(package_parent), str(seconds)]


def _tail(ended: Ended) -> str:
    """The end of what was printed, without what the probes said and without ruled lines."""
    lines = [line.strip() for text in (ended.stdout, ended.stderr) for line in text.splitlines()]
    kept = [line for line in lines if line.strip("-=* ") and not messages(line)]
    return "\n".join(kept)[-_TAIL_CHARACTERS:]


def try_out(here: ProcessFacts, *, seconds: float) -> Facts:
    """What happens to a process alone, and to two that mpirun starts."""
    alone = run_limited(_probe_command(seconds), seconds=seconds + _GRACE_SECONDS, environment=environment())
    said = {name: value for message in messages(alone.stdout) for name, value in message.items()}
    programs = find_programs()
    if "missing" in said:
        return Facts(here, None, said["missing"], mpi_is_missing=True, programs=programs)
    mpi, error = None, None
    if "mpi" in said:
        mpi = MPIFacts(**said["mpi"])
    else:
        error = _tail(alone) or f"it ended with status {alone.status} and said nothing"
    if not programs:
        return Facts(here, mpi, error)
    command = [*_launch_command(programs[0], here), *_probe_command(seconds)]
    ended = run_limited(command, seconds=seconds + _GRACE_SECONDS, environment=environment())
    said = {name: value for message in messages(ended.stdout) for name, value in message.items()}
    launch = Launch(
        command=shlex.join([*command[: command.index(sys.executable)], "python", "..."]),
        status=None if _TIME_IS_UP in ended.stderr else ended.status,
        seconds=round(ended.seconds, 1),
        sizes=[message["mpi"]["size"] for message in messages(ended.stdout) if "mpi" in message],
        output=_tail(ended),
    )
    return Facts(
        here,
        mpi,
        error,
        programs=programs,
        launch=launch,
        ranks=[RankFacts.from_json(rank) for rank in said.get("ranks", [])],
        self_test=SelfTest(**said["self_test"]) if "self_test" in said else None,
    )
