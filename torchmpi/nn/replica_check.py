"""Comparison of replicas over the ranks: a checksum of the bits of every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from .. import collectives
from ..argument_types import checks_types
from ..communicators.levels import Comm
from ..errors import ReplicaError
from ..session import runtime
from ..tensors.buffers import byte_view
from .agreement import check_same_layout
from .join_state import refuse_inside_join
from .replica import Net, Replica

_CHUNK_WORDS = 1 << 20  # 64-bit words; limits the memory of intermediate results

# Constants of the splitmix64 generator, as signed 64-bit numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_MAX_NAMED = 8


@checks_types
@torch.no_grad()
def check_with_allreduce(net: Net, *, buffers: bool = True, comm: Comm = None) -> None:
    """Check that every parameter and buffer has the same bits on all ranks. Collective.

    Args:
        net: Module, or iterable of tensors. A shard is compared among the ranks that hold the same one
            (:func:`~torchmpi.nn.set_sharded`).
        buffers: Also compare buffers. In data-parallel training the running statistics of batch norm differ between
            ranks, as each rank has its own data.
        comm: Communicator, group or level; default: the current communicator.

    Raises:
        ReplicaError: On all ranks: tensors differ. The message names them and the ranks that agree.
        ArgumentError: Called inside ``join``, or the net has sparse tensors, or shards that do not fit to the
            communicator.

    Example:
        mpinn.check_with_allreduce(model)
    """
    refuse_inside_join(net, "check_with_allreduce")
    communicator = runtime.communicator(comm)
    replica = Replica(net)
    tensors = replica.parameters + (replica.buffers if buffers else [])
    check_same_layout(replica, tensors, communicator)
    holders = [0] * len(tensors)  # the first of the world ranks that must agree; for replicated tensors any constant
    for part, comm in replica.shard_parts(communicator):
        shards = part.parameters + (part.buffers if buffers else [])
        tensors += shards
        holders += [comm.intra.world_ranks[0]] * len(shards)
    if not tensors:
        return
    sums = [checksum(tensor.detach()) for tensor in tensors]
    table = collectives.allgather(torch.tensor([[sums, holders]]), comm=communicator)
    suspects = (table[:, 0] != table[0, 0]).any(dim=0).nonzero().flatten().tolist()
    described = {index: _describe(*table[:, :, index].t().tolist()) for index in suspects}
    differing = [index for index in suspects if described[index]]
    if not differing:
        return
    names = replica.names(tensors)
    lines = [f"  {names[index]!r}: {described[index]}" for index in differing[:_MAX_NAMED]]
    if len(differing) > _MAX_NAMED:
        lines.append(f"  and {len(differing) - _MAX_NAMED} more")
    raise ReplicaError(
        f"rank {communicator.rank}: {len(differing)} of {len(tensors)} tensors differ between the ranks:\n"
        + "\n".join(lines)
        + "\nCall synchronize_parameters(net) before training, and synchronize gradients before every step."
    )


def _describe(sums: Sequence[int], holders: Sequence[int]) -> str:
    """Describe which ranks have the same checksum; '' if all ranks with the same entry in `holders` agree.

    >>> _describe([7, 9, 7], [0, 0, 0])
    'ranks 0, 2 agree; rank 1 differs'
    >>> _describe([7, 9, 7, 8], [0, 1, 0, 1])
    'ranks 1, 3 with the same shard: all ranks differ'
    """
    texts = []
    for holder in sorted(set(holders)):
        groups: dict[int, list[str]] = {}
        for rank, value in enumerate(sums):
            if holders[rank] == holder:
                groups.setdefault(value, []).append(str(rank))
        if len(groups) > 1:
            ranks = ", ".join(sorted(chain(*groups.values()), key=int))
            text = _describe_groups(list(groups.values()))
            texts.append(text if len(set(holders)) == 1 else f"ranks {ranks} with the same shard: {text}")
    return "; ".join(texts)


def _describe_groups(groups: Sequence[list[str]]) -> str:
    largest = max(groups, key=len)
    others = [rank for group in groups if group is not largest for rank in group]
    if len(largest) == 1:
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
    data = byte_view(tensor.resolve_conj().resolve_neg().contiguous())
    missing = -data.numel() % 8
    if missing or data.storage_offset() % 8:  # a view as int64 begins at a multiple of 8 bytes
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
