"""Start processes with a time limit, find the launchers of this machine, and leave a job."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..launch import affinity, mpi_library

PACKAGE_PARENT = Path(__file__).resolve().parents[2]
"""The folder that contains torchmpi, for processes that do not have it on their path."""
BOOTSTRAP = "import sys; sys.path[0] or sys.path.pop(0); sys.path.append(sys.argv[1]); "
"""For ``python -c`` with `PACKAGE_PARENT`: nothing is imported from the current folder, which would come first."""
_SHARED_MEMORY = "/dev/shm"
_VERSION_SECONDS = 15.0
_TERMINATION_SECONDS = 5.0
_TICK_SECONDS = 0.2
# As root, Open MPI's mpirun refuses to run without two variables.
_ALLOW_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclasses.dataclass(frozen=True)
class Program:
    """An mpirun or mpiexec."""

    path: str
    library: str
    """For example ``Open MPI 5.0.11``."""
    is_on_path: bool


class ProcessResult(NamedTuple):
    """Status, output and duration of a process that has ended."""

    status: int | None
    """None: it exceeded the time limit and was killed."""
    stdout: str
    stderr: str
    seconds: float


def run_limited(command: Sequence[str], *, seconds: float, tick: Callable[[], object] = lambda: None) -> ProcessResult:
    r"""Run a command in a process group of its own, kill the group after a time limit, and call `tick` meanwhile.

    >>> run_limited(["echo", "hello"], seconds=5).stdout
    'hello\n'
    """
    begin = time.monotonic()
    # Files, not pipes: a process that outlives its mpirun would keep a pipe open, and reading it would not end.
    folder = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None  # a container may have no other for files
    with tempfile.TemporaryFile(dir=folder) as out, tempfile.TemporaryFile(dir=folder) as err:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | _ALLOW_ROOT,
                start_new_session=True,
            )
        except OSError as error:
            return ProcessResult(127, "", str(error), 0.0)
        status = None
        try:
            while status is None and time.monotonic() < begin + seconds:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(min(_TICK_SECONDS, seconds))
                tick()
        finally:  # also after Ctrl-C, which reaches only the process group of this process
            if status is None:
                _terminate(process)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return ProcessResult(status, texts[0], texts[1], time.monotonic() - begin)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, so that mpirun ends its ranks, and later SIGKILL to the remaining processes of the group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATION_SECONDS)


def find_programs() -> list[Program]:
    """Return the first mpirun or mpiexec on PATH, then the one beside this Python if it is another."""
    found: dict[str, Program] = {}
    for folder in (None, str(Path(sys.executable).parent)):
        path = shutil.which("mpirun", path=folder) or shutil.which("mpiexec", path=folder)
        if path is not None and os.path.realpath(path) not in found:
            answer = run_limited([path, "--version"], seconds=_VERSION_SECONDS)
            library = library_of(answer.stdout + answer.stderr)
            found[os.path.realpath(path)] = Program(path, library, is_on_path=folder is None)
    return list(found.values())


def library_of(version_text: str) -> str:
    r"""Return the library that a launcher belongs to, given the output of ``mpirun --version``.

    >>> library_of("mpirun (Open MPI) 5.0.11"), library_of("HYDRA build details:\n    Version:       4.2.1")
    ('Open MPI 5.0.11', 'MPICH 4.2.1')
    """
    for name, pattern in (
        ("Open MPI", r"\(Open MPI\) (\S+)"),
        ("Intel MPI", r"Intel\(R\) MPI Library.*Version (\S+)"),
        ("MPICH", r"HYDRA build details:\s+Version:\s+(\S+)"),
    ):
        if match := re.search(pattern, version_text):
            return f"{name} {match[1]}"
    return "of an unknown library"


def hosts_of_batch_job() -> list[str]:
    """Return the hosts of this job, if the batch system (PBS, LSF, Grid Engine) has named them in a file."""
    for variable in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE"):
        with suppress(KeyError, OSError):  # the latter after the end of the job
            lines = Path(os.environ[variable]).read_text().splitlines()
            return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))
    return []


def launch_command(program: Program, num_ranks: int, *, unbound: bool = False) -> list[str]:
    """Return the launcher with its options, up to the program.

    >>> launch_command(Program("mpiexec", "MPICH 5.0.2", True), 4)
    ['mpiexec', '-n', '4']
    """
    command = [program.path]
    if program.library.startswith("Open MPI"):
        cores = affinity.physical_cores()
        # Its slots are cores, or in a batch job the tasks of all nodes: all ranks would then start on the first one.
        is_crowded = num_ranks > len(set(cores.values()) if cores else affinity.current())
        if is_crowded and "SLURM_JOB_ID" not in os.environ and len(hosts_of_batch_job()) < 2:
            command.append("--oversubscribe")
        if unbound:
            command += ["--bind-to", "none"]
    return [*command, "-n", str(num_ranks)]


def leave_job() -> None:
    """Wait for all ranks; abort the job if torchmpi still runs on one of them after an error."""
    from ..session import runtime  # here, since it imports torch, which `torchmpi run` does not need

    comm = mpi_library.load().COMM_WORLD
    if any(comm.allgather(runtime.is_running())):
        comm.Abort(1)
    comm.Barrier()
