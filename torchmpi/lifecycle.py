"""Start, stop, and questions about this rank: thin, documented functions over the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed

from . import runtime
from .communicator import Communicator
from .runtime import start, stop
from .selector import Availability


@contextmanager
def started(*arguments: Any, **options: Any) -> Iterator[None]:
    """``start()`` before a block and ``stop()`` after it; takes the arguments of :func:`start`.

        with mpi.started():
            print(mpi.rank())

    A block that raises is not followed by ``stop()``, which is collective: the exception goes on, and ends the job.
    """
    start(*arguments, **options)
    yield
    stop()


def rank() -> int:
    """This rank in the current communicator, from 0."""
    return runtime.current().communicators.current.rank


def size() -> int:
    """Ranks in the current communicator."""
    return runtime.current().communicators.current.size


def local_rank() -> int:
    """This rank among those of the job on this host."""
    return runtime.current().local_rank


def local_size() -> int:
    """Ranks of the job on this host."""
    return runtime.current().local_size


def device() -> torch.device:
    """The device of this rank: a GPU, round robin over those it sees, or the CPU.

    model.to(mpi.device())
    """
    return runtime.current().device


def host_name() -> str:
    """Name of this host, as ranks are grouped by it."""
    return runtime.current().host_name


def has_cuda() -> bool:
    """Whether this torch sees a CUDA device on this host."""
    return torch.cuda.is_available()


def has_nccl() -> bool:
    """Whether this torch was built with NCCL and has a device for it."""
    return torch.cuda.is_available() and torch.distributed.is_available() and torch.distributed.is_nccl_available()


def has_gloo() -> bool:
    """Whether this torch was built with gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


# --- communicators -----------------------------------------------------------------------------------------


def push_communicator(key: str | int, name: str | None = None) -> int:
    """Split the current communicator: ranks with the same key form a group. Collective; the new level becomes current.

    Gives the number of the new level. `name` is for messages and :func:`communicator_names`.

        level = mpi.push_communicator(mpi.rank() % 2)
        mpi.allreduce(tensor, comm=level)       # among the even, and among the odd ranks
        mpi.set_communicator(0)
    """
    return runtime.current().communicators.push(key, name)  # type: ignore[arg-type]


def set_communicator(level: int) -> None:
    """Make a level current: `rank()`, `size()` and verbs without ``comm=`` refer to it."""
    runtime.current().communicators.set_current(level)


def use(comm: int | Communicator) -> AbstractContextManager[Communicator]:
    """Make a communicator current inside a block, for this thread or task only.

    with mpi.use(1):
        mpi.allreduce(tensor)
    """
    return runtime.current().communicators.use(comm)


def communicator(level: int | None = None) -> Communicator:
    """The current communicator, or that of a level."""
    return runtime.current().communicators.find(level)


def communicator_names() -> str:
    """The levels of this rank, one a line, the current one marked with a star."""
    return runtime.current().communicators.names()


def is_cartesian_communicator() -> bool:
    """Whether all inner groups of the current level have the same size."""
    return runtime.current().communicators.current.is_cartesian


def num_nodes_in_communicator() -> int:
    """Hosts on which the ranks of the current communicator run."""
    return runtime.current().communicators.current.num_nodes


def set_collective_span(begin: int, end: int) -> None:
    """Run collectives on level `begin` in steps over the levels down to `end`; ``begin == end`` runs them flat.

    Two steps (inside the groups, then across) if the groups are equal and ``start(cartesian=True)``; three steps
    (to the first rank of each group, across those, back) otherwise.
    """
    runtime.current().communicators.set_span(begin, end)


def collective_availability() -> Availability:
    """What each backend can do here: backend x verb x device x mode -> available, unavailable (why), unimplemented.

    print(mpi.collective_availability())
    """
    return runtime.current().selector.availability()
