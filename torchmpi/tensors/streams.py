"""Order between the device and this process: nothing on the CPU, events and streams on CUDA.

What is queued on a device runs in the order of streams. A call marks the end of the current stream when it is made; its
work follows that mark, on the current stream itself or, in the background, on the *communication stream* of the thread
that does it; and whoever waits for the call makes the stream that is current there follow the end of the work. The
host waits for the device only where data go through its memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch

End = Any
"""A ``torch.cuda.Event`` behind some work; NOTHING where there is nothing to wait for."""
NOTHING: End = None
_HIGH_PRIORITY = -1  # what other ranks wait for goes before what only this one computes
_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts of the process
_own = threading.local()


class Mark(NamedTuple):
    """How far a stream had been filled."""

    event: torch.cuda.Event
    stream: torch.cuda.Stream
    thread: int
    """Who has filled it."""


def fence(tensor: object) -> Mark | None:
    """A mark behind the work queued so far on the tensor's device; None where there is nothing to wait for.

    >>> fence(torch.ones(2)) is None
    True
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return None
    stream = torch.cuda.current_stream(tensor.device)
    return Mark(stream.record_event(), stream, threading.get_ident())


def enqueue_after(mark: Mark | None, device: torch.device | None, task: Callable[[], Any]) -> tuple[Any, End]:
    """Run `task`, whose work on the device follows `mark`, on this thread's communication stream.

    Gives its result, and a mark behind its work, which need not have begun.

    >>> enqueue_after(None, None, lambda: 3)
    (3, None)
    """
    if mark is None:
        return task(), NOTHING
    assert device is not None
    if mark.thread != threading.get_ident() and torch.cuda.current_device() != device.index:
        # For good: a block that ends sets the device of before, in a new thread the first one, which costs a context.
        torch.cuda.set_device(device)
    stream = communication_stream(device)
    with torch.cuda.stream(stream):
        stream.wait_event(mark.event)
        result = task()
        return result, stream.record_event(torch.cuda.Event(blocking=True))


def run_after(mark: Mark | None, device: torch.device | None, task: Callable[[], Any]) -> Any:
    """The same for tasks on the host; return when the device has finished, too.

    >>> run_after(None, None, lambda: 3)
    3
    """
    result, end = enqueue_after(mark, device, task)
    wait(end)
    return result


def in_order(tensor: object, task: Callable[[], Any]) -> Callable[[], Any]:
    """`task` for whichever thread will run it: after what is queued on the tensor's device now.

    >>> in_order(torch.ones(2), lambda: 3)()
    3
    """
    mark = fence(tensor)
    if mark is None:
        return task
    assert isinstance(tensor, torch.Tensor)
    here, device = threading.get_ident(), tensor.device
    return lambda: task() if threading.get_ident() == here else run_after(mark, device, task)


def follow(end: End, device: torch.device | None) -> None:
    """Make the current stream wait for `end`; the host goes on.

    >>> follow(None, None)
    """
    if end is not NOTHING:
        torch.cuda.current_stream(device).wait_event(end)


def end_of(*tensors: torch.Tensor) -> End:
    """Behind what is queued on the current stream of the device of one of these; NOTHING if all are on the host.

    >>> end_of(torch.ones(2), torch.ones(3))
    """
    devices = [tensor.device for tensor in tensors if tensor.is_cuda]
    if not devices:
        return NOTHING
    stream = torch.cuda.current_stream(devices[0])
    # In the background the host sleeps until then, which takes longer to end than looking all the time.
    is_background = stream in _own.__dict__.get("streams", {}).values()
    return stream.record_event(torch.cuda.Event(blocking=is_background))


def wait(end: End) -> None:
    """Let the host wait.

    >>> wait(NOTHING)
    """
    if end is not NOTHING:
        end.synchronize()


def behind(end: End, device: torch.device | None) -> AbstractContextManager[Any]:
    """A block in which a stream that follows `end`, and nothing else, is the current one.

    >>> with behind(None, None): pass
    """
    if end is NOTHING:
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_event(end)
    return torch.cuda.stream(stream)


def on_device(tensor: object) -> AbstractContextManager[Any]:
    """A block in which the tensor's device is the current one, for libraries that look there.

    >>> with on_device(torch.ones(2)): pass
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda or torch.cuda.current_device() == tensor.get_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def settle(tensor: torch.Tensor) -> None:
    """Wait until the device has done what was queued: MPI reads device memory without regard to streams.

    >>> settle(torch.ones(2))
    """
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def use_here(*tensors: torch.Tensor) -> None:
    """Tell the allocator that the current stream uses these tensors, whatever stream their memory was made for.

    >>> use_here(torch.ones(2))
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def pin(memory: torch.Tensor) -> bool:
    """Lock memory of the host in its place, so that the device copies from and to it by itself; whether that went well.

    Undo it with :func:`unpin` before the memory goes.
    """
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)) == 0:
        return True
    # The runtime keeps the error for whoever asks next, and that would be torch, after some kernel of the user's.
    with suppress(RuntimeError):
        torch.empty(1, device="cuda").zero_()
    return False


def unpin(memory: torch.Tensor) -> None:
    """Undo :func:`pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def communication_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for work in the background: one for each thread, that is for each lane.

    One for all would let calls on different communicators wait for each other, in an order that ranks need not share.
    """
    streams: dict[int, torch.cuda.Stream] = _own.__dict__.setdefault("streams", {})
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in streams:
        streams[index] = torch.cuda.Stream(index, priority=_HIGH_PRIORITY)
    return streams[index]


class Order:
    """Keeps work on different streams in the order in which it was queued, as on one stream.

    >>> Order().enter(torch.ones(2))
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None

    def enter(self, tensor: object) -> None:
        """The current stream comes next: it waits for the one before, if that was another."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
            return
        stream = torch.cuda.current_stream(tensor.device)
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream


class Queued:
    """What has become of a task whose work is queued on a device."""

    def __init__(self, result: Any, end: torch.cuda.Event, origin: torch.cuda.Stream, kept: object) -> None:
        self._result, self._end, self._origin = result, end, origin
        self._kept = kept
        """What the device still uses."""

    def follow(self) -> Any:
        """The result, which the current stream may use from here on."""
        current = torch.cuda.current_stream(self._origin.device)
        current.wait_event(self._end)
        if isinstance(self._result, torch.Tensor):
            use_here(self._result)  # it may have been made on the communication stream
        if current != self._origin:
            self._hand_over()
        self._kept = None  # the allocator gives memory to the stream it was made on, which follows by now
        return self._result

    def has_ended(self) -> bool:
        """Whether the device has finished."""
        return bool(self._end.query())

    def behind(self) -> AbstractContextManager[Any]:
        """See :func:`behind`."""
        return behind(self._end, self._origin.device)

    def _hand_over(self) -> None:
        """The stream that the memory was made on does not follow: were it free now, it would be given away too soon."""
        if self._kept is not None and not self.has_ended():
            _abandoned.add(self._end, (self._kept, self._result))

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._hand_over()  # nobody has waited


class _Abandoned:
    """Keeps what is still in use until the device has finished with it."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._entries: list[tuple[End, object]] = []

    def add(self, end: End, kept: object) -> None:
        """One more; may be called by the garbage collector, at any moment, so it does not wait for the lock."""
        self._entries.append((end, kept))

    def sweep(self) -> None:
        """Let go of what is no longer used."""
        if self._entries and self._changing.acquire(False):
            try:
                for entry in list(self._entries):
                    if entry[0].query():
                        self._entries.remove(entry)
            finally:
                self._changing.release()


_abandoned = _Abandoned()


def queue(mark: Mark, device: torch.device, task: Callable[[], Any], kept: object) -> Queued:
    """:func:`enqueue_after` for a task that uses `kept` on the device."""
    _abandoned.sweep()
    try:
        result, end = enqueue_after(mark, device, task)
    except BaseException:
        _abandoned.add(communication_stream(device).record_event(), kept)  # part of its work may be queued
        raise
    return Queued(result, end, mark.stream, kept)
