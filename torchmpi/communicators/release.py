"""Freeing MPI communicators.

``MPI_Comm_free`` is collective, but the ranks free their groups at different moments, and a rank may end a group whose
other ranks still use it. So the communicators of a freed group are kept until a group with all of its ranks is created:
those ranks compare the kept communicators, and free in one order those that all ranks have kept.

Most groups that :func:`torchmpi.group` makes are freed by all of their ranks together. The next group of the same ranks
takes over their communicators and shared memory (:class:`FreedGroups`).

A communicator on which a message was sent and never received is not freed: MPI may assign its context identifier to a
later communicator, which would receive that message (MPICH 5.0).
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..shared_memory.segments import Segment
from .conditions import on_all, sleep_until
from .status_board import StatusBoard

_MOST_FREED = 4
_LEAVE_SECONDS = 10.0
"""How long a rank waits for others that have ended their last call of a group, but may not have left it."""
FAILURE = 1 << 32
"""Counted as messages after an error, when MPI may have some of the group: more than are on their way otherwise."""
Key = tuple[tuple[int, ...], int]
"""The world ranks of a group, and its number among the groups of these ranks: the same on all of them."""


class MessageCounter:
    """The number of messages that this rank has sent on a communicator, minus those that it has received.

    The sum over all ranks is 0 when all messages have been received.

    >>> messages = MessageCounter()
    >>> messages.add(2), messages.add(-1), messages.value
    (None, None, 1)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._others: list[Callable[[], int]] = []

    @property
    def value(self) -> int:
        """The number."""
        return self._number + sum(read() for read in self._others)

    def add(self, number: int) -> None:
        """Count messages that were sent, or received if `number` is negative."""
        with self._lock:
            self._number += number

    def include(self, read: Callable[[], int]) -> None:
        """Include those of which another count is kept, by machine code."""
        self._others.append(read)


class _Retired(NamedTuple):
    comms: tuple[Any, ...]
    messages: MessageCounter


_created: Counter[tuple[int, ...]] = Counter()
_retired: dict[Key, _Retired] = {}


def register(comm: Any, world_ranks: tuple[int, ...]) -> Key:
    """Return the key of a new group, and free the retired communicators of its ranks. Collective."""
    if getattr(comm, "has_unique_context", False):  # whose communicators are freed at once
        return world_ranks, 0
    number = _created[world_ranks]
    _created[world_ranks] += 1
    members = set(world_ranks)
    own = {key: _retired[key].messages.value for key in list(_retired) if members.issuperset(key[0])}
    if not on_all(comm, not own):
        retired_by = dict(zip(world_ranks, comm.allgather(own), strict=True))
        for key in sorted(own):
            balances = [retired_by[rank].get(key) for rank in key[0]]
            if None not in balances and sum(balances) == 0:
                for retired in _retired.pop(key).comms:
                    retired.Free()
    return world_ranks, number


def forget() -> None:
    """Forget all groups, without freeing communicators: ranks have been lost, and the others get new numbers.

    Freeing them could wait for the lost ranks, and what the remaining ones have kept may differ.
    """
    _created.clear()
    _retired.clear()


def retire(key: Key, messages: MessageCounter, *comms: Any) -> None:
    """Free the communicators of a group, as soon as all of its ranks have retired them."""
    if getattr(comms[0], "has_unique_context", False):
        for comm in comms:
            comm.Free()
    else:
        _retired[key] = _Retired(comms, messages)


class FreedGroup(NamedTuple):
    """What a group leaves to the next one of the same ranks, which have all freed it, and received all its messages."""

    key: Key
    """Of the communicators."""
    segment: Segment | None
    """The shared memory; None if the ranks have none."""
    comm: Any
    side_comm: Any
    last: int
    """The number of its last call."""
    intra: FreedGroup | None
    inter: FreedGroup | None
    """Those of the groups within the host and between hosts, if this rank is in them."""

    @property
    def number(self) -> int:
        """A number that is the same on all ranks of the group, above 0, and differs from those of others."""
        return 1 + zlib.crc32(repr((self.key, None if self.segment is None else self.segment.ticket)).encode())

    def clear(self) -> bool:
        """Clear what this rank has left in shared memory, when no rank reads it for the last call any more.

        Returns False if that takes too long: a rank may have been lost in its last call.
        """
        for part in self._parts():
            if part.segment is not None:
                board = StatusBoard(part.segment, part.comm.size)
                if not sleep_until(partial(board.has_been_left, part.last), _LEAVE_SECONDS):
                    return False
                board.clear(part.comm.rank)
        return True

    def close(self) -> None:
        """Unmap the memory, and free the communicators as soon as all ranks do."""
        for part in self._parts():
            if part.segment is not None:
                part.segment.close()
            retire(part.key, MessageCounter(), part.side_comm, part.comm)

    def _parts(self) -> list[FreedGroup]:
        return [part for part in (self.inter, self.intra, self) if part is not None]


class FreedGroups:
    """The last groups that all of their ranks have freed together.

    To make communicators, and a segment that all ranks open and the system fills with zeros, takes several times as
    long as all the rest of a new group.
    """

    def __init__(self) -> None:
        self._groups: list[FreedGroup] = []
        self._lock = threading.Lock()

    def keep(self, group: FreedGroup) -> None:
        """Keep a group, and not the oldest one, if there are too many."""
        with self._lock:
            self._groups.append(group)
            oldest = self._groups.pop(0) if len(self._groups) > _MOST_FREED else None
        if oldest is not None:
            oldest.close()

    def take(self, world_ranks: tuple[int, ...]) -> FreedGroup | None:
        """Return the group of these ranks that was freed last, if there is one."""
        with self._lock:
            found = next((each for each in reversed(self._groups) if each.key[0] == world_ranks), None)
            if found is not None:
                self._groups.remove(found)
        return found

    def close(self) -> None:
        while self._groups:
            self._groups.pop().close()
