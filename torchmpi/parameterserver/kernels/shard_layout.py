"""The records of the parameter server's kernels: shared memory of the shards, a private pass over them, and requests.

docs/design/parameterserver.md describes the protocol.
"""

from __future__ import annotations

from ...shared_memory.kernels.records import FastPath
from ...shared_memory.memory_layout import ChannelFields, LockFields
from ...shared_memory.typed_records import Array, Atomic, Pointer, Record, Word

CHUNK_BYTES = 64 << 10
"""Size of a chunk in the array with the largest elements."""
MOST_STATES = 2
NUM_ARRAYS = 1 + MOST_STATES
"""Values, then states."""
NUM_COEFFICIENTS = 6

# Numbers of an actor in float64, behind the coefficients.
SCALED = NUM_COEFFICIENTS
"""The coefficients of a damped rule for the chunk at hand."""
OFFSET = SCALED + NUM_COEFFICIENTS
"""What is added to the staleness before a rate is divided by it."""
AGES = OFFSET + 1
"""Sum of the staleness of all chunks of the call; nan if it is unknown."""
NUM_NUMBERS = AGES + 1


class Header(Record):
    """The header of a chunk, a cache line of its own."""

    lock = Atomic()
    """Number of the actor that holds the lock, or 0."""
    version = Word()
    """Rules applied so far."""
    steps = Word()
    """Rules with states applied so far."""
    row_steps = Atomic()
    """Of the first chunk of a shard: rules with states applied so far to rows, of any chunk of the server."""
    rest = Array(4)


class Image(Record):
    """A copy of a chunk that an actor keeps while it applies a rule, so that another one can undo half of it."""

    chunk = Atomic()
    """Number of the chunk among those of all shards, plus 1; 0 while the copy is not needed."""
    version = Word()
    steps = Word()
    """Of its header."""
    numel = Word()
    num_arrays = Word()
    """How many of its arrays the rule changes."""
    rest = Array(3)


class Shard(Record):
    """A shard of the server."""

    headers = Pointer(Header)
    """One for each chunk."""
    arrays = Array(NUM_ARRAYS)
    """Addresses of the values and of the states."""
    begin = Word()
    """First element."""
    numel = Word()
    first_chunk = Word()
    """Number of its first chunk among those of all shards."""


class Pass(Record):
    """A pass over elements of a tensor."""

    # Of the actor.
    actor = Word()
    """Its number."""
    scratch = Word()
    """Address of its scratch memory."""
    coefficients = Word()
    """Address of the coefficients of the rule, and of other numbers in float64."""
    spins = Word()
    yields = Word()

    # Of the server.
    shards = Pointer(Shard)
    num_shards = Word()
    chunk_numel = Word()
    """Elements of a chunk."""
    item_bytes = Word()
    state_bytes = Word()
    """Bytes of an element of a state."""
    images = Pointer(Image)
    """Of all actors,"""
    num_images = Word()
    """and how many; 0 if rules are applied without copies."""
    image_arrays = Word()
    """Address of their arrays: NUM_ARRAYS times CHUNK_BYTES for each."""
    image = Word()
    """The number of that of this actor."""

    # Of the call.
    num_states = Word()
    """Number of states of the rule."""
    rule = Word()
    data = Word()
    """Address of the data,"""
    data_begin = Word()
    """and its range of elements."""
    data_end = Word()
    position = Word()
    """Chunks done so far."""
    shift = Word()
    """Shards done so far,"""
    shift_position = Word()
    """and the chunks in them."""
    versions = Word()
    """Sum of the versions found."""
    holder = Word()
    """Holder of a lock that could not be taken."""

    header = Pointer(Header)
    """Of the chunk at `position`; 0 after the last chunk."""
    first_shard = Word()
    """The shard to begin with."""
    base = Word()
    """Address of the versions that the sender knows, without its own sends, in float64 for each chunk; or 0."""
    own = Word()
    """The same of the numbers of its own sends."""
    halves = Word()
    """Twice the power of the staleness by which the first coefficient is divided; 0 for none."""
    rows = Word()
    """Address of the numbers of rows, in increasing order; the data have the elements of these rows only."""
    row_numel = Word()
    """Elements of a row; 0 if the data have all elements."""
    row_steps = Word()
    """Address of the number of this step for each shard, of a rule with states that is applied to rows."""
    cursor = Word()
    """Elements of the data before the chunk at hand, of rows,"""
    cursor_end = Word()
    """and where the data end."""

    # Of the chunk at `position`.
    chunk = Word()
    """Its number among the chunks of all shards."""
    version = Word()
    """Its version when its lock was taken."""
    first_header = Pointer(Header)
    """The header of the first chunk of its shard."""
    chunk_begin = Word()
    """Its range of elements."""
    chunk_end = Word()
    arrays = Array(NUM_ARRAYS)
    """Addresses of its arrays."""
    run_arrays = Array(NUM_ARRAYS)
    """The same, from the first of adjacent rows on."""


class RequestFields(ChannelFields):
    """The record of the sends of a client to a server, or of its receives: an entry of the flight record."""

    total_bytes = Word()
    total_ns = Word()
    """Of all requests that have ended."""
    versions = Word()
    """Of the last one: sum of the versions that it has found,"""
    num_chunks = Word()
    """over so many chunks,"""
    ages = Word()
    """and sum of the staleness, a float64."""


class RepeatedRequest(Record):
    """A request that a program repeats, as the path through Python has prepared it."""

    following: Pointer[RepeatedRequest] = Pointer("RepeatedRequest")
    """0 for none."""
    key = Word()
    """Address of what identifies it: the object given as rule, or the tensor that receives."""
    address = Word()
    """Of the memory of that tensor; 0 for any."""
    prepared = Array(Pass.rows - Pass.shards)
    """What is stored in the fields of a pass from `shards` to `halves`,"""
    numbers = Array(NUM_NUMBERS)
    """and in the numbers of its actor."""


class RepeatedRequests(Record):
    """The requests of a client to a server that it repeats."""

    path = Pointer(FastPath)
    first_send = Pointer(RepeatedRequest)
    first_receive = Pointer(RepeatedRequest)
    """0 for none, so that every request takes the path through Python."""
    run_lock = Pointer(LockFields)
    plan = Pointer(Pass)
    """Of the actor."""
    sends = Pointer(RequestFields)
    receives = Pointer(RequestFields)
    numel = Word()
    num_bytes = Word()
    dlpack_dtype = Word()
    dtype = Word()
    """Number of the dtype in records."""


# Values of `rule` other than addresses.
READING = 0
IN_PYTHON = 1

# Statuses that a kernel returns.
DONE = 0
HELD = 1
"""Another actor has held the lock for a long time: check whether its process is alive, and call again."""
TAKEN = 2
"""For a rule in Python: a chunk is locked, and copied to the scratch memory."""
