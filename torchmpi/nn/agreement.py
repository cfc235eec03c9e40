"""Comparison of the nets of all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import ReplicaError
from ..tensors import buffers, reused_memory
from ..tensors.dtypes import short_name
from .replica import Replica


def check_same_layout(
    replica: Replica,
    tensors: Sequence[Tensor],
    comm: Communicator,
    *,
    strides: bool = False,
    written: bool = False,
) -> None:
    """Raise on all ranks unless names, shapes and dtypes of `tensors` are the same everywhere, and none is sparse.

    With `strides`, these are compared too; with `written`, expanded tensors are refused.

    The ranks exchange a checksum, and the complete lists only if the checksums differ, for the message.
    """
    # From the structure of the modules follow the names, which take longer than all the rest.
    names = _structure(replica, tensors) if replica.modules else replica.names(tensors)
    forms = [(each.dtype, each.layout, tuple(each.shape), _strides(each) if strides else None) for each in tensors]
    if _have_same(names, forms, comm=comm):
        # All ranks see the same checksums, so all return or raise here, or none.
        _refuse_unusable(replica, tensors, comm, written=written)
        return
    layout = [
        (name, _kind(tensor), tuple(tensor.shape), _strides(tensor) if strides else None)
        for name, tensor in zip(replica.names(tensors), tensors, strict=True)
    ]
    layouts = collectives.allgather_object(layout, comm=comm)
    if layouts.count(layout) < len(layouts):
        raise ReplicaError(f"rank {comm.rank}: {_first_difference(layouts)} Build the same net on every rank.")
    _refuse_unusable(replica, tensors, comm, written=written)  # only modules without tensors differ


def _structure(replica: Replica, tensors: Sequence[Tensor]) -> list[str | int | None]:
    """Return the names of tensors and children within each module, with the places of these in lists."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    numbers = {id(module): number for number, module in enumerate(replica.modules)}
    structure: list[str | int | None] = []
    for module in replica.modules:
        for members, known in (
            (module._parameters, places),
            (module._buffers, places),
            (module._modules, numbers),
        ):
            for name, member in members.items():
                structure += name, known.get(id(member))
            structure.append(None)
    return structure


def _have_same(*values: object, comm: Communicator) -> bool:
    """Return whether all ranks passed the same values, as far as their representation tells."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    own, of_all = reused_memory.take(torch.int64, 1), reused_memory.take(torch.int64, comm.size)
    own.array[0] = checksum = int.from_bytes(digest, "little", signed=True)
    collectives.allgather(own.tensor, out=of_all.tensor, comm=comm)
    are_same: bool = of_all.array.tolist() == [checksum] * comm.size
    own.give_back()
    of_all.give_back()
    return are_same


def _refuse_unusable(replica: Replica, tensors: Sequence[Tensor], comm: Communicator, *, written: bool) -> None:
    """Raise if a tensor is sparse, or cannot be `written`."""
    for tensor in tensors:
        if (written or not _is_strided(tensor)) and not buffers.is_plain(tensor.detach()):
            buffers.check(tensor, f"rank {comm.rank}: {replica.name(tensor)!r}", written=written)


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if _is_strided(tensor) else None


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _kind(tensor: Tensor) -> str:
    dtype = short_name(tensor.dtype)
    return dtype if _is_strided(tensor) else f"{str(tensor.layout).removeprefix('torch.')} {dtype}"


def _first_difference(layouts: Sequence[Sequence[tuple[Any, ...]]]) -> str:
    """Describe the first difference between the list of rank 0 and another one.

    >>> _first_difference([[("w", "float32", (2,), None)], []])
    "The nets differ: tensor 0 is 'w' float32 [2] on rank 0, but missing on rank 1."
    """
    first = layouts[0]
    rank, other = next((rank, layout) for rank, layout in enumerate(layouts) if layout != first)
    index = next(
        (index for index, (mine, theirs) in enumerate(zip(first, other, strict=False)) if mine != theirs),
        min(len(first), len(other)),
    )
    here, there = _entry(first, index), _entry(other, index)
    return f"The nets differ: tensor {index} is {here} on rank 0, but {there} on rank {rank}."


def _entry(layout: Sequence[tuple[Any, ...]], index: int) -> str:
    if index >= len(layout):
        return "missing"
    name, dtype, shape, strides = layout[index]
    return f"{name!r} {dtype} {list(shape)}" + (f" with strides {list(strides)}" if strides is not None else "")
