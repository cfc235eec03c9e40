"""A barrier that tells who did not come."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from ..errors import ArgumentError, StallError
from ..groups import Group
from .transfers import ANSWER_TAG, ARRIVED_TAG

_NAP_SECONDS = 0.0005


def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """``torch.distributed.monitored_barrier``, which torch itself allows for gloo only.

    Rank 0 of the group waits for all others and raises an error that names the first rank which does not come in time,
    or all of them with `wait_all_ranks`; ranks that have come raise too.

        from torchmpi.distributed import monitored_barrier
        monitored_barrier(timeout=timedelta(seconds=30))
    """
    from .process_group import ProcessGroup

    chosen = group or dist.group.WORLD
    if not isinstance(chosen, ProcessGroup):
        raise ArgumentError("monitored_barrier needs a group with the backend 'torchmpi'; torch has one for gloo.")
    chosen.monitored_barrier(timeout, wait_all_ranks)


def meet(group: Group, seconds: float, *, wait_all_ranks: bool) -> None:
    """Every rank reports to rank 0 of the group, and is told whether all came."""
    limit = time.monotonic() + seconds
    if group.rank == 0:
        _collect(group, limit, seconds, wait_all_ranks=wait_all_ranks)
    else:
        _report(group, limit, seconds)


def _collect(group: Group, limit: float, seconds: float, *, wait_all_ranks: bool) -> None:
    comm, MPI = group.side_comm, group.context.MPI
    others = range(1, group.size)
    arrivals = {rank: comm.Irecv((np.empty(1, np.int8), MPI.BYTE), rank, ARRIVED_TAG) for rank in others}
    missing: list[int] = []
    for rank in others:  # in order: without wait_all_ranks the first one missing is named
        if not missing or wait_all_ranks:
            if not _ends(arrivals[rank], limit):
                missing.append(rank)
    for rank in others:
        if rank in missing or not arrivals[rank].Test():
            arrivals[rank].Cancel()
            arrivals[rank].Free()
        else:
            comm.Send((np.array([bool(missing)], np.int8), MPI.BYTE), rank, ANSWER_TAG)
    if missing:
        names = ", ".join(str(rank) for rank in missing)
        raise StallError(
            f"{group.where}: monitored_barrier: rank{'s' * (len(missing) > 1)} {names} of the group did not "
            f"come within {seconds:g} s. Look at what that rank does instead; torchmpi's watchdog tells if it waits in a call."
        )


def _report(group: Group, limit: float, seconds: float) -> None:
    comm, MPI = group.side_comm, group.context.MPI
    answer = np.empty(1, np.int8)
    reply = comm.Irecv((answer, MPI.BYTE), 0, ANSWER_TAG)
    comm.Isend((np.empty(1, np.int8), MPI.BYTE), 0, ARRIVED_TAG).Wait()
    # Rank 0 may wait as long for others after this one has come.
    if not _ends(reply, limit + seconds):
        reply.Cancel()
        reply.Free()
        raise StallError(
            f"{group.where}: monitored_barrier: rank 0 of the group did not answer within {2 * seconds:g} s. Look at "
            "what it does instead."
        )
    if answer[0]:
        raise StallError(f"{group.where}: monitored_barrier: another rank did not come; rank 0's error names it.")


def _ends(request: Any, limit: float) -> bool:
    while not request.Test():
        if time.monotonic() > limit:
            return False
        time.sleep(_NAP_SECONDS)
    return True
