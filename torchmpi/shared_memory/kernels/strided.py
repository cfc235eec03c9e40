"""Tensors with gaps between their elements, packed into contiguous memory and back: the copies of a short call."""

from __future__ import annotations

from ..compiler.compilation import inner
from ..compiler.cpython import on_stack
from ..memory_layout import MAX_LOG_DIMS
from ..typed_records import Words
from .intrinsics import copy
from .records import NOT_FAST

_positions = on_stack(MAX_LOG_DIMS)


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

    Along the last dimension together, and through the others as the digits of a counter.
    """
    positions, last = Words(_positions()), num_dims - 1
    for index in range(num_dims):
        positions[index] = 0
    length, step = shape[last], strides[last] * item_bytes
    while True:
        if unpacks:
            copy_items(address, step, packed, item_bytes, length, item_bytes)
        else:
            copy_items(packed, item_bytes, address, step, length, item_bytes)
        packed += length * item_bytes
        index = last - 1
        while index >= 0:
            positions[index] += 1
            address += strides[index] * item_bytes
            if positions[index] < shape[index]:
                break
            address -= shape[index] * strides[index] * item_bytes
            positions[index] = 0
            index -= 1
        if index < 0:
            return 0
