"""Ranks as threads of one process: each has its own end of real sockets."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from torchmpi.distributed.sockets.intracomm import Intracomm
from torchmpi.distributed.sockets.socket_endpoint import Endpoint

LIMIT_SECONDS = 60


def mesh(size: int, *, tcp: bool = False) -> list[dict[int, socket.socket]]:
    """A connection between each two ranks."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for one, other in itertools.combinations(range(size), 2):
        ends[one][other], ends[other][one] = _tcp_pair() if tcp else socket.socketpair()
    return ends


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@contextmanager
def world(size: int, *, tcp: bool = False, eager_seconds: float = 0.0):
    """The world communicator of each of `size` ranks."""
    endpoints = [
        Endpoint(rank, size, sockets, eager_seconds=eager_seconds) for rank, sockets in enumerate(mesh(size, tcp=tcp))
    ]
    try:
        yield [Intracomm(endpoint, range(size), 0, ["host"] * size) for endpoint in endpoints]
    finally:
        for endpoint in endpoints:
            endpoint.close()


def on_all(comms: list[Intracomm], action: Callable[[Intracomm], Any]) -> list[Any]:
    """What the action gives on each rank, all running at once; an exception is given like a result."""
    results: list[Any] = [TimeoutError("it does not end")] * len(comms)

    def run(place: int) -> None:
        try:
            results[place] = action(comms[place])
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(comms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    return results
