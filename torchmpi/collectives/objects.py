"""Collectives of Python objects, by pickle.

The first call carries the length of each pickle, and the pickle itself if it is short. Long ones need a second call.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, NoReturn, TypeVar

import torch

from ..communicators.levels import Comm
from ..errors import ArgumentError
from ..other_names import refuses_keywords, unknown_keyword
from ..session import runtime
from ..tensors import pickling, reused_memory
from .call_arguments import check_root
from .movements import allgather, broadcast

__all__ = ["allgather_object", "broadcast_object"]

_T = TypeVar("_T")
_FAILED = -1
"""Sent in place of a length by a rank whose object has no pickle."""
_LENGTH = struct.Struct("<q")
_FIRST_BYTES, _FIRST_BYTES_OF_ALL = 1024, 64 << 10
"""Of the first call: what a rank sends, and the most that it receives, but for the lengths."""


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
    is_root = group.rank == root
    data, problem = _pickled(value) if is_root else (b"", "")
    memory = reused_memory.take(torch.uint8, _FIRST_BYTES)
    first = memory.array.data
    if is_root:
        _write(first, data)
    broadcast(memory.tensor, root, comm=comm)
    (length,) = _LENGTH.unpack_from(first)
    if length == _FAILED:
        reason = problem or f"see the error of rank {group.world_ranks[root]}, the root"
        raise ArgumentError(f"{group.where}: broadcast_object: the object cannot be sent: {reason}.")
    if length <= _FIRST_BYTES - _LENGTH.size:
        received: _T = pickle.loads(first[_LENGTH.size : _LENGTH.size + length])
    else:
        rest = torch.frombuffer(bytearray(data or length), dtype=torch.uint8)
        received = pickle.loads(broadcast(rest, root, comm=comm).numpy().data)
    memory.give_back()
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
    group = runtime.communicator(comm).intra
    data, problem = _pickled(value)
    num_bytes = _first_bytes(group.size)
    memory, memory_of_all = (reused_memory.take(torch.uint8, length) for length in (num_bytes, num_bytes * group.size))
    _write(memory.array.data, data)
    allgather(memory.tensor, memory_of_all.tensor, comm=comm)
    firsts = memory_of_all.array.data
    starts = range(0, len(firsts), num_bytes)
    lengths: list[int] = [_LENGTH.unpack_from(firsts, start)[0] for start in starts]
    if _FAILED in lengths:
        reason = problem or f"see the error of rank {group.world_ranks[lengths.index(_FAILED)]}"
        raise ArgumentError(f"{group.where}: allgather_object: the object cannot be sent: {reason}.")
    if max(lengths) <= num_bytes - _LENGTH.size:
        parts = [
            firsts[start + _LENGTH.size : start + _LENGTH.size + length]
            for start, length in zip(starts, lengths, strict=True)
        ]
    else:
        everything = allgather(torch.frombuffer(bytearray(data), dtype=torch.uint8), comm=comm)
        parts = [part.numpy().data for part in torch.split(everything, lengths)]
    received = [pickle.loads(part) for part in parts]
    memory.give_back()
    memory_of_all.give_back()
    return received


def _first_bytes(size: int) -> int:
    """Return how many bytes each of so many ranks sends in the first call of a gather.

    >>> _first_bytes(2), _first_bytes(1000), _first_bytes(100_000)
    (1024, 64, 8)
    """
    return max(_LENGTH.size, min(_FIRST_BYTES, _FIRST_BYTES_OF_ALL // size & -_LENGTH.size))


def _pickled(value: Any) -> tuple[bytes, str]:
    """Return the pickle of an object; nothing and the reason if it has none, such as a lambda."""
    try:
        return pickling.dumps(value), ""
    except Exception as error:
        remedy = "Send what it is made of; functions and classes belong to the top level of a module"
        return b"", f"pickle raises {type(error).__name__}: {str(error).rstrip('.')}. {remedy}"


def _write(first: memoryview, data: bytes) -> None:
    """Write the length of a pickle, and the pickle if there is room."""
    _LENGTH.pack_into(first, 0, len(data) or _FAILED)
    if _LENGTH.size + len(data) <= len(first):
        first[_LENGTH.size : _LENGTH.size + len(data)] = data
