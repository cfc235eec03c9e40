"""The part of MPI that torchmpi uses, over sockets: for processes that no MPI launcher has started.

They meet through a store of torch.distributed (torchrun has one). What :func:`connect` gives stands where the module
``mpi4py.MPI`` does; :func:`torchmpi.session.mpi_library.adopt` puts it there.
"""

from __future__ import annotations

from typing import Any

from .addresses import here
from .rendezvous_store import StoreRendezvous
from .socket_endpoint import Endpoint
from .stand_in import StandIn

_EAGER_SECONDS = 50e-6


def connect(store: Any, rank: int, size: int, *, timeout_seconds: float) -> StandIn:
    """Meet the other ranks through a store. Collective; ends with ``close()``, at the latest when Python does.

    MPI = connect(store, rank, size, timeout_seconds=60)
    mpi_library.adopt(MPI)
    torchmpi.start()
    """
    meeting = StoreRendezvous(store, rank, size, here(), timeout_seconds=timeout_seconds)
    return enter(meeting, rank, size)


def enter(meeting: StoreRendezvous, rank: int, size: int) -> StandIn:
    """What :func:`connect` does, for ranks that are where the meeting says they are."""
    sockets = meeting.run()
    # To sleep and be woken takes longer than most messages; but another rank may need the core.
    endpoint = Endpoint(rank, size, sockets, eager_seconds=0.0 if meeting.is_crowded else _EAGER_SECONDS)
    MPI = StandIn(endpoint, meeting.places)
    try:
        MPI.COMM_WORLD.Barrier()  # all have read what is in the store
        meeting.clear()
        MPI.COMM_WORLD.Barrier()  # and nobody finds it there who connects again
    except BaseException:
        MPI.close()
        raise
    return MPI
