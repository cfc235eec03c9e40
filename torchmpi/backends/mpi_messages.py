"""Shared parts of the backends that exchange rows over MPI: row counts, destinations, messages of limited length."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, starmap
from typing import Any

import numpy as np
import torch

from ..communicators.group import Group
from ..errors import MismatchError
from ..tensors import buffers, dtypes, partition

Range = tuple[int, int]
"""Offset and length in elements."""
Messages = list[tuple[int, torch.Tensor]]
"""Ranks and contiguous tensors."""
PARTS_TAG = 1
"""The tag of parts that ranks send each other, in Python and by kernels."""
STATUS_BYTES = 64
"""More than an MPI_Status has in any library."""
NONBLOCKING = {"irecv": "MPI_Irecv", "isend": "MPI_Isend", "test": "MPI_Test"}
"""The functions that kernels call: a wait for the message can end."""
OF_MESSAGES = NONBLOCKING | {"get_count": "MPI_Get_count"}
"""Those of messages between two ranks."""


def rows_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the number of rows along dim 0 and the elements of one row; a 0-dim tensor is one row of one element.

    >>> rows_of(torch.ones(3, 4)), rows_of(torch.tensor(1.0))
    ((3, 4), (1, 1))
    """
    if tensor.dim() == 0:
        return 1, 1
    return tensor.shape[0], math.prod(tensor.shape[1:])


def destination_for(source: torch.Tensor, num_rows: int, given: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor that receives `num_rows` rows like those of `source`: `given` if it fits, or a new one."""
    shape = (num_rows, *source.shape[1:])
    if given is None or given.shape != shape or given.dtype != source.dtype:
        return torch.empty(shape, dtype=source.dtype, device=source.device)
    return given


def unless_overlapping(source: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor | None:
    """Return a given destination, or None if the source is a row of it: rows of other lengths would go over it.

    >>> result = torch.zeros(4, 2)
    >>> unless_overlapping(result[1:2], result), unless_overlapping(torch.ones(1, 2), result) is result
    (None, True)
    """
    return None if given is not None and buffers.overlap(source, given) else given


def row_counts(group: Group, source: torch.Tensor) -> list[int]:
    """Gather the number of rows of every rank's `source`, unless the comparison has found them equal. Collective."""
    if group.even_seq == group.call_log.seq:
        return [rows_of(source)[0]] * group.size
    MPI, counts = group.context.MPI, np.empty(group.size, np.int64)
    own = np.array([rows_of(source)[0]], np.int64)
    group.comm.Allgather((own, MPI.INT64_T), (counts, MPI.INT64_T))
    result: list[int] = counts.tolist()
    return result


def broadcast_header(group: Group, source: torch.Tensor | None, root: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Broadcast the shape and dtype of the tensor that the root scatters, unless the comparison has. Collective."""
    seq, header_of_call = group.scattered
    if header_of_call is not None and seq == group.call_log.seq:
        return header_of_call
    header = None
    if group.rank == root:
        assert source is not None
        header = (tuple(source.shape) or (1,), dtypes.info(source.dtype).code)
    shape, code = group.comm.bcast(header, root)
    dtype = dtypes.from_code(code)
    assert dtype is not None
    return shape, dtype


def check_part_sizes(group: Group, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Compare the sizes of all parts that the ranks send each other, and raise on all ranks if two differ. Collective.

    Part j of `sources` is for rank j; part j of `destinations` is received from rank j. A rank learns only the sizes of
    its own messages, so that the memory for them grows with the number of ranks and not with its square. Nothing is
    compared if the comparison of the call has found all sizes equal.
    """
    if group.even_seq == group.call_log.seq:
        return
    MPI, comm = group.context.MPI, group.comm
    sent, room = (np.array([part.nbytes for part in parts], np.int64) for parts in (sources, destinations))
    arriving = np.empty_like(sent)
    comm.Alltoall((sent, MPI.INT64_T), (arriving, MPI.INT64_T))
    wrong = np.flatnonzero(arriving != room)
    none = group.size**2
    first = np.array([wrong[0] * group.size + group.rank if wrong.size else none], np.int64)
    comm.Allreduce(MPI.IN_PLACE, (first, MPI.INT64_T), MPI.MIN)
    if first[0] != none:
        sender, receiver = divmod(int(first[0]), group.size)
        sizes = np.array([arriving[sender], room[sender]])
        comm.Bcast((sizes, MPI.INT64_T), receiver)
        raise _different_sizes(group.where, sender, receiver, *sizes.tolist())


def longest_part(sizes: np.ndarray, where: str) -> int:
    """Return the bytes of the longest part that any rank sends.

    `sizes[i, 0, j]` is the size of the part that rank i sends to rank j, `sizes[i, 1, j]` of the part that rank i
    receives from rank j. Raises the same MismatchError on all ranks if the two sides of a message differ.

    >>> longest_part(np.array([[[4, 8], [4, 2]], [[2, 4], [8, 4]]]), "rank 0")
    8
    """
    wrong = np.argwhere(sizes[:, 0] != sizes[:, 1].T)
    if len(wrong):
        sender, receiver = wrong[0].tolist()
        sent, room = int(sizes[sender, 0, receiver]), int(sizes[receiver, 1, sender])
        raise _different_sizes(where, sender, receiver, sent, room)
    return int(sizes[:, 0].max())


def _different_sizes(where: str, sender: int, receiver: int, sent: int, room: int) -> MismatchError:
    return MismatchError(
        f"{where}: rank {sender} of the group sends {sent} bytes to rank {receiver}, which has room for {room}. "
        "Send the sizes that the receivers expect."
    )


def messages(MPI: Any, tensor: torch.Tensor, message_bytes: int) -> list[Any]:
    """Return the memory of a contiguous tensor as buffers of at most `message_bytes`: MPI counts have 32 bits.

    An empty tensor has no messages, at the sender and at the receiver.
    """
    flat = tensor.view(-1)
    max_numel = max(1, message_bytes // tensor.element_size())
    return [
        buffers.as_bytes(MPI, flat[begin : begin + numel]) for begin, numel in partition.chunks(flat.numel(), max_numel)
    ]


def wait_all(MPI: Any, requests: Sequence[Any]) -> None:
    """Wait until all messages have ended; raise the error of one.

    MPI_Waitall of Open MPI 5.0.11 returns none if a message has failed before the call; its request remains.
    """
    MPI.Request.Waitall(requests)
    for request in filter(None, requests):
        request.Wait()


def exchange(group: Group, received: Messages, sent: Messages, message_bytes: int) -> None:
    """Receive messages from other ranks, and send them some, in pieces of at most `message_bytes`."""
    group.check_messages()
    MPI, comm, requests = group.context.MPI, group.comm, list[Any]()
    try:
        for call, which in ((comm.Irecv, received), (comm.Isend, sent)):
            pieces = [(piece, peer) for peer, tensor in which for piece in messages(MPI, tensor, message_bytes)]
            # Without an instruction of Python, before which an interrupt may come, when a message has begun.
            requests.extend(starmap(call, [((piece, MPI.BYTE), peer, PARTS_TAG) for piece, peer in pieces]))
        wait_all(MPI, requests)
    except BaseException as error:
        if isinstance(error, MPI.Exception) or any(requests):
            group.give_up(received, sent)
        raise


def counts_and_offsets(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the counts and the offsets that they add up to, as mpi4py takes them.

    >>> counts_and_offsets([2, 0, 3])
    ([2, 0, 3], [0, 2, 2])
    """
    return list(counts), [0, *accumulate(counts[:-1])]


def can_call_from_kernels(group: Group) -> bool:
    """Return whether kernels can call MPI: there is a library, and ranks need not sleep before they call it."""
    return hasattr(group.context.MPI, "_addressof") and not group.context.sleeps_before_mpi


def kernel_fields(MPI: Any, comm: Any, status: np.ndarray, functions: Mapping[str, str]) -> dict[str, int]:
    """Return what a record of messages on a communicator has in fields of these names.

    Args:
        MPI: The library.
        comm: The communicator.
        status: Memory of STATUS_BYTES for an MPI_Status.
        functions: The names of functions, by the fields for their addresses.
    """
    library = ctypes.CDLL(MPI.__file__)
    addresses = {field: ctypes.cast(library[name], ctypes.c_void_p).value or 0 for field, name in functions.items()}
    return addresses | {
        "byte_type": _handle(MPI, MPI.BYTE),
        "comm": _handle(MPI, comm),
        "status": int(status.ctypes.data),
    }


def _handle(MPI: Any, item: Any) -> int:
    """Return the handle of an object of mpi4py as a number."""
    return int.from_bytes(ctypes.string_at(MPI._addressof(item), MPI._sizeof(type(item))), "little")
