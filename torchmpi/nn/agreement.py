"""Small exchanges in which ranks find out whether they agree: on the net, and on who has which gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import GradientError, ReplicaError
from ..tensors.dtypes import short_name
from .replica import Replica

_DENSE, _SPARSE, _FAILED, _SCATTERED = 1, 2, 4, 8


def check_same_layout(
    replica: Replica, tensors: Sequence[Tensor], comm: Communicator, *, strides: bool = False
) -> None:
    """Raise on all ranks unless names, shapes and dtypes of `tensors` are the same everywhere.

    One number per rank is exchanged; only when they differ are the lists, to say where.
    """
    layout = [
        (name, short_name(tensor.dtype), tuple(tensor.shape), tensor.stride() if strides else None)
        for name, tensor in zip(replica.names(tensors), tensors, strict=True)
    ]
    digest = hashlib.blake2b(repr(layout).encode(), digest_size=8).digest()
    fingerprint = torch.tensor([int.from_bytes(digest, "little", signed=True)])
    fingerprints = collectives.allgather(fingerprint, comm=comm)
    if bool((fingerprints == fingerprint).all()):
        # Equal to mine everywhere means equal everywhere, so all ranks leave here together.
        return
    layouts = collectives.allgather_object(layout, comm=comm)
    raise ReplicaError(f"rank {comm.rank}: {_first_difference(layouts)} Build the same net on every rank.")


def _first_difference(layouts: Sequence[Sequence[tuple[Any, ...]]]) -> str:
    """Where the first rank whose list is not rank 0's departs from it, in words.

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


class Presence(NamedTuple):
    """For each parameter, whether some rank has a dense or a sparse gradient; then what holds for any of the ranks."""

    is_dense: list[bool]
    is_sparse: list[bool]
    is_failed: bool
    is_scattered: bool


def agree_on_gradients(
    replica: Replica, parameters: Sequence[Tensor], comm: Communicator, *, failed: bool = False, scattered: bool = True
) -> Presence:
    """Find out together which of `parameters` have a gradient on any rank, with one byte each.

    And whether any rank has `failed`, or has its gradients `scattered` and not in one piece.

    Asked anew at every step: a rank cannot know that nothing changed on the others unless they say so.
    """
    codes = [_code(parameter.grad) for parameter in parameters]
    codes.append((_FAILED if failed else 0) | (_SCATTERED if scattered else 0))
    flags = collectives.allreduce(torch.tensor(codes, dtype=torch.uint8), op="bor", comm=comm).tolist()
    states = flags.pop()
    if _DENSE | _SPARSE in flags:
        name = replica.name(parameters[flags.index(_DENSE | _SPARSE)])
        raise GradientError(
            f"rank {comm.rank}: the gradient of {name!r} is sparse on one rank and dense on another. "
            "Use the same kind of layer on every rank."
        )
    return Presence(
        [flag == _DENSE for flag in flags],
        [flag == _SPARSE for flag in flags],
        bool(states & _FAILED),
        bool(states & _SCATTERED),
    )


def _code(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    return _DENSE if gradient.layout is torch.strided else _SPARSE
