"""Reading the tensors of other ranks: in shared segments, or from the memory of their processes.

Shared segments (`mpi.empty_shared`):

1. Before `arrive`, a rank whose tensor is in one of its own segments announces the tensor in the payload of the call:
   key, file and length of the segment, and the offset of the tensor (`announce_memory`).
2. After all have arrived, and if all have announced one, each rank looks up where these segments are mapped in its own
   process (`find_memory`). If a segment is not mapped, the kernel returns UNMAPPED, Python maps the segment, and the
   kernel runs again.

Memory order: the payload is published by the sequence number of the entry. Python may write the table of own segments
in another thread at the same time: SEGMENT_END is written last and cleared first, and therefore read twice.

Direct reads (Linux: process_vm_readv), one copy instead of two, used by allgather, alltoall, gather and
scatter.

1. A rank that prefers direct reads stores the address of its data in its payload before it arrives, others store 0
   (`show_memory`). The preference follows from the paces that the rank has measured for this length
   (`prefers_reading`). Both routes are tried repeatedly: the system call looks up every page, and the faster route
   depends on machine and length.
2. If all ranks have stored an address (`all_show`), each rank reads its data from all others (`read_all`).
3. `end_reading` publishes REDUCED and waits for all, because the tensors are being read until then. A rank that could
   not read also publishes UNREAD, and all ranks repeat the call through the slots.

Memory order: the address is published by the sequence number of the entry, UNREAD by REDUCED.
"""

from __future__ import annotations

from ..memory_layout import BY_DIRECT_READS, MEMORY, UNREAD
from .access import block_of, fail_check, own_block, payload_of, peer_at
from .arrival import end_reads, set_algorithm
from .chunk_loop import deliver
from .compilation import inner
from .copying import phase_of_call
from .intrinsics import field_address, load, load_field, load_field_acquire, read_memory, store, store_field
from .kernel_sets import ENABLE_CHECKS
from .records import (
    CHECK_SHARED_TENSOR,
    CHUNKS,
    MAPPINGS,
    MAPPINGS_PER_RANK,
    OWN_SEGMENTS,
    POINTERS,
    PROCESSES,
    RANK,
    SEGMENT_BEGIN,
    SEGMENT_END,
    SEGMENT_FIELDS,
    SEGMENT_FILE,
    SEGMENT_KEY,
    SIZE,
    UNMAPPED,
    UNREADABLE,
    WHOLE_BYTES,
)

SOME_SHARED, ALL_SHARED = 1, 2
_KEY, _FILE, _SEGMENT_LENGTH, _OFFSET = range(4)
"""Fields of the announcement in the payload."""


@inner
def segment_of(group, address, num_bytes):
    """Return the record of the own segment that contains all these bytes; 0 if there is none."""
    segments = load_field(group, OWN_SEGMENTS)
    for index in range(load(segments)):
        segment = segments + 8 + index * SEGMENT_FIELDS * 8
        end = load_field_acquire(segment, SEGMENT_END)
        is_there = load_field_acquire(segment, SEGMENT_BEGIN) <= address and address + num_bytes <= end
        # Another thread may have put another segment into this record between the two loads.
        if is_there and load_field_acquire(segment, SEGMENT_END) == end:
            return segment
    return 0


@inner
def announcement_of(group, rank, seq):
    """Return the address of a rank's announcement of its shared tensor."""
    return payload_of(group, rank, seq) + MEMORY * 8


@inner
def announce_memory(group, seq, address, num_bytes):
    """Announce this rank's tensor if it is shared, and return whether it is.

    Tensors up to WHOLE_BYTES go through the slots: reading shared tensors would take a second synchronization.
    """
    announcement = announcement_of(group, load_field(group, RANK), seq)
    segment = segment_of(group, address, num_bytes) if num_bytes > load_field(group, WHOLE_BYTES) else 0
    if segment == 0:
        store_field(announcement, _KEY, 0)
        return False
    begin = load_field(segment, SEGMENT_BEGIN)
    store_field(announcement, _KEY, load_field(segment, SEGMENT_KEY))
    store_field(announcement, _FILE, load_field(segment, SEGMENT_FILE))
    store_field(announcement, _SEGMENT_LENGTH, load_field(segment, SEGMENT_END) - begin)
    store_field(announcement, _OFFSET, address - begin)
    return True


@inner
def mapped(group, rank, key):
    """Return the address in this process of another rank's segment; 0 if the segment is not mapped."""
    pairs = load_field(group, MAPPINGS) + rank * MAPPINGS_PER_RANK * 16
    for index in range(MAPPINGS_PER_RANK):
        if load_field(pairs, index * 2) == key:
            return load_field(pairs, index * 2 + 1)
    return 0


@inner
def find_of(group, seq, rank):
    """Store the address of another rank's shared tensor; return 0, or UNMAPPED and the rank."""
    announcement = announcement_of(group, rank, seq)
    base = mapped(group, rank, load_field(announcement, _KEY))
    if base == 0:
        return UNMAPPED + rank
    offset = load_field(announcement, _OFFSET)
    if ENABLE_CHECKS and not 0 <= offset < load_field(announcement, _SEGMENT_LENGTH):
        fail_check(group, CHECK_SHARED_TENSOR, offset, load_field(announcement, _SEGMENT_LENGTH))
    store_field(group, POINTERS + load_field(group, SIZE) + rank, base + offset)
    return 0


@inner
def shared_tensor_of(group, rank):
    """Return the address of the shared tensor of a rank, after `find_memory`."""
    return load_field(group, POINTERS + load_field(group, SIZE) + rank)


@inner
def find_memory(group, seq, address):
    """Store the addresses of all ranks' tensors: ALL_SHARED, SOME_SHARED, 0 if none is, or UNMAPPED and a rank."""
    rank, size = load_field(group, RANK), load_field(group, SIZE)
    num_shared = 0
    for other in range(size):
        num_shared += load_field(announcement_of(group, other, seq), _KEY) != 0
    if num_shared < size:
        return SOME_SHARED if num_shared else 0
    store_field(group, POINTERS + size + rank, address)
    for other in range(size):
        status = find_of(group, seq, other) if other != rank else 0
        if status != 0:
            return status
    return ALL_SHARED


_MIN_BYTES, _MAX_BYTES = 32 << 10, 16 << 20
_SHOWN_ADDRESS = 1  # field of the payload
_FIRST_CALLS = 16  # the first calls of a length alternate between both routes
_EVERY = 128  # later, one of so many calls takes each route regardless of the measurements
_SLOTS, _DIRECTLY, _CALLS = 0, 1, 2
_CLASS_FIELDS = 3


@inner
def measurement_of(group, paces, num_bytes, which):
    """Return the address of a measurement for a length: pace through the slots, of direct reads, or number of calls.

    `paces` is the first field of the collective's measurements; a class of lengths ends at a power of two.
    """
    length_class, larger = 0, num_bytes // (2 * _MIN_BYTES)
    while larger > 0:
        length_class += 1
        larger //= 2
    return field_address(group, paces + _CLASS_FIELDS * length_class + which)


@inner
def note_pace(group, paces, num_bytes, reads, nanoseconds):
    """Record the duration of a call. A slower call, which may have been disturbed, is weighted by one eighth."""
    if num_bytes < _MIN_BYTES or num_bytes >= _MAX_BYTES:
        return 0
    calls = measurement_of(group, paces, num_bytes, _CALLS)
    store(calls, load(calls) + 1)
    known = measurement_of(group, paces, num_bytes, _DIRECTLY if reads else _SLOTS)
    pace = nanoseconds * 1024 // num_bytes + 1
    before = load(known)
    store(known, pace if before == 0 or pace < before else before + (pace - before) // 8)
    return 0


@inner
def can_read(group, num_bytes):
    """Return whether this rank may read other processes, and direct reads of this length can be faster."""
    return load_field(group, PROCESSES) != 0 and num_bytes >= _MIN_BYTES and num_bytes < _MAX_BYTES


@inner
def prefers_reading(group, paces, num_bytes):
    """Return whether this rank prefers to read `num_bytes` of each other rank directly."""
    if not can_read(group, num_bytes):
        return False
    directly = load(measurement_of(group, paces, num_bytes, _DIRECTLY))
    slots = load(measurement_of(group, paces, num_bytes, _SLOTS))
    phase = phase_of_call(group, _EVERY)
    if directly == 0 or slots == 0 or load(measurement_of(group, paces, num_bytes, _CALLS)) < _FIRST_CALLS:
        return phase % 2 == 1
    # The time of direct reads includes the wait for all ranks; that of the slots excludes the wait for the last chunk.
    return phase == 1 or (phase != 0 and directly * 16 <= slots * 17)


@inner
def show_memory(group, seq, address):
    """Store in the payload the address of this rank's data for direct reads; 0 for no direct reads."""
    store_field(payload_of(group, load_field(group, RANK), seq), _SHOWN_ADDRESS, address)
    return 0


@inner
def all_show(group, seq):
    """Return whether all ranks have stored an address; otherwise no rank reads."""
    for rank in range(load_field(group, SIZE)):
        if load_field(payload_of(group, rank, seq), _SHOWN_ADDRESS) == 0:
            return False
    return True


@inner
def read_from(group, rank, source, num_bytes, target):
    """Read from an address of another process; return whether the system allowed it."""
    if load_field(group, PROCESSES) == 0:
        return False
    process, done = load_field(load_field(group, PROCESSES), rank), 0
    while done < num_bytes:
        length = read_memory(process, target + done, source + done, num_bytes - done)
        if length <= 0:
            return False
        done += length
    return True


@inner
def end_reading(group, has_read):
    """Wait until all ranks have read: 0, UNREADABLE if one could not, or the status of the wait."""
    chunk = load_field(group, CHUNKS)
    store_field(own_block(group), UNREAD, 0 if has_read else chunk + 1)
    status = end_reads(group)
    if status != 0:
        return status
    if not has_read:
        store_field(group, PROCESSES, 0)  # reads would fail again; without this rank's address no rank reads
    for other in range(load_field(group, SIZE)):
        if load_field(block_of(group, other), UNREAD) == chunk + 1:
            return UNREADABLE
    set_algorithm(group, BY_DIRECT_READS)
    return 0


@inner
def read_all(group, seq, source, first, num_bytes, target):
    """Read `num_bytes` from offset `first` of all ranks: 0, UNREADABLE if a rank could not, or another status."""
    rank, size = load_field(group, RANK), load_field(group, SIZE)
    deliver(target + rank * num_bytes, source + first, num_bytes, num_bytes)
    has_read = True
    for shift in range(1, size):
        other = peer_at(rank, size, shift)
        address = load_field(payload_of(group, other, seq), _SHOWN_ADDRESS) + first
        has_read = has_read and read_from(group, other, address, num_bytes, target + other * num_bytes)
    return end_reading(group, has_read)
