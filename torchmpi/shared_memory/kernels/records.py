"""The private records that Python prepares and kernels read, and the statuses that kernels return.

The memory that the ranks share is described in :mod:`torchmpi.shared_memory.memory_layout`, what a record is in
:mod:`torchmpi.shared_memory.typed_records`.
"""

from __future__ import annotations

from ..memory_layout import CALL_NUMBER_BITS, FIELD_BYTES, Block, ChannelFields, LockFields, LogFields, MessageRing
from ..typed_records import Array, Atomic, Embedded, Pointer, Record, Word, Words

# --- Records that groups and calls refer to ----------------------------------------------------------------


class Transfer(Record):
    """What a rank sends to another one, and receives from it."""

    send_address = Word()
    send_bytes = Word()
    receive_address = Word()
    receive_bytes = Word()


class TensorRecord(Record):
    """One tensor of a list that is reduced together."""

    begin = Word()
    """Offset in the concatenation of all tensors, a multiple of a cache line."""
    address = Word()
    num_bytes = Word()


class SegmentRecord(Record):
    """A shared tensor of this process. Another thread may write it: `end` is written last and cleared first."""

    begin = Atomic()
    """First address in this process."""
    end = Atomic()
    key = Word()
    """A unique number (upper half) and the inode (lower half)."""
    file = Word()
    """Process id (upper half) and file descriptor (lower half)."""


class OwnSegments(Record):
    """The shared tensors of this process."""

    count = Word()
    segments = Array(0)
    """A `Segment` for each."""


class Mapping(Record):
    """Where a segment of another rank is mapped in this process."""

    key = Word()
    address = Word()


MAPPINGS_PER_RANK = 64


class Paces(Record):
    """Measurements of one class of lengths: nanoseconds per KiB, and the number of calls."""

    through_slots = Word()
    of_reads = Word()
    calls = Word()


NUM_LENGTHS = 9
"""Classes of lengths that are measured."""


class GroupRecord(Record):
    """The group on this rank, and the state of its current call."""

    rank = Word()
    size = Word()
    blocks = Pointer(Block)
    """The shared segment, which begins with the status blocks of all ranks."""
    slots = Word()
    """Address of the slots: `num_slots` of `slot_bytes` for each rank, in rank order."""
    slot_bytes = Word()
    chunks = Word()
    """Chunks that have passed through the slots before the current call: equal on all ranks between calls."""
    spins = Word()
    """Polls with a pause instruction before `sched_yield` is called."""
    yields = Word()
    """Polls with `sched_yield` before the wait begins to sleep."""
    current_seq = Word()
    """Sequence number of the current call."""
    whole_bytes = Word()
    """Up to this size a tensor is not divided among the ranks, which saves one synchronization."""
    own_segments = Pointer(OwnSegments)
    mappings = Pointer(Mapping)
    """The mapped segments of other ranks: MAPPINGS_PER_RANK for each rank."""
    chunk_bytes = Word()
    """Size of all chunks of the current call but the last; of transfers the share of one rank in a chunk."""
    free_until = Word()
    """Calls up to this number may write their ring entry without waiting: all ranks are past its previous use."""
    cache_bypass = Word()
    """How slots are written: through the caches (0), with non-temporal stores because the caches are slow now (1), or
    with non-temporal stores regardless of measurements (2)."""
    max_chunk_bytes = Word()
    """Upper limit of `chunk_bytes` in reductions."""

    # Measurements of the current call (see kernels.copying).
    pace = Word()
    """Nanoseconds per KiB of the best chunk of this call, or since `cache_bypass` changed; 0 = not measured."""
    put_pace = Word()
    """The same for the copy into the slot alone."""
    num_measured = Word()
    """Chunks of this call finished so far."""
    expired = Atomic()
    """Sequence number of the call that has exceeded its time limit; set by the watchdog, read by waiting kernels."""
    call_chunks = Word()
    """Number of chunks of the current call."""
    tensors = Pointer(TensorRecord)
    """The tensors of a reduction."""
    num_tensors = Word()
    single_tensor = Embedded(TensorRecord)
    """The record of a reduction of one tensor."""
    fragmented = Word()
    """Whether the tensors of the call are so short that its pace does not measure memory."""
    num_slots = Word()
    """Slots of each rank: a power of two, at least two."""
    crowded = Word()
    """Whether the host has more ranks than cores."""
    last_aborted = Word()
    """Number of the last call that this rank aborted, until all ranks are past it; then 0."""
    out = Array(1)
    """Target address of a reduction with only one target."""
    spacing = Word()
    """Distance in a slot between the data for one rank and for the next; 0 if all ranks read the same data."""
    cached_pace = Word()
    """`pace` + `put_pace` of the chunks that went through the caches in this call, if they were slow; otherwise 0."""
    rejected = Word()
    """Consecutive trials in which bypassing the caches was no faster although the caches were slow."""
    spent = Array(2)
    """By chunk parity: nanoseconds spent on copying and reducing a chunk in progress, without waits."""

    # Reading the memory of other processes (see kernels.peer_memory).
    processes = Pointer(Words)
    """The process ids of all ranks if their memory can be read."""
    allgather_paces = Embedded(Paces, NUM_LENGTHS)
    alltoall_paces = Embedded(Paces, NUM_LENGTHS)
    scatter_paces = Embedded(Paces, NUM_LENGTHS)
    """Scatters from this rank."""
    gather_paces = Embedded(Paces, NUM_LENGTHS)
    """Gathers to this rank."""
    spent_before = Word()
    """Nanoseconds that the root of a scatter spent on its slot before all ranks arrived."""
    gathers_read = Word()
    """Whether the last long gather to another rank was read directly."""
    segment_bytes = Word()
    """Length of the shared segment at `blocks`."""

    # Result of the checked build (see kernels.access).
    violated_check = Word()
    """Number of the first check that failed in the current call, 0 if none did; then the value and its limit."""
    violation_value = Word()
    violation_limit = Word()

    call_log = Pointer(LogFields)
    """The call log, to which waits for other ranks are added; 0 if they are not counted."""
    operands = Array(0)
    """An address for each rank: operands of a reduction. Then another for each: the ranks' shared tensors."""


# --- Prepared call ------------------------------------------------------------------------------------------


class TensorMessage(Record):
    """The description of a tensor that a rank sends, before the values."""

    dtype = Word()
    """Number of the dtype, the same on all ranks; 0 if unknown."""
    num_dims = Word()
    shape = Array(0)


DESCRIPTION_BYTES = 16 * FIELD_BYTES
"""The room for a description in a message between hosts."""

STEPS = ("barrier", "reduce", "gather", "broadcast", "reduce_scatter")
"""The steps within a host, by number; an allgather is a gather without a root."""


class StepRecord(Record):
    """A step within the host of a call over hosts."""

    kind = Word()
    """Its number in STEPS."""
    call: Pointer[KernelCall] = Pointer("KernelCall")
    code = Word()
    """The code of the step in the call log."""
    signed_code = Word()
    """The code in the signature."""


class RoundRecord(Record):
    """A round of messages between hosts (torchmpi.tensors.schedule.Carried)."""

    target = Word()
    """Host to send to."""
    num_sent = Word()
    """Number of blocks."""
    origin = Word()
    """Host to receive from."""
    position = Word()
    """Position of the first received block."""
    num_received = Word()


class AnyMessage(Record):
    """A message that a program repeats."""

    by_mpi = Word()
    """Whether it is a message of MPI, and not one through rings."""


class MpiMessage(AnyMessage):
    """A prepared message of MPI to one rank, from one, or both.

    Short values follow their description in one message, long ones in a second message. With a tag there are values
    alone.
    """

    irecv = Word()
    """Addresses of the functions of MPI."""
    isend = Word()
    test = Word()
    get_count = Word()
    byte_type = Word()
    comm = Word()
    status = Word()
    """Address of memory for an MPI_Status."""
    has_tag = Word()
    tag = Word()
    """Of descriptions, and of the values that follow them."""
    values_tag = Word()
    """Of values in a message of their own."""
    send_to = Word()
    receive_from = Word()
    send_lock = Pointer(LockFields)
    """The run lock of the queue of messages to `send_to`; 0 if nothing is sent."""
    receive_lock = Pointer(LockFields)
    """Likewise."""
    item_bytes = Word()
    sent_dtype = Word()
    """Number of the dtype, the same on all ranks."""
    sent = Pointer(Words)
    """The message to send; of a receive the expected description."""
    received = Pointer(Words)
    received_bytes = Word()
    """Length of the longest message."""
    packed_bytes = Word()
    """Length of the longest values that follow their description."""
    value_bytes = Word()
    """Length of the longest values."""
    send = Array(1)
    """Requests of MPI: of the description, and of values in a message of their own."""
    send_values = Array(1)
    receive = Array(1)
    """That of the part that is awaited."""
    sending = Word()
    """The parts that have not left: DESCRIPTION, VALUES, or both."""
    receiving = Word()
    """The part that is awaited, 0 for none; OTHER if a description has arrived that is not the expected one."""
    found_bytes = Word()
    """The length of what has been received with a tag."""
    address = Word()
    """The values of the tensor,"""
    num_bytes = Word()
    """and their length."""
    is_background = Word()
    """Whether the program goes on: a receive is then the first one of those that are deferred."""
    lock = Pointer(LockFields)
    """Fields with the number of deferred receives of the group."""
    is_unfinished = Word()
    """Whether Python must continue, and has the locks."""
    patience = Word()
    """How many nanoseconds to wait for the other rank."""
    yields = Word()
    """Whether other ranks need the core meanwhile."""
    num_open = Word()
    """Messages of this kind that this rank has sent, minus those that it has received."""
    begun = Word()
    """When it began, in nanoseconds."""
    call_log = Pointer(LogFields)
    send_channel = Pointer(ChannelFields)
    receive_channel = Pointer(ChannelFields)


DESCRIPTION, VALUES, OTHER = 1, 2, 4


class Frame(Record):
    """What a message in a ring begins with."""

    tag = Word()
    is_elsewhere = Word()
    """Whether the values are sent by MPI."""
    num_bytes = Word()
    dtype = Word()
    """Number of the dtype, the same on all ranks."""
    num_dims = Word()
    shape = Array(0)


class MessageRequest(Record):
    """A message that a rank sends or receives, as far as it has got."""

    state = Word()
    """WAITING, BEGUN or ENDED."""
    frame = Pointer(Frame)
    """What is sent, or expected."""
    found = Pointer(Frame)
    """What is received."""
    compared = Word()
    """How many fields of both must be equal, from `num_bytes` on."""
    differs = Word()
    """Whether they are not: the values are dropped."""
    address = Word()
    """Where the values are, or go to."""
    num_bytes = Word()
    """How many bytes of values there are in the ring, of a receive when it has begun."""
    moved = Word()
    """How many of them have been written to the ring, or read from it."""
    begun = Word()
    """When it began, in nanoseconds."""
    is_from_any = Word()
    """Whether it may begin in several directions;"""
    direction = Word()
    """the one in which it has begun."""


WAITING, BEGUN, ENDED = range(3)
SOME_ENDED = 1
"""`advance` returns this if a message has ended, or one from any rank has begun."""
UNEXPECTED = 2
"""And this, and the number of a direction, if a message arrives there that has another tag than the expected one."""


class Direction(Record):
    """One direction between this rank and another, and the message of this rank that is next or has begun there."""

    ring = Pointer(MessageRing)
    other = Pointer(MessageRing)
    """The ring of the other rank to itself."""
    request = Pointer(MessageRequest)
    is_receive = Word()


class MessageCall(AnyMessage):
    """A message through rings to one rank, from one, or both in place."""

    out = Pointer(MessageRing)
    """Of the sent message; 0 if none is sent."""
    into = Pointer(MessageRing)
    """Of the received one, likewise."""
    receiver = Pointer(MessageRing)
    """The rings to themselves: of the rank that receives,"""
    sender = Pointer(MessageRing)
    """and of the one that sends."""
    capacity = Word()
    polls = Word()
    patience = Word()
    """How many nanoseconds to wait for the other rank, after the polls."""
    is_background = Word()
    """Whether the program goes on: a receive is then the first one of those that are deferred."""
    has_tag = Word()
    """Whether the lengths of sent and received message are compared alone."""
    sending = Embedded(MessageRequest)
    receiving = Embedded(MessageRequest)
    item_bytes = Word()
    begun = Word()
    """When it began, in nanoseconds."""
    lock = Pointer(LockFields)
    """That of all messages of the group."""
    call_log = Pointer(LogFields)
    send_channel = Pointer(ChannelFields)
    receive_channel = Pointer(ChannelFields)


class ComparedNumber(Record):
    """What a message between hosts begins with: a number that must be equal on all of them."""

    lowest = Word()
    """The lowest one of which the sender knows,"""
    highest = Word()
    """and the highest one."""


class HostsWait(Record):
    """How other threads end a call that waits for messages of other hosts."""

    polling = Atomic()
    """Sequence number of the call that waits; 0 for none."""
    expired = Atomic()
    """Sequence number of the call that is to end."""


class Hosts(Record):
    """A prepared short call over hosts; `isend` is 0 at ranks that send nothing to other hosts."""

    byte_type = Word()
    comm = Word()
    status = Word()
    """Address of memory for an MPI_Status."""
    tag = Word()
    sent = Pointer(Words)
    """The message to send."""
    received = Pointer(Words)
    """The received message."""
    received_bytes = Word()
    """Length of the longest message."""
    value_bytes = Word()
    """Length of the longest values."""
    call_log = Pointer(LogFields)
    irecv = Word()
    """Addresses of the functions of MPI."""
    isend = Word()
    test = Word()
    receive = Array(1)
    """Request of MPI of the message to receive."""
    send = Array(1)
    """Request of MPI of the message to send."""
    wait = Pointer(HostsWait)
    eager = Word()
    """How many nanoseconds to wait before other ranks may have the core."""
    mark = Word()
    """Added to the number of the call: calls with the same code may send different messages."""
    rounds = Pointer(RoundRecord)
    num_rounds = Word()
    num_hosts = Word()
    own_host = Word()
    operands = Pointer(Words)
    """The addresses of the blocks of all hosts."""
    result = Array(1)
    """Address of the result of a reduction."""
    intra_log = Pointer(LogFields)
    """The call log of the ranks of this host; 0 if there is only this rank."""
    before = Embedded(StepRecord)
    after = Embedded(StepRecord)
    failed_step = Word()
    """The step that has failed."""
    most_gathered = Word()
    """Length of the longest vectors that are gathered whole."""
    relayed_blocks = Word()
    """Address of memory for blocks that are relayed."""
    waited = Word()
    """Nanoseconds from the begin of the call until the blocks of all hosts had arrived."""

    # What the collective does, and this rank in it.
    sent_item_bytes = Word()
    """The size of an element that is sent: partial results may be wider than those of the tensor."""
    widen = Word()
    """Address of the function that makes such elements of the tensor; 0 if they are alike."""
    finish = Word()
    """Address of the function that makes the result of the total; 0 if they are alike."""
    divisor = Word()
    """What it divides an average by."""
    source = Array(1)
    """The address of what these two convert."""
    reduces = Word()
    divides = Word()
    gathers = Word()
    copies = Word()
    """Whether this rank copies its tensor to `own` first."""
    receives = Word()
    """Whether this rank gets a result."""
    is_root = Word()
    is_home = Word()
    """Whether the root is on this host."""
    own = Word()
    """Address of the memory in which the first rank of a host collects what the host sends; of other ranks theirs."""
    scratch = Word()
    """Address of further memory, for what this rank receives although it has no tensor for it."""
    takes_part = Word()
    """Whether each rank takes its part of a vector that all ranks get: the others than the root in `given_memory`."""
    given_memory = Word()
    """Addresses of memory for the tensors of lists, as rows."""
    received_memory = Word()

    # Places of the ranks.
    ranks = Pointer(Words)
    """The ranks of all hosts, in `most_ranks` places for each; -1 for none."""
    most_ranks = Word()
    num_local = Word()
    """Ranks of this host."""
    place = Word()
    """The place of this rank on its host."""
    block_units = Word()
    """The length of a block of a host, and of what is passed on in a host: see `Blocks` of torchmpi.backends."""
    passed_units = Word()

    # An exchange of parts of any length, and a scatter of which the root alone knows the tensor.
    frames: Pointer[KernelCall] = Pointer("KernelCall")
    """The prepared gather or broadcast of frames; 0 for other calls."""
    frame_bytes = Word()
    """The length of a frame: sizes of parts or a description, and values if there is room."""
    parts: Pointer[Hosts] = Pointer("Hosts")
    """The messages between all ranks."""
    requests = Pointer(Words)
    """Of such a record memory for two requests of MPI for each rank."""

    # A call whose values follow the comparison in messages.
    long: Pointer[Hosts] = Pointer("Hosts")
    """The comparison in such a call, of which `after` is repeated for further hosts; 0 if there are no such calls."""
    most_long = Word()
    """Length of the longest tensor of such a call as it is sent, with as many rows for each rank as for the first."""
    memory = Word()
    """Address of the memory for the sums that are sent and received."""
    algorithm = Word()
    """The algorithm that the call log stores."""
    num_done = Word()
    """Of such a comparison: for how many hosts the step has been made."""


OF_ROWS, OF_FRAMES, LONG = (1 << CALL_NUMBER_BITS - each for each in (1, 2, 3))
"""Added to the number of a call that only compares the numbers of rows, of one that sends frames, and of a long one."""
STEP_BEFORE, STEP_BETWEEN, STEP_AFTER, STEP_PARTS, STEP_OF_HOST = range(5)
"""The last two: parts in messages of their own, and the step within the host for a further host."""


class KernelCall(Record):
    """A prepared call."""

    group = Pointer(GroupRecord)
    item_bytes = Word()
    reducer = Word()
    """Address of the reduction function (see kernels.reduction), 0 if none."""
    root = Word()
    """Rank that receives a reduction or a gather, or sends a broadcast or a scatter; -1 for all ranks."""
    transfers = Pointer(Transfer)
    """One for each rank."""
    message = Pointer(TensorMessage)
    """The description of the tensor that this rank offers or expects in a scatter."""
    dtype = Word()
    """Number of the dtype, the same on all ranks; 0 if unknown."""
    hosts = Pointer(Hosts)
    """For a call over hosts; 0 for a call within a host."""
    given_parts = Pointer(Words)
    received_parts = Pointer(Words)
    """The addresses of the parts of each rank, if they are tensors of a list; 0 if they are rows of one tensor."""


# --- Queue of pieces of messages ------------------------------------------------------------------------------


class LongMessage(Record):
    """A message in pieces."""

    peer = Word()
    address = Word()
    num_bytes = Word()


class Piece(Record):
    """What is received and sent in the same turn."""

    receive = Array(1)
    """Request of MPI of what is received."""
    send = Array(1)
    """Request of MPI of what is sent."""
    received = Word()
    """The bytes of what is received; 0 for nothing."""
    sent = Word()
    peer = Word()
    """To whom it is sent."""
    address = Word()
    """What is sent."""
    begin = Word()
    """When it began."""


class Queue(Record):
    """Long messages in pieces, of which few are in progress."""

    irecv = Word()
    """Addresses of the functions of MPI."""
    isend = Word()
    test = Word()
    byte_type = Word()
    """The arguments of all pieces."""
    tag = Word()
    comm = Word()
    status = Word()
    """Address of memory for an MPI_Status."""
    messages = Pointer(LongMessage)
    """As many messages as a rank sends and receives together."""
    pieces = Pointer(Piece)
    """The ring of pieces."""
    most_pieces = Word()
    """Their number, a power of two."""
    added = Word()
    """How many pieces have been added."""
    begun = Word()
    """How many of them have begun."""
    done = Word()
    """How many of these have been received and sent."""
    bytes_in_progress = Word()
    """Bytes that are sent by the pieces which have begun and are not done."""
    window_bytes = Word()
    """How many bytes may be in progress."""
    least_window = Word()
    """The limits of this number."""
    most_window = Word()
    window_step = Word()
    """By how much it changes."""
    least_time = Word()
    """Nanoseconds of the fastest piece since none was in progress; 0 if none is done."""


class Chunks(Record):
    """A reduction by such messages, chunk by chunk."""

    queue = Pointer(Queue)
    item_bytes = Word()
    reducer = Word()
    numel = Word()
    """Elements of a chunk."""
    piece_bytes = Word()
    rank = Word()
    size = Word()
    memory = Array(2)
    """Addresses of memory for the received parts of a chunk, used in turns."""
    operands = Pointer(Words)
    """The addresses of the parts to combine."""
    result = Array(1)
    """The address of the result."""
    times = Pointer(Words)
    """The begin and the end of combining each chunk; 0 if nobody asks for them."""


# --- Prepared short allreduce on a GPU (see torchmpi.backends.ipc.short_allreduce) -------------------------------


class StreamOperation(Record):
    """An operation with which a stream waits for a number (CUstreamBatchMemOpParams)."""

    value = Word(at=2)
    rest = Array(3)


class GpuCall(Record):
    """A prepared short allreduce on a GPU."""

    stream_operations = Word()
    """Address of the driver's cuStreamBatchMemOp."""
    launch_kernel = Word()
    """Address of cuLaunchKernel."""
    waits = Pointer(StreamOperation)
    """The operations with which a stream waits for the numbers of the other ranks."""
    num_waits = Word()
    own_block = Pointer(Block)
    others = Pointer(Words)
    """The addresses of the status blocks of the other ranks."""
    fill_kernel = Word()
    add_kernel = Word()
    kernel_threads = Word()
    """The threads of a block."""
    most_blocks = Word()
    numel_of_block = Word()
    """The elements that a block takes at once."""
    fill_parameters = Array(2)
    """Addresses of the addresses of the parameters of a kernel, for each half. The values of three parameters are in
    the fields at the end."""
    add_parameters = Array(2)
    tensor = Word()
    numel = Word()
    number = Word()
    """The number that is published."""


IS_LATE = -1
"""Returned if other ranks have not enqueued their part; otherwise the error of CUDA, or 0."""

# --- Fast path (see torchmpi.shared_memory.fast_path) -----------------------------------------------------------


FLAT = -1


class CachedCallRecord(Record):
    """A call that the fast path can run, with the arguments that identify it."""

    following: Pointer[CachedCallRecord] = Pointer("CachedCallRecord")
    """The next cached call, 0 for none."""
    key = Word()
    """Address of the object that identifies the call: the operation, the root, or both."""
    comm = Word()
    """Address of the communicator, or of None for the default one."""
    backend = Word()
    """Address of the name of the backend, or of None for that of the selection table."""
    dlpack_dtype = Word()
    """Dtype as in a DLTensor: code, bits and lanes in one number."""
    call = Pointer(KernelCall)
    """The prepared call; of a `sendreceive` its exchange."""
    call_log = Pointer(LogFields)
    run_lock = Pointer(LockFields)
    """The run lock of the group's call queue."""
    code = Word()
    """The code in the call log: collective, operation, dtype, root."""
    signed_code = Word()
    """The code in the signature."""
    first_dim = Word()
    """First dimension that is part of the signature."""
    given_rows = Word()
    received_rows = Word()
    """As how many rows the tensors are taken, whatever their shapes; 0: with their shapes, FLAT: as one dimension."""
    packed = Word()
    """Of a call in place the address of memory for a short tensor with gaps between its elements; 0 for none."""
    only_compares = Word()
    """Whether the call is only compared in shared memory, and Python runs it then, by a library."""
    bound = Word()
    """Address of the object that begins an asynchronous call like this one; 0 if none does."""


class FastPath(Record):
    """Data of the machine code of one collective's fast path: addresses."""

    first_call = Pointer(CachedCallRecord)
    """0 for none, so that every call takes the path through Python."""
    describe = Word()
    """Of torch's function that describes a tensor as a DLTensor."""
    chosen_comm = Word()
    """Of the context variable that is None unless this thread or task has chosen a communicator."""
    none = Word()
    tensor_type = Word()
    list_type = Word()
    is_neg = Word()
    false = Word()
    increment_version = Word()
    settle = Word()
    """Of the Python function that continues when a kernel returns a status: (status, tensor, out, cached call)."""
    touch = Word()
    """Of the Python function that records the writes to a sequence of tensors where `increment_version` cannot."""
    abort = Word()
    """Of the Python function that aborts a call if `settle` did not start: (cached call, tensor)."""
    same_shapes = Word()
    """Whether a result in another tensor has the shape of the source."""
    any_length = Word()
    """Whether the parts of lists may differ in length."""
    is_included = Word()
    """Of torch's function that tells whether a dispatch key is active in this thread,"""
    watching_keys = Array(3)
    """and these keys."""


class DLTensor(Record):
    """Torch's description of a tensor."""

    data = Word()
    device = Word()
    num_dims_and_dtype = Word()
    """In the lower half and in the upper one."""
    shape = Pointer(Words)
    strides = Pointer(Words)
    byte_offset = Word()


class Arguments(Record):
    """What the fast path writes for a kernel: its arguments after the call record."""

    seq = Word()
    signature = Word()
    given_parts = Pointer(Words)
    received_parts = Pointer(Words)
    """Of a KernelCall, which no other thread uses from when the call has been entered."""
    rest = Array(0)


class ScatterArguments(Arguments):
    """The arguments of the kernel `scatter`."""

    message = Pointer(TensorMessage)
    message_bytes = Word()
    source = Word()
    num_rows = Word()
    row_bytes = Word()
    target = Word()


# --- Status: what a kernel returns, 0 for success; the low bits contain the rank concerned -----------------

PART_SIZES = -1
"""In the place of the number of rows of an alltoall: a rank exchanges parts, whose sizes follow."""

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
UNFINISHED = 6 << 20
"""A message waits for the other rank: Python continues it."""
UNREADABLE = 9 << 20
"""A rank could not read the memory of another. Internal to the kernels, which use the slots instead."""
VIOLATION = 7 << 20
"""Checked build only: a check failed on this rank; the group record has its number."""
COMPARED = 8 << 20
"""All ranks have made the same call, which Python runs (`only_compares` of a CachedCallRecord)."""
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
    "the counters ready and reduced ascend within the chunks of the call",
    "ready of a rank is at most two chunks ahead of this rank",
    "reduced of a rank is at most two chunks ahead of this rank",
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
