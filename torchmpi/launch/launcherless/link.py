"""A connection to another rank: what is being read from it, and what is still to be written to it."""

from __future__ import annotations

import errno
import socket
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from .requests import Receive, Request

_JOINED_BYTES = 16 << 10  # up to this length a copy behind the head is cheaper than a second buffer


class Arrival:
    """A message that is being read, or that waits for its receive."""

    __slots__ = ("context", "data", "filled", "is_in_place", "is_whole", "receive", "source", "tag")

    def __init__(self, source: int, context: int, tag: int, num_bytes: int, receive: Receive | None) -> None:
        self.source, self.context, self.tag, self.receive = source, context, tag, receive
        room = None if receive is None else receive.room_for(num_bytes)
        self.data = np.empty(num_bytes, np.uint8).data if room is None else room
        self.filled, self.is_whole, self.is_in_place = 0, False, room is not None

    def rest(self) -> memoryview:
        """Return the memory for the rest of the message: that of the receive, also if posted after it began."""
        if self.receive is not None and not self.is_in_place:
            room = self.receive.room_for(len(self.data))
            if room is not None:
                room[: self.filled] = self.data[: self.filled]
                self.data, self.is_in_place = room, True
        return self.data[self.filled :]

    def detach(self) -> None:
        """Read the rest of the message into other memory than that of the receive, which has ended."""
        self.receive, self.data, self.is_in_place = None, memoryview(bytearray(len(self.data))), False

    def deliver(self, receive: Receive) -> None:
        """End the receive with this message."""
        receive.take(self.source, self.tag, self.data, is_in_place=self.is_in_place)


class Link:
    """The connection to another rank. One thread reads; any thread sends."""

    def __init__(self, peer: int, name: str, sock: socket.socket, on_room: Callable[[Link, bool], None]) -> None:
        sock.setblocking(False)
        self.peer, self.name, self.sock, self._on_room = peer, name, sock, on_room
        self.problem = ""
        """Why sends fail; '' while they are possible."""
        self.said_goodbye, self.goodbye_is_read = False, False
        self.arrival: Arrival | None = None
        """The message of which a part has been read."""
        self.rest = b""
        """The beginning of a head."""
        self._sending = threading.Lock()
        self._outgoing: deque[tuple[list[memoryview], Request | None]] = deque()

    def send(self, head: bytes, view: memoryview | None = None, request: Request | None = None) -> None:
        """Write as much of a frame as the socket accepts; the reading thread writes the rest."""
        view = view or memoryview(b"")
        pieces = [memoryview(head + view)] if len(view) <= _JOINED_BYTES else [memoryview(head), view]
        with self._sending:
            if self.problem:
                if request is not None:
                    request.complete(self.problem)
                return
            try:
                self._outgoing.append((pieces, request))
                if len(self._outgoing) == 1:
                    self._write()
            except BaseException:  # from a signal handler: it is unknown how much has been written
                self.sock.shutdown(socket.SHUT_RDWR)
                raise

    def send_first(self, head: bytes) -> bool:
        """Write a frame before all frames that have not been begun; return whether all frames have been written."""
        if self._sending.acquire(timeout=0.1):  # a signal handler may have interrupted a send
            try:
                if head and not self.problem:
                    self._outgoing.insert(1, ([memoryview(head)], None))
                if self._outgoing:
                    self._write()
            finally:
                self._sending.release()
        return not self._outgoing

    def write_more(self) -> None:
        """Write as much as the socket accepts."""
        with self._sending:
            self._write()

    def _write(self) -> None:
        while self._outgoing:
            pieces, request = self._outgoing[0]
            try:
                num_bytes = self.sock.sendmsg(pieces) if len(pieces) > 1 else self.sock.send(pieces[0])
            except OSError as error:
                if means_later(error):
                    self._on_room(self, True)
                    return
                # Messages of the other rank may still have to be read.
                self._refuse(f"{self.name} is gone: {error.strerror}")
                return
            while pieces and num_bytes >= len(pieces[0]):
                num_bytes -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][num_bytes:]
                continue
            self._outgoing.popleft()
            if request is not None:
                request.complete()
        self._on_room(self, False)

    def refuse(self, problem: str) -> None:
        """Fail all sends from now on."""
        with self._sending:
            self._refuse(problem)

    def revoke(self, problem: str) -> None:
        """Fail the messages in the queue. The rest of one that has been begun is sent, from a copy of its memory."""
        with self._sending:
            kept: deque[tuple[list[memoryview], Request | None]] = deque()
            for index, (pieces, request) in enumerate(self._outgoing):
                if request is None:
                    kept.append((pieces, None))
                    continue
                if index == 0:
                    kept.append(([memoryview(bytes(piece)) for piece in pieces], None))
                request.complete(problem)
            self._outgoing = kept

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem
        while self._outgoing:
            _, request = self._outgoing.popleft()
            if request is not None:
                request.complete(self.problem)


def means_later(error: OSError) -> bool:
    """Return whether there is nothing to read, or no room to write; raise an exception of a signal handler."""
    if error.errno is None:
        raise error
    return error.errno in (errno.EAGAIN, errno.EINTR)
