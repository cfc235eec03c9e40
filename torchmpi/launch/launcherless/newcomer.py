"""A new rank in place of a lost one, without MPI: the launcher has started it, and the others let it join."""

from __future__ import annotations

import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable

from .. import meeting, respawning
from ..survivors import Survivors
from . import newcomer_store
from .endpoint import Endpoint
from .mesh import Place, own_place, set_options
from .stand_in import StandIn

_MOST_RANKS = 1 << 10
_LOST_LOOK_SECONDS = 1.0


class Newcomer(StandIn):
    """Takes the place of ``mpi4py.MPI`` in a rank that joins others; connected after :meth:`take_place` only."""

    def __init__(self) -> None:
        self._number = int(os.environ[respawning.NEWCOMER_VARIABLE])
        self._is_connected = False

    def Is_finalized(self) -> bool:
        return self._is_connected and super().Is_finalized()

    def loss_behind_error(self) -> str:
        return super().loss_behind_error() if self._is_connected else ""

    @property
    def is_ending(self) -> bool:  # type: ignore[override]
        return self._is_connected and super().is_ending

    def take_place(self, prepare: Callable[[], object]) -> None:
        if self._is_connected:
            return
        prepare()
        number, store = self._number, newcomer_store.NewcomerStore.of_launcher()
        nonce = secrets.token_hex(meeting.NONCE_BYTES)
        with meeting.listen_nearby(_MOST_RANKS) as listener:
            own = own_place(listener)
            store.write(f"newcomer {number}", newcomer_store.Offer(number, list(own), nonce))
            # Each rank writes it before it connects, and waits then. The launcher ends this process if none does.
            order, is_called = None, False
            while order is None:
                time.sleep(newcomer_store.LOOK_SECONDS if is_called else 0.0)  # by a stranger
                is_called = bool(select.select([listener], [], [], newcomer_store.LOOK_SECONDS)[0])
                order = store.read(newcomer_store.order(number))
            key, limit = newcomer_store.proof(nonce), time.monotonic() + order["timeout_seconds"]
            sockets: dict[int, socket.socket] = {}
            members = absent = {*order["members"]}
            while absent and time.monotonic() < limit:
                met = meeting.meet(number, key, [listener], {}, absent, timeout_seconds=_LOST_LOOK_SECONDS)
                sockets |= met.sockets
                absent = met.absent - {*(store.read(newcomer_store.lost(number)) or ())}
        places = {rank: Place(*each) for rank, each in order["places"]} | {number: own}
        hosts = [places[rank].host if rank in places else "" for rank in range(number + 1)]
        for sock in sockets.values():
            set_options(sock)
        networks = {rank: place.network for rank, place in places.items()}
        survivors = Survivors.joining(number, networks, order["members"], order["view"].encode())
        for rank in members - sockets.keys():
            survivors.note(rank, f"rank {rank} has not connected to a new rank")
        # With the survivors, since the others send what they know at once.
        endpoint = Endpoint(number, hosts, sockets, order["eager_seconds"], survivors)
        self._is_connected = self.is_newcomer = True
        super().__init__(endpoint, places)
        self.num_wanted, self.joining_seconds = order["num_wanted"], order["timeout_seconds"]
        self.agree(self.joining_seconds)
        if self.COMM_WORLD.size == 1:  # the others are gone, and with them the state
            sys.exit(0)
        store.write(newcomer_store.joined(number), True)
        self.note_numbers()
