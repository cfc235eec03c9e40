"""The calls of torch.distributed with their expected results, which every rank computes from all inputs.

Each call is a function of a :class:`Setting` that makes it and returns the tensors it writes with the expected values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from helpers import contract

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

OPS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX, "band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR,
}  # fmt: skip
_OF_BOOL = {"sum": "lor", "prod": "land"}
LAYOUTS = ("contiguous", "transposed", "leaf", "inference")
MODES = ("sync", "async", "mixed")
# Later versions have new names for these two, and warn of the old ones.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def ops_of(dtype: torch.dtype) -> list[str]:
    """The operations of torch that make sense for a dtype."""
    if dtype is torch.bool:
        return [*_OF_BOOL, "min", "max", "band", "bor", "bxor"]
    if dtype.is_complex:
        return ["sum", "avg"]  # torch refuses the others
    return [op for op in contract.OPS_OF.get(dtype, ()) if op in OPS]


class Setting(NamedTuple):
    """Where and on what a call is made."""

    group: Any
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (3,)
    seed: int = 0
    op: str = "sum"
    layout: str = "contiguous"
    asynchronous: bool = False

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def root(self) -> int:
        return self.seed % self.size

    def value(self, rank: int, part: int = 0, *, longer: int = 0) -> torch.Tensor:
        """The input of a rank: its tensor, or part of its list, with some rows more than usual."""
        shape = (self.shape[0] + longer, *self.shape[1:]) if longer else self.shape
        return contract.values(shape, self.dtype, rank, self.seed + 7 * part)

    def laid(self, values: torch.Tensor) -> torch.Tensor:
        """The values in memory of the requested kind."""
        if self.layout == "transposed":
            return contract.strided(values)
        if self.layout == "leaf" and (values.is_floating_point() or values.is_complex()):
            return values.clone().requires_grad_()
        if self.layout == "inference":
            with torch.inference_mode():
                return values.clone()
        return values.clone()

    def blank(self, like: torch.Tensor) -> torch.Tensor:
        """Room for a result."""
        return self.laid(torch.ones_like(like))

    def reduced(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        op = _OF_BOOL.get(self.op, self.op) if self.dtype is torch.bool else self.op
        return contract.reduced(inputs, op)

    @property
    def common(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.asynchronous}


def all_reduce(s: Setting) -> tuple[Any, Pairs]:
    inputs = [s.value(rank) for rank in range(s.size)]
    tensor = s.laid(inputs[s.rank])
    return dist.all_reduce(tensor, OPS[s.op], **s.common), [(tensor, s.reduced(inputs))]


def all_reduce_coalesced(s: Setting) -> tuple[Any, Pairs]:
    lists = [[s.value(rank, part, longer=part if s.shape else 0) for part in range(3)] for rank in range(s.size)]
    tensors = [s.laid(values) for values in lists[s.rank]]
    work = dist.all_reduce_coalesced(tensors, OPS[s.op], **s.common)
    return work, [(tensor, s.reduced(list(column))) for tensor, *column in zip(tensors, *lists, strict=True)]


def reduce(s: Setting) -> tuple[Any, Pairs]:
    """The tensors of the other ranks keep their values."""
    inputs = [s.value(rank) for rank in range(s.size)]
    tensor = s.laid(inputs[s.rank])
    work = dist.reduce(tensor, op=OPS[s.op], group_dst=s.root, **s.common)
    return work, [(tensor, s.reduced(inputs) if s.rank == s.root else inputs[s.rank])]


def reduce_scatter(s: Setting) -> tuple[Any, Pairs]:
    lists = [[s.value(rank, part) for part in range(s.size)] for rank in range(s.size)]
    return _reduce_scatter(s, lists)


def reduce_scatter_uneven(s: Setting) -> tuple[Any, Pairs]:
    lists = [[s.value(rank, part, longer=part % 3) for part in range(s.size)] for rank in range(s.size)]
    return _reduce_scatter(s, lists)


def _reduce_scatter(s: Setting, lists: list[list[torch.Tensor]]) -> tuple[Any, Pairs]:
    expected = s.reduced([parts[s.rank] for parts in lists])
    output, parts = s.blank(expected), [s.laid(part) for part in lists[s.rank]]
    return dist.reduce_scatter(output, parts, OPS[s.op], **s.common), [(output, expected)]


def reduce_scatter_tensor(s: Setting) -> tuple[Any, Pairs]:
    lists = [torch.stack([s.value(rank, part) for part in range(s.size)]) for rank in range(s.size)]
    expected = s.reduced([parts[s.rank] for parts in lists])
    output = s.blank(expected)
    return reduce_scatter_single(output, s.laid(lists[s.rank]), OPS[s.op], **s.common), [(output, expected)]


def broadcast(s: Setting) -> tuple[Any, Pairs]:
    tensor = s.laid(s.value(s.rank))
    return dist.broadcast(tensor, group_src=s.root, **s.common), [(tensor, s.value(s.root))]


def all_gather(s: Setting) -> tuple[Any, Pairs]:
    return _all_gather(s, [s.value(rank) for rank in range(s.size)])


def all_gather_uneven(s: Setting) -> tuple[Any, Pairs]:
    return _all_gather(s, [s.value(rank, longer=rank % 3) for rank in range(s.size)])


def _all_gather(s: Setting, inputs: list[torch.Tensor]) -> tuple[Any, Pairs]:
    outputs = [s.blank(values) for values in inputs]
    work = dist.all_gather(outputs, s.laid(inputs[s.rank]), **s.common)
    return work, list(zip(outputs, inputs, strict=True))


def all_gather_into_views(s: Setting) -> tuple[Any, Pairs]:
    """Into the parts of one tensor, in order, which needs no copies."""
    inputs = [s.value(rank) for rank in range(s.size)]
    whole = torch.ones_like(torch.stack(inputs))
    work = dist.all_gather(list(whole.unbind()), s.laid(inputs[s.rank]), **s.common)
    return work, [(whole, torch.stack(inputs))]


def all_gather_coalesced(s: Setting) -> tuple[Any, Pairs]:
    lists = [[s.value(rank, part, longer=part if s.shape else 0) for part in range(2)] for rank in range(s.size)]
    outputs = [[s.blank(values) for values in parts] for parts in lists]
    work = dist.all_gather_coalesced(outputs, [s.laid(values) for values in lists[s.rank]], **s.common)
    return work, list(zip(itertools.chain(*outputs), itertools.chain(*lists), strict=True))


def all_gather_into_tensor(s: Setting) -> tuple[Any, Pairs]:
    """The ranks' tensors one above the other, and every other time one behind the other."""
    inputs = [s.value(rank) for rank in range(s.size)]
    expected = torch.stack(inputs) if s.seed % 2 or not s.shape else torch.cat(inputs)
    output = s.blank(expected)
    return all_gather_single(output, s.laid(inputs[s.rank]), **s.common), [(output, expected)]


def gather(s: Setting) -> tuple[Any, Pairs]:
    inputs = [s.value(rank) for rank in range(s.size)]
    outputs = [s.blank(values) for values in inputs] if s.rank == s.root else None
    work = dist.gather(s.laid(inputs[s.rank]), outputs, group_dst=s.root, **s.common)
    return work, list(zip(outputs, inputs, strict=True)) if outputs is not None else []


def gather_single(s: Setting) -> tuple[Any, Pairs]:
    """Into one tensor. Before torch 2.14 only the groups of torchmpi have it, without a function of torch."""
    inputs = [s.value(rank) for rank in range(s.size)]
    whole = torch.stack(inputs)
    output, own = s.blank(whole) if s.rank == s.root else None, s.laid(inputs[s.rank])
    pairs = [] if output is None else [(output, whole)]
    if hasattr(dist, "gather_single"):
        return dist.gather_single(own, output, group_dst=s.root, **s.common), pairs
    options = dist.distributed_c10d.GatherOptions()
    options.rootRank, options.asyncOp = s.root, s.asynchronous
    work = (s.group or dist.group.WORLD).gather_single(own.new_empty(0) if output is None else output, own, options)
    if s.asynchronous:
        return work, pairs
    work.wait()
    return None, pairs


def scatter(s: Setting) -> tuple[Any, Pairs]:
    parts = [s.value(s.root, part) for part in range(s.size)]
    output = s.blank(parts[s.rank])
    inputs = [s.laid(part) for part in parts] if s.rank == s.root else None
    return dist.scatter(output, inputs, group_src=s.root, **s.common), [(output, parts[s.rank])]


def all_to_all(s: Setting) -> tuple[Any, Pairs]:
    """Every pair of ranks has a length of its own, some of them none."""

    def part(source: int, target: int) -> torch.Tensor:
        values = contract.values(((source + 2 * target) % 4, 3), s.dtype, source, s.seed + target)
        return values if s.shape else values.reshape(-1)

    expected = [part(source, s.rank) for source in range(s.size)]
    outputs = [s.blank(values) for values in expected]
    work = dist.all_to_all(outputs, [s.laid(part(s.rank, target)) for target in range(s.size)], **s.common)
    return work, list(zip(outputs, expected, strict=True))


def all_to_all_even(s: Setting) -> tuple[Any, Pairs]:
    lists = [[s.value(rank, part) for part in range(s.size)] for rank in range(s.size)]
    expected = [parts[s.rank] for parts in lists]
    outputs = [s.blank(values) for values in expected]
    work = dist.all_to_all(outputs, [s.laid(part) for part in lists[s.rank]], **s.common)
    return work, list(zip(outputs, expected, strict=True))


def all_to_all_single(s: Setting) -> tuple[Any, Pairs]:
    lists = [torch.stack([s.value(rank, part) for part in range(s.size)]) for rank in range(s.size)]
    expected = torch.stack([parts[s.rank] for parts in lists])
    output = s.blank(expected)
    return dist.all_to_all_single(output, s.laid(lists[s.rank]), **s.common), [(output, expected)]


def uneven_rows(s: Setting) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor]:
    """Return what a rank sends, how many rows to each rank and from each rank, and what it receives."""
    rows = [[(source + 2 * target + s.seed) % 4 for target in range(s.size)] for source in range(s.size)]
    width = s.shape[-1:]
    inputs = [contract.values((sum(rows[rank]), *width), s.dtype, rank, s.seed) for rank in range(s.size)]
    received = [rows[source][s.rank] for source in range(s.size)]
    expected = torch.cat([inputs[source].split(rows[source])[s.rank] for source in range(s.size)])
    return s.laid(inputs[s.rank]), rows[s.rank], received, expected


def all_to_all_single_uneven(s: Setting) -> tuple[Any, Pairs]:
    given, sent, received, expected = uneven_rows(s)
    output = s.blank(expected)
    return dist.all_to_all_single(output, given, received, sent, **s.common), [(output, expected)]


def barrier(s: Setting) -> tuple[Any, Pairs]:
    return dist.barrier(s.group, async_op=s.asynchronous), []


Call = Callable[[Setting], tuple[Any, Pairs]]
REDUCING: dict[str, Call] = {
    call.__name__: call
    for call in (all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_uneven, reduce_scatter_tensor)
}
MOVING: dict[str, Call] = {
    call.__name__: call
    for call in (
        broadcast, all_gather, all_gather_uneven, all_gather_into_views, all_gather_coalesced, all_gather_into_tensor,
        gather, gather_single, scatter, all_to_all, all_to_all_even, all_to_all_single, all_to_all_single_uneven,
        barrier,
    )
}  # fmt: skip
CALLS = REDUCING | MOVING
NEEDS_ROWS = ("reduce_scatter_uneven", "all_gather_uneven")
"""These need a first dimension, to differ in."""


def is_asynchronous(mode: str, rank: int) -> bool:
    """torch permits a difference between ranks here."""
    return mode == "async" or (mode == "mixed" and rank % 2 == 0)


def wrong(name: str, setting: Setting, pairs: Pairs) -> list[str]:
    """Descriptions of the results that differ from the expected ones."""
    return [
        f"{name} {setting._replace(group=None)}: got {actual.detach().flatten()[:8].tolist()}, "
        f"expected {expected.flatten()[:8].tolist()}"
        for actual, expected in pairs
        if not contract.same_bits(actual.detach(), expected)
    ]
