"""What carries messages between ranks: the interface, and nonblocking messages of the MPI library.

A message with a tag is one message of MPI. One without a tag, of `send` and `recv`, begins with a frame by which the
receiver detects that its tensor does not fit: the frame is sent together with short values, and before long ones.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..communicators.call_queue import NOW, CallQueue, RunLock
from ..communicators.group import Group
from ..shared_memory.memory_layout import LockFields
from ..tensors import buffers, dtypes, partition
from ..timeline import events
from .mpi_messages import can_call_from_kernels

HEADER_TAG, PAYLOAD_TAG = 1, 2
MOST_HEADER_BYTES = 8 * 66  # dtype, number of dims, and up to 64 dims, the limit of torch
PACKED_BYTES = 32 << 10
"""Values of at most this size are sent behind their header, in one message."""
_NUM_BUSY_TESTS, _TURN_NANOSECONDS = 2000, 25_000
"""How often a thread looks before it sleeps, and the length of a look that counts as two."""
_LEAST_SLEEP_SECONDS, _MOST_SLEEP_SECONDS, _SLEEP_GROWTH = 50e-6, 1e-3, 1.02  # the longest after 0.05 s


class Received(NamedTuple):
    """What a rank has received."""

    source: int
    num_bytes: int
    dtype: int
    """Number of the dtype; 0 if the message has none."""
    shape: tuple[int, ...]
    memory: Any
    """The values, as an array of bytes; None if they are where they belong, or have been dropped."""
    is_elsewhere: bool = False
    """Whether the values follow by MPI."""


class PostedMessage(Protocol):
    """A message, for the transport that carries it."""

    peer: int | None
    """The other rank; None: any."""
    is_receive: bool
    tag: int
    code: int
    """Number of the dtype."""
    shape: tuple[int, ...]
    num_bytes: int
    work: torch.Tensor
    """What is sent, or received into: contiguous."""
    address: int
    """That of the values in host memory."""
    is_elsewhere: bool
    """Whether the sent values are in the memory of a device that MPI reads."""
    call_queue: CallQueue
    waited_until: int
    """When the message began to arrive, in nanoseconds; 0 if that is unknown."""
    has_ended: bool
    """Whether it has ended."""

    @property
    def what(self) -> str:
        """The rank and the function, for messages to the user."""

    @property
    def compares_shape(self) -> bool:
        """Whether dtype and shape must be equal, rather than the length alone."""

    @property
    def memory_bytes(self) -> int:
        """The longest message of MPI."""

    def begin_record(self) -> None:
        """Count the message, which begins now."""

    def end_record(self) -> None:
        """Count its end."""

    def finish(self, received: Received | None) -> None:
        """End it; None for a send."""

    def fail(self, error: BaseException) -> None:
        """End it with an error."""

    def pause(self, seconds: float) -> None:
        """Sleep, at most until it has ended."""


class Deferred(Protocol):
    """A receive that begins later, but before all messages that are posted after it."""

    @property
    def is_deferred(self) -> bool:
        """Whether it has neither begun nor ended."""

    def begin(self) -> None:
        """Post the receive; after an interrupt it has begun, or is deferred as before."""


class Transport:
    """How the messages of a group are carried, and the receives that have been made and not begun.

    Attributes:
        lock: Of rings, held while a thread continues the messages of the group. Its fields tell machine code how many
            receives are deferred, also one that a thread is posting now.
        deferring: Held while deferred receives change, and while the fast path makes one.
        is_watched: Whether the progress thread looks for deferred receives.
    """

    brief_turns: int
    """After as many turns of :meth:`proceed` a thread has waited long."""

    def __init__(self) -> None:
        self.lock, self.deferring = RunLock(), threading.RLock()
        self.deferred: deque[Deferred] = deque()
        self.is_watched = False

    def post(self, message: PostedMessage, *, was_deferred: bool = False) -> None:
        """Begin a message, after those that are deferred if it was not; end it if that is possible at once."""
        raise NotImplementedError

    def proceed(self, message: PostedMessage, turn: int) -> int:
        """Continue messages for a while, in the thread that waits for one.

        Args:
            message: The message.
            turn: How often this has been called for it since a message has ended.

        Returns:
            The next turn: 0 after a message has ended. After `brief_turns`, the thread has waited long.
        """
        raise NotImplementedError

    def test(self, message: PostedMessage) -> None:
        """Continue a message, and those before it, if that is possible at once."""
        raise NotImplementedError

    def cancel(self, message: PostedMessage) -> bool:
        """Withdraw a message; return False if it has begun."""
        raise NotImplementedError

    def carries(self, message: PostedMessage) -> bool:
        """Return whether a message has been posted and has not ended."""
        raise NotImplementedError

    @property
    def has_messages(self) -> bool:
        """Whether messages are under way."""
        return self.lock.fields[LockFields.pending] != 0

    def defer(self, receive: Deferred) -> bool:
        """Note a receive that begins later; return False if it has begun, because other messages are under way."""
        with self.deferring:
            self.deferred.append(receive)
            self.count_deferred()
            if self.has_messages:
                self.begin_deferred()
            return bool(self.deferred)

    def count_deferred(self) -> None:
        """Tell machine code of the deferred receives; the caller holds `deferring`."""
        self.lock.fields[LockFields.deferred] = len(self.deferred)

    def begin_deferred(self) -> None:
        """Post all deferred receives, in their order."""
        if not self.lock.fields[LockFields.deferred]:
            return
        with self.deferring:  # again, if the one that this thread posts has ended others, whose callbacks look
            deferred = self.deferred
            while deferred:
                first = deferred[0]
                try:
                    del deferred[0]  # no call, after which an interrupt may come
                    first.begin()
                except BaseException:
                    if first.is_deferred:
                        deferred.appendleft(first)
                    raise
                finally:
                    self.count_deferred()


Then = Callable[[Any], "Stage | Received | None"]


class Stage(NamedTuple):
    """Requests of MPI, and what follows with the status of the last one: another stage, or the end.

    An interrupt may come between any two instructions of Python, and must neither lose a request nor make it twice.
    """

    requests: list[Any]
    then: Then
    num_received: int = 0
    """Messages of MPI that have been received at its end, those of earlier stages too."""
    begins: Iterator[Any] = iter(())
    """Begins further requests, without an instruction of Python after one has begun."""


@dataclass(eq=False)
class _Open:
    """A message that has not ended."""

    message: PostedMessage
    stage: Stage
    status: Any
    """Of the last request of the stage that has ended."""
    result: Received | None = None
    error: BaseException | None = None
    is_recorded: bool = False
    """Whether its end has been counted."""


_kept: list[_Open] = []
"""Messages of which MPI has ended a part with an error, and may not have ended other ones, in the same memory."""


class MpiTransport(Transport):
    """The messages of a group as messages of MPI."""

    brief_turns = _NUM_BUSY_TESTS

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.MPI, self.comm = group, group.context.MPI, group.side_comm
        self._lock: Any = threading.RLock()
        """Held while a thread tests messages. It knows its owner, who may be interrupted when it has just taken it."""
        self._open: dict[CallQueue, deque[_Open]] = {}

    def post(self, message: PostedMessage, *, was_deferred: bool = False) -> None:
        if not was_deferred:
            self.begin_deferred()
        message.begin_record()
        self.start(message, self._first_stage)

    @property
    def has_messages(self) -> bool:
        """Whether messages are under way, or machine code or a progress thread cannot make deferred receives."""
        can_defer = self.group.context.threaded and can_call_from_kernels(self.group)
        return any(list(self._open.values())) or not can_defer

    def post_values(self, message: PostedMessage, received: Received | None) -> None:
        """Begin to send the values of a message whose frame has been sent, or to receive those behind a frame."""

        def stage(message: PostedMessage) -> Stage:
            if received is None:
                return self._sends(message, [(part, PAYLOAD_TAG) for part in self._parts(message, message.work)])
            return self._values_stage(message, received)

        self.start(message, stage)

    def start(self, message: PostedMessage, make: Callable[[PostedMessage], Stage]) -> None:
        """Begin a stage of a message in the order of its direction."""
        # With the run lock, since the fast path may exchange messages with this rank.
        message.call_queue.run_lock.run(self._begin, message, make(message))
        self.test(message)

    def _begin(self, message: PostedMessage, stage: Stage) -> None:
        with self._lock:
            try:
                self.adopt(message, stage)
                stage.requests.extend(stage.begins)
            except BaseException as error:
                opened = self._find(message)
                if opened is not None and (isinstance(error, self.MPI.Exception) or not stage.requests):
                    self._remove(opened, [])  # otherwise a look at it would begin it
                    if stage.requests:
                        _kept.append(opened)
                raise

    def adopt(self, message: PostedMessage, stage: Stage) -> None:
        """Continue a message that the fast path has begun; the caller has the run lock of its direction.

        A second time, after an interrupt, this does nothing.
        """
        queue = message.call_queue
        opened = self._open.setdefault(queue, deque())
        if all(each.message is not message for each in opened):
            entry = _Open(message, stage, self.MPI.Status())
            queue.run_lock.fields[LockFields.pending] += 1  # from here on without a call
            opened += [entry]

    def _find(self, message: PostedMessage) -> _Open | None:
        opened = list(self._open.get(message.call_queue, ()))
        return next((each for each in opened if each.message is message), None)

    def carries(self, message: PostedMessage) -> bool:
        return self._find(message) is not None

    def proceed(self, message: PostedMessage, turn: int) -> int:
        begun = time.monotonic_ns()
        self.test(message)
        if turn < self.brief_turns:
            os.sched_yield()  # to other ranks; the test lets other threads run. time.sleep(0) would take 70 us
            return turn + 1 + (time.monotonic_ns() - begun) // _TURN_NANOSECONDS  # others may use the core for long
        growth = min(turn - self.brief_turns, 1000)
        message.pause(min(_LEAST_SLEEP_SECONDS * _SLEEP_GROWTH**growth, _MOST_SLEEP_SECONDS))
        return turn + 1

    def test(self, message: PostedMessage) -> None:
        removed: list[_Open] = []
        try:
            self._remove_ended(message, removed)
        finally:  # also after an interrupt, so that the end of no message is lost
            try:
                self._end(removed)
            except BaseException:
                self._end(removed)
                raise

    def _end(self, removed: list[_Open]) -> None:
        """End the messages of a list and remove them; a second time, also that in which an interrupt has come."""
        while removed:
            each = removed[0]
            if each.error is not None and not each.message.has_ended:
                each.message.fail(each.error)
            elif not each.message.has_ended:
                if not each.is_recorded:
                    each.message.end_record()
                    each.is_recorded = True
                each.message.finish(each.result)
            del removed[0]

    def _remove_ended(self, message: PostedMessage, removed: list[_Open]) -> None:
        """Remove what has ended of the messages up to this one, and add it to a list.

        An interrupt comes when a function begins, or has returned, so that it leaves no lock taken.
        """
        (taken,) = map(self._lock.acquire, NOW)
        if not taken:  # another thread does
            return
        try:
            for each in list(self._open.get(message.call_queue, ())):
                if self._has_ended(each):
                    self._remove(each, removed)
                    self.group.messages.add(-each.stage.num_received)
                if each.message is message:
                    break
        finally:
            self._lock.release()

    def _remove(self, opened: _Open, removed: list[_Open]) -> None:
        """Move a message to a list, all of it or, after an interrupt, nothing: from `del` on without a call."""
        queue = opened.message.call_queue
        fields, others = queue.run_lock.fields, self._open[queue]
        index = others.index(opened)
        del others[index]
        fields[LockFields.pending] -= 1
        removed += [opened]

    def sleep(self, message: PostedMessage, seconds: float) -> None:
        """Sleep until something may have arrived; without an MPI library this also reads."""
        opened = self._find(message)
        request = opened.stage.requests[0] if opened is not None and opened.stage.requests else None
        wait: Callable[[float], object] = getattr(request, "wait_for", time.sleep)
        wait(seconds)

    def cancel(self, message: PostedMessage) -> bool:
        with self._lock:
            found = self._find(message)
            if found is None or not message.is_receive or message.waited_until:
                return False
            for request in filter(None, found.stage.requests):  # one, which has not been found to have ended
                request.Cancel()
                request.Wait(found.status)
                if found.status.Is_cancelled():
                    self._remove(found, [])
                    return True
        self.test(message)  # it arrived before it could be cancelled
        return False

    # --- Stages -----------------------------------------------------------------------------------------------------

    def _has_ended(self, opened: _Open) -> bool:
        try:
            while True:
                requests = opened.stage.requests
                requests.extend(opened.stage.begins)
                while requests:
                    if requests[-1] and not requests[-1].Test(opened.status):
                        return False
                    requests.pop()
                followed = opened.stage.then(opened.status)
                if not isinstance(followed, Stage):
                    opened.result = followed
                    return True
                opened.stage = followed
        except self.MPI.Exception as error:  # perhaps truncated, and not to be received again
            opened.error = error
            if any(opened.stage.requests[:-1]):  # the last one has failed
                _kept.append(opened)
            return True

    def _first_stage(self, message: PostedMessage) -> Stage:
        peer = self.MPI.ANY_SOURCE if message.peer is None else message.peer
        if not message.compares_shape:
            call = self.comm.Irecv if message.is_receive else self.comm.Isend
            begins = _whole(call, self.MPI, message.work, (peer, message.tag), message.memory_bytes)
            if message.is_receive:
                return Stage([], self._take_whole, 1, begins)
            self.group.messages.add(1)
            return Stage([], end_send, begins=begins)
        if not message.is_receive:
            return self._sends(message, self._messages(message))
        header = np.empty(MOST_HEADER_BYTES + PACKED_BYTES, np.uint8)
        begins = starmap(self.comm.Irecv, [((header, self.MPI.BYTE), peer, HEADER_TAG)])
        return self.header_stage(message, [], header)._replace(begins=begins)

    def header_stage(self, message: PostedMessage, requests: list[Any], header: np.ndarray) -> Stage:
        """Receive a message into this memory: its header, and short values behind it; without a request it has come."""

        def take(_: Any) -> Stage | Received:
            message.waited_until = events.now()
            received = described(header, message.peer or 0)
            if received.num_bytes <= PACKED_BYTES:
                return received
            values = self._values_stage(message, received)
            return values._replace(num_received=1 + values.num_received)

        return Stage(requests, take, 1)

    def begun_values_stage(self, requests: list[Any], header: np.ndarray | None, source: int) -> Stage:
        """Receive values into their place, which machine code has begun, behind this header if there is one."""

        def take(_: Any) -> Received:
            assert header is not None
            return described(header, source)._replace(memory=None)

        return Stage(requests, self._take_whole if header is None else take, 1)

    def _values_stage(self, message: PostedMessage, received: Received) -> Stage:
        """Receive long values, into memory that is dropped if they do not fit."""
        fits = received.dtype == message.code and received.shape == message.shape
        dtype = dtypes.from_code(received.dtype)
        work = message.work if fits else torch.empty(received.shape, dtype=dtype, device="cpu")
        parts = [((part, self.MPI.BYTE), received.source, PAYLOAD_TAG) for part in self._parts(message, work)]

        def take(_: Any, _kept: torch.Tensor = work) -> Received:
            return received._replace(memory=None, is_elsewhere=False)

        return Stage([], take, len(parts), starmap(self.comm.Irecv, parts))

    def _take_whole(self, status: Any) -> Received:
        return Received(status.source, status.Get_elements(self.MPI.BYTE), 0, (), None)

    def _sends(self, message: PostedMessage, parts: list[tuple[Any, int]]) -> Stage:
        self.group.messages.add(len(parts))
        sends = [((part, self.MPI.BYTE), message.peer, tag) for part, tag in parts]
        return Stage([], end_send, begins=starmap(self.comm.Isend, sends))

    def _messages(self, message: PostedMessage) -> list[tuple[Any, int]]:
        """Return the header with the memory behind it, or the header and then the memory in parts, with their tags."""
        header_bytes = 8 * (2 + len(message.shape))
        is_packed = message.num_bytes <= PACKED_BYTES
        header = np.empty(header_bytes + message.num_bytes if is_packed else header_bytes, np.uint8)
        header[:header_bytes].view(np.int64)[:] = message.code, len(message.shape), *message.shape
        if not is_packed:
            return [
                (header, HEADER_TAG),
                *((part, PAYLOAD_TAG) for part in self._parts(message, message.work)),
            ]
        ctypes.memmove(header.ctypes.data + header_bytes, message.address, message.num_bytes)
        return [(header, HEADER_TAG)]

    def _parts(self, message: PostedMessage, work: torch.Tensor) -> list[Any]:
        """Return the memory in parts that MPI can count."""
        flat = work.view(-1)
        most = max(1, message.memory_bytes // work.element_size())
        return [
            buffers.as_bytes(self.MPI, flat[begin : begin + numel])
            for begin, numel in partition.chunks(flat.numel(), most)
        ]


def described(header: np.ndarray, source: int) -> Received:
    """Return what a rank has sent, with the values if they are short."""
    code, num_dims = header[:16].view(np.int64).tolist()
    header_bytes = 8 * (2 + num_dims)
    shape, dtype = tuple(header[16:header_bytes].view(np.int64).tolist()), dtypes.from_code(code)
    assert dtype is not None
    num_bytes = math.prod(shape) * dtype.itemsize
    return Received(source, num_bytes, code, shape, header[header_bytes : header_bytes + num_bytes])


def end_send(status: Any) -> None:
    """End a send, as the last stage of it."""


def _whole(call: Callable[..., Any], MPI: Any, work: torch.Tensor, to: tuple[int, int], most: int) -> Iterator[Any]:
    """Begin one message with all of the memory, as a datatype of blocks if MPI cannot count its bytes.

    One message is necessary: several messages from different ranks could be received in any order.
    """
    memory = buffers.as_bytes(MPI, work)
    if work.nbytes <= most or not hasattr(MPI.BYTE, "Create_contiguous"):  # without MPI there is no such limit
        return starmap(call, [((memory, MPI.BYTE), *to)])

    def in_blocks(most: int) -> Any:
        num_rows, rest = divmod(work.nbytes, most)
        block = MPI.BYTE.Create_contiguous(most)
        kind = MPI.Datatype.Create_struct([num_rows, rest], [0, num_rows * most], [block, MPI.BYTE]).Commit()
        try:
            return call((memory, 1, kind), *to)
        finally:  # MPI keeps them until the message has ended
            kind.Free()
            block.Free()

    return map(in_blocks, [most])
