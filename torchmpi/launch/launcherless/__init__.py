"""Ranks without an MPI launcher: a small message layer that takes the place of ``mpi4py.MPI``.

Processes that torchrun or a program of the user has started find each other through a store of torch.distributed. The
result of :func:`connect` is passed to :func:`torchmpi.launch.mpi_library.adopt`.
"""

from __future__ import annotations

from typing import Any

from .. import launcher
from .endpoint import Endpoint
from .mesh import Mesh
from .stand_in import StandIn

_EAGER_SECONDS = 50e-6
"""How long a waiting caller polls: waking a thread takes longer than a short message, but uses no core."""


def connect(store: Any, rank: int, size: int, *, timeout_seconds: float, key: bytes | None = None) -> StandIn:
    """Connect to the other ranks through a store of torch.distributed. Collective.

    Args:
        store: A store that all ranks have opened.
        rank: The rank of this process.
        size: The number of ranks.
        timeout_seconds: The limit for the rendezvous. A host that is silent for half of it, at most 30 s, is lost.
        key: The key of the job, by default that of the variable TORCHMPI_JOB_KEY. Without a key, ranks of several hosts
            trust the store, and ranks of one host, if their launcher has started them all there, the kernel.

    Returns:
        The stand-in for ``mpi4py.MPI``. Its ``close()`` ends the connections; the end of Python does so too.

    Raises:
        LaunchError: A rank has not written to the store in time, cannot be reached, or has another key.

    Example:
        ::

            MPI = connect(store, rank, size, timeout_seconds=60)
            mpi_library.adopt(MPI)
            torchmpi.start()
    """
    found = launcher.detect()
    is_one_host = (found.rank, found.num_ranks, found.local_size) == (rank, size, size)
    key = launcher.job_key() if key is None else key
    mesh = Mesh(store, rank, size, timeout_seconds, key=key, is_one_host=is_one_host)
    sockets = mesh.run()
    endpoint = Endpoint(
        rank, [place.host for place in mesh.places], sockets, 0.0 if mesh.is_crowded else _EAGER_SECONDS
    )
    MPI = StandIn(endpoint, dict(enumerate(mesh.places)))
    try:
        MPI.COMM_WORLD.Barrier()  # all ranks have read the store
        mesh.clear()
        MPI.COMM_WORLD.Barrier()  # all ranks have cleared it, so that they can connect again
    except BaseException:
        MPI.close()
        raise
    return MPI
