"""The contestants of ``bench collectives``: torchmpi by backend, a plain copy, mpi4py, torch.distributed, Horovod."""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed

import torchmpi

from ...backends.selector import AVAILABLE
from ...collective_specs import IN_PLACE, SPECS
from ...distributed.registration import register
from ...launch import mpi_library
from ...nn import functional
from ...session import runtime
from .bench_job import BenchJob
from .options import AUTO, DIST, HVD, NN, PEERS
from .workload import Allocate, BenchCase, Workload

Call = Callable[..., Any]
COPY = "copy"
LAUNCH = "auto launch"


class Contestant:
    """An implementation of collectives that can be timed, or the reason why it is not available."""

    def __init__(self, name: str, reason: str | None = None) -> None:
        self.name, self._reason = name, reason

    def why_not(self, collective: str, dtype: str) -> str | None:
        """Return the reason why this contestant cannot run a collective, or None."""
        return self._reason

    def allocate(self) -> Allocate | None:
        """Return the allocator of its tensors; None: plain memory, shared by all contestants."""

    def bind(self, work: Workload, root: int) -> Call:
        """Return a call of the collective on these buffers, ready to be timed."""
        raise NotImplementedError(self.name)


class Ours(Contestant):
    """torchmpi, with one backend or the automatic choice, on plain or shared tensors."""

    def __init__(
        self, backend: str | None, memory: str, *, asynchronous: bool, device: str = "cpu", name: str = ""
    ) -> None:
        named = f"torchmpi {backend}" if backend in PEERS else backend or AUTO
        super().__init__(name or named + ("" if memory == "plain" else f" {memory}"))
        self.backend, self.memory, self.asynchronous, self.device = backend, memory, asynchronous, device

    def why_not(self, collective: str, dtype: str) -> str | None:
        if not SPECS[collective].tensors and (self.asynchronous or self.memory != "plain"):
            return f"there is no {collective}_async()" if self.asynchronous else f"a {collective} has no tensors"
        if self.backend is None:
            return None
        if SPECS[collective].kind == "message" or not SPECS[collective].tensors:
            return f"{collective} has no argument backend="
        mode = "async" if self.asynchronous else "sync"
        verdict = torchmpi.collective_availability()[self.backend, collective, self.device, mode]
        return None if verdict in AVAILABLE else verdict.removeprefix("unavailable: ")

    def allocate(self) -> Allocate | None:
        if self.memory == "plain":
            return None
        return lambda numel, dtype: torchmpi.empty_shared(numel, dtype=dtype)

    def bind(self, work: Workload, root: int) -> Call:
        call = getattr(torchmpi, f"{work.collective}_async" if self.asynchronous else work.collective)
        call = partial(call, *self._arguments(work, root), **({"backend": self.backend} if self.backend else {}))
        return (lambda: call().wait()) if self.asynchronous and self.name != LAUNCH else call

    def _arguments(self, work: Workload, root: int) -> list[Any]:
        if not work.spec.tensors:
            return []
        if work.spec.flow == "neighbor":
            return [work.source, *_neighbors(work)]
        is_root = work.rank == root
        positional: list[Any] = [work.source if work.spec.passes(is_root) else None]
        if work.spec.is_rooted:
            positional.append(root)
        if not work.is_in_place and work.spec.receives(is_root):
            positional.append(work.target)
        return positional


def our_contestants(
    backends: Sequence[str] | None, memories: Sequence[str], *, asynchronous: bool, device: str = "cpu"
) -> list[Ours]:
    """Return torchmpi with each backend on plain tensors, and on shared ones with those requested or the default."""
    named: Sequence[str] = (AUTO, *_available(device)) if backends is None else backends
    chosen = [(backend, "plain") for backend in named if "plain" in memories]
    chosen += [(backend, "shared") for backend in ((AUTO,) if backends is None else named) if "shared" in memories]
    ours = [
        Ours(None if name == AUTO else name, memory, asynchronous=asynchronous, device=device)
        for name, memory in chosen
        if device == "cpu" or memory == "plain"  # tensors of a device are not in shared memory of the host
    ]
    if asynchronous and device != "cpu":  # the time until the call returns, without wait()
        ours.append(Ours(None, "plain", asynchronous=True, device=device, name=LAUNCH))
    return ours


def through(interface: str, job: BenchJob, *, asynchronous: bool) -> Contestant:
    """Return torchmpi through one of its interfaces other than the native one. Collective."""
    if interface == DIST:
        return TorchDistributed(DIST, open_group("torchmpi", job.resources), asynchronous=asynchronous)
    if interface == HVD:
        return Horovod(HVD, "torchmpi.horovod", asynchronous=asynchronous)
    return Functional(job.device, "torchmpi.nn.functional has no asynchronous functions" if asynchronous else None)


class Functional(Contestant):
    """Functions of torchmpi.nn.functional, which return new tensors; no gradient is computed."""

    def __init__(self, device: torch.device, reason: str | None) -> None:
        super().__init__(NN, reason)
        self._device = device

    def why_not(self, collective: str, dtype: str) -> str | None:
        known = collective in functional.__all__
        return super().why_not(collective, dtype) if known else f"torchmpi.nn.functional has no {collective}"

    def allocate(self) -> Allocate:
        # Tensors of its own: each result becomes the target, which another contestant has bound.
        return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=self._device)

    def bind(self, work: Workload, root: int) -> Call:
        arguments = _neighbors(work) if work.spec.flow == "neighbor" else (root,) if work.spec.is_rooted else ()
        call = partial(getattr(functional, work.collective), work.source, *arguments)

        def run() -> None:
            work.target = call()

        return run


def _available(device_type: str) -> list[str]:
    table = torchmpi.collective_availability()
    names = (name for (name, collective, device, _), verdict in table.items()
             if verdict in AVAILABLE and device == device_type and SPECS[collective].tensors)  # fmt: skip
    return list(dict.fromkeys(names))


class Copy(Contestant):
    """A plain copy of the payload by all ranks concurrently: a bound for calls that write the result to memory."""

    def __init__(self) -> None:
        super().__init__(COPY)

    def why_not(self, collective: str, dtype: str) -> str | None:
        return None if SPECS[collective].tensors else f"a {collective} has no tensors"

    def bind(self, work: Workload, root: int) -> Call:
        source = max(work.source, work.target, key=torch.Tensor.numel)
        return partial(torch.zeros_like(source).copy_, source)


def _neighbors(work: Workload) -> tuple[int, int]:
    """Return the rank from which `sendreceive` receives, and the one to which it sends."""
    return (work.rank - 1) % work.size, (work.rank + 1) % work.size


def _on_copy(work: Workload, call: Call) -> Call:
    """Return the call after a copy of the source into the target, for functions that work in place only."""
    if work.is_in_place:
        return call

    def run(**options: Any) -> Any:
        work.target.copy_(work.source)
        return call(**options)

    return run


# --- other libraries ----------------------------------------------------------------------------------------


_OF_TORCH = (
    "allreduce", "broadcast", "reduce", "gather", "scatter", "allgather", "reduce_scatter", "alltoall", "barrier",
    "sendreceive",
)  # fmt: skip
_OF_HOROVOD = ("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "barrier")


class MPI4Py(Contestant):
    """The MPI library through mpi4py, with arrays that were made before the call."""

    def __init__(self, comm: Any, *, asynchronous: bool) -> None:
        super().__init__("mpi4py")
        self._comm, self._asynchronous, self._MPI = comm, asynchronous, mpi_library.load()

    def why_not(self, collective: str, dtype: str) -> str | None:
        return f"MPI cannot add {dtype}" if SPECS[collective].reduces and dtype in ("bfloat16", "float16") else None

    def bind(self, work: Workload, root: int) -> Call:
        name = work.spec.name_in_mpi
        call: Call = partial(
            getattr(self._comm, f"I{name.lower()}" if self._asynchronous else name), *self._arguments(work, root)
        )
        if work.spec.in_place and work.spec.flow == "root to all":
            call = _on_copy(work, call)
        return (lambda: call().Wait()) if self._asynchronous else call

    def _arguments(self, work: Workload, root: int) -> tuple[Any, ...]:
        source, target, add = _array(work.source), _array(work.target), self._MPI.SUM
        in_place = self._MPI.IN_PLACE if work.is_in_place else source
        is_root, (left, right) = work.rank == root, _neighbors(work)
        arguments: dict[str, tuple[Any, ...]] = {
            "broadcast": (target, root),
            "reduce": (in_place, target, add, root) if is_root else (source, None, add, root),
            "gather": (source, target if is_root else None, root),
            "scatter": (source if is_root else None, target, root),
            "sendreceive": (target, right, 0, left, 0),
            "barrier": (),
        }
        return arguments.get(work.collective, (in_place, target))


class StagedMPI4Py(MPI4Py):
    """mpi4py for tensors on a GPU, with explicit staging: copy to pinned memory, communicate, copy back."""

    _COLLECTIVES = ("allreduce",)

    def why_not(self, collective: str, dtype: str) -> str | None:
        if collective not in self._COLLECTIVES:
            return f"only {self._COLLECTIVES[0]} is staged by hand, not {collective}"
        return super().why_not(collective, dtype)

    def bind(self, work: Workload, root: int) -> Call:
        host = Workload(
            BenchCase(work.collective, str(work.dtype).removeprefix("torch."), work.payload_bytes),
            rank=work.rank,
            size=work.size,
            allocate=lambda numel, dtype: torch.empty(numel, dtype=dtype, pin_memory=True),
        )
        call = super().bind(host, root)

        def staged() -> None:
            host.source.copy_(work.source)
            call()
            work.target.copy_(host.target)

        return staged


def _array(tensor: torch.Tensor) -> Any:
    """View a tensor as a numpy array; bfloat16, which numpy lacks, as int16 for collectives that do not reduce."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class TorchDistributed(Contestant):
    """torch.distributed with a given process group."""

    def __init__(self, name: str, group: torch.distributed.ProcessGroup | None, *, asynchronous: bool) -> None:
        super().__init__(name)
        self._group, self._asynchronous = group, asynchronous

    def why_not(self, collective: str, dtype: str) -> str | None:
        if collective not in _OF_TORCH:
            return f"torch.distributed has no {collective}"
        return "gloo does not support int16" if dtype == "int16" and self.name == "gloo" else None

    def bind(self, work: Workload, root: int) -> Call:
        if work.spec.flow == "neighbor":
            return self._exchange(work)
        call: Call = partial(self._function(work, root), group=self._group)
        if work.collective in IN_PLACE:
            call = _on_copy(work, call)
        return (lambda: call(async_op=True).wait()) if self._asynchronous else call

    def _function(self, work: Workload, root: int) -> Call:
        dist, source, target = torch.distributed, work.source, work.target
        parts = list(max(source, target, key=torch.Tensor.numel).chunk(work.size)) if work.rank == root else None
        functions: dict[str, Call] = {
            "allreduce": partial(dist.all_reduce, target),
            "broadcast": partial(dist.broadcast, target, root),
            "reduce": partial(dist.reduce, target, root),
            "gather": partial(dist.gather, source, parts, root),
            "scatter": partial(dist.scatter, target, parts, root),
            "allgather": partial(dist.all_gather_into_tensor, target, source),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, target, source),
            "alltoall": partial(dist.all_to_all_single, target, source),
            "barrier": dist.barrier,
        }
        return functions[work.collective]

    def _exchange(self, work: Workload) -> Call:
        """Return a pair of a send and a receive; the sent tensor is copied, since the result overwrites it."""
        dist, (left, right) = torch.distributed, _neighbors(work)
        copied = torch.empty_like(work.source)
        sent = dist.P2POp(dist.isend, copied, right, self._group)
        received = dist.P2POp(dist.irecv, work.target, left, self._group)

        def run() -> None:
            copied.copy_(work.source)
            for handle in dist.batch_isend_irecv([sent, received]):
                handle.wait()

        return run


class Horovod(Contestant):
    """Functions of Horovod's interface for torch, in place where they exist."""

    def __init__(self, name: str, module: str, *, asynchronous: bool) -> None:
        super().__init__(name)
        self._hvd, self._asynchronous = import_module(module), asynchronous
        self._hvd.init()

    def why_not(self, collective: str, dtype: str) -> str | None:
        if collective not in _OF_HOROVOD:
            return f"Horovod has no {collective}"
        has_mode = SPECS[collective].has_async or not self._asynchronous
        return None if has_mode else f"Horovod has no {collective}_async"

    def bind(self, work: Workload, root: int) -> Call:
        hvd, mode = self._hvd, "_async" if self._asynchronous else ""
        if not work.spec.tensors:
            return partial(hvd.barrier)
        has_in_place = work.is_in_place and work.spec.in_place
        function = getattr(hvd, f"{work.collective.replace('_', '')}{mode}{'_' if has_in_place else ''}")
        arguments = (root,) if work.spec.is_rooted else ()
        options = {"op": hvd.Sum} if work.spec.reduces else {}
        # The same name each time: Horovod caches its negotiation.
        call = partial(function, work.source, *arguments, name=f"bench.{work.collective}.{root}", **options)

        def run() -> None:
            result = hvd.synchronize(call()) if mode else call()
            if not has_in_place:  # Horovod has allocated the result
                work.target = result[0] if isinstance(result, tuple) else result

        return run


def find_peers(names: Sequence[str], job: BenchJob, *, asynchronous: bool) -> list[Contestant]:
    """Return the requested peers; unavailable ones have a reason. Collective."""
    mpi4py = MPI4Py if job.device.type == "cpu" else StagedMPI4Py
    found: list[Contestant] = []
    for name in names:
        # On all ranks or on none: the ranks may be on different machines.
        reason = job.agreed(_why_no_nccl(job) if name == "nccl" else why_absent(name))
        if reason is not None:
            found.append(Contestant(name, reason))
        elif name == "mpi4py":
            found.append(mpi4py(job.comm, asynchronous=asynchronous))
        elif name == "horovod":
            found.append(Horovod(name, "horovod.torch", asynchronous=asynchronous))
        else:
            found.append(TorchDistributed(name, open_group(name, job.resources), asynchronous=asynchronous))
    return found


def _why_no_nccl(job: BenchJob) -> str | None:
    """Return the reason why NCCL through torch cannot be measured, the same on all ranks."""
    if job.device.type == "cpu":
        return "NCCL needs tensors on GPUs: --device cuda"
    if not torch.distributed.is_nccl_available():
        return "this torch was built without NCCL"
    shared = runtime.current().devices.first_sharing(range(job.size))
    return None if shared is None else f"ranks {shared[0]} and {shared[1]} share a GPU, which NCCL refuses"


def why_absent(name: str) -> str | None:
    """Return the reason why this process cannot use a peer, or None."""
    if name == "gloo":
        has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
        return None if has_gloo else "this torch was built without gloo"
    return "not installed" if name == "horovod" and find_spec("horovod") is None else None


def open_group(backend: str, resources: ExitStack) -> Any:
    """Open a process group of torch.distributed over all ranks, until `resources` close. Collective."""
    dist = torch.distributed
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # deprecated names
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)  # the name in older torch
    register()  # torch registers an installed torchmpi automatically, but not a checkout
    if dist.is_initialized():
        return dist.new_group(backend=backend)
    if runtime.current().num_hosts == 1:  # the fastest interface within a host, and not reachable from others
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method="mpi://", timeout=datetime.timedelta(minutes=10))
    resources.callback(dist.destroy_process_group)
    return dist.group.WORLD
