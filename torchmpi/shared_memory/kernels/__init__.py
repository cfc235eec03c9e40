"""Native code that runs without the GIL: collectives in shared memory, and the reductions in them.

Importing this package loads nothing. `load` gives the kernels: compiled by the first process on a machine, machine code
from a file for all others.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .kernel_sets import SETS

_PREFIX = "torchmpi_kernel_"
_METH_FASTCALL = 0x80
_kernels: dict[str, dict[str, Callable[..., int]]] = {}


def load(
    announce: Callable[[str], object] = lambda message: None, *, which: str = "collectives"
) -> dict[str, Callable[..., int]]:
    """A set of kernels by name. The first process on a machine compiles them, and tells by `announce` that it does.

    >>> sorted(load())  # doctest: +ELLIPSIS
    ['allgather', 'allreduce', 'allreduce_many', 'alltoall', 'broadcast', 'exchange', 'meet', 'offer', ...]
    """
    if which not in _kernels:
        from . import native_code

        compiler, recipe = native_code.compiler(), _source_digest()
        if not compiler.load(f"torchmpi_{which}", recipe):
            _build(compiler, recipe, which, announce)
        _kernels[which] = {name: _callable(name, compiler.find(_PREFIX + name)) for name in SETS[which].names}
    return _kernels[which]


def _build(compiler: Any, recipe: str, which: str, announce: Callable[[str], object]) -> None:
    try:
        lock = open(compiler.folder / "torchmpi_kernels.lock", "w") if compiler.folder else None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one compiles, the other ranks wait for it instead of doing the same
    except OSError:  # without locks, or another user's
        lock = None
    modules, names, what, fast_paths = SETS[which]
    try:
        if lock is not None and compiler.load(f"torchmpi_{which}", recipe):
            return
        announce(f"compiling the {what}, once per machine: some seconds")
        from . import compilation

        compiler.build(f"torchmpi_{which}", recipe, compilation.module_text(_PREFIX, modules, names, fast_paths))
    finally:
        if lock is not None:
            lock.close()


class _Definition(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_definitions: dict[str, _Definition] = {}
"""They must live as long as the functions."""


def fast_path(which: str, fields: int) -> Callable[..., Any]:
    """The function that enters a kernel with tensors; `words` is where what it looks at is (see context)."""
    from . import native_code

    name = f"enter_{which}"
    return _callable(name, native_code.compiler().find(_PREFIX + name), fields)


def _callable(name: str, address: int, owner: int | None = None) -> Callable[..., int]:
    """A function of Python around machine code that unpacks its arguments itself, and finds `owner` as its ``self``."""
    definition = _definitions.setdefault(name, _Definition(name.encode(), address, _METH_FASTCALL, None))
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    made: Callable[..., int] = make(ctypes.addressof(definition), owner, None)
    return made


def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")) + [Path(__file__).parent.parent / "memory_layout.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


__all__ = ["load"]
