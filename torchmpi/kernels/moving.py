"""Verbs that move and do not combine, and the sum of which each rank gets its rows, through shared memory.

One loop serves them all: in each round a rank puts a piece of what it sends into its slot, and fetches from the slots
of the others. What it sends is one stream for everybody (broadcast, gathers) or one for each rank (scatter, alltoall,
reduce_scatter).
"""

from __future__ import annotations

from .. import layout
from . import context
from .meeting import PAYLOAD, arrive, begin, entry, inner, kernel, leave, own, row, wait, wait_all
from .memory import copy, fence, load, now, store, store_release
from .placing import (
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
    slot,
)
from .reducing import combine, point_at

_READY, _REDUCED = layout.READY * 8, layout.REDUCED * 8
_LINE_BYTES = 64
_SHORT_BROADCAST_BYTES = 128 << 10  # such a one goes past the caches in any case: that was never slower

# A table of what is sent and received: for each rank two pairs of address and length.
_PAIRS = 4 * 8


@kernel
def meet(plan, seq, signature, message, num_bytes):  # type: ignore[no-untyped-def]
    """A barrier, to which each rank brings a message: it can then be read in the payload of its entry."""
    ctx = own(plan, context.CONTEXT)
    status = begin(ctx, seq)
    if status == 0:
        copy(entry(ctx, own(ctx, context.RANK), seq) + PAYLOAD, message, num_bytes)
        status = arrive(ctx, seq, signature)
    leave(ctx, seq)
    return status


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
    """Whether a stream is so long that this rank copies what it keeps of it together with what it puts into its slot."""
    pair = table + own(ctx, context.RANK) * _PAIRS
    is_sent = own(ctx, context.SIZE) > 1 and load(pair + 8) == load(pair + 24)
    return is_sent and load(pair + 24) >= LONG_BYTES


@inner
def keep_own(ctx, chunk, table, piece_bytes):  # type: ignore[no-untyped-def]
    """What this rank sends to itself, piece by piece while it is in the cache on its way into the slot."""
    pair = table + own(ctx, context.RANK) * _PAIRS
    done = (chunk - own(ctx, context.CHUNKS)) * piece_bytes
    length = min(piece_bytes, load(pair + 24) - done)
    if length > 0:
        deliver(load(pair + 16) + done, load(pair) + done, length, load(pair + 24))
    return 0


@inner
def put(ctx, chunk, table, piece_bytes, keeps):  # type: ignore[no-untyped-def]
    """Put the next piece of what this rank sends into its slot: one for all if `piece_bytes` is the slot's size.

    If it `keeps` that piece too, it goes there at the same time.
    """
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    done = (chunk - own(ctx, context.CHUNKS)) * piece_bytes
    is_stream = piece_bytes == own(ctx, context.SLOT_BYTES)
    num_put, since = 0, now()
    for other in range(size):
        pair = table + other * _PAIRS
        length = min(piece_bytes, load(pair + 8) - done)
        if length > 0 and other != rank:
            target = moving_slot(ctx, rank, chunk) + (0 if is_stream else other * piece_bytes)
            if keeps:
                kept = load(table + rank * _PAIRS + 16) + done
                copy_into_slot_and(ctx, target, kept, load(pair) + done, length)
            else:
                copy_into_slot(ctx, target, load(pair) + done, length)
            num_put += length
            if is_stream:
                break
    note_put(ctx, chunk, since, num_put)
    publish(ctx, _READY, chunk + 1)
    return 0


@inner
def fetch(ctx, chunk, table, piece_bytes):  # type: ignore[no-untyped-def]
    """Fetch what the others have put there for this rank."""
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    done = (chunk - own(ctx, context.CHUNKS)) * piece_bytes
    is_stream = piece_bytes == own(ctx, context.SLOT_BYTES)
    fetched = 0
    for shift in range(1, size):
        other = rank + shift - size if rank + shift >= size else rank + shift
        pair = table + other * _PAIRS + 16
        length = min(piece_bytes, load(pair + 8) - done)
        if length > 0:
            status = wait(ctx, row(ctx, other) + _READY, chunk + 1)
            if status != 0:
                return status
            source = moving_slot(ctx, other, chunk) + (0 if is_stream else rank * piece_bytes)
            begin = now()
            deliver(load(pair) + done, source, length, load(pair + 8))
            note_time(ctx, begin)
            fetched += length
    note_chunk(ctx, fetched)
    store_release(row(ctx, rank) + _REDUCED, chunk + 1)
    return 0


@kernel
def exchange(plan, table, piece_bytes, num_rounds, has_sent):  # type: ignore[no-untyped-def]
    """Move everything in the table; all ranks make the same number of rounds.

    `has_sent`: something has gone through the slots in this call already, which others may still be fetching.
    """
    ctx = own(plan, context.CONTEXT)
    if has_sent:
        status = wait_all(ctx, _REDUCED, own(ctx, context.CHUNKS))
        if status != 0:
            return status
    is_stream = piece_bytes == own(ctx, context.SLOT_BYTES)
    choose_way(ctx, num_rounds, False)
    if not is_stream:
        kept = table + own(ctx, context.RANK) * _PAIRS
        copy(load(kept + 16), load(kept), load(kept + 24))
    if num_rounds > 0:
        put(ctx, own(ctx, context.CHUNKS), table, piece_bytes, False)
    return go_on(ctx, table, piece_bytes, num_rounds)


@inner
def go_on(ctx, table, piece_bytes, num_rounds):  # type: ignore[no-untyped-def]
    """Move what is in the table, of which the first pieces are in the slots already."""
    base = own(ctx, context.CHUNKS)
    is_stream = piece_bytes == own(ctx, context.SLOT_BYTES)
    on_the_way = is_stream and keeps_on_the_way(ctx, table)
    if is_stream and num_rounds > 0:
        keep_own(ctx, base, table, piece_bytes)
    for index in range(num_rounds):
        chunk = base + index
        if index + 1 < num_rounds:
            # The slot of the round before last is free once everybody has fetched from it; that of an earlier call is.
            status = wait_all(ctx, _REDUCED, chunk) if index > 0 else 0
            if status != 0:
                return status
            put(ctx, chunk + 1, table, piece_bytes, on_the_way)
            if is_stream and not on_the_way:
                keep_own(ctx, chunk + 1, table, piece_bytes)
        status = fetch(ctx, chunk, table, piece_bytes)
        if status != 0:
            return status
    fence()  # what went past the caches is in no order with anything else
    end_chunks(ctx)
    store(ctx + context.CHUNKS * 8, base + num_rounds)
    return wait_all(ctx, _REDUCED, base + num_rounds - 1) if num_rounds > 1 else 0


@inner
def send_to_all(plan, address, num_bytes):  # type: ignore[no-untyped-def]
    """Fill the sending half of the table: the same for everybody."""
    ctx = own(plan, context.CONTEXT)
    table = own(plan, context.TABLE)
    for other in range(own(ctx, context.SIZE)):
        store(table + other * _PAIRS, address)
        store(table + other * _PAIRS + 8, num_bytes)
    return table


@inner
def put_whole(ctx, address, num_bytes):  # type: ignore[no-untyped-def]
    """Put something short into the slot before arriving: whoever has met this rank may read it."""
    chunk = own(ctx, context.CHUNKS)
    copy(slot(ctx, own(ctx, context.RANK), chunk), address, num_bytes)
    store_release(row(ctx, own(ctx, context.RANK)) + _READY, chunk + 1)
    return 0


@inner
def end_whole(ctx):  # type: ignore[no-untyped-def]
    """What was put whole into the slots has been read by this rank."""
    chunk = own(ctx, context.CHUNKS)
    store(ctx + context.CHUNKS * 8, chunk + 1)
    store_release(row(ctx, own(ctx, context.RANK)) + _REDUCED, chunk + 1)
    return 0


@inner
def rounds(num_bytes, piece_bytes):  # type: ignore[no-untyped-def]
    """How many pieces that many bytes make."""
    return (num_bytes + piece_bytes - 1) // piece_bytes


@kernel
def broadcast(plan, seq, signature, address, num_bytes):  # type: ignore[no-untyped-def]
    """The root's bytes to everybody. The root is in the plan."""
    ctx = own(plan, context.CONTEXT)
    rank, size, root = own(ctx, context.RANK), own(ctx, context.SIZE), own(plan, context.ROOT)
    is_short, is_whole = num_bytes <= layout.PAYLOAD_BYTES, num_bytes <= own(ctx, context.WHOLE_BYTES)
    status = begin(ctx, seq)
    if status != 0:
        return status
    if is_short and rank == root:
        copy(entry(ctx, rank, seq) + PAYLOAD, address, num_bytes)
    elif is_whole and rank == root:
        put_whole(ctx, address, num_bytes)
    status = arrive(ctx, seq, signature)
    if status == 0 and is_short:
        if rank != root:
            copy(address, entry(ctx, root, seq) + PAYLOAD, num_bytes)
    elif status == 0 and is_whole:
        if rank != root:
            copy(address, slot(ctx, root, own(ctx, context.CHUNKS)), num_bytes)
        end_whole(ctx)
    elif status == 0:
        table = send_to_all(plan, address, num_bytes if rank == root else 0)
        for other in range(size):
            store(table + other * _PAIRS + 16, address)
            store(table + other * _PAIRS + 24, num_bytes if other == root and rank != root else 0)
        piece = own(ctx, context.SLOT_BYTES)
        choose_way(ctx, rounds(num_bytes, piece), num_bytes <= _SHORT_BROADCAST_BYTES)
        put(ctx, own(ctx, context.CHUNKS), table, piece, False)
        status = go_on(ctx, table, piece, rounds(num_bytes, piece))
    leave(ctx, seq)
    return status


@kernel
def allgather(plan, seq, signature, source, num_bytes, target):  # type: ignore[no-untyped-def]
    """Everybody's bytes to everybody, if all have as many; UNEVEN otherwise, with the lengths in the payloads."""
    ctx = own(plan, context.CONTEXT)
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    payload = entry(ctx, rank, seq) + PAYLOAD
    status = begin(ctx, seq)
    if status != 0:
        return status
    store(payload, num_bytes)
    is_short, is_whole = num_bytes <= layout.PAYLOAD_BYTES - 8, num_bytes <= own(ctx, context.WHOLE_BYTES)
    table, piece = send_to_all(plan, source, num_bytes), own(ctx, context.SLOT_BYTES)
    if is_short:
        copy(payload + 8, source, num_bytes)
    elif is_whole:
        put_whole(ctx, source, num_bytes)
    else:
        choose_way(ctx, rounds(num_bytes, piece), False)
        put(ctx, own(ctx, context.CHUNKS), table, piece, False)
    status = arrive(ctx, seq, signature)
    if status != 0:
        return status
    for other in range(size):
        if load(entry(ctx, other, seq) + PAYLOAD) != num_bytes:
            return context.UNEVEN
    if is_short:
        for other in range(size):
            copy(target + other * num_bytes, entry(ctx, other, seq) + PAYLOAD + 8, num_bytes)
    elif is_whole:
        for other in range(size):
            there = source if other == rank else slot(ctx, other, own(ctx, context.CHUNKS))
            copy(target + other * num_bytes, there, num_bytes)
        end_whole(ctx)
    else:
        for other in range(size):
            store(table + other * _PAIRS + 16, target + other * num_bytes)
            store(table + other * _PAIRS + 24, num_bytes)
        status = go_on(ctx, table, piece, rounds(num_bytes, piece))
    leave(ctx, seq)
    return status


@inner
def rows_before(num_rows, size, rank):  # type: ignore[no-untyped-def]
    """Rows that go to the ranks below: the first ranks take the remainder, one each."""
    return num_rows // size * rank + min(num_rows % size, rank)


@kernel
def reduce_scatter(plan, seq, signature, source, num_rows, row_bytes, target):  # type: ignore[no-untyped-def]
    """Combine everybody's rows of each rank, and give them to that rank."""
    ctx = own(plan, context.CONTEXT)
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    first = rows_before(num_rows, size, rank) * row_bytes
    length = rows_before(num_rows, size, rank + 1) * row_bytes - first
    status = begin(ctx, seq)
    if status != 0:
        return status
    if num_rows * row_bytes <= layout.PAYLOAD_BYTES:
        copy(entry(ctx, rank, seq) + PAYLOAD, source, num_rows * row_bytes)
        status = arrive(ctx, seq, signature)
        if status == 0:
            for other in range(size):
                point_at(ctx, other, entry(ctx, other, seq) + PAYLOAD + first)
            combine(plan, target, length, 0)
        leave(ctx, seq)
        return status
    piece = own(ctx, context.SLOT_BYTES) // size // _LINE_BYTES * _LINE_BYTES
    table, base = own(plan, context.TABLE), own(ctx, context.CHUNKS)
    num_rounds = rounds((num_rows + size - 1) // size * row_bytes, piece)
    choose_way(ctx, num_rounds, False)
    for other in range(size):
        theirs = rows_before(num_rows, size, other) * row_bytes
        store(table + other * _PAIRS, source + theirs)
        store(table + other * _PAIRS + 8, rows_before(num_rows, size, other + 1) * row_bytes - theirs)
    put(ctx, base, table, piece, False)
    status = arrive(ctx, seq, signature)
    for index in range(num_rounds):
        if status != 0:
            return status
        chunk = base + index
        if index + 1 < num_rounds:
            status = wait_all(ctx, _REDUCED, chunk) if index > 0 else 0
            if status != 0:
                return status
            put(ctx, chunk + 1, table, piece, False)
        if index > 0:
            status = wait_all(ctx, _READY, chunk + 1)
            if status != 0:
                return status
        for other in range(size):
            point_at(ctx, other, moving_slot(ctx, other, chunk) + rank * piece)
        point_at(ctx, rank, source + first + index * piece)
        mine, since = max(0, min(piece, length - index * piece)), now()
        combine(plan, target + index * piece, mine, 0)
        note_time(ctx, since)
        note_chunk(ctx, mine * (size - 1))
        store_release(row(ctx, rank) + _REDUCED, chunk + 1)
    end_chunks(ctx)
    store(ctx + context.CHUNKS * 8, base + num_rounds)
    if num_rounds > 1 and status == 0:
        status = wait_all(ctx, _REDUCED, base + num_rounds - 1)
    leave(ctx, seq)
    return status
