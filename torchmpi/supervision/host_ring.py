"""The connections between hosts: which ranks are connected, the path of a message, the rendezvous, and messages."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from ..communicators.conditions import on_all
from ..launch import meeting, network

_CONNECT_SECONDS = 10.0
_MAX_LINE_BYTES = 64 << 10

Message = dict[str, Any]


def connections(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of ranks that are connected, the lower rank first.

    >>> connections([0, 0, 1, 1]), connections([0, 1, 2])
    ([(0, 1), (2, 3), (0, 2)], [(0, 1), (1, 2), (0, 2)])
    """
    leaders = leaders_of(hosts)
    star = [(leaders[host], rank) for rank, host in enumerate(hosts) if rank != leaders[host]]
    ring = list(leaders.values())
    pairs = {(min(pair), max(pair)) for pair in zip(ring, [*ring[1:], ring[0]], strict=True) if pair[0] != pair[1]}
    return star + sorted(pairs, key=lambda pair: (pair[0] == ring[0] and pair[1] == ring[-1], pair))


def next_hop(hosts: Sequence[int], rank: int, to: int, closed: Iterable[int] = ()) -> int | None:
    """Return the rank to which a rank passes a message for another; None if its connections are `closed`.

    >>> next_hop([0, 0, 1, 1, 2], 1, 4), next_hop([0, 0, 1, 1, 2], 0, 3), next_hop([0, 0, 1, 1, 2], 0, 3, closed=[2])
    (0, 2, 4)
    """
    leaders = leaders_of(hosts)
    leader = leaders[hosts[rank]]
    if rank != leader:
        path = [leader]
    elif hosts[to] == hosts[rank]:
        path = [to]
    else:
        ring = list(leaders.values())
        own, goal = ring.index(rank), ring.index(leaders[hosts[to]])
        ahead, behind = ahead_of(hosts, rank), ring[own - 1]
        path = [ahead, behind] if (goal - own) % len(ring) <= len(ring) // 2 else [behind, ahead]
    return next((hop for hop in path if hop not in set(closed)), None)


def ahead_of(hosts: Sequence[int], rank: int) -> int:
    """Return the first rank of the next host of the ring; the rank itself if it is not the first one of its host.

    >>> ahead_of([0, 0, 1, 1, 2], 0), ahead_of([0, 0, 1, 1, 2], 4), ahead_of([0, 0, 1, 1, 2], 3)
    (2, 0, 3)
    """
    ring = list(leaders_of(hosts).values())
    return ring[(ring.index(rank) + 1) % len(ring)] if rank in ring else rank


def leaders_of(hosts: Sequence[int]) -> dict[int, int]:
    """Return the first rank of each host."""
    leaders: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        leaders.setdefault(host, rank)
    return leaders


def connect(comm: Any, hosts: Sequence[int], host_name: str) -> tuple[dict[int, socket.socket], list[str], str]:
    """Connect this rank as in :func:`connections`. Collective.

    Returns:
        The connection to each rank, the names of the hosts by rank, and the problem if a rank could not connect.
    """
    rank, pairs = comm.rank, connections(hosts)
    lower = [low for low, high in pairs if high == rank]
    higher = {high for low, high in pairs if low == rank}
    near = [peer for peer in lower if hosts[peer] == hosts[rank]]
    problem, address = "", None
    with ExitStack() as opened:
        listeners = [opened.enter_context(meeting.listen_nearby(len(higher)))]
        own = (
            host_name,
            network.namespace(),
            network.own_interfaces(),
            listeners[0].getsockname()[1:].decode(),
            secrets.token_bytes(meeting.NONCE_BYTES),
        )
        places = comm.allgather(own)
        try:
            if any(hosts[high] != hosts[rank] for high in higher):
                where = network.address_of([place[1:3] for place in places], rank)
                listeners.append(opened.enter_context(network.listen(where, len(higher))))
                address = listeners[1].getsockname()[:2]
        except OSError as error:
            problem = f"rank {rank} on host {host_name} cannot listen: {error}"
        addresses = comm.allgather((address, problem))
        if reason := next((text for _, text in addresses if text), ""):
            return {}, [], reason
        targets = {peer: "\0" + places[peer][3] if peer in near else addresses[peer][0] for peer in lower}
        met = meeting.meet(rank, places[0][4], listeners, targets, higher, timeout_seconds=_CONNECT_SECONDS)
    for peer, failure in met.unreachable.items():
        where = "" if peer in near else f" at {targets[peer][0]} port {targets[peer][1]}"
        problem = (
            f"rank {rank} on host {host_name} cannot reach rank {peer} on host {places[peer][0]}{where}: {failure}"
        )
    if met.absent and not problem:
        problem = f"rank {rank} on host {host_name}: rank {min(met.absent)} has not connected"
    if not on_all(comm, not problem):
        problems = comm.allgather((problem, bool(met.unreachable)))
        met.close()
        # The rank that could not connect knows the reason, and the one that waited for it does not.
        return {}, [], next(text for text, _ in sorted(problems, key=lambda each: not each[1]) if text)
    return met.sockets, [place[0] for place in places], ""


class HostLink:
    """The connection to another rank."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.peer, self.sock = peer, sock
        self.said_goodbye = self.is_closed = False
        self._rest = b""
        self._error: OSError | None = None
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message, or drop it if the connection has ended or the other rank reads nothing."""
        line = json.dumps(message).encode() + b"\n"
        if self.is_closed or not self._sending.acquire(timeout=0.1):  # a signal handler may have interrupted a send
            return
        try:
            if self.sock.send(line) < len(line):
                self.sock.shutdown(socket.SHUT_RDWR)  # the next message could not be told from this one
        except BlockingIOError:
            pass
        except OSError as error:  # a socket reports it once; the thread then reads the end of the connection
            self._error = error
        finally:
            self._sending.release()

    def receive(self) -> tuple[list[Message], OSError | None]:
        """Return the messages that have arrived, and the reason if the connection has ended."""
        try:
            data = self.sock.recv(_MAX_LINE_BYTES)
        except BlockingIOError:
            return [], None
        except OSError as error:
            return [], self._error or error
        *lines, self._rest = (self._rest + data).split(b"\n")
        is_over = not data or len(self._rest) > _MAX_LINE_BYTES
        return [json.loads(line) for line in lines], (self._error or ConnectionResetError()) if is_over else None
