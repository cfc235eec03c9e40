"""Layout of the memory that the ranks of a group share: one status block per rank, then the slots.

All fields are of 64 bits (:mod:`torchmpi.shared_memory.typed_records`). Only the rank of a block writes to the block.
Fields that other ranks poll have two cache lines to themselves, since processors fetch lines in pairs.

The module also describes private memory that machine code and Python share: call logs with the flight record, channels
of messages, run locks.
"""

from __future__ import annotations

from .typed_records import Array, Atomic, Embedded, Pointer, Record, Word

FIELD_BYTES = 8
_LINE_FIELDS = 16  # 128 bytes
BLAMED_RANK_BITS = 24
STAGE_BITS = 24  # of ENQUEUED: the number of the stage within the call; the upper bits are the number of the call
EXIT_STATUS = 2  # added to the status in EXITED; 1 without status
CHUNK_BITS = 24  # a call has fewer chunks than two to the power of this


class Entry(Record):
    """The entry of a call in the ring of a rank."""

    sequence = Atomic()
    """Number of the call, written last."""
    signature = Word()
    payload = Array(_LINE_FIELDS - 2)


ARRIVED = Entry.payload  # of calls that no kernel runs: when the rank has entered the call, in nanoseconds
PAYLOAD_BYTES = (Entry.FIELDS - Entry.payload) * FIELD_BYTES


class Announcement(Record):
    """What a rank announces in the payload of a long call (kernels.peer_memory)."""

    length = Word()
    """Bytes or rows of its tensor."""
    shown_address = Word()
    """Address of its data for direct reads, or 0."""
    key = Word()
    """Of the segment with its tensor if that is shared: `key` and `file` of its Segment, its length, and"""
    file = Word()
    segment_bytes = Word()
    offset = Word()
    """the offset of the tensor. All are undefined if `key` is 0."""


RING_LENGTH = 32  # a power of two
NOT_ARRIVED, DIFFERENT = 1, 2  # results of a comparison with a neighbor (kernels.arrival.announce)
NEIGHBOR = 4  # the factor of the result for the second neighbor


class Block(Record):
    """The status block of a rank."""

    entered = Atomic()
    """Number of the last call entered."""
    left = Atomic()
    """Number of the last call left."""
    refused = Atomic()
    """Number of the last call aborted."""
    asked = Atomic()
    """Number of status requests to this rank."""
    answered = Atomic()
    """Number of status requests that it has answered."""
    dying = Atomic()
    """Whether the rank is terminating."""
    fetches_slowly = Word()
    """Consecutive trials in which copies through the caches were slow: a hint without order (see kernels.copying)."""
    closed = Atomic()
    """Whether the rank has closed the group."""
    enqueued = Atomic()
    """Number of the last stage enqueued on its device (backends/ipc)."""
    blames = Atomic()
    """Call (upper bits) and rank (last BLAMED_RANK_BITS) that this rank holds responsible for an abort."""
    core = Word()
    """Core on which it last waited, where there are more ranks than cores: a hint without order."""
    exited = Atomic()
    """Whether the rank is at the end of its program; with the status of ``sys.exit()``, if it called that."""
    completed = Atomic()
    """Number of the last call completed that enqueues its work on a device."""
    ready = Atomic(at=1 * _LINE_FIELDS)
    """Chunks that this rank has put into its slots."""
    reduced = Atomic(at=2 * _LINE_FIELDS)
    """Chunks that this rank has reduced, or read."""
    kept = Array(2)
    """By chunk parity: whether the result of a reduction is in the slot of this rank. Ordered by `reduced`."""
    unread = Word()
    """`reduced` of the last call with direct reads if this rank could not read, otherwise 0. Ordered by `reduced`."""
    ring = Embedded(Entry, RING_LENGTH, at=3 * _LINE_FIELDS)
    """An entry for each of the last calls. A text follows: what the rank does, on request."""


TEXT_START_BYTES = Block.BYTES
BLOCK_BYTES = 8192
BLOCK_FIELDS = BLOCK_BYTES // FIELD_BYTES

# --- private memory of machine code and Python --------------------------------------------------------------------

CALL_NUMBER_BITS = 60  # of the number of a call: Python's hash of a number of up to 60 bits is the number itself
CHECKSUM_MODULUS = 1_000_000  # of the hash of the shapes of a list, which the ranks compare
RECORD_IS_NUMBER = 1 << 32  # added to the number of dimensions if the shape is a number that stands for a larger call
RECORD_LENGTH = 1024  # entries, a power of two
MAX_COLLECTIVES = 32
MAX_LOG_DIMS = 11


class RecordFields(Record):
    """An entry of the flight record (communicators/flight_record.py)."""

    sequence = Atomic()
    """Number of the call; 0 while the entry is written."""
    code = Word()
    num_dims = Word()
    """Number of the dimensions that are signed."""
    begin = Word()
    """In ticks of the processor; with a minus nanoseconds of the monotonic clock."""
    end = Word()
    dims = Array(MAX_LOG_DIMS)


class CounterFields(Record):
    """The counters of a collective.

    The time in calls is in ticks of the processor for parts measured by machine code and in nanoseconds for parts
    measured by Python: of calls whose waits are known (`known_ns`), and of others.
    """

    calls = Word()
    """Calls that have ended."""
    num_bytes = Word()
    """Bytes of their tensors."""
    ticks = Word()
    ns = Word()
    known_ns = Word()
    waited_ns = Word()
    """The known waits for other ranks."""
    stalls = Word()
    """Stalled calls."""


class LogFields(Record):
    """The call log of a group."""

    sequence = Word()
    """Number of the last call."""
    active = Word()
    """Number of the call that the fast path has entered and that is active, or 0."""
    record = Pointer(RecordFields)
    """The first entry of the flight record."""
    num_bytes = Word()
    """Bytes of the call that the fast path has entered."""
    waited = Word()
    """Nanoseconds that the current call has waited for other ranks, or, if these are not known, minus the time of its
    begin."""
    algorithm = Word()
    """The algorithm of the last call, 0 if the library below has chosen it (communicators/algorithms.py)."""
    counters = Embedded(CounterFields, MAX_COLLECTIVES)


# The algorithms of kernels: in the entries of the ring, in whole slots, in chunks through the slots, in shared tensors,
# by direct reads, in the messages that compare the call.
IN_RING, IN_WHOLE_SLOTS, IN_CHUNKS, IN_SHARED_TENSORS, BY_DIRECT_READS, WITH_COMPARISON = range(1, 7)


class ChannelFields(Record):
    """The messages from one rank to another, of one tag, as one of both sees them (communicators/message_record.py)."""

    begun = Word()
    """Number of the last message that has begun,"""
    ended = Word()
    """and of the last one that has ended;"""
    begin = Word()
    """the nanoseconds of both."""
    end = Word()
    num_bytes = Word()
    """Of the last message."""
    dtype = Word()
    peer = Word()
    """The other rank."""
    tag = Word()
    is_receive = Word()


class MessageRing(Record):
    """The messages from one rank of a host to another, in order (kernels.ring_messages)."""

    head = Atomic()
    """Bytes that the sender has written so far,"""
    asleep = Atomic()
    """In the ring of a rank to itself: FOR_ARRIVALS or FOR_ROOM if it sleeps until another rank moves something."""
    tail = Atomic(at=_LINE_FIELDS)
    """and that the receiver has read. The memory of the messages follows."""
    data = Array(0, at=2 * _LINE_FIELDS)


FOR_ARRIVALS, FOR_ROOM = 1, 2  # until something arrives; or until there is room to send, too

MOST_COPIED_BYTES = 1 << 20  # of a tensor that the fast path copies, or packs, while the GIL is held: below 1 ms


class LockFields(Record):
    """The run lock of a call queue."""

    held = Word()
    """Whether Python holds it."""
    entered = Atomic()
    """Whether the fast path has entered."""
    pending = Word()
    """How many calls have been queued."""
    ended = Word()
    """How many of them have ended."""
    runner = Word()
    """The thread that runs a queued call, as `threading.get_ident` numbers it; 0 for none."""
    deferred = Word()
    """How many receives begin later, of the messages of a group: no other receive may overtake them."""


# Of numbers in signatures: an odd factor, with which the calls that they count change the lower half too.
_SIGNED_CALLS, _SIGNED_FACTOR = (1 << 31) - 1, 0x4C957F2D

# Processors copy at half their speed to an address with nearly the same offset in its page as the source. Large NumPy
# arrays begin 16 bytes after the beginning of a page: so the slots begin in the middle of one.
_PAGE_BYTES = 4096

_LEAST_RING_BYTES = 4 << 10
_MOST_RING_BYTES = (512 << 10, 64 << 20), (2 << 20, 32 << 20)
"""The bytes of a ring and of all rings together: longer rings, into which messages of 1 MB fit, among few ranks."""


def signed_chunks(chunks: int) -> int:
    """Return the number that kernels add to the signatures of their calls, given the chunks before the call.

    After an aborted call the upper bits of this count differ between the ranks. Those are the bits of the root in a
    signature: the difference of two roots must not make up for that of two counts.

    >>> signed_chunks(0), signed_chunks(3)
    (0, 3)
    >>> (signed_chunks(256 << CHUNK_BITS) ^ signed_chunks(0)) & 0xFFFFFFFF != 0
    True
    """
    return (((chunks >> CHUNK_BITS) & _SIGNED_CALLS) * _SIGNED_FACTOR) ^ (chunks & ((1 << CHUNK_BITS) - 1))


def slots_begin(size: int) -> int:
    """Return the offset in bytes of the slots of so many ranks, after their status blocks.

    >>> slots_begin(2) - 2 * BLOCK_BYTES
    2048
    """
    return size * BLOCK_BYTES + _PAGE_BYTES // 2


def ring_capacity(size: int) -> int:
    """Return the bytes of messages in a ring, a power of two: the rings of a host with many ranks are shorter.

    >>> [ring_capacity(size) >> 10 for size in (2, 4, 5, 8, 16, 64)]
    [2048, 2048, 1024, 512, 256, 16]
    """
    most = max(min(ring, together // size**2) for ring, together in _MOST_RING_BYTES)
    return max(_LEAST_RING_BYTES, 1 << most.bit_length() - 1)


def rings_bytes(size: int) -> int:
    """Return the bytes of the rings between so many ranks, which are at the end of the segment.

    The system gives memory only to the rings in use.
    """
    return size * size * (MessageRing.BYTES + ring_capacity(size))


def num_slots(size: int) -> int:
    """Return how many slots a rank has: two, or four if there is only one other rank.

    A core writes faster to cache lines that have left the caches of their readers. With many ranks the reads between
    two uses of a slot evict the lines; with two ranks more slots are necessary.

    >>> num_slots(2), num_slots(3), num_slots(64)
    (4, 2, 2)
    """
    return 4 if size == 2 else 2


def segment_bytes(size: int, slot_bytes: int) -> int:
    """Return the bytes of the segment of so many ranks: their status blocks, slots and rings of messages.

    >>> segment_bytes(2, 4096) == slots_begin(2) + 8 * 4096 + rings_bytes(2)
    True
    """
    return slots_begin(size) + num_slots(size) * size * slot_bytes + rings_bytes(size)


def entry(block: int, index: int) -> int:
    """Return the first field of an entry in the ring of a block, counted from the first block.

    >>> entry(0, 1) - entry(0, 0), entry(1, 0) - entry(0, 0)
    (16, 1024)
    """
    return block * BLOCK_FIELDS + Block.ring + index * Entry.FIELDS
