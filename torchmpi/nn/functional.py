"""Collectives that autograd differentiates.

Each function returns a new tensor. The gradient is that of the sum of the losses of all ranks: what a rank gets for its
input is the sum of the contributions of all ranks that have received it. Backward is collective too: if the result
takes part in a loss, all ranks must run backward, in the same order of these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from .. import collectives
from ..collectives import exchange
from ..communicators.communicator import Communicator
from ..communicators.levels import Comm
from ..errors import ArgumentError, rank_prefix
from ..session import runtime
from ..tensors import partition
from ..tensors.operation_specs import OPERATIONS

_Map = Callable[[Tensor], Tensor]

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "reduce_scatter", "sendreceive"]


class _LinearMap(torch.autograd.Function):
    """A linear function; its gradient is the transposed function, also of higher order."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, function: _Map, transposed: _Map) -> Tensor:
        ctx.functions = function, transposed
        return function(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        function, transposed = ctx.functions
        return linear_map(gradient, transposed, function), None, None


def linear_map(tensor: Tensor, function: _Map, transposed: _Map) -> Tensor:
    """Apply a linear function of which the transposed function is known. Both return new tensors."""
    apply: Callable[..., Tensor] = _LinearMap.apply
    return apply(tensor, function, transposed)


def allreduce(tensor: Tensor, *, op: Literal["sum", "avg"] = "sum", comm: Comm = None) -> Tensor:
    """Add or average the tensors of all ranks. The gradients are added or averaged too.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        op: ``sum`` or ``avg``.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Returns:
        The result, on every rank.

    Raises:
        ArgumentError: The operation is another one.
        MismatchError: The ranks made different calls; raised on all ranks, in backward too.

    Example:
        total = mpinn.functional.allreduce(partial_sums)
        loss(total).backward()
    """
    _check_op(op)
    communicator = runtime.communicator(comm)

    def reduced(values: Tensor) -> Tensor:
        result: Tensor = collectives.allreduce(_copy(values), op=op, comm=communicator)
        return result

    return linear_map(tensor, reduced, reduced)


def broadcast(tensor: Tensor, root: int = 0, *, comm: Comm = None) -> Tensor:
    """Copy the root's values to every rank. The root gets the sum of the gradients, the other ranks zeros.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        root: The rank whose values are copied.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Returns:
        The root's values, on every rank.

    Raises:
        ArgumentError: `root` is not a rank of the communicator.
        MismatchError: The ranks made different calls; raised on all ranks, in backward too.

    Example:
        weight = mpinn.functional.broadcast(weight, root=0)
    """
    communicator = runtime.communicator(comm)

    def copied(values: Tensor) -> Tensor:
        result: Tensor = collectives.broadcast(_copy(values), root, comm=communicator)
        return result

    def added(gradient: Tensor) -> Tensor:
        result: Tensor = collectives.reduce(_copy(gradient), root, comm=communicator)
        return result if communicator.rank == root else torch.zeros_like(result)

    return linear_map(tensor, copied, added)


def allgather(tensor: Tensor, *, comm: Comm = None) -> Tensor:
    """Concatenate the tensors of all ranks along dim 0. A rank gets the sum of the gradients of its rows.

    Args:
        tensor: A tensor; the length of dim 0 may differ between ranks. A 0-dim tensor counts as one element.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Returns:
        The concatenation, on every rank.

    Raises:
        MismatchError: The ranks made different calls; raised on all ranks, in backward too.

    Example:
        features = mpinn.functional.allgather(encoder(x))   # those of the whole batch, for a contrastive loss
    """
    communicator = runtime.communicator(comm)
    shape = tensor.shape
    num_rows = shape[0] if shape else 1

    def gathered(values: Tensor) -> Tensor:
        result: Tensor = collectives.allgather(values.detach(), comm=communicator)
        return result

    def added(gradient: Tensor) -> Tensor:
        lengths = collectives.allgather(num_rows, comm=communicator)
        if lengths == [length for _, length in partition.even_partition(sum(lengths), communicator.size)]:
            return collectives.reduce_scatter(gradient, comm=communicator).view(shape)
        total: Tensor = collectives.allreduce(_copy(gradient), comm=communicator)
        return total.narrow(0, sum(lengths[: communicator.rank]), num_rows).clone().view(shape)

    return linear_map(tensor, gathered, added)


def reduce_scatter(tensor: Tensor, *, op: Literal["sum", "avg"] = "sum", comm: Comm = None) -> Tensor:
    """Add or average the tensors of all ranks, and return this rank's part of dim 0. The gradients are gathered.

    Args:
        tensor: A tensor of the same shape and dtype on every rank. Dim 0 is split evenly, the first ranks take one row
            more.
        op: ``sum`` or ``avg``.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Returns:
        This rank's rows of the result.

    Raises:
        ArgumentError: The operation is another one.
        MismatchError: The ranks made different calls; raised on all ranks, in backward too.

    Example:
        mine = mpinn.functional.reduce_scatter(partial_sums)
    """
    _check_op(op)
    communicator, shape = runtime.communicator(comm), tensor.shape

    def scattered(values: Tensor) -> Tensor:
        return collectives.reduce_scatter(values.detach(), op=op, comm=communicator)

    def gathered(gradient: Tensor) -> Tensor:
        result: Tensor = collectives.allgather(gradient, comm=communicator)
        return (result / communicator.size if OPERATIONS[op].finish else result).view(shape)

    return linear_map(tensor, scattered, gathered)


def alltoall(tensor: Tensor, splits: Iterable[int] | None = None, *, comm: Comm = None) -> Tensor:
    """Send part j of dim 0 to rank j, and concatenate the received parts. The gradients of the parts are sent back.

    Args:
        tensor: The tensor to split. The length of dim 0 may differ between ranks.
        splits: How many rows of dim 0 each rank gets, on all ranks or on none; None to split evenly, the first ranks
            get one row more.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Returns:
        The received parts, in rank order.

    Raises:
        ArgumentError: The splits do not add up to the length of dim 0.
        MismatchError: The ranks made different calls; raised on all ranks, in backward too.

    Example:
        tokens = mpinn.functional.alltoall(tokens, splits=tokens_per_expert)
    """
    group = runtime.communicator(comm).intra
    if splits is None and tensor.dim():
        return _alltoall_of_even_parts(tensor, runtime.communicator(comm))
    sent = exchange.check_splits(group, tensor, () if splits is None else splits)
    received: list[int] = []

    def exchanged(values: Tensor) -> Tensor:
        rows, received[:] = exchange.alltoall_rows(group, values, sent)
        return rows

    return linear_map(tensor, exchanged, lambda gradient: exchange.alltoall_rows(group, gradient, received)[0])


def _alltoall_of_even_parts(tensor: Tensor, comm: Communicator) -> Tensor:
    """Exchange even parts in one call, which does not tell the numbers of rows of the others; backward asks them."""
    num_rows = tensor.shape[0]

    def exchanged(values: Tensor) -> Tensor:
        return collectives.alltoall(values.detach(), comm=comm)

    def returned(gradient: Tensor) -> Tensor:
        lengths = collectives.allgather(num_rows, comm=comm)
        if len(set(lengths)) == 1:  # then the parts to return are even too
            return exchanged(gradient)
        received = [partition.part_of(length, comm.size, comm.rank)[1] for length in lengths]
        return exchange.alltoall_rows(comm.intra, gradient, received)[0]

    return linear_map(tensor, exchanged, returned)


def sendreceive(tensor: Tensor, src: int, dst: int, *, comm: Comm = None) -> Tensor:
    """Send a tensor to one rank and receive one from another. The gradient is sent back to `src`.

    Args:
        tensor: The tensor to send, of the same shape and dtype as the tensor to receive.
        src: The rank to receive from.
        dst: The rank to send to.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Returns:
        The received tensor.

    Raises:
        ArgumentError: `src` or `dst` is not a rank of the communicator.
        MismatchError: The sender used another shape or dtype, in backward too.

    Example:
        left, right = (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
        border = mpinn.functional.sendreceive(x[-1], src=left, dst=right)
    """
    communicator = runtime.communicator(comm)

    def shifted(values: Tensor) -> Tensor:
        return collectives.sendreceive(_copy(values), src, dst, comm=communicator)

    def shifted_back(gradient: Tensor) -> Tensor:
        return collectives.sendreceive(_copy(gradient), dst, src, comm=communicator)

    return linear_map(tensor, shifted, shifted_back)


def _copy(values: Tensor) -> Tensor:
    return values.detach().clone(memory_format=torch.contiguous_format)


def _check_op(op: str) -> None:
    if op not in OPERATIONS or OPERATIONS[op].combine != "sum":
        raise ArgumentError(
            f"{rank_prefix()}op={op!r} is not differentiable here. Use 'sum' or 'avg'; mpi.allreduce has the others."
        )
