"""Passes over shards: apply a rule, or read, chunk by chunk. Whole or not at all, whoever is killed where.

What is stored when, and why, is told in docs/design/parameterserver.md.
"""

from __future__ import annotations

from . import shard_layout as fields
from .arrival import inner, kernel, own
from .copying import copy_past
from .intrinsics import (
    call_rule,
    compare_and_swap,
    copy,
    fence,
    give_way,
    load,
    load_acquire,
    load_number,
    pause,
    sleep,
    store,
    store_number,
    store_release,
)

_LONG_BYTES = 8 << 20  # more than a core's share of the caches
_NAP_MICROSECONDS = 20
_LONGEST_NAP_MICROSECONDS = 1000
_MOST_NAPS = 120  # a tenth of a second


@inner
def row(plan, actor):  # type: ignore[no-untyped-def]
    """Address of the row of an actor."""
    return own(plan, fields.ARENA) + (actor - 1) * fields.BLOCK_BYTES


@inner
def lock(plan, header):  # type: ignore[no-untyped-def]
    """Take the lock of a chunk: DONE, or HELD."""
    actor = own(plan, fields.ACTOR)
    if compare_and_swap(header, 0, actor) == 0:
        return fields.DONE
    for _ in range(own(plan, fields.SPINS)):
        if load_acquire(header) == 0 and compare_and_swap(header, 0, actor) == 0:
            return fields.DONE
        pause()
    for _ in range(own(plan, fields.YIELDS)):
        if load_acquire(header) == 0 and compare_and_swap(header, 0, actor) == 0:
            return fields.DONE
        give_way()
    nap = _NAP_MICROSECONDS
    for _ in range(_MOST_NAPS):
        holder = compare_and_swap(header, 0, actor)
        if holder == 0:
            return fields.DONE
        store(plan + fields.HOLDER * 8, holder)
        sleep(nap)
        nap = min(nap + nap // 4, _LONGEST_NAP_MICROSECONDS)
    return fields.HELD


@inner
def unlock(header):  # type: ignore[no-untyped-def]
    """Let go of it."""
    store_release(header, 0)
    return 0


@inner
def begin_of(plan, shard):  # type: ignore[no-untyped-def]
    """The first element of the data in a shard, counted from the shard's first: at a boundary of chunks."""
    return max(own(plan, fields.DATA_BEGIN) - own(shard, fields.SHARD_BEGIN), 0)


@inner
def end_of(plan, shard):  # type: ignore[no-untyped-def]
    """Where the data in a shard ends."""
    return min(own(plan, fields.DATA_END) - own(shard, fields.SHARD_BEGIN), own(shard, fields.SHARD_NUMEL))


@inner
def point_at(plan, shard, begin):  # type: ignore[no-untyped-def]
    """Note where the arrays of a chunk are, and the scratch for what becomes of them."""
    scratch = row(plan, own(plan, fields.ACTOR)) + fields.SCRATCH_START
    for array in range(fields.NUM_ARRAYS):
        item = own(plan, fields.ITEM_BYTES) if array == 0 else own(plan, fields.STATE_BYTES)
        address = load(shard + (fields.SHARD_ARRAYS + array) * 8) + begin * item
        store(plan + (fields.SOURCES + array) * 8, address)
        store(plan + (fields.TARGETS + array) * 8, scratch + array * fields.CHUNK_BYTES)
    return 0


@inner
def bytes_of(plan, array, numel):  # type: ignore[no-untyped-def]
    """Size of so many elements of an array; 0 if the rule does not use it."""
    if array == 0:
        return numel * own(plan, fields.ITEM_BYTES)
    return numel * own(plan, fields.STATE_BYTES) if array <= own(plan, fields.NUM_STATES) else 0


@inner
def commit(plan, header, numel):  # type: ignore[no-untyped-def]
    """The scratch becomes the chunk: whoever finds this actor dead from the redo record on does the same."""
    mine = row(plan, own(plan, fields.ACTOR))
    version, steps = load(header + fields.VERSION * 8) + 1, load(header + fields.STEPS * 8)
    if own(plan, fields.NUM_STATES) > 0:
        steps += 1
    store(mine + fields.NEW_VERSION * 8, version)
    store(mine + fields.NEW_STEPS * 8, steps)
    for array in range(fields.NUM_ARRAYS):
        store(mine + (fields.NEW_BYTES + array) * 8, bytes_of(plan, array, numel))
    store_release(mine + fields.REDO * 8, 1)
    fence()  # nothing of what follows before that
    redo(plan, mine, header)
    return 0


@inner
def redo(plan, who, header):  # type: ignore[no-untyped-def]
    """Carry out the redo record of an actor on a chunk whose arrays are noted in the plan."""
    for array in range(fields.NUM_ARRAYS):
        num_bytes = load(who + (fields.NEW_BYTES + array) * 8)
        if num_bytes > 0:
            scratch = who + fields.SCRATCH_START + array * fields.CHUNK_BYTES
            copy(load(plan + (fields.SOURCES + array) * 8), scratch, num_bytes)
    store(header + fields.VERSION * 8, load(who + fields.NEW_VERSION * 8))
    store(header + fields.STEPS * 8, load(who + fields.NEW_STEPS * 8))
    store_release(who + fields.REDO * 8, 0)
    return 0


@inner
def power(base, exponent):  # type: ignore[no-untyped-def]
    """By squaring, without a library."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@inner
def apply_to_chunk(plan, header, begin, numel):  # type: ignore[no-untyped-def]
    """The rule, from the chunk and the data into the scratch, and from there into the chunk."""
    coefficients = own(plan, fields.COEFFICIENTS)
    if own(plan, fields.NUM_STATES) == 2:
        steps = load(header + fields.STEPS * 8) + 1
        for decay in range(2):
            value = 1.0 - power(load_number(coefficients + (1 + decay) * 8), steps)
            store_number(coefficients + (fields.NUM_COEFFICIENTS - 2 + decay) * 8, value)
    call_rule(
        own(plan, fields.RULE), plan + fields.TARGETS * 8, plan + fields.SOURCES * 8, begin, numel, coefficients
    )  # fmt: skip
    commit(plan, header, numel)
    return 0


@inner
def read_chunk(plan, target, num_bytes):  # type: ignore[no-untyped-def]
    """Out of the chunk; past the caches if it is part of something long."""
    total = (own(plan, fields.DATA_END) - own(plan, fields.DATA_BEGIN)) * own(plan, fields.ITEM_BYTES)
    if total >= _LONG_BYTES:
        copy_past(target, load(plan + fields.SOURCES * 8), num_bytes)
    else:
        copy(target, load(plan + fields.SOURCES * 8), num_bytes)
    return 0


@kernel
def pass_over(plan):  # type: ignore[no-untyped-def]
    """Apply the rule to the elements of the data, or read them: DONE, or HELD with everything before POSITION done."""
    chunk_numel, num_shards = own(plan, fields.CHUNK_NUMEL), own(plan, fields.NUM_SHARDS)
    position, done = 0, own(plan, fields.POSITION)
    for shift in range(num_shards):
        shard = (
            own(plan, fields.SHARDS) + (own(plan, fields.FIRST_SHARD) + shift) % num_shards * fields.SHARD_FIELDS * 8
        )
        begin, end = begin_of(plan, shard), end_of(plan, shard)
        while begin < end:
            numel = min(chunk_numel, end - begin)
            if position >= done:
                header = own(shard, fields.SHARD_HEADERS) + begin // chunk_numel * fields.HEADER_BYTES
                if lock(plan, header) != fields.DONE:
                    store(plan + fields.POSITION * 8, position)
                    return fields.HELD
                store(plan + fields.VERSIONS * 8, own(plan, fields.VERSIONS) + load(header + fields.VERSION * 8))
                point_at(plan, shard, begin)
                element = begin + own(shard, fields.SHARD_BEGIN) - own(plan, fields.DATA_BEGIN)
                data = own(plan, fields.DATA) + element * own(plan, fields.ITEM_BYTES)
                if own(plan, fields.RULE) != 0:
                    apply_to_chunk(plan, header, data, numel)
                else:
                    read_chunk(plan, data, numel * own(plan, fields.ITEM_BYTES))
                unlock(header)
            position += 1
            begin += numel
    store(plan + fields.POSITION * 8, position)
    return fields.DONE


@inner
def header_at(plan, wanted):  # type: ignore[no-untyped-def]
    """Address of the header of the chunk with that number in the pass, its elements noted in the plan; 0 after all."""
    chunk_numel, num_shards = own(plan, fields.CHUNK_NUMEL), own(plan, fields.NUM_SHARDS)
    for shift in range(num_shards):
        shard = (
            own(plan, fields.SHARDS) + (own(plan, fields.FIRST_SHARD) + shift) % num_shards * fields.SHARD_FIELDS * 8
        )
        begin, end = begin_of(plan, shard), end_of(plan, shard)
        num_chunks = max(end - begin + chunk_numel - 1, 0) // chunk_numel
        if wanted < num_chunks:
            begin += wanted * chunk_numel
            element = begin + own(shard, fields.SHARD_BEGIN)
            store(plan + fields.CHUNK_BEGIN * 8, element)
            store(plan + fields.CHUNK_END * 8, element + min(chunk_numel, end - begin))
            point_at(plan, shard, begin)
            return own(shard, fields.SHARD_HEADERS) + begin // chunk_numel * fields.HEADER_BYTES
        wanted -= num_chunks
    return 0


@kernel
def take_chunk(plan):  # type: ignore[no-untyped-def]
    """For a rule in Python: lock the chunk at POSITION and copy it into the scratch: TAKEN, HELD, or DONE after all."""
    header = header_at(plan, own(plan, fields.POSITION))
    if header == 0:
        return fields.DONE
    if lock(plan, header) != fields.DONE:
        return fields.HELD
    store(plan + fields.VERSIONS * 8, own(plan, fields.VERSIONS) + load(header + fields.VERSION * 8))
    numel = own(plan, fields.CHUNK_END) - own(plan, fields.CHUNK_BEGIN)
    for array in range(fields.NUM_ARRAYS):
        num_bytes = bytes_of(plan, array, numel)
        if num_bytes > 0:
            copy(load(plan + (fields.TARGETS + array) * 8), load(plan + (fields.SOURCES + array) * 8), num_bytes)
    return fields.TAKEN


@kernel
def end_chunk(plan, is_good):  # type: ignore[no-untyped-def]
    """After that rule: the scratch becomes the chunk, or (`is_good` 0) is forgotten. Nothing if no chunk is taken."""
    header = header_at(plan, own(plan, fields.POSITION))
    if header == 0 or load(header) != own(plan, fields.ACTOR):
        return 0
    if is_good != 0:
        commit(plan, header, own(plan, fields.CHUNK_END) - own(plan, fields.CHUNK_BEGIN))
        store(plan + fields.POSITION * 8, own(plan, fields.POSITION) + 1)
    unlock(header)
    return 0


@kernel
def take_over(plan):  # type: ignore[no-untyped-def]
    """The HOLDER of the chunk at POSITION is dead: finish what it had begun, and unlock. 1 if somebody was faster."""
    actor, holder = own(plan, fields.ACTOR), own(plan, fields.HOLDER)
    mine, header = row(plan, actor), header_at(plan, own(plan, fields.POSITION))
    # First: should this actor die in the middle, the next one finds here whose record it was about.
    store(mine + fields.TAKING * 8, holder)
    fence()
    if compare_and_swap(header, holder, actor) != holder:
        store(mine + fields.TAKING * 8, 0)
        return 1
    while holder != 0:
        who = row(plan, holder)
        if load_acquire(who + fields.REDO * 8) != 0:
            redo(plan, who, header)
            break
        holder = load(who + fields.TAKING * 8)
    unlock(header)
    store_release(mine + fields.TAKING * 8, 0)
    return 0
