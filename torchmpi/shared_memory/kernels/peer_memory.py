"""Reading the tensors of other ranks: in shared segments, or from the memory of their processes.

Shared segments (`mpi.empty_shared`):

1. Before `arrive`, a rank whose tensor is in one of its own segments announces the tensor in the payload of the call:
   key, file and length of the segment, and the offset of the tensor (`announce_memory`).
2. After all have arrived, and if all have announced one (`num_shared`), each rank looks up where these segments are
   mapped in its own process (`find_shared`). If a segment is not mapped, the kernel returns UNMAPPED, Python maps the
   segment, and the kernel runs again.

Memory order: the payload is published by the sequence number of the entry. Python may write the table of own segments
in another thread at the same time: `Segment.end` is written last and cleared first, and therefore read twice.

Direct reads (Linux: process_vm_readv), one copy instead of two, used by allgather, alltoall, gather and
scatter.

1. A rank that prefers direct reads stores the address of its data in its payload before it arrives, others store 0
   (`show_memory`). The preference follows from the paces that the rank has measured for this length
   (`prefers_reading`). Both routes are tried repeatedly: the system call looks up every page, and the faster route
   depends on machine and length.
2. If all ranks have stored an address (`all_show`), each rank reads its data from all others (`read_all`).
3. `end_reading` publishes `reduced` and waits for all, because the tensors are being read until then. A rank that could
   not read also publishes `unread`, and all ranks repeat the call through the slots.

Memory order: the address is published by the sequence number of the entry, `unread` by `reduced`.
"""

from __future__ import annotations

from ..compiler.compilation import inner
from ..memory_layout import BY_DIRECT_READS, Announcement
from ..typed_records import Words
from .access import block_of, fail_check, group_of, own_block, part_at, payload_of, peer_at
from .arrival import end_reads, set_algorithm
from .chunk_loop import deliver
from .copying import phase_of_call
from .intrinsics import load, load_acquire, read_memory
from .kernel_sets import ENABLE_CHECKS
from .records import (
    CHECK_SHARED_TENSOR,
    MAPPINGS_PER_RANK,
    UNMAPPED,
    UNREADABLE,
    GroupRecord,
    KernelCall,
    Paces,
    SegmentRecord,
)


@inner
def segment_of(group: GroupRecord, address, num_bytes) -> SegmentRecord:
    """Return the own segment that contains all these bytes; 0 if there is none."""
    for index in range(group.own_segments.count):
        segment = SegmentRecord(group.own_segments.segments + 0)[index]
        end = load_acquire(segment.end)
        is_there = load_acquire(segment.begin) <= address and address + num_bytes <= end
        # Another thread may have put another segment into this record between the two loads.
        if is_there and load_acquire(segment.end) == end:
            return segment
    return SegmentRecord(0)


@inner
def announcement_of(group: GroupRecord, rank, seq) -> Announcement:
    """Return what a rank announces in the payload of a long call."""
    return Announcement(payload_of(group, rank, seq))


@inner
def announce_memory(group: GroupRecord, seq, address, num_bytes):
    """Announce this rank's tensor if it is shared, and return whether it is.

    Tensors up to `whole_bytes` go through the slots: reading shared tensors would take a second synchronization.
    """
    announcement = announcement_of(group, group.rank, seq)
    segment = segment_of(group, address, num_bytes) if num_bytes > group.whole_bytes else SegmentRecord(0)
    if not segment:
        announcement.key = 0
        return False
    begin = load(segment.begin)
    announcement.key = segment.key
    announcement.file = segment.file
    announcement.segment_bytes = load(segment.end) - begin
    announcement.offset = address - begin
    return True


@inner
def mapped(group: GroupRecord, rank, key):
    """Return the address in this process of another rank's segment; 0 if the segment is not mapped."""
    mappings = group.mappings[rank * MAPPINGS_PER_RANK]
    for index in range(MAPPINGS_PER_RANK):
        if mappings[index].key == key:
            return mappings[index].address
    return 0


@inner
def find_of(group: GroupRecord, seq, rank):
    """Store the address of another rank's shared tensor; return 0, or UNMAPPED and the rank."""
    announcement = announcement_of(group, rank, seq)
    base = mapped(group, rank, announcement.key)
    if base == 0:
        return UNMAPPED + rank
    offset = announcement.offset
    if ENABLE_CHECKS and not 0 <= offset < announcement.segment_bytes:
        fail_check(group, CHECK_SHARED_TENSOR, offset, announcement.segment_bytes)
    group.operands[group.size + rank] = base + offset
    return 0


@inner
def shared_tensor_of(group: GroupRecord, rank):
    """Return the address of the shared tensor of a rank, after `find_shared`."""
    return group.operands[group.size + rank]


@inner
def num_shared(group: GroupRecord, seq):
    """Return how many ranks have announced a shared tensor for this call."""
    count = 0
    for other in range(group.size):
        count += announcement_of(group, other, seq).key != 0
    return count


@inner
def find_shared(group: GroupRecord, seq, address):
    """Store the addresses of the tensors of all ranks, which have announced them: 0, or UNMAPPED and a rank."""
    rank, size = group.rank, group.size
    group.operands[size + rank] = address
    for other in range(size):
        status = find_of(group, seq, other) if other != rank else 0
        if status != 0:
            return status
    return 0


_MIN_BYTES, _MAX_BYTES = 32 << 10, 16 << 20
_FIRST_CALLS = 16  # the first calls of a length alternate between both routes
_EVERY = 128  # later, one of so many calls takes each route regardless of the measurements


@inner
def paces_of(paces: Paces, num_bytes) -> Paces:
    """Return the measurements of a collective for a length; a class of lengths ends at a power of two."""
    length_class, larger = 0, num_bytes // (2 * _MIN_BYTES)
    while larger > 0:
        length_class += 1
        larger //= 2
    return paces[length_class]


@inner
def better_pace(before, pace):
    """Return the pace of a route after another call: a slower one, which may have been disturbed, counts one eighth."""
    return pace if before == 0 or pace < before else before + (pace - before) // 8


@inner
def note_pace(paces: Paces, num_bytes, reads, nanoseconds):
    """Record the duration of a call."""
    if num_bytes < _MIN_BYTES or num_bytes >= _MAX_BYTES:
        return 0
    known, pace = paces_of(paces, num_bytes), nanoseconds * 1024 // num_bytes + 1
    known.calls += 1
    if reads:
        known.of_reads = better_pace(known.of_reads, pace)
    else:
        known.through_slots = better_pace(known.through_slots, pace)
    return 0


@inner
def can_read(group: GroupRecord, num_bytes):
    """Return whether this rank may read other processes, and direct reads of this length can be faster."""
    return bool(group.processes) and num_bytes >= _MIN_BYTES and num_bytes < _MAX_BYTES


@inner
def prefers_reading(group: GroupRecord, paces: Paces, num_bytes):
    """Return whether this rank prefers to read `num_bytes` of each other rank directly."""
    if not can_read(group, num_bytes):
        return False
    known = paces_of(paces, num_bytes)
    directly, slots = known.of_reads, known.through_slots
    phase = phase_of_call(group, _EVERY)
    if directly == 0 or slots == 0 or known.calls < _FIRST_CALLS:
        return phase % 2 == 1
    # The time of direct reads includes the wait for all ranks; that of the slots excludes the wait for the last chunk.
    return phase == 1 or (phase != 0 and directly * 16 <= slots * 17)


@inner
def show_memory(group: GroupRecord, seq, address):
    """Store in the payload the address of this rank's data for direct reads; 0 for no direct reads."""
    announcement_of(group, group.rank, seq).shown_address = address
    return 0


@inner
def all_show(group: GroupRecord, seq):
    """Return whether all ranks have stored an address; otherwise no rank reads."""
    for rank in range(group.size):
        if announcement_of(group, rank, seq).shown_address == 0:
            return False
    return True


@inner
def read_from(group: GroupRecord, rank, source, num_bytes, target):
    """Read from an address of another process; return whether the system allowed it."""
    if not group.processes:
        return False
    process, done = group.processes[rank], 0
    while done < num_bytes:
        length = read_memory(process, target + done, source + done, num_bytes - done)
        if length <= 0:
            return False
        done += length
    return True


@inner
def end_reading(group: GroupRecord, has_read):
    """Wait until all ranks have read: 0, UNREADABLE if one could not, or the status of the wait."""
    chunk = group.chunks
    own_block(group).unread = 0 if has_read else chunk + 1
    status = end_reads(group)
    if status != 0:
        return status
    if not has_read:
        group.processes = Words(0)  # reads would fail again; without this rank's address no rank reads
    for other in range(group.size):
        if block_of(group, other).unread == chunk + 1:
            return UNREADABLE
    set_algorithm(group, BY_DIRECT_READS)
    return 0


@inner
def read_all(call: KernelCall, seq, source, first, num_bytes, target):
    """Read `num_bytes` from offset `first` of all ranks: 0, UNREADABLE if a rank could not, or another status."""
    group, parts = group_of(call), call.received_parts
    rank, size = group.rank, group.size
    deliver(part_at(parts, rank, target + rank * num_bytes), source + first, num_bytes, num_bytes)
    has_read = True
    for shift in range(1, size):
        other = peer_at(rank, size, shift)
        address = announcement_of(group, other, seq).shown_address + first
        into = part_at(parts, other, target + other * num_bytes)
        has_read = has_read and read_from(group, other, address, num_bytes, into)
    return end_reading(group, has_read)
