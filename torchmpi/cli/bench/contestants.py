"""The contestants of ``bench collectives``: torchmpi by backend, a plain copy, mpi4py, torch.distributed, Horovod."""

# ruff: noqa: D102 -- the methods are documented in Contestant
from __future__ import annotations

import datetime
import os
import socket
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.distributed
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

import torchmpi

from ...backends.selector import AVAILABLE
from ...distributed.registration import register
from ...session import mpi_library, runtime
from .job import BenchJob
from .options import AUTO, DIST, PEERS
from .workload import IN_PLACE, ROOTED, Allocate, BenchCase, Workload

Call = Callable[[], object]
COPY = "copy"
LAUNCH = "auto launch"


class Contestant(Protocol):
    """An implementation of collectives that can be timed."""

    name: str

    def why_not(self, collective: str, dtype: str) -> str | None:
        """Return the reason why it cannot run this collective here, or None."""

    def allocate(self) -> Allocate | None:
        """Return the allocator of its tensors; None: plain memory, shared by all contestants."""

    def bind(self, work: Workload, root: int) -> Call:
        """Return a call of the collective on these buffers, ready to be timed."""


class Ours:
    """torchmpi, with one backend or the automatic choice, on plain or shared tensors."""

    def __init__(self, backend: str | None, memory: str, *, asynchronous: bool, device: str = "cpu") -> None:
        self.backend, self.memory, self.asynchronous = backend, memory, asynchronous
        self.device = device
        name = f"torchmpi {backend}" if backend in PEERS else backend or AUTO
        self.name = name + ("" if memory == "plain" else f" {memory}")

    def why_not(self, collective: str, dtype: str) -> str | None:
        if self.backend is None:
            return None
        mode = "async" if self.asynchronous else "sync"
        verdict = torchmpi.collective_availability()[self.backend, collective, self.device, mode]
        return None if verdict in AVAILABLE else verdict.removeprefix("unavailable: ")

    def allocate(self) -> Allocate | None:
        if self.memory == "plain":
            return None
        return lambda numel, dtype: torchmpi.empty_shared(numel, dtype=dtype)

    def bind(self, work: Workload, root: int) -> Call:
        positional: list[Any] = [work.source]
        named: dict[str, Any] = {} if self.backend is None else {"backend": self.backend}
        is_root = work.rank == root
        if work.collective == "scatter" and not is_root:
            positional[0] = None
        if work.collective in ROOTED:
            positional.append(root)
        if work.collective not in IN_PLACE and (work.collective != "gather" or is_root):
            positional.append(work.target)
        if not self.asynchronous:
            return partial(getattr(torchmpi, work.collective), *positional, **named)
        start = partial(getattr(torchmpi, f"{work.collective}_async"), *positional, **named)
        return self._measured(start)

    def _measured(self, start: Callable[[], Any]) -> Call:
        """Return the part of an asynchronous call that is timed."""
        return lambda: start().wait()


class AsyncLaunch(Ours):
    """An asynchronous call of torchmpi until it returns, without ``wait()``."""

    def __init__(self, device: str) -> None:
        super().__init__(None, "plain", asynchronous=True, device=device)
        self.name = LAUNCH

    def _measured(self, start: Callable[[], Any]) -> Call:
        return start


def our_contestants(
    backends: Sequence[str] | None, memories: Sequence[str], *, asynchronous: bool, device: str = "cpu"
) -> list[Ours]:
    """Return torchmpi with each backend on plain tensors, and on shared ones with those requested or the default."""
    requested: Sequence[str] = (AUTO, *_available(device)) if backends is None else backends
    named = [name for name in requested if name != DIST]
    chosen = [(backend, "plain") for backend in named if "plain" in memories]
    chosen += [(backend, "shared") for backend in ((AUTO,) if backends is None else named) if "shared" in memories]
    ours = [
        Ours(None if name == AUTO else name, memory, asynchronous=asynchronous, device=device)
        for name, memory in chosen
        if device == "cpu" or memory == "plain"  # tensors of a device are not in shared memory of the host
    ]
    return [*ours, AsyncLaunch(device)] if asynchronous and device != "cpu" else ours


def _available(device_type: str) -> list[str]:
    """Return the backends that can run any collective on tensors of this device."""
    table = torchmpi.collective_availability()
    names = {name for (name, collective, device, _), verdict in table.items()
             if verdict in AVAILABLE and device == device_type and collective != "barrier"}  # fmt: skip
    return [name for name in dict.fromkeys(key[0] for key in table) if name in names]


class Copy:
    """A plain copy of the payload by all ranks concurrently: a bound for calls that write the result to memory."""

    name = COPY

    def __init__(self) -> None:
        self._target = torch.empty(0)

    def why_not(self, collective: str, dtype: str) -> str | None:
        return None

    def allocate(self) -> Allocate | None:
        return None

    def bind(self, work: Workload, root: int) -> Call:
        source = max(work.source, work.target, key=torch.Tensor.numel)
        self._target = torch.zeros_like(source)
        return partial(self._target.copy_, source)


# --- other libraries ----------------------------------------------------------------------------------------

_MPI_NAMES = {
    "allreduce": "Allreduce", "broadcast": "Bcast", "allgather": "Allgather", "reduce_scatter": "Reduce_scatter_block",
    "reduce": "Reduce", "alltoall": "Alltoall", "gather": "Gather", "scatter": "Scatter",
}  # fmt: skip
_REDUCING = ("allreduce", "reduce", "reduce_scatter")


class Peer:
    """Base of the other libraries, which use plain memory."""

    name: str

    def allocate(self) -> Allocate | None:
        return None


class MPI4Py(Peer):
    """The MPI library through mpi4py, with arrays that were made before the call."""

    name = "mpi4py"

    def __init__(self, comm: Any, *, asynchronous: bool) -> None:
        MPI = mpi_library.load()
        self._comm, self._asynchronous = comm, asynchronous
        self._in_place, self._sum = MPI.IN_PLACE, MPI.SUM

    def why_not(self, collective: str, dtype: str) -> str | None:
        if collective in _REDUCING and dtype in ("bfloat16", "float16"):
            return f"MPI cannot add {dtype}"
        return None

    def bind(self, work: Workload, root: int) -> Call:
        name = _MPI_NAMES[work.collective]
        call = getattr(self._comm, f"I{name.lower()}" if self._asynchronous else name)
        arguments = self._arguments(work, root)
        if not self._asynchronous:
            return partial(call, *arguments)
        return lambda: call(*arguments).Wait()

    def _arguments(self, work: Workload, root: int) -> tuple[Any, ...]:
        source, target = _array(work.source), _array(work.target)
        is_root = work.rank == root
        if work.collective == "allreduce":
            return self._in_place, source
        if work.collective == "broadcast":
            return source, root
        if work.collective == "reduce":
            return (self._in_place, source, self._sum, root) if is_root else (source, None, self._sum, root)
        if work.collective == "gather":
            return source, target if is_root else None, root
        if work.collective == "scatter":
            return source if is_root else None, target, root
        return source, target


class StagedMPI4Py(MPI4Py):
    """mpi4py for tensors on a GPU, with explicit staging: copy to pinned memory, communicate, copy back."""

    def why_not(self, collective: str, dtype: str) -> str | None:
        return (
            f"only allreduce is staged by hand, not {collective}"
            if collective != "allreduce"
            else super().why_not(collective, dtype)
        )

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


class TorchDistributed(Peer):
    """torch.distributed with a given process group."""

    def __init__(self, name: str, group: torch.distributed.ProcessGroup | None, *, asynchronous: bool) -> None:
        self.name, self._group, self._asynchronous = name, group, asynchronous

    def why_not(self, collective: str, dtype: str) -> str | None:
        if dtype == "int16" and self.name == "gloo":
            return "gloo does not support int16"
        return None

    def bind(self, work: Workload, root: int) -> Call:
        call = self._call(work, root)
        if not self._asynchronous:
            return call
        return lambda: call(async_op=True).wait()

    def _call(self, work: Workload, root: int) -> Callable[..., Any]:
        return partial(self._function(work, root), group=self._group)

    def _function(self, work: Workload, root: int) -> Callable[..., Any]:
        dist, source, target = torch.distributed, work.source, work.target
        is_root = work.rank == root
        if work.collective == "allreduce":
            return partial(dist.all_reduce, source)
        if work.collective == "broadcast":
            return partial(dist.broadcast, source, root)
        if work.collective == "reduce":
            return partial(dist.reduce, source, root)
        if work.collective == "gather":
            return partial(dist.gather, source, list(target.chunk(work.size)) if is_root else None, root)
        if work.collective == "scatter":
            return partial(dist.scatter, target, list(source.chunk(work.size)) if is_root else None, root)
        names = {"allgather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
        return partial(getattr(dist, names.get(work.collective, "all_to_all_single")), target, source)


class Horovod(Peer):
    """Horovod's functions for torch, in place where they exist."""

    name = "horovod"

    def __init__(self, *, asynchronous: bool) -> None:
        self._hvd, self._asynchronous = import_module("horovod.torch"), asynchronous
        self._hvd.init()

    def why_not(self, collective: str, dtype: str) -> str | None:
        if collective in ("reduce", "gather", "scatter"):
            return f"Horovod has no {collective}"
        return None

    def bind(self, work: Workload, root: int) -> Call:
        hvd, name = self._hvd, f"bench.{work.collective}"  # the same name each time: Horovod caches its negotiation
        mode = "_async" if self._asynchronous else ""
        call: Call
        if work.collective == "allreduce":
            call = partial(getattr(hvd, f"allreduce{mode}_"), work.source, name=name, op=hvd.Sum)
        elif work.collective == "broadcast":
            call = partial(getattr(hvd, f"broadcast{mode}_"), work.source, root, name=f"{name}.{root}")
        else:
            options = {"op": hvd.Sum} if work.collective == "reduce_scatter" else {}
            function = getattr(hvd, f"{work.collective.replace('_', '')}{mode}")
            call = _storing(partial(function, work.source, name=name, **options), hvd, work, mode)
            return call
        return call if not mode else lambda: hvd.synchronize(call())


def _storing(call: Callable[[], Any], hvd: Any, work: Workload, mode: str) -> Call:
    """Store the result, which Horovod allocates, in `work` so that it can be checked."""

    def run() -> None:
        result = hvd.synchronize(call()) if mode else call()
        work.target = result[0] if isinstance(result, tuple) else result

    return run


class Absent(Peer):
    """A library that is not available, with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self._reason = name, reason

    def why_not(self, collective: str, dtype: str) -> str | None:
        return self._reason

    def bind(self, work: Workload, root: int) -> Call:
        raise NotImplementedError(self._reason)


def find_peers(names: Sequence[str], job: BenchJob, *, asynchronous: bool) -> list[Contestant]:
    """Return the requested peers; unavailable ones have a reason. Collective."""
    comm, resources, is_on_host = job.comm, job.resources, job.device.type == "cpu"
    mpi4py = MPI4Py if is_on_host else StagedMPI4Py
    makers: dict[str, Callable[[], Contestant]] = {
        "mpi4py": lambda: mpi4py(comm, asynchronous=asynchronous),
        "gloo": lambda: TorchDistributed("gloo", open_group("gloo", comm, resources), asynchronous=asynchronous),
        "horovod": lambda: Horovod(asynchronous=asynchronous),
        "nccl": lambda: TorchDistributed("nccl", open_group("nccl", comm, resources), asynchronous=asynchronous),
    }
    found: list[Contestant] = []
    for name in names:
        reason = why_absent(name) if name != "nccl" else _why_no_nccl(job)
        # On all ranks or on none: the ranks may be on different machines.
        reasons = [text for text in comm.allgather(reason) if text is not None]
        found.append(Absent(name, reasons[0]) if reasons else makers[name]())
    return found


def _why_no_nccl(job: BenchJob) -> str | None:
    """Return the reason why NCCL through torch cannot be measured, the same on all ranks."""
    if job.device.type == "cpu":
        return "NCCL needs tensors on GPUs: --device cuda"
    if not torch.distributed.is_nccl_available():
        return "this torch was built without NCCL"
    devices = job.comm.allgather((runtime.current().host_name, torch.cuda.get_device_properties(job.device).uuid))
    return "ranks share a GPU, which NCCL refuses" if len({*map(str, devices)}) < job.size else None


def why_absent(name: str) -> str | None:
    """Return the reason why this process cannot use a peer, or None."""
    if name == "gloo":
        has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
        return None if has_gloo else "this torch was built without gloo"
    if name == "horovod":
        return None if find_spec("horovod") is not None else "not installed"
    return None


def open_group(backend: str, comm: Any, resources: ExitStack) -> Any:
    """Open a process group of torch.distributed over all ranks, until `resources` close. Collective over `comm`."""
    dist = torch.distributed
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # deprecated names
    register()  # torch registers an installed torchmpi itself, but this may be a checkout
    if dist.is_initialized():
        return dist.new_group(backend=backend)
    limit = datetime.timedelta(minutes=10)
    store = _store_on_host(comm, resources) if runtime.current().num_hosts == 1 else _store_between_hosts(comm)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size, timeout=limit)
    resources.callback(dist.destroy_process_group)
    return dist.group.WORLD


def _store_on_host(comm: Any, resources: ExitStack) -> Any:
    os.environ.setdefault(
        "GLOO_SOCKET_IFNAME", "lo"
    )  # the fastest interface within a host, and not reachable from others
    folder = ""
    if comm.rank == 0:
        folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="torchmpi-bench-"))
    resources.callback(comm.Barrier)  # so that the file exists until all ranks have finished
    return FileStore(os.path.join(comm.bcast(folder), "gloo"), comm.size)


def _store_between_hosts(comm: Any) -> Any:
    make = partial(TCPStore, world_size=comm.size, wait_for_workers=False)
    if comm.rank == 0:
        server = make(socket.gethostname(), 0, is_master=True)
        comm.bcast((server.host, server.port))
        return server
    host, port = comm.bcast(None)
    return make(host, port, is_master=False)
