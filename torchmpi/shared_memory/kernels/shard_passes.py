"""Passes over the shards of a parameter server: apply a rule or read, chunk by chunk, each chunk atomically.

For each chunk a pass

1. takes the lock of the chunk (compare-and-swap in its header);
2. applies the rule from chunk and data into the scratch memory of this actor;
3. stores the redo record: new version, new steps, lengths; REDO = 1 publishes it (release store, then a fence);
4. copies the scratch into the chunk, stores version and steps in the header, and clears REDO;
5. releases the lock.

If the actor dies before step 3, the chunk is unchanged; afterwards whoever takes over the lock repeats step 4 from the
redo record (`take_over`). docs/design/parameterserver.md describes the protocol.
"""

from __future__ import annotations

from . import shard_layout as fields
from .access import inlined, inner, kernel
from .copying import copy_past
from .intrinsics import (
    call_rule,
    compare_and_swap,
    copy,
    fence,
    field_address,
    give_way,
    load,
    load_acquire,
    load_field,
    load_field_acquire,
    load_number,
    pause,
    sleep,
    store_field,
    store_field_release,
    store_number,
    store_release,
)

_LONG_BYTES = 8 << 20  # more than a core's share of the caches
_NAP_MICROSECONDS = 20
_LONGEST_NAP_MICROSECONDS = 1000
_MOST_NAPS = 120  # a tenth of a second


@inner
def actor_block(plan, actor):
    """Return the address of the block of an actor in the arena."""
    return load_field(plan, fields.ARENA) + (actor - 1) * fields.BLOCK_BYTES


@inner
def lock(plan, header):
    """Take the lock of a chunk: DONE, or HELD if another actor has it for long."""
    actor = load_field(plan, fields.ACTOR)
    if compare_and_swap(header, 0, actor) == 0:
        return fields.DONE
    for _ in range(load_field(plan, fields.SPINS)):
        if load_acquire(header) == 0 and compare_and_swap(header, 0, actor) == 0:
            return fields.DONE
        pause()
    for _ in range(load_field(plan, fields.YIELDS)):
        if load_acquire(header) == 0 and compare_and_swap(header, 0, actor) == 0:
            return fields.DONE
        give_way()
    nap = _NAP_MICROSECONDS
    for _ in range(_MOST_NAPS):
        holder = compare_and_swap(header, 0, actor)
        if holder == 0:
            return fields.DONE
        store_field(plan, fields.HOLDER, holder)
        sleep(nap)
        nap = min(nap + nap // 4, _LONGEST_NAP_MICROSECONDS)
    return fields.HELD


@inner
def unlock(header):
    store_release(header, 0)
    return 0


@inlined
def shard_at(plan, shift, num_shards):
    """Return the address of a shard, counted from FIRST_SHARD."""
    index = (load_field(plan, fields.FIRST_SHARD) + shift) % num_shards
    return field_address(load_field(plan, fields.SHARDS), index * fields.SHARD_FIELDS)


@inner
def begin_of(plan, shard):
    """Return the first element of the data in a shard, relative to the shard; at a boundary of chunks."""
    return max(load_field(plan, fields.DATA_BEGIN) - load_field(shard, fields.SHARD_BEGIN), 0)


@inner
def end_of(plan, shard):
    """Return the end of the data in a shard, relative to the shard."""
    return min(
        load_field(plan, fields.DATA_END) - load_field(shard, fields.SHARD_BEGIN), load_field(shard, fields.SHARD_NUMEL)
    )


@inner
def select_chunk(plan, shard, begin):
    """Store the addresses of the arrays of a chunk (SOURCES), and of the scratch for their new values (TARGETS)."""
    scratch = actor_block(plan, load_field(plan, fields.ACTOR)) + fields.SCRATCH_START
    for array in range(fields.NUM_ARRAYS):
        item = load_field(plan, fields.ITEM_BYTES) if array == 0 else load_field(plan, fields.STATE_BYTES)
        address = load_field(shard, fields.SHARD_ARRAYS + array) + begin * item
        store_field(plan, fields.SOURCES + array, address)
        store_field(plan, fields.TARGETS + array, scratch + array * fields.CHUNK_BYTES)
    return 0


@inner
def bytes_of(plan, array, numel):
    """Return the size of so many elements of an array; 0 if the rule does not use it."""
    if array == 0:
        return numel * load_field(plan, fields.ITEM_BYTES)
    return numel * load_field(plan, fields.STATE_BYTES) if array <= load_field(plan, fields.NUM_STATES) else 0


@inner
def commit(plan, header, numel):
    """Copy the scratch to the chunk, by a redo record that another actor can carry out if this one dies."""
    mine = actor_block(plan, load_field(plan, fields.ACTOR))
    version, steps = load_field(header, fields.VERSION) + 1, load_field(header, fields.STEPS)
    if load_field(plan, fields.NUM_STATES) > 0:
        steps += 1
    store_field(mine, fields.NEW_VERSION, version)
    store_field(mine, fields.NEW_STEPS, steps)
    for array in range(fields.NUM_ARRAYS):
        store_field(mine, fields.NEW_BYTES + array, bytes_of(plan, array, numel))
    store_field_release(mine, fields.REDO, 1)
    fence()  # before any store to the chunk
    redo(plan, mine, header)
    return 0


@inner
def redo(plan, block, header):
    """Carry out the redo record in an actor's block on the selected chunk."""
    for array in range(fields.NUM_ARRAYS):
        num_bytes = load_field(block, fields.NEW_BYTES + array)
        if num_bytes > 0:
            scratch = block + fields.SCRATCH_START + array * fields.CHUNK_BYTES
            copy(load_field(plan, fields.SOURCES + array), scratch, num_bytes)
    store_field(header, fields.VERSION, load_field(block, fields.NEW_VERSION))
    store_field(header, fields.STEPS, load_field(block, fields.NEW_STEPS))
    store_field_release(block, fields.REDO, 0)
    return 0


@inner
def power(base, exponent):
    """Return ``base ** exponent``, by squaring."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@inner
def apply_to_chunk(plan, header, begin, numel):
    """Apply the rule to the selected chunk and the data."""
    coefficients = load_field(plan, fields.COEFFICIENTS)
    if load_field(plan, fields.NUM_STATES) == 2:
        steps = load_field(header, fields.STEPS) + 1
        for decay in range(2):
            value = 1.0 - power(load_number(field_address(coefficients, 1 + decay)), steps)
            store_number(field_address(coefficients, fields.NUM_COEFFICIENTS - 2 + decay), value)
    targets, sources = field_address(plan, fields.TARGETS), field_address(plan, fields.SOURCES)
    call_rule(load_field(plan, fields.RULE), targets, sources, begin, numel, coefficients)
    commit(plan, header, numel)
    return 0


@inner
def read_chunk(plan, target, num_bytes):
    """Copy the values of the selected chunk out; with non-temporal stores if the data is long."""
    total = (load_field(plan, fields.DATA_END) - load_field(plan, fields.DATA_BEGIN)) * load_field(
        plan, fields.ITEM_BYTES
    )
    if total >= _LONG_BYTES:
        copy_past(target, load_field(plan, fields.SOURCES), num_bytes)
    else:
        copy(target, load_field(plan, fields.SOURCES), num_bytes)
    return 0


@kernel
def pass_over(plan):
    """Apply the rule to the elements of the data, or read them: DONE, or HELD with all chunks before POSITION done."""
    chunk_numel, num_shards = load_field(plan, fields.CHUNK_NUMEL), load_field(plan, fields.NUM_SHARDS)
    position, done = 0, load_field(plan, fields.POSITION)
    for shift in range(num_shards):
        shard = shard_at(plan, shift, num_shards)
        begin, end = begin_of(plan, shard), end_of(plan, shard)
        while begin < end:
            numel = min(chunk_numel, end - begin)
            if position >= done:
                header = load_field(shard, fields.SHARD_HEADERS) + begin // chunk_numel * fields.HEADER_BYTES
                if lock(plan, header) != fields.DONE:
                    store_field(plan, fields.POSITION, position)
                    return fields.HELD
                store_field(
                    plan, fields.VERSIONS, load_field(plan, fields.VERSIONS) + load_field(header, fields.VERSION)
                )
                select_chunk(plan, shard, begin)
                element = begin + load_field(shard, fields.SHARD_BEGIN) - load_field(plan, fields.DATA_BEGIN)
                data = load_field(plan, fields.DATA) + element * load_field(plan, fields.ITEM_BYTES)
                if load_field(plan, fields.RULE) != 0:
                    apply_to_chunk(plan, header, data, numel)
                else:
                    read_chunk(plan, data, numel * load_field(plan, fields.ITEM_BYTES))
                unlock(header)
            position += 1
            begin += numel
    store_field(plan, fields.POSITION, position)
    return fields.DONE


@inner
def header_at(plan, wanted):
    """Select the chunk with this number in the pass, and return the address of its header; 0 after the last."""
    chunk_numel, num_shards = load_field(plan, fields.CHUNK_NUMEL), load_field(plan, fields.NUM_SHARDS)
    for shift in range(num_shards):
        shard = shard_at(plan, shift, num_shards)
        begin, end = begin_of(plan, shard), end_of(plan, shard)
        num_chunks = max(end - begin + chunk_numel - 1, 0) // chunk_numel
        if wanted < num_chunks:
            begin += wanted * chunk_numel
            element = begin + load_field(shard, fields.SHARD_BEGIN)
            store_field(plan, fields.CHUNK_BEGIN, element)
            store_field(plan, fields.CHUNK_END, element + min(chunk_numel, end - begin))
            select_chunk(plan, shard, begin)
            return load_field(shard, fields.SHARD_HEADERS) + begin // chunk_numel * fields.HEADER_BYTES
        wanted -= num_chunks
    return 0


@kernel
def take_chunk(plan):
    """For a rule in Python: lock the chunk at POSITION, and copy it to the scratch: TAKEN, HELD or DONE."""
    header = header_at(plan, load_field(plan, fields.POSITION))
    if header == 0:
        return fields.DONE
    if lock(plan, header) != fields.DONE:
        return fields.HELD
    store_field(plan, fields.VERSIONS, load_field(plan, fields.VERSIONS) + load_field(header, fields.VERSION))
    numel = load_field(plan, fields.CHUNK_END) - load_field(plan, fields.CHUNK_BEGIN)
    for array in range(fields.NUM_ARRAYS):
        num_bytes = bytes_of(plan, array, numel)
        if num_bytes > 0:
            copy(load_field(plan, fields.TARGETS + array), load_field(plan, fields.SOURCES + array), num_bytes)
    return fields.TAKEN


@kernel
def end_chunk(plan, is_good):
    """After that rule: copy the scratch to the chunk unless `is_good` is 0. Does nothing if no chunk is taken."""
    header = header_at(plan, load_field(plan, fields.POSITION))
    if header == 0 or load(header) != load_field(plan, fields.ACTOR):
        return 0
    if is_good != 0:
        commit(plan, header, load_field(plan, fields.CHUNK_END) - load_field(plan, fields.CHUNK_BEGIN))
        store_field(plan, fields.POSITION, load_field(plan, fields.POSITION) + 1)
    unlock(header)
    return 0


@kernel
def take_over(plan):
    """Finish the update of the dead HOLDER of the chunk at POSITION, and unlock. Return 1 if another actor did it."""
    actor, holder = load_field(plan, fields.ACTOR), load_field(plan, fields.HOLDER)
    mine, header = actor_block(plan, actor), header_at(plan, load_field(plan, fields.POSITION))
    # First: if this actor dies as well, the next one finds here whose redo record applies.
    store_field(mine, fields.TAKING, holder)
    fence()
    if compare_and_swap(header, holder, actor) != holder:
        store_field(mine, fields.TAKING, 0)
        return 1
    while holder != 0:
        block = actor_block(plan, holder)
        if load_field_acquire(block, fields.REDO) != 0:
            redo(plan, block, header)
            break
        holder = load_field(block, fields.TAKING)
    unlock(header)
    store_field_release(mine, fields.TAKING, 0)
    return 0
