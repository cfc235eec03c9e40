"""Compilation of the kernels from Python to LLVM assembly, with Numba. Only the first process on a machine does this.

Numba's own cache would load Numba in every start: most of a second, and 60 MB. Instead Numba compiles each kernel as a
C callback; its LLVM text, without Numba's wrapper, is linked into one module with wrappers that Python can call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from llvmlite import binding

from .access import kernels
from .fast_path_ir import fast_path_text
from .kernel_sets import FastPathKernel
from .wrappers import Native, Wrapper


def module_text(
    prefix: str, modules: tuple[str, ...], names: tuple[str, ...], fast_paths: Mapping[str, FastPathKernel]
) -> str:
    """Return one LLVM module with the named kernels of these modules.

    For each kernel it has a function `prefix + name` that Python can call, and for each fast path a function `prefix +
    "enter_" + name` that takes tensors.
    """
    for module in modules:
        importlib.import_module(f"{__package__}.{module}")  # registers its kernels
    entering = ["find_cached_call", *sorted({spec.enter for spec in fast_paths.values()})] if fast_paths else []
    natives = {name: Native(kernels[name]) for name in (*names, *entering)}
    texts = [native.text for native in natives.values()]
    texts += [_plain(prefix + name, natives[name]) for name in names]
    for name, spec in fast_paths.items():
        functions = natives["find_cached_call"], natives[spec.enter], natives[spec.kernel]
        texts.append(fast_path_text(f"{prefix}enter_{name}", *functions, spec))
    whole = binding.parse_assembly(texts[0])
    for text in texts[1:]:
        whole.link_in(binding.parse_assembly(text))
    whole.verify()
    return str(whole)


def function_text(name: str, function: Callable[..., int]) -> str:
    """Return an LLVM module with one function of 64-bit integers under this name, for kernels to call."""
    native = Native(function)
    return native.text.replace(native.name, name)


def _plain(name: str, native: Native) -> str:
    """Return a function that takes Python integers and returns one."""
    wrapper = Wrapper(name)
    arguments = [wrapper.number(wrapper.argument(index)) for index in range(native.num_arguments)]
    status = wrapper.without_gil(native, arguments)
    return wrapper.finish(wrapper.as_number(status))
