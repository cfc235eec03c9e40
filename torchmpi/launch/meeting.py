"""Authenticated connections between the ranks of a job.

Ranks share a key. Both ends of a connection prove with HMAC-SHA256 that they know it, over fresh random numbers, both
ranks and their part, before anything else is read. On a Unix socket, the kernel also names the user at the other end:
another one is refused at once. Connections are made and accepted at the same time, so no rank needs a certain order,
and under one time limit; strangers can delay nobody.
docs/security.md says what this protects from.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from . import network
from .conversations import Conversation, ConversationError, Conversations, exactly

Address = str | tuple[str, int]
"""The name of a Unix socket, or an address with a port."""
NONCE_BYTES = 16
_MAGIC = b"torchmpi"
_HELLO = struct.Struct(f"<{len(_MAGIC)}sII{NONCE_BYTES}s")
"""The rank that connects, the rank that it means, and a nonce."""
_ANSWER = struct.Struct(f"<{NONCE_BYTES}s32s")
_WELCOME = b"\1"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_GREETING_SECONDS = 2.0
_RETRY_SECONDS = 0.05
_MOST_GREETINGS = 256
_TRY_AGAIN = (errno.EAGAIN, errno.ECONNRESET, errno.EPIPE, None)
"""The queue of a Unix socket is full, or the connection was closed before the end of the greeting, as the other rank
does with the oldest ones of many."""


class WrongPeerError(ConnectionError):
    """What listens at an address is not the rank that is expected there."""


class Met(NamedTuple):
    """The connections of a rank."""

    sockets: dict[int, socket.socket]
    """Non-blocking, by rank."""
    unreachable: dict[int, OSError]
    """Why other ranks could not be reached."""
    absent: set[int]
    """The ranks that have not connected in time."""

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()


def listen_nearby(num_ranks: int) -> socket.socket:
    """Listen on a Unix socket in the abstract namespace, which other hosts cannot reach and which leaves no file."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0torchmpi-{secrets.token_hex(12)}")
        listener.listen(num_ranks + network.NUM_STRANGERS)
    except OSError:
        listener.close()
        raise
    return listener


def meet(
    rank: int,
    key: bytes,
    listeners: Sequence[socket.socket],
    targets: Mapping[int, Address],
    awaited: Collection[int],
    *,
    timeout_seconds: float,
) -> Met:
    """Connect to some ranks, and accept the connections of others, which call this too.

    Args:
        rank: The rank of this process.
        key: What all ranks know, and nobody else.
        listeners: Where this rank listens. They stay open.
        targets: The addresses of the ranks to connect to. These listen already.
        awaited: The ranks that connect to this one.
        timeout_seconds: The limit for all of it.
    """
    met, limit = Met({}, {}, set(awaited)), time.monotonic() + timeout_seconds
    next_try = dict.fromkeys(targets, 0.0)
    peers: dict[socket.socket, int] = {}

    def begin(sock: socket.socket) -> Conversation[int]:
        _check_user(sock)
        return _accept(rank, key, met.absent)

    def dial(peer: int) -> None:
        address = targets[peer]
        sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else network.family(address[0]))
        try:
            sock.setblocking(False)
            problem = sock.connect_ex(address)
            if problem not in (0, errno.EINPROGRESS):
                raise OSError(problem, os.strerror(problem))
            _check_user(sock)
            conversations.add(sock, _connect(rank, peer, key), limit_seconds=limit - time.monotonic())
        except OSError as error:
            sock.close()
            note(peer, error)
        else:
            peers[sock] = peer

    def note(peer: int, error: OSError) -> None:
        if error.errno in _TRY_AGAIN and not isinstance(error, (WrongPeerError, TimeoutError)):
            next_try[peer] = time.monotonic() + _RETRY_SECONDS
        else:
            met.unreachable[peer] = error

    serving = Conversations[int](
        dict.fromkeys(listeners, begin), limit_seconds=_GREETING_SECONDS, most=_MOST_GREETINGS + len(awaited)
    )
    with serving as conversations:
        while (now := time.monotonic()) < limit:
            for peer in [peer for peer, at in next_try.items() if at <= now]:
                del next_try[peer]
                dial(peer)
            if not (next_try or peers or met.absent):
                break
            until = min([limit, *next_try.values()])
            for sock, result, problem in conversations.turn(until - time.monotonic()):
                dialed = peers.pop(sock, None)
                if result is not None:
                    met.sockets[result] = sock
                    met.absent.discard(result)
                elif dialed is not None and problem is not None:  # otherwise a stranger
                    note(dialed, problem)
    for peer in {*next_try, *peers.values()}:
        met.unreachable.setdefault(peer, TimeoutError("it has not answered in time"))
    return met


def _connect(rank: int, peer: int, key: bytes) -> Conversation[int]:
    """Prove to a rank that listens that this one belongs to the job, after it has proved the same."""
    own = os.urandom(NONCE_BYTES)
    yield _HELLO.pack(_MAGIC, rank, peer, own)
    other, proof = _ANSWER.unpack((yield from exactly(_ANSWER.size)))
    if not hmac.compare_digest(proof, _proof(key, b"listens", rank, peer, own, other)):
        raise WrongPeerError("what listens there does not know the key of this job")
    yield _proof(key, b"connects", rank, peer, own, other)
    yield from exactly(len(_WELCOME))
    return peer


def _accept(rank: int, key: bytes, awaited: Collection[int]) -> Conversation[int]:
    """Find out which rank has connected, after a proof that this one belongs to the job."""
    magic, peer, meant, other = _HELLO.unpack((yield from exactly(_HELLO.size)))
    if magic != _MAGIC or meant != rank or peer not in awaited:
        raise ConversationError("no rank that is awaited")
    own = os.urandom(NONCE_BYTES)
    yield _ANSWER.pack(own, _proof(key, b"listens", peer, rank, other, own))
    proof = yield from exactly(hmac.new(key, digestmod="sha256").digest_size)
    if not hmac.compare_digest(proof, _proof(key, b"connects", peer, rank, other, own)):
        raise ConversationError("it does not know the key of this job")
    if peer not in awaited:  # it has connected meanwhile
        raise ConversationError("no rank that is awaited")
    yield _WELCOME
    return int(peer)


def _proof(key: bytes, part: bytes, connecting: int, listening: int, *nonces: bytes) -> bytes:
    return hmac.digest(key, b" ".join((part, b"%d %d" % (connecting, listening), *nonces)), "sha256")


def _check_user(sock: socket.socket) -> None:
    """Refuse the process of another user at the other end of a Unix socket."""
    if sock.family == socket.AF_UNIX:
        _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.geteuid():
            raise WrongPeerError(f"the other end belongs to the user with the number {user}")
