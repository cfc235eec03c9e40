"""Functions of the kernels, compiled so that a test can call them, and the record of a group that they take."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from torchmpi.shared_memory import kernels
from torchmpi.shared_memory.compiler import compilation, native_code
from torchmpi.shared_memory.kernels import records

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


def group_fields(size: int) -> np.ndarray:
    """Return the fields of the record of a group, all 0: behind those with a name are two addresses for each rank."""
    return np.zeros(records.GroupRecord.FIELDS + 2 * size, np.int64)
