"""The collectives that combine the tensors of all ranks.

Every collective takes torch tensors of any shape, strides and dtype, and works in place unless ``out`` is given or the
result has another shape; those of :mod:`.signatures` take Python numbers too. Every rank of the communicator must make
the same call. Calls on one communicator run in the order in which they were made, synchronous and asynchronous calls
alike. The tensors of an asynchronous call must not be read or written until ``wait()`` has returned the result.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..communicators.handle import Handle
from ..communicators.levels import Comm
from ..config import BackendName, Operation
from ..other_names import refuses_keywords, unknown_keyword
from ..shared_memory import fast_path
from . import signatures
from .dispatch import call, submit
from .signatures import Values

__all__ = [
    "allreduce",
    "allreduce_async",
    "reduce",
    "reduce_async",
    "reduce_scatter",
    "reduce_scatter_async",
]

_Tensor = torch.Tensor
# The parameters op, comm and backend are passed by keyword, and `refuses_keywords` describes them so. The frequent
# functions do not mark them: beside **_unknown, defaults of keyword-only parameters would make a short call 5 % slower.


@signatures.like_allreduce
def allreduce(
    tensor: Values,
    out: _Tensor | None = None,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
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


@signatures.like_allreduce_async
def allreduce_async(
    tensor: Values,
    out: _Tensor | None = None,
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Handle[Any]:
    """Run :func:`~torchmpi.allreduce` in the background, with the same parameters.

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


@signatures.like_reduce
def reduce(
    tensor: Values,
    root: int = 0,
    out: _Tensor | None = None,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
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


@signatures.like_reduce_async
def reduce_async(
    tensor: Values,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Handle[Any]:
    """Run :func:`~torchmpi.reduce` in the background, with the same parameters.

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
def reduce_scatter_async(
    tensor: _Tensor,
    out: _Tensor | None = None,
    *,
    op: Operation = "sum",
    comm: Comm = None,
    backend: BackendName | None = None,
    **_unknown: NoReturn,
) -> Handle[_Tensor]:
    """Run :func:`~torchmpi.reduce_scatter` in the background, with the same parameters.

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
