"""Machine code that runs without the GIL: collectives in shared memory, and their reductions.

Importing this package loads nothing. `load` returns the kernels: the first processes on a machine compile them, later
processes load the machine code from files.

=================================== ============================================================================
layer, from the top                 modules
=================================== ============================================================================
kernels that Python calls           movement, reduce_kernels, host_calls, messages, message_pieces, gpu_calls,
                                    fast_path_code, list_calls
loop, routes, measurements          chunk_loop, peer_memory, copying
synchronization                     arrival
shared memory by name               access
records                             records, torchmpi.shared_memory.memory_layout, and
                                    torchmpi.shared_memory.typed_records, which says what a record is
signatures, flight record           logged_calls
tensors with gaps                   strided
raw memory, atomics, system calls   intrinsics
reductions as LLVM text             reduction, reduction_ir
which kernels there are             kernel_sets
compilation, loading                torchmpi.shared_memory.compiler
=================================== ============================================================================
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ... import files
from ...log import logger
from ...status_line import telling
from .kernel_sets import COLLECTIVES, DELAYS, ENABLE_CHECKS, KernelSet

if TYPE_CHECKING:
    from ..compiler.native_code import Compiler

_PREFIX = "torchmpi_kernel_"
_METH_FASTCALL = 0x80
_LOCK_SECONDS = 120
"""How long a rank waits for another one that compiles, and of which nothing is noted meanwhile."""
_kernels: dict[str, dict[str, Callable[..., int]]] = {}
announce: Callable[[str], object] | None = None
"""Set on one rank of a host: tells the user that kernels are compiled. That rank also shows the progress."""


def load(*, which: KernelSet = COLLECTIVES) -> dict[str, Callable[..., int]]:
    """Return a set of kernels by name. The first processes on a machine compile them; see :data:`announce`.

    >>> sorted(load())  # doctest: +ELLIPSIS
    ['allgather', 'allreduce', 'allreduce_list', 'alltoall', 'barrier', 'broadcast', 'exchange', 'offer', ...]
    """
    if which.name not in _kernels:
        from ..compiler import native_code

        compiler = native_code.compiler()
        _load_or_build(compiler, which)
        _kernels[which.name] = {name: function_at(name, compiler.find(_PREFIX + name)) for name in which.names}
    return _kernels[which.name]


def _load_or_build(compiler: Compiler, which: KernelSet) -> None:
    """Load all parts of a set. A rank compiles the parts that are missing and that no other rank compiles, then waits.

    If the other rank has ended, or could not write its file, all waiting ranks compile that part at the same time.
    """
    recipe = source_digest(which.package)
    names = [f"torchmpi_{which.name}_{number}" for number in range(len(which.parts))]
    missing = [number for number, name in enumerate(names) if not compiler.load(name, recipe)]
    if not missing:
        return
    locks = [compiler.folder / f"{names[number]}.lock" for number in missing if compiler.folder]
    with _telling(which, locks, recipe):
        for waits in (False, True):
            for number in missing.copy():
                with contextlib.ExitStack() as stack:
                    lock = None
                    with contextlib.suppress(OSError):  # no locks on this file system, or another user's file
                        if compiler.folder:
                            path = compiler.folder / f"{names[number]}.lock"
                            lock = stack.enter_context(files.open_lock(path))
                            if not _may_compile(lock, path, waits=waits):
                                continue
                    missing.remove(number)
                    if compiler.load(names[number], recipe):
                        continue
                    with no_garbage_collection():  # Numba's objects live on: collections took a fifth of the time
                        module = _module(which, number, partial(_note_progress, lock, recipe))
                    compiler.build(names[number], recipe, module)
                    _note_progress(lock, recipe, 1.0)


def _may_compile(lock: BinaryIO, path: Path, *, waits: bool) -> bool:
    """Return whether this rank may compile: it has the lock, or has waited for the holder."""
    if files.lock(lock, fcntl.LOCK_EX, seconds=0):
        return True
    noted = files.text_of(path)
    while waits and not files.lock(lock, fcntl.LOCK_SH, seconds=_LOCK_SECONDS):
        if noted == (noted := files.text_of(path)):
            logger.warning(f"another process has locked {path} for {_LOCK_SECONDS} s: this rank compiles too")
            break
    return waits


@contextlib.contextmanager
def _telling(which: KernelSet, locks: list[Path], recipe: str) -> Iterator[None]:
    """Context manager in which one rank of the host tells how far all those are that compile."""
    if announce is None:
        yield
        return
    announce(f"compiling the {which.description}, once per machine: about {which.seconds} s if a core is idle")

    def text(seconds: float) -> str:
        noted = [int(each.split()[1]) for each in map(files.text_of, locks) if each.startswith(f"{recipe} ")]
        share = f" {sum(noted) // len(locks)} %," if locks else ""
        return f"torchmpi: compiling {which.description}:{share} {seconds:.0f} s"

    with telling(text):
        yield


def _note_progress(lock: BinaryIO | None, recipe: str, share: float) -> None:
    """Write to a lock file what the rank that tells of the compilation reads, perhaps in another process."""
    if lock is not None:
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(lock.fileno(), f"{recipe} {100 * share:3.0f}\n".encode(), 0)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Context manager in which no garbage is collected."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _module(which: KernelSet, number: int, note: Callable[[float], object]) -> Any:
    """Return a part of a set of kernels as an LLVM module; `note` is called with the part of the work that is done."""
    names = which.parts[number]
    from ..compiler import compilation

    for module in which.modules:
        importlib.import_module(f"{which.package}.{module}")
    entries = {name: spec for name, spec in which.fast_paths.items() if spec.kernel in names}
    num_steps = 2 * (len(names) + len(entries))  # LLVM takes as long as Numba
    wrappers = []
    for index, name in enumerate(names):
        note(index / num_steps)
        wrappers.append(compilation.plain(_PREFIX + name, compilation.kernels[name], keeps_gil=name in which.brief))
    if which.fast_paths:
        from .fast_path_code import entry, entry_wrapper, find_bound
        from .list_calls import list_entry

        for index, (name, spec) in enumerate(entries.items(), len(names)):
            note(index / num_steps)
            wrappers.append(entry_wrapper(f"{_PREFIX}enter_{name}", list_entry() if spec.is_of_list else entry(spec)))
        if number == 0:
            finders = {"find_bound": compilation.kernels["find_bound"], "find_list": list_entry(finds=True)}
            wrappers += [entry_wrapper(f"{_PREFIX}{name}", function) for name, function in finders.items()]
    if which.entries and number == 0:
        wrappers += importlib.import_module(f"{which.package}.{which.entries}").wrappers(_PREFIX)
    return compilation.link(_PREFIX, wrappers)


class _Definition(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_definitions: dict[str, _Definition] = {}
"""Functions read theirs also when they are deleted, which may be after the variables of this module."""


def fast_path(which: str, fields: int) -> Callable[..., Any]:
    """Return the fast path of a collective; `fields`: the address of its record (records.FastPath)."""
    return with_record(f"enter_{which}", f"enter_{which}", fields)


def finder(which: str, fields: int) -> Callable[..., Any]:
    """Return the function that finds what begins an asynchronous call like one that its fast path makes."""
    spec = COLLECTIVES.fast_paths.get(which)
    code = "find_list" if spec is not None and spec.is_of_list else "find_bound"
    return with_record(f"find_{which}", code, fields)


def with_record(name: str, code: str, fields: int) -> Callable[..., Any]:
    """Return a function of this name around machine code, whose first argument is the address of a record."""
    from ..compiler import native_code

    return function_at(name, native_code.compiler().find(_PREFIX + code), fields)


def function_at(name: str, address: int, owner: int | None = None) -> Callable[..., int]:
    """Return a Python function around machine code that unpacks its arguments itself; `owner` is its ``self``.

    Args:
        name: Name of the function, one for each address.
        address: Address of the machine code.
        owner: Address of the record that is passed as the first argument.
    """
    if name not in _definitions:
        _definitions[name] = _Definition(name.encode(), address, _METH_FASTCALL, None)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_definitions[name]))  # never deleted
    definition = _definitions[name]
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    made: Callable[..., int] = make(ctypes.addressof(definition), owner, None)
    return made


@cache
def source_digest(package: str = __name__) -> str:
    """Return a digest of all sources that the compiled code of a package depends on."""
    digest = hashlib.sha256((b"checks" if ENABLE_CHECKS else b"") + DELAYS.encode())
    folder = Path(__file__).parent
    folders = {folder, folder.parent / "compiler", Path(str(sys.modules[package].__file__)).parent}
    shared = (folder.parent / name for name in ("memory_layout.py", "typed_records.py"))
    for path in (*sorted(path for each in folders for path in each.glob("*.py")), *shared):
        digest.update(path.read_bytes())
    return digest.hexdigest()


__all__ = ["load"]
