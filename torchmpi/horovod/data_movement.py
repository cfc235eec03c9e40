"""The other collectives of Horovod's torch module, asynchronous and in place: gathers, broadcasts, exchanges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import collectives
from ..argument_types import checks_types
from ..collectives import exchange
from ..communicators.communicator import Communicator
from ..communicators.handle import Handle, JoinedHandle
from ..errors import MismatchError
from .exceptions import HorovodInternalError, internal_errors
from .operation_table import NamedOperation, first
from .process_sets import ProcessSet, global_process_set, member_of, world
from .scaling import Average, Sum, finished, native_op, scaled_copy, values_of


def check_rows(collective: str, tensors: Iterable[Tensor]) -> None:
    """Raise if a tensor has no dim 0."""
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{collective}: a 0-dim tensor has no rows. Pass tensor.view(1).")


def on_each(
    collective: str,
    process_set: ProcessSet,
    tensors: Sequence[Tensor],
    run: Callable[[Tensor], Tensor],
    start: Callable[[Tensor], Handle[Tensor]],
    finish: Callable[[Tensor], Tensor] = lambda result: result,
) -> NamedOperation:
    """Return the operation that makes a call with each of some tensors; `finish` converts its result."""

    def begin() -> Handle[Any]:
        handles = [start(tensor) for tensor in tensors]
        return JoinedHandle(handles, handles, collective)

    def results(ended: Sequence[Any]) -> list[Tensor]:
        return [finish(each.wait() if isinstance(each, Handle) else each) for each in ended]

    return NamedOperation(
        collective, process_set, list(tensors), lambda: [run(tensor) for tensor in tensors], begin, results
    )


def gather(collective: str, tensors: Sequence[Tensor], process_set: ProcessSet) -> NamedOperation:
    """Return the gathers of several tensors."""
    comm = member_of(process_set)
    check_rows(collective, tensors)
    return on_each(
        collective,
        process_set,
        tensors,
        lambda tensor: collectives.allgather(values_of(tensor), comm=comm),
        lambda tensor: collectives.allgather_async(tensor.detach(), comm=comm),
    )


@checks_types
def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Run :func:`allgather` in the background, with the same parameters.

    Returns:
        A handle for `synchronize` and `poll`.

    Example:
        everything = hvd.synchronize(hvd.allgather_async(tensor))
    """
    return gather("allgather", [tensor], process_set).start(name, first)


@checks_types
def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Run :func:`grouped_allgather` in the background, with the same parameters.

    Returns:
        A handle for `poll`, and for `synchronize`, which returns a tuple of the results.

    Example:
        rows, labels = hvd.synchronize(hvd.grouped_allgather_async([rows, labels]))
    """
    return gather("grouped_allgather", tensors, process_set).start(name, tuple)


def broadcast_into(target: Tensor, root_rank: int, process_set: ProcessSet) -> NamedOperation:
    """Return a broadcast in place."""
    comm, root = member_of(process_set), process_set.position(root_rank, "broadcast")
    return on_each(
        "broadcast",
        process_set,
        [target],
        lambda tensor: collectives.broadcast(values_of(tensor), root, comm=comm),
        lambda tensor: collectives.broadcast_async(values_of(tensor), root, comm=comm),
        lambda _: target,
    )


@checks_types
def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Run :func:`broadcast` in the background, into a new tensor, with the same parameters.

    Returns:
        A handle for `synchronize` and `poll`.

    Example:
        handle = hvd.broadcast_async(tensor, root_rank=0)
    """
    return broadcast_into(scaled_copy(tensor, 1), root_rank, process_set).start(name, first)


@checks_types
def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Run :func:`broadcast` in the background, in place, with the same parameters.

    Returns:
        A handle for `synchronize` and `poll`.

    Example:
        hvd.synchronize(hvd.broadcast_async_(parameter.data, root_rank=0))
    """
    return broadcast_into(tensor, root_rank, process_set).start(name, first)


@checks_types
def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Run :func:`broadcast` in place, with the same parameters.

    Returns:
        The tensor.

    Example:
        hvd.broadcast_(parameter.data, root_rank=0)
    """
    broadcast_into(tensor, root_rank, process_set).run(name)
    return tensor


def checked_splits(tensor: Tensor, splits: Any, comm: Communicator) -> list[int]:
    """Return the number of rows for each rank."""
    check_rows("alltoall", [tensor])
    if splits is None:
        if tensor.shape[0] % comm.size:
            raise ValueError(f"alltoall: {tensor.shape[0]} rows cannot be divided evenly by {comm.size}. Pass splits.")
        return [tensor.shape[0] // comm.size] * comm.size
    if isinstance(splits, Tensor) and (splits.dtype is not torch.int32 or splits.dim() != 1):
        raise ValueError(f"alltoall: splits must be a list, or a 1-dim tensor of int32, not of {splits.dtype}.")
    numbers = [int(each) for each in splits]
    if len(numbers) != comm.size or min(numbers) < 0 or sum(numbers) > tensor.shape[0]:
        raise ValueError(
            f"alltoall: splits={numbers} needs one number for each of {comm.size} ranks, and {tensor.shape[0]} rows."
        )
    return numbers


def alltoall(tensor: Tensor, splits: Any, process_set: ProcessSet) -> NamedOperation:
    """Return the exchange of rows; its results: the received rows, and a tensor with their number from each rank."""
    comm = member_of(process_set)
    numbers, group = checked_splits(tensor, splits, comm), comm.intra
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")
    sent = tensor.detach()[: sum(numbers)]

    def start() -> Handle[Any]:
        return exchange.submit_alltoall_rows(group, sent, numbers, lambda rows, received: (rows, received))

    def finish(result: tuple[Tensor, list[int]]) -> list[Tensor]:
        rows, received = result
        return [rows, torch.tensor(received, dtype=torch.int32, device=device)]

    return NamedOperation(
        "alltoall", process_set, [tensor], lambda: exchange.alltoall_rows(group, sent, numbers), start, finish
    )


@checks_types
def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Run :func:`alltoall` in the background, with the same parameters.

    Returns:
        A handle; `synchronize` returns the received rows and a tensor with their number from each rank.

    Example:
        rows, received_splits = hvd.synchronize(hvd.alltoall_async(tensor, [1, 2]))
    """
    return alltoall(tensor, splits, process_set).start(name, tuple)


def scatter(
    collective: str, tensors: Sequence[Tensor], op: int, factors: tuple[float, float], process_set: ProcessSet
) -> NamedOperation:
    """Return the scattered reductions of several tensors."""
    comm, (before, after) = member_of(process_set), factors
    if op not in (Average, Sum):
        raise HorovodInternalError(f"{collective}: op must be hvd.Average or hvd.Sum.")
    check_rows(collective, tensors)
    return on_each(
        collective,
        process_set,
        tensors,
        lambda each: collectives.reduce_scatter(_scaled(each, before), op=native_op(op, each), comm=comm),
        lambda each: collectives.reduce_scatter_async(_scaled(each, before), op=native_op(op, each), comm=comm),
        lambda part: finished(part, op, comm.size, after),
    )


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return values_of(tensor) if factor == 1 else scaled_copy(tensor, factor)


@checks_types
def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Run :func:`reducescatter` in the background, with the same parameters but `compression`.

    Returns:
        A handle for `synchronize` and `poll`.

    Example:
        mine = hvd.synchronize(hvd.reducescatter_async(tensor, op=hvd.Sum))
    """
    factors = (prescale_factor, postscale_factor)
    return scatter("reducescatter", [tensor], op, factors, process_set).start(name, first)


@checks_types
def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Run :func:`grouped_reducescatter` in the background, with the same parameters but `compression`.

    Returns:
        A handle for `poll`, and for `synchronize`, which returns a tuple of the results.

    Example:
        mine = hvd.synchronize(hvd.grouped_reducescatter_async(tensors, op=hvd.Sum))
    """
    factors = (prescale_factor, postscale_factor)
    return scatter("grouped_reducescatter", tensors, op, factors, process_set).start(name, tuple)


@checks_types
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called this function. Other operations in flight may end later.

    Args:
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: A rank has left.

    Example:
        hvd.barrier()
    """
    member_of(process_set)
    with internal_errors():
        collectives.barrier(comm=process_set.barrier_communicator)


@checks_types
def join(device: int = -1) -> int:
    """Wait until all ranks have joined. All ranks must have made the same calls before.

    Horovod lets a rank without data join early, and uses zeros for it in the calls of the others. Calls here are
    matched by their order, so that a rank which joins early raises an error on all ranks.

    Args:
        device: Not used.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: Other ranks still make calls.

    Example:
        last = hvd.join()
    """
    comm = world()
    try:
        times = collectives.allgather(time.time(), comm=comm)
    except MismatchError as error:
        raise HorovodInternalError(
            f"join(): other ranks still make calls ({error}) Give all ranks the same number of batches (drop_last, or "
            "a DistributedSampler), or use the block torchmpi.nn.join(model) with torchmpi.nn.DistributedOptimizer."
        ) from error
    return max(range(comm.size), key=lambda rank: times[rank])
