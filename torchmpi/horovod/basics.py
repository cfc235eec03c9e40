"""Start, stop, ranks and capabilities.

All but `init`, `is_initialized` and the names that end in ``_built`` or ``_enabled`` raise ValueError before `init`.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch

from ..config import Config, parse
from ..session import api, runtime
from . import operation_table, process_sets, timeline
from .exceptions import internal_errors
from .process_sets import ProcessSet, world

__all__ = [
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "rank", "rocm_built", "shutdown", "size",
]  # fmt: skip

_SETTINGS = {
    "HOROVOD_FUSION_THRESHOLD": "bucket_bytes",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "stall_warning_seconds",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "stall_abort_seconds",
}
"""Variables of Horovod, and the settings that they have here; ``TORCHMPI_*`` takes precedence."""
_arguments: tuple[Any, Sequence[ProcessSet] | str | None] = None, None
"""Those of `init`, with which an elastic program starts again."""
_owned = {"torchmpi": False}
"""Whether ``init()`` has started torchmpi, so that ``shutdown()`` stops it."""


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start torchmpi, unless it runs already. Collective; does nothing if it was called before.

    Args:
        comm: None for all ranks; or the ranks of the job that form the world of this program, as a list or a
            communicator of mpi4py. Every rank of the job calls `init`, with the list that contains it.
        process_sets: Sets to register, the same ones on all ranks; or ``"dynamic"`` to allow `add_process_set`.

    Raises:
        ValueError: A process set exists twice, or `comm` does not contain this rank.
        TorchMPIError: As ``torchmpi.start()``.

    Example:
        hvd.init()
    """
    global _arguments
    if is_initialized():
        return
    _arguments = comm, process_sets
    if not api.is_started():
        _start()
    everyone = _communicator(comm)
    dynamic = process_sets == "dynamic" or os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"
    static = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    with internal_errors():
        _register(everyone, static, dynamic, comm)
    timeline.begin(everyone.rank)
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _register(everyone: Any, static: list[ProcessSet], dynamic: bool, comm: Any) -> None:
    process_sets.register_all(everyone, static, dynamic=dynamic)
    process_sets.global_process_set.mpi_comm = comm if hasattr(comm, "Get_group") else None


def _start() -> None:
    config = Config.from_environment()
    changed = {
        name: parse(variable, os.environ[variable], type(getattr(config, name)))
        for variable, name in _SETTINGS.items()
        if os.environ.get(variable) and f"TORCHMPI_{name.upper()}" not in os.environ
    }
    if "bucket_bytes" in changed:  # in Horovod 0 means no fusion
        changed["bucket_bytes"] = max(1, changed["bucket_bytes"])
        if "TORCHMPI_GPU_BUCKET_BYTES" not in os.environ:
            changed["gpu_bucket_bytes"] = changed["bucket_bytes"]
    api.start(config=dataclasses.replace(config, **changed))
    _owned["torchmpi"] = True


def _communicator(comm: Any) -> Any:
    """Return the communicator of the ranks that `comm` names."""
    everyone = api.communicator(0)
    if comm is None:
        return everyone
    ranks = process_sets.ranks_of_mpi_comm(comm) if hasattr(comm, "Get_group") else sorted(comm)
    if everyone.rank not in ranks:
        raise ValueError(f"init(comm={ranks}): rank {everyone.rank} is not in it. Pass the list that contains it.")
    if len(ranks) == everyone.size:
        return everyone
    # A level, so that it is the current communicator of torchmpi.nn too.
    return api.communicator(api.push_communicator(f"init(comm={ranks})"))


def shutdown() -> None:
    """Stop torchmpi, if `init` has started it. Collective; also called at the end of the program.

    Example:
        hvd.shutdown()
    """
    _forget()
    if _owned["torchmpi"] and api.is_started():
        _owned["torchmpi"] = False
        runtime.stop()


def init_again() -> None:
    """Call `init` as before, after ``recover()`` has closed the communicators. Collective."""
    _forget()
    init(*_arguments)


def _forget() -> None:
    timeline.stop_timeline()
    process_sets.unregister_all()
    operation_table.forget()


def _at_exit() -> None:
    """Leave ``stop()`` to torchmpi's exit handler, if there is one: it ends the job if other ranks are in a call."""
    if api.is_started() and runtime.current().config.abort_on_exception:
        _forget()
    else:
        shutdown()


def is_initialized() -> bool:
    """Return whether `init` has been called, and `shutdown` has not been called since."""
    try:
        world()
    except ValueError:
        return False
    return True


def rank() -> int:
    """Return the number of this rank, from 0 to ``size() - 1``."""
    return world().rank


def size() -> int:
    """Return the number of the ranks that `init` was given; all ranks of the job by default."""
    return world().size


def _hosts() -> list[int]:
    """Return the host of each rank."""
    group = world().intra
    return [group.context.hosts[rank] for rank in group.world_ranks]


def _local_ranks() -> list[int]:
    """Return the local rank of each rank."""
    hosts = _hosts()
    return [hosts[:rank].count(host) for rank, host in enumerate(hosts)]


def local_rank() -> int:
    """Return the number of this rank among those on its host, from 0 to ``local_size() - 1``."""
    return _local_ranks()[rank()]


def local_size() -> int:
    """Return the number of ranks on this host, of those that `init` was given."""
    hosts = _hosts()
    return hosts.count(hosts[rank()])


def _hosts_with_local_rank() -> list[int]:
    """Return the hosts that have a rank with the local rank of this one."""
    local = local_rank()
    return [host for host, other in zip(_hosts(), _local_ranks(), strict=True) if other == local]


def cross_rank() -> int:
    """Return the number of this host among those that have this local rank, from 0 to ``cross_size() - 1``."""
    return _hosts_with_local_rank().index(_hosts()[rank()])


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return len(_hosts_with_local_rank())


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    hosts = _hosts()
    return len({hosts.count(host) for host in hosts}) == 1


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI at the same time (``MPI_THREAD_MULTIPLE``)."""
    return world().intra.context.threaded


def mpi_enabled() -> bool:
    """Return True: the calls are those of MPI."""
    return True


def mpi_built() -> bool:
    """Return True: the calls are those of MPI."""
    return True


def gloo_enabled() -> bool:
    """Return False: ranks are started by MPI or torchrun, not by gloo."""
    return False


def gloo_built() -> bool:
    """Return False: ranks are started by MPI or torchrun, not by gloo."""
    return False


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Return whether torch has CUDA; there may be no GPU."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch has ROCm; there may be no GPU."""
    return torch.version.hip is not None


def nccl_built() -> int:
    """Return the version of NCCL in torch, a number such as 21805; 0 if torch has none."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)
