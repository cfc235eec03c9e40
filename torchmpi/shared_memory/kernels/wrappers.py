"""LLVM's text for functions that Python can call: what wrappers around kernels are made of."""

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
    """A kernel as Numba compiles it: its text, without the wrapper that C would call, and its name in there."""

    def __init__(self, function: Any) -> None:
        self.num_arguments = function.__code__.co_argcount
        numbas: Any = numba
        signature = types.int64(*[types.int64] * self.num_arguments)
        compiled = numbas.cfunc(signature, nopython=True, error_model="numpy")(function)
        self.text = _CFUNC.sub("", compiled.inspect_llvm())
        self.name = compiled.native_name.removeprefix("cfunc.")


class Wrapper:
    """``PyObject *name(PyObject *self, PyObject **arguments, Py_ssize_t count)``, in a module of its own.

    It only declares the kernels, and what it takes of Python.
    """

    def __init__(self, name: str) -> None:
        self.module = ir.Module(name)
        self.module.triple = binding.get_process_triple()
        self.function = self.declared(name, BYTES, BYTES, BYTES.as_pointer(), WORD)
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        self._result, self._exception = self.builder.alloca(WORD), self.builder.alloca(BYTES)

    def finish(self, item: Any) -> str:
        """Return an object; the text of the module."""
        self.builder.ret(item)
        return str(self.module)

    def declared(self, name: str, result: Any, *arguments: Any, takes_any: bool = False) -> Any:
        """A function of somebody else's; with `takes_any` of any number of arguments after these."""
        known = self.module.globals.get(name)
        return known or ir.Function(self.module, ir.FunctionType(result, arguments, var_arg=takes_any), name)

    def argument(self, index: int) -> Any:
        """What Python passed."""
        return self.builder.load(self.builder.gep(self.function.args[1], [WORD(index)]))

    def number(self, item: Any) -> Any:
        """The value of an int."""
        return self.builder.call(self.declared("PyLong_AsLongLong", WORD, BYTES), [item])

    def as_number(self, value: Any) -> Any:
        """A new int."""
        return self.builder.call(self.declared("PyLong_FromLongLong", BYTES, WORD), [value])

    def place(self, base: Any, index: int) -> Any:
        """A word in memory."""
        return self.builder.inttoptr(self.builder.add(base, WORD(8 * index)), WORD.as_pointer())

    def field(self, base: Any, index: int) -> Any:
        """Its value."""
        return self.builder.load(self.place(base, index))

    def room(self, num_words: int) -> Any:
        """The address of some words on the stack."""
        return self.builder.ptrtoint(self.builder.alloca(WORD, size=num_words), WORD)

    def call(self, native: Native, arguments: list[Any]) -> Any:
        """A kernel's result."""
        # As Numba calls: where the result goes, where an exception would, then the arguments.
        function = self.declared(native.name, INT, BYTES, BYTES, *[WORD] * native.num_arguments)
        places = [self.builder.bitcast(place, BYTES) for place in (self._result, self._exception)]
        self.builder.call(function, [*places, *arguments])
        return self.builder.load(self._result)

    def without_gil(self, native: Native, arguments: list[Any]) -> Any:
        """The same while other threads may run Python."""
        state = self.builder.call(self.declared("PyEval_SaveThread", BYTES), [])
        status = self.call(native, arguments)
        self.builder.call(self.declared("PyEval_RestoreThread", ir.VoidType(), BYTES), [state])
        return status
