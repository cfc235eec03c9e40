"""Machine code of the fast path for a list of tensors: one allreduce of all of them, where they are.

As for one tensor (:mod:`.fast_path_code`), torch describes each of them. The table of the tensors, and what the ranks
compare, are those that `TensorList` makes on the path through Python (torchmpi.collectives.tensor_lists).
"""

from __future__ import annotations

from ..compiler.compilation import Function, inner
from ..compiler.cpython import describe_with, list_item, list_size, on_stack, release_gil, take_gil
from ..memory_layout import CHECKSUM_MODULUS
from ..typed_records import Words
from .fast_path_code import (
    PyObject,
    begin_call,
    data,
    dim,
    find_cached_call,
    finish,
    is_for_python,
    is_plain,
    leave_to_python,
    new_reference,
    num_dims,
    plain_numel,
)
from .logged_calls import FIRST_HASH, hash_end, hash_step
from .records import NOT_FAST, Arguments, CachedCallRecord, DLTensor, FastPath, TensorRecord
from .reduce_kernels import allreduce_list

MOST_TENSORS = 512
"""Of a list: the table is in the frame of the call. Longer lists cost more in their kernel than in Python."""
_LINE_BYTES = 64
_SIGNED_NUMBERS = 3
_described, _written, _shape, _rows, _spans = (
    on_stack(num_fields)
    for num_fields in (
        DLTensor.FIELDS,
        Arguments.FIELDS + 3,
        _SIGNED_NUMBERS,
        MOST_TENSORS * TensorRecord.FIELDS,
        2 * 2 * MOST_TENSORS,
    )
)


@inner
def are_plain(path: FastPath, tensors, count):
    """Return whether the items of a list are tensors as `is_plain` says. Runs Python: the cached calls may change."""
    for index in range(count):
        if not is_plain(path, list_item(tensors, index)):
            return False
    return True


@inner
def shape_hash(tensor: DLTensor):
    """Return Python's hash of the shape of a tensor."""
    total, length = FIRST_HASH, num_dims(tensor)
    for index in range(length):
        total = hash_step(total, dim(tensor, index))
    return hash_end(total, length)


@inner
def add_span(spans: Words, low, high, begin, end):
    """Add a range of memory to the sorted ones from index `low` to `high`; return the new limits, 0 for an overlap.

    A range below or above all others, as most are, moves none of them.
    """
    place = high
    if low < high and begin < spans[2 * low]:
        low -= 1
        place = low
    else:
        high += 1
        while place > low and spans[2 * place - 2] > begin:
            spans[2 * place], spans[2 * place + 1] = spans[2 * place - 2], spans[2 * place - 1]
            place -= 1
    spans[2 * place], spans[2 * place + 1] = begin, end
    if (place > low and spans[2 * place - 1] > begin) or (place + 1 < high and spans[2 * place + 2] < end):
        return 0, 0
    return low, high


@inner
def describe_list(
    path: FastPath, cached_call: CachedCallRecord, tensors, count, tensor: DLTensor, rows: TensorRecord, shape: Words
):
    """Fill in the table of the tensors that are not empty, and what the ranks compare; return how many there are.

    NOT_FAST if one of them is not contiguous or of another dtype, or if two share memory.
    """
    numel, num_rows, offset, total = 0, 0, 0, FIRST_HASH
    spans, low, high = Words(_spans()), MOST_TENSORS, MOST_TENSORS
    for index in range(count):
        if describe_with(path.describe, list_item(tensors, index), tensor) != 0:
            return NOT_FAST
        length, begin = plain_numel(cached_call, tensor), data(tensor)
        if length < 0:
            return NOT_FAST
        total = hash_step(total, shape_hash(tensor))
        numel += length
        num_bytes = length * cached_call.call.item_bytes
        if num_bytes > 0:
            low, high = add_span(spans, low, high, begin, begin + num_bytes)
            if high == 0:
                return NOT_FAST
            row = rows[num_rows]
            row.begin, row.address, row.num_bytes = offset, begin, num_bytes
            offset += (num_bytes + _LINE_BYTES - 1) // _LINE_BYTES * _LINE_BYTES
            num_rows += 1
    shape[0], shape[1], shape[2] = numel, count, hash_end(total, count) % CHECKSUM_MODULUS
    return num_rows


def list_entry(*, finds: bool = False) -> Function:
    """Return the function of the fast path: the list, None if Python must run the call, 0 if it has raised.

    One that `finds` returns what begins such a call in the background, instead of the list, as `find_bound` does.
    """

    def list_call(path: FastPath, tensors, out, key, comm, backend):
        if not path.first_call or PyObject(tensors).kind != path.list_type:
            return new_reference(path.none)
        count = list_size(tensors)
        if count < 2 or count > MOST_TENSORS:
            return new_reference(path.none)
        if not are_plain(path, tensors, count) or is_for_python(path):
            return leave_to_python(path)
        tensor, arguments = DLTensor(_described()), Arguments(_written())
        if describe_with(path.describe, list_item(tensors, 0), tensor) != 0:
            return leave_to_python(path)
        cached_call = find_cached_call(path.first_call, tensor, key, comm, backend)
        if not cached_call:
            return new_reference(path.none)
        rows, shape = TensorRecord(_rows()), Words(_shape())
        num_rows = describe_list(path, cached_call, tensors, count, tensor, rows, shape)
        if num_rows <= 0:
            return leave_to_python(path)
        if finds:
            return new_reference(cached_call.bound if cached_call.bound != 0 else path.none)
        last = rows[num_rows - 1]
        num_bytes = last.begin + last.num_bytes
        tensor.shape, tensor.num_dims_and_dtype = shape, _SIGNED_NUMBERS
        if begin_call(cached_call, tensor, num_bytes, arguments) != 0:
            return new_reference(path.none)
        thread = release_gil()
        status = allreduce_list(cached_call.call, arguments.seq, arguments.signature, rows, num_rows, num_bytes)
        take_gil(thread)
        return finish(path, status, tensors, path.none, tensors, True, cached_call, arguments.seq)

    return Function(list_call)
