"""All private names of PyTorch that the backend depends on, to be tested with each new version of torch."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction, _is_torch_function_mode_enabled
from torch._C import _distributed_c10d as c10d

from ..errors import ArgumentError, LaunchError

NAME = "torchmpi"
"""The name of the backend."""
GLOO = "gloo"
_NAME_AS_GLOO = f"{NAME}_as_gloo"
"""The name under which torch finds the constructor of groups that a program asks for as gloo."""
OLDEST = (2, 7)
"""Oldest version of torch of which C++ keeps the Python half of a work."""
TESTED = ("2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
"""Minor versions of torch that were run (results/places.md): all tests with 2.13, the suite of PyTorch with 2.14."""

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
HookOpName: Any = getattr(c10d, "HookOpName", None)  # torch 2.14
FP16_COMPRESS = c10d.BuiltinCommHookType.FP16_COMPRESS
has_function_mode: Callable[[], bool] = _is_torch_function_mode_enabled
"""Whether a ``TorchFunctionMode`` of the program sees the calls of this thread."""
WithoutFunctionModes = DisableTorchFunction

Options = TypeVar("Options")


def new_options(kind: type[Options]) -> Options:
    """Return options for a call without any: a program that calls the method of a group itself reads the work.

    Older versions of torch have no asyncOp: there all calls are asynchronous.
    """
    options = kind()
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


ALLGATHER = new_options(AllgatherOptions)
ALLREDUCE = new_options(AllreduceOptions)
ALLREDUCE_COALESCED = new_options(AllreduceCoalescedOptions)
ALLTOALL = new_options(AllToAllOptions)
GATHER = new_options(GatherOptions)
REDUCE_SCATTER = new_options(ReduceScatterOptions)


class CallOptions(Protocol):
    """The attributes that the options of all calls have."""

    asyncOp: bool
    timeout: timedelta


# Not wrapped in Python functions, because each call uses them.
is_asynchronous: Callable[[CallOptions], bool]
is_asynchronous = attrgetter("asyncOp") if hasattr(ALLREDUCE, "asyncOp") else lambda options: True


def factor_of(reduction: Any) -> Any:
    """Return the factor of an operation of the kind PREMUL_SUM, which older versions of torch (2.7) do not export."""
    factor = reduction.__getstate__()[1]
    return factor.item() if isinstance(factor, torch.Tensor) else factor  # a tensor would promote 16-bit ones


def complex_original(tensor: torch.Tensor) -> torch.Tensor:
    """Return the complex tensor of which all_reduce has passed ``view_as_real()``, a copy of sparse ones; or `tensor`.

    In inference mode torch does not record the original.
    """
    base = tensor._base
    return base if base is not None and base.is_complex() and not tensor.is_complex() else tensor


def why_too_old() -> str:
    """Return the reason why torch is too old for a process group in Python; '' if it is not."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= OLDEST:
        return ""
    return (
        f"init_process_group('{NAME}') needs torch {'.'.join(map(str, OLDEST))} or newer, "
        f"and this is {torch.__version__}: before, C++ lost the results of a process group in Python, and "
        "DistributedDataParallel waited for ever"
    )


def check_version() -> None:
    """Raise if torch is too old for a process group in Python, and warn if the suite was not run with this version."""
    reason = why_too_old()
    if reason:
        raise LaunchError(f"{reason}. Install a newer torch, or use torchmpi.nn, which works with this one.")
    minor = ".".join(torch.__version__.split(".")[:2])
    if minor not in TESTED:
        warnings.warn(
            f"torchmpi's torch.distributed backend uses private parts of PyTorch and was tested with torch "
            f"{', '.join(TESTED)}; this is {torch.__version__}. Errors may be due to this version.",
            stacklevel=2,
        )


def is_bucket_of_ddp(tensor: torch.Tensor) -> bool:
    """Return whether the caller, a repeated method of a group, was called by DDP's reducer with one of its buckets.

    The reducer calls from C++ below `backward()`, with a flat tensor that owns its memory. Other reductions below
    `backward()` come from Python: from a hook, or the backward of a function.
    """
    try:
        caller = sys._getframe(4)  # of the two functions of `repeated()`, which call the method
    except ValueError:  # in a thread of autograd, which GPUs have
        return False
    return caller.f_code is _RUN_BACKWARD and tensor.dim() == 1 and tensor.nbytes == tensor.untyped_storage().nbytes()


_RUN_BACKWARD = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
_SHARED_MEMORY = "/dev/shm"


def move_to_file(tensor: torch.Tensor, at_once: int) -> tuple[torch.UntypedStorage, int, int] | None:
    """Move the storage of a tensor, with all its views, to an unlinked file; return None if that is impossible.

    Returns the storage, the descriptor of the file, which the storage owns, and its length. Up to `at_once` processes
    may do this at the same time.
    """
    system = os.statvfs(_SHARED_MEMORY)  # torch creates the file here; half of it remains for data loaders
    if system.f_bavail * system.f_frsize - at_once * tensor.nbytes < system.f_blocks * system.f_frsize // 2:
        return None
    storage = tensor.untyped_storage()
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
        handlers[scheme] = functools.partial(handler, handlers[scheme])


def leave_flight_recorder() -> None:
    """Exclude the backend from torch's flight recorder, which cannot record a process group in Python (torch 2.15).

    Its hook would raise, since no backend in C++ belongs to the group. The call log records the calls.
    """
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(NAME)


def take_name_of_mpi(create: Callable[[Any, Any], Any]) -> None:
    """Make ``mpi`` another name of this backend, and an available one, if torch was built without its own.

    ``init_process_group`` treats the value "mpi" differently from others, so the name is translated.
    """
    if dist.is_mpi_available():
        return
    dist.distributed_c10d._MPI_AVAILABLE = True
    dist.Backend._plugins[NAME.upper()] = dist.Backend._BackendPlugin(create, True)
    original = dist.Backend.__new__

    def translated(cls: type, name: Any) -> Any:
        return original(cls, _MPI.sub(NAME, name) if isinstance(name, str) else name)

    dist.Backend.__new__ = translated  # type: ignore[method-assign]


_MPI = re.compile("(?i)(?<![^:,])mpi(?![^,])")
"""The name in "mpi" and in "cpu:mpi,cuda:mpi"."""


def take_name_of_gloo(create: Callable[[Any, Any], Any], devices: list[str]) -> None:
    """Make torch construct groups by `create` where it would construct groups that have gloo for all devices.

    The name of the groups remains gloo: torch and other libraries compare it.
    """
    dist.Backend.register_backend(_NAME_AS_GLOO, create, extended_api=True, devices=devices)
    original = dist.BackendConfig.get_device_backend_map

    def constructed(config: Any) -> Any:
        backends = original(config)
        return dict.fromkeys(backends, _NAME_AS_GLOO) if set(backends.values()) == {GLOO} else backends

    dist.BackendConfig.get_device_backend_map = constructed  # type: ignore[method-assign,assignment]


def names_taken() -> list[str]:
    """Return the names of other backends that are those of this backend in this process."""
    taken = {"mpi": dist.Backend("mpi") == NAME, GLOO: _NAME_AS_GLOO in dist.Backend.backend_list}
    return [name for name, is_taken in taken.items() if is_taken]


def group_of_gloo(options: BackendOptions) -> dist.ProcessGroup:
    """Create the group that torch would create for the name ``gloo``."""
    rank, size = options.group_rank, options.group_size
    backend = dist.ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
    own_options: Any = backend.options  # the type of group_name depends on the version of torch
    own_options.global_ranks_in_group, own_options.group_name = options.global_ranks_in_group, options.group_id
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(options.store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for device in dist.Backend.backend_capability[GLOO]:
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def extend_function(name: str, extension: Callable[..., Any], holder: Any = dist.distributed_c10d) -> None:
    """Replace a function of torch.distributed, or a method of `holder`, by ``extension(original, ...)``, once."""
    original = getattr(holder, name)
    if hasattr(original, "is_extended"):
        return

    @functools.wraps(original)
    def extended(*arguments: Any, **options: Any) -> Any:
        return extension(original, *arguments, **options)

    extended.is_extended = True  # type: ignore[attr-defined]
    setattr(holder, name, extended)
    if getattr(dist, name, None) is original:
        setattr(dist, name, extended)


def implement_out_variants() -> None:
    """Implement the functional collectives with `out`, once.

    torch calls their methods of a group in C++, without the override in Python (2.13).
    """
    global _out_variants
    if _out_variants is not None or not hasattr(torch.ops._c10d_functional, "all_gather_into_tensor_out"):
        return
    _out_variants = torch.library.Library("_c10d_functional", "IMPL")  # kept, since without it torch removes them
    for device in ("CPU", "CUDA"):
        _out_variants.impl("all_gather_into_tensor_out", _all_gather_out, device)
        _out_variants.impl("reduce_scatter_tensor_out", _reduce_scatter_out, device)


def _all_gather_out(source: torch.Tensor, size: int, group: Any, *, out: torch.Tensor) -> torch.Tensor:
    return _registered(out, _backend_of(group, out)._allgather_base(out, source, ALLGATHER))


def _reduce_scatter_out(source: torch.Tensor, op: str, size: int, group: Any, *, out: torch.Tensor) -> torch.Tensor:
    options = ReduceScatterOptions()
    options.reduceOp = getattr(ReduceOp, op.upper())
    return _registered(out, _backend_of(group, out)._reduce_scatter_base(out, source, options))


def _backend_of(group: Any, tensor: torch.Tensor) -> Any:
    """Return the backend of a group, also given by its name, for the device of a tensor."""
    found = c10d._resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]
    return found._get_backend(tensor.device)


def _registered(out: torch.Tensor, work: Any) -> torch.Tensor:
    """Return the result of a call, for which ``wait_tensor`` will wait."""
    c10d._register_work(out, work)
    return out


_out_variants: torch.library.Library | None = None


def keep_works_of_join() -> None:
    """Keep each work that ``Join`` passes to C++ alive until the model is called again.

    DDP's reducer holds the C++ object of a work only, and without its Python object a wait would not end (torch 2.13).
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
    _call_with_module("torch._dynamo.trace_rules", lambda rules: rules.add(package))


def extend_checkpointing(extension: Callable[..., Any]) -> None:
    """Extend the method that begins an asynchronous checkpoint, once the modules that have it are loaded."""
    for kind in ("thread", "process"):
        holder = f"_{kind.title()}BasedAsyncCheckpointExecutor"
        extend = functools.partial(_extend_method, holder, "execute_save", extension)
        _call_with_module(f"torch.distributed.checkpoint._async_{kind}_executor", extend)


def _extend_method(holder: str, name: str, extension: Callable[..., Any], module: Any) -> None:
    extend_function(name, extension, getattr(module, holder))


def _call_with_module(name: str, use: Callable[[Any], object]) -> None:
    """Call a function with a module, now if it is loaded, otherwise when it is, as loading it may take a second."""
    if name in sys.modules:
        use(sys.modules[name])
    else:
        sys.meta_path.insert(0, _WhenLoaded(name, use))


class _WhenLoaded(importlib.abc.MetaPathFinder):
    """Finds no module itself; calls a function with a module when it is loaded."""

    def __init__(self, name: str, use: Callable[[Any], object]) -> None:
        self._name, self._use = name, use

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_use(module: ModuleType) -> None:
                load(module)
                self._use(module)

            spec.loader.exec_module = load_and_use  # type: ignore[method-assign]
        return spec
