"""A message between two ranks: what `send`, `recv`, `sendreceive` and the messages of torch.distributed are.

A message begins when it is made and is continued by the thread that waits for it, by threads that wait for other
messages of the group, and by the progress thread while nobody waits. What carries it is the transport of its group:
rings of shared memory if all ranks are on one host, the MPI library otherwise (docs/design/messages.md).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch

from ..backends.message_transport import PACKED_BYTES, MpiTransport, Received, Transport
from ..backends.ring_transport import RingTransport
from ..communicators.conditions import Alarm
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.message_record import ANY_RANK, NO_TAG
from ..errors import MismatchError, RankLostError, StallError, TorchMPIError
from ..session import runtime
from ..tensors import buffers, dtypes, streams
from ..timeline import events

_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS, _AWAITED_PAUSE_SECONDS = 50e-6, 1e-3, 10e-3
_SURE = 3
"""After as many messages that have ended without it, it is not woken for the next one."""


def transport_of(group: Group) -> Transport:
    """Return what carries the messages of a group: the same kind on all its ranks."""
    if group.transport is None:
        with group.binding:
            if group.transport is None:
                shm = runtime.current().selector.backends["shm"]
                if group.status_board is not None and shm.why_not("allreduce", "cpu", group) is None:
                    group.transport = RingTransport(group)
                    group.attachments.append(group.transport)
                else:
                    group.transport = MpiTransport(group)
    transport: Transport = group.transport
    return transport


class MessageHandle(Handle[Any]):
    """A message that has begun, as a handle.

    Args:
        group: The group.
        name: ``send``, ``recv`` or ``sendreceive``, for messages to the user.
        tensor: The checked tensor to send, or to receive into.
        peer: The other rank; None to receive from any.
        tag: The tag; messages without one compare dtype and shape, others the length.
        is_receive: The direction.
        exchange: Of the receive of a `sendreceive`: its send, which has begun before.
        is_part: Whether it is the send of a `sendreceive`: the receive is counted, recorded and shown for both.
        is_background: Whether the program goes on.
        result: What ``wait()`` returns, given by a function.
        begun: When the message began, if before, in nanoseconds.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int = NO_TAG,
        *,
        is_receive: bool,
        exchange: MessageHandle | None = None,
        is_part: bool = False,
        is_background: bool = True,
        result: Callable[[], Any] | None = None,
        begun: int = 0,
    ) -> None:
        super().__init__()
        self.group, self.name, self.tensor, self.peer, self.tag = group, name, tensor, peer, tag
        self.is_receive, self._exchange, self._is_part = is_receive, exchange, is_part
        self._result_of, self._is_background = result, is_background
        self.code, self.shape, self.num_bytes = dtypes.info(tensor.dtype).code, tuple(tensor.shape), tensor.nbytes
        self.call_queue = group.peer_queue("receive" if is_receive else "send", -1 if peer is None else peer)
        rank = ANY_RANK if peer is None else group.world_ranks[peer]
        self._channel, self._number = group.channels.channel(rank, is_receive=is_receive, tag=tag), 0
        self._begin = begun or events.now()
        self.waited_until = 0
        self.source = -1 if is_receive else group.rank
        """The rank that sends the message; -1 until that is known."""
        self.is_waited_for = False
        """Whether a thread continues the message, so that the progress thread need not."""
        self._origin = None if events.recorder is None else events.recorder.origin(self._begin if is_background else 0)
        show = events.show_task if is_background and not is_part else None
        self._show_end = None if show is None else show(self._description, self.described_call(), lambda: None)
        self.transport = transport_of(group)
        is_on_host = tensor.device.type == "cpu"
        takes_device = not is_on_host and tag == NO_TAG and self._mpi_takes(tensor.device.type)
        self._mark, self.is_elsewhere = None, False
        if is_receive:
            is_direct = (is_on_host or takes_device) and buffers.is_direct(tensor)
            self.work = tensor.detach() if is_direct else self._host_memory()
            self._mark = None if is_on_host else streams.fence(tensor)
            self._memory = self.work if self.work.device.type == "cpu" else self._host_memory()
        else:
            to_host = not takes_device or self.num_bytes <= PACKED_BYTES
            self.work = self._memory = buffers.plain(tensor, to_host=to_host)
            if not is_on_host:
                streams.settle(self.work)  # MPI reads device memory without regard to streams
                self.is_elsewhere = self.work.device.type != "cpu"
        self.address = self._memory.data_ptr()

    @cached_property
    def doing(self) -> str:
        """The message in words, for the watchdog: the same object as long as it is under way."""
        whom = "any rank" if self.peer is None else f"rank {self.peer}"
        kind = f"{self.name}({dtypes.short_name(self.tensor.dtype)} {list(self.shape)})"
        return f"{kind} {'from' if self.is_receive else 'to'} {whom}"

    @property
    def what(self) -> str:
        """The rank and the function, for messages to the user."""
        return f"{self.group.where}: {self.name}"

    @property
    def _description(self) -> str:
        return f"{self.group.where}: {self.doing}"

    @_description.setter
    def _description(self, _: str) -> None:
        """Ignore what a handle is told: most messages need no description."""

    def _mpi_takes(self, device_type: str) -> bool:
        """Return whether the MPI library reads the memory of a device."""
        backend = runtime.current().selector.choose(self.name, device_type, "mpi", self.group)
        return backend.takes(device_type, self.name)

    def _host_memory(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.tensor.dtype, device="cpu")

    @property
    def compares_shape(self) -> bool:
        """Whether dtype and shape must be equal, rather than the length alone."""
        return self.tag == NO_TAG

    @property
    def memory_bytes(self) -> int:
        """The longest message of MPI."""
        return runtime.current().config.message_bytes

    def start(self, *, was_deferred: bool = False) -> MessageHandle:
        """Begin the message; return it."""
        try:
            self.transport.post(self, was_deferred=was_deferred)
            if not self.has_ended:
                self.note_begin()
        except BaseException as error:
            if not self.leave() and self._number and not self.has_ended:
                self._channel.withdraw()
            raise self._failure(error) from error
        return self

    def note_begin(self) -> None:
        """Have a message that has begun, and has not ended, waited for when the group is freed, and continued."""
        if self.compares_shape:
            self.group.open_messages.add(self)
        if self._is_background:
            continue_in_background(self)

    # --- For the transport ------------------------------------------------------------------------------------------

    def begin_record(self) -> None:
        """Count the message, which begins now."""
        self._number = self._channel.begin(self.code, self.num_bytes)

    def end_record(self) -> None:
        """Count its end."""
        self._channel.end()

    def finish(self, received: Received | None) -> None:
        """End the message with what has been received; None for a send."""
        if (received is None and self.is_elsewhere) or (received is not None and received.is_elsewhere):
            self.is_elsewhere, self.transport = False, MpiTransport(self.group)
            self.transport.post_values(self, received)
            return
        try:
            if received is not None:
                self.source = received.source
                device = None if self._mark is None else self.tensor.device
                streams.run_after(self._mark, device, partial(self._take, received))
        except Exception as error:  # an interrupt has its transport end the message once more
            self.fail(error)
        else:
            self.end(self.tensor if self._result_of is None else self._result_of())

    def fail(self, error: BaseException) -> None:
        """End the message with an error."""
        failure = self._failure(error)
        if self.compares_shape:  # works of torch.distributed may be dropped
            self.call_queue.failed = [*(each for each in self.call_queue.failed if each.unseen_error), self]
        self.end(error=failure)

    def pause(self, seconds: float) -> None:
        """Sleep, at most until the message has ended."""
        if isinstance(self.transport, MpiTransport):
            self.transport.sleep(self, seconds)
        elif self._finished.acquire(timeout=seconds):
            self._finished.release()

    # --- For the program --------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the message has ended; return the tensor, or raise its error, or StallError after `timeout`."""
        if not self.has_ended:
            recorder, since = events.recorder, events.now()
            try:
                self._continue(timeout)
            finally:
                self.call_queue.doing = None
            if recorder is not None and self._is_background:
                recorder.slice("wait", "wait", since, call=self._description)
        return super().wait(timeout)

    def run_here(self) -> None:
        """Wait until the message has ended, without raising its error."""
        self._continue(None)

    def _continue(self, timeout: float | None) -> None:
        limit, turn, context = None if timeout is None else time.monotonic() + timeout, 0, self.group.context
        self.is_waited_for = True
        try:
            while not self.has_ended:
                turn = self.transport.proceed(self, turn)
                if turn > self.transport.brief_turns:
                    self.call_queue.doing = self.doing  # for the watchdog
                    if context.loss and context.raises_lost_ranks and self.withdraw():
                        self.fail(RankLostError(f"{context.loss}. Continue with recover()."))
                if limit is not None and time.monotonic() > limit and not self.has_ended:
                    raise StallError(
                        f"{self._description} has not ended after {timeout:g} s. It continues; wait() again."
                    )
        finally:
            self.is_waited_for = False

    def test(self) -> bool:
        """Continue the message if that is possible at once; return whether it has ended."""
        if not self.has_ended:
            self.transport.test(self)
        return self.has_ended

    def done(self) -> bool:
        """Return whether the message has ended."""
        return self.test()

    def withdraw(self) -> bool:
        """Do not wait for the message any more, unless it has begun to arrive or to leave; return whether it was so."""
        if self.has_ended or not self.transport.cancel(self):
            return False
        self._channel.withdraw()
        if self.is_receive:
            self._channel.is_exact, self._number = False, 0  # later receives have their numbers already
        self.group.open_messages.discard(self)
        return True

    def leave(self, *, withdraws: bool = True) -> bool:
        """Leave the message after an interrupt; return whether it was under way.

        An interrupted receive must not take a later message, so it is withdrawn. What arrives already, its sender waits
        for: that is continued, and everything if nothing is to be withdrawn.
        """
        if withdraws and self.withdraw():
            return True
        if is_carried := self.transport.carries(self):
            continue_in_background(self)
        return is_carried

    def abort(self, error: TorchMPIError) -> None:
        """End a receive that exceeds its timeout with an error, so that it does not take a later message."""
        if self.is_receive and self.withdraw():
            self.fail(error)
            self._seen = True  # the caller raises it

    @property
    def description(self) -> str:
        """The rank and its call, for messages to the user."""
        return self._description

    def described_call(self) -> events.ShownCall:
        """Return what torch.profiler shows of the message."""
        return self.group.described((self.name, "", dtypes.short_name(self.tensor.dtype), -1), self.tensor)

    # --- Its end ----------------------------------------------------------------------------------------------------

    def _take(self, received: Received) -> None:
        """Compare a received message with the tensor, and write its values where they are not yet."""
        there = received.dtype, received.shape
        differs = there != (self.code, self.shape) if self.compares_shape else received.num_bytes != self.num_bytes
        if differs:
            raise mismatch(self.group, self.name, self.tensor, received, compares_shape=self.compares_shape)
        memory = self._memory
        if received.memory is not None and received.num_bytes:
            ctypes.memmove(memory.data_ptr(), np.ascontiguousarray(received.memory).ctypes.data, received.num_bytes)
        arrived = memory if received.memory is not None or isinstance(self.transport, RingTransport) else self.work
        if arrived.data_ptr() != self.tensor.data_ptr() or arrived.device != self.tensor.device:
            buffers.overwrite(self.tensor, arrived)
        else:
            buffers.touch(self.tensor)

    def _failure(self, error: BaseException) -> BaseException:
        """Return an error of MPI as one that names the call, or the loss of a rank behind it."""
        context = self.group.context
        if not isinstance(error, context.MPI.Exception):
            return error
        failure = TorchMPIError(f"{self.what}: {self.doing} failed: {error}.")
        failure.__cause__ = error
        return context.loss_behind(error) or failure

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        """Count and record the message before other threads see its end."""
        group, now = self.group, events.now()
        group.open_messages.discard(self)
        if not self._is_part:
            if error is None:
                waited = max(self.waited_until - self._begin, 0) if self.is_receive and self.waited_until else None
                group.context.call_counts.add_message(group.name, self.name, self.num_bytes, now - self._begin, waited)
            if self._show_end is not None:
                self._show_end()
            if (recorder := events.recorder) is not None and self._origin is not None:
                self._record(recorder, now, error)
        super().end(result, error)

    def _record(self, recorder: events.Recorder, end: int, error: BaseException | None) -> None:
        group, peer = self.group, self.source if self.is_receive else self.peer
        if peer is None or peer < 0:
            peer = self.peer
        rank = -1 if peer is None else group.world_ranks[peer]
        own = self._message_number(rank)
        sent, received = (None, own) if self.is_receive else (own, None)
        begin = self._begin
        if self._exchange is not None:
            exchange = self._exchange
            assert exchange.peer is not None
            sent, begin = exchange._message_number(group.world_ranks[exchange.peer]), min(begin, exchange._begin)
        assert self._origin is not None
        recorder.report(
            events.MessageRecord(
                group.info, self.name, dtypes.short_name(self.tensor.dtype), self.num_bytes, rank, sent, received,
                self.tag, self.call_queue.name, is_background=self.tag != NO_TAG, begin=begin, end=end,
                thread=threading.get_ident(), origin=events.origin_of(self._origin),
                error="" if error is None else type(error).__name__,
            )
        )  # fmt: skip

    def _message_number(self, rank: int) -> events.MessageNumber | None:
        is_known = rank >= 0 and self._number and self._channel.is_exact
        return events.MessageNumber(rank, self._number) if is_known else None


def mismatch(
    group: Group, name: str, tensor: torch.Tensor, received: Received, *, compares_shape: bool = True
) -> MismatchError:
    """Return the error for a message that does not fit the tensor."""
    own = f"{dtypes.short_name(tensor.dtype)} {list(tensor.shape)}"
    if not compares_shape:
        return MismatchError(
            f"{group.where}: rank {received.source} sent {received.num_bytes} bytes, but the tensor to receive into "
            f"has {tensor.nbytes}: {own}. Make them equal."
        )
    dtype = dtypes.from_code(received.dtype)
    assert dtype is not None
    return MismatchError(
        f"{group.where}: {name}: rank {received.source} sent {dtypes.short_name(dtype)} {list(received.shape)}, but "
        f"the tensor to receive into is {own}. Make them equal; the message is dropped."
    )


def adopt(message: MessageHandle, *begun: Any) -> None:
    """Continue a message that the fast path has begun, for the transport in this form; the caller has its lock."""
    message._number = message._channel.number
    transport: Any = message.transport
    transport.adopt(message, *begun)
    message.note_begin()


# --- Progress -------------------------------------------------------------------------------------------------------


class Continued(Protocol):
    """A message that has begun, or receives that will."""

    transport: Transport
    is_waited_for: bool

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to do."""

    def test(self) -> bool:
        """Continue it if that is possible at once; return whether nothing is left to do."""


class _DeferredReceives:
    """The receives of a transport that have not begun: the progress thread begins those that it finds twice.

    Most looks come while the program has released the GIL to send, and is about to wait for its receive.
    """

    is_waited_for = False

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._found = 0

    @property
    def has_ended(self) -> bool:
        """Whether there are none; if so, the next one calls the thread."""
        transport = self.transport
        transport.is_watched = False  # before the look: a receive that comes after it calls the thread
        transport.is_watched = bool(transport.deferred)
        return not transport.is_watched

    def test(self) -> bool:
        """Begin them, if the first one is that of the last look."""
        with self.transport.deferring:
            first = id(self.transport.deferred[0]) if self.transport.deferred else 0
            if first == self._found:
                self.transport.begin_deferred()
        self._found = first
        return self.has_ended


class _ProgressThread(threading.Thread):
    """Continues the messages that no thread waits for.

    It is woken for each message as long as it has ended one of the last ones, because the program computes meanwhile.
    If the program waits for its messages, the thread looks a millisecond later: a thread that is woken takes the GIL
    and the messages from the one that waits. Each look also takes the core from what the program computes, so the
    thread sleeps while there are no messages, and longer while threads wait for all of them.
    """

    def __init__(self) -> None:
        super().__init__(name="torchmpi messages", daemon=True)
        self._messages: set[Continued] = set()
        self._alarm, self._is_ending = Alarm(_MOST_PAUSE_SECONDS), False
        self._num_unaided = 0
        """Messages that have ended without this thread, since it has ended one."""

    def add(self, message: Continued) -> None:
        self._messages.add(message)
        if self._num_unaided < _SURE:
            self._alarm.ring()
        else:
            self._alarm.set_once()

    def run(self) -> None:
        """Test the messages, at increasing intervals while none of them ends."""
        pause, num_left = _LEAST_PAUSE_SECONDS, 0
        while not self._is_ending:
            self._alarm.wait()
            messages = list(self._messages)
            pause = min(pause * 1.25, _MOST_PAUSE_SECONDS) if len(messages) <= num_left else _LEAST_PAUSE_SECONDS
            for message in messages:
                if message.has_ended:
                    self._num_unaided += 1
                    self._messages.discard(message)
                elif not message.is_waited_for and message.test():
                    self._num_unaided = 0
                    self._messages.discard(message)
                    pause = _LEAST_PAUSE_SECONDS
            if num_left := len(self._messages):
                are_awaited = all(message.is_waited_for for message in list(self._messages))
                self._alarm.set(_AWAITED_PAUSE_SECONDS if are_awaited else pause)

    def close(self) -> None:
        """End the thread."""
        self._is_ending = True
        self._alarm.ring()
        if self is not threading.current_thread() and self.is_alive():  # a forked child has no threads
            self.join()
            self._alarm.close()


_progress: tuple[runtime.Runtime, _ProgressThread] | None = None
_starting = threading.Lock()


def continue_in_background(message: Continued) -> None:
    """Have a message continued until it has ended, while no thread waits for it."""
    global _progress
    running = runtime.current()
    if not running.threads_allowed and isinstance(message.transport, MpiTransport):
        return
    with _starting:
        if _progress is None or _progress[0] is not running:
            thread = _ProgressThread()
            thread.start()
            running.resources.callback(thread.close)
            _progress = running, thread
        _progress[1].add(message)


def continue_deferred(transport: Transport) -> None:
    """Have the receives that a transport has deferred begun, unless the program waits for them before."""
    transport.is_watched = True
    continue_in_background(_DeferredReceives(transport))
