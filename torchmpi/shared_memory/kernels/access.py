"""Access to the shared memory by name: status blocks, ring entries, slots, transfers.

All kernels use this vocabulary; everything here is inlined. A field of a record costs one load or store
(:mod:`.addresses`).

The module also has the checks of the checked build (``TORCHMPI_KERNEL_CHECKS=1``, part of the name of the compiled
file). A failed check stores its number in the group record, and the guarded copy is omitted; `outcome` returns
VIOLATION at the end of the kernel. Without the variable ENABLE_CHECKS is a constant False, and the compiler
removes the checks.

Memory order: plain accesses guarantee none. A counter or sequence number that other ranks poll is an `Atomic` field,
whose name stands for its address: it is written by `store_release` after the data that it announces, and read by
`load_acquire` before that data.
"""

from __future__ import annotations

from ..compiler.compilation import inner
from ..memory_layout import BLOCK_BYTES, CHUNK_BITS, PAYLOAD_BYTES, RING_LENGTH, Block, Entry
from ..typed_records import Words
from .intrinsics import copy, field_address, load, load_acquire, store_release
from .kernel_sets import ENABLE_CHECKS
from .records import (
    CHECK_COUNTER,
    CHECK_PAYLOAD,
    CHECK_RANK,
    CHECK_READY,
    CHECK_REDUCED,
    CHECK_SEGMENT,
    CHECK_SLOT,
    VIOLATION,
    GroupRecord,
    KernelCall,
    Transfer,
)

_LINE_BYTES = 64


@inner
def group_of(call: KernelCall) -> GroupRecord:
    return call.group


# --- shared memory --------------------------------------------------------------------------------------------


@inner
def block_of(group: GroupRecord, rank) -> Block:
    """Return the status block of a rank."""
    if ENABLE_CHECKS and not 0 <= rank < group.size:
        fail_check(group, CHECK_RANK, rank, group.size)
        return group.blocks
    return Block(group.blocks + rank * BLOCK_BYTES)


@inner
def own_block(group: GroupRecord) -> Block:
    return block_of(group, group.rank)


@inner
def ring_field(seq):
    """Return the number of the first field of the entry of a call, which is its sequence number."""
    return Block.ring + (seq & (RING_LENGTH - 1)) * Entry.FIELDS


@inner
def entry_of(group: GroupRecord, rank, seq) -> Entry:
    """Return the entry of a call in the ring of a rank."""
    return block_of(group, rank).ring[seq & (RING_LENGTH - 1)]


@inner
def payload_of(group: GroupRecord, rank, seq) -> Words:
    """Return the payload of that entry."""
    return entry_of(group, rank, seq).payload


@inner
def copy_to_payload(group: GroupRecord, seq, offset, source, num_bytes):
    """Write to this rank's payload before it arrives."""
    if ENABLE_CHECKS and not 0 <= num_bytes <= PAYLOAD_BYTES - offset:
        return fail_check(group, CHECK_PAYLOAD, num_bytes, PAYLOAD_BYTES - offset)
    copy(payload_of(group, group.rank, seq) + offset, source, num_bytes)
    return 0


@inner
def slot_of(group: GroupRecord, rank, chunk):
    """Return the slot of a rank for a chunk of a reduction: two in alternation, which stay in the caches."""
    index = group.num_slots * rank + (chunk & 1)
    return group.slots + index * group.slot_bytes


@inner
def transfer_slot_of(group: GroupRecord, rank, chunk):
    """Return the slot of a rank for a chunk of a transfer: all slots in turn (see `memory_layout.num_slots`).

    Two ranks exchange their slots after each round: a rank writes the slots that it has just read, which are in its
    cache.
    """
    num_slots = group.num_slots
    if group.size == 2:
        rank ^= (chunk // num_slots) & 1
    index = num_slots * rank + (chunk & (num_slots - 1))
    return group.slots + index * group.slot_bytes


@inner
def copy_from_slot(group: GroupRecord, target, slot, num_bytes):
    """Copy data out of a slot of any rank."""
    if ENABLE_CHECKS and not is_in_slot(group, slot, num_bytes):
        return 0
    copy(target, slot, num_bytes)
    return 0


@inner
def set_counter(group: GroupRecord, counter, value):
    """Publish `ready` or `reduced` of this rank after the announced data."""
    if ENABLE_CHECKS:
        check_counter(group, counter, value)
    store_release(field_address(own_block(group), counter), value)
    return 0


# --- ranks and transfers --------------------------------------------------------------------------------------


@inner
def peer_at(rank, size, shift):
    """Return ``(rank + shift) % size``: each rank begins with its neighbor, so that not all read from one rank."""
    return rank + shift - size if rank + shift >= size else rank + shift


@inner
def part_at(parts: Words, rank, otherwise):
    """Return the address of the part of a rank, which may be a tensor of a list."""
    return parts[rank] if parts else otherwise


@inner
def set_send(transfers: Transfer, rank, address, num_bytes):
    transfers[rank].send_address = address
    transfers[rank].send_bytes = num_bytes
    return 0


@inner
def set_receive(transfers: Transfer, rank, address, num_bytes):
    transfers[rank].receive_address = address
    transfers[rank].receive_bytes = num_bytes
    return 0


# --- checked build --------------------------------------------------------------------------------------------


@inner
def fail_check(group: GroupRecord, check, value, limit):
    """Store a violation, unless one is stored already."""
    if group.violated_check == 0:
        group.violated_check = check
        group.violation_value = value
        group.violation_limit = limit
    return 0


@inner
def is_in_slot(group: GroupRecord, address, num_bytes):
    """Check that a range is within one slot, and all slots within the segment."""
    slot_bytes, begin = group.slot_bytes, group.slots
    end = begin + group.size * group.num_slots * slot_bytes
    segment = group.blocks
    if begin < segment + group.size * BLOCK_BYTES or end > segment + group.segment_bytes:
        fail_check(group, CHECK_SEGMENT, end - segment, group.segment_bytes)
        return False
    if num_bytes == 0:
        return True
    offset = address - begin
    if num_bytes < 0 or offset < 0 or address >= end or offset % slot_bytes + num_bytes > slot_bytes:
        fail_check(group, CHECK_SLOT, offset + num_bytes, slot_bytes)
        return False
    return True


@inner
def check_counter(group: GroupRecord, counter, value):
    """Check that `ready` or `reduced` ascends, to a chunk of the current call."""
    before, chunks = load(field_address(own_block(group), counter)), group.chunks
    if value < before:
        fail_check(group, CHECK_COUNTER, value, before)
    elif value <= chunks or value > chunks + (1 << CHUNK_BITS):
        fail_check(group, CHECK_COUNTER, value, chunks)
    return 0


@inner
def check_peers(group: GroupRecord):
    """Check the counters of all ranks at the end of a kernel.

    A rank that is ahead, in the next call or in the second kernel of this call, can have put and finished two chunks;
    before the third chunk that rank waits for this rank.
    """
    chunks = group.chunks
    for rank in range(group.size):
        block = block_of(group, rank)
        if load_acquire(block.ready) > chunks + 2:
            fail_check(group, CHECK_READY, load(block.ready), chunks + 2)
        if load_acquire(block.reduced) > chunks + 2:
            fail_check(group, CHECK_REDUCED, load(block.reduced), chunks + 2)
    return 0


@inner
def outcome(group: GroupRecord, status):
    """Return the status of a kernel that ends: in a checked build VIOLATION if a check has failed."""
    if ENABLE_CHECKS:
        if status == 0:
            check_peers(group)
        if group.violated_check != 0:
            return VIOLATION + group.rank
    return status


@inner
def whole_lines(num_bytes):
    """Return a length in whole cache lines, so that what comes next begins at one."""
    return (num_bytes + _LINE_BYTES - 1) & -_LINE_BYTES
