"""Connections between all pairs of ranks, made through a store of torch.distributed, without a launcher.

Ranks on one host connect through Unix sockets in the abstract namespace, which is closed to other hosts and leaves no
files. If there are several hosts, each rank also listens at one address until all ranks have connected. One time limit,
that of the caller, covers all. At the end the keys are removed from the store.

Others may read and write the store of torch. So each entry is signed with the key of the job, which is not in the
store, and each connection is authenticated (:mod:`torchmpi.launch.meeting`). On one host, which the launcher states,
the kernel names the user at the other end of each connection, and no key is needed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple

from ... import files
from ...errors import LaunchError
from .. import launcher, meeting, network
from . import signed_entries

_KEY = "torchmpi rendezvous"
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


def own_place(listener: socket.socket) -> Place:
    """Return the addresses of this process, which listens on a Unix socket."""
    key, pids = network.namespace(), ""
    with contextlib.suppress(OSError):
        pids = os.readlink("/proc/self/ns/pid")
    return Place(
        socket.gethostname(),
        key,
        f"{key} {pids}",
        listener.getsockname()[1:].decode(),
        network.own_interfaces(),
        sorted(os.sched_getaffinity(0)),
    )


class Mesh:
    """The rendezvous of one rank; `run` connects it. Collective."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout_seconds: float, *, key: bytes, is_one_host: bool
    ) -> None:
        """Prepare the rendezvous, with the key of the job; `is_one_host` if the launcher has started it on one host."""
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout_seconds
        self._key, self._is_one_host = key, is_one_host
        self._limit = time.monotonic() + timeout_seconds
        self._keys: list[str] = []
        self.places: list[Place] = []
        """The places of all ranks."""

    def run(self) -> dict[int, socket.socket]:
        """Return a connection to each other rank."""
        with ExitStack() as opened:
            listeners = [opened.enter_context(meeting.listen_nearby(self._size))]
            own = own_place(listeners[0])
            key = own.network
            entries = self._allgather("place", [own, secrets.token_hex(meeting.NONCE_BYTES)])
            try:
                self.places, nonce = [Place(*place) for place, _ in entries], bytes.fromhex(entries[0][1])
                addresses: dict[int, meeting.Address] = {
                    rank: "\0" + place.unix_name for rank, place in enumerate(self.places)
                }
                networks = {place.network for place in self.places}
            except (IndexError, KeyError, TypeError, ValueError) as error:
                raise LaunchError(self._is_foreign(error)) from None
            if len(networks) > 1:
                if self._is_one_host and not self._key:
                    # Only the kernel tells who is at the other end, so no connection may leave the host.
                    raise LaunchError(self._is_foreign("ranks of other hosts, but the launcher knows this one only"))
                address = network.address_of([(place.network, place.interfaces) for place in self.places], self._rank)
                listeners.append(opened.enter_context(network.listen(address, self._size)))
                for rank, offer in enumerate(self._allgather("address", listeners[1].getsockname()[:2])):
                    if self.places[rank].network != key:
                        addresses[rank] = (str(offer[0]), int(offer[1]))
            met = meeting.meet(
                self._rank,
                hmac.digest(self._key, nonce, "sha256"),
                listeners,
                {peer: addresses[peer] for peer in range(self._rank)},
                range(self._rank + 1, self._size),
                timeout_seconds=self._time_left(),
            )
            if met.unreachable or met.absent:
                met.close()
                raise LaunchError(self._is_incomplete(met, addresses))
        for sock in met.sockets.values():
            set_options(sock, max(1.0, min(self._timeout / 2, _MAX_SILENCE_SECONDS)))
        return met.sockets

    def _is_incomplete(self, met: meeting.Met, addresses: Mapping[int, meeting.Address]) -> str:
        for peer, error in met.unreachable.items():
            address = addresses[peer]
            where = "on this host" if isinstance(address, str) else f"at {address[0]} port {address[1]}"
            return (
                f"rank {self._rank}: rank {peer} on host {self.places[peer].host} cannot be reached {where}: {error}. "
                f"If it still runs: {_REMEDY[0].lower()}{_REMEDY[1:]}."
            )
        return (
            f"rank {self._rank}: rank {', '.join(map(str, sorted(met.absent)))} has not connected in time. "
            f"{_REMEDY}, or increase timeout=."
        )

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
        self._store.set(own, signed_entries.signed(self._key, self._label(name, self._rank), value))
        if self._rank == 0:
            entries = [self._get(f"{_KEY} {name} {rank}", name) for rank in range(self._size)]
            self._store.set(table, json.dumps(entries))
        entries = self._get(table, name)
        if not isinstance(entries, list) or len(entries) != self._size:
            raise LaunchError(self._is_foreign(f"not the entries of {self._size} ranks"))
        return [self._checked(name, rank, entry) for rank, entry in enumerate(entries)]

    def _label(self, name: str, rank: int) -> str:
        return f"{name} {rank} {self._size}"

    def _checked(self, name: str, rank: int, entry: Any) -> Any:
        """Return the value of an entry that has the signature of its rank."""
        try:
            return signed_entries.value_of(self._key, self._label(name, rank), entry)
        except signed_entries.NotSignedError:
            raise LaunchError(
                f"rank {self._rank}: the entry of rank {rank} in the store is not signed with the key of this job. "
                f"Give all ranks the same {launcher.JOB_KEY_VARIABLE}. If they have it, somebody else writes to the "
                "store: see docs/security.md."
            ) from None
        except (TypeError, ValueError) as error:
            raise LaunchError(self._is_foreign(error)) from None

    def _get(self, key: str, name: str) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=self._time_left()))
            return files.parse_json(self._store.get(key))
        except ValueError as error:
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


def set_options(sock: socket.socket, silence_seconds: float = _MAX_SILENCE_SECONDS) -> None:
    """Send short messages immediately, and end the connection when the other host does not answer for this time."""
    if sock.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    network.limit_silence(sock, silence_seconds)
