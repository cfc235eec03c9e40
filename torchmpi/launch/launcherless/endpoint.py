"""The connections of a rank: sends, receives, matching of messages, and the loss of ranks.

A thread reads all messages and writes the parts that callers could not write immediately, so that messages make
progress while the program computes. The thread sleeps in the kernel while there is no work.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ...log import log_fatal
from ...timeline import observer
from .. import launcher
from ..survivors import Survivors
from .link import Arrival, Link, means_later
from .requests import ANY, CommunicationError, Receive, Request

_HEAD = struct.Struct("<QQiI")
"""Context, length and tag of a message, and the kind of frame. An abort has the rank that aborts, the length of the
reason that follows, and the status."""
_MESSAGE, _GOODBYE, _GOODBYE_READ, _ABORT = range(4)
_EPOCH_BITS = 44
"""The bits of a context below the number of lost and new ranks."""
_LOST_RANKS = (1 << 64) - 1
"""The context of messages about lost ranks."""
_STAGING_BYTES = 64 << 10
_TURN_SECONDS = 2e-3  # for this time after a caller has read, the thread does not read
_GOODBYE_SECONDS, _ABORT_SECONDS, _NOTICE_SECONDS = 10.0, 1.0, 2.0
_MOST_REASON_BYTES = 4 << 10
_TORCHRUN_SECONDS = 0.5  # torchrun looks at its processes ten times a second
_exit_process = os._exit  # start() replaces os._exit by a function that reports
_FORKED = "this process was forked from a rank and is not a rank itself"


class Endpoint:
    """The connections of this rank to all others, by world rank."""

    def __init__(
        self,
        rank: int,
        hosts: list[str],
        sockets: Mapping[int, socket.socket],
        eager_seconds: float,
        survivors: Survivors | None = None,
    ) -> None:
        """Start to read; a caller that waits polls for `eager_seconds` before it sleeps."""
        self.rank, self.hosts = rank, dict(enumerate(hosts))
        self.on_loss: Callable[[int, str], None] | None = None
        """Called with a rank whose connection has ended without a goodbye, and the reason."""
        self.problem = ""
        """Why sends and receives fail; '' while they are possible."""
        self.num_communicators = 0
        self._is_ending = self._is_closed = False
        self.is_ended = False
        """Whether another rank has ended the job."""
        self._lock = threading.Lock()  # of the following four
        self._posted: defaultdict[int, list[Receive]] = defaultdict(list)
        self._arrived: defaultdict[int, list[Arrival]] = defaultdict(list)
        self._gone: dict[int, str] = {}
        self._left: dict[int, str] = {}
        self.survivors = survivors
        """Set if the job continues after the loss of ranks; see :meth:`continue_without`."""
        self.revoked = ""
        """Why all calls fail until the remaining ranks have agreed; '' otherwise."""
        self._planned = ""
        """Why the reading thread is to revoke all calls; see :meth:`end_calls`."""
        self._epoll = select.epoll()
        self._watched: dict[int, int] = {}
        self._links = {}
        for peer, sock in sockets.items():
            self._links[peer] = Link(peer, f"rank {peer} on host {hosts[peer]}", sock, self._watch)
            self._watch(self._links[peer], False)
        self._links_open = {link.sock.fileno(): link for link in self._links.values()}
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        self.eager_seconds = eager_seconds
        self._turn: dict[None, int] = {}
        """The thread that reads."""
        self._num_turns, self._gives_way, self._thread_waits = 0, False, False
        self._sleepers: set[Request] = set()
        self._idle = threading.Lock()
        """Held until the thread is woken. Not an Event: an exception of a signal handler may leave its lock held."""
        self._idle.acquire()
        self._start_reader()
        _open.add(self)

    def _start_reader(self) -> None:
        self._reader = threading.Thread(target=self._run, name="torchmpi messages", daemon=True)
        self._reader.start()

    def add(self, peer: int, host: str, sock: socket.socket) -> None:
        """Begin to read from a new rank."""
        link = Link(peer, f"a new rank on host {host}", sock, self._watch)
        self.hosts[peer] = host
        has_ended = not self._links_open
        if has_ended:  # the thread that reads: it had no connection left
            self._wake_thread()
            self._reader.join()
        self._links = {**self._links, peer: link}  # others iterate over it
        self._links_open[sock.fileno()] = link
        self._watch(link, False)
        if has_ended:
            self._start_reader()

    def _watch(self, link: Link, room: bool) -> None:
        descriptor, events = link.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if room else 0)
        if self._watched.get(descriptor) == events:
            return
        (self._epoll.modify if descriptor in self._watched else self._epoll.register)(descriptor, events)
        self._watched[descriptor] = events

    # --- calls

    def send(self, peer: int, context: int, tag: int, view: memoryview) -> Request:
        """Begin to send to a rank; the memory is read until the request has ended."""
        self._check_open()
        request = Request(self)
        if peer != self.rank:
            self._links[peer].send(_HEAD.pack(context, len(view), tag, _MESSAGE), view, request)
            return request
        arrival = self._begin(peer, context, tag, len(view))
        arrival.data[:] = view
        self._finish(arrival)
        request.complete()
        return request

    def receive(self, context: int, source: int, tag: int, view: memoryview | None, members: Sequence[int]) -> Receive:
        """Begin to receive; the memory is written until the request has ended."""
        self._check_open()
        receive = Receive(self, context, source, tag, view, members)
        with self._lock:
            arrival = self._find(context, source, tag)
            if arrival is None:
                problem = self.revoked or self._why_never(receive)
                if problem:
                    receive.complete(problem)
                else:
                    self._posted[context].append(receive)
                return receive
            self._arrived[context].remove(arrival)
            arrival.receive = receive
            is_whole = arrival.is_whole
        if is_whole:
            arrival.deliver(receive)
        return receive

    def probe(self, context: int, source: int, tag: int) -> Arrival | None:
        """Return the message that a receive would get now."""
        self._check_open()
        self.progress()
        with self._lock:
            return self._find(context, source, tag)

    def awaited(self, contexts: range) -> list[str]:
        """Return the names of the ranks from which a receive has no message, or a part of one."""
        with self._lock:
            receives = [receive for context in contexts for receive in self._posted.get(context, ())]
            ranks = {receive.source for receive in receives} - {ANY, self.rank}
            begun = [(link.peer, link.arrival) for link in self._links.values()]
            ranks |= {peer for peer, arrival in begun if arrival is not None and arrival.context in contexts}
        return [self._links[rank].name for rank in sorted(ranks)]

    def forget(self, contexts: range) -> None:
        """Drop the messages of communicators that are freed."""
        with self._lock:
            for context in contexts:
                self._posted.pop(context, None)
                self._arrived.pop(context, None)

    def _check_open(self) -> None:
        if self.problem or self.revoked:
            raise CommunicationError(self.problem or self.revoked)

    # --- matching

    def _find(self, context: int, source: int, tag: int) -> Arrival | None:
        for arrival in self._arrived[context]:
            if source in (ANY, arrival.source) and tag in (ANY, arrival.tag):
                return arrival
        return None

    def _why_never(self, receive: Receive) -> str:
        if receive.source == ANY:
            return next((problem for rank, problem in self._gone.items() if rank in receive.members), "")
        return self._gone.get(receive.source) or self._left.get(receive.source, "")

    def withdraw(self, receive: Receive) -> bool:
        """Remove a receive that has no message; return whether it had none."""
        with self._lock:
            posted = self._posted[receive.context]
            if receive not in posted:
                return False
            posted.remove(receive)
            return True

    def _begin(self, source: int, context: int, tag: int, num_bytes: int) -> Arrival:
        with self._lock:
            posted = self._posted[context]
            receive = next((receive for receive in posted if receive.matches(source, tag)), None)
            arrival = Arrival(source, context, tag, num_bytes, receive)
            if receive is None:
                self._arrived[context].append(arrival)
            else:
                posted.remove(receive)
            return arrival

    def _finish(self, arrival: Arrival) -> None:
        with self._lock:
            arrival.is_whole = True
            receive = arrival.receive
            if arrival.context == _LOST_RANKS:
                self._arrived[_LOST_RANKS].remove(arrival)
        if arrival.context == _LOST_RANKS:
            self._hear(arrival.source, arrival.data)
        elif receive is not None:
            arrival.deliver(receive)

    # --- reading

    def wait(self, request: Request) -> None:
        """Return when a request has ended.

        The caller itself reads if no other thread does: waking a thread takes longer than a short message.
        """
        while not request.is_done:
            try:
                if self.problem:
                    request.complete(self.problem)
                elif self._take_turn():
                    self._read_until_done(request)
                    self._end_turn()
                else:
                    self._sleep(request)
            except BaseException:  # from a signal handler, at any point
                self._end_turn()
                raise

    def progress(self) -> None:
        """Read what has arrived."""
        try:
            if self._take_turn():
                self._num_turns += 1
                self._read(0)
                self._end_turn()
            else:
                self._gives_way = True  # the caller polls, and can read itself
        except BaseException:
            self._end_turn()
            raise

    def wait_for(self, request: Request, seconds: float) -> None:
        """Return when a request has ended, or after the given time."""
        end = time.perf_counter() + seconds
        try:
            if not self._take_turn():
                time.sleep(seconds)
                return
            self._num_turns += 1
            while not (request.is_done or self.problem) and (left := end - time.perf_counter()) > 0:
                self._read(left)
            self._end_turn()
        except BaseException:
            self._end_turn()
            raise

    def _take_turn(self) -> bool:
        """Make this thread the reading thread if there is none; return whether it is the reading thread."""
        own = threading.get_ident()
        return self._turn.setdefault(None, own) == own  # atomic, so that an exception leaves no turn without an owner

    def _end_turn(self) -> None:
        if self._turn.get(None) == threading.get_ident():
            del self._turn[None]
        if self._sleepers or self._thread_waits:
            self._wake_thread()

    def _wake_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # released already
            self._idle.release()

    def _read_until_done(self, request: Request) -> None:
        request.wake = self._ring
        self._num_turns += 1
        limit = time.perf_counter() + self.eager_seconds
        while not (request.is_done or self.problem):
            if self._read(0 if time.perf_counter() < limit else None):
                limit = time.perf_counter() + self.eager_seconds
        request.wake = None

    def _sleep(self, request: Request) -> None:
        """Return when a request has ended, unless no thread reads."""
        asleep = threading.Lock()
        asleep.acquire()

        def wake() -> None:
            self._sleepers.discard(request)
            self._gives_way = not self._sleepers  # the caller will probably wait again soon, and can read itself
            if asleep.locked():
                asleep.release()

        request.wake = wake
        self._sleepers.add(request)
        if self._turn and not (request.is_done or self.problem):
            asleep.acquire()
        self._sleepers.discard(request)

    def _run(self) -> None:
        """Read while no caller does."""
        num_turns = -1
        while self._links_open:
            is_idle = num_turns == self._num_turns
            num_turns = self._num_turns
            if (is_idle or self._sleepers) and self._take_turn():
                self._gives_way = False
                try:
                    while self._links_open and (self._sleepers or not self._gives_way):
                        self._read(None)
                finally:
                    del self._turn[None]
            self._thread_waits = is_idle  # for a caller that reads for long, to end its turn
            if not self._sleepers:
                self._idle.acquire(timeout=-1 if is_idle and self._turn else _TURN_SECONDS)

    def _ring(self) -> None:
        if self._bell >= 0:  # otherwise a request ends after the connections were closed
            os.eventfd_write(self._bell, 1)

    def _read(self, timeout: float | None) -> int:
        """Read from all readable connections and write to all writable ones; return their number."""
        found = self._epoll.poll(timeout)
        try:
            for descriptor, events in found:
                link = self._links_open.get(descriptor)
                if link is None:
                    os.eventfd_read(self._bell)
                    if self._planned:
                        self._revoke(self._planned)
                        self._planned = ""
                    continue
                if events & select.EPOLLOUT:
                    link.write_more()
                if events & ~select.EPOLLOUT and (end := self.problem or self._read_from(link)):
                    del self._links_open[descriptor]
                    self._epoll.unregister(descriptor)
                    self._lose(link, end)
        except BaseException as error:  # from a signal handler, or a defect: it is unknown what has been read
            self._fail(f"rank {self.rank} was interrupted while it read messages: {error!r}")
            raise
        return len(found)

    def _read_from(self, link: Link) -> str:
        """Read once; return why the connection has ended, or ''."""
        staging = self._staging
        arrival, kept = link.arrival, len(link.rest)
        try:
            num_bytes = link.sock.recv_into(arrival.rest() if arrival else staging[kept:])
        except OSError as error:
            return "" if means_later(error) else str(error.strerror)
        if not num_bytes:
            return "Connection closed by peer"  # as gloo says, and in the form of the errors of the system
        if arrival is not None:
            arrival.filled += num_bytes
            if arrival.filled == len(arrival.data):
                link.arrival = None
                self._finish(arrival)
            return ""
        staging[:kept] = link.rest
        try:
            self._parse(link, staging[: kept + num_bytes])
        except (ValueError, MemoryError) as error:  # not a frame of a rank, or a message longer than the memory
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)
            return f"its message cannot be read ({error})"
        return ""

    def _parse(self, link: Link, data: memoryview) -> None:
        """Read the frames in `data`; keep the beginning of one that is not complete."""
        while len(data) >= _HEAD.size:
            frame = data
            context, length, tag, kind = _HEAD.unpack_from(data)
            data = data[_HEAD.size :]
            if kind == _GOODBYE:
                link.said_goodbye = True
                link.send(_HEAD.pack(0, 0, 0, _GOODBYE_READ))
            elif kind == _GOODBYE_READ:
                link.goodbye_is_read = True
            elif kind == _ABORT:
                if length > _MOST_REASON_BYTES:
                    raise ValueError(f"a reason of {length} bytes")
                if length > len(data):
                    data = frame
                    break
                self._end_with(context, tag, bytes(data[:length]))
                data = data[length:]
            elif kind != _MESSAGE:
                raise ValueError(f"unknown kind {kind}")
            else:
                arrival = self._begin(link.peer, context, tag, length)
                part = data[:length]
                arrival.data[: len(part)], arrival.filled = part, len(part)
                data = data[length:]
                if arrival.filled == length:
                    self._finish(arrival)
                else:
                    link.arrival = arrival
        link.rest = bytes(data)

    def _lose(self, link: Link, reason: str) -> None:
        """Fail the requests that need a rank whose connection has ended."""
        left, arrival = link.said_goodbye, link.arrival
        problem = link.problem or f"{link.name} is gone: {reason}"  # a failed send knows more than the end of a stream
        if left:
            problem = f"{link.name} has left: it has closed its connections"
        survivors, is_open = self.survivors, not (self._is_ending or self.problem)
        is_loss = survivors is not None and is_open and survivors.note(link.peer, problem) and not left
        if is_loss:  # known before the first request fails, whose caller asks for the reason
            self.revoked = self.revoked or problem
        link.refuse(problem)
        with self._lock:
            (self._left if left else self._gone)[link.peer] = problem
            hopeless = [receive for posted in self._posted.values() for receive in posted if self._why_never(receive)]
            for receive in hopeless:
                self._posted[receive.context].remove(receive)
            if arrival is not None and arrival.receive is not None:
                hopeless.append(arrival.receive)
            elif arrival is not None and arrival in self._arrived[arrival.context]:
                self._arrived[arrival.context].remove(arrival)
        for receive in hopeless:
            receive.complete(problem)
        if is_loss:
            self._revoke(problem)
        tell = self.on_loss  # another thread may reset it
        if survivors is None and tell is not None and not (left or self._is_ending):
            tell(link.peer, problem)

    # --- continuing without lost ranks

    def _revoke(self, problem: str) -> None:
        """Fail all calls, and tell all ranks, also a lost one that can still be reached. Called by the reading thread.

        The frames of calls before this one precede the message about the lost ranks on each connection.
        """
        self.revoked = self.revoked or problem
        with self._lock:
            pending = [receive for posted in self._posted.values() for receive in posted]
            self._posted.clear()
            for link in self._links.values():
                if (arrival := link.arrival) is not None and arrival.receive is not None:
                    pending.append(arrival.receive)
                    arrival.detach()
        for receive in pending:
            receive.complete(self.revoked)
        for link in self._links.values():
            link.revoke(self.revoked)
        self._tell_lost()
        assert self.survivors is not None
        self.survivors.on_loss(self.revoked)

    def loss_behind_error(self) -> str:
        """Return `revoked`, after a call has failed: a send fails before the end of its connection has been read."""
        limit = time.monotonic() + _NOTICE_SECONDS
        while not self.revoked and time.monotonic() < limit:
            if not any(link.problem and link.peer not in {**self._gone, **self._left} for link in self._links.values()):
                break
            self.progress()
            time.sleep(1e-4)
        return self.revoked

    def end_calls(self, reason: str) -> None:
        """Fail all calls, so that the ranks meet in :meth:`agree`, as all other ranks do now."""
        self._planned = reason
        self._ring()
        while self._planned:
            self.progress()
            time.sleep(1e-4)

    def _tell_lost(self) -> None:
        assert self.survivors is not None
        view = self.survivors.own_view()
        for link in self._links.values():
            link.send(_HEAD.pack(_LOST_RANKS, len(view), 0, _MESSAGE), memoryview(view))

    def _hear(self, peer: int, view: memoryview) -> None:
        """Take over what another rank has lost."""
        if self.survivors is None:
            return
        is_new = self.survivors.hear(peer, bytes(view))
        if self.survivors.exclusion:
            self._fail(self.survivors.exclusion)
            self.survivors.on_loss(self.problem)
        elif is_new:
            self._revoke(self.survivors.last_reason)

    def agree(self, timeout_seconds: float, before_telling: Callable[[], object]) -> tuple[int, ...]:
        """Return the ranks that remain, when all of them have called this with the same view. Calls work again then.

        `before_telling` is called when the view has changed: it connects to newcomers by :meth:`add`.
        """
        survivors = self.survivors
        assert survivors is not None

        def tell() -> None:
            before_telling()
            self._tell_lost()

        members = survivors.agree(tell, timeout_seconds)
        with self._lock:
            for context in [context for context in self._arrived if context < self.first_context]:
                del self._arrived[context]
        self.revoked = ""
        if not survivors.is_agreed:  # a rank was lost meanwhile, perhaps before the line above
            self.revoked = survivors.last_reason
        for index, rank in enumerate(members):
            if rank != self.rank:
                self._links[rank].name = f"rank {index} on host {self.hosts[rank]}"
        return members

    @property
    def first_context(self) -> int:
        """The lowest context of the communicators that the present ranks create."""
        return 0 if self.survivors is None else self.survivors.epoch << _EPOCH_BITS

    # --- the end of the job

    def abort(self, status: int) -> None:
        """End all ranks. Does not return."""
        self._is_ending = True
        reason = launcher.written_reason().encode()[:_MOST_REASON_BYTES]
        self._tell_all(_HEAD.pack(self.rank, len(reason), status & 0xFF, _ABORT) + reason)
        _exit_process(status & 0xFF)

    def _end_with(self, rank: int, status: int, reason: bytes) -> None:
        if self._is_ending:
            return
        self._is_ending = self.is_ended = True
        # To all ranks, which could otherwise notice the end of this rank before they read the reason.
        self._tell_all(_HEAD.pack(rank, len(reason), status, _ABORT) + reason)
        text = f"rank {self.rank} ends, since rank {rank} has ended the job ({status=})"
        log_fatal(text)
        observer.flush_all()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if launcher.ERROR_FILE_VARIABLE in os.environ:  # torchrun takes the rank that it sees end first for the cause
            time.sleep(_TORCHRUN_SECONDS)
            told = reason.decode(errors="replace")
            launcher.write_error_file(f"{text}. The reason on rank {rank}:\n{told}" if told else text)
        _exit_process(status)

    def _tell_all(self, head: bytes) -> None:
        limit = time.monotonic() + _ABORT_SECONDS
        pending = [link for link in self._links.values() if not link.send_first(head)]
        while pending and time.monotonic() < limit:
            time.sleep(1e-3)
            pending = [link for link in pending if not link.send_first(b"")]

    # --- the end of this rank

    def close(self) -> None:
        """Send a goodbye to the other ranks after all messages, and close. A second call has no effect."""
        if self._is_closed:
            return
        self._is_closed = self._is_ending = True
        for link in self._links.values():
            link.send(_HEAD.pack(0, 0, 0, _GOODBYE))
        limit = time.monotonic() + _GOODBYE_SECONDS
        # Closing a TCP connection with unread data would discard messages in flight.
        while time.monotonic() < limit and not all(link.goodbye_is_read for link in list(self._links_open.values())):
            time.sleep(1e-4)
        self._fail(f"rank {self.rank} has closed its connections")
        self._wake_thread()
        self._reader.join(_GOODBYE_SECONDS)
        while not self._take_turn():  # a caller that reads is about to return
            time.sleep(1e-4)
        self._close_descriptors()
        _open.discard(self)

    def _fail(self, problem: str) -> None:
        """End all requests, refuse new ones, and shut the connections."""
        self.problem = self.problem or problem
        with self._lock:
            ended = [*self._sleepers, *(receive for posted in self._posted.values() for receive in posted)]
            self._posted.clear()
        for request in ended:
            request.complete(self.problem)
        for link in self._links.values():
            link.refuse(self.problem)
            with contextlib.suppress(OSError):  # it has been closed by the other rank
                link.sock.shutdown(socket.SHUT_RDWR)
        self._ring()

    def _close_descriptors(self) -> None:
        for link in self._links.values():
            link.sock.close()
        self._epoll.close()
        bell, self._bell = self._bell, -1
        os.close(bell)

    def abandon(self) -> None:
        """Close the descriptors that a forked child has inherited."""
        self.problem, self._is_closed = _FORKED, True
        self._close_descriptors()


_open: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _in_forked_child() -> None:
    for endpoint in list(_open):
        endpoint.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_in_forked_child)  # cannot be undone, so registered once
