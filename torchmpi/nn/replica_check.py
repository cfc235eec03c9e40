"""Comparison of replicas over the ranks: a checksum of the bits of every tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from .. import collectives
from ..argument_types import checks_types
from ..communicators.communicator import Communicator
from ..communicators.levels import Comm
from ..errors import ReplicaError
from ..session import runtime
from ..tensors.buffers import byte_view
from .agreement import check_same_layout
from .join_state import refuse_inside_join
from .kernels import compiled
from .replica import Net, Replica
from .splitmix import FIRST, SECOND, STEP

_CHUNK_WORDS = 1 << 20  # 64-bit words; limits the memory of intermediate results
_LEAST_CODE_BYTES = 256
"""Shorter tensors are not worth a call of machine code."""
_MOST_TOGETHER_BYTES = 64 << 20
"""So many bytes of a device are put together, as each of the operations below takes microseconds to begin there."""
_MAX_NAMED = 8
ADVICE = "Call synchronize_parameters(net) before training, and synchronize gradients before every step."


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
    tensors = compared_tensors(replica, communicator, buffers=buffers)
    check_same_layout(replica, replica.parameters + (replica.buffers if buffers else []), communicator)
    if differing := compare(tensors, communicator):
        raise ReplicaError(
            f"rank {communicator.rank}: {in_words(differing, len(tensors))}:\n{listed(differing)}\n{ADVICE}"
        )


Compared = Mapping[str, tuple[Tensor, Communicator]]
"""Tensors by name, each with the ranks that must have the same one."""


def compared_tensors(replica: Replica, comm: Communicator, *, buffers: bool) -> dict[str, tuple[Tensor, Communicator]]:
    """Return the parameters of a net, and the buffers if these are compared too, with those of its shards."""
    found: list[tuple[Tensor, Communicator]] = []
    for part, of_part in [(replica, comm), *replica.shard_parts(comm)]:
        found += [(tensor, of_part) for tensor in part.parameters + (part.buffers if buffers else [])]
    names = replica.names(tensor for tensor, _ in found)
    return dict(zip(names, found, strict=True))


class Difference(NamedTuple):
    """A tensor that is not the same on ranks that should have the same one."""

    text: str
    """Which ranks agree, and which differ."""
    model: int | None = None
    """The rank whose tensor this rank should have, with most others; None if it has that, or if a rank has none."""
    is_missing: bool = False
    """Whether a rank has no such tensor."""


@torch.no_grad()
def compare(tensors: Compared, comm: Communicator) -> dict[str, Difference]:
    """Compare tensors over the ranks by their checksums. Collective. Return the differences by name.

    The ranks exchange one number for all tensors, which travels with the comparison of the call between hosts, and
    through shared memory within a host. Only if it differs, they exchange the checksums of each.
    """
    if not tensors:
        return {}
    holders = {name: 0 if of is comm else hash(tuple(of.intra.world_ranks)) for name, (_, of) in tensors.items()}
    parts = sorted(set(holders.values()) - {0})
    row = [
        number
        for part in (0, *parts)
        for number in (part, _digest([tensors[name][0] for name, holder in holders.items() if holder == part]))
    ]
    table = collectives.allgather(torch.tensor([row]), comm=comm)
    if bool((table == table[0]).all()):
        return {}
    pairs = {
        (holder, digest) for ranks in table.tolist() for holder, digest in zip(ranks[::2], ranks[1::2], strict=True)
    }
    if len(pairs) == len({holder for holder, _ in pairs}):
        return {}  # all ranks see the same table, so all return or continue
    sums = {name: (checksum(tensor), holders[name]) for name, (tensor, _) in tensors.items()}
    return differences(collectives.allgather_object(sums, comm=comm), comm.rank)


def differences(found: Sequence[Mapping[str, tuple[int, int]]], rank: int) -> dict[str, Difference]:
    """Return the differences among the checksums of all ranks.

    Each checksum in `found` has a number that is equal on ranks that must agree.

    >>> same, other = {"w": (7, 0), "b": (1, 0)}, {"w": (9, 0), "b": (1, 0)}
    >>> differences([same, other, same], 1)
    {'w': Difference(text='ranks 0, 2 agree; rank 1 differs', model=0, is_missing=False)}
    >>> differences([same, {"b": (1, 0)}], 0)["w"].is_missing
    True
    """
    different: dict[str, Difference] = {}
    for name in dict.fromkeys(chain.from_iterable(found)):
        sums, holders = zip(*(each.get(name, (None, 0)) for each in found), strict=True)
        text = _describe(sums, holders)
        if text:
            alike = [each for each, holder in enumerate(holders) if holder == holders[rank]]
            by_sum = {value: [each for each in alike if sums[each] == value] for value in dict.fromkeys(sums)}
            model, is_missing = max(by_sum.values(), key=len)[0], None in sums
            is_even = is_missing or len({sums[each] for each in alike}) == 1
            different[name] = Difference(text, None if is_even else model, is_missing)
    return different


def in_words(differing: Mapping[str, Difference], num_tensors: int) -> str:
    """Say how many tensors differ."""
    return f"{len(differing)} of {num_tensors} tensors differ between the ranks"


def listed(differing: Mapping[str, Difference]) -> str:
    """List the first differences, one in a line."""
    lines = [f"  {name!r}: {each.text}" for name, each in list(differing.items())[:_MAX_NAMED]]
    return "\n".join([*lines, f"  and {len(differing) - _MAX_NAMED} more"] if len(differing) > _MAX_NAMED else lines)


def _digest(tensors: Sequence[Tensor]) -> int:
    """Return one checksum of many tensors."""
    sums: list[int] = []
    together: list[Tensor] = []
    num_bytes = 0
    for tensor in (*tensors, None):
        if together and (tensor is None or tensor.device != together[0].device or num_bytes > _MOST_TOGETHER_BYTES):
            sums.append(checksum(torch.cat(together)))
            together, num_bytes = [], 0
        if tensor is not None and tensor.is_cpu:
            sums.append(checksum(tensor))
        elif tensor is not None:
            together.append(_words(tensor))
            num_bytes += tensor.nbytes
    return checksum(torch.tensor(sums, dtype=torch.int64))


def _describe(sums: Sequence[int | None], holders: Sequence[int]) -> str:
    """Describe which ranks have the same checksum; '' if all ranks with the same entry in `holders` agree.

    >>> _describe([7, 9, 7], [0, 0, 0])
    'ranks 0, 2 agree; rank 1 differs'
    >>> _describe([7, 9, 7, 8], [0, 1, 0, 1])
    'ranks 1, 3 with the same shard: all ranks differ'
    """
    texts = []
    for holder in sorted(set(holders)):
        groups: dict[int | None, list[str]] = {}
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
    total = tensor.numel()
    words = _words(tensor)
    if words.is_cpu and words.nbytes >= _LEAST_CODE_BYTES and (sum_words := compiled("sum_words")) is not None:
        total += sum_words(words.data_ptr(), words.numel())
    else:
        for begin in range(0, words.numel(), _CHUNK_WORDS):
            total += _scrambled_sum(words[begin : begin + _CHUNK_WORDS], begin)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)  # wrapped to the range of int64


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as 64-bit words, the last one filled with zeros."""
    data = byte_view(tensor.detach().resolve_conj().resolve_neg().contiguous())
    missing = -data.numel() % 8
    if missing or data.storage_offset() % 8:  # a view as int64 begins at a multiple of 8 bytes
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int64)


def _scrambled_sum(words: Tensor, begin: int) -> int:
    index = torch.arange(begin + 1, begin + 1 + words.numel(), device=words.device)
    mixed = index.mul_(STEP).add_(words)  # int64 arithmetic wraps around
    mixed = (mixed ^ _shifted(mixed, 30)).mul_(FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)).mul_(SECOND)
    return int((mixed ^ _shifted(mixed, 31)).sum().item())


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift to the right logically; the operator of torch copies the sign bit."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
