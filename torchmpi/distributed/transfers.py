"""Point-to-point messages of a process group: as MPI has them, with tags, from any source, in order per pair and tag.

A collective in shared memory does not look after MPI's messages, so a rank that waits in one would not move a message
it owes: transfers under way are looked after by a thread, which sleeps while there are none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..communicators.group import Group
from ..communicators.handle import Handle
from ..errors import ArgumentError, CommunicatorError, MismatchError, StallError, TorchMPIError
from ..session import runtime
from ..tensors import buffers, dtypes, streams

_EAGER_LOOKS = 2000
_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 50e-6, 1e-3
MAX_TAG = (1 << 20) - 1
"""Every MPI of today has tags up to this; those above are ours."""
ARRIVED_TAG, ANSWER_TAG = MAX_TAG + 1, MAX_TAG + 2


class MessageHandle(Handle):
    """One message under way, in one direction."""

    __slots__ = (
        "_call_queue",
        "_doing",
        "_group",
        "_is_receive",
        "_looking",
        "_request",
        "_settle",
        "_waited_for",
        "source",
    )

    def __init__(self, group: Group, tensor: torch.Tensor, collective: str, peer: int | None) -> None:
        what = f"{collective}({dtypes.short_name(tensor.dtype)} {list(tensor.shape)})"
        self._doing = (
            f"{what} {'to' if collective == 'send' else 'from'} {'any rank' if peer is None else f'rank {peer}'}"
        )
        super().__init__(f"{group.where}: {self._doing}")
        self._group = group
        self._is_receive = collective != "send"
        self._call_queue = group.peer_queue("receive" if self._is_receive else "send", -1 if peer is None else peer)
        self._request: Any = None
        self._settle: Callable[[Any], object] = lambda status: None
        """Called with the status of the request when MPI has ended it."""
        self._looking = threading.Lock()
        self._waited_for = False
        self.source = -1 if self._is_receive else group.rank
        """Whose tensor it is; -1 = not known yet."""

    def look(self) -> bool:
        """Move it on; whether it has ended."""
        with self._looking:
            return self._is_done or self._ends_if(self._request.Test)

    def _ends_if(self, has_ended: Callable[[Any], bool]) -> bool:
        """End it if this, which is given a status to fill, says so or raises."""
        MPI = self._group.context.MPI
        status = MPI.Status()
        try:
            if not has_ended(status):
                return False
            self._settle(status)
        except MPI.Exception as error:
            self.set_error(TorchMPIError(f"{self._description} failed in MPI: {error}."))
        except TorchMPIError as error:
            self.set_error(error)
        else:
            self.set_result(None)
        return True

    def done(self) -> bool:
        """Whether it has ended; looks."""
        return self._is_done or self.look()

    def wait(self, timeout: float | None = None) -> Any:
        """Return when it has ended, or raise."""
        begin, num_looks, nap = time.monotonic(), 0, _SHORTEST_NAP_SECONDS
        self._waited_for = True
        while not self.done():  # who is called back at the end of it is within a look already
            num_looks += 1
            if num_looks < _EAGER_LOOKS:
                time.sleep(0)  # lets other threads and other ranks run
                continue
            self._call_queue.doing = self._doing  # for the watchdog
            time.sleep(nap)
            nap = min(nap * 1.25, _LONGEST_NAP_SECONDS)
            if timeout is not None and time.monotonic() - begin > timeout:
                self._waited_for, self._call_queue.doing = False, None
                raise StallError(f"{self._description} has not ended after {timeout:g} s. It goes on; wait() again.")
        self._call_queue.doing = None
        return super().wait(timeout)

    def abort(self, error: TorchMPIError) -> None:
        """End a receive that has taken too long, so that it does not swallow the next message."""
        with self._looking:
            if self._is_receive and not self._is_done:
                self._ends_if(partial(self._is_cancelled_with, error))

    def _is_cancelled_with(self, error: TorchMPIError, status: Any) -> bool:
        self._request.Cancel()
        self._request.Wait(status)
        if status.Is_cancelled():
            raise error
        return True  # the message came at the last moment

    @property
    def what(self) -> str:
        """Which rank does what, for messages."""
        return self._description

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody looks after it already."""
        return self._waited_for

    def post(self, request: Any, settle: Callable[[Any], object]) -> None:
        """What is under way in MPI, and what to do when it has ended."""
        self._request, self._settle = request, settle


def send(group: Group, tensor: torch.Tensor, peer: int, tag: int) -> MessageHandle:
    """Start sending; the tensor must be left alone until the transfer has ended."""
    transfer = _checked(group, tensor, "send", peer, tag)
    work = buffers.plain(tensor, to_host=True)
    streams.settle(work)
    request = _start(group.side_comm.Isend, group.context.MPI, work, (peer, tag))

    def keep(status: Any, _work: torch.Tensor = work) -> None:
        """The memory alive as long as MPI reads it."""

    transfer.post(request, keep)
    return _looked_after(transfer)


def receive(group: Group, tensor: torch.Tensor, peer: int | None, tag: int) -> MessageHandle:
    """Start receiving, from a rank or from any; the sender's tensor must be as long."""
    MPI, comm = group.context.MPI, group.side_comm
    transfer = _checked(group, tensor, "recv", peer, tag)
    is_direct = tensor.device.type == "cpu" and buffers.is_direct(tensor)
    work = tensor.detach() if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    request = _start(comm.Irecv, MPI, work, (MPI.ANY_SOURCE if peer is None else peer, tag))
    mark = streams.fence(tensor)

    def settle(status: Any) -> None:
        transfer.source = status.source
        device = None if mark is None else tensor.device
        streams.run_after(mark, device, partial(_complete, group, tensor, work, status))

    transfer.post(request, settle)
    return _looked_after(transfer)


def _complete(group: Group, tensor: torch.Tensor, work: torch.Tensor, status: Any) -> None:
    """Check the length of what came, and put it where it belongs."""
    num_bytes = status.Get_elements(group.context.MPI.BYTE)
    if num_bytes != work.nbytes:
        raise MismatchError(
            f"{group.where}: rank {status.source} sent {num_bytes} bytes, but the tensor to receive into has "
            f"{work.nbytes}: {dtypes.short_name(tensor.dtype)} {list(tensor.shape)}. Make them equal."
        )
    if work.data_ptr() != tensor.data_ptr() or tensor.device.type != "cpu":
        buffers.overwrite(tensor, work)
    else:
        buffers.touch(tensor)


def _checked(group: Group, tensor: torch.Tensor, collective: str, peer: int | None, tag: int) -> MessageHandle:
    what = f"{group.where}: {collective}"
    check_open(group, what)
    buffers.check(tensor, what, written=collective == "recv")
    if peer is not None and not 0 <= peer < group.size:
        raise ArgumentError(f"{what}: {peer} is not a rank of this group. Use 0 to {group.size - 1}.")
    if not 0 <= tag <= MAX_TAG:
        raise ArgumentError(f"{what}: tag={tag} is out of range. Use 0 to {MAX_TAG}.")
    return MessageHandle(group, tensor, collective, peer)


def check_open(group: Group, what: str) -> None:
    """Refuse messages on a group that has been destroyed."""
    if group.call_queue.closed:
        raise CommunicatorError(f"{what}: {group.name} has been destroyed. Make a new one.")


def _start(call: Callable[..., Any], MPI: Any, work: torch.Tensor, to: tuple[int, int]) -> Any:
    """Start one message with all of the memory: of blocks, where there are more bytes than MPI can count."""
    memory, most = buffers.as_bytes(MPI, work), runtime.current().config.message_bytes
    if work.nbytes <= most or not hasattr(MPI.BYTE, "Create_contiguous"):  # the stand-in for MPI counts further
        return call((memory, MPI.BYTE), *to)
    num_rows, rest = divmod(work.nbytes, most)
    block = MPI.BYTE.Create_contiguous(most)
    kind = MPI.Datatype.Create_struct([num_rows, rest], [0, num_rows * most], [block, MPI.BYTE]).Commit()
    try:
        return call((memory, 1, kind), *to)
    finally:  # MPI itself keeps them until the message has ended
        kind.Free()
        block.Free()


# --- looking after them ---------------------------------------------------------------------------------------------


class _Caretaker(threading.Thread):
    """Looks after transfers for which nobody waits."""

    def __init__(self) -> None:
        super().__init__(name="torchmpi transfers", daemon=True)
        self._under_way: set[MessageHandle] = set()
        self._is_needed = threading.Event()

    def take(self, transfer: MessageHandle) -> None:
        """Look after one more, and keep what it needs alive."""
        self._under_way.add(transfer)
        self._is_needed.set()

    def run(self) -> None:
        nap = _SHORTEST_NAP_SECONDS
        while True:
            self._is_needed.wait()
            for transfer in list(self._under_way):
                if transfer.is_waited_for or not runtime.is_running():
                    if transfer._is_done or not runtime.is_running():
                        self._under_way.discard(transfer)
                    continue
                if transfer.look():
                    self._under_way.discard(transfer)
                    nap = _SHORTEST_NAP_SECONDS
            if not self._under_way:
                self._is_needed.clear()
                if self._under_way:  # one came between the two
                    self._is_needed.set()
            time.sleep(nap)
            nap = min(nap * 1.25, _LONGEST_NAP_SECONDS)


_caretaker: _Caretaker | None = None
_starting = threading.Lock()


def _looked_after(transfer: MessageHandle) -> MessageHandle:
    global _caretaker
    if transfer.look() or not runtime.current().threads_allowed:
        return transfer
    with _starting:
        if _caretaker is None or not _caretaker.is_alive():  # a forked child has no threads
            _caretaker = _Caretaker()
            _caretaker.start()
    _caretaker.take(transfer)
    return transfer
