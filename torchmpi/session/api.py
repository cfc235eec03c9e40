"""The public functions about starting, ranks, devices, communicators and the selection of backends."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch

from ..argument_types import checks_types
from ..backends.gloo_backend import problem as problem_of_gloo
from ..backends.nccl.nccl_backend import problem as problem_of_nccl
from ..backends.selection_table import Key, Rule
from ..backends.selector import Availability
from ..communicators import group_of_ranks
from ..communicators.communicator import Communicator, NullCommunicator
from ..communicators.levels import Comm
from ..config import BackendName, CollectiveName, DeviceType, Mode, Span
from ..errors import ArgumentError, DtypeError, rank_prefix
from . import runtime
from .runtime import start as start
from .runtime import stop as stop

__all__ = [
    "collective_availability", "collective_selector", "collective_selector_to_string", "communicator",
    "communicator_names", "device", "empty_shared", "group", "has_cuda", "has_gloo", "has_nccl", "host_name",
    "is_cartesian_communicator", "is_started", "local_rank", "local_size", "num_nodes_in_communicator",
    "push_communicator", "rank", "set_collective_span", "set_communicator", "size", "start", "started", "stop",
    "use",
]  # fmt: skip


@contextmanager
def started(*arguments: Any, **options: Any) -> Iterator[None]:
    """Call ``start()`` before a block and ``stop()`` after it.

    If the block raises, ``stop()``, which is collective, is not called: the exception propagates and ends the job.

    Args:
        *arguments: Passed to :func:`start`.
        **options: Passed to :func:`start`.

    Returns:
        A context manager.

    Raises:
        TorchMPIError: As :func:`start` and :func:`stop`.

    Example:
        ::

            with mpi.started():
                print(mpi.rank())
    """
    start(*arguments, **options)
    yield
    stop()


def is_started() -> bool:
    """Return whether torchmpi runs: ``start()`` has been called, and ``stop()`` has not been called since.

    Returns:
        True between ``start()`` and ``stop()``; False in a process forked from a rank.

    Example:
        ::

            if not mpi.is_started():
                mpi.start()
    """
    return runtime.is_running()


def rank(comm: Comm = None) -> int:
    """Return the rank of this process in a communicator.

    Args:
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Returns:
        A number from 0 to ``size() - 1``.

    Raises:
        CommunicatorError: This process is not a rank of the communicator, or the communicator has been freed.
        NotStartedError: torchmpi is not started.

    Example:
        ::

            if mpi.rank() == 0:
                torch.save(model.state_dict(), "model.pt")
    """
    return runtime.communicator(comm).rank


def size(comm: Comm = None) -> int:
    """Return the number of ranks in a communicator.

    Args:
        comm: As for :func:`rank`.

    Returns:
        The number of ranks, at least 1.

    Raises:
        CommunicatorError: As for :func:`rank`.
        NotStartedError: torchmpi is not started.

    Example:
        ::

            data = dataset[mpi.rank() :: mpi.size()]
    """
    return runtime.communicator(comm).size


def local_rank() -> int:
    """Return the rank of this process among the ranks of the job on this host.

    Returns:
        A number from 0 to ``local_size() - 1``.

    Raises:
        NotStartedError: torchmpi is not started.

    Example:
        ::

            if mpi.local_rank() == 0:
                download(dataset)
            mpi.barrier()
    """
    return runtime.current().local_rank


def local_size() -> int:
    """Return the number of ranks of the job on this host.

    Returns:
        The number of ranks, at least 1.

    Raises:
        NotStartedError: torchmpi is not started.

    Example:
        ::

            num_workers = os.cpu_count() // mpi.local_size()
    """
    return runtime.current().local_size


def device() -> torch.device:
    """Return the device of this rank: a GPU, assigned round robin among the visible ones, or the CPU.

    Returns:
        The device chosen by :func:`start`.

    Raises:
        NotStartedError: torchmpi is not started.

    Example:
        ::

            model.to(mpi.device())
    """
    return runtime.current().device


def host_name() -> str:
    """Return the name of this host, or the setting ``host_name``.

    Returns:
        The name.

    Raises:
        NotStartedError: torchmpi is not started.

    Example:
        ::

            print(f"rank {mpi.rank()} runs on {mpi.host_name()}")
    """
    return runtime.current().host_name


def has_cuda() -> bool:
    """Return whether torch sees a CUDA device on this host.

    Returns:
        True if there is one.

    Example:
        ::

            mpi.start(with_cuda=mpi.has_cuda())
    """
    return torch.cuda.is_available()


def has_nccl() -> bool:
    """Return whether the backend ``nccl`` can be used on this host.

    Returns:
        True if torch was built with NCCL and there is a CUDA device.

    Example:
        ::

            backend = "nccl" if mpi.has_nccl() else None
    """
    return not problem_of_nccl()


def has_gloo() -> bool:
    """Return whether torch was built with gloo.

    Returns:
        True if torch was built with gloo.

    Example:
        ::

            assert mpi.has_gloo()
    """
    return not problem_of_gloo()


def empty_shared(*shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocate an uninitialized tensor, like ``torch.empty``, in memory that the ranks of this host share.

    An allreduce of tensors that all ranks allocated this way copies nothing: each rank reduces its part of all of them
    in place. Otherwise such tensors behave like any tensor. Not collective. Where shared memory is not available, the
    tensor is in private memory.

    Args:
        *shape: The sizes of the tensor, as numbers or as one sequence.
        dtype: The data type; by default that of ``torch.get_default_dtype()``.

    Returns:
        A contiguous tensor on the CPU.

    Raises:
        ArgumentError: A size is negative or no whole number; the subclass DtypeError if `dtype` is no dtype.
        NotStartedError: torchmpi is not started.

    Example:
        ::

            gradients = mpi.empty_shared(1_000_000)
            mpi.allreduce(gradients.fill_(1.0))
    """
    sizes = cast(Sequence[int], shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    try:
        dims = tuple(map(operator.index, sizes))
    except TypeError:
        raise ArgumentError(
            f"{rank_prefix()}empty_shared: {sizes!r} is no shape. Pass whole numbers, or one sequence of them."
        ) from None
    if any(dim < 0 for dim in dims):
        raise ArgumentError(f"{rank_prefix()}empty_shared: the shape {list(dims)} has a negative size.")
    if not isinstance(dtype, torch.dtype | None):
        raise DtypeError(f"{rank_prefix()}empty_shared: dtype={dtype!r} is no dtype. Pass one of torch: torch.float32.")
    return runtime.current().empty_shared(dims, dtype or torch.get_default_dtype())


# --- communicators -----------------------------------------------------------------------------------------


@checks_types
def push_communicator(key: str | int, name: str | None = None) -> int:
    """Split the current communicator into groups of ranks with equal keys. Collective; the new level becomes current.

    Args:
        key: Ranks with the same key form a group.
        name: The name of the level in messages and in :func:`communicator_names`.

    Returns:
        The number of the new level.

    Raises:
        ArgumentError: The key is neither a string nor a number.
        CommunicatorError: The current communicator is not a level.
        MismatchError: Other ranks make a different call.
        NotStartedError: torchmpi is not started.

    Example:
        ::

            level = mpi.push_communicator(mpi.rank() % 2)
            mpi.allreduce(tensor, comm=level)  # among the even and among the odd ranks
            mpi.set_communicator(0)
    """
    return runtime.current().communicators.push(key, name)  # type: ignore[arg-type]


def set_communicator(level: int) -> None:
    """Make a level current: ``rank()``, ``size()`` and collectives without ``comm=`` refer to it.

    Args:
        level: The number of a level; 0 is the world.

    Raises:
        CommunicatorError: There is no such level; communicators of :func:`group` are not levels.
        NotStartedError: torchmpi is not started.

    Example:
        ::

            mpi.set_communicator(0)
    """
    runtime.current().communicators.set_current(level)


def group(ranks: Iterable[int], *, comm: Comm = None, name: str | None = None) -> Communicator | NullCommunicator:
    """Make a communicator of some ranks. Collective over all ranks of the current communicator, or of `comm`.

    All ranks pass the same list, also those that are not in it. The communicator can be freed with its method
    ``free()``, which is collective over its ranks, or by a ``with`` block. It is not a level.

    Args:
        ranks: Ranks of the current communicator, or of `comm`. Their order is that of the numbers in the new
            communicator: ``ranks[0]`` is its rank 0.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        name: The name of the communicator in messages; by default its ranks.

    Returns:
        The communicator. On ranks that are not in `ranks` a ``NullCommunicator``, which is false in a condition and
        which calls with ``comm=`` refuse.

    Raises:
        ArgumentError: A rank does not exist or occurs twice, or there is none.
        CommunicatorError: This rank is not a rank of `comm`.
        MismatchError: The ranks passed different lists or names, or make different calls.
        NotStartedError: torchmpi is not started.

    Example:
        ::

            with mpi.group([0, 1]) as pair:
                if pair:
                    mpi.allreduce(tensor, comm=pair)
    """
    return group_of_ranks.make(runtime.communicator(comm).intra, ranks, name)


def use(comm: Comm) -> AbstractContextManager[Communicator]:
    """Make a communicator current inside a block, for this thread or task only.

    Args:
        comm: The number of a level, a communicator, or one of its groups.

    Returns:
        A context manager that returns the communicator.

    Raises:
        CommunicatorError: The communicator is unknown or closed, or this process is not one of its ranks.
        NotStartedError: torchmpi is not started.

    Example:
        ::

            with mpi.use(1):
                mpi.allreduce(tensor)
    """
    return runtime.current().communicators.use(comm)


def communicator(level: int | None = None) -> Communicator:
    """Return the current communicator, or that of a level.

    Args:
        level: The number of a level; None: the current communicator.

    Returns:
        The communicator.

    Raises:
        CommunicatorError: There is no such level.
        NotStartedError: torchmpi is not started.

    Example:
        ::

            print(mpi.communicator(0).size)
    """
    return runtime.current().communicators.find(level)


def communicator_names() -> str:
    """Return the levels of this rank as text.

    Returns:
        One line for each level; an asterisk marks the current one.

    Raises:
        NotStartedError: torchmpi is not started.

    Example:
        ::

            print(mpi.communicator_names())
    """
    return runtime.current().communicators.names()


def is_cartesian_communicator() -> bool:
    """Return whether all inner groups of the current level have the same size.

    Returns:
        True if all inner groups have the same size.

    Raises:
        NotStartedError: torchmpi is not started.

    Example:
        ::

            with mpi.use(1):
                print(mpi.is_cartesian_communicator())
    """
    return runtime.current().communicators.current.is_cartesian


def num_nodes_in_communicator() -> int:
    """Return the number of hosts on which the ranks of the current communicator run.

    Returns:
        The number of hosts, at least 1.

    Raises:
        NotStartedError: torchmpi is not started.

    Example:
        ::

            print(mpi.num_nodes_in_communicator(), "hosts")
    """
    return runtime.current().communicators.current.num_nodes


def set_collective_span(begin: int, end: int) -> None:
    """Run collectives on level `begin` in steps over the levels down to `end`. Collective.

    With groups of equal sizes and ``start(cartesian=True)`` there are two steps (inside the groups, then across them),
    otherwise three (to the first rank of each group, across those ranks, and back).

    Args:
        begin: The level of the collectives.
        end: The last level of the span; ``begin == end`` runs collectives without steps.

    Raises:
        CommunicatorError: A level does not exist, or the span is invalid.
        MismatchError: The ranks passed different spans, or make different calls.
        NotStartedError: torchmpi is not started.

    Example:
        ::

            mpi.set_collective_span(0, 1)
    """
    runtime.current().communicators.set_span(begin, end)


# --- selection of backends ---------------------------------------------------------------------------------


def collective_availability() -> Availability:
    """Return the calls that each backend supports in this job.

    Returns:
        A dictionary from (backend, collective, device, mode) to ``available`` or ``unavailable: reason``. Printed, it
        is a table.

    Raises:
        NotStartedError: torchmpi is not started.

    Example:
        ::

            print(mpi.collective_availability())
            mpi.collective_availability()["shm", "allreduce", "cpu", "sync"]
    """
    return runtime.current().selector.availability()


class CollectiveSelector(Mapping[Key, Rule]):
    """The selection table: (collective, device, span, mode) -> pairs of a size in bytes and a transport.

    A pair applies to tensors up to that size; None is any size. `span` is ``host`` (all ranks of the communicator on
    one host), ``across`` (each on a host of its own) or ``hosts`` (several hosts, some with several ranks); `mode` is
    ``sync`` or ``async``. Changes apply from the next call on, to existing and new communicators, until ``stop()``. All
    ranks must make the same changes at the same point of the program. The argument ``backend=`` of a call overrides the
    table. Printed, it shows the spans that occur in this job.

    Example:
        ::

            print(mpi.collective_selector)
            mpi.collective_selector["allreduce", "cpu", "host", "sync"]  # ((None, 'mpi'),)
            mpi.collective_selector.set("allreduce", "mpi", up_to_bytes=4096)  # larger ones unchanged
            mpi.collective_selector["reduce", "cpu", "host", "async"] = [(65536, "mpi"), (None, "mpi")]
            mpi.collective_selector.reset()
    """

    def set(
        self,
        collective: CollectiveName,
        backend: BackendName,
        *,
        device: DeviceType | None = "cpu",
        span: Span | None = None,
        mode: Mode | None = None,
        up_to_bytes: int | None = None,
    ) -> None:
        """Select a backend for a collective.

        Args:
            collective: The name of the collective.
            backend: The name of the backend.
            device: ``cpu`` or ``cuda``; None: both.
            span: ``host``, ``across`` or ``hosts``; None: all spans that the backend supports.
            mode: ``sync`` or ``async``; None: both.
            up_to_bytes: Largest size to which this applies; larger tensors keep their rule. None: all sizes.

        Raises:
            ArgumentError: A name is unknown.
            BackendUnavailableError: The backend does not support the call, for the reason in the message.
            NotStartedError: torchmpi is not started.

        Example:
            ::

                mpi.collective_selector.set("broadcast", "mpi", span="host", mode="sync")
        """
        runtime.current().selector.set(
            collective, backend, device=device, span=span, mode=mode, up_to_bytes=up_to_bytes
        )

    def reset(self) -> None:
        """Restore the default table, also if it was measured."""
        runtime.current().selector.reset()

    def __getitem__(self, key: tuple[str, str, str, str]) -> Rule:
        return runtime.current().selector.rule(key)

    def __setitem__(
        self, key: tuple[str, str, str, str], rule: BackendName | Iterable[tuple[int | None, BackendName]]
    ) -> None:
        runtime.current().selector.assign(key, rule)

    def __iter__(self) -> Iterator[Key]:
        return iter(runtime.current().selector.table)

    def __len__(self) -> int:
        return len(runtime.current().selector.table)

    def __str__(self) -> str:
        return runtime.current().selector.text()

    def __repr__(self) -> str:
        state = f"{len(self)} rules" if runtime.is_running() else "not started"
        return f"<collective_selector: {state}>"


collective_selector = CollectiveSelector()


def collective_selector_to_string(
    collective: CollectiveName | None = None,
    device: DeviceType | None = None,
    span: Span | None = None,
    mode: Mode | None = None,
    backend: BackendName | None = None,
) -> str:
    """Return the selection table, or a part of the table, as text.

    Args:
        collective: Only this collective.
        device: Only the rules for ``cpu`` or ``cuda``.
        span: Only ``host``, ``across`` or ``hosts``; None: the spans that occur in this job.
        mode: Only the rules for ``sync`` or ``async`` calls.
        backend: Only lines that name this backend.

    Returns:
        One line for each collective and span; an empty string if no rule is left.

    Raises:
        ArgumentError: A name is unknown.
        BackendUnavailableError: The backend is unknown.
        NotStartedError: torchmpi is not started.

    Example:
        ::

            print(mpi.collective_selector_to_string())
            print(mpi.collective_selector_to_string("allreduce", "cpu", mode="async"))
    """
    return runtime.current().selector.text(collective, device, span, mode, backend)
