"""Comparison of replicas over the ranks: a checksum of the bits of every tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import collectives
from ..communicators.communicator import Communicator
from ..errors import ReplicaError
from ..session import runtime
from .agreement import check_same_layout
from .join_state import refuse_inside_join
from .replica import Net, Replica

_CHUNK_WORDS = 1 << 20  # 64-bit words; limits the memory of intermediate results

# Constants of the splitmix64 generator, as signed 64-bit numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_MAX_NAMED = 8


@torch.no_grad()
def check_with_allreduce(net: Net, *, buffers: bool = True, comm: int | Communicator | None = None) -> None:
    """Check that every parameter and buffer has the same bits on all ranks. Collective.

    Args:
        net: Module, or iterable of tensors. Sharded parameters are ignored.
        buffers: Also compare buffers. In data-parallel training the running statistics of batch norm differ between
            ranks, as each rank has its own data.
        comm: Communicator or level; default: the current communicator.

    Raises:
        ReplicaError: On all ranks: tensors differ. The message names them and the ranks that agree.
        ArgumentError: Called inside ``join``.

    Example:
        mpinn.check_with_allreduce(model)
    """
    refuse_inside_join(net, "check_with_allreduce")
    communicator = runtime.communicator(comm)
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
    """Describe which ranks have the same checksum.

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
    differing = f"rank {others[0]} differs" if len(others) == 1 else f"ranks {', '.join(others)} differ"
    return f"ranks {', '.join(largest)} agree; {differing}"


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit checksum that depends on every bit of `tensor` and its position.

    Each 64-bit word is combined with its index and scrambled (the finalizer of splitmix64), and the results are added.
    A plain weighted sum would not detect two flipped sign bits.

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
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)  # wrapped to the range of int64


def _scrambled_sum(words: Tensor, begin: int) -> int:
    index = torch.arange(begin + 1, begin + 1 + words.numel(), device=words.device)
    mixed = index.mul_(_STEP).add_(words)  # int64 arithmetic wraps around
    mixed = (mixed ^ _shifted(mixed, 30)).mul_(_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)).mul_(_SECOND)
    return int((mixed ^ _shifted(mixed, 31)).sum().item())


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift to the right logically; the operator of torch copies the sign bit."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
