"""Point to point: send, recv, sendreceive.

Messages between a pair of ranks arrive in the order in which they were sent. Each is announced by a small header, so
that a receiver whose tensor does not fit is told so instead of getting somebody else's bytes. Asynchronous messages run
on one queue per peer and direction: sending to one rank never waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from ..communicators.call_queue import CallQueue
from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.levels import Comm
from ..errors import ArgumentError, MismatchError, TorchMPIError
from ..session import runtime
from ..tensors import buffers, dtypes, partition, streams
from ..tensors.numbers import as_tensor, is_number, restore

_HEADER_TAG, _PAYLOAD_TAG = 1, 2


def send(tensor: Any, dst: int, *, comm: Comm = None) -> None:
    """Send a tensor or number to one rank, which calls :func:`recv`; return when the tensor may be changed again.

    if mpi.rank() == 0:
        mpi.send(torch.ones(3), 1)
    elif mpi.rank() == 1:
        received = mpi.recv(torch.empty(3), 0)
    """
    message = _Message("send", tensor, dst, comm)
    if dst == message.group.rank:
        raise ArgumentError(f"{message.what}: a blocking send to oneself never ends. Use send_async, or sendreceive.")
    message.call_queue.run(message.in_order(message.send))


def send_async(tensor: Any, dst: int, *, comm: Comm = None) -> Handle:
    """:func:`send` in the background; leave the tensor alone until ``wait()``."""
    message = _Message("send", tensor, dst, comm)
    return message.submit(message.send)


def recv(tensor: Any, src: int, *, comm: Comm = None) -> Any:
    """Receive into a tensor what `src` sends; shape and dtype must be those of the sender. A number gives a number.

    received = mpi.recv(torch.empty(3), 0)
    """
    message = _Message("recv", tensor, src, comm)
    if src == message.group.rank:
        raise ArgumentError(
            f"{message.what}: a blocking receive from oneself never ends. Use recv_async, or sendreceive."
        )
    return message.result(message.call_queue.run(message.in_order(message.receive)))


def recv_async(tensor: Any, src: int, *, comm: Comm = None) -> Handle:
    """:func:`recv` in the background; ``wait()`` gives the result."""
    message = _Message("recv", tensor, src, comm)
    return message.submit(message.receive)


def sendreceive(tensor: Any, src: int, dst: int, *, comm: Comm = None) -> Any:
    """Send the tensor to `dst`, and receive into it what `src` sends: a shift, without deadlock.

    left, right = (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
    mpi.sendreceive(tensor, src=left, dst=right)
    """
    message = _Message("sendreceive", tensor, src, comm)
    exchange = message.in_order(message.exchange_with(dst))
    return message.result(message.queue_to(dst).run(partial(message.call_queue.run, exchange)))


def sendreceive_async(tensor: Any, src: int, dst: int, *, comm: Comm = None) -> Handle:
    """:func:`sendreceive` in the background."""
    message = _Message("sendreceive", tensor, src, comm)
    exchange = message.in_order(message.exchange_with(dst))
    return message.submit(partial(message.call_queue.run, exchange), message.queue_to(dst))


class _Message:
    """One call: a tensor, a peer, and the queue between."""

    def __init__(self, collective: str, tensor: Any, peer: int, comm: Comm) -> None:
        running = runtime.current()
        self.group: Group = runtime.communicator(comm).intra
        self.what = f"{self.group.where}: {collective}"
        self.collective, self.peer, self.is_number = collective, self._checked_peer(peer), is_number(tensor)
        given = as_tensor(tensor) if self.is_number else tensor
        self.tensor = buffers.check(given, self.what, written=collective != "send")
        self.code = dtypes.info(self.tensor.dtype).code
        self.backend = running.selector.choose(collective, self.tensor.device.type, "mpi", self.group)
        self.message_bytes = running.config.message_bytes
        self.MPI, self.comm = self.group.context.MPI, self.group.side_comm
        self.call_queue: CallQueue = self.group.peer_queue("send" if collective == "send" else "receive", peer)

    def _checked_peer(self, peer: Any) -> int:
        if not isinstance(peer, int) or isinstance(peer, bool) or not 0 <= peer < self.group.size:
            raise ArgumentError(
                f"{self.what}: {peer!r} is not a rank of communicator {self.group.name}. Use 0 to "
                f"{self.group.size - 1}."
            )
        return peer

    def queue_to(self, dst: int) -> CallQueue:
        return self.group.peer_queue("send", self._checked_peer(dst))

    def result(self, value: Any) -> Any:
        return restore(value) if self.is_number else value

    def in_order(self, task: Callable[[], Any]) -> Callable[[], Any]:
        """For whichever thread runs the task: after what is queued on the tensor's device now."""
        return streams.in_order(self.tensor, task)

    def submit(self, task: Callable[[], Any], call_queue: CallQueue | None = None) -> Handle:
        mark = streams.fence(self.tensor)
        device = None if mark is None else self.tensor.device
        return (call_queue or self.call_queue).submit(
            lambda: self.result(streams.run_after(mark, device, task)), self.what
        )

    # What runs in the queue.

    def send(self) -> torch.Tensor:
        with self._watched(f"to rank {self.peer}"):
            work = self._plain()
            for piece, tag in self._pieces(work):
                self.comm.Send((piece, self.MPI.BYTE), self.peer, tag)
        return self.tensor

    def receive(self) -> torch.Tensor:
        with self._watched(f"from rank {self.peer}"):
            return self._receive()

    @contextmanager
    def _watched(self, peer: str) -> Iterator[None]:
        """Tell the watchdog what this queue is doing, and name the call if MPI fails in it."""
        self.call_queue.doing = self._description(peer)
        try:
            yield
        except self.MPI.Exception as error:
            raise TorchMPIError(f"{self.what}: {self.call_queue.doing} failed in MPI: {error}.") from error
        finally:
            self.call_queue.doing = None

    def _receive(self) -> torch.Tensor:
        self._check_header()
        direct = self.backend.takes(self.tensor.device.type) and buffers.is_direct(self.tensor)
        work = self.tensor.detach() if direct else torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="cpu")
        streams.settle(work)
        for piece in self._payload(work):
            self.comm.Recv((piece, self.MPI.BYTE), self.peer, _PAYLOAD_TAG)
        if not direct:
            buffers.overwrite(self.tensor, work)
        else:
            buffers.touch(self.tensor)
        return self.tensor

    def exchange_with(self, dst: int) -> Callable[[], torch.Tensor]:
        self._checked_peer(dst)

        def exchange() -> torch.Tensor:
            outgoing = self._plain().clone()
            requests = [self.comm.Isend((piece, self.MPI.BYTE), dst, tag) for piece, tag in self._pieces(outgoing)]
            try:
                return self.receive()
            finally:
                self.MPI.Request.Waitall(requests)  # also on the way out: MPI reads `outgoing` until then

        return exchange

    def _plain(self) -> torch.Tensor:
        work = buffers.plain(self.tensor, to_host=not self.backend.takes(self.tensor.device.type))
        streams.settle(work)
        return work

    def _pieces(self, work: torch.Tensor) -> list[tuple[Any, int]]:
        """The header, and the memory in messages that MPI can count."""
        header = np.array([self.code, work.dim(), *work.shape, *[0] * (_HEADER_WORDS - 2 - work.dim())], np.int64)
        return [(header, _HEADER_TAG), *((piece, _PAYLOAD_TAG) for piece in self._payload(work))]

    def _payload(self, work: torch.Tensor) -> list[Any]:
        flat = work.view(-1)
        most = max(1, self.message_bytes // work.element_size())
        return [
            buffers.as_bytes(self.MPI, flat[begin : begin + numel])
            for begin, numel in partition.chunks(flat.numel(), most)
        ]

    def _check_header(self) -> None:
        header = np.empty(_HEADER_WORDS, np.int64)
        self.comm.Recv((header, self.MPI.BYTE), self.peer, _HEADER_TAG)
        code, num_dims, *dims = header.tolist()
        shape = tuple(dims[:num_dims])
        if code == self.code and shape == tuple(self.tensor.shape):
            return
        dtype = dtypes.from_code(code)
        assert dtype is not None
        dropped = torch.empty(
            shape, dtype=dtype, device="cpu"
        )  # has a name, so that it lives until the bytes have arrived
        for piece in self._payload(dropped):  # out of the way of the next message
            self.comm.Recv((piece, self.MPI.BYTE), self.peer, _PAYLOAD_TAG)
        raise MismatchError(
            f"{self.what}: rank {self.peer} sent {dtypes.short_name(dtype)} {list(shape)}, but the tensor to "
            "receive into is "
            f"{dtypes.short_name(self.tensor.dtype)} {list(self.tensor.shape)}. Make them equal; the message is "
            "dropped."
        )

    def _description(self, peer: str) -> str:
        return f"{self.collective}({dtypes.short_name(self.tensor.dtype)} {list(self.tensor.shape)}) {peer}"


_HEADER_WORDS = 66  # dtype, number of dims, and up to 64 dims, which is what torch allows
