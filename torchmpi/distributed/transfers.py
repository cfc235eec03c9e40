"""Point-to-point messages of a process group: nonblocking MPI messages with tags, also from any source.

MPI moves a long message only while some thread calls it. A wait in a collective in shared memory does not call MPI,
so a thread tests the messages that no caller waits for; the thread sleeps while there are none.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..communicators.group import Group
from ..communicators.handle import Handle
from ..communicators.message_record import ANY_RANK
from ..errors import ArgumentError, CommunicatorError, MismatchError, StallError, TorchMPIError
from ..session import runtime
from ..tensors import buffers, dtypes, streams, writable
from ..timeline import events

_NUM_BUSY_TESTS = 2000
_MIN_SLEEP_SECONDS, _MAX_SLEEP_SECONDS, _SLEEP_GROWTH = 50e-6, 1e-3, 1.02  # the longest after 0.05 s
MAX_TAG = (1 << 20) - 1
"""The greatest tag of a user; current MPI libraries permit larger ones, which the monitored barrier uses."""
ARRIVED_TAG, ANSWER_TAG = MAX_TAG + 1, MAX_TAG + 2


class MessageHandle(Handle[torch.Tensor]):
    """Handle of one message, a send or a receive."""

    __slots__ = (
        "_begin",
        "_call_queue",
        "_channel",
        "_collective",
        "_doing",
        "_finish",
        "_group",
        "_is_receive",
        "_number",
        "_origin",
        "_peer",
        "_request",
        "_show_end",
        "_tag",
        "_tensor",
        "_testing",
        "is_waited_for",
        "source",
    )

    def __init__(self, group: Group, tensor: torch.Tensor, collective: str, peer: int | None, tag: int) -> None:
        what = f"{collective}({dtypes.short_name(tensor.dtype)} {list(tensor.shape)})"
        self._doing = (
            f"{what} {'to' if collective == 'send' else 'from'} {'any rank' if peer is None else f'rank {peer}'}"
        )
        super().__init__(f"{group.where}: {self._doing}")
        self._group, self._tensor, self._collective, self._peer, self._tag = group, tensor, collective, peer, tag
        self._begin = events.now()
        self._origin = None if events.recorder is None else events.recorder.origin(self._begin)
        show = events.show_task
        self._show_end = None if show is None else show(self._description, self.described_call(), lambda: None)
        self._is_receive = collective != "send"
        self._call_queue = group.peer_queue("receive" if self._is_receive else "send", -1 if peer is None else peer)
        rank = ANY_RANK if peer is None else group.world_ranks[peer]
        self._channel, self._number = group.channels.channel(rank, is_receive=self._is_receive, tag=tag), 0
        self._request: Any = None
        self._finish: Callable[[Any], object] = lambda status: None
        """Called with the status of the request when MPI has completed it."""
        self._testing = threading.Lock()
        self.is_waited_for = False
        """Whether a caller tests the message, so that the progress thread need not."""
        self.source = -1 if self._is_receive else group.rank
        """The rank that sends the message; -1 until that is known."""

    @property
    def what(self) -> str:
        """The rank and its call, for messages to the user."""
        return self._description

    def start(self, call: Callable[..., Any], work: torch.Tensor, to: tuple[int, int]) -> Any:
        """Count the message, start it with the memory of `work`, and return the request."""
        self._number = self._channel.begin(dtypes.info(self._tensor.dtype).code, self._tensor.nbytes)
        try:
            return _start(call, self._group.context.MPI, work, to)
        except BaseException:
            self._channel.withdraw()
            raise

    def begin(self, request: Any, finish: Callable[[Any], object]) -> None:
        """Set the MPI request, and the function to call with its status when it has completed."""
        self._request, self._finish = request, finish

    def described_call(self) -> events.ShownCall:
        """Return what torch.profiler shows of the message."""
        return self._group.described((self._collective, "", dtypes.short_name(self._tensor.dtype), -1), self._tensor)

    def _end(self) -> None:
        """Count and record the message before other threads see its end."""
        group, tensor, collective = self._group, self._tensor, self._collective
        if self._error is None:
            num_nanoseconds = events.now() - self._begin
            group.context.call_counts.add_message(group.name, collective, tensor.nbytes, num_nanoseconds)
        if self._number:
            self._channel.end()
        if self._show_end is not None:
            self._show_end()
        if (recorder := events.recorder) is not None and self._origin is not None:
            peer = self.source if self._is_receive else self._peer
            rank = -1 if peer is None or peer < 0 else group.world_ranks[peer]
            number = events.MessageNumber(rank, self._number) if rank >= 0 and self._channel.is_exact else None
            record = events.MessageRecord(
                group.info, collective, dtypes.short_name(tensor.dtype), tensor.nbytes, rank,
                sent=None if self._is_receive else number, received=number if self._is_receive else None, tag=self._tag,
                queue=self._call_queue.name, is_background=True, begin=self._begin, end=events.now(),
                thread=threading.get_ident(), origin=events.origin_of(self._origin),
                error="" if self._error is None else type(self._error).__name__,
            )  # fmt: skip
            recorder.report(record)
        super()._end()

    def test(self) -> bool:
        """Let MPI make progress; return whether the message has ended."""
        with self._testing:
            return self._is_done or self._ends_if(self._request.Test)

    def _ends_if(self, has_ended: Callable[[Any], bool]) -> bool:
        """End the message if `has_ended`, which fills in a status, returns True or raises."""
        MPI = self._group.context.MPI
        status = MPI.Status()
        try:
            if not has_ended(status):
                return False
            self._finish(status)
        except MPI.Exception as error:
            if self._is_receive:  # truncated, and not to be received again
                self._group.messages.add(-1)
            self.set_error(TorchMPIError(f"{self._description} failed: {error}."))
        except TorchMPIError as error:
            self.set_error(error)
        else:
            self.set_result(None)
        return True

    def done(self) -> bool:
        """Return whether the message has ended."""
        return self._is_done or self.test()

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the message has ended; raise its error, or StallError after `timeout` seconds."""
        begin, num_tests, pause = time.monotonic(), 0, _MIN_SLEEP_SECONDS
        sleep: Callable[[float], None] = getattr(self._request, "wait_for", time.sleep)  # without MPI it also reads
        self.is_waited_for = True
        recorder, since = (None, 0) if self._is_done else (events.recorder, events.now())
        while not self.done():  # not test(): a callback at the end of this message runs while the lock is held
            num_tests += 1
            if num_tests < _NUM_BUSY_TESTS:
                os.sched_yield()  # to other ranks; the test lets other threads run. time.sleep(0) would take 70 us
                continue
            self._call_queue.doing = self._doing  # for the watchdog
            sleep(pause)
            pause = min(pause * _SLEEP_GROWTH, _MAX_SLEEP_SECONDS)
            if timeout is not None and time.monotonic() - begin > timeout:
                self.is_waited_for, self._call_queue.doing = False, None
                raise StallError(f"{self._description} has not ended after {timeout:g} s. It continues; wait() again.")
        self._call_queue.doing = None
        if recorder is not None:
            recorder.slice("wait", "wait", since, call=self._description)
        return super().wait(timeout)

    def abort(self, error: TorchMPIError) -> None:
        """Cancel a receive that exceeds its timeout, so that it does not take a later message."""
        with self._testing:
            if self._is_receive and not self._is_done:
                self._ends_if(partial(self._is_cancelled_with, error))

    def _is_cancelled_with(self, error: TorchMPIError, status: Any) -> bool:
        self._request.Cancel()
        self._request.Wait(status)
        if status.Is_cancelled():
            self._channel.withdraw()
            self._channel.is_exact, self._number = False, 0  # later receives have their numbers already
            raise error
        return True  # the message arrived before it could be cancelled


def send(group: Group, tensor: torch.Tensor, peer: int, tag: int) -> MessageHandle:
    """Start to send a tensor, which must not change until the message has ended."""
    message = _checked(group, tensor, "send", peer, tag)
    work = buffers.plain(tensor, to_host=True)
    streams.settle(work)
    request = message.start(group.side_comm.Isend, work, (peer, tag))
    group.messages.add(1)

    def keep_alive(status: Any, _work: torch.Tensor = work) -> None:
        """Hold the memory that MPI reads."""

    message.begin(request, keep_alive)
    return _in_progress(message)


def receive(group: Group, tensor: torch.Tensor, peer: int | None, tag: int) -> MessageHandle:
    """Start to receive a tensor of the sender's length, from one rank or from any (None)."""
    MPI, comm = group.context.MPI, group.side_comm
    message = _checked(group, tensor, "recv", peer, tag)
    is_direct = tensor.device.type == "cpu" and buffers.is_direct(tensor)
    work = tensor.detach() if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    request = message.start(comm.Irecv, work, (MPI.ANY_SOURCE if peer is None else peer, tag))
    mark = streams.fence(tensor)

    def finish(status: Any) -> None:
        group.messages.add(-1)
        message.source = status.source
        device = None if mark is None else tensor.device
        streams.run_after(mark, device, partial(_complete, group, tensor, work, status))

    message.begin(request, finish)
    return _in_progress(message)


def _complete(group: Group, tensor: torch.Tensor, work: torch.Tensor, status: Any) -> None:
    """Check the length of a received message, and copy it to the tensor if it was received into other memory."""
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
    if collective == "recv":
        writable.refuse_read_only(tensor, group.where, collective)
    if peer is not None and not 0 <= peer < group.size:
        raise ArgumentError(f"{what}: {peer} is not a rank of this group. Use 0 to {group.size - 1}.")
    if not 0 <= tag <= MAX_TAG:
        raise ArgumentError(f"{what}: tag={tag} is out of range. Use 0 to {MAX_TAG}.")
    return MessageHandle(group, tensor, collective, peer, tag)


def check_open(group: Group, what: str) -> None:
    """Raise if the group has been destroyed."""
    if group.call_queue.closed:
        raise CommunicatorError(f"{what}: {group.name} has been destroyed. Create a new one.")


def _start(call: Callable[..., Any], MPI: Any, work: torch.Tensor, to: tuple[int, int]) -> Any:
    """Start one message with all of the memory, as a datatype of blocks if MPI cannot count its bytes.

    One message is necessary: several messages from different ranks could be received in any order.
    """
    memory, most = buffers.as_bytes(MPI, work), runtime.current().config.message_bytes
    if work.nbytes <= most or not hasattr(MPI.BYTE, "Create_contiguous"):  # without MPI there is no such limit
        return call((memory, MPI.BYTE), *to)
    num_rows, rest = divmod(work.nbytes, most)
    block = MPI.BYTE.Create_contiguous(most)
    kind = MPI.Datatype.Create_struct([num_rows, rest], [0, num_rows * most], [block, MPI.BYTE]).Commit()
    try:
        return call((memory, 1, kind), *to)
    finally:  # MPI keeps them until the message has ended
        kind.Free()
        block.Free()


# --- Progress -------------------------------------------------------------------------------------------------------


class _ProgressThread(threading.Thread):
    """Tests the messages that no caller waits for."""

    def __init__(self) -> None:
        super().__init__(name="torchmpi transfers", daemon=True)
        self._messages: set[MessageHandle] = set()
        self._is_needed = threading.Event()

    def add(self, message: MessageHandle) -> None:
        self._messages.add(message)
        self._is_needed.set()

    def run(self) -> None:
        """Test the messages, at increasing intervals while none of them ends."""
        pause = _MIN_SLEEP_SECONDS
        while True:
            self._is_needed.wait()
            for message in list(self._messages):
                if message.is_waited_for or not runtime.is_running():
                    if message._is_done or not runtime.is_running():
                        self._messages.discard(message)
                    continue
                if message.test():
                    self._messages.discard(message)
                    pause = _MIN_SLEEP_SECONDS
            if not self._messages:
                self._is_needed.clear()
                if self._messages:  # one was added before clear()
                    self._is_needed.set()
            time.sleep(pause)
            pause = min(pause * 1.25, _MAX_SLEEP_SECONDS)


_progress_thread: _ProgressThread | None = None
_starting = threading.Lock()


def _in_progress(message: MessageHandle) -> MessageHandle:
    """Have a message tested until it has ended, and return it."""
    global _progress_thread
    if message.test() or not runtime.current().threads_allowed:
        return message
    with _starting:
        if _progress_thread is None or not _progress_thread.is_alive():  # a forked child has no threads
            _progress_thread = _ProgressThread()
            _progress_thread.start()
    _progress_thread.add(message)
    return message
