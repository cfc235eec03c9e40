"""What the kernels of the parameter server know: words of shared memory, and private ones of a prepared pass.

The protocol is told in docs/design/parameterserver.md.
"""

from __future__ import annotations

CHUNK_BYTES = 64 << 10
"""Size of a chunk in the array with the largest elements."""
MOST_STATES = 2
NUM_ARRAYS = 1 + MOST_STATES
"""Values, then states."""
NUM_COEFFICIENTS = 8
"""The last two are the kernel's: see `Adam` in torchmpi.shared_memory.kernels.server_rules."""

# The header of a chunk, a cache line of its own.
LOCK = 0
"""Number of the actor that holds it, or 0."""
VERSION = 1
"""Rules applied so far."""
STEPS = 2
"""Rules with states applied so far."""
HEADER_BYTES = 64

# The row of an actor in the arena. Actors are numbered from 1.
PROCESS, STARTED, REDO, TAKING, NEW_VERSION, NEW_STEPS, NEW_BYTES = range(7)
"""Who it is; whether what follows is to be done again if it dies; the dead actor whose lock it is taking over; what the
chunk's words become; how many bytes of each array."""
SCRATCH_START = 4096
BLOCK_BYTES = SCRATCH_START + NUM_ARRAYS * CHUNK_BYTES

# A shard that can be reached, as its process knows it: addresses, and which elements it has.
SHARD_HEADERS = 0
SHARD_ARRAYS = 1
SHARD_BEGIN = SHARD_ARRAYS + NUM_ARRAYS
SHARD_NUMEL = SHARD_BEGIN + 1
SHARD_FIELDS = SHARD_NUMEL + 1

# A pass over elements of a tensor.
(
    ARENA,
    ACTOR,
    SHARDS,
    NUM_SHARDS,
    FIRST_SHARD,
    CHUNK_NUMEL,
    ITEM_BYTES,
    STATE_BYTES,
    NUM_STATES,
    RULE,
    COEFFICIENTS,
    DATA,
    DATA_BEGIN,
    DATA_END,
    POSITION,
    VERSIONS,
    SPINS,
    YIELDS,
    HOLDER,
    CHUNK_BEGIN,
    CHUNK_END,
    TARGETS,
) = range(22)
"""Address of the arena; number of this actor; address and number of the shards, and with which to begin; the shape of
their chunks; the rule (an address, or 0 for reading) and its coefficients; address of the data and which elements it
has; chunks done so far, and the sum of the VERSIONs found; patience; the holder of a lock that is not to be had; the
elements of the chunk that `take_chunk` took; room for NUM_ARRAYS addresses twice: where the rule writes and reads."""
SOURCES = TARGETS + NUM_ARRAYS
PLAN_FIELDS = SOURCES + NUM_ARRAYS

# What a kernel returns.
DONE = 0
HELD = 1
"""Another actor holds the lock for long: look whether it lives, and call again."""
TAKEN = 2
"""From `take_chunk`: there is a chunk."""
