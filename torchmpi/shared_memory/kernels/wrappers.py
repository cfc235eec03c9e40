"""LLVM text of functions that Python can call, around kernels."""

from __future__ import annotations

import re
from typing import Any

import numba
from llvmlite import binding, ir
from numba import types

WORD, INT = ir.IntType(64), ir.IntType(32)
BYTES = ir.IntType(8).as_pointer()
_CFUNC = re.compile(r"^define i64 @cfunc\..*?^}\n", re.DOTALL | re.MULTILINE)


class Native:
    """A kernel as Numba compiles it: its LLVM text without the wrapper for C, and its name in that text."""

    def __init__(self, function: Any) -> None:
        self.num_arguments = function.__code__.co_argcount
        numbas: Any = numba
        signature = types.int64(*[types.int64] * self.num_arguments)
        compiled = numbas.cfunc(signature, nopython=True, error_model="numpy")(function)
        self.text = _CFUNC.sub("", compiled.inspect_llvm())
        self.name = compiled.native_name.removeprefix("cfunc.")


class Wrapper:
    """``PyObject *name(PyObject *self, PyObject **arguments, Py_ssize_t count)``, in a module of its own.

    The module declares the kernels and the functions of CPython's C API that it calls.
    """

    def __init__(self, name: str) -> None:
        self.module = ir.Module(name)
        self.module.triple = binding.get_process_triple()
        self.function = self.declared(name, BYTES, BYTES, BYTES.as_pointer(), WORD)
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        self._result, self._exception = self.builder.alloca(WORD), self.builder.alloca(BYTES)

    def finish(self, item: Any) -> str:
        """Emit the return of an object, and return the text of the module."""
        self.builder.ret(item)
        return str(self.module)

    def declared(self, name: str, result: Any, *arguments: Any, takes_any: bool = False) -> Any:
        """Declare an external function; with `takes_any` one that takes further arguments."""
        known = self.module.globals.get(name)
        return known or ir.Function(self.module, ir.FunctionType(result, arguments, var_arg=takes_any), name)

    def argument(self, index: int) -> Any:
        """Load an argument of the call."""
        return self.builder.load(self.builder.gep(self.function.args[1], [WORD(index)]))

    def number(self, item: Any) -> Any:
        """Convert a Python int."""
        return self.builder.call(self.declared("PyLong_AsLongLong", WORD, BYTES), [item])

    def as_number(self, value: Any) -> Any:
        """Make a Python int."""
        return self.builder.call(self.declared("PyLong_FromLongLong", BYTES, WORD), [value])

    def field_pointer(self, base: Any, index: int) -> Any:
        """Return a pointer to a field of a record."""
        return self.builder.inttoptr(self.builder.add(base, WORD(8 * index)), WORD.as_pointer())

    def field(self, base: Any, index: int) -> Any:
        """Load a field of a record."""
        return self.builder.load(self.field_pointer(base, index))

    def stack_record(self, num_fields: int) -> Any:
        """Return the address of a record on the stack."""
        return self.builder.ptrtoint(self.builder.alloca(WORD, size=num_fields), WORD)

    def call(self, native: Native, arguments: list[Any]) -> Any:
        """Call a kernel."""
        # Numba's calling convention: pointers to the result and to the exception, then the arguments.
        function = self.declared(native.name, INT, BYTES, BYTES, *[WORD] * native.num_arguments)
        results = [self.builder.bitcast(pointer, BYTES) for pointer in (self._result, self._exception)]
        self.builder.call(function, [*results, *arguments])
        return self.builder.load(self._result)

    def without_gil(self, native: Native, arguments: list[Any]) -> Any:
        """Call a kernel with the GIL released."""
        state = self.builder.call(self.declared("PyEval_SaveThread", BYTES), [])
        status = self.call(native, arguments)
        self.builder.call(self.declared("PyEval_RestoreThread", ir.VoidType(), BYTES), [state])
        return status
