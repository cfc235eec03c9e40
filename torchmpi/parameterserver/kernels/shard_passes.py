"""Passes over the shards of a parameter server: apply a rule or read, chunk by chunk, each chunk under its lock.

docs/design/parameterserver.md describes the protocol.
"""

from __future__ import annotations

import math

from numba import types

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
    pointer_to,
    sleep,
    store_release,
)
from .shard_layout import (
    AGES,
    CHUNK_BYTES,
    DONE,
    HELD,
    IN_PYTHON,
    NUM_ARRAYS,
    NUM_COEFFICIENTS,
    OFFSET,
    READING,
    SCALED,
    TAKEN,
    Header,
    Image,
    Pass,
    Shard,
)

_LONG_BYTES = 8 << 20  # more than a core's share of the caches
_SLEEP_MICROSECONDS = 20
_LONGEST_SLEEP_MICROSECONDS = 1000
_MOST_SLEEPS = 120  # a tenth of a second

floats_at, words_at = pointer_to(types.float64), pointer_to(types.int64)


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
            return enter_chunk(plan, shard, begin, min(begin + chunk_numel, end))
        plan.shift += 1
        plan.shift_position += num_chunks
    plan.header = Header(0)
    return Header(0)


@inner
def enter_chunk(plan: Pass, shard: Shard, begin, end) -> Header:
    """Store what a pass needs of the chunk with these elements of a shard, and return its header."""
    number = begin // plan.chunk_numel
    header = shard.headers[number]
    plan.header = header
    plan.first_header = shard.headers
    plan.chunk = shard.first_chunk + number
    plan.chunk_begin = shard.begin + begin
    plan.chunk_end = shard.begin + end
    for array in range(NUM_ARRAYS):
        plan.arrays[array] = shard.arrays[array] + begin * bytes_of_item(plan, array)
    return header


@inner
def note_version(plan: Pass, header: Header):
    """Note the version of a locked chunk; return the rules that the sender's values lack, 0 if that is unknown."""
    version = header.version
    plan.version = version
    plan.versions += version
    if plan.base == 0:
        return 0.0
    base, own, chunk = floats_at(plan.base), floats_at(plan.own), plan.chunk
    if plan.rule == READING:
        base[chunk] = version - own[chunk]
        return 0.0
    staleness = version - (base[chunk] + own[chunk])
    floats_at(plan.coefficients)[AGES] += staleness
    return staleness if staleness == staleness else 0.0


@inner
def damped(plan: Pass, staleness):
    """Return the address of the coefficients, the first of which is divided by a power of the staleness."""
    numbers, halves = floats_at(plan.coefficients), plan.halves
    if halves == 0:
        return plan.coefficients
    age = max(staleness + numbers[OFFSET], 1.0)
    divisor = math.sqrt(age) if halves & 1 else 1.0
    for _ in range(halves >> 1):
        divisor *= age
    numbers[SCALED] = numbers[0] / divisor
    for index in range(1, NUM_COEFFICIENTS):
        numbers[SCALED + index] = numbers[index]
    return plan.coefficients + 8 * SCALED


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
def copy_arrays(plan: Pass, num_arrays, numel, memory, is_back):
    """Copy the first arrays of the selected chunk to memory that has room for all of a chunk, or back."""
    for array in range(num_arrays):
        chunk, kept = plan.arrays[array], memory + array * CHUNK_BYTES
        num_bytes = numel * bytes_of_item(plan, array)
        if is_back:
            copy(chunk, kept, num_bytes)
        else:
            copy(kept, chunk, num_bytes)
    return 0


@inner
def copy_image(plan: Pass, image: Image, index, is_back):
    """Copy the arrays of the selected chunk that a rule changes to an image, or back."""
    memory = plan.image_arrays + index * NUM_ARRAYS * CHUNK_BYTES
    return copy_arrays(plan, image.num_arrays, image.numel, memory, is_back)


@inner
def keep_image(plan: Pass, header: Header):
    """Copy the locked chunk before a rule changes it, if there are copies."""
    if plan.num_images > 0:
        image = plan.images[plan.image]
        image.version, image.steps = header.version, header.steps
        image.numel, image.num_arrays = plan.chunk_end - plan.chunk_begin, plan.num_states + 1
        copy_image(plan, image, plan.image, False)
        store_release(image.chunk, plan.chunk + 1)  # from here on the chunk may have half of the update
    return 0


@inner
def count_rule(plan: Pass, header: Header):
    """Count the rule in the header of its chunk, and among the sends of the client."""
    header.version += 1
    if plan.num_states > 0 and plan.row_numel == 0:
        header.steps += 1
    if plan.num_images > 0:
        image = plan.images[plan.image]
        store_release(image.chunk, 0)  # the rule is applied
    if plan.base != 0:
        floats_at(plan.own)[plan.chunk] += 1.0
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
        staleness = note_version(plan, header)
        begin = plan.chunk_begin
        numel = plan.chunk_end - begin
        data = plan.data + (begin - plan.data_begin) * item_bytes
        if rule == IN_PYTHON:
            copy_arrays(plan, plan.num_states + 1, numel, plan.scratch, False)
            return TAKEN
        if rule == READING:
            read_chunk(plan, data, numel * item_bytes)
        else:
            arrays, steps = plan.arrays, header.steps + 1
            if plan.num_states > 0:
                steps += load_acquire(plan.first_header.row_steps)
            keep_image(plan, header)
            call_rule(rule, arrays, data, numel, damped(plan, staleness), steps)
            count_rule(plan, header)
        store_release(header.lock, 0)
        plan.position += 1
        header = select_chunk(plan)
    return DONE


@inner
def select_rows(plan: Pass) -> Header:
    """Like `select_chunk` for the chunk of the row at `cursor`; the data end before rows of other ranks' memory."""
    row_numel, cursor = plan.row_numel, plan.cursor
    if cursor >= plan.cursor_end:
        plan.header = Header(0)
        return Header(0)
    element = words_at(plan.rows)[cursor // row_numel] * row_numel + cursor % row_numel
    shard = plan.shards[plan.shift]
    while element >= shard.begin + shard.numel:
        plan.shift += 1
        shard = plan.shards[plan.shift]
    begin = (element - shard.begin) // plan.chunk_numel * plan.chunk_numel
    return enter_chunk(plan, shard, begin, min(begin + plan.chunk_numel, shard.numel))


@inner
def next_run(plan: Pass, cursor):
    """Return the number of elements from `cursor` on that are adjacent in the chunk at hand, 0 after its last row."""
    row_numel, rows = plan.row_numel, words_at(plan.rows)
    if cursor >= plan.cursor_end:
        return 0
    index = cursor // row_numel
    element = rows[index] * row_numel + cursor % row_numel
    most = min(plan.chunk_end - element, plan.cursor_end - cursor)
    numel = row_numel - cursor % row_numel
    while numel < most and rows[index + 1] == rows[index] + 1:
        index += 1
        numel += row_numel
    numel = max(min(numel, most), 0)
    offset = element - plan.chunk_begin
    for array in range(NUM_ARRAYS):
        plan.run_arrays[array] = plan.arrays[array] + offset * bytes_of_item(plan, array)
    return numel


@inner
def copy_rows(plan: Pass, is_back):
    """Copy the rows of the arrays that the rule uses to the scratch memory, without gaps, or back; return the end."""
    begin = cursor = plan.cursor
    numel = next_run(plan, cursor)
    while numel > 0:
        for array in range(plan.num_states + 1):
            item_bytes = bytes_of_item(plan, array)
            scratch = plan.scratch + array * CHUNK_BYTES + (cursor - begin) * item_bytes
            if is_back:
                copy(plan.run_arrays[array], scratch, numel * item_bytes)
            else:
                copy(scratch, plan.run_arrays[array], numel * item_bytes)
        cursor += numel
        numel = next_run(plan, cursor)
    return cursor


@inner
def visit_rows(plan: Pass, coefficients, steps):
    """Apply the rule to the rows of the chunk at hand, or read them."""
    rule, item_bytes, cursor = plan.rule, plan.item_bytes, plan.cursor
    if rule != READING:
        keep_image(plan, plan.header)
    numel = next_run(plan, cursor)
    while numel > 0:
        data = plan.data + (cursor - plan.data_begin) * item_bytes
        if rule == READING:
            copy(data, plan.run_arrays[0], numel * item_bytes)
        else:
            arrays = plan.run_arrays
            call_rule(rule, arrays, data, numel, coefficients, steps)
        cursor += numel
        numel = next_run(plan, cursor)
    plan.cursor = cursor
    return 0


@kernel
def pass_over_rows(plan: Pass):
    """Like `pass_over` for data that have the elements of some rows, one row after the other, from `cursor` on."""
    rule = plan.rule
    header = select_rows(plan)
    while header:
        if lock(plan, header) != DONE:
            return HELD
        staleness = note_version(plan, header)
        if rule == IN_PYTHON:
            plan.data_end = copy_rows(plan, False)  # for Python, which calls the rule
            return TAKEN
        steps = header.steps
        if plan.num_states > 0:
            steps += words_at(plan.row_steps)[plan.shift]
        visit_rows(plan, damped(plan, staleness), steps)
        if rule != READING:
            count_rule(plan, header)
        store_release(header.lock, 0)
        plan.position += 1
        header = select_rows(plan)
    return DONE


@kernel
def count_step(plan: Pass):
    """Count a step for all shards with elements of the data, and note its number in each."""
    numbers = words_at(plan.row_steps)
    for index in range(plan.num_shards):
        shard = plan.shards[index]
        if max(shard.begin, plan.data_begin) < min(shard.begin + shard.numel, plan.data_end):
            counter = shard.headers.row_steps
            number = load_acquire(counter)
            while compare_and_swap(counter, number, number + 1) != number:
                number = load_acquire(counter)
            numbers[index] = number + 1
    return DONE


@kernel
def end_chunk(plan: Pass, is_good):
    """After a rule in Python: copy the scratch to the chunk unless `is_good` is 0. Do nothing if no chunk is taken."""
    header = plan.header
    if not header or load(header.lock) != plan.actor:
        return 0
    if is_good != 0:
        keep_image(plan, header)
        if plan.row_numel > 0:
            plan.cursor = copy_rows(plan, True)
        else:
            copy_arrays(plan, plan.num_states + 1, plan.chunk_end - plan.chunk_begin, plan.scratch, True)
        count_rule(plan, header)
        plan.position += 1
    store_release(header.lock, 0)
    return 0


@kernel
def take_over(plan: Pass, holder):
    """Unlock the chunk at `position`, which a process has locked that has ended, and undo what it has not completed.

    Return HELD if another actor has done so, DONE if the chunk is as it was before the rule or after it, and TAKEN if
    it may have half of the update, as there are no copies.
    """
    header = plan.header if plan.row_numel > 0 else select_chunk(plan)
    if compare_and_swap(header.lock, holder, plan.actor) != holder:
        return HELD
    status = DONE if plan.num_images > 0 else TAKEN
    # Found by the chunk: an actor that had begun to do this may have ended as well.
    for index in range(plan.num_images):
        image = plan.images[index]
        if load_acquire(image.chunk) == plan.chunk + 1:
            copy_image(plan, image, index, True)
            header.version, header.steps = image.version, image.steps
            store_release(image.chunk, 0)
    store_release(header.lock, 0)
    return status
