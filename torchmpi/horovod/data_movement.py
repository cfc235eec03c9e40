"""The other collectives of Horovod's torch module, asynchronous and in place: gathers, broadcasts, exchanges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
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
    for tensor in tensors:
        if not tensor.dim():
            raise ValueError(f"{collective}: a 0-dim tensor has no rows. Pass tensor.view(1).")


class EachTensor(NamedOperation):
    """A call with each of some tensors.

    Args:
        collective, process_set, tensors: As for the base.
        run: Makes the call with a tensor in this thread.
        start: Makes it in the background.
        finish: Converts a result; None if it stays as it is.
    """

    def __init__(
        self,
        collective: str,
        process_set: ProcessSet,
        tensors: Sequence[Tensor],
        run: Callable[[Tensor], Tensor],
        start: Callable[[Tensor], Handle[Tensor]],
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(collective, process_set, list(tensors))
        self._run, self._start, self._finish = run, start, finish

    def _call(self) -> list[Tensor]:
        return [self._run(values_of(tensor)) for tensor in self._tensors]

    def _begin(self) -> Handle[Any]:
        handles = [self._start(values_of(tensor)) for tensor in self._tensors]
        return JoinedHandle(handles, handles, self._collective)

    def _results(self, ended: Sequence[Any]) -> list[Tensor]:
        results = [each.wait() if isinstance(each, Handle) else each for each in ended]
        return results if self._finish is None else list(map(self._finish, results))


def gather(collective: str, tensors: Sequence[Tensor], process_set: ProcessSet) -> NamedOperation:
    """Return the gathers of several tensors."""
    comm = member_of(process_set)
    check_rows(collective, tensors)
    run, start = partial(collectives.allgather, comm=comm), partial(collectives.allgather_async, comm=comm)
    return EachTensor(collective, process_set, tensors, run, start)


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
    run = partial(collectives.broadcast, root=root, comm=comm)
    start = partial(collectives.broadcast_async, root=root, comm=comm)
    return EachTensor("broadcast", process_set, [target], run, start, lambda _: target)


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


def check_even(tensor: Tensor, comm: Communicator) -> None:
    """Raise unless each rank gets as many rows."""
    check_rows("alltoall", [tensor])
    if tensor.shape[0] % comm.size:
        raise ValueError(f"alltoall: {tensor.shape[0]} rows cannot be divided evenly by {comm.size}. Pass splits.")


def checked_splits(tensor: Tensor, splits: Any, comm: Communicator) -> list[int]:
    """Return the number of rows for each rank."""
    if splits is None:
        check_even(tensor, comm)
        return [tensor.shape[0] // comm.size] * comm.size
    check_rows("alltoall", [tensor])
    if isinstance(splits, Tensor) and (splits.dtype is not torch.int32 or splits.dim() != 1):
        raise ValueError(f"alltoall: splits must be a list, or a 1-dim tensor of int32, not of {splits.dtype}.")
    numbers = [int(each) for each in splits]
    if len(numbers) != comm.size or min(numbers) < 0 or sum(numbers) > tensor.shape[0]:
        raise ValueError(
            f"alltoall: splits={numbers} needs one number for each of {comm.size} ranks, and {tensor.shape[0]} rows."
        )
    return numbers


def even_alltoall(tensor: Tensor, process_set: ProcessSet) -> NamedOperation:
    """Return the exchange of equal parts of rows, in one call instead of two; its result: the received rows."""
    comm = member_of(process_set)
    run, start = partial(collectives.alltoall, comm=comm), partial(collectives.alltoall_async, comm=comm)
    return EachTensor("alltoall", process_set, [tensor], run, start)


def alltoall(tensor: Tensor, splits: Any, process_set: ProcessSet) -> NamedOperation:
    """Return the exchange of rows; its results: the received rows, and a tensor with their number from each rank."""
    return _Alltoall(tensor, splits, process_set)


class _Alltoall(NamedOperation):
    def __init__(self, tensor: Tensor, splits: Any, process_set: ProcessSet) -> None:
        super().__init__("alltoall", process_set, [tensor])
        comm = member_of(process_set)
        self._numbers, self._group = checked_splits(tensor, splits, comm), comm.intra
        self._device = splits.device if isinstance(splits, Tensor) else "cpu"
        given, num_rows = values_of(tensor), sum(self._numbers)
        self._rows = given if num_rows == given.shape[0] else given[:num_rows]

    def _call(self) -> tuple[Tensor, list[int]]:
        return exchange.alltoall_rows(self._group, self._rows, self._numbers)

    def _begin(self) -> Handle[Any]:
        return exchange.submit_alltoall_rows(self._group, self._rows, self._numbers, lambda *result: result)

    def _results(self, ended: tuple[Tensor, list[int]]) -> list[Tensor]:
        rows, received = ended
        return [rows, torch.tensor(received, dtype=torch.int32, device=self._device)]


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
    given = tensors if before == 1 else [scaled_copy(tensor, before) for tensor in tensors]
    return EachTensor(
        collective,
        process_set,
        given,
        lambda each: collectives.reduce_scatter(each, op=native_op(op, each), comm=comm),
        lambda each: collectives.reduce_scatter_async(each, op=native_op(op, each), comm=comm),
        lambda part: finished(part, op, comm.size, after),
    )


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
