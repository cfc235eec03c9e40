"""Every private name of PyTorch that the backend depends on, in one file, to be tested against each new torch."""

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
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

NAME = "torchmpi"
"""The name of the backend."""
TESTED = ("2.13",)
"""Minor versions of torch with which the whole test-suite was run."""

ReduceOp: Any = c10d.ReduceOp
AllreduceOptions: Any = c10d.AllreduceOptions
BroadcastOptions: Any = c10d.BroadcastOptions

# The options of a call that is given none.
ALLGATHER: Any = c10d.AllgatherOptions()
ALLREDUCE: Any = AllreduceOptions()
ALLREDUCE_COALESCED: Any = c10d.AllreduceCoalescedOptions()
ALLTOALL: Any = c10d.AllToAllOptions()
BARRIER: Any = c10d.BarrierOptions()
BROADCAST: Any = BroadcastOptions()
GATHER: Any = c10d.GatherOptions()
REDUCE: Any = c10d.ReduceOptions()
REDUCE_SCATTER: Any = c10d.ReduceScatterOptions()
SCATTER: Any = c10d.ScatterOptions()


def warn_if_untested() -> None:
    """Say once which versions of torch were tested, if this is none of them."""
    minor = ".".join(torch.__version__.split(".")[:2])
    if minor not in TESTED:
        warnings.warn(
            f"torchmpi's torch.distributed backend uses private parts of PyTorch and was tested with torch "
            f"{', '.join(TESTED)}; this is {torch.__version__}. Most likely it works; if something is odd, look here.",
            stacklevel=2,
        )


def reduce_options(given: Any) -> Any:
    """The options of an allreduce; torch's bindings also take the operation alone."""
    if isinstance(given, AllreduceOptions):
        return given
    options = AllreduceOptions()
    options.reduceOp = given
    return options


def broadcast_options(given: Any) -> Any:
    """The options of a broadcast; torch's bindings also take the root alone."""
    if isinstance(given, BroadcastOptions):
        return given
    options = BroadcastOptions()
    options.rootRank = given
    return options


def is_asynchronous(options: Any) -> bool:
    """Whether the caller goes on before the call has ended. Older versions do not tell."""
    return bool(getattr(options, "asyncOp", True))


def is_bucket_of_ddp(tensor: torch.Tensor) -> bool:
    """Whether a call of the backend comes from DDP's reducer: flat memory of its own, handed over by `backward()`.

    Everybody else who reduces while gradients are computed does so from Python: in a hook, or a function's backward.
    """
    caller = sys._getframe(1).f_back  # of the backend's function; none in a thread of autograd's, which GPUs have
    return (
        caller is not None
        and caller.f_code is getattr(_RUN_BACKWARD, "__code__", None)
        and tensor.dim() == 1
        and tensor.nbytes == tensor.untyped_storage().nbytes()
    )


_RUN_BACKWARD = getattr(torch.autograd.graph, "_engine_run_backward", None)
_SHARED_MEMORY = "/dev/shm"


def move_to_file(tensor: torch.Tensor, at_once: int) -> tuple[torch.UntypedStorage, int, int] | None:
    """Move the memory of a tensor, and of all that share it, to a file without a name; None if that cannot be.

    Gives the storage, the file, which belongs to it, and its length. `at_once` processes may be doing the same.
    """
    system = os.statvfs(_SHARED_MEMORY)  # where torch makes the file; half of it is for others, such as data loaders
    if system.f_bavail * system.f_frsize - at_once * tensor.nbytes < system.f_blocks * system.f_frsize // 2:
        return None
    alive = weakref.ref(tensor.untyped_storage())
    storage = alive()
    if storage is None:  # a torch that makes a new object for each look: it would not tell when the memory goes
        return None
    file, num_bytes = storage._share_fd_cpu_()
    return storage, file, num_bytes


def wrap_rendezvous(scheme: str, handler: Callable[..., Iterator[Any]]) -> None:
    """Put ``handler(original, url, **options)`` before a rendezvous handler of torch."""
    # torch.distributed.rendezvous is a function of that name, which hides the module.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers = module._rendezvous_handlers
    handlers[scheme] = partial(handler, handlers[scheme])


def variable_of_caller(function: str, variable: str) -> Any:
    """A local variable of the innermost function of torch.distributed with this name that is under way, or None."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
            return frame.f_locals.get(variable)
        frame = frame.f_back
    return None


def take_name_of_mpi(create: Callable[[Any, Any], Any]) -> None:
    """Let ``init_process_group("mpi")`` mean this backend, where torch was built without its own."""
    if dist.is_mpi_available():
        return
    original = dist.Backend.__new__

    def renamed(cls: type, name: Any) -> Any:
        value = original(cls, name)
        return "torchmpi" if value == "mpi" else value

    dist.Backend.__new__ = renamed  # type: ignore[method-assign,assignment]


def event(name: str) -> AbstractContextManager[Any]:
    """A block that torch.profiler shows under this name, if it is at work."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


def as_event(name: str, task: Callable[[], Any]) -> Callable[[], Any]:
    """A task to be run elsewhere, whose time from now to its end torch.profiler shows, if it is at work."""
    if not torch.autograd._profiler_enabled():
        return task
    begun = torch.ops.profiler._record_function_enter_new(name)

    def run() -> Any:
        try:
            return task()
        finally:
            torch.ops.profiler._record_function_exit._RecordFunction(begun)

    return run


def keep_works_of_join() -> None:
    """Let a work that ``Join`` hands to C++ live as long as its model is not called again.

    DDP's reducer holds the C++ half of it only; without its Python half, waiting for it would be for ever (torch 2.13).
    """
    from torch.distributed.algorithms.join import Join

    original = Join.notify_join_context
    if hasattr(original, "keeps"):
        return

    def notify_join_context(joinable: Any) -> Any:
        work = joinable.__dict__["_torchmpi_work"] = original(joinable)
        return work

    notify_join_context.keeps = True  # type: ignore[attr-defined]
    Join.notify_join_context = staticmethod(notify_join_context)  # type: ignore[method-assign,assignment]


def keep_dynamo_out(package: str) -> None:
    """Tell torch.compile not to look into this package, once it is loaded: loading it costs a second."""
    if "torch._dynamo.trace_rules" in sys.modules:
        sys.modules["torch._dynamo.trace_rules"].add(package)  # type: ignore[attr-defined]
    else:
        sys.meta_path.insert(0, _WhenTraceRulesLoad(package))


class _WhenTraceRulesLoad(importlib.abc.MetaPathFinder):
    """Finds nothing itself; adds the package to the rules when somebody else has found and loaded them."""

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
                module.add(self._package)  # type: ignore[attr-defined]

            spec.loader.exec_module = load_and_add  # type: ignore[method-assign]
        return spec
