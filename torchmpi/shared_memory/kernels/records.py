"""Field numbers of the private records that Python prepares and kernels read, and the statuses that kernels return.

A record is an array of 64-bit fields in the memory of one process; a kernel gets its address. The memory that the ranks
share is described in :mod:`torchmpi.shared_memory.memory_layout`.

=========== ====================== ==========================================================================
record      number of fields       contents
=========== ====================== ==========================================================================
group       `group_fields(size)`   the group on this rank, and the state of its current call
call        CALL_FIELDS            a prepared call: group, item size, reducer, root
exchange    EXCHANGE_FIELDS        a prepared short message to one rank and from another
hosts       HOSTS_FIELDS           a prepared short allreduce over hosts, which begins with an exchange
queue       QUEUE_FIELDS           long messages in pieces, of which few are in progress
long        LONG_FIELDS            one of these messages
piece       PIECE_FIELDS           one of these pieces
chunks      CHUNKS_FIELDS          a reduction by such messages, chunk by chunk
transfer    TRANSFER_FIELDS        per rank: addresses and lengths to send and to receive
tensor      TENSOR_FIELDS          one tensor of a list that is reduced together
segment     SEGMENT_FIELDS         one shared tensor of this process
fast path   FAST_PATH_FIELDS       data of the machine code of one collective's fast path
cached call CACHED_CALL_FIELDS     a call that the fast path can run, with the arguments that identify it
=========== ====================== ==========================================================================
"""

from __future__ import annotations

# --- Group: identity and memory -------------------------------------------------------------------------

RANK = 0
SIZE = 1
BLOCKS = 2
"""Address of the shared segment, which begins with the status blocks of all ranks."""
SLOTS = 3
"""Address of the slots: NUM_SLOTS of SLOT_BYTES for each rank, in rank order."""
SLOT_BYTES = 4
CHUNKS = 5
"""Chunks that have passed through the slots before the current call: equal on all ranks between calls."""
SPINS = 6
"""Polls with a pause instruction before `sched_yield` is called."""
YIELDS = 7
"""Polls with `sched_yield` before the wait begins to sleep."""
CURRENT_SEQ = 8
"""Sequence number of the current call."""
WHOLE_BYTES = 9
"""Up to this size a tensor is not divided among the ranks, which saves one synchronization."""
OWN_SEGMENTS = 10
"""Address of the table of this process's shared tensors: their number, then one segment record for each."""
MAPPINGS = 11
"""Address of the mapped segments of other ranks: MAPPINGS_PER_RANK pairs of key and local address for each rank."""
CHUNK_BYTES = 12
"""Size of all chunks of the current call but the last; of transfers the share of one rank in a chunk."""
FREE_UNTIL = 13
"""Calls up to this number may write their ring entry without waiting: all ranks are past its previous use."""
CACHE_BYPASS = 14
"""How slots are written: through the caches (0), with non-temporal stores because the caches are slow now (1), or
with non-temporal stores regardless of measurements (2)."""
MAX_CHUNK_BYTES = 15
"""Upper limit of CHUNK_BYTES in reductions."""

# --- Group: measurements of the current call (see kernels.copying) ----------------------------------------

PACE = 16
"""Nanoseconds per KiB of the best chunk of this call, or since CACHE_BYPASS changed; 0 = not measured."""
PUT_PACE = 17
"""The same for the copy into the slot alone."""
NUM_MEASURED = 18
"""Chunks of this call finished so far."""
EXPIRED = 19
"""Sequence number of the call that has exceeded its time limit; set by the watchdog, read by waiting kernels."""
CALL_CHUNKS = 20
"""Number of chunks of the current call."""
TENSORS = 21
"""Address of the tensor records of a reduction."""
NUM_TENSORS = 22
SINGLE_TENSOR = 23
"""First of the TENSOR_FIELDS fields that hold the record of a reduction of one tensor."""
FRAGMENTED = 26
"""Whether the tensors of the call are so short that its pace does not measure memory."""
NUM_SLOTS = 27
"""Slots of each rank: a power of two, at least two."""
CROWDED = 28
"""Whether the host has more ranks than cores."""
LAST_ABORTED = 29
"""Number of the last call that this rank aborted, until all ranks are past it; then 0."""
OUT = 30
"""Target address of a reduction with only one target."""
SPACING = 31
"""Distance in a slot between the data for one rank and for the next; 0 if all ranks read the same data."""
CACHED_PACE = 32
"""PACE + PUT_PACE of the chunks that went through the caches in this call, if they were slow; otherwise 0."""
REJECTED = 33
"""Consecutive trials in which bypassing the caches was no faster although the caches were slow."""
SPENT = 34
"""Two fields, by chunk parity: nanoseconds spent on copying and reducing a chunk in progress, without waits."""

# --- Group: reading the memory of other processes (see kernels.peer_memory) -------------------------------

PROCESSES = 36
"""Address of the process ids of all ranks if their memory can be read, otherwise 0."""
ALLGATHER_PACES = 37
"""27 fields: for nine length classes the nanoseconds per KiB through the slots and by direct reads, and the number of
calls."""
ALLTOALL_PACES = 64
SCATTER_PACES = 91
"""Scatters from this rank."""
GATHER_PACES = 118
"""Gathers to this rank."""
SPENT_BEFORE = 145
"""Nanoseconds that the root of a scatter spent on its slot before all ranks arrived."""
GATHERS_READ = 146
"""Whether the last long gather to another rank was read directly."""
SEGMENT_BYTES = 147
"""Length of the shared segment at BLOCKS."""

# --- Group: result of the checked build (see kernels.access) ----------------------------------------------

VIOLATED_CHECK = 148
"""Number of the first check that failed in the current call, 0 if none did; then the offending value and its limit."""
VIOLATION_VALUE = 149
VIOLATION_LIMIT = 150

CALL_LOG_FIELDS = 151
"""Address of the fields of the call log, to which waits for other ranks are added; 0 if they are not counted."""
POINTERS = 152
"""Two addresses for each rank, the last fields: operands of a reduction, then the ranks' shared tensors."""


def group_fields(size: int) -> int:
    """Return the number of fields of the record of a group.

    >>> group_fields(4) - group_fields(3)
    2
    """
    return POINTERS + 2 * size


# --- Records that groups and calls refer to ----------------------------------------------------------------

SEND_ADDRESS, SEND_BYTES, RECEIVE_ADDRESS, RECEIVE_BYTES = range(4)
TRANSFER_FIELDS = 4

TENSOR_BEGIN, TENSOR_ADDRESS, TENSOR_BYTES = range(3)
"""Offset in the concatenation of all tensors, a multiple of a cache line; address; length."""
TENSOR_FIELDS = 3

SEGMENT_BEGIN, SEGMENT_END, SEGMENT_KEY, SEGMENT_FILE = range(4)
"""Address range in this process; key: a unique number (upper half) and the inode (lower half); process id (upper half)
and file descriptor (lower half)."""
SEGMENT_FIELDS = 4
MAPPINGS_PER_RANK = 64

# --- Prepared call ------------------------------------------------------------------------------------------

GROUP = 0
"""Address of the group record."""
ITEM_BYTES = 1
REDUCER = 2
"""Address of the reduction function (see kernels.reduction), 0 if none."""
ROOT = 3
"""Rank that receives a reduction or a gather, or sends a broadcast or a scatter; -1 for all ranks."""
TRANSFERS = 4
"""Address of one transfer record per rank."""
MESSAGE = 5
"""Address of the message in which the root of a scatter describes its tensor: DTYPE, number of dimensions, shape."""
DTYPE = 6
"""Number of the dtype, the same on all ranks; 0 if unknown."""
HOSTS = 7
"""Address of the hosts record of an allreduce over hosts, 0 for a call within a host."""
CALL_FIELDS = 8

# --- Prepared exchange of short messages: the arguments of MPI_Sendrecv -----------------------------------------

SENDRECV = 0
"""Address of the function; ITEM_BYTES is a field of this record, too."""
SENT_DTYPE = 2
"""Number of the dtype, the same on all ranks."""
SENT = 3
"""Address of the message to send: SENT_DTYPE, number of dimensions, shape, values."""
RECEIVED = 4
"""Address of the received message."""
RECEIVED_BYTES = 5
"""Length of the longest message."""
VALUE_BYTES = 6
"""Length of the longest values."""
BYTE_TYPE, SEND_TO, RECEIVE_FROM, MESSAGE_TAG, MPI_COMM = range(7, 12)
MPI_STATUS = 12
"""Address of memory for an MPI_Status."""
SEND_LOCK = 13
"""Address of the fields of the run lock of the queue of messages to SEND_TO."""
EXCHANGE_LOG = 14
"""Address of the fields of the call log of the exchange."""
SEND_CHANNEL, RECEIVE_CHANNEL = 15, 16
"""Addresses of the entries of the flight record for messages to the one rank and from the other."""
EXCHANGE_FIELDS = 17

# --- Prepared allreduce over hosts: the fields of an exchange, and these --------------------------------------------

HOSTS_CODE = 15
"""Code of the call."""
ROUNDS, NUM_ROUNDS = 16, 17
"""Address of one record for each round of messages; SENDRECV is 0 at ranks that send nothing to other hosts."""
NUM_HOSTS, OWN_HOST = 18, 19
"""Number of the vectors to combine, and the place of this rank's own one."""
OPERANDS = 20
"""Address of the addresses of these vectors."""
RESULT = 21
"""Address of the result."""
LOCAL_LOG = 22
"""Address of the fields of the call log of the ranks of this host; 0 if there is only this rank."""
REDUCE_STEP, BROADCAST_STEP = 23, 26
"""First fields of the steps within the host."""
STEP_CALL, STEP_CODE, STEP_SIGNED_CODE = range(3)
"""Of a step: address of its call record, its code in the call log, and in the signature."""
FAILED_STEP = 29
"""The step that has failed."""
MOST_GATHERED, RELAYED_BLOCKS = 30, 31
"""Length of the longest vectors that are gathered whole, and address of memory for the blocks of longer ones."""
EXCHANGE_WAITED = 32
"""Nanoseconds from the begin of the call until the vectors of all hosts had arrived."""
HOSTS_FIELDS = 33
STEP_BEFORE, STEP_ACROSS, STEP_AFTER = range(3)
ROUND_TARGET, ROUND_LENGTH, ROUND_ORIGIN, ROUND_POSITION = range(4)
"""Ranks to send to and to receive from; number of vectors; cyclic position of the first received one."""
ROUND_FIELDS = 4

# --- Queue of pieces of messages: BYTE_TYPE, MESSAGE_TAG, MPI_COMM and MPI_STATUS of an exchange, and these -----------

IRECV, ISEND, TEST = range(3)
"""Addresses of the functions of MPI."""
PIECES, MOST_PIECES = 3, 4
"""Address of the ring of the records of pieces, and their number, a power of two."""
PIECES_ADDED, PIECES_BEGUN, PIECES_DONE = 5, 6, 8
"""How many pieces have been added, how many of them begun, and how many of these received and sent."""
BYTES_IN_PROGRESS = 9
"""Bytes that are sent by the pieces which have begun and are not done."""
WINDOW_BYTES, LEAST_WINDOW, MOST_WINDOW, WINDOW_STEP = 13, 14, 15, 16
"""How many of them there may be, the limits of this number, and by how much it changes."""
LEAST_TIME = 17
"""Nanoseconds of the fastest piece since none was in progress; 0 if none is done."""
LONG_MESSAGES = 18
"""Address of records of messages: as many as a rank sends and receives together."""
QUEUE_FIELDS = 19

LONG_PEER, LONG_ADDRESS, LONG_BYTES = range(3)
LONG_FIELDS = 3

CHUNK_QUEUE = 0
"""Address of the queue. ITEM_BYTES and REDUCER are those of a call."""
CHUNK_NUMEL, CHUNK_PIECE_BYTES = 3, 4
CHUNK_RANK, CHUNK_SIZE = 5, 6
"""This rank and the number of ranks."""
CHUNK_MEMORY = 7
"""First of two fields: addresses of memory for the received parts of a chunk, used in turns."""
CHUNK_OPERANDS, CHUNK_RESULT = 9, 10
"""Address of the addresses of the parts to combine; that of the result."""
CHUNK_TIMES = 11
"""Address of the begin and the end of combining each chunk; 0 if nobody asks for them."""
CHUNKS_FIELDS = 12

PIECE_RECEIVE, PIECE_SEND = 0, 1
"""Requests of MPI: of what is received, and of what is sent, in the same turn."""
PIECE_RECEIVED, PIECE_SENT = 2, 3
"""The bytes of both; 0 for nothing."""
PIECE_PEER, PIECE_ADDRESS = 4, 5
"""What is sent, and to whom."""
PIECE_BEGIN = 6
"""When it began."""
PIECE_FIELDS = 7

# --- Prepared short allreduce on a GPU (see torchmpi.backends.ipc.short_allreduce) -------------------------------

STREAM_OPERATIONS, LAUNCH_KERNEL = range(2)
"""Addresses of functions of the CUDA driver: cuStreamBatchMemOp, cuLaunchKernel."""
STREAM_WAITS, NUM_STREAM_WAITS = 2, 3
"""Address of the operations with which a stream waits for the numbers of the other ranks, and how many they are."""
OWN_BLOCK = 4
"""Address of this rank's status block."""
BLOCKS_OF_OTHERS = 5
"""Address of the addresses of those of the other ranks."""
FILL_KERNEL, ADD_KERNEL, KERNEL_THREADS, MOST_BLOCKS, NUMEL_OF_BLOCK = range(6, 11)
"""The kernels, the threads of a block, the most blocks, and the elements that a block takes at once."""
FILL_PARAMETERS, ADD_PARAMETERS = 11, 13
"""First of two fields: addresses of the addresses of the parameters of a kernel, for each half. The values of three
parameters are in the next fields."""
GPU_TENSOR, GPU_NUMEL, GPU_NUMBER = 15, 16, 17
"""The address of the tensor, its elements, and the number that is published."""
GPU_CALL_FIELDS = 18

OPERATION_VALUE, OPERATION_FIELDS = 2, 6
"""Of an operation of a stream: the field of its number, and how many fields it has."""
IS_LATE = -1
"""Returned if other ranks have not enqueued their part; otherwise the error of CUDA, or 0."""

# --- Fast path (see torchmpi.shared_memory.fast_path): addresses -------------------------------------------

FIRST_CALL = 0
"""Of the first cached call; 0 = none, so that every call takes the path through Python."""
DESCRIBE = 1
"""Of torch's function that describes a tensor as a DLTensor."""
CHOSEN_COMM = 2
"""Of the context variable that is None unless this thread or task has chosen a communicator."""
NONE = 3
TENSOR_TYPE = 4
IS_NEG = 5
FALSE = 6
INCREMENT_VERSION = 7
SETTLE = 8
"""Of the Python function that continues when a kernel returns a status: (status, tensor, out, cached call)."""
TOUCH = 9
"""Of the Python function that records a write where INCREMENT_VERSION cannot."""
ABORT = 10
"""Of the Python function that aborts a call if SETTLE did not start: (cached call)."""
NOTE = 11
"""Of the Python function that records calls that NOTES does not take, (description, numbers); 0 for no recorder."""
NOTES = 12
"""Of the ring of notes."""
FRAME_AT = 13
"""Of `sys._getframe`."""
ONE = 14
LABELS = 15
"""Of the dict of the labels of calls, which notes have only in their origins."""
FAST_PATH_FIELDS = 16

# --- Ring of notes: the calls that have ended while a timeline is recorded ---------------------------------------

NUM_NOTED = 0
"""How many notes have been written."""
NUM_TAKEN = 1
"""How many of them Python has taken."""
KNOWN_CODES = 2
"""Addresses of known code, each at the position that it determines; plus IS_OWN for code of torchmpi or torch."""
NUM_CODES, CODE_SHIFT, IS_OWN = 8192, 5, 1
FIRST_NOTE = KNOWN_CODES + NUM_CODES
NUM_NOTES = 1 << 16

NOTED_INFO, NOTED_PLAN, NOTED_CODE = range(3)
"""Addresses of objects, of which the note has references: the description of the call; its plan, 0 for a call of the
fast path; the code that has made it."""
NOTED_OFFSET = 3
"""The offset of the instruction in the code; IS_ORIGIN if NOTED_CODE is the origin of a queued call."""
IS_ORIGIN = -1
NOTED_THREAD = 4
NOTED_NUMBERS = 5
"""Number, begin, end, bytes and code of the call, as the flight record has them, and its algorithm."""
NUM_NUMBERS, NUMBER_OF_BYTES = 6, 3
NOTE_FIELDS = NOTED_NUMBERS + NUM_NUMBERS

ORIGIN_QUEUED, ORIGIN_CODE, ORIGIN_OFFSET = range(3)
"""The time at which a call was queued, address of the code that has made it, and offset of the instruction."""
ORIGIN_FIELDS = 3

# --- Cached call ----------------------------------------------------------------------------------------------

NEXT_CALL = 0
"""Address of the next cached call, 0 for none."""
KEY = 1
"""Address of the object that identifies the call: the operation, the root, or both."""
COMM = 2
"""Address of the communicator, or of None for the default one."""
DLPACK_DTYPE = 3
"""Dtype as in a DLTensor: code, bits and lanes in one number."""
PREPARED_CALL = 4
"""Address of the call record."""
CALL_LOG = 5
"""Address of the fields of the group's call log."""
RUN_LOCK = 6
"""Address of the fields of the run lock of the group's call queue."""
CODE = 7
"""The code in the call log: collective, operation, dtype, root."""
SIGNED_CODE = 8
"""The code in the signature."""
FIRST_DIM = 9
"""First dimension that is part of the signature."""
DESCRIPTION = 10
"""Address of the object that describes the call to a recorder."""
CACHED_CALL_FIELDS = 11

# --- Arguments that the fast path writes for a kernel, after the call record ------------------------------------

ARGUMENT_SEQ, ARGUMENT_SIGNATURE, FIRST_ARGUMENT = range(3)

# --- Status: what a kernel returns, 0 for success; the low bits contain the rank concerned -----------------

MISMATCH = 1 << 20
"""That rank has made a different call."""
ABORTED = 2 << 20
"""That rank has aborted this call."""
UNMAPPED = 3 << 20
"""The shared tensor of that rank is not mapped in this process: map it and run the kernel again."""
UNEVEN = 4 << 20
"""The ranks differ in length."""
TIMEOUT = 5 << 20
"""The call has exceeded its time limit."""
UNREADABLE = 6 << 20
"""A rank could not read the memory of another. Internal to the kernels, which use the slots instead."""
VIOLATION = 7 << 20
"""Checked build only: a check failed on this rank; the group record has its number."""
STATUS_KINDS = ~((1 << 20) - 1)
NOT_FAST = -1
"""Of the functions of the fast path: the arguments must take the path through Python."""

# --- Checks of the checked build ------------------------------------------------------------------------------

CHECKS = (
    "",
    "rank within the group",
    "slots within the shared segment",
    "copy within one slot",
    "copy within the payload of the ring entry",
    "sequence numbers ascend",
    "counters READY and REDUCED ascend within the chunks of the call",
    "READY of a rank is at most two chunks ahead of this rank",
    "REDUCED of a rank is at most two chunks ahead of this rank",
    "offset within the shared tensor",
)
"""Descriptions by number; see kernels.access."""
(
    CHECK_RANK,
    CHECK_SEGMENT,
    CHECK_SLOT,
    CHECK_PAYLOAD,
    CHECK_SEQUENCE,
    CHECK_COUNTER,
    CHECK_READY,
    CHECK_REDUCED,
    CHECK_SHARED_TENSOR,
) = range(1, 10)
