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
from ..tensors import buffers
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
    names = replica.names(tensors)
    layout = [
        (name, _kind(tensor), tuple(tensor.shape), tensor.stride() if strides and _is_strided(tensor) else None)
        for name, tensor in zip(names, tensors, strict=True)
    ]
    digest = hashlib.blake2b(repr(layout).encode(), digest_size=8).digest()
    fingerprint = torch.tensor([int.from_bytes(digest, "little", signed=True)])
    fingerprints = collectives.allgather(fingerprint, comm=comm)
    if bool((fingerprints == fingerprint).all()):
        # All ranks see the same checksums, so all return or raise here, or none.
        for name, tensor in zip(names, tensors, strict=True):
            if written or not _is_strided(tensor):
                buffers.check(tensor, f"rank {comm.rank}: {name!r}", written=written)
        return
    layouts = collectives.allgather_object(layout, comm=comm)
    raise ReplicaError(f"rank {comm.rank}: {_first_difference(layouts)} Build the same net on every rank.")


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
