"""From the kernels' Python to LLVM's text, with Numba; only the first process on a machine comes here.

Numba's own cache would do, but then every start would load all of Numba: most of a second, and 60 MB. So its result is
taken without what ties it to Numba, put into one module, and each kernel given a wrapper that Python can call.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import numba
from llvmlite import binding, ir
from numba import types

from .meeting import kernels

_WORD = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_CFUNC = re.compile(r"^define i64 @cfunc\..*?^}\n", re.DOTALL | re.MULTILINE)


def module_text(prefix: str, modules: tuple[str, ...], names: tuple[str, ...]) -> str:
    """One module with these kernels of these modules, and for each a function `prefix + name` that Python can call."""
    for module in modules:
        importlib.import_module(f"{__package__}.{module}")  # which fills the list
    whole: Any = None
    for name in names:
        part = binding.parse_assembly(_kernel_text(prefix + name, kernels[name]))
        if whole is None:
            whole = part
        else:
            whole.link_in(part)
    whole.verify()
    return str(whole)


def _kernel_text(name: str, function: Any) -> str:
    """The kernel as Numba compiles it, and the wrapper instead of Numba's."""
    num_arguments = function.__code__.co_argcount
    signature = types.int64(*[types.int64] * num_arguments)
    numbas: Any = numba
    compiled = numbas.cfunc(signature, nopython=True, error_model="numpy")(function)
    text = _CFUNC.sub("", compiled.inspect_llvm())
    native_name = compiled.native_name.removeprefix("cfunc.")
    wrapper = _wrapper_text(name, native_name, num_arguments)
    # The wrapper only declares what the kernel's text defines, or declares too.
    module = binding.parse_assembly(text)
    module.link_in(binding.parse_assembly(wrapper))
    return str(module)


def _wrapper_text(name: str, native_name: str, num_arguments: int) -> str:
    """``PyObject *name(PyObject *self, PyObject **arguments, Py_ssize_t count)``: unpack, release the GIL, call."""
    module = ir.Module(name)
    module.triple = binding.get_process_triple()

    def external(name: str, result: Any, *arguments: Any) -> Any:
        return ir.Function(module, ir.FunctionType(result, arguments), name)

    unpack, pack = external("PyLong_AsLongLong", _WORD, _BYTES), external("PyLong_FromLongLong", _BYTES, _WORD)
    release, take = external("PyEval_SaveThread", _BYTES), external("PyEval_RestoreThread", ir.VoidType(), _BYTES)
    # As Numba calls: where the result goes, where an exception would, then the arguments.
    native = external(native_name, ir.IntType(32), _BYTES, _BYTES, *[_WORD] * num_arguments)
    wrapper = external(name, _BYTES, _BYTES, _BYTES.as_pointer(), _WORD)
    builder = ir.IRBuilder(wrapper.append_basic_block())
    result, exception = builder.alloca(_WORD), builder.alloca(_BYTES)
    items = [builder.gep(wrapper.args[1], [_WORD(index)]) for index in range(num_arguments)]
    arguments = [builder.call(unpack, [builder.load(item)]) for item in items]
    state = builder.call(release, [])
    builder.call(native, [builder.bitcast(result, _BYTES), builder.bitcast(exception, _BYTES), *arguments])
    builder.call(take, [state])
    builder.ret(builder.call(pack, [builder.load(result)]))
    return str(module)
