"""The loop of the verbs that move and do not combine: pieces through shared memory, round after round.

In each round a rank puts a piece of what it sends into its slot, and fetches from the slots of the others. What it
sends is one stream for everybody (broadcast, gathers) or one for each rank (scatter, alltoall, reduce_scatter).
"""

from __future__ import annotations

from .. import memory_layout
from . import context
from .arrival import inner, kernel, own, row, wait, wait_all
from .copying import (
    LONG_BYTES,
    choose_way,
    copy_into_slot,
    copy_into_slot_and,
    copy_past,
    end_chunks,
    moving_slot,
    note_chunk,
    note_put,
    note_time,
    publish,
)
from .intrinsics import copy, fence, load, now, store, store_release

_READY, _REDUCED = memory_layout.READY * 8, memory_layout.REDUCED * 8

# A table of what is sent and received: for each rank two pairs of address and length.
PAIRS = 4 * 8
_LINE_BYTES = 64
_NUM_PIECES = 8  # of a stream, more if a slot is shorter: most is put while what came before it is fetched
_LEAST_PIECE_BYTES = 16 << 10  # times the number of ranks, which all have to come for each piece
# What is in the slots at a time should stay in the second cache of whoever reads it, and of whoever writes.
ONE_SENDS_BYTES, ALL_SEND_BYTES, _PARTS_BYTES = 384 << 10, 128 << 10, 256 << 10


@inner
def num_rounds_of(ctx, num_bytes):  # type: ignore[no-untyped-def]
    """How many rounds it takes to move that many bytes from one rank to another."""
    return (num_bytes + own(ctx, context.CHUNK_BYTES) - 1) // own(ctx, context.CHUNK_BYTES)


@inner
def cut_stream(ctx, num_bytes, most_bytes):  # type: ignore[no-untyped-def]
    """Cut what goes to all, from one rank or from each; gives the number of rounds."""
    piece = max((num_bytes + _NUM_PIECES - 1) // _NUM_PIECES, _LEAST_PIECE_BYTES * own(ctx, context.SIZE))
    piece = (piece + _LINE_BYTES - 1) // _LINE_BYTES * _LINE_BYTES
    store(ctx + context.CHUNK_BYTES * 8, min(piece, most_bytes, own(ctx, context.SLOT_BYTES)))
    store(ctx + context.SPACING * 8, 0)
    return num_rounds_of(ctx, num_bytes)


@inner
def cut_parts(ctx, num_bytes):  # type: ignore[no-untyped-def]
    """Cut what is something else for each rank, of this length at most; gives the number of rounds."""
    piece = min(own(ctx, context.SLOT_BYTES), _PARTS_BYTES) // own(ctx, context.SIZE) // _LINE_BYTES * _LINE_BYTES
    store(ctx + context.CHUNK_BYTES * 8, piece)
    store(ctx + context.SPACING * 8, piece)
    return num_rounds_of(ctx, num_bytes)


@inner
def send_to_all(plan, address, num_bytes):  # type: ignore[no-untyped-def]
    """Fill the sending half of the table: the same for everybody."""
    ctx = own(plan, context.CONTEXT)
    table = own(plan, context.TABLE)
    for other in range(own(ctx, context.SIZE)):
        store(table + other * PAIRS, address)
        store(table + other * PAIRS + 8, num_bytes)
    return table


@inner
def deliver(target, source, num_bytes, total_bytes):  # type: ignore[no-untyped-def]
    """Copy a piece of something long or short."""
    if total_bytes >= LONG_BYTES:
        copy_past(target, source, num_bytes)
    else:
        copy(target, source, num_bytes)
    return 0


@inner
def keeps_on_the_way(ctx, table):  # type: ignore[no-untyped-def]
    """Whether a stream is so long that what this rank keeps of it is copied together with what it puts in its slot."""
    pair = table + own(ctx, context.RANK) * PAIRS
    is_sent = own(ctx, context.SIZE) > 1 and load(pair + 8) == load(pair + 24)
    return is_sent and load(pair + 24) >= LONG_BYTES


@inner
def keep_own(ctx, chunk, table):  # type: ignore[no-untyped-def]
    """What this rank sends to itself, piece by piece while it is in the cache on its way into the slot."""
    pair = table + own(ctx, context.RANK) * PAIRS
    done = (chunk - own(ctx, context.CHUNKS)) * own(ctx, context.CHUNK_BYTES)
    length = min(own(ctx, context.CHUNK_BYTES), load(pair + 24) - done)
    if length > 0:
        deliver(load(pair + 16) + done, load(pair) + done, length, load(pair + 24))
    return 0


@inner
def put(ctx, chunk, table, keeps):  # type: ignore[no-untyped-def]
    """Put the next piece of what this rank sends into its slot, of a stream one for all.

    If it `keeps` that piece too, it goes there at the same time.
    """
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    piece_bytes, spacing = own(ctx, context.CHUNK_BYTES), own(ctx, context.SPACING)
    done = (chunk - own(ctx, context.CHUNKS)) * piece_bytes
    num_put, since = 0, now()
    for other in range(size):
        pair = table + other * PAIRS
        length = min(piece_bytes, load(pair + 8) - done)
        if length > 0 and other != rank:
            target = moving_slot(ctx, rank, chunk) + other * spacing
            if keeps:
                kept = load(table + rank * PAIRS + 16) + done
                copy_into_slot_and(ctx, target, kept, load(pair) + done, length)
            else:
                copy_into_slot(ctx, target, load(pair) + done, length)
            num_put += length
            if spacing == 0:
                break
    note_put(ctx, chunk, since, num_put)  # also of what is kept at the same time: that adds less than slow lines do
    publish(ctx, _READY, chunk + 1)
    return 0


@inner
def put_first_piece(ctx, table, num_rounds):  # type: ignore[no-untyped-def]
    """Put the first piece of what this rank sends into its slot, before it arrives or after."""
    choose_way(ctx, num_rounds, False)
    put(ctx, own(ctx, context.CHUNKS), table, False)
    return 0


@inner
def put_next(ctx, index, table, keeps):  # type: ignore[no-untyped-def]
    """In a round, put the piece of the one after it: 0, or why its slot will never be free.

    The slot of the round before last is free once everybody has fetched from it; that of an earlier call is.
    """
    chunk = own(ctx, context.CHUNKS) + index
    status = wait_all(ctx, _REDUCED, chunk) if index > 0 else 0
    if status == 0:
        put(ctx, chunk + 1, table, keeps)
    return status


@inner
def fetch(ctx, chunk, table):  # type: ignore[no-untyped-def]
    """Fetch what the others have put there for this rank."""
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    piece_bytes = own(ctx, context.CHUNK_BYTES)
    done = (chunk - own(ctx, context.CHUNKS)) * piece_bytes
    fetched = 0
    for shift in range(1, size):
        other = rank + shift - size if rank + shift >= size else rank + shift
        pair = table + other * PAIRS + 16
        length = min(piece_bytes, load(pair + 8) - done)
        if length > 0:
            status = wait(ctx, row(ctx, other) + _READY, chunk + 1)
            if status != 0:
                return status
            source = moving_slot(ctx, other, chunk) + rank * own(ctx, context.SPACING)
            begin = now()
            deliver(load(pair) + done, source, length, load(pair + 8))
            note_time(ctx, chunk, begin)
            fetched += length
    note_chunk(ctx, chunk, fetched)
    store_release(row(ctx, rank) + _REDUCED, chunk + 1)
    return 0


@kernel
def exchange(plan, table, is_stream, longest, has_sent):  # type: ignore[no-untyped-def]
    """Move everything in the table, in which the ranks may differ; `longest` is the longest length in anybody's.

    `has_sent`: something has gone through the slots in this call already, which others may still be fetching.
    """
    ctx = own(plan, context.CONTEXT)
    if has_sent:
        status = wait_all(ctx, _REDUCED, own(ctx, context.CHUNKS))
        if status != 0:
            return status
    if is_stream:
        # Before the ranks knew that they differ, first pieces of other lengths were announced under this number.
        store(ctx + context.CHUNKS * 8, own(ctx, context.CHUNKS) + 1)
        num_rounds = cut_stream(ctx, longest, ALL_SEND_BYTES)
    else:
        num_rounds = cut_parts(ctx, longest)
        kept = table + own(ctx, context.RANK) * PAIRS
        deliver(load(kept + 16), load(kept), load(kept + 24), load(kept + 24))
    choose_way(ctx, num_rounds, False)
    if num_rounds > 0:
        put(ctx, own(ctx, context.CHUNKS), table, False)
    return go_on(ctx, table, num_rounds)


@inner
def go_on(ctx, table, num_rounds):  # type: ignore[no-untyped-def]
    """Move what is in the table, of which the first pieces are in the slots already."""
    base = own(ctx, context.CHUNKS)
    is_stream = own(ctx, context.SPACING) == 0
    on_the_way = is_stream and keeps_on_the_way(ctx, table)
    if is_stream and num_rounds > 0:
        keep_own(ctx, base, table)
    for index in range(num_rounds):
        chunk = base + index
        if index + 1 < num_rounds:
            status = put_next(ctx, index, table, on_the_way)
            if status != 0:
                return status
            if is_stream and not on_the_way:
                keep_own(ctx, chunk + 1, table)
        status = fetch(ctx, chunk, table)
        if status != 0:
            return status
    fence()  # what went past the caches is in no order with anything else
    end_chunks(ctx)
    store(ctx + context.CHUNKS * 8, base + num_rounds)
    return wait_all(ctx, _REDUCED, base + num_rounds - 1) if num_rounds > 1 else 0
