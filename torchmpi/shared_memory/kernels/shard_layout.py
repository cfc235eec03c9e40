"""Field numbers of the parameter server's kernels: shared memory of the shards, and the private record of a pass.

docs/design/parameterserver.md describes the protocol.
"""

from __future__ import annotations

CHUNK_BYTES = 64 << 10
"""Size of a chunk in the array with the largest elements."""
MOST_STATES = 2
NUM_ARRAYS = 1 + MOST_STATES
"""Values, then states."""
NUM_COEFFICIENTS = 6

# Header of a chunk, a cache line of its own.
LOCK = 0
"""Number of the actor that holds the lock, or 0."""
VERSION = 1
"""Rules applied so far."""
STEPS = 2
"""Rules with states applied so far."""
HEADER_BYTES = 64

# Record of a shard: addresses of headers and arrays, first element, number of elements.
SHARD_HEADERS = 0
SHARD_ARRAYS = 1
SHARD_BEGIN = SHARD_ARRAYS + NUM_ARRAYS
SHARD_NUMEL = SHARD_BEGIN + 1
SHARD_FIELDS = SHARD_NUMEL + 1

# A pass over elements of a tensor.
(
    ACTOR,
    SCRATCH,
    COEFFICIENTS,
    SPINS,
    YIELDS,
    SHARDS,
    NUM_SHARDS,
    CHUNK_NUMEL,
    ITEM_BYTES,
    STATE_BYTES,
    NUM_STATES,
    RULE,
    DATA,
    DATA_BEGIN,
    DATA_END,
    POSITION,
    SHIFT,
    SHIFT_POSITION,
    VERSIONS,
    HOLDER,
    HEADER,
    FIRST_SHARD,
    CHUNK_BEGIN,
    CHUNK_END,
    ARRAYS,
) = range(25)
"""Record of a pass.

Of the actor: its number; addresses of its scratch memory and of the coefficients; limits of polling. Of the server:
address and number of the shard records; elements of a chunk; bytes of an element and of a state. Of the call: number of
states of the rule; the rule; address of the data and its range of elements; chunks done so far; shards done so far, and
the chunks in them; sum of the VERSIONs found; holder of a lock that could not be taken. Of the chunk at POSITION:
address of its header, or 0; the shard to begin with; its range of elements; addresses of its arrays."""
PLAN_FIELDS = ARRAYS + NUM_ARRAYS

# Values of RULE other than addresses.
READING = 0
IN_PYTHON = 1

# Statuses that a kernel returns.
DONE = 0
HELD = 1
"""Another actor has held the lock for a long time: check whether its process is alive, and call again."""
TAKEN = 2
"""For a rule in Python: a chunk is locked, and copied to the scratch memory."""
