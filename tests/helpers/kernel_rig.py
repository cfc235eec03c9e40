"""Functions of the kernels, compiled so that a test can call them."""

from __future__ import annotations

import itertools
from typing import Any

from torchmpi.shared_memory import kernels
from torchmpi.shared_memory.compiler import compilation, native_code

_numbers = itertools.count()


class compiled:
    """These functions by name, as callables of integers that return one; compiled when the first one is used.

    Numba takes seconds, which a process that only collects the tests, or runs others, does not need.
    """

    def __init__(self, *functions: Any) -> None:
        self._functions = {function.py_func.__name__: function for function in functions}

    def __getattr__(self, name: str) -> Any:
        if name not in self._functions:
            raise AttributeError(name)
        prefix, compiler = f"torchmpi_test_{next(_numbers)}_", native_code.compiler()
        functions = [compilation.plain(prefix + each, function) for each, function in self._functions.items()]
        module = compilation.link(prefix, functions)
        recipe = str(module)
        if not compiler.load("torchmpi_test", recipe):
            compiler.build("torchmpi_test", recipe, module)
        for each in self._functions:
            setattr(self, each, kernels.function_at(prefix + each, compiler.find(prefix + each)))
        return getattr(self, name)
