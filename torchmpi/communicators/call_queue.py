"""One ordered queue of communication: calls run in the order in which they were submitted.

MPI wants every rank to enter the calls on a communicator in the same order, so each communicator has one lane.
A synchronous call runs in the caller's thread when the lane is idle, which costs a lock; otherwise it queues up behind
the asynchronous ones. Asynchronous calls run in one worker thread, which sleeps when there is nothing to do. What the
worker itself calls, because somebody asked to be called back at the end of a call, runs at once: before everything
queued, on all ranks alike.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

from ..errors import NotStartedError
from ..shared_memory.memory_layout import RUN_LOCK_ENTERED, RUN_LOCK_FIELDS, RUN_LOCK_HELD, RUN_LOCK_PENDING
from .handle import Handle

Task = Callable[[], Any]
_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 20e-6, 1e-3


class RunLock:
    """The right to run, held by whoever runs a call: a lock, beside words by which machine code takes it too.

    That code (see :mod:`torchmpi.shared_memory.fast_path`) looks at the words and writes them while it has the GIL: it
    takes the right if
    nobody holds it and nothing is pending. It never waits for it, so whoever has the lock waits for it to leave.

    >>> turn = Turn()
    >>> turn.acquire(), turn.acquire(False), turn.release(), turn.locked()
    (True, False, None, False)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fields = array("q", bytes(8 * RUN_LOCK_FIELDS))
        self.address, _ = self.fields.buffer_info()

    def acquire(self, blocking: bool = True) -> bool:
        """Take the right, and say whether it could be had."""
        if not self._lock.acquire(blocking):
            return False
        fields = self.fields
        fields[RUN_LOCK_HELD] = 1
        if fields[RUN_LOCK_ENTERED]:
            if not blocking:
                self.release()
                return False
            try:
                self._wait_for_machine_code()
            except BaseException:  # KeyboardInterrupt
                self.release()
                raise
        return True

    def release(self) -> None:
        """Give it back."""
        self.fields[RUN_LOCK_HELD] = 0
        self._lock.release()

    def locked(self) -> bool:
        """Whether anybody holds it."""
        return self._lock.locked() or self.fields[RUN_LOCK_ENTERED] != 0

    def _wait_for_machine_code(self) -> None:
        nap = _SHORTEST_NAP_SECONDS
        while self.fields[RUN_LOCK_ENTERED]:
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class CallQueue:
    """A queue and the right to run.

    >>> lane = Lane("example")
    >>> lane.run(lambda: 1), lane.submit(lambda: 2, "two").wait()
    (1, 2)
    >>> lane.close()
    """

    def __init__(self, name: str, *, threaded: bool = True) -> None:
        self.name = name
        self.run_lock = RunLock()
        """Held by whoever runs a call."""
        self.closed = False
        self.doing: str | None = None
        """What runs at the moment, in words, if whoever runs it says so; for the watchdog."""
        self.failed: list[Handle] = []
        """Calls that ended with an error, so that one which nobody waits for is not lost."""
        self._threaded = threaded
        self._counting = threading.Lock()
        self._tasks: queue.SimpleQueue[tuple[Task, Handle] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Submitted calls that have not ended."""
        return self.run_lock.fields[RUN_LOCK_PENDING]

    def run(self, task: Task) -> Any:
        """Run `task` in its turn and return its result."""
        if self.pending == 0 and self.run_lock.acquire(False):
            try:
                return task()
            finally:
                self.run_lock.release()
        if not self._threaded or self._worker is threading.current_thread():
            return task()
        return self.submit(task, self.name).wait()

    def submit(self, task: Task, description: str) -> Handle:
        """Run `task` after all earlier ones, in the background."""
        self._check_open(description)
        handle = Handle(description)
        if not self._threaded or self._worker is threading.current_thread():
            self._finish(task, handle)  # called back at the end of a call: waiting for one's own turn would be for ever
            return handle
        with self._counting:
            self._check_open(description)  # another thread may have closed it: then nobody looks at the queue any more
            self.run_lock.fields[RUN_LOCK_PENDING] += 1
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=f"torchmpi {self.name}", daemon=True)
                self._worker.start()
            self._tasks.put((task, handle))
        return handle

    def _check_open(self, description: str) -> None:
        if self.closed:
            raise NotStartedError(f"{description}: its communicator has been closed.")

    def drain(self) -> None:
        """Return when everything submitted so far has ended."""
        if self._worker is not None and self._worker is not threading.current_thread():
            with contextlib.suppress(NotStartedError):  # another thread has closed it: then nothing is queued
                self.submit(lambda: None, "drain").wait()

    def close(self) -> None:
        """Finish what is queued, and what another thread runs by itself; end the worker."""
        if not self.closed:
            self.drain()
            with self._counting:
                self.closed = True
                self.run_lock.fields[RUN_LOCK_PENDING] += 1  # never idle again: callers look no further
                if self._worker is not None:
                    self._tasks.put(None)
            if self._worker is not None:
                self._worker.join()
            self.run_lock.acquire()  # for good: who found the lane idle just before must not begin any more

    def _work(self) -> None:
        while (entry := self._tasks.get()) is not None:
            with self.run_lock:
                self._finish(*entry)
                with self._counting:
                    self.run_lock.fields[RUN_LOCK_PENDING] -= 1
            del entry  # or the last tensor would live until the next call

    def _finish(self, task: Task, handle: Handle) -> None:
        try:
            result = task()
        except BaseException as error:  # whatever it is belongs to the one who waits
            self.failed = [*(other for other in self.failed if other.unseen_error is not None), handle]
            handle.set_error(error)
        else:
            handle.set_result(result)
