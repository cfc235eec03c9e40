"""Machine code of the fast path: tensors in, one call of a kernel, the result out (docs/design/fast-path.md).

`FastPathWrapper` has torch describe the tensors as DLTensors. `find_cached_call` then looks for a cached call of the
same dtype, key and communicator, and one of the `enter_*` functions

1. checks the tensors: contiguous, on the host, of the cached dtype, and with an `out` made for the result;
2. writes the arguments of the kernel that follow the call record (from FIRST_ARGUMENT on);
3. takes the run lock if the call queue is idle, enters the call into the call log, and computes its signature
   (`begin_call`). Nothing before this step has an effect, so NOT_FAST can be returned up to here.

The GIL is held throughout and orders the fast path with Python threads, so no atomic access is needed.

`FastPathWrapper` emits LLVM code that uses functions which CPython's C API exports; functions that its headers define
inline cannot be called.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..memory_layout import MAX_LOG_DIMS, LockFields, LogFields
from .access import group_of
from .compilation import BYTES, INT, WORD, Wrapper, inner, kernel, kernels
from .intrinsics import copy, load, store
from .kernel_sets import FastPathKernel
from .logged_calls import FIRST_HASH, close_entry, hash_end, hash_step, open_entry, set_dim
from .movement import rows_before
from .records import (
    NOT_FAST,
    Arguments,
    CachedCallRecord,
    DLTensor,
    FastPath,
    KernelCall,
    ScatterArguments,
    TensorMessage,
)

_HOST = 1  # device type CPU, device number 0 in the upper half
_LOW_BITS = (1 << 32) - 1
_MAX_BITS = 60  # greater numbers are not equal to their hash
_MOST_COPIED_BYTES = 64 << 10  # while the GIL is held


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
    if tensor.device != _HOST or dtype_of(tensor) != cached_call.dlpack_dtype:
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
def row_numel(tensor: DLTensor):
    """Return the number of elements of a row; a 0-dim tensor is one row of one element."""
    numel = 1
    for index in range(1, num_dims(tensor)):
        numel *= dim(tensor, index)
    return numel


@inner
def is_apart(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor):
    """Return whether two contiguous tensors share no memory."""
    item_bytes = cached_call.call.item_bytes
    source_end = data(source) + plain_numel(cached_call, source) * item_bytes
    target_end = data(target) + plain_numel(cached_call, target) * item_bytes
    return source_end <= data(target) or target_end <= data(source)


@inner
def fits(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, num_rows):
    """Return whether the target has `num_rows` rows like those of the source, and shares no memory with the source."""
    dims = max(num_dims(source), 1)
    if plain_numel(cached_call, target) < 0 or num_dims(target) != dims or dim(target, 0) != num_rows:
        return False
    for index in range(1, dims):
        if dim(target, index) != dim(source, index):
            return False
    return is_apart(cached_call, source, target)


# --- entering ---------------------------------------------------------------------------------------------------


@kernel
def find_cached_call(first: CachedCallRecord, tensor: DLTensor, key, comm) -> CachedCallRecord:
    """Return the cached call for this dtype, key and communicator, or 0."""
    dtype, cached_call = dtype_of(tensor), first
    while cached_call:
        is_like_it = cached_call.key == key and cached_call.comm == comm
        if is_like_it and cached_call.dlpack_dtype == dtype:
            break
        cached_call = cached_call.following
    return cached_call


@inner
def is_free(run_lock: LockFields):
    """Return whether the call queue of a run lock is idle."""
    return run_lock.held == 0 and load(run_lock.entered) == 0 and run_lock.pending == 0


@inner
def begin_call(cached_call: CachedCallRecord, tensor: DLTensor, num_bytes, arguments: Arguments):
    """Take the run lock and enter the call into the call log; NOT_FAST if the call queue is not idle.

    `num_bytes`: the size of the tensor that this rank passes.
    """
    run_lock = cached_call.run_lock
    if not is_free(run_lock):
        return NOT_FAST
    store(run_lock.entered, 1)
    call_log, first = cached_call.call_log, cached_call.first_dim
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
def enter_in_place(cached_call: CachedCallRecord, tensor: DLTensor, unit, arguments: Arguments):
    """Enter a kernel that takes an address and a length, of `unit` for each element."""
    numel, call = plain_numel(cached_call, tensor), cached_call.call
    num_bytes, hosts = numel * call.item_bytes, call.hosts
    if numel < 0 or (hosts and not 0 < num_bytes <= hosts.value_bytes):
        return NOT_FAST
    arguments.rest[0] = data(tensor)
    arguments.rest[1] = numel * unit
    return begin_call(cached_call, tensor, num_bytes, arguments)


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
    numel, dims = plain_numel(cached_call, source), num_dims(source)
    num_bytes = numel * cached_call.call.item_bytes
    if numel < 0 or num_bytes > _MOST_COPIED_BYTES or num_dims(target) != dims:
        return NOT_FAST
    for index in range(dims):
        if dim(target, index) != dim(source, index):
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
def enter_gathering(cached_call: CachedCallRecord, source: DLTensor, numel, target, arguments: Arguments):
    """Enter an allgather whose result has the address `target`; 0 if this rank gets no result."""
    num_bytes = numel * cached_call.call.item_bytes
    arguments.rest[0] = data(source)
    arguments.rest[1] = num_bytes
    arguments.rest[2] = target
    return begin_call(cached_call, source, num_bytes, arguments)


@kernel
def enter_allgather(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, arguments: Arguments):
    """Enter an allgather that expects the same number of rows of every rank."""
    numel = plain_numel(cached_call, source)
    if numel < 0 or row_numel(source) == 0:
        return NOT_FAST
    num_rows = dim(source, 0) if num_dims(source) > 0 else 1
    size = group_of(cached_call.call).size
    if not fits(cached_call, source, target, num_rows * size):
        return NOT_FAST
    return enter_gathering(cached_call, source, numel, data(target), arguments)


@kernel
def enter_give(cached_call: CachedCallRecord, source: DLTensor, _: DLTensor, arguments: Arguments):
    """Enter a gather on a rank that is not the root."""
    numel = plain_numel(cached_call, source)
    if numel < 0 or row_numel(source) == 0:
        return NOT_FAST
    return enter_gathering(cached_call, source, numel, 0, arguments)


@inner
def own_rows(call: KernelCall, num_rows):
    """Return how many of `num_rows` rows belong to this rank."""
    group = group_of(call)
    rank, size = group.rank, group.size
    return rows_before(num_rows, size, rank + 1) - rows_before(num_rows, size, rank)


@inner
def enter_with_rows(cached_call: CachedCallRecord, source: DLTensor, target: DLTensor, times, arguments: Arguments):
    """Enter a kernel that takes the rows of the source, and a target for `times` this rank's part of them."""
    call = cached_call.call
    if plain_numel(cached_call, source) < 0 or num_dims(source) == 0:
        return NOT_FAST
    num_rows, row_bytes = dim(source, 0), row_numel(source) * call.item_bytes
    if not fits(cached_call, source, target, own_rows(call, num_rows) * times):
        return NOT_FAST
    arguments.rest[0] = data(source)
    arguments.rest[1] = num_rows
    arguments.rest[2] = row_bytes
    arguments.rest[3] = data(target)
    return begin_call(cached_call, source, num_rows * row_bytes, arguments)


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


@inner
def enter_scattering(cached_call: CachedCallRecord, tensor: DLTensor, arguments: ScatterArguments):
    """Enter a scatter, and write the description of the tensor that this rank offers or expects."""
    call = cached_call.call
    row_bytes = row_numel(tensor) * call.item_bytes
    status = begin_call(cached_call, tensor, dim(tensor, 0) * row_bytes, Arguments(arguments))
    if status != 0:
        return status
    message, length = call.message, num_dims(tensor)
    message.dtype, message.num_dims = call.dtype, length
    for index in range(length):
        message.shape[index] = dim(tensor, index)
    arguments.message = message
    arguments.message_bytes = (TensorMessage.shape + length) * 8
    arguments.row_bytes = row_bytes
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
    if not fits(cached_call, source, target, own_rows(call, num_rows)):
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


_TYPE = 1  # field of a PyObject


class FastPathWrapper(Wrapper):
    """``name(tensor, out, key, comm, backend)``, which returns the result, or None if Python must run the call.

    `self.record` is the address of its record (see records).
    """

    def __init__(self, name: str, spec: FastPathKernel) -> None:
        super().__init__(name, 5)
        self.writes = spec.writes
        self.failed = self.function.append_basic_block("failed")
        self.not_fast = self.function.append_basic_block("not_fast")
        self.tensor, self.out, self.key, self.comm, backend = (self.argument(index) for index in range(5))
        self.record = self.number(self.function.args[0])
        self.none = self.field(self.record, FastPath.none)
        self.unused, self.tensors = [backend], list[Any]()
        for item, is_taken in ((self.tensor, spec.takes_tensor), (self.out, spec.takes_out)):
            (self.tensors if is_taken else self.unused).append(item)
        self._emit(spec)

    def _emit(self, spec: FastPathKernel) -> None:
        builder, kernel = self.builder, kernels[spec.kernel]
        num_fields = kernel.num_arguments - 1
        first = self.field(self.record, FastPath.first_call)
        self._continue_if(builder.icmp_signed("!=", first, WORD(0)), self.not_fast)
        self._check_arguments()
        # These two run Python or release the GIL, so other threads may invalidate the fast path. Later steps do not,
        # until the call is entered: FIRST_CALL is loaded again, and the cached calls stay valid.
        self._check_negative_views()
        self._check_chosen_communicator()
        described = self._describe_tensors()
        identity = [builder.ptrtoint(item, WORD) for item in (self.key, self.comm)]
        cached_call = self.call(
            kernels["find_cached_call"], [self.field(self.record, FastPath.first_call), described[0], *identity]
        )
        self._continue_if(builder.icmp_signed("!=", cached_call, WORD(0)), self.not_fast)
        written = self.stack_record(num_fields)
        status = self.call(kernels[spec.enter], [cached_call, described[0], described[-1], written])
        self._continue_if(builder.icmp_signed("==", status, WORD(0)), self.not_fast)
        arguments = [self.field(written, index) for index in range(num_fields)]
        status = self.without_gil(kernel, [self.field(cached_call, CachedCallRecord.call), *arguments])
        unsettled = self.function.append_basic_block("unsettled")
        self._continue_if(builder.icmp_signed("==", status, WORD(0)), unsettled)
        self._leave(cached_call)
        self._end_not_fast()
        builder.position_at_end(unsettled)
        builder.ret(self._settle(status, cached_call, arguments[Arguments.seq]))

    # --- before the call -------------------------------------------------------------------------------------

    def _check_arguments(self) -> None:
        """Require tensors, not of a subclass, and no `backend`."""
        for item in self.unused:
            self._continue_if(self._is_at(item, self.none), self.not_fast)
        for tensor in self.tensors:
            kind = self.field(self.builder.ptrtoint(tensor, WORD), _TYPE)
            is_tensor = self.builder.icmp_signed("==", kind, self.field(self.record, FastPath.tensor_type))
            self._continue_if(is_tensor, self.not_fast)

    def _check_chosen_communicator(self) -> None:
        """Require that no communicator is chosen for this thread or task (`mpi.use`)."""
        value = self.builder.alloca(BYTES)
        get = self.declared("PyContextVar_Get", INT, BYTES, BYTES, BYTES.as_pointer())
        status = self.builder.call(get, [self._object(FastPath.chosen_comm), BYTES(None), value])
        self._continue_if(self.builder.icmp_signed("==", status, INT(0)), self.failed)
        self._decref(chosen := self.builder.load(value))
        self._continue_if(self._is_at(chosen, self.none), self.not_fast)

    def _check_negative_views(self) -> None:
        """Require tensors without the negative bit, which a DLTensor does not describe."""
        for tensor in self.tensors:
            answer = self._call_python(FastPath.is_neg, tensor)
            self._continue_if(self.builder.icmp_signed("!=", answer, BYTES(None)), self.failed)
            self._decref(answer)
            self._continue_if(self._is_at(answer, self.field(self.record, FastPath.false)), self.not_fast)

    def _describe_tensors(self) -> list[Any]:
        """Have torch fill in a DLTensor for each tensor."""
        kind = ir.FunctionType(INT, [BYTES, WORD]).as_pointer()
        describe = self.builder.inttoptr(self.field(self.record, FastPath.describe), kind)
        described = [self.stack_record(DLTensor.FIELDS) for _ in self.tensors]
        for tensor, target in zip(self.tensors, described, strict=True):
            status = self.builder.call(describe, [tensor, target])
            self._continue_if(self.builder.icmp_signed("==", status, INT(0)), self.failed)
        if not described:  # a barrier is cached without dtype and has no shape
            described = [self.stack_record(DLTensor.FIELDS)]
            self.builder.store(WORD(0), self.field_pointer(described[0], DLTensor.num_dims_and_dtype))
        return described

    # --- after the call --------------------------------------------------------------------------------------

    def _leave(self, cached_call: Any) -> None:
        """Release the run lock, record the write for autograd, and return the written tensor; False for a barrier."""
        self._end_call(cached_call)
        written = self.tensors[-1] if self.tensors else self._object(FastPath.false)
        if not self.writes:
            self._incref(written)
            self.builder.ret(written)
            return
        pack = self.declared("PyTuple_Pack", BYTES, WORD, takes_any=True)
        alone = self.builder.call(pack, [WORD(1), written])
        counted = self._call_python(FastPath.increment_version, alone)
        self._decref(alone)
        counted_block, uncounted, error, done = (
            self.function.append_basic_block(name) for name in ("counted", "uncounted", "error", "done")
        )
        self.builder.cbranch(self.builder.icmp_signed("!=", counted, BYTES(None)), counted_block, uncounted)
        self.builder.position_at_end(counted_block)
        self._decref(counted)
        self.builder.branch(done)
        self.builder.position_at_end(uncounted)
        self._clear_error()
        touched = self._call_python(FastPath.touch, written)
        self._continue_if(self.builder.icmp_signed("!=", touched, BYTES(None)), error)
        self._decref(touched)
        self.builder.branch(done)
        self.builder.position_at_end(error)
        self.builder.ret(BYTES(None))
        self.builder.position_at_end(done)
        self._incref(written)
        self.builder.ret(written)

    def _call_fields(self, cached_call: Any) -> tuple[Any, Any]:
        """Return pointers to `active` of the call log and `entered` of the run lock."""
        return (
            self.field_pointer(self.field(cached_call, CachedCallRecord.call_log), LogFields.active),
            self.field_pointer(self.field(cached_call, CachedCallRecord.run_lock), LockFields.entered),
        )

    def _end_call(self, cached_call: Any) -> None:
        call_log, run_lock = (
            self.field(cached_call, field) for field in (CachedCallRecord.call_log, CachedCallRecord.run_lock)
        )
        self.call(kernels["end_call"], [call_log, run_lock])

    def _settle(self, status: Any, cached_call: Any, seq: Any) -> Any:
        """Return the result of Python's handling of a status; null with an exception set."""
        active, entered = self._call_fields(cached_call)
        numbers = [self.as_number(status), self.as_number(cached_call)]
        result = self._call_python(FastPath.settle, numbers[0], self.tensor, self.out, numbers[1])
        for number in numbers:
            self._decref(number)
        # After a KeyboardInterrupt before the first line of Python the call is still active.
        builder = self.builder
        is_lost = builder.and_(
            builder.icmp_signed("==", result, BYTES(None)), builder.icmp_signed("==", builder.load(active), seq)
        )
        with builder.if_then(is_lost, likely=False):
            self._abort(cached_call)
            builder.store(WORD(0), active)
            builder.store(WORD(0), entered)
        return result

    def _abort(self, cached_call: Any) -> None:
        """Abort the call, and keep the exception that is set."""
        saved = [self.builder.alloca(BYTES) for _ in range(3)]
        fetch = self.declared("PyErr_Fetch", ir.VoidType(), *[BYTES.as_pointer()] * 3)
        self.builder.call(fetch, saved)
        number = self.as_number(cached_call)
        answer = self._call_python(FastPath.abort, number)
        self._decref(number)
        with self.builder.if_then(self.builder.icmp_signed("!=", answer, BYTES(None))):
            self._decref(answer)
        restore = self.declared("PyErr_Restore", ir.VoidType(), *[BYTES] * 3)
        self.builder.call(restore, [self.builder.load(item) for item in saved])

    def _end_not_fast(self) -> None:
        """Emit the exits that return None: after an error of Python, or because the fast path cannot run the call."""
        self.builder.position_at_end(self.failed)
        matches = self.declared("PyErr_ExceptionMatches", INT, BYTES)
        is_error = self.builder.call(matches, [self.python_object("PyExc_Exception")])
        with self.builder.if_then(self.builder.icmp_signed("==", is_error, INT(0)), likely=False):
            self.builder.ret(BYTES(None))  # KeyboardInterrupt in Python code of a mode, or SystemExit
        self._clear_error()
        self.builder.branch(self.not_fast)
        self.builder.position_at_end(self.not_fast)
        none = self._object(FastPath.none)
        self._incref(none)
        self.builder.ret(none)

    def _object(self, index: int) -> Any:
        return self.builder.inttoptr(self.field(self.record, index), BYTES)

    def _call_python(self, index: int, *arguments: Any) -> Any:
        call = self.declared("PyObject_CallFunctionObjArgs", BYTES, BYTES, takes_any=True)
        return self.builder.call(call, [self._object(index), *arguments, BYTES(None)])

    def _incref(self, item: Any) -> None:
        self.builder.call(self.declared("Py_IncRef", ir.VoidType(), BYTES), [item])

    def _decref(self, item: Any) -> None:
        self.builder.call(self.declared("Py_DecRef", ir.VoidType(), BYTES), [item])

    def _clear_error(self) -> None:
        self.builder.call(self.declared("PyErr_Clear", ir.VoidType()), [])

    def _is_at(self, item: Any, address: Any) -> Any:
        return self.builder.icmp_signed("==", self.builder.ptrtoint(item, WORD), address)

    def _continue_if(self, condition: Any, otherwise: Any) -> None:
        following = self.function.append_basic_block()
        self.builder.cbranch(condition, following, otherwise)
        self.builder.position_at_end(following)
