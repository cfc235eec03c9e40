"""Functions of CPython's C API that kernels call while they hold the GIL. An object is its address.

Functions that the headers define inline in a supported version cannot be called. What an address refers to is not
checked: kernels pass on what the interpreter has given them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .target import Intrinsic, intrinsic

_WORD, _INT, _VOID = ir.IntType(64), ir.IntType(32), ir.VoidType()
_NULL = _WORD(0)


def _c_function(name: str, num_arguments: int, result: Any = _WORD) -> Any:
    """Return an intrinsic that calls a C function of words."""
    return _caller(name, num_arguments, ir.FunctionType(result, [_WORD] * num_arguments))


def _variadic(name: str, num_arguments: int, *last: Any) -> Any:
    """Return an intrinsic that calls a C function of any number of words, with these ones at the end."""
    return _caller(name, num_arguments, ir.FunctionType(_WORD, [_WORD], var_arg=True), *last)


def _caller(name: str, num_arguments: int, kind: Any, *last: Any) -> Any:
    def generate(context, builder, signature, arguments):
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        result = builder.call(function, [*arguments, *last])
        if kind.return_type == _VOID:
            return context.get_dummy_value()
        return result if kind.return_type == _WORD else builder.sext(result, _WORD)

    returned = types.void if kind.return_type == _VOID else types.int64
    return Intrinsic(name, returned(*[types.int64] * num_arguments), generate)


incref = _c_function("Py_IncRef", 1, _VOID)
decref = _c_function("Py_DecRef", 1, _VOID)
call_with_one = _variadic("PyObject_CallFunctionObjArgs", 2, _NULL)
"""Call a Python function: a reference to its result, or 0 and an exception that is set."""
call_with_two = _variadic("PyObject_CallFunctionObjArgs", 3, _NULL)
call_with_four = _variadic("PyObject_CallFunctionObjArgs", 5, _NULL)
tuple_of_one = _variadic("PyTuple_Pack", 2)
"""Make a tuple: the number of its items, which is 1, and the item."""
list_size = _c_function("PyList_Size", 1)
list_item = _c_function("PyList_GetItem", 2)
"""Return an item of a list, without a reference."""
new_number = _c_function("PyLong_FromLongLong", 1)
context_value = _c_function("PyContextVar_Get", 3, _INT)
"""Get the value of a context variable: variable, default, address for the reference; -1 if an exception is set."""
release_gil = _c_function("PyEval_SaveThread", 0)
take_gil = _c_function("PyEval_RestoreThread", 1, _VOID)
this_thread = _c_function("PyThread_get_thread_ident", 0)
"""Return what `threading.get_ident` does."""
clear_error = _c_function("PyErr_Clear", 0, _VOID)
error_is_set = _c_function("PyErr_Occurred", 0)
"""Return the type of the exception that is set, or 0."""
error_matches = _c_function("PyErr_ExceptionMatches", 1, _INT)
fetch_error = _c_function("PyErr_Fetch", 3, _VOID)
"""Take the exception that is set: addresses for type, value and traceback."""
restore_error = _c_function("PyErr_Restore", 3, _VOID)


@intrinsic
def exception_class():
    """Return the class Exception, which KeyboardInterrupt and SystemExit are not derived from."""

    def generate(context, builder, signature, arguments):
        known = builder.module.globals.get("PyExc_Exception")
        return builder.load(known or ir.GlobalVariable(builder.module, _WORD, "PyExc_Exception"))

    return types.int64(), generate


@intrinsic
def describe_with(function, tensor, described):
    """Call torch's function that describes a tensor as a DLTensor; -1 if an exception is set."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_INT, [_WORD, _WORD]).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(arguments[0], kind), arguments[1:]), _WORD)

    return types.int64(*[types.int64] * 3), generate


@intrinsic
def tells(function, number):
    """Call a C function that takes a number and returns a bool."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(8), [_WORD]).as_pointer()
        return builder.zext(builder.call(builder.inttoptr(arguments[0], kind), arguments[1:]), _WORD)

    return types.int64(*[types.int64] * 2), generate


def on_stack(num_fields: int) -> Any:
    """Return an intrinsic that returns the address of a record of so many fields in the frame of its caller."""

    @intrinsic
    def room():
        def generate(context, builder, signature, arguments):
            fields = cgutils.alloca_once(builder, ir.ArrayType(_WORD, num_fields))
            return builder.ptrtoint(fields, _WORD)

        return types.int64(), generate

    return room
