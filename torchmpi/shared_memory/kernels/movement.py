"""Verbs that send the same to everybody, through shared memory: broadcast, and what gathers.

What is short travels with the announcement, or in the slot before the ranks meet; the rest goes by rounds.
"""

from __future__ import annotations

from .. import memory_layout
from . import context
from .arrival import PAYLOAD, arrive, begin, end_reads, entry, inner, kernel, leave, own, row
from .chunk_loop import (
    ALL_SEND_BYTES,
    ONE_SENDS_BYTES,
    PAIRS,
    cut_stream,
    deliver,
    go_on,
    put,
    put_first_piece,
    send_to_all,
)
from .copying import choose_way, moving_slot
from .direct_read import all_show, may_read, note_pace, read_all, show_memory, would_read
from .intrinsics import copy, load, now, store, store_release
from .lookup import ALL_SHARED, announce_memory, find_memory, found
from .reduce_kernels import part_begin

_READY, _REDUCED = memory_layout.READY * 8, memory_layout.REDUCED * 8
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
    is_short, is_whole = num_bytes <= memory_layout.PAYLOAD_BYTES, num_bytes <= own(ctx, context.WHOLE_BYTES)
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
    is_short, is_whole = num_bytes <= memory_layout.PAYLOAD_BYTES - 8, num_bytes <= own(ctx, context.WHOLE_BYTES)
    num_sent = num_bytes if rank != root else 0
    num_received = num_bytes if root < 0 or rank == root else 0
    table, num_rounds = send_to_all(plan, source, num_sent), cut_stream(ctx, num_bytes, ALL_SEND_BYTES)
    gives, paces = root >= 0 and rank != root, context.ALLGATHER_PACES if root < 0 else context.GATHER_PACES
    # The root of a gather decides; the others show theirs always, and put it as well unless they need not last time.
    shows = not is_whole and (may_read(ctx, num_bytes) if gives else would_read(ctx, paces, num_bytes))
    is_shared = not is_short and announce_memory(ctx, seq, source, num_bytes)
    puts = not is_shared and (own(ctx, context.GATHERS_READ) == 0 if gives else not shows)
    spent = 0
    if is_short:
        copy(payload + 8, source, num_bytes)
    elif is_whole:
        put_whole(ctx, source, num_sent)
    else:
        show_memory(ctx, seq, source if shows else 0)
        since = now()
        if puts:
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
        if gives:
            store(ctx + context.GATHERS_READ * 8, reads)
        status = read_all(ctx, seq, source, 0, num_received, target) if reads else context.UNREAD
        if status == context.UNREAD:
            if reads or not puts:
                put_first_piece(ctx, table, num_rounds)
            for other in range(size):
                store(table + other * PAIRS + 16, target + other * num_bytes)
                store(table + other * PAIRS + 24, num_received)
            status = go_on(ctx, table, num_rounds)
        if not gives and status == 0:
            note_pace(ctx, paces, num_bytes, reads, now() - since + spent)
    leave(ctx, seq)
    return status
