"""Compilation of LLVM code to machine code, once per machine: results are kept on disk.

Numba's own pipeline needs a tenth of a second and more for a function. This module uses only LLVM, through llvmlite.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding

from ... import config

_DAY = 24 * 60 * 60
_UNUSED_DAYS = 30  # a compiled file is removed after this time without use
# Functions that LLVM calls if the processor cannot convert half precision. No library in this process has them.
_HALF_CALLS = (b"__extendhfsf2", b"__truncsfhf2", b"__gnu_h2f_ieee", b"__gnu_f2h_ieee")


def cache_folders() -> list[Path]:
    """Return the folders in which compiled code may be, as for Numba."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    beside = Path(__file__).parent / "__pycache__"
    folders = [Path(chosen)] if chosen else [beside, config.cache_folder()]
    return [folder for folder in folders if folder is not None and folder.is_absolute()]


def cache_folder() -> Path | None:
    """Return the first writable folder of them, or None."""
    for folder in cache_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    return None


class Compiler:
    """A compiler for this processor, or for the processor of NUMBA_CPU_NAME. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.functions: dict[str, int] = {}
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        self.cpu = os.environ.get("NUMBA_CPU_NAME") or binding.get_host_cpu_name()
        asked = "NUMBA_CPU_NAME" in os.environ
        self.features = os.environ.get("NUMBA_CPU_FEATURES", "" if asked else binding.get_host_cpu_features().flatten())
        self.triple = binding.get_process_triple()
        self.has_half = "+f16c" in self.features or self.triple.startswith("aarch64")
        """Whether the processor is known to convert 16-bit floats."""
        self.folder = cache_folder()
        self._folders = cache_folders()
        self.machine = self._machine()
        nothing = binding.parse_assembly("")
        nothing.triple = self.triple
        self.engine = binding.create_mcjit_compiler(nothing, self._machine())  # which owns both

    def function(self, name: str, text_of: Callable[..., str]) -> int:
        """Return the address of the function `function` of the module that `text_of` returns.

        The function is renamed to `name`, which must be unique, and compiled or loaded once.
        """
        with self.lock:
            if name not in self.functions:
                self.functions[name] = self._made(name, text_of)
            return self.functions[name]

    def _made(self, name: str, text_of: Callable[..., str]) -> int:
        text = text_of().replace('@"function"', f'@"{name}"')
        image = self._read(name, text)
        if image is None:
            image = self._compile(text)
            if any(call in image for call in _HALF_CALLS):
                image = self._compile(text_of(has_half=False).replace('@"function"', f'@"{name}"'))
            self._write(name, text, image)
        self._add(image)
        return self.find(name)

    def load(self, name: str, recipe: str) -> bool:
        """Load the module of this name and recipe from the cache; return whether it was cached."""
        with self.lock:
            image = self._read(name, recipe)
            if image is not None:
                self._add(image)
            return image is not None

    def build(self, name: str, recipe: str, module: Any) -> None:
        """Optimize, compile and load a module, and store it on disk."""
        with self.lock:
            image = self._emit(module, is_optimized=True)
            self._write(name, recipe, image)
            self._add(image)

    def find(self, name: str) -> int:
        """Return the address of a function of a loaded module."""
        address: int = self.engine.get_function_address(name)
        assert address, name
        return address

    def _add(self, image: bytes) -> None:
        self.engine.add_object_file(binding.ObjectFileRef.from_data(image))
        self.engine.finalize_object()

    def _machine(self) -> Any:
        # As in Numba: x86 code loaded by MCJIT cannot be position-independent.
        reloc = "static" if self.triple.startswith("x86_64") else "default"
        target = binding.Target.from_triple(self.triple)
        return target.create_target_machine(
            cpu=self.cpu, features=self.features, opt=2, reloc=reloc, codemodel="jitdefault", jit=True
        )

    def _compile(self, text: str) -> bytes:
        return self._emit(binding.parse_assembly(text))

    def _emit(self, module: Any, *, is_optimized: bool = False) -> bytes:
        module.triple = self.triple
        module.data_layout = str(self.machine.target_data)
        module.verify()
        if is_optimized:
            options = binding.create_pipeline_tuning_options(speed_level=2)
            builder = binding.create_pass_builder(self.machine, options)
            builder.getModulePassManager().run(module, builder)
        image: bytes = self.machine.emit_object(module)
        return image

    # A file begins with the digest of the rest, so that a truncated file is not run.

    def _file_name(self, name: str, text: str) -> str:
        version = ".".join(map(str, binding.llvm_version_info))
        recipe = "\n".join((self.triple, self.cpu, self.features, version, llvmlite.__version__, text))
        return f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:24]}.native"

    def _read(self, name: str, text: str) -> bytes | None:
        file_name = self._file_name(name, text)
        for folder in self._folders:  # also one that only its owner can write to: compiled when an image was built
            path = folder / file_name
            with contextlib.suppress(OSError):
                content = path.read_bytes()
                digest, image = content[:32], content[32:]
                if digest != hashlib.sha256(image).digest():
                    continue
                with contextlib.suppress(OSError):  # another user's file
                    if path.stat().st_mtime < time.time() - _DAY:
                        os.utime(path)  # which _remove_old reads
                return image
        return None

    def _write(self, name: str, text: str, image: bytes) -> None:
        if self.folder is None:
            return
        path = self.folder / self._file_name(name, text)
        part = path.with_name(f"{path.stem}.{os.getpid()}.part")
        try:
            part.write_bytes(hashlib.sha256(image).digest() + image)
            part.replace(path)  # atomic, also with other writers
            self._remove_old(path.parent)
        except OSError:
            self.folder = None  # full, or not writable: do not try again
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    @staticmethod
    def _remove_old(folder: Path) -> None:
        """Remove files that no process has loaded for a long time: those of other versions or processors."""
        for path in (*folder.glob("torchmpi_*.native"), *folder.glob("torchmpi_*.part")):
            days = _UNUSED_DAYS if path.suffix == ".native" else 1  # the others are those of killed processes
            with contextlib.suppress(OSError):  # another user's file, or removed by another process
                if path.stat().st_mtime < time.time() - days * _DAY:
                    path.unlink()


_first = threading.Lock()


def compiler() -> Compiler:
    """Return the compiler of this process, which keeps all loaded code."""
    with _first:  # a second compiler, made by another thread, would be freed with its code
        return _the_compiler()


@lru_cache(maxsize=1)
def _the_compiler() -> Compiler:
    return Compiler()
