"""Status requests between the watchdogs of ranks on different hosts.

Ranks of one host read each other's status from shared memory. Between hosts the watchdog threads exchange
messages on a separate communicator, while the main threads may be inside MPI. Nothing is sent unless
a call waits too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_REQUEST_TAG, _REPLY_TAG = 1, 2
_POLL_SECONDS = 0.02


class RankStatus(NamedTuple):
    """The status of a rank in one group."""

    group: int
    entered: int
    """Number of the last call that the rank has entered."""
    is_waiting: bool
    """Whether the rank is still inside that call."""
    location: str
    """The line at which the main thread of the rank is."""


class RemoteStatus:
    """Requests and replies over a communicator. Used by one thread only, the watchdog."""

    def __init__(self, MPI: Any, comm: Any, own_status: Callable[[int], RankStatus]) -> None:
        self._MPI, self._comm, self._own_status = MPI, comm, own_status

    def reply(self) -> None:
        """Reply to all requests that have arrived."""
        status = self._MPI.Status()
        while self._comm.iprobe(self._MPI.ANY_SOURCE, _REQUEST_TAG, status):
            source = status.Get_source()
            key = self._comm.recv(source=source, tag=_REQUEST_TAG)
            self._comm.send(tuple(self._own_status(key)), source, _REPLY_TAG)

    def request(self, ranks: Iterable[int], key: int, *, timeout_seconds: float) -> dict[int, RankStatus]:
        """Return the status of some world ranks in a group; ranks that do not reply in time are omitted."""
        outstanding = set(ranks)
        requests = [self._comm.isend(key, rank, _REQUEST_TAG) for rank in outstanding]
        replies: dict[int, RankStatus] = {}
        status = self._MPI.Status()
        limit = time.monotonic() + timeout_seconds
        while outstanding and time.monotonic() < limit:
            self.reply()  # the other rank may be waiting for a reply of this one
            if not self._comm.iprobe(self._MPI.ANY_SOURCE, _REPLY_TAG, status):
                time.sleep(_POLL_SECONDS)
                continue
            rank = status.Get_source()
            reply = RankStatus(*self._comm.recv(source=rank, tag=_REPLY_TAG))
            if reply.group == key:  # otherwise it is a late reply to an earlier request
                replies[rank] = reply
                outstanding.discard(rank)
        for request in requests:
            request.test()  # such small messages have been sent by now
        return replies
