"""Freeing MPI communicators."""

from __future__ import annotations

from collections import deque
from typing import Any

_retired: deque[Any] = deque()
_MAX_RETIRED = 64


def release(comm: Any) -> None:
    """Free a communicator, once no message that was sent on it can arrive any more.

    MPI may assign the context identifier of a freed communicator to the next one, which would then receive messages
    of the old one that were never received (MPICH 5.0). So the communicator is kept until many others were released.
    """
    if getattr(comm, "has_unique_context", False):
        comm.Free()
        return
    _retired.append(comm)
    if len(_retired) > _MAX_RETIRED:
        oldest = _retired.popleft()
        _discard_messages(oldest)
        oldest.Free()


def _discard_messages(comm: Any) -> None:
    from mpi4py import MPI

    status = MPI.Status()
    while comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
        num_bytes = status.Get_count(MPI.BYTE)
        comm.Recv((bytearray(num_bytes), num_bytes, MPI.BYTE), status.source, status.tag)
