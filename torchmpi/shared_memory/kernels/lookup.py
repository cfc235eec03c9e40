"""Finding the tensors of all ranks in shared segments (`mpi.empty_shared`).

1. Before it arrives, a rank whose tensor is in one of its own segments announces it in the payload of the call: key and
   file of the segment, its length, and the offset of the tensor (`announce_memory`).
2. After all have arrived, and if all have announced one, each rank looks up where these segments are mapped in its own
   process (`find_memory`). If one is not, the kernel returns UNMAPPED, Python maps it, and the kernel runs again.

Memory order: the payload is published by the sequence number of the entry. The table of own segments is written by
Python in another thread at most: SEGMENT_END is written last and cleared first, so it is read twice.
"""

from __future__ import annotations

from ..memory_layout import MEMORY
from .access import fail_check, payload_of
from .compilation import inner
from .intrinsics import load, load_field, load_field_acquire, store_field
from .kernel_sets import ENABLE_CHECKS
from .records import (
    CHECK_SHARED_TENSOR,
    MAPPINGS,
    MAPPINGS_PER_RANK,
    OWN_SEGMENTS,
    POINTERS,
    RANK,
    SEGMENT_BEGIN,
    SEGMENT_END,
    SEGMENT_FIELDS,
    SEGMENT_FILE,
    SEGMENT_KEY,
    SIZE,
    UNMAPPED,
    WHOLE_BYTES,
)

SOME_SHARED, ALL_SHARED = 1, 2
_KEY, _FILE, _SEGMENT_LENGTH, _OFFSET = range(4)
"""Fields of the announcement in the payload."""


@inner
def segment_of(group, address, num_bytes):
    """Return the record of the own segment that holds all these bytes, 0 if none does."""
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
    """Announce this rank's tensor if it is shared; return whether it is.

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
    """Return where a segment of another rank is mapped in this process, 0 if it is not."""
    pairs = load_field(group, MAPPINGS) + rank * MAPPINGS_PER_RANK * 16
    for index in range(MAPPINGS_PER_RANK):
        if load_field(pairs, index * 2) == key:
            return load_field(pairs, index * 2 + 1)
    return 0


@inner
def find_of(group, seq, rank):
    """Store the address of another rank's shared tensor: 0, or UNMAPPED and that rank."""
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
