"""How the processes of a job find each other: each pair gets one connection.

Through the store each rank says where it is. Ranks that share a network of the kernel's connect by a name in it, which
is no file and open to this host only; if there are others, each rank also listens at one address, until all have come.
Who connects must show a secret that is in the store only, and afterwards nothing is left there.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from ...errors import LaunchError
from . import wire
from .addresses import Place, own_address

_KEY = "torchmpi sockets"
_TABLE, _ADDRESSES = f"{_KEY} table", f"{_KEY} addresses"
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
_BUFFER_BYTES = 4 << 20


class StoreRendezvous:
    """One rank's part in it."""

    def __init__(self, store: Any, rank: int, size: int, place: Place, *, timeout_seconds: float) -> None:
        self._store, self._rank, self._size, self._place = store, rank, size, place
        self._limit = time.monotonic() + timeout_seconds
        self.places: list[Place] = [place]
        """Of all ranks."""
        self.is_crowded = False
        """Whether the ranks here have fewer cores than they are."""
        self._secret = b""

    def run(self) -> dict[int, socket.socket]:
        """A connection to each of the other ranks. Collective."""
        if self._size == 1:
            return {}
        with ExitStack() as opened:
            listeners = [opened.enter_context(self._listen_on_host())]
            mine = {"place": self._place, "name": _name_of(listeners[0]), "cores": sorted(os.sched_getaffinity(0))}
            table = self._publish(_TABLE, mine, self._with_secret)
            self._secret = bytes.fromhex(table["secret"])
            self.places = [Place(*entry["place"]) for entry in table["ranks"]]
            near = [entry for entry, place in zip(table["ranks"], self.places, strict=True) if self._is_near(place)]
            self.is_crowded = len(near) > len(set().union(*(entry["cores"] for entry in near)))
            addresses: list[Any] = ["\0" + entry["name"] for entry in table["ranks"]]
            if len({place.network for place in self.places}) > 1:
                listeners.append(opened.enter_context(_listen_at(own_address(self._store), self._size)))
                own = listeners[1].getsockname()[:2]
                for rank, address in enumerate(self._publish(_ADDRESSES, own, lambda found: found)):
                    if not self._is_near(self.places[rank]):
                        addresses[rank] = tuple(address)
            sockets = opened.enter_context(_closed_on_failure())
            for peer in range(self._rank):
                sockets[peer] = self._connect(peer, addresses[peer])
            self._accept(listeners, sockets)
        for sock in sockets.values():
            _tune(sock)
        return sockets

    def _is_near(self, place: Place) -> bool:
        return place.network == self._place.network

    # --- through the store

    def _publish(self, key: str, mine: Any, make_table: Callable[[list[Any]], Any]) -> Any:
        """Tell what is `mine` to rank 0, and have what it makes of everybody's."""
        self._store.set(f"{key} {self._rank}", json.dumps(mine))
        if self._rank == 0:
            found = [self._fetch(f"{key} {rank}", rank) for rank in range(self._size)]
            self._store.set(key, json.dumps(make_table(found)))
        return self._fetch(key, 0)

    def _fetch(self, key: str, rank: int) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=self._time_left()))
            return json.loads(self._store.get(key))
        except RuntimeError as error:  # torch's stores have no common class for it
            raise LaunchError(
                f"rank {self._rank}: rank {rank} has not come in time: it writes nothing to the store ({error}). Start "
                f"all {self._size} ranks, with the same store, or give them more time (timeout=)."
            ) from error

    def _with_secret(self, ranks: list[Any]) -> dict[str, Any]:
        return {"ranks": ranks, "secret": secrets.token_hex(wire.SECRET_BYTES)}

    def clear(self) -> None:
        """Take out of the store what this rank has written. When all have met, and before they go on."""
        for key in (_TABLE, _ADDRESSES):
            for name in (f"{key} {self._rank}", *([key] if self._rank == 0 else [])):
                with contextlib.suppress(RuntimeError):  # there is none, or this store cannot delete
                    self._store.delete_key(name)

    # --- through sockets

    def _listen_on_host(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0torchmpi-{secrets.token_hex(12)}")
        listener.listen(self._size)
        return listener

    def _connect(self, peer: int, address: Any) -> socket.socket:
        on_host = isinstance(address, str)
        sock = socket.socket(socket.AF_UNIX if on_host else _family(address[0]), socket.SOCK_STREAM)
        try:
            sock.settimeout(self._time_left())
            while True:
                try:
                    sock.connect(address)
                    break
                except BlockingIOError:  # more have come at once than it takes; on this host nobody is made to wait
                    if time.monotonic() > self._limit:
                        raise
                    time.sleep(0.01)
            sock.sendall(wire.GREETING.pack(self._secret, self._rank))
        except OSError as error:
            sock.close()
            where = "on this host" if on_host else f"at {address[0]} port {address[1]}"
            raise LaunchError(
                f"rank {self._rank}: rank {peer} cannot be reached {where}: {error}. If it still runs: between hosts, "
                "choose the network interface with GLOO_SOCKET_IFNAME, and open the ports between them."
            ) from error
        return sock

    def _time_left(self) -> float:
        return max(0.001, self._limit - time.monotonic())

    def _accept(self, listeners: list[socket.socket], sockets: dict[int, socket.socket]) -> None:
        """Add the connections of all higher ranks; a stranger's is dropped."""
        guests: dict[socket.socket, bytearray] = {}
        with selectors.DefaultSelector() as selector, _closed_on_failure() as taken:
            for listener in listeners:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            while awaited := set(range(self._rank + 1, self._size)) - taken.keys():
                for key, _ in selector.select(self._left_for(awaited)):
                    sock: Any = key.fileobj
                    if sock in listeners:
                        with contextlib.suppress(OSError):  # it has gone again
                            guest, _ = sock.accept()
                            guest.setblocking(False)
                            selector.register(guest, selectors.EVENT_READ)
                            guests[guest] = bytearray()
                    elif (rank := self._hear(sock, guests[sock])) is not None:
                        selector.unregister(sock)
                        del guests[sock]
                        if rank in awaited:
                            taken[rank] = sock
                        else:
                            sock.close()
            for guest in guests:
                guest.close()
            sockets |= taken

    def _left_for(self, awaited: set[int]) -> float:
        left = self._limit - time.monotonic()
        if left > 0:
            return left
        raise LaunchError(
            f"rank {self._rank}: rank {', '.join(map(str, sorted(awaited)))} has not connected in time. Between hosts, "
            "open the ports between them, or give the ranks more time (timeout=)."
        )

    def _hear(self, guest: socket.socket, said: bytearray) -> int | None:
        """The rank that a guest has shown to be, -1 for a stranger; None if it has not said all yet."""
        try:
            data = guest.recv(wire.GREETING.size - len(said))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        said += data
        if data and len(said) < wire.GREETING.size:
            return None
        if not data:
            return -1
        secret, rank = wire.GREETING.unpack(said)
        return int(rank) if hmac.compare_digest(secret, self._secret) else -1


@contextlib.contextmanager
def _closed_on_failure() -> Iterator[dict[int, socket.socket]]:
    """Sockets by rank, closed if something goes wrong while they are collected."""
    sockets: dict[int, socket.socket] = {}
    try:
        yield sockets
    except BaseException:
        for sock in sockets.values():
            sock.close()
        raise


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _name_of(listener: socket.socket) -> str:
    return listener.getsockname()[1:].decode()  # type: ignore[no-any-return]


def _listen_at(address: str, size: int) -> socket.socket:
    return socket.create_server((address, 0), family=_family(address), backlog=size)


def _tune(sock: socket.socket) -> None:
    """Short messages leave at once, a host that vanished is noticed, and much fits in between."""
    if sock.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        return
    # No buffer sizes here: the kernel then finds better ones by itself.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
