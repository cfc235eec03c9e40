"""The records of the parameter server's kernels: shared memory of the shards, and a private pass over them.

docs/design/parameterserver.md describes the protocol.
"""

from __future__ import annotations

from ...shared_memory.typed_records import Array, Atomic, Pointer, Record, Word

CHUNK_BYTES = 64 << 10
"""Size of a chunk in the array with the largest elements."""
MOST_STATES = 2
NUM_ARRAYS = 1 + MOST_STATES
"""Values, then states."""
NUM_COEFFICIENTS = 6


class Header(Record):
    """The header of a chunk, a cache line of its own."""

    lock = Atomic()
    """Number of the actor that holds the lock, or 0."""
    version = Word()
    """Rules applied so far."""
    steps = Word()
    """Rules with states applied so far."""
    rest = Array(5)


class Shard(Record):
    """A shard of the server."""

    headers = Pointer(Header)
    """One for each chunk."""
    arrays = Array(NUM_ARRAYS)
    """Addresses of the values and of the states."""
    begin = Word()
    """First element."""
    numel = Word()


class Pass(Record):
    """A pass over elements of a tensor."""

    # Of the actor.
    actor = Word()
    """Its number."""
    scratch = Word()
    """Address of its scratch memory."""
    coefficients = Word()
    """Address of the coefficients of the rule."""
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

    # Of the chunk at `position`.
    header = Pointer(Header)
    """0 after the last chunk."""
    first_shard = Word()
    """The shard to begin with."""
    chunk_begin = Word()
    """Its range of elements."""
    chunk_end = Word()
    arrays = Array(NUM_ARRAYS)
    """Addresses of its arrays."""


# Values of `rule` other than addresses.
READING = 0
IN_PYTHON = 1

# Statuses that a kernel returns.
DONE = 0
HELD = 1
"""Another actor has held the lock for a long time: check whether its process is alive, and call again."""
TAKEN = 2
"""For a rule in Python: a chunk is locked, and copied to the scratch memory."""
