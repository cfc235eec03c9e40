"""Functions of CPython's C API that kernels call while they hold the GIL. An object is its address.

Functions that the headers define inline in a supported version cannot be called. What an address refers to is not
checked: kernels pass on what the interpreter has given them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .intrinsics import intrinsic

_WORD, _INT, _VOID = ir.IntType(64), ir.IntType(32), ir.VoidType()
_NULL = _WORD(0)


def _c_function(name: str, num_arguments: int, result: Any = _WORD) -> Any:
    """Return an intrinsic that calls a C function of words."""
    kind = ir.FunctionType(result, [_WORD] * num_arguments)
    return _of_numbers(num_arguments, lambda builder, numbers: _called(builder, name, kind, numbers), result)


def _variadic(name: str, num_arguments: int, *last: Any) -> Any:
    """Return an intrinsic that calls a C function of any number of words, with these ones at the end."""
    kind = ir.FunctionType(_WORD, [_WORD], var_arg=True)
    return _of_numbers(num_arguments, lambda builder, numbers: _called(builder, name, kind, [*numbers, *last]), _WORD)


def _called(builder: Any, name: str, kind: Any, arguments: Any) -> Any:
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _of_numbers(count: int, call: Any, result: Any) -> Any:
    """Return an intrinsic of so many numbers."""

    def generate(context, builder, signature, arguments):
        called = call(builder, arguments)
        if result == _VOID:
            return context.get_dummy_value()
        return called if result == _WORD else builder.sext(called, _WORD)

    returned = types.void if result == _VOID else types.int64
    typed = returned(*[types.int64] * count), generate
    typers = (  # Numba counts the parameters
        lambda context: typed,
        lambda context, a: typed,
        lambda context, a, b: typed,
        lambda context, a, b, c: typed,
        lambda context, a, b, c, d: typed,
        lambda context, a, b, c, d, e: typed,
    )
    return intrinsic(typers[count])


incref = _c_function("Py_IncRef", 1, _VOID)
decref = _c_function("Py_DecRef", 1, _VOID)
call_with_one = _variadic("PyObject_CallFunctionObjArgs", 2, _NULL)
"""Call a Python function: a reference to its result, or 0 and an exception that is set."""
call_with_four = _variadic("PyObject_CallFunctionObjArgs", 5, _NULL)
tuple_of_one = _variadic("PyTuple_Pack", 2)
"""Make a tuple: the number of its items, which is 1, and the item."""
new_number = _c_function("PyLong_FromLongLong", 1)
context_value = _c_function("PyContextVar_Get", 3, _INT)
"""Get the value of a context variable: variable, default, address for the reference; -1 if an exception is set."""
release_gil = _c_function("PyEval_SaveThread", 0)
take_gil = _c_function("PyEval_RestoreThread", 1, _VOID)
clear_error = _c_function("PyErr_Clear", 0, _VOID)
error_is_set = _c_function("PyErr_Occurred", 0)
"""Return the type of the exception that is set, or 0."""
error_matches = _c_function("PyErr_ExceptionMatches", 1, _INT)
fetch_error = _c_function("PyErr_Fetch", 3, _VOID)
"""Take the exception that is set: addresses for type, value and traceback."""
restore_error = _c_function("PyErr_Restore", 3, _VOID)


@intrinsic
def exception_class(typing_context):
    """Return the class Exception, which KeyboardInterrupt and SystemExit are not derived from."""

    def generate(context, builder, signature, arguments):
        known = builder.module.globals.get("PyExc_Exception")
        return builder.load(known or ir.GlobalVariable(builder.module, _WORD, "PyExc_Exception"))

    return types.int64(), generate


@intrinsic
def describe_with(typing_context, function, tensor, described):
    """Call torch's function that describes a tensor as a DLTensor; -1 if an exception is set."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_INT, [_WORD, _WORD]).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(arguments[0], kind), arguments[1:]), _WORD)

    return types.int64(*[types.int64] * 3), generate


def on_stack(num_fields: int) -> Any:
    """Return an intrinsic that returns the address of a record of so many fields in the frame of its caller."""

    @intrinsic
    def room(typing_context):
        def generate(context, builder, signature, arguments):
            fields = cgutils.alloca_once(builder, ir.ArrayType(_WORD, num_fields))
            return builder.ptrtoint(fields, _WORD)

        return types.int64(), generate

    return room
