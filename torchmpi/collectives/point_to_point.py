"""Point-to-point messages: send, recv, sendreceive.

Messages between a pair of ranks arrive in the order in which they were sent. A header, by which a receiver detects that
its tensor does not fit and raises an error, is sent with short tensors in one message, and before long ones.
Asynchronous messages use one queue per peer and direction: sending to one rank never waits for another.
"""

from __future__ import annotations

import ctypes
import math
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from ..backends.mpi_messages import can_call_from_kernels
from ..communicators.call_queue import CallQueue
from ..communicators.communicator import Communicator
from ..communicators.conditions import sleep_until
from ..communicators.group import Group
from ..communicators.handle import Handle, JoinedHandle
from ..communicators.levels import Comm, used
from ..communicators.message_record import NO_TAG, Channel
from ..errors import ArgumentError, MismatchError, TorchMPIError
from ..other_names import refuses_keywords, unknown_keyword
from ..session import runtime
from ..shared_memory import fast_path
from ..shared_memory.kernels.records import MISMATCH
from ..tensors import buffers, dtypes, partition, streams, writable
from ..tensors.numbers import Value, as_tensor, is_number, restore
from ..timeline import events
from .prepared import checked_dtype
from .short_messages import HEADER_TAG, MOST_HEADER_BYTES, PACKED_BYTES, cached_exchange

__all__ = ["recv", "recv_async", "send", "send_async", "sendreceive", "sendreceive_async"]

_PAYLOAD_TAG = 2


@refuses_keywords
def send(tensor: torch.Tensor | complex | np.generic, dst: int, *, comm: Comm = None, **_unknown: NoReturn) -> None:
    """Send a tensor or number to a rank that calls :func:`recv`; return when the tensor may be changed.

    The tensor is not changed.

    Args:
        tensor: The tensor or number to send.
        dst: The rank that receives it.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Raises:
        ArgumentError: The tensor cannot be sent, or `dst` is not another rank of the communicator.

    Example:
        if mpi.rank() == 0:
            mpi.send(torch.ones(3), 1)
        elif mpi.rank() == 1:
            received = mpi.recv(torch.empty(3), 0)
    """
    if _unknown:
        raise unknown_keyword(send, _unknown)
    message = _Message("send", tensor, dst, comm)
    if dst == message.group.rank:
        raise ArgumentError(f"{message.what}: a blocking send to oneself never ends. Use send_async, or sendreceive.")
    message.call_queue.run(message.in_order(message.send))


@refuses_keywords
def send_async(tensor: Value, dst: int, *, comm: Comm = None, **_unknown: NoReturn) -> Handle[Value]:
    """Run :func:`~torchmpi.send` in the background, with the same parameters.

    Do not change the tensor before ``wait()`` returns.

    Returns:
        A handle.

    Raises:
        ArgumentError: The tensor cannot be sent, or `dst` is not a rank of the communicator.

    Example:
        handle = mpi.send_async(torch.ones(3), 1)
        handle.wait()
    """
    if _unknown:
        raise unknown_keyword(send_async, _unknown)
    message = _Message("send", tensor, dst, comm)
    return message.submit(message.send)


@refuses_keywords
def recv(tensor: Value, src: int, *, comm: Comm = None, **_unknown: NoReturn) -> Value:
    """Receive a tensor or number from a rank that calls :func:`send`.

    In place: the tensor is overwritten.

    Args:
        tensor: The tensor to receive into, of the shape and dtype that the sender uses; a number to receive a number.
        src: The rank that sends.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Returns:
        The tensor, or the received number.

    Raises:
        ArgumentError: The tensor cannot be received into, or `src` is not another rank of the communicator.
        MismatchError: The sender used another shape or dtype; the message is dropped.

    Example:
        received = mpi.recv(torch.empty(3), 0)
    """
    if _unknown:
        raise unknown_keyword(recv, _unknown)
    message = _Message("recv", tensor, src, comm)
    if src == message.group.rank:
        raise ArgumentError(
            f"{message.what}: a blocking receive from oneself never ends. Use recv_async, or sendreceive."
        )
    result: Value = message.call_queue.run(message.in_order(message.receive))
    return result


@refuses_keywords
def recv_async(tensor: Value, src: int, *, comm: Comm = None, **_unknown: NoReturn) -> Handle[Value]:
    """Run :func:`~torchmpi.recv` in the background, with the same parameters.

    Returns:
        A handle whose ``wait()`` returns the tensor or number.

    Raises:
        ArgumentError: The tensor cannot be received into, or `src` is not a rank of the communicator.

    Example:
        received = mpi.recv_async(torch.empty(3), 0).wait()
    """
    if _unknown:
        raise unknown_keyword(recv_async, _unknown)
    message = _Message("recv", tensor, src, comm)
    return message.submit(message.receive)


@refuses_keywords
def sendreceive(tensor: Value, src: int, dst: int, *, comm: Comm = None, **_unknown: NoReturn) -> Value:
    """Send the tensor to `dst`, and receive into it from `src`, without deadlock.

    In place: the tensor is overwritten.

    Args:
        tensor: The tensor or number to send; a tensor is overwritten by the received one.
        src: The rank to receive from.
        dst: The rank to send to.
        comm: The communicator: None for the current one, a level, a Communicator, or one of its groups.

    Returns:
        The tensor, or the received number.

    Raises:
        ArgumentError: The tensor cannot be used, or `src` or `dst` is not a rank of the communicator.
        MismatchError: The sender used another shape or dtype; the message is dropped.

    Example:
        left, right = (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
        mpi.sendreceive(tensor, src=left, dst=right)
    """
    if type(src) is int and type(dst) is int and not _unknown:
        exchanged: Value | None = fast_path.sendreceive(tensor, None, fast_path.joint_key(src, dst), comm, None)
        if exchanged is not None:
            return exchanged
    if _unknown:
        raise unknown_keyword(sendreceive, _unknown)
    message = _Message("sendreceive", tensor, src, comm)
    target = message.checked_peer(dst)
    if type(src) is int and type(dst) is int and not message.is_number:
        message.cache(dst, comm)
    outgoing = message.group.peer_queue("send", target)
    if is_busy(outgoing):  # the receive must not wait for the messages before this one
        waited: Value = message.start_exchange(target).wait()
        return waited
    # Not message.post itself, which would describe a call: torch.profiler shows the receive alone.
    finish = outgoing.run(message.in_order(lambda: message.post(target)))
    try:
        result: Value = message.call_queue.run(message.in_order(message.receive))
    except BaseException:
        with suppress(TorchMPIError):  # the first error is raised
            message.complete(finish, target, outgoing)  # MPI reads the memory until then
        raise
    if is_busy(outgoing):  # by another thread
        finish()
    else:
        outgoing.run(message.complete, finish, target, outgoing)
    return result


@refuses_keywords
def sendreceive_async(tensor: Value, src: int, dst: int, *, comm: Comm = None, **_unknown: NoReturn) -> Handle[Value]:
    """Run :func:`~torchmpi.sendreceive` in the background, with the same parameters.

    A copy of the tensor, made at the call, is sent.

    Returns:
        A handle whose ``wait()`` returns the tensor or number.

    Raises:
        ArgumentError: The tensor cannot be used, or `src` or `dst` is not a rank of the communicator.

    Example:
        mpi.sendreceive_async(tensor, src=left, dst=right).wait()
    """
    if _unknown:
        raise unknown_keyword(sendreceive_async, _unknown)
    message = _Message("sendreceive", tensor, src, comm)
    return message.start_exchange(message.checked_peer(dst))


def is_busy(call_queue: CallQueue) -> bool:
    """Return whether a call made now would wait for others in the queue."""
    return call_queue.pending > 0 or call_queue.run_lock.locked()


class _Exchange(JoinedHandle[Any]):
    """The handle of a `sendreceive`, of which the first part is the receive."""

    __slots__ = ()

    def wait(self, timeout: float | None = None) -> Any:
        """Return the received value when it has arrived and the other one is sent."""
        super().wait(timeout)
        return self._handles[0].wait()


class _Message:
    """A message: a tensor, a peer, and the queue of messages from or to that peer."""

    def __init__(self, collective: str, tensor: Any, peer: int, comm: Comm) -> None:
        running = runtime.current()
        self.group: Group = runtime.communicator(comm).intra
        self.what = f"{self.group.where}: {collective}"
        self.collective, self.peer, self.is_number = collective, self.checked_peer(peer), is_number(tensor)
        given = as_tensor(tensor) if self.is_number else tensor
        self.tensor = buffers.check(given, self.what, written=collective != "send", or_number=True)
        if collective != "send":
            writable.refuse_read_only(self.tensor, self.group.where, collective)
        self.code = checked_dtype(collective, self.tensor.dtype, None, self.what).code
        self.backend = running.selector.choose(collective, self.tensor.device.type, "mpi", self.group)
        self.message_bytes = running.config.message_bytes
        self.MPI, self.comm = self.group.context.MPI, self.group.side_comm
        self.call_queue: CallQueue = self.group.peer_queue("send" if collective == "send" else "receive", self.peer)
        self.waited: int | None = None
        """Nanoseconds until the message of the other rank began to arrive; None for a send, whose wait is not known."""
        self.posted = 0
        """When the send of an exchange began, if it did so before the receive; 0 otherwise."""
        self.sent: events.MessageNumber | None = None
        self.received: events.MessageNumber | None = None

    def _counted(self, peer: int, *, is_receive: bool) -> Channel:
        """Count a message that begins now, for the flight record and for timelines; return its channel."""
        rank = self.group.world_ranks[peer]
        channel = self.group.channels.channel(rank, is_receive=is_receive)
        number = events.MessageNumber(rank, channel.begin(self.code, self.tensor.nbytes))
        if not is_receive:
            self.sent = number
        elif channel.is_exact:
            self.received = number
        return channel

    def checked_peer(self, peer: Any) -> int:
        try:
            number = -1 if isinstance(peer, bool) else operator.index(peer)  # numpy's integers too
        except TypeError:
            number = -1
        if not 0 <= number < self.group.size:
            raise ArgumentError(
                f"{self.what}: {peer!r} is not a rank of communicator {self.group.name}. Use 0 to "
                f"{self.group.size - 1}."
            )
        return number

    def result(self) -> Any:
        return restore(self.tensor) if self.is_number else self.tensor

    def in_order(self, task: Callable[[], Any]) -> Callable[[], Any]:
        """Return the task, to run after the work queued on the tensor's device now."""
        return streams.in_order(self.tensor, task)

    def submit(self, task: Callable[[], Any], call_queue: CallQueue | None = None) -> Handle[Any]:
        mark = streams.fence(self.tensor)
        device = None if mark is None else self.tensor.device
        # Of a sendreceive, torch.profiler shows the receive alone: the other parts have a name of no call.
        task = partial(streams.run_after, mark, device, task)
        if call_queue is None:
            return self.call_queue.submit(task, self.what, call=self.described_call)
        return call_queue.submit(task, f"{self.collective} of {self.group.where}")

    def cache(self, dst: int, comm: Comm) -> None:
        """Let the fast path make exchanges like this one, if it can."""
        tensor, group = self.tensor, self.group
        is_plain = tensor.device.type == "cpu" and not tensor.dtype.is_complex and tensor.nbytes <= PACKED_BYTES
        is_meant = type(comm) in (Communicator, Group) or (
            comm is None and used.get() is None and runtime.communicator(None).intra is group
        )
        if is_plain and is_meant and can_call_from_kernels(group):
            name = fast_path.joint_key(self.peer, dst), tensor.dtype, comm
            find = partial(cached_exchange, group, self.peer, dst, tensor.dtype, partial(_settle, group, self.peer))
            fast_path.cache_call("sendreceive", name, find)

    # Run in the queue.

    def send(self) -> Any:
        with self.watched(f"to rank {self.peer}"):
            messages = self._messages(self._plain(self.tensor))
            channel = self._counted(self.peer, is_receive=False)
            for message, tag in messages:
                self.comm.Send((message, self.MPI.BYTE), self.peer, tag)
                self.group.messages.add(1)
            channel.end()
        return self.result()

    def receive(self) -> Any:
        with self.watched(f"from rank {self.peer}"):
            self._receive()
        return self.result()

    def start_exchange(self, dst: int) -> _Exchange:
        """Send a copy of the tensor and receive, each in the queue of its direction."""
        copy, outgoing = self.tensor.detach().clone(), self.group.peer_queue("send", dst)
        posted = self.submit(lambda: self.post(dst, copy), outgoing)
        try:
            received = self.submit(self.receive)
        finally:  # otherwise the memory may be freed before MPI has read it
            sent = self.submit(lambda: self.complete(posted.wait(), dst, outgoing), outgoing)
        return _Exchange((received, posted, sent), None, self.what)

    def post(self, dst: int, copy: torch.Tensor | None = None) -> Callable[[], None]:
        """Begin to send the tensor, which may be overwritten then, or the copy of it; return what ends the messages."""
        self.posted = events.now()
        work = self._plain(self.tensor, copied=True) if copy is None else self._plain(copy)
        messages = self._messages(work)
        channel = self._counted(dst, is_receive=False)
        requests: list[Any] = []
        try:
            for message, tag in messages:
                requests.append(self.comm.Isend((message, self.MPI.BYTE), dst, tag))
        except BaseException as error:
            if not requests:
                channel.withdraw()
            self._raise_failure(error, dst)
        self.group.messages.add(len(requests))
        return partial(self._finish, requests, channel, dst, work)

    def _finish(self, requests: list[Any], channel: Channel, dst: int, _memory: torch.Tensor) -> None:
        try:
            self.MPI.Request.Waitall(requests)
        except self.MPI.Exception as error:
            self._raise_failure(error, dst)
        channel.end()

    def _raise_failure(self, error: BaseException, dst: int) -> NoReturn:
        """Raise an error of MPI in a send as one that names the call, or the loss of a rank behind it."""
        if not isinstance(error, self.MPI.Exception):
            raise error
        failure = TorchMPIError(f"{self.what}: {self.description(f'to rank {dst}')} failed: {error}.")
        raise self.group.context.loss_behind(error) or failure from error

    def complete(self, finish: Callable[[], None], dst: int, call_queue: CallQueue) -> None:
        """End the messages of `post` in the queue of messages to `dst`."""
        call_queue.doing = self.description(f"to rank {dst}")
        try:
            finish()
        finally:
            call_queue.doing = None

    @contextmanager
    def watched(self, peer: str) -> Iterator[None]:
        """Describe the call for the watchdog, and in the error if MPI fails."""
        self.call_queue.doing = doing = self.description(peer)
        recorder = events.recorder
        event = None if events.show_call is None else self._begin_event()
        begin, error_name = events.now(), ""
        try:
            yield
            duration = events.now() - begin
            counts, name = self.group.context.call_counts, self.group.name
            counts.add_message(name, self.collective, self.tensor.nbytes, duration, self.waited)
        except BaseException as error:
            error_name = type(error).__name__
            if not isinstance(error, self.MPI.Exception):
                raise
            failure = TorchMPIError(f"{self.what}: {doing} failed: {error}.")
            raise self.group.context.loss_behind(error) or failure from error
        finally:
            self.call_queue.doing = None
            events.end_event(event)
            if recorder is not None:
                self._record(recorder, begin, error_name)

    def _record(self, recorder: events.Recorder, begin: int, error: str) -> None:
        """Record the message, which ends now."""
        group, queue = self.group, self.call_queue
        record = events.MessageRecord(
            group.info, self.collective, dtypes.short_name(self.tensor.dtype), self.tensor.nbytes,
            group.world_ranks[self.peer], self.sent, self.received, NO_TAG, queue.name, is_background=False,
            # The other rank may have received the message before this one began to receive.
            begin=min(begin, self.posted or begin), end=events.now(), thread=threading.get_ident(),
            origin=events.origin_of(queue.origin or recorder.origin(0)), error=error,
        )  # fmt: skip
        recorder.report(record)

    def _begin_event(self) -> Any:
        return events.begin_event(self.described_call(), is_task=self.call_queue.origin is not None)

    def described_call(self) -> events.ShownCall:
        """Return what torch.profiler shows of the message."""
        return self.group.described((self.collective, "", dtypes.short_name(self.tensor.dtype), -1), self.tensor)

    def _receive(self) -> None:
        channel = self._counted(self.peer, is_receive=True)
        try:
            header = self._header()
        except BaseException:
            channel.withdraw()
            raise
        try:
            self._received(header)
        finally:
            channel.end()

    def _received(self, header: npt.NDArray[np.uint8]) -> None:
        """Write the values of a message to the tensor."""
        payload = self.unpacked(header)
        if payload is not None:
            buffers.overwrite(self.tensor, payload)
            return
        direct = self.backend.takes(self.tensor.device.type, self.collective) and buffers.is_direct(self.tensor)
        work = self.tensor.detach() if direct else torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="cpu")
        streams.settle(work)
        self._receive_payload(work)
        if not direct:
            buffers.overwrite(self.tensor, work)
        else:
            buffers.touch(self.tensor)

    def _plain(self, tensor: torch.Tensor, *, copied: bool = False) -> torch.Tensor:
        """Return the values to send; `copied`: in memory that is not that of the tensor, unless they are packed."""
        is_packed = tensor.nbytes <= PACKED_BYTES
        to_host = is_packed or not self.backend.takes(tensor.device.type, self.collective)
        work = buffers.plain(tensor, to_host=to_host)
        if copied and not is_packed:
            work = work.clone()
        streams.settle(work)  # MPI reads device memory without regard to streams
        return work

    def _messages(self, work: torch.Tensor) -> list[tuple[Any, int]]:
        """Return the header with the memory behind it, or the header and then the memory in parts, with their tags."""
        header_bytes = 8 * (2 + work.dim())
        is_packed = work.nbytes <= PACKED_BYTES
        message = np.empty(header_bytes + work.nbytes if is_packed else header_bytes, np.uint8)
        message[:header_bytes].view(np.int64)[:] = self.code, work.dim(), *work.shape
        if not is_packed:
            return [(message, HEADER_TAG), *((part, _PAYLOAD_TAG) for part in self._payload(work))]
        ctypes.memmove(message.ctypes.data + header_bytes, work.data_ptr(), work.nbytes)
        return [(message, HEADER_TAG)]

    def _payload(self, work: torch.Tensor) -> list[Any]:
        flat = work.view(-1)
        most = max(1, self.message_bytes // work.element_size())
        return [
            buffers.as_bytes(self.MPI, flat[begin : begin + numel])
            for begin, numel in partition.chunks(flat.numel(), most)
        ]

    def _header(self) -> npt.NDArray[np.uint8]:
        """Receive the first part of a message."""
        begin = events.now()
        if self.group.context.sleeps_before_mpi:
            sleep_until(lambda: bool(self.comm.Iprobe(self.peer, HEADER_TAG)))
        message = np.empty(MOST_HEADER_BYTES + PACKED_BYTES, np.uint8)
        self.comm.Recv((message, self.MPI.BYTE), self.peer, HEADER_TAG)
        self.waited = events.now() - begin
        self.group.messages.add(-1)
        return message

    def unpacked(self, message: npt.NDArray[np.uint8]) -> torch.Tensor | None:
        """Compare the header of a message; return the values behind it, or None if they are in further messages."""
        code, num_dims = message[:16].view(np.int64).tolist()
        header_bytes = 8 * (2 + num_dims)
        shape = tuple(message[16:header_bytes].view(np.int64).tolist())
        dtype = dtypes.from_code(code)
        assert dtype is not None
        num_bytes = math.prod(shape) * dtype.itemsize
        if code == self.code and shape == tuple(self.tensor.shape):
            if num_bytes > PACKED_BYTES:
                return None
            values = torch.empty(shape, dtype=dtype, device="cpu")
            ctypes.memmove(values.data_ptr(), message.ctypes.data + header_bytes, num_bytes)
            return values
        if num_bytes > PACKED_BYTES:  # before the next message can be received
            self._receive_payload(torch.empty(shape, dtype=dtype, device="cpu"))
        raise MismatchError(
            f"{self.what}: rank {self.peer} sent {dtypes.short_name(dtype)} {list(shape)}, but the tensor to "
            "receive into is "
            f"{dtypes.short_name(self.tensor.dtype)} {list(self.tensor.shape)}. Make them equal; the message is "
            "dropped."
        )

    def _receive_payload(self, work: torch.Tensor) -> None:
        for part in self._payload(work):
            self.comm.Recv((part, self.MPI.BYTE), self.peer, _PAYLOAD_TAG)
            self.group.messages.add(-1)

    def description(self, peer: str) -> str:
        return f"{self.collective}({dtypes.short_name(self.tensor.dtype)} {list(self.tensor.shape)}) {peer}"


def _settle(group: Group, src: int, status: int, tensor: torch.Tensor, received: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Raise the error of an exchange on the fast path, given the received message."""
    message = _Message("sendreceive", tensor, src, group)
    with message.watched(f"from rank {src}"):
        if status != MISMATCH:
            raise message.MPI.Exception(status)
        message.unpacked(received)
    return tensor
