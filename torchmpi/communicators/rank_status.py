"""The status of a rank, in the one form in which all carriers bring it and all readers take it.

Ranks of one host tell it on the status board (:mod:`.status_board`), ranks of several hosts in messages of the
heartbeat (:mod:`torchmpi.supervision.heartbeat`), and the commands compute it from flight records.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

_POLL_SECONDS = 0.02
_MOST_CHARACTERS = 200


class LastCall(NamedTuple):
    """The last call of a rank on a group."""

    seq: int = 0
    """Its number; 0 if there was none."""
    is_inside: bool = False
    """Whether the call had not ended."""
    call: str = ""
    """The call, as text; only a flight record has this and what follows."""
    seconds: float = 0.0
    """Time between begin (of a call that had not ended) or end of the call and the last event of all ranks."""
    failed_after: float | None = None
    """The seconds after which the call has ended with an error; None if it has not."""


NO_CALLS: Mapping[int, LastCall] = MappingProxyType({})


class RankStatus(NamedTuple):
    """What a rank is doing.

    >>> status = RankStatus("barrier()", 2.0, "at train.py:7", calls={5: LastCall(3, True)}, blocked=(5, 3))
    >>> RankStatus.unpacked(json.loads(json.dumps(status.packed()))) == status, str(status)
    (True, 'barrier(), for 2 s, at train.py:7')
    """

    doing: str = ""
    """The call of the program, that there is none, or the error with which the rank ends; '' if that is not known."""
    seconds: float = 0.0
    """How long the call has waited."""
    line: str = ""
    """The line of the program at which the main thread is."""
    problem: str = ""
    """Why the rank has no status."""
    calls: Mapping[int, LastCall] = NO_CALLS
    """The last call on each group, by the key of the group. A running rank leaves out groups on which no rank of its
    host is ahead of it."""
    blocked: tuple[int, int] = (0, 0)
    """The group and the number of the call in which the main thread waits, if nothing else can continue on the rank."""
    recent: tuple[str, ...] = ()
    """The last calls on the group on whose board the status is, newest first."""

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        duration = f", for {self.seconds:.0f} s" if self.seconds >= 1 else ""
        return f"{self.doing}{duration}, {self.line}" if self.line else f"{self.doing}{duration}"

    def packed(self) -> list[Any]:
        """Return what a running rank tells of itself, in types of JSON."""
        calls = {str(key): [last.seq, last.is_inside] for key, last in self.calls.items()}
        return [self.doing, self.seconds, self.line, self.problem, calls, self.blocked, self.recent]

    @classmethod
    def unpacked(cls, packed: list[Any]) -> RankStatus:
        """Return the status of which `packed` has returned this."""
        doing, seconds, line, problem, calls, blocked, recent = packed
        last = {int(key): LastCall(*numbers) for key, numbers in calls.items()}
        return cls(doing, seconds, line, problem, last, (blocked[0], blocked[1]), tuple(recent))

    def packed_text(self, most_bytes: int) -> bytes:
        """Return `packed` as JSON of at most so many bytes, without the calls and ends of texts that have no room."""
        few = self._replace(recent=self.recent[:1])
        short = RankStatus(self.doing[:_MOST_CHARACTERS], self.seconds, self.line[:_MOST_CHARACTERS])
        texts = (
            json.dumps(each.packed(), ensure_ascii=False).encode(errors="replace")
            for each in (self, few, few._replace(calls=NO_CALLS), short)
        )
        return next((text for text in texts if len(text) <= most_bytes), b"")


NO_ANSWER = RankStatus(problem="no answer: it is stopped, has ended, or is busy outside Python")


class Question(Protocol):
    """A question to ranks for their status, which has been sent. Each carrier has a class for its questions."""

    def is_answered(self) -> bool:
        """Return whether all ranks have answered."""

    def answers(self) -> dict[int, RankStatus]:
        """Return the answers, and take no later ones."""


def await_answers(
    question: Question, patience_seconds: float, meanwhile: Callable[[], object] = lambda: None
) -> dict[int, RankStatus]:
    """Return the status of the ranks that answer a question in time.

    `meanwhile` is called while waiting: a watchdog passes the function that answers the questions of other ranks, since
    the other rank may be waiting for this one.
    """
    limit = time.monotonic() + patience_seconds
    while not question.is_answered() and time.monotonic() < limit:
        meanwhile()
        time.sleep(_POLL_SECONDS)
    return question.answers()
