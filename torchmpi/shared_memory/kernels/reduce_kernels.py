"""Reductions through shared memory, one call per kernel.

Everything is combined in rank order by :mod:`torchmpi.shared_memory.kernels.reduction`; each element is computed from
the same
operands in the same order on whatever path, so that paths differ in speed only.
"""

from __future__ import annotations

from .. import memory_layout
from . import context
from .arrival import PAYLOAD, arrive, begin, end_reads, entry, have_all, inner, kernel, leave, own, row, wait_all
from .copying import choose_way, copy_into_slot, end_chunks, note_chunk, note_put, note_time, publish, slot
from .intrinsics import copy, load, now, reduce, store, store_release
from .lookup import ALL_SHARED, announce_memory, find_memory, found

_READY, _REDUCED, _KEPT = memory_layout.READY * 8, memory_layout.REDUCED * 8, memory_layout.KEPT * 8
_LINE_BYTES = 64
_NUM_UNDER_WAY = 2  # chunks, each in a slot of its own
_BLOCK_BYTES = 16 << 10  # combined, then copied on while it is in the first cache
_PIECE_BYTES = context.PIECE_FIELDS * 8
_FRAGMENT_BYTES = 4 << 10  # of shorter pieces on average, the way from one to the next is part of the pace


@inner
def part_begin(num_bytes, size, rank):  # type: ignore[no-untyped-def]
    """Where the part of a rank begins, in whole lines; that of rank `size` is the end."""
    lines = (num_bytes + _LINE_BYTES - 1) // _LINE_BYTES
    return min(lines * rank // size * _LINE_BYTES, num_bytes)


@inner
def chunk_part(ctx, rank, num_bytes):  # type: ignore[no-untyped-def]
    """The same within a chunk: the last one, which is shorter, is cut in the same places.

    Its slot may still be read where the chunk before last had this rank's part: nothing else may be written there.
    """
    return min(part_begin(own(ctx, context.CHUNK_BYTES), own(ctx, context.SIZE), rank), num_bytes)


@inner
def point_at(ctx, rank, address):  # type: ignore[no-untyped-def]
    """Note where the operand of a rank is."""
    store(ctx + (context.POINTERS + rank) * 8, address)
    return 0


@inner
def combine(plan, out, num_bytes):  # type: ignore[no-untyped-def]
    """Combine what the pointers point at into `out`."""
    ctx = own(plan, context.CONTEXT)
    store(ctx + context.OUT * 8, out)
    pointers, numel = ctx + context.POINTERS * 8, num_bytes // own(plan, context.ITEM_BYTES)
    reduce(own(plan, context.REDUCER), ctx + context.OUT * 8, 1, pointers, own(ctx, context.SIZE), numel)
    return 0


@inner
def combine_for_all(plan, num_bytes):  # type: ignore[no-untyped-def]
    """Combine what the pointers point at, and put it into each of these places.

    A core that has read a line of another core's, and writes to it at once, has it to itself from then on: the line
    comes over once, and goes back once, when its owner fetches the result.
    """
    ctx = own(plan, context.CONTEXT)
    pointers, size = ctx + context.POINTERS * 8, own(ctx, context.SIZE)
    reduce(own(plan, context.REDUCER), pointers, size, pointers, size, num_bytes // own(plan, context.ITEM_BYTES))
    return 0


@inner
def combine_past(plan, out, also, num_bytes):  # type: ignore[no-untyped-def]
    """Combine into `out`, and past the caches into another place, while it is in the first cache."""
    ctx = own(plan, context.CONTEXT)
    done = 0
    while done < num_bytes:
        block = min(_BLOCK_BYTES, num_bytes - done)
        combine(plan, out + done, block)
        copy_into_slot(ctx, also + done, out + done, block)
        for rank in range(own(ctx, context.SIZE)):
            point_at(ctx, rank, own(ctx, context.POINTERS + rank) + block)
        done += block
    return 0


@inner
def piece_at(ctx, place):  # type: ignore[no-untyped-def]
    """The last piece that begins at this place of the stream or before it."""
    pieces = own(ctx, context.PIECES)
    low, high = 0, own(ctx, context.NUM_PIECES) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if load(pieces + middle * _PIECE_BYTES) <= place:
            low = middle
        else:
            high = middle - 1
    return low


@inner
def overlap(ctx, index, begin, end):  # type: ignore[no-untyped-def]
    """What a piece has of a stretch of the stream: where that begins, its address, and its length, 0 in a gap."""
    piece = own(ctx, context.PIECES) + index * _PIECE_BYTES
    place = load(piece)
    first = max(place, begin)
    length = min(place + load(piece + 16), end) - first
    return first, load(piece + 8) + first - place, max(length, 0)


@inner
def has_more(ctx, index, end):  # type: ignore[no-untyped-def]
    """Whether there is such a piece, and it begins before the end of a stretch."""
    is_there = index < own(ctx, context.NUM_PIECES)
    return is_there and load(own(ctx, context.PIECES) + index * _PIECE_BYTES) < end


@inner
def put_stretch(ctx, target, begin, end):  # type: ignore[no-untyped-def]
    """Copy a stretch of the stream into a slot."""
    index = piece_at(ctx, begin)
    while begin < end and has_more(ctx, index, end):
        first, address, length = overlap(ctx, index, begin, end)
        copy_into_slot(ctx, target + first - begin, address, length)
        index += 1
    return 0


@inner
def combine_stretch(plan, chunk, base, begin, end, publishes):  # type: ignore[no-untyped-def]
    """Combine a stretch of a chunk that begins at `base`; the others get it as well if this rank `publishes` it."""
    ctx = own(plan, context.CONTEXT)
    rank, size, root = own(ctx, context.RANK), own(ctx, context.SIZE), own(plan, context.ROOT)
    index = piece_at(ctx, base + begin)
    while begin < end and has_more(ctx, index, base + end):
        first, address, length = overlap(ctx, index, base + begin, base + end)
        for other in range(size):
            point_at(ctx, other, slot(ctx, other, chunk) + first - base)
        point_at(ctx, rank, address)
        if root >= 0:
            combine(plan, own(ctx, context.POINTERS + root), length)
        elif not publishes:
            combine(plan, address, length)
        elif own(ctx, context.IS_PAST) != 0:
            combine_past(plan, address, slot(ctx, rank, chunk) + first - base, length)
        else:
            combine_for_all(plan, length)
        index += 1
    return 0


@inner
def kept_word(ctx, rank, chunk):  # type: ignore[no-untyped-def]
    """Where a rank says whether it has kept its part of a chunk in its own slot."""
    return row(ctx, rank) + _KEPT + (chunk & 1) * 8


@inner
def copy_in(ctx, chunk, base, num_bytes):  # type: ignore[no-untyped-def]
    """Give the other ranks their parts of a chunk."""
    rank = own(ctx, context.RANK)
    target = slot(ctx, rank, chunk)
    begin, end = chunk_part(ctx, rank, num_bytes), chunk_part(ctx, rank + 1, num_bytes)
    since = now()
    put_stretch(ctx, target, base, base + begin)
    put_stretch(ctx, target + end, base + end, base + num_bytes)
    note_put(ctx, chunk, since, begin + num_bytes - end)
    note_time(ctx, chunk, since)
    publish(ctx, _READY, chunk + 1)
    return 0


@inner
def combine_own(plan, chunk, base, num_bytes):  # type: ignore[no-untyped-def]
    """Combine this rank's part of a chunk, and put it where the others find it: in their slots, or in its own."""
    ctx = own(plan, context.CONTEXT)
    rank = own(ctx, context.RANK)
    begin, end = chunk_part(ctx, rank, num_bytes), chunk_part(ctx, rank + 1, num_bytes)
    since = now()
    combine_stretch(plan, chunk, base, begin, end, True)
    note_time(ctx, chunk, since)
    is_kept = own(plan, context.ROOT) < 0 and own(ctx, context.IS_PAST) != 0
    store(kept_word(ctx, rank, chunk), is_kept)
    publish(ctx, _REDUCED, chunk + 1)
    return 0


@inner
def copy_out(plan, chunk, base, num_bytes):  # type: ignore[no-untyped-def]
    """Fetch the parts that the others have combined."""
    ctx = own(plan, context.CONTEXT)
    rank, size, root = own(ctx, context.RANK), own(ctx, context.SIZE), own(plan, context.ROOT)
    if root >= 0 and root != rank:
        return 0
    for shift in range(1, size):
        other = rank + shift - size if rank + shift >= size else rank + shift
        begin, end = chunk_part(ctx, other, num_bytes), chunk_part(ctx, other + 1, num_bytes)
        source, since = slot(ctx, other if load(kept_word(ctx, other, chunk)) else rank, chunk), now()
        index = piece_at(ctx, base + begin)
        while begin < end and has_more(ctx, index, base + end):
            first, address, length = overlap(ctx, index, base + begin, base + end)
            copy(address, source + first - base, length)
            index += 1
        note_time(ctx, chunk, since)
    return 0


@inner
def combine_in_place(plan, address, num_bytes):  # type: ignore[no-untyped-def]
    """Everybody's tensor can be reached: combine this rank's part once, and write it to all who want it."""
    ctx = own(plan, context.CONTEXT)
    rank, size, root = own(ctx, context.RANK), own(ctx, context.SIZE), own(plan, context.ROOT)
    begin, end = part_begin(num_bytes, size, rank), part_begin(num_bytes, size, rank + 1)
    for other in range(size):
        point_at(ctx, other, found(ctx, other) + begin)
    if root < 0:
        combine_for_all(plan, end - begin)
    else:
        combine(plan, own(ctx, context.POINTERS + root), end - begin)
    return end_reads(ctx)


@inner
def in_chunks(plan, num_bytes, num_put):  # type: ignore[no-untyped-def]
    """Everything through the slots, of which one chunk may be there already.

    Whatever can be done is done, what is furthest first: ranks that share a core go on as far as they can before they
    give way.
    """
    ctx = own(plan, context.CONTEXT)
    base, chunk_bytes = own(ctx, context.CHUNKS), own(ctx, context.CHUNK_BYTES)
    num_chunks = (num_bytes + chunk_bytes - 1) // chunk_bytes
    num_combined, num_out = 0, 0
    while num_out < num_chunks:
        # When all have combined the last chunk, all have fetched those before it: the next call may begin to put.
        is_next = num_combined < num_put and (num_combined + 1 < num_chunks or num_out == num_combined)
        if num_combined > num_out and have_all(ctx, _REDUCED, base + num_out + 1):
            length = min(chunk_bytes, num_bytes - num_out * chunk_bytes)
            copy_out(plan, base + num_out, num_out * chunk_bytes, length)
            note_chunk(ctx, base + num_out, length)
            num_out += 1
        elif is_next and have_all(ctx, _READY, base + num_combined + 1):
            here = num_combined * chunk_bytes
            combine_own(plan, base + num_combined, here, min(chunk_bytes, num_bytes - here))
            num_combined += 1
        elif num_put < min(num_chunks, num_out + _NUM_UNDER_WAY):
            here = num_put * chunk_bytes
            copy_in(ctx, base + num_put, here, min(chunk_bytes, num_bytes - here))
            num_put += 1
        else:
            counter = _REDUCED if num_combined > num_out else _READY
            status = wait_all(ctx, counter, base + num_out + 1)
            if status != 0:
                return status
    end_chunks(ctx)
    store(ctx + context.CHUNKS * 8, base + num_chunks)
    return 0


@inner
def with_entry(plan, seq, signature, address, num_bytes):  # type: ignore[no-untyped-def]
    """So short that it travels with the announcement."""
    ctx = own(plan, context.CONTEXT)
    rank, size, root = own(ctx, context.RANK), own(ctx, context.SIZE), own(plan, context.ROOT)
    copy(entry(ctx, rank, seq) + PAYLOAD, address, num_bytes)
    status = arrive(ctx, seq, signature)
    if status == 0 and (root < 0 or root == rank):
        for other in range(size):
            point_at(ctx, other, entry(ctx, other, seq) + PAYLOAD)
        combine(plan, address, num_bytes)
    return status


@inner
def whole(plan, num_bytes):  # type: ignore[no-untyped-def]
    """Everybody has put everything into a slot, and combines all of it."""
    ctx = own(plan, context.CONTEXT)
    rank, root = own(ctx, context.RANK), own(plan, context.ROOT)
    chunk = own(ctx, context.CHUNKS)
    store(ctx + context.CHUNKS * 8, chunk + 1)
    if root < 0 or root == rank:
        combine_stretch(plan, chunk, 0, 0, num_bytes, False)
    store_release(row(ctx, rank) + _REDUCED, chunk + 1)
    return 0


@inner
def cut(ctx, num_bytes):  # type: ignore[no-untyped-def]
    """Decide on the chunks of a call; gives whether it is so short that there are none."""
    # Even cuts, so that the last chunk is no remnant.
    most = min(own(ctx, context.SLOT_BYTES), own(ctx, context.MOST_CHUNK_BYTES))
    num_chunks = (num_bytes + most - 1) // most
    chunk_bytes = ((num_bytes + num_chunks - 1) // num_chunks + _LINE_BYTES - 1) // _LINE_BYTES * _LINE_BYTES
    store(ctx + context.CHUNK_BYTES * 8, chunk_bytes)
    if num_bytes > own(ctx, context.WHOLE_BYTES):
        choose_way(ctx, num_chunks, False)
        return False
    store(ctx + context.IS_PAST * 8, 0)
    store(ctx + context.CALL_CHUNKS * 8, 1)
    return True


@inner
def put_first(ctx, num_bytes, is_whole):  # type: ignore[no-untyped-def]
    """Before arriving: put everything into the slot, or the first chunk."""
    if is_whole:
        rank, chunk = own(ctx, context.RANK), own(ctx, context.CHUNKS)
        put_stretch(ctx, slot(ctx, rank, chunk), 0, num_bytes)
        store_release(row(ctx, rank) + _READY, chunk + 1)
    else:
        copy_in(ctx, own(ctx, context.CHUNKS), 0, min(own(ctx, context.CHUNK_BYTES), num_bytes))
    return 0


@kernel
def allreduce(plan, seq, signature, address, numel):  # type: ignore[no-untyped-def]
    """Combine in place, on all ranks or on one."""
    ctx = own(plan, context.CONTEXT)
    num_bytes = numel * own(plan, context.ITEM_BYTES)
    status = begin(ctx, seq)
    if status != 0:
        return status
    if num_bytes <= memory_layout.PAYLOAD_BYTES:
        status = with_entry(plan, seq, signature, address, num_bytes)
        leave(ctx, seq)
        return status
    only = ctx + context.ONLY_PIECE * 8
    store(only, 0)
    store(only + 8, address)
    store(only + 16, num_bytes)
    store(ctx + context.PIECES * 8, only)
    store(ctx + context.NUM_PIECES * 8, 1)
    is_whole = cut(ctx, num_bytes)
    is_shared = announce_memory(ctx, seq, address, num_bytes)
    if not is_shared:
        put_first(ctx, num_bytes, is_whole)
    status = arrive(ctx, seq, signature)
    if status != 0:
        return status
    memory = find_memory(ctx, seq, address)
    if memory == ALL_SHARED:
        status = combine_in_place(plan, address, num_bytes)
    elif memory >= context.UNMAPPED:
        return memory
    elif memory == 0 and is_whole:
        status = whole(plan, num_bytes)
    else:
        status = in_chunks(plan, num_bytes, 0 if is_shared else 1)
    leave(ctx, seq)
    return status


@kernel
def allreduce_many(plan, seq, signature, pieces, num_pieces, num_bytes):  # type: ignore[no-untyped-def]
    """The same for a stream of pieces: for each where it begins in the stream, on a cache line, address, and length."""
    ctx = own(plan, context.CONTEXT)
    status = begin(ctx, seq)
    if status != 0:
        return status
    store(ctx + context.PIECES * 8, pieces)
    store(ctx + context.NUM_PIECES * 8, num_pieces)
    is_whole = cut(ctx, num_bytes)
    store(ctx + context.FRAGMENTED * 8, num_bytes < num_pieces * _FRAGMENT_BYTES)
    put_first(ctx, num_bytes, is_whole)
    status = arrive(ctx, seq, signature)
    if status != 0:
        return status
    status = whole(plan, num_bytes) if is_whole else in_chunks(plan, num_bytes, 1)
    leave(ctx, seq)
    return status
