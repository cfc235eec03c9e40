"""The stream between this rank and one other: frames are cut out of what arrives, and written as far as there is room.

Nothing here waits: who is told by the system that there is something to read, or room to write, calls :meth:`read` or
:meth:`flush`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import sys
import termios
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from . import wire
from .matching import Body, Inbox
from .requests import CommunicationError, Request

_JOINED_BYTES = 16 << 10
"""Up to this length, copying a message behind its head is cheaper than two pieces."""


class StreamError(Exception):
    """The system says that the stream has ended, and why."""


class _Parcel(NamedTuple):
    """What is left to write of a frame."""

    pieces: list[memoryview]
    request: Request | None


class Connection:
    """One per pair of ranks. One thread at a time reads; any thread sends."""

    def __init__(self, sock: socket.socket, peer: int, on_room: Callable[[bool], None] | None = None) -> None:
        """`on_room` is called with whether it is of interest that there is room to write."""
        sock.setblocking(False)
        self.peer = peer
        self.body: Body | None = None
        """The long message at hand."""
        self.said_goodbye = False
        self._socket = sock
        self._rest = b""  # the beginning of a head
        self._sending = threading.Lock()
        self._parcels: deque[_Parcel] = deque()
        self._problem: str | None = None
        self._is_closed = False
        self.on_room: Callable[[bool], None] = on_room or (lambda wanted: None)

    def fileno(self) -> int:
        """The descriptor."""
        return self._socket.fileno()

    # --- sending

    @property
    def has_outgoing(self) -> bool:
        """Whether something waits for room."""
        return bool(self._parcels)

    @property
    def is_delivered(self) -> bool:
        """Whether closing loses nothing of what was sent: TCP forgets what is on its way if something came unread."""
        with self._sending:
            if self._is_closed or self._parcels or self._socket.family == socket.AF_UNIX:
                return not self._parcels
            return not int.from_bytes(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    def send(self, head: bytes, view: memoryview, request: Request | None = None) -> bool:
        """Write a frame, or what there is room for, and the rest later; whether it has left as a whole."""
        is_short = len(view) <= _JOINED_BYTES
        pieces = [memoryview(head + view)] if is_short else [memoryview(head), view]
        with self._sending:
            if self._problem is not None:
                raise CommunicationError(self._problem)
            try:
                if not self._parcels:
                    pieces = self._write(pieces)
                if pieces:
                    self._parcels.append(_Parcel(pieces, request))
                    self.on_room(True)
            except BaseException as error:
                self._tear(error)
                raise
        return not pieces

    def send_first(self, head: bytes) -> None:
        """The same for a frame without bytes, before all that has not been begun; without a word if it fails."""
        if self._sending.acquire(timeout=0.1):
            try:
                self._parcels.insert(1, _Parcel([memoryview(head)], None))  # the first may have been begun
                self._write_parcels(lambda request: None)
            except CommunicationError:
                pass
            finally:
                self._sending.release()

    def flush(self) -> list[tuple[Request, str | None]]:
        """Write what there is room for; what has ended by that, and why it failed."""
        ended: list[tuple[Request, str | None]] = []
        with self._sending:
            try:
                self._write_parcels(lambda request: ended.append((request, None)))
                if not self._parcels and not self._is_closed:
                    self.on_room(False)
            except CommunicationError as error:
                ended += [(parcel.request, str(error)) for parcel in self._parcels if parcel.request is not None]
                self._parcels.clear()
            except BaseException as error:
                self._tear(error)
                raise
        return ended

    def _write_parcels(self, on_end: Callable[[Request], None]) -> None:
        while self._parcels:
            parcel = self._parcels[0]
            left = self._write(parcel.pieces)
            if left:
                self._parcels[0] = parcel._replace(pieces=left)
                return
            self._parcels.popleft()
            if parcel.request is not None:
                on_end(parcel.request)

    def _write(self, pieces: list[memoryview]) -> list[memoryview]:
        """Write as much as goes; what is left."""
        try:
            num_bytes = self._socket.sendmsg(pieces) if len(pieces) > 1 else self._socket.send(pieces[0])
        except OSError as error:
            if _means_later(error):
                return pieces
            # What the other has sent before is still to be read: that it is lost is for who reads to say.
            self._problem = f"rank {self.peer} is gone: {error.strerror}"
            raise CommunicationError(self._problem) from error
        while pieces and num_bytes >= len(pieces[0]):
            num_bytes -= len(pieces[0])
            pieces = pieces[1:]
        return [pieces[0][num_bytes:], *pieces[1:]] if pieces else []

    def _tear(self, error: BaseException) -> None:
        """After an exception out of a signal handler: what was written may not be what was noted."""
        if not isinstance(error, CommunicationError):
            self._problem = f"the connection to rank {self.peer} is torn: this rank was interrupted while it wrote"
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # so that both ranks notice

    # --- reading

    def read(self, inbox: Inbox, staging: memoryview, on_abort: Callable[[int, int], None]) -> None:
        """Read once. `on_abort` is called with the rank that ends the job and its status."""
        if self.body is None:
            self._read_frames(inbox, staging, on_abort)
            return
        body = self.body
        body.filled += self._receive(body.missing())
        if body.filled == body.num_bytes:
            self.body = None
            inbox.finish(body)

    def _receive(self, memory: memoryview) -> int:
        try:
            num_bytes = self._socket.recv_into(memory)
        except OSError as error:
            if _means_later(error):
                return 0
            raise StreamError(error.strerror) from error
        if not num_bytes:
            raise StreamError("its connection has ended without a goodbye")
        return num_bytes

    def _read_frames(self, inbox: Inbox, staging: memoryview, on_abort: Callable[[int, int], None]) -> None:
        begin, kept = 0, len(self._rest)
        if kept:
            staging[:kept] = self._rest
        end = kept + self._receive(staging[kept:])
        while end - begin >= wire.HEAD.size:
            context, length, tag, kind = wire.HEAD.unpack_from(staging, begin)
            begin += wire.HEAD.size
            if kind == wire.GOODBYE:
                self.said_goodbye = True
            elif kind == wire.ABORT:
                on_abort(context, tag)
            elif length <= end - begin:
                inbox.arrive(self.peer, context, tag, staging[begin : begin + length])
                begin += length
            else:
                body = inbox.begin(self.peer, context, tag, length)
                body.fill(staging[begin:end])
                self.body, begin = body, end
        self._rest = bytes(staging[begin:end])

    # --- the end

    def refuse(self, reason: str) -> list[Request]:
        """From now on a send raises for this reason, and nothing comes; what had not left as a whole."""
        with self._sending:
            self._problem, self._is_closed = reason, True
            pending = [parcel.request for parcel in self._parcels if parcel.request is not None]
            self._parcels.clear()
            with contextlib.suppress(OSError):  # it may be closed from the other side
                self._socket.shutdown(socket.SHUT_RDWR)
        return pending

    def close(self) -> None:
        """Close the socket, which nobody may be reading."""
        with self._sending:
            self._socket.close()

    def abandon(self) -> None:
        """Close the descriptor of a forked child: the connection is the parent's."""
        self._problem = "this process was forked from a rank and is none itself"
        self._socket.close()


def _means_later(error: OSError) -> bool:
    """Whether it only cannot be done now. An exception of this class that has no number is no word of the system's."""
    if error.errno is None:
        raise error
    return error.errno in (errno.EAGAIN, errno.EINTR)
