"""Reductions through shared memory, one call per kernel.

Everything is combined in rank order by :mod:`torchmpi.kernels.reduction`; each element is computed from the same
operands in the same order on whatever path, so that paths differ in speed only.
"""

from __future__ import annotations

from .. import layout
from . import context
from .meeting import PAYLOAD, arrive, begin, entry, inner, kernel, leave, own, row, wait, wait_all
from .memory import copy, load, now, reduce, store, store_release
from .placing import choose_way, copy_into_slot, end_chunks, note_chunk, note_put, note_time, publish, slot

_READY, _REDUCED = layout.READY * 8, layout.REDUCED * 8
_LINE_BYTES = 64
_BLOCK_BYTES = 16 << 10  # combined, then copied on while it is in the first cache
_MIXED, _ALL_SHARED = 1, 2


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
def combine(plan, out, num_bytes, second):  # type: ignore[no-untyped-def]
    """Combine what the pointers point at into `out`, and into `second` unless that is 0."""
    ctx = own(plan, context.CONTEXT)
    size, item, reducer = own(ctx, context.SIZE), own(plan, context.ITEM_BYTES), own(plan, context.REDUCER)
    pointers = ctx + context.POINTERS * 8
    if second == 0:
        reduce(reducer, out, pointers, size, num_bytes // item)
        return 0
    done = 0
    while done < num_bytes:
        block = min(_BLOCK_BYTES, num_bytes - done)
        reduce(reducer, out + done, pointers, size, block // item)
        copy_into_slot(ctx, second + done, out + done, block)
        for rank in range(size):
            point_at(ctx, rank, own(ctx, context.POINTERS + rank) + block)
        done += block
    return 0


@inner
def copy_in(ctx, chunk, address, num_bytes):  # type: ignore[no-untyped-def]
    """Give the other ranks their parts of a chunk."""
    rank = own(ctx, context.RANK)
    target = slot(ctx, rank, chunk)
    begin, end = chunk_part(ctx, rank, num_bytes), chunk_part(ctx, rank + 1, num_bytes)
    since = now()
    copy_into_slot(ctx, target, address, begin)
    copy_into_slot(ctx, target + end, address + end, num_bytes - end)
    note_put(ctx, chunk, since, begin + num_bytes - end)
    note_time(ctx, since)
    publish(ctx, _READY, chunk + 1)
    return 0


@inner
def combine_own(plan, chunk, address, num_bytes):  # type: ignore[no-untyped-def]
    """Combine this rank's part of a chunk, for itself and for the others to fetch."""
    ctx = own(plan, context.CONTEXT)
    rank, size, root = own(ctx, context.RANK), own(ctx, context.SIZE), own(plan, context.ROOT)
    begin, end = chunk_part(ctx, rank, num_bytes), chunk_part(ctx, rank + 1, num_bytes)
    for other in range(size):
        point_at(ctx, other, slot(ctx, other, chunk) + begin)
    point_at(ctx, rank, address + begin)
    out, since = slot(ctx, rank, chunk) + begin, now()
    if root < 0:
        combine(plan, address + begin, end - begin, out)
    else:
        combine(plan, address + begin if root == rank else out, end - begin, 0)
    note_time(ctx, since)
    publish(ctx, _REDUCED, chunk + 1)
    return 0


@inner
def copy_out(plan, chunk, address, num_bytes):  # type: ignore[no-untyped-def]
    """Fetch the parts that the others have combined."""
    ctx = own(plan, context.CONTEXT)
    rank, size, root = own(ctx, context.RANK), own(ctx, context.SIZE), own(plan, context.ROOT)
    for shift in range(1, size):
        other = rank + shift - size if rank + shift >= size else rank + shift
        status = wait(ctx, row(ctx, other) + _REDUCED, chunk + 1)
        if status != 0:
            return status
        if root < 0 or root == rank:
            begin, end = chunk_part(ctx, other, num_bytes), chunk_part(ctx, other + 1, num_bytes)
            since = now()
            copy(address + begin, slot(ctx, other, chunk) + begin, end - begin)
            note_time(ctx, since)
    return 0


@inner
def shared_segment(ctx, address, num_bytes):  # type: ignore[no-untyped-def]
    """The own shared segment that holds all these bytes, as the address of its words; 0 if none does."""
    segments = own(ctx, context.OWN_SEGMENTS)
    for index in range(load(segments)):
        segment = segments + 8 + index * context.SEGMENT_WORDS * 8
        begins_before = load(segment + context.SEGMENT_BEGIN * 8) <= address
        if begins_before and address + num_bytes <= load(segment + context.SEGMENT_END * 8):
            return segment
    return 0


@inner
def announce_memory(ctx, seq, address, num_bytes):  # type: ignore[no-untyped-def]
    """Say in the payload where this rank's tensor is, if others can get at it; gives whether they can."""
    payload = entry(ctx, own(ctx, context.RANK), seq) + PAYLOAD
    segment = shared_segment(ctx, address, num_bytes)
    if segment == 0:
        store(payload, 0)
        return 0
    store(payload, load(segment + context.SEGMENT_KEY * 8))
    store(payload + 8, load(segment + context.SEGMENT_FILE * 8))
    store(payload + 16, load(segment + context.SEGMENT_END * 8) - load(segment + context.SEGMENT_BEGIN * 8))
    store(payload + 24, address - load(segment + context.SEGMENT_BEGIN * 8))
    return 1


@inner
def mapped(ctx, rank, key):  # type: ignore[no-untyped-def]
    """Where a segment of another rank is mapped in this process; 0 if it is not."""
    pairs = own(ctx, context.MAPPINGS) + rank * context.MAPPINGS_PER_RANK * 16
    for index in range(context.MAPPINGS_PER_RANK):
        if load(pairs + index * 16) == key:
            return load(pairs + index * 16 + 8)
    return 0


@inner
def find_memory(ctx, seq, address):  # type: ignore[no-untyped-def]
    """Note where everybody's tensor is: _ALL_SHARED, _MIXED, 0 if all are private, or UNMAPPED and a rank."""
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    num_shared = 0
    for other in range(size):
        num_shared += load(entry(ctx, other, seq) + PAYLOAD) != 0
    if num_shared < size:
        return _MIXED if num_shared else 0
    for other in range(size):
        payload = entry(ctx, other, seq) + PAYLOAD
        base = mapped(ctx, other, load(payload))
        if other != rank and base == 0:
            return context.UNMAPPED + other
        store(
            ctx + (context.POINTERS + size + other) * 8, address if other == rank else base + load(payload + 24)
        )
    return _ALL_SHARED


@inner
def combine_in_place(plan, address, num_bytes):  # type: ignore[no-untyped-def]
    """Everybody's tensor can be reached: combine this rank's part once, and write it to all who want it."""
    ctx = own(plan, context.CONTEXT)
    rank, size, root = own(ctx, context.RANK), own(ctx, context.SIZE), own(plan, context.ROOT)
    chunk = own(ctx, context.CHUNKS)
    store(ctx + context.CHUNKS * 8, chunk + 1)
    begin, end = part_begin(num_bytes, size, rank), part_begin(num_bytes, size, rank + 1)
    receiver = rank if root < 0 else root
    while begin < end:
        block = min(_BLOCK_BYTES, end - begin)
        for other in range(size):
            point_at(ctx, other, own(ctx, context.POINTERS + size + other) + begin)
        out = own(ctx, context.POINTERS + receiver)
        combine(plan, out, block, 0)
        if root < 0:
            for other in range(size):
                if other != rank:
                    copy(own(ctx, context.POINTERS + other), out, block)
        begin += block
    store_release(row(ctx, rank) + _READY, chunk + 1)
    store_release(row(ctx, rank) + _REDUCED, chunk + 1)
    return wait_all(ctx, _REDUCED, chunk + 1)


@inner
def in_chunks(plan, address, num_bytes, chunk_bytes, is_mixed):  # type: ignore[no-untyped-def]
    """Everything through the slots. The first chunk is there already, unless some ranks hoped to do without."""
    ctx = own(plan, context.CONTEXT)
    base = own(ctx, context.CHUNKS)
    num_chunks = (num_bytes + chunk_bytes - 1) // chunk_bytes
    for index in range(num_chunks):
        chunk, here = base + index, address + index * chunk_bytes
        length = min(chunk_bytes, num_bytes - index * chunk_bytes)
        if index > 0 or is_mixed:
            status = wait_all(ctx, _READY, chunk + 1)
            if status != 0:
                return status
        combine_own(plan, chunk, here, length)
        if index + 1 < num_chunks:
            following = min(chunk_bytes, num_bytes - (index + 1) * chunk_bytes)
            copy_in(ctx, chunk + 1, here + chunk_bytes, following)
        status = copy_out(plan, chunk, here, length)
        if status != 0:
            return status
        note_chunk(ctx, length)
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
        combine(plan, address, num_bytes, 0)
    return status


@inner
def whole(plan, address, num_bytes):  # type: ignore[no-untyped-def]
    """Everybody has put everything into a slot, and combines all of it."""
    ctx = own(plan, context.CONTEXT)
    rank, size, root = own(ctx, context.RANK), own(ctx, context.SIZE), own(plan, context.ROOT)
    chunk = own(ctx, context.CHUNKS)
    store(ctx + context.CHUNKS * 8, chunk + 1)
    if root < 0 or root == rank:
        for other in range(size):
            point_at(ctx, other, slot(ctx, other, chunk))
        point_at(ctx, rank, address)
        combine(plan, address, num_bytes, 0)
    store_release(row(ctx, rank) + _REDUCED, chunk + 1)
    return 0


@kernel
def allreduce(plan, seq, signature, address, numel):  # type: ignore[no-untyped-def]
    """Combine in place, on all ranks or on one."""
    ctx = own(plan, context.CONTEXT)
    num_bytes = numel * own(plan, context.ITEM_BYTES)
    status = begin(ctx, seq)
    if status != 0:
        return status
    if num_bytes <= layout.PAYLOAD_BYTES:
        status = with_entry(plan, seq, signature, address, num_bytes)
        leave(ctx, seq)
        return status
    rank, chunk = own(ctx, context.RANK), own(ctx, context.CHUNKS)
    # Even cuts, so that the last chunk is no remnant.
    num_chunks = (num_bytes + own(ctx, context.SLOT_BYTES) - 1) // own(ctx, context.SLOT_BYTES)
    chunk_bytes = ((num_bytes + num_chunks - 1) // num_chunks + _LINE_BYTES - 1) // _LINE_BYTES * _LINE_BYTES
    store(ctx + context.CHUNK_BYTES * 8, chunk_bytes)
    is_whole = num_bytes <= own(ctx, context.WHOLE_BYTES)
    first = min(chunk_bytes, num_bytes)
    if not is_whole:
        choose_way(ctx, num_chunks, False)
    if is_whole or not announce_memory(ctx, seq, address, num_bytes):
        if is_whole:
            store(entry(ctx, rank, seq) + PAYLOAD, 0)
            copy(slot(ctx, rank, chunk), address, num_bytes)
            store_release(row(ctx, rank) + _READY, chunk + 1)
        else:
            copy_in(ctx, chunk, address, first)
    status = arrive(ctx, seq, signature)
    if status != 0:
        return status
    memory = find_memory(ctx, seq, address)
    if memory == _ALL_SHARED:
        status = combine_in_place(plan, address, num_bytes)
    elif memory >= context.UNMAPPED:
        return memory
    elif memory == 0 and is_whole:
        status = whole(plan, address, num_bytes)
    else:
        if memory == _MIXED and load(entry(ctx, rank, seq) + PAYLOAD) != 0:
            copy_in(ctx, chunk, address, first)
        status = in_chunks(plan, address, num_bytes, chunk_bytes, memory == _MIXED)
    leave(ctx, seq)
    return status
