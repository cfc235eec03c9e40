"""Sends and receives in progress, and the status of those that have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

ANY, UNDEFINED = -1, -3


class CommunicationError(RuntimeError):
    """A failed send or receive; takes the place of ``mpi4py.MPI.Exception``."""


class Datatype(NamedTuple):
    """The type of the elements of a buffer."""

    itemsize: int


class Status:
    """Source, tag and length of a message."""

    def __init__(self) -> None:
        self.source, self.tag, self.num_bytes, self.was_cancelled = ANY, ANY, 0, False

    def Get_source(self) -> int:
        """Return the rank of the sender."""
        return self.source

    def Get_elements(self, datatype: Datatype) -> int:
        return self.num_bytes // datatype.itemsize

    def Is_cancelled(self) -> bool:
        """Return whether the receive ended without a message."""
        return self.was_cancelled


class Waiter(Protocol):
    """The part of the endpoint that a request needs."""

    def wait(self, request: Request) -> None:
        """Return when a request has ended."""

    def wait_for(self, request: Request, seconds: float) -> None:
        """Return when a request has ended, or after the given time."""

    def progress(self) -> None:
        """Read what has arrived."""

    def withdraw(self, request: Receive) -> bool:
        """Remove a receive that has no message; return whether it had none."""


class Request:
    """A send; completed once, in any thread."""

    def __init__(self, endpoint: Waiter) -> None:
        self.endpoint, self.is_done, self.error = endpoint, False, ""
        self.wake: Callable[[], object] | None = None
        """Called when the request has ended, if a thread waits for that."""

    def complete(self, error: str = "") -> None:
        """End the request and wake the thread that waits for it; a second call has no effect."""
        if self.is_done:
            return
        self.error, self.is_done = error, True
        wake = self.wake
        if wake is not None:
            wake()

    def fill(self, status: Status) -> None:
        """Describe the message of an ended request."""

    def Wait(self, status: Status | None = None) -> bool:
        """Return when the request has ended; raise CommunicationError if it failed."""
        try:
            self.endpoint.wait(self)
        except BaseException:  # from a signal handler; the memory of the caller is in use until the request has ended
            self.Cancel()
            self.endpoint.wait(self)
            raise
        return self._end(status)

    def Test(self, status: Status | None = None) -> bool:
        """Return whether the request has ended; raise CommunicationError if it failed."""
        if not self.is_done:
            self.endpoint.progress()
        return self.is_done and self._end(status)

    def wait_for(self, seconds: float) -> None:
        """Return when the request has ended, or after the given time; not in MPI."""
        self.endpoint.wait_for(self, seconds)

    def Cancel(self) -> None:
        """End a receive that has no message."""

    def test(self) -> tuple[bool, None]:
        """Test as mpi4py does for objects."""
        return self.Test(), None

    wait = Wait

    @staticmethod
    def Waitall(requests: Sequence[Request]) -> bool:
        """Return when all requests have ended; then raise CommunicationError if one failed."""
        for request in requests:
            if not request.is_done:
                request.endpoint.wait(request)
        return all(request.Test() for request in requests)

    def _end(self, status: Status | None) -> bool:
        if self.error:
            raise CommunicationError(self.error)
        if status is not None:
            self.fill(status)
        return True


class Receive(Request):
    """A receive, of at most the length of `view`, or of any length into new memory."""

    def __init__(
        self,
        endpoint: Waiter,
        context: int,
        source: int,
        tag: int,
        view: memoryview | None,
        members: Sequence[int],
    ) -> None:
        """Create a receive from a world rank; `members` are the world ranks of the communicator."""
        super().__init__(endpoint)
        self.context, self.source, self.tag, self.view, self.members = context, source, tag, view, members
        self.memory: Any = None
        """The message, without a view."""
        self.num_bytes, self.was_cancelled = 0, False

    def matches(self, source: int, tag: int) -> bool:
        return self.source in (ANY, source) and self.tag in (ANY, tag)

    def room_for(self, num_bytes: int) -> memoryview | None:
        """Return the memory for a message of this length, or None if it must be received elsewhere first."""
        return None if self.view is None or num_bytes > len(self.view) else self.view[:num_bytes]

    def take(self, source: int, tag: int, data: Any, *, is_in_place: bool) -> None:
        """End the receive with a message."""
        self.source, self.tag, self.num_bytes, error = source, tag, len(data), ""
        if self.view is None:
            self.memory = data
        elif len(data) > len(self.view):
            error = f"message truncated: rank {source} sent {len(data)} bytes, for which there are {len(self.view)}"
        elif not is_in_place:
            self.view[: len(data)] = data
        self.complete(error)

    def Cancel(self) -> None:
        if self.endpoint.withdraw(self):
            self.was_cancelled = True
            self.complete()

    def fill(self, status: Status) -> None:
        status.source = ANY if self.was_cancelled else self.members.index(self.source)
        status.tag = self.tag
        status.num_bytes, status.was_cancelled = self.num_bytes, self.was_cancelled
