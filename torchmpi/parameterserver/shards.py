"""How a tensor is cut: into shards, one per rank, and shards into chunks. Pure arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from ..shared_memory.kernels.shard_layout import CHUNK_BYTES, HEADER_BYTES, NUM_ARRAYS

_PAGE_BYTES = 4096
PIECE_BYTES = 1 << 20
"""Most of a tensor that travels to another host in one message."""


class Layout(NamedTuple):
    """Where the shards of the ranks that share memory are in it, in bytes from its beginning."""

    num_bytes: int
    headers: tuple[int, ...]
    """Of each shard: its chunks' headers."""
    arrays: tuple[tuple[int, ...], ...]
    """Of each shard: its values and its states."""


def chunk_numel(item_bytes: int, state_bytes: int) -> int:
    """Elements of a chunk: in the array with the largest elements it fills CHUNK_BYTES.

    >>> chunk_numel(4, 4), chunk_numel(2, 4), chunk_numel(8, 8)
    (16384, 16384, 8192)
    """
    return CHUNK_BYTES // max(item_bytes, state_bytes)


def layout(numels: tuple[int, ...], item_bytes: int, state_bytes: int) -> Layout:
    """The memory for shards of so many elements. Each array begins on a page, so that unused ones take none.

    >>> layout((10, 0), 4, 4)
    Layout(num_bytes=16384, headers=(0, 16384), arrays=((4096, 8192, 12288), (16384, 16384, 16384)))
    """
    position, headers, arrays = 0, [], []
    chunk = chunk_numel(item_bytes, state_bytes)
    for numel in numels:
        headers.append(position)
        position += _pages(-(-numel // chunk) * HEADER_BYTES)
        own = []
        for array in range(NUM_ARRAYS):
            own.append(position)
            position += _pages(numel * (state_bytes if array else item_bytes))
        arrays.append(tuple(own))
    return Layout(max(position, _PAGE_BYTES), tuple(headers), tuple(arrays))


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def pieces(numel: int, chunk: int, item_bytes: int, most_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
    """Begin and end of the pieces in which a shard travels: whole chunks, but for the last.

    >>> pieces(10, 4, 1, 8), pieces(0, 4, 1, 8)
    ([(0, 8), (8, 10)], [])
    """
    step = max(1, most_bytes // (chunk * item_bytes)) * chunk
    return [(begin, min(begin + step, numel)) for begin in range(0, numel, step)]
