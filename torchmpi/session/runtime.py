"""Start and stop: the one object per process that owns everything."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..backends import saved_tables
from ..backends.base import Operation
from ..backends.devices import Devices, device_index, ipc_key
from ..backends.hierarchical import HierarchicalBackend
from ..backends.ipc import staging_areas
from ..backends.ipc.ipc_backend import IpcBackend
from ..backends.mpi import MPIBackend
from ..backends.nccl.nccl_backend import NcclBackend
from ..backends.p2p import P2PBackend
from ..backends.selector import Selector
from ..backends.shm import SharedMemoryBackend
from ..communicators import splits
from ..communicators.communicator import Communicator
from ..communicators.group import Group, GroupContext
from ..communicators.levels import Comm, CommunicatorStack, used
from ..config import Config
from ..errors import AlreadyStartedError, ConfigError, DeviceError, NotStartedError
from ..shared_memory import fast_path, process_vm
from ..shared_memory.shared_tensors import SharedHeap
from . import affinity, mpi_library
from .failure import FailureHandling
from .watchdog import Watchdog

Initialiser = Callable[[], Any]

running: Runtime | None = None
"""The runtime between ``start()`` and ``stop()``, else None."""
_chosen = used.get
_why_not = "torchmpi has not been started. Call mpi.start() first, or use `with mpi.started():`."


class Runtime:
    """Everything between ``start()`` and ``stop()``."""

    def __init__(self, config: Config | None, *, with_cuda: bool | None, cartesian: bool) -> None:
        self.resources = ExitStack()
        self.MPI, _ = mpi_library.initialise()
        world = self.MPI.COMM_WORLD
        self.config, self.cartesian = _agreed_config(world, config), cartesian
        config = self.config
        self.threads_allowed = self.MPI.Query_thread() == self.MPI.THREAD_MULTIPLE
        settings = _shared_settings(config, with_cuda, cartesian)
        own = _host_key(self.MPI, config), affinity.current(), settings, torch.cuda.is_available(), process_vm.probe()
        facts = world.allgather(own)
        _check_agreement([settings for _, _, settings, *_ in facts])
        if with_cuda:
            _check_cuda([has_cuda for *_, has_cuda, _ in facts])
        self.host_name = config.host_name or socket.gethostname()
        hosts = splits.host_keys([key for key, *_ in facts])
        locals_ = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
        self.num_hosts = len(set(hosts))
        self.local_rank, self.local_size = locals_.index(world.rank), len(locals_)
        self.context = GroupContext(
            self.MPI, hosts, check=config.check, threaded=self.threads_allowed, slot_bytes=config.slot_bytes
        )
        self.communicators = CommunicatorStack(world, self.context)
        self.world: Group = self.communicators.levels[0].intra
        self.resources.callback(self.communicators.free)
        self.heap = SharedHeap(self.local_size)
        self.resources.callback(self.heap.close)
        self._handle_failures()
        self.device = self._pick_device(with_cuda)
        has_cuda = with_cuda is not False and any(has_cuda for *_, has_cuda, _ in facts)
        self.devices = Devices.gather(world, hosts, self.device, has_cuda=has_cuda)
        self.selector = Selector(self._backends({rank: facts[rank][-1] for rank in locals_}), self.world, config)
        self.binding = self._bind([facts[rank][1] for rank in locals_])
        cores = frozenset.union(*(facts[rank][1] for rank in locals_))
        self.context.is_crowded = self.local_size > len(cores)
        self.job = saved_tables.describe_job(hosts, len(cores), self.local_size, mpi_library.short_version(self.MPI))
        self.selector.load_saved(self.job)
        self._watch()

    def _backends(self, neighbours: Mapping[int, process_vm.Probe]) -> dict[str, Any]:
        shared = SharedMemoryBackend(self.config, self.heap, self._say)
        nccl = NcclBackend(self.config, self.devices)
        reads = self.config.read_directly and not shared.problem and process_vm.can_read(neighbours.values())
        offers = self.MPI.COMM_WORLD.allgather((shared.problem, nccl.offer(), reads))
        nccl.agree([offer for _, offer, _ in offers])
        # All ranks or none: a call must go the same way everywhere.
        for rank, (problem, *_) in enumerate(offers):
            shared.problem = shared.problem or (problem and f"rank {rank} cannot: {problem}")
        if all(reads for *_, reads in offers):
            self.context.processes = {rank: probe.process for rank, probe in neighbours.items()}
        if shared.kernels:
            fast_path.build(used, enabled=self.config.fast_path)
        for problem in sorted({shared.problem, *self.context.problems} - {""}):
            if self.world.rank == 0 and self.config.slot_bytes:
                self._say(f"no shared memory between ranks, so that MPI moves everything: {problem}")
        return {
            "mpi": MPIBackend(self.config, is_cuda_aware=mpi_library.is_cuda_aware()),
            "shm": shared,
            "p2p": P2PBackend(self.config),
            "hierarchical": HierarchicalBackend(self.config, self._bind_step),
            "nccl": nccl,
            "ipc": IpcBackend(self.config, self.devices, self._why_no_ipc()),
        }

    def _why_no_ipc(self) -> str:
        """Whether processes of this job can share memory of their GPUs is found out by trying: '' if they can."""
        if not (all(self.devices.uuids) and self.config.staging_bytes and self.config.slot_bytes):
            return ""  # for other reasons it is not offered anyway
        world = self.MPI.COMM_WORLD
        host = world.Split(self.context.hosts[world.rank], world.rank)
        make_device = partial(staging_areas.CudaDevice, self.device.index)
        problem = staging_areas.trial(host, make_device) if host.size > 1 else ""
        host.Free()
        found = [f"rank {rank}: {text}" for rank, text in enumerate(world.allgather(problem)) if text]
        return found[0] if found else ""

    def _bind_step(
        self, group: Group, collective: str, dtype: torch.dtype | None, op: str | None, device_type: str
    ) -> Operation:
        return self.selector.bind(group, collective, dtype, op, device_type=device_type)

    @property
    def can_share(self) -> bool:
        """Whether ranks of one host can reach tensors of each other."""
        return self.selector.backends["shm"].why_not("allreduce", "cpu") is None

    def empty_shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory that the other ranks of this host can reach, if there is any to be had."""
        if self.can_share:
            try:
                return self.heap.empty(shape, dtype)
            except OSError:  # no more descriptors, or the memory limit of a container
                pass
        return torch.empty(shape, dtype=dtype, device="cpu")

    def _say(self, message: str) -> None:
        if self.config.verbose:
            print(f"torchmpi: {message}", file=sys.stderr, flush=True)

    def _watch(self) -> None:
        """Start the watchdog: without THREAD_MULTIPLE it may not send, and asks no other host."""
        comm = None
        if self.num_hosts > 1 and self.threads_allowed:
            comm = self.MPI.COMM_WORLD.Dup()
            self.resources.callback(comm.Free)
        watchdog = Watchdog(self.context, self.config, self.failures.end_job, comm=comm)
        watchdog.start()
        self.resources.callback(watchdog.stop)

    def _handle_failures(self) -> None:
        self.failures = FailureHandling(self.world, stop)
        if self.config.abort_on_exception:
            self.failures.install()
            self.resources.callback(self.failures.uninstall)
            self.resources.callback(mpi_library.watch_ranks(self.MPI, self.failures.end_job))

    def _bind(self, masks: list[frozenset[int]]) -> str:
        """Give this rank its own cores if nobody has, and torch as many threads; says what was done."""
        before, cores = affinity.current(), affinity.physical_cores()
        plan = affinity.plan_binding(masks, cores=cores) if self.config.bind == "auto" else None
        if plan is not None and affinity.bind(plan[self.local_rank]):
            self.resources.callback(affinity.bind, before)
            mask, num_sharing, binding = plan[self.local_rank], 1, "one set of cores per rank, bound by torchmpi"
        else:
            mask = before
            num_sharing = sum(bool(mask & other) for other in masks)
            binding = (
                "cores as the launcher gave them"
                if num_sharing == 1
                else f"{num_sharing} ranks share {len(mask)} cores"
            )
        self.resources.callback(torch.set_num_threads, torch.get_num_threads())
        share = max(1.0, affinity.cpu_quota() / self.local_size)
        threads = min(affinity.torch_threads(mask, num_sharing, cores=cores), share)
        self.num_threads = self.config.threads or int(threads)
        torch.set_num_threads(self.num_threads)
        return binding

    def _pick_device(self, with_cuda: bool | None) -> torch.device:
        if with_cuda is False or not torch.cuda.is_available():
            return torch.device("cpu")
        index = device_index(self.local_rank, torch.cuda.device_count())
        assert index is not None
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def make_levels(self, custom: Initialiser | None, collective: Initialiser | None, *, ipc_groups: bool) -> None:
        """The caller's levels, then hosts, then (with CUDA) GPUs that reach each other; level 0 stays current."""
        if custom is not None:
            custom()
        if collective is not None:
            collective()
        else:
            self.communicators.push(str(self.context.hosts[self.world.rank]), name=f"host {self.host_name}")
            if self.num_hosts > 1:
                self.failures.neighbours = self.communicators.current.intra
            if self.device.type == "cuda" and ipc_groups:
                self.communicators.push(ipc_key(self.device), name=f"ipc {self.host_name}")
        self.communicators.set_current(0)

    def summary(self) -> str:
        """What was chosen, in one line."""
        hosts = f"{self.num_hosts} host" + "s" * (self.num_hosts > 1)
        ranks = f"{self.world.size} rank" + "s" * (self.world.size > 1)
        threads = f"{self.num_threads} torch thread" + "s" * (self.num_threads > 1)
        level = mpi_library.thread_level(self.MPI)
        tuned = ", tuned" if self.selector.tuned else ""
        overlap = "" if self.threads_allowed else f" (only THREAD_{level}: asynchronous calls do not overlap)"
        return (
            f"torchmpi {__version__}: {ranks} on {hosts}, {mpi_library.short_version(self.MPI)}{overlap}, "
            f"device {self.device}, {threads} per rank, {self.binding}{tuned}"
        )

    def close(self) -> None:
        """Finish what is under way, agree that this is the end, and give everything back in reverse order."""
        for group in list(self.context.groups):
            group.drain()
        self.world.call_action("stop", self.world.comm.Barrier)
        self.resources.close()


def start(
    with_cuda: bool | None = None,
    *,
    ipc_groups: bool = True,
    custom_communicator_init: Initialiser | None = None,
    cartesian: bool = False,
    collective_communicator: Initialiser | None = None,
    config: Config | None = None,
) -> None:
    """Start torchmpi on all ranks: MPI, cores, device, communicators. Collective.

    `with_cuda` None takes CUDA where torch and the host have it. `custom_communicator_init` may push levels of its own
    below the world; `collective_communicator` replaces the default levels (hosts, and with `ipc_groups` groups of
    GPUs). `cartesian` lets collectives over a span use two steps where the groups are equal; otherwise they
    use three, as on a tree. `config` overrides the environment.

        import torchmpi as mpi
        mpi.start()
        print(mpi.rank(), "of", mpi.size())
        mpi.stop()
    """
    global running
    if running is not None:
        raise AlreadyStartedError(
            f"rank {running.world.rank}: torchmpi is already started. Call mpi.stop() before starting it again "
            "(a start() or `with mpi.started()` that raised leaves it started, since stopping is collective)."
        )
    running = Runtime(config, with_cuda=with_cuda, cartesian=cartesian)
    running.make_levels(custom_communicator_init, collective_communicator, ipc_groups=ipc_groups)
    if running.world.rank == 0 and running.config.verbose:
        print(running.summary(), file=sys.stderr, flush=True)


def stop() -> None:
    """Finish what is under way and give everything back. Collective; a second call is harmless.

    MPI itself is finalized when the interpreter exits, if it was started here: so ``start()`` may follow again.
    """
    global running, _why_not
    if running is None:
        return
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit) and running.world.size > 1:
        running.failures.announce(error)
    running.close()
    running = None
    _why_not = "torchmpi has been stopped. Call mpi.start() again before using it."


def current() -> Runtime:
    """The running runtime, or a refusal."""
    if running is None:
        raise NotStartedError(_why_not)
    return running


def communicator(comm: Comm) -> Communicator:
    """The communicator meant by a ``comm=`` argument of a verb."""
    if comm is None and running is not None:
        return running.communicators.default if _chosen() is None else running.communicators.current
    return current().communicators.find(comm)


def is_running() -> bool:
    """Whether ``start()`` has been called and ``stop()`` has not."""
    return running is not None


def _forget_in_forked_child() -> None:
    global running, _why_not
    fast_path.invalidate_in_child()
    if running is not None:
        running = None
        _why_not = (
            "This process was forked from a rank and is none itself (a DataLoader worker?). Communicate in the "
            "main process only, "
            "or start workers with multiprocessing_context='spawn'."
        )


os.register_at_fork(after_in_child=_forget_in_forked_child)


def _agreed_config(world: Any, given: Config | None) -> Config:
    """The settings of this rank. A wrong one on any rank is refused on all, which would otherwise wait for it."""
    problem = ""
    try:
        config = given or Config.from_environment()
    except ConfigError as error:
        problem = str(error)
    problems = world.allgather(problem)
    for rank, text in enumerate(problems):
        if text:
            raise ConfigError(f"rank {rank}: {text}")
    return config


def _host_key(MPI: Any, config: Config) -> str:
    """Ranks with equal keys share a host, and memory: a name alone may occur twice (containers, cloud images)."""
    if config.host_name:
        return config.host_name
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED, MPI.COMM_WORLD.rank)
    first = node.bcast(MPI.COMM_WORLD.rank)
    node.Free()
    return f"{socket.gethostname()} {boot} {first}"


def _shared_settings(config: Config, with_cuda: bool | None, cartesian: bool) -> dict[str, object]:
    """What must be the same on all ranks for their calls to fit together."""
    names = ("check", "message_bytes", "pipeline_bytes", "bucket_bytes", "slot_bytes", "backend", "hierarchical")
    return {name: getattr(config, name) for name in names} | {
        "with_cuda": with_cuda,
        "cartesian": cartesian,
        "version": __version__,
    }


def _check_agreement(settings: list[dict[str, object]]) -> None:
    for rank, other in enumerate(settings):
        for name, value in settings[0].items():
            if other[name] != value:
                raise ConfigError(
                    f"The ranks were started with different settings: {name} is {value!r} on rank 0 and "
                    f"{other[name]!r} on rank "
                    f"{rank}. Set it the same everywhere (mpirun -x, or start(config=...))."
                )


def _check_cuda(has_cuda: list[bool]) -> None:
    """All ranks see all answers, so all refuse together."""
    if not all(has_cuda):
        without = ", ".join(str(rank) for rank, has in enumerate(has_cuda) if not has)
        raise DeviceError(
            f"start(with_cuda=True), but torch sees no CUDA device on rank {without}. Check CUDA_VISIBLE_DEVICES and "
            "`torchmpi doctor`, or leave with_cuda out to use the CPU."
        )
