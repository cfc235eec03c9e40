"""Messages between two ranks of a communicator: of memory (capital letters) and of objects, under mpi4py's names."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

from .datatypes import buffer_of
from .requests import ANY, NOBODY, CommunicationError, Receive, Request, Status
from .socket_endpoint import Endpoint

AnyRequest = TypeVar("AnyRequest", bound=Request)
_NUM_PLANES = 4
MESSAGES, COLLECTIVES, CREATION = range(3)
"""The messages of users, those within collectives, and those that make communicators never meet."""


class Messenger:
    """Sends and receives in one context."""

    def __init__(self, endpoint: Endpoint, world_ranks: Sequence[int], number: int) -> None:
        """`number` is that of the communicator, the same on all its ranks and no other's that shares two of them."""
        self.endpoint = endpoint
        self.world_ranks = tuple(world_ranks)
        self.members = {world_rank: rank for rank, world_rank in enumerate(self.world_ranks)}
        self.rank = self.members[endpoint.rank]
        self.size = len(self.world_ranks)
        self._context = number * _NUM_PLANES

    # --- what the rest is made of

    def _send(self, view: memoryview, dest: int, tag: int, plane: int = MESSAGES) -> Request:
        if dest == NOBODY:
            return _ended(Request(self.endpoint.poller))
        if not 0 <= dest < self.size:
            raise CommunicationError(f"rank {self.rank}: there is no rank {dest} among {self.size} to send to")
        return self.endpoint.send(self.world_ranks[dest], self._context + plane, tag, view)

    def _receive(self, view: memoryview | None, source: int, tag: int, plane: int = MESSAGES) -> Receive:
        receive = Receive(
            self.endpoint.poller,
            self._context + plane,
            self._world_rank(source),
            tag,
            view=view,
            members=self.members,
            withdraw=self.endpoint.inbox.withdraw,
            from_all=plane == COLLECTIVES,
        )
        if source == NOBODY:
            receive.origin = NOBODY
            return _ended(receive)
        self.endpoint.post(receive)
        return receive

    def _receive_object(self, source: int, tag: int, plane: int = MESSAGES, status: Status | None = None) -> Any:
        receive = self._receive(None, source, tag, plane)
        receive.Wait(status)
        return pickle.loads(receive.memory) if source != NOBODY else None

    def _world_rank(self, source: int) -> int:
        if source in (ANY, NOBODY):
            return source
        if not 0 <= source < self.size:
            raise CommunicationError(f"rank {self.rank}: there is no rank {source} among {self.size} to receive from")
        return self.world_ranks[source]

    # --- memory

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send."""
        return self._send(buffer_of(buf).view, dest, tag)

    def Irecv(self, buf: Any, source: int = ANY, tag: int = ANY) -> Receive:
        """Begin to receive."""
        return self._receive(buffer_of(buf, written=True).view, source, tag)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send; return when the memory may be changed again."""
        self.Isend(buf, dest, tag).Wait()

    def Recv(self, buf: Any, source: int = ANY, tag: int = ANY, status: Status | None = None) -> None:
        """Receive."""
        self.Irecv(buf, source, tag).Wait(status)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY,
        recvtag: int = ANY,
        status: Status | None = None,
    ) -> None:
        """Send one and receive one, without deadlock."""
        sending = self.Isend(sendbuf, dest, sendtag)
        receive = self.Irecv(recvbuf, source, recvtag)
        Request.Waitall((receive, sending))
        if status is not None:
            receive.note_in(status)

    def Iprobe(self, source: int = ANY, tag: int = ANY, status: Status | None = None) -> bool:
        """Whether there is a message to be received."""
        arrival = self.endpoint.probe(self._context, self._world_rank(source), tag)
        if arrival is not None and status is not None:
            status.note(self.members[arrival.source], arrival.tag, arrival.num_bytes)
        return arrival is not None

    # --- objects

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send an object."""
        return self._send(packed(obj), dest, tag)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        self.isend(obj, dest, tag).Wait()

    def recv(self, buf: Any = None, source: int = ANY, tag: int = ANY, status: Status | None = None) -> Any:
        """Receive an object. `buf` is there for mpi4py's sake."""
        return self._receive_object(source, tag, status=status)

    def iprobe(self, source: int = ANY, tag: int = ANY, status: Status | None = None) -> bool:
        """:meth:`Iprobe`."""
        return self.Iprobe(source, tag, status)


def packed(obj: Any) -> memoryview:
    """An object as bytes."""
    return memoryview(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))


def _ended(request: AnyRequest) -> AnyRequest:
    request.is_done = True
    return request
