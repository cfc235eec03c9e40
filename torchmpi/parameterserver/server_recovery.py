"""Servers after the loss of a rank: their shards live on in the memory of the host, and other ranks take them over.

docs/design/parameterserver.md describes the states.
"""

from __future__ import annotations

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
from .shards import Shards, layout


class _Offer(NamedTuple):
    """With what a rank that was a spare makes its object of a server."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    parts: list[tuple[int, int]]
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
            server.name, server.shape, server.dtype, server.parts, num_images, server.is_saved, server.is_internal,
            ticket,
        )  # fmt: skip

    def open(self, context: ServerContext, number: int) -> Server:
        """Make the server."""
        if self.ticket is None:
            raise FileNotFoundError("they have no descriptor in /proc")
        states = state_dtype(self.dtype)
        numels = tuple(numel for _, numel in self.parts)
        plan = layout(numels, self.dtype.itemsize, states.itemsize, self.num_images)
        shards = Shards(Segment.open(self.ticket), plan, self.parts, dtypes=(self.dtype, states))
        server = Server(context, number, self.shape, shards=shards, name=self.name)
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
    numbers = sorted(set.intersection(*map(set, known)))
    if numbers:
        context = ServerContext(group)
        context.num_made = numbers[-1] + 1
        for number in numbers:
            _continue(context, number, known[0][number], joins=joins)
        if group.rank == 0:
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
        context.servers[number].is_awaited = True
    except OSError as error:
        problem = f"rank {group.world_ranks[group.rank]} cannot map the shards of {offer.name}: {error}"
    if problems := "; ".join(filter(None, group.comm.allgather(problem))):
        raise TorchMPIError(f"{group.where}: a parameter server cannot continue: {problems}")
