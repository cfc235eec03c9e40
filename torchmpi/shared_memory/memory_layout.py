"""How memory is laid out, in 64-bit words: what the ranks of a group share, one row per rank, then the slots.

A row is what one rank tells the others: a head with its state, two counters, a ring with one entry per call, and room
for a message. Only its owner writes it. What is read often by others has a pair of cache lines to itself, since
processors fetch lines in pairs.
"""

from __future__ import annotations

FIELD_BYTES = 8
_LINE_FIELDS = 16  # 128 bytes

# The head: number of the last call entered and left, of the one refused, questions asked and answered, the end,
# whether this rank is slow with what goes through the caches (see torchmpi.shared_memory.kernels.copying), whether it
# has given
# the group up, and answers no more; how far it has enqueued a call on its device, and how much it brings to that call;
# for which call it blames another rank, and which one, in the last BLAMED_RANK_BITS; where there are more ranks than
# cores, the core that it was last on.
ENTERED, LEFT, REFUSED, ASKED, ANSWERED, DYING, FETCHES_SLOWLY, CLOSED, ENQUEUED, BROUGHT, BLAMES, CORE = range(12)
BLAMED_RANK_BITS = 24

# Chunks of large calls: how many this rank has put into its slots, and how many it has combined or read; for the last
# two of those, by turns, whether what it has combined is in its own slot instead of those of the others.
READY = 1 * _LINE_FIELDS
REDUCED = 2 * _LINE_FIELDS
KEPT = REDUCED + 1
# Of the last call in which ranks read each other's memory: REDUCED if this one could not, otherwise 0.
UNREAD = REDUCED + 3
CHUNK_BITS = 24  # a call has fewer chunks than two to the power of this

# The ring: of each call its number, its signature, and up to PAYLOAD_BYTES that travel with them.
RING_START = 3 * _LINE_FIELDS
RING_LENGTH = 32  # calls remembered; a power of two
ENTRY_FIELDS = _LINE_FIELDS
SEQUENCE, SIGNATURE, PAYLOAD = range(3)
PAYLOAD_BYTES = (ENTRY_FIELDS - PAYLOAD) * FIELD_BYTES
MEMORY = 2  # the word of the payload of a long call from which a rank says where its tensor is, if that is shared

# What a rank keeps of a group for machine code, in private memory. Of the ledger: number of the last call, and of the
# one that machine code has entered and that is under way (0 if none is), its code, its shape as far as it is signed.
LOG_SEQUENCE, LOG_ACTIVE, LOG_CODE, LOG_NUM_DIMS, LOG_DIMS = range(5)
MAX_LOG_DIMS = 12
LOG_FIELDS = LOG_DIMS + MAX_LOG_DIMS
# Of the right to run: whether Python holds it, whether machine code has entered, and how many calls are pending.
RUN_LOCK_HELD, RUN_LOCK_ENTERED, RUN_LOCK_PENDING = range(3)
RUN_LOCK_FIELDS = 3

TEXT_START_BYTES = (RING_START + RING_LENGTH * ENTRY_FIELDS) * FIELD_BYTES
BLOCK_BYTES = 8192
BLOCK_FIELDS = BLOCK_BYTES // FIELD_BYTES

# Processors copy at half their speed to a place that has nearly the same offset in its page as what they copy. Pages
# begin where slots would, and 16 bytes later large NumPy arrays do: so the slots begin in the middle of a page.
_PAGE_BYTES = 4096


def slots_begin(size: int) -> int:
    """The byte at which the slots of so many ranks begin, behind their rows.

    >>> slots_begin(2) - 2 * ROW_BYTES
    2048
    """
    return size * BLOCK_BYTES + _PAGE_BYTES // 2


def num_slots(size: int) -> int:
    """How many slots a rank has: two, by turns, or four if there is only one other rank.

    A core writes faster to lines that have left the caches of the cores that have read them. From many ranks so much is
    read that they have, when the slot's turn comes again; from one it takes more slots.

    >>> num_slots(2), num_slots(3), num_slots(64)
    (4, 2, 2)
    """
    return 4 if size == 2 else 2


def entry(row: int, index: int) -> int:
    """The word at which an entry of the ring of a row begins.

    >>> entry(0, 1) - entry(0, 0), entry(1, 0) - entry(0, 0)
    (16, 1024)
    """
    return row * BLOCK_FIELDS + RING_START + index * ENTRY_FIELDS
