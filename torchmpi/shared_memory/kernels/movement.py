"""Kernels of the barrier, broadcast, allgather and gather: every receiver gets the same data.

Four routes by length, of which all ranks take the same:

* up to PAYLOAD_BYTES the data travels in the payload of the ring entry;
* up to WHOLE_BYTES in the slot, written before the ranks synchronize: one synchronization either way;
* longer data, if all tensors are shared, is copied from tensor to tensor (`end_reads` waits for all readers);
* otherwise it is read directly from the other processes (kernels.direct_read), or goes through the slots in chunks
  (kernels.chunk_loop).

An allgather assumes that all ranks bring the same length. Lengths are in the payloads; if they differ, the kernel
returns UNEVEN, and Python allocates the result and calls `exchange`.

Memory order: payload and slot are published by the sequence number of the entry (`arrive`). A slot written whole also
sets READY and REDUCED, so that the counters stay equal to CHUNKS on all ranks.
"""

from __future__ import annotations

from ..memory_layout import PAYLOAD_BYTES, READY, REDUCED
from .access import (
    copy_from_slot,
    copy_to_payload,
    group_of,
    is_in_slot,
    payload_of,
    peer_at,
    set_counter,
    set_receive,
    transfer_slot_of,
)
from .arrival import arrive, begin, end_reads, leave
from .chunk_loop import (
    ALL_SEND_BYTES,
    ONE_SENDS_BYTES,
    deliver,
    divide_stream,
    put,
    put_first_chunk,
    run_rounds,
    send_to_all,
)
from .compilation import inner, kernel
from .copying import begin_measuring
from .direct_read import all_show, can_read, note_pace, prefers_reading, read_all, show_memory
from .intrinsics import copy, load, load_field, now, store, store_field
from .kernel_sets import ENABLE_CHECKS
from .lookup import ALL_SHARED, announce_memory, find_memory, shared_tensor_of
from .records import (
    ALLGATHER_PACES,
    CHUNKS,
    GATHER_PACES,
    GATHERS_READ,
    RANK,
    ROOT,
    SIZE,
    UNEVEN,
    UNMAPPED,
    UNREADABLE,
    WHOLE_BYTES,
)
from .reduce_kernels import part_begin

_SHORT_BROADCAST_BYTES = 128 << 10  # up to here broadcasts bypass the caches: that was never slower


@kernel
def barrier(call, seq, signature, message, num_bytes):
    """Synchronize; the message of each rank can be read in the payload of its entry afterwards."""
    group = group_of(call)
    status = begin(group, seq)
    if status == 0:
        copy_to_payload(group, seq, 0, message, num_bytes)
        status = arrive(group, seq, signature)
    return leave(group, seq, status)


@inner
def put_whole(group, address, num_bytes):
    """Copy short data into the slot before arriving."""
    chunk = load_field(group, CHUNKS)
    slot = transfer_slot_of(group, load_field(group, RANK), chunk)
    if not ENABLE_CHECKS or is_in_slot(group, slot, num_bytes):
        copy(slot, address, num_bytes)
    set_counter(group, READY, chunk + 1)
    return 0


@inner
def end_whole(group):
    """Count the chunk that was put whole into the slots, after reading it."""
    chunk = load_field(group, CHUNKS)
    set_counter(group, REDUCED, chunk + 1)
    store_field(group, CHUNKS, chunk + 1)
    return 0


@inner
def broadcast_shared(group, address, num_bytes, root):
    """Broadcast between shared tensors: the root writes the first part of all others, so that all copy equally much."""
    rank, size = load_field(group, RANK), load_field(group, SIZE)
    share = part_begin(num_bytes, size, 1)
    if rank != root:
        deliver(address + share, shared_tensor_of(group, root) + share, num_bytes - share, num_bytes)
    else:
        for other in range(size):
            if other != root:
                deliver(shared_tensor_of(group, other), address, share, num_bytes)
    return end_reads(group)


@inner
def broadcast_chunks(call, address, num_bytes):
    """Broadcast through the slots of the root."""
    group = group_of(call)
    rank, root = load_field(group, RANK), load_field(call, ROOT)
    transfers = send_to_all(call, address, num_bytes if rank == root else 0)
    for other in range(load_field(group, SIZE)):
        set_receive(transfers, other, address, num_bytes if other == root and rank != root else 0)
    num_rounds = divide_stream(group, num_bytes, ONE_SENDS_BYTES)
    begin_measuring(group, num_rounds, num_bytes <= _SHORT_BROADCAST_BYTES)
    put(group, load_field(group, CHUNKS), transfers, False)
    return run_rounds(group, transfers, num_rounds)


@kernel
def broadcast(call, seq, signature, address, num_bytes):
    """Copy the root's bytes to all ranks, in place."""
    group = group_of(call)
    rank, root = load_field(group, RANK), load_field(call, ROOT)
    is_short, is_whole = num_bytes <= PAYLOAD_BYTES, num_bytes <= load_field(group, WHOLE_BYTES)
    status = begin(group, seq)
    if status != 0:
        return status
    if is_short and rank == root:
        copy_to_payload(group, seq, 0, address, num_bytes)
    elif not is_short:
        announce_memory(group, seq, address, num_bytes)
        if is_whole and rank == root:
            put_whole(group, address, num_bytes)
    status = arrive(group, seq, signature)
    if status == 0 and is_short:
        if rank != root:
            copy(address, payload_of(group, root, seq), num_bytes)
    elif status == 0 and is_whole:
        if rank != root:
            copy_from_slot(group, address, transfer_slot_of(group, root, load_field(group, CHUNKS)), num_bytes)
        end_whole(group)
    elif status == 0:
        memory = find_memory(group, seq, address)
        if memory >= UNMAPPED:
            return memory
        if memory == ALL_SHARED:
            status = broadcast_shared(group, address, num_bytes, root)
        else:
            status = broadcast_chunks(call, address, num_bytes)
    return leave(group, seq, status)


@inner
def are_even(group, seq, length):
    """Return whether all ranks have announced the same length, in bytes or rows, in their payloads."""
    for other in range(load_field(group, SIZE)):
        if load(payload_of(group, other, seq)) != length:
            return False
    return True


@inner
def gather_shared(group, first, num_bytes, target):
    """Copy so many bytes, from offset `first`, of every rank's shared tensor."""
    rank, size = load_field(group, RANK), load_field(group, SIZE)
    for shift in range(size):
        other = peer_at(rank, size, shift)
        deliver(target + other * num_bytes, shared_tensor_of(group, other) + first, num_bytes, num_bytes)
    return end_reads(group)


@kernel
def allgather(call, seq, signature, source, num_bytes, target):
    """Concatenate the bytes of all ranks, on all ranks or on the root of the call, if all bring the same length.

    Returns UNEVEN otherwise, with the lengths in the payloads.
    """
    group = group_of(call)
    rank, size, root = load_field(group, RANK), load_field(group, SIZE), load_field(call, ROOT)
    payload = payload_of(group, rank, seq)
    status = begin(group, seq)
    if status != 0:
        return status
    store(payload, num_bytes)
    is_short, is_whole = num_bytes <= PAYLOAD_BYTES - 8, num_bytes <= load_field(group, WHOLE_BYTES)
    num_sent = num_bytes if rank != root else 0
    num_received = num_bytes if root < 0 or rank == root else 0
    transfers, num_rounds = send_to_all(call, source, num_sent), divide_stream(group, num_bytes, ALL_SEND_BYTES)
    only_sends, paces = root >= 0 and rank != root, ALLGATHER_PACES if root < 0 else GATHER_PACES
    # The root of a gather decides. The others always show their data, and write their slots too unless the last long
    # gather was read directly.
    shows = not is_whole and (can_read(group, num_bytes) if only_sends else prefers_reading(group, paces, num_bytes))
    is_shared = not is_short and announce_memory(group, seq, source, num_bytes)
    puts = not is_shared and (load_field(group, GATHERS_READ) == 0 if only_sends else not shows)
    spent = 0
    if is_short:
        copy_to_payload(group, seq, 8, source, num_bytes)
    elif is_whole:
        put_whole(group, source, num_sent)
    else:
        show_memory(group, seq, source if shows else 0)
        since = now()
        if puts:
            put_first_chunk(group, transfers, num_rounds)
        spent = now() - since
    status = arrive(group, seq, signature)
    if status != 0:
        return status
    if not are_even(group, seq, num_bytes):
        return UNEVEN
    if is_short:
        for other in range(size):
            copy(target + other * num_bytes, payload_of(group, other, seq) + 8, num_received)
    elif is_whole:
        for other in range(size):
            if other == rank:
                copy(target + other * num_bytes, source, num_received)
            else:
                slot = transfer_slot_of(group, other, load_field(group, CHUNKS))
                copy_from_slot(group, target + other * num_bytes, slot, num_received)
        end_whole(group)
    else:
        memory = find_memory(group, seq, source)
        if memory >= UNMAPPED:
            return memory
        if memory == ALL_SHARED:
            return leave(group, seq, gather_shared(group, 0, num_received, target))
        since, reads = now(), all_show(group, seq)
        if only_sends:
            store_field(group, GATHERS_READ, reads)
        status = read_all(group, seq, source, 0, num_received, target) if reads else UNREADABLE
        if status == UNREADABLE:
            if reads or not puts:
                put_first_chunk(group, transfers, num_rounds)
            for other in range(size):
                set_receive(transfers, other, target + other * num_bytes, num_received)
            status = run_rounds(group, transfers, num_rounds)
        if not only_sends and status == 0:
            note_pace(group, paces, num_bytes, reads, now() - since + spent)
    return leave(group, seq, status)
