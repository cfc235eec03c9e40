"""The synchronous collectives of Horovod's torch module, which autograd differentiates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import collectives
from ..argument_types import checks_types
from ..communicators.communicator import Communicator
from ..errors import TorchMPIError
from ..nn import functional
from ..tensors.dtypes import DIVISIBLE_INTEGERS
from ..timeline import events
from . import data_movement, mpi_ops
from .compressors import Compression, Compressor
from .exceptions import HorovodInternalError, internal_errors, refuse
from .operation_table import first
from .process_sets import ProcessSet, global_process_set, member_of
from .scaling import NAMES, Average, Sum, scaled_copy, values_of


class _ScaledGradient(torch.autograd.Function):
    """The identity, with a factor for the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def _with_gradient_times(factor: float, tensor: Tensor) -> Tensor:
    """Return the tensor; its gradient will be multiplied, where Horovod's differs from that of the summed losses."""
    apply: Callable[..., Tensor] = _ScaledGradient.apply
    return apply(tensor, factor)


def _is_recorded(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def _is_native(tensor: Tensor, name: str | None) -> bool:
    """Return whether a call is that of torchmpi alone: nothing shows its name, and no gradient is recorded."""
    return name is None and events.recorder is None and not _is_recorded(tensor)


def _native(call: Callable[..., Tensor], tensor: Tensor, comm: Communicator, **options: Any) -> Tensor:
    """Make a call of torchmpi; its errors are Horovod's."""
    try:
        return call(values_of(tensor), comm=comm, **options)
    except TorchMPIError as error:
        refuse(error)
        raise


@checks_types
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine the tensors of all ranks into a new tensor. The gradient is reduced by the same operation.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        average: Deprecated, use `op`.
        name: Name of the operation, not used by another one that has not ended.
        compression: Conversion for the reduction, such as ``hvd.Compression.fp16``.
        op: Average, Sum, Adasum, Min, Max or Product; None for the average.
        prescale_factor: Factor for the tensor before the reduction; the same on all ranks.
        postscale_factor: Factor for the result; the same on all ranks.
        process_set: The ranks that take part.

    Returns:
        The result.

    Raises:
        ValueError: The arguments cannot be used, or the name is in use.
        HorovodInternalError: The ranks made different calls; raised on all ranks.

    Example:
        loss = hvd.allreduce(loss, name="loss")
    """
    op = mpi_ops.chosen_op(op, average)
    compressed, context = compression.compress(tensor)
    reduced = _reduced(compressed, name, op, (prescale_factor, postscale_factor), process_set)
    return compression.decompress(reduced, context)


def _reduced(
    tensor: Tensor, name: str | None, op: int, factors: tuple[float, float], process_set: ProcessSet
) -> Tensor:
    def run(values: Tensor) -> Tensor:
        reduction = mpi_ops.NamedReduction("allreduce", [values], op, factors, process_set, in_place=False)
        return first(reduction.run(name))

    if not _is_recorded(tensor):
        return run(tensor)
    if op not in (Average, Sum):
        return functional.linear_map(tensor, run, run)  # not linear: Horovod reduces the gradient like the tensor
    before, after = factors
    with internal_errors():
        total = functional.allreduce(
            _times(tensor, before), op="avg" if op == Average else "sum", comm=member_of(process_set)
        )
    return _times(total, after)


@checks_types
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Run :func:`allreduce` on several tensors in few messages, with the same parameters.

    Returns:
        The list of the results.

    Example:
        means = hvd.grouped_allreduce([loss, accuracy])
    """
    op, factors = mpi_ops.chosen_op(op, average), (prescale_factor, postscale_factor)
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed, contexts = [each for each, _ in pairs], [context for _, context in pairs]
    results: Sequence[Tensor]
    if any(_is_recorded(tensor) for tensor in compressed):
        results = [_reduced(tensor, None, op, factors, process_set) for tensor in compressed]
    else:
        reduction = mpi_ops.NamedReduction("grouped_allreduce", compressed, op, factors, process_set, in_place=False)
        results = reduction.run(name)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


@checks_types
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the tensors of all ranks along dim 0. A rank gets the average of the gradients of its rows.

    Args:
        tensor: A tensor with at least one dimension; the length of dim 0 may differ between ranks.
        name: Name of the operation.
        process_set: The ranks that take part.

    Returns:
        The concatenation.

    Raises:
        ValueError: The tensor has no dimension, or the name is in use.
        HorovodInternalError: The ranks made different calls; raised on all ranks.

    Example:
        everything = hvd.allgather(torch.tensor([hvd.rank()]))
    """
    comm = member_of(process_set)
    data_movement.check_rows("allgather", [tensor])
    if _is_native(tensor, name):
        return _native(collectives.allgather, tensor, comm)
    if not _is_recorded(tensor):
        return first(data_movement.gather("allgather", [tensor], process_set).run(name))
    with internal_errors():
        return functional.allgather(_with_gradient_times(1 / comm.size, tensor), comm=comm)


@checks_types
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Run :func:`allgather` on several tensors, with the same parameters.

    Returns:
        The list of the results.

    Example:
        rows, labels = hvd.grouped_allgather([rows, labels])
    """
    if any(_is_recorded(tensor) for tensor in tensors):
        return [allgather(tensor, None, process_set) for tensor in tensors]
    return data_movement.gather("grouped_allgather", tensors, process_set).run(name)


@checks_types
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Copy the root's values to a new tensor on every rank. The root gets the average of the gradients.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        root_rank: The rank, among all ranks, whose values are copied.
        name: Name of the operation.
        process_set: The ranks that take part.

    Returns:
        The root's values.

    Raises:
        ValueError: The root is not in the process set, or the name is in use.
        HorovodInternalError: The ranks made different calls; raised on all ranks.

    Example:
        seed = hvd.broadcast(torch.tensor(1234), root_rank=0)
    """
    if not _is_recorded(tensor):
        return first(data_movement.broadcast_into(scaled_copy(tensor, 1), root_rank, process_set).run(name))
    comm = member_of(process_set)
    root = process_set.position(root_rank, "broadcast")
    with internal_errors():
        return functional.broadcast(_with_gradient_times(1 / comm.size, tensor), root, comm=comm)


@checks_types
def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor | tuple[Tensor, Tensor]:
    """Send part j of dim 0 to rank j, and concatenate the received parts. The gradients of the parts are sent back.

    Args:
        tensor: The tensor to split along dim 0. Rows after the last split are not sent.
        splits: How many rows each rank gets: a list, or a tensor of int32; None to split evenly.
        name: Name of the operation.
        process_set: The ranks that take part.

    Returns:
        The received rows; with `splits`, also a tensor with their number from each rank.

    Raises:
        ValueError: The splits do not fit, or the name is in use.
        HorovodInternalError: The ranks made different calls; raised on all ranks.

    Example:
        rows, received_splits = hvd.alltoall(rows, splits=[1, 2])
    """
    comm = member_of(process_set)
    if splits is None:
        data_movement.check_even(tensor, comm)
        if _is_native(tensor, name):
            return _native(collectives.alltoall, tensor, comm)
        if not _is_recorded(tensor):
            return first(data_movement.even_alltoall(tensor, process_set).run(name))
        with internal_errors():
            return functional.alltoall(tensor, comm=comm)
    if not _is_recorded(tensor):
        rows, received = data_movement.alltoall(tensor, splits, process_set).run(name)
        return rows, received
    numbers = data_movement.checked_splits(tensor, splits, comm)
    with internal_errors():
        rows = functional.alltoall(tensor[: sum(numbers)], numbers, comm=comm)
        received = collectives.alltoall(torch.tensor(numbers, dtype=torch.int32, device="cpu"), comm=comm)
    return rows, received.to(splits.device) if isinstance(splits, Tensor) else received


@checks_types
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine the tensors of all ranks, and return this rank's rows; the first ranks take one row more.

    The gradients are gathered; those of a sum are multiplied by the number of ranks, as in Horovod.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        name: Name of the operation.
        compression: As for :func:`allreduce`.
        op: Average or Sum.
        process_set: The ranks that take part.
        prescale_factor: Factor for the tensor before the reduction; the same on all ranks.
        postscale_factor: Factor for the result; the same on all ranks.

    Returns:
        This rank's rows of the result.

    Raises:
        ValueError: The tensor has no dimension, or the name is in use.
        HorovodInternalError: The operation is another one, or the ranks made different calls.

    Example:
        mine = hvd.reducescatter(torch.ones(hvd.size(), 3), op=hvd.Sum)
    """
    factors = (prescale_factor, postscale_factor)
    compressed, context = compression.compress(tensor)
    return compression.decompress(_scattered(compressed, name, op, factors, process_set), context)


def _scattered(
    tensor: Tensor, name: str | None, op: int, factors: tuple[float, float], process_set: ProcessSet
) -> Tensor:
    comm, (before, after) = member_of(process_set), factors
    if op not in (Average, Sum):
        raise HorovodInternalError("reducescatter: op must be hvd.Average or hvd.Sum.")
    data_movement.check_rows("reducescatter", [tensor])
    is_divided_after = op == Average and tensor.dtype in DIVISIBLE_INTEGERS
    if before == after == 1 and not is_divided_after and _is_native(tensor, name):
        return _native(collectives.reduce_scatter, tensor, comm, op=NAMES[op])
    if not _is_recorded(tensor):
        return first(data_movement.scatter("reducescatter", [tensor], op, factors, process_set).run(name))
    with internal_errors():
        part = functional.reduce_scatter(
            _times(_with_gradient_times(comm.size, tensor), before), op="avg" if op == Average else "sum", comm=comm
        )
    return _times(part, after)


@checks_types
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Run :func:`reducescatter` on several tensors, with the same parameters.

    Returns:
        The list of the results.

    Example:
        parts = hvd.grouped_reducescatter([weights, biases])
    """
    factors = (prescale_factor, postscale_factor)
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed, contexts = [each for each, _ in pairs], [context for _, context in pairs]
    results: Sequence[Tensor]
    if any(_is_recorded(tensor) for tensor in compressed):
        results = [_scattered(tensor, None, op, factors, process_set) for tensor in compressed]
    else:
        results = data_movement.scatter("grouped_reducescatter", compressed, op, factors, process_set).run(name)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]
