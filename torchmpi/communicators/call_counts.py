"""Counts of calls by communicator and collective, also of communicators that have been freed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from ..shared_memory.memory_layout import CounterFields, LogFields
from .call_log import CallLog

_MOST_NAMES = 256
OTHERS = "others"
"""The name of further freed communicators, of a program that makes and frees ever new ones."""


class CallCount(NamedTuple):
    """The ended calls of one collective on one communicator: counters of memory_layout."""

    calls: int
    bytes: int
    ticks: int
    nanoseconds: int
    known_nanoseconds: int
    waited_nanoseconds: int
    stalls: int


class MessageCount(NamedTuple):
    """The messages of one kind on one communicator that have ended; nanoseconds."""

    calls: int
    bytes: int
    time: int
    known: int
    """The part of the time in which the waits are known."""
    waited: int
    stalls: int
    ticks: int = 0
    """The time of the messages of the fast path; the other times do not include it."""
    known_ticks: int = 0
    """The part of these ticks in which the waits are known: that of receives."""


Key = tuple[str, bool, str]
"""Name of the communicator, whether its calls are steps of hierarchical calls, collective."""
Totals = tuple[int, int, int, int]
"""Calls, ticks, nanoseconds, nanoseconds waited."""
MessageKey = tuple[str, str]
"""Name of the communicator; send, recv or sendreceive."""


class CallCounts:
    """The counts of all groups of a runtime.

    >>> counts, log = CallCounts(), CallLog("world", 0, 1)
    >>> counts.add("world", False, log)
    >>> log.enter(0, ()); _ = log.leave(4)
    >>> [(key, count.calls, count.bytes) for key, count in counts.read().items()]
    [(('world', False, 'barrier'), 1, 4)]
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[CallLog, tuple[str, bool]] = {}
        self._freed: dict[Key, CallCount] = {}
        self._freed_names: set[str] = set()
        self._messages: dict[MessageKey, MessageCount] = {}
        self._exchanges: dict[CallLog, tuple[str, bool]] = {}
        self._requests: dict[object, tuple[str, Callable[[], Mapping[str, MessageCount]]]] = {}
        self._totals: dict[CallLog, tuple[int, Totals]] = {}
        """The totals of each group, with the number of the last call that they include."""
        self._freed_totals: Totals = (0, 0, 0, 0)

    def add(self, name: str, is_step: bool, call_log: CallLog) -> None:
        with self._lock:
            self._groups[call_log] = name, is_step

    def free(self, call_log: CallLog) -> None:
        """Keep the counts of a group, but not the group."""
        with self._lock:
            name, is_step = self._groups.pop(call_log)
            self._totals.pop(call_log, None)
            known = self._freed_names
            if name not in known and len(known) >= _MOST_NAMES:
                name = OTHERS
            for key, each in _counts_of(name, is_step, call_log):
                known.add(name)
                _add_to(self._freed, key, each)
                if not is_step:
                    added = each.calls, each.ticks, each.nanoseconds + each.known_nanoseconds, each.waited_nanoseconds
                    calls, ticks, nanoseconds, waited = map(sum, zip(self._freed_totals, added, strict=True))
                    self._freed_totals = calls, ticks, nanoseconds, waited

    def add_message(self, name: str, kind: str, num_bytes: int, nanoseconds: int, waited: int | None = None) -> None:
        """Count a message that has ended; `waited`: how long this rank has waited for the other one, if that is known.

        >>> counts = CallCounts()
        >>> counts.add_message("world", "recv", 4, 100, 90), counts.add_message("world", "recv", 8, 50)
        (None, None)
        >>> counts.read_messages()  # doctest: +NORMALIZE_WHITESPACE
        {('world', 'recv'): MessageCount(calls=2, bytes=12, time=150, known=100, waited=90, stalls=0, ticks=0,
        known_ticks=0)}
        """
        known = 0 if waited is None else nanoseconds
        self._add(name, kind, MessageCount(1, num_bytes, nanoseconds, known, waited or 0, 0))

    def add_message_stall(self, name: str, kind: str) -> None:
        """Count a message that waits too long."""
        self._add(name, kind, MessageCount(0, 0, 0, 0, 0, 1))

    def _add(self, name: str, kind: str, added: MessageCount) -> None:
        with self._lock:
            key = name, kind
            if key not in self._messages and len(self._messages) >= _MOST_NAMES:
                key = OTHERS, kind
            self._messages[key] = sum_of_messages(self._messages.get(key), added)

    def add_exchanges(self, name: str, call_log: CallLog, *, receives: bool) -> None:
        """Count the messages that the fast path makes; `receives`: whether it knows how long they wait."""
        with self._lock:
            self._exchanges[call_log] = name, receives

    def free_exchanges(self, call_log: CallLog) -> None:
        """Keep the counts of these messages, but not their call log."""
        with self._lock:
            name, receives = self._exchanges.pop(call_log)
        for kind, count in _counts_of_exchanges(call_log, receives=receives):
            self._add(name, kind, count)

    def add_requests(self, owner: object, name: str, read: Callable[[], Mapping[str, MessageCount]]) -> None:
        """Count the requests to parameter servers, by kind, as `read` returns them."""
        with self._lock:
            self._requests[owner] = name, read

    def keep_requests(self, owner: object, remove: Callable[[], object] | None = None) -> None:
        """Keep the counts of what `remove` takes away from the requests of an owner, or of all of them."""
        with self._lock:
            name, read = self._requests[owner]
            before = read()
            if remove is None:
                del self._requests[owner]
            else:
                remove()
            after = {} if remove is None else read()
        for kind, count in before.items():
            kept = after.get(kind)
            self._add(
                name, kind, count if kept is None else MessageCount(*(a - b for a, b in zip(count, kept, strict=True)))
            )

    def totals(self) -> tuple[int, int, int, int]:
        """Return the number of calls that have ended, and their ticks, nanoseconds, and nanoseconds waited.

        Steps are left out, and messages are included but for the number. Groups without calls since the last time cost
        next to nothing, since the watchdog calls this twice a second.
        """
        with self._lock:
            parts = [self._freed_totals]
            for log in (log for log, (_, is_step) in self._groups.items() if not is_step):
                known = self._totals.get(log)
                if known is None or known[0] != log.seq:
                    last = -1 if log.current is not None else log.seq  # it counts when it ends
                    self._totals[log] = known = last, _total(log)
                parts.append(known[1])
            parts += [(0, *_total(log)[1:]) for log in self._exchanges]
            parts += [(0, each.ticks, each.time, each.waited) for each in self._messages.values()]
        calls, ticks, nanoseconds, waited = map(sum, zip(*parts, strict=True))
        return calls, ticks, nanoseconds, waited

    def read_messages(self) -> dict[MessageKey, MessageCount]:
        with self._lock:
            found = dict(self._messages)
            for call_log, (name, receives) in self._exchanges.items():
                for kind, count in _counts_of_exchanges(call_log, receives=receives):
                    found[name, kind] = sum_of_messages(found.get((name, kind)), count)
            for name, read in self._requests.values():
                for kind, count in read().items():
                    found[name, kind] = sum_of_messages(found.get((name, kind)), count)
            return found

    def read(self) -> dict[Key, CallCount]:
        """Return the counts of calls that have ended; those of groups with the same name are added."""
        with self._lock:
            total = dict(self._freed)
            for log, names in self._groups.items():
                for key, each in _counts_of(*names, log):
                    _add_to(total, key, each)
            return total


def _total(call_log: CallLog) -> Totals:
    """Return the counters of a group over all collectives: calls, ticks, nanoseconds, nanoseconds waited."""
    counters = np.frombuffer(call_log.log_fields, np.int64)[LogFields.counters :].reshape(-1, CounterFields.FIELDS)
    total = counters.sum(axis=0).tolist()
    nanoseconds = total[CounterFields.ns] + total[CounterFields.known_ns]
    return total[CounterFields.calls], total[CounterFields.ticks], nanoseconds, total[CounterFields.waited_ns]


def _counts_of(name: str, is_step: bool, call_log: CallLog) -> list[tuple[Key, CallCount]]:
    return [((name, is_step, collective), CallCount(*numbers)) for collective, numbers in call_log.counters()]


def _counts_of_exchanges(call_log: CallLog, *, receives: bool) -> list[tuple[str, MessageCount]]:
    counts = ((kind, CallCount(*numbers)) for kind, numbers in call_log.counters())
    return [
        (
            kind,
            MessageCount(
                each.calls, each.bytes, 0, 0, each.waited_nanoseconds, each.stalls, each.ticks, each.ticks * receives
            ),
        )
        for kind, each in counts
    ]


def sum_of_messages(known: MessageCount | None, added: MessageCount) -> MessageCount:
    """Return the sum of two counts, of which the first may be missing."""
    return added if known is None else MessageCount(*(a + b for a, b in zip(known, added, strict=True)))


def _add_to(total: dict[Key, CallCount], key: Key, count: CallCount) -> None:
    known = total.get(key)
    total[key] = count if known is None else CallCount(*map(sum, zip(known, count, strict=True)))
