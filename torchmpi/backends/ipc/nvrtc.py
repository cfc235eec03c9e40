"""Compilation of CUDA kernels by NVRTC, the compiler library of CUDA that PyTorch brings and uses."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def _library() -> Any:
    """Load NVRTC. A library of torch is linked with it, and so knows where it is.

    Raises:
        RuntimeError: It was not found.
    """
    own = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    for name in (str(own), f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}"):
        with suppress(OSError):
            library = ctypes.CDLL(name)
            if hasattr(library, "nvrtcCreateProgram"):
                return library
    raise RuntimeError("the library NVRTC of CUDA was not found")


def compile_source(source: str, architecture: str) -> bytes:
    """Compile kernels for an architecture such as ``sm_90``, and return a module as `cuModuleLoadData` takes it.

    Raises:
        RuntimeError: There is no NVRTC, or it cannot compile the source or for this architecture.
    """
    library = _library()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"torchmpi.cu", 0, None, None))
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if library.nvrtcCompileProgram(program, len(options), options):
            _check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check(library.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"NVRTC: {log.value.decode(errors='replace').strip()}")
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        module = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, module))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return module.raw


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC: error {status}")
