"""Who reads from the sockets, and how a caller waits.

One thread at a time looks what has arrived: it *leads*. A caller that waits leads itself if nobody does, since to be
woken by another thread costs more than the message. Otherwise it sleeps until its request has ended, or until it is
called to lead. A thread of our own leads while no caller does, so that messages are taken off and written whatever the
program is doing; it sleeps in the system until there is something.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from .requests import Request

_NAP_SECONDS = 2e-3
"""So long after a caller has led, the thread does not: the next caller then need not wait for it."""

Handle = Callable[[bool, bool], None]
"""Called with whether there is something to read, and room to write."""


class _Baton:
    """The right to poll, and the thread that has it.

    It is assigned together with its holder, so that an exception in a signal handler cannot leave it without one, as
    it could with a lock.
    """

    def __init__(self) -> None:
        self._holder: dict[None, int] = {}

    def take(self) -> bool:
        """Whether it is this thread's now."""
        own = threading.get_ident()
        return self._holder.setdefault(None, own) == own  # one step, for all other threads

    def give_back(self) -> None:
        """If it is this thread's."""
        if self.holder == threading.get_ident():
            del self._holder[None]

    @property
    def holder(self) -> int | None:
        """The thread that leads."""
        return self._holder.get(None)


class Poller:
    """Waits for sockets and for requests."""

    def __init__(self, *, eager_seconds: float) -> None:
        """A caller that leads looks again and again for that long before it sleeps: to wake up takes longer."""
        self._eager_seconds = eager_seconds
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._handles: dict[int, Handle] = {}
        self._lock = threading.Lock()  # of the state of requests
        self._baton = _Baton()
        self._followers: deque[Request] = deque()
        self._led_for: Request | None = None
        self._num_leads = 0
        self._has_rung = False
        self._gives_way = False
        self._is_wanted = threading.Event()
        self._asks_to_be_called = False
        self._is_closing = False
        self._on_failure: Callable[[str], None] = lambda reason: None
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="torchmpi sockets", daemon=True)

    def start(self, on_failure: Callable[[str], None]) -> None:
        """Start the thread. `on_failure` is called when no call can be trusted any more, and must call :meth:`fail`."""
        self._on_failure = on_failure
        self._thread.start()

    # --- what is watched

    def add(self, descriptor: int, handle: Handle) -> None:
        """Watch for something to read."""
        self._handles[descriptor] = handle
        self._epoll.register(descriptor, select.EPOLLIN)

    def watch_room(self, descriptor: int, wanted: bool) -> None:
        """Watch for room to write, too."""
        self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def remove(self, descriptor: int) -> None:
        """Watch no longer."""
        del self._handles[descriptor]
        self._epoll.unregister(descriptor)

    # --- requests

    def complete(self, request: Request, error: str | None = None) -> None:
        """A request has ended: wake who waits for it. A second time nothing happens."""
        with self._lock:
            if request.is_done:
                return
            request.error, request.is_done = error, True
            callbacks, request.callbacks = request.callbacks, []
            has_follower = _release_waiter(request)
        if has_follower:
            self._gives_way = True
        elif self._led_for is request and self._baton.holder != threading.get_ident():
            self._ring()
        for callback in callbacks:
            callback()

    def when_done(self, request: Request, callback: Callable[[], None]) -> None:
        """Have something called by the thread that ends the request; now if it has ended."""
        with self._lock:
            if not request.is_done:
                request.callbacks.append(callback)
                return
        callback()

    def wait(self, request: Request) -> None:
        """Return when the request has ended.

        An exception out of a signal handler must wait, too: memory of the caller's may be written until then. A second
        one gets through, at the price of all connections.
        """
        interrupt: BaseException | None = None
        while not request.is_done:
            try:
                if self._failure is not None:
                    self.complete(request, self._failure)
                elif self._baton.take():
                    self._lead(request)
                else:
                    self._follow(request)
            except BaseException as error:
                self._pass_on()
                if interrupt is not None:
                    self._on_failure("this rank was interrupted twice while it waited")
                    raise  # the first is its context
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def progress(self, request: Request | None = None) -> None:
        """Look once what has arrived, without waiting; perhaps that ends the request."""
        if self._failure is not None and request is not None:
            self.complete(request, self._failure)
            return
        try:
            if self._baton.take():
                self._num_leads += 1
                self._handle(self._epoll.poll(0))
                self._pass_on()
            elif self._baton.holder == self._thread.ident and not self._has_rung:
                self._ring()  # it would leave one that looks again and again no time for what has arrived
        except BaseException:
            self._pass_on()
            raise

    def fail(self, reason: str) -> None:
        """No request will end by itself any more: each that is waited for ends for this reason."""
        self._failure = reason
        with self._lock:
            for request in self._followers:
                _release_waiter(request)
            self._followers.clear()
        self._ring()

    # --- leading

    def _lead(self, request: Request) -> None:
        """Read until the request has ended. Called with the baton."""
        self._num_leads += 1
        self._led_for = request
        limit = time.perf_counter() + self._eager_seconds
        while not (request.is_done or self._failure):
            events = self._epoll.poll(0 if time.perf_counter() < limit else None)
            if events:
                self._handle(events)
                limit = time.perf_counter() + self._eager_seconds
        self._pass_on()

    def _follow(self, request: Request) -> None:
        """Sleep until the request has ended, or it is one's turn to lead."""
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if request.is_done:
                return
            request.waiter = waiter
            self._followers.append(request)
        if self._baton.holder is None:  # who led may have missed this follower
            self._call_follower()
        waiter.acquire()

    def _pass_on(self) -> None:
        """Give the baton back, and see to it that somebody takes it who needs to. Once too often does no harm."""
        if self._baton.holder == threading.get_ident():
            self._led_for = None
        self._baton.give_back()
        if self._followers:
            self._call_follower()
        if self._asks_to_be_called:
            self._asks_to_be_called = False
            self._is_wanted.set()

    def _call_follower(self) -> None:
        with self._lock:
            while self._followers and not _release_waiter(self._followers.popleft()):
                pass

    def _handle(self, events: list[tuple[int, int]]) -> None:
        for descriptor, mask in events:
            handle = self._handles.get(descriptor)
            if handle is not None:
                handle(bool(mask & ~select.EPOLLOUT), bool(mask & select.EPOLLOUT))
            elif descriptor == self._bell:
                os.eventfd_read(self._bell)
                self._has_rung = False  # in this order: who rings in between is heard by the next look

    def _ring(self) -> None:
        """Have whoever sleeps in the system look up."""
        self._has_rung = True
        os.eventfd_write(self._bell, 1)

    # --- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # a defect: better all calls fail than wait for ever
            self._pass_on()
            self._on_failure(f"the thread that reads from the sockets has failed: {error!r}")
            raise

    def _serve(self) -> None:
        num_leads = -1
        while not self._is_closing:
            if num_leads == self._num_leads and self._baton.take():
                self._gives_way = False
                while not (self._gives_way or self._is_closing):
                    events = self._epoll.poll()
                    self._gives_way |= self._has_rung
                    self._handle(events)
                self._pass_on()
            elif self._baton.holder is not None:  # a caller waits, perhaps for long
                self._is_wanted.clear()
                self._asks_to_be_called = True
                if self._baton.holder is not None:
                    self._is_wanted.wait()
            num_leads = self._num_leads
            if not self._is_closing:
                time.sleep(_NAP_SECONDS)

    # --- the end

    def close(self, close_sockets: Callable[[], None]) -> None:
        """End the thread and close everything, when nobody reads; no request may be under way any more."""
        self._is_closing = True
        self._is_wanted.set()
        self._ring()
        self._thread.join()
        while not self._baton.take():  # a caller is on its way out
            time.sleep(1e-4)
        close_sockets()
        self._epoll.close()
        os.close(self._bell)

    def abandon(self) -> None:
        """Close the descriptors of a forked child; the threads are the parent's."""
        self._epoll.close()
        os.close(self._bell)


def _release_waiter(request: Request) -> bool:
    """Wake who sleeps for a request; whether there is somebody."""
    waiter = request.waiter
    if waiter is None:
        return False
    if waiter.locked():
        waiter.release()
    request.waiter = None  # last: whoever is interrupted before leaves it to be opened again
    return True
