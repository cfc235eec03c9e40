"""Messages by the fast path: `send`, `recv` and `sendreceive` like an earlier call, without Python code in between.

Over rings of shared memory these are messages of any length. The kernel takes the lock of the messages of the group.
Over the MPI library these are short messages: the kernel takes the run locks of the queues of their directions, and
packs the header and the values into one message, as Python does, so that these messages are in one order with all
others. If the other rank is late, the message becomes one of Python, with the record or the request of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np
import torch

from ..backends.message_transport import (
    HEADER_TAG,
    MOST_HEADER_BYTES,
    PACKED_BYTES,
    PAYLOAD_TAG,
    MpiTransport,
    Received,
    Stage,
    described,
    end_send,
)
from ..backends.mpi_messages import OF_MESSAGES, STATUS_BYTES, can_call_from_kernels, kernel_fields
from ..backends.ring_transport import Frames, RingTransport
from ..communicators.call_codes import call_code, describe
from ..communicators.call_log import CallLog
from ..communicators.call_queue import CallQueue, RunLock
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.message_record import NO_TAG
from ..errors import TorchMPIError
from ..session import runtime
from ..shared_memory import fast_path, kernels
from ..shared_memory.kernels import records
from ..shared_memory.memory_layout import LockFields, LogFields
from ..tensors import dtypes, writable
from .message_handle import MessageHandle, adopt, continue_deferred, mismatch, transport_of

_MOST_MESSAGES = 64  # of a group, as the fast path looks through all of them
_YIELD_NANOSECONDS = 300_000
"""How long the fast path waits for the other rank, after the polls."""
_MOST_EXCHANGED_BYTES = 4 << 20  # of which the fast path keeps a copy
_POLL_NANOSECONDS, _BRIEF_NANOSECONDS = 1_000_000, 10_000
"""How long for one on another host, and until what is sent in the background has left. On a core that another program
wants, a thread that lets it go waits for its next turn."""


def cache_message(
    name: str,
    group: Group,
    tensor: torch.Tensor,
    key: Hashable,
    comm: Any,
    src: int,
    dst: int,
    tag: int = NO_TAG,
    *,
    is_background: bool = False,
) -> None:
    """Let the fast path make calls like this one, if it can.

    Args:
        name: ``send``, ``recv`` or ``sendreceive``; of the last one in the background, each direction is one call.
        group: The group.
        tensor: The tensor, in host memory.
        key: The ranks, and the tag if there is one.
        comm: The communicator that the program passes.
        src: The rank to receive from, -1 for none.
        dst: The rank to send to, likewise.
        tag: The tag.
        is_background: Whether the program goes on: the fast path returns a message that has not ended.
    """
    make: type[_RingMessage | _MpiMessage]
    if isinstance(transport_of(group), RingTransport):
        make = _RingMessage
    elif can_call_from_kernels(group):
        make = _MpiMessage
    else:
        return
    made = partial(make, name, group, src, dst, tensor.dtype, tag, is_background=is_background)
    call = fast_path.Name(key, tensor.dtype, comm)
    which = "send" if src < 0 else "recv" if dst < 0 else "sendreceive"
    fast_path.cache_call(which, call, partial(_cached, made, group, src, dst, (name, tensor.dtype, tag, is_background)))


def receive_later(tensor: Any, key: Hashable, comm: Any) -> DeferredReceive | None:
    """Return the handle of a receive like an earlier one; None if there was none, or if Python must check it."""
    plan: _FastMessage | None = fast_path.find_receive(tensor, None, key, comm, None)
    return None if plan is None else plan.receive_later(tensor)


def exchange_later(
    tensor: Any, keys: tuple[Hashable, Hashable], comm: Any
) -> tuple[DeferredReceive, MessageHandle | None] | None:
    """Send a copy of a tensor, and return the handle of a receive into it, as in an earlier call.

    Args:
        tensor: The tensor.
        keys: The keys of the receive and of the send.
        comm: The communicator that the program passes.

    Returns:
        The receive, and the send if it has not ended; None if there was no such call, or if Python must check it.
    """
    plan: _FastMessage | None = fast_path.find_receive(tensor, None, keys[0], comm, None)
    if plan is None or not writable.is_writable(tensor):  # Python refuses it, before anything is sent
        return None
    copy = tensor.detach().clone()
    sent = fast_path.send(copy, None, keys[1], comm, None)
    return None if sent is None else (plan.receive_later(tensor), None if sent is copy else sent)


def _cached(make: Any, group: Group, src: int, dst: int, kind: Hashable) -> fast_path.CachedCall | None:
    """Return the call for the fast path; None if the group is closed, or has too many."""
    queues = _queues(group, src, dst)
    if any(queue.closed for queue in queues):
        return None
    calls: dict[Hashable, Any] = queues[0].fast_calls
    key = make.func, src, dst, kind
    if key not in calls:
        if sum(len(queue.fast_calls) for queue in list(group.peer_queues.values())) >= _MOST_MESSAGES:
            return None
        calls[key] = make()
    call: fast_path.CachedCall = calls[key].cached_call
    return call


def _queues(group: Group, src: int, dst: int) -> list[CallQueue]:
    """Return the queues of a message, that of the receive first."""
    receives = [] if src < 0 else [group.peer_queue("receive", src)]
    return receives + ([] if dst < 0 else [group.peer_queue("send", dst)])


class _FastMessage:
    """A message that a program repeats: what the kernel needs, and its counts."""

    cached_call: fast_path.CachedCall
    _record: Any
    _locks: list[RunLock]
    """Which the kernel holds when it leaves a message to Python."""

    def __init__(
        self, name: str, group: Group, src: int, dst: int, dtype: torch.dtype, tag: int, *, is_background: bool
    ) -> None:
        self.name, self.group, self.src, self.dst, self.dtype, self.tag = name, group, src, dst, dtype, tag
        self.is_background, self.transport = is_background, transport_of(group)
        self.call_log, self._counts = CallLog(group.name, group.rank, group.size), group.context.call_counts
        self._is_part = name == "sendreceive" and src < 0
        """Whether it is the send of an exchange in the background, of which the receive is counted."""
        if not self._is_part:
            self._counts.add_exchanges(group.name, self.call_log, receives=src >= 0)
        self._known: tuple[object, str] = None, ""
        self._handed: tuple[int, list[MessageHandle]] = 0, []
        """The messages of the call with this number, from when they are given to Python until `settle` returns."""
        self._whom = f"from rank {src}" if src >= 0 else f"to rank {dst}"

    def cached(self, record: int, run_lock: RunLock) -> fast_path.CachedCall:
        """Return the call for the fast path."""
        code = call_code(self.name, None, dtypes.info(self.dtype).code)
        call = fast_path.CachedCall(record, self.call_log, run_lock, code, code, self.settle, self.abort)
        return call._replace(bound=self) if self.is_background and self.src >= 0 else call

    def channels(self, tag: int = NO_TAG) -> dict[str, int]:
        """Return the entries of the flight record."""
        ranks, channel, found = self.group.world_ranks, partial(self.group.channels.channel, tag=tag), {}
        if self.dst >= 0:
            found["send_channel"] = channel(ranks[self.dst], is_receive=False).address
        if self.src >= 0:
            found["receive_channel"] = channel(ranks[self.src], is_receive=True).address
        return found

    def doing(self) -> str | None:
        """Return the description of the message that is under way, the same object as long as it is."""
        current = self.call_log.current
        if current is None:
            return None
        if current != self._known[0]:
            self._known = current, f"{describe(*current[1:])} {self._whom}"
        return self._known[1]

    def close(self) -> None:
        """Keep the counts of the messages, but not their call log."""
        if not self._is_part:
            self._counts.free_exchanges(self.call_log)

    def receive_later(self, tensor: torch.Tensor) -> DeferredReceive:
        """Return the handle of a receive into a tensor like that of the call: deferred, if nothing is under way."""
        seen = writable.known.get(id(tensor))
        if seen is None or seen() is not tensor:
            writable.refuse_read_only(self.group.where, self.name, tensor)
        receive, transport = DeferredReceive(self, tensor), self.transport
        if transport.defer(receive) and not transport.is_watched:
            continue_deferred(transport)
        return receive

    def receive(self, tensor: torch.Tensor) -> Any:
        """Receive by the fast path: the tensor, the message if it has not arrived yet, None if Python must do it."""
        received = fast_path.recv(tensor, None, self, self.group, None)
        if received is None:
            queue, call = self.group.peer_queue("receive", self.src), self.cached_call
            fast_path.cache_call(
                "recv", fast_path.Name(self, self.dtype, self.group), lambda: None if queue.closed else call
            )
        return received

    def settle(self, status: int, tensor: torch.Tensor, _: Any) -> torch.Tensor | MessageHandle:
        """Wait for a message that the other rank delays, or return it; raise the error of one that has failed."""
        if not self._is_unfinished:
            self._leave()
            raise self._error(status, tensor)
        try:
            messages = self._hand_over(tensor, is_background=self.is_background)
            if self.src < 0 or not self.is_background:  # a deferred one begins the others when it knows its message
                self.transport.begin_deferred()  # the others could wait for this rank to receive them
            if not self.is_background:
                for message in messages:
                    message.wait()
        except BaseException:
            self.abort(tensor)
            raise
        self._handed = 0, []
        return messages[0] if self.is_background else tensor

    def abort(self, tensor: torch.Tensor) -> None:
        """Leave the message after an interrupt: what has begun to leave, or to arrive, does so."""
        if not self._is_unfinished:
            self._leave()
            return
        messages = self._hand_over(tensor)
        is_interrupted = not any(message.failed for message in messages)
        for message in messages:
            message.leave(withdraws=is_interrupted)
        self._handed = 0, []

    def _leave(self) -> None:
        """Remove the message from the call log."""
        self.call_log.take_over(kernels.load()["read_ticks"]())
        self.call_log.abandon()

    def _hand_over(self, tensor: torch.Tensor, *, is_background: bool = False) -> list[MessageHandle]:
        """Have Python continue what the kernel has begun; release its locks; return the messages, the receive first.

        After an interrupt `abort` completes this, until the call has left the log, and leaves the messages: what has
        begun must neither be lost nor be continued twice.
        """
        if seq := self.call_log.log_fields[LogFields.active]:
            if self._handed[0] != seq:
                self._handed = seq, self._make(tensor, is_background)
            for message in self._handed[1]:
                if not message.has_ended:
                    self._continue(message)
            for lock in self._locks:
                lock.fields[LockFields.entered] = 0
            self._leave()
        return self._handed[1]

    def _make(self, tensor: torch.Tensor, is_background: bool) -> list[MessageHandle]:
        """Return the messages of a tensor, the receive first."""
        make = partial(
            MessageHandle, self.group, self.name, tag=self.tag, is_background=is_background, begun=self._record.begun
        )
        messages, send = [], None
        if self.dst >= 0:
            send = make(self._sent_of(tensor), self.dst, is_receive=False, is_part=self._is_part or self.src >= 0)
            messages.append(send)
        if self.src >= 0:
            messages.insert(0, make(tensor, self.src, is_receive=True, exchange=send))
        return messages

    def _sent_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what is sent of a tensor."""
        return tensor

    @property
    def _is_unfinished(self) -> bool:
        """Whether the kernel has left the message to Python, with its locks."""
        raise NotImplementedError

    def _continue(self, message: MessageHandle) -> None:
        """Give a message to its transport, or end it; a second time, if an interrupt has come in the first."""
        raise NotImplementedError

    def _error(self, status: int, tensor: torch.Tensor) -> Exception:
        """Return the error for a status."""
        raise NotImplementedError


class _RingMessage(_FastMessage):
    """A message through a ring of shared memory.

    In the background, what is sent is what the ring has room for.
    """

    def __init__(
        self, name: str, group: Group, src: int, dst: int, dtype: torch.dtype, tag: int, *, is_background: bool
    ) -> None:
        super().__init__(name, group, src, dst, dtype, tag, is_background=is_background)
        transport = self.transport
        assert isinstance(transport, RingTransport)
        self._frames = Frames()
        self._frames.write(tag, 0, dtypes.info(dtype).code)
        waits = not is_background or src >= 0
        self._record = records.MessageCall.new().write(
            out=transport.ring(group.rank, dst) if dst >= 0 else 0,
            into=transport.ring(src, group.rank) if src >= 0 else 0,
            receiver=transport.ring(dst, dst) if dst >= 0 else 0,
            sender=transport.ring(src, src) if src >= 0 else 0,
            capacity=transport.capacity,
            polls=transport.polls if waits else 0,
            patience=_YIELD_NANOSECONDS if waits else 0,
            is_background=is_background,
            has_tag=tag != NO_TAG,
            item_bytes=dtype.itemsize,
            lock=transport.lock.address,
            call_log=self.call_log.address,
            **self.channels(tag),
        )
        for request in (self._record.sending, self._record.receiving):
            request.frame, request.found = self._frames.frame, self._frames.found
        self._locks, self._own_lock = [transport.lock], RunLock()
        self.cached_call = self.cached(int(self._record), self._own_lock)

    @property
    def _is_unfinished(self) -> bool:
        """Whether a part is left: the kernel keeps the lock then."""
        return bool(self._record.sending.state != records.ENDED or self._record.receiving.state != records.ENDED)

    def _error(self, status: int, tensor: torch.Tensor) -> Exception:
        """Return the error of a message that did not fit."""
        received = self._frames.received(self.src)
        return mismatch(self.group, self.name, tensor, received, compares_shape=self.tag == NO_TAG)

    def _sent_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in an exchange: received values must not overwrite those that have not been sent."""
        if self.src >= 0:
            tensor = tensor.detach().clone()
            self._record.sending.address = tensor.data_ptr()
        return tensor

    def _continue(self, message: MessageHandle) -> None:
        """Post a message, or end it."""
        record = self._record.receiving if message.is_receive else self._record.sending
        if record.state != records.ENDED:
            adopt(message, self._frames, record)
        else:
            message.end_record()
            message.finish(self._frames.received(self.src) if message.is_receive else None)


def _failed(error: BaseException) -> Handle[Any]:
    handle = Handle[Any]()
    handle.end(error=error)
    return handle


class DeferredReceive(Handle[Any]):
    """The handle of a receive of a program that has gone on: it begins when the program waits for it.

    Then the fast path makes it, if it is the first one of its group and nothing else has been posted meanwhile.
    Otherwise it is a :class:`MessageHandle`: as soon as another message is posted that could overtake it, or one of the
    group does not end at once; the program looks at it; or the progress thread does for the second time, within two
    milliseconds.

    Args:
        plan: The message that is repeated.
        tensor: The tensor to receive into.
    """

    __slots__ = ("_begun", "_has_arrived", "_plan", "tensor")

    def __init__(self, plan: _FastMessage, tensor: torch.Tensor) -> None:
        # Not that of Handle: the state is that of the message, of which most receives have none.
        self._plan, self.tensor, self._has_arrived = plan, tensor, False
        self._begun: Handle[Any] | None = None

    @property
    def is_deferred(self) -> bool:
        """Whether it has neither begun nor ended."""
        return self._begun is None and not self._has_arrived

    def begin(self) -> None:
        """Begin the receive; its handle has the error if that fails."""
        plan = self._plan
        try:
            message = MessageHandle(plan.group, plan.name, self.tensor, plan.src, plan.tag, is_receive=True)
            self._begun = message  # before it is posted, which may end others, whose callbacks may look at this one
            message.start(was_deferred=True)
        except Exception as error:
            self._begun = self._begun or Handle()
            self._begun.end(error=error)
        except BaseException:  # an interrupt, of a thread that may wait for another message
            begun = self._begun
            if begun is not None and not (begun.has_ended or plan.transport.carries(message)):
                self._begun = None
            raise

    def receive(self) -> bool:
        """Receive by the fast path if that is possible; return whether the message has arrived."""
        if not self.is_deferred:
            return self._has_arrived
        plan, transport = self._plan, self._plan.transport
        with transport.deferring:
            deferred = transport.deferred
            if not deferred or deferred[0] is not self:
                return self._has_arrived
            deferred.popleft()
            try:
                received = plan.receive(self.tensor)
            except BaseException as error:
                self._begun = _failed(error)
                raise
            else:
                if received is None:
                    deferred.appendleft(self)
                elif received is self.tensor:
                    self._has_arrived = True
                else:
                    self._begun = received
            finally:
                transport.lock.fields[LockFields.deferred] = len(deferred)
        if self._begun is not None:
            transport.begin_deferred()
        return self._has_arrived

    def handle(self) -> Handle[Any]:
        """Return the handle of the message, which begins now if it has not."""
        if self.is_deferred:
            self._plan.transport.begin_deferred()
        if self._begun is None:
            self._begun = Handle.completed(self.tensor)
        return self._begun

    def wait(self, timeout: float | None = None) -> Any:
        """Receive, and return the tensor; as of any handle, raise the error, or StallError after `timeout`."""
        if timeout is None and self.receive():
            return self.tensor
        return self.handle().wait(timeout)

    def done(self) -> bool:
        """Return whether the message has ended; it begins now, if it has not."""
        return self.handle().done()

    def run_here(self) -> None:
        """Wait until the message has ended, without raising its error."""
        self.handle().run_here()

    def when_done(self, callback: Callable[[], object], *, soon: bool = True) -> None:
        """Call `callback` at the end of the message, which begins now, if it has not."""
        self.handle().when_done(callback, soon=soon)

    @property
    def has_ended(self) -> bool:  # type: ignore[override]
        """Whether the message has ended."""
        return self.handle().has_ended

    @property
    def unseen_error(self) -> BaseException | None:
        """The error, if the message failed and ``wait()`` has not raised it."""
        return self.handle().unseen_error

    @property
    def error(self) -> BaseException | None:
        """The error, if the message has failed; it counts as seen then."""
        return self.handle().error

    @property
    def failed(self) -> bool:
        """Whether the message has ended with an error."""
        return self.handle().failed

    @property
    def source(self) -> int:
        """The rank that sends."""
        return self._plan.src


class _MpiMessage(_FastMessage):
    """A message of MPI: the memory for what is sent to one rank and received from another, of one dtype."""

    def __init__(
        self, name: str, group: Group, src: int, dst: int, dtype: torch.dtype, tag: int, *, is_background: bool
    ) -> None:
        super().__init__(name, group, src, dst, dtype, tag, is_background=is_background)
        most_bytes, is_exchange = runtime.current().config.message_bytes, src >= 0 and dst >= 0
        if is_exchange:  # of which a copy is sent
            most_bytes = min(most_bytes, _MOST_EXCHANGED_BYTES)
        self._sent = np.zeros(MOST_HEADER_BYTES + (most_bytes if is_exchange else PACKED_BYTES), np.uint8)
        self._received = np.zeros(MOST_HEADER_BYTES + PACKED_BYTES, np.uint8)
        self._status = np.zeros(STATUS_BYTES, np.uint8)
        queues = _queues(group, src, dst)
        self._locks = [queue.run_lock for queue in queues]
        self._record = records.MpiMessage.new().write(
            **kernel_fields(group.context.MPI, group.side_comm, self._status, OF_MESSAGES),
            by_mpi=True,
            item_bytes=dtype.itemsize,
            sent_dtype=dtypes.info(dtype).code,
            sent=self._sent.ctypes.data,
            received=self._received.ctypes.data,
            received_bytes=self._received.nbytes,
            packed_bytes=PACKED_BYTES,
            value_bytes=most_bytes,
            send_to=dst,
            receive_from=src,
            has_tag=tag != NO_TAG,
            tag=HEADER_TAG,
            values_tag=PAYLOAD_TAG if tag == NO_TAG else tag,
            send_lock=self._locks[-1].address if dst >= 0 else 0,
            receive_lock=self._locks[0].address if src >= 0 else 0,
            patience=_BRIEF_NANOSECONDS if is_background and src < 0 else _POLL_NANOSECONDS,
            is_background=is_background,
            lock=self.transport.lock.address,
            yields=group.context.is_crowded,
            call_log=self.call_log.address,
            **self.channels(tag),
        )
        group.messages.include(lambda: self._record.num_open)
        self._own_lock = RunLock()
        self.cached_call = self.cached(int(self._record), self._own_lock)

    @property
    def _is_unfinished(self) -> bool:
        """Whether the kernel awaits a part, or has received another one than expected."""
        return bool(self._record.is_unfinished)

    def _error(self, status: int, tensor: torch.Tensor) -> Exception:
        """Return the error of a message that did not fit, or of MPI."""
        if status == records.MISMATCH:
            return mismatch(self.group, self.name, tensor, self._whole, compares_shape=False)
        context, error = self.group.context, self.group.context.MPI.Exception(status)
        what = f"{self.name}({dtypes.short_name(tensor.dtype)} {list(tensor.shape)}) {self._whom}"
        failure = TorchMPIError(f"{self.group.where}: {self.name}: {what} failed: {error}.")
        failure.__cause__ = error
        return context.loss_behind(error) or failure

    @property
    def _whole(self) -> Received:
        """What has been received with a tag."""
        return Received(self.src, self._record.found_bytes, 0, (), None)

    def _continue(self, message: MessageHandle) -> None:
        """Continue the requests of a message from the part that the kernel awaits, or end it."""
        record, from_handle = self._record, self.group.context.MPI.Request.fromhandle
        if message.is_receive:
            self._continue_receive(message)
            return
        parts = (records.DESCRIPTION, record.send), (records.VALUES, record.send_values)
        requests = [from_handle(request[0]) for part, request in parts if record.sending & part]
        if requests:
            adopt(message, Stage(requests, end_send))
        else:
            message.finish(None)

    def _continue_receive(self, receive: MessageHandle) -> None:
        transport = self.transport
        assert isinstance(transport, MpiTransport)
        record, header = self._record, None if self.tag != NO_TAG else self._received
        if not record.receiving:
            received = self._whole if header is None else described(header, self.src)
            is_packed = header is not None and received.num_bytes <= PACKED_BYTES
            receive.finish(received if is_packed else received._replace(memory=None))
            return
        requests = []
        if record.receiving != records.OTHER:
            requests.append(self.group.context.MPI.Request.fromhandle(record.receive[0]))
        if record.receiving == records.VALUES:
            if header is not None:  # it has begun to arrive, so the rest must be received too
                receive.waited_until = record.begun + max(self.call_log.log_fields[LogFields.waited], 0)
            adopt(receive, transport.begun_values_stage(requests, header, self.src))
        else:
            adopt(receive, transport.header_stage(receive, requests, self._received))
