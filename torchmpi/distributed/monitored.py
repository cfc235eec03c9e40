"""A barrier that tells who did not come."""

from __future__ import annotations

import time

import numpy as np

from ..communicators.group import Group
from ..errors import StallError
from ..session import runtime
from .transfers import ANSWER_TAG, ARRIVED_TAG, check_open

_NAP_SECONDS = 0.0005


def barrier(group: Group, seconds: float, number: int, *, wait_all_ranks: bool) -> None:
    """Every rank reports to rank 0 of the group, and is told whether all came.

    `number` counts these barriers on the group: a rank that comes after its barrier was given up is not taken for one
    that comes to the next.
    """
    runtime.current()  # refuses in a forked child, which is no rank
    check_open(group, f"{group.where}: monitored_barrier")
    limit = time.monotonic() + seconds
    if group.rank == 0:
        _collect(group, limit, seconds, number, wait_all_ranks=wait_all_ranks)
    else:
        _report(group, limit, seconds, number)


def _collect(group: Group, limit: float, seconds: float, number: int, *, wait_all_ranks: bool) -> None:
    arrived: list[int] = []
    missing: list[int] = []
    for rank in range(1, group.size):  # in order: without wait_all_ranks the first one missing is named
        is_named = not missing or wait_all_ranks
        if _arrives(group, rank, number, limit if is_named else 0.0):
            arrived.append(rank)
        elif is_named:
            missing.append(rank)
    for rank in arrived:
        _send(group, rank, ANSWER_TAG, number, bool(missing))
    if missing:
        names = ", ".join(str(rank) for rank in missing)
        raise StallError(  # in gloo's words, which programs may look for
            f"{group.where}: Rank 0 timed out in monitoredBarrier: Rank{'s' * (len(missing) > 1)} {names} failed to "
            f"pass monitoredBarrier within {seconds:g} s (ranks of the group). Look at what is done there instead: "
            "torchmpi's watchdog tells if it waits in a call."
        )


def _arrives(group: Group, rank: int, number: int, limit: float) -> bool:
    """Whether a rank comes to this barrier in time; who comes to an earlier one is told that it is over."""
    while (arrived := _receive(group, rank, ARRIVED_TAG, limit)) is not None:
        if arrived[0] == number:
            return True
        _send(group, rank, ANSWER_TAG, arrived[0], True)
    return False


def _report(group: Group, limit: float, seconds: float, number: int) -> None:
    _send(group, 0, ARRIVED_TAG, number, False)
    # Rank 0 may wait as long for others after this one has come.
    while (answer := _receive(group, 0, ANSWER_TAG, limit + seconds)) is not None:
        if answer[0] == number and answer[1]:
            raise StallError(
                f"{group.where}: Rank {group.rank} successfully reached monitoredBarrier, but received errors while "
                "waiting for send/recv from rank 0: another rank did not come; rank 0's error names it."
            )
        if answer[0] == number:
            return
    raise StallError(
        f"{group.where}: monitored_barrier: rank 0 of the group did not answer within {2 * seconds:g} s. Look at "
        "what it does instead."
    )


def _send(group: Group, rank: int, tag: int, number: int, is_over: bool) -> None:
    message = np.array([number, is_over], np.int64)
    group.side_comm.Isend((message, group.context.MPI.BYTE), rank, tag).Wait()  # so short that it does not wait


def _receive(group: Group, rank: int, tag: int, limit: float) -> tuple[int, int] | None:
    """Number and verdict of the next message; None if none comes in time."""
    message = np.empty(2, np.int64)
    request = group.side_comm.Irecv((message, group.context.MPI.BYTE), rank, tag)
    while not request.Test():
        if time.monotonic() > limit:
            request.Cancel()
            status = group.context.MPI.Status()
            request.Wait(status)
            if status.Is_cancelled():
                return None
            break  # it came at the last moment
        time.sleep(_NAP_SECONDS)
    return int(message[0]), int(message[1])
