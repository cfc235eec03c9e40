"""Tensors with gaps between their elements, packed into contiguous memory and back: the copies of a short call."""

from __future__ import annotations

from ..compiler.compilation import inner
from ..compiler.cpython import on_stack
from ..memory_layout import MAX_LOG_DIMS
from ..typed_records import Words
from .intrinsics import copy
from .records import NOT_FAST

_positions, _packed_steps = on_stack(MAX_LOG_DIMS), on_stack(MAX_LOG_DIMS)
_TILE = 8
"""Elements in a row of a tile, if elements that are neighbors in memory are not neighbors in the tensor: the parts of a
cache line that a row does not use are used by the next rows, before another line takes its place."""


@inner
def strided_numel(shape: Words, strides: Words, num_dims, most):
    """Return the number of elements; NOT_FAST if there are none, more than `most`, or several in the same memory."""
    numel = 1
    for index in range(num_dims):
        length = shape[index]
        if length == 0 or length > most or (length > 1 and strides[index] == 0):
            return NOT_FAST
        numel *= length
        if numel > most:
            return NOT_FAST
    return numel


@inner
def copy_items(target, target_step, source, source_step, count, item_bytes):
    """Copy elements at these distances; LLVM makes a load and a store of a copy of constant length."""
    if item_bytes == 4:
        for index in range(count):
            copy(target + index * target_step, source + index * source_step, 4)
    elif item_bytes == 8:
        for index in range(count):
            copy(target + index * target_step, source + index * source_step, 8)
    elif item_bytes == 2:
        for index in range(count):
            copy(target + index * target_step, source + index * source_step, 2)
    else:
        for index in range(count):
            copy(target + index * target_step, source + index * source_step, item_bytes)
    return 0


@inner
def move_strided(shape: Words, strides: Words, num_dims, address, packed, item_bytes, unpacks):
    """Copy the elements at `address` into contiguous memory at `packed`, or back; there is at least one.

    Rows along the last dimension are copied together, and in tiles with those of the dimension whose elements are
    the nearest in memory, if that is another one, as in a transposed matrix. The others are the digits of a counter.
    """
    positions, packed_steps, last = Words(_positions()), Words(_packed_steps()), num_dims - 1
    near, packed_step = last, item_bytes
    for index in range(last, -1, -1):
        positions[index], packed_steps[index] = 0, packed_step
        packed_step *= shape[index]
        if shape[index] > 1 and strides[index] < strides[near]:
            near = index
    length, step, near_step = shape[last], strides[last] * item_bytes, strides[near] * item_bytes
    num_rows, tile = (1, length) if near == last else (shape[near], _TILE)
    while True:
        for begin in range(0, length, tile):
            count = min(tile, length - begin)
            row, packed_row = address + begin * step, packed + begin * item_bytes
            for _ in range(num_rows):
                if unpacks:
                    copy_items(row, step, packed_row, item_bytes, count, item_bytes)
                else:
                    copy_items(packed_row, item_bytes, row, step, count, item_bytes)
                row += near_step
                packed_row += packed_steps[near]
        index = last - 1
        while index >= 0:
            if index != near:
                positions[index] += 1
                address += strides[index] * item_bytes
                packed += packed_steps[index]
                if positions[index] < shape[index]:
                    break
                address -= shape[index] * strides[index] * item_bytes
                packed -= shape[index] * packed_steps[index]
                positions[index] = 0
            index -= 1
        if index < 0:
            return 0
