"""Long messages in pieces: how many a rank sends before others have arrived. Pure arithmetic.

If each rank sends long messages to several others at once, TCP divides the links unevenly: some messages end early, and
links are idle while the others end. So a message is sent in short pieces, the peers take turns, and a rank sends only a
little before the oldest piece has arrived.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

PIECE_BYTES = 32 << 10
"""Short enough for MPI libraries to send without a handshake, long enough for the speed of a link."""
_FEWEST_BYTES, _MOST_BYTES = 8 * PIECE_BYTES, 64 * PIECE_BYTES

T = TypeVar("T")
U = TypeVar("U")


class Window:
    """The bytes that a rank has sent, or may send, before the oldest piece has arrived.

    They grow while a piece takes hardly longer than the fastest one, since the links are then not full: the latency is
    long. They shrink when pieces wait for others. Each rank has a window of its own.

    >>> window = Window()
    >>> for _ in range(100): window.note(0.1)
    >>> window.num_bytes >> 10
    2048
    >>> for _ in range(100): window.note(0.4)
    >>> window.num_bytes >> 10
    256
    """

    def __init__(self) -> None:
        self.num_bytes = _FEWEST_BYTES
        self._least_seconds = math.inf

    def restart(self) -> None:
        """Forget how long the fastest piece took."""
        self._least_seconds = math.inf

    def note(self, seconds: float) -> None:
        """Take the time from the beginning of a piece to its arrival."""
        self._least_seconds = min(self._least_seconds, seconds)
        if seconds < 1.5 * self._least_seconds:
            self.num_bytes = min(self.num_bytes + PIECE_BYTES, _MOST_BYTES)
        elif seconds > 3 * self._least_seconds:
            self.num_bytes = max(self.num_bytes - PIECE_BYTES, _FEWEST_BYTES)


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
