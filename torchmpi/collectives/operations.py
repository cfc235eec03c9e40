"""The synchronous collectives.

Every collective takes torch tensors of any shape, strides and dtype, or a Python number, and works in place unless
``out`` is given. Every rank of the communicator must make the same call. Calls on one communicator run in the order in
which they were made, synchronous and asynchronous calls alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NoReturn, TypeVar, overload

import numpy as np
import torch

from ..communicators.levels import Comm
from ..config import BackendName, NoAverage, Operation
from ..other_names import refuses_keywords, unknown_keyword
from ..session import runtime
from ..shared_memory import fast_path
from ..tensors.numbers import Number, Value
from .dispatch import BARRIER, cache_barrier, call, plan_for
from .exchange import rows_task

_T = TypeVar("_T")
_Tensor = torch.Tensor


# The parameters op, comm and backend are passed by keyword, and `refuses_keywords` describes them so. The frequent
# functions do not mark them: beside **_unknown, defaults of keyword-only parameters would make a short call 5 % slower.


@overload
def allreduce(
    tensor: _Tensor,
    out: _Tensor | None = None,
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
) -> _Tensor: ...
@overload
def allreduce(tensor: float, *, op: Literal["avg"], comm: Comm = None, backend: BackendName | None = None) -> float: ...
@overload
def allreduce(
    tensor: Number, *, op: NoAverage = "sum", comm: Comm = None, backend: BackendName | None = None
) -> Number: ...
@overload
def allreduce(
    tensor: complex | np.generic, *, op: Operation = "sum", comm: Comm = None, backend: BackendName | None = None
) -> Any: ...
@refuses_keywords
def allreduce(
    tensor: Any,
    out: _Tensor | None = None,
    op: str = "sum",
    comm: Comm = None,
    backend: str | None = None,
    **_unknown: NoReturn,
) -> Any:
    """Combine the tensors of all ranks; every rank gets the result, with the same bits everywhere.

    In place, unless `out` is given. Sums are computed in rank order; 16-bit floats are summed in 32 bits and rounded
    once.

    Args:
        tensor: A tensor of the same shape and dtype on every rank, or a number.
        out: Tensor for the result; None to overwrite `tensor`.
        op: Reduction operation: ``sum``, ``avg``, ``prod``, ``min``, ``max``, ``band``, ``bor``, ``bxor``, ``land`` or
            ``lor``.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

    Returns:
        `tensor`, or `out` if given; a number if `tensor` is a number.

    Raises:
        ArgumentError: The arguments cannot be used; the subclass DtypeError if the dtype is the reason.
        MismatchError: The ranks made different calls; raised on all ranks.

    Example:
        mpi.allreduce(torch.ones(3))        # tensor([n, n, n]) on n ranks
        mpi.allreduce(2.5, op="max")        # a number is returned as a number
    """
    if _unknown:
        raise unknown_keyword(allreduce, _unknown)
    cached = fast_path.allreduce if out is None else fast_path.allreduce_into
    if (result := cached(tensor, out, op, comm, backend)) is not None:
        return result
    return call("allreduce", tensor, out, 0, op, comm, backend)


@overload
def reduce(
    tensor: _Tensor,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
) -> _Tensor: ...
@overload
def reduce(
    tensor: float, root: int = 0, *, op: Literal["avg"], comm: Comm = None, backend: BackendName | None = None
) -> float: ...
@overload
def reduce(
    tensor: Number, root: int = 0, *, op: NoAverage = "sum", comm: Comm = None, backend: BackendName | None = None
) -> Number: ...
@overload
def reduce(
    tensor: complex | np.generic,
    root: int = 0,
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
) -> Any: ...
@refuses_keywords
def reduce(
    tensor: Any,
    root: int = 0,
    out: _Tensor | None = None,
    op: str = "sum",
    comm: Comm = None,
    backend: str | None = None,
    **_unknown: NoReturn,
) -> Any:
    """Combine the tensors of all ranks on the root.

    In place on the root, unless `out` is given; the tensors of the other ranks are not changed.

    Args:
        tensor: A tensor of the same shape and dtype on every rank, or a number.
        root: The rank that gets the result.
        out: Tensor for the result on the root; None to overwrite `tensor` there.
        op: Reduction operation, as for :func:`allreduce`.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

    Returns:
        The result on the root; `tensor`, unchanged, on the other ranks.

    Raises:
        ArgumentError: The arguments cannot be used.
        MismatchError: The ranks made different calls; raised on all ranks.

    Example:
        total = mpi.reduce(torch.ones(3), root=0)
    """
    if _unknown:
        raise unknown_keyword(reduce, _unknown)
    if type(root) is int and type(op) is str:
        result = fast_path.reduce(tensor, out, fast_path.joint_key(op, root), comm, backend)
        if result is not None:
            return result
    return call("reduce", tensor, out, root, op, comm, backend)


@overload
def broadcast(
    tensor: Value, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: BackendName | None = None
) -> Value: ...
@overload
def broadcast(tensor: np.generic, root: int = 0, *, comm: Comm = None, backend: BackendName | None = None) -> Any: ...
@refuses_keywords
def broadcast(
    tensor: Any,
    root: int = 0,
    out: _Tensor | None = None,
    comm: Comm = None,
    backend: str | None = None,
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


@overload
def allgather(
    tensor: _Tensor, out: _Tensor | None = None, *, comm: Comm = None, backend: BackendName | None = None
) -> _Tensor: ...
@overload
def allgather(tensor: Number, *, comm: Comm = None, backend: BackendName | None = None) -> list[Number]: ...
@overload
def allgather(tensor: np.generic, *, comm: Comm = None, backend: BackendName | None = None) -> list[Any]: ...
@refuses_keywords
def allgather(
    tensor: Any, out: _Tensor | None = None, comm: Comm = None, backend: str | None = None, **_unknown: NoReturn
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


@overload
def gather(
    tensor: _Tensor, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: BackendName | None = None
) -> _Tensor | None: ...
@overload
def gather(
    tensor: Number, root: int = 0, *, comm: Comm = None, backend: BackendName | None = None
) -> list[Number] | None: ...
@overload
def gather(
    tensor: np.generic, root: int = 0, *, comm: Comm = None, backend: BackendName | None = None
) -> list[Any] | None: ...
@refuses_keywords
def gather(
    tensor: Any,
    root: int = 0,
    out: _Tensor | None = None,
    comm: Comm = None,
    backend: str | None = None,
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
def reduce_scatter(
    tensor: _Tensor,
    out: _Tensor | None = None,
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> _Tensor:
    """Combine the tensors of all ranks and split the result along dim 0, as :func:`scatter` does.

    The tensor is not changed.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        out: Tensor for this rank's part; None to allocate one.
        op: Reduction operation, as for :func:`allreduce`.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.
        backend: Name of the backend, instead of that of the selection table.

    Returns:
        This rank's part of the result.

    Raises:
        ArgumentError: The arguments cannot be used, or `out` does not fit.
        MismatchError: The ranks made different calls; raised on all ranks.

    Example:
        mine = mpi.reduce_scatter(torch.ones(mpi.size(), 3))    # one row of n's
    """
    if _unknown:
        raise unknown_keyword(reduce_scatter, _unknown)
    result: _Tensor | None = fast_path.reduce_scatter(tensor, out, op, comm, backend)
    if result is None:
        result = call("reduce_scatter", tensor, out, 0, op, comm, backend)
    assert result is not None
    return result


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
    if splits is not None:
        group = runtime.communicator(comm).intra
        rows: _Tensor = group.call_queue.run(rows_task(group, tensor, splits, out, backend), subject=tensor)
        return rows
    result: _Tensor | None = fast_path.alltoall(tensor, out, 0, comm, backend)
    if result is None:
        result = call("alltoall", tensor, out, 0, None, comm, backend)
    assert result is not None
    return result


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
    plan = plan_for(communicator, BARRIER)
    cache_barrier(communicator.intra, comm)
    communicator.intra.call(plan)
