"""Connections between all pairs of ranks, made through a store of torch.distributed, without a launcher.

Ranks on one host connect through Unix sockets in the abstract namespace, which is closed to other hosts and leaves no
files. If there are several hosts, each rank also listens at one address until all ranks have connected. A rank that
connects sends a secret from the store. Each connection is tried once; one time limit, that of the caller, covers all.
At the end the keys are removed from the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple

from ...backends import network
from ...errors import LaunchError

_KEY = "torchmpi rendezvous"
_NUM_STRANGERS = 128  # queued connections of other programs, in addition to those of the ranks
_MAX_SILENCE_SECONDS = 30.0
_UNIX_BUFFER_BYTES = 4 << 20
_REMEDY = f"Between hosts, choose the network interface with {network.INTERFACE_VARIABLE} and open the ports"


class Place(NamedTuple):
    """The addresses of a rank."""

    host: str
    """The name of the host, for messages."""
    network: str
    """Ranks with the same value reach each other without a network."""
    memory: str
    """Ranks with the same value share memory."""
    unix_name: str
    interfaces: list[str]
    cores: list[int]


class Mesh:
    """The rendezvous of one rank; `run` connects it. Collective."""

    def __init__(self, store: Any, rank: int, size: int, timeout_seconds: float) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout_seconds
        self._limit = time.monotonic() + timeout_seconds
        self._keys: list[str] = []
        self.places: list[Place] = []
        """The places of all ranks."""

    def run(self) -> dict[int, socket.socket]:
        """Return a connection to each other rank."""
        with ExitStack() as opened:
            listeners = [opened.enter_context(socket.socket(socket.AF_UNIX))]
            listeners[0].bind(f"\0torchmpi-{secrets.token_hex(12)}")
            listeners[0].listen(self._size + _NUM_STRANGERS)  # if the queue is full, connect() fails at once
            key, pids = network.namespace(), ""
            with contextlib.suppress(OSError):
                pids = os.readlink("/proc/self/ns/pid")
            own = Place(
                socket.gethostname(),
                key,
                f"{key} {pids}",
                listeners[0].getsockname()[1:].decode(),
                network.own_interfaces(),
                sorted(os.sched_getaffinity(0)),
            )
            entries = self._allgather("place", [own, secrets.token_hex(16)])
            try:
                self.places, secret = [Place(*place) for place, _ in entries], bytes.fromhex(entries[0][1])
            except (IndexError, KeyError, TypeError, ValueError) as error:
                raise LaunchError(self._is_foreign(error)) from None
            if len(self.places) != self._size:
                raise LaunchError(self._is_foreign(f"{len(self.places)} ranks instead of {self._size}"))
            addresses: list[Any] = ["\0" + place.unix_name for place in self.places]
            if len({place.network for place in self.places}) > 1:
                address = network.address_of([(place.network, place.interfaces) for place in self.places], self._rank)
                listeners.append(opened.enter_context(network.listen(address, self._size)))
                offers = self._allgather("address", listeners[1].getsockname()[:2])
                for rank, address in enumerate(offers):
                    if self.places[rank].network != key:
                        addresses[rank] = tuple(address)
            connected = opened.enter_context(ExitStack())
            sockets = {}
            for peer in range(self._rank):
                sockets[peer] = connected.enter_context(self._connect(peer, addresses[peer], secret))
            while awaited := set(range(self._rank + 1, self._size)) - sockets.keys():
                rank, sock = self._accept(listeners, secret, awaited)
                sockets[rank] = connected.enter_context(sock)
            connected.pop_all()
        for sock in sockets.values():
            _set_options(sock, max(1.0, min(self._timeout / 2, _MAX_SILENCE_SECONDS)))
        return sockets

    @property
    def is_crowded(self) -> bool:
        """Return whether this host has more ranks than cores for them."""
        near = [place for place in self.places if place.network == self.places[self._rank].network]
        return len(near) > len(set().union(*(place.cores for place in near)))

    # --- the store

    def _allgather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all ranks; rank 0 collects them, so that the store serves 2 requests per rank."""
        own, table = f"{_KEY} {name} {self._rank}", f"{_KEY} {name}"
        self._keys += [own] + [table] * (self._rank == 0)
        self._store.set(own, json.dumps(value))
        if self._rank == 0:
            values = [self._get(f"{_KEY} {name} {rank}", name) for rank in range(self._size)]
            self._store.set(table, json.dumps(values))
        return self._get(table, name)  # type: ignore[no-any-return]

    def _get(self, key: str, name: str) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=self._time_left()))
            return json.loads(self._store.get(key))
        except (ValueError, RecursionError) as error:
            raise LaunchError(self._is_foreign(error)) from None
        except RuntimeError as error:  # torch's stores have no specific exception
            raise LaunchError(
                f"rank {self._rank}: rank {self._silent_ranks(name)} has written nothing to the store in time "
                f"({error}). Start all {self._size} ranks, with the same store, or increase timeout=."
            ) from error

    def _silent_ranks(self, name: str) -> str:
        """Return the ranks that have not written their value; others wait for rank 0, which waits for these."""
        silent = []
        with contextlib.suppress(RuntimeError):  # the store has been closed
            silent = [rank for rank in range(self._size) if not self._store.check([f"{_KEY} {name} {rank}"])]
        return ", ".join(map(str, silent)) or "0"

    def _is_foreign(self, problem: object) -> str:
        return (
            f"rank {self._rank}: the store has something else under the keys of torchmpi ({problem}). Use another "
            "store, or another prefix, for each job."
        )

    def clear(self) -> None:
        """Delete what this rank has written to the store, once all ranks have read it."""
        for key in self._keys:
            with contextlib.suppress(RuntimeError):  # a store that cannot delete
                self._store.delete_key(key)

    def _time_left(self) -> float:
        return max(0.001, self._limit - time.monotonic())

    # --- connections

    def _connect(self, peer: int, address: Any, secret: bytes) -> socket.socket:
        try:
            return network.connect(address, secret, self._rank, timeout_seconds=self._time_left())
        except OSError as error:
            where = "on this host" if isinstance(address, str) else f"at {address[0]} port {address[1]}"
            raise LaunchError(
                f"rank {self._rank}: rank {peer} on host {self.places[peer].host} cannot be reached {where}: {error}. "
                f"If it still runs: {_REMEDY[0].lower()}{_REMEDY[1:]}."
            ) from error

    def _accept(self, listeners: list[socket.socket], secret: bytes, awaited: set[int]) -> tuple[int, socket.socket]:
        """Return the next rank that connects."""
        found = network.accept(listeners, secret, awaited, timeout_seconds=self._time_left())
        if found is None:
            raise LaunchError(
                f"rank {self._rank}: rank {', '.join(map(str, sorted(awaited)))} has not connected in time. "
                f"{_REMEDY}, or increase timeout=."
            )
        return found


def _set_options(sock: socket.socket, silence_seconds: float) -> None:
    """Send short messages immediately, and end the connection when the other host does not answer for this time."""
    if sock.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    network.limit_silence(sock, silence_seconds)
