"""The chunk loop of transfers: collectives that move data without reducing (broadcast, gathers, scatter, alltoall).

Each rank has a table of transfer records: for each rank the data to send and the destination of received data. A call
sends either one stream, the same for all ranks (SPACING 0), or one part to each rank (SPACING apart in the slot).

In round `i`, with chunk number `c = CHUNKS + i`, each rank

1. waits until all ranks have read chunk `c - 1` (REDUCED >= c), and copies its chunk `c + 1` into its slot, then
   publishes READY = c + 2. Chunk `CHUNKS` itself is in the slot when the loop begins.
2. for each other rank: waits for READY > c and copies its share of chunk `c` out of the slot of that rank.
3. publishes REDUCED = c + 1.

Chunks `c` and `c + 1` are in different slots, and step 1 waits until all ranks have read the previous chunk in
the slot, so that no slot is overwritten too early (proof: docs/design/shared-memory.md).

Memory order: READY is published after the data in the slot, with a fence if the caches were bypassed, and acquired
before that data is read. REDUCED is published after the reads, and acquired before the slot is written again.
"""

from __future__ import annotations

from ..memory_layout import IN_CHUNKS, READY, REDUCED
from .access import (
    block_of,
    group_of,
    is_in_slot,
    outcome,
    peer_at,
    set_counter,
    set_send,
    transfer_of,
    transfer_slot_of,
)
from .arrival import set_algorithm, wait, wait_all
from .compilation import inner, kernel
from .copying import (
    LONG_BYTES,
    begin_measuring,
    copy_into_slot,
    copy_into_slot_and,
    copy_past,
    end_measuring,
    note_chunk,
    note_put,
    note_time,
    publish,
)
from .intrinsics import copy, fence, field_address, load_field, now, store_field
from .kernel_sets import ENABLE_CHECKS
from .records import (
    CHUNK_BYTES,
    CHUNKS,
    RANK,
    RECEIVE_ADDRESS,
    RECEIVE_BYTES,
    SEND_ADDRESS,
    SEND_BYTES,
    SIZE,
    SLOT_BYTES,
    SPACING,
    TRANSFERS,
)

_LINE_BYTES = 64
_STREAM_CHUNKS = 8  # of a stream, more if a slot is shorter: a chunk is written while the one before is read
_MIN_CHUNK_BYTES = 16 << 10  # times the number of ranks, which synchronize for each chunk
# The slots in use should stay in the second-level caches of their readers and their writer.
ONE_SENDS_BYTES, ALL_SEND_BYTES, _PARTS_BYTES = 384 << 10, 128 << 10, 256 << 10


@inner
def count_rounds(group, num_bytes):
    """Return the number of rounds that move `num_bytes` from one rank to another."""
    return (num_bytes + load_field(group, CHUNK_BYTES) - 1) // load_field(group, CHUNK_BYTES)


@inner
def divide_stream(group, num_bytes, max_bytes):
    """Choose the chunks of a stream for all ranks; return the number of rounds."""
    chunk = max((num_bytes + _STREAM_CHUNKS - 1) // _STREAM_CHUNKS, _MIN_CHUNK_BYTES * load_field(group, SIZE))
    chunk = (chunk + _LINE_BYTES - 1) // _LINE_BYTES * _LINE_BYTES
    store_field(group, CHUNK_BYTES, min(chunk, max_bytes, load_field(group, SLOT_BYTES)))
    store_field(group, SPACING, 0)
    return count_rounds(group, num_bytes)


@inner
def divide_parts(group, num_bytes):
    """Choose the chunks of one part of at most `num_bytes` for each rank; return the number of rounds."""
    chunk = min(load_field(group, SLOT_BYTES), _PARTS_BYTES) // load_field(group, SIZE) // _LINE_BYTES * _LINE_BYTES
    store_field(group, CHUNK_BYTES, chunk)
    store_field(group, SPACING, chunk)
    return count_rounds(group, num_bytes)


@inner
def send_to_all(call, address, num_bytes):
    """Fill the sending half of the transfers: the same for all ranks. Return their address."""
    transfers = load_field(call, TRANSFERS)
    for other in range(load_field(group_of(call), SIZE)):
        set_send(transfers, other, address, num_bytes)
    return transfers


@inner
def deliver(target, source, num_bytes, total_bytes):
    """Copy a chunk of a result; with non-temporal stores if the result is longer than the caches."""
    if total_bytes >= LONG_BYTES:
        copy_past(target, source, num_bytes)
    else:
        copy(target, source, num_bytes)
    return 0


@inner
def keeps_while_sending(group, transfers):
    """Return whether a stream is so long that this rank's result is written together with the slot."""
    own = transfer_of(transfers, load_field(group, RANK))
    is_sent = load_field(group, SIZE) > 1 and load_field(own, SEND_BYTES) == load_field(own, RECEIVE_BYTES)
    return is_sent and load_field(own, RECEIVE_BYTES) >= LONG_BYTES


@inner
def keep_own(group, chunk, transfers):
    """Copy this rank's own chunk to its result while the chunk is in the cache after the copy into the slot."""
    own = transfer_of(transfers, load_field(group, RANK))
    done = (chunk - load_field(group, CHUNKS)) * load_field(group, CHUNK_BYTES)
    total = load_field(own, RECEIVE_BYTES)
    length = min(load_field(group, CHUNK_BYTES), total - done)
    if length > 0:
        deliver(load_field(own, RECEIVE_ADDRESS) + done, load_field(own, SEND_ADDRESS) + done, length, total)
    return 0


@inner
def put(group, chunk, transfers, keeps):
    """Copy the next chunk to send into the slot of this rank, and with `keeps` into its result as well."""
    rank, size = load_field(group, RANK), load_field(group, SIZE)
    chunk_bytes, spacing = load_field(group, CHUNK_BYTES), load_field(group, SPACING)
    done = (chunk - load_field(group, CHUNKS)) * chunk_bytes
    num_put, since = 0, now()
    for other in range(size):
        transfer = transfer_of(transfers, other)
        length = min(chunk_bytes, load_field(transfer, SEND_BYTES) - done)
        if length > 0 and other != rank:
            target = transfer_slot_of(group, rank, chunk) + other * spacing
            if keeps:
                kept = load_field(transfer_of(transfers, rank), RECEIVE_ADDRESS) + done
                copy_into_slot_and(group, target, kept, load_field(transfer, SEND_ADDRESS) + done, length)
            else:
                copy_into_slot(group, target, load_field(transfer, SEND_ADDRESS) + done, length)
            num_put += length
            if spacing == 0:
                break
    note_put(group, chunk, since, num_put)  # including the copy to the result, which adds less than slow cache lines do
    publish(group, READY, chunk + 1)
    return 0


@inner
def put_first_chunk(group, transfers, num_rounds):
    """Copy the first chunk into the slot, before or after the ranks synchronize."""
    begin_measuring(group, num_rounds, False)
    put(group, load_field(group, CHUNKS), transfers, False)
    return 0


@inner
def put_next(group, index, transfers, keeps):
    """Copy the chunk of the next round into its slot: 0, or a status if the slot will not be free.

    The slot is free when all ranks have read the chunk of the previous round; chunks of earlier calls have been read.
    """
    chunk = load_field(group, CHUNKS) + index
    status = wait_all(group, REDUCED, chunk) if index > 0 else 0
    if status == 0:
        put(group, chunk + 1, transfers, keeps)
    return status


@inner
def fetch(group, chunk, transfers):
    """Copy this rank's share of a chunk out of the slots of all other ranks."""
    rank, size = load_field(group, RANK), load_field(group, SIZE)
    chunk_bytes = load_field(group, CHUNK_BYTES)
    done = (chunk - load_field(group, CHUNKS)) * chunk_bytes
    fetched = 0
    for shift in range(1, size):
        other = peer_at(rank, size, shift)
        transfer = transfer_of(transfers, other)
        length = min(chunk_bytes, load_field(transfer, RECEIVE_BYTES) - done)
        if length > 0:
            status = wait(group, field_address(block_of(group, other), READY), chunk + 1)
            if status != 0:
                return status
            source = transfer_slot_of(group, other, chunk) + rank * load_field(group, SPACING)
            since = now()
            if not ENABLE_CHECKS or is_in_slot(group, source, length):
                target, total = load_field(transfer, RECEIVE_ADDRESS), load_field(transfer, RECEIVE_BYTES)
                deliver(target + done, source, length, total)
            note_time(group, chunk, since)
            fetched += length
    note_chunk(group, chunk, fetched)
    set_counter(group, REDUCED, chunk + 1)
    return 0


@inner
def run_rounds(group, transfers, num_rounds):
    """Run the transfers, of which the first chunks are in the slots."""
    base = load_field(group, CHUNKS)
    set_algorithm(group, IN_CHUNKS)
    is_stream = load_field(group, SPACING) == 0
    keeps = is_stream and keeps_while_sending(group, transfers)
    if is_stream and num_rounds > 0:
        keep_own(group, base, transfers)
    for index in range(num_rounds):
        chunk = base + index
        if index + 1 < num_rounds:
            status = put_next(group, index, transfers, keeps)
            if status != 0:
                return status
            if is_stream and not keeps:
                keep_own(group, chunk + 1, transfers)
        status = fetch(group, chunk, transfers)
        if status != 0:
            return status
    fence()  # non-temporal stores to the result are ordered with nothing else
    end_measuring(group)
    store_field(group, CHUNKS, base + num_rounds)
    return wait_all(group, REDUCED, base + num_rounds - 1) if num_rounds > 1 else 0


@kernel
def exchange(call, transfers, is_stream, longest, has_sent):
    """Run the transfers, whose lengths may differ between ranks.

    `longest` is the longest length of any rank. `has_sent`: the call has used the slots before, and other ranks may
    still be reading them.
    """
    group = group_of(call)
    if has_sent:
        status = wait_all(group, REDUCED, load_field(group, CHUNKS))
        if status != 0:
            return status
    if is_stream:
        # First chunks of other lengths were published under this number before the difference was detected.
        store_field(group, CHUNKS, load_field(group, CHUNKS) + 1)
        num_rounds = divide_stream(group, longest, ALL_SEND_BYTES)
    else:
        num_rounds = divide_parts(group, longest)
        own = transfer_of(transfers, load_field(group, RANK))
        length = load_field(own, RECEIVE_BYTES)
        deliver(load_field(own, RECEIVE_ADDRESS), load_field(own, SEND_ADDRESS), length, length)
    begin_measuring(group, num_rounds, False)
    if num_rounds > 0:
        put(group, load_field(group, CHUNKS), transfers, False)
    return outcome(group, run_rounds(group, transfers, num_rounds))
