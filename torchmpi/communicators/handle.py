"""The promise that an asynchronous call returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..errors import StallError


class Handle:
    """Result of a ``NAME_async`` call.

    The tensors of the call must not be read or written before ``wait()`` returns. ``wait()`` may be called any
    number of times, from any thread; it returns the result or raises what went wrong in the call.

        handle = mpi.allreduce_async(gradient)
        compute_something_else()
        gradient = handle.wait()
    """

    __slots__ = ("__weakref__", "_callbacks", "_description", "_error", "_finished", "_is_done", "_result", "_seen")

    def __init__(self, description: str = "asynchronous call") -> None:
        # A locked lock is the cheapest event: released once, when the call ends; waiters hand it on.
        self._finished = threading.Lock()
        self._finished.acquire()
        self._description = description
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_done = False
        self._seen = False
        self._callbacks: list[Callable[[], object]] = []

    @classmethod
    def completed(cls, result: Any) -> Handle:
        """A handle that is done already.

        >>> Handle.completed(3).wait()
        3
        """
        handle = cls()
        handle.set_result(result)
        return handle

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the call has ended and give its result; raise its error if it failed.

        With `timeout` (seconds) a :class:`~torchmpi.errors.StallError` is raised when it has not ended by then; the
        call itself goes on.
        """
        if not self._finished.acquire(timeout=-1 if timeout is None else timeout):
            raise StallError(f"{self._description} has not ended after {timeout:g} s. It goes on; wait() again for it.")
        self._finished.release()
        self._seen = True
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        """Whether ``wait()`` would return at once."""
        return self._is_done

    def when_done(self, callback: Callable[[], object]) -> None:
        """Have `callback` called when the call has ended: by the thread that ends it, or now if it has.

        If it makes calls itself, attach it before the next call on that communicator: ranks where the first one has
        ended already would otherwise make its calls behind the next one, and others before it.

        >>> Handle.completed(3).when_done(lambda: print("over"))
        over
        """
        self._callbacks.append(callback)
        if self._is_done:
            self._call_back()

    # What follows is for those who run the call.

    def set_result(self, result: Any) -> None:
        """End the call with `result`."""
        self._result = result
        self._end()

    def set_error(self, error: BaseException) -> None:
        """End the call with `error`, which ``wait()`` raises."""
        self._error = error
        self._end()

    @property
    def unseen_error(self) -> BaseException | None:
        """The error, if the call failed and nobody has waited for it."""
        return None if self._seen else self._error

    @property
    def error(self) -> BaseException | None:
        """The error, if the call has failed; who asks has seen it."""
        if self._error is not None:
            self._seen = True
        return self._error

    @property
    def failed(self) -> bool:
        """Whether the call has ended with an error; who asks has not seen it by that."""
        return self._error is not None

    @property
    def result(self) -> Any:
        """What the call has given, for those who know that it has ended well."""
        return self._result

    def _end(self) -> None:
        self._is_done = True
        self._finished.release()
        if self._callbacks:
            self._call_back()

    def _call_back(self) -> None:
        """Both who ends the call and who comes too late may be here: each callback is called by the one who gets it."""
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # the other has taken the last one
                return
            callback()


class DeviceHandle(Handle):
    """Of a call on tensors of a device.

    ``wait()`` returns when the call has been queued there, and makes the stream that is current in the waiting thread
    follow it: what is queued on that stream afterwards sees the result, and the host does not wait for the device.
    ``done()`` is true when the device has finished as well. Callbacks are called when the call has been queued, with a
    stream current that follows it.
    """

    __slots__ = ("_queued",)

    def __init__(self, queued: Handle, description: str) -> None:
        """`queued` gives something with the methods of :class:`torchmpi.tensors.streams.Queued`."""
        super().__init__(description)
        self._queued = queued

    def wait(self, timeout: float | None = None) -> Any:
        """Return the result once the call is queued, after at most `timeout` seconds, and follow it."""
        return self._queued.wait(timeout).follow()

    def done(self) -> bool:
        """Whether the call has ended, on the device too."""
        if not self._queued.done():
            return False
        return self._queued.failed or bool(self._queued.result.has_ended())

    def when_done(self, callback: Callable[[], object]) -> None:
        """Have `callback` called when the call is queued, as in :class:`Handle`."""

        def call() -> None:
            if self._queued.failed:
                callback()
                return
            with self._queued.result.behind():
                callback()

        self._queued.when_done(call)

    @property
    def unseen_error(self) -> BaseException | None:
        """The error, if the call failed and nobody has waited for it."""
        return self._queued.unseen_error

    @property
    def error(self) -> BaseException | None:
        """The error, if the call has failed; who asks has seen it."""
        return self._queued.error
