"""Exchanges of a few bytes with many sockets at once, of which some may belong to strangers.

A generator drives each connection. It yields a number to receive up to that many bytes, and bytes to send them. One
poll covers all connections, and each has a time limit of its own, so a client that sends nothing, or one byte a second,
delays nobody. The number of accepted connections is limited: the oldest one is closed for a new one.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
Conversation = Generator[int | bytes, bytes, T]
_LATER = (errno.EAGAIN, errno.EINTR, errno.ENOTCONN)  # the last one of a TCP connection that is being made
_PAUSE_SECONDS = 0.05  # before the next accept() of a process that has no descriptor left


class ConversationError(ConnectionError):
    """What the other end has said, or has not said, ends the conversation."""


class Outcome(NamedTuple, Generic[T]):
    """The end of a conversation: a result and an open connection, or a problem and a closed one."""

    sock: socket.socket
    result: T | None
    problem: OSError | None


class _Talk:
    """A connection, and what its conversation waits for."""

    def __init__(self, sock: socket.socket, conversation: Conversation[Any], limit: float, is_accepted: bool) -> None:
        sock.setblocking(False)
        self.sock, self.conversation, self.limit, self.is_accepted = sock, conversation, limit, is_accepted
        first = next(conversation)
        self.wanted: int | memoryview = first if isinstance(first, int) else memoryview(first)

    def advance(self) -> None:
        """Receive and send as much as possible now.

        Raises:
            StopIteration: The conversation has ended, with its result.
            OSError: It has failed.
        """
        while True:
            try:
                if isinstance(self.wanted, int):
                    said = self.sock.recv(self.wanted)
                    if not said:
                        raise ConversationError("the connection has ended")
                else:
                    self.wanted = self.wanted[self.sock.send(self.wanted, socket.MSG_NOSIGNAL) :]
                    if self.wanted:
                        continue
                    said = b""
            except OSError as error:
                if error.errno in _LATER:
                    return
                raise
            following = self.conversation.send(said)
            self.wanted = following if isinstance(following, int) else memoryview(following)


def exactly(num_bytes: int) -> Conversation[bytes]:
    """Receive this many bytes and no more, as a part of a conversation."""
    data = b""
    while len(data) < num_bytes:
        data += yield num_bytes - len(data)
    return data


class Conversations(Generic[T]):
    """The conversations of one thread. The end of the ``with`` block closes those that have not ended."""

    def __init__(
        self,
        listeners: Mapping[socket.socket, Callable[[socket.socket], Conversation[T]]],
        *,
        limit_seconds: float,
        most: int,
    ) -> None:
        """Prepare to accept.

        Args:
            listeners: Listening sockets, which stay open at the end; each with the function that returns the
                conversation for an accepted connection, or raises an OSError to close it at once.
            limit_seconds: The time limit of an accepted connection.
            most: How many accepted connections there may be at once.
        """
        self._listeners = {each.fileno(): (each, begin) for each, begin in listeners.items()}
        self._limit_seconds, self._most = limit_seconds, most
        self._talks: dict[int, _Talk] = {}
        self._poll = select.poll()  # select() refuses descriptors from 1,024 on
        for number, (listener, _) in self._listeners.items():
            listener.setblocking(False)
            self._poll.register(number, select.POLLIN)

    def __enter__(self) -> Conversations[T]:
        return self

    def __exit__(self, *_: object) -> None:
        while self._talks:
            self._end(next(iter(self._talks.values())))

    def add(self, sock: socket.socket, conversation: Conversation[T], *, limit_seconds: float) -> None:
        """Begin a conversation on a connection of this process."""
        self._add(_Talk(sock, conversation, time.monotonic() + limit_seconds, False))

    def turn(self, timeout_seconds: float) -> list[Outcome[T]]:
        """Wait until something can be done, at most this long, do it, and return the conversations that have ended."""
        now = time.monotonic()
        limit = min([now + timeout_seconds, *(talk.limit for talk in self._talks.values())])
        ended: list[Outcome[T]] = []
        for number, _ in self._poll.poll(1000 * max(0.0, limit - now)):
            if number in self._listeners:
                ended += self._accept(*self._listeners[number])
            elif number in self._talks:  # otherwise it was closed in this turn
                ended += self._advance(self._talks[number])
        now = time.monotonic()
        for talk in [talk for talk in self._talks.values() if talk.limit <= now]:
            self._end(talk)
            ended.append(Outcome(talk.sock, None, TimeoutError("no answer in time")))
        return ended

    def _accept(self, listener: socket.socket, begin: Callable[[socket.socket], Conversation[T]]) -> list[Outcome[T]]:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._close_oldest():
                time.sleep(_PAUSE_SECONDS)
            return []
        if sum(talk.is_accepted for talk in self._talks.values()) >= self._most:
            self._close_oldest()
        try:
            talk = _Talk(sock, begin(sock), time.monotonic() + self._limit_seconds, True)
        except OSError:
            sock.close()
            return []
        self._add(talk)
        return self._advance(talk)

    def _close_oldest(self) -> bool:
        oldest = next((talk for talk in self._talks.values() if talk.is_accepted), None)
        if oldest is not None:
            self._end(oldest)
        return oldest is not None

    def _add(self, talk: _Talk) -> None:
        self._talks[talk.sock.fileno()] = talk
        self._watch(talk)

    def _watch(self, talk: _Talk) -> None:
        self._poll.register(talk.sock, select.POLLIN if isinstance(talk.wanted, int) else select.POLLOUT)

    def _advance(self, talk: _Talk) -> list[Outcome[T]]:
        try:
            talk.advance()
        except StopIteration as end:
            self._release(talk)
            return [Outcome(talk.sock, end.value, None)]
        except OSError as error:
            self._end(talk)
            return [Outcome(talk.sock, None, error)]
        self._watch(talk)
        return []

    def _release(self, talk: _Talk) -> None:
        del self._talks[talk.sock.fileno()]
        self._poll.unregister(talk.sock)

    def _end(self, talk: _Talk) -> None:
        self._release(talk)
        with suppress(OSError):
            talk.conversation.close()
        talk.sock.close()
