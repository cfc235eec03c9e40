"""Verbs that move and do not combine, and the sum of which each rank gets its rows, through shared memory.

What is short travels with the announcement, or in the slot before the ranks meet; the rest goes by rounds.
"""

from __future__ import annotations

from .. import layout
from . import context
from .finding import ALL_SHARED, announce_memory, find_memory, found
from .meeting import PAYLOAD, arrive, begin, end_reads, entry, inner, kernel, leave, own, row, wait_all
from .memory import copy, load, now, store, store_release
from .placing import choose_way, end_chunks, moving_slot, note_chunk, note_time
from .reading import all_show, note_pace, read_all, show_memory, would_read
from .reducing import combine, part_begin, point_at
from .rounds import ALL_SEND_BYTES, ONE_SENDS_BYTES, PAIRS, cut_parts, cut_stream, deliver, go_on, put

_READY, _REDUCED = layout.READY * 8, layout.REDUCED * 8
_SHORT_BROADCAST_BYTES = 128 << 10  # such a one goes past the caches in any case: that was never slower


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
def send_to_all(plan, address, num_bytes):  # type: ignore[no-untyped-def]
    """Fill the sending half of the table: the same for everybody."""
    ctx = own(plan, context.CONTEXT)
    table = own(plan, context.TABLE)
    for other in range(own(ctx, context.SIZE)):
        store(table + other * PAIRS, address)
        store(table + other * PAIRS + 8, num_bytes)
    return table


@inner
def put_whole(ctx, address, num_bytes):  # type: ignore[no-untyped-def]
    """Put something short into the slot before arriving: whoever has met this rank may read it."""
    chunk = own(ctx, context.CHUNKS)
    copy(moving_slot(ctx, own(ctx, context.RANK), chunk), address, num_bytes)
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
def put_first_piece(ctx, table, num_rounds):  # type: ignore[no-untyped-def]
    """Put the first piece of what this rank sends into its slot, before it arrives or after."""
    choose_way(ctx, num_rounds, False)
    put(ctx, own(ctx, context.CHUNKS), table, False)
    return 0


@inner
def broadcast_in_place(ctx, address, num_bytes, root):  # type: ignore[no-untyped-def]
    """From shared tensor to shared tensor: the root has time as well, and writes as much as everybody else."""
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    share = part_begin(num_bytes, size, 1)
    if rank != root:
        deliver(address + share, found(ctx, root) + share, num_bytes - share, num_bytes)
    else:
        for other in range(size):
            if other != root:
                deliver(found(ctx, other), address, share, num_bytes)
    return end_reads(ctx)


@inner
def send_from_root(plan, address, num_bytes):  # type: ignore[no-untyped-def]
    """What the root has, piece by piece through its slots."""
    ctx = own(plan, context.CONTEXT)
    rank, root = own(ctx, context.RANK), own(plan, context.ROOT)
    table = send_to_all(plan, address, num_bytes if rank == root else 0)
    for other in range(own(ctx, context.SIZE)):
        store(table + other * PAIRS + 16, address)
        store(table + other * PAIRS + 24, num_bytes if other == root and rank != root else 0)
    num_rounds = cut_stream(ctx, num_bytes, ONE_SENDS_BYTES)
    choose_way(ctx, num_rounds, num_bytes <= _SHORT_BROADCAST_BYTES)
    put(ctx, own(ctx, context.CHUNKS), table, False)
    return go_on(ctx, table, num_rounds)


@kernel
def broadcast(plan, seq, signature, address, num_bytes):  # type: ignore[no-untyped-def]
    """The root's bytes to everybody. The root is in the plan."""
    ctx = own(plan, context.CONTEXT)
    rank, root = own(ctx, context.RANK), own(plan, context.ROOT)
    is_short, is_whole = num_bytes <= layout.PAYLOAD_BYTES, num_bytes <= own(ctx, context.WHOLE_BYTES)
    status = begin(ctx, seq)
    if status != 0:
        return status
    if is_short and rank == root:
        copy(entry(ctx, rank, seq) + PAYLOAD, address, num_bytes)
    elif not is_short:
        announce_memory(ctx, seq, address, num_bytes)
        if is_whole and rank == root:
            put_whole(ctx, address, num_bytes)
    status = arrive(ctx, seq, signature)
    if status == 0 and is_short:
        if rank != root:
            copy(address, entry(ctx, root, seq) + PAYLOAD, num_bytes)
    elif status == 0 and is_whole:
        if rank != root:
            copy(address, moving_slot(ctx, root, own(ctx, context.CHUNKS)), num_bytes)
        end_whole(ctx)
    elif status == 0:
        memory = find_memory(ctx, seq, address)
        if memory >= context.UNMAPPED:
            return memory
        if memory == ALL_SHARED:
            status = broadcast_in_place(ctx, address, num_bytes, root)
        else:
            status = send_from_root(plan, address, num_bytes)
    leave(ctx, seq)
    return status


@inner
def have_as_many(ctx, seq, number):  # type: ignore[no-untyped-def]
    """Whether all ranks have announced the same number, of bytes or rows."""
    for other in range(own(ctx, context.SIZE)):
        if load(entry(ctx, other, seq) + PAYLOAD) != number:
            return False
    return True


@inner
def take_from_all(ctx, first, num_bytes, target):  # type: ignore[no-untyped-def]
    """What everybody has for this rank in shared tensors, that of this rank as well: so much, from `first` on."""
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    for shift in range(size):
        other = rank + shift - size if rank + shift >= size else rank + shift
        deliver(target + other * num_bytes, found(ctx, other) + first, num_bytes, num_bytes)
    return end_reads(ctx)


@kernel
def allgather(plan, seq, signature, source, num_bytes, target):  # type: ignore[no-untyped-def]
    """Everybody's bytes to everybody, or to the root of the plan, if all have as many.

    UNEVEN otherwise, with the lengths in the payloads.
    """
    ctx = own(plan, context.CONTEXT)
    rank, size, root = own(ctx, context.RANK), own(ctx, context.SIZE), own(plan, context.ROOT)
    payload = entry(ctx, rank, seq) + PAYLOAD
    status = begin(ctx, seq)
    if status != 0:
        return status
    store(payload, num_bytes)
    is_short, is_whole = num_bytes <= layout.PAYLOAD_BYTES - 8, num_bytes <= own(ctx, context.WHOLE_BYTES)
    num_sent = num_bytes if rank != root else 0
    num_received = num_bytes if root < 0 or rank == root else 0
    table, num_rounds = send_to_all(plan, source, num_sent), cut_stream(ctx, num_bytes, ALL_SEND_BYTES)
    shows, spent = root < 0 and not is_whole and would_read(ctx, num_bytes), 0
    is_shared = not is_short and announce_memory(ctx, seq, source, num_bytes)
    if is_short:
        copy(payload + 8, source, num_bytes)
    elif is_whole:
        put_whole(ctx, source, num_sent)
    else:
        show_memory(ctx, seq, source if shows else 0)
        if not shows and not is_shared:
            since = now()
            put_first_piece(ctx, table, num_rounds)
            spent = now() - since
    status = arrive(ctx, seq, signature)
    if status != 0:
        return status
    if not have_as_many(ctx, seq, num_bytes):
        return context.UNEVEN
    if is_short:
        for other in range(size):
            copy(target + other * num_bytes, entry(ctx, other, seq) + PAYLOAD + 8, num_received)
    elif is_whole:
        for other in range(size):
            there = source if other == rank else moving_slot(ctx, other, own(ctx, context.CHUNKS))
            copy(target + other * num_bytes, there, num_received)
        end_whole(ctx)
    else:
        memory = find_memory(ctx, seq, source)
        if memory >= context.UNMAPPED:
            return memory
        if memory == ALL_SHARED:
            status = take_from_all(ctx, 0, num_received, target)
            leave(ctx, seq)
            return status
        since, reads = now(), all_show(ctx, seq)
        status = read_all(ctx, seq, source, num_bytes, target) if reads else context.UNREAD
        if status == context.UNREAD:
            if shows or is_shared:
                put_first_piece(ctx, table, num_rounds)
            for other in range(size):
                store(table + other * PAIRS + 16, target + other * num_bytes)
                store(table + other * PAIRS + 24, num_received)
            status = go_on(ctx, table, num_rounds)
        if root < 0 and status == 0:
            note_pace(ctx, num_bytes, reads, now() - since + spent)
    leave(ctx, seq)
    return status


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
            combine(plan, target, length)
        leave(ctx, seq)
        return status
    table, base = send_rows(plan, source, num_rows, row_bytes), own(ctx, context.CHUNKS)
    num_rounds, piece = cut_rows(ctx, num_rows, row_bytes), own(ctx, context.CHUNK_BYTES)
    is_shared = announce_memory(ctx, seq, source, num_rows * row_bytes)
    if not is_shared:
        put_first_piece(ctx, table, num_rounds)
    status = arrive(ctx, seq, signature)
    if status != 0:
        return status
    memory = find_memory(ctx, seq, source)
    if memory >= context.UNMAPPED:
        return memory
    if memory == ALL_SHARED:
        for other in range(size):
            point_at(ctx, other, found(ctx, other) + first)
        combine(plan, target, length)
        status = end_reads(ctx)
        leave(ctx, seq)
        return status
    if is_shared:
        put_first_piece(ctx, table, num_rounds)
    for index in range(num_rounds):
        if status != 0:
            return status
        chunk = base + index
        if index + 1 < num_rounds:
            status = wait_all(ctx, _REDUCED, chunk) if index > 0 else 0
            if status != 0:
                return status
            put(ctx, chunk + 1, table, False)
        if index > 0:
            status = wait_all(ctx, _READY, chunk + 1)
            if status != 0:
                return status
        for other in range(size):
            point_at(ctx, other, moving_slot(ctx, other, chunk) + rank * piece)
        point_at(ctx, rank, source + first + index * piece)
        mine, since = max(0, min(piece, length - index * piece)), now()
        combine(plan, target + index * piece, mine)
        note_time(ctx, chunk, since)
        note_chunk(ctx, chunk, mine * (size - 1))
        store_release(row(ctx, rank) + _REDUCED, chunk + 1)
    end_chunks(ctx)
    store(ctx + context.CHUNKS * 8, base + num_rounds)
    if num_rounds > 1 and status == 0:
        status = wait_all(ctx, _REDUCED, base + num_rounds - 1)
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
    is_short = num_rows * row_bytes <= layout.PAYLOAD_BYTES - 8
    is_shared = not is_short and announce_memory(ctx, seq, source, num_rows * row_bytes)
    if is_short:
        copy(payload + 8, source, num_rows * row_bytes)
    elif not is_shared:
        put_first_piece(ctx, send_rows(plan, source, num_rows, row_bytes), num_rounds)
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
        else:
            table = send_rows(plan, source, num_rows, row_bytes)
            if is_shared:
                put_first_piece(ctx, table, num_rounds)
            for other in range(size):
                store(table + other * PAIRS + 16, target + other * length)
                store(table + other * PAIRS + 24, length)
            deliver(target + rank * length, source + first, length, length)
            status = go_on(ctx, table, num_rounds)
    leave(ctx, seq)
    return status


@kernel
def offer(plan, seq, signature, message, num_bytes, source, num_rows, row_bytes):  # type: ignore[no-untyped-def]
    """A barrier to which the root, which is in the plan, brings a message about its rows, and the first of them."""
    ctx = own(plan, context.CONTEXT)
    status = begin(ctx, seq)
    if status != 0:
        return status
    copy(entry(ctx, own(ctx, context.RANK), seq) + PAYLOAD, message, num_bytes)
    if own(ctx, context.RANK) == own(plan, context.ROOT):
        num_rounds = cut_rows(ctx, num_rows, row_bytes)
        choose_way(ctx, num_rounds, False)
        if num_rounds > 0:
            put(ctx, own(ctx, context.CHUNKS), send_rows(plan, source, num_rows, row_bytes), False)
    status = arrive(ctx, seq, signature)
    leave(ctx, seq)
    return status


@kernel
def take(plan, num_rows, row_bytes, source, target):  # type: ignore[no-untyped-def]
    """After an offer: take this rank's rows of the root's."""
    ctx = own(plan, context.CONTEXT)
    rank, size, root = own(ctx, context.RANK), own(ctx, context.SIZE), own(plan, context.ROOT)
    first = rows_before(num_rows, size, rank) * row_bytes
    length = rows_before(num_rows, size, rank + 1) * row_bytes - first
    table, num_rounds = own(plan, context.TABLE), cut_rows(ctx, num_rows, row_bytes)
    if rank != root:
        send_to_all(plan, 0, 0)
        choose_way(ctx, num_rounds, False)
    else:
        deliver(target, source + first, length, length)
    for other in range(size):
        store(table + other * PAIRS + 16, target)
        store(table + other * PAIRS + 24, length if other == root else 0)
    return go_on(ctx, table, num_rounds)
