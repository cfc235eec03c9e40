"""This process's end of all connections: sends, receives, and what becomes of both when a rank is lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial

from ...log import log_fatal
from . import wire
from .connection import Connection, StreamError
from .matching import Arrival, Inbox
from .poller import Poller
from .requests import CommunicationError, Receive, Request

_STAGING_BYTES = 64 << 10
_FAREWELL_SECONDS, _ABORT_SECONDS = 10.0, 1.0


class Endpoint:
    """Ranks here are those of the world."""

    def __init__(self, rank: int, size: int, sockets: Mapping[int, socket.socket], *, eager_seconds: float) -> None:
        self.rank, self.size = rank, size
        self.poller = Poller(eager_seconds=eager_seconds)
        self.inbox = Inbox(self.poller.complete)
        self.on_loss: Callable[[int], None] | None = None
        """Called with a rank whose connection has ended without a goodbye."""
        self.numbers = itertools.count(1)
        """For communicators."""
        self._connections: dict[int, Connection] = {}
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._why_closed = ""
        self._closing = threading.Lock()
        self._is_ending = self._is_closed = False
        for peer, sock in sockets.items():
            self._connect(peer, sock)
        self.poller.start(self._fail)
        _open.add(self)

    def _connect(self, peer: int, sock: socket.socket) -> None:
        connection = Connection(sock, peer, partial(self.poller.watch_room, sock.fileno()))
        self._connections[peer] = connection
        self.poller.add(sock.fileno(), partial(self._serve, connection))

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return bool(self._why_closed)

    def check_members(self, members: Mapping[int, int]) -> None:
        """Raise if a rank among `members` is lost, so that a call of all of them cannot end."""
        self._check_open()
        problem = self.inbox.check_members(members)
        if problem is not None:
            raise CommunicationError(problem)

    # --- messages

    def send(self, peer: int, context: int, tag: int, view: memoryview) -> Request:
        """Send to a rank. The memory is read until the request has ended.

        A rank that is gone fails the request: who has posted receives before must be able to wait for them.
        """
        self._check_open()
        request = Request(self.poller)
        if peer == self.rank:
            self.inbox.arrive(peer, context, tag, view)
            request.is_done = True
            return request
        try:
            if self._connections[peer].send(wire.head(context, tag, len(view)), view, request):
                request.is_done = True  # nobody has it yet who would have to be told
        except CommunicationError as error:
            self.poller.complete(request, str(error))
        return request

    def post(self, receive: Receive) -> None:
        """Post a receive. Its memory is written until it has ended."""
        self._check_open()
        self.inbox.post(receive)

    def probe(self, context: int, source: int, tag: int) -> Arrival | None:
        """The message that a receive would get now."""
        self._check_open()
        arrival = self.inbox.probe(context, source, tag)
        if arrival is None:
            self.poller.progress()
            arrival = self.inbox.probe(context, source, tag)
        return arrival

    def _check_open(self) -> None:
        if self._why_closed:
            raise CommunicationError(self._why_closed)

    # --- what arrives; called by the thread that leads

    def _serve(self, connection: Connection, can_read: bool, can_write: bool) -> None:
        if self._why_closed:  # what comes now must not be written to memory of requests that have been ended
            self.poller.remove(connection.fileno())
            connection.close()
            return
        try:
            if can_write:
                for request, problem in connection.flush():
                    self.poller.complete(request, problem)
            if can_read:
                connection.read(self.inbox, self._staging, self._on_abort)
        except StreamError as error:
            self._lose(connection, str(error))
        except BaseException as error:  # out of a signal handler, or a defect: nobody knows what has been read
            self._fail(f"rank {self.rank} was interrupted while it read a message: {error!r}")
            raise

    def _lose(self, connection: Connection, detail: str) -> None:
        rank = connection.peer
        said_goodbye = connection.said_goodbye
        reason = f"rank {rank} is gone: {detail}"
        if said_goodbye:
            reason = f"rank {rank} has left: it has closed its connections"
        self.poller.remove(connection.fileno())
        for request in connection.refuse(reason):
            self.poller.complete(request, reason)
        connection.close()
        body, connection.body = connection.body, None
        self.inbox.lose(rank, reason, said_goodbye=said_goodbye, body=body)
        tell = self.on_loss  # which another thread may take away
        if tell is not None and not (said_goodbye or self._is_ending):
            tell(rank)

    # --- the end of the job

    def abort(self, status: int) -> None:
        """End all ranks. Does not return."""
        self._is_ending = True
        self._tell_all(wire.head(self.rank, status & 0xFF, 0, wire.ABORT))
        os._exit(status & 0xFF)

    def _on_abort(self, rank: int, status: int) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        # Further to all, who would otherwise hear of the end of this rank before they hear why.
        self._tell_all(wire.head(rank, status, 0, wire.ABORT))
        log_fatal(f"rank {self.rank} ends, since rank {rank} has ended the job ({status=})")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)

    def _tell_all(self, head: bytes) -> None:
        limit = time.monotonic() + _ABORT_SECONDS
        connections = list(self._connections.values())
        for connection in connections:
            connection.send_first(head)
        while any(connection.has_outgoing for connection in connections) and time.monotonic() < limit:
            time.sleep(1e-3)
            for connection in connections:
                connection.flush()

    # --- the end of this rank

    def close(self) -> None:
        """Say goodbye when all that was sent has left, and close everything. A second call is harmless."""
        with self._closing:
            if self._is_closed:
                return
            self._is_ending = True
            self._say_goodbye()
            self._fail(f"rank {self.rank} has closed its connections")
            self._is_closed = True
            self.poller.close(self._close_sockets)
            _open.discard(self)

    def _say_goodbye(self) -> None:
        limit = time.monotonic() + _FAREWELL_SECONDS
        for connection in self._connections.values():
            with contextlib.suppress(CommunicationError):  # it has left before
                connection.send(wire.head(0, 0, 0, wire.GOODBYE), memoryview(b""))
        while time.monotonic() < limit and not all(link.is_delivered for link in self._connections.values()):
            self.poller.progress()
            time.sleep(1e-4)

    def _fail(self, reason: str) -> None:
        """End all requests, and refuse new ones."""
        self._why_closed = self._why_closed or reason
        for connection in self._connections.values():
            for request in connection.refuse(reason):
                self.poller.complete(request, reason)
        self.inbox.close(reason)
        self.poller.fail(reason)

    def _close_sockets(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def abandon(self) -> None:
        """In a forked child: let go of what is the parent's."""
        self._is_closed = True
        self._why_closed = "this process was forked from a rank and is none itself"
        for connection in self._connections.values():
            connection.abandon()
        self.poller.abandon()


_open: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _in_forked_child() -> None:
    for endpoint in list(_open):
        endpoint.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_in_forked_child)  # cannot be undone, so once for all
