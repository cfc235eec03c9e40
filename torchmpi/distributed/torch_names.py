"""All private names of PyTorch that the backend depends on, to be tested with each new version of torch."""

from __future__ import annotations

import importlib
import importlib.abc
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ..errors import ArgumentError, LaunchError

NAME = "torchmpi"
"""The name of the backend."""
OLDEST = (2, 7)
"""Oldest version of torch of which C++ keeps the Python half of a work."""
TESTED = ("2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
"""Minor versions of torch that were run: all tests with 2.13, those of docs/places.md with the others."""

Store = c10d.Store
HashStore = c10d.HashStore
ReduceOp: Any = c10d.ReduceOp  # torch declares its members without their values
BackendOptions = c10d._DistributedBackendOptions
AllgatherOptions = c10d.AllgatherOptions
AllreduceOptions = c10d.AllreduceOptions
AllreduceCoalescedOptions = c10d.AllreduceCoalescedOptions
AllToAllOptions = c10d.AllToAllOptions
BarrierOptions = c10d.BarrierOptions
BroadcastOptions = c10d.BroadcastOptions
GatherOptions = c10d.GatherOptions
ReduceOptions = c10d.ReduceOptions
ReduceScatterOptions = c10d.ReduceScatterOptions
ScatterOptions = c10d.ScatterOptions

# Options of calls without options.
ALLGATHER = AllgatherOptions()
ALLREDUCE = AllreduceOptions()
ALLREDUCE_COALESCED = AllreduceCoalescedOptions()
ALLTOALL = AllToAllOptions()
BARRIER = BarrierOptions()
BROADCAST = BroadcastOptions()
GATHER = GatherOptions()
REDUCE = ReduceOptions()
REDUCE_SCATTER = ReduceScatterOptions()
SCATTER = ScatterOptions()


class CallOptions(Protocol):
    """The attributes that the options of all calls have."""

    asyncOp: bool


# Not wrapped in Python functions, because each call uses them. Older versions of torch have no asyncOp.
is_asynchronous: Callable[[CallOptions], bool]
is_asynchronous = attrgetter("asyncOp") if hasattr(ALLREDUCE, "asyncOp") else lambda options: True
profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def factor_of(reduction: Any) -> Any:
    """Return the factor of an operation of the kind PREMUL_SUM, which older versions of torch (2.7) do not export."""
    return reduction.__getstate__()[1]


def check_version() -> None:
    """Raise if torch is too old for a process group in Python, and warn if the suite was not run with this version."""
    minor = ".".join(torch.__version__.split(".")[:2])
    if tuple(map(int, minor.split("."))) < OLDEST:
        raise LaunchError(
            f"init_process_group('{NAME}') needs torch {'.'.join(map(str, OLDEST))} or newer, "
            f"and this is {torch.__version__}: before, C++ lost the results of a process group in Python, and "
            "DistributedDataParallel waited for ever. Install a newer torch, or use torchmpi.nn, which works "
            "with this one."
        )
    if minor not in TESTED:
        warnings.warn(
            f"torchmpi's torch.distributed backend uses private parts of PyTorch and was tested with torch "
            f"{', '.join(TESTED)}; this is {torch.__version__}. Errors may be due to this version.",
            stacklevel=2,
        )


def is_bucket_of_ddp(tensor: torch.Tensor) -> bool:
    """Return whether the caller, a method of the process group, was called by DDP's reducer with one of its buckets.

    The reducer calls from C++ below `backward()`, with a flat tensor that owns its memory. Other reductions below
    `backward()` come from Python: from a hook, or the backward of a function.
    """
    caller = sys._getframe(1).f_back  # None in a thread of autograd, which GPUs have
    return (
        caller is not None
        and caller.f_code is getattr(_RUN_BACKWARD, "__code__", None)
        and tensor.dim() == 1
        and tensor.nbytes == tensor.untyped_storage().nbytes()
    )


_RUN_BACKWARD = getattr(torch.autograd.graph, "_engine_run_backward", None)
_SHARED_MEMORY = "/dev/shm"


def move_to_file(tensor: torch.Tensor, at_once: int) -> tuple[torch.UntypedStorage, int, int] | None:
    """Move the storage of a tensor, with all its views, to an unlinked file; return None if that is impossible.

    Returns the storage, the descriptor of the file, which the storage owns, and its length. Up to `at_once` processes
    may do this at the same time.
    """
    system = os.statvfs(_SHARED_MEMORY)  # torch creates the file here; half of it remains for data loaders
    if system.f_bavail * system.f_frsize - at_once * tensor.nbytes < system.f_blocks * system.f_frsize // 2:
        return None
    alive = weakref.ref(tensor.untyped_storage())
    storage = alive()
    if storage is None:  # torch before 2.1 makes a new object each time: its end would not be that of the memory
        return None
    file, num_bytes = storage._share_fd_cpu_()
    return storage, file, num_bytes


class _BackendName:
    """An attribute of ``dist.Backend``: the name of a backend, and a function to call when the name is read."""

    def __init__(self, name: str, when_read: Callable[[], None]) -> None:
        self._name, self._when_read = name, when_read

    def __get__(self, instance: object, owner: type) -> str:
        self._when_read()
        return self._name


def call_when_named(action: Callable[[], None]) -> None:
    """Call `action` whenever a program names the backend.

    ``init_process_group`` looks its argument up in ``dist.Backend`` before the rendezvous, also one with devices.
    """
    devices = (f"cpu:{NAME}", f"cuda:{NAME}")
    for name in (NAME, *devices, ",".join(devices), ",".join(reversed(devices))):
        setattr(dist.Backend, name.upper(), _BackendName(name, action))


class _Mixture(str):
    """The name of a mixture of backends. torch compares names when it looks them up, before it starts anything."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        raise ArgumentError(
            f"the backend {self[:]!r} mixes torchmpi with others, which torch cannot do: it would use torchmpi "
            "for all devices. Use 'torchmpi' alone, which takes CPU and CUDA tensors, or the others without it."
        )


def refuse_mixtures() -> None:
    """Raise if a program asks for this backend for one device and for another backend for the other.

    torch would ignore the other backend, and use a process group in Python for all devices.
    """
    for other in set(dist.Backend.backend_list) - {NAME, dist.Backend.UNDEFINED}:
        for on_cpu, on_cuda in ((NAME, other), (other, NAME)):
            for name in (f"cpu:{on_cpu},cuda:{on_cuda}", f"cuda:{on_cuda},cpu:{on_cpu}"):
                setattr(dist.Backend, name.upper(), _Mixture(name))


def wrap_rendezvous(scheme: str, handler: Callable[..., Iterator[Any]]) -> None:
    """Replace a rendezvous handler of torch by ``handler(original, url, **options)``, once."""
    # torch.distributed.rendezvous is a function of that name, which hides the module.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    if getattr(handlers[scheme], "func", None) is not handler:
        handlers[scheme] = partial(handler, handlers[scheme])


def leave_flight_recorder() -> None:
    """Exclude the backend from torch's flight recorder, which cannot record a process group in Python (torch 2.15).

    Its hook would raise, since no backend in C++ belongs to the group. The call log records the calls.
    """
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(NAME)


def take_name_of_mpi() -> None:
    """Make ``init_process_group("mpi")`` use this backend, if torch was built without its own."""
    if dist.is_mpi_available():
        return
    original = dist.Backend.__new__

    def renamed(cls: type, name: Any) -> Any:
        value = original(cls, name)
        return dist.Backend.TORCHMPI if value == "mpi" else value  # type: ignore[attr-defined]

    dist.Backend.__new__ = renamed  # type: ignore[method-assign]


def event(name: str) -> AbstractContextManager[Any]:
    """Return a block that torch.profiler records under this name, if it is active."""
    return torch.profiler.record_function(name) if profiler_enabled() else nullcontext()


def as_event(name: str, task: Callable[[], Any]) -> Callable[[], Any]:
    """Return a task for another thread; torch.profiler records the time from now to its end."""
    begun = torch.ops.profiler._record_function_enter_new(name)

    def run() -> Any:
        try:
            return task()
        finally:
            torch.ops.profiler._record_function_exit._RecordFunction(begun)

    return run


def keep_works_of_join() -> None:
    """Keep each work that ``Join`` passes to C++ alive until the model is called again.

    DDP's reducer holds the C++ half of the work only, and without its Python half a wait would not end (torch 2.13).
    """
    from torch.distributed.algorithms.join import Join

    original = Join.notify_join_context
    if hasattr(original, "keeps"):
        return

    def notify_join_context(joinable: Any) -> Any:
        work = joinable.__dict__["_torchmpi_work"] = original(joinable)
        return work

    notify_join_context.keeps = True  # type: ignore[attr-defined]
    Join.notify_join_context = staticmethod(notify_join_context)  # type: ignore[method-assign]


def keep_dynamo_out(package: str) -> None:
    """Exclude a package from torch.compile's tracing, once its rules are loaded: loading them takes a second."""
    if "torch._dynamo.trace_rules" in sys.modules:
        sys.modules["torch._dynamo.trace_rules"].add(package)
    else:
        sys.meta_path.insert(0, _WhenTraceRulesLoad(package))


class _WhenTraceRulesLoad(importlib.abc.MetaPathFinder):
    """Finds no module itself; adds the package to the rules when they are loaded."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torch._dynamo.trace_rules":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_add(module: ModuleType) -> None:
                load(module)
                module.add(self._package)

            spec.loader.exec_module = load_and_add  # type: ignore[method-assign]
        return spec
