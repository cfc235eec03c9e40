"""Files of tensors, written atomically and verified when read."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..errors import CheckpointError


def write(path: Path, archive: dict[str, Any]) -> None:
    """Write plain values and tensors; a reader finds either the old file or the new one.

    Raises:
        OSError: The file cannot be created.
        CheckpointError: Writing has failed.
    """
    with files.replacing(path, is_durable=True) as file:
        try:
            torch.save(archive, file)
        except RuntimeError as error:  # of torch's writer: the error of the file is its context
            raise CheckpointError(f"{path}: {error.__context__ or error}") from error


def parse(path: Path, raw: bytes, *, mark: tuple[str, int], what: str) -> dict[str, Any]:
    """Return the content of a file, given its bytes; raise CheckpointError if it is damaged or has another `mark`."""
    loaded = load(str(path), raw)
    key, version = mark
    if not isinstance(loaded, dict) or loaded.get(key) != version:
        raise CheckpointError(f"{path} is a file of torch.save(), but no {what} (format {version})")
    return loaded


def load(name: str, raw: bytes) -> Any:
    """Return what torch.save() has written, given its bytes, without running code; `name` is for the error.

    Raises:
        CheckpointError: The bytes are damaged, or torch.save() has not written them.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("torch.save() compresses nothing, and compressed parts may be of any length")
            damaged = archive.testzip()  # torch.load() does not compare the checksums
        if damaged is None:
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # of zipfile, or of torch, which raises IndexError, KeyError and others for some pickles
        raise CheckpointError(f"{name} ({len(raw)} bytes) is not a checkpoint or is truncated: {error!r}") from error
    raise CheckpointError(f"{name} is damaged: the checksum of its part {damaged!r} is wrong")
