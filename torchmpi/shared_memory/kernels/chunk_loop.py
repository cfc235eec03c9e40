"""The chunk loop of transfers: collectives that move data without reducing (broadcast, gathers, scatter, alltoall).

Each rank has a table of transfer records: for each rank the data to send and the destination of received data. A call
sends either one stream, the same for all ranks (`spacing` 0), or one part to each rank (`spacing` apart in the slot).

In round `i`, with chunk number `c = chunks + i`, each rank

1. waits until all ranks have read chunk `c - 1` (`reduced` >= c), and copies its chunk `c + 1` into its slot, then
   publishes `ready` = c + 2. Chunk `chunks` itself is in the slot when the loop begins.
2. for each other rank: waits for `ready` > c and copies its share of chunk `c` out of the slot of that rank.
3. publishes `reduced` = c + 1.

Chunks `c` and `c + 1` are in different slots, and step 1 waits until all ranks have read the previous chunk in
the slot, so that no slot is overwritten too early (proof: docs/design/shared-memory.md).

Memory order: `ready` is published after the data in the slot, with a fence if the caches were bypassed, and acquired
before that data is read. `reduced` is published after the reads, and acquired before the slot is written again.
"""

from __future__ import annotations

from ..compiler.compilation import inner, kernel
from ..memory_layout import IN_CHUNKS, Block
from .access import (
    block_of,
    group_of,
    is_in_slot,
    outcome,
    peer_at,
    set_counter,
    set_send,
    transfer_slot_of,
)
from .arrival import set_algorithm, wait, wait_all
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
from .intrinsics import copy, fence, now
from .kernel_sets import ENABLE_CHECKS
from .records import GroupRecord, KernelCall, Transfer

_LINE_BYTES = 64
_STREAM_CHUNKS = 8  # of a stream, more if a slot is shorter: a chunk is written while the one before is read
_MIN_CHUNK_BYTES = 16 << 10  # times the number of ranks, which synchronize for each chunk
# The slots in use should stay in the second-level caches of their readers and their writer.
ONE_SENDS_BYTES, ALL_SEND_BYTES, _PARTS_BYTES = 384 << 10, 128 << 10, 256 << 10


@inner
def count_rounds(group: GroupRecord, num_bytes):
    """Return the number of rounds that move `num_bytes` from one rank to another."""
    return (num_bytes + group.chunk_bytes - 1) // group.chunk_bytes


@inner
def divide_stream(group: GroupRecord, num_bytes, max_bytes):
    """Choose the chunks of a stream for all ranks; return the number of rounds."""
    chunk = max((num_bytes + _STREAM_CHUNKS - 1) // _STREAM_CHUNKS, _MIN_CHUNK_BYTES * group.size)
    chunk = (chunk + _LINE_BYTES - 1) // _LINE_BYTES * _LINE_BYTES
    group.chunk_bytes = min(min(chunk, max_bytes), group.slot_bytes)
    group.spacing = 0
    return count_rounds(group, num_bytes)


@inner
def divide_parts(group: GroupRecord, num_bytes):
    """Choose the chunks of one part of at most `num_bytes` for each rank; return the number of rounds."""
    chunk = min(group.slot_bytes, _PARTS_BYTES) // group.size // _LINE_BYTES * _LINE_BYTES
    group.chunk_bytes = chunk
    group.spacing = chunk
    return count_rounds(group, num_bytes)


@inner
def send_to_all(call: KernelCall, address, num_bytes) -> Transfer:
    """Fill the sending half of the transfers, which are returned: the same for all ranks."""
    transfers = call.transfers
    for other in range(group_of(call).size):
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
def keeps_while_sending(group: GroupRecord, transfers: Transfer):
    """Return whether a stream is so long that this rank's result is written together with the slot."""
    own = transfers[group.rank]
    is_sent = group.size > 1 and own.send_bytes == own.receive_bytes
    return is_sent and own.receive_bytes >= LONG_BYTES


@inner
def keep_own(group: GroupRecord, chunk, transfers: Transfer):
    """Copy this rank's own chunk to its result while the chunk is in the cache after the copy into the slot."""
    own = transfers[group.rank]
    done = (chunk - group.chunks) * group.chunk_bytes
    total = own.receive_bytes
    length = min(group.chunk_bytes, total - done)
    if length > 0:
        deliver(own.receive_address + done, own.send_address + done, length, total)
    return 0


@inner
def put(group: GroupRecord, chunk, transfers: Transfer, keeps):
    """Copy the next chunk to send into the slot of this rank, and with `keeps` into its result as well."""
    rank, size = group.rank, group.size
    chunk_bytes, spacing = group.chunk_bytes, group.spacing
    done = (chunk - group.chunks) * chunk_bytes
    num_put, since = 0, now()
    for other in range(size):
        transfer = transfers[other]
        length = min(chunk_bytes, transfer.send_bytes - done)
        if length > 0 and other != rank:
            target = transfer_slot_of(group, rank, chunk) + other * spacing
            if keeps:
                kept = transfers[rank].receive_address + done
                copy_into_slot_and(group, target, kept, transfer.send_address + done, length)
            else:
                copy_into_slot(group, target, transfer.send_address + done, length)
            num_put += length
            if spacing == 0:
                break
    note_put(group, chunk, since, num_put)  # including the copy to the result, which adds less than slow cache lines do
    publish(group, Block.ready, chunk + 1)
    return 0


@inner
def put_first_chunk(group: GroupRecord, transfers: Transfer, num_rounds):
    """Copy the first chunk into the slot, before or after the ranks synchronize."""
    begin_measuring(group, num_rounds, False)
    put(group, group.chunks, transfers, False)
    return 0


@inner
def put_next(group: GroupRecord, index, transfers: Transfer, keeps):
    """Copy the chunk of the next round into its slot: 0, or a status if the slot will not be free.

    The slot is free when all ranks have read the chunk of the previous round; chunks of earlier calls have been read.
    """
    chunk = group.chunks + index
    status = wait_all(group, Block.reduced, chunk) if index > 0 else 0
    if status == 0:
        put(group, chunk + 1, transfers, keeps)
    return status


@inner
def fetch(group: GroupRecord, chunk, transfers: Transfer):
    """Copy this rank's share of a chunk out of the slots of all other ranks."""
    rank, size = group.rank, group.size
    chunk_bytes = group.chunk_bytes
    done = (chunk - group.chunks) * chunk_bytes
    fetched = 0
    for shift in range(1, size):
        other = peer_at(rank, size, shift)
        transfer = transfers[other]
        length = min(chunk_bytes, transfer.receive_bytes - done)
        if length > 0:
            status = wait(group, block_of(group, other).ready, chunk + 1)
            if status != 0:
                return status
            source = transfer_slot_of(group, other, chunk) + rank * group.spacing
            since = now()
            if not ENABLE_CHECKS or is_in_slot(group, source, length):
                target, total = transfer.receive_address, transfer.receive_bytes
                deliver(target + done, source, length, total)
            note_time(group, chunk, since)
            fetched += length
    note_chunk(group, chunk, fetched)
    set_counter(group, Block.reduced, chunk + 1)
    return 0


@inner
def run_rounds(group: GroupRecord, transfers: Transfer, num_rounds):
    """Run the transfers, of which the first chunks are in the slots."""
    base = group.chunks
    set_algorithm(group, IN_CHUNKS)
    is_stream = group.spacing == 0
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
    group.chunks = base + num_rounds
    return wait_all(group, Block.reduced, base + num_rounds - 1) if num_rounds > 1 else 0


@kernel
def exchange(call: KernelCall, transfers: Transfer, is_stream, longest, has_sent):
    """Run the transfers, whose lengths may differ between ranks.

    `longest` is the longest length of any rank. `has_sent`: the call has used the slots before, and other ranks may
    still be reading them.
    """
    group = group_of(call)
    if has_sent:
        status = wait_all(group, Block.reduced, group.chunks)
        if status != 0:
            return status
    if is_stream:
        # First chunks of other lengths were published under this number before the difference was detected.
        group.chunks += 1
        num_rounds = divide_stream(group, longest, ALL_SEND_BYTES)
    else:
        num_rounds = divide_parts(group, longest)
        own = transfers[group.rank]
        length = own.receive_bytes
        deliver(own.receive_address, own.send_address, length, length)
    begin_measuring(group, num_rounds, False)
    if num_rounds > 0:
        put(group, group.chunks, transfers, False)
    return outcome(group, run_rounds(group, transfers, num_rounds))
