"""Proof that replicas are equal: a checksum of the bits of every tensor, compared between all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import ReplicaError
from .agreement import check_same_layout
from .channel import resolve
from .join_state import refuse_inside_join
from .replica import Net, Replica

_CHUNK_WORDS = 1 << 20  # bounds the memory of the intermediate results


# Constants of the splitmix64 generator, as signed 64-bit numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_MAX_NAMED = 8


@torch.no_grad()
def check_with_allreduce(net: Net, *, buffers: bool = True, comm: int | Communicator | None = None) -> None:
    """Raise on all ranks unless every parameter and buffer has the same bits on all of them.

    The :class:`~torchmpi.errors.ReplicaError` names the tensors that differ, and which ranks agree. With
    ``buffers=False`` only parameters are compared: the running statistics of batch norm differ in
    data-parallel training, since each rank sees other data.

        mpinn.check_with_allreduce(model)
    """
    refuse_inside_join(net, "check_with_allreduce")
    communicator = resolve(comm)
    replica = Replica(net)
    tensors = replica.parameters + (replica.buffers if buffers else [])
    check_same_layout(replica, tensors, communicator)
    if not tensors:
        return
    sums = torch.tensor([[checksum(tensor.detach()) for tensor in tensors]])
    table = collectives.allgather(sums, comm=communicator)
    differing = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
    if not differing:
        return
    names = replica.names(tensors)
    lines = [f"  {names[index]!r}: {_describe(table[:, index].tolist())}" for index in differing[:_MAX_NAMED]]
    if len(differing) > _MAX_NAMED:
        lines.append(f"  and {len(differing) - _MAX_NAMED} more")
    raise ReplicaError(
        f"rank {communicator.rank}: {len(differing)} of {len(tensors)} tensors differ between the ranks:\n"
        + "\n".join(lines)
        + "\nCall synchronize_parameters(net) before training, and synchronize gradients before every step."
    )


def _describe(sums: list[int]) -> str:
    """Which ranks hold the same bits.

    >>> _describe([7, 9, 7])
    'ranks 0, 2 agree; rank 1 differs'
    """
    groups: dict[int, list[str]] = {}
    for rank, value in enumerate(sums):
        groups.setdefault(value, []).append(str(rank))
    largest = max(groups.values(), key=len)
    others = [rank for group in groups.values() if group is not largest for rank in group]
    if len(largest) == 1 and len(groups) > 1:
        return "all ranks differ"
    collective = "differs" if len(others) == 1 else "differ"
    return f"ranks {', '.join(largest)} agree; rank{'s' * (len(others) > 1)} {', '.join(others)} {collective}"


def checksum(tensor: Tensor) -> int:
    """A 64-bit number that depends on every bit of `tensor` and on its place.

    Each 64-bit word is combined with its index, scrambled (the finalizer of splitmix64) and added up. A plain
    weighted sum would not do: it misses two flipped sign bits.

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
    False
    >>> checksum(torch.tensor(0.0)) == checksum(torch.tensor(-0.0))
    False
    """
    data = tensor.contiguous().view(-1).view(torch.uint8)
    missing = -data.numel() % 8
    if missing:
        data = torch.cat([data, data.new_zeros(missing)])
    total = tensor.numel()
    for begin in range(0, data.numel() // 8, _CHUNK_WORDS):
        words = data[begin * 8 : (begin + _CHUNK_WORDS) * 8].view(torch.int64)
        total += _scrambled_sum(words, begin)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)  # wrapped like the int64 it travels as


def _scrambled_sum(words: Tensor, begin: int) -> int:
    index = torch.arange(begin + 1, begin + 1 + words.numel(), device=words.device)
    mixed = index.mul_(_STEP).add_(words)  # int64 arithmetic wraps around
    mixed = (mixed ^ _shifted(mixed, 30)).mul_(_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)).mul_(_SECOND)
    return int((mixed ^ _shifted(mixed, 31)).sum().item())


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch shifts the sign bit in."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
