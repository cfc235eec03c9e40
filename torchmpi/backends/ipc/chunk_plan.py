"""What each rank does in a collective over staging areas on the GPUs of one host, as data.

Each rank has a staging area of two halves that all others can read. A chunk of a call goes through one half, the next
chunk through the other: one is filled while the others still read the one before.
:class:`torchmpi.backends.ipc.ipc_backend` runs
the steps: the copies and reductions in the order of a stream, and between streams through events.

A rank *records* an event behind what it has enqueued, and *publishes* the number of the stage that it has reached, so
that the hosts of the others know that they may wait for the event: a stream waits for the last record that an event has
had, so the record must be there before. It must not be made again before all have called their wait, either. Per chunk:

1. `Room`: the others' events of the chunk that was in this half before, *emptied*. `Fill`; record *filled*.
2. `Await` *filled* of those who bring something; reduce or take it; record *emptied*.
   Or, in *two shots*: reduce only the own part of the chunk, into the own area; record *reduced*; `Await` it of all;
   take their parts; record *emptied*.

All lengths and offsets are bytes. Areas are cut at multiples of `ALIGNMENT`, so that no element is cut and every
address that a kernel reads is aligned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...tensors import partition

ALIGNMENT = 512

FILLED, REDUCED, EMPTIED = range(3)
"""Events, and the stages of a chunk."""
NUM_EVENTS = 3
ARRIVED, BROUGHT = range(2)
"""Stages before the first chunk: this rank is in the call; it has said how much it brings."""
_FIRST_STAGE = 2
STAGE_BITS = 24
MOST_CHUNKS = ((1 << STAGE_BITS) - _FIRST_STAGE) // NUM_EVENTS


class Room(NamedTuple):
    """Wait until nobody reads what is in the own half any more."""


class Fill(NamedTuple):
    """Copy from the source into the own half."""

    source: int
    area: int
    num_bytes: int


class Record(NamedTuple):
    """Record an event behind all that was enqueued, and publish its stage."""

    event: int


class Publish(NamedTuple):
    """Publish a stage for which nobody waits on the device: this rank reads nobody's area in this chunk."""

    event: int


class Await(NamedTuple):
    """Wait until ranks have published the stage of an event, and let the stream wait for it."""

    event: int
    ranks: tuple[int, ...]


class ReduceAreas(NamedTuple):
    """Combine a stretch of everybody's half, into the output or (None) the own half."""

    area: int
    num_bytes: int
    out: int | None


class Take(NamedTuple):
    """Copy from a rank's half into the output."""

    rank: int
    area: int
    out: int
    num_bytes: int


Step = Room | Fill | Record | Publish | Await | ReduceAreas | Take
Chunks = Iterator[list[Step]]


def stage(index: int, event: int) -> int:
    """The number that is published for an event of a chunk of a call.

    >>> stage(0, FILLED), stage(1, EMPTIED)
    (2, 7)
    """
    return _FIRST_STAGE + NUM_EVENTS * index + event


def half_bytes(wanted: int, size: int) -> int:
    """Bytes of a half: whole megabytes, so that the two are an allocation of their own, with room for each rank.

    >>> half_bytes(1, 2), half_bytes(3 << 20, 4096)
    (1048576, 3145728)
    """
    return -(-max(wanted, size * ALIGNMENT) // (1 << 20)) << 20


def cut(num_bytes: int, most: int) -> list[tuple[int, int]]:
    """Offset and length of chunks, all of about the same length, so that none is small for its cost.

    >>> cut(1000, 512), cut(1025, 1024)
    ([(0, 512), (512, 488)], [(0, 1024), (1024, 1)])
    >>> cut(5000, 4096)
    [(0, 2560), (2560, 2440)]
    """
    num_chunks = max(1, -(-num_bytes // most))
    length = -(-num_bytes // (num_chunks * ALIGNMENT)) * ALIGNMENT
    return partition.chunks(num_bytes, max(length, ALIGNMENT))


def parts(num_bytes: int, size: int) -> list[tuple[int, int]]:
    """Offset and length of the part of a chunk that each rank reduces.

    >>> parts(1600, 3)
    [(0, 1024), (1024, 512), (1536, 64)]
    """
    spans = partition.even_partition(-(-num_bytes // ALIGNMENT), size)
    begins = [min(first * ALIGNMENT, num_bytes) for first, _ in spans]
    return [(begin, min(count * ALIGNMENT, num_bytes - begin)) for begin, (_, count) in zip(begins, spans, strict=True)]


def others(rank: int, size: int) -> tuple[int, ...]:
    """The other ranks, the next one first, so that not all read the same area at once.

    >>> others(1, 4)
    (2, 3, 0)
    """
    return tuple((rank + shift) % size for shift in range(1, size))


def allreduce(rank: int, size: int, num_bytes: int, half: int, *, shots: int) -> Chunks:
    """Everybody gets the result: in one shot, each computes all of it; in two, its part.

    >>> for step in next(allreduce(0, 2, 64, 4096, shots=1)): print(step)
    Room()
    Fill(source=0, area=0, num_bytes=64)
    Record(event=0)
    Await(event=0, ranks=(1,))
    ReduceAreas(area=0, num_bytes=64, out=0)
    Record(event=2)
    """
    for begin, length in cut(num_bytes, half):
        if shots == 1:
            yield [*_fill(rank, size, begin, length), ReduceAreas(0, length, begin), Record(EMPTIED)]
        else:
            steps, spans = _reduce_part(rank, size, begin, length)
            yield [*steps, *_take_parts(rank, size, begin, spans), Record(EMPTIED)]


def reduce(rank: int, size: int, num_bytes: int, half: int, *, root: int, shots: int) -> Chunks:
    """The root gets the result."""
    for begin, length in cut(num_bytes, half):
        if shots == 1:
            steps = _fill(rank, size, begin, length)
            if rank == root:
                yield [*steps, ReduceAreas(0, length, begin), Record(EMPTIED)]
            else:
                yield [*steps[:-1], Publish(EMPTIED)]
        else:
            steps, spans = _reduce_part(rank, size, begin, length)
            yield [*steps, *(_take_parts(rank, size, begin, spans) if rank == root else ()), Record(EMPTIED)]


def broadcast(rank: int, size: int, num_bytes: int, half: int, *, root: int) -> Chunks:
    """Everybody gets what the root has."""
    if size == 1:  # with nobody to read it, nothing would order one filling after the other
        return
    for begin, length in cut(num_bytes, half):
        if rank == root:
            yield [Room(), Fill(begin, 0, length), Record(FILLED), Publish(EMPTIED)]
        else:
            yield [Await(FILLED, (root,)), Take(root, 0, begin, length), Record(EMPTIED)]


def allgather(rank: int, size: int, lengths: Sequence[int], half: int) -> Chunks:
    """Everybody's bytes in rank order, to everybody. What a rank itself brings it copies without a detour."""
    ends = [sum(lengths[: index + 1]) for index in range(size)]
    for begin, _ in partition.chunks(max(lengths), half):
        steps: list[Step] = []
        if size > 1 and lengths[rank] > begin:
            steps += [Room(), Fill(begin, 0, min(half, lengths[rank] - begin)), Record(FILLED)]
        bringing = tuple(other for other in others(rank, size) if lengths[other] > begin)
        if not bringing:
            yield [*steps, Publish(EMPTIED)]
            continue
        steps.append(Await(FILLED, bringing))
        for other in bringing:
            first = ends[other] - lengths[other] + begin
            steps.append(Take(other, 0, first, min(half, lengths[other] - begin)))
        yield [*steps, Record(EMPTIED)]


def reduce_scatter(rank: int, size: int, spans: Sequence[tuple[int, int]], half: int) -> Chunks:
    """Each rank gets the result of its span (offset, length): the same stretch of each span goes into a chunk."""
    slot = half // size // ALIGNMENT * ALIGNMENT
    for begin, _ in partition.chunks(max(length for _, length in spans), slot):
        pieces = [max(0, min(slot, length - begin)) for _, length in spans]
        fills = [
            Fill(offset + begin, index * slot, piece)
            for index, ((offset, _), piece) in enumerate(zip(spans, pieces, strict=True))
            if piece
        ]
        steps: list[Step] = [Room(), *fills, Record(FILLED), Await(FILLED, others(rank, size))]
        if pieces[rank]:
            steps.append(ReduceAreas(rank * slot, pieces[rank], begin))
        yield [*steps, Record(EMPTIED)]


def _fill(rank: int, size: int, begin: int, length: int) -> list[Step]:
    return [Room(), Fill(begin, 0, length), Record(FILLED), Await(FILLED, others(rank, size))]


def _reduce_part(rank: int, size: int, begin: int, length: int) -> tuple[list[Step], list[tuple[int, int]]]:
    """The first of two shots; nobody but its owner reads or writes a part of the area until *reduced*."""
    spans = parts(length, size)
    offset, part = spans[rank]
    steps = _fill(rank, size, begin, length)
    if part:
        steps.append(ReduceAreas(offset, part, None))
    return [*steps, Record(REDUCED)], spans


def _take_parts(rank: int, size: int, begin: int, spans: list[tuple[int, int]]) -> list[Step]:
    readable = others(rank, size)
    takes = [
        Take(owner, offset, begin + offset, length)
        for owner in (*readable, rank)
        for offset, length in spans[owner : owner + 1]
        if length
    ]
    return [Await(REDUCED, readable), *takes]
