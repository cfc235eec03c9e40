"""What the kernels know of a group and of a prepared call: private arrays of words, by these numbers."""

from __future__ import annotations

# Of the group.
RANK = 0
SIZE = 1
ROWS = 2
"""Address of the rows of all ranks (see torchmpi.shared_memory.memory_layout)."""
SLOTS = 3
"""Address of the slots: NUM_SLOTS of SLOT_BYTES for each rank, one after the other."""
SLOT_BYTES = 4
CHUNKS = 5
"""Chunks that have passed through the slots so far: the same on all ranks between calls."""
SPINS = 6
"""How often to look before giving way."""
YIELDS = 7
"""How often to give way before going to sleep."""
SEQUENCE = 8
"""Number of the call under way."""
WHOLE_BYTES = 9
"""Up to this size every rank combines everything itself, which takes one meeting instead of two."""
OWN_SEGMENTS = 10
"""Address of this process's own shared segments: their number, then SEGMENT_WORDS for each."""
MAPPINGS = 11
"""Address of what is mapped here of the segments of each rank: MAPPINGS_PER_RANK pairs of key and address for each."""
CHUNK_BYTES = 12
"""Size of the chunks in which the current call is cut, but for the last; of what moves, what one rank gets of each."""
FREE = 13
"""Calls up to this number may be entered: all ranks are past the entries that they take in the ring."""
IS_PAST = 14
"""How slots are written to: through the caches (0), or past them because that is slow now (1), or in any case (2)."""
MOST_CHUNK_BYTES = 15
"""Most that a chunk of a reduction has."""
PACE = 16
"""Nanoseconds for a KB in the best chunk of this call, or of those after its way changed; 0 = not known."""
PUT_PACE = 17
"""The same for copying into the slots alone, where that is noted by itself."""
TRIED = 18
"""Chunks of this call so far: after some of them the ranks decide how to write the others."""
EXPIRED = 19
"""Number of the call that has taken longer than it may: set by the watchdog, and looked at between naps."""
CALL_CHUNKS = 20
"""Chunks that this call has."""
PIECES = 21
"""Address of what a reduction combines, a stream of pieces: PIECE_WORDS for each."""
NUM_PIECES = 22
ONLY_PIECE = 23
"""ONLY_PIECE and the words after it: the piece, where there is one."""
FRAGMENTED = 26
"""Whether the call is about pieces so short that its pace says nothing about memory."""
NUM_SLOTS = 27
"""Slots of each rank: a power of two, at least two."""
CROWDED = 28
"""Whether there are more ranks than cores, so that some of them share one."""
LAST_ABORTED = 29
"""Number of the last call that this rank has given up, until all others have left it; then 0."""
OUT = 30
"""Where something is combined to, if to one place only."""
SPACING = 31
"""Bytes from what is for one rank in a slot to what is for the next: 0 where all get the same."""
NEAR_PACE = 32
"""PACE and PUT_PACE of what went through the caches in this call, together, if that was found slow; otherwise 0."""
REJECTED = 33
"""How many trials in a row have found that past the caches was no faster, though through them was slow."""
SPENT = 34
"""SPENT and the word after it: nanoseconds spent on copying and combining in chunks under way, without the waits."""
PROCESSES = 36
"""Address of the numbers of all ranks' processes, if their memory can be read; otherwise 0."""
ALLGATHER_PACES = 37
"""ALLGATHER_PACES and the words after it: of nine lengths nanoseconds for a KB, through the slots and directly, and
the number of calls."""
ALLTOALL_PACES = 64
"""The same of alltoall."""
SCATTER_PACES = 91
"""The same of scatters from this rank."""
GATHER_PACES = 118
"""The same of gathers to this rank."""
SPENT_BEFORE = 145
"""Nanoseconds that a root has spent on putting something into its slot before the ranks met."""
GATHERS_READ = 146
"""Whether the last long gather to another rank was read from where it was: then the next one may be, too."""
POINTERS = 147
"""POINTERS and the words after it: room for two addresses per rank."""


def context_words(size: int) -> int:
    """Length of the array for a group.

    >>> context_words(4)
    155
    """
    return POINTERS + 2 * size


# Of a piece: where it begins in the stream, in whole lines; its address; its length.
PIECE_FIELDS = 3

# Of a segment.
SEGMENT_BEGIN, SEGMENT_END, SEGMENT_KEY, SEGMENT_FILE = range(4)
SEGMENT_FIELDS = 4
MAPPINGS_PER_RANK = 64

# Of a prepared call.
CONTEXT = 0
ITEM_BYTES = 1
REDUCER = 2
ROOT = 3
"""Who receives the result of a reduction or a gather, or sends a broadcast or a scatter; -1 for everybody."""
TABLE = 4
"""Address of what is sent and received: for each rank two pairs of address and length."""
MESSAGE = 5
"""Address of room for what the root of a scatter says of its tensor: DTYPE, number of dimensions, shape."""
DTYPE = 6
"""The number of the dtype, for all ranks the same; 0 where it is not known."""
PLAN_FIELDS = 7

# Of a gate, through which tensors enter kernels (see torchmpi.shared_memory.fast_path): addresses.
FIRST = 0
"""Of the words of the first door; 0 = the gate is shut."""
EXCHANGE = 1
"""Of torch's function that describes a tensor in DLPack's terms."""
CHOSEN = 2
"""Of the context variable that is None unless this thread or task has chosen a communicator."""
NONE = 3
TENSOR_TYPE = 4
IS_NEG = 5
FALSE = 6
INCREMENT_VERSION = 7
SETTLE = 8
"""Of the function that goes on where a kernel could not finish: status, tensor, out, address of the door."""
TOUCH = 9
"""Of the function that notes a write where INCREMENT_VERSION cannot."""
ABORT = 10
"""Of the function that tells the others of a call with which SETTLE could not even begin: address of the door."""
FAST_PATH_FIELDS = 11

# Of a door: a prepared call behind a gate.
NEXT = 0
"""Address of the next door, 0 for none."""
KEY = 1
"""Address of the object by which the caller names it: the operation, or the root."""
COMM = 2
"""Address of the communicator, or of None for the default one."""
DLPACK_DTYPE = 3
"""The dtype as DLPack has it: code, bits, and lanes."""
PLAN = 4
CALL_LOG = 5
"""Address of the words of the group's ledger."""
RUN_LOCK = 6
"""Address of the words of the lane's right to run."""
CODE = 7
"""What the ledger knows of the call beside the shape: verb, operation, dtype, root."""
SIGNED_CODE = 8
"""The same as it goes into the signature."""
FIRST_DIM = 9
"""The first dimension that is part of the signature."""
CACHED_CALL_FIELDS = 10

# What a kernel returns, if not 0. Plus the rank that it is about.
MISMATCH = 1 << 20
"""That rank called something else."""
REFUSED = 2 << 20
"""That rank has given this call up."""
UNMAPPED = 3 << 20
"""The segment of that rank is not mapped here yet: map it and call again."""
UNEVEN = 4 << 20
"""The ranks differ in length."""
LATE = 5 << 20
"""The call has taken longer than it may."""
UNREAD = 6 << 20
"""A rank could not read the memory of another. Kernels do not return it: they take another way."""
KINDS = ~((1 << 20) - 1)
OTHERWISE = -1
"""What a gate finds of tensors that must take the way through Python."""
