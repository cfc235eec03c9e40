"""Communicators of process groups: torchmpi is started with the first group and stopped with the last.

The ranks of torch's world are those of MPI's world if an MPI launcher has started that number of processes. Otherwise
(torchrun, or one process without an MPI library) they connect through torch's store (`launcherless/`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import zlib
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.release import MessageCounter, register, retire
from ..errors import ArgumentError, LaunchError
from ..launch import launcher, mpi_library
from ..launch.start_watch import StartWatch
from ..session import recovery, runtime
from .properties import GroupProperties
from .torch_names import BackendOptions

_TAG_BITS = 14  # MPI guarantees 15


class Membership:
    """This process's place in torch's world, from the first process group to the last."""

    def __init__(self, options: BackendOptions) -> None:
        """Start torchmpi unless it runs. Collective over all ranks of torch's world."""
        rank, size = self._place = options.group_rank, options.group_size
        self._stand_in: Any = None
        self._started = not runtime.is_running()
        if _lost is not None and not self._started:  # recover() has started torchmpi again in its place
            self._started, self._stand_in = _lost._started, _lost._stand_in
        elif self._started:
            if not _is_started_by_mpi(size):
                self._connect(options)
            runtime.start()
        self._pid, self._runtime = os.getpid(), runtime.current()
        self._num_groups = 0
        world = self._runtime.MPI.COMM_WORLD
        ranks = world.allgather(rank) if world.size == size else []
        if sorted(ranks) != list(range(size)):
            self._stop()
            raise LaunchError(
                f"rank {rank} of torch's world, {world.rank} of MPI's: the ranks passed to init_process_group are "
                f"{ranks}. Pass a different rank in each process, or none: MPI provides them."
                if ranks
                else f"torch's world has {size} ranks, but torchmpi was started on {world.size}. Call "
                "init_process_group before torchmpi.start(), or give it the same ranks."
            )
        self._world_ranks = [ranks.index(number) for number in range(size)]
        """The rank in MPI's world of each rank of torch's world."""
        self._base = world.Split(0, rank)
        self._retirement_key = register(self._base, tuple(self._world_ranks))

    def _connect(self, options: BackendOptions) -> None:
        from ..launch import launcherless

        seconds = (options.timeout or default_pg_timeout).total_seconds()  # gloo accepts 0: no limit
        is_whole_job = launcher.detect().num_ranks == options.group_size  # otherwise ranks outside of it may end
        with StartWatch() if is_whole_job else contextlib.nullcontext():
            self._stand_in = launcherless.connect(
                options.store, options.group_rank, options.group_size, timeout_seconds=seconds
            )
            mpi_library.adopt(self._stand_in)

    def open(self, options: BackendOptions) -> Communicator:
        """Create the communicator of a process group. Collective over its ranks."""
        ranks = list(options.global_ranks_in_group)
        if ranks:
            # Not made of the name: in it torch counts the groups that this rank has created, and ranks may differ.
            tag = zlib.crc32(repr(ranks).encode()) & ((1 << _TAG_BITS) - 1)
            everyone = self._base.Get_group()
            members = everyone.Incl(ranks)
            comm = self._base.Create_group(members, tag)
            members.Free()
            everyone.Free()
            name = f"process group {options.group_id}"
        else:
            if (options.group_rank, options.group_size) != self._place:
                raise _second_rank(options, f"rank {self._place[0]} of {self._place[1]}")
            ranks = list(range(options.group_size))
            comm, name = self._base.Dup(), "process group"
        group = Group(comm, name, tuple(self._world_ranks[rank] for rank in ranks), self._runtime.context)
        self._num_groups += 1
        return Communicator.of(group)

    def close(self, communicator: Communicator) -> None:
        """Free the communicator of a process group; with the last one, stop torchmpi, if started here.

        Does nothing if the group has been freed, by ``abort()`` or ``torchmpi.stop()``.
        """
        global _membership
        if os.getpid() != self._pid or not self.is_valid or communicator.intra.call_queue.closed:
            return
        communicator.intra.free()
        self._num_groups -= 1
        if self._num_groups:
            return
        _membership = None
        retire(self._retirement_key, MessageCounter(), self._base)
        self._stop()

    @property
    def is_valid(self) -> bool:
        """Whether torchmpi has run since the membership began."""
        return runtime.running is self._runtime

    def _stop(self) -> None:
        try:
            if self._started:
                runtime.stop()
        finally:
            if self._stand_in is not None:
                mpi_library.adopt(None)
                self._stand_in.close()


_membership: Membership | None = None
_joining = threading.Lock()
"""Held while the first group is made."""
_lost: Membership | None = None
"""The last one that ``recover()`` has ended."""


def _end_groups() -> None:
    """Destroy the process groups, as a rank is lost: the program makes them again on the remaining ranks."""
    global _membership, _lost
    if _membership is None:
        return
    _lost, _membership = _membership, None
    if isinstance(dist.group.WORLD, GroupProperties):
        dist.destroy_process_group()  # and all others
    gc.collect()  # DDP refers to itself, and its hooks would reduce the gradients on the closed group


recovery.when_abandoned.append(_end_groups)


def current(options: BackendOptions) -> Membership:
    """Return the membership of this process, created with its first group."""
    global _membership
    if _membership is None or not _membership.is_valid:
        reason = why_not(options)
        if reason:
            raise ArgumentError(
                f"rank {dist.get_rank()}: {reason}. Call init_process_group('torchmpi'), or "
                "new_group(backend='torchmpi') without ranks, before."
            )
        if not _joining.acquire(blocking=False):
            raise _second_rank(options, "another rank, which waits for the others")
        try:
            _membership = Membership(options)
        finally:
            _joining.release()
    return _membership


def _second_rank(options: BackendOptions, first: str) -> ArgumentError:
    return ArgumentError(
        f"rank {options.group_rank} of {options.group_size} of a process group: this process is {first}. A process is "
        "one rank of torchmpi, also if it has several threads: start a process for each rank."
    )


def why_not(options: BackendOptions) -> str:
    """Return the reason why a process group cannot be created, the same on all its ranks; '' if it can."""
    ranks = list(options.global_ranks_in_group)
    if (_membership is None or not _membership.is_valid) and ranks and ranks != list(range(dist.get_world_size())):
        return (
            "the first process group with the backend 'torchmpi' must have all ranks, since all of them start torchmpi "
            "together"
        )
    return ""


def _is_started_by_mpi(size: int) -> bool:
    """Return whether MPI's world has the processes of torch's, as far as that is known before MPI is initialized."""
    found = launcher.detect()
    if size == 1 and not dist.is_torchelastic_launched():
        return found.has_mpi_interface or mpi_library.can_be_loaded()
    if not found.has_mpi_interface and not mpi_library.notices_ended_ranks():
        return False
    return found.num_ranks in (size, None)
