"""Process groups as groups of ranks: torchmpi is started with the first of them, and stopped with the last.

The ranks of torch's world are those of MPI's, if an MPI launcher has started as many processes; otherwise (torchrun)
they meet through torch's store and talk over sockets.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import torch.distributed as dist

from ..communicators import splits
from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.release import release
from ..errors import ArgumentError, LaunchError
from ..session import launcher, mpi_library, runtime

_TAG_BITS = 14  # of what MPI guarantees for tags


class Membership:
    """Of this process, between the first group and the last."""

    def __init__(self, options: Any) -> None:
        """Collective over all ranks of torch's world."""
        rank, size = options.group_rank, options.group_size
        self._stand_in: Any = None
        self._started = not runtime.is_running()
        if self._started:
            if not _started_by_mpi(size):
                self._meet(options, rank, size)
            runtime.start()
        self._pid = os.getpid()
        self._num_groups = 0
        world = runtime.current().MPI.COMM_WORLD
        _check_size(world.size, size)
        ranks = world.allgather(rank)
        if sorted(ranks) != list(range(size)):
            raise LaunchError(
                f"rank {rank} of torch's world, {world.rank} of MPI's: the ranks given to init_process_group are "
                f"{ranks}. Give each process a rank of its own, or none: MPI knows them."
            )
        self._world_ranks = [ranks.index(number) for number in range(size)]
        """Rank in MPI's world of each rank of torch's."""
        self._base = world.Split(0, rank)

    def _meet(self, options: Any, rank: int, size: int) -> None:
        from . import sockets

        self._stand_in = sockets.connect(options.store, rank, size, timeout_seconds=options.timeout.total_seconds())
        mpi_library.adopt(self._stand_in)

    def open(self, options: Any) -> Communicator:
        """The ranks of a process group as a communicator of their own. Collective over them."""
        ranks = list(options.global_ranks_in_group)
        if ranks:
            # Not of the name, in which torch counts the groups that this rank has made, which may differ among ranks.
            tag = zlib.crc32(repr(ranks).encode()) & ((1 << _TAG_BITS) - 1)
            comm = self._base.Create_group(self._base.Get_group().Incl(ranks), tag)
            name = f"process group {options.group_id}"
        else:
            ranks = list(range(options.group_size))
            comm, name = self._base.Dup(), "process group"
        running = runtime.current()
        group = Group(comm, name, tuple(self._world_ranks[rank] for rank in ranks), running.context)
        split = splits.plan_split([name] * group.size, cartesian=True)
        self._num_groups += 1
        return Communicator(-1, name, group, None, split=split, parent=None)

    def close(self, communicator: Communicator) -> None:
        """Give the ranks of a process group back; with the last one everything that was started for them."""
        global _membership
        if os.getpid() != self._pid or not runtime.is_running():
            return
        if not communicator.intra.call_queue.closed:
            communicator.intra.free()
        self._num_groups -= 1
        if self._num_groups:
            return
        _membership = None
        release(self._base)
        if self._started:
            runtime.stop()
        if self._stand_in is not None:
            mpi_library.adopt(None)
            self._stand_in.close()


_membership: Membership | None = None


def current(options: Any) -> Membership:
    """That of this process; made with its first group."""
    global _membership
    if _membership is None or not runtime.is_running():
        ranks = list(options.global_ranks_in_group)
        if ranks and ranks != list(range(dist.get_world_size())):
            raise ArgumentError(
                f"rank {dist.get_rank()}: the first process group with the backend 'torchmpi' must have all ranks, "
                "since all of them start torchmpi together. Call init_process_group('torchmpi'), or "
                "new_group(backend='torchmpi') without ranks, before."
            )
        _membership = Membership(options)
    return _membership


def _started_by_mpi(size: int) -> bool:
    """Whether MPI's world are the processes that make up torch's, as far as can be told before it is initialised."""
    if dist.is_torchelastic_launched():
        return False
    return size == 1 or launcher.detect().num_ranks == size


def _check_size(mpi_size: int, size: int) -> None:
    if mpi_size != size:
        raise LaunchError(
            f"torch's world has {size} ranks, but torchmpi was started on {mpi_size}. Call init_process_group before "
            "torchmpi.start(), or give it the same ranks."
        )
