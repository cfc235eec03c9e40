"""Long messages in pieces: how many a rank sends before others have arrived. Pure arithmetic.

If each rank sends long messages to several others at once, TCP divides the links unevenly: some messages end early, and
links are idle while the others end. So a message is sent in short pieces, the peers take turns, and a rank sends only a
little before the oldest piece has arrived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

_PIECE_BYTES = 32 << 10  # long enough for the speed of a link
_LONG_PIECE_BYTES = 1 << 20
_FEWEST_BYTES, _MOST_BYTES = 256 << 10, 2 << 20  # in progress

T = TypeVar("T")
U = TypeVar("U")


class PieceSizes(NamedTuple):
    """Bytes of a piece, and of the pieces that a rank has sent before the oldest one has arrived: least and most."""

    piece: int
    fewest: int
    most: int


def piece_sizes(size: int, vendor: str) -> PieceSizes:
    """Return the sizes of pieces in a group of this many ranks, with this MPI library.

    Two ranks do not divide a link among peers: much may be in progress, so that the link is busy while their processes
    wait for a core. MPICH announces each piece to the receiver and waits for its answer: fewer are better. Open MPI
    announces only longer ones (see `launch.mpi_library`), which it then sends and receives by turns.

    >>> piece_sizes(3, "MPICH").piece >> 10, piece_sizes(2, "MPICH").piece >> 10
    (32, 1024)
    """
    if size > 2:
        return PieceSizes(_PIECE_BYTES, _FEWEST_BYTES, _MOST_BYTES)
    return PieceSizes(_PIECE_BYTES if vendor == "Open MPI" else _LONG_PIECE_BYTES, _MOST_BYTES, _MOST_BYTES)


class Window:
    """The bytes that a rank has sent, or may send, before the oldest piece has arrived.

    They grow while a piece takes hardly longer than the fastest one, since the links are then not full: the latency is
    long. They shrink when pieces wait for others. Each rank has a window of its own.

    >>> window = Window(piece_sizes(3, "Open MPI"))
    >>> for _ in range(100): window.note(0.1)
    >>> window.num_bytes >> 10
    2048
    >>> for _ in range(100): window.note(0.4)
    >>> window.num_bytes >> 10
    256
    """

    def __init__(self, sizes: PieceSizes) -> None:
        self._sizes, self.num_bytes = sizes, sizes.fewest
        self._least_seconds = math.inf

    def restart(self) -> None:
        """Forget how long the fastest piece took."""
        self._least_seconds = math.inf

    def note(self, seconds: float) -> None:
        """Take the time from the beginning of a piece to its arrival."""
        self._least_seconds = min(self._least_seconds, seconds)
        if seconds < 1.5 * self._least_seconds:
            self.num_bytes = min(self.num_bytes + self._sizes.piece, self._sizes.most)
        elif seconds > 3 * self._least_seconds:
            self.num_bytes = max(self.num_bytes - self._sizes.piece, self._sizes.fewest)


def in_turns(receives: Sequence[Sequence[T]], sends: Sequence[Sequence[U]]) -> Iterator[tuple[T | None, U | None]]:
    """Yield what to receive and what to send next: of each message the first piece, then of each the second.

    >>> list(in_turns([["a0", "a1"], ["b0"]], [["c0"], ["d0", "d1"]]))
    [('a0', 'c0'), ('b0', 'd0'), ('a1', None), (None, 'd1')]
    """
    for index in range(max(map(len, (*receives, *sends)), default=0)):
        for number in range(max(len(receives), len(sends))):
            pair = _item(receives, number, index), _item(sends, number, index)
            if pair != (None, None):
                yield pair


def _item(lists: Sequence[Sequence[T]], number: int, index: int) -> T | None:
    return lists[number][index] if number < len(lists) and index < len(lists[number]) else None


class PieceQueue(Generic[T, U]):
    """The pieces that wait for their turn, and those in progress: what is received of T, and what is sent of U.

    >>> queue = PieceQueue(piece_sizes(3, "MPICH"), lambda sent: f"sent {sent}", len, lambda: 0.0)
    >>> list(queue.up_to(queue.add([["from 1"], ["from 2"]], [["to 2"], ["to 1"]])))
    [['from 1', 'sent to 2'], ['from 2', 'sent to 1']]
    """

    def __init__(
        self, sizes: PieceSizes, send: Callable[[U], T], size_of: Callable[[U], int], clock: Callable[[], float]
    ) -> None:
        self._send, self._size_of, self._clock = send, size_of, clock
        self._window = Window(sizes)
        self._waiting: deque[tuple[T | None, U | None]] = deque()
        self._begun: deque[tuple[list[T], int, float]] = deque()
        """The requests, the bytes that are sent, and the beginning of each piece in progress."""
        self._num_added = self._num_done = self._num_bytes = 0

    def add(self, receives: Sequence[Sequence[T]], sends: Sequence[Sequence[U]]) -> int:
        """Add the pieces of messages, whose receives have begun; return the number of the last piece."""
        if not self._begun:
            self._window.restart()
        for piece in in_turns(receives, sends):
            self._waiting.append(piece)
            self._num_added += 1
        self._begin()
        return self._num_added

    def _begin(self) -> None:
        while self._waiting:
            received, sent = self._waiting[0]
            num_bytes = 0 if sent is None else self._size_of(sent)
            if self._num_bytes and self._num_bytes + num_bytes > self._window.num_bytes:
                break
            self._waiting.popleft()
            requests = [] if received is None else [received]
            if sent is not None:
                requests.append(self._send(sent))
            self._begun.append((requests, num_bytes, self._clock()))
            self._num_bytes += num_bytes

    def up_to(self, last: int) -> Iterator[list[T]]:
        """Yield the requests of each piece up to a number. The caller waits for them before it takes the next."""
        while self._num_done < last:
            requests, num_bytes, since = self._begun.popleft()
            yield requests
            self._window.note(self._clock() - since)
            self._num_done += 1
            self._num_bytes -= num_bytes
            self._begin()
