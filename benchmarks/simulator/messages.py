"""Simulated MPI: the messages and collectives that the backends use, between ranks of one process.

The ranks run by turns, and their messages carry data. A message waits for its receive, however short it is, and is
copied as late as MPI allows: a plan that overwrites a buffer too early has a wrong result, a plan that depends on
buffering is a deadlock.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchmpi.backends import schedule

from .coroutines import Event, Turns
from .network import Links, Network

LIBRARY_TAG = 1000
# Up to this size, collectives of a library gather in the fewest rounds.
_LIBRARY_SHORT_BYTES = 64 << 10
_NUMBERS = {"FLOAT": np.float32, "DOUBLE": np.float64}


class Request(Event):
    """A message that a rank sends or receives."""

    def __init__(self, comm: Comm, is_send: bool, memory: tuple[int, int], peer: int, tag: int) -> None:
        direction = "to" if is_send else "from"
        super().__init__(f"rank {comm.world_rank}: {memory[1]} bytes {direction} rank {comm.members[peer]}, tag {tag}")
        self.comm, self.is_send, self.peer, self.tag = comm, is_send, peer, tag
        self.address, self.num_bytes = memory
        self.other: Request | None = None
        self.posted = 0.0


class Buffers:
    """`MPI.buffer`."""

    @staticmethod
    def fromaddress(address: int, num_bytes: int) -> tuple[int, int]:
        """Return memory as simulated messages take it."""
        return address, num_bytes


class SimulatedMPI:
    """The part of the module `mpi4py.MPI` that backends use; types and operations are their names."""

    UNDEFINED = -1
    Exception = type("Exception", (RuntimeError,), {})
    buffer = Buffers

    def __init__(self, world: World) -> None:
        self.Request = _RequestType(world)

    def __getattr__(self, name: str) -> str:
        return name

    @staticmethod
    def get_vendor() -> tuple[str, tuple[int, int, int]]:
        """Return the name and version of the library."""
        return "simulated", (1, 0, 0)


class _RequestType:
    def __init__(self, world: World) -> None:
        self.Waitall = world.wait_all


class Comm:
    """A communicator of one rank."""

    has_unique_context = True

    def __init__(self, world: World, members: Sequence[int], rank: int, name: str) -> None:
        self.world, self.members, self.rank, self.size = world, members, rank, len(members)
        self.name = name

    @property
    def world_rank(self) -> int:
        """The number of this rank among all."""
        return self.members[self.rank]

    # Point-to-point messages.

    def Isend(self, message: Any, dest: int, tag: int) -> Request:
        """Begin to send."""
        request = Request(self, True, _memory(message), dest, tag)
        self.world.begin(request)
        return request

    def Irecv(self, message: Any, source: int, tag: int) -> Request:
        """Begin to receive."""
        request = Request(self, False, _memory(message), source, tag)
        self.world.begin(request)
        return request

    def Sendrecv(self, sent: Any, dest: int, sendtag: int, received: Any, source: int, recvtag: int) -> None:
        """Send a message and receive another."""
        self.world.wait_all([self.Irecv(received, source, recvtag), self.Isend(sent, dest, sendtag)])

    # Collectives, by algorithms that MPI libraries have too.

    def Barrier(self) -> None:
        """Wait for all ranks, by dissemination."""
        for (sent,), (received,) in schedule.doubling(self.rank, self.size):
            self.Sendrecv((0, 0), sent.peer, LIBRARY_TAG, (0, 0), received.peer, LIBRARY_TAG)

    def Allreduce(self, sent: Any, received: Any, op: str) -> None:
        """Add in place on two ranks: other sums of vectors are not left to a library."""
        memory, _, dtype = received
        if (self.size, op) != (2, "SUM"):
            raise NotImplementedError(f"the simulated library has no {op} of {self.size} ranks")
        address, num_bytes = _memory(memory)
        other = np.empty(num_bytes, np.uint8)
        peer = 1 - self.rank
        self.Sendrecv((address, num_bytes), peer, LIBRARY_TAG, (other, dtype), peer, LIBRARY_TAG)
        own = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address)).view(_NUMBERS[dtype])
        own += other.view(own.dtype)

    def Bcast(self, message: Any, root: int) -> None:
        """Copy the root's memory to all ranks along a binomial tree."""
        memory = _memory(message)
        for sends, receives in schedule.tree(self.rank, self.size, root):
            requests = [self.Irecv(memory, peer, LIBRARY_TAG) for peer, *_ in receives]
            requests += [self.Isend(memory, peer, LIBRARY_TAG) for peer, *_ in sends]
            self.world.wait_all(requests)

    def Alltoallv(self, sent: Any, received: Any) -> None:
        """Send each rank its part, all at the same time."""
        outgoing, incoming = _parts(sent), _parts(received)
        ctypes.memmove(incoming[self.rank][0], *outgoing[self.rank])
        self._exchange(schedule.exchange(self.rank, self.size), outgoing, incoming)

    def Allgather(self, sent: Any, received: Any) -> None:
        """Gather equal parts on all ranks."""
        address, num_bytes = _memory(sent)
        begin, _ = _memory(received)
        self._gather((address, num_bytes), [(begin + num_bytes * rank, num_bytes) for rank in range(self.size)])

    def Allgatherv(self, sent: Any, received: Any) -> None:
        """Gather parts of any length on all ranks."""
        self._gather(_memory(sent), _parts(received))

    def Gatherv(self, sent: Any, received: Any, root: int) -> None:
        """Gather parts of any length on the root."""
        own = _memory(sent)
        parts = [own] * self.size if received is None else _parts(received)
        if self.rank == root:
            ctypes.memmove(parts[root][0], *own)
        self._exchange(schedule.collect(self.rank, self.size, root), [own] * self.size, parts)

    def _gather(self, own: tuple[int, int], parts: list[tuple[int, int]]) -> None:
        ctypes.memmove(parts[self.rank][0], *own)
        if sum(num_bytes for _, num_bytes in parts) <= _LIBRARY_SHORT_BYTES:
            for (sent,), (received,) in schedule.doubling(self.rank, self.size):
                requests = [
                    begin(parts[(message.first + k) % self.size], message.peer, LIBRARY_TAG)
                    for begin, message in ((self.Irecv, received), (self.Isend, sent))
                    for k in range(message.num_blocks)
                ]
                self.world.wait_all(requests)
            return
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for k in range(self.size - 1):
            sent_part, received_part = parts[(self.rank - k) % self.size], parts[(self.rank - k - 1) % self.size]
            self.Sendrecv(sent_part, right, LIBRARY_TAG, received_part, left, LIBRARY_TAG)

    def _exchange(self, step: schedule.Round, outgoing: list[tuple[int, int]], incoming: list[tuple[int, int]]) -> None:
        requests = [self.Irecv(incoming[peer], peer, LIBRARY_TAG) for peer, *_ in step.receives]
        requests += [self.Isend(outgoing[peer], peer, LIBRARY_TAG) for peer, *_ in step.sends]
        self.world.wait_all(requests)

    # Other communicators.

    def Dup(self) -> Comm:
        """Return a communicator of the same ranks."""
        return Comm(self.world, self.members, self.rank, f"{self.name}'")

    def Split(self, color: int, key: int) -> Comm | None:
        """Return the communicator of the ranks with the same color. Collective."""
        ranks = self.world.members_of(self, color, key)
        if ranks is None:
            return None
        members = [self.members[rank] for rank in ranks]
        return Comm(self.world, members, ranks.index(self.rank), f"{self.name}/{ranks}")


class BackgroundQueue:
    """Takes the place of the call queue of a group: the thread of the real one waits in real time."""

    origin = None

    def __init__(self, world: World) -> None:
        self._world = world
        self.last: Event | None = None

    def run(self, task: Callable[..., Any], *arguments: Any, subject: object = None) -> Any:
        """Run a task now; the plans do not call this while others are submitted."""
        assert self.last is None or self.last.is_done
        return task(*arguments)

    def submit(self, task: Callable[[], Any], description: str) -> Any:
        """Run a task in the background."""
        return self._world.submit(self, task)


class _TaskHandle:
    def __init__(self, turns: Turns, event: Event) -> None:
        self._turns, self._event = turns, event

    def wait(self) -> None:
        """Wait until the task has ended."""
        self._turns.wait([self._event])


class World:
    """Ranks that exchange data."""

    def __init__(self, hosts: Sequence[int], seed: int = 0, network: Network | None = None) -> None:
        """Prepare ranks on these hosts; `network` gives times to messages."""
        self.hosts, self.network, self.MPI = hosts, network, SimulatedMPI(self)
        self.turns = Turns(seed, timed=network is not None)
        self.links = None if network is None else Links(network, self.turns)
        self.sent_bytes: dict[tuple[int, int], int] = defaultdict(int)
        """Bytes that were sent from a host to a host."""
        self.num_sent: dict[int, int] = defaultdict(int)
        """Messages that each rank has sent to other hosts."""
        self._posted: dict[tuple[str, int, int, int], tuple[deque[Request], deque[Request]]] = defaultdict(
            lambda: (deque(), deque())
        )
        self._meetings: dict[str, tuple[Event, dict[int, Any], list[Any]]] = {}

    def comm_of(self, rank: int) -> Comm:
        """Return the communicator of all ranks, for one of them."""
        return Comm(self, range(len(self.hosts)), rank, "world")

    def run(self, function: Callable[[Comm], Any]) -> list[Any]:
        """Call a function on all ranks, and return the results; check that every message has been received."""
        comms = [self.comm_of(rank) for rank in range(len(self.hosts))]
        results = self.turns.run([lambda comm=comm: function(comm) for comm in comms])  # type: ignore[misc]
        left = [request.description for queues in self._posted.values() for queue in queues for request in queue]
        if left:
            raise RuntimeError(f"{len(left)} messages have not been completed: {'; '.join(left[:8])}")
        return results

    def begin(self, request: Request) -> None:
        """Begin a message: it is on its way when both sides have begun it."""
        comm, peer = request.comm, request.peer
        if self.network is not None:
            self.turns.advance(self.network.overhead)
            request.posted = self.turns.clock
        ends = (comm.rank, peer) if request.is_send else (peer, comm.rank)
        queues = self._posted[comm.name, ends[0], ends[1], request.tag]
        if not queues[1 - request.is_send]:
            queues[request.is_send].append(request)
            return
        other = queues[1 - request.is_send].popleft()
        request.other, other.other = other, request
        sent, received = (request, other) if request.is_send else (other, request)
        if sent.num_bytes > received.num_bytes:
            raise RuntimeError(f"message too long: {sent.description}; {received.description}")
        hosts = self.hosts[sent.comm.world_rank], self.hosts[received.comm.world_rank]
        self.sent_bytes[hosts] += sent.num_bytes
        self.num_sent[sent.comm.world_rank] += hosts[0] != hosts[1]
        if self.links is None:
            for each in (request, other):
                self.turns.finish(each)
        else:
            self.links.carry(sent, received, sent.num_bytes, sent.posted, received.posted, *hosts)

    def wait_all(self, requests: Sequence[Request]) -> None:
        """Wait for messages; each is copied when the first of its two sides has waited for it."""
        self.turns.wait(requests)
        for request in requests:
            other = request.other
            if other is not None:
                sent, received = (request, other) if request.is_send else (other, request)
                ctypes.memmove(received.address, sent.address, sent.num_bytes)
                request.other = other.other = None

    def members_of(self, comm: Comm, color: int, key: int) -> list[int] | None:
        """Return the ranks with the same color."""
        colors = self.meet(f"{comm.name} split", comm, (color, key), list)
        ranks = [rank for rank in range(comm.size) if colors[rank][0] == color]
        return None if color == SimulatedMPI.UNDEFINED else sorted(ranks, key=lambda rank: (colors[rank][1], rank))

    def meet(self, name: str, comm: Comm, value: Any, combine: Callable[[list[Any]], Any], num_bytes: int = 0) -> Any:
        """Return what `combine` returns for the values of all ranks of a communicator. Collective."""
        event, values, results = self._meetings.setdefault(name, (Event(f"ranks of {name}"), {}, []))
        values[comm.rank] = value
        if len(values) < comm.size:
            self.turns.wait([event])
        else:
            del self._meetings[name]
            results.append(combine([values[rank] for rank in range(comm.size)]))
            # The ranks of a host share its memory. The last one has the latest clock.
            seconds = 0.0 if self.network is None else self.network.in_host(num_bytes * comm.size)
            self.turns.advance(seconds)
            self.turns.finish(event, self.turns.clock)
        return results[0]

    def submit(self, queue: BackgroundQueue, task: Callable[[], Any]) -> Any:
        """Run a task in the background."""
        before, queue.last = queue.last, Event("a task in the background")
        end = queue.last

        def work() -> None:
            self.turns.wait([] if before is None else [before])
            task()
            self.turns.finish(end, self.turns.clock)

        self.turns.start(work)
        return _TaskHandle(self.turns, end)


def _memory(message: Any) -> tuple[int, int]:
    """Return address and length of a message as mpi4py takes it."""
    if isinstance(message[0], np.ndarray):
        return int(message[0].ctypes.data), int(message[0].nbytes)
    if isinstance(message[0], tuple):
        return _memory(message[0])
    address, num_bytes = message
    return address, num_bytes


def _parts(message: Any) -> list[tuple[int, int]]:
    """Return address and length of each rank's part."""
    memory, counts, offsets, _ = message
    begin, _ = _memory(memory)
    return [(begin + offset, count) for count, offset in zip(counts, offsets, strict=True)]
