"""The part of ``mpi4py.MPI`` that torchmpi uses without an MPI library: messages, headers, objects, communicators.

Collectives on tensors are not included: they use shared memory, gloo and messages.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ... import _version
from ...tensors import schedule
from .. import respawning
from ..abilities import JOINS, Continuing
from ..survivors import Survivors
from . import newcomer_store
from .endpoint import Endpoint
from .link import Arrival
from .mesh import Place
from .requests import ANY, UNDEFINED, CommunicationError, Datatype, Receive, Request, Status

COMM_TYPE_SHARED = 1
_MESSAGES, _COLLECTIVES, _CREATION, _NUM_CONTEXTS = range(4)
"""Separate contexts for messages of callers, of collectives, and for the creation of communicators."""
_RANK_BITS = 16
_LOSS_SECONDS = 1.0  # the error of a call that fails for the same reason has more details, and ends the job first
_PyBUF_WRITE = 0x200
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_at.restype = ctypes.py_object


class buffer:
    """Take the place of ``mpi4py.MPI.buffer``."""

    @staticmethod
    def fromaddress(address: int, nbytes: int) -> memoryview:
        """Return the memory at an address; the caller keeps it alive."""
        if not nbytes:
            return memoryview(bytearray())
        return _memory_at(address, nbytes, _PyBUF_WRITE)  # type: ignore[no-any-return]


class RankGroup(NamedTuple):
    """Ranks without a communicator, by world rank."""

    world_ranks: tuple[int, ...]

    def Incl(self, ranks: Sequence[int]) -> RankGroup:
        """Return some of the ranks, in this order."""
        return RankGroup(tuple(self.world_ranks[rank] for rank in ranks))

    def Free(self) -> None:
        """Do nothing."""


class Intracomm:
    """Take the place of ``mpi4py.MPI.Intracomm``."""

    has_unique_context = True
    """No later communicator gets the number of this one; see :func:`torchmpi.communicators.release.release`."""

    def __init__(self, endpoint: Endpoint, world_ranks: Sequence[int], number: int, hosts: Mapping[int, str]) -> None:
        """Create a communicator; `hosts` is, for each world rank, a key of the ranks with which it shares memory."""
        self._endpoint, self._hosts, self._num_calls = endpoint, hosts, 0
        self._world_ranks = tuple(world_ranks)
        self._context = endpoint.first_context + number * _NUM_CONTEXTS
        self.rank, self.size = self._world_ranks.index(endpoint.rank), len(self._world_ranks)
        self._doubling = schedule.doubling(self.rank, self.size)

    # --- messages

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send memory."""
        return self._send(_bytes_of(buf), dest, tag)

    def Irecv(self, buf: Any, source: int = ANY, tag: int = ANY) -> Request:
        """Begin to receive into memory."""
        return self._receive(_bytes_of(buf), source, tag)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        self.Isend(buf, dest, tag).Wait()

    def Recv(self, buf: Any, source: int = ANY, tag: int = ANY, status: Status | None = None) -> None:
        """Receive into memory."""
        self.Irecv(buf, source, tag).Wait(status)

    def Sendrecv(self, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int) -> None:
        """Send and receive, without deadlock."""
        Request.Waitall((self.Irecv(recvbuf, source, recvtag), self.Isend(sendbuf, dest, sendtag)))

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send an object."""
        return self._send(_packed(obj), dest, tag)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self.isend(obj, dest, tag).Wait()

    def recv(self, buf: Any = None, source: int = ANY, tag: int = ANY) -> Any:
        """Receive an object; `buf` is unused, as in mpi4py."""
        return self._object(self._receive(None, source, tag))

    def Iprobe(self, source: int = ANY, tag: int = ANY, status: Status | None = None) -> bool:
        """Return whether there is a message to receive."""
        arrival: Arrival | None = self._endpoint.probe(self._context, self._world_rank(source), tag)
        if arrival is not None and status is not None:
            status.source, status.tag = self._world_ranks.index(arrival.source), arrival.tag
            status.num_bytes = len(arrival.data)
        return arrival is not None

    iprobe = Iprobe

    def _send(self, view: memoryview, dest: int, tag: int, kind: int = _MESSAGES) -> Request:
        return self._endpoint.send(self._world_rank(dest), self._context + kind, tag, view)

    def _receive(self, view: memoryview | None, source: int, tag: int, kind: int = _MESSAGES) -> Receive:
        return self._endpoint.receive(self._context + kind, self._world_rank(source), tag, view, self._world_ranks)

    def _world_rank(self, rank: int) -> int:
        if rank != ANY and not 0 <= rank < self.size:
            raise CommunicationError(f"rank {self.rank}: there is no rank {rank} in a communicator of {self.size}")
        return rank if rank == ANY else self._world_ranks[rank]

    @staticmethod
    def _object(receive: Receive) -> Any:
        receive.Wait()
        return pickle.loads(receive.memory)

    # --- collectives: every rank makes the same calls in the same order, and the number of the call is the tag

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Return the object of the root on all ranks."""
        call, data = self._next_call(), None
        for step in schedule.tree(self.rank, self.size, root):
            for message in step.receives:
                receive = self._receive(None, message.peer, call, _COLLECTIVES)
                receive.Wait()
                data = receive.memory
            data = _packed(obj) if data is None else data
            Request.Waitall([self._send(data, message.peer, call, _COLLECTIVES) for message in step.sends])
        return obj if self.rank == root else pickle.loads(data)  # type: ignore[arg-type]

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks."""
        call, found = self._next_call(), {self.rank: obj}
        for (sent,), (received,) in self._doubling:
            receive = self._receive(None, received.peer, call, _COLLECTIVES)
            ranks = [(sent.first + k) % self.size for k in range(sent.num_blocks)]
            sending = self._send(_packed({rank: found[rank] for rank in ranks}), sent.peer, call, _COLLECTIVES)
            found |= self._object(receive)
            sending.Wait()
        return [found[rank] for rank in range(self.size)]

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Gather blocks of equal length on all ranks; used for headers."""
        call, own, memory = self._next_call(), _bytes_of(sendbuf), _bytes_of(recvbuf)
        width = len(own)
        blocks = memoryview(bytearray(len(memory)))  # in cyclic rank order, this rank's own first
        blocks[:width] = own
        for (sent,), (received,) in self._doubling:
            begin = (received.first - self.rank) % self.size * width
            room = blocks[begin : begin + received.num_blocks * width]
            receive = self._receive(room, received.peer, call, _COLLECTIVES)
            sending = self._send(blocks[: sent.num_blocks * width], sent.peer, call, _COLLECTIVES)
            Request.Waitall((receive, sending))
            if receive.num_bytes != len(room):
                raise CommunicationError(f"rank {self.rank}: the blocks of an Allgather differ in length")
        begin = self.rank * width
        memory[begin:], memory[:begin] = blocks[: len(memory) - begin], blocks[len(memory) - begin :]

    def Barrier(self) -> None:
        """Wait until all ranks have called."""
        self.allgather(None)

    def _next_call(self) -> int:
        self._num_calls = (self._num_calls + 1) & 0x7FFFFFFF
        return self._num_calls

    # --- communicators

    def Get_group(self) -> RankGroup:
        return RankGroup(self._world_ranks)

    def Dup(self) -> Intracomm:
        """Create a communicator of the same ranks. Collective."""
        return self._made(self._world_ranks, self.bcast(self._new_number()))

    def Split(self, color: int = 0, key: int = 0) -> Intracomm | None:
        """Create a communicator of the ranks with the same color, ordered by key; None for UNDEFINED. Collective."""
        offers = self.allgather((color, key, self._new_number()))
        if color == UNDEFINED:
            return None
        ranks = sorted((theirs, rank) for rank, (other, theirs, _) in enumerate(offers) if other == color)
        # One number for all parts: no two ranks are in more than one of them.
        return self._made([self._world_ranks[rank] for _, rank in ranks], offers[0][2])

    def Split_type(self, split_type: int, key: int = 0) -> Intracomm | None:
        """Create a communicator of the ranks that share memory with this one. Collective."""
        hosts = [self._hosts[world_rank] for world_rank in self._world_ranks]
        return self.Split(hosts.index(hosts[self.rank]), key)

    def Create_group(self, group: RankGroup, tag: int = 0) -> Intracomm:
        """Create a communicator of some of the ranks. Collective over these only."""
        first, *others = (self._world_ranks.index(world_rank) for world_rank in group.world_ranks)
        if self.rank == first:
            number = self._new_number()
            Request.Waitall([self._send(_packed(number), rank, tag, _CREATION) for rank in others])
        else:
            number = self._object(self._receive(None, first, tag, _CREATION))
        return self._made(group.world_ranks, number)

    def Free(self) -> None:
        """Discard the messages that were not received."""
        self._endpoint.forget(range(self._context, self._context + _NUM_CONTEXTS))

    def Abort(self, errorcode: int = 1) -> None:
        """End all ranks of the job. Does not return."""
        self._endpoint.abort(errorcode)

    def awaited(self) -> list[str]:
        """Return the names of the ranks from which a message is awaited."""
        return self._endpoint.awaited(range(self._context, self._context + _NUM_CONTEXTS))

    def _made(self, world_ranks: Sequence[int], number: int) -> Intracomm:
        return Intracomm(self._endpoint, world_ranks, number, self._hosts)

    def _new_number(self) -> int:
        """Return a number that no other communicator has, without asking the other ranks."""
        self._endpoint.num_communicators += 1
        return self._endpoint.num_communicators << _RANK_BITS | self._endpoint.rank


class StandIn(Continuing):
    """Take the place of the module ``mpi4py.MPI`` for ranks that are connected."""

    calls_library = False
    problem_of_collectives = "no MPI launcher has started these processes"
    ANY_SOURCE = ANY_TAG = ANY
    UNDEFINED = UNDEFINED
    COMM_TYPE_SHARED = COMM_TYPE_SHARED
    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
    BYTE, INT64_T = Datatype(1), Datatype(8)
    Request, Status, buffer = Request, Status, buffer
    Wtime = staticmethod(time.monotonic)
    Exception = CommunicationError

    def __init__(self, endpoint: Endpoint, places: Mapping[int, Place]) -> None:
        """Create the stand-in for ranks at these places."""
        self._endpoint, self._places = endpoint, dict(places)
        self._hosts = {rank: place.memory for rank, place in places.items()}
        """Ranks with the same value share memory."""
        self.COMM_WORLD = Intracomm(endpoint, tuple(places), 0, self._hosts)
        self.num_wanted = self.COMM_WORLD.size
        """The number of ranks at the beginning, which new ones restore."""
        self._newcomers: newcomer_store.Watch | None = None
        self._found: newcomer_store.Offer | None = None
        """A rank that waits to join, as the first of the others knows it; while it joins, as all know it."""
        atexit.register(self.close)

    def get_vendor(self) -> tuple[str, tuple[int, ...]]:
        """Return a name and a version, as mpi4py does for the MPI library."""
        numbers = _version.__version__.split(".")[:3]
        return "torchmpi messages", tuple(int(number) for number in numbers if number.isdigit())

    def Query_thread(self) -> int:
        """Return the thread level: all threads may call."""
        return self.THREAD_MULTIPLE

    def Is_finalized(self) -> bool:
        """Return whether the connections have been closed."""
        return bool(self._endpoint.problem)

    @property
    def is_ending(self) -> bool:  # type: ignore[override]
        """Return whether another rank has ended the job, so that this process is about to end."""
        return self._endpoint.is_ended

    def watch_ranks(self, end_job: Callable[[str, int], None]) -> Callable[[], None]:
        """End the job when another rank is lost; return a function that ends the watch.

        An MPI library leaves this to its launcher. A rank that waits in shared memory notices no lost connection.
        """
        rank, lost, is_over = self._endpoint.rank, {}, threading.Event()  # type: ignore[var-annotated]

        def end() -> None:
            # The lowest remaining rank reports; the others report only if the job has not ended then.
            has_lower = any(other not in lost for other in range(rank))
            if not is_over.wait(_LOSS_SECONDS * (3 if has_lower else 1)):
                end_job(f"torchmpi: rank {rank}: {'; '.join(lost.values())} (killed?), which ends the job.", 1)

        def note(other: int, problem: str) -> None:
            lost[other] = problem
            if len(lost) == 1:
                with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread while it shuts down
                    threading.Thread(target=end, name="torchmpi lost rank", daemon=True).start()

        def stop() -> None:
            self._endpoint.on_loss = None
            is_over.set()

        self._endpoint.on_loss = note
        return stop

    @property
    def loss(self) -> str:
        return self._endpoint.revoked

    def loss_behind_error(self) -> str:
        return self._endpoint.loss_behind_error()

    @property
    def problem(self) -> str:  # type: ignore[override]
        """Why calls fail for ever; '' otherwise."""
        return self._endpoint.problem

    def begin(self) -> Survivors:
        if self._endpoint.survivors is None:
            networks = [place.network for place in self._places.values()]
            self._endpoint.survivors = Survivors(self._endpoint.rank, networks)
        self.survivors = self._endpoint.survivors
        return self.survivors

    def agree(self, timeout_seconds: float) -> None:
        self.begin()
        members = self._endpoint.agree(timeout_seconds, partial(self._meet_newcomers, timeout_seconds))
        self._found = None
        self.COMM_WORLD = Intracomm(self._endpoint, members, 0, self._hosts)
        if respawning.limit() and self._newcomers is None:
            self._newcomers = newcomer_store.Watch(self._find)

    def _find(self, store: newcomer_store.NewcomerStore) -> None:
        """Look for a new rank that waits, if this is the rank that does so."""
        assert self.survivors is not None
        if self._found is None and self.COMM_WORLD.rank == 0 and self.COMM_WORLD.size < self.num_wanted:
            self._found = store.first_offer(self.num_wanted, self.survivors.offers)

    def confirm(self) -> bool:
        if self._newcomers is None:
            self.COMM_WORLD.Barrier()
            return False
        self._found = self.COMM_WORLD.allgather(self._found if self.COMM_WORLD.rank == 0 else None)[0]
        return self._found is not None

    def join(self) -> str:
        survivors, found = self.begin(), self._found
        assert found is not None
        survivors.offer(found.rank, found)
        self._endpoint.end_calls(JOINS)
        return self.loss

    def _meet_newcomers(self, timeout_seconds: float) -> None:
        """Connect to new ranks, and let them know who connects, and who is lost and will not.

        Each rank writes this to the store, as any other one may be lost before it does.
        """
        survivors = self.begin()
        if self._newcomers is None:  # this rank is new itself
            return
        for rank, found in survivors.unreached().items():
            order = {
                "members": survivors.members,
                "places": [(member, self._places[member]) for member in survivors.members],
                "view": survivors.own_view().decode(),
                "num_wanted": self.num_wanted,
                "eager_seconds": self._endpoint.eager_seconds,
                "timeout_seconds": timeout_seconds,
            }
            self._newcomers.store.write(newcomer_store.order(rank), order)
            self._reach(rank, newcomer_store.Offer(*found), timeout_seconds / 2)  # the other half is for the agreement
        if lost := survivors.lost_members:
            for rank in survivors.newcomers:
                self._newcomers.store.write(newcomer_store.lost(rank), lost)

    def _reach(self, rank: int, offer: newcomer_store.Offer, timeout_seconds: float) -> None:
        """Connect to a new rank, or note that it is lost."""
        survivors = self.begin()
        place = Place(*offer.place)
        try:
            sock = newcomer_store.reach(self._endpoint.rank, offer, timeout_seconds)
        except OSError as error:
            survivors.note(rank, f"a new rank on host {place.host} cannot be reached: {error}")
            return
        self._places[rank], self._hosts[rank] = place, place.memory
        self._endpoint.add(rank, place.host, sock)
        survivors.note_reached(rank, place.network)

    def close(self) -> None:
        """Close the connections. A second call has no effect."""
        if self._newcomers is not None:
            self._newcomers.close()
            self._newcomers = None
        self._endpoint.close()
        atexit.unregister(self.close)


def _packed(obj: Any) -> memoryview:
    return memoryview(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))


def _bytes_of(given: Any) -> memoryview:
    """Return the bytes of a buffer, passed as ``memory`` or ``(memory, type)``."""
    memory = given[0] if isinstance(given, tuple) else given
    return memory if type(memory) is memoryview and memory.format == "B" else memoryview(memory).cast("B")
