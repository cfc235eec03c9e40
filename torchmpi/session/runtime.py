"""``start()`` and ``stop()``, and the :class:`Runtime`, which owns all resources of a process between them."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch

from .. import timeline
from .._version import __version__
from ..backends import saved_tables
from ..backends.base import Backend
from ..backends.gpus import Devices, ipc_key
from ..backends.job_facts import JobFacts, load_backends, make_backends
from ..backends.selector import Selector
from ..backends.shm import SharedMemoryBackend
from ..communicators import release, splits
from ..communicators.call_log import CallLog
from ..communicators.communicator import Communicator
from ..communicators.conditions import on_all
from ..communicators.flight_record import FlightRecord, as_ranges
from ..communicators.group import Comparison, Group, GroupContext
from ..communicators.levels import Comm, CommunicatorStack
from ..communicators.levels import used as communicator_in_use
from ..communicators.plan import Run
from ..config import Config
from ..errors import (
    AlreadyStartedError,
    ConfigError,
    KeywordError,
    LaunchError,
    NotStartedError,
    RankLostError,
    TorchMPIError,
    kind_of,
    set_rank,
)
from ..launch import affinity, launcher, mpi_library, network
from ..launch.start_watch import StartWatch
from ..log import HOST, logger, set_place
from ..other_names import refuses_keywords, unknown_keyword
from ..shared_memory import fast_path, kernels, process_vm, read_only
from ..shared_memory.kernels import no_garbage_collection
from ..shared_memory.shared_tensors import SharedHeap
from ..supervision import children, clock_samples, host_ring, job_metrics, job_observers
from ..supervision.failure import FailureHandling
from ..supervision.heartbeat import Heartbeat
from ..supervision.late_ranks import LateRanks
from ..supervision.lost_ranks import LossWatch
from ..supervision.program_lines import location
from ..supervision.status_exchange import StatusExchange
from ..supervision.watchdog import Watchdog
from ..timeline import observer, torch_profiler
from . import mpi_progress
from .devices import about_gpu_backends, check_cuda, choose_device
from .rank_info import RankInfo, RankPlace, check_settings, has_rdma, place_of, shared_settings

Initializer = Callable[[], Any]

running: Runtime | None = None
"""The runtime between ``start()`` and ``stop()``, else None."""
_has_started = False
"""Whether a start has been completed."""
_is_after_loss = False
"""Whether ranks have been lost since the last complete start."""
_get_communicator_in_use = communicator_in_use.get  # bound once: every call of a collective uses it
_not_running_reason = "torchmpi has not been started. Call mpi.start() first, or use `with mpi.started():`."


continued_by: set[str] = set()
"""The modules of what lives on when a rank is lost: their `continue_all()` is called on the ranks of the next start."""


class Runtime:
    """All resources between ``start()`` and ``stop()``, acquired in the order of the methods called here."""

    def __init__(
        self, config: Config | None, *, with_cuda: bool | None, cartesian: bool = False, ipc_groups: bool = True
    ) -> None:
        self.resources = ExitStack()
        self.arguments: dict[str, Any] = {}
        """The arguments of ``start()``, with which ``recover()`` starts again."""
        self.is_closing = False
        """Whether all ranks have entered ``stop()``, so that none enters it again, not even after an error."""
        try:
            self._acquire(config, with_cuda, cartesian, ipc_groups)
        except Exception as error:
            if reason := mpi_library.loss_behind_error():  # recover() tries again
                self.resources.close()
                raise RankLostError(f"{reason}, during start().") from error
            raise

    def _acquire(self, config: Config | None, with_cuda: bool | None, cartesian: bool, ipc_groups: bool) -> None:
        self.cartesian, self.ipc_groups = cartesian, ipc_groups
        launcher.open_standard_streams()
        with StartWatch(config):  # not longer: the first start on a machine may compile for minutes
            self.MPI = mpi_library.initialize()
        library = mpi_library.abilities(self.MPI)
        library.take_place(_prepare_spare)
        self.joins = library.is_newcomer and not _has_started
        """Whether this rank was a spare until now, or is new."""
        with StartWatch(config):
            self.config = agreed_config(self.MPI.COMM_WORLD, config)
            if self.config.on_lost_rank == "raise" and (problem := mpi_library.why_no_recovery(self.MPI)):
                raise ConfigError(problem)
            if self.config.on_lost_rank == "raise":
                mpi_library.abilities(self.MPI).before_groups()
            self.threads_allowed = self.MPI.Query_thread() == self.MPI.THREAD_MULTIPLE
            ranks = self._exchange_information(with_cuda)
        hosts = self._group_by_host([rank.place for rank in ranks])
        host_names = [rank.place.host.partition(" ")[0] for rank in ranks]
        self._open_world(hosts, job=ranks[0].process.value)
        self.context.sends_whole = all(rank.has_rdma for rank in ranks)
        self._handle_failures()
        self._choose_devices(hosts, with_cuda, has_cuda=any(rank.has_cuda for rank in ranks))
        own = ranks[self.world.rank].place
        neighbors = {rank: info for rank, info in enumerate(ranks) if hosts[rank] == hosts[self.world.rank]}
        processes = {rank: info.process for rank, info in neighbors.items()}
        self.failures.watch({rank: probe.process for rank, probe in processes.items()})
        self.selector = Selector(self._backends(processes), self.world, self.config)
        self.context.make_comparison = self._comparison
        self.context.make_reduction = self._reduction
        masks = {rank: info.cores for rank, info in enumerate(ranks) if info.place.machine == own.machine}
        self.binding = self._bind(list(masks.values()), list(masks).index(self.world.rank))
        self._load_tuning(hosts, num_ranks=len(masks), num_cores=len(frozenset.union(*masks.values())))
        in_groups = affinity.in_several_autogroups(probe.process for probe in processes.values())
        self.context.sleeps_before_mpi = self.context.is_crowded and in_groups
        self._start_watchdog(hosts, host_names)
        if self.num_hosts > 1 and self.threads_allowed and mpi_library.abilities(self.MPI).calls_library:
            self.resources.callback(mpi_progress.start(self.MPI))
        clock_samples.provide_timeline(self.world, self._described())
        self.resources.callback(timeline.set_job, None)
        self.resources.callback(observer.close_all)
        torch_profiler.watch()
        self.metrics = partial(job_metrics.of, self.context, self.world.rank, self.host_name)
        self.flight_record.note_ticks()  # the second time: this rank may be killed before the watchdog does so

    def _described(self) -> dict[str, Any]:
        """Describe this rank for the readers of a timeline."""
        return {
            "rank": self.world.rank, "size": self.world.size, "host": self.host_name, "process": os.getpid(),
            "local_rank": self.local_rank, "num_hosts": self.num_hosts, "version": __version__,
            "mpi": mpi_library.short_version(self.MPI), "hierarchical": self.config.hierarchical,
            "bucket_bytes": self.config.bucket_bytes_on(self.device.type),
        }  # fmt: skip

    @property
    def observed(self) -> observer.ObservedJob:
        ranks = self.world.rank, self.local_rank
        return observer.ObservedJob(self.config, *ranks, self.host_name, self.world.comm, self.metrics)

    def _exchange_information(self, with_cuda: bool | None) -> list[RankInfo]:
        """Gather the information of all ranks, and raise on all of them if it is inconsistent."""
        settings = shared_settings(
            self.config, with_cuda=with_cuda, cartesian=self.cartesian, ipc_groups=self.ipc_groups
        )
        place, world = place_of(self.config), self.MPI.COMM_WORLD
        cores, has_cuda = affinity.current(), torch.cuda.is_available()
        own = RankInfo(place, cores, settings, has_cuda, process_vm.probe(), has_rdma())
        ranks: list[RankInfo] = world.allgather(own)
        if not all(rank.place.is_unique for rank in ranks):
            node = world.Split_type(self.MPI.COMM_TYPE_SHARED, world.rank)
            own = own._replace(place=place_of(self.config, first=node.bcast(world.rank)))
            node.Free()
            ranks = world.allgather(own)
        mpi_library.remove_attached_segments()  # all ranks have left MPI_Init
        check_settings([rank.settings for rank in ranks])
        if with_cuda:
            check_cuda([rank.has_cuda for rank in ranks])
        return ranks

    def _group_by_host(self, places: Sequence[RankPlace]) -> list[int]:
        """Find the local rank; return the host of each rank, where containers of a host count as hosts."""
        own = places[self.MPI.COMM_WORLD.rank]
        on_host = [rank for rank, place in enumerate(places) if place.host == own.host]
        hosts = list(splits.host_keys([place.memory for place in places]))
        self.host_name = self.config.host_name or socket.gethostname()
        self.num_hosts = len(set(hosts))
        self.local_rank, self.local_size = on_host.index(self.MPI.COMM_WORLD.rank), len(on_host)
        if len({place.host for place in places}) < self.num_hosts and self.MPI.COMM_WORLD.rank == 0:
            self._log_info("ranks under one host name are in containers that share no memory: each counts as a host")
        return hosts

    def _open_world(self, hosts: Sequence[int], *, job: int) -> None:
        set_place(self.MPI.COMM_WORLD.rank, self.host_name)
        set_rank(self.MPI.COMM_WORLD.rank)
        self.resources.callback(set_place, None, HOST)
        self.resources.callback(set_rank, None)
        check, slot_bytes = self.config.check, self.config.slot_bytes
        self.context = GroupContext(self.MPI, hosts, check=check, threaded=self.threads_allowed, slot_bytes=slot_bytes)
        self.context.job = job
        self.flight_record = self.context.flight_record = self._open_flight_record()
        self.losses = LossWatch(self.context) if self.config.on_lost_rank == "raise" else None
        if self.losses is not None:
            self.resources.callback(self.losses.close)  # after the groups, whose queued calls it ends
        self.communicators = CommunicatorStack(self.MPI.COMM_WORLD, self.context)
        self.world: Group = self.communicators.levels[0].intra
        self.resources.callback(self.communicators.free)
        self.heap = SharedHeap(self.local_size)
        self.resources.callback(self.heap.close)
        self.resources.callback(read_only.withdraw_all)

    def _open_flight_record(self) -> FlightRecord:
        comm, hosts = self.MPI.COMM_WORLD, self.context.hosts
        about = {
            "rank": comm.rank, "size": comm.size, "host": self.host_name, "process": os.getpid(),
            "program": " ".join(sys.argv), "version": __version__, "mpi": mpi_library.short_version(self.MPI),
            "job": self.context.job,
            "on_host": as_ranges([rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]),
        }  # fmt: skip
        record = FlightRecord(self.config.flight_record, about)
        self.resources.callback(record.close)  # after the groups are freed
        return record

    def _choose_devices(self, hosts: Sequence[int], with_cuda: bool | None, *, has_cuda: bool) -> None:
        self.device = choose_device(self.local_rank, with_cuda)
        uses_cuda = with_cuda is not False and has_cuda
        self.devices = Devices.gather(self.MPI.COMM_WORLD, hosts, self.device, has_cuda=uses_cuda)

    def _comparison(self, group: Group) -> Comparison:
        """Return the comparison of the calls of a group over several hosts."""
        from ..backends.call_comparison import CallComparison

        return CallComparison(group, shared=self.selector.backends["shm"], network=self.selector.network)

    def _reduction(self, group: Group, op: str) -> Run:
        """Return the operation that reduces numbers over the ranks of a group."""
        operation, _ = self.selector.bind(group, "allreduce", torch.int64, op, "cpu")
        return operation.run

    def _load_tuning(self, hosts: Sequence[int], *, num_ranks: int, num_cores: int) -> None:
        self.context.is_crowded = num_ranks > num_cores
        library = mpi_library.short_version(self.MPI)
        self.job = saved_tables.describe_job(hosts, num_cores, self.local_size, library)
        self.selector.load_saved(self.job)

    def _backends(self, neighbors: Mapping[int, process_vm.Probe]) -> dict[str, Backend]:
        job = JobFacts(
            self.MPI.COMM_WORLD,
            self.config,
            self.heap,
            self.device,
            self.devices,
            list(neighbors.values()),
            bind_step=lambda *step: self.selector.bind(*step),
            is_cuda_aware=mpi_library.is_cuda_aware(),
            problem_of_mpi=mpi_library.abilities(self.MPI).problem_of_collectives,
        )
        if self.local_rank == 0 and self.config.verbose:
            kernels.announce = logger.info
            self.resources.callback(setattr, kernels, "announce", None)
        backends, shared = make_backends(job), job.backend(SharedMemoryBackend)
        if shared.reads_directly:
            self.context.processes = {rank: probe.process for rank, probe in neighbors.items()}
        if shared.kernels:
            CallLog.publish = shared.kernels["announce"]
            self.flight_record.read_ticks = shared.kernels["read_ticks"]
            self.flight_record.note_ticks()
            fast_path.build(communicator_in_use, enabled=self.config.fast_path)
        for problem in sorted({shared.problem, *self.context.problems} - {""}):
            if self.world.rank == 0 and self.config.slot_bytes:
                self._log_info(f"no shared memory between ranks, so all data are sent through MPI: {problem}")
        return backends

    @property
    def can_share(self) -> bool:
        """Return whether ranks of one host can share tensors."""
        return self.selector.backends["shm"].why_not("allreduce", "cpu") is None

    def empty_shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor in memory that the ranks of this host share, or in private memory if that fails."""
        if self.can_share:
            try:
                return self.heap.empty(shape, dtype)
            except OSError:  # no more descriptors, or the memory limit of a container
                pass
        return torch.empty(shape, dtype=dtype, device="cpu")

    def _log_info(self, message: str) -> None:
        if self.config.verbose:
            logger.info(message)

    def _start_watchdog(self, hosts: Sequence[int], host_names: Sequence[str]) -> None:
        """Start the watchdog, and connect it with the other hosts."""
        watchdog = Watchdog(self.context, self.config, self.exchange, self.failures.end_job)
        # A lost host is noticed by the connections of the message layer, if its loss does not end the job.
        if self.num_hosts > 1 and self.config.heartbeat_seconds and self.losses is None:
            self.exchange.heartbeat = self._connect_hosts(hosts, watchdog)
        if self.config.late_rank_share and self.world.size > 1:
            least, period = self.config.late_rank_share, self.config.watchdog_period_seconds
            late_ranks = LateRanks(self.context, self.exchange, host_names, least, period)
            watchdog.checks.append(late_ranks.check)
            self.resources.callback(late_ranks.close)  # after the thread has ended
        watchdog.start()
        self.resources.callback(watchdog.stop)

    def _connect_hosts(self, hosts: Sequence[int], watchdog: Watchdog) -> Heartbeat | None:
        sockets, names, problem = host_ring.connect(self.MPI.COMM_WORLD, hosts, self.host_name)
        if problem:
            if self.world.rank == 0:
                logger.warning(
                    f"a lost host will not be noticed, since the hosts cannot connect: {problem}. Choose the network "
                    f"interface with {network.INTERFACE_VARIABLE}, or set heartbeat_seconds=0."
                )
            return None
        heartbeat = Heartbeat(
            self.world.rank,
            hosts,
            names,
            sockets,
            limit_seconds=self.config.heartbeat_seconds,
            own_status=self.exchange.own,
            location=location,
            end_job=self.failures.end_job,
            save_record=watchdog.save_record,
        )
        self.failures.before_abort = heartbeat.announce_end
        self.resources.callback(heartbeat.close)
        return heartbeat

    def _handle_failures(self) -> None:
        self.exchange = StatusExchange(self.context, self.world)
        self.failures = FailureHandling(self.exchange, stop, self.host_name, self.config)
        if self.config.abort_on_exception:
            self.failures.install()
            self.resources.callback(self.failures.uninstall)
        if self.losses is not None:
            self.resources.callback(self.MPI.continue_without_lost_ranks(self.losses.note))
        elif self.config.abort_on_exception:
            self.resources.callback(mpi_library.abilities(self.MPI).watch_ranks(self.failures.end_job))

    def _bind(self, masks: list[frozenset[int]], index: int) -> str:
        """Bind this rank to its own cores unless it is bound, set the number of torch threads; describe the result.

        `masks`: those of the ranks that share the cores of this machine; `index`: the position of this rank among them.
        """
        before, cores = affinity.current(), affinity.physical_cores()
        plan = affinity.plan_binding(masks, cores=cores) if self.config.bind == "auto" else None
        if plan is not None and affinity.bind(plan[index]):
            self.resources.callback(affinity.bind, before)
            mask, num_sharing, binding = plan[index], 1, "one set of cores per rank, bound by torchmpi"
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

    def make_levels(self, custom: Initializer | None, collective: Initializer | None) -> None:
        """Push the levels of the caller, of hosts, and of GPUs with peer access; level 0 stays current."""
        if custom is not None:
            custom()
        if collective is not None:
            collective()
        else:
            hosts = list(map(str, self.context.hosts))
            self.communicators.push(hosts[self.world.rank], name=f"host {self.host_name}", keys=hosts)
            if self.ipc_groups and any(self.devices.uuids):  # of any rank: pushing is collective
                key = ipc_key(self.device) if self.device.type == "cuda" else "no GPU"
                self.communicators.push(key, name=f"ipc {self.host_name}")
        self.communicators.set_current(0)

    def summary(self) -> str:
        """Describe the job in one line."""
        hosts = f"{self.num_hosts} host" + "s" * (self.num_hosts > 1)
        ranks = f"{self.world.size} rank" + "s" * (self.world.size > 1)
        threads = f"{self.num_threads} torch thread" + "s" * (self.num_threads > 1)
        level = mpi_library.thread_level(self.MPI)
        tuned = ", tuned" if self.selector.tuned else ""
        overlap = "" if self.threads_allowed else f" (only THREAD_{level}: asynchronous calls do not overlap)"
        return (
            f"torchmpi {__version__}: {ranks} on {hosts}, {mpi_library.short_version(self.MPI)}{overlap}, device "
            f"{self.device}, {threads} per rank, {self.binding}{tuned}{about_gpu_backends(self.config, self.devices)}"
        )

    def close(self) -> None:
        """Complete queued calls, synchronize all ranks, and release all resources in reverse order."""
        for group in list(self.context.groups):
            group.drain()
        self.world.call_action("stop", self._synchronize)
        self.is_closing = True
        mpi_library.abilities(self.MPI).note_stop()
        self.resources.close()

    def _synchronize(self) -> None:
        # Before the barrier: after a different call of another rank, that of its next call would complete it.
        self.world.call_log.sleep_until_all_arrive()
        self.world.call_log.compare()
        self.world.comm.Barrier()
        observer.meet_all()


def _prepare_spare() -> None:
    """Do what takes time the first time: a rank that waits has it, and the others will wait for this rank."""
    with suppress(Exception):  # start() reports it
        kernels.load()
        load_backends()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer imports the compiler of torch
    gc.collect()  # a collection soon after start() would look at all objects of torch


@refuses_keywords
def start(
    with_cuda: bool | None = None,
    *,
    ipc_groups: bool = True,
    custom_communicator_init: Initializer | None = None,
    cartesian: bool = False,
    collective_communicator: Initializer | None = None,
    config: Config | None = None,
    **_unknown: NoReturn,
) -> None:
    """Start torchmpi on all ranks: MPI, cores, device, communicators. Collective.

    Args:
        with_cuda: Use CUDA (True), do not use it (False), or use it if torch and the host have it (None).
        ipc_groups: If a rank has a GPU, push a level of groups of GPUs that can access each other's memory.
        custom_communicator_init: Called first; may push levels between the world and the default levels.
        cartesian: Let collectives over a span use two steps if the groups have equal sizes, instead of three.
        collective_communicator: Called instead of pushing the default levels (hosts and groups of GPUs).
        config: The settings of this rank; by default those of the environment.

    Raises:
        AlreadyStartedError: torchmpi runs already.
        MissingMPIError: No MPI library can be loaded.
        LaunchError: The launcher belongs to another MPI library, MPI has been finalized, or this process is a child of
            a rank, such as a DataLoader worker.
        ConfigError: A setting is invalid, or differs between ranks; or `config` is no Config.
        DeviceError: `with_cuda` is True and a rank has no CUDA device.

    Example:
        ::

            import torchmpi as mpi

            mpi.start()
            print(mpi.rank(), "of", mpi.size())
            mpi.stop()
    """
    if problem := children.why_no_rank():
        raise LaunchError(problem)
    if settings := sorted(_unknown.keys() & {field.name for field in dataclasses.fields(Config)}):
        text = ", ".join(f"{name}={_unknown[name]!r}" for name in settings)
        raise KeywordError(f"{_of_launcher()}mpi.start(): {settings[0]!r} is a setting: config=mpi.Config({text}).")
    if _unknown:
        raise unknown_keyword(start, _unknown)
    if not isinstance(config, Config | None):
        hint = "mpi.Config(**config)" if isinstance(config, Mapping) else "mpi.Config(...)"
        raise ConfigError(f"{_of_launcher()}mpi.start(config=...): {kind_of(config)} is no Config. Pass {hint}.")
    if running is not None:
        raise AlreadyStartedError(
            f"rank {running.world.rank}: torchmpi is already started. Call mpi.stop() before starting it again "
            "(a start() or `with mpi.started()` that raised leaves it started, since stopping is collective)."
        )
    arguments = {
        "with_cuda": with_cuda,
        "ipc_groups": ipc_groups,
        "custom_communicator_init": custom_communicator_init,
        "cartesian": cartesian,
        "collective_communicator": collective_communicator,
        "config": config,
    }
    while True:
        try:
            return _start(arguments)
        except RankLostError as error:
            if _has_started or not mpi_library.is_newcomer():  # later, recover() begins again
                raise
            logger.warning(f"lost another rank while this one joins: {error}")
            mpi_library.join_again()
            abandon()
            release.forget()


def _start(arguments: dict[str, Any]) -> None:
    global running, _is_after_loss, _has_started
    passed = {name: arguments[name] for name in ("with_cuda", "cartesian", "ipc_groups")}
    with no_garbage_collection():  # a collection would look at all objects of torch
        running = Runtime(arguments["config"], **passed)
    children.note_rank(running.world.rank)
    running.arguments = arguments | {"config": running.config}
    running.make_levels(arguments["custom_communicator_init"], arguments["collective_communicator"])
    if running.world.rank == 0 and running.config.verbose:
        logger.info(running.summary())
    logger.debug("process %d on cores %s, %s", os.getpid(), sorted(affinity.current()), running.config)
    job_observers.attach_all(running.observed)
    if _is_after_loss or running.joins:
        _continue_services(running.world, joins=running.joins)
        _is_after_loss = False
    _has_started = True


def _continue_services(world: Group, *, joins: bool) -> None:
    """Continue what lives on after a loss. Collective over the ranks of the new start, also those that were spares."""
    names = world.call_action("recover", lambda: world.comm.allgather(sorted(continued_by)))
    for name in sorted(set(chain(*names))):  # which a spare rank may not have imported
        importlib.import_module(name).continue_all(joins=joins)


def _of_launcher() -> str:
    """Return the beginning of messages before MPI is initialized: the rank that the launcher gives, if it does."""
    rank = launcher.detect().rank
    return "" if rank is None else f"rank {rank}: "


def stop() -> None:
    """Complete all asynchronous calls and release all resources. Collective; does nothing if torchmpi does not run.

    MPI is finalized when the interpreter exits, if torchmpi has initialized it; ``start()`` may be called again before.
    A rank for which the others wait longer than ``stall_abort_seconds`` ends the job.

    Raises:
        MismatchError: Other ranks make a different call.
        TorchMPIError: All resources are released, but an asynchronous call has failed, and ``wait()`` was not called.

    Example:
        ::

            mpi.start()
            mpi.stop()
    """
    global running, _not_running_reason
    if running is None:
        return
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit) and running.world.size > 1:
        running.failures.announce(error)
    closed = running
    try:
        closed.close()
    finally:
        if closed.is_closing:
            running = None
            children.forget_rank()
            _not_running_reason = "torchmpi has been stopped. Call mpi.start() again before using it."
    if unseen := [each for handle in closed.context.failed if (each := handle.unseen_error) is not None]:
        message = f"{closed.world.where}: an asynchronous call failed, and wait() was not called: {unseen[0]}"
        if error is None:
            raise TorchMPIError(message) from unseen[0]
        logger.error(message)


def abandon() -> None:
    """Release all resources without the other ranks, of which some have been lost."""
    global running, _is_after_loss
    _is_after_loss = True
    if running is not None:
        closed, running = running, None
        children.forget_rank()
        closed.resources.close()


def current() -> Runtime:
    """Return the running runtime; raise :class:`NotStartedError` if there is none."""
    if running is None:
        raise NotStartedError(children.why_no_rank() or _not_running_reason)
    return running


def communicator(comm: Comm) -> Communicator:
    """Return the communicator for the argument ``comm=`` of a call."""
    if running is not None and _get_communicator_in_use() is None:  # the most frequent cases, without further calls
        if comm is None:
            return running.communicators.default
        if type(comm) is Communicator and not comm.intra.call_queue.closed:
            return comm
    return current().communicators.find(comm)


def is_running() -> bool:
    """Return whether ``start()`` has been called and ``stop()`` has not."""
    return running is not None


def _reset_in_forked_child() -> None:
    global running
    fast_path.invalidate_in_child()
    running = None


os.register_at_fork(after_in_child=_reset_in_forked_child)


def agreed_config(world: Any, given: Config | None) -> Config:
    """Return the settings of this rank; raise on all ranks if they are invalid on one. Collective."""
    problem = ""
    try:
        config = given or Config.from_environment()
    except ConfigError as error:
        problem = str(error)
    if not on_all(world, not problem):
        raise ConfigError(next(f"rank {rank}: {text}" for rank, text in enumerate(world.allgather(problem)) if text))
    return config
