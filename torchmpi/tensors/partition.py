"""Partitions of lengths: even parts, rows per rank, chunks of a limited size. Pure arithmetic."""

from __future__ import annotations

from ..errors import ArgumentError


def part_of(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Return offset and length of one part of an even partition; the first parts have one element more.

    >>> part_of(10, 3, 0), part_of(10, 3, 2)
    ((0, 4), (7, 3))
    """
    if numel < 0 or parts < 1 or not 0 <= index < parts:
        raise ArgumentError(f"cannot take part {index} of {numel} elements in {parts} parts.")
    least, num_larger = divmod(numel, parts)
    return index * least + min(index, num_larger), least + (index < num_larger)


def even_partition(numel: int, parts: int) -> list[tuple[int, int]]:
    """Return offset and length of every part of an even partition: also the rows of each rank in a scatter.

    Lengths differ by at most one; the longer parts come first.

    >>> even_partition(10, 3)
    [(0, 4), (4, 3), (7, 3)]
    >>> even_partition(2, 3)
    [(0, 1), (1, 1), (2, 0)]
    """
    if parts < 1:
        raise ArgumentError(f"cannot cut {numel} elements into {parts} parts; at least one is needed.")
    least, num_larger = part_of(numel, parts, parts - 1)[1], numel % parts
    return [(index * least + min(index, num_larger), least + (index < num_larger)) for index in range(parts)]


def chunks(numel: int, max_numel: int) -> list[tuple[int, int]]:
    """Return offset and length of chunks of at most `max_numel` elements; all but the last have that length.

    >>> chunks(10, 4)
    [(0, 4), (4, 4), (8, 2)]
    >>> chunks(0, 4)
    []
    """
    if numel < 0 or max_numel < 1:
        raise ArgumentError(f"cannot cut {numel} elements into chunks of at most {max_numel}.")
    return [(offset, min(max_numel, numel - offset)) for offset in range(0, numel, max_numel)]
