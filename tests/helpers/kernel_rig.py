"""Functions of the kernels, compiled so that a test can call them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from torchmpi.shared_memory import kernels
from torchmpi.shared_memory.kernels import compilation, native_code

_numbers = itertools.count()


def compiled(*functions: Any) -> SimpleNamespace:
    """Return these functions by name, as callables of integers that return one."""
    prefix, compiler = f"torchmpi_test_{next(_numbers)}_", native_code.compiler()
    by_name = {function.py_func.__name__: function for function in functions}
    module = compilation.link(prefix, [compilation.plain(prefix + name, each) for name, each in by_name.items()])
    recipe = str(module)
    if not compiler.load("torchmpi_test", recipe):
        compiler.build("torchmpi_test", recipe, module)
    return SimpleNamespace(
        **{name: kernels.function_at(prefix + name, compiler.find(prefix + name)) for name in by_name}
    )
