"""The messages of a group of one host: rings of shared memory, and the messages that this rank has posted.

A direction is to or from one rank, and has the posted messages in order. The first of them is
continued by whoever waits for any message of the group, or by the progress thread while nobody waits. A message with
a tag that no posted receive has is received into memory of its own, so that those behind it can arrive; the receive
that is posted for it later takes it from there.

docs/design/messages.md has the protocol; :mod:`torchmpi.shared_memory.kernels.ring_messages` moves the bytes.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from ..communicators.call_queue import RunLock
from ..communicators.group import Group, GroupResource
from ..errors import CommunicatorError
from ..shared_memory import kernels, memory_layout
from ..shared_memory.kernels import records
from ..shared_memory.memory_layout import LockFields, MessageRing
from .message_transport import PostedMessage, Received

MOST_DIMS = 64
"""The limit of torch."""
_POLLS, _CROWDED_POLLS = 3000, 50
_YIELD_NANOSECONDS, _SLEEP_NANOSECONDS = 300_000, 1_000_000
_LEAST_SLEEP, _MOST_SLEEP, _GROWTH = 20, 1000, 1.25  # microseconds
_ANY_SHAPE = 1  # so many fields are compared: the number of bytes
_SHAPE = 3  # and with those of the dtype and the shape


class Frames:
    """What a message begins with: as it is sent or expected, and as it is received."""

    def __init__(self) -> None:
        self.fields = np.zeros((2, records.Frame.FIELDS + MOST_DIMS), np.int64)
        self.frame, self.found = (records.Frame(row.ctypes.data) for row in self.fields)

    def write(self, tag: int, num_bytes: int, dtype: int = 0, shape: tuple[int, ...] = (), elsewhere: int = 0) -> None:
        """Describe what is sent or expected."""
        self.fields[0, : records.Frame.FIELDS + len(shape)] = tag, elsewhere, num_bytes, dtype, len(shape), *shape

    def expected_shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor that is sent or expected."""
        first = records.Frame.FIELDS
        return tuple(self.fields[0, first : first + self.fields[0, records.Frame.num_dims]].tolist())

    def received(self, source: int, memory: Any = None) -> Received:
        """Return what has been received, whose values are in `memory` if not where they belong."""
        found = self.fields[1].tolist()
        first = records.Frame.FIELDS
        shape = tuple(found[first : first + found[records.Frame.num_dims]])
        return Received(
            source, found[records.Frame.num_bytes], found[records.Frame.dtype], shape, memory,
            is_elsewhere=bool(found[records.Frame.is_elsewhere]),
        )  # fmt: skip


class _Passage:
    """A posted message, or one that no receive has been posted for; and the record of the kernels."""

    def __init__(
        self, message: PostedMessage | None, directions: list[int], frames: Frames, record: records.Passage
    ) -> None:
        self.message, self.directions, self.frames, self.record = message, directions, frames, record
        self.memory: Any = None
        """The values of a message that no receive has been posted for."""

    def can_continue_in(self, direction: int) -> bool:
        """Return whether it is the next message of a direction if it is the first one there."""
        record = self.record
        return record.state == records.WAITING or (record.state == records.BEGUN and self.is_in(direction))

    def is_in(self, direction: int) -> bool:
        """Return whether it has begun in a direction."""
        record = self.record
        return record.state != records.WAITING and (not record.is_from_any or record.direction == direction)


class RingTransport(GroupResource):
    """The rings of a group, and the messages of this rank."""

    def __init__(self, group: Group) -> None:
        assert group.status_board is not None
        self.group, self.size = group, group.size
        segment = group.status_board.segment
        self.capacity = memory_layout.ring_capacity(self.size)
        self._rings = segment.address + segment.ticket.num_bytes - memory_layout.rings_bytes(self.size)
        self.polls = _CROWDED_POLLS if group.context.is_crowded else _POLLS
        self.lock = RunLock()
        """Held while a thread continues the messages of the group."""
        self.is_closed = False
        self._advance = kernels.load()["advance"]
        self._directions = records.Direction.new(extra=(2 * self.size - 1) * records.Direction.FIELDS)
        self._posted: list[deque[_Passage]] = [deque() for _ in range(2 * self.size)]
        self._early: list[deque[_Passage]] = [deque() for _ in range(self.size)]
        """By sender: messages that have arrived before a receive was posted for them."""
        for peer in range(self.size):
            sends, receives = self._directions[peer], self._directions[self.size + peer]
            sends.ring, receives.ring = self.ring(group.rank, peer), self.ring(peer, group.rank)
            receives.is_receive = 1

    def ring(self, sender: int, receiver: int) -> MessageRing:
        """Return the ring of a pair of ranks."""
        number = sender * self.size + receiver
        return MessageRing(self._rings + number * (MessageRing.BYTES + self.capacity))

    # --- What the waiting thread and the progress thread call --------------------------------------------------------

    def post(self, message: PostedMessage) -> None:
        """Begin a message, and end it if that is possible at once."""
        frames, record = Frames(), records.Passage.new()
        shape = message.shape if message.compares_shape else ()
        frames.write(message.tag, message.num_bytes, message.code, shape, int(message.is_elsewhere))
        record.write(
            frame=frames.frame,
            found=frames.found,
            compared=_SHAPE + len(shape) if message.compares_shape else _ANY_SHAPE,
            address=0 if message.is_elsewhere else message.address,
            num_bytes=0 if message.is_elsewhere else message.num_bytes,
            is_from_any=message.peer is None,
        )
        with self.lock:
            if self.is_closed:
                raise CommunicatorError(f"{message.what}: {self.group.name} has been destroyed. Create a new one.")
            message.begin_record()
            early = self._early_for(message)
            ended = []
            if early is not None and early.record.state == records.ENDED:
                if early in self._posted[early.directions[0]]:
                    self._remove(early)
                early.message = message
                message.end_record()
                ended.append(early)
            elif early is not None:  # it arrives now
                self._count(early, -1)
                early.message = message
                self._count(early, 1)
            else:
                self._enter(_Passage(message, self._directions_of(message), frames, record))
                ended = self._continue()
        self._end(ended)

    def adopt(self, message: PostedMessage, frames: Frames, record: records.Passage) -> None:
        """Continue a message that the fast path has begun, which holds the lock and has begun its record."""
        self._enter(_Passage(message, self._directions_of(message), frames, record))

    def proceed(self, message: PostedMessage, turn: int) -> bool:
        """Continue the messages of the group for a while, in the thread that waits for one.

        Args:
            message: The message.
            turn: How often this has been called for it.

        Returns:
            Whether the caller has waited so long that it describes the call for the watchdog.
        """
        if not self.lock.acquire(False):  # another thread does
            message.pause(_LEAST_SLEEP / 1e6)
            return turn > 0
        ended = []
        try:
            if turn == 0:
                ended = self._continue(self.polls, 0, _YIELD_NANOSECONDS)
            else:
                sleep = min(_LEAST_SLEEP * _GROWTH**turn, _MOST_SLEEP) if turn < 50 else _MOST_SLEEP
                ended = self._continue(1, int(sleep), _SLEEP_NANOSECONDS)
        finally:
            self.lock.release()
            self._end(ended)
        return True

    def test(self, message: PostedMessage) -> None:
        """Continue the messages of the group if that is possible at once."""
        if self.lock.acquire(False):
            ended = []
            try:
                ended = self._continue()
            finally:
                self.lock.release()
                self._end(ended)

    def cancel(self, message: PostedMessage) -> bool:
        """Withdraw a message; return False if it has begun."""
        with self.lock:
            for direction in self._directions_of(message):
                for passage in self._posted[direction]:
                    if passage.message is message and passage.record.state == records.WAITING:
                        self._remove(passage)
                        return True
        return False

    def close(self) -> None:
        """End the use of the rings; messages that have not ended fail."""
        with self.lock:
            self.is_closed = True
            self.lock.fields[LockFields.pending] += 1  # never idle again: the fast path does not use the rings
            passages = {id(passage): passage for direction in self._posted for passage in direction}.values()
            for passage in passages:
                self._count(passage, -1)
            messages = [passage.message for passage in passages if passage.message is not None]
            for direction in self._posted:
                direction.clear()
        for message in messages:
            message.fail(CommunicatorError(f"{message.what}: {self.group.name} has been destroyed."))

    # --- With the lock ----------------------------------------------------------------------------------------------

    def _directions_of(self, message: PostedMessage) -> list[int]:
        if not message.is_receive:
            assert message.peer is not None
            return [message.peer]
        peers = range(self.size) if message.peer is None else [message.peer]
        return [self.size + peer for peer in peers]

    def _count(self, passage: _Passage, change: int) -> None:
        """Count a message among those under way, for the fast path and for the search for deadlocks."""
        self.lock.fields[LockFields.pending] += change
        if passage.message is not None:
            passage.message.call_queue.run_lock.fields[LockFields.pending] += change

    def _enter(self, passage: _Passage) -> None:
        self._count(passage, 1)
        for direction in passage.directions:
            self._posted[direction].append(passage)
            self._choose(direction)

    def _remove(self, passage: _Passage) -> None:
        self._count(passage, -1)
        for direction in passage.directions:
            self._posted[direction].remove(passage)
            self._choose(direction)

    def _choose(self, direction: int) -> None:
        """Let the kernel continue the message that has begun in a direction, or else the first one."""
        posted = self._posted[direction]
        following = next((each for each in posted if each.is_in(direction)), None)
        if following is None:
            following = next((each for each in posted if each.can_continue_in(direction)), None)
        self._directions[direction].passage = records.Passage(0) if following is None else following.record

    def _continue(self, polls: int = 1, microseconds: int = 0, nanoseconds: int = 0) -> list[_Passage]:
        """Continue all messages until one has ended; return those that have."""
        directions, count = int(self._directions), 2 * self.size
        while (status := self._advance(directions, count, self.capacity, polls, microseconds, nanoseconds)) >= (
            records.UNEXPECTED
        ):
            self._make_way(status - records.UNEXPECTED)
        return self._take_ended() if status == records.SOME_ENDED else []

    def _make_way(self, direction: int) -> None:
        """Let the kernel receive the message that arrives in a direction and is not the expected one."""
        tag = records.Frame(int(self._directions[direction].passage.found)).tag
        for passage in self._posted[direction]:
            if passage.frames.frame.tag == tag and passage.record.state == records.WAITING:
                self._directions[direction].passage = passage.record
                return
        found = records.Frame(int(self._directions[direction].passage.found))
        frames, record = Frames(), records.Passage.new()
        frames.write(tag, found.num_bytes)
        early = _Passage(None, [direction], frames, record)
        early.memory = np.empty(0 if found.is_elsewhere else found.num_bytes, np.uint8)
        record.write(frame=frames.frame, found=frames.found, compared=_ANY_SHAPE, address=early.memory.ctypes.data)
        self._early[direction - self.size].append(early)
        self._posted[direction].append(early)
        self._count(early, 1)
        self._directions[direction].passage = record

    def _take_ended(self) -> list[_Passage]:
        ended = []
        for direction, posted in enumerate(self._posted):
            for passage in [each for each in posted if each.record.state == records.ENDED]:
                if passage in posted:  # it was in several directions
                    self._remove(passage)
                    ended.append(passage)
                    if passage.message is not None:
                        passage.message.end_record()
            self._choose(direction)  # one from any rank may have begun in another direction
        return [passage for passage in ended if passage.message is not None]

    def _early_for(self, message: PostedMessage) -> _Passage | None:
        """Take the first message that has arrived before this receive of it."""
        if not message.is_receive:
            return None
        peers = range(self.size) if message.peer is None else [message.peer]
        for peer in peers:
            for passage in self._early[peer]:
                if passage.frames.frame.tag == message.tag:
                    self._early[peer].remove(passage)
                    return passage
        return None

    # --- Without the lock --------------------------------------------------------------------------------------------

    def _end(self, ended: list[_Passage]) -> None:
        for passage in ended:
            message = passage.message
            assert message is not None
            message.waited_until = passage.record.begun
            if not message.is_receive:
                message.finish(None)
                continue
            source = message.peer
            if source is None:
                direction = passage.record.direction if passage.memory is None else passage.directions[0]
                source = direction - self.size
            message.finish(passage.frames.received(source, passage.memory))
