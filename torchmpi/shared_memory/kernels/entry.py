"""The shortest way into a kernel, from the tensors themselves, without Python looking at them.

Each thing that Python asks of a tensor takes a good part of what a short call may take. So the machine code
around a kernel (see :mod:`torchmpi.shared_memory.kernels.fast_path_ir`) lets torch describe the tensors in DLPack's
terms, looks here for
the call that was prepared for them, and then lets one of these functions take the right to run, note the call in the
ledger, and write down what the kernel wants to know. All of it has the GIL. Whatever is unusual is left to Python.
"""

from __future__ import annotations

from .. import memory_layout
from . import context
from .arrival import inner, kernel, own
from .intrinsics import load, store
from .partitioning import rows_before

# DLPack's description of a tensor.
_DATA, _DEVICE, _DIMS_AND_DTYPE, _SHAPE, _STRIDES, _OFFSET = (field * 8 for field in range(6))
_HOST = 1  # and device number 0 above it
_LOW_BITS = (1 << 32) - 1
_MOST_BITS = 60  # greater numbers are not their own hash

# Python's hash of a tuple, which the other ranks may have computed: xxHash with these numbers, taken as signed.
_PRIME_1, _PRIME_2, _PRIME_5 = -7046029288634856825, -4417276706812531889, 2870177450012600261
_INSTEAD_OF_MINUS_ONE = 1546275796


@inner
def hash_step(total, value):  # type: ignore[no-untyped-def]
    """Take one more number of a tuple into its hash."""
    total = total + value * _PRIME_2
    total = (total << 31) | ((total >> 33) & 0x7FFFFFFF)
    return total * _PRIME_1


@inner
def hash_end(total, length):  # type: ignore[no-untyped-def]
    """The hash of a tuple of that length."""
    total = total + (length ^ (_PRIME_5 ^ 3527539))
    return _INSTEAD_OF_MINUS_ONE if total == -1 else total


@inner
def num_dims(tensor):  # type: ignore[no-untyped-def]
    """How many dimensions a tensor has."""
    return load(tensor + _DIMS_AND_DTYPE) & _LOW_BITS


@inner
def dim(tensor, index):  # type: ignore[no-untyped-def]
    """One number of the shape."""
    return load(load(tensor + _SHAPE) + index * 8)


@inner
def data(tensor):  # type: ignore[no-untyped-def]
    """Where the elements begin."""
    return load(tensor + _DATA) + load(tensor + _OFFSET)


@kernel
def find_cached_call(first, tensor, key, comm):  # type: ignore[no-untyped-def]
    """The door for this dtype, key and communicator, or 0."""
    dtype, cached_call = load(tensor + _DIMS_AND_DTYPE) >> 32, first
    while cached_call != 0:
        is_for_it = own(cached_call, context.KEY) == key and own(cached_call, context.COMM) == comm
        if is_for_it and own(cached_call, context.DLPACK_DTYPE) == dtype:
            break
        cached_call = own(cached_call, context.NEXT)
    return cached_call


@inner
def plain_numel(cached_call, tensor):  # type: ignore[no-untyped-def]
    """The number of elements of a contiguous tensor of the host with the right dtype; OTHERWISE if it is not that."""
    if load(tensor + _DEVICE) != _HOST or load(tensor + _DIMS_AND_DTYPE) >> 32 != own(
        cached_call, context.DLPACK_DTYPE
    ):
        return context.OTHERWISE
    if num_dims(tensor) > memory_layout.MAX_LOG_DIMS:
        return context.OTHERWISE
    numel, strides = 1, load(tensor + _STRIDES)
    for index in range(num_dims(tensor) - 1, -1, -1):
        length = dim(tensor, index)
        if length != 1 and load(strides + index * 8) != numel:
            return context.OTHERWISE
        if length >> _MOST_BITS != 0:
            return context.OTHERWISE
        numel *= length
    # Without memory: freed storage, a wrapper of torch.func.functionalize, a zero of autograd's.
    return context.OTHERWISE if load(tensor + _DATA) == 0 and numel != 0 else numel


@inner
def begin_call(cached_call, tensor, call):  # type: ignore[no-untyped-def]
    """Enter the next call into the ledger, and its number and signature into `call`; OTHERWISE if others go before."""
    run_lock = own(cached_call, context.RUN_LOCK)
    for field in (memory_layout.RUN_LOCK_HELD, memory_layout.RUN_LOCK_ENTERED, memory_layout.RUN_LOCK_PENDING):
        if load(run_lock + field * 8) != 0:
            return context.OTHERWISE
    store(run_lock + memory_layout.RUN_LOCK_ENTERED * 8, 1)
    call_log, code, first = (
        own(cached_call, context.CALL_LOG),
        own(cached_call, context.CODE),
        own(cached_call, context.FIRST_DIM),
    )
    seq, length, total = load(call_log) + 1, max(num_dims(tensor) - first, 0), _PRIME_5
    for index in range(length):
        number = dim(tensor, first + index)
        store(call_log + (memory_layout.LOG_DIMS + index) * 8, number)
        total = hash_step(total, number)
    store(call_log + memory_layout.LOG_NUM_DIMS * 8, length)
    store(call_log + memory_layout.LOG_CODE * 8, code)
    store(call_log + memory_layout.LOG_ACTIVE * 8, seq)
    store(call_log, seq)
    store(call, seq)
    store(call + 8, own(cached_call, context.SIGNED_CODE) ^ hash_end(total, length))
    return 0


@inner
def row_numel(tensor):  # type: ignore[no-untyped-def]
    """Elements of a row; a tensor without dimensions is one row of one."""
    numel = 1
    for index in range(1, num_dims(tensor)):
        numel *= dim(tensor, index)
    return numel


@inner
def is_made_for(cached_call, source, target, num_rows):  # type: ignore[no-untyped-def]
    """Whether the target has that many rows like the source's, and no memory in common with it."""
    dims = max(num_dims(source), 1)
    if plain_numel(cached_call, target) < 0 or num_dims(target) != dims or dim(target, 0) != num_rows:
        return False
    for index in range(1, dims):
        if dim(target, index) != dim(source, index):
            return False
    item = own(own(cached_call, context.PLAN), context.ITEM_BYTES)
    here, there = data(source), data(target)
    here_end, there_end = (
        here + plain_numel(cached_call, source) * item,
        there + plain_numel(cached_call, target) * item,
    )
    return here_end <= there or there_end <= here


@inner
def enter_in_place(cached_call, tensor, unit, call):  # type: ignore[no-untyped-def]
    """A kernel that wants one address, and a length of so many units for each element."""
    numel = plain_numel(cached_call, tensor)
    if numel < 0:
        return context.OTHERWISE
    store(call + 16, data(tensor))
    store(call + 24, numel * unit)
    return begin_call(cached_call, tensor, call)


@kernel
def enter_allreduce(cached_call, tensor, _, call):  # type: ignore[no-untyped-def]
    """Length in elements."""
    return enter_in_place(cached_call, tensor, 1, call)


@kernel
def enter_broadcast(cached_call, tensor, _, call):  # type: ignore[no-untyped-def]
    """Length in bytes."""
    return enter_in_place(cached_call, tensor, own(own(cached_call, context.PLAN), context.ITEM_BYTES), call)


@kernel
def enter_allgather(cached_call, source, target, call):  # type: ignore[no-untyped-def]
    """Rows that all hope to be as many on every rank."""
    plan, numel = own(cached_call, context.PLAN), plain_numel(cached_call, source)
    if numel < 0 or row_numel(source) == 0:
        return context.OTHERWISE
    num_rows = dim(source, 0) if num_dims(source) > 0 else 1
    if not is_made_for(cached_call, source, target, num_rows * own(own(plan, context.CONTEXT), context.SIZE)):
        return context.OTHERWISE
    store(call + 16, data(source))
    store(call + 24, numel * own(plan, context.ITEM_BYTES))
    store(call + 32, data(target))
    return begin_call(cached_call, source, call)


@kernel
def enter_give(cached_call, source, _, call):  # type: ignore[no-untyped-def]
    """The same for one who gets nothing."""
    plan, numel = own(cached_call, context.PLAN), plain_numel(cached_call, source)
    if numel < 0 or row_numel(source) == 0:
        return context.OTHERWISE
    store(call + 16, data(source))
    store(call + 24, numel * own(plan, context.ITEM_BYTES))
    store(call + 32, 0)
    return begin_call(cached_call, source, call)


@inner
def own_rows(plan, num_rows):  # type: ignore[no-untyped-def]
    """How many of so many rows are this rank's."""
    ctx = own(plan, context.CONTEXT)
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    return rows_before(num_rows, size, rank + 1) - rows_before(num_rows, size, rank)


@inner
def enter_with_rows(cached_call, source, target, times, call):  # type: ignore[no-untyped-def]
    """A kernel that wants rows of the source, and a target for so many times this rank's part of them."""
    plan, numel = own(cached_call, context.PLAN), plain_numel(cached_call, source)
    if numel < 0 or num_dims(source) == 0:
        return context.OTHERWISE
    num_rows = dim(source, 0)
    if not is_made_for(cached_call, source, target, own_rows(plan, num_rows) * times):
        return context.OTHERWISE
    store(call + 16, data(source))
    store(call + 24, num_rows)
    store(call + 32, row_numel(source) * own(plan, context.ITEM_BYTES))
    store(call + 40, data(target))
    return begin_call(cached_call, source, call)


@kernel
def enter_reduce_scatter(cached_call, source, target, call):  # type: ignore[no-untyped-def]
    """Rows of which each rank gets its part."""
    return enter_with_rows(cached_call, source, target, 1, call)


@kernel
def enter_alltoall(cached_call, source, target, call):  # type: ignore[no-untyped-def]
    """Rows that all hope to be as many on every rank: each gets its part of everybody's."""
    if row_numel(source) == 0:
        return context.OTHERWISE
    return enter_with_rows(
        cached_call, source, target, own(own(own(cached_call, context.PLAN), context.CONTEXT), context.SIZE), call
    )


@inner
def enter_scattering(cached_call, tensor, call):  # type: ignore[no-untyped-def]
    """Enter a scatter, and write down what this rank says of a tensor: what it offers, or what it expects."""
    status = begin_call(cached_call, tensor, call)
    if status != 0:
        return status
    plan = own(cached_call, context.PLAN)
    message, length = own(plan, context.MESSAGE), num_dims(tensor)
    store(message, own(plan, context.DTYPE))
    store(message + 8, length)
    for index in range(length):
        store(message + (2 + index) * 8, dim(tensor, index))
    store(call + 16, message)
    store(call + 24, (2 + length) * 8)
    store(call + 48, row_numel(tensor) * own(plan, context.ITEM_BYTES))
    return 0


@kernel
def enter_scatter(cached_call, source, target, call):  # type: ignore[no-untyped-def]
    """The root's rows, of which it gets its part."""
    plan = own(cached_call, context.PLAN)
    if own(own(plan, context.CONTEXT), context.RANK) != own(plan, context.ROOT):
        return context.OTHERWISE
    if plain_numel(cached_call, source) < 0 or num_dims(source) == 0:
        return context.OTHERWISE
    num_rows = dim(source, 0)
    if not is_made_for(cached_call, source, target, own_rows(plan, num_rows)):
        return context.OTHERWISE
    store(call + 32, data(source))
    store(call + 40, num_rows)
    store(call + 56, data(target))
    return enter_scattering(cached_call, source, call)


@kernel
def enter_receive(cached_call, target, _, call):  # type: ignore[no-untyped-def]
    """The part of one who hopes that the root's rows are like its target's, and as many as fit."""
    if plain_numel(cached_call, target) < 0 or num_dims(target) == 0:
        return context.OTHERWISE
    store(call + 32, 0)
    store(call + 40, 0)
    store(call + 56, data(target))
    return enter_scattering(cached_call, target, call)
