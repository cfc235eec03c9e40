"""What looks at a rank from its start to ``stop()``, and the thread by which an observer receives records of calls."""

from __future__ import annotations

import threading
import time
import traceback
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from math import inf
from operator import attrgetter
from types import TracebackType
from typing import Any, NamedTuple

from typing_extensions import Self

from ..config import Config
from ..errors import TorchMPIError, rank_prefix
from ..log import logger
from . import events
from .events import EventQueue, Record

PERIOD_SECONDS = 0.5
_MOST_RECORDS = 5000
"""The most records that are passed on together."""
_SETTLING = 20_000_000
"""Nanoseconds for which a record may come after others that have ended later: its thread may have lost the GIL."""
_LAST_SECONDS = 1.0
_end_of = attrgetter("end")
_running: dict[JobObserver, bool] = {}
"""The observers that have not been closed, in the order in which they came."""


class ObservedJob(NamedTuple):
    """What observers know of the running job."""

    config: Config
    rank: int
    local_rank: int
    host: str
    comm: Any
    """The MPI communicator of all ranks, for :meth:`JobObserver.meet`."""
    metrics: Callable[[], dict[str, Any]]
    """See :func:`torchmpi.metrics`."""


class JobObserver:
    """What looks at a rank until ``stop()``: at its calls (:class:`Observer`), or at its counters."""

    def attach(self) -> Self:
        """Begin."""
        _running[self] = True
        return self

    def meet(self) -> None:
        """Do what needs all ranks, while they are in ``stop()``. Collective."""

    def flush(self, seconds: float) -> None:
        """Write what is known, as this process may be ended; wait for it so long."""

    def close(self) -> None:
        """End, without the other ranks. The second time, and in a forked process, this does nothing."""
        if _running.pop(self, False):
            self._end()

    def _end(self) -> None:
        """End, once."""


def meet_all() -> None:
    """Do what the observers need all ranks for. Collective."""
    for observer in list(_running):
        observer.meet()


def flush_all() -> None:
    """Have all observers write what they know, before this process is ended; wait for them for a limited time."""
    limit = time.monotonic() + _LAST_SECONDS
    for observer in list(_running):
        observer.flush(max(0.0, limit - time.monotonic()))


def close_all() -> None:
    """End all observers, the last one first."""
    for observer in reversed(list(_running)):
        observer.close()


def in_forked_child() -> None:
    """Forget the observers in a forked process, which has neither their threads nor the calls of a rank."""
    _running.clear()


class Observer(JobObserver, ABC):
    """Receives a record of each call, message, wait and range of this rank: :meth:`write` is all that a class needs.

    A thread passes the records to :meth:`write` twice a second, and when the observer is closed or the job fails. They
    are in the order of their ends, but for those that are reported late. An error in :meth:`write` is logged, and ends
    the observer; the calls go on. If records come faster than they are written, those for which there is no room are
    counted (`num_lost`) and dropped.

    Args:
        output: What it writes, for messages.
        seconds: The time between two calls of :meth:`write`.

    Example:
        ::

            class LongCalls(mpi.timeline.Observer):
                def write(self, records):
                    for each in records:
                        if isinstance(each, mpi.timeline.CallRecord) and each.end - each.begin > 1e9:
                            print(each.collective, each.num_bytes, each.origin.line)

            with mpi.timeline.add_observer(LongCalls()):
                train_one_epoch()
    """

    def __init__(self, output: str = "", seconds: float | None = None) -> None:
        name = type(self).__name__
        self.output, self.has_failed = output or f"the output of {name}", False
        self._seconds = PERIOD_SECONDS if seconds is None else seconds
        self._queue = EventQueue()
        self.read = self._queue.put
        """Queues a record; called by the thread that has made the call."""
        self._recent: list[Record] = []
        """Records that may have to come after others in the queue."""
        self._wake, self._flushed = threading.Event(), deque[threading.Event]()
        self._is_closing = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=f"torchmpi {name}", daemon=True)

    @abstractmethod
    def write(self, records: list[Record]) -> None:
        """Write records; there may be none. Called in the thread of the observer, which must not make calls.

        Args:
            records: What has ended: objects of CallRecord, MessageRecord, and SliceRecord for all others.
        """

    def end(self) -> None:
        """Close what is open, after the last records, or after an error (`has_failed`). Called in the same thread."""

    @property
    def num_lost(self) -> int:
        """The number of records for which there was no room."""
        return self._queue.num_lost

    def start(self) -> None:
        """Start the thread."""
        if self._thread.ident is not None:
            raise TorchMPIError(f"{rank_prefix()}this {type(self).__name__} has been closed. Make a new one.")
        self._thread.start()
        _running[self] = True

    def attach(self) -> Self:
        """Receive records from now on."""
        if self not in _running:
            self.start()
        events.add_reader(self.read)
        return self

    def flush(self, seconds: float = inf) -> None:
        """Have all records written that have been reported, and wait for it so long."""
        if self in _running:
            done = threading.Event()
            self._flushed.append(done)
            self._wake.set()
            if not self._has_ended:  # else the thread may have looked for requests before this one
                done.wait(min(seconds, threading.TIMEOUT_MAX))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _end(self) -> None:
        events.remove_reader(self.read)
        self._is_closing = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        for part in (self._pass_on_until_closed, self.end):
            try:
                part()
            except BaseException as error:  # also sys.exit(): nothing that an observer does may hurt the job
                self._fail(error)
        self._has_ended = True  # before the last look at the requests
        while self._flushed:
            self._flushed.popleft().set()

    def _pass_on_until_closed(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(self._seconds if len(self._queue) < _MOST_RECORDS else 0)
            self._wake.clear()
            is_last, num_requests = self._is_closing, len(self._flushed)
            self._pass_on(inf if is_last or num_requests else events.now() - _SETTLING)
            for _ in range(num_requests):
                self._flushed.popleft().set()

    def _pass_on(self, until: float) -> None:
        """Pass on the records that are in the queue now, and have ended until this time."""
        num_records, is_done = len(self._queue), False
        while not is_done:
            num = min(num_records, _MOST_RECORDS)
            found = self._recent + [events.as_record(self._queue.popleft()) for _ in range(num)]
            found.sort(key=_end_of)
            index = bisect_right(found, until, key=_end_of)
            self._recent, num_records = found[index:], num_records - num
            self.write(found[:index])
            is_done = num_records == 0

    def _fail(self, error: BaseException) -> None:
        """Report the first error, and receive no more records."""
        if not self.has_failed:
            self.has_failed = True
            events.remove_reader(self.read)
            self._queue.clear()
            text = f"{error}" if isinstance(error, OSError) else "".join(traceback.format_exception(error)).rstrip()
            logger.warning(f"{rank_prefix()}{self.output} is not complete: {text}")
