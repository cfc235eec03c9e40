"""LLVM's text for gates (see :mod:`torchmpi.shared_memory.fast_path`): tensors in, one call of a kernel, the result
out.

Written for CPython's C API as far as it is exported as functions: what its headers define inline has no name here.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .. import memory_layout
from . import context
from .kernel_sets import Entrance
from .wrappers import BYTES, INT, WORD, Native, Wrapper

_TENSOR_FIELDS = 6  # DLPack's description of one
_TYPE = 1  # the word of an object that tells its type


def fast_path_text(name: str, find: Native, enter: Native, native: Native, entrance: Entrance) -> str:
    """``name(tensor, out, key, comm, backend)``: the result, or None if the call must take the way through Python."""
    return _FastPath(name, native, entrance).text(find, enter)


class _FastPath(Wrapper):
    def __init__(self, name: str, native: Native, entrance: Entrance) -> None:
        super().__init__(name)
        self.native, self.writes = native, entrance.writes
        self.refused = self.function.append_basic_block("refused")
        self.otherwise = self.function.append_basic_block("otherwise")
        self.tensor, self.out, self.key, self.comm, backend = (self.argument(index) for index in range(5))
        self.fast_path = self.number(self.function.args[0])
        self.none = self.field(self.fast_path, context.NONE)
        self.unused, self.tensors = [backend], list[Any]()
        for item, is_taken in ((self.tensor, entrance.takes_tensor), (self.out, entrance.takes_out)):
            (self.tensors if is_taken else self.unused).append(item)

    def text(self, find: Native, enter: Native) -> str:
        builder = self.builder
        first = self.field(self.fast_path, context.FIRST)
        self._go_on_if(builder.icmp_signed("!=", first, WORD(0)), self.otherwise)
        self._look_at_arguments()
        # This gives the GIL away, or runs Python: other threads may shut the gate. Nothing after it does, until the
        # call is entered: so what is found here stays.
        self._look_at_signs()
        self._look_at_context()
        described = self._described()
        names = [builder.ptrtoint(item, WORD) for item in (self.key, self.comm)]
        cached_call = self.call(find, [self.field(self.fast_path, context.FIRST), described[0], *names])
        self._go_on_if(builder.icmp_signed("!=", cached_call, WORD(0)), self.otherwise)
        call = self.room(self.native.num_arguments - 1)
        status = self.call(enter, [cached_call, described[0], described[-1], call])
        self._go_on_if(builder.icmp_signed("==", status, WORD(0)), self.otherwise)
        arguments = [self.field(call, index) for index in range(self.native.num_arguments - 1)]
        status = self.without_gil(self.native, [self.field(cached_call, context.PLAN), *arguments])
        unsettled = self.function.append_basic_block("unsettled")
        self._go_on_if(builder.icmp_signed("==", status, WORD(0)), unsettled)
        self._leave(cached_call)
        self._end_otherwise()
        builder.position_at_end(unsettled)
        return self.finish(self._settled(status, cached_call, arguments[0]))

    # --- before the call -------------------------------------------------------------------------------------

    def _look_at_arguments(self) -> None:
        """Tensors and nothing else, by the transport that the selector says."""
        for item in self.unused:
            self._go_on_if(self._is_at(item, self.none), self.otherwise)
        for tensor in self.tensors:
            kind = self.field(self.builder.ptrtoint(tensor, WORD), _TYPE)
            is_tensor = self.builder.icmp_signed("==", kind, self.field(self.fast_path, context.TENSOR_TYPE))
            self._go_on_if(is_tensor, self.otherwise)

    def _look_at_context(self) -> None:
        """No communicator chosen by this thread or task."""
        value = self.builder.alloca(BYTES)
        get = self.declared("PyContextVar_Get", INT, BYTES, BYTES, BYTES.as_pointer())
        status = self.builder.call(get, [self._object(context.CHOSEN), BYTES(None), value])
        self._go_on_if(self.builder.icmp_signed("==", status, INT(0)), self.refused)
        self._take_away(chosen := self.builder.load(value))
        self._go_on_if(self._is_at(chosen, self.none), self.otherwise)

    def _described(self) -> list[Any]:
        """What the tensors are, in DLPack's terms."""
        kind = ir.FunctionType(INT, [BYTES, WORD]).as_pointer()
        describe = self.builder.inttoptr(self.field(self.fast_path, context.EXCHANGE), kind)
        places = [self.room(_TENSOR_FIELDS) for _ in self.tensors]
        for tensor, place in zip(self.tensors, places, strict=True):
            status = self.builder.call(describe, [tensor, place])
            self._go_on_if(self.builder.icmp_signed("==", status, INT(0)), self.refused)
        return places

    def _look_at_signs(self) -> None:
        """No view that only says its values are negative, which the description does not tell."""
        for tensor in self.tensors:
            answer = self._call_python(context.IS_NEG, tensor)
            self._go_on_if(self.builder.icmp_signed("!=", answer, BYTES(None)), self.refused)
            self._take_away(answer)
            self._go_on_if(self._is_at(answer, self.field(self.fast_path, context.FALSE)), self.otherwise)

    # --- after it --------------------------------------------------------------------------------------------

    def _leave(self, cached_call: Any) -> None:
        """Give the right to run back, tell autograd what was written, and return it."""
        self.builder.store(WORD(0), self.place(self.field(cached_call, context.CALL_LOG), memory_layout.LOG_ACTIVE))
        self.builder.store(
            WORD(0), self.place(self.field(cached_call, context.RUN_LOCK), memory_layout.RUN_LOCK_ENTERED)
        )
        written = self.tensors[-1]
        if not self.writes:
            self._give(written)
            self.builder.ret(written)
            return
        pack = self.declared("PyTuple_Pack", BYTES, WORD, takes_any=True)
        alone = self.builder.call(pack, [WORD(1), written])
        noted = self._call_python(context.INCREMENT_VERSION, alone)
        self._take_away(alone)
        noted_block, unnoted, failed, done = (
            self.function.append_basic_block(field) for field in ("noted", "unnoted", "failed", "done")
        )
        self.builder.cbranch(self.builder.icmp_signed("!=", noted, BYTES(None)), noted_block, unnoted)
        self.builder.position_at_end(noted_block)
        self._take_away(noted)
        self.builder.branch(done)
        self.builder.position_at_end(unnoted)
        self._forget_error()
        touched = self._call_python(context.TOUCH, written)
        self._go_on_if(self.builder.icmp_signed("!=", touched, BYTES(None)), failed)
        self._take_away(touched)
        self.builder.branch(done)
        self.builder.position_at_end(failed)
        self.builder.ret(BYTES(None))
        self.builder.position_at_end(done)
        self._give(written)
        self.builder.ret(written)

    def _settled(self, status: Any, cached_call: Any, seq: Any) -> Any:
        """What Python makes of a call that could not be finished here; null with an error, as Python wants it."""
        busy = self.place(self.field(cached_call, context.CALL_LOG), memory_layout.LOG_ACTIVE)
        entered = self.place(self.field(cached_call, context.RUN_LOCK), memory_layout.RUN_LOCK_ENTERED)
        numbers = [self.as_number(status), self.as_number(cached_call)]
        result = self._call_python(context.SETTLE, numbers[0], self.tensor, self.out, numbers[1])
        for number in numbers:
            self._take_away(number)
        # A KeyboardInterrupt strikes before the first line of Python: then nobody has taken the call over.
        builder = self.builder
        is_lost = builder.and_(
            builder.icmp_signed("==", result, BYTES(None)), builder.icmp_signed("==", builder.load(busy), seq)
        )
        with builder.if_then(is_lost, likely=False):
            self._abort(cached_call)
            builder.store(WORD(0), busy)
            builder.store(WORD(0), entered)
        return result

    def _abort(self, cached_call: Any) -> None:
        """Let the others know, and keep the error that there is."""
        places = [self.builder.alloca(BYTES) for _ in range(3)]
        fetch = self.declared("PyErr_Fetch", ir.VoidType(), *[BYTES.as_pointer()] * 3)
        self.builder.call(fetch, places)
        number = self.as_number(cached_call)
        answer = self._call_python(context.ABORT, number)
        self._take_away(number)
        with self.builder.if_then(self.builder.icmp_signed("!=", answer, BYTES(None))):
            self._take_away(answer)
        restore = self.declared("PyErr_Restore", ir.VoidType(), *[BYTES] * 3)
        self.builder.call(restore, [self.builder.load(place) for place in places])

    def _end_otherwise(self) -> None:
        self.builder.position_at_end(self.refused)
        self._forget_error()
        self.builder.branch(self.otherwise)
        self.builder.position_at_end(self.otherwise)
        none = self._object(context.NONE)
        self._give(none)
        self.builder.ret(none)

    # --- Python's objects ------------------------------------------------------------------------------------

    def _object(self, index: int) -> Any:
        """An object that the gate knows."""
        return self.builder.inttoptr(self.field(self.fast_path, index), BYTES)

    def _call_python(self, index: int, *arguments: Any) -> Any:
        call = self.declared("PyObject_CallFunctionObjArgs", BYTES, BYTES, takes_any=True)
        return self.builder.call(call, [self._object(index), *arguments, BYTES(None)])

    def _is_at(self, item: Any, address: Any) -> Any:
        return self.builder.icmp_signed("==", self.builder.ptrtoint(item, WORD), address)

    def _give(self, item: Any) -> None:
        self.builder.call(self.declared("Py_IncRef", ir.VoidType(), BYTES), [item])

    def _take_away(self, item: Any) -> None:
        self.builder.call(self.declared("Py_DecRef", ir.VoidType(), BYTES), [item])

    def _forget_error(self) -> None:
        self.builder.call(self.declared("PyErr_Clear", ir.VoidType()), [])

    def _go_on_if(self, condition: Any, otherwise: Any) -> None:
        following = self.function.append_basic_block()
        self.builder.cbranch(condition, following, otherwise)
        self.builder.position_at_end(following)
