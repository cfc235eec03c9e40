"""Passes over the shards of a parameter server: apply a rule or read, chunk by chunk, each chunk under its lock.

docs/design/parameterserver.md describes the protocol.
"""

from __future__ import annotations

from ...shared_memory.compiler.compilation import inner, kernel
from ...shared_memory.kernels.copying import copy_past
from ...shared_memory.kernels.intrinsics import (
    call_rule,
    compare_and_swap,
    copy,
    give_way,
    load,
    load_acquire,
    pause,
    sleep,
    store_release,
)
from .shard_layout import CHUNK_BYTES, DONE, HELD, IN_PYTHON, NUM_ARRAYS, READING, TAKEN, Header, Pass

_LONG_BYTES = 8 << 20  # more than a core's share of the caches
_SLEEP_MICROSECONDS = 20
_LONGEST_SLEEP_MICROSECONDS = 1000
_MOST_SLEEPS = 120  # a tenth of a second


@inner
def lock(plan: Pass, header: Header):
    """Take the lock of a chunk: DONE, or HELD if another actor has held it for a long time."""
    actor = plan.actor
    if compare_and_swap(header.lock, 0, actor) == 0:
        return DONE
    for _ in range(plan.spins):
        if load_acquire(header.lock) == 0 and compare_and_swap(header.lock, 0, actor) == 0:
            return DONE
        pause()
    for _ in range(plan.yields):
        if load_acquire(header.lock) == 0 and compare_and_swap(header.lock, 0, actor) == 0:
            return DONE
        give_way()
    duration = _SLEEP_MICROSECONDS
    for _ in range(_MOST_SLEEPS):
        holder = compare_and_swap(header.lock, 0, actor)
        if holder == 0:
            return DONE
        plan.holder = holder
        sleep(duration)
        duration = min(duration + duration // 4, _LONGEST_SLEEP_MICROSECONDS)
    return HELD


@inner
def select_chunk(plan: Pass) -> Header:
    """Store header, elements and arrays of the chunk at `position`. Return the header; 0 after the last chunk."""
    chunk_numel, num_shards = plan.chunk_numel, plan.num_shards
    while plan.shift < num_shards:
        index = (plan.first_shard + plan.shift) % num_shards
        shard = plan.shards[index]
        first = shard.begin
        begin = max(plan.data_begin - first, 0)  # at a boundary of chunks
        end = min(plan.data_end - first, shard.numel)
        chunk = plan.position - plan.shift_position
        num_chunks = max(end - begin + chunk_numel - 1, 0) // chunk_numel
        if chunk < num_chunks:
            begin += chunk * chunk_numel
            header = shard.headers[begin // chunk_numel]
            plan.header = header
            plan.chunk_begin = first + begin
            plan.chunk_end = first + min(begin + chunk_numel, end)
            for array in range(NUM_ARRAYS):
                plan.arrays[array] = shard.arrays[array] + begin * bytes_of_item(plan, array)
            return header
        plan.shift += 1
        plan.shift_position += num_chunks
    plan.header = Header(0)
    return Header(0)


@inner
def bytes_of_item(plan: Pass, array):
    return plan.item_bytes if array == 0 else plan.state_bytes


@inner
def read_chunk(plan: Pass, target, num_bytes):
    """Copy the values of the selected chunk out; with non-temporal stores if the data is long."""
    numel = plan.data_end - plan.data_begin
    if numel * plan.item_bytes >= _LONG_BYTES:
        copy_past(target, plan.arrays[0], num_bytes)
    else:
        copy(target, plan.arrays[0], num_bytes)
    return 0


@inner
def copy_arrays(plan: Pass, numel, is_back):
    """Copy the arrays that the rule uses to the scratch memory, or back."""
    for array in range(plan.num_states + 1):
        chunk = plan.arrays[array]
        scratch = plan.scratch + array * CHUNK_BYTES
        num_bytes = numel * bytes_of_item(plan, array)
        if is_back:
            copy(chunk, scratch, num_bytes)
        else:
            copy(scratch, chunk, num_bytes)
    return 0


@inner
def count_rule(plan: Pass, header: Header):
    """Count the rule in the header of its chunk."""
    header.version += 1
    if plan.num_states > 0:
        header.steps += 1
    return 0


@kernel
def pass_over(plan: Pass):
    """Apply the rule to the elements of the data, or read them, from the chunk at `position` on.

    Return DONE, HELD, or for a rule in Python TAKEN: then call `end_chunk` and this kernel again.
    """
    rule, item_bytes = plan.rule, plan.item_bytes
    header = select_chunk(plan)
    while header:
        if lock(plan, header) != DONE:
            return HELD
        plan.versions += header.version
        begin = plan.chunk_begin
        numel = plan.chunk_end - begin
        data = plan.data + (begin - plan.data_begin) * item_bytes
        if rule == IN_PYTHON:
            copy_arrays(plan, numel, False)
            return TAKEN
        if rule == READING:
            read_chunk(plan, data, numel * item_bytes)
        else:
            arrays, steps = plan.arrays, header.steps + 1
            call_rule(rule, arrays, data, numel, plan.coefficients, steps)
            count_rule(plan, header)
        store_release(header.lock, 0)
        plan.position += 1
        header = select_chunk(plan)
    return DONE


@kernel
def end_chunk(plan: Pass, is_good):
    """After a rule in Python: copy the scratch to the chunk unless `is_good` is 0. Do nothing if no chunk is taken."""
    header = plan.header
    if not header or load(header.lock) != plan.actor:
        return 0
    if is_good != 0:
        copy_arrays(plan, plan.chunk_end - plan.chunk_begin, True)
        count_rule(plan, header)
        plan.position += 1
    store_release(header.lock, 0)
    return 0
