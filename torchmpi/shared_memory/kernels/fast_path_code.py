"""Machine code of the fast path: tensors in, one call of a kernel, the result out (docs/design/fast-path.md).

`entry` has torch describe the tensors as DLTensors. `find_cached_call` then looks for a cached call of the
same dtype, key, communicator and backend, and one of the `enter_*` functions

1. checks the tensors: contiguous, on the host, of the cached dtype, and with an `out` made for the result;
2. writes the arguments of the kernel that follow the call record (from `rest` on);
3. takes the run lock if the call queue is idle or this thread runs one of its calls, enters the call into the call
   log, and computes its signature (`begin_call`). Nothing before this step has an effect, so NOT_FAST can be returned
   up to here.

The GIL is held throughout and orders the fast path with Python threads, so no atomic access is needed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ..compiler.compilation import BYTES, WORD, Function, Wrapper, inner, kernel, kernels
from ..compiler.cpython import (
    call_with_four,
    call_with_one,
    call_with_two,
    clear_error,
    context_value,
    decref,
    describe_with,
    error_is_set,
    error_matches,
    exception_class,
    fetch_error,
    incref,
    list_item,
    list_size,
    new_number,
    on_stack,
    release_gil,
    restore_error,
    take_gil,
    tells,
    this_thread,
    tuple_of_one,
)
from ..memory_layout import FIELD_BYTES, MAX_LOG_DIMS, MOST_COPIED_BYTES, PAYLOAD_BYTES, LockFields
from ..typed_records import Array, Record, Word, Words
from .access import group_of, part_at, set_receive, set_send
from .host_calls import is_carried, is_long
from .intrinsics import copy, load, store
from .kernel_sets import FastPathKernel
from .logged_calls import FIRST_HASH, close_entry, end_call, hash_end, hash_step, open_entry, set_dim
from .movement import compare_only, own_length
from .records import (
    FLAT,
    NOT_FAST,
    PART_SIZES,
    Arguments,
    CachedCallRecord,
    DLTensor,
    FastPath,
    KernelCall,
    ScatterArguments,
    TensorMessage,
)
from .strided import move_strided, strided_numel

_HOST = 1  # device type CPU, device number 0 in the upper half
_LOW_BITS = (1 << 32) - 1
_MAX_BITS = 60  # greater numbers are not equal to their hash
_MOST_PARTS = 64
"""Longer lists are copied in Python."""


# --- tensors ----------------------------------------------------------------------------------------------------


@inner
def num_dims(tensor: DLTensor):
    return tensor.num_dims_and_dtype & _LOW_BITS


@inner
def dtype_of(tensor: DLTensor):
    return tensor.num_dims_and_dtype >> 32


@inner
def dim(tensor: DLTensor, index):
    return tensor.shape[index]


@inner
def data(tensor: DLTensor):
    return tensor.data + tensor.byte_offset


@inner
def plain_numel(cached_call: CachedCallRecord, tensor: DLTensor):
    """Return the number of elements of a contiguous host tensor of the cached dtype; NOT_FAST for others."""
    return numel_of(tensor, cached_call.dlpack_dtype)


@inner
def numel_of(tensor: DLTensor, dtype):
    """Return the number of elements of a contiguous host tensor of a dtype; NOT_FAST for others."""
    if tensor.device != _HOST or dtype_of(tensor) != dtype:
        return NOT_FAST
    if num_dims(tensor) > MAX_LOG_DIMS:
        return NOT_FAST
    numel, strides = 1, tensor.strides
    for index in range(num_dims(tensor) - 1, -1, -1):
        length = dim(tensor, index)
        if length != 1 and strides[index] != numel:
            return NOT_FAST
        if length >> _MAX_BITS != 0:
            return NOT_FAST
        numel *= length
    # Elements without memory: freed storage, a wrapper of torch.func.functionalize, a zero tensor of autograd.
    return NOT_FAST if tensor.data == 0 and numel != 0 else numel


@inner
def is_divisible(cached_call: CachedCallRecord, tensor: DLTensor):
    """Return whether the first dimension has as many rows for each rank."""
    return num_dims(tensor) > 0 and dim(tensor, 0) % group_of(cached_call.call).size == 0


@inner
def take_as_rows(cached_call: CachedCallRecord, tensor: DLTensor, num_rows, any_length, dims: Words):
    """Describe a tensor by another shape, of the same elements in order; return whether it can be.

    One that becomes flat has a first dimension that the ranks can divide, unless its parts may have `any_length`.
    """
    if num_rows == 0:
        return True
    numel = plain_numel(cached_call, tensor)
    if numel < 0 or (num_rows != FLAT and numel % num_rows != 0):
        return False
    is_flat = num_rows == FLAT
    if is_flat and not any_length and not is_divisible(cached_call, tensor):
        return False
    row = 1 if is_flat else numel // num_rows
    dims[0], dims[1], dims[2] = numel if is_flat else num_rows, row, 1
    tensor.shape, tensor.strides = dims, Words(dims + FIELD_BYTES)
    tensor.num_dims_and_dtype = dtype_of(tensor) << 32 | (1 if is_flat else 2)
    return True


@inner
def row_numel(tensor: DLTensor):
    """Return the number of elements of a row; a 0-dim tensor is one row of one element."""
    numel = 1
    for index in range(1, num_dims(tensor)):
        numel *= dim(tensor, index)
    return numel


@inner
def part_numel(parts: Words, rank):
    """Return the number of elements of the part of a rank, which is a tensor of a list."""
    return parts[_MOST_PARTS + rank]


@inner
def overlaps(address, num_bytes, other, other_bytes):
    """Return whether two ranges of memory share bytes."""
    return address < other + other_bytes and other < address + num_bytes


@inner
def is_apart(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor):
    """Return whether two contiguous tensors share no memory."""
    item_bytes = cached_call.call.item_bytes
    source_bytes = plain_numel(cached_call, source) * item_bytes
    target_bytes = plain_numel(cached_call, target) * item_bytes
    return not overlaps(data(source), source_bytes, data(target), target_bytes)


@inner
def are_apart(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, arguments: Arguments):
    """Return whether received parts share memory neither with given parts nor with each other."""
    given, received = arguments.given_parts, arguments.received_parts
    if not given and not received:
        return is_apart(cached_call, source, target)
    size, item_bytes = group_of(cached_call.call).size, cached_call.call.item_bytes
    for index in range(size if received else 1):
        part = part_at(received, index, data(target))
        numel = part_numel(received, index) if received else plain_numel(cached_call, target)
        for other in range(size if given else 1):
            passed = part_at(given, other, data(source))
            passed_numel = part_numel(given, other) if given else plain_numel(cached_call, source)
            if overlaps(part, numel * item_bytes, passed, passed_numel * item_bytes):
                return False
        for other in range(index):
            if overlaps(part, numel * item_bytes, received[other], part_numel(received, other) * item_bytes):
                return False
    return True


@inner
def has_rows(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, num_rows):
    """Return whether the target has `num_rows` rows like those of the source."""
    dims = max(num_dims(source), 1)
    if plain_numel(cached_call, target) < 0 or num_dims(target) != dims or dim(target, 0) != num_rows:
        return False
    for index in range(1, dims):
        if dim(target, index) != dim(source, index):
            return False
    return True


@inner
def have_one_shape(source: DLTensor, target: DLTensor):
    """Return whether two tensors have the same shape."""
    dims = num_dims(source)
    if num_dims(target) != dims:
        return False
    for index in range(dims):
        if dim(target, index) != dim(source, index):
            return False
    return True


@inner
def fits(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, num_rows, arguments: Arguments):
    """Return whether the target has `num_rows` rows like those of the source, and shares no memory with the source."""
    return has_rows(cached_call, source, target, num_rows) and are_apart(cached_call, source, target, arguments)


# --- entering ---------------------------------------------------------------------------------------------------


@kernel
def find_cached_call(first: CachedCallRecord, tensor: DLTensor, key, comm, backend) -> CachedCallRecord:
    """Return the cached call for this dtype, key, communicator and backend, or 0."""
    dtype, cached_call = dtype_of(tensor), first
    while cached_call:
        is_like_it = cached_call.key == key and cached_call.comm == comm and cached_call.backend == backend
        if is_like_it and cached_call.dlpack_dtype == dtype:
            break
        cached_call = cached_call.following
    return cached_call


@inner
def is_free(run_lock: LockFields):
    """Return whether this thread may run a call now: the call queue is idle, or the thread runs one of its calls."""
    if load(run_lock.entered) != 0:
        return False
    if run_lock.runner != 0:
        return run_lock.runner == this_thread()
    return run_lock.held == 0 and run_lock.pending == run_lock.ended


@inner
def begin_call(cached_call: CachedCallRecord, tensor: DLTensor, num_bytes, arguments: Arguments):
    """Take the run lock and enter the call into the call log; NOT_FAST if this thread may not run a call now.

    `num_bytes`: the size of the tensor that this rank passes.
    """
    run_lock, call_log, first = cached_call.run_lock, cached_call.call_log, cached_call.first_dim
    if not is_free(run_lock) or call_log.active != 0:  # made by a signal handler within a call
        return NOT_FAST
    store(run_lock.entered, 1)
    seq, length, total = call_log.sequence + 1, max(num_dims(tensor) - first, 0), FIRST_HASH
    record = open_entry(call_log, seq)
    for index in range(length):
        number = dim(tensor, first + index)
        set_dim(record, index, number)
        total = hash_step(total, number)
    close_entry(call_log, record, seq, cached_call.code, length, num_bytes)
    arguments.seq = seq
    arguments.signature = cached_call.signed_code ^ hash_end(total, length)
    return 0


@inner
def packed_numel(cached_call: CachedCallRecord, tensor: DLTensor):
    """Return the number of elements of a host tensor of the cached dtype that is packed for the call, or NOT_FAST."""
    if cached_call.packed == 0 or tensor.device != _HOST or dtype_of(tensor) != cached_call.dlpack_dtype:
        return NOT_FAST
    if num_dims(tensor) > MAX_LOG_DIMS or tensor.data == 0:
        return NOT_FAST
    most = MOST_COPIED_BYTES // cached_call.call.item_bytes
    return strided_numel(tensor.shape, tensor.strides, num_dims(tensor), most)


@inner
def move_packed(cached_call: CachedCallRecord, tensor: DLTensor, unpacks):
    """Copy a tensor into the memory for packed ones, or back."""
    packed, item_bytes = cached_call.packed, cached_call.call.item_bytes
    return move_strided(tensor.shape, tensor.strides, num_dims(tensor), data(tensor), packed, item_bytes, unpacks)


@inner
def is_changed(call: KernelCall):
    """Return whether a call in place changes the tensor of this rank: not the source of a broadcast, for example."""
    root, reduces = call.root, call.reducer != 0
    return root < 0 or (group_of(call).rank == root) == reduces


@inner
def unpack(cached_call: CachedCallRecord, tensor: DLTensor, arguments: Arguments):
    """Copy the result of a call back to the tensor, if that was packed."""
    if arguments.rest[0] == cached_call.packed and is_changed(cached_call.call):
        move_packed(cached_call, tensor, True)
    return 0


@inner
def enter_in_place(cached_call: CachedCallRecord, tensor: DLTensor, unit, arguments: Arguments):
    """Enter a kernel that takes an address and a length, of `unit` for each element; pack a tensor with gaps."""
    numel, address, call = plain_numel(cached_call, tensor), data(tensor), cached_call.call
    packs = numel < 0
    if packs:
        numel, address = packed_numel(cached_call, tensor), cached_call.packed
    num_bytes = numel * call.item_bytes
    if numel < 0 or not is_carried(call, num_bytes, 0):
        return NOT_FAST
    arguments.rest[0] = address
    arguments.rest[1] = numel * unit
    status = begin_call(cached_call, tensor, num_bytes, arguments)
    if packs and status == 0:
        move_packed(cached_call, tensor, False)
    return status


@kernel
def enter_allreduce(cached_call: CachedCallRecord, tensor: DLTensor, _: DLTensor, arguments: Arguments):
    return enter_in_place(cached_call, tensor, 1, arguments)


@kernel
def enter_broadcast(cached_call: CachedCallRecord, tensor: DLTensor, _: DLTensor, arguments: Arguments):
    item_bytes = cached_call.call.item_bytes
    return enter_in_place(cached_call, tensor, item_bytes, arguments)


@inner
def enter_into(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, unit, arguments: Arguments):
    """Enter a kernel that works in place on a copy of the source in the target, which has the same shape."""
    numel = plain_numel(cached_call, source)
    num_bytes = numel * cached_call.call.item_bytes
    if numel < 0 or num_bytes > MOST_COPIED_BYTES or not have_one_shape(source, target):
        return NOT_FAST
    if plain_numel(cached_call, target) < 0 or not is_apart(cached_call, source, target):
        return NOT_FAST
    status = enter_in_place(cached_call, target, unit, arguments)
    if status == 0:
        copy(data(target), data(source), num_bytes)
    return status


@kernel
def enter_allreduce_into(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, arguments: Arguments):
    return enter_into(cached_call, source, target, 1, arguments)


@kernel
def enter_broadcast_into(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, arguments: Arguments):
    item_bytes = cached_call.call.item_bytes
    return enter_into(cached_call, source, target, item_bytes, arguments)


@kernel
def enter_barrier(cached_call: CachedCallRecord, no_tensor: DLTensor, _: DLTensor, arguments: Arguments):
    """Enter a barrier, without a message to the other ranks."""
    arguments.rest[0] = 0
    arguments.rest[1] = 0
    return begin_call(cached_call, no_tensor, 0, arguments)


@inner
def use_parts(call: KernelCall, arguments: Arguments):
    """Let the kernel use the tensors of lists, after the call has been entered."""
    call.given_parts, call.received_parts = arguments.given_parts, arguments.received_parts
    return 0


@inner
def use_no_parts(call: KernelCall):
    """Let the next calls use whole tensors."""
    call.given_parts = call.received_parts = Words(0)
    return 0


@inner
def stands_for_rows(path: FastPath, item, cached_call: CachedCallRecord, described: DLTensor, num_rows, any_length):
    """Return whether an object is no list, or one with a part of each rank for a call that takes rows."""
    if not is_list(path, item):
        return True
    if num_rows == 0:
        return False
    return (any_length or num_dims(described) == 2) and list_size(item) == group_of(cached_call.call).size


@inner
def enter_gathering(cached_call: CachedCallRecord, source: DLTensor, numel, target, arguments: Arguments):
    """Enter an allgather whose result has the address `target`; 0 if this rank gets no result."""
    num_bytes = numel * cached_call.call.item_bytes
    if not is_carried(cached_call.call, num_bytes, 0) and not is_long(cached_call.call, num_bytes, 0):
        return NOT_FAST
    arguments.rest[0] = data(source)
    arguments.rest[1] = num_bytes
    arguments.rest[2] = target
    status = begin_call(cached_call, source, num_bytes, arguments)
    return status if status != 0 else use_parts(cached_call.call, arguments)


@kernel
def enter_allgather(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, arguments: Arguments):
    """Enter an allgather that expects the same number of rows of every rank."""
    numel = plain_numel(cached_call, source)
    if numel < 0 or row_numel(source) == 0:
        return NOT_FAST
    num_rows = dim(source, 0) if num_dims(source) > 0 else 1
    group = group_of(cached_call.call)
    if not has_rows(cached_call, source, target, num_rows * group.size):
        return NOT_FAST
    # The rows of this rank in the target may be the source: no kernel writes other values there.
    own = data(target) + group.rank * numel * cached_call.call.item_bytes
    if (arguments.received_parts or data(source) != own) and not are_apart(cached_call, source, target, arguments):
        return NOT_FAST
    return enter_gathering(cached_call, source, numel, data(target), arguments)


@inner
def is_of_parts(call: KernelCall, given: Words, received: Words):
    """Return whether parts over hosts are no alltoall whose values are sent with the comparison."""
    size, length, item_bytes = group_of(call).size, part_numel(given, 0), call.item_bytes
    if not call.hosts.frames:
        return False
    for other in range(size):
        if part_numel(given, other) != length or part_numel(received, other) != length:
            return True
    return not is_carried(call, size * length * item_bytes, item_bytes)


@inner
def have_equal_own(cached_call: CachedCallRecord, arguments: Arguments):
    """Return whether this rank sends itself as much as it receives from itself, in lists."""
    rank, given, received = group_of(cached_call.call).rank, arguments.given_parts, arguments.received_parts
    if not given or not received:
        return False
    return part_numel(given, rank) == part_numel(received, rank)


@kernel
def enter_exchange(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, arguments: Arguments):
    """Enter an exchange of parts of any length, and write their sizes and transfers."""
    call = cached_call.call
    group, item_bytes = group_of(call), call.item_bytes
    size, given, received = group.size, arguments.given_parts, arguments.received_parts
    num_fields = 1 + 2 * size
    if not call.hosts and num_fields * FIELD_BYTES > PAYLOAD_BYTES:
        return NOT_FAST
    if dtype_of(target) != cached_call.dlpack_dtype or not have_equal_own(cached_call, arguments):
        return NOT_FAST
    if call.hosts and not is_of_parts(call, given, received):
        return NOT_FAST
    if not are_apart(cached_call, source, target, arguments):
        return NOT_FAST
    status = begin_call(cached_call, source, plain_numel(cached_call, source) * item_bytes, arguments)
    if status != 0:
        return status
    message, transfers = Words(call.message), call.transfers
    for other in range(size):
        set_send(transfers, other, given[other], part_numel(given, other) * item_bytes)
        set_receive(transfers, other, received[other], part_numel(received, other) * item_bytes)
    if not call.hosts:
        message[0] = PART_SIZES
        for other in range(size):
            message[1 + other] = transfers[other].send_bytes
            message[1 + size + other] = transfers[other].receive_bytes
    arguments.rest[0] = message + 0
    arguments.rest[1] = num_fields * FIELD_BYTES
    return 0


@kernel
def enter_give(cached_call: CachedCallRecord, source: DLTensor, _: DLTensor, arguments: Arguments):
    """Enter a gather on a rank that is not the root."""
    numel = plain_numel(cached_call, source)
    if numel < 0 or row_numel(source) == 0:
        return NOT_FAST
    return enter_gathering(cached_call, source, numel, 0, arguments)


@inner
def enter_with_rows(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, times, arguments: Arguments):
    """Enter a kernel that takes the rows of the source, and a target for `times` this rank's part of them."""
    call = cached_call.call
    if plain_numel(cached_call, source) < 0 or num_dims(source) == 0:
        return NOT_FAST
    num_rows, row_bytes = dim(source, 0), row_numel(source) * call.item_bytes
    if not fits(cached_call, source, target, own_length(group_of(call), num_rows, 1) * times, arguments):
        return NOT_FAST
    if not is_carried(call, num_rows * row_bytes, row_bytes):
        if call.hosts.frames:
            if num_rows % group_of(call).size != 0:
                return NOT_FAST
        elif arguments.given_parts or arguments.received_parts or not is_long(call, num_rows * row_bytes, row_bytes):
            return NOT_FAST
    arguments.rest[0] = data(source)
    arguments.rest[1] = num_rows
    arguments.rest[2] = row_bytes
    arguments.rest[3] = data(target)
    status = begin_call(cached_call, source, num_rows * row_bytes, arguments)
    return status if status != 0 else use_parts(call, arguments)


@kernel
def enter_reduce_scatter(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, arguments: Arguments):
    return enter_with_rows(cached_call, source, target, 1, arguments)


@kernel
def enter_alltoall(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, arguments: Arguments):
    """Enter an alltoall that expects the same number of rows of every rank."""
    if row_numel(source) == 0:
        return NOT_FAST
    size = group_of(cached_call.call).size
    return enter_with_rows(cached_call, source, target, size, arguments)


@kernel
def enter_alltoall_splits(cached_call: CachedCallRecord, rows: DLTensor, numbers: DLTensor, arguments: Arguments):
    """Enter an alltoall of numbers of rows, whose signature has dtype and shape of the rows.

    `numbers`: those that this rank sends, and memory for those that it receives.
    """
    call, half = cached_call.call, group_of(cached_call.call).size * FIELD_BYTES
    if plain_numel(cached_call, rows) < 0 or not is_carried(call, half, FIELD_BYTES):
        return NOT_FAST
    arguments.rest[0] = data(numbers)
    arguments.rest[1] = group_of(call).size
    arguments.rest[2] = FIELD_BYTES
    arguments.rest[3] = data(numbers) + half
    return begin_call(cached_call, rows, half, arguments)


@inner
def enter_scattering(cached_call: CachedCallRecord, tensor: DLTensor, arguments: ScatterArguments):
    """Enter a scatter, and write the description of the tensor that this rank offers or expects.

    None is written for a call over hosts whose values are sent with the comparison of what each rank receives.
    """
    call, row_bytes = cached_call.call, row_numel(tensor) * cached_call.call.item_bytes
    is_compared = cached_call.first_dim < MAX_LOG_DIMS
    status = begin_call(cached_call, tensor, dim(tensor, 0) * row_bytes, Arguments(arguments))
    if status != 0:
        return status
    use_parts(call, Arguments(arguments))
    arguments.row_bytes = row_bytes
    arguments.message_bytes = 0
    if call.hosts and is_compared and is_carried(call, group_of(call).size * row_bytes, 0):
        return 0
    message, length = call.message, num_dims(tensor)
    message.dtype, message.num_dims = call.dtype, length
    for index in range(length):
        message.shape[index] = dim(tensor, index)
    arguments.message = message
    arguments.message_bytes = (TensorMessage.shape + length) * 8
    return 0


@kernel
def enter_scatter(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, arguments: ScatterArguments):
    """Enter a scatter on the root, which also gets its part of the rows."""
    call = cached_call.call
    if group_of(call).rank != call.root:
        return NOT_FAST
    if plain_numel(cached_call, source) < 0 or num_dims(source) == 0:
        return NOT_FAST
    num_rows = dim(source, 0)
    if not fits(cached_call, source, target, own_length(group_of(call), num_rows, 1), Arguments(arguments)):
        return NOT_FAST
    arguments.source = data(source)
    arguments.num_rows = num_rows
    arguments.target = data(target)
    return enter_scattering(cached_call, source, arguments)


@kernel
def enter_receive(cached_call: CachedCallRecord, target: DLTensor, _: DLTensor, arguments: ScatterArguments):
    """Enter a scatter on another rank, which expects the root's rows to fit its target."""
    if plain_numel(cached_call, target) < 0 or num_dims(target) == 0:
        return NOT_FAST
    arguments.source = 0
    arguments.num_rows = 0
    arguments.target = data(target)
    return enter_scattering(cached_call, target, arguments)


# --- the entry: from Python into a kernel -------------------------------------------------------------------------


class PyObject(Record):
    """The head of an object of CPython, in builds without Py_DEBUG."""

    count = Word()
    kind = Word()
    """Address of the type."""


class Error(Record):
    """An exception that is set aside."""

    kind = Array(1)
    value = Array(1)
    traceback = Array(1)


_MOST_ARGUMENTS = 8
_SHAPE_FIELDS = 3
"""Two lengths, and two strides of which the first is the second length."""
described_tensor, _dims, _written, _error, _word, _parts = (
    on_stack(num_fields)
    for num_fields in (
        DLTensor.FIELDS,
        _SHAPE_FIELDS,
        Arguments.FIELDS + _MOST_ARGUMENTS,
        Error.FIELDS,
        1,
        _SHAPE_FIELDS + 2 * _MOST_PARTS,
    )
)
_TENSOR, _OUT, _LIST, _OUT_LIST = 1, 2, 4, 8  # what a fast path takes


@inner
def new_reference(item):
    """Return an object, with a reference for the caller."""
    incref(item)
    return item


@inner
def leave_to_python(path: FastPath):
    """Return None, because Python must run the call; after an error of Python, unless it ends the program."""
    if error_is_set() != 0:
        if error_matches(exception_class()) == 0:
            return 0  # KeyboardInterrupt in Python code of a mode, or SystemExit
        clear_error()
    return new_reference(path.none)


@inner
def is_plain(path: FastPath, tensor):
    """Return whether an object is a tensor, not of a subclass, without the negative bit, which a DLTensor lacks.

    Runs Python: the cached calls may change.
    """
    if PyObject(tensor).kind != path.tensor_type:
        return False
    answer = call_with_one(path.is_neg, tensor)
    if answer == 0:
        return False
    decref(answer)
    return answer == path.false


@inner
def is_for_python(path: FastPath):
    """Return whether Python must make the calls of this thread, or an exception is set.

    A communicator is chosen for the thread or task (`mpi.use`), or torch records operators, or a mode watches them.
    """
    for index in range(3):
        if tells(path.is_included, path.watching_keys[index]) != 0:
            return True
    value = Words(_word())
    if context_value(path.chosen_comm, 0, value) != 0:
        return True
    decref(value[0])
    return value[0] != path.none


@inner
def count_write(path: FastPath, written):
    """Record the write to a tensor, or to those of a list, for autograd; return whether that was possible."""
    of_list = is_list(path, written)
    tensors = written if of_list else tuple_of_one(1, written)
    counted = call_with_one(path.increment_version, tensors)
    if counted == 0:
        clear_error()
        counted = call_with_one(path.touch, tensors)
    if not of_list:
        decref(tensors)
    if counted == 0:
        return False
    decref(counted)
    return True


@inner
def abort(path: FastPath, cached_call: CachedCallRecord, tensor):
    """Abort the call on a tensor, and keep the exception that is set."""
    error = Error(_error())
    fetch_error(error.kind, error.value, error.traceback)
    number = new_number(cached_call)
    answer = call_with_two(path.abort, number, tensor)
    decref(number)
    if answer != 0:
        decref(answer)
    restore_error(error.kind[0], error.value[0], error.traceback[0])
    return 0


@inner
def settle(path: FastPath, status, tensor, out, cached_call: CachedCallRecord, seq):
    """Return the result of Python's handling of a status; 0 with an exception that is set."""
    number, address = new_number(status), new_number(cached_call)
    result = call_with_four(path.settle, number, tensor, out, address)
    decref(number)
    decref(address)
    if result == 0 and cached_call.call_log.active == seq:  # KeyboardInterrupt before the first line of Python
        abort(path, cached_call, tensor)
        cached_call.call_log.active = 0
        store(cached_call.run_lock.entered, 0)
    return result


@cache
def _runner(of: Function) -> Any:
    """Return a function that calls a kernel with a prepared call and the arguments of a record."""
    kernel, kind = of, of.records["call"].record
    num_others = of.num_arguments - 3  # than call, sequence number and signature

    def with_two(call: KernelCall, a: Arguments):
        return kernel(kind(call), a.seq, a.signature, a.rest[0], a.rest[1])

    def with_three(call: KernelCall, a: Arguments):
        return kernel(kind(call), a.seq, a.signature, a.rest[0], a.rest[1], a.rest[2])

    def with_four(call: KernelCall, a: Arguments):
        return kernel(kind(call), a.seq, a.signature, a.rest[0], a.rest[1], a.rest[2], a.rest[3])

    def as_scatter(call: KernelCall, arguments: Arguments):
        a = ScatterArguments(arguments)
        return kernel(call, a.seq, a.signature, a.message, a.message_bytes, a.source, a.num_rows, a.row_bytes, a.target)

    return inner({2: with_two, 3: with_three, 4: with_four, 6: as_scatter}[num_others])


@inner
def is_list(path: FastPath, item):
    return PyObject(item).kind == path.list_type


@inner
def is_list_of_plain(path: FastPath, items):
    """Return whether an object is a list of such tensors, not too many."""
    if not 0 < list_size(items) <= _MOST_PARTS:
        return False
    for index in range(list_size(items)):
        if not is_plain(path, list_item(items, index)):
            return False
    return True


@inner
def describe_list(path: FastPath, items, whole: DLTensor, room: Words):
    """Describe a list of contiguous host tensors of one dtype, and store their addresses and lengths.

    They are described as rows, or as one dimension if they differ in length.
    """
    total, dtype, length, parts = 0, 0, list_size(items), Words(room + _SHAPE_FIELDS * FIELD_BYTES)
    are_rows = True
    for index in range(length):
        if describe_with(path.describe, list_item(items, index), whole) != 0:
            return False
        if index == 0:
            dtype = dtype_of(whole)
        numel = numel_of(whole, dtype)
        if numel < 0:
            return False
        parts[index], parts[_MOST_PARTS + index] = data(whole), numel
        are_rows = are_rows and numel == part_numel(parts, 0)
        total += numel
    room[0], room[1], room[2] = length, part_numel(parts, 0) if are_rows else total, 1
    whole.data = parts[0] if are_rows else room + 0
    whole.byte_offset, whole.num_dims_and_dtype = 0, dtype << 32 | (2 if are_rows else 1)
    whole.shape = Words(room + (0 if are_rows else FIELD_BYTES))
    whole.strides = Words(whole.shape + FIELD_BYTES)
    return True


@inner
def can_be_described(path: FastPath, item, takes_list):
    """Return whether an object is a tensor that a DLTensor describes, or a list of such tensors."""
    return is_list_of_plain(path, item) if takes_list and is_list(path, item) else is_plain(path, item)


@inner
def describe_any(path: FastPath, item, takes_list, described: DLTensor, room: Words):
    """Describe a tensor, or those of a list; return whether that was possible."""
    if takes_list and is_list(path, item):
        return describe_list(path, item, described, room)
    return describe_with(path.describe, item, described) == 0


@inner
def parts_in(path: FastPath, item, takes_list, room: Words) -> Words:
    """Return the addresses of the tensors of a list that has been described; 0 of a tensor."""
    return Words(room + _SHAPE_FIELDS * FIELD_BYTES if takes_list and is_list(path, item) else 0)


@inner
def describe(path: FastPath, tensor, out, takes, first: DLTensor, last: DLTensor, given: Words, received: Words):
    """Describe the tensors of a call; False if Python must run it, perhaps because an exception is set."""
    if not path.first_call:
        return False
    takes_tensor, takes_out = takes & _TENSOR, takes & _OUT
    if (not takes_tensor and tensor != path.none) or (not takes_out and out != path.none):
        return False
    # These run Python or release the GIL, so other threads may invalidate the fast path. Later steps do not, until the
    # call is entered: `first_call` is loaded again, and the cached calls stay valid.
    if takes_tensor and not can_be_described(path, tensor, takes & _LIST):
        return False
    if takes_out and not can_be_described(path, out, takes & _OUT_LIST):
        return False
    if is_for_python(path):
        return False
    first.num_dims_and_dtype = 0  # a barrier is cached without dtype and has no shape
    if takes_tensor and not describe_any(path, tensor, takes & _LIST, first, given):
        return False
    return not takes_out or describe_any(path, out, takes & _OUT_LIST, last, received)


@inner
def finish(path: FastPath, status, tensor, out, result, writes, cached_call: CachedCallRecord, seq):
    """End a call after its kernel, and return its result; 0 with an exception that is set."""
    if status != 0:
        return settle(path, status, tensor, out, cached_call, seq)
    end_call(cached_call.call_log, cached_call.run_lock)
    if writes and not count_write(path, result):
        return 0
    return new_reference(result)


def entry(spec: FastPathKernel) -> Function:
    """Return the function of a fast path: the result of the call, None if Python must run it, 0 if it has raised."""
    enter, run = kernels[spec.enter], _runner(kernels[spec.kernel])
    arguments_of = enter.records["arguments"].record
    takes_tensor, takes_out, writes = spec.takes_tensor, spec.takes_out, spec.writes
    takes_list, takes_out_list, any_length = spec.takes_list, spec.takes_out_list, spec.any_length
    takes = _TENSOR * takes_tensor | _OUT * takes_out | _LIST * takes_list | _OUT_LIST * takes_out_list

    def fast_call(path: FastPath, tensor, out, key, comm, backend):
        first, last = DLTensor(described_tensor()), DLTensor(described_tensor())
        given_parts, received_parts = Words(_parts()), Words(_parts())
        if not describe(path, tensor, out, takes, first, last, given_parts, received_parts):
            return leave_to_python(path)
        source = first if takes_tensor or not takes_out else last
        target = last if takes_out else first
        cached_call, arguments = find_cached_call(path.first_call, source, key, comm, backend), Arguments(_written())
        if not cached_call:
            return new_reference(path.none)
        given, received = Words(_dims()), Words(_dims())
        if takes_list or takes_out_list:
            arguments.given_parts = parts_in(path, tensor, takes_list, given_parts)
            arguments.received_parts = parts_in(path, out, takes_out_list, received_parts)
            if not stands_for_rows(path, tensor, cached_call, first, cached_call.given_rows, any_length):
                return new_reference(path.none)
            if not stands_for_rows(path, out, cached_call, last, cached_call.received_rows, any_length):
                return new_reference(path.none)
        else:
            arguments.given_parts = arguments.received_parts = Words(0)
        if takes_tensor and not take_as_rows(cached_call, first, cached_call.given_rows, any_length, given):
            return new_reference(path.none)
        if takes_out and not take_as_rows(cached_call, last, cached_call.received_rows, any_length, received):
            return new_reference(path.none)
        if enter(cached_call, source, target, arguments_of(arguments)) != 0:
            return new_reference(path.none)
        thread = release_gil()
        if cached_call.only_compares != 0:
            status = compare_only(cached_call.call, arguments.seq, arguments.signature)
        else:
            status = run(cached_call.call, arguments)
        take_gil(thread)
        if takes_list or takes_out_list:
            use_no_parts(cached_call.call)
        if status == 0 and cached_call.packed != 0:
            unpack(cached_call, source, arguments)
        result = out if takes_out else tensor if takes_tensor else path.false
        return finish(path, status, tensor, out, result, writes, cached_call, arguments.seq)

    return Function(fast_call)


@kernel
def find_bound(path: FastPath, tensor, out, key, comm, backend):
    """Return what begins an asynchronous call; None if Python must check its arguments, 0 if it has raised."""
    first, last = DLTensor(described_tensor()), DLTensor(described_tensor())
    given_parts, received_parts = Words(_parts()), Words(_parts())
    has_tensor, has_out = tensor != path.none, out != path.none
    takes = (_TENSOR | _LIST if has_tensor else 0) | (_OUT | _OUT_LIST if has_out else 0)
    if not describe(path, tensor, out, takes, first, last, given_parts, received_parts):
        return leave_to_python(path)
    source = first if has_tensor or not has_out else last
    cached_call = find_cached_call(path.first_call, source, key, comm, backend)
    if not cached_call or cached_call.bound == 0:
        return new_reference(path.none)
    if not stands_for_rows(path, tensor, cached_call, first, cached_call.given_rows, path.any_length):
        return new_reference(path.none)
    if not stands_for_rows(path, out, cached_call, last, cached_call.received_rows, path.any_length):
        return new_reference(path.none)
    given, received = Words(_dims()), Words(_dims())
    if has_tensor and not take_as_rows(cached_call, first, cached_call.given_rows, path.any_length, given):
        return new_reference(path.none)
    if has_out and not take_as_rows(cached_call, last, cached_call.received_rows, path.any_length, received):
        return new_reference(path.none)
    if (has_tensor and plain_numel(cached_call, first) < 0) or (has_out and plain_numel(cached_call, last) < 0):
        return new_reference(path.none)
    if has_tensor and has_out:
        if path.same_shapes and not have_one_shape(first, last):
            return new_reference(path.none)
        arguments = Arguments(_written())
        arguments.given_parts = parts_in(path, tensor, True, given_parts)
        arguments.received_parts = parts_in(path, out, True, received_parts)
        if path.any_length:
            if not have_equal_own(cached_call, arguments):
                return new_reference(path.none)
        elif cached_call.given_rows != 0 and given[num_dims(first) - 1] != received[num_dims(last) - 1]:
            return new_reference(path.none)  # rows of different lengths
        if not are_apart(cached_call, first, last, arguments):
            return new_reference(path.none)
    return new_reference(cached_call.bound)


def entry_wrapper(name: str, function: Function) -> Wrapper:
    """Return ``name(tensor, out, key, comm, backend)``; its ``self`` is the address of its record (FastPath)."""
    wrapper = Wrapper(name, 5)
    words = [wrapper.builder.ptrtoint(wrapper.argument(index), WORD) for index in range(5)]
    path = wrapper.number(wrapper.function.args[0])
    result = wrapper.call(function, [path, *words])
    wrapper.builder.ret(wrapper.builder.inttoptr(result, BYTES))
    return wrapper
