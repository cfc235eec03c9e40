"""Collectives of Python objects, by pickle."""

from __future__ import annotations

import pickle
from typing import Any, NoReturn, TypeVar

import torch

from ..communicators.levels import Comm
from ..errors import ArgumentError
from ..other_names import refuses_keywords, unknown_keyword
from ..session import runtime
from ..tensors import pickling
from .call_arguments import check_root
from .movements import allgather, broadcast

__all__ = ["allgather_object", "broadcast_object"]

_T = TypeVar("_T")
_Tensor = torch.Tensor
_FAILED = -1
"""Sent in place of a length by a rank whose object has no pickle."""


@refuses_keywords
def broadcast_object(value: _T | None, root: int = 0, *, comm: Comm = None, **_unknown: NoReturn) -> _T:
    """Copy the root's object to every rank, by pickle.

    Args:
        value: The object to send; ignored on ranks other than the root.
        root: The rank whose object is sent.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Returns:
        The root's object.

    Raises:
        ArgumentError: `root` is not a rank of the communicator; or the object has no pickle, raised on all ranks.
        MismatchError: The ranks made different calls; raised on all ranks.

    Example:
        settings = mpi.broadcast_object(parse_arguments() if mpi.rank() == 0 else None)
    """
    if _unknown:
        raise unknown_keyword(broadcast_object, _unknown)
    group = runtime.communicator(comm).intra
    root = check_root(group, root, "broadcast_object")
    data, problem = _pickled(value) if group.rank == root else (None, "")
    length = broadcast(_FAILED if problem else 0 if data is None else data.numel(), root, comm=comm)
    if length == _FAILED:
        reason = problem or f"see the error of rank {group.world_ranks[root]}, the root"
        raise ArgumentError(f"{group.where}: broadcast_object: the object cannot be sent: {reason}.")
    data = torch.empty(length, dtype=torch.uint8, device="cpu") if data is None else data
    received: _T = _unpickled(broadcast(data, root, comm=comm))
    return received


@refuses_keywords
def allgather_object(value: _T, *, comm: Comm = None, **_unknown: NoReturn) -> list[_T]:
    """Return the objects of all ranks in rank order, by pickle.

    Args:
        value: This rank's object.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Returns:
        One object per rank.

    Raises:
        ArgumentError: The object of a rank has no pickle; raised on all ranks.
        MismatchError: The ranks made different calls; raised on all ranks.

    Example:
        hosts = mpi.allgather_object(mpi.host_name())
    """
    if _unknown:
        raise unknown_keyword(allgather_object, _unknown)
    data, problem = _pickled(value)
    lengths = allgather(_FAILED if data is None else data.numel(), comm=comm)
    if data is None or _FAILED in lengths:
        group = runtime.communicator(comm).intra
        reason = problem or f"see the error of rank {group.world_ranks[lengths.index(_FAILED)]}"
        raise ArgumentError(f"{group.where}: allgather_object: the object cannot be sent: {reason}.")
    everything = allgather(data, comm=comm)
    return [_unpickled(part) for part in torch.split(everything, lengths)]


def _pickled(value: Any) -> tuple[_Tensor | None, str]:
    """Return the pickle of an object; None and the reason if it has none, such as a lambda."""
    try:
        return torch.frombuffer(bytearray(pickling.dumps(value)), dtype=torch.uint8), ""
    except Exception as error:
        return None, f"pickle raises {type(error).__name__}: {error}"


def _unpickled(data: _Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
