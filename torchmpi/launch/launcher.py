"""Detection of the launcher that started this process, from environment variables."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import termios
import time
import zlib
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Set by torchrun: the file in which a rank describes its failure."""


class _Variables(NamedTuple):
    """The variables that a launcher sets in each process; '' if it has none."""

    launcher: str
    rank: str
    num_ranks: str = ""
    local_rank: str = ""
    local_size: str = ""
    first_rank: int = 0


OPEN_MPI, SLURM, TORCHRUN = "Open MPI's mpirun", "Slurm's srun", "torchrun"
# The innermost launcher first: an mpirun inside a job of Slurm, LSF or PBS leaves their variables to its ranks. srun
# sets some of the variables of other launchers too, those of MPICH's with --mpi=pmi2, but not MPI_LOCALRANKID.
_LAUNCHERS = (
    _Variables(TORCHRUN, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Variables(
        OPEN_MPI,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Variables(
        "MVAPICH's mpirun",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Variables("MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Variables(
        "LSF's jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    _Variables("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    _Variables(SLURM, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    _Variables("PALS's mpiexec", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    _Variables("a launcher with PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    _Variables("a launcher with PMIx", "PMIX_RANK"),
    _Variables("LSF's blaunch", "LSF_PM_TASKID", first_rank=1),
    _Variables("PBS's pbsdsh", "PBS_VNODENUM"),
    _Variables("PBS's pbsdsh", "PBS_NODENUM"),
)
# Without these the row does not apply, although the rank is given: to a batch script (Slurm), or to another launcher.
_REQUIRED = {
    TORCHRUN: "TORCHELASTIC_RUN_ID",
    "MPICH's mpiexec": "MPI_LOCALRANKID",
    SLURM: "SLURM_STEP_NUM_TASKS",
    "PALS's mpiexec": "PALS_RANKID",
}
_ONLY_TASKS_AFTER_THE_FIRST = ("LSF's blaunch", "PBS's pbsdsh")
"""The job script has their variables too, as the first task, so that only another number shows a launch."""
MPI_INTERFACES = ("PMI_RANK", "PMI_FD", "PMI_PORT", "PMIX_RANK", "PALS_RANKID", "SLURM_MPI_TYPE", "I_MPI_PMI_LIBRARY")

RUN_VARIABLE = "TORCHMPI_RUN_PID"
"""The process id of a rank that ``torchmpi run`` started."""
_MPIRUN = ("mpirun", "prterun", "orterun", "mpiexec")

JOB_KEY_VARIABLE = "TORCHMPI_JOB_KEY"
"""What only the ranks of a job know, in the environment of each: other users cannot read that of a process."""
_LEAST_KEY_LENGTH = 16

# Below the ports that systems assign to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 20000, 12000

WITHOUT_MPI_ID = "torchmpi run"
"""The id of a run of torchrun, by which ``torchmpi run --without-mpi`` starts ranks as torchrun does."""


class Launcher(NamedTuple):
    """The launcher of a process; `name` is None if none was detected, and a number None if it is not known."""

    name: str | None
    num_ranks: int | None
    local_rank: int | None
    rank: int | None = None
    local_size: int | None = None

    @property
    def least_num_ranks(self) -> int:
        """The number of ranks, as far as this process knows it."""
        return max(self.num_ranks or 1, (self.rank or 0) + 1)

    @property
    def has_mpi_interface(self) -> bool:
        """Whether an MPI library can find the other ranks by means of the launcher."""
        if self.name == SLURM:
            return any(name in os.environ for name in MPI_INTERFACES)
        return self.name not in (None, TORCHRUN)


def detect(environment: Mapping[str, str] | None = None) -> Launcher:
    """Detect the launcher of this process.

    >>> detect({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"})
    Launcher(name="MPICH's mpiexec", num_ranks=4, local_rank=1, rank=2, local_size=None)
    >>> detect({}).name is None
    True
    """
    environment = os.environ if environment is None else environment
    for row in _LAUNCHERS:
        rank, num_ranks, local_rank, local_size = (_number(environment, name) for name in row[1:5])
        if rank is None and num_ranks is None:
            continue
        required = _REQUIRED.get(row.launcher)
        if required is not None and required not in environment:
            continue
        if rank is not None:
            rank -= row.first_rank
        if row.launcher in _ONLY_TASKS_AFTER_THE_FIRST and not rank:
            continue
        if row.launcher == SLURM:
            local_size = _local_size_of_slurm(environment)
        return Launcher(row.launcher, num_ranks, local_rank, rank, local_size)
    return Launcher(None, 1, None)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else None


def _local_size_of_slurm(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks of this host, which Slurm gives as ``4(x2),3`` for all hosts."""
    host, num_hosts = _number(environment, "SLURM_NODEID"), 0
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        num_hosts += int(times or 1)
        if host is not None and host < num_hosts:
            return int(count)
    return None


def is_rank() -> bool:
    """Return whether a launcher started this process as a rank of a job.

    The shell of an interactive Slurm job is a step with one task, and counts as not launched.
    """
    found = detect()
    if found.name == SLURM:
        return found.least_num_ranks > 1
    return found.name is not None


def torch_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as far as the launcher gives them.

    >>> torch_variables({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    {'RANK': '1', 'WORLD_SIZE': '4'}
    """
    found = detect(environment)
    numbers = {
        "RANK": found.rank,
        "WORLD_SIZE": found.num_ranks,
        "LOCAL_RANK": found.local_rank,
        "LOCAL_WORLD_SIZE": found.local_size,
    }
    return {name: str(number) for name, number in numbers.items() if found.name and number is not None}


def job_key() -> bytes:
    """Return the key of the job from the environment; b"" if there is none.

    Raises:
        LaunchError: The key is too short.
    """
    key = os.environ.get(JOB_KEY_VARIABLE, "")
    if 0 < len(key) < _LEAST_KEY_LENGTH:
        from ..errors import LaunchError  # not at the top: cli/rank_start.py loads this file alone

        raise LaunchError(
            f"{JOB_KEY_VARIABLE} has {len(key)} characters, and needs at least {_LEAST_KEY_LENGTH} random ones. "
            f"Set it to the same value for all ranks: export {JOB_KEY_VARIABLE}=$(openssl rand -hex 32)"
        )
    return key.encode()


def torch_address(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT for programs that read them, if all ranks of an MPI launcher are on this host.

    Without communication, ranks of several hosts do not know the address of the first one.
    """
    environment = os.environ if environment is None else environment
    found = detect(environment)
    if not found.has_mpi_interface or found.num_ranks is None or found.local_size != found.num_ranks:
        return {}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_of(_job_on_this_host(environment)))}


def about_missing(variable: str) -> str:
    """Return why a variable that torchrun sets is missing under another launcher, and what to do."""
    found = detect()
    text = (
        f"{found.name or 'the launcher'} does not set {variable}, as torchrun does. "
        f"`torchmpi run -n {found.least_num_ranks} PROGRAM` sets it before the program starts."
    )
    if variable.startswith("MASTER_") and found.local_size != found.num_ranks:
        return f"{text} Or set it, as ranks are on several hosts: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..."
    return f"{text} Or set TORCHMPI_AS_TORCHRUN=1: then the line `import torch` sets it, which has to come first."


def port_of(job: str) -> int:
    """Return a port for a job, the same on all of its ranks.

    >>> port_of("4711.0")
    26573
    """
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _job_on_this_host(environment: Mapping[str, str]) -> str:
    """Return what only the ranks of this job have in common: its name or, for MPICH, the process that started them."""
    if "PMIX_NAMESPACE" in environment:
        return environment["PMIX_NAMESPACE"]
    session = os.getsid(0)
    with contextlib.suppress(OSError):
        session = _parent(session)  # each rank has a session of its own
    return str(session)


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def announcement() -> str:
    """Return the line that precedes the messages of the launcher when the job is aborted; '' without a launcher."""
    name = None if os.environ.get("TORCHELASTIC_RUN_ID") == WITHOUT_MPI_ID else detect().name
    return "" if name is None else f"torchmpi: The lines below are from {name}."


def stderr_of_mpirun() -> int | None:
    """Open the standard error of Open MPI's mpirun, which discards what ranks print after Ctrl-C and SIGTERM.

    Only of an mpirun on this host, and only a terminal or a pipe: in a file, the two programs would write at positions
    of their own.
    """
    with contextlib.suppress(OSError):
        process = os.getppid() if detect().name == OPEN_MPI else 1
        while process > 1:
            # The system cuts the name of a process after 15 bytes, also within a letter.
            if Path(f"/proc/{process}/comm").read_text(errors="replace").rstrip("\n") in _MPIRUN:
                stream = f"/proc/{process}/fd/2"
                mode = os.stat(stream).st_mode
                if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
                    return os.open(stream, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
                break
            process = _parent(process)
    return None


def open_standard_streams() -> None:
    """Open /dev/null in place of standard streams that are closed, as in some daemons.

    A connection to another rank would otherwise get the number of a stream, to which libraries write their messages.
    """
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number


def set_home() -> None:
    """Set the variable HOME if it is not set, as in some services: Open MPI 5.0 would end the process."""
    home = os.path.expanduser("~")
    os.environ.setdefault("HOME", home if os.path.isabs(home) else "/")  # relative: the user is not in /etc/passwd


def wait_until_output_is_read(descriptors: Iterable[int] = (1, 2), *, limit_seconds: float = 1.0) -> None:
    """Wait until the other end of each pipe among `descriptors` has read all of it, for a limited time.

    MPICH's launcher drops output that it has not read when a rank ends the job: on a busy machine, the reason.
    """
    limit = time.monotonic() + limit_seconds
    while any(map(_num_unread, descriptors)) and time.monotonic() < limit:
        time.sleep(0.01)


def _num_unread(descriptor: int) -> int:
    """Return the number of bytes in a pipe that have not been read; 0 if `descriptor` is no pipe."""
    unread = array("i", [0])
    with contextlib.suppress(OSError):  # it is closed
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            fcntl.ioctl(descriptor, termios.FIONREAD, unread)
    return unread[0]


def write_error_file(report: str) -> None:
    """Tell torchrun the reason why this rank ends the job, which torchrun then prints as root cause."""
    path = os.environ.get(ERROR_FILE_VARIABLE, "")
    if path and not os.path.exists(path):  # torch's decorator `record` has written it
        from .. import files  # here, since torchmpi.cli.rank_start loads this module alone

        extra = {"py_callstack": report, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            files.write(path, json.dumps({"message": {"message": report, "extraInfo": extra}}))


def written_reason() -> str:
    """Return the reason that this rank has written for torchrun; '' if there is none."""
    try:
        return str(json.loads(Path(os.environ[ERROR_FILE_VARIABLE]).read_text())["message"]["message"])
    except (KeyError, OSError, ValueError, TypeError):  # TypeError: the program's own file has another form
        return ""


def is_started_by_run() -> bool:
    """Return whether ``torchmpi run`` started this process as a rank; a child process of a rank does not count."""
    return os.environ.get(RUN_VARIABLE) == str(os.getpid())


def family(name: str) -> str | None:
    """Return the family of a launcher or library; only members of one family work together.

    >>> family("Open MPI's mpirun"), family("Intel MPI 2021.9"), family("Slurm's srun")
    ('Open MPI', 'MPICH', None)
    """
    if name.startswith("Open MPI"):
        return "Open MPI"
    return "MPICH" if name.startswith(("MPICH", "Intel MPI", "MVAPICH")) else None


def are_incompatible(launcher: str | None, library: str) -> bool:
    """Return whether a launcher is known to belong to another family than the library.

    >>> are_incompatible("Open MPI's mpirun", "MPICH 5.0.2"), are_incompatible(None, "MPICH 5.0.2")
    (True, False)
    """
    families = family(launcher or ""), family(library)
    return None not in families and families[0] != families[1]


def first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's notation.

    >>> first_host("node[008-011,20],other7"), first_host("rack[2-3]-n[0-7]")
    ('node008', 'rack2-n0')
    """
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
