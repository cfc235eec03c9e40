"""Which message goes to which receive: in the order of MPI, whether the one or the other comes first.

Nothing here knows of sockets. Who reads from one calls :meth:`Inbox.arrive` with a message that is there as a whole,
or :meth:`Inbox.begin` with the head of a long one, which says where to write what follows.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .requests import ANY, Receive, Request

Complete = Callable[[Request, "str | None"], None]


class Arrival:
    """A message for which no receive had been posted when it came."""

    __slots__ = ("is_whole", "memory", "num_bytes", "number", "source", "tag", "taker")

    def __init__(self, source: int, tag: int, memory: Any, number: int) -> None:
        self.source, self.tag, self.memory, self.number = source, tag, memory, number
        self.num_bytes = len(memory)
        self.is_whole = False
        self.taker: Receive | None = None
        """The receive posted meanwhile, if it is not whole yet."""


class Mailbox:
    """Receives without a message and messages without a receive, in one context."""

    def __init__(self) -> None:
        self.posted: list[Receive] = []
        self._arrived: dict[tuple[int, int], deque[Arrival]] = {}

    def take_posted(self, source: int, tag: int) -> Receive | None:
        """The first posted receive that a message from there matches; it is posted no more."""
        for place, receive in enumerate(self.posted):
            if receive.source in (source, ANY) and receive.tag in (tag, ANY):
                del self.posted[place]
                return receive
        return None

    def keep(self, arrival: Arrival) -> None:
        """A message that waits for its receive."""
        self._arrived.setdefault((arrival.source, arrival.tag), deque()).append(arrival)

    def find(self, source: int, tag: int) -> Arrival | None:
        """The first waiting message that matches."""
        if source != ANY and tag != ANY:
            queue = self._arrived.get((source, tag))
            return queue[0] if queue else None
        heads = [queue[0] for key, queue in self._arrived.items() if source in (key[0], ANY) and tag in (key[1], ANY)]
        return min(heads, key=lambda arrival: arrival.number, default=None)

    def remove(self, arrival: Arrival) -> None:
        """It has its receive, or will never be whole."""
        key = arrival.source, arrival.tag
        queue = self._arrived[key]
        queue.remove(arrival)
        if not queue:
            del self._arrived[key]


class Body:
    """A long message that is being read: where its bytes go, and how many have come."""

    def __init__(self, origin: int, context: int, tag: int, num_bytes: int, receive: Receive | None) -> None:
        self.origin, self.context, self.tag, self.num_bytes, self.receive = origin, context, tag, num_bytes, receive
        self.arrival: Arrival | None = None
        self.problem = None if receive is None else receive.take(origin, tag, num_bytes)
        self.target = _room(receive, num_bytes)
        self.filled = 0

    def fill(self, data: memoryview) -> None:
        """Append what has been read already."""
        self.target[self.filled : self.filled + len(data)] = data
        self.filled += len(data)

    def missing(self) -> memoryview:
        """Where to read the rest to; from now on into the memory of a receive, if one was posted after it began."""
        taker = self.arrival.taker if self.arrival is not None else None
        if taker is not None and taker.fits(self.num_bytes):
            taker.take(self.origin, self.tag, self.num_bytes)
            target = _room(taker, self.num_bytes)
            target[: self.filled] = self.target[: self.filled]
            self.target, self.receive, self.arrival = target, taker, None
        return self.target[self.filled :]


def _room(receive: Receive | None, num_bytes: int) -> memoryview:
    """The memory of the receive if the message fits there, else new."""
    if receive is not None and receive.view is not None and receive.fits(num_bytes):
        return receive.view[:num_bytes]
    return new_memory(num_bytes)


def new_memory(num_bytes: int) -> memoryview:
    """Memory that nobody has written to: a bytearray would be filled with zeros first."""
    return np.empty(num_bytes, np.uint8).data


class Inbox:
    """All mailboxes of a process."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete
        self._lock = threading.Lock()
        self._boxes: dict[int, Mailbox] = {}
        self._numbers = itertools.count()
        self._lost: dict[int, str] = {}
        self._left: dict[int, str] = {}

    def _box(self, context: int) -> Mailbox:
        box = self._boxes.get(context)
        if box is None:
            box = self._boxes[context] = Mailbox()
        return box

    # --- what callers do

    def post(self, receive: Receive) -> None:
        """Give a receive the first message that matches, or let it wait for one."""
        with self._lock:
            box = self._box(receive.context)
            arrival = box.find(receive.source, receive.tag)
            if arrival is None:
                problem = self._why_never(receive)
                if problem is None:
                    box.posted.append(receive)
                    return
            else:
                box.remove(arrival)
                if not arrival.is_whole:
                    arrival.taker = receive
                    return
        if arrival is None:
            self._complete(receive, problem)
        else:
            self._hand_over(receive, arrival.source, arrival.tag, arrival.memory)

    def withdraw(self, receive: Receive) -> bool:
        """Whether the receive had no message; it will get none."""
        with self._lock:
            posted = self._box(receive.context).posted
            if receive not in posted:
                return False
            posted.remove(receive)
            return True

    def probe(self, context: int, source: int, tag: int) -> Arrival | None:
        """The message that a receive would get now."""
        with self._lock:
            return self._box(context).find(source, tag)

    def check_members(self, members: Mapping[int, int]) -> str | None:
        """Why a call of all members of a communicator cannot end."""
        return next((reason for rank, reason in list(self._lost.items()) if rank in members), None)

    def drop(self, context: int) -> None:
        """Forget a context; nobody will use it any more."""
        with self._lock:
            self._boxes.pop(context, None)

    # --- what the reader does

    def arrive(self, source: int, context: int, tag: int, data: memoryview) -> None:
        """A whole message; `data` is copied."""
        with self._lock:
            box = self._box(context)
            receive = box.take_posted(source, tag)
            if receive is None:
                arrival = Arrival(source, tag, bytes(data), next(self._numbers))
                arrival.is_whole = True
                box.keep(arrival)
                return
        self._hand_over(receive, source, tag, data)

    def begin(self, source: int, context: int, tag: int, num_bytes: int) -> Body:
        """The head of a message has come: where its body belongs."""
        with self._lock:
            box = self._box(context)
            body = Body(source, context, tag, num_bytes, box.take_posted(source, tag))
            if body.receive is None:
                body.arrival = Arrival(source, tag, body.target, next(self._numbers))
                box.keep(body.arrival)
            return body

    def finish(self, body: Body) -> None:
        """The body is there."""
        arrival = body.arrival
        if arrival is None:
            assert body.receive is not None
            if body.receive.view is None:
                body.receive.memory = body.target
            self._complete(body.receive, body.problem)
            return
        with self._lock:
            arrival.is_whole = True
            taker = arrival.taker
        if taker is not None:
            self._hand_over(taker, arrival.source, arrival.tag, arrival.memory)

    def lose(self, rank: int, reason: str, *, said_goodbye: bool, body: Body | None) -> None:
        """A rank will send nothing more: end the receives that depend on it, and what it was in the middle of."""
        with self._lock:
            (self._left if said_goodbye else self._lost)[rank] = reason
            hopeless = [receive for box in self._boxes.values() for receive in box.posted if self._why_never(receive)]
            for box in self._boxes.values():
                box.posted = [receive for receive in box.posted if receive not in hopeless]
            if body is not None:
                receive = self._drop(body)
                hopeless += [receive] if receive is not None else []
        for receive in hopeless:
            self._complete(receive, reason)

    def close(self, reason: str) -> None:
        """End all receives."""
        with self._lock:
            posted = [receive for box in self._boxes.values() for receive in box.posted]
            self._boxes.clear()
        for receive in posted:
            self._complete(receive, reason)

    def _drop(self, body: Body) -> Receive | None:
        """Forget a message that will never be whole; the receive it was for."""
        if body.arrival is None:
            return body.receive
        if body.arrival.taker is None:
            self._box(body.context).remove(body.arrival)
        return body.arrival.taker

    def _why_never(self, receive: Receive) -> str | None:
        """Why no message can come for a receive."""
        if receive.source in self._left:
            return self._left[receive.source]
        if receive.source in self._lost:
            return self._lost[receive.source]
        if self._lost and (receive.from_all or receive.source == ANY):
            return self.check_members(receive.members)
        return None

    def _hand_over(self, receive: Receive, source: int, tag: int, data: Any) -> None:
        """Copy a whole message to its receive, which ends it."""
        problem = receive.take(source, tag, len(data))
        if receive.view is None:
            receive.memory = bytes(data)
        elif problem is None:
            receive.view[: len(data)] = data
        self._complete(receive, problem)
