"""The parameter server on simulated ranks: the requests of clients, and the threads that serve them, by their code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from torchmpi.backends.plan_cost import PlanCost
from torchmpi.communicators.group import Group, GroupContext
from torchmpi.parameterserver import remote
from torchmpi.parameterserver.kernels.server_rules import state_dtype
from torchmpi.parameterserver.remote import RemoteClient, ServerThread
from torchmpi.parameterserver.rules import PreparedRule, Rule, prepare
from torchmpi.parameterserver.shards import SERVER, Actor, Shards, chunk_numel, layout, message_ranges, private_segment
from torchmpi.parameterserver.simulation.coroutines import Event, Turns
from torchmpi.tensors.partition import even_partition

from .messages import Comm, World


def request_cost(size: int, num_remote: int, num_bytes: int) -> PlanCost:
    """Return what a client does to send to the shards of other hosts: requests with data, and replies.

    A receive has the same messages, with the data in the replies.
    """
    numel, item_bytes = num_bytes // 4, 4
    first, _, *_ = even_partition(numel, size)
    num_messages = len(message_ranges(first[1], chunk_numel(item_bytes, item_bytes), item_bytes))
    shards = num_remote * num_bytes / size
    header, reply = remote._HEADER.size, remote._REPLY_FORMAT.size
    return PlanCost(2, num_remote * (1 + num_messages), num_remote * header + shards, num_remote * (header + reply))


class SimulatedServer:
    """A tensor of which each rank holds a shard in memory of its own."""

    number, name = 0, "server 0"

    def __init__(self, comm: Comm, values: torch.Tensor) -> None:
        """Put the own part of the values into the shard."""
        self.dtype = values.dtype
        self.parts = even_partition(values.numel(), comm.size)
        begin, numel = self.parts[comm.rank]
        states = state_dtype(self.dtype)
        plan = layout((numel,), self.dtype.itemsize, states.itemsize)
        own = [self.parts[comm.rank]]
        memory = private_segment(plan.num_bytes)
        self.shards = Shards(memory, plan, own, dtypes=(self.dtype, states), all_parts=self.parts)
        self.shards.array(0).copy_(values.view(-1)[begin : begin + numel])
        self.actor, self.holders = Actor(SERVER), list(range(comm.size))
        self.remote_shards = [rank for rank in self.holders if rank != comm.rank]

    def prepared(self, rule: str | Rule) -> PreparedRule:
        """Return the rule for the dtype of the server."""
        return prepare(rule, self.dtype)


class _Thread(ServerThread):
    """A server thread that runs by turns with the ranks."""

    def __init__(self, turns: Turns, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._turns, self._end = turns, Event("the end of a server thread")

    def start(self) -> None:
        """Run from now on."""
        self._turns.start(self.run)

    def run(self) -> None:
        """Serve until `stop`."""
        self._serve()
        self._turns.finish(self._end, self._turns.clock)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end."""
        self._turns.wait([self._end])


class _Queue:
    doing: str | None = None


class ServerRank:
    """Client and server of a rank."""

    def __init__(self, comm: Comm, values: torch.Tensor) -> None:
        """Start the server. Collective."""
        world: World = comm.world
        self.comm, self.server = comm, SimulatedServer(comm, values)
        context = GroupContext(world.MPI, world.hosts, check="off", threaded=True, slot_bytes=0)
        group = Group(comm, "world", tuple(comm.members), context)
        others = tuple(rank for rank in range(comm.size) if rank != comm.rank)
        messages = comm.Dup()
        self._client = RemoteClient(world.MPI, messages, group, others, _Queue())  # type: ignore[arg-type]
        servers = {0: self.server}
        self._thread = _Thread(world.turns, group, messages, self.server.actor, servers, end_job=_raise)
        self._thread.start()
        comm.Barrier()

    def send(self, data: torch.Tensor, rule: str) -> None:
        """Apply a rule to the shards of all other ranks."""
        self._client.request(self.server, data, self.server.prepared(rule))

    def receive(self, data: torch.Tensor) -> None:
        """Copy the shards of all other ranks."""
        self._client.request(self.server, data, None)

    def stop(self) -> None:
        """End the server when all ranks have called this. Collective."""
        self.comm.Barrier()
        self._thread.stop()


class _Clock:
    """Takes the place of the module `time`."""

    def __init__(self, turns: Turns) -> None:
        self.sleep, self._turns = turns.sleep, turns

    def monotonic(self) -> float:
        """Return the time of what runs."""
        return self._turns.clock


@contextmanager
def virtual_time(world: World) -> Iterator[None]:
    """Let clients and servers sleep in virtual time."""
    with patch.object(remote, "time", _Clock(world.turns)):
        yield


def _raise(message: str, status: int) -> None:
    raise RuntimeError(message)
