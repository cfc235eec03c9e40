"""The connections between hosts: which ranks are connected, the path of a message, the rendezvous, and messages."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from ..backends import network
from ..communicators.conditions import on_all

_CONNECT_SECONDS = 10.0
_NUM_STRANGERS = 128  # queued connections of other programs
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
        ahead, behind = ring[(own + 1) % len(ring)], ring[own - 1]
        path = [ahead, behind] if (goal - own) % len(ring) <= len(ring) // 2 else [behind, ahead]
    return next((hop for hop in path if hop not in set(closed)), None)


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
    sockets: dict[int, socket.socket] = {}
    problem = ""
    with ExitStack() as opened:
        listeners = [opened.enter_context(socket.socket(socket.AF_UNIX))]
        listeners[0].bind(f"\0torchmpi-{secrets.token_hex(12)}")
        listeners[0].listen(len(higher) + 1)
        own = (
            host_name,
            network.namespace(),
            network.own_interfaces(),
            listeners[0].getsockname()[1:].decode(),
            secrets.token_bytes(16),
        )
        places = comm.allgather(own)
        secret = places[0][4]
        address = None
        try:
            if any(hosts[high] != hosts[rank] for high in higher):
                where = network.address_of([place[1:3] for place in places], rank)
                listeners.append(opened.enter_context(network.listen(where, len(higher) + _NUM_STRANGERS)))
                address = listeners[1].getsockname()[:2]
        except OSError as error:
            problem = f"rank {rank} on host {host_name} cannot listen: {error}"
        addresses = comm.allgather(address)
        for peer in lower if not problem else ():
            is_near = hosts[peer] == hosts[rank]
            target = "\0" + places[peer][3] if is_near else addresses[peer]
            if target is None:
                continue  # that rank has the problem
            try:
                sockets[peer] = network.connect(target, secret, rank, timeout_seconds=_CONNECT_SECONDS)
            except OSError as error:
                where = "" if is_near else f" at {target[0]} port {target[1]}"
                problem = f"rank {rank} on host {host_name} cannot reach rank {peer} on host {places[peer][0]}{where}: "
                problem += str(error)
        # A rank that could not connect must not keep the others waiting for its connection.
        is_well = on_all(comm, not problem)
        missing = set() if is_well else {other for other, text in enumerate(comm.allgather(problem)) if text}
        while awaited := higher - sockets.keys() - missing:
            found = network.accept(listeners, secret, awaited, timeout_seconds=_CONNECT_SECONDS)
            if found is None:
                problem = f"rank {rank} on host {host_name}: rank {min(awaited)} has not connected"
                break
            sockets[found[0]] = found[1]
    if not on_all(comm, not problem):
        problem = next(text for text in comm.allgather(problem) if text)
        for sock in sockets.values():
            sock.close()
        return {}, [], problem
    return sockets, [place[0] for place in places], ""


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
