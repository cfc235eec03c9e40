"""Reads MNIST files in the IDX format: a header with the shape, followed by the bytes."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

UNSIGNED_BYTE = 0x08


class DataError(Exception):
    """A data file is missing, truncated or of another kind. The message names the file."""


def read_images(directory: Path, prefix: str) -> tuple[Tensor, Tensor]:
    """Read the images and labels of the files named "train-..." or "t10k-..."; pixels are scaled to [0, 1]."""
    arrays = []
    for kind, ndim in (("images", 3), ("labels", 1)):
        path = find(directory, prefix, kind, ndim)
        if path is None:
            raise DataError(f"{directory}: expected one of {', '.join(_names(prefix, kind, ndim))}; found none")
        arrays.append((path, read_idx(path, ndim)))
    (images_path, images), (labels_path, labels) = arrays
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: expected {len(images)} labels, one for each image of {images_path}, found {len(labels)}"
        )
    if not len(labels) or labels.max() > 9:
        raise DataError(
            f"{labels_path}: expected labels from 0 to 9, found {labels.max(initial=0)} as the largest of {len(labels)}"
        )
    pixels = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32) / 255)
    return pixels, torch.from_numpy(labels.astype(np.int64))


def find(directory: Path, prefix: str, kind: str, ndim: int) -> Path | None:
    """Return the path of a file in any spelling of its name, or None if there is none."""
    found = (directory / name for name in _names(prefix, kind, ndim))
    return next((path for path in found if path.is_file()), None)


def _names(prefix: str, kind: str, ndim: int) -> list[str]:
    return [f"{prefix}-{kind}{dot}idx{ndim}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes with ``ndim`` dimensions.

    Example: ``read_idx(Path("t10k-labels-idx1-ubyte.gz"), 1)`` returns an array of 10,000 labels.
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
