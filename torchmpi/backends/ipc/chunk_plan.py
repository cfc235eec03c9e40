"""Plans of the collectives over staging areas on the GPUs of one host: the steps of each rank, as data.

Each rank has a staging area of two halves that all other ranks can read. Chunks use the halves alternately: one half is
filled while other ranks still read the other. :mod:`torchmpi.backends.ipc.staged_group` enqueues the steps, each on the
stream of its rank.

A rank *publishes* a stage: its stream writes the number of the stage after all earlier work. Another rank *awaits* it:
the process waits until the write is enqueued, then its stream waits for the number. The numbers only grow. Per chunk:

1. `Room`: await *emptied* of the last chunk in this half. `Fill`; publish *filled*.
2. Await *filled* of the ranks that contribute; reduce or take their data; publish *emptied*.
   Or, in *two shots*: reduce this rank's part of the chunk, and copy the result into its own area; publish *reduced*;
   await *reduced* of all ranks; take their parts; publish *emptied*.

All lengths and offsets are elements. Areas are cut at multiples of `ALIGNMENT`, so that kernels read aligned memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...tensors import partition

ALIGNMENT = 512
_LARGEST_ITEM_BYTES = 16

FILLED, REDUCED, EMPTIED = range(3)
"""The stages of a chunk."""
NUM_STAGES = 3
_FIRST_STAGE = 1  # 0: this rank has entered the call


class Room(NamedTuple):
    """Wait until no rank reads this rank's half any more."""


class Fill(NamedTuple):
    """Copy from the source into this rank's half."""

    source: int
    area: int
    numel: int


class Sync(NamedTuple):
    """Publish a stage after everything enqueued, or not; then wait until ranks have published the same stage."""

    stage: int
    publishes: bool
    awaits: tuple[int, ...] = ()


class ReduceAreas(NamedTuple):
    """Combine a range of all ranks' halves into the output."""

    area: int
    out: int
    numel: int


class Take(NamedTuple):
    """Copy from a rank's half into the output."""

    rank: int
    area: int
    out: int
    numel: int


Step = Room | Fill | Sync | ReduceAreas | Take
Chunks = Iterator[list[Step]]


def stage_number(index: int, stage: int) -> int:
    """Return the number of a stage of a chunk within its call.

    >>> stage_number(0, FILLED), stage_number(1, EMPTIED)
    (1, 6)
    """
    return _FIRST_STAGE + NUM_STAGES * index + stage


def half_bytes(wanted: int, size: int) -> int:
    """Return the size of a half in bytes: a multiple of 1 MiB, with room for a part of each rank.

    >>> half_bytes(1, 2), half_bytes(3 << 20, 4096)
    (1048576, 33554432)
    """
    return -(-max(wanted, size * ALIGNMENT * _LARGEST_ITEM_BYTES) // (1 << 20)) << 20


def parts(numel: int, size: int) -> list[tuple[int, int]]:
    """Return offset and length of the part of a chunk that each rank reduces.

    >>> parts(1600, 3)
    [(0, 1024), (1024, 512), (1536, 64)]
    """
    units = partition.even_partition(-(-numel // ALIGNMENT), size)
    begins = [min(first * ALIGNMENT, numel) for first, _ in units]
    return [(begin, min(count * ALIGNMENT, numel - begin)) for begin, (_, count) in zip(begins, units, strict=True)]


def others(rank: int, size: int) -> tuple[int, ...]:
    """Return the other ranks, the next one first: the ranks start reading different areas.

    >>> others(1, 4)
    (2, 3, 0)
    """
    return tuple((rank + shift) % size for shift in range(1, size))


def allreduce(rank: int, size: int, numel: int, half: int, *, shots: int) -> Chunks:
    """Plan an allreduce in place: in one shot each rank computes the whole result, in two shots its part.

    >>> for step in next(allreduce(0, 2, 64, 4096, shots=1)): print(step)
    Room()
    Fill(source=0, area=0, numel=64)
    Sync(stage=0, publishes=True, awaits=(1,))
    ReduceAreas(area=0, out=0, numel=64)
    Sync(stage=2, publishes=True, awaits=())
    """
    for begin, length in partition.chunks(numel, half):
        steps = _fill(rank, size, begin, length)
        if shots == 1:
            yield [*steps, ReduceAreas(0, begin, length), Sync(EMPTIED, True)]
            continue
        ranges = parts(length, size)  # until *reduced*, only its owner reads a part of the areas
        offset, part = ranges[rank]
        if part:
            steps += [ReduceAreas(offset, begin + offset, part), Fill(begin + offset, offset, part)]
        steps.append(Sync(REDUCED, True, others(rank, size)))
        steps += [Take(owner, ranges[owner][0], begin + ranges[owner][0], ranges[owner][1])
                  for owner in others(rank, size) if ranges[owner][1]]  # fmt: skip
        yield [*steps, Sync(EMPTIED, True)]


def reduce(rank: int, size: int, numel: int, half: int, *, root: int) -> Chunks:
    """Plan a reduce in place on the root, which computes the whole result."""
    for begin, length in partition.chunks(numel, half):
        steps = _fill(rank, size, begin, length)
        if rank == root:
            steps.append(ReduceAreas(0, begin, length))
        else:
            steps[-1] = Sync(FILLED, True)
        yield [*steps, Sync(EMPTIED, True)]


def broadcast(rank: int, size: int, numel: int, half: int, *, root: int) -> Chunks:
    """Plan a broadcast."""
    if size == 1:
        return
    for begin, length in partition.chunks(numel, half):
        if rank == root:
            yield [Room(), Fill(begin, 0, length), Sync(FILLED, True), Sync(EMPTIED, True)]
        else:
            yield [Sync(FILLED, False, (root,)), Take(root, 0, begin, length), Sync(EMPTIED, True)]


def allgather(rank: int, size: int, lengths: Sequence[int], half: int) -> Chunks:
    """Plan an allgather of other ranks' data; a rank copies its own data directly to the result."""
    ends = [sum(lengths[: index + 1]) for index in range(size)]
    for begin, _ in partition.chunks(max(lengths), half):
        has_more = size > 1 and lengths[rank] > begin
        steps: list[Step] = []
        if has_more:
            steps += [Room(), Fill(begin, 0, min(half, lengths[rank] - begin))]
        senders = tuple(other for other in others(rank, size) if lengths[other] > begin)
        steps.append(Sync(FILLED, has_more, senders))
        for other in senders:
            first = ends[other] - lengths[other] + begin
            steps.append(Take(other, 0, first, min(half, lengths[other] - begin)))
        yield [*steps, Sync(EMPTIED, True)]


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
        steps: list[Step] = [Room(), *fills, Sync(FILLED, True, others(rank, size))]
        if sections[rank]:
            steps.append(ReduceAreas(rank * slot, begin, sections[rank]))
        yield [*steps, Sync(EMPTIED, True)]


def _fill(rank: int, size: int, begin: int, length: int) -> list[Step]:
    return [Room(), Fill(begin, 0, length), Sync(FILLED, True, others(rank, size))]
