"""Questions between the watchdogs of different hosts: have you arrived at call 42 of world, and if not, where are you?

Ranks of one host read that from their shared board. Between hosts it takes messages, on a communicator of their own,
sent and answered by the watchdog threads while the main threads may be inside MPI. Nothing is sent unless somebody
waits too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_QUESTION, _ANSWER = 1, 2
_POLL_SECONDS = 0.02


class Answer(NamedTuple):
    """What a rank says of itself, about one group."""

    group: int
    entered: int
    """Number of the last call it has entered there."""
    waits: bool
    """Whether it is still inside that call."""
    whereabouts: str


class Inquiry:
    """Asks and answers. Used by one thread only, the watchdog."""

    def __init__(self, MPI: Any, comm: Any, describe: Callable[[int], Answer]) -> None:
        self._MPI, self._comm, self._describe = MPI, comm, describe

    def answer(self) -> None:
        """Reply to every question that has come in."""
        status = self._MPI.Status()
        while self._comm.iprobe(self._MPI.ANY_SOURCE, _QUESTION, status):
            asker = status.Get_source()
            key = self._comm.recv(source=asker, tag=_QUESTION)
            self._comm.send(tuple(self._describe(key)), asker, _ANSWER)

    def ask(self, ranks: Iterable[int], key: int, *, patience_seconds: float) -> dict[int, Answer]:
        """The answers of some world ranks about a group; who does not reply in time is left out."""
        outstanding = set(ranks)
        requests = [self._comm.isend(key, rank, _QUESTION) for rank in outstanding]
        answers: dict[int, Answer] = {}
        status = self._MPI.Status()
        limit = time.monotonic() + patience_seconds
        while outstanding and time.monotonic() < limit:
            self.answer()  # the other may be asking us at this very moment
            if not self._comm.iprobe(self._MPI.ANY_SOURCE, _ANSWER, status):
                time.sleep(_POLL_SECONDS)
                continue
            rank = status.Get_source()
            reply = Answer(*self._comm.recv(source=rank, tag=_ANSWER))
            if reply.group == key:  # a late reply to an earlier question may be about another group
                answers[rank] = reply
                outstanding.discard(rank)
        for request in requests:
            request.test()  # small messages: on their way long since
        return answers
