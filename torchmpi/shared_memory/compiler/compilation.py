"""Compilation of the kernels from Python to LLVM code, with Numba. Only the first process on a machine does this.

Numba would optimize each function together with all functions that it calls, compile it, and make wrappers for it,
which took three quarters of the time. Here the result for a function is the LLVM text of its own body. All texts are
linked into one module with wrappers that Python can call, and LLVM optimizes this module once. Functions are not
compiled again for constant arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, TypeVar, cast, get_type_hints

from llvmlite import binding, ir
from numba import types
from numba.core import codegen, compiler, compiler_machinery, lowering, registry, typed_passes, untyped_passes
from numba.core.errors import TypingError

from ..typed_records import RecordType
from .addresses import Address
from .target import TARGET, TYPING

# mypy knows only some of Numba's functions.
_types: Any = types
_codegen: Any = codegen
_compiler: Any = compiler
_machinery: Any = compiler_machinery
_registry: Any = registry
_typed: Any = typed_passes
_untyped: Any = untyped_passes

WORD, INT = ir.IntType(64), ir.IntType(32)
BYTES = ir.IntType(8).as_pointer()
_ENVIRONMENT = re.compile(r"^@_ZN08NumbaEnv.* = common global i8\* null$", re.MULTILINE)

functions: list[Function] = []
"""All functions of the modules imported so far, in the order of their definition."""
kernels: dict[str, Function] = {}
"""The functions that Python calls, by name."""


class _Texts(_codegen.CodeLibrary):  # type: ignore[misc]
    """The LLVM text of one function, and the functions that it calls."""

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.texts: list[str] = []
        self.used: list[Any] = []

    def add_ir_module(self, ir_module: Any) -> None:
        self.texts.append(str(ir_module))

    def add_linking_library(self, library: Any) -> None:
        """Keep a function that is called."""
        self.used.append(library)

    def finalize(self) -> None:
        """Compile nothing."""

    def get_function(self, name: str) -> Any:
        """Raise, since there is no machine code."""
        raise NotImplementedError(name)

    get_llvm_str = get_asm_str = get_function


@_machinery.register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(_typed.BaseNativeLowering):  # type: ignore[misc]
    """The last pass, without Numba's compilation: callers find the function by its descriptor."""

    _name = "torchmpi_lowering"
    lowering_class = lowering.Lower

    def run_pass(self, state: Any) -> bool:
        flags = state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        state.library = _Texts(state.targetctx.codegen(), state.func_id.func_qualname)
        super().run_pass(state)
        descriptor = state["cr"].fndesc
        state.targetctx.insert_user_function(descriptor, descriptor, [state.library])
        state["cr"] = state["cr"]._replace(cfunc=descriptor)
        return bool(_typed.NoPythonBackend().run_pass(state))


class _Pipeline(_compiler.CompilerBase):  # type: ignore[misc]
    """The passes of Numba that functions of numbers need, without those that end the lives of objects."""

    def define_pipelines(self) -> list[Any]:
        manager = _machinery.PassManager("torchmpi")
        for each in (
            _untyped.TranslateByteCode,
            _untyped.FixupArgs,
            _untyped.GenericRewrites,
            _untyped.DeadBranchPrune,
            _untyped.ReconstructSSA,
            _typed.NopythonTypeInference,
            _typed.PreLowerStripPhis,
            _Lowering,
        ):
            manager.add_pass(each, each.__name__)
        manager.finalize()
        return [manager]


class Function(_registry.CPUDispatcher):  # type: ignore[misc]
    """A function of numbers that kernels call; Python cannot call it."""

    targetdescr = TARGET

    def __init__(self, function: Callable[..., Any], *, is_inlined: bool = False) -> None:
        options = {"nopython": True, "nogil": True, "error_model": "numpy", "forceinline": is_inlined, "_nrt": False}
        super().__init__(function, targetoptions=options, pipeline_class=_Pipeline)
        functions.append(self)

    @cached_property
    def records(self) -> dict[str, Address]:
        """The types of the parameters, and of the result, that are annotated as records."""
        hints = get_type_hints(self.py_func)
        return {name: Address(hint) for name, hint in hints.items() if isinstance(hint, RecordType)}

    def get_call_template(self, args: Iterable[Any], kws: Any) -> Any:
        """Type a call: a parameter that is annotated as a record takes nothing else, and the others take numbers.

        Numba would compile the function again for each constant argument.
        """
        names = self.py_func.__code__.co_varnames
        taken = [self._taken(name, _types.unliteral(each)) for name, each in zip(names, args, strict=False)]
        return super().get_call_template(taken, kws)

    def _taken(self, name: str, given: Any) -> Any:
        expected = self.records.get(name)
        if expected is not None and given != expected:
            raise TypingError(f"{self.py_func.__name__}: {name} is of type {expected}, and a call passes {given}")
        return _types.int64 if expected is None and isinstance(given, Address) else given

    def add_overload(self, result: Any) -> None:
        """Keep a compiled function, without making it callable."""
        expected, returned = self.records.get("return"), result.signature.return_type
        if expected is not None and returned != expected:
            raise TypingError(f"{self.py_func.__name__} returns {returned} instead of {expected}")
        self.overloads[tuple(result.signature.args)] = result

    @property
    def num_arguments(self) -> int:
        """Number of arguments."""
        count: int = self.py_func.__code__.co_argcount
        return count

    def native(self) -> Any:
        """Compile the function for words, unless already compiled, and return Numba's result."""
        names = self.py_func.__code__.co_varnames[: self.num_arguments]
        arguments = tuple(self.records.get(name, _types.int64) for name in names)
        self.compile(arguments)
        return self.overloads[arguments]


F = TypeVar("F", bound=Callable[..., Any])


def inner(function: F) -> F:
    """Mark a function that kernels call; LLVM may inline it."""
    return cast("F", Function(function))


def inlined(function: F) -> F:
    """Mark a function that must be inlined, although LLVM would not inline it."""
    return cast("F", Function(function, is_inlined=True))


def kernel(function: F) -> F:
    """Mark a function of addresses and numbers that Python and other kernels may call."""
    kernels[function.__name__] = Function(function)
    return cast("F", kernels[function.__name__])


# Numba would compile and optimize its own ones for each number of arguments.


@inner
def _smaller(one: int, other: int) -> int:
    return other if other < one else one


@inner
def _larger(one: int, other: int) -> int:
    return other if other > one else one


TYPING.register_global(min, _types.Dispatcher(_smaller))
TYPING.register_global(max, _types.Dispatcher(_larger))


def link(prefix: str, wrappers: Iterable[Wrapper]) -> Any:
    """Return an LLVM module with these wrappers, whose names begin with `prefix`, and all functions that they call."""
    wrappers = list(wrappers)
    whole = _linked([library for wrapper in wrappers for library in wrapper.libraries])
    for wrapper in wrappers:
        whole.link_in(binding.parse_assembly(str(wrapper.module)))
    return _with_exports(whole, prefix)


def link_function(name: str, function: Callable[..., int]) -> Any:
    """Return an LLVM module with one function of 64-bit integers under this name, for kernels to call."""
    native = Function(function).native()
    whole = _linked([native.library])
    whole.get_function(native.fndesc.mangled_name).name = name
    return _with_exports(whole, name)


def _linked(libraries: Iterable[Any]) -> Any:
    whole = binding.parse_assembly("")
    for text in _texts(libraries, set()):
        whole.link_in(binding.parse_assembly(_ENVIRONMENT.sub("", text)))
    return whole


def _with_exports(whole: Any, prefix: str) -> Any:
    """Make all functions internal whose names do not begin with `prefix`."""
    for each in whole.functions:
        if not each.is_declaration and not each.name.startswith(prefix):
            each.linkage = binding.Linkage.internal
    return whole


def _texts(libraries: Iterable[Any], seen: set[int]) -> Iterator[str]:
    for library in libraries:
        if id(library) not in seen:
            seen.add(id(library))
            yield from library.texts
            yield from _texts(library.used, seen)


class Wrapper:
    """``PyObject *name(PyObject *self, PyObject **arguments, Py_ssize_t count)``, in a separate module.

    The module declares the kernels and the functions of CPython's C API that it calls. A call with another number of
    arguments than `num_arguments` raises TypeError.
    """

    def __init__(self, name: str, num_arguments: int) -> None:
        self.libraries: list[Any] = []
        self.module = ir.Module(name)
        self.module.triple = binding.get_process_triple()
        self.function = self.declared(name, BYTES, BYTES, BYTES.as_pointer(), WORD)
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        self._result, self._exception = self.builder.alloca(WORD), self.builder.alloca(BYTES)
        self._expect_arguments(num_arguments)

    def _expect_arguments(self, count: int) -> None:
        builder = self.builder
        with builder.if_then(builder.icmp_signed("!=", self.function.args[2], WORD(count)), likely=False):
            text = f"this function of machine code takes {count} arguments".encode() + b"\0"
            message = ir.GlobalVariable(self.module, ir.ArrayType(ir.IntType(8), len(text)), "message")
            message.initializer, message.linkage = ir.Constant(message.value_type, bytearray(text)), "internal"
            message.global_constant = True
            set_error = self.declared("PyErr_SetString", ir.VoidType(), BYTES, BYTES)
            builder.call(set_error, [self.python_object("PyExc_TypeError"), builder.bitcast(message, BYTES)])
            builder.ret(BYTES(None))

    def end_if_raised(self) -> None:
        """Return to Python if an exception is set, as by an argument that is not a number."""
        error = self.builder.call(self.declared("PyErr_Occurred", BYTES), [])
        with self.builder.if_then(self.builder.icmp_signed("!=", error, BYTES(None)), likely=False):
            self.builder.ret(BYTES(None))

    def python_object(self, name: str) -> Any:
        """Return an object of which CPython's C API exports the address, such as an exception."""
        known = self.module.globals.get(name) or ir.GlobalVariable(self.module, BYTES, name)
        return self.builder.load(known)

    def declared(self, name: str, result: Any, *arguments: Any) -> Any:
        """Declare an external function."""
        known = self.module.globals.get(name)
        return known or ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def argument(self, index: int) -> Any:
        """Load an argument of the call."""
        return self.builder.load(self.builder.gep(self.function.args[1], [WORD(index)]))

    def number(self, item: Any) -> Any:
        """Convert a Python int."""
        return self.builder.call(self.declared("PyLong_AsLongLong", WORD, BYTES), [item])

    def as_number(self, value: Any) -> Any:
        """Make a Python int."""
        return self.builder.call(self.declared("PyLong_FromLongLong", BYTES, WORD), [value])

    def call(self, function: Function, arguments: list[Any]) -> Any:
        """Call a function, and return its result as a word."""
        native = function.native()
        self.libraries.append(native.library)
        # Numba's calling convention: pointers to the result and to the exception, then the arguments.
        called = self.declared(native.fndesc.mangled_name, INT, BYTES, BYTES, *[WORD] * function.num_arguments)
        self.builder.store(WORD(0), self._result)  # of which a bool takes one byte
        results = [self.builder.bitcast(pointer, BYTES) for pointer in (self._result, self._exception)]
        self.builder.call(called, [*results, *arguments])
        return self.builder.load(self._result)

    def without_gil(self, function: Function, arguments: list[Any]) -> Any:
        """Call a function with the GIL released."""
        state = self.builder.call(self.declared("PyEval_SaveThread", BYTES), [])
        status = self.call(function, arguments)
        self.builder.call(self.declared("PyEval_RestoreThread", ir.VoidType(), BYTES), [state])
        return status


def plain(name: str, function: Function, *, keeps_gil: bool = False) -> Wrapper:
    """Return a wrapper that takes Python integers and returns one."""
    wrapper = Wrapper(name, function.num_arguments)
    arguments = [wrapper.number(wrapper.argument(index)) for index in range(function.num_arguments)]
    wrapper.end_if_raised()
    call = wrapper.call if keeps_gil else wrapper.without_gil
    wrapper.builder.ret(wrapper.as_number(call(function, arguments)))
    return wrapper
