"""Simulated MPI: the messages and collectives that the backends use, between ranks of one process.

The ranks run by turns, and their messages carry data. A message waits for its receive, however short it is, and is
copied as late as MPI allows: a plan that overwrites a buffer too early has a wrong result, a plan that depends on
buffering is a deadlock.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchmpi.parameterserver.simulation.coroutines import Event, Turns
from torchmpi.tensors import schedule

from .network import Links, Message, Network

LIBRARY_TAG = 1000
# Up to this size, collectives of a library gather in the fewest rounds.
LIBRARY_SHORT_BYTES = 64 << 10
_NUMBERS = {"FLOAT": np.float32, "DOUBLE": np.float64}


class Request(Message):
    """A message that a rank sends or receives."""

    def __init__(self, comm: Comm, is_send: bool, message: Any, peer: int, tag: int) -> None:
        address, num_bytes = _memory(message)
        direction, hosts = "to" if is_send else "from", comm.world.hosts
        description = f"rank {comm.world_rank}: {num_bytes} bytes {direction} rank {comm.members[peer]}, tag {tag}"
        ends = (comm.rank, peer) if is_send else (peer, comm.rank)
        on_hosts = hosts[comm.members[ends[0]]], hosts[comm.members[ends[1]]]
        super().__init__(description, is_send, num_bytes, on_hosts, 0.0)
        self.comm, self.key, self.address = comm, (comm.name, *ends, tag), address
        self.memory = message
        """Kept alive."""
        self.other: Request | None = None

    def buffer(self) -> None:
        """Copy what is sent, since the sender goes on."""
        self.memory = ctypes.string_at(self.address, self.num_bytes)
        self.address, _ = _memory(self.memory)

    def Wait(self) -> None:
        """Return: Waitall has waited."""

    def Test(self) -> bool:
        """Return whether the message has been sent or received."""
        is_done = self.is_done and (self.comm.world.links is None or self.time <= self.comm.world.turns.clock)
        if is_done:
            self.comm.world.wait_all([self])
        return is_done


class Memory(NamedTuple):
    """Memory as simulated messages take it."""

    address: int
    nbytes: int


class Buffers:
    """`MPI.buffer`."""

    fromaddress = Memory


class Status:
    """What a probe has found."""

    source = 0

    def Get_source(self) -> int:
        """Return the rank of the sender."""
        return self.source


class SimulatedMPI:
    """The part of the module `mpi4py.MPI` that backends use; types and operations are their names."""

    UNDEFINED = ANY_SOURCE = -1
    Status = Status
    Exception = type("Exception", (RuntimeError,), {})
    buffer = Buffers

    def __init__(self, world: World) -> None:
        self.Request, self._turns = _RequestType(world), world.turns

    def __getattr__(self, name: str) -> str:
        return name

    def Wtime(self) -> float:
        """Return the virtual time."""
        return self._turns.clock

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
        self.name, self._num_made = name, 0

    @property
    def world_rank(self) -> int:
        """The number of this rank among all."""
        return self.members[self.rank]

    # Point-to-point messages.

    def Isend(self, message: Any, dest: int, tag: int) -> Request:
        """Begin to send."""
        request = Request(self, True, message, dest, tag)
        self.world.begin(request)
        return request

    def Irecv(self, message: Any, source: int, tag: int) -> Request:
        """Begin to receive."""
        request = Request(self, False, message, source, tag)
        self.world.begin(request)
        return request

    def Sendrecv(self, sent: Any, dest: int, sendtag: int, received: Any, source: int, recvtag: int) -> None:
        """Send a message and receive another."""
        self.world.wait_all([self.Irecv(received, source, recvtag), self.Isend(sent, dest, sendtag)])

    def Recv(self, message: Any, source: int, tag: int) -> None:
        """Receive."""
        self.world.wait_all([self.Irecv(message, source, tag)])

    def Iprobe(self, source: int, tag: int, status: Status) -> bool:
        """Return whether there is a message to receive, of any rank."""
        found = self.world.arrived(self, tag)
        status.source = self.rank if found is None else found
        return found is not None

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
        in_cyclic_order = [num_bytes for _, num_bytes in [*parts[self.rank :], *parts[: self.rank]]]
        ends = list(itertools.accumulate(in_cyclic_order, initial=0))
        if ends[-1] <= LIBRARY_SHORT_BYTES:
            self._gather_short(own, parts, ends)
            return
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for k in range(self.size - 1):
            sent_part, received_part = parts[(self.rank - k) % self.size], parts[(self.rank - k - 1) % self.size]
            self.Sendrecv(sent_part, right, LIBRARY_TAG, received_part, left, LIBRARY_TAG)

    def _gather_short(self, own: tuple[int, int], parts: list[tuple[int, int]], ends: list[int]) -> None:
        """Gather in the fewest rounds, in memory in cyclic order; `ends` are those of the parts there."""
        memory = np.empty(max(1, ends[-1]), np.uint8)
        begin = int(memory.ctypes.data)
        ctypes.memmove(begin, *own)
        for (sent,), (received,) in schedule.doubling(self.rank, self.size):
            first = (received.first - self.rank) % self.size
            place = begin + ends[first], ends[first + received.num_blocks] - ends[first]
            sent_place = begin, ends[sent.num_blocks]
            self.Sendrecv(sent_place, sent.peer, LIBRARY_TAG, place, received.peer, LIBRARY_TAG)
        for position in range(self.size):
            address, num_bytes = parts[(self.rank + position) % self.size]
            ctypes.memmove(address, begin + ends[position], num_bytes)

    def _exchange(self, step: schedule.Round, outgoing: list[tuple[int, int]], incoming: list[tuple[int, int]]) -> None:
        requests = [self.Irecv(incoming[peer], peer, LIBRARY_TAG) for peer, *_ in step.receives]
        requests += [self.Isend(outgoing[peer], peer, LIBRARY_TAG) for peer, *_ in step.sends]
        self.world.wait_all(requests)

    # Other communicators.

    def Dup(self) -> Comm:
        """Return a communicator of the same ranks."""
        return self._made(self.members, self.rank, "")

    def Split(self, color: int, key: int) -> Comm | None:
        """Return the communicator of the ranks with the same color. Collective."""
        colors = self._gathered_colors(color, key)
        ranks = sorted(rank for rank in range(self.size) if colors[rank][0] == color)
        ranks.sort(key=lambda rank: colors[rank][1])
        if color == SimulatedMPI.UNDEFINED:
            self._num_made += 1
            return None
        return self._made([self.members[rank] for rank in ranks], ranks.index(self.rank), str(ranks))

    def _gathered_colors(self, color: int, key: int) -> list[tuple[int, int]]:
        """Return color and key of all ranks."""
        found: list[tuple[int, int]] = self.world.meet(f"{self.name} split", self, (color, key), list)
        return found

    def _made(self, members: Sequence[int], rank: int, name: str) -> Comm:
        self._num_made += 1
        return type(self)(self.world, members, rank, f"{self.name}/{self._num_made}{name}")


class BackgroundQueue:
    """Takes the place of the call queue of a group: the thread of the real one waits in real time."""

    origin = None

    def __init__(self, world: World) -> None:
        self._world = world
        self.last: Event | None = None

    def run(self, task: Callable[..., Any], *arguments: Any, subject: object = None, describe: object = None) -> Any:
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

    def __init__(
        self,
        hosts: Sequence[int],
        seed: int = 0,
        network: Network | None = None,
        comm_type: type[Comm] = Comm,
    ) -> None:
        """Prepare ranks on these hosts; `network` gives times to messages."""
        self.hosts, self.network = hosts, network
        self._comm_type = comm_type
        self.turns = Turns(seed, timed=network is not None)
        self.MPI = SimulatedMPI(self)
        self.links = None if network is None else Links(network, self.turns)
        self.sent_bytes: dict[tuple[int, int], int] = defaultdict(int)
        """Bytes that were sent from a host to a host."""
        self.num_sent: dict[int, int] = defaultdict(int)
        """Messages that each rank has sent to other hosts."""
        self.library_calls: list[Any] = []
        """The collectives of the MPI library that rank 0 has called, where communicators note them."""
        self.sent_by: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
        """Messages and bytes that each rank has sent."""
        # By communicator, ranks and tag: receives, and messages that are sent.
        self._posted: dict[tuple[str, int, int, int], tuple[deque[Request], deque[Request]]] = defaultdict(
            lambda: (deque(), deque())
        )
        self._meetings: dict[str, tuple[Event, dict[int, Any], list[Any]]] = {}

    def comm_of(self, rank: int) -> Comm:
        """Return the communicator of all ranks, for one of them."""
        return self._comm_type(self, range(len(self.hosts)), rank, "world")

    def run(self, function: Callable[[Comm], Any]) -> list[Any]:
        """Call a function on all ranks, and return the results; check that every message has been received."""
        comms = [self.comm_of(rank) for rank in range(len(self.hosts))]
        results = self.turns.run([lambda comm=comm: function(comm) for comm in comms])  # type: ignore[misc]
        left = [request.description for queues in self._posted.values() for queue in queues for request in queue]
        if left:
            raise RuntimeError(f"{len(left)} messages have not been completed: {'; '.join(left[:8])}")
        return results

    def begin(self, request: Request) -> None:
        """Begin a message: both sides are needed, except for the time of short ones."""
        if self.links is not None and self.network is not None:
            self.turns.advance(self.network.overhead)
            request.posted = self.turns.clock
            self.links.begin(request)
        queues = self._posted[request.key]
        if not queues[1 - request.is_send]:
            queues[request.is_send].append(request)
            return
        other = queues[1 - request.is_send].popleft()
        request.other, other.other = other, request
        sent, received = (request, other) if request.is_send else (other, request)
        if sent.num_bytes > received.num_bytes:
            raise RuntimeError(f"message too long: {sent.description}; {received.description}")
        self.sent_bytes[sent.hosts] += sent.num_bytes
        rank = sent.comm.world_rank
        self.num_sent[rank] += sent.hosts[0] != sent.hosts[1]
        self.sent_by[rank] = self.sent_by[rank][0] + 1, self.sent_by[rank][1] + sent.num_bytes
        if self.links is None:
            for each in (request, other):
                self.turns.finish(each)
        else:
            self.links.match(sent, received)

    def arrived(self, comm: Comm, tag: int) -> int | None:
        """Return the rank from which a message with this tag has arrived that the rank does not receive yet."""
        for source in range(comm.size):
            _, sent = self._posted.get((comm.name, source, comm.rank, tag), ((), ()))
            if sent and (self.links is None or (sent[0].arrived or math.inf) <= self.turns.clock):
                return source
        return None

    def wait_all(self, requests: Sequence[Request]) -> None:
        """Wait for messages; each is copied when the first of its two sides has waited for it."""
        self.turns.wait(requests)
        for request in requests:
            other = request.other
            if request.is_send and request.receiver is None and self.links is not None:
                request.buffer()
            elif other is not None:
                sent, received = (request, other) if request.is_send else (other, request)
                ctypes.memmove(received.address, sent.address, sent.num_bytes)
                request.other = other.other = None

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
    if isinstance(message, (bytes, bytearray)):
        return int(np.frombuffer(message, np.uint8).ctypes.data), len(message)
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
