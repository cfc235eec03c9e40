"""Compilation of LLVM code to machine code, once per machine: results are kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite  # only its version: the library is loaded by the module llvm

from ... import config, files
from ...log import logger
from . import object_file

if TYPE_CHECKING:
    from .llvm import Llvm

_PACKAGE = Path(__file__).parent
_MOST_BYTES = 64 << 20  # of a file; those of kernels have one or two
_DAY = 24 * 60 * 60
_UNUSED_DAYS = 30  # a compiled file is removed after this time without use
# Lines of /proc/cpuinfo, of x86 and of aarch64, that tell processors apart for which LLVM generates different code.
_PROCESSOR = (
    "vendor_id",
    "cpu family",
    "model",
    "stepping",
    "flags",
    "CPU implementer",
    "CPU variant",
    "CPU part",
    "Features",
)
# Functions that LLVM calls if the processor cannot convert half precision. No library in this process has them.
_HALF_CALLS = (b"__extendhfsf2", b"__truncsfhf2", b"__gnu_h2f_ieee", b"__gnu_f2h_ieee")


_creating = threading.RLock()  # a second compiler, or LLVM, of another thread would be freed with its code


def cache_folders() -> list[Path]:
    """Return the folders in which compiled code may be, as for Numba."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    beside = Path(__file__).parent / "__pycache__"
    folders = [Path(chosen)] if chosen else [beside, config.cache_folder()]
    return [folder for folder in folders if folder is not None and folder.is_absolute()]


def writable_folders() -> list[Path]:
    """Return those of them in which this user may write, and nobody else; they are made if they are not there."""
    writable = []
    for folder in cache_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700 if _is_private(folder) else 0o777, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK) and _is_trusted(folder, folder.stat()):
                writable.append(folder)
    return writable


def _is_private(folder: Path) -> bool:
    """Return whether a folder is for this user only; the compiled code beside the sources is for all who run them."""
    return folder != Path(__file__).parent / "__pycache__"


def _is_trusted(path: Path, found: os.stat_result) -> bool:
    """Return whether code in a file or folder may be run; report once if it may not."""
    reason = files.why_not_trusted(found, _PACKAGE.stat())
    if reason:
        _report(
            f"compiled code in {path} is not run, since {reason}. Make it writable for user {os.geteuid()} only, or "
            "set NUMBA_CACHE_DIR to a folder of this user; until then kernels are compiled again"
        )
    return not reason


@lru_cache(maxsize=100)
def _report(message: str) -> None:
    logger.warning(message)


def _processor() -> str:
    """Return what distinguishes this processor, or the one that the environment asks for; '' if that is not known."""
    chosen = [os.environ.get(name, "") for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")]
    with contextlib.suppress(OSError):
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            first = takewhile(str.strip, file)  # the lines of the first processor
            known = [line for line in first if line.partition(":")[0].strip() in _PROCESSOR]
        if any(line.startswith(("flags", "Features")) for line in known):
            return "\n".join((os.uname().machine, *chosen, *known))
    return ""


class Compiler:
    """Compiles LLVM code for this processor, or for that of NUMBA_CPU_NAME, or loads what was compiled. Thread-safe.

    LLVM itself is loaded only if something has to be compiled, or cannot be loaded otherwise.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._functions: dict[str, int] = {}
        """Addresses by name of the functions that have been loaded, except by LLVM."""
        self._llvm: Llvm | None = None
        self._folders, self._writable = cache_folders(), writable_folders()
        self.folder = self._writable[0] if self._writable else None
        self._processor = _processor() or self.llvm.processor

    @property
    def llvm(self) -> Llvm:
        """LLVM, loaded now if it has not been."""
        with _creating:
            if self._llvm is None:
                from .llvm import Llvm  # here, since it loads the library

                self._llvm = Llvm()
            return self._llvm

    def function(self, name: str, recipe: str, text_of: Callable[..., str]) -> int:
        """Return the address of the function `function` of the module that `text_of` returns.

        The function is renamed to `name`, which must be unique, and compiled or loaded once.
        """
        with self.lock:
            if name not in self._functions and not self._load(name, recipe):
                image = self._compile(name, text_of)
                if any(call in image for call in _HALF_CALLS):
                    image = self._compile(name, partial(text_of, has_half=False))
                self._write(name, recipe, image)
                self._add(image)
            return self.find(name)

    def _compile(self, name: str, text_of: Callable[..., str]) -> bytes:
        return self.llvm.object_file(text_of().replace('@"function"', f'@"{name}"'), is_optimized=False)

    def load(self, name: str, recipe: str) -> bool:
        """Load the module of this name and recipe from the cache; return whether it was cached."""
        with self.lock:
            return self._load(name, recipe)

    def _load(self, name: str, recipe: str) -> bool:
        image = self._read(name, recipe)
        if image is not None:
            self._add(image)
        return image is not None

    def build(self, name: str, recipe: str, module: Any) -> None:
        """Optimize, compile and load a module, and store it on disk."""
        with self.lock:
            image = self.llvm.object_file(module, is_optimized=True)
            self._write(name, recipe, image)
            self._add(image)

    def _add(self, image: bytes) -> None:
        functions = object_file.load(image)
        if functions is None:
            self.llvm.load(image)
        else:
            self._functions.update(functions)

    def find(self, name: str) -> int:
        """Return the address of a function of a loaded module."""
        address = self._functions.get(name) or self.llvm.find(name)
        assert address, name
        return address

    # A file begins with the digest of the rest, so that a truncated file is not run.

    def _file_name(self, name: str, recipe: str) -> str:
        # Kernels call functions of CPython, of which older versions have fewer: PyFrame_GetLasti is new in 3.11.
        whole = "\n".join((self._processor, llvmlite.__version__, str(sys.implementation.cache_tag), recipe))
        return f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:24]}.native"

    def _read(self, name: str, recipe: str) -> bytes | None:
        file_name = self._file_name(name, recipe)
        for folder in self._folders:  # also one that only its owner can write to: compiled when an image was built
            path = folder / file_name
            with contextlib.suppress(OSError), files.open_input(path, _MOST_BYTES) as file:
                if not _is_trusted(folder, folder.stat()) or not _is_trusted(path, os.fstat(file.fileno())):
                    continue
                content = file.read()
                digest, image = content[:32], content[32:]
                if digest != hashlib.sha256(image).digest():
                    continue
                with contextlib.suppress(OSError):  # another user's file
                    if path.stat().st_mtime < time.time() - _DAY:
                        os.utime(path)  # which _remove_old reads
                return image
        return None

    def _write(self, name: str, recipe: str, image: bytes) -> None:
        """Write to all folders: other environments, and the next installation in this one, find that of the user."""
        for folder in self._writable.copy():
            path = folder / self._file_name(name, recipe)
            mode = 0o600 if _is_private(folder) else 0o644
            try:
                files.write(path, hashlib.sha256(image).digest() + image, mode=mode)  # atomic, also with other writers
                self._remove_old(folder)
            except OSError:
                self._writable.remove(folder)  # full, or not writable: do not try again
                if folder == self.folder:
                    self.folder = None

    @staticmethod
    def _remove_old(folder: Path) -> None:
        """Remove files that no process has loaded for a long time: those of other versions or processors."""
        files.remove_unfinished(folder, "torchmpi_")
        for path in folder.glob("torchmpi_*.native"):
            with contextlib.suppress(OSError):  # another user's file, or removed by another process
                if path.stat().st_mtime < time.time() - _UNUSED_DAYS * _DAY:
                    path.unlink()


def compiler() -> Compiler:
    """Return the compiler of this process, which keeps all loaded code."""
    with _creating:
        return _the_compiler()


@lru_cache(maxsize=1)
def _the_compiler() -> Compiler:
    return Compiler()
