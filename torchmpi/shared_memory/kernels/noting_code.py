"""Machine code that notes the calls of the fast path while a timeline is recorded (docs/design/timeline.md)."""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir

from ..memory_layout import FIELD_BYTES
from . import records
from .compilation import BYTES, INT, WORD, Wrapper, kernels

_HAS_OFFSETS = hasattr(ctypes.pythonapi, "PyFrame_GetLasti")  # from CPython 3.11 on


class NotingWrapper(Wrapper):
    """A wrapper that calls Python, and notes calls that have ended; `record` is the address of its record."""

    record: Any

    def _note(self, cached_call: Any) -> None:
        """Pass the call to the recorder of calls, if there is one."""
        builder = self.builder
        has_recorder = builder.icmp_signed("!=", self.field(self.record, records.NOTE), WORD(0))
        with builder.if_then(has_recorder, likely=False):
            numbers = self.stack_record(records.NUM_NUMBERS)
            self.call(kernels["note_call"], [self.field(cached_call, records.CALL_LOG), numbers])
            info = builder.inttoptr(self.field(cached_call, records.DESCRIPTION), BYTES)
            self._incref(info)  # of the note; an audit hook of sys._getframe may drop the cached call
            is_noted = builder.alloca(WORD)
            builder.store(WORD(0), is_noted)
            if _HAS_OFFSETS:
                frame = self._call_python(records.FRAME_AT, self._object(records.ONE))
                with builder.if_else(builder.icmp_signed("!=", frame, BYTES(None))) as (found, missing):
                    with found:
                        builder.store(self._add_note(info, frame, numbers), is_noted)
                    with missing:  # no Python code has called the public function
                        self._clear_error()
            with builder.if_then(builder.icmp_signed("==", builder.load(is_noted), WORD(0)), likely=False):
                self._note_in_python(info, numbers)

    def _add_note(self, info: Any, frame: Any, numbers: Any) -> Any:
        """Note a call by the line that a frame executes; return whether that was possible."""
        builder = self.builder
        code = builder.call(self.declared("PyFrame_GetCode", BYTES, BYTES), [frame])
        offset = builder.call(self.declared("PyFrame_GetLasti", INT, BYTES), [frame])
        self._decref(frame)
        thread = builder.call(self.declared("PyThread_get_thread_ident", WORD), [])
        addresses = [builder.ptrtoint(item, WORD) for item in (info, code)]
        notes = self.field(self.record, records.NOTES)
        status = self.call(kernels["add_note"], [notes, *addresses, builder.sext(offset, WORD), thread, numbers])
        is_refused = builder.icmp_signed("!=", status, WORD(0))
        with builder.if_then(is_refused, likely=False):
            self._decref(code)
        return builder.zext(builder.not_(is_refused), WORD)

    def _note_in_python(self, info: Any, numbers: Any) -> None:
        builder = self.builder
        pack = self.declared("PyBytes_FromStringAndSize", BYTES, BYTES, WORD)
        packed = builder.call(pack, [builder.inttoptr(numbers, BYTES), WORD(records.NUM_NUMBERS * FIELD_BYTES)])
        answer = self._call_python(records.NOTE, info, packed)
        self._decref(packed)
        self._decref(info)
        with builder.if_then(builder.icmp_signed("==", answer, BYTES(None)), likely=False):
            builder.ret(BYTES(None))  # KeyboardInterrupt
        self._decref(answer)

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
