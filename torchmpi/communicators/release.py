"""Freeing MPI communicators.

``MPI_Comm_free`` is collective, but the ranks free their groups at different moments, and a rank may end a group whose
other ranks still use it. So the communicators of a freed group are kept until a group with all of its ranks is created:
those ranks compare the kept communicators, and free in one order those that all ranks have kept. Where all ranks are
known to free a group together, :func:`free_now` needs no such delay.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

Key = tuple[tuple[int, ...], int]
"""The world ranks of a group, and its number among the groups of these ranks: the same on all of them."""

_LAST_TAG = 1 << 21  # above those of users and of the monitored barrier
_created: Counter[tuple[int, ...]] = Counter()
_retired: dict[Key, tuple[Any, ...]] = {}


def register(comm: Any, world_ranks: tuple[int, ...]) -> Key:
    """Return the key of a new group, and free the retired communicators of its ranks. Collective."""
    number = _created[world_ranks]
    _created[world_ranks] += 1
    if not getattr(comm, "has_unique_context", False):
        members = set(world_ranks)
        own = {key for key in list(_retired) if members.issuperset(key[0])}
        retired_by = dict(zip(world_ranks, comm.allgather(own), strict=True))
        for key in sorted(own):
            if all(key in retired_by[rank] for rank in key[0]):
                for retired in _retired.pop(key):
                    _receive_rest(retired)
                    retired.Free()
    return world_ranks, number


def retire(key: Key, *comms: Any) -> None:
    """Free the communicators of a group, as soon as all of its ranks have retired them."""
    if getattr(comms[0], "has_unique_context", False):
        for comm in comms:
            comm.Free()
    else:
        _retired[key] = comms


def free_now(*comms: Any) -> None:
    """Free the communicators of a group. Collective over the ranks of the group."""
    for comm in comms:
        if not getattr(comm, "has_unique_context", False):
            _receive_rest(comm)
        comm.Free()


def _receive_rest(comm: Any) -> None:
    """Receive the messages that were sent on a communicator and never received.

    MPI may assign the context identifier of a freed communicator to the next one, which would then receive them
    (MPICH 5.0). Messages between two ranks arrive in order, so the others have arrived before the last.
    """
    from mpi4py import MPI

    nothing, status = (bytearray(), MPI.BYTE), MPI.Status()
    requests = [comm.Isend(nothing, peer, _LAST_TAG) for peer in range(comm.size)]
    for peer in range(comm.size):  # this rank too: it may have sent messages to itself
        tag = None
        while tag != _LAST_TAG:
            comm.Probe(peer, MPI.ANY_TAG, status)
            num_bytes, tag = status.Get_count(MPI.BYTE), status.tag
            comm.Recv((bytearray(num_bytes), num_bytes, MPI.BYTE), peer, tag)
    MPI.Request.Waitall(requests)
