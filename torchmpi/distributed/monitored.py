"""Monitored barrier: a barrier over messages that names missing ranks."""

from __future__ import annotations

import time

import numpy as np

from ..communicators.group import Group
from ..errors import StallError
from ..session import runtime
from .transfers import ANSWER_TAG, ARRIVED_TAG, check_open

_NUM_POLLS = 200
"""How often to look for a message before sleeping in between."""
_LEAST_SLEEP, _MOST_SLEEP = 20e-6, 500e-6


def barrier(group: Group, seconds: float, number: int, *, wait_all_ranks: bool) -> None:
    """Send a message to rank 0 of the group, which waits for all of them and answers whether a rank is missing.

    `number` counts the monitored barriers of the group, so that the message of a late rank, whose barrier has timed
    out, is not counted for the next one.
    """
    runtime.current()  # raises in a forked child
    check_open(group, f"{group.where}: monitored_barrier")
    limit = time.monotonic() + seconds
    if group.rank == 0:
        _collect(group, limit, seconds, number, wait_all_ranks=wait_all_ranks)
    else:
        _report(group, limit, seconds, number)


def _collect(group: Group, limit: float, seconds: float, number: int, *, wait_all_ranks: bool) -> None:
    arrived: list[int] = []
    missing: list[int] = []
    for rank in range(1, group.size):  # in order, so that the first missing rank is named without wait_all_ranks
        is_named = not missing or wait_all_ranks
        if _arrives(group, rank, number, limit if is_named else 0.0):
            arrived.append(rank)
        elif is_named:
            missing.append(rank)
    for rank in arrived:
        _send(group, rank, ANSWER_TAG, number, bool(missing))
    if missing:
        names = ", ".join(str(rank) for rank in missing)
        raise StallError(  # the wording is gloo's, for programs that search for it
            f"{group.where}: Rank 0 timed out in monitoredBarrier: Rank{'s' * (len(missing) > 1)} {names} failed to "
            f"pass monitoredBarrier within {seconds:g} s (ranks of the group). Check which calls these ranks run: "
            "torchmpi's watchdog reports calls that wait."
        )


def _arrives(group: Group, rank: int, number: int, limit: float) -> bool:
    """Return whether a rank arrives in time; to its arrival at an earlier barrier, answer that this has failed."""
    while (arrival := _receive(group, rank, ARRIVED_TAG, limit)) is not None:
        if arrival[0] == number:
            return True
        _send(group, rank, ANSWER_TAG, arrival[0], True)
    return False


def _report(group: Group, limit: float, seconds: float, number: int) -> None:
    _send(group, 0, ARRIVED_TAG, number, False)
    # Rank 0 may wait that long for other ranks after the arrival of this one.
    while (answer := _receive(group, 0, ANSWER_TAG, limit + seconds)) is not None:
        if answer[0] == number and answer[1]:
            raise StallError(
                f"{group.where}: Rank {group.rank} successfully reached monitoredBarrier, but received errors while "
                "waiting for send/recv from rank 0: another rank is missing; the error of rank 0 names it."
            )
        if answer[0] == number:
            return
    raise StallError(
        f"{group.where}: monitored_barrier: rank 0 of the group did not answer within {2 * seconds:g} s. Check "
        "which call that rank runs."
    )


def _send(group: Group, rank: int, tag: int, number: int, has_failed: bool) -> None:
    message = np.array([number, has_failed], np.int64)
    group.side_comm.Isend((message, group.context.MPI.BYTE), rank, tag).Wait()  # short enough not to block
    group.messages.add(1)


def _receive(group: Group, rank: int, tag: int, limit: float) -> tuple[int, int] | None:
    """Receive the number of a barrier and whether it has failed; return None if no message arrives in time."""
    message = np.empty(2, np.int64)
    request = group.side_comm.Irecv((message, group.context.MPI.BYTE), rank, tag)
    turn, sleep = 0, _LEAST_SLEEP
    while not request.Test():
        turn += 1
        if time.monotonic() > limit:
            request.Cancel()
            status = group.context.MPI.Status()
            request.Wait(status)
            if status.Is_cancelled():
                return None
            break  # it arrived before it could be cancelled
        if turn > _NUM_POLLS:
            time.sleep(sleep)
            sleep = min(sleep * 1.25, _MOST_SLEEP)
    group.messages.add(-1)
    return int(message[0]), int(message[1])
