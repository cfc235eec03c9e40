"""The order of the calls on a communicator.

MPI requires that every rank enters the calls on a communicator in the same order, so each communicator has one queue
and one run lock: whoever holds the lock takes the call at the head. A synchronous call runs in the caller's thread if
nothing is queued, which costs one lock. An asynchronous call is taken by whoever comes first: a thread that waits for
it, which costs no switch of threads, or the helper thread of the queue, which sleeps while there is nothing to do.

The helper is woken for each call as long as it has run some of the last ones, because the program computes meanwhile.
If threads have run the last ones for which they waited, the helper only looks a millisecond after a call, again while
there are some, and takes a call that it has seen the last time too; without that, a call for which nobody waits would
block the other ranks. While a thread waits, the helper leaves the calls to it.

A call that is like an earlier one runs in machine code, whoever runs it (:mod:`torchmpi.shared_memory.fast_path`).

A call made by a call of the same queue (from a callback at its end) runs immediately, before everything queued, on all
ranks alike.

Calls on device tensors depend on the current stream, which is a property of the thread. A call that runs in the
caller's thread uses the caller's stream. The helper runs all others, on another stream that follows the caller's, and
``wait()`` makes the stream of the waiting thread follow that of the helper.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ..errors import CommunicatorError
from ..shared_memory.memory_layout import MOST_COPIED_BYTES, LockFields
from ..tensors import modes, streams
from ..timeline import events
from .conditions import Alarm, sleep_until
from .handle import DeviceHandle, Handle

Task = Callable[[], Any]
T = TypeVar("T")


class LeftToHelper(Exception):
    """Raised by a queued task that has not begun and must not run in a thread that waits: the helper runs it."""


NOW = (False,)
"""The argument `blocking` of an acquisition that does not wait."""
_LOOK_SECONDS = 0.001
_SURE = 3
"""After as many calls that threads have run for which they waited, the helper is not woken for the next one."""


class Polling(NamedTuple):
    """How often the kernels of a group poll while they wait: the numbers that they read, and what is written there."""

    numbers: memoryview = memoryview(array("q"))
    eager: array[int] = array("q")
    """For the lowest latency."""
    polite: array[int] = array("q")
    """Beside a computation."""


class RunLock:
    """The lock held while a call runs, with fields through which the machine-code fast path takes it as well.

    The fast path (:mod:`torchmpi.shared_memory.fast_path`) reads and writes the fields while it holds the GIL: it
    enters a call only if the lock is free and nothing is pending. It never waits for the lock, so a Python thread that
    acquires the lock waits until the fast path has left its call.

    A signal handler may raise an exception when a function begins, and when one of C has returned. So the lock is taken
    by an instruction that is no call and notes whether it has been taken, and given back without a function of Python.
    Only `release` is one: it is for threads without signal handlers, and where none is expected.

    >>> lock = RunLock()
    >>> lock.acquire(), lock.acquire(False), lock.release(), lock.locked()
    (True, False, None, False)
    """

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        """Excludes other Python threads; acquire it through `acquire`, or check the fields as `CallQueue.run` does."""
        self.fields = array("q", bytes(8 * LockFields.FIELDS))
        self.address, _ = self.fields.buffer_info()
        self._packed: np.ndarray[Any, Any] | None = None

    def packed_address(self) -> int:
        """Return the address of memory for the tensor of a call that runs, if the fast path packs it."""
        if self._packed is None:
            self._packed = np.empty(MOST_COPIED_BYTES, np.uint8)
        return int(self._packed.ctypes.data)

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock; return whether it was acquired."""
        (taken,) = map(self.mutex.acquire, (blocking,))
        if not taken:
            return False
        fields = self.fields
        try:
            fields[LockFields.held] = 1
            if not fields[LockFields.entered]:
                return True
            if blocking:
                sleep_until(lambda: not fields[LockFields.entered])
                return True
        except BaseException:  # KeyboardInterrupt
            fields[LockFields.held] = 0
            self.mutex.release()
            raise
        self.release()
        return False

    def run(self, task: Callable[..., T], *arguments: Any, blocking: bool = True) -> T | None:
        """Return ``task(*arguments)``, run with the lock; None if the lock is taken, unless `blocking`."""
        (taken,) = map(self.mutex.acquire, (blocking,))
        if not taken:
            return None
        fields = self.fields
        try:
            fields[LockFields.held] = 1
            if fields[LockFields.entered]:
                if not blocking:
                    return None
                sleep_until(lambda: not fields[LockFields.entered])
            return task(*arguments)
        finally:
            fields[LockFields.held] = 0
            self.mutex.release()

    def release(self, *_: object) -> None:
        """Release the lock."""
        self.fields[LockFields.held] = 0
        self.mutex.release()

    def locked(self) -> bool:
        """Return whether a thread or the fast path holds the lock."""
        return self.mutex.locked() or self.fields[LockFields.entered] != 0

    __enter__, __exit__ = acquire, release


class FastCall(Protocol):
    """A call that the fast path can run in a queue."""

    def doing(self) -> str | None:
        """Describe the call that runs, by the same string as long as it runs; None if none runs."""

    def close(self) -> None:
        """Release the resources of the call."""


class ShownTask:
    """A task that is one event of torch.profiler, whatever calls it makes."""

    def __init__(self, call_queue: CallQueue, task: Task, call: events.ShownCall) -> None:
        self._call_queue, self._task, self._call = call_queue, task, call

    def described_call(self) -> events.ShownCall:
        """Return what the profiler shows."""
        return self._call

    def __call__(self) -> Any:
        """Run the task, inside the event."""
        event = events.begin_event(self._call, is_task=self._call_queue.origin is not None)
        try:
            return self._task()
        finally:
            events.end_event(event)


def _described(task: Task, call: Callable[[], events.ShownCall] | None) -> Callable[[], events.ShownCall] | None:
    return task.described_call if call is None and isinstance(task, ShownTask) else call


class CallQueue:
    """The calls of a communicator in their order, and the lock held while one of them runs.

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
        self._threaded = threaded
        self._counting = threading.Lock()
        self.origin: events.PlainOrigin | None = None
        """Where the queued call that is running was made, if calls are recorded."""
        self.polling = Polling()
        """The calls of the helper poll little, as the program computes beside them."""
        self._entries: deque[Handle[Any]] = deque()
        """The calls that have not begun."""
        self._running: Handle[Any] | None = None
        self._waiting: list[object] = []
        """An item for each thread that waits and may run calls."""
        self._helper: threading.Thread | None = None
        self._alarm: Alarm | None = None
        """What the helper waits for; made with it."""
        self._is_called = False
        """Whether the helper is to take the calls now; it rings then."""
        self._looks = False
        """Whether the helper will look at the calls soon."""
        self._is_ending = False
        self._num_run_by_waiters = 0
        """Since the helper has run a call."""
        self.is_run_by_waiter = False
        """Whether the thread that holds the run lock waits for the call, which may then raise LeftToHelper."""

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
        fields = self.run_lock.fields
        return fields[LockFields.pending] - fields[LockFields.ended]

    def run(
        self,
        task: Callable[..., Any],
        *arguments: Any,
        subject: object = None,
        describe: Callable[..., events.ShownCall] | None = None,
    ) -> Any:
        """Run ``task(*arguments)`` in the order of the queue and return its result.

        The task runs in the calling thread if nothing is queued before it. `subject` is as in `submit`, and
        ``describe(*arguments)`` describes the call for torch.profiler.
        """
        # RunLock.run() inlined: two method calls less on the path of every synchronous call.
        lock = self.run_lock
        fields = lock.fields
        if fields[LockFields.pending] == fields[LockFields.ended]:
            (taken,) = map(lock.mutex.acquire, NOW)
            if taken:
                try:
                    fields[LockFields.held] = 1
                    if not fields[LockFields.entered]:
                        return task(*arguments)
                finally:
                    fields[LockFields.held] = 0
                    lock.mutex.release()
        has_streams = streams.has_streams(subject)
        if not has_streams and (not self._threaded or self.runs_here()):
            if self.closed:
                raise self._closed_error(self.name)
            return task(*arguments)
        call = None if describe is None else partial(describe, *arguments)
        queued = partial(task, *arguments) if arguments else task
        return self.submit(queued, self.name, subject, call=call, in_any_thread=not has_streams).wait()

    def submit(
        self,
        task: Task,
        description: str,
        subject: object = None,
        *,
        call: Callable[[], events.ShownCall] | None = None,
        in_any_thread: bool = False,
    ) -> Handle[Any]:
        """Run a task in the background, after all calls made before.

        Args:
            task: The task.
            description: The rank and the call, for messages.
            subject: If this is a tensor on a device, the work of the task on that device follows the work that the
                calling thread has queued on its current stream, and the handle is a
                :class:`~torchmpi.communicators.handle.DeviceHandle`.
            call: Describes the call for torch.profiler.
            in_any_thread: Whether a thread that waits for a call may run the task, as if it had made the call then;
                not for a `subject` on a device, whose tasks the helper runs. There the task may raise LeftToHelper.
        """
        mark = None if subject is None else streams.fence(subject)
        if mark is not None:
            on_stream = partial(streams.queue, mark, mark.stream.device, task, task)
            return DeviceHandle(self.submit(on_stream, description, call=_described(task, call)), description)
        handle: Handle[Any] = Handle(description)
        handle.task = task
        fields = self.run_lock.fields
        if not self._threaded or (fields[LockFields.runner] and self.runs_here()):
            if self.closed:
                raise self._closed_error(description)
            # Queued by a call of this queue, the task would wait for its own end.
            handle.origin = self.origin
            self._finish(handle)
            return handle
        with self._counting:
            if self.closed:
                raise self._closed_error(description)
            alarm = self._alarm or self._start_helper()
            recorder = events.recorder
            if events.show_task is not None and not events.has_event():
                shown = _described(task, call)
                handle.task = events.show_task(description, None if shown is None else shown(), task)
            if recorder is not None:  # calls are in the rows of the threads that run them
                handle.origin, in_any_thread = recorder.origin(events.now()), False
            handle.queue, handle.in_any_thread = self, in_any_thread
            fields[LockFields.pending] += 1
            self._entries.append(handle)
            if not (in_any_thread and self._num_run_by_waiters >= _SURE):  # ring() without a call
                if not self._is_called:
                    self._is_called = True
                    alarm.ring()
            elif not (self._looks or self._is_called):
                self._looks = True
                alarm.ring_later()
        return handle

    def _start_helper(self) -> Alarm:
        alarm = Alarm(_LOOK_SECONDS)
        helper = threading.Thread(target=self._help, args=(alarm,), name=f"torchmpi {self.name}", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # the system allows no more threads
            alarm.close()
            raise
        self._helper, self._alarm = helper, alarm
        return alarm

    def finish_earlier(self) -> bool:
        """Run the calls that have been submitted in this thread, or await them; return whether there were some."""
        last = self._running
        with contextlib.suppress(IndexError):
            last = self._entries[-1]
        if last is None or self.runs_here():
            return False
        recorder = events.recorder
        begin = 0 if recorder is None else events.now()
        last.run_here()
        if not last.has_ended:
            last.await_end()
        if recorder is not None:
            recorder.slice(events.WAIT, events.WAIT, begin, call=self.name)
        return True

    def ring(self) -> None:
        """Call the helper, which takes the calls that no thread waits for."""
        if not self._is_called:
            self._is_called = True
            assert self._alarm is not None  # there are calls
            self._alarm.ring()

    def run_until(self, handle: Handle[Any]) -> None:
        """Run the calls at the head in this thread until one has ended, if this thread may; else call the helper.

        If another thread runs one of them, this one waits for the end of that call, and goes on.
        """
        if not ((self.run_lock.fields[LockFields.runner] and self.runs_here()) or modes.are_active()):
            waiting = self._waiting
            waiting += NOW  # no call, after which an interrupt may come
            try:
                self._run_while_waiting(handle)
            finally:
                waiting.pop()
        if not handle.has_ended or (self._entries and self._num_run_by_waiters < _SURE):
            self.ring()

    def _run_while_waiting(self, handle: Handle[Any]) -> None:
        mutex, fields = self.run_lock.mutex, self.run_lock.fields
        while not handle.has_ended:
            (taken,) = map(mutex.acquire, NOW)  # RunLock.run() inlined, as in run()
            if taken:
                try:
                    fields[LockFields.held] = 1
                    if fields[LockFields.entered] or not self._run_head(by_waiter=True):
                        return
                finally:
                    fields[LockFields.held] = 0
                    mutex.release()
            elif (running := self._running) is None or running.has_ended:
                return  # a synchronous call, or callbacks at the end of a queued one
            else:
                running.await_end()

    def _is_head_for_any_thread(self) -> bool:
        try:
            return self._entries[0].in_any_thread
        except IndexError:  # nothing is queued
            return False

    def runs_here(self) -> bool:
        """Return whether the calling thread runs a queued call."""
        runner = self.run_lock.fields[LockFields.runner]
        return runner != 0 and runner == threading.get_ident()

    def _closed_error(self, description: str) -> CommunicatorError:
        return CommunicatorError(f"{description}: its communicator has been closed.")

    def drain(self) -> None:
        """Wait until all calls submitted so far have ended."""
        if self._helper is not None and not self.runs_here():
            with contextlib.suppress(CommunicatorError):  # closed by another thread: nothing is queued
                self.submit(lambda: None, "drain").wait()

    def close(self) -> None:
        """Finish the queued calls and the running one, and end the helper."""
        if not self.closed:
            self.drain()
            with self._counting:
                self.closed = True
                self.run_lock.fields[LockFields.pending] += 1  # never idle again, so all calls reach submit()
                self._is_ending = True
            if self._helper is not None and self._alarm is not None:
                self.ring()
                self._helper.join()
                self._alarm.close()
            for call in self.fast_calls.values():
                call.close()
            self.run_lock.acquire()  # never released: a thread that has just found the queue idle must not start a call

    def _help(self, alarm: Alarm) -> None:
        seen = None
        while True:
            alarm.wait()
            if self._is_called or (seen is not None and self._entries and self._entries[0] is seen):
                self._is_called = False
                while self._entries and not (self._waiting and self._is_head_for_any_thread()):
                    self.run_lock.run(self._run_head)
            with self._counting:
                seen = self._entries[0] if self._entries else None
                if seen is None and self._is_ending:
                    return
                self._looks = seen is not None
                if self._looks:
                    alarm.ring_later()
                    if self._is_called:  # since, and perhaps before this set the alarm
                        alarm.ring()

    def _run_head(self, *, by_waiter: bool = False) -> bool:
        """Run the call at the head; return False if it is not for this thread. The caller holds the run lock.

        A call for any thread is for those that wait, if there are any; all others are for the helper. A call that has
        not begun stays at the head.
        """
        entries, fields, polling = self._entries, self.run_lock.fields, self.polling
        handle = entries[0] if entries else None
        if handle is None or (handle.in_any_thread and bool(self._waiting)) != by_waiter:
            return False
        self._num_run_by_waiters = self._num_run_by_waiters + 1 if by_waiter else 0
        self.is_run_by_waiter = by_waiter
        if not by_waiter:
            polling.numbers[:] = polling.polite
        try:
            self._running, fields[LockFields.runner] = handle, threading.get_ident()
            del entries[0]
            self._finish(handle)
        except BaseException as error:  # of a callback, such as SystemExit; unless the hook ends the job, go on
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is not self._helper:
                raise
            # As of the helper, whoever runs the call: a callback does not choose the thread.
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._helper)))
        finally:
            self._running, fields[LockFields.runner] = None, 0
            if handle.task is None:
                fields[LockFields.ended] += 1
            elif not (entries and entries[0] is handle):
                entries.appendleft(handle)
            if not by_waiter:
                polling.numbers[:] = polling.eager
        return True

    def _finish(self, handle: Handle[Any]) -> None:
        task, handle.task = handle.task, None
        assert task is not None
        before, self.origin = self.origin, handle.origin
        if self.failed:  # an error that has been raised would keep the tensors of its call
            self.failed = [other for other in self.failed if other.unseen_error is not None]
        try:
            try:
                result = task()
            finally:
                self.is_run_by_waiter = False  # callbacks of the handle make calls of their own
        except LeftToHelper:
            self.origin, handle.task, handle.in_any_thread = before, task, False
        except BaseException as error:  # every error is raised by wait()
            self.origin = before  # callbacks of the handle make calls of their own
            self.failed = [*self.failed, handle]
            handle.end(error=error)
        else:
            self.origin = before
            handle.end(result)
