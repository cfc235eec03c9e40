"""The format of shared data, in memory and in files: a header, then the bytes of each tensor and array.

The header is JSON, of which reading runs no code: a file may come from anywhere. A tensor or an array of the value is a
*leaf*; lists, tuples, dictionaries, numbers and texts are in the header, of which each rank makes objects of its own.

===================== =============================================
bytes 0 to 15         ``_MARK``, with the version of the format
bytes 16 to 27        length and CRC-32 of the JSON text
from byte 32          the JSON text, then zeros to a multiple of 4,096
from there            the leaves, each at a multiple of 64 bytes
===================== =============================================
"""

from __future__ import annotations

import ast
import json
import math
import os
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import files
from ..shared_memory.read_only import ReadOnlyMemory

_MARK = b"torchmpi data 1\n"
_LENGTHS = struct.Struct("<QI")
_HEADER_BYTES, _PAGE_BYTES, _LEAF_BYTES = 32, 4096, 64
_MOST_LEVELS = 30
"""Of containers inside each other; each is three in JSON, of which files.parse_json() reads 100."""
_WRITTEN_BYTES = 64 << 20
_MOST_BYTES = 1 << 50
_WRONG_HEADER = (
    *(KeyError, TypeError, AttributeError, IndexError, OverflowError),
    *(SyntaxError, RecursionError, MemoryError),  # of ast.literal_eval()
    RuntimeError,  # of torch, about shapes
)
_SCALARS = (bool, int, float, str, type(None))
_REMEDY = (
    "Return tensors, NumPy arrays, numbers and texts, and lists, tuples, named tuples and dictionaries of them; a "
    "Dataset is made of these on each rank"
)

Leaf = torch.Tensor | np.ndarray[Any, Any]


class Description(NamedTuple):
    """A value as the header describes it, and its leaves."""

    header: bytes
    leaves: list[Leaf]
    offsets: list[int]
    num_bytes: int
    """Of header and leaves together."""


class _Describer:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.entries: list[list[Any]] = []
        self._numbers: dict[int, int] = {}
        self._next = 0

    def node(self, value: Any, path: str, level: int = 0) -> Any:
        """Return the JSON of a value; `path` is where it is, for errors."""
        if type(value) in _SCALARS:
            return value
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return {"leaf": self._leaf(value, path)}
        if level > _MOST_LEVELS:
            raise TypeError(f"{path} has more than {_MOST_LEVELS} containers inside each other")
        if type(value) is dict:
            if wrong := [key for key in value if type(key) not in _SCALARS]:
                raise TypeError(f"{path} has the key {wrong[0]!r}, a {type(wrong[0]).__name__}. Use texts or numbers")
            return {"dict": [[key, self.node(each, f"{path}[{key!r}]", level + 1)] for key, each in value.items()]}
        if type(value) in (list, tuple):
            nodes = [self.node(each, f"{path}[{index}]", level + 1) for index, each in enumerate(value)]
            return {type(value).__name__: nodes}
        if isinstance(value, tuple) and (fields := getattr(value, "_fields", None)):
            kind = type(value)
            nodes = [self.node(each, f"{path}.{field}", level + 1) for field, each in zip(fields, value, strict=True)]
            return {"named": [kind.__module__, kind.__qualname__, list(fields), nodes]}
        raise TypeError(f"{path} is of type {type(value).__name__}. {_REMEDY}")

    def _leaf(self, leaf: Leaf, path: str) -> int:
        if id(leaf) in self._numbers:
            return self._numbers[id(leaf)]
        kind, dtype = self._kind(leaf, path)
        self._numbers[id(leaf)] = len(self.leaves)
        self.leaves.append(leaf)
        self.entries.append([kind, dtype, list(leaf.shape), self._next])
        self._next += -(-_num_bytes(leaf) // _LEAF_BYTES) * _LEAF_BYTES
        return self._numbers[id(leaf)]

    def _kind(self, leaf: Leaf, path: str) -> tuple[str, str]:
        if isinstance(leaf, torch.Tensor):
            if leaf.device.type != "cpu" or leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
                what = f"{str(leaf.layout).removeprefix('torch.')}, {leaf.dtype}, on {leaf.device}"
                raise TypeError(
                    f"{path} is a tensor that has no plain memory of the host ({what}). Use .cpu(), .to_dense()"
                )
            return "tensor", str(leaf.dtype).removeprefix("torch.")
        if type(leaf) not in (np.ndarray, np.memmap):
            raise TypeError(f"{path} is of type {type(leaf).__name__}. Use numpy.asarray(), which makes a plain array")
        if leaf.dtype.hasobject:
            raise TypeError(
                f"{path} is an array of Python objects ({leaf.dtype}). Convert it to numbers or texts, .astype()"
            )
        return "array", repr(np.lib.format.dtype_to_descr(leaf.dtype))


def describe(value: Any) -> Description:
    """Describe a value.

    Raises:
        TypeError: The value has an object that cannot be shared; the message says where, and what to use.

    >>> description = describe({"x": torch.zeros(3), "names": ["a", "b"]})
    >>> len(description.leaves), description.num_bytes
    (1, 4160)
    """
    describer = _Describer()
    node = describer.node(value, "the value")
    text = json.dumps({"value": node, "leaves": describer.entries}, separators=(",", ":")).encode()
    begin = -(-(_HEADER_BYTES + len(text)) // _PAGE_BYTES) * _PAGE_BYTES
    header = _MARK + _LENGTHS.pack(len(text), zlib.crc32(text))
    header = (header.ljust(_HEADER_BYTES, b"\0") + text).ljust(begin, b"\0")
    offsets = [begin + entry[3] for entry in describer.entries]
    return Description(header, describer.leaves, offsets, begin + describer._next)


def write(file: int, description: Description, show: Callable[[int], object] = lambda _: None) -> None:
    """Write header and leaves to an empty file. Each leaf is dropped when it is written, so that its memory is free.

    Args:
        file: A descriptor.
        description: The value. Its list of leaves is empty afterwards.
        show: Called with the number of bytes written so far.

    Raises:
        OSError: There is no space left.
    """
    write_bytes(file, memoryview(description.header), 0, show)
    description.leaves.reverse()
    for offset in description.offsets:
        data = _as_bytes(description.leaves.pop())
        write_bytes(file, data, offset, show)
    os.ftruncate(file, description.num_bytes)


def read(memory: ReadOnlyMemory) -> Any:
    """Return the value whose leaves are views of the memory.

    Raises:
        ValueError: These are no such data, or they are damaged.
    """
    if memory.num_bytes < _PAGE_BYTES or memory.bytes(0, len(_MARK)) != _MARK:
        raise ValueError("it does not begin as a file of shared_dataset()")
    length, checksum = _LENGTHS.unpack(memory.bytes(len(_MARK), _LENGTHS.size))
    text = memory.bytes(_HEADER_BYTES, length)
    if len(text) != length or zlib.crc32(text) != checksum:
        raise ValueError("its header is damaged")
    begin = -(-(_HEADER_BYTES + length) // _PAGE_BYTES) * _PAGE_BYTES
    try:
        header = files.parse_json(bytes(text))
    except ValueError as error:
        raise ValueError(f"its header is no JSON: {error}") from error
    try:
        leaves = [_leaf_at(memory, begin, *entry) for entry in header["leaves"]]
        return _value(header["value"], leaves)
    except _WRONG_HEADER as error:
        raise ValueError(f"its header is wrong: {type(error).__name__}: {error}") from error


def open_file(path: Path) -> ReadOnlyMemory:
    """Map a file that nobody else can have written.

    Raises:
        OSError: It is no file of this user or root, or others may write to it.
        ValueError: It is empty.
    """
    with files.open_input(path, _MOST_BYTES) as file:
        if reason := files.why_not_trusted(os.fstat(file.fileno()), os.stat(__file__)):
            raise PermissionError(reason)
        return ReadOnlyMemory.of(os.dup(file.fileno()))


def _leaf_at(memory: ReadOnlyMemory, begin: int, kind: str, dtype: str, shape: list[int], offset: int) -> Leaf:
    numbers = [*shape, offset]
    if not all(type(each) is int and each >= 0 for each in numbers) or offset % _LEAF_BYTES:
        raise ValueError("its header has a wrong shape or place")
    offset += begin
    torch_dtype = getattr(torch, dtype) if kind == "tensor" else None
    numpy_dtype = np.lib.format.descr_to_dtype(ast.literal_eval(dtype)) if kind == "array" else None
    if isinstance(torch_dtype, torch.dtype):
        item_bytes = torch_dtype.itemsize
    elif numpy_dtype is not None and not numpy_dtype.hasobject:
        item_bytes = numpy_dtype.itemsize
    else:
        raise ValueError(f"its header has the unknown dtype {dtype!r}")
    if offset + math.prod(shape) * item_bytes > memory.num_bytes:
        raise ValueError("it is truncated")
    if isinstance(torch_dtype, torch.dtype):
        return memory.tensor(offset, torch_dtype, shape)
    assert numpy_dtype is not None
    return memory.array(offset if math.prod(shape) * item_bytes else 0, numpy_dtype, shape)


def _value(node: Any, leaves: list[Leaf]) -> Any:
    if type(node) in _SCALARS:
        return node
    ((kind, content),) = node.items()
    if kind == "leaf":
        return leaves[content]
    if kind == "dict":
        return {key: _value(each, leaves) for key, each in content}
    if kind in ("list", "tuple"):
        nodes = (_value(each, leaves) for each in content)
        return list(nodes) if kind == "list" else tuple(nodes)
    if kind == "named":
        module, name, fields, values = content
        return _named_tuple(module, name, tuple(fields))(*(_value(each, leaves) for each in values))
    raise ValueError(f"its header has the unknown kind {kind!r}")


def _named_tuple(module: str, name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    """Return the class of a named tuple, of a module that the program has loaded: no file chooses what is imported."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields):
        raise ValueError(
            f"it has a named tuple {module}.{name}{fields}, which this process does not have. Define it at the top of "
            "a module that all ranks import"
        )
    return found


def _num_bytes(leaf: Leaf) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, torch.Tensor) else leaf.nbytes


def _as_bytes(leaf: Leaf) -> memoryview:
    if not _num_bytes(leaf):
        return memoryview(b"")
    if isinstance(leaf, torch.Tensor):
        plain = leaf.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().reshape(-1)
        # One element counts as contiguous with every stride, but cannot be viewed as bytes.
        whole = plain.contiguous() if len(plain) > 1 else plain.clone(memory_format=torch.contiguous_format)
        return whole.view(torch.uint8).numpy().data
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data


def write_bytes(file: int, data: memoryview, offset: int, show: Callable[[int], object] = lambda _: None) -> None:
    """Write bytes to a place of a file; `show` as for :func:`write`."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done : done + _WRITTEN_BYTES], offset + done)
        show(offset + done)
