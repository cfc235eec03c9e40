"""Ordered queues of communication calls.

MPI requires that every rank enters the calls on a communicator in the same order, so each communicator has one queue.
A synchronous call runs in the caller's thread if the queue is idle, which costs one lock; otherwise it is queued behind
the asynchronous calls. One worker thread per queue runs the asynchronous calls; it sleeps while the queue is empty.
A call made by the worker itself (from a callback at the end of a call) runs immediately, before everything queued, on
all ranks alike.

Calls on device tensors depend on the current stream, which is a property of the thread. A call that runs in the
caller's thread uses the caller's stream; a call in the worker uses another stream that follows the caller's, and
``wait()`` makes the stream of the waiting thread follow the worker's stream.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from array import array
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol

from ..errors import CommunicatorError
from ..shared_memory.memory_layout import LockFields
from ..tensors import streams
from ..timeline import events
from .conditions import sleep_until
from .handle import DeviceHandle, Handle

Task = Callable[[], Any]


class RunLock:
    """The lock held while a call runs, with fields through which the machine-code fast path takes it as well.

    The fast path (:mod:`torchmpi.shared_memory.fast_path`) reads and writes the fields while it holds the GIL: it
    enters a call only if the lock is free and nothing is pending. It never waits for the lock, so a Python thread that
    acquires the lock waits until the fast path has left its call.

    >>> lock = RunLock()
    >>> lock.acquire(), lock.acquire(False), lock.release(), lock.locked()
    (True, False, None, False)
    """

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        """Excludes other Python threads; acquire it through `acquire`, or check the fields as `CallQueue.run` does."""
        self.fields = array("q", bytes(8 * LockFields.FIELDS))
        self.address, _ = self.fields.buffer_info()

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock; return whether it was acquired."""
        if not self.mutex.acquire(blocking):
            return False
        fields = self.fields
        fields[LockFields.held] = 1
        if fields[LockFields.entered]:
            if not blocking:
                self.release()
                return False
            try:
                self._wait_for_fast_path()
            except BaseException:  # KeyboardInterrupt
                self.release()
                raise
        return True

    def release(self) -> None:
        """Release the lock."""
        self.fields[LockFields.held] = 0
        self.mutex.release()

    def locked(self) -> bool:
        """Return whether a thread or the fast path holds the lock."""
        return self.mutex.locked() or self.fields[LockFields.entered] != 0

    def _wait_for_fast_path(self) -> None:
        sleep_until(lambda: not self.fields[LockFields.entered])

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class FastCall(Protocol):
    """A call that the fast path can run in a queue."""

    def doing(self) -> str | None:
        """Describe the call that runs, by the same string as long as it runs; None if none runs."""

    def close(self) -> None:
        """Release the resources of the call."""


class CallQueue:
    """A queue of calls and the lock held while one of them runs.

    >>> calls = CallQueue("example")
    >>> calls.run(lambda: 1), calls.submit(lambda: 2, "two").wait()
    (1, 2)
    >>> calls.close()
    """

    def __init__(self, name: str, *, threaded: bool = True) -> None:
        self.name = name
        self.run_lock = RunLock()
        """Held while a call runs."""
        self.closed = False
        self._doing: str | None = None
        self.fast_calls: dict[Hashable, FastCall] = {}
        """The calls that the fast path can run."""
        self.failed: list[Handle[Any]] = []
        """Failed calls, so that an error for which no thread waits can be reported when the group is freed."""
        self.recorded_until = 0
        """The end of the last message in the timeline, whose slices on a row do not overlap."""
        self._threaded = threaded
        self._counting = threading.Lock()
        self.origin: events.PlainOrigin | None = None
        """Where the queued call that is running was made, if calls are recorded."""
        self._tasks: queue.SimpleQueue[tuple[Task, Handle[Any], events.PlainOrigin | None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    @property
    def doing(self) -> str | None:
        """The description of the running call for stall reports, a separate string for each call."""
        if self._doing is not None or not self.run_lock.fields[LockFields.entered]:
            return self._doing
        return next(filter(None, (call.doing() for call in list(self.fast_calls.values()))), None)

    @doing.setter
    def doing(self, description: str | None) -> None:
        self._doing = description

    @property
    def pending(self) -> int:
        """The number of submitted calls that have not ended."""
        return self.run_lock.fields[LockFields.pending]

    def run(self, task: Callable[..., Any], *arguments: Any, subject: object = None) -> Any:
        """Run ``task(*arguments)`` in the order of the queue and return its result.

        The task runs in the calling thread if the queue is idle; otherwise it is queued. `subject` is as in `submit`.
        """
        # RunLock.acquire(False) inlined: two method calls less on the path of every synchronous call.
        lock = self.run_lock
        fields = lock.fields
        if fields[LockFields.pending] == 0 and lock.mutex.acquire(False):
            try:
                fields[LockFields.held] = 1
                if not fields[LockFields.entered]:
                    return task(*arguments)
            finally:
                fields[LockFields.held] = 0
                lock.mutex.release()
        if not streams.has_streams(subject) and (not self._threaded or self.is_worker()):
            if self.closed:
                raise self._closed_error(self.name)
            return task(*arguments)
        return self.submit(partial(task, *arguments), self.name, subject).wait()

    def submit(self, task: Task, description: str, subject: object = None) -> Handle[Any]:
        """Run `task` in the background, after all calls submitted before.

        If `subject` is a tensor on a device, the work of the task on that device follows the work that the calling
        thread has queued on its current stream, and the handle is a
        :class:`~torchmpi.communicators.handle.DeviceHandle`.
        """
        mark = streams.fence(subject)
        if mark is not None:
            task = partial(streams.queue, mark, mark.stream.device, task, task)
            queued = self.submit(task, description)
            return DeviceHandle(queued, description)
        handle: Handle[Any] = Handle(description)
        if not self._threaded or self.is_worker():
            if self.closed:
                raise self._closed_error(description)
            # Queued from the worker itself, the task would wait for its own end.
            self._finish(task, handle, self.origin)
            return handle
        with self._counting:
            if self.closed:
                raise self._closed_error(description)
            if self._worker is None:
                worker = threading.Thread(target=self._work, name=f"torchmpi {self.name}", daemon=True)
                worker.start()  # raises where the system allows no more threads
                self._worker = worker
            recorder = events.recorder
            if events.show_task is not None and not events.has_event():
                task = events.show_task(description, task)
            origin = None if recorder is None else recorder.origin(events.now())
            self.run_lock.fields[LockFields.pending] += 1
            self._tasks.put((task, handle, origin))
        return handle

    def is_worker(self) -> bool:
        """Return whether the calling thread is the worker of this queue."""
        return self._worker is threading.current_thread()

    def _closed_error(self, description: str) -> CommunicatorError:
        return CommunicatorError(f"{description}: its communicator has been closed.")

    def drain(self) -> None:
        """Wait until all calls submitted so far have ended."""
        if self._worker is not None and not self.is_worker():
            with contextlib.suppress(CommunicatorError):  # closed by another thread: nothing is queued
                self.submit(lambda: None, "drain").wait()

    def close(self) -> None:
        """Finish the queued calls and the running one, and end the worker."""
        if not self.closed:
            self.drain()
            with self._counting:
                self.closed = True
                self.run_lock.fields[LockFields.pending] += 1  # never idle again, so all calls reach submit()
                if self._worker is not None:
                    self._tasks.put(None)
            if self._worker is not None:
                self._worker.join()
            for call in self.fast_calls.values():
                call.close()
            self.run_lock.acquire()  # never released: a thread that has just found the queue idle must not start a call

    def _work(self) -> None:
        while (entry := self._tasks.get()) is not None:
            with self.run_lock:
                try:
                    self._finish(*entry)
                except BaseException:  # of a callback, such as SystemExit; a job that the hook does not end continues
                    thread = threading.current_thread()
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))
                with self._counting:
                    self.run_lock.fields[LockFields.pending] -= 1
            del entry  # otherwise the tensors of the last call would live until the next call

    def _finish(self, task: Task, handle: Handle[Any], origin: events.PlainOrigin | None) -> None:
        before, self.origin = self.origin, origin
        if self.failed:  # an error that has been raised would keep the tensors of its call
            self.failed = [other for other in self.failed if other.unseen_error is not None]
        try:
            result = task()
        except BaseException as error:  # every error is raised by wait()
            self.origin = before  # callbacks of the handle make calls of their own
            self.failed = [*self.failed, handle]
            handle.set_error(error)
        else:
            self.origin = before
            handle.set_result(result)
