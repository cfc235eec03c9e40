"""The asynchronous collectives: the collectives of :mod:`torchmpi.collectives.operations`, run in the background.

Each function returns a :class:`~torchmpi.communicators.handle.Handle`. The tensors of the call must not be read or
written until ``wait()`` has returned the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NoReturn, overload

import numpy as np
import torch

from ..communicators.handle import Handle
from ..communicators.levels import Comm
from ..config import BackendName, NoAverage, Operation
from ..other_names import refuses_keywords, unknown_keyword
from ..session import runtime
from ..tensors.numbers import Number, Value
from .dispatch import submit
from .exchange import rows_task

_Tensor = torch.Tensor


@overload
def allreduce_async(
    tensor: _Tensor,
    out: _Tensor | None = None,
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
) -> Handle[_Tensor]: ...
@overload
def allreduce_async(
    tensor: float, *, op: Literal["avg"], comm: Comm = None, backend: BackendName | None = None
) -> Handle[float]: ...
@overload
def allreduce_async(
    tensor: Number, *, op: NoAverage = "sum", comm: Comm = None, backend: BackendName | None = None
) -> Handle[Number]: ...
@overload
def allreduce_async(
    tensor: complex | np.generic, *, op: Operation = "sum", comm: Comm = None, backend: BackendName | None = None
) -> Handle[Any]: ...
@refuses_keywords
def allreduce_async(
    tensor: Any,
    out: _Tensor | None = None,
    *,
    op: str = "sum",
    comm: Comm = None,
    backend: str | None = None,
    **_unknown: NoReturn,
) -> Handle[Any]:
    """Run :func:`~torchmpi.allreduce` in the background.

    In place, unless `out` is given.

    Args:
        tensor: As for the synchronous collective.
        out: Tensor for the result; None to overwrite `tensor`.
        op: Reduction operation, as for :func:`~torchmpi.allreduce`.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

    Returns:
        A handle whose ``wait()`` returns the result.

    Raises:
        ArgumentError: The arguments cannot be used. Errors of the call itself are raised by ``wait()``.

    Example:
        handle = mpi.allreduce_async(gradient)
        loss = criterion(model(x), y)       # computes meanwhile; must not use gradient
        handle.wait()
    """
    if _unknown:
        raise unknown_keyword(allreduce_async, _unknown)
    return submit("allreduce", tensor, out, op=op, comm=comm, backend=backend)


@overload
def reduce_async(
    tensor: _Tensor,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
) -> Handle[_Tensor]: ...
@overload
def reduce_async(
    tensor: float, root: int = 0, *, op: Literal["avg"], comm: Comm = None, backend: BackendName | None = None
) -> Handle[float]: ...
@overload
def reduce_async(
    tensor: Number, root: int = 0, *, op: NoAverage = "sum", comm: Comm = None, backend: BackendName | None = None
) -> Handle[Number]: ...
@overload
def reduce_async(
    tensor: complex | np.generic,
    root: int = 0,
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
) -> Handle[Any]: ...
@refuses_keywords
def reduce_async(
    tensor: Any,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    op: str = "sum",
    comm: Comm = None,
    backend: str | None = None,
    **_unknown: NoReturn,
) -> Handle[Any]:
    """Run :func:`~torchmpi.reduce` in the background.

    In place on the root, unless `out` is given; the tensors of the other ranks are not changed.

    Args:
        tensor: As for the synchronous collective.
        root: The rank that gets the result.
        out: Tensor for the result; None to overwrite `tensor`.
        op: Reduction operation, as for :func:`~torchmpi.allreduce`.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

    Returns:
        A handle whose ``wait()`` returns the result.

    Raises:
        ArgumentError: The arguments cannot be used. Errors of the call itself are raised by ``wait()``.

    Example:
        total = mpi.reduce_async(torch.ones(3), root=0).wait()
    """
    if _unknown:
        raise unknown_keyword(reduce_async, _unknown)
    return submit("reduce", tensor, out, root=root, op=op, comm=comm, backend=backend)


@overload
def broadcast_async(
    tensor: Value, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: BackendName | None = None
) -> Handle[Value]: ...
@overload
def broadcast_async(
    tensor: np.generic, root: int = 0, *, comm: Comm = None, backend: BackendName | None = None
) -> Handle[Any]: ...
@refuses_keywords
def broadcast_async(
    tensor: Any,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    comm: Comm = None,
    backend: str | None = None,
    **_unknown: NoReturn,
) -> Handle[Any]:
    """Run :func:`~torchmpi.broadcast` in the background.

    In place, unless `out` is given.

    Args:
        tensor: As for the synchronous collective.
        root: The rank whose values are copied.
        out: Tensor for the result; None to overwrite `tensor`.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

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


@overload
def allgather_async(
    tensor: _Tensor, out: _Tensor | None = None, *, comm: Comm = None, backend: BackendName | None = None
) -> Handle[_Tensor]: ...
@overload
def allgather_async(
    tensor: Number, *, comm: Comm = None, backend: BackendName | None = None
) -> Handle[list[Number]]: ...
@overload
def allgather_async(
    tensor: np.generic, *, comm: Comm = None, backend: BackendName | None = None
) -> Handle[list[Any]]: ...
@refuses_keywords
def allgather_async(
    tensor: Any, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None, **_unknown: NoReturn
) -> Handle[Any]:
    """Run :func:`~torchmpi.allgather` in the background.

    The tensor is not changed.

    Args:
        tensor: As for the synchronous collective.
        out: Tensor for the result; None to allocate one.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

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


@overload
def gather_async(
    tensor: _Tensor, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: BackendName | None = None
) -> Handle[_Tensor | None]: ...
@overload
def gather_async(
    tensor: Number, root: int = 0, *, comm: Comm = None, backend: BackendName | None = None
) -> Handle[list[Number] | None]: ...
@overload
def gather_async(
    tensor: np.generic, root: int = 0, *, comm: Comm = None, backend: BackendName | None = None
) -> Handle[list[Any] | None]: ...
@refuses_keywords
def gather_async(
    tensor: Any,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    comm: Comm = None,
    backend: str | None = None,
    **_unknown: NoReturn,
) -> Handle[Any]:
    """Run :func:`~torchmpi.gather` in the background.

    The tensor is not changed.

    Args:
        tensor: As for the synchronous collective.
        root: The rank that gets the result.
        out: Tensor for the result; None to allocate one.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

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
def scatter_async(
    tensor: _Tensor | None,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Handle[_Tensor]:
    """Run :func:`~torchmpi.scatter` in the background.

    The root's tensor is not changed.

    Args:
        tensor: The tensor to split on the root; None on the other ranks.
        root: The rank whose tensor is split.
        out: Tensor for the result; None to allocate one.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

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
def reduce_scatter_async(
    tensor: _Tensor,
    out: _Tensor | None = None,
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Handle[_Tensor]:
    """Run :func:`~torchmpi.reduce_scatter` in the background.

    The tensor is not changed.

    Args:
        tensor: As for the synchronous collective.
        out: Tensor for the result; None to allocate one.
        op: Reduction operation, as for :func:`~torchmpi.allreduce`.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

    Returns:
        A handle whose ``wait()`` returns the result.

    Raises:
        ArgumentError: The arguments cannot be used. Errors of the call itself are raised by ``wait()``.

    Example:
        mine = mpi.reduce_scatter_async(torch.ones(mpi.size(), 3)).wait()
    """
    if _unknown:
        raise unknown_keyword(reduce_scatter_async, _unknown)
    return submit("reduce_scatter", tensor, out, op=op, comm=comm, backend=backend)


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
    """Run :func:`~torchmpi.alltoall` in the background.

    The tensor is not changed.

    Args:
        tensor: As for the synchronous collective.
        out: Tensor for the result; None to allocate one.
        splits: As for :func:`~torchmpi.alltoall`.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

    Returns:
        A handle whose ``wait()`` returns the result.

    Raises:
        ArgumentError: The arguments cannot be used. Errors of the call itself are raised by ``wait()``.

    Example:
        parts = mpi.alltoall_async(torch.full((mpi.size(),), mpi.rank())).wait()
    """
    if _unknown:
        raise unknown_keyword(alltoall_async, _unknown)
    if splits is not None:
        group = runtime.communicator(comm).intra
        task = rows_task(group, tensor, splits, out, backend)
        return group.call_queue.submit(task, f"{group.where}: alltoall", tensor)
    return submit("alltoall", tensor, out, comm=comm, backend=backend)
