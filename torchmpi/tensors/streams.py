"""Order between the device and this process: nothing on the CPU, events and streams on CUDA.

A call records an event at the end of the current stream when it is made. Its work follows that event, on the current
stream itself or, in the background, on the *communication stream* of the worker thread. ``wait()`` makes the current
stream of the waiting thread follow the end of the work. The host waits for the device only if data pass through host
memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch

End = Any
"""A ``torch.cuda.Event`` at the end of some work; NOTHING if there is nothing to wait for."""
NOTHING: End = None
_HIGH_PRIORITY = -1  # other ranks wait for communication, not for computation
_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts of the process
_address_of_current = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_index_of_current = getattr(torch._C, "_cuda_getDevice", None)
is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Returns whether the current stream of the current device is captured in a CUDA graph."""
_known: dict[tuple[int | None, int], torch.cuda.Stream] = {}
_NO_CONTEXT: AbstractContextManager[Any] = nullcontext()


def current(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a device.

    ``torch.cuda.current_stream()`` makes an object in each call, which takes microseconds.
    """
    if _address_of_current is None:
        return torch.cuda.current_stream(device)
    key = device.index, _address_of_current(device.index)
    stream = _known.get(key)
    if stream is None:
        stream = _known[key] = torch.cuda.current_stream(device)
    return stream


def address_of_current(index: int) -> int:
    """Return the address of the current stream of a GPU."""
    if _address_of_current is None:
        return torch.cuda.current_stream(index).cuda_stream
    address: int = _address_of_current(index)
    return address


class _StreamsOfThread(dict[int, torch.cuda.Stream]):
    """The communication streams of a thread by device. When it ends, others use them: each stream has memory."""

    def __init__(self) -> None:
        super().__init__()
        self._unused = _unused

    def __del__(self) -> None:
        for index, stream in self.items():
            self._unused.setdefault(index, []).append(stream)


_unused: dict[int, list[torch.cuda.Stream]] = {}
"""The communication streams of threads that have ended, by device."""


class _Own(threading.local):
    """The streams of the current thread."""

    def __init__(self) -> None:
        self.streams = _StreamsOfThread()


_own = _Own()


class Mark(NamedTuple):
    """A position in a stream."""

    event: torch.cuda.Event
    stream: torch.cuda.Stream
    thread: int
    """Identifier of the thread that recorded the event."""


def has_streams(tensor: object) -> bool:
    """Return whether a value is a tensor on a device whose work is ordered by streams.

    >>> has_streams(torch.ones(2)), has_streams(None)
    (False, False)
    """
    return isinstance(tensor, torch.Tensor) and tensor.is_cuda


def fence(tensor: object) -> Mark | None:
    """Return a mark at the end of the current stream of the tensor's device; None for host tensors.

    >>> fence(torch.ones(2)) is None
    True
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return None
    stream = current(tensor.device)
    return Mark(stream.record_event(), stream, threading.get_ident())


def move_to(device: torch.device) -> None:
    """Make `device` the current device of a thread of torchmpi.

    Not a with block: its end would set the previous device, in a new thread the first one, which costs a context.
    """
    if torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device)


def enqueue_after(mark: Mark | None, device: torch.device | None, task: Callable[[], Any]) -> tuple[Any, End]:
    """Run `task` on this thread's communication stream; its work on the device follows `mark`.

    Returns the result, and the end of the work, which may not have started.

    >>> enqueue_after(None, None, lambda: 3)
    (3, None)
    """
    if mark is None:
        return task(), NOTHING
    assert device is not None
    if mark.thread != threading.get_ident():
        move_to(device)
    stream = communication_stream(device)
    with torch.cuda.stream(stream):
        stream.wait_event(mark.event)
        result = task()
        return result, stream.record_event(torch.cuda.Event(blocking=True))


def run_after(mark: Mark | None, device: torch.device | None, task: Callable[[], Any]) -> Any:
    """Run `task` like `enqueue_after`, and wait until the device has finished.

    >>> run_after(None, None, lambda: 3)
    3
    """
    result, end = enqueue_after(mark, device, task)
    wait(end)
    return result


def in_order(tensor: object, task: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function for any thread that runs `task` after the work queued on the tensor's device now.

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
    """Make the current stream wait for `end`; the host does not wait.

    >>> follow(None, None)
    """
    if end is not NOTHING:
        torch.cuda.current_stream(device).wait_event(end)


def end_of(*tensors: torch.Tensor) -> End:
    """Return the end of the current stream of the device of these tensors; NOTHING if all are on the host.

    >>> end_of(torch.ones(2), torch.ones(3))
    """
    devices = [tensor.device for tensor in tensors if tensor.is_cuda]
    if not devices:
        return NOTHING
    stream = current(devices[0])
    # In the background the host sleeps until then, which takes longer than polling.
    is_background = stream in _own.streams.values()
    return stream.record_event(torch.cuda.Event(blocking=is_background))


def wait(end: End) -> None:
    """Make the host wait for `end`.

    >>> wait(NOTHING)
    """
    if end is not NOTHING:
        end.synchronize()


def behind(end: End, device: torch.device | None) -> AbstractContextManager[Any]:
    """Return a context in which the current stream is the communication stream of this thread, behind `end`.

    In the thread that has queued the work, this stream is behind it already. A new stream would be one of the 32 that
    torch has: after 32 callbacks, that of other work.

    >>> with behind(None, None): pass
    """
    if end is NOTHING:
        return nullcontext()
    assert device is not None
    stream = communication_stream(device)
    stream.wait_event(end)
    return torch.cuda.stream(stream)


def on_device(tensor: object) -> AbstractContextManager[Any]:
    """Return a context in which the tensor's device is the current device.

    >>> with on_device(torch.ones(2)): pass
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return _NO_CONTEXT
    current_index = torch.cuda.current_device() if _index_of_current is None else _index_of_current()
    if current_index == tensor.get_device():
        return _NO_CONTEXT
    return torch.cuda.device(tensor.device)


def settle(tensor: torch.Tensor) -> None:
    """Wait until the device has finished the queued work: MPI reads device memory without regard to streams.

    >>> settle(torch.ones(2))
    """
    if tensor.is_cuda:
        current(tensor.device).synchronize()


def use_here(*tensors: torch.Tensor) -> None:
    """Record for the allocator that the current stream uses these tensors, which were allocated on another one.

    >>> use_here(torch.ones(2))
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(current(tensor.device))


def pin(memory: torch.Tensor) -> bool:
    """Page-lock host memory for asynchronous copies, and return whether that succeeded.

    Call :func:`unpin` before the memory is freed.
    """
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)) == 0:
        return True
    # CUDA keeps the error until the next check, which torch would make after a kernel of the user.
    with suppress(RuntimeError):
        torch.empty(1, device="cuda").zero_()
    return False


def unpin(memory: torch.Tensor) -> None:
    """Undo :func:`pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def communication_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for background work of this thread, that is, of one call queue.

    With one common stream, calls on different communicators would wait for each other, in different orders on different
    ranks.
    """
    streams = _own.streams
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in streams:
        with suppress(IndexError):
            streams[index] = _unused.setdefault(index, []).pop()
            return streams[index]
        streams[index] = torch.cuda.Stream(index, priority=_HIGH_PRIORITY)
    return streams[index]


class Order:
    """Keeps work on different streams in the order in which it was queued.

    >>> Order().enter(torch.ones(2))
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None
        self._place = -1, 0
        """The index of its device, and its address."""

    def is_kept_by(self, tensor: torch.Tensor) -> bool:
        """Return whether the device of a CUDA tensor is the current one, and its current stream the last one here."""
        index, address = self._place
        return (
            _index_of_current is not None
            and _address_of_current is not None
            and tensor.get_device() == index
            and _index_of_current() == index
            and _address_of_current(index) == address
        )

    def enter(self, tensor: object) -> None:
        """Make the current stream follow the previous one, if that was another stream.

        In the capture of a CUDA graph the order is that of the program: a captured stream cannot wait for work outside.
        """
        if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
            return
        stream = current(tensor.device)
        if stream is self._last or stream == self._last or torch.cuda.is_current_stream_capturing():
            return
        if self._last is not None:
            stream.wait_stream(self._last)
        self._last = stream
        if _address_of_current is not None:
            self._place = tensor.get_device(), _address_of_current(tensor.get_device())


class Queued:
    """The result of a task whose work is queued on a device."""

    def __init__(self, result: Any, end: torch.cuda.Event, origin: torch.cuda.Stream, kept: object) -> None:
        self._result, self._end, self._origin = result, end, origin
        self._kept = kept
        """The objects that the device still uses."""

    def follow(self) -> Any:
        """Return the result, which the current stream may use from here on."""
        stream = current(self._origin.device)
        stream.wait_event(self._end)
        # Tensors of the result may have been made on the communication stream.
        parts = self._result if isinstance(self._result, (tuple, list)) else (self._result,)
        use_here(*(part for part in parts if isinstance(part, torch.Tensor)))
        if stream == self._origin:
            self._kept = None  # the allocator reuses memory for its original stream, which follows now
        _abandoned.sweep()
        return self._result

    def has_ended(self) -> bool:
        """Return whether the device has finished."""
        return bool(self._end.query())

    def behind(self) -> AbstractContextManager[Any]:
        """Return :func:`behind` for the end of the call."""
        return behind(self._end, self._origin.device)

    def __del__(self) -> None:
        """Keep the memory: if the stream it was allocated on does not follow, the allocator would reuse it too soon."""
        is_needed = self._kept is not None and not sys.is_finalizing()
        if is_needed and (torch.cuda.is_current_stream_capturing() or not self.has_ended()):
            _abandoned.add(self._end, (self._kept, self._result))


class _Abandoned:
    """Keeps memory alive until the device has finished with it."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._entries: list[tuple[End, object]] = []

    def add(self, end: End, kept: object) -> None:
        """Add an entry. The garbage collector may call this at any moment, so no lock is awaited."""
        self._entries.append((end, kept))

    def sweep(self) -> None:
        """Release the objects that the device no longer uses. A query would invalidate the capture of a CUDA graph."""
        if self._entries and not torch.cuda.is_current_stream_capturing() and self._changing.acquire(False):
            try:
                for entry in list(self._entries):
                    with suppress(RuntimeError):  # the event of a capture cannot be queried
                        if entry[0].query():
                            self._entries.remove(entry)
            finally:
                self._changing.release()

    def close(self) -> None:
        """Release all objects when the device has finished with them."""
        with suppress(RuntimeError):  # the device has failed
            for end, _ in list(self._entries):
                wait(end)
            self.sweep()


_abandoned = _Abandoned()


def release() -> None:
    """Wait until the device has finished the calls whose handles were dropped, and release their memory.

    >>> release()
    """
    _abandoned.close()


def queue(mark: Mark, device: torch.device, task: Callable[[], Any], kept: object) -> Queued:
    """Run :func:`enqueue_after` for a task that uses `kept` on the device."""
    _abandoned.sweep()
    try:
        result, end = enqueue_after(mark, device, task)
    except BaseException:
        _abandoned.add(communication_stream(device).record_event(), kept)  # part of its work may be queued
        raise
    return Queued(result, end, mark.stream, kept)
