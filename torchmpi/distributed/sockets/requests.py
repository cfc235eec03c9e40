"""Operations under way: what a caller waits for, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol

ANY = -1
"""As source or tag: whatever comes."""
NOBODY = -2
"""As source or destination: there is no message."""
UNDEFINED = -3


class HasItemsize(Protocol):
    """The part of a datatype that a status needs."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""


class RequestPoller(Protocol):
    """The part of a poller that a request needs."""

    def wait(self, request: Request) -> None:
        """Return when a request has ended."""

    def progress(self, request: Request) -> None:
        """Look once whether a request has ended."""

    def complete(self, request: Request, error: str | None = None) -> None:
        """Note that a request has ended."""

    def when_done(self, request: Request, callback: Callable[[], None]) -> None:
        """Call back when a request has ended."""


class CommunicationError(RuntimeError):
    """What the calls raise when they fail; stands where ``mpi4py.MPI.Exception`` does."""


class Status:
    """Where a message came from, and how long it was."""

    __slots__ = ("_num_bytes", "_was_cancelled", "source", "tag")

    def __init__(self) -> None:
        self.source, self.tag, self._num_bytes, self._was_cancelled = ANY, ANY, 0, False

    def note(self, source: int, tag: int, num_bytes: int, *, was_cancelled: bool = False) -> None:
        """Fill in what is known now."""
        self.source, self.tag, self._num_bytes, self._was_cancelled = source, tag, num_bytes, was_cancelled

    def Get_source(self) -> int:
        """The sender's rank."""
        return self.source

    def Get_tag(self) -> int:
        """The message's tag."""
        return self.tag

    def Get_count(self, datatype: HasItemsize | None = None) -> int:
        """The number of elements, of bytes if not said otherwise; UNDEFINED if they are not whole."""
        count, rest = divmod(self._num_bytes, datatype.itemsize if datatype is not None else 1)
        return UNDEFINED if rest else count

    def Get_elements(self, datatype: HasItemsize | None = None) -> int:
        """The same, as nothing here is made of several types."""
        return self.Get_count(datatype)

    def Is_cancelled(self) -> bool:
        """Whether there was no message in the end."""
        return self._was_cancelled


class Request:
    """Something that will end: a send, or whatever has no data for the caller."""

    __slots__ = ("_was_seen", "callbacks", "error", "is_done", "poller", "waiter")

    def __init__(self, poller: RequestPoller) -> None:
        self.poller = poller
        self.is_done = False
        self.error: str | None = None
        """Why it failed."""
        self.waiter: Lock | None = None
        """Released when it is done; there if a thread sleeps until then."""
        self.callbacks: list[Callable[[], None]] = []
        self._was_seen = False  # by a caller: it is then what mpi4py calls a null request

    def note_in(self, status: Status) -> None:
        """Fill in the status of what has ended."""
        status.note(ANY, ANY, 0)

    def Wait(self, status: Status | None = None) -> bool:
        """Return when it has ended; raise if it failed."""
        if not self.is_done:
            self.poller.wait(self)
        return self._see(status)

    def Test(self, status: Status | None = None) -> bool:
        """Whether it has ended; raise if it failed."""
        if not self.is_done:
            self.poller.progress(self)
        return self.is_done and self._see(status)

    def Cancel(self) -> None:
        """A send has left already, as good as: nothing happens."""

    def wait(self) -> None:
        """:meth:`Wait`, as mpi4py calls it for objects."""
        self.Wait()

    def test(self) -> tuple[bool, None]:
        """:meth:`Test`, as mpi4py calls it for objects."""
        return self.Test(), None

    def _see(self, status: Status | None) -> bool:
        self._was_seen = True
        if self.error is not None:
            raise CommunicationError(self.error)
        if status is not None:
            self.note_in(status)
        return True

    @staticmethod
    def Waitall(requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> bool:
        """Return when all have ended; then raise if one failed."""
        for request in requests:
            if not request.is_done:
                request.poller.wait(request)
        return _see_all(requests, statuses)

    @staticmethod
    def Testall(requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> bool:
        """Whether all have ended; if so raise if one failed."""
        for request in requests:
            if not request.is_done:
                request.poller.progress(request)
                break
        return all(request.is_done for request in requests) and _see_all(requests, statuses)

    @staticmethod
    def Waitany(requests: Sequence[Request], status: Status | None = None) -> int:
        """The place of one that has ended and was not known to; UNDEFINED if there is none left."""
        open_ = [(place, request) for place, request in enumerate(requests) if not request._was_seen]
        if not open_:
            return UNDEFINED
        if not any(request.is_done for _, request in open_):
            poller = open_[0][1].poller
            first = Request(poller)
            for _, request in open_:
                poller.when_done(request, lambda: poller.complete(first))
            poller.wait(first)
        place, request = next((place, request) for place, request in open_ if request.is_done)
        request._see(status)
        return place


def _see_all(requests: Sequence[Request], statuses: Sequence[Status] | None) -> bool:
    for place, request in enumerate(requests):
        request._see(None if statuses is None else statuses[place])
    return True


class Receive(Request):
    """A receive that has been posted."""

    __slots__ = (
        "_withdraw", "context", "from_all", "is_exact", "members", "memory", "num_bytes", "origin", "source", "tag",
        "view", "was_cancelled",
    )  # fmt: skip

    def __init__(
        self,
        poller: RequestPoller,
        context: int,
        source: int,
        tag: int,
        *,
        view: memoryview | None,
        members: Mapping[int, int],
        withdraw: Callable[[Receive], bool],
        from_all: bool = False,
    ) -> None:
        """`members` are the ranks of the communicator by world rank, in which `source` is counted.

        Without a `view` it takes a message of any length. `from_all`: it is part of a call of all members, so that it
        cannot be had if one of them is lost, and the message must be exactly as long as the view.
        """
        super().__init__(poller)
        self.context, self.source, self.tag, self.view = context, source, tag, view
        self.members, self.from_all, self._withdraw = members, from_all, withdraw
        self.memory: Any = None
        """The message itself, where there is no view."""
        self.origin, self.num_bytes, self.was_cancelled = ANY, 0, False

    def fits(self, num_bytes: int) -> bool:
        """Whether a message of that length may be written to the view."""
        if self.view is None:
            return False
        return num_bytes == len(self.view) if self.from_all else num_bytes <= len(self.view)

    def take(self, origin: int, tag: int, num_bytes: int) -> str | None:
        """Note which message it is; what is wrong with its length."""
        self.origin, self.tag, self.num_bytes = origin, tag, num_bytes
        if self.view is None or self.fits(num_bytes):
            return None
        if num_bytes > len(self.view):
            return f"message truncated: rank {origin} sent {num_bytes} bytes, for which there are {len(self.view)}"
        return f"rank {origin} sent {num_bytes} bytes where {len(self.view)} were expected"

    def note_in(self, status: Status) -> None:
        """The sender in the numbers of the communicator, the tag, the length."""
        source = self.members.get(self.origin, self.origin)
        status.note(source, self.tag, self.num_bytes, was_cancelled=self.was_cancelled)

    def Cancel(self) -> None:
        """End it without a message, if none has come yet."""
        if self._withdraw(self):
            self.was_cancelled = True
            self.poller.complete(self)
