"""The last copies of a state in memory, one of which all remaining ranks have after a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class NumberedCopies(Generic[T]):
    """The last two copies: when a rank is lost, the others may differ by one.

    >>> copies = NumberedCopies[str]()
    >>> copies.add("first"), copies.add("second"), copies.add("third")
    (None, None, None)
    >>> copies.agree(lambda number: [number, 1], lambda value, root: value, rank=0)
    'second'
    """

    def __init__(self) -> None:
        self._copies: dict[int, T] = {}
        self._next = 0

    def __bool__(self) -> bool:
        return bool(self._copies)

    def add(self, copy: T) -> None:
        """Add a copy. All ranks do so at the same points."""
        self._copies = {number: self._copies[number] for number in sorted(self._copies)[-1:]}
        self._copies[self._next] = copy
        self._next += 1

    def change(self, function: Callable[[T], T]) -> None:
        """Replace each copy by the result of a function."""
        self._copies = {number: function(copy) for number, copy in self._copies.items()}

    def agree(self, gather: Callable[[Any], list[Any]], broadcast: Callable[[Any, int], Any], rank: int) -> T | None:
        """Return the last copy that all ranks have, and forget the others; None if no rank has a copy. Collective.

        A rank without copies gets that of the first rank which has some.

        Args:
            gather: Returns the objects of all ranks, in rank order.
            broadcast: Returns the object of one rank, whose number follows.
            rank: The number of this rank.
        """
        numbers = gather(max(self._copies, default=None))
        root, number = min(
            ((rank, each) for rank, each in enumerate(numbers) if each is not None),
            key=lambda pair: (pair[1], pair[0]),
            default=(0, None),
        )
        if number is None:
            return None
        if None in numbers:
            received = broadcast(self._copies[number] if rank == root else None, root)
            if not self._copies:
                self._copies[number] = received
        copy = self._copies[number]
        self._copies, self._next = {number: copy}, number + 1
        return copy
