"""Freeing MPI communicators.

``MPI_Comm_free`` is collective, but the ranks free their groups at different moments, and a rank may end a group whose
other ranks still use it. So the communicators of a freed group are kept until a group with all of its ranks is created:
those ranks compare the kept communicators, and free in one order those that all ranks have kept.

A communicator on which a message was sent and never received is not freed: MPI may assign its context identifier to a
later communicator, which would receive that message (MPICH 5.0).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from .conditions import true_and_same

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


def register(comm: Any, world_ranks: tuple[int, ...], compared: int | None = None) -> tuple[Key, bool]:
    """Return the key of a new group, and free the retired communicators of its ranks. Collective.

    Also returned is whether a number is the same on all ranks, unless it is None; it takes no message of its own.
    """
    if compared is None and getattr(comm, "has_unique_context", False):  # whose communicators are freed at once
        return (world_ranks, 0), True
    number = _created[world_ranks]
    _created[world_ranks] += 1
    members = set(world_ranks)
    own = {key: _retired[key].messages.value for key in list(_retired) if members.issuperset(key[0])}
    has_none, is_same = true_and_same(comm, not own, compared or 0)
    if not has_none:
        retired_by = dict(zip(world_ranks, comm.allgather(own), strict=True))
        for key in sorted(own):
            balances = [retired_by[rank].get(key) for rank in key[0]]
            if None not in balances and sum(balances) == 0:
                for retired in _retired.pop(key).comms:
                    retired.Free()
    return (world_ranks, number), is_same


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
