"""Measurements of the clock of each host against that of rank 0, by messages to and fro."""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np

from .. import timeline
from ..communicators.conditions import on_all
from ..communicators.group import Group
from ..launch import meeting, network
from ..timeline import events
from ..timeline.clocks import ClockSample, sample
from .host_ring import leaders_of

_ROUNDS, _ROUNDS_BETWEEN = 32, 8
_SECONDS_BETWEEN, _MOST_HOSTS = 0.25, 16
"""Seconds between two samples of a host, and the number of hosts up to which rank 0 answers so often."""
_CONNECT_SECONDS = 2.0
_TAG = 3
_TIME = struct.Struct("q")
_TIMES = struct.Struct("2q")


def provide_timeline(world: Group, description: dict[str, Any]) -> None:
    """Let timelines be recorded by the ranks of the world."""
    hosts = world.context.hosts
    open_here: Callable[[], HostClock] = partial(HostClock, world)
    measure_in_call = measure_here = partial(measure, world)
    description = {**description, "leader": leaders_of(hosts)[hosts[world.rank]]}
    if len(set(hosts)) > 1:  # otherwise they do not communicate
        open_here = partial(world.call_action, "barrier", open_here)
        measure_here = partial(world.call_action, "barrier", measure_here)
    agree = partial(_agree, world)
    timeline.set_job(timeline.JobInfo(description, open_here, measure_here, measure_in_call, agree))


def _agree(world: Group, condition: bool) -> bool:
    return world.call_action("barrier", partial(on_all, world.comm, condition))


def measure(world: Group) -> list[ClockSample]:
    """Return the sample of this host; the first rank of each host exchanges messages with rank 0.

    Collective if there are several hosts; the caller then runs this as a call of the world.
    """
    hosts = world.context.hosts
    if len(set(hosts)) == 1:
        return [ClockSample(events.now(), 0, 0)]
    own: ClockSample | None = ClockSample(events.now(), 0, 0) if world.rank == 0 else None
    for leader in leaders_of(hosts).values():
        if leader != 0 and world.rank in (0, leader):
            own = _exchange(world, leader) or own
    samples: list[ClockSample | None] = world.comm.allgather(own)
    found = samples[hosts.index(hosts[world.rank])]
    assert found is not None
    return [ClockSample(*found)]


def _exchange(world: Group, leader: int) -> ClockSample | None:
    """Exchange messages between rank 0 and the first rank of another host, which returns the sample."""
    MPI, comm = world.context.MPI, world.comm
    buffer = np.zeros(1, np.int64)
    rounds = []
    for _ in range(_ROUNDS):
        if world.rank == leader:
            sent = events.now()
            comm.Send((buffer, MPI.INT64_T), 0, _TAG)
            comm.Recv((buffer, MPI.INT64_T), 0, _TAG)
            rounds.append((sent, int(buffer[0]), events.now()))
        else:
            comm.Recv((buffer, MPI.INT64_T), leader, _TAG)
            buffer[0] = events.now()
            comm.Send((buffer, MPI.INT64_T), leader, _TAG)
    return sample(rounds) if rounds else None


class HostClock:
    """The clock of this host while a timeline is recorded.

    It is measured at once, and then by a thread of the first rank of each host, which asks a thread of rank 0. They
    have connections of their own, as a thread that waits in MPI occupies a core. Where the hosts cannot connect, the
    error of the clocks grows with the length of the recording.
    """

    def __init__(self, world: Group) -> None:
        """Measure, and connect. Collective if there are several hosts."""
        self.samples = measure(world)
        num_hosts = len(set(world.context.hosts))
        self._is_reference = world.rank == 0
        self._sockets = [] if num_hosts == 1 else _connect(world)
        self._seconds = _SECONDS_BETWEEN * max(1.0, num_hosts / _MOST_HOSTS)
        self._stopped, self._thread = threading.Event(), threading.Thread()

    def follow(self, take: Callable[[ClockSample], None]) -> None:
        """Pass samples to a function from now on."""
        if self._sockets:
            run = self._answer if self._is_reference else partial(self._ask, take)
            self._thread = threading.Thread(target=run, name="torchmpi clock", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread and the connections."""
        self._stopped.set()
        for sock in self._sockets:
            with suppress(OSError):  # the other end has ended
                sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join()
        for sock in self._sockets:
            sock.close()

    def _ask(self, take: Callable[[ClockSample], None]) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                take(sample([self._exchange_with(self._sockets[0]) for _ in range(_ROUNDS_BETWEEN)]))
            except TimeoutError:  # rank 0 is stopped, for example
                continue
            except OSError:  # rank 0 records no more
                return

    def _exchange_with(self, sock: socket.socket) -> tuple[int, int, int]:
        sent = events.now()
        sock.sendall(_TIME.pack(sent))
        answered = None
        while answered != sent:  # after a timeout, the answer to an earlier message comes first
            reply = sock.recv(_TIMES.size, socket.MSG_WAITALL)
            if len(reply) < _TIMES.size:
                raise ConnectionResetError
            answered, reference = _TIMES.unpack(reply)
        return sent, reference, events.now()

    def _answer(self) -> None:
        with suppress(OSError), selectors.DefaultSelector() as selector:  # without descriptors, no request is answered
            for sock in self._sockets:
                selector.register(sock, selectors.EVENT_READ, sock)
            while selector.get_map():
                for key, _ in selector.select():
                    if not _answer_one(key.data):
                        selector.unregister(key.data)


def _answer_one(sock: socket.socket) -> bool:
    """Answer a message; return False if the connection has ended."""
    with suppress(OSError):
        sent = sock.recv(_TIME.size, socket.MSG_WAITALL)
        if len(sent) == _TIME.size:
            sock.sendall(sent + _TIME.pack(events.now()))
            return True
    return False


def _connect(world: Group) -> list[socket.socket]:
    """Connect rank 0 with the first rank of each other host, and return the connections of this rank. Collective."""
    rank, awaited = world.rank, set(leaders_of(world.context.hosts).values()) - {0}
    places = world.comm.allgather((network.namespace(), network.own_interfaces()))
    listeners: list[socket.socket] = []
    address, key = None, secrets.token_bytes(meeting.NONCE_BYTES)
    with ExitStack() as opened:
        if rank == 0:
            with suppress(OSError):
                where = network.address_of(places, 0)
                listeners = [opened.enter_context(network.listen(where, len(awaited)))]
                address = listeners[0].getsockname()[:2]
        address, key = world.comm.allgather((address, key))[0]
        is_leader = address is not None and rank in awaited
        met = meeting.meet(
            rank,
            key,
            listeners,
            {0: address} if is_leader else {},
            awaited if listeners else (),
            timeout_seconds=_CONNECT_SECONDS,
        )
    for sock in met.sockets.values():
        sock.settimeout(1.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return list(met.sockets.values())
