"""Rows of a server: which elements they are, in which chunks and messages. Pure arithmetic."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ArgumentError, DtypeError


class Rows:
    """Some rows of a tensor, in increasing order, and their elements as they are sent: one row after the other.

    A *position* counts elements of these rows only, an *element* those of the whole tensor.

    Attributes:
        numbers: The numbers of the rows.
        row_numel: Elements of a row.
        steps: For each shard in memory, the number of the step of a rule with states that is applied to the rows.

    >>> rows = Rows(np.array([1, 2, 7]), 10)
    >>> rows.numel, rows.position(15), rows.position(40), rows.element(20)
    (30, 5, 20, 70)
    """

    def __init__(self, numbers: NDArray[np.int64], row_numel: int) -> None:
        self.numbers, self.row_numel = np.ascontiguousarray(numbers, np.int64), row_numel
        self.steps: NDArray[np.int64] | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the rows."""
        return len(self.numbers) * self.row_numel

    @property
    def cells(self) -> tuple[int, int, int]:
        """What a kernel gets: address of the numbers, elements of a row, address of the steps."""
        return self.numbers.ctypes.data, self.row_numel, 0 if self.steps is None else self.steps.ctypes.data

    def position(self, element: int) -> int:
        """Return the position of an element, or that of the next one that the rows have."""
        row, column = divmod(element, self.row_numel)
        index = int(np.searchsorted(self.numbers, row))
        has_row = index < len(self.numbers) and int(self.numbers[index]) == row
        return index * self.row_numel + (column if has_row else 0)

    def element(self, position: int) -> int:
        index, column = divmod(position, self.row_numel)
        return int(self.numbers[index]) * self.row_numel + column

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Return the positions of the elements from `begin` to `end`.

        >>> Rows(np.array([1, 2, 7]), 10).span(15, 72)
        (5, 22)
        """
        return self.position(begin), self.position(end)

    def within(self, begin: int, end: int) -> Rows:
        """Return the rows that have some of the elements from `begin` to `end`."""
        first, last = self.span(begin, end)
        if first == last:  # in the middle of a row, or not
            return Rows(self.numbers[:0], self.row_numel)
        return Rows(self.numbers[first // self.row_numel : -(-last // self.row_numel)], self.row_numel)

    def chunks(self, begin: int, numel: int, chunk: int) -> NDArray[np.int64]:
        """Return the numbers of the chunks with elements of the rows, in a shard that begins at element `begin`.

        >>> Rows(np.array([0, 1, 7]), 10).chunks(0, 80, 15)
        array([0, 1, 4, 5])
        """
        rows = self.within(begin, begin + numel).numbers * self.row_numel
        first = (np.maximum(rows, begin) - begin) // chunk
        last = (np.minimum(rows + self.row_numel, begin + numel) - 1 - begin) // chunk
        longest = int((last - first).max(initial=0))
        return np.unique(np.concatenate([np.minimum(first + shift, last) for shift in range(longest + 1)]))

    def message_spans(self, begin: int, numel: int, chunk: int, most: int) -> list[tuple[int, int]]:
        """Return the positions at which the elements in a shard are divided into messages of at most `most` elements.

        A message ends where a chunk ends, so that each chunk is changed once. `most` is at least a chunk.

        >>> Rows(np.array([0, 1, 7]), 10).message_spans(0, 80, 8, 16)
        [(0, 16), (16, 30)]
        """
        position, end = self.span(begin, begin + numel)
        spans = []
        while position < end:
            stop = min(position + most, end)
            if stop < end:
                element = self.element(stop)
                stop = max(self.position(element - (element - begin) % chunk), position + 1)
            spans.append((position, stop))
            position = stop
        return spans


def checked_index(
    index: object, num_rows: int, what: str, server: str, *, unique: bool
) -> tuple[NDArray[np.int64], bool]:
    """Return the numbers of rows that a caller has given, and whether they increase, or raise an error about `what`.

    >>> checked_index(torch.tensor([0, 5]), 5, "rank 0: send", "server 0", unique=True)
    Traceback (most recent call last):
    torchmpi.errors.ArgumentError: rank 0: send: rows=[...] has row 5 at place 1; server 0 has rows 0 to 4.
    """
    if isinstance(index, torch.Tensor):
        if index.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
            raise DtypeError(f"{what}: rows= is {index.dtype}. Pass numbers of rows: an integer tensor, or a list.")
        found = index.detach().to(device="cpu", dtype=torch.int64).numpy()
    else:
        try:
            found = np.asarray(index)
        except (TypeError, ValueError):
            found = np.empty((0, 0))
        if found.size == 0 and found.ndim == 1:
            found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ArgumentError(f"{what}: rows= is no list of whole numbers. Pass the numbers of rows of {server}: [0, 7].")
    numbers = found.astype(np.int64)
    increases = bool((numbers[1:] > numbers[:-1]).all())
    if increases and len(numbers) and numbers[0] >= 0 and numbers[-1] < num_rows:
        return numbers, True
    bad = np.flatnonzero((numbers < 0) | (numbers >= num_rows))
    if len(bad):
        place = int(bad[0])
        raise ArgumentError(
            f"{what}: rows=[...] has row {int(numbers[place])} at place {place}; {server} has rows 0 to {num_rows - 1}."
        )
    if unique:
        values, counts = np.unique(numbers, return_counts=True)
        if len(values) < len(numbers):
            raise ArgumentError(
                f"{what}: rows=[...] has row {int(values[counts > 1][0])} more than once, and a rule is applied to a "
                f"row of {server} once. Add up such rows first: sparse gradient.coalesce()."
            )
    return numbers, increases
