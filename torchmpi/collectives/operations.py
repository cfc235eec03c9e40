"""The verbs: what users call. Check, select, run.

Every verb takes torch tensors of any shape, strides and dtype, or a Python number, and works in place unless ``out``
is given. ``comm`` is None (the current communicator), a level, or a Communicator; ``backend`` overrides the selector.
Every rank of the communicator makes the same call. ``NAME_async`` returns a
:class:`~torchmpi.communicators.handle.Handle` at once;
calls on one communicator run in the order in which they were made, synchronous and asynchronous alike.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from ..communicators.handle import Handle
from ..communicators.levels import Comm
from ..session import runtime
from ..shared_memory import fast_path
from .dispatch import call, check_root, plan_for

_Tensor = torch.Tensor


def allreduce(
    tensor: Any, out: _Tensor | None = None, *, op: str = "sum", comm: Comm = None, backend: str | None = None
) -> Any:
    """Combine the tensors of all ranks; every rank gets the result, the same bits everywhere.

    `op` is sum, avg, prod, min, max, band, bor, bxor, land or lor. Sums are in rank order, 16-bit floats are summed in
    32 bits and rounded once.

        mpi.allreduce(torch.ones(3))        # tensor([n, n, n]) on n ranks
        mpi.allreduce(2.5, op="max")        # a number comes back as a number
    """
    if (result := fast_path.allreduce(tensor, out, op, comm, backend)) is not None:
        return result
    return call("allreduce", tensor, out, op=op, comm=comm, backend=backend)


def allreduce_async(
    tensor: Any, out: _Tensor | None = None, *, op: str = "sum", comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`allreduce` in the background.

    handle = mpi.allreduce_async(gradient)
    ...                                 # compute; leave gradient alone
    handle.wait()
    """
    return call("allreduce", tensor, out, op=op, comm=comm, backend=backend, asynchronous=True)


def reduce(
    tensor: Any,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    op: str = "sum",
    comm: Comm = None,
    backend: str | None = None,
) -> Any:
    """Combine the tensors of all ranks on the root; the others get their input back unchanged.

    total = mpi.reduce(torch.ones(3), root=0)
    """
    if type(root) is int and type(op) is str:
        result = fast_path.reduce(tensor, out, fast_path.joint_key(op, root), comm, backend)
        if result is not None:
            return result
    return call("reduce", tensor, out, root=root, op=op, comm=comm, backend=backend)


def reduce_async(
    tensor: Any,
    root: int = 0,
    out: _Tensor | None = None,
    *,
    op: str = "sum",
    comm: Comm = None,
    backend: str | None = None,
) -> Handle:
    """:func:`reduce` in the background."""
    return call("reduce", tensor, out, root=root, op=op, comm=comm, backend=backend, asynchronous=True)


def broadcast(
    tensor: Any, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Any:
    """Give every rank the root's values.

    mpi.broadcast(weights)              # everybody has rank 0's weights
    """
    if (result := fast_path.broadcast(tensor, out, root, comm, backend)) is not None:
        return result
    return call("broadcast", tensor, out, root=root, comm=comm, backend=backend)


def broadcast_async(
    tensor: Any, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`broadcast` in the background."""
    return call("broadcast", tensor, out, root=root, comm=comm, backend=backend, asynchronous=True)


def allgather(tensor: Any, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None) -> Any:
    """Concatenate the tensors of all ranks along dim 0, in rank order. Ranks may differ in length.

    A 0-dim tensor counts as one element; numbers come back as a list of numbers.

        mpi.allgather(torch.full((2,), mpi.rank()))     # tensor([0, 0, 1, 1, ...])
        mpi.allgather(mpi.rank())                       # [0, 1, ...]
    """
    if (result := fast_path.allgather(tensor, out, 0, comm, backend)) is not None:
        return result
    return call("allgather", tensor, out, comm=comm, backend=backend)


def allgather_async(
    tensor: Any, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`allgather` in the background."""
    return call("allgather", tensor, out, comm=comm, backend=backend, asynchronous=True)


def gather(
    tensor: Any, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Any:
    """Concatenate the tensors of all ranks along dim 0 on the root; the others get None.

    everything = mpi.gather(torch.full((2,), mpi.rank()), root=0)
    """
    cached = fast_path.give if out is None else fast_path.gather
    if cached(tensor, out, root, comm, backend) is not None:
        return out
    return call("gather", tensor, out, root=root, comm=comm, backend=backend)


def gather_async(
    tensor: Any, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`gather` in the background."""
    return call("gather", tensor, out, root=root, comm=comm, backend=backend, asynchronous=True)


def scatter(
    tensor: Any, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Any:
    """Split the root's tensor along dim 0, evenly as far as it goes: each rank gets its rows, the first one row more.

    Ranks other than the root pass None.

        part = mpi.scatter(torch.arange(10) if mpi.rank() == 0 else None, root=0)
    """
    cached = fast_path.receive if tensor is None else fast_path.scatter
    if out is not None and cached(tensor, out, root, comm, backend) is not None:
        return out
    return call("scatter", tensor, out, root=root, comm=comm, backend=backend)


def scatter_async(
    tensor: Any, root: int = 0, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`scatter` in the background."""
    return call("scatter", tensor, out, root=root, comm=comm, backend=backend, asynchronous=True)


def reduce_scatter(
    tensor: _Tensor, out: _Tensor | None = None, *, op: str = "sum", comm: Comm = None, backend: str | None = None
) -> _Tensor:
    """Combine the tensors of all ranks, and give each rank its rows of the result.

    mine = mpi.reduce_scatter(torch.ones(mpi.size(), 3))    # one row of n's
    """
    result: _Tensor | None = fast_path.reduce_scatter(tensor, out, op, comm, backend)
    if result is not None:
        return result
    return call("reduce_scatter", tensor, out, op=op, comm=comm, backend=backend)  # type: ignore[no-any-return]


def reduce_scatter_async(
    tensor: _Tensor, out: _Tensor | None = None, *, op: str = "sum", comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`reduce_scatter` in the background."""
    return call("reduce_scatter", tensor, out, op=op, comm=comm, backend=backend, asynchronous=True)


def alltoall(tensor: _Tensor, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None) -> _Tensor:
    """Send part j of dim 0 to rank j, and concatenate what arrives in rank order.

    mpi.alltoall(torch.full((mpi.size(),), mpi.rank()))     # tensor([0, 1, ...]) everywhere
    """
    result: _Tensor | None = fast_path.alltoall(tensor, out, 0, comm, backend)
    if result is not None:
        return result
    return call("alltoall", tensor, out, comm=comm, backend=backend)  # type: ignore[no-any-return]


def alltoall_async(
    tensor: _Tensor, out: _Tensor | None = None, *, comm: Comm = None, backend: str | None = None
) -> Handle:
    """:func:`alltoall` in the background."""
    return call("alltoall", tensor, out, comm=comm, backend=backend, asynchronous=True)


def barrier(comm: Comm = None) -> None:
    """Return when every rank of the communicator has come here."""
    communicator = runtime.communicator(comm)
    plan = plan_for(communicator, ("barrier", None, None, "cpu", True, None, False))
    communicator.intra.call(plan, None, None, 0)


# --- objects ----------------------------------------------------------------------


def broadcast_object(value: Any, root: int = 0, *, comm: Comm = None) -> Any:
    """Give every rank the root's object, by pickle.

    settings = mpi.broadcast_object(parse_arguments() if mpi.rank() == 0 else None)
    """
    group = runtime.communicator(comm).intra
    root = check_root(group, root, "broadcast_object")
    data = _pickled(value) if group.rank == root else None
    length = broadcast(0 if data is None else data.numel(), root, comm=comm)
    data = torch.empty(length, dtype=torch.uint8, device="cpu") if data is None else data
    return _unpickled(broadcast(data, root, comm=comm))


def allgather_object(value: Any, *, comm: Comm = None) -> list[Any]:
    """The objects of all ranks in rank order, by pickle.

    hosts = mpi.allgather_object(mpi.host_name())
    """
    data = _pickled(value)
    lengths = allgather(data.numel(), comm=comm)
    everything = allgather(data, comm=comm)
    return [_unpickled(part) for part in everything.split(lengths)]


def _pickled(value: Any) -> _Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _unpickled(data: _Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
