"""The collectives that move tensors and compute nothing, and the barrier; see also :mod:`.reductions`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from ..communicators.handle import Handle
from ..communicators.levels import Comm
from ..config import BackendName
from ..other_names import refuses_keywords, unknown_keyword
from ..session import runtime
from ..shared_memory import fast_path
from ..tensors import buffers
from . import signatures
from .call_arguments import check_splits
from .dispatch import BARRIER, cache_barrier, call, plan_for, submit
from .exchange import alltoall_rows, submit_alltoall_rows
from .signatures import Values

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "gather",
    "gather_async",
    "scatter",
    "scatter_async",
]

_Tensor = torch.Tensor
# The parameters op, comm and backend are passed by keyword, and `refuses_keywords` describes them so. The frequent
# functions do not mark them: beside **_unknown, defaults of keyword-only parameters would make a short call 5 % slower.


@signatures.like_broadcast
def broadcast(
    tensor: Values,
    root: int = 0,
    out: _Tensor | None = None,
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Any:
    """Copy the root's values to every rank.

    In place, unless `out` is given.

    Args:
        tensor: A tensor of the same shape and dtype on every rank, or a number.
        root: The rank whose values are copied.
        out: Tensor for the result; None to overwrite `tensor`.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

    Returns:
        `tensor`, or `out` if given; a number if `tensor` is a number.

    Raises:
        ArgumentError: The arguments cannot be used.
        MismatchError: The ranks made different calls; raised on all ranks.

    Example:
        mpi.broadcast(weights)              # every rank has the weights of rank 0
    """
    if _unknown:
        raise unknown_keyword(broadcast, _unknown)
    cached = fast_path.broadcast if out is None else fast_path.broadcast_into
    if (result := cached(tensor, out, root, comm, backend)) is not None:
        return result
    return call("broadcast", tensor, out, root, None, comm, backend)


@signatures.like_broadcast_async
def broadcast_async(
    tensor: Values,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Handle[Any]:
    """Run :func:`~torchmpi.broadcast` in the background, with the same parameters.

    Returns:
        A handle whose ``wait()`` returns the result.

    Raises:
        ArgumentError: The arguments cannot be used. Errors of the call itself are raised by ``wait()``.

    Example:
        mpi.broadcast_async(weights, root=0).wait()
    """
    if _unknown:
        raise unknown_keyword(broadcast_async, _unknown)
    return submit("broadcast", tensor, out, root=root, comm=comm, backend=backend)


@signatures.like_allgather
def allgather(
    tensor: Values,
    out: _Tensor | None = None,
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Any:
    """Concatenate the tensors of all ranks along dim 0, in rank order.

    The tensor is not changed.

    Args:
        tensor: A tensor, or a number. The length of dim 0 may differ between ranks; a 0-dim tensor counts as one
            element.
        out: Tensor for the result; None to allocate one.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

    Returns:
        The concatenation; a list of numbers if `tensor` is a number.

    Raises:
        ArgumentError: The arguments cannot be used, or `out` does not fit.
        MismatchError: The ranks made different calls; raised on all ranks.

    Example:
        mpi.allgather(torch.full((2,), mpi.rank()))     # tensor([0, 0, 1, 1, ...])
        mpi.allgather(mpi.rank())                       # [0, 1, ...]
    """
    if _unknown:
        raise unknown_keyword(allgather, _unknown)
    if (result := fast_path.allgather(tensor, out, 0, comm, backend)) is not None:
        return result
    return call("allgather", tensor, out, 0, None, comm, backend)


@signatures.like_allgather_async
def allgather_async(
    tensor: Values,
    out: _Tensor | None = None,
    *,
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Handle[Any]:
    """Run :func:`~torchmpi.allgather` in the background, with the same parameters.

    Returns:
        A handle whose ``wait()`` returns the result.

    Raises:
        ArgumentError: The arguments cannot be used. Errors of the call itself are raised by ``wait()``.

    Example:
        ranks = mpi.allgather_async(torch.tensor(mpi.rank())).wait()
    """
    if _unknown:
        raise unknown_keyword(allgather_async, _unknown)
    return submit("allgather", tensor, out, comm=comm, backend=backend)


@signatures.like_gather
def gather(
    tensor: Values,
    root: int = 0,
    out: _Tensor | None = None,
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Any:
    """Concatenate the tensors of all ranks along dim 0 on the root, in rank order.

    The tensor is not changed.

    Args:
        tensor: As for :func:`allgather`.
        root: The rank that gets the result.
        out: Tensor for the result on the root; None to allocate one.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

    Returns:
        The concatenation on the root; None on the other ranks.

    Raises:
        ArgumentError: The arguments cannot be used, or `out` does not fit.
        MismatchError: The ranks made different calls; raised on all ranks.

    Example:
        everything = mpi.gather(torch.full((2,), mpi.rank()), root=0)
    """
    if _unknown:
        raise unknown_keyword(gather, _unknown)
    cached = fast_path.give if out is None else fast_path.gather
    if cached(tensor, out, root, comm, backend) is not None:
        return out
    return call("gather", tensor, out, root, None, comm, backend)


@signatures.like_gather_async
def gather_async(
    tensor: Values,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Handle[Any]:
    """Run :func:`~torchmpi.gather` in the background, with the same parameters.

    Returns:
        A handle whose ``wait()`` returns the result.

    Raises:
        ArgumentError: The arguments cannot be used. Errors of the call itself are raised by ``wait()``.

    Example:
        everything = mpi.gather_async(torch.ones(2), root=0).wait()     # None on the other ranks
    """
    if _unknown:
        raise unknown_keyword(gather_async, _unknown)
    return submit("gather", tensor, out, root=root, comm=comm, backend=backend)


@refuses_keywords
def scatter(
    tensor: _Tensor | None,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> _Tensor:
    """Split the root's tensor along dim 0 over the ranks.

    The root's tensor is not changed. The parts are equal; if the length is not divisible, the first ranks get one row
    more.

    Args:
        tensor: The tensor to split on the root; None on the other ranks.
        root: The rank whose tensor is split.
        out: Tensor for this rank's part; None to allocate one.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

    Returns:
        This rank's part.

    Raises:
        ArgumentError: The arguments cannot be used, or `out` does not fit.
        MismatchError: The ranks made different calls; raised on all ranks.

    Example:
        part = mpi.scatter(torch.arange(10) if mpi.rank() == 0 else None, root=0)
    """
    if _unknown:
        raise unknown_keyword(scatter, _unknown)
    cached = fast_path.receive if tensor is None else fast_path.scatter
    if out is not None and cached(tensor, out, root, comm, backend) is not None:
        return out
    result: _Tensor = call("scatter", tensor, out, root, None, comm, backend)
    return result


@refuses_keywords
def scatter_async(
    tensor: _Tensor | None,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Handle[_Tensor]:
    """Run :func:`~torchmpi.scatter` in the background, with the same parameters.

    Returns:
        A handle whose ``wait()`` returns the result.

    Raises:
        ArgumentError: The arguments cannot be used. Errors of the call itself are raised by ``wait()``.

    Example:
        part = mpi.scatter_async(torch.arange(10) if mpi.rank() == 0 else None, root=0).wait()
    """
    if _unknown:
        raise unknown_keyword(scatter_async, _unknown)
    return submit("scatter", tensor, out, root=root, comm=comm, backend=backend)


@refuses_keywords
def alltoall(
    tensor: _Tensor,
    out: _Tensor | None = None,
    *,
    splits: Iterable[int] | None = None,
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> _Tensor:
    """Send part j of dim 0 to rank j, and concatenate the received parts in rank order.

    The tensor is not changed.

    Args:
        tensor: The tensor to split, as by :func:`scatter`. The length of dim 0 may differ between ranks.
        out: Tensor for the result; None to allocate one.
        splits: How many rows of dim 0 each rank gets, for parts that are not even; on all ranks or on none.
            ``mpi.alltoall(torch.tensor(splits))`` returns how many rows each rank sends to this one.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table; not together with `splits`.

    Returns:
        The concatenation of the received parts.

    Raises:
        ArgumentError: The arguments cannot be used, or `out` does not fit.
        MismatchError: The ranks made different calls; raised on all ranks.

    Example:
        mpi.alltoall(torch.full((mpi.size(),), mpi.rank()))     # tensor([0, 1, ...]) on every rank
        mpi.alltoall(rows, splits=[3, 1])       # on two ranks: 3 rows to rank 0, 1 row to rank 1
    """
    if _unknown:
        raise unknown_keyword(alltoall, _unknown)
    if splits is None:
        result: _Tensor | None = fast_path.alltoall(tensor, out, 0, comm, backend)
        rows: _Tensor = call("alltoall", tensor, out, 0, None, comm, backend) if result is None else result
        return rows
    group = runtime.communicator(comm).intra
    rows, _ = alltoall_rows(group, tensor, check_splits(group, tensor, splits, out, backend), out)
    return rows


@refuses_keywords
def alltoall_async(
    tensor: _Tensor,
    out: _Tensor | None = None,
    *,
    splits: Iterable[int] | None = None,
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Handle[_Tensor]:
    """Run :func:`~torchmpi.alltoall` in the background, with the same parameters.

    Returns:
        A handle whose ``wait()`` returns the result.

    Raises:
        ArgumentError: The arguments cannot be used. Errors of the call itself are raised by ``wait()``.

    Example:
        parts = mpi.alltoall_async(torch.full((mpi.size(),), mpi.rank())).wait()
    """
    if _unknown:
        raise unknown_keyword(alltoall_async, _unknown)
    if splits is None:
        return submit("alltoall", tensor, out, comm=comm, backend=backend)
    group = runtime.communicator(comm).intra
    numbers = check_splits(group, tensor, splits, out, backend)
    return submit_alltoall_rows(group, tensor, numbers, lambda rows, _: rows, out)


@refuses_keywords
def barrier(comm: Comm = None, **_unknown: NoReturn) -> None:
    """Wait until every rank of the communicator has called this function.

    Args:
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Raises:
        MismatchError: The ranks made different calls; raised on all ranks.

    Example:
        mpi.barrier()
    """
    if _unknown:
        raise unknown_keyword(barrier, _unknown)
    if fast_path.barrier(None, None, None, comm, None) is not None:
        return
    communicator = runtime.communicator(comm)
    buffers.refuse_tracing(f"{communicator.intra.where}: barrier")
    plan = plan_for(communicator, BARRIER)
    cache_barrier(communicator.intra, comm)
    communicator.intra.call(plan)
