"""Layout of the memory that the ranks of a group share: one status block per rank, then the slots.

All numbers are of 64-bit fields. A status block consists of a head with the state of its rank, two counters, a ring
with one entry per call, and room for a text; only the rank of the block writes to the block. Fields that other ranks
poll have two cache lines to themselves, since processors fetch lines in pairs.

============== ==================================================================================================
field          contents
============== ==================================================================================================
ENTERED, LEFT  number of the last call entered, and left
REFUSED        number of the last call aborted
ASKED          number of status requests to this rank
ANSWERED       number of status requests that it has answered
DYING          whether the rank is terminating
FETCHES_SLOWLY consecutive trials in which copies through the caches were slow (see kernels.copying)
CLOSED         whether the rank has closed the group
ENQUEUED       number of the last stage enqueued on its device (backends/ipc)
BLAMES         call (upper bits) and rank (last BLAMED_RANK_BITS) that this rank holds responsible for an abort
CORE           core on which it last waited, where there are more ranks than cores
EXITED         whether the rank is at the end of its program; with the status of ``sys.exit()``, if it called that
COMPLETED      number of the last call completed that enqueues its work on a device
READY          chunks that this rank has put into its slots
REDUCED        chunks that this rank has reduced, or read
KEPT           two fields, by chunk parity: whether the result of a reduction is in the slot of this rank
UNREAD         REDUCED of the last call with direct reads if this rank could not read, otherwise 0
ring           from RING_START: RING_LENGTH entries of sequence number, signature and payload
text           from TEXT_START_BYTES: current activity of the rank, on request
============== ==================================================================================================
"""

from __future__ import annotations

FIELD_BYTES = 8
_LINE_FIELDS = 16  # 128 bytes

ENTERED, LEFT, REFUSED, ASKED, ANSWERED, DYING, FETCHES_SLOWLY, CLOSED, ENQUEUED, BLAMES, CORE = range(11)
EXITED, COMPLETED = 11, 12
BLAMED_RANK_BITS = 24
STAGE_BITS = 24  # of ENQUEUED: the number of the stage within the call; the upper bits are the number of the call
EXIT_STATUS = 2  # added to the status in EXITED; 1 without status

READY = 1 * _LINE_FIELDS
REDUCED = 2 * _LINE_FIELDS
KEPT = REDUCED + 1
UNREAD = REDUCED + 3
CHUNK_BITS = 24  # a call has fewer chunks than two to the power of this

# Fields of an entry of the ring: sequence number, signature, payload.
RING_START = 3 * _LINE_FIELDS
RING_LENGTH = 32  # a power of two
ENTRY_FIELDS = _LINE_FIELDS
SEQUENCE, SIGNATURE, PAYLOAD = range(3)
PAYLOAD_BYTES = (ENTRY_FIELDS - PAYLOAD) * FIELD_BYTES
MEMORY = 2  # field of the payload of a long call from which a rank announces its shared tensor
ARRIVED = PAYLOAD  # of calls that no kernel runs: when the rank has entered the call, in nanoseconds

# Private memory that machine code and Python share. The call log of a group: number of the last call; number of the
# call that the fast path has entered and that is active, or 0; address of the first entry of the flight record; bytes
# of the call that the fast path has entered; nanoseconds that the current call has waited for other ranks, or, if these
# are not known, minus the time of its begin; the algorithm of the last call, 0 if the library below has chosen it
# (communicators/algorithms.py), and of an exchange the numbers of its messages; number of the last call that was a
# later chunk of a call of the program, and when the first chunk began, in nanoseconds; counters of each collective.
LOG_SEQUENCE, LOG_ACTIVE, LOG_RECORD, LOG_BYTES, LOG_WAITED, LOG_ALGORITHM = range(6)
LOG_LAST_CHUNK, LOG_BEGUN, LOG_COUNTERS = range(6, 9)
# The algorithms of kernels: in the entries of the ring, in whole slots, in chunks through the slots, in shared tensors,
# by direct reads, in the messages that compare the call.
IN_RING, IN_WHOLE_SLOTS, IN_CHUNKS, IN_SHARED_TENSORS, BY_DIRECT_READS, WITH_COMPARISON = range(1, 7)
# The counters of a collective: calls that have ended; bytes of their tensors; time in them, in ticks of the processor
# for parts measured by machine code and in nanoseconds for parts measured by Python: of calls whose waits are known
# (COUNTED_KNOWN_NS), and of others; nanoseconds of the known waits for other ranks; stalled calls.
COUNTED_CALLS, COUNTED_BYTES, COUNTED_TICKS, COUNTED_NS, COUNTED_KNOWN_NS, COUNTED_WAITED_NS, COUNTED_STALLS = range(7)
COUNTER_FIELDS = 7
MAX_COLLECTIVES = 32
LOG_FIELDS = LOG_COUNTERS + MAX_COLLECTIVES * COUNTER_FIELDS
# An entry of the flight record (communicators/flight_record.py): number of the call, its code, number of the dimensions
# that are signed, begin and end (ticks of the processor; with a minus nanoseconds of the monotonic clock), dimensions.
RECORD_SEQUENCE, RECORD_CODE, RECORD_NUM_DIMS, RECORD_BEGIN, RECORD_END, RECORD_DIMS = range(6)
RECORD_IS_NUMBER = 1 << 32  # added to RECORD_NUM_DIMS if the shape is a number that stands for a larger call
CALL_NUMBER_BITS = 60  # of that number: Python's hash of a number of up to 60 bits is the number itself
RECORD_FIELDS = 16
RECORD_LENGTH = 1024  # entries, a power of two
MAX_LOG_DIMS = RECORD_FIELDS - RECORD_DIMS
# The entry of a channel there (communicators/message_record.py): numbers of the messages that have begun and ended,
# nanoseconds at which the last one began and the last one ended, bytes and dtype of the last one; the other rank, the
# tag, and whether the messages are received.
(
    MESSAGE_BEGUN, MESSAGE_ENDED, MESSAGE_BEGIN, MESSAGE_END, MESSAGE_BYTES, MESSAGE_DTYPE, MESSAGE_PEER, MESSAGE_TAG,
    MESSAGE_IS_RECEIVE,
) = range(9)  # fmt: skip
# A run lock: whether Python holds it, whether the fast path has entered, and how many calls are pending.
RUN_LOCK_HELD, RUN_LOCK_ENTERED, RUN_LOCK_PENDING = range(3)
RUN_LOCK_FIELDS = 3
# Of numbers in signatures: an odd factor, with which the calls that they count change the lower half too.
_SIGNED_CALLS, _SIGNED_FACTOR = (1 << 31) - 1, 0x4C957F2D

TEXT_START_BYTES = (RING_START + RING_LENGTH * ENTRY_FIELDS) * FIELD_BYTES
BLOCK_BYTES = 8192
BLOCK_FIELDS = BLOCK_BYTES // FIELD_BYTES

# Processors copy at half their speed to an address with nearly the same offset in its page as the source. Large NumPy
# arrays begin 16 bytes after the beginning of a page: so the slots begin in the middle of one.
_PAGE_BYTES = 4096


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


def num_slots(size: int) -> int:
    """Return how many slots a rank has: two, or four if there is only one other rank.

    A core writes faster to cache lines that have left the caches of their readers. With many ranks the reads between
    two uses of a slot evict the lines; with two ranks more slots are necessary.

    >>> num_slots(2), num_slots(3), num_slots(64)
    (4, 2, 2)
    """
    return 4 if size == 2 else 2


def entry(block: int, index: int) -> int:
    """Return the first field of an entry in the ring of a block, counted from the first block.

    >>> entry(0, 1) - entry(0, 0), entry(1, 0) - entry(0, 0)
    (16, 1024)
    """
    return block * BLOCK_FIELDS + RING_START + index * ENTRY_FIELDS
