"""Plans of the collectives over staging areas on the GPUs of one host: the steps of each rank, as data.

Each rank has a staging area of two halves that all other ranks can read. Chunks use the halves alternately: one half is
filled while other ranks still read the other. :mod:`torchmpi.backends.ipc.ipc_backend` runs the steps: copies and
reductions in the order of a stream, and between streams through events.

A rank *records* an event after the work that it has enqueued, and *publishes* the number of the stage, so that other
processes know that they may wait for the event: a stream waits for the last record of an event, so the record must
exist before the wait, and must not be repeated before all ranks have called their wait. Per chunk:

1. `Room`: wait for the *emptied* events of the last chunk in this half. `Fill`; record *filled*.
2. `Await` *filled* of the ranks that contribute; reduce or take their data; record *emptied*.
   Or, in *two shots*: reduce this rank's part of the chunk into its own area; record *reduced*; `Await` *reduced* of
   all ranks; take their parts; record *emptied*.

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
ARRIVED, SENT_LENGTH = range(2)
"""Stages before the first chunk: this rank has entered the call; it has written its length."""
_FIRST_STAGE = 2
STAGE_BITS = 24
MAX_CHUNKS = ((1 << STAGE_BITS) - _FIRST_STAGE) // NUM_EVENTS


class Room(NamedTuple):
    """Wait until no rank reads this rank's half any more."""


class Fill(NamedTuple):
    """Copy from the source into this rank's half."""

    source: int
    area: int
    num_bytes: int


class Record(NamedTuple):
    """Record an event after everything enqueued, and publish its stage."""

    event: int


class Publish(NamedTuple):
    """Publish a stage without an event: this rank reads no other area in this chunk."""

    event: int


class Await(NamedTuple):
    """Wait until ranks have published the stage of an event, and let the stream wait for it."""

    event: int
    ranks: tuple[int, ...]


class ReduceAreas(NamedTuple):
    """Combine a range of all ranks' halves into the output or, with `out` None, into this rank's half."""

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
    """Return the stage number of an event of a chunk.

    >>> stage(0, FILLED), stage(1, EMPTIED)
    (2, 7)
    """
    return _FIRST_STAGE + NUM_EVENTS * index + event


def half_bytes(wanted: int, size: int) -> int:
    """Return the bytes of a half: whole megabytes, so that an area is an allocation of its own, with room per rank.

    >>> half_bytes(1, 2), half_bytes(3 << 20, 4096)
    (1048576, 3145728)
    """
    return -(-max(wanted, size * ALIGNMENT) // (1 << 20)) << 20


def cut(num_bytes: int, max_bytes: int) -> list[tuple[int, int]]:
    """Return offset and length of chunks of about equal length: a short chunk costs as much as a long one.

    >>> cut(1000, 512), cut(1025, 1024)
    ([(0, 512), (512, 488)], [(0, 1024), (1024, 1)])
    >>> cut(5000, 4096)
    [(0, 2560), (2560, 2440)]
    """
    num_chunks = max(1, -(-num_bytes // max_bytes))
    length = -(-num_bytes // (num_chunks * ALIGNMENT)) * ALIGNMENT
    return partition.chunks(num_bytes, max(length, ALIGNMENT))


def parts(num_bytes: int, size: int) -> list[tuple[int, int]]:
    """Return offset and length of the part of a chunk that each rank reduces.

    >>> parts(1600, 3)
    [(0, 1024), (1024, 512), (1536, 64)]
    """
    units = partition.even_partition(-(-num_bytes // ALIGNMENT), size)
    begins = [min(first * ALIGNMENT, num_bytes) for first, _ in units]
    return [(begin, min(count * ALIGNMENT, num_bytes - begin)) for begin, (_, count) in zip(begins, units, strict=True)]


def others(rank: int, size: int) -> tuple[int, ...]:
    """Return the other ranks, the next one first: the ranks start reading different areas.

    >>> others(1, 4)
    (2, 3, 0)
    """
    return tuple((rank + shift) % size for shift in range(1, size))


def allreduce(rank: int, size: int, num_bytes: int, half: int, *, shots: int) -> Chunks:
    """Plan an allreduce: in one shot each rank computes the whole result, in two shots its part.

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
            steps, ranges = _reduce_part(rank, size, begin, length)
            yield [*steps, *_take_parts(rank, size, begin, ranges), Record(EMPTIED)]


def reduce(rank: int, size: int, num_bytes: int, half: int, *, root: int, shots: int) -> Chunks:
    """Plan a reduce."""
    for begin, length in cut(num_bytes, half):
        if shots == 1:
            steps = _fill(rank, size, begin, length)
            if rank == root:
                yield [*steps, ReduceAreas(0, length, begin), Record(EMPTIED)]
            else:
                yield [*steps[:-1], Publish(EMPTIED)]
        else:
            steps, ranges = _reduce_part(rank, size, begin, length)
            yield [*steps, *(_take_parts(rank, size, begin, ranges) if rank == root else ()), Record(EMPTIED)]


def broadcast(rank: int, size: int, num_bytes: int, half: int, *, root: int) -> Chunks:
    """Plan a broadcast."""
    if size == 1:  # without a reader, no event would order one filling after the other
        return
    for begin, length in cut(num_bytes, half):
        if rank == root:
            yield [Room(), Fill(begin, 0, length), Record(FILLED), Publish(EMPTIED)]
        else:
            yield [Await(FILLED, (root,)), Take(root, 0, begin, length), Record(EMPTIED)]


def allgather(rank: int, size: int, lengths: Sequence[int], half: int) -> Chunks:
    """Plan an allgather of other ranks' data; a rank copies its own data directly to the result."""
    ends = [sum(lengths[: index + 1]) for index in range(size)]
    for begin, _ in partition.chunks(max(lengths), half):
        steps: list[Step] = []
        if size > 1 and lengths[rank] > begin:
            steps += [Room(), Fill(begin, 0, min(half, lengths[rank] - begin)), Record(FILLED)]
        senders = tuple(other for other in others(rank, size) if lengths[other] > begin)
        if not senders:
            yield [*steps, Publish(EMPTIED)]
            continue
        steps.append(Await(FILLED, senders))
        for other in senders:
            first = ends[other] - lengths[other] + begin
            steps.append(Take(other, 0, first, min(half, lengths[other] - begin)))
        yield [*steps, Record(EMPTIED)]


def reduce_scatter(rank: int, size: int, ranges: Sequence[tuple[int, int]], half: int) -> Chunks:
    """Plan a reduce-scatter: a chunk is the same section of every rank's range (offset, length)."""
    slot = half // size // ALIGNMENT * ALIGNMENT
    for begin, _ in partition.chunks(max(length for _, length in ranges), slot):
        sections = [max(0, min(slot, length - begin)) for _, length in ranges]
        fills = [
            Fill(offset + begin, index * slot, section)
            for index, ((offset, _), section) in enumerate(zip(ranges, sections, strict=True))
            if section
        ]
        steps: list[Step] = [Room(), *fills, Record(FILLED), Await(FILLED, others(rank, size))]
        if sections[rank]:
            steps.append(ReduceAreas(rank * slot, sections[rank], begin))
        yield [*steps, Record(EMPTIED)]


def _fill(rank: int, size: int, begin: int, length: int) -> list[Step]:
    return [Room(), Fill(begin, 0, length), Record(FILLED), Await(FILLED, others(rank, size))]


def _reduce_part(rank: int, size: int, begin: int, length: int) -> tuple[list[Step], list[tuple[int, int]]]:
    """Plan the first of two shots; until *reduced*, only its owner reads or writes a part of the area."""
    ranges = parts(length, size)
    offset, part = ranges[rank]
    steps = _fill(rank, size, begin, length)
    if part:
        steps.append(ReduceAreas(offset, part, None))
    return [*steps, Record(REDUCED)], ranges


def _take_parts(rank: int, size: int, begin: int, ranges: list[tuple[int, int]]) -> list[Step]:
    readable = others(rank, size)
    takes = [
        Take(owner, offset, begin + offset, length)
        for owner in (*readable, rank)
        for offset, length in ranges[owner : owner + 1]
        if length
    ]
    return [Await(REDUCED, readable), *takes]
