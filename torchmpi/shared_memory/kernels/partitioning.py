"""Verbs that divide rows among the ranks, through shared memory: each gets its own of everybody's, or their sum."""

from __future__ import annotations

from .. import memory_layout
from . import context
from .arrival import PAYLOAD, arrive, begin, end_reads, entry, inner, kernel, leave, own, row, wait_all
from .chunk_loop import PAIRS, cut_parts, deliver, go_on, put_first_piece, put_next, send_to_all
from .copying import choose_way, end_chunks, moving_slot, note_chunk, note_time
from .direct_read import all_show, end_reading, note_pace, read_all, read_from, show_memory, would_read
from .intrinsics import copy, load, now, store, store_release
from .lookup import ALL_SHARED, announce_memory, find_memory, found
from .movement import have_as_many, take_from_all
from .reduce_kernels import combine, point_at

_READY, _REDUCED = memory_layout.READY * 8, memory_layout.REDUCED * 8


@inner
def rows_before(num_rows, size, rank):  # type: ignore[no-untyped-def]
    """Rows that go to the ranks below: the first ranks take the remainder, one each."""
    return num_rows // size * rank + min(num_rows % size, rank)


@inner
def cut_rows(ctx, num_rows, row_bytes):  # type: ignore[no-untyped-def]
    """Cut rows, of which each rank has its own; gives the number of rounds."""
    return cut_parts(ctx, rows_before(num_rows, own(ctx, context.SIZE), 1) * row_bytes)


@inner
def send_rows(plan, source, num_rows, row_bytes):  # type: ignore[no-untyped-def]
    """Fill the sending half of the table: to each rank its rows."""
    size, table = own(own(plan, context.CONTEXT), context.SIZE), own(plan, context.TABLE)
    for other in range(size):
        theirs = rows_before(num_rows, size, other) * row_bytes
        store(table + other * PAIRS, source + theirs)
        store(table + other * PAIRS + 8, rows_before(num_rows, size, other + 1) * row_bytes - theirs)
    return table


@inner
def combine_rows(plan, source, length, target, table, num_rounds, are_first_there):  # type: ignore[no-untyped-def]
    """Combine this rank's rows, of which its own begin at `source`, piece by piece from the slots.

    `are_first_there`: all have put their first pieces before they arrived.
    """
    ctx = own(plan, context.CONTEXT)
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    base, piece = own(ctx, context.CHUNKS), own(ctx, context.CHUNK_BYTES)
    for index in range(num_rounds):
        chunk = base + index
        if index + 1 < num_rounds:
            status = put_next(ctx, index, table, False)
            if status != 0:
                return status
        if index > 0 or not are_first_there:
            status = wait_all(ctx, _READY, chunk + 1)
            if status != 0:
                return status
        for other in range(size):
            point_at(ctx, other, moving_slot(ctx, other, chunk) + rank * piece)
        point_at(ctx, rank, source + index * piece)
        mine, since = max(0, min(piece, length - index * piece)), now()
        combine(plan, target + index * piece, mine)
        note_time(ctx, chunk, since)
        note_chunk(ctx, chunk, mine * (size - 1))
        store_release(row(ctx, rank) + _REDUCED, chunk + 1)
    end_chunks(ctx)
    store(ctx + context.CHUNKS * 8, base + num_rounds)
    return wait_all(ctx, _REDUCED, base + num_rounds - 1) if num_rounds > 1 else 0


@inner
def combine_rows_in_place(plan, first, length, target):  # type: ignore[no-untyped-def]
    """Combine this rank's rows, which begin at `first` in the shared tensors of all."""
    ctx = own(plan, context.CONTEXT)
    for other in range(own(ctx, context.SIZE)):
        point_at(ctx, other, found(ctx, other) + first)
    combine(plan, target, length)
    return end_reads(ctx)


@kernel
def reduce_scatter(plan, seq, signature, source, num_rows, row_bytes, target):  # type: ignore[no-untyped-def]
    """Combine everybody's rows of each rank, and give them to that rank."""
    ctx = own(plan, context.CONTEXT)
    rank, size, num_bytes = own(ctx, context.RANK), own(ctx, context.SIZE), num_rows * row_bytes
    first = rows_before(num_rows, size, rank) * row_bytes
    length = rows_before(num_rows, size, rank + 1) * row_bytes - first
    status = begin(ctx, seq)
    if status != 0:
        return status
    if num_bytes <= memory_layout.PAYLOAD_BYTES:
        copy(entry(ctx, rank, seq) + PAYLOAD, source, num_bytes)
        status = arrive(ctx, seq, signature)
        if status == 0:
            for other in range(size):
                point_at(ctx, other, entry(ctx, other, seq) + PAYLOAD + first)
            combine(plan, target, length)
        leave(ctx, seq)
        return status
    table, num_rounds = send_rows(plan, source, num_rows, row_bytes), cut_rows(ctx, num_rows, row_bytes)
    is_shared = announce_memory(ctx, seq, source, num_bytes)
    if not is_shared:
        put_first_piece(ctx, table, num_rounds)
    status = arrive(ctx, seq, signature)
    memory = find_memory(ctx, seq, source) if status == 0 else 0
    if status != 0 or memory >= context.UNMAPPED:
        return max(status, memory)
    if memory == ALL_SHARED:
        status = combine_rows_in_place(plan, first, length, target)
    else:
        if is_shared:
            put_first_piece(ctx, table, num_rounds)
        status = combine_rows(plan, source + first, length, target, table, num_rounds, memory == 0)
    leave(ctx, seq)
    return status


@kernel
def alltoall(plan, seq, signature, source, num_rows, row_bytes, target):  # type: ignore[no-untyped-def]
    """Rows to those whom they are for, if all ranks have as many; UNEVEN otherwise, with the number in the payload."""
    ctx = own(plan, context.CONTEXT)
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    payload = entry(ctx, rank, seq) + PAYLOAD
    status = begin(ctx, seq)
    if status != 0:
        return status
    store(payload, num_rows)
    first = rows_before(num_rows, size, rank) * row_bytes
    length = rows_before(num_rows, size, rank + 1) * row_bytes - first
    num_rounds = cut_rows(ctx, num_rows, row_bytes)
    is_short = num_rows * row_bytes <= memory_layout.PAYLOAD_BYTES - 8
    is_shared = not is_short and announce_memory(ctx, seq, source, num_rows * row_bytes)
    shows, spent = not is_short and would_read(ctx, context.ALLTOALL_PACES, length), 0
    if is_short:
        copy(payload + 8, source, num_rows * row_bytes)
    else:
        show_memory(ctx, seq, source if shows else 0)
        if not shows and not is_shared:
            since = now()
            put_first_piece(ctx, send_rows(plan, source, num_rows, row_bytes), num_rounds)
            spent = now() - since
    status = arrive(ctx, seq, signature)
    if status != 0:
        return status
    if not have_as_many(ctx, seq, num_rows):
        return context.UNEVEN
    if is_short:
        for other in range(size):
            copy(target + other * length, entry(ctx, other, seq) + PAYLOAD + 8 + first, length)
    else:
        memory = find_memory(ctx, seq, source)
        if memory >= context.UNMAPPED:
            return memory
        if memory == ALL_SHARED:
            status = take_from_all(ctx, first, length, target)
            leave(ctx, seq)
            return status
        since, reads = now(), all_show(ctx, seq)
        status = read_all(ctx, seq, source, first, length, target) if reads else context.UNREAD
        if status == context.UNREAD:
            table = send_rows(plan, source, num_rows, row_bytes)
            if shows or is_shared:
                put_first_piece(ctx, table, num_rounds)
            for other in range(size):
                store(table + other * PAIRS + 16, target + other * length)
                store(table + other * PAIRS + 24, length)
            deliver(target + rank * length, source + first, length, length)
            status = go_on(ctx, table, num_rounds)
        if status == 0:
            note_pace(ctx, context.ALLTOALL_PACES, length, reads, now() - since + spent)
    leave(ctx, seq)
    return status


@kernel
def offer(plan, seq, signature, message, num_bytes, source, num_rows, row_bytes):  # type: ignore[no-untyped-def]
    """A barrier to which the root, which is in the plan, brings a message about its rows, and the first of them.

    All of them if they fit into the payload behind the message; or it says there where they are, for all to read.
    """
    ctx = own(plan, context.CONTEXT)
    status = begin(ctx, seq)
    if status != 0:
        return status
    payload = entry(ctx, own(ctx, context.RANK), seq) + PAYLOAD
    copy(payload, message, num_bytes)
    is_root = own(ctx, context.RANK) == own(plan, context.ROOT)
    if is_root and num_bytes + num_rows * row_bytes <= memory_layout.PAYLOAD_BYTES:
        copy(payload + num_bytes, source, num_rows * row_bytes)
    elif is_root:
        num_rounds, since = cut_rows(ctx, num_rows, row_bytes), now()
        has_room = num_bytes + 8 <= memory_layout.PAYLOAD_BYTES
        shows = has_room and would_read(ctx, context.SCATTER_PACES, num_rows // own(ctx, context.SIZE) * row_bytes)
        if has_room:
            store(payload + num_bytes, source if shows else 0)
        if not shows:
            put_first_piece(ctx, send_rows(plan, source, num_rows, row_bytes), num_rounds)
        store(ctx + context.SPENT_BEFORE * 8, now() - since)
    status = arrive(ctx, seq, signature)
    leave(ctx, seq)
    return status


@inner
def message_bytes_of(message):  # type: ignore[no-untyped-def]
    """Length of what is said of a tensor: its dtype, number of dimensions, and shape."""
    return (2 + load(message + 8)) * 8


@kernel
def take(plan, seq, num_rows, row_bytes, source, target):  # type: ignore[no-untyped-def]
    """After an offer: take this rank's rows of the root's."""
    ctx = own(plan, context.CONTEXT)
    rank, size, root = own(ctx, context.RANK), own(ctx, context.SIZE), own(plan, context.ROOT)
    first = rows_before(num_rows, size, rank) * row_bytes
    length = rows_before(num_rows, size, rank + 1) * row_bytes - first
    offered = entry(ctx, root, seq) + PAYLOAD
    message_bytes = message_bytes_of(offered)
    if message_bytes + num_rows * row_bytes <= memory_layout.PAYLOAD_BYTES:
        copy(target, offered + message_bytes + first, length)
        return 0
    table, num_rounds, since = own(plan, context.TABLE), cut_rows(ctx, num_rows, row_bytes), now()
    shown = load(offered + message_bytes) if message_bytes + 8 <= memory_layout.PAYLOAD_BYTES else 0
    if rank == root:
        deliver(target, source + first, length, length)
    status = context.UNREAD
    if shown != 0:
        status = end_reading(ctx, rank == root or read_from(ctx, root, shown + first, length, target))
    if status == context.UNREAD:
        if rank != root:
            send_to_all(plan, 0, 0)
            choose_way(ctx, num_rounds, False)
        elif shown != 0:
            put_first_piece(ctx, send_rows(plan, source, num_rows, row_bytes), num_rounds)
        for other in range(size):
            store(table + other * PAIRS + 16, target)
            store(table + other * PAIRS + 24, length if other == root else 0)
        status = go_on(ctx, table, num_rounds)
    if rank == root and status == 0:
        spent = now() - since + own(ctx, context.SPENT_BEFORE)
        note_pace(ctx, context.SCATTER_PACES, num_rows // size * row_bytes, shown != 0, spent)
    return status


@inner
def is_expected(ctx, seq, root, message):  # type: ignore[no-untyped-def]
    """Whether the root offers rows of this dtype and shape, and as many to this rank as the message says."""
    offered = entry(ctx, root, seq) + PAYLOAD
    for index in range(message_bytes_of(message) // 8):
        if index != 2 and load(offered + index * 8) != load(message + index * 8):
            return False
    size, rank, num_rows = own(ctx, context.SIZE), own(ctx, context.RANK), load(offered + 16)
    return rows_before(num_rows, size, rank + 1) - rows_before(num_rows, size, rank) == load(message + 16)


@kernel
def scatter(plan, seq, signature, message, num_bytes, source, num_rows, row_bytes, target):  # type: ignore[no-untyped-def]
    """An offer, and taking it. Others than the root say what they expect: UNEVEN if that is not what is offered."""
    ctx = own(plan, context.CONTEXT)
    root = own(plan, context.ROOT)
    if own(ctx, context.RANK) == root:
        status = offer(plan, seq, signature, message, num_bytes, source, num_rows, row_bytes)
    else:
        status = offer(plan, seq, signature, message, 0, 0, 0, 0)
        if status == 0 and not is_expected(ctx, seq, root, message):
            status = context.UNEVEN
        num_rows = load(entry(ctx, root, seq) + PAYLOAD + 16)
    return status if status != 0 else take(plan, seq, num_rows, row_bytes, source, target)
