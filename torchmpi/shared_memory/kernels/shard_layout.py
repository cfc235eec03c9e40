"""Field numbers of the parameter server's kernels: shared memory of the shards, and the private record of a pass.

docs/design/parameterserver.md describes the protocol.
"""

from __future__ import annotations

CHUNK_BYTES = 64 << 10
"""Size of a chunk in the array with the largest elements."""
MOST_STATES = 2
NUM_ARRAYS = 1 + MOST_STATES
"""Values, then states."""
NUM_COEFFICIENTS = 8
"""The last two are computed by the kernel: see `adam` in torchmpi.shared_memory.kernels.server_rules."""

# Header of a chunk, a cache line of its own.
LOCK = 0
"""Number of the actor that holds the lock, or 0."""
VERSION = 1
"""Rules applied so far."""
STEPS = 2
"""Rules with states applied so far."""
HEADER_BYTES = 64

# Block of an actor in the arena. Actors are numbered from 1.
PROCESS, STARTED, REDO, TAKING, NEW_VERSION, NEW_STEPS, NEW_BYTES = range(7)
"""Process id and its start time; whether the redo record is to be carried out if the actor dies; the dead actor whose
lock it is taking over; redo record: version, steps, and bytes of each array."""
SCRATCH_START = 4096
BLOCK_BYTES = SCRATCH_START + NUM_ARRAYS * CHUNK_BYTES

# Record of a shard: addresses of headers and arrays, first element, number of elements.
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
"""Record of a pass: address of the arena; number of this actor; address and number of the shard records, and the first
one; elements of a chunk, bytes of an element and of a state; rule (an address, 0 for reading), its states and
coefficients; address of the data and its range of elements; chunks done so far; sum of the VERSIONs found; limits of
polling; holder of a lock that could not be taken; range of elements of the chunk that `take_chunk` took; then twice
NUM_ARRAYS addresses: where the rule writes (TARGETS) and reads (SOURCES)."""
SOURCES = TARGETS + NUM_ARRAYS
PLAN_FIELDS = SOURCES + NUM_ARRAYS

# What a kernel returns.
DONE = 0
HELD = 1
"""Another actor has held the lock for long: check whether it is alive, and call again."""
TAKEN = 2
"""From `take_chunk`: a chunk is locked."""
