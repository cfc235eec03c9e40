"""Access to the records and the shared memory by name: fields, status blocks, ring entries, slots, transfers.

All kernels use this vocabulary; everything here is inlined, so that a field costs one load or store.

The module also has the checks of the checked build (``TORCHMPI_KERNEL_CHECKS=1``, part of the name of the compiled
file). A failed check stores its number in the group record, and the guarded copy is omitted; `outcome` returns
VIOLATION at the end of the kernel. Without the variable ENABLE_CHECKS is a constant False, and the compiler
removes the checks.

Memory order: plain `load_field` and `store_field` guarantee none. A counter or sequence number that other ranks poll is
written by `store_field_release` after the data that it announces, and read by `load_field_acquire` before that data.
"""

from __future__ import annotations

from ..memory_layout import (
    BLOCK_BYTES,
    CHUNK_BITS,
    ENTRY_FIELDS,
    PAYLOAD,
    PAYLOAD_BYTES,
    READY,
    REDUCED,
    RING_LENGTH,
    RING_START,
)
from .compilation import inner
from .intrinsics import copy, field_address, load_field, load_field_acquire, store_field, store_field_release
from .kernel_sets import ENABLE_CHECKS
from .records import (
    BLOCKS,
    CHECK_COUNTER,
    CHECK_PAYLOAD,
    CHECK_RANK,
    CHECK_READY,
    CHECK_REDUCED,
    CHECK_SEGMENT,
    CHECK_SLOT,
    CHUNKS,
    GROUP,
    NUM_SLOTS,
    RANK,
    RECEIVE_ADDRESS,
    RECEIVE_BYTES,
    SEGMENT_BYTES,
    SEND_ADDRESS,
    SEND_BYTES,
    SIZE,
    SLOT_BYTES,
    SLOTS,
    TRANSFER_FIELDS,
    VIOLATED_CHECK,
    VIOLATION,
    VIOLATION_LIMIT,
    VIOLATION_VALUE,
)


@inner
def group_of(call):
    return load_field(call, GROUP)


# --- shared memory --------------------------------------------------------------------------------------------


@inner
def block_of(group, rank):
    """Return the address of the status block of a rank."""
    if ENABLE_CHECKS and not 0 <= rank < load_field(group, SIZE):
        fail_check(group, CHECK_RANK, rank, load_field(group, SIZE))
        return load_field(group, BLOCKS)
    return load_field(group, BLOCKS) + rank * BLOCK_BYTES


@inner
def own_block(group):
    return block_of(group, load_field(group, RANK))


@inner
def ring_field(seq):
    """Return the number of the first field of the entry of a call, which is its sequence number."""
    return RING_START + (seq & (RING_LENGTH - 1)) * ENTRY_FIELDS


@inner
def entry_of(group, rank, seq):
    """Return the address of the entry of a call in the ring of a rank."""
    return field_address(block_of(group, rank), ring_field(seq))


@inner
def payload_of(group, rank, seq):
    """Return the address of the payload of that entry."""
    return entry_of(group, rank, seq) + PAYLOAD * 8


@inner
def copy_to_payload(group, seq, offset, source, num_bytes):
    """Write to this rank's payload before it arrives."""
    if ENABLE_CHECKS and not 0 <= num_bytes <= PAYLOAD_BYTES - offset:
        return fail_check(group, CHECK_PAYLOAD, num_bytes, PAYLOAD_BYTES - offset)
    copy(payload_of(group, load_field(group, RANK), seq) + offset, source, num_bytes)
    return 0


@inner
def slot_of(group, rank, chunk):
    """Return the slot of a rank for a chunk of a reduction: two in alternation, which stay in the caches."""
    index = load_field(group, NUM_SLOTS) * rank + (chunk & 1)
    return load_field(group, SLOTS) + index * load_field(group, SLOT_BYTES)


@inner
def transfer_slot_of(group, rank, chunk):
    """Return the slot of a rank for a chunk of a transfer: all slots in turn (see `memory_layout.num_slots`).

    Two ranks exchange their slots after each round: a rank writes the slots that it has just read, which are in its
    cache.
    """
    num_slots = load_field(group, NUM_SLOTS)
    if load_field(group, SIZE) == 2:
        rank ^= (chunk // num_slots) & 1
    index = num_slots * rank + (chunk & (num_slots - 1))
    return load_field(group, SLOTS) + index * load_field(group, SLOT_BYTES)


@inner
def copy_from_slot(group, target, slot, num_bytes):
    """Copy data out of a slot of any rank."""
    if ENABLE_CHECKS and not is_in_slot(group, slot, num_bytes):
        return 0
    copy(target, slot, num_bytes)
    return 0


@inner
def set_counter(group, counter, value):
    """Publish READY or REDUCED of this rank after the announced data."""
    if ENABLE_CHECKS:
        check_counter(group, counter, value)
    store_field_release(own_block(group), counter, value)
    return 0


# --- ranks and transfers --------------------------------------------------------------------------------------


@inner
def peer_at(rank, size, shift):
    """Return ``(rank + shift) % size``: each rank begins with its neighbor, so that not all read from one rank."""
    return rank + shift - size if rank + shift >= size else rank + shift


@inner
def transfer_of(transfers, rank):
    """Return the address of the transfer record of a rank."""
    return transfers + rank * (TRANSFER_FIELDS * 8)


@inner
def set_send(transfers, rank, address, num_bytes):
    store_field(transfer_of(transfers, rank), SEND_ADDRESS, address)
    store_field(transfer_of(transfers, rank), SEND_BYTES, num_bytes)
    return 0


@inner
def set_receive(transfers, rank, address, num_bytes):
    store_field(transfer_of(transfers, rank), RECEIVE_ADDRESS, address)
    store_field(transfer_of(transfers, rank), RECEIVE_BYTES, num_bytes)
    return 0


# --- checked build --------------------------------------------------------------------------------------------


@inner
def fail_check(group, check, value, limit):
    """Store a violation, unless one is stored already."""
    if load_field(group, VIOLATED_CHECK) == 0:
        store_field(group, VIOLATED_CHECK, check)
        store_field(group, VIOLATION_VALUE, value)
        store_field(group, VIOLATION_LIMIT, limit)
    return 0


@inner
def is_in_slot(group, address, num_bytes):
    """Check that a range is within one slot, and all slots within the segment."""
    slot_bytes, begin = load_field(group, SLOT_BYTES), load_field(group, SLOTS)
    end = begin + load_field(group, SIZE) * load_field(group, NUM_SLOTS) * slot_bytes
    segment = load_field(group, BLOCKS)
    if begin < segment + load_field(group, SIZE) * BLOCK_BYTES or end > segment + load_field(group, SEGMENT_BYTES):
        fail_check(group, CHECK_SEGMENT, end - segment, load_field(group, SEGMENT_BYTES))
        return False
    if num_bytes == 0:
        return True
    offset = address - begin
    if num_bytes < 0 or offset < 0 or address >= end or offset % slot_bytes + num_bytes > slot_bytes:
        fail_check(group, CHECK_SLOT, offset + num_bytes, slot_bytes)
        return False
    return True


@inner
def check_counter(group, counter, value):
    """Check that READY or REDUCED ascends, to a chunk of the current call."""
    before, chunks = load_field(own_block(group), counter), load_field(group, CHUNKS)
    if value < before:
        fail_check(group, CHECK_COUNTER, value, before)
    elif value <= chunks or value > chunks + (1 << CHUNK_BITS):
        fail_check(group, CHECK_COUNTER, value, chunks)
    return 0


@inner
def check_peers(group):
    """Check the counters of all ranks at the end of a kernel.

    A rank that is ahead, in the next call or in the second kernel of this call, can have put and finished two chunks;
    before the third chunk that rank waits for this rank.
    """
    chunks = load_field(group, CHUNKS)
    for rank in range(load_field(group, SIZE)):
        block = block_of(group, rank)
        if load_field_acquire(block, READY) > chunks + 2:
            fail_check(group, CHECK_READY, load_field(block, READY), chunks + 2)
        if load_field_acquire(block, REDUCED) > chunks + 2:
            fail_check(group, CHECK_REDUCED, load_field(block, REDUCED), chunks + 2)
    return 0


@inner
def outcome(group, status):
    """Return the status of a kernel that ends: in a checked build VIOLATION if a check has failed."""
    if ENABLE_CHECKS:
        if status == 0:
            check_peers(group)
        if load_field(group, VIOLATED_CHECK) != 0:
            return VIOLATION + load_field(group, RANK)
    return status
