"""Point-to-point messages: send, recv, sendreceive.

Messages between a pair of ranks arrive in the order in which they were sent. A receiver detects that its tensor does
not fit, and raises an error. A call like an earlier one is made by machine code, if no other message of the
communicator is under way (:mod:`.short_messages`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from ..communicators.communicator import Communicator
from ..communicators.group import Group
from ..communicators.handle import Handle, JoinedHandle
from ..communicators.levels import Comm, used
from ..communicators.message_record import NO_TAG
from ..errors import ArgumentError, KeywordError
from ..other_names import MISSING, refuses_keywords, unknown_keyword
from ..session import runtime
from ..shared_memory import fast_path
from ..tensors import buffers, dtypes, streams, writable
from ..tensors.numbers import Value, as_tensor, is_number, restore
from ..timeline import events
from .message_handle import MessageHandle
from .prepared import checked_dtype
from .short_messages import cache_message, exchange_later, receive_later

_PART = NO_TAG - 1
"""In place of a tag, which the directions of an exchange do not have either."""

__all__ = ["recv", "recv_async", "send", "send_async", "sendreceive", "sendreceive_async"]


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
    if type(dst) is int and not _unknown and fast_path.send(tensor, None, dst, comm, None) is not None:
        return
    if _unknown:
        raise unknown_keyword(send, _unknown)
    call = _Call("send", tensor, comm)
    peer = call.peer("dst", dst)
    if peer == call.group.rank:
        raise ArgumentError(f"{call.what}: a blocking send to oneself never ends. Use send_async, or sendreceive.")
    call.cache(dst, dst=dst)
    call.run(lambda: call.message(peer, is_receive=False, is_background=False))


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
    if type(dst) is int and not _unknown:
        sent = fast_path.send(tensor, None, _background_key(dst), comm, None)
        if sent is not None:
            return Handle.completed(tensor) if sent is tensor else sent
    if _unknown:
        raise unknown_keyword(send_async, _unknown)
    call = _Call("send", tensor, comm)
    peer = call.peer("dst", dst)
    call.cache(_background_key(peer), dst=dst, is_background=True)
    return call.message(peer, is_receive=False)


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
    if type(src) is int and not _unknown:
        received: Value | None = fast_path.recv(tensor, None, src, comm, None)
        if received is not None:
            return received
    if _unknown:
        raise unknown_keyword(recv, _unknown)
    call = _Call("recv", tensor, comm)
    peer = call.peer("src", src)
    if peer == call.group.rank:
        raise ArgumentError(f"{call.what}: a blocking receive from oneself never ends. Use recv_async, or sendreceive.")
    call.cache(src, src=src)
    result: Value = call.run(lambda: call.message(peer, is_receive=True, is_background=False))
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
    if type(src) is int and not _unknown:
        receive = receive_later(tensor, _background_key(src), comm)
        if receive is not None:
            return receive
    if _unknown:
        raise unknown_keyword(recv_async, _unknown)
    call = _Call("recv", tensor, comm)
    peer = call.peer("src", src)
    call.cache(_background_key(peer), src=src, is_background=True)
    return call.message(peer, is_receive=True)


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
        key = fast_path.joint_key(src, dst)
        exchanged: Value | None = fast_path.sendreceive(tensor, None, key, comm, None)
        if exchanged is not None:
            return exchanged
    if _unknown:
        raise unknown_keyword(sendreceive, _unknown)
    call = _Call("sendreceive", tensor, comm)
    source, target = call.peer("src", src), call.peer("dst", dst)
    if type(src) is int and type(dst) is int:  # others have no key
        call.cache(fast_path.joint_key(src, dst), src=src, dst=dst)
    result: Value = call.run(lambda: call.exchange(source, target, is_background=False))
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
    if type(src) is int and type(dst) is int and not _unknown:
        begun = exchange_later(tensor, (_part_key(src), _part_key(dst)), comm)
        if begun is not None:
            receive, send = begun
            return receive if send is None else _Exchange((receive, send), None, "sendreceive")
    if _unknown:
        raise unknown_keyword(sendreceive_async, _unknown)
    call = _Call("sendreceive", tensor, comm)
    source, target = call.peer("src", src), call.peer("dst", dst)
    call.cache(_part_key(target), dst=dst, is_background=True)
    call.cache(_part_key(source), src=src, is_background=True)
    return call.exchange(source, target, is_background=True)


def _background_key(peer: int) -> tuple[str | int, int]:
    """Return the identity of an asynchronous message for the fast path."""
    return fast_path.joint_key(peer, NO_TAG)


def _part_key(peer: int) -> tuple[str | int, int]:
    """Return the identity of one direction of an asynchronous exchange."""
    return fast_path.joint_key(peer, _PART)


class _Exchange(JoinedHandle[Any]):
    """The handle of a `sendreceive`, of which the first part is the receive."""

    __slots__ = ()

    def wait(self, timeout: float | None = None) -> Any:
        """Return the received value when it has arrived and the other one is sent."""
        for part in self._handles:
            part.wait(timeout)
        return self._handles[0].wait()


class _Call:
    """The checked arguments of a call."""

    def __init__(self, name: str, tensor: Any, comm: Comm) -> None:
        self.name, self.comm, self.is_number = name, comm, is_number(tensor)
        self.group: Group = runtime.communicator(comm).intra
        self.what = f"{self.group.where}: {name}"
        given = as_tensor(tensor, self.what) if self.is_number else tensor
        self.tensor = buffers.check(given, self.what, written=name != "send", or_number=True)
        if name != "send":
            writable.refuse_read_only(self.group.where, name, self.tensor)
        checked_dtype(name, self.tensor.dtype, None, self.what)
        self._awaited: list[MessageHandle] = []
        """The messages that the call waits for, and that are left after an interrupt."""

    def peer(self, role: str, given: Any) -> int:
        """Return a rank of the communicator, or raise; `role`: its parameter."""
        if given is MISSING:
            raise KeywordError(f"{self.what}: {role} is missing, the rank. Pass 0 to {self.group.size - 1}.")
        try:
            number = -1 if isinstance(given, bool) else operator.index(given)  # numpy's integers too
        except TypeError:
            number = -1
        if not 0 <= number < self.group.size:
            raise ArgumentError(
                f"{self.what}: {role}={given!r} is not a rank of communicator {self.group.name}. Use 0 to "
                f"{self.group.size - 1}."
            )
        return number

    def message(self, peer: int, *, is_receive: bool, is_background: bool = True) -> MessageHandle:
        """Begin the message."""
        return self._start(
            MessageHandle(
                self.group, self.name, self.tensor, peer, is_receive=is_receive, is_background=is_background,
                result=self._number if self.is_number else None,
            ),
            is_background=is_background,
        )  # fmt: skip

    def exchange(self, src: int, dst: int, *, is_background: bool) -> Handle[Any]:
        """Begin to send a copy of the tensor, and to receive into the tensor."""
        copy = self.tensor.detach().clone()
        send = MessageHandle(self.group, self.name, copy, dst, is_receive=False, is_part=True).start()
        receive = MessageHandle(
            self.group, self.name, self.tensor, src, is_receive=True, exchange=send, is_background=is_background,
            result=self._number if self.is_number else None,
        )  # fmt: skip
        return _Exchange((self._start(receive, is_background=is_background), send), None, self.what)

    def _start(self, message: MessageHandle, *, is_background: bool) -> MessageHandle:
        if not is_background:
            self._awaited += [message]  # no call, after which an interrupt may come
        return message.start()

    def run(self, begin: Callable[[], Handle[Any]]) -> Any:
        """Begin what the caller waits for, and wait; torch.profiler shows it as one call."""
        event = None if events.show_call is None else events.begin_event(self._described(), is_task=False)
        try:
            return streams.in_order(self.tensor, lambda: begin().wait())()
        except BaseException:
            for message in self._awaited:
                message.leave()
            raise
        finally:
            events.end_event(event)

    def cache(self, key: Any, *, src: int = -1, dst: int = -1, is_background: bool = False) -> None:
        """Let the fast path make calls like this one, if it can."""
        comm, group = self.comm, self.group
        is_meant = type(comm) in (Communicator, Group) or (
            comm is None and used.get() is None and runtime.communicator(None).intra is group
        )
        is_plain = self.tensor.device.type == "cpu" and not self.tensor.dtype.is_complex and not self.is_number
        if is_meant and is_plain and type(src) is int and type(dst) is int:
            cache_message(self.name, group, self.tensor, key, comm, src, dst, is_background=is_background)

    def _described(self) -> events.ShownCall:
        return self.group.described((self.name, "", dtypes.short_name(self.tensor.dtype), -1), self.tensor)

    def _number(self) -> Any:
        return restore(self.tensor)
