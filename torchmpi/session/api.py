"""Start, stop, and questions about this rank: thin, documented functions over the runtime."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed

from ..backends.nccl import nccl_library
from ..backends.selection_table import Key, Rule
from ..backends.selector import Availability
from ..communicators.communicator import Communicator
from ..errors import ArgumentError, TransportError
from . import runtime
from .runtime import start, stop


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
    """Whether there is an NCCL that the backend ``nccl`` can load, and a CUDA device for it."""
    if not torch.cuda.is_available():
        return False
    try:
        nccl_library.load()
    except TransportError:
        return False
    return True


def has_gloo() -> bool:
    """Whether this torch was built with gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def empty_shared(*shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor, like ``torch.empty``, in memory that the other ranks of this host can reach.

    An allreduce of tensors that all ranks made like this copies nothing: each rank adds its part of all of them in
    place. In everything else they are like any tensor. Not collective. Where no shared memory can be had, the tensor
    is a private one.

        gradients = mpi.empty_shared(1_000_000)
        mpi.allreduce(gradients.fill_(1.0))
    """
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    dims = tuple(map(operator.index, sizes))  # type: ignore[arg-type]
    if any(dim < 0 for dim in dims):
        raise ArgumentError(f"rank {rank()}: empty_shared: the shape {list(dims)} has a negative size.")
    return runtime.current().empty_shared(dims, dtype or torch.get_default_dtype())


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


class CollectiveSelector(Mapping[Key, Rule]):
    """The table that chooses the transport of a call: (verb, device, span, mode) -> (up to how many bytes, transport).

    `span` is ``host`` (all ranks of the communicator on one host), ``across`` (each on a host of its own) or ``hosts``
    (several hosts, some with several ranks); `mode` is ``sync`` or ``async``. Changes hold from the next call on, on
    communicators that exist as on new ones, until ``stop()``. All ranks must make the same ones, at the same point of
    the program. ``backend=`` of a call goes before the table. Printed, it shows the spans there are in this job.

        print(mpi.collective_selector)
        mpi.collective_selector["allreduce", "cpu", "host", "sync"]         # ((None, 'mpi'),)
        mpi.collective_selector.set("allreduce", "mpi", up_to_bytes=4096)   # larger ones as before
        mpi.collective_selector["reduce", "cpu", "host", "async"] = [(65536, "mpi"), (None, "mpi")]
        mpi.collective_selector.reset()
    """

    def set(
        self,
        collective: str,
        backend: str,
        *,
        device: str | None = "cpu",
        span: str | None = None,
        mode: str | None = None,
        up_to_bytes: int | None = None,
    ) -> None:
        """Take a backend for a verb: for both modes, and for every span that the backend reaches, unless told.

        With `up_to_bytes` larger tensors keep what they have. A backend that cannot is refused with the reason.

            mpi.collective_selector.set("broadcast", "mpi", span="host", mode="sync")
        """
        runtime.current().selector.set(
            collective, backend, device=device, span=span, mode=mode, up_to_bytes=up_to_bytes
        )

    def reset(self) -> None:
        """Back to the defaults, also from what was measured."""
        runtime.current().selector.reset()

    def __getitem__(self, key: tuple[str, ...]) -> Rule:
        return runtime.current().selector.rule(key)

    def __setitem__(self, key: tuple[str, ...], rule: str | Iterable[tuple[int | None, str]]) -> None:
        runtime.current().selector.assign(key, rule)

    def __iter__(self) -> Iterator[Key]:
        return iter(runtime.current().selector.table)

    def __len__(self) -> int:
        return len(runtime.current().selector.table)

    def __str__(self) -> str:
        selector = runtime.current().selector
        return selector.table.text(selector.spans)

    def __repr__(self) -> str:
        state = f"{len(self)} rules" if runtime.is_running() else "not started"
        return f"<collective_selector: {state}>"


collective_selector = CollectiveSelector()


def collective_selector_to_string() -> str:
    """The table of :data:`collective_selector`, one line per verb and span.

    print(mpi.collective_selector_to_string())
    """
    return str(collective_selector)
