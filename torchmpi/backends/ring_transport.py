"""The messages of a group of one host: rings of shared memory, and the messages that this rank has posted.

A direction is to or from one rank, and has the posted messages in order. The first of them is
continued by whoever waits for any message of the group, or by the progress thread while nobody waits. A message with
a tag that no posted receive has is received into memory of its own, so that those behind it can arrive; the receive
that is posted for it later takes it from there.

docs/design/messages.md has the protocol; :mod:`torchmpi.shared_memory.kernels.ring_messages` moves the bytes.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..communicators.group import Group, GroupResource
from ..errors import CommunicatorError
from ..shared_memory import kernels, memory_layout
from ..shared_memory.kernels import records
from ..shared_memory.memory_layout import LockFields, MessageRing
from .message_transport import PostedMessage, Received, Transport

MOST_DIMS = 64
"""The limit of torch."""
_POLLS, _CROWDED_POLLS = 3000, 50
_YIELD_NANOSECONDS, _SLEEP_NANOSECONDS = 300_000, 1_000_000
_OTHERS_SECONDS = 20e-6
"""How long to leave the messages to another thread that continues them."""
_ANY_SHAPE = 1  # so many fields are compared: the number of bytes
_SHAPE = 3  # and with those of the dtype and the shape


_FRAME_FIELDS = records.Frame.FIELDS + MOST_DIMS
_SHAPE_AT, _FOUND_AT = records.Frame.shape, _FRAME_FIELDS


class Frames:
    """What a message begins with: as it is sent or expected, and as it is received."""

    def __init__(self) -> None:
        self.fields = array("q", bytes(16 * _FRAME_FIELDS))
        address, _ = self.fields.buffer_info()
        self.frame, self.found = records.Frame(address), records.Frame(address + 8 * _FOUND_AT)

    def write(self, tag: int, num_bytes: int, dtype: int = 0, shape: tuple[int, ...] = (), elsewhere: int = 0) -> None:
        """Describe what is sent or expected."""
        fields = self.fields
        fields[0], fields[1], fields[2], fields[3], fields[4] = tag, elsewhere, num_bytes, dtype, len(shape)
        for number, length in enumerate(shape, _SHAPE_AT):
            fields[number] = length

    @property
    def tag(self) -> int:
        """The tag of what is sent or expected."""
        return self.fields[0]

    def received(self, source: int, memory: Any = None) -> Received:
        """Return what has been received, whose values are in `memory` if not where they belong."""
        _, elsewhere, num_bytes, dtype, num_dims = self.fields[_FOUND_AT : _FOUND_AT + _SHAPE_AT]
        first = _FOUND_AT + _SHAPE_AT
        shape = tuple(self.fields[first : first + num_dims])
        return Received(source, num_bytes, dtype, shape, memory, is_elsewhere=bool(elsewhere))


class _MessageRequest:
    """A posted message, or one that no receive has been posted for; and the record of the kernels."""

    def __init__(self, frames: Frames, record: records.MessageRequest) -> None:
        self.message: PostedMessage | None = None
        self.directions: Sequence[int] = ()
        self.frames, self.cells, self.address = frames, record.cells, int(record)
        self.memory: Any = None
        """The values of a message that no receive has been posted for."""

    @property
    def state(self) -> int:
        """WAITING, BEGUN or ENDED."""
        state: int = self.cells[_STATE]
        return state

    @property
    def is_from_any(self) -> bool:
        """Whether it is in several directions until it has begun."""
        return bool(self.cells[_FROM_ANY])


_STATE, _FROM_ANY = records.MessageRequest.state, records.MessageRequest.is_from_any
_DIRECTION = records.MessageRequest.direction


class RingTransport(Transport, GroupResource):
    """The rings of a group, and the messages of this rank."""

    brief_turns = 1

    def __init__(self, group: Group) -> None:
        assert group.status_board is not None
        super().__init__()
        self.group, self.size = group, group.size
        segment = group.status_board.segment
        self.capacity = memory_layout.ring_capacity(self.size)
        self._rings = segment.address + segment.ticket.num_bytes - memory_layout.rings_bytes(self.size)
        self.polls = _CROWDED_POLLS if group.context.is_crowded else _POLLS
        self.is_closed = False
        self._advance = kernels.load()["advance"]
        self._directions = records.Direction.new(extra=(2 * self.size - 1) * records.Direction.FIELDS)
        self._cells = self._directions.cells
        self._posted: list[deque[_MessageRequest]] = [deque() for _ in range(2 * self.size)]
        self._open: list[_MessageRequest] = []
        """All posted messages that have not ended."""
        self._unused: list[_MessageRequest] = []
        self._early: list[deque[_MessageRequest]] = [deque() for _ in range(self.size)]
        """By sender: messages that have arrived before a receive was posted for them."""
        for peer in range(self.size):
            sends, receives = self._directions[peer], self._directions[self.size + peer]
            sends.ring, receives.ring = self.ring(group.rank, peer), self.ring(peer, group.rank)
            sends.other = receives.other = self.ring(peer, peer)
            receives.is_receive = 1

    def ring(self, sender: int, receiver: int) -> MessageRing:
        """Return the ring of a pair of ranks."""
        number = sender * self.size + receiver
        return MessageRing(self._rings + number * (MessageRing.BYTES + self.capacity))

    # --- What the waiting thread and the progress thread call --------------------------------------------------------

    def post(self, message: PostedMessage, *, was_deferred: bool = False) -> None:
        if not was_deferred:
            self.begin_deferred()
        self._run(self._post, message)

    def adopt(self, message: PostedMessage, frames: Frames, record: records.MessageRequest) -> None:
        """Continue a message that the fast path has begun, which holds the lock and has begun its record.

        A second time, after an interrupt, this ends what has been begun.
        """
        request = next((each for each in self._open if each.message is message), _MessageRequest(frames, record))
        request.message, request.directions = message, self._directions_of(message)
        self._enter(request)

    def proceed(self, message: PostedMessage, turn: int) -> int:
        """Continue the messages of the group for a while, in the thread that waits for one; return the next turn."""
        pause = (1, 1, _SLEEP_NANOSECONDS) if turn else (self.polls, 0, _YIELD_NANOSECONDS)
        result, has_ended = self._run(self._continue, *pause, blocking=False)
        if result is None:
            message.pause(_OTHERS_SECONDS)
        return 0 if has_ended else turn + 1

    def test(self, message: PostedMessage) -> None:
        """Continue the messages of the group if that is possible at once."""
        self._run(self._continue, blocking=False)

    def cancel(self, message: PostedMessage) -> bool:
        return bool(self.lock.run(self._withdraw, message))

    def carries(self, message: PostedMessage) -> bool:
        return any(request.message is message for request in list(self._open))

    def close(self) -> None:
        """End the use of the rings; messages that have not ended fail."""
        self.begin_deferred()
        for message in self.lock.run(self._take_all) or ():
            message.fail(CommunicatorError(f"{message.what}: {self.group.name} has been destroyed."))

    def _run(self, task: Callable[..., Any], *arguments: Any, blocking: bool = True) -> tuple[Any, bool]:
        """Run a task with the lock, and end the messages that it adds to a list; return whether there are some, too."""
        ended: list[_MessageRequest] = []
        try:
            result = self.lock.run(task, ended, *arguments, blocking=blocking)
        finally:  # also after an interrupt, so that the end of no message is lost
            left = [*ended]
            try:
                self._end(left)
            except BaseException:
                self._end(left)
                raise
        return result, bool(ended)

    # --- With the lock ----------------------------------------------------------------------------------------------

    def _post(self, ended: list[_MessageRequest], message: PostedMessage) -> None:
        if self.is_closed:
            raise CommunicatorError(f"{message.what}: {self.group.name} has been destroyed. Create a new one.")
        message.begin_record()
        early = self._early_for(message)
        if early is not None and early.state == records.ENDED:
            if early in self._open:
                self._remove(early)
            self._count(early, -1)
            early.message = message
            message.end_record()
            ended.append(early)
        elif early is not None:  # it arrives now
            self._count(early, -1)
            early.message = message
            self._count(early, 1)
        else:
            self._enter(self._request_of(message))
            self._continue(ended)

    def _withdraw(self, message: PostedMessage) -> bool:
        for direction in self._directions_of(message):
            for request in self._posted[direction]:
                if request.message is message and request.state == records.WAITING:
                    self._remove(request)
                    return True
        return False

    def _take_all(self) -> list[PostedMessage]:
        """Let no message begin, and return those that have not ended."""
        self.is_closed = True
        self.lock.fields[LockFields.pending] += 1  # never idle again: the fast path does not use the rings
        for request in self._open:
            self._count(request, -1)
        messages = [request.message for request in self._open if request.message is not None]
        self._open.clear()
        for posted in self._posted:
            posted.clear()
        return messages

    def _directions_of(self, message: PostedMessage) -> list[int]:
        if not message.is_receive:
            assert message.peer is not None
            return [message.peer]
        peers = range(self.size) if message.peer is None else [message.peer]
        return [self.size + peer for peer in peers]

    def _count(self, request: _MessageRequest, change: int) -> None:
        """Count a message among those under way, for the fast path and for the search for deadlocks."""
        self.lock.fields[LockFields.pending] += change
        if request.message is not None:
            request.message.call_queue.run_lock.fields[LockFields.pending] += change

    def _request_of(self, message: PostedMessage) -> _MessageRequest:
        """Return the record of a message that begins, perhaps one that another message has used."""
        if self._unused:
            request = self._unused.pop()
        else:
            frames, record = Frames(), records.MessageRequest.new()
            record.write(frame=frames.frame, found=frames.found)
            request = _MessageRequest(frames, record)
        request.message, request.directions = message, self._directions_of(message)
        shape, cells, at = message.shape if message.compares_shape else (), request.cells, records.MessageRequest
        request.frames.write(message.tag, message.num_bytes, message.code, shape, int(message.is_elsewhere))
        cells[at.state], cells[at.moved] = records.WAITING, 0
        cells[at.compared] = _SHAPE + len(shape) if message.compares_shape else _ANY_SHAPE
        is_here = not message.is_elsewhere
        cells[at.address], cells[at.num_bytes] = (message.address, message.num_bytes) if is_here else (0, 0)
        cells[at.is_from_any] = message.peer is None
        return request

    def _enter(self, request: _MessageRequest) -> None:
        if request not in self._open:
            self._count(request, 1)
            self._open += [request]  # no call, after which an interrupt may come
        for direction in request.directions:
            if request not in self._posted[direction]:
                self._posted[direction].append(request)
            self._choose(direction)

    def _remove(self, request: _MessageRequest) -> None:
        """End the use of a record; a second time, after an interrupt, what has not been done of that."""
        for direction in request.directions:
            if request in self._posted[direction]:
                self._posted[direction].remove(request)
            self._choose(direction)
        if request.message is not None:  # the fast path must not receive a message before one that is kept here
            self._count(request, -1)
        self._open.remove(request)

    def _choose(self, direction: int) -> None:
        """Let the kernel continue the message that has begun in a direction, or else the first one."""
        address = 0
        for request in self._posted[direction]:
            state = request.cells[_STATE]
            if state == records.BEGUN and (not request.is_from_any or request.cells[_DIRECTION] == direction):
                address = request.address
                break
            if state == records.WAITING and not address:
                address = request.address
        self._cells[direction * records.Direction.FIELDS + records.Direction.request] = address

    def _continue(self, ended: list[_MessageRequest], polls: int = 1, sleeps: int = 0, nanoseconds: int = 0) -> bool:
        """Continue all messages until one has ended; add those that have, and return whether one has."""
        rank = self.group.rank
        what = int(self._directions), 2 * self.size, int(self.ring(rank, rank)), self.capacity
        try:
            while (status := self._advance(*what, polls, sleeps, nanoseconds)) >= records.UNEXPECTED:
                self._make_way(status - records.UNEXPECTED)
            if status == records.SOME_ENDED:
                self._take_ended(ended)
        except BaseException:  # an interrupt: the kernel tells only once of those that have ended
            self._take_ended(ended)
            raise
        return bool(ended)

    def _make_way(self, direction: int) -> None:
        """Let the kernel receive the message that arrives in a direction and is not the expected one."""
        chosen = self._cells[direction * records.Direction.FIELDS + records.Direction.request]
        found = next(each for each in self._posted[direction] if each.address == chosen).frames.found
        for request in self._posted[direction]:
            if request.frames.tag == found.tag and request.state == records.WAITING:
                self._directions[direction].request = records.MessageRequest(request.address)
                return
        frames, record = Frames(), records.MessageRequest.new()
        frames.write(found.tag, found.num_bytes)
        early = _MessageRequest(frames, record)
        early.directions = [direction]
        early.memory = np.empty(0 if found.is_elsewhere else found.num_bytes, np.uint8)
        record.write(frame=frames.frame, found=frames.found, compared=_ANY_SHAPE, address=early.memory.ctypes.data)
        self._early[direction - self.size].append(early)
        self._count(early, 1)
        self._open.append(early)
        self._posted[direction].append(early)
        self._directions[direction].request = record

    def _take_ended(self, ended: list[_MessageRequest]) -> None:
        for request in [request for request in self._open if request.cells[_STATE] == records.ENDED]:
            if request.message is not None:
                ended += [request]  # first, and no call, since an interrupt may come in the next ones
            self._remove(request)
            if request.message is not None:
                request.message.end_record()
        for request in self._open:
            if request.is_from_any and request.state == records.BEGUN:
                for direction in request.directions:  # all others but one
                    self._choose(direction)

    def _early_for(self, message: PostedMessage) -> _MessageRequest | None:
        """Take the first message that has arrived before this receive of it."""
        if not message.is_receive:
            return None
        peers = range(self.size) if message.peer is None else [message.peer]
        for peer in peers:
            for request in self._early[peer]:
                if request.frames.tag == message.tag:
                    self._early[peer].remove(request)
                    return request
        return None

    # --- Without the lock --------------------------------------------------------------------------------------------

    def _end(self, ended: list[_MessageRequest]) -> None:
        """End the messages of a list and remove them; a second time, also that in which an interrupt has come."""
        while ended:
            request = ended[0]
            if request.message is not None and not request.message.has_ended:
                self._finish(request, request.message)
            is_own = isinstance(request.cells, array) and request not in self._open  # the fast path has others
            if request.memory is None and is_own and request.message is not None:
                request.message = None
                self._unused += [request]
            del ended[0]

    def _finish(self, request: _MessageRequest, message: PostedMessage) -> None:
        received, message.waited_until = None, request.cells[records.MessageRequest.begun]
        if message.is_receive:
            source = message.peer
            if source is None:
                is_here = request.memory is None
                source = (request.cells[_DIRECTION] if is_here else request.directions[0]) - self.size
            received = request.frames.received(source, request.memory)
        message.finish(received)
