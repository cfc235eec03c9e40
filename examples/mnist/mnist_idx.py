"""Reads IDX files, the format of MNIST: a header with the shape, then the bytes."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

UNSIGNED_BYTE = 0x08


class DataError(Exception):
    """A data file is missing, truncated or of another kind; the message names it."""


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes with ``ndim`` dimensions.

    Example: ``read_idx(Path("t10k-labels-idx1-ubyte.gz"), 1)`` gives an array of 10,000 labels.
    """
    raw = _read_bytes(path)
    magic, header = bytes((0, 0, UNSIGNED_BYTE, ndim)), 4 + 4 * ndim
    if raw[:4] != magic:
        raise DataError(
            f"{path}: expected an IDX file of bytes with {ndim} dimension(s), beginning {magic.hex(' ')}; "
            f"found {raw[:4].hex(' ') or 'an empty file'}"
        )
    if len(raw) < header:
        raise DataError(f"{path}: expected a header of {header} bytes, found a file of {len(raw)}")
    shape = tuple(int(length) for length in np.frombuffer(raw, ">u4", count=ndim, offset=4))
    expected = int(np.prod(shape, dtype=object))
    if len(raw) - header != expected:
        raise DataError(
            f"{path}: expected {expected} bytes of data for shape {shape}, found {len(raw) - header}: "
            "the file is truncated or damaged"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected a readable IDX or gzip file, found: {error}") from error
