"""Passes over the shards of a parameter server: apply a rule or read, chunk by chunk, each chunk under its lock.

docs/design/parameterserver.md describes the protocol.
"""

from __future__ import annotations

from . import shard_layout as fields
from .compilation import inner, kernel
from .copying import copy_past
from .intrinsics import (
    call_rule,
    compare_and_swap,
    copy,
    field_address,
    give_way,
    load,
    load_acquire,
    load_field,
    pause,
    sleep,
    store_field,
    store_release,
)

_LONG_BYTES = 8 << 20  # more than a core's share of the caches
_SLEEP_MICROSECONDS = 20
_LONGEST_SLEEP_MICROSECONDS = 1000
_MOST_SLEEPS = 120  # a tenth of a second


@inner
def lock(plan, header):
    """Take the lock of a chunk: DONE, or HELD if another actor has held it for a long time."""
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
    duration = _SLEEP_MICROSECONDS
    for _ in range(_MOST_SLEEPS):
        holder = compare_and_swap(header, 0, actor)
        if holder == 0:
            return fields.DONE
        store_field(plan, fields.HOLDER, holder)
        sleep(duration)
        duration = min(duration + duration // 4, _LONGEST_SLEEP_MICROSECONDS)
    return fields.HELD


@inner
def select_chunk(plan):
    """Store header, elements and arrays of the chunk at POSITION. Return the header; 0 after the last chunk."""
    chunk_numel, num_shards = load_field(plan, fields.CHUNK_NUMEL), load_field(plan, fields.NUM_SHARDS)
    while load_field(plan, fields.SHIFT) < num_shards:
        index = (load_field(plan, fields.FIRST_SHARD) + load_field(plan, fields.SHIFT)) % num_shards
        shard = field_address(load_field(plan, fields.SHARDS), index * fields.SHARD_FIELDS)
        first = load_field(shard, fields.SHARD_BEGIN)
        begin = max(load_field(plan, fields.DATA_BEGIN) - first, 0)  # at a boundary of chunks
        end = min(load_field(plan, fields.DATA_END) - first, load_field(shard, fields.SHARD_NUMEL))
        chunk = load_field(plan, fields.POSITION) - load_field(plan, fields.SHIFT_POSITION)
        num_chunks = max(end - begin + chunk_numel - 1, 0) // chunk_numel
        if chunk < num_chunks:
            begin += chunk * chunk_numel
            header = load_field(shard, fields.SHARD_HEADERS) + begin // chunk_numel * fields.HEADER_BYTES
            store_field(plan, fields.HEADER, header)
            store_field(plan, fields.CHUNK_BEGIN, first + begin)
            store_field(plan, fields.CHUNK_END, first + min(begin + chunk_numel, end))
            for array in range(fields.NUM_ARRAYS):
                address = load_field(shard, fields.SHARD_ARRAYS + array) + begin * bytes_of_item(plan, array)
                store_field(plan, fields.ARRAYS + array, address)
            return header
        store_field(plan, fields.SHIFT, load_field(plan, fields.SHIFT) + 1)
        store_field(plan, fields.SHIFT_POSITION, load_field(plan, fields.SHIFT_POSITION) + num_chunks)
    store_field(plan, fields.HEADER, 0)
    return 0


@inner
def bytes_of_item(plan, array):
    return load_field(plan, fields.ITEM_BYTES) if array == 0 else load_field(plan, fields.STATE_BYTES)


@inner
def read_chunk(plan, target, num_bytes):
    """Copy the values of the selected chunk out; with non-temporal stores if the data is long."""
    numel = load_field(plan, fields.DATA_END) - load_field(plan, fields.DATA_BEGIN)
    if numel * load_field(plan, fields.ITEM_BYTES) >= _LONG_BYTES:
        copy_past(target, load_field(plan, fields.ARRAYS), num_bytes)
    else:
        copy(target, load_field(plan, fields.ARRAYS), num_bytes)
    return 0


@inner
def copy_arrays(plan, numel, is_back):
    """Copy the arrays that the rule uses to the scratch memory, or back."""
    for array in range(load_field(plan, fields.NUM_STATES) + 1):
        chunk = load_field(plan, fields.ARRAYS + array)
        scratch = load_field(plan, fields.SCRATCH) + array * fields.CHUNK_BYTES
        num_bytes = numel * bytes_of_item(plan, array)
        if is_back:
            copy(chunk, scratch, num_bytes)
        else:
            copy(scratch, chunk, num_bytes)
    return 0


@inner
def count_rule(plan, header):
    """Count the rule in the header of its chunk."""
    store_field(header, fields.VERSION, load_field(header, fields.VERSION) + 1)
    if load_field(plan, fields.NUM_STATES) > 0:
        store_field(header, fields.STEPS, load_field(header, fields.STEPS) + 1)
    return 0


@kernel
def pass_over(plan):
    """Apply the rule to the elements of the data, or read them, from the chunk at POSITION on.

    Return DONE, HELD, or for a rule in Python TAKEN: then call `end_chunk` and this kernel again.
    """
    rule, item_bytes = load_field(plan, fields.RULE), load_field(plan, fields.ITEM_BYTES)
    header = select_chunk(plan)
    while header != 0:
        if lock(plan, header) != fields.DONE:
            return fields.HELD
        store_field(plan, fields.VERSIONS, load_field(plan, fields.VERSIONS) + load_field(header, fields.VERSION))
        begin = load_field(plan, fields.CHUNK_BEGIN)
        numel = load_field(plan, fields.CHUNK_END) - begin
        data = load_field(plan, fields.DATA) + (begin - load_field(plan, fields.DATA_BEGIN)) * item_bytes
        if rule == fields.IN_PYTHON:
            copy_arrays(plan, numel, False)
            return fields.TAKEN
        if rule == fields.READING:
            read_chunk(plan, data, numel * item_bytes)
        else:
            arrays, steps = field_address(plan, fields.ARRAYS), load_field(header, fields.STEPS) + 1
            call_rule(rule, arrays, data, numel, load_field(plan, fields.COEFFICIENTS), steps)
            count_rule(plan, header)
        store_release(header, 0)
        store_field(plan, fields.POSITION, load_field(plan, fields.POSITION) + 1)
        header = select_chunk(plan)
    return fields.DONE


@kernel
def end_chunk(plan, is_good):
    """After a rule in Python: copy the scratch to the chunk unless `is_good` is 0. Do nothing if no chunk is taken."""
    header = load_field(plan, fields.HEADER)
    if header == 0 or load(header) != load_field(plan, fields.ACTOR):
        return 0
    if is_good != 0:
        copy_arrays(plan, load_field(plan, fields.CHUNK_END) - load_field(plan, fields.CHUNK_BEGIN), True)
        count_rule(plan, header)
        store_field(plan, fields.POSITION, load_field(plan, fields.POSITION) + 1)
    store_release(header, 0)
    return 0
