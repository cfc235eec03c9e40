"""Straight out of the memory of another rank's process, by a call of the system: one copy, where slots take two.

For verbs in which all cores are busy all the time, allgather and alltoall, and for those in which one rank has
something for each, or gets something from each.

The system looks up every page, so that this is slower than a copy through a cache that the cores share. Which of the
two ways is faster depends on the machine and on the length; so both are tried now and then, and the faster one taken.
"""

from __future__ import annotations

from .. import memory_layout
from . import context
from .arrival import PAYLOAD, end_reads, entry, inner, own, row
from .chunk_loop import deliver
from .copying import turn_of
from .intrinsics import load, read_memory, store

_UNREAD = memory_layout.UNREAD * 8
_LEAST_BYTES, _MOST_BYTES = 32 << 10, 16 << 20
_SOURCE = PAYLOAD + 8
_FIRST_CALLS = 16  # of a length go either way by turns
_EVERY = 128  # later, calls of which one goes each way whatever is known
_SLOTS, _DIRECTLY, _CALLS = 0, 1, 2


@inner
def known(ctx, paces, num_bytes, what):  # type: ignore[no-untyped-def]
    """Address of what is known for about so many bytes: the pace through the slots, directly; the number of calls.

    `paces`: those of the verb.
    """
    place, larger = 0, num_bytes // (2 * _LEAST_BYTES)
    while larger > 0:
        place += 1
        larger //= 2
    return ctx + (paces + 3 * place + what) * 8


@inner
def note_pace(ctx, paces, num_bytes, reads, nanoseconds):  # type: ignore[no-untyped-def]
    """Note how long it took to get so many bytes from each rank. Slower calls, perhaps disturbed ones, count less."""
    if num_bytes < _LEAST_BYTES or num_bytes >= _MOST_BYTES:
        return 0
    calls = known(ctx, paces, num_bytes, _CALLS)
    store(calls, load(calls) + 1)
    place, pace = known(ctx, paces, num_bytes, _DIRECTLY if reads else _SLOTS), nanoseconds * 1024 // num_bytes + 1
    before = load(place)
    store(place, pace if before == 0 or pace < before else before + (pace - before) // 8)
    return 0


@inner
def may_read(ctx, num_bytes):  # type: ignore[no-untyped-def]
    """Whether the system lets this rank read, and so many bytes of each are worth a try."""
    return own(ctx, context.PROCESSES) != 0 and num_bytes >= _LEAST_BYTES and num_bytes < _MOST_BYTES


@inner
def would_read(ctx, paces, num_bytes):  # type: ignore[no-untyped-def]
    """Whether this rank is for reading so many bytes of each of the others from where they are."""
    if not may_read(ctx, num_bytes):
        return False
    directly, slots = load(known(ctx, paces, num_bytes, _DIRECTLY)), load(known(ctx, paces, num_bytes, _SLOTS))
    turn = turn_of(ctx, _EVERY)
    if directly == 0 or slots == 0 or load(known(ctx, paces, num_bytes, _CALLS)) < _FIRST_CALLS:
        return turn % 2 == 1
    # A rank that reads waits for the others to have read everything; through the slots it leaves them the last piece.
    return turn == 1 or (turn != 0 and directly * 16 <= slots * 17)


@inner
def show_memory(ctx, seq, address):  # type: ignore[no-untyped-def]
    """Say in the payload where this rank has what others may read; 0 if they should not."""
    store(entry(ctx, own(ctx, context.RANK), seq) + _SOURCE, address)
    return 0


@inner
def all_show(ctx, seq):  # type: ignore[no-untyped-def]
    """Whether all ranks are for it: otherwise none does."""
    for rank in range(own(ctx, context.SIZE)):
        if load(entry(ctx, rank, seq) + _SOURCE) == 0:
            return False
    return True


@inner
def read_from(ctx, rank, source, num_bytes, target):  # type: ignore[no-untyped-def]
    """Read what a rank has at an address of its own; gives whether the system let us."""
    if own(ctx, context.PROCESSES) == 0:
        return False
    process, done = load(own(ctx, context.PROCESSES) + rank * 8), 0
    while done < num_bytes:
        length = read_memory(process, target + done, source + done, num_bytes - done)
        if length <= 0:
            return False
        done += length
    return True


@inner
def end_reading(ctx, has_read):  # type: ignore[no-untyped-def]
    """After all have read: 0, or UNREAD if a rank could not, or what else came between."""
    chunk = own(ctx, context.CHUNKS)
    store(row(ctx, own(ctx, context.RANK)) + _UNREAD, 0 if has_read else chunk + 1)
    status = end_reads(ctx)
    if status != 0:
        return status
    if not has_read:
        store(ctx + context.PROCESSES * 8, 0)  # nor will it later, and one rank that is not for it is enough
    for other in range(own(ctx, context.SIZE)):
        if load(row(ctx, other) + _UNREAD) == chunk + 1:
            return context.UNREAD
    return 0


@inner
def read_all(ctx, seq, source, first, num_bytes, target):  # type: ignore[no-untyped-def]
    """So many bytes of everybody's, from `first` on: 0, or UNREAD if a rank could not, or what else came between."""
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    deliver(target + rank * num_bytes, source + first, num_bytes, num_bytes)
    has_read = True
    for shift in range(1, size):
        other = rank + shift - size if rank + shift >= size else rank + shift
        there = load(entry(ctx, other, seq) + _SOURCE) + first
        has_read = has_read and read_from(ctx, other, there, num_bytes, target + other * num_bytes)
    return end_reading(ctx, has_read)
