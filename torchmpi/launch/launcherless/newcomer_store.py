"""How ranks without MPI find a new one in place of a lost one, which the launcher has started: through its store."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C import _distributed_c10d as c10d

from ... import files
from ...errors import LaunchError
from ...log import logger
from .. import launcher, meeting, respawning, tcp_store
from . import signed_entries
from .mesh import Place, set_options

_TIMEOUT = timedelta(minutes=5)
LOOK_SECONDS = 0.1


class Offer(NamedTuple):
    """A new rank that waits to join."""

    rank: int
    """A number that no other rank has had."""
    place: list[Any]
    """The items of its `Place`."""
    nonce: str


class NewcomerStore:
    """The entries of newcomers in the store of the launcher, which have the signature of the job."""

    def __init__(self, store: c10d.Store, key: bytes) -> None:
        """Use the store of the launcher, with the key of the job."""
        self._store, self._key = c10d.PrefixStore("torchmpi respawn", store), key

    @classmethod
    def of_launcher(cls) -> NewcomerStore:
        """Connect to the store of the launcher that has started this rank."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        size = int(os.environ["WORLD_SIZE"])
        return cls(tcp_store.open_tcp_store(address, port, size, False, _TIMEOUT), launcher.job_key())

    def write(self, name: str, value: Any) -> None:
        self._store.set(name, signed_entries.signed(self._key, name, value))

    def read(self, name: str) -> Any:
        """Return a value; None if it has not been written.

        Raises:
            LaunchError: Somebody else has written it.
        """
        if not self._store.check([name]):
            return None
        try:
            return signed_entries.value_of(self._key, name, files.parse_json(self._store.get(name)))
        except (TypeError, ValueError) as error:
            raise LaunchError(
                f"the entry {name!r} of the store is not of this job: {error}. Somebody else writes to it: see "
                "docs/security.md."
            ) from None

    def has_joined(self, number: int) -> bool:
        """Return whether a new rank has joined the others."""
        try:
            return self.read(joined(number)) is True
        except LaunchError:
            return False

    def first_offer(self, first: int, known: Collection[int]) -> Offer | None:
        """Return the first new rank that waits; their numbers begin with `first`, and `known` ones have been seen."""
        for rank in range(first, first + respawning.limit()):
            if rank not in known and (offer := self.read(f"newcomer {rank}")) is not None:
                return Offer(*offer)
        return None


def order(number: int) -> str:
    """Return the name of the entry with what a new rank needs to join the others."""
    return f"join {number}"


def lost(number: int) -> str:
    """Return the name of the entry with the ranks that have been lost while a new one joins."""
    return f"lost {number}"


def joined(number: int) -> str:
    """Return the name of the entry of a new rank that has joined the others."""
    return f"joined {number}"


def proof(nonce: str) -> bytes:
    """Return what only ranks of the job know, for the connections to one new rank."""
    return hmac.digest(launcher.job_key(), bytes.fromhex(nonce), "sha256")


def reach(own_rank: int, offer: Offer, timeout_seconds: float) -> socket.socket:
    """Return a connection to a new rank, which accepts those of all ranks.

    Raises:
        OSError: It cannot be reached.
    """
    target = {offer.rank: "\0" + Place(*offer.place).unix_name}
    met = meeting.meet(own_rank, proof(offer.nonce), [], target, (), timeout_seconds=timeout_seconds)
    if met.unreachable:
        raise met.unreachable[offer.rank]
    sock = met.sockets[offer.rank]
    set_options(sock)
    return sock


class Watch:
    """Looks for new ranks that wait, in a thread."""

    def __init__(self, find: Callable[[NewcomerStore], object]) -> None:
        self.store, self._find, self._closed = NewcomerStore.of_launcher(), find, threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchmpi new ranks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        problem = ""
        with contextlib.suppress(RuntimeError):  # of the store: the launcher has ended
            while not self._closed.wait(LOOK_SECONDS):
                try:
                    self._find(self.store)
                except LaunchError as error:
                    if problem != (problem := str(error)):
                        logger.warning(f"no new rank can join: {problem}")

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
