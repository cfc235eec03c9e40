"""Servers after the loss of a rank: their shards live on in the memory of its host, whose other ranks take them over.

docs/design/parameterserver.md describes the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from ..communicators.group import Group
from ..errors import TorchMPIError
from ..session import runtime
from ..shared_memory.segments import Segment, Ticket
from .kernels.server_rules import state_dtype
from .servers import Server, ServerContext, suspended
from .shards import Shards, layout, private_segment


class _Offer(NamedTuple):
    """With what a rank that was a spare makes its object of a server."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    parts: list[tuple[int, int]]
    local_shards: tuple[int, ...]
    num_images: int
    is_saved: bool
    is_internal: bool
    ticket: Ticket | None
    """With what it maps the shards; None if the system does not let another process do so."""

    @classmethod
    def of(cls, server: Server) -> _Offer:
        """Describe a server."""
        ticket = None
        with suppress(OSError):
            ticket = server.shards.segment.offer()
        num_images = server.shards.images[1]
        return cls(
            server.name, server.shape, server.dtype, server.parts, server.local_shards, num_images, server.is_saved,
            server.is_internal, ticket,
        )  # fmt: skip

    def open(self, context: ServerContext, number: int) -> Server:
        """Make the server."""
        if self.ticket is None:
            raise FileNotFoundError("they have no descriptor in /proc")
        states, parts = state_dtype(self.dtype), [self.parts[shard] for shard in self.local_shards]
        plan = layout(tuple(numel for _, numel in parts), self.dtype.itemsize, states.itemsize, self.num_images)
        segment = Segment.open(self.ticket) if parts else private_segment(plan.num_bytes)
        shards = Shards(segment, plan, parts, dtypes=(self.dtype, states), all_parts=self.parts)
        server = Server(context, number, self.shape, shards=shards, name=self.name, local_shards=self.local_shards)
        server.is_saved, server.is_internal = self.is_saved, self.is_internal
        return server


def continue_all(*, joins: bool) -> None:
    """Continue the servers of the former ranks on the present ones. Collective; `joins`: this rank was a spare.

    If a rank is lost meanwhile, they remain suspended.
    """
    group = runtime.current().world
    group.call_action("recover", partial(_continue_all, group, joins=joins))


def _continue_all(group: Group, *, joins: bool) -> None:
    offers = group.comm.allgather(None if joins else {number: _Offer.of(each) for number, each in suspended.items()})
    known = [offer for offer in offers if offer is not None]
    numbers = sorted(set.intersection(*map(set, known))) if known else []  # none if all ranks were spares
    if numbers:
        context = ServerContext(group)
        context.num_made = numbers[-1] + 1
        near = next((offer for rank in context.local_ranks if (offer := offers[rank]) is not None), None)
        for number in numbers:
            offer = known[0][number]._replace(local_shards=()) if near is None else near[number]
            _continue(context, number, offer, joins=joins)
        if group.rank == context.local_ranks[0]:
            for server in context.servers.values():
                server.actor.repair(server.shards)
        group.comm.Barrier()  # other ranks may send from now on
    for number in suspended.keys() - set(numbers):  # of an init() that other ranks have not begun
        suspended[number].refuse()
        suspended[number].shards.close()
    suspended.clear()


def _continue(context: ServerContext, number: int, offer: _Offer, *, joins: bool) -> None:
    group, problem = context.group, ""
    try:
        if joins:
            context.servers[number] = offer.open(context, number)
        else:
            suspended[number].resume(context)
            context.servers[number] = suspended[number]
    except OSError as error:
        problem = f"rank {group.world_ranks[group.rank]} cannot map the shards of {offer.name}: {error}"
    found = group.comm.allgather((problem, offer.local_shards))
    if problems := "; ".join(filter(None, (problem for problem, _ in found))):
        raise TorchMPIError(f"{group.where}: a parameter server cannot continue: {problems}")
    server = context.servers[number]
    server.holders = holders([shards for _, shards in found], len(server.parts))
    server.is_awaited = True
    lost = [shard for shard, rank in enumerate(server.holders) if rank < 0 and server.parts[shard][1]]
    if lost:
        server.problem = (
            f"{server.name} has ended with the last ranks that had its shards {lost} in their memory. Make a new one "
            "with parameterserver.init, and get the values from elsewhere, e.g. by parameterserver.load."
        )
        group.context.call_counts.keep_requests(context, lambda: context.servers.pop(number))
        suspended.pop(number, None)
        server.close()


def holders(held: Sequence[tuple[int, ...]], num_shards: int) -> list[int]:
    """Return which rank serves each shard, given those in the memory of each rank; -1 if a shard is lost.

    >>> holders([(0, 1), (0, 1), (2, 3), ()], 5)
    [0, 1, 2, 2, -1]
    """
    found = []
    for shard in range(num_shards):
        ranks = [rank for rank, shards in enumerate(held) if shard in shards]
        found.append(ranks[held[ranks[0]].index(shard) % len(ranks)] if ranks else -1)
    return found
