"""Files of tensors, written atomically and verified when read."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError


def write(path: Path, archive: dict[str, Any]) -> None:
    """Write plain values and tensors; a reader finds either the old file or the new one.

    Raises:
        OSError: The file cannot be created.
        CheckpointError: Writing has failed.
    """
    # In the same directory, because a rename is atomic only within one file system.
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed or the process ends
            try:
                torch.save(archive, file)
            except RuntimeError as error:  # of torch's writer: the error of the file is its context
                raise CheckpointError(f"{path}: {error.__context__ or error}") from error
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp() makes files only their owner can read
            os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def remove_unfinished(folder: Path, prefix: str) -> None:
    """Remove files that :func:`write` has left in a folder when its process was killed."""
    for path in folder.glob(f".{prefix}*.tmp"):
        with contextlib.suppress(OSError), path.open("rb+") as file:  # locked: it is being written
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def parse(path: Path, raw: bytes, *, mark: tuple[str, int], what: str) -> dict[str, Any]:
    """Return the content of a file, given its bytes; raise CheckpointError if it is damaged or has another `mark`."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("torch.save() compresses nothing, and compressed parts may be of any length")
            damaged = archive.testzip()  # torch.load() does not compare the checksums
        if damaged is None:
            loaded = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # of zipfile, or of torch, which raises IndexError, KeyError and others for some pickles
        raise CheckpointError(f"{path} ({len(raw)} bytes) is not a checkpoint or is truncated: {error!r}") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of its part {damaged!r} is wrong")
    key, version = mark
    if not isinstance(loaded, dict) or loaded.get(key) != version:
        raise CheckpointError(f"{path} is a file of torch.save(), but no {what} (format {version})")
    return loaded
