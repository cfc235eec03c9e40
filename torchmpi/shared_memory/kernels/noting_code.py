"""Machine code that notes the calls of the fast path while a timeline is recorded (docs/design/timeline.md)."""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir

from ..memory_layout import FIELD_BYTES, LogFields
from .compilation import BYTES, INT, WORD, Wrapper, kernels
from .records import IS_ORIGIN, CachedCallRecord, FastPath, Noted, OriginRecord

_HAS_OFFSETS = hasattr(ctypes.pythonapi, "PyFrame_GetLasti")  # from CPython 3.11 on


class NotingWrapper(Wrapper):
    """A wrapper that calls Python, and notes calls that have ended; `record` is the address of its record."""

    record: Any

    def _note(self, cached_call: Any) -> None:
        """Pass the call to the recorder of calls, if there is one."""
        builder = self.builder
        has_recorder = builder.icmp_signed("!=", self.field(self.record, FastPath.note), WORD(0))
        with builder.if_then(has_recorder, likely=False):
            numbers, call_log = self.stack_record(Noted.FIELDS), self.field(cached_call, CachedCallRecord.call_log)
            self.call(kernels["note_call"], [call_log, numbers])
            self._forget_algorithm(call_log)
            info = builder.inttoptr(self.field(cached_call, CachedCallRecord.description), BYTES)
            self._incref(info)  # of the note; an audit hook of sys._getframe may drop the cached call
            is_noted = builder.alloca(WORD)
            builder.store(WORD(0), is_noted)
            if _HAS_OFFSETS:
                frame = self._call_python(FastPath.frame_at, self._object(FastPath.one))
                with builder.if_else(builder.icmp_signed("!=", frame, BYTES(None))) as (found, missing):
                    with found:
                        builder.store(self._add_note(info, BYTES(None), frame, numbers), is_noted)
                    with missing:  # no Python code has called the public function
                        self._clear_error()
            with builder.if_then(builder.icmp_signed("==", builder.load(is_noted), WORD(0)), likely=False):
                self._note_in_python(info, numbers)

    def _forget_algorithm(self, call_log: Any) -> None:
        """Store that the library has chosen the algorithm of the next call, unless it stores another."""
        self.builder.store(WORD(0), self.field_pointer(call_log, LogFields.algorithm))

    def _frame_at(self, depth: Any) -> Any:
        """Return a frame; null if there is none, or if calls have labels, which Python has to look up."""
        builder = self.builder
        frame = builder.alloca(BYTES)
        builder.store(BYTES(None), frame)
        num_labels = builder.call(self.declared("PyDict_Size", WORD, BYTES), [self._object(FastPath.labels)])
        with builder.if_then(builder.icmp_signed("==", num_labels, WORD(0))):
            found = self._call_python(FastPath.frame_at, depth)
            builder.store(found, frame)
            with builder.if_then(builder.icmp_signed("==", found, BYTES(None)), likely=False):
                self._clear_error()  # a thread of autograd, for example, has fewer frames
        return builder.load(frame)

    def _add_note(self, info: Any, plan: Any, frame: Any, numbers: Any) -> Any:
        """Note a call by the line that a frame executes; return whether that was possible."""
        return self._write_note(info, plan, *self._place(frame), numbers)

    def _place(self, frame: Any) -> tuple[Any, Any]:
        """Return a reference to the code that a frame executes, and the offset of the instruction; release the frame.

        Callers take the place of frames whose code is known to be of torchmpi or torch.
        """
        builder = self.builder
        notes, current, back = self.field(self.record, FastPath.notes), builder.alloca(BYTES), builder.alloca(BYTES)
        builder.store(frame, current)
        loop, after = builder.append_basic_block("frame"), builder.append_basic_block("place")
        builder.branch(loop)
        builder.position_at_end(loop)
        frame = builder.load(current)
        code = builder.call(self.declared("PyFrame_GetCode", BYTES, BYTES), [frame])
        offset = builder.call(self.declared("PyFrame_GetLasti", INT, BYTES), [frame])
        builder.store(BYTES(None), back)
        is_own = self.call(kernels["is_own_code"], [notes, builder.ptrtoint(code, WORD)])
        with builder.if_then(builder.icmp_signed("!=", is_own, WORD(0))):
            builder.store(builder.call(self.declared("PyFrame_GetBack", BYTES, BYTES), [frame]), back)
        self._decref(frame)
        builder.store(builder.load(back), current)
        with builder.if_then(builder.icmp_signed("!=", builder.load(back), BYTES(None))):
            self._decref(code)
            builder.branch(loop)
        builder.branch(after)
        builder.position_at_end(after)
        return code, builder.sext(offset, WORD)

    def _write_note(self, info: Any, plan: Any, code: Any, offset: Any, numbers: Any) -> Any:
        """Note a call, with the reference to its code or origin; return whether that was possible."""
        builder = self.builder
        thread = builder.call(self.declared("PyThread_get_thread_ident", WORD), [])
        addresses = [builder.ptrtoint(item, WORD) for item in (info, plan, code)]
        notes = self.field(self.record, FastPath.notes)
        status = self.call(kernels["add_note"], [notes, *addresses, offset, thread, numbers])
        is_refused = builder.icmp_signed("!=", status, WORD(0))
        with builder.if_then(is_refused, likely=False):
            self._decref(code)
        return builder.zext(builder.not_(is_refused), WORD)

    def _packed(self, numbers: Any, count: int) -> Any:
        """Make an object of `bytes` of some fields."""
        pack = self.declared("PyBytes_FromStringAndSize", BYTES, BYTES, WORD)
        return self.builder.call(pack, [self.builder.inttoptr(numbers, BYTES), WORD(count * FIELD_BYTES)])

    def _note_in_python(self, info: Any, numbers: Any) -> None:
        builder = self.builder
        packed = self._packed(numbers, Noted.FIELDS)
        answer = self._call_python(FastPath.note, info, packed)
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


class NotingCalls(NotingWrapper):
    """``note(info, plan, origin, depth, num_bytes, call_log)``, which notes a call that Python has run.

    It returns 1, or 0 if there is no room, or if Python must search the origin.

    Args:
        info: The group, as the readers see it.
        plan: The plan of the call.
        origin: The origin of a queued call; None for the line of the frame at `depth`.
        depth: As of `sys._getframe` in the function that calls this one.
        num_bytes: The size of the call.
        call_log: Address of the fields of the call log.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, 6)
        builder = self.builder
        self.record = self.number(self.function.args[0])
        info, plan, origin, depth = (self.argument(index) for index in range(4))
        num_bytes, call_log = (self.number(self.argument(index)) for index in (4, 5))
        self.end_if_raised()
        numbers, is_noted = self.stack_record(Noted.FIELDS), builder.alloca(WORD)
        builder.store(WORD(0), is_noted)
        self.call(kernels["note_call"], [call_log, numbers])
        builder.store(num_bytes, self.field_pointer(numbers, Noted.num_bytes))
        for item in (info, plan):
            self._incref(item)
        is_here = builder.icmp_signed("==", builder.ptrtoint(origin, WORD), self.field(self.record, FastPath.none))
        with builder.if_else(is_here) as (here, queued):
            with here:
                if _HAS_OFFSETS:
                    frame = self._frame_at(depth)
                    with builder.if_then(builder.icmp_signed("!=", frame, BYTES(None))):
                        builder.store(self._add_note(info, plan, frame, numbers), is_noted)
            with queued:
                self._incref(origin)
                offset = WORD(IS_ORIGIN)
                builder.store(self._write_note(info, plan, origin, offset, numbers), is_noted)
        with builder.if_else(builder.icmp_signed("!=", builder.load(is_noted), WORD(0))) as (noted, refused):
            with noted:
                self._forget_algorithm(call_log)
            with refused:
                for item in (info, plan):
                    self._decref(item)
        builder.ret(self.as_number(builder.load(is_noted)))


class NotingOrigins(NotingWrapper):
    """``note_origin(depth)``, which returns the origin of a call that is queued now, as fields in an object of `bytes`.

    It returns None if Python must search the line (:meth:`torchmpi.timeline.events.Recorder.origin`). `depth` is that
    of `sys._getframe` in the function that calls this one.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, 1)
        builder = self.builder
        self.record = self.number(self.function.args[0])
        if _HAS_OFFSETS:
            frame = self._frame_at(self.argument(0))
            with builder.if_then(builder.icmp_signed("!=", frame, BYTES(None))):
                code, offset = self._place(frame)
                fields = self.stack_record(OriginRecord.FIELDS)
                notes, address = self.field(self.record, FastPath.notes), builder.ptrtoint(code, WORD)
                status = self.call(kernels["note_origin"], [notes, address, offset, fields])
                self._decref(code)  # code that is known is never freed
                with builder.if_then(builder.icmp_signed("==", status, WORD(0))):
                    builder.ret(self._packed(fields, OriginRecord.FIELDS))
        self._incref(self._object(FastPath.none))
        builder.ret(self._object(FastPath.none))


class NotingIntervals(NotingWrapper):
    """``note_interval(category, text, begin)``, which notes an interval that ends now; 0 if there is no room."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 3)
        builder = self.builder
        self.record = self.number(self.function.args[0])
        category, text = self.argument(0), self.argument(1)
        numbers = self.stack_record(Noted.FIELDS)
        begin = self.number(self.argument(2))
        self.end_if_raised()
        self.call(kernels["note_interval"], [begin, numbers])
        objects = category, text, category
        for item in objects:
            self._incref(item)
        is_noted = self._write_note(*objects, WORD(IS_ORIGIN), numbers)
        with builder.if_then(builder.icmp_signed("==", is_noted, WORD(0)), likely=False):
            for item in objects[:2]:
                self._decref(item)
        builder.ret(self.as_number(is_noted))
