"""What a communicator with servers has, once: its actors, the order of its calls, and the way to other hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..communicators.call_queue import CallQueue
from ..communicators.group import Group, share
from ..errors import CommunicatorError, MismatchError, TorchMPIError
from ..session import runtime
from . import remote
from .actor import Actor, Shards
from .arena import CLIENT, SERVER, Arena, Memory
from .shards import layout

T = TypeVar("T")


class Service:
    """Made by the first `init` on a group, closed with the group."""

    def __init__(self, group: Group) -> None:
        context = group.context
        self.group = group
        self.comm = group.comm.Dup()
        self.near_comm, self.arena = _make_arena(group, self.comm)
        near = tuple(self.near_comm.allgather(group.rank))
        self.near_ranks, self.far_ranks = near, tuple(rank for rank in range(group.size) if rank not in near)
        self.client = Actor(self.arena, CLIENT, is_crowded=context.is_crowded)
        self.client.on_wait = self._note_wait
        # Where all is done in memory, MPI need not allow threads for calls to have one.
        call_queue = CallQueue(f"{group.name} parameter server", threaded=context.threaded or not self.far_ranks)
        self.call_queue = group.peer_queues.setdefault(("parameter server", 0), call_queue)
        self.servers: dict[int, Any] = {}
        """Those that have not been freed, by number."""
        self.num_made = 0
        self.requests: remote.Requests | None = None
        self._thread: remote.ServingThread | None = None
        if self.far_ranks:
            self.requests = remote.Requests(context.MPI, self.comm, self.call_queue, self.far_ranks)
            serving = Actor(self.arena, SERVER, is_crowded=context.is_crowded)
            end_job = runtime.current().failures.end_job
            self._thread = remote.ServingThread(
                context.MPI, self.comm, serving, self.servers, name=group.name, end_job=end_job
            )
            self._thread.start()
        group.attachments.append(self)

    def allocate(self, parts: list[tuple[int, int]], dtypes: tuple[torch.dtype, torch.dtype]) -> Shards:
        """Memory for the shards of the ranks that share it, of which each has mapped all. Collective."""
        own = [parts[rank] for rank in self.near_ranks]
        plan = layout(tuple(numel for _, numel in own), *(dtype.itemsize for dtype in dtypes))
        memory = _shared(self.comm, self.near_comm, "shards", plan.num_bytes)
        if memory is None:
            raise TorchMPIError(
                f"{self.group.where}: no {plan.num_bytes} bytes of shared memory for the shards can be had on some "
                "host. Give the container more (docker --shm-size), or do without: TORCHMPI_SLOT_BYTES=0."
            )
        return Shards(memory, plan, own, dtypes=dtypes)

    def refuse_calls(self, server: Any) -> None:
        """From now on, also of other threads that are about to make one: what it looks at will go."""
        with self.call_queue.run_lock:
            server.is_open = False

    def _note_wait(self, holder: int) -> None:
        """Let the watchdog see that, and for whom, this rank waits."""
        if self.call_queue.doing is None:
            rank = self.group.world_ranks[self.near_ranks[self.arena.rank_of(holder)]]
            self.call_queue.doing = f"a call of the parameter server, for a chunk that rank {rank} has locked,"

    def close(self) -> None:
        """Meet the others, who until then may still send something here, and give everything back. Collective."""
        for server in self.servers.values():
            server.is_open = False  # the group has closed the lane: nobody is in a call
        self.comm.Barrier()
        if self._thread is not None:
            self._thread.stop()
        for server in list(self.servers.values()):
            server.close()
        self.servers.clear()
        self.arena.memory.close()
        self.near_comm.Free()
        self.comm.Free()


def _make_arena(group: Group, comm: Any) -> tuple[Any, Arena]:
    """The ranks that share memory with this one, and their arena: alone where there is none to share."""
    hosts = [group.context.hosts[rank] for rank in group.world_ranks]
    shares = bool(group.context.slot_bytes)
    near = comm.Split(hosts[group.rank] if shares else group.rank, group.rank)
    memory = _shared(comm, near, "arena", Arena.num_bytes(near.size))
    if memory is None:
        near.Free()
        near, memory = comm.Split(group.rank, 0), Memory(None, Arena.num_bytes(1))
    return near, Arena(memory, near.rank)


def _shared(comm: Any, near: Any, name: str, num_bytes: int) -> Memory | None:
    """Memory for the ranks in `near`, a part of those in `comm`; None if it cannot be had by all parts. Collective."""
    segment = share(near, name, num_bytes) if near.size > 1 else None
    if all(comm.allgather(segment is not None or near.size == 1)):
        return Memory(segment, num_bytes)
    if segment is not None:
        segment.close()
    return None


def service_of(group: Group) -> Service | None:
    """The service of a group, if it has one."""
    return next((item for item in group.attachments if isinstance(item, Service)), None)


def call_on_servers(group: Group, collective: str, subject: str, action: Callable[[], T]) -> T:
    """Run `action`, a collective operation on servers, as a call that the ranks compare.

    `subject` describes the object of the operation. It must be the same on all ranks; otherwise all ranks raise before
    the action starts, since a rank inside the action could not be stopped by one that finds the difference later.
    """

    def run() -> T:
        calls = group.comm.allgather((group.call_log.seq, subject))
        if calls != [calls[0]] * group.size:
            listing = "; ".join(
                f"rank {rank}: {what}, call #{seq}" for rank, (seq, what) in zip(group.world_ranks, calls, strict=True)
            )
            raise MismatchError(
                f"{group.where}: the ranks called {collective} with different things: {listing}. Pass the same on all."
            )
        return action()

    return group.call_action(collective, run)


def require_threads(group: Group) -> None:
    """Between hosts a thread serves, which MPI must allow."""
    if not group.context.threaded and (len(group.hosts) > 1 or not group.context.slot_bytes) and group.size > 1:
        raise CommunicatorError(
            f"{group.where}: parameter servers for ranks that share no memory need MPI_THREAD_MULTIPLE, which this MPI "
            "library does not give. Use servers within the hosts (comm=1, the level of hosts that start() makes), or "
            "another MPI."
        )
