"""Handles of asynchronous calls."""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ..errors import StallError
from ..log import logger
from ..timeline import events

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class CallOrder(Protocol):
    """An order of calls, of which a waiting thread may run some."""

    def run_until(self, handle: Handle[Any]) -> None:
        """Run calls in this thread until that of the handle has ended, if this thread may; else call the helper."""

    def ring(self) -> None:
        """Wake the helper."""


class Handle(Generic[T_co]):
    """The handle of an asynchronous call, whose ``wait()`` returns the result.

    The tensors of the call must not be read or written before ``wait()`` returns. ``wait()`` may be called any number
    of times and from any thread; it returns the result of the call, or raises its error.

        handle = mpi.allreduce_async(gradient)
        compute_something_else()
        gradient = handle.wait()
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_description",
        "_error",
        "_finished",
        "_result",
        "_seen",
        "awaited",
        "has_ended",
        "in_any_thread",
        "origin",
        "queue",
        "task",
    )

    def __init__(self, description: str = "asynchronous call") -> None:
        # A locked lock is the cheapest event: released at the end of the call, and by each waiter for the next one.
        self._finished = finished = threading.Lock()
        finished.acquire()
        self._description = description
        self.awaited: Callable[[], str] | None = None
        """Returns the ranks for which the call waits, for the message of a timeout; '' if unknown."""
        self.queue: CallOrder | None = None
        """The order of calls in which this one is, until it has ended."""
        self.task: Callable[[], Any] | None = None
        """What the order of calls runs; None from the begin of the call, which holds the tensors."""
        self.origin: events.PlainOrigin | None = None
        """Where the call was made, if calls are recorded."""
        self.in_any_thread = False
        """Whether a thread that waits may run the call."""
        self._result: T_co  # from the end of the call
        self._error: BaseException | None = None
        self.has_ended = False
        """Whether the call has ended; unlike :meth:`done`, this does not wake the helper."""
        self._seen = False
        self._callbacks: list[Callable[[], object]] = []

    @classmethod
    def completed(cls, result: T) -> Handle[T]:
        """Return a handle that is done.

        Args:
            result: What ``wait()`` returns.

        Returns:
            The handle.

        >>> Handle.completed(3).wait()
        3
        """
        handle: Handle[T] = Handle()
        handle.end(result)
        return handle

    def wait(self, timeout: float | None = None) -> T_co:
        """Wait until the call has ended and return its result; raise its error if it failed.

        Args:
            timeout: Longest time to wait, in seconds; None for any time. The call continues after a timeout.

        Returns:
            The result of the call, as of the synchronous function.

        Raises:
            StallError: The call has not ended after `timeout` seconds.
        """
        if not self.has_ended:
            recorder = events.recorder
            begin = 0 if recorder is None else events.now()
            if (order := self.queue) is not None:
                if timeout is None:  # run_here() without a call
                    order.run_until(self)
                else:  # a thread that runs the call itself cannot return before its end
                    order.ring()
            if not self.has_ended:
                self.await_end(timeout)
            if recorder is not None:
                recorder.slice(events.WAIT, events.WAIT, begin, call=self._description)
        self._seen = True
        if self._error is not None:
            raise self._error
        return self._result

    def await_end(self, timeout: float | None = None) -> None:
        """Wait until the call has ended; unlike :meth:`wait`, this runs no call and raises no error of the call."""
        if not self._finished.acquire(timeout=-1 if timeout is None else min(max(timeout, 0), threading.TIMEOUT_MAX)):
            ranks = self.awaited() if self.awaited is not None else ""
            reason = f": it waits for {ranks}" if ranks else ""
            raise StallError(
                f"{self._description} has not ended after {timeout:g} s{reason}. It continues; call wait() again."
            )
        self._finished.release()

    def done(self) -> bool:
        """Return whether the call has ended, also with an error.

        Returns:
            True if ``wait()`` would not wait.
        """
        if (order := self.queue) is not None:
            order.ring()
        return self.has_ended

    def run_here(self) -> None:
        """Run the call, and those before it, in this thread if it may; else wake the helper."""
        if (order := self.queue) is not None:
            order.run_until(self)

    def when_done(self, callback: Callable[[], object], *, soon: bool = True) -> None:
        """Call `callback` when the call has ended, in the thread that ends it; immediately if the call has ended.

        Attach a callback that makes collective calls before the next call on that communicator. Otherwise ranks on
        which the first call has ended would make the callback's calls after the next one, and other ranks before.

        An exception that the callback raises is logged with its traceback. It changes neither the result of the call
        nor later calls.

        Args:
            callback: A function without parameters; its result is ignored.
            soon: Have a helper thread run the call now, also if no thread waits for it; False to leave the call to
                those who wait, or to the helper in its time.

        >>> Handle.completed(3).when_done(lambda: print("over"))
        over
        """
        self._callbacks.append(callback)
        if self.has_ended:
            self._call_back()
        elif soon and (order := self.queue) is not None:
            order.ring()

    # For the code that runs the call.

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        """End the call with a result, or with an error, which ``wait()`` raises."""
        self._result, self._error = result, error
        self.has_ended, self.queue = True, None
        self._finished.release()
        if self._callbacks:
            self._call_back()

    @property
    def unseen_error(self) -> BaseException | None:
        """The error, if the call failed and ``wait()`` has not raised it."""
        return None if self._seen else self._error

    @property
    def error(self) -> BaseException | None:
        """The error, if the call has failed; it counts as seen then."""
        if self._error is not None:
            self._seen = True
        return self._error

    @property
    def failed(self) -> bool:
        """Whether the call has ended with an error, which does not count as seen."""
        return self._error is not None

    def _call_back(self) -> None:
        """Call each callback once; the thread that ends the call and one that attaches a callback may both be here."""
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # the other thread has taken the last one
                return
            try:
                callback()
            except Exception:  # SystemExit ends the job, with a report
                logger.error(f"{self._description}: a callback of when_done() failed:\n{traceback.format_exc()}")


class EndedHandle(Handle[T_co]):
    """The handle of a call that has ended without an error before the handle was made, at little cost.

    >>> EndedHandle(3).wait(), EndedHandle(3).done(), EndedHandle(3).when_done(lambda: print("over"))
    over
    (3, True, None)
    """

    __slots__ = ()
    _description, has_ended, _error, queue, task, origin, awaited = "call", True, None, None, None, None, None
    in_any_thread, _seen = False, True

    def __init__(self, result: T_co) -> None:
        self._result = result

    def wait(self, timeout: float | None = None) -> T_co:
        return self._result

    def when_done(self, callback: Callable[[], object], *, soon: bool = True) -> None:
        self._callbacks = [callback]
        self._call_back()


class DeviceHandle(Handle[T_co]):
    """The handle of a call on device tensors.

    ``wait()`` returns when the work has been queued on the device, and makes the current stream of the waiting thread
    follow it: later work on that stream sees the result, and the host does not wait for the device. ``done()`` is true
    when the device has finished. Callbacks are called when the work has been queued; the current stream follows it.
    """

    __slots__ = ("_queued",)

    def __init__(self, queued: Handle[Any], description: str) -> None:
        """Wrap the handle of a task that returns a :class:`torchmpi.tensors.streams.Queued`."""
        super().__init__(description)
        self._queued = queued

    def wait(self, timeout: float | None = None) -> T_co:
        """Return the result when the work is queued; raise after `timeout` seconds."""
        self._queued.awaited = self.awaited
        result: T_co = self._queued.wait(timeout).follow()
        return result

    def done(self) -> bool:
        """Return whether the call has ended, on the device too."""
        if not self._queued.done():
            return False
        return self._queued.failed or bool(self._queued._result.has_ended())

    def when_done(self, callback: Callable[[], object], *, soon: bool = True) -> None:
        """Call `callback` when the work is queued, as in :class:`Handle`."""

        def call() -> None:
            if self._queued.failed:
                callback()
                return
            with self._queued._result.behind():
                callback()

        self._queued.when_done(call, soon=soon)

    @property
    def unseen_error(self) -> BaseException | None:
        return self._queued.unseen_error

    @property
    def error(self) -> BaseException | None:
        return self._queued.error

    @property
    def failed(self) -> bool:
        return self._queued.failed


class JoinedHandle(Handle[T_co]):
    """The handle of several calls that are one call to the user. It ends with the last of them.

    >>> JoinedHandle([Handle.completed(1), Handle.completed(2)], "both", "two calls").wait()
    'both'
    """

    __slots__ = ("_handles", "_num_ended")

    def __init__(self, handles: Sequence[Handle[Any]], result: T_co, description: str) -> None:
        super().__init__(description)
        self._handles, self._result, self.queue = handles, result, self
        self._num_ended = itertools.count(1)  # next() is atomic: handles may end in several threads
        for handle in handles:
            handle.when_done(self._one_has_ended, soon=False)
        if not handles:
            self.end(result)

    def _one_has_ended(self) -> None:
        if next(self._num_ended) == len(self._handles):
            if not self.failed:
                for handle in self._handles:
                    handle.wait()  # the current stream follows the work of all
            self.end(self._result)

    def wait(self, timeout: float | None = None) -> T_co:
        """Wait until all calls have ended and return the result; raise the first error."""
        if not self.has_ended:
            super().wait(timeout)
        if (error := self.error) is not None:
            raise error
        for handle in self._handles:
            handle.wait()  # the current stream of this thread follows
        return self._result

    # It is the order of its calls, which may be in several others.

    def run_until(self, handle: Handle[Any]) -> None:
        for part in self._handles:
            part.run_here()

    def ring(self) -> None:
        for part in self._handles:
            part.done()

    def done(self) -> bool:
        """Return whether all calls have ended, on the device too."""
        return all(handle.done() for handle in self._handles)

    @property
    def unseen_error(self) -> BaseException | None:
        return next((error for handle in self._handles if (error := handle.unseen_error) is not None), None)

    @property
    def error(self) -> BaseException | None:
        errors = [error for handle in self._handles if (error := handle.error) is not None]
        return errors[0] if errors else None

    @property
    def failed(self) -> bool:
        return any(handle.failed for handle in self._handles)
