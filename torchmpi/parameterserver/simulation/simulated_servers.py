"""Servers of simulated workers: real shards in private memory, real rules, and calls at simulated times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from ...communicators.call_queue import CallQueue
from ...communicators.group import Group
from ...communicators.handle import Handle
from ..kernels.server_rules import state_dtype
from ..rules import PreparedRule
from ..runs import observed_run
from ..runs.call_order import ComparedCalls, NumberedCalls, RecordedRows
from ..runs.observed_run import ObservedServer
from ..server_requests import RequestRecords, ServerRequest
from ..servers import Server, ServerContext
from ..shards import CLIENT, Actor, Shards, layout, private_segment
from .coroutines import Event
from .simulated_job import WorkerTurns
from .simulated_network import SimulatedNetwork

if TYPE_CHECKING:
    from mpi4py.MPI import Comm as MPIComm

T = TypeVar("T")
_LOOK_SECONDS = 20e-6
"""How long a worker does something else that has asked whether a call has ended."""


class SharedShards(Shards):
    """The shards of a server, which all simulated workers use, and the last one unmaps."""

    num_users = 0

    def close(self) -> None:
        """Unmap the shards when no worker uses them."""
        self.num_users -= 1
        if not self.num_users:
            super().close()


class SimulatedHandle(Handle[T]):
    """The handle of a call that ends at a simulated time."""

    __slots__ = ("ended",)

    def __init__(self, description: str) -> None:
        super().__init__(description)
        self.ended = Event(description)


class NumberedServing(NumberedCalls):
    """Numbers the calls of workers, which are served one at a time."""

    def run(self, server: ObservedServer, task: Callable[[], T]) -> T:
        self.position += 1
        return task()


class RepeatedServing(ComparedCalls):
    """Serves the calls of workers in a recorded order."""

    def __init__(self, rows: RecordedRows, turns: WorkerTurns) -> None:
        super().__init__(rows)
        self._turns, self._following, self._last = turns, 0, 0.0
        self._made: dict[int, tuple[float, Callable[[float], object]]] = {}

    def add(self, server: Server, earliest: float, serve: Callable[[float], object]) -> None:
        """Serve a call, at a time or later, when those before it have been made."""
        position, row = self.rows.take(server)

        def in_turn(now: float) -> None:
            self.set(position, row)
            serve(now)

        self._made[position] = earliest, in_turn
        while (made := self._made.pop(self._following, None)) is not None:
            self._last = max(made[0], self._last)
            self._turns.at(self._last, made[1])
            self._following += 1

    def missing(self) -> str:
        """Return which call the workers have not made, for which all others wait."""
        return self.rows.describe_missing(self._following)

    def run(self, server: ObservedServer, task: Callable[[], T]) -> T:
        """Run a call, whose turn it is."""
        return task()


class ServedGroup:
    """What the servers of all workers of a group have in common."""

    def __init__(self, turns: WorkerTurns, network: SimulatedNetwork) -> None:
        self.turns, self.network, self.actor = turns, network, Actor(CLIENT)
        self.shards: dict[int, SharedShards] = {}
        self.repeated: RepeatedServing | None = None
        """The recorded order in which calls are served, if a run is repeated."""
        self.waiting: dict[int, list[tuple[Callable[[torch.Tensor], bool], Event]]] = {}
        """For each server: conditions on its values, and the events of workers that wait for them."""

    def values(self, server: Server) -> torch.Tensor:
        """Return the values of a server, at no cost of simulated time."""
        values = torch.empty(server.numel, dtype=server.dtype)
        self.actor.visit(server.shards, values.data_ptr(), (0, server.numel), None)
        return values

    def wake(self, server: Server, time: float) -> None:
        """Wake the workers that wait for what the values of a server now are."""
        waiting = self.waiting.get(server.number)
        if not waiting:
            return
        values, self.waiting[server.number] = self.values(server), []
        for is_over, event in waiting:
            if is_over(values):
                self.turns.finish(event, time)
            else:
                self.waiting[server.number].append((is_over, event))


class SimulatedServerContext(ServerContext):
    """The servers of one worker. Its calls follow each other, as on ranks, and are served at simulated times."""

    repeats = False

    def __init__(self, group: Group, served: ServedGroup) -> None:
        self.group, self._served = group, served
        self.comm = self.local_comm = cast("MPIComm", group.comm)
        self.local_ranks, self.remote_ranks = tuple(range(group.size)), ()
        self.local_world_ranks = list(group.world_ranks)
        self.remote = None
        self.records: RequestRecords = RequestRecords(group)
        group.context.call_counts.add_requests(self, group.name, self._counted)
        self.call_queue = CallQueue(f"{group.name} parameter server")
        self.servers, self.num_made = {}, 0
        self._free_at = 0.0
        """When the last call of this worker ends."""
        group.attachments.append(self)

    def allocate(self, parts: list[tuple[int, int]], dtype: torch.dtype) -> Shards:
        """Return the shards, which all workers share; the first one makes them."""
        shards, number = self._served.shards, self.num_made
        if number not in shards:
            states = state_dtype(dtype)
            plan = layout(tuple(numel for _, numel in parts), dtype.itemsize, states.itemsize)
            shards[number] = SharedShards(private_segment(plan.num_bytes), plan, parts, dtypes=(dtype, states))
        shards[number].num_users += 1
        return shards[number]

    def require_registered(self, server: Server, rule: PreparedRule) -> None:
        """Return: the workers are one process."""

    def make_client(self) -> Actor:
        """Return what applies rules for all workers."""
        return self._served.actor

    def call(self, request: ServerRequest, key: object) -> Handle[Any]:
        """Run a request at the simulated time at which it reaches the servers."""
        turns, network, server = self._served.turns, self._served.network, cast("Server", request.server)
        handle: SimulatedHandle[Any] = SimulatedHandle(request.what)
        handle.queue = self
        begin, is_send = max(turns.clock, self._free_at), request.rule is not None
        served_at, end = network.times(begin, request.tensor.nbytes, is_send=is_send)
        serve = partial(self._serve, server if is_send else None, handle, request.run, (begin, end - served_at))
        self._free_at = end
        if self._served.repeated is None:
            turns.at(served_at, serve)
        else:
            self._served.repeated.add(server, served_at, serve)
        return handle

    def _serve(
        self,
        changed: Server | None,
        handle: SimulatedHandle[Any],
        run: Callable[[], Any],
        span: tuple[float, float],
        now: float,
    ) -> None:
        """Run the task of a call; `span`: its begin, and the seconds until its end. `changed`: to which it sends."""
        observer = observed_run.active
        num_events = 0 if observer is None else len(observer.events)
        try:
            end = partial(handle.end, run())
        except Exception as error:
            end = partial(handle.end, error=error)
        if observer is not None and len(observer.events) > num_events:
            begun, ended = round(1e9 * span[0]), round(1e9 * (now + span[1]))
            observer.events[-1] = (*observer.events[-1][:4], begun, ended, *observer.events[-1][6:])
        if changed is not None:
            self._served.wake(changed, now)
        self._served.turns.at(now + span[1], partial(self._end, handle, end))

    def _end(self, handle: SimulatedHandle[Any], end: Callable[[], None], now: float) -> None:
        end()
        self._served.turns.finish(handle.ended, now)

    # What a handle asks of the order of its call.

    def run_until(self, handle: Handle[Any]) -> None:
        """Let the worker wait for the end of a call."""
        assert isinstance(handle, SimulatedHandle)
        self._served.turns.wait([handle.ended])

    def ring(self) -> None:
        """Let a moment pass, as a worker asks whether a call has ended."""
        self._served.turns.sleep(_LOOK_SECONDS)

    def pause(self, server: Server, seconds: float, is_over: Callable[[torch.Tensor], bool]) -> None:
        """Wait until a condition is true for the values of a server."""
        if self._served.repeated is not None:  # values are read again as often as in the recorded run
            self._served.turns.sleep(seconds)
            return
        if is_over(self._served.values(server)):  # since it was read
            return
        event = Event(f"a worker that may be ahead of rank {self.group.world_ranks[self.group.rank]}")
        self._served.waiting.setdefault(server.number, []).append((is_over, event))
        self._served.turns.wait([event])

    def time(self) -> float:
        return self._served.turns.clock

    def free(self, server: Server) -> None:
        turns = self._served.turns
        turns.sleep(max(0.0, self._free_at - turns.clock))
        super().free(server)

    def close(self) -> None:
        """Unmap all servers, without the barrier of ranks: a worker that has failed is in none."""
        self.group.context.call_counts.keep_requests(self)
        for server in list(self.servers.values()):
            server.close()
        self.servers.clear()
