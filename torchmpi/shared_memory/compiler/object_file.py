"""Loads the object files that LLVM writes for x86-64, without LLVM: its library takes 45 MB and 30 ms of each process.

The kernels are compiled for addresses of 64 bits, so that an object file has relocations of two kinds only: an address,
and the distance to one. A file with anything else is not loaded, nor is one for another processor: `llvm` loads all.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, NamedTuple

import numpy as np

# Records of ELF for 64 bits, with the names of its specification.
_HEADER = np.dtype(
    {
        "names": ("ident", "type", "machine", "shoff", "shnum"),
        "formats": ("S6", "<u2", "<u2", "<i8", "<u2"),
        "offsets": (0, 16, 18, 40, 60),
        "itemsize": 64,
    }
)
_SECTION = np.dtype("<u4, <u4, <i8, <i8, <i8, <i8, <u4, <u4, <i8, <i8")
_SECTION.names = ("name", "type", "flags", "addr", "offset", "size", "link", "info", "addralign", "entsize")
_SYMBOL = np.dtype("<u4, u1, u1, <u2, <i8, <i8")
_SYMBOL.names = ("name", "info", "other", "shndx", "value", "size")
_RELOCATION = np.dtype("<i8, <u4, <u4, <i8")
_RELOCATION.names = ("offset", "type", "sym", "addend")
_BYTE = np.dtype("u1")
_ELF64_LITTLE, _REL, _X86_64 = b"\x7fELF\x02\x01", 1, 62
_PROGBITS, _SYMTAB, _RELA, _UNWIND = 1, 2, 4, 0x70000001
_WRITE, _ALLOC = 1, 2
_UNDEFINED, _GLOBAL_FUNCTION = 0, 0x12
_ADDRESS, _DISTANCE = 1, 24  # R_X86_64_64, R_X86_64_PC64

_process = ctypes.CDLL(None, use_errno=True)
_process.mmap.restype = ctypes.c_void_p
_process.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_process.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def load(image: bytes) -> dict[str, int] | None:
    """Load an object file until the process ends, and return the addresses of its global functions by name.

    Returns:
        None if the file has to be loaded by LLVM.

    Raises:
        OSError: The system gives no memory for machine code.
        RuntimeError: The file calls a function that this process does not have.
    """
    (header,) = np.frombuffer(image, _HEADER, 1)
    if (header["ident"], header["type"], header["machine"]) != (_ELF64_LITTLE, _REL, _X86_64):
        return None
    file = _parsed(image, np.frombuffer(image, _SECTION, header["shnum"], header["shoff"]))
    if not _is_supported(file):
        return None
    offsets, size = np.zeros(len(file.sections), np.int64), 0
    for index in file.loaded:
        align = file.sections["addralign"][index]
        offsets[index] = -(-size // align) * align
        size = int(offsets[index] + file.sections["size"][index])
    base = _reserve(size)
    memory = np.zeros(size, _BYTE)
    for index in file.loaded:
        content = _items(image, file.sections[index], _BYTE)
        memory[offsets[index] : offsets[index] + len(content)] = content
    addresses = _addresses(file, base + offsets)
    for section, table in file.relocations:
        places = offsets[section] + table["offset"]
        values = addresses[table["sym"]] + table["addend"] - np.where(table["type"] == _DISTANCE, base + places, 0)
        memory[places[:, None] + np.arange(8)] = values.astype("<i8").view(_BYTE).reshape(-1, 8)
    _fill(base, memory)
    is_function = (file.symbols["info"] == _GLOBAL_FUNCTION) & (file.symbols["shndx"] != _UNDEFINED)
    return {file.names[index]: int(addresses[index]) for index in np.flatnonzero(is_function)}


class _File(NamedTuple):
    sections: Any
    loaded: Any
    """Indices of the sections that are in memory while the code runs."""
    symbols: Any
    names: list[str]
    """Of the symbols."""
    relocations: list[tuple[int, Any]]
    """The index of a section, and the relocations of its contents."""


def _items(image: bytes, section: Any, item: Any) -> Any:
    """Return the contents of a section as an array."""
    return np.frombuffer(image, item, section["size"] // item.itemsize, section["offset"])


def _parsed(image: bytes, sections: Any) -> _File:
    is_loaded = (sections["flags"] & _ALLOC > 0) & (sections["size"] > 0)
    # Nothing unwinds these frames, not even a thread that ends in the code because the interpreter has ended.
    loaded = np.flatnonzero(is_loaded & (sections["type"] != _UNWIND))
    (table,) = sections[sections["type"] == _SYMTAB]
    symbols = _items(image, table, _SYMBOL)
    text = _items(image, sections[table["link"]], _BYTE).tobytes()
    names = [text[start : text.index(b"\0", start)].decode() for start in symbols["name"]]
    tables = sections[(sections["type"] == _RELA) & np.isin(sections["info"], loaded)]
    return _File(
        sections, loaded, symbols, names, [(each["info"], _items(image, each, _RELOCATION)) for each in tables]
    )


def _is_supported(file: _File) -> bool:
    loaded = file.sections[file.loaded]
    if (loaded["flags"] & _WRITE).any() or (loaded["type"] != _PROGBITS).any():
        return False
    found_in = (_UNDEFINED, *file.loaded)
    return all(
        np.isin(table["type"], (_ADDRESS, _DISTANCE)).all()
        and np.isin(file.symbols["shndx"][table["sym"]], found_in).all()
        for _, table in file.relocations
    )


def _addresses(file: _File, places: Any) -> Any:
    """Return the addresses of all symbols; `places`: the addresses of the sections."""
    section = file.symbols["shndx"]
    addresses = places[np.where(section < len(places), section, 0)] + file.symbols["value"]
    for index in np.flatnonzero(section == _UNDEFINED)[1:]:  # the first symbol is none
        try:
            function = _process[file.names[index]]
        except AttributeError:
            raise RuntimeError(f"this process has no function {file.names[index]}, which compiled code calls") from None
        addresses[index] = ctypes.cast(function, ctypes.c_void_p).value
    return addresses


# The memory is never freed: a thread may run the code while the interpreter ends.


def _reserve(size: int) -> int:
    address = _process.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"no {size} bytes for machine code: {os.strerror(ctypes.get_errno())}")
    return int(address)


def _fill(address: int, memory: Any) -> None:
    ctypes.memmove(address, memory.ctypes.data, memory.nbytes)
    if _process.mprotect(address, memory.nbytes, mmap.PROT_READ | mmap.PROT_EXEC):
        problem = os.strerror(ctypes.get_errno())
        raise OSError(
            ctypes.get_errno(), f"the system does not let this process run machine code of its own: {problem}"
        )
