"""LLVM text of the fast path's functions: tensors in, one call of a kernel, the result out.

docs/design/fast-path.md describes the steps. The code uses functions that CPython's C API exports; what its headers
define inline cannot be called.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..memory_layout import LOG_ACTIVE, RUN_LOCK_ENTERED
from . import records
from .compilation import BYTES, INT, WORD, Wrapper, kernels
from .kernel_sets import FastPathKernel

_DLTENSOR_FIELDS = 6
_TYPE = 1  # field of a PyObject


class FastPathWrapper(Wrapper):
    """``name(tensor, out, key, comm, backend)``: it returns the result, or None if Python must run the call.

    `self.record` is the address of its record (see records).
    """

    def __init__(self, name: str, spec: FastPathKernel) -> None:
        super().__init__(name)
        self.writes = spec.writes
        self.failed = self.function.append_basic_block("failed")
        self.not_fast = self.function.append_basic_block("not_fast")
        self.tensor, self.out, self.key, self.comm, backend = (self.argument(index) for index in range(5))
        self.record = self.number(self.function.args[0])
        self.none = self.field(self.record, records.NONE)
        self.unused, self.tensors = [backend], list[Any]()
        for item, is_taken in ((self.tensor, spec.takes_tensor), (self.out, spec.takes_out)):
            (self.tensors if is_taken else self.unused).append(item)
        self._emit(spec)

    def _emit(self, spec: FastPathKernel) -> None:
        builder, kernel = self.builder, kernels[spec.kernel]
        num_fields = kernel.num_arguments - 1
        first = self.field(self.record, records.FIRST_CALL)
        self._continue_if(builder.icmp_signed("!=", first, WORD(0)), self.not_fast)
        self._check_arguments()
        # These two run Python or release the GIL, so other threads may invalidate the fast path. Nothing after them
        # does, until the call is entered: FIRST_CALL is loaded again, and what is found there stays valid.
        self._check_negative_views()
        self._check_chosen_communicator()
        described = self._describe_tensors()
        identity = [builder.ptrtoint(item, WORD) for item in (self.key, self.comm)]
        cached_call = self.call(
            kernels["find_cached_call"], [self.field(self.record, records.FIRST_CALL), described[0], *identity]
        )
        self._continue_if(builder.icmp_signed("!=", cached_call, WORD(0)), self.not_fast)
        written = self.stack_record(num_fields)
        status = self.call(kernels[spec.enter], [cached_call, described[0], described[-1], written])
        self._continue_if(builder.icmp_signed("==", status, WORD(0)), self.not_fast)
        arguments = [self.field(written, index) for index in range(num_fields)]
        status = self.without_gil(kernel, [self.field(cached_call, records.PREPARED_CALL), *arguments])
        unsettled = self.function.append_basic_block("unsettled")
        self._continue_if(builder.icmp_signed("==", status, WORD(0)), unsettled)
        self._leave(cached_call)
        self._end_not_fast()
        builder.position_at_end(unsettled)
        builder.ret(self._settle(status, cached_call, arguments[records.ARGUMENT_SEQ]))

    # --- before the call -------------------------------------------------------------------------------------

    def _check_arguments(self) -> None:
        """Require tensors, not of a subclass, and no `backend`."""
        for item in self.unused:
            self._continue_if(self._is_at(item, self.none), self.not_fast)
        for tensor in self.tensors:
            kind = self.field(self.builder.ptrtoint(tensor, WORD), _TYPE)
            is_tensor = self.builder.icmp_signed("==", kind, self.field(self.record, records.TENSOR_TYPE))
            self._continue_if(is_tensor, self.not_fast)

    def _check_chosen_communicator(self) -> None:
        """Require that this thread or task has not chosen a communicator (`mpi.use`)."""
        value = self.builder.alloca(BYTES)
        get = self.declared("PyContextVar_Get", INT, BYTES, BYTES, BYTES.as_pointer())
        status = self.builder.call(get, [self._object(records.CHOSEN_COMM), BYTES(None), value])
        self._continue_if(self.builder.icmp_signed("==", status, INT(0)), self.failed)
        self._decref(chosen := self.builder.load(value))
        self._continue_if(self._is_at(chosen, self.none), self.not_fast)

    def _check_negative_views(self) -> None:
        """Require tensors without the negative bit, which a DLTensor does not describe."""
        for tensor in self.tensors:
            answer = self._call_python(records.IS_NEG, tensor)
            self._continue_if(self.builder.icmp_signed("!=", answer, BYTES(None)), self.failed)
            self._decref(answer)
            self._continue_if(self._is_at(answer, self.field(self.record, records.FALSE)), self.not_fast)

    def _describe_tensors(self) -> list[Any]:
        """Have torch fill in a DLTensor for each tensor."""
        kind = ir.FunctionType(INT, [BYTES, WORD]).as_pointer()
        describe = self.builder.inttoptr(self.field(self.record, records.DESCRIBE), kind)
        described = [self.stack_record(_DLTENSOR_FIELDS) for _ in self.tensors]
        for tensor, target in zip(self.tensors, described, strict=True):
            status = self.builder.call(describe, [tensor, target])
            self._continue_if(self.builder.icmp_signed("==", status, INT(0)), self.failed)
        return described

    # --- after the call --------------------------------------------------------------------------------------

    def _leave(self, cached_call: Any) -> None:
        """Release the run lock, record the write for autograd, and return the written tensor."""
        self._end_call(cached_call)
        written = self.tensors[-1]
        if not self.writes:
            self._incref(written)
            self.builder.ret(written)
            return
        pack = self.declared("PyTuple_Pack", BYTES, WORD, takes_any=True)
        alone = self.builder.call(pack, [WORD(1), written])
        counted = self._call_python(records.INCREMENT_VERSION, alone)
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
        touched = self._call_python(records.TOUCH, written)
        self._continue_if(self.builder.icmp_signed("!=", touched, BYTES(None)), error)
        self._decref(touched)
        self.builder.branch(done)
        self.builder.position_at_end(error)
        self.builder.ret(BYTES(None))
        self.builder.position_at_end(done)
        self._incref(written)
        self.builder.ret(written)

    def _call_fields(self, cached_call: Any) -> tuple[Any, Any]:
        """Return pointers to LOG_ACTIVE of the call log and RUN_LOCK_ENTERED of the run lock."""
        return (
            self.field_pointer(self.field(cached_call, records.CALL_LOG), LOG_ACTIVE),
            self.field_pointer(self.field(cached_call, records.RUN_LOCK), RUN_LOCK_ENTERED),
        )

    def _end_call(self, cached_call: Any) -> None:
        for pointer in self._call_fields(cached_call):
            self.builder.store(WORD(0), pointer)

    def _settle(self, status: Any, cached_call: Any, seq: Any) -> Any:
        """Return what Python makes of a call that returned a status; null with an exception set."""
        active, entered = self._call_fields(cached_call)
        numbers = [self.as_number(status), self.as_number(cached_call)]
        result = self._call_python(records.SETTLE, numbers[0], self.tensor, self.out, numbers[1])
        for number in numbers:
            self._decref(number)
        # A KeyboardInterrupt may come before the first line of Python: then the call is still active.
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
        answer = self._call_python(records.ABORT, number)
        self._decref(number)
        with self.builder.if_then(self.builder.icmp_signed("!=", answer, BYTES(None))):
            self._decref(answer)
        restore = self.declared("PyErr_Restore", ir.VoidType(), *[BYTES] * 3)
        self.builder.call(restore, [self.builder.load(item) for item in saved])

    def _end_not_fast(self) -> None:
        """Emit the exits that return None: after an error of Python, or because the call is not a plain one."""
        self.builder.position_at_end(self.failed)
        self._clear_error()
        self.builder.branch(self.not_fast)
        self.builder.position_at_end(self.not_fast)
        none = self._object(records.NONE)
        self._incref(none)
        self.builder.ret(none)

    # --- Python objects --------------------------------------------------------------------------------------

    def _object(self, index: int) -> Any:
        """Load an object from the record."""
        return self.builder.inttoptr(self.field(self.record, index), BYTES)

    def _call_python(self, index: int, *arguments: Any) -> Any:
        call = self.declared("PyObject_CallFunctionObjArgs", BYTES, BYTES, takes_any=True)
        return self.builder.call(call, [self._object(index), *arguments, BYTES(None)])

    def _is_at(self, item: Any, address: Any) -> Any:
        return self.builder.icmp_signed("==", self.builder.ptrtoint(item, WORD), address)

    def _incref(self, item: Any) -> None:
        self.builder.call(self.declared("Py_IncRef", ir.VoidType(), BYTES), [item])

    def _decref(self, item: Any) -> None:
        self.builder.call(self.declared("Py_DecRef", ir.VoidType(), BYTES), [item])

    def _clear_error(self) -> None:
        self.builder.call(self.declared("PyErr_Clear", ir.VoidType()), [])

    def _continue_if(self, condition: Any, otherwise: Any) -> None:
        following = self.function.append_basic_block()
        self.builder.cbranch(condition, following, otherwise)
        self.builder.position_at_end(following)
