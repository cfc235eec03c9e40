"""Communicators of some ranks of another communicator, which can be freed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, NoReturn

from ..errors import ArgumentError, MismatchError
from .communicator import Communicator, NullCommunicator
from .conditions import common, digest
from .group import Group


class _Request(NamedTuple):
    """The arguments of one rank."""

    shown: str
    ranks: tuple[int, ...] | None
    name: str | None


def make(parent: Group, ranks: Iterable[int], name: str | None) -> Communicator | NullCommunicator:
    """Make a communicator of some ranks of a group. Collective over the group.

    For arguments and errors see :func:`torchmpi.group`.
    """
    # Arguments are checked after the exchange only: all ranks raise, or none.
    request = _request(ranks, name)
    requests, made = parent.call_exchange("group", partial(_make, parent, request))
    if made is None:
        _refuse(parent, request, requests)
    return made


def _request(ranks: Iterable[int], name: str | None) -> _Request:
    try:
        numbers = tuple(map(operator.index, ranks))
    except TypeError:
        return _Request(repr(ranks), None, name)
    return _Request(str(list(numbers)), numbers, name)


def _make(parent: Group, request: _Request) -> tuple[list[_Request], Communicator | NullCommunicator | None]:
    context, ranks, name = parent.context, request.ranks, request.name
    is_valid = ranks is not None and not _problem(ranks, parent.size)
    members = tuple(parent.world_ranks[rank] for rank in ranks) if ranks is not None and is_valid else ()
    freed = context.freed.take(members)
    if freed is not None and not freed.clear():  # before all ranks have compared what they have: none begins earlier
        freed.close()
        freed = None
    number = None if ranks is None or parent.rank not in ranks else 0 if freed is None else freed.number
    # Only requests that differ are gathered: a long list for each rank would take much memory in a large job.
    known, taken = common(parent.reduce, digest(request), number)
    if freed is not None and (known is None or not taken):
        freed.close()
        freed = None
    if known is None:
        return list(parent.comm.allgather(request)), None
    if ranks is None or not is_valid:
        return [], None
    is_member, comm = number is not None, None if freed is None else freed.comm
    if not taken:  # the same on all ranks, also those that are not in the group
        color, position = (0, ranks.index(parent.rank)) if is_member else (context.MPI.UNDEFINED, 0)
        comm = parent.comm.Split(color, position)
    name = name or f"group {list(members)}"
    if not is_member:
        return [], NullCommunicator(name, members, parent.where)
    return [], Communicator.of(Group(comm, name, members, context, freed=freed), can_be_freed=True)


def _problem(ranks: Sequence[int] | None, size: int) -> str:
    if ranks is None:
        return "Pass a list of ranks"
    if not ranks:
        return "A group has at least one rank"
    if outside := [rank for rank in ranks if not 0 <= rank < size]:
        return f"{outside[0]} is not a rank of the communicator. Use 0 to {size - 1}"
    return "A rank occurs twice" if len(set(ranks)) < len(ranks) else ""


def _refuse(parent: Group, own: _Request, requests: Sequence[_Request]) -> NoReturn:
    if not requests:
        raise ArgumentError(f"{parent.where}: group({own.shown}): {_problem(own.ranks, parent.size)}.")
    calls = [
        f"rank {rank} called group({request.shown}{'' if request.name is None else f', name={request.name!r}'})"
        for rank, request in enumerate(requests)
    ]
    raise MismatchError(
        f"{parent.where}: the ranks of communicator {parent.name} asked for different groups: {'; '.join(calls)}. Pass "
        "the same list on all ranks, also on those that are not in the list. Several groups need a call for each."
    )
