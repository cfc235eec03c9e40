"""Checkpoints: folders of torch.distributed.checkpoint, replaced atomically and verified when read.

A checkpoint contains tensors only. Those of network, criterion and optimizer have names such as ``network.0.weight``;
these are the tensors of rank 0, and complete tensors where a layer is sharded. All other state is plain values, one
tensor of bytes ``engine.rank0`` and so on for each rank, which is read without running code.
"""

from __future__ import annotations

import enum
import errno
import hashlib
import io
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .. import files
from ..communicators.conditions import from_rank_0
from ..errors import CheckpointError
from ..status_line import telling
from ..tensors import archive, buffers
from .coordination import Coordinator
from .data_loading import map_tensors

_MARK = ("torchmpi_checkpoint", 3)
_MOST_METADATA_BYTES = 64 << 20  # some 300 bytes for a tensor
_PLAIN, _DIGESTS = "engine.rank", "engine.digests"
T = TypeVar("T")


class Stateful(Protocol):
    """An object whose state is stored in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Restore the state."""


@dataclass(frozen=True)
class Content:
    """The contents of a checkpoint, when it is saved.

    `common` is equal on all ranks, `own` belongs to this rank, and `trees` are the state dicts of tensors.
    """

    common: dict[str, Any]
    own: dict[str, Any]
    trees: dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint, when it is read.

    `ranks` has the `own` state of all ranks that saved. The tensors in `trees` are those that this rank saved, or those
    of rank 0 if the number of ranks has changed.
    """

    common: dict[str, Any]
    ranks: list[dict[str, Any]]
    trees: dict[str, Any]


class Saver:
    """Saves the checkpoints of a run, one at a time, in a thread of rank 0. Its methods are collective."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._thread = ThreadPoolExecutor(1, "torchmpi-checkpoint")
        self._is_saving = False
        self._pending: Future[None] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the save in progress is known to have failed, on rank 0."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def save(self, path: Path, content: Content, asynchronous: bool = False) -> None:
        """Save a checkpoint; with `asynchronous`, return when its state is copied. Errors are raised on all ranks."""
        self.wait()
        packed = _pack(content, self._coordinator, copy=asynchronous)
        if self._coordinator.rank == 0:
            self._pending = self._thread.submit(_replace, path, *packed)
        self._is_saving = True
        if not asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress, and raise its failure on all ranks."""
        if self._is_saving:
            self._is_saving, pending, self._pending = False, self._pending, None
            _on_rank_0(self._coordinator, lambda: None if pending is None else _await(pending))

    def close(self) -> None:
        """End the thread. A failed job of many ranks does not wait for a save: the previous checkpoint is complete."""
        self._thread.shutdown(wait=self._coordinator.size == 1)


def _await(save: Future[None]) -> Any:
    """Wait for a save, and say so if it takes long."""
    with telling(lambda seconds: f"torchmpi: a checkpoint is being written, for {seconds:.0f} s"):
        return save.result()


def exists(path: Path) -> bool:
    """Return whether :func:`read` finds a checkpoint: `path`, or the previous one, if a job has ended between renames.

    >>> exists(Path("missing.ckpt"))
    False
    """
    return path.exists() or _previous(path.resolve()).exists()


def read(path: Path, coordinator: Coordinator) -> Saved:
    """Read a checkpoint. Collective: only rank 0 reads the files."""
    tensors, ranks = _on_rank_0(coordinator, lambda: _load(path))
    try:
        mine = ranks[0]
        if len(ranks) == coordinator.size:
            mine = ranks[coordinator.rank]
            tensors.update(mine["differing"])
        trees = map_tensors(lambda _, name: tensors[name], mine["trees"])
        return Saved(mine["common"], [rank["own"] for rank in ranks], trees)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of an engine: it lacks {error}") from error


def _on_rank_0(coordinator: Coordinator, action: Callable[[], T]) -> T:
    """Return what `action` returns on rank 0, or raise its failure, on all ranks."""

    def checked() -> T:
        try:
            return action()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"checkpoint, on rank 0: {type(error).__name__}: {error}") from error

    return from_rank_0(coordinator.rank, coordinator.broadcast, checked)


# --- state of the ranks ------------------------------------------------------------------------------------


def _pack(
    content: Content, coordinator: Coordinator, copy: bool
) -> tuple[dict[str, Tensor], dict[str, bytes], list[Tensor]]:
    """Return the tensors of this rank, their digests if computed, and on rank 0 the other state of all. Collective."""
    tensors: dict[str, Tensor] = {}
    problems = []

    def take(tensor: Tensor, name: str) -> Tensor:
        if name in tensors:
            problems.append(f"two tensors have the name {name!r} in a checkpoint: rename a module or a key")
        on_host = tensor.detach().cpu()
        is_alias = on_host.data_ptr() == tensor.data_ptr()
        tensors[name] = on_host.clone() if copy and is_alias and coordinator.rank == 0 else on_host
        return torch.empty(0)

    trees = map_tensors(take, content.trees)
    others = {"iterator": content.own.get("iterator"), "metadata": content.common.get("metadata")}
    problems += _unreadable({**others, **content.own.get("kept", {}), **trees})
    digests = {name: digest(tensor) for name, tensor in tensors.items()} if coordinator.size > 1 else {}
    reference = coordinator.broadcast(digests)
    plain = {
        "common": content.common,
        "own": content.own if not problems else None,
        "trees": trees if not problems else None,
        "differing": {name: tensors[name] for name in digests if digests[name] != reference.get(name)},
    }
    part = _as_bytes(plain)
    everyone = coordinator.gather((problems, part.numel()))
    for theirs, _ in everyone:
        if theirs:
            raise CheckpointError(theirs[0])
    parts = coordinator.collect(part)
    return tensors, digests, [] if parts is None else list(parts.split([numel for _, numel in everyone]))


def _as_bytes(values: dict[str, Any]) -> Tensor:
    buffer = io.BytesIO()
    torch.save({_MARK[0]: _MARK[1], **values}, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unreadable(states: dict[str, Any]) -> list[str]:
    """Return error messages for states that could be saved but not read back."""
    problems = []
    for name, state in states.items():
        buffer = io.BytesIO()
        try:
            torch.save(state, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:  # state_dict() may return objects that fail in any way
            problems.append(
                f"state_dict() of {name!r} holds an object that a checkpoint cannot hold: only numbers, strings, "
                f"tensors and lists, tuples and dicts of them can be read back without running code ({error})"
            )
    return problems


def digest(value: Any) -> bytes:
    """Return a hash that is equal for equal bits, types and shapes, also of nested containers.

    >>> digest([torch.zeros(2), 1]) == digest([torch.zeros(2), 1.0])
    False
    """
    hasher = hashlib.sha256()
    _feed(hasher, value)
    return hasher.digest()


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        hasher.update(f"{value.dtype} {tuple(value.shape)}".encode())
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        hasher.update(buffers.byte_view(plain).numpy().data)
    elif isinstance(value, Mapping):
        hasher.update(b"{")
        for key, item in value.items():
            _feed(hasher, key)
            _feed(hasher, item)
    elif isinstance(value, (list, tuple)):
        hasher.update(b"[")
        for item in value:
            _feed(hasher, item)
        hasher.update(b"]")
    else:
        hasher.update(f"{type(value).__name__} {value!r};".encode())


# --- folders, on rank 0 ------------------------------------------------------------------------------------


def _replace(path: Path, tensors: dict[str, Tensor], digests: dict[str, bytes], ranks: list[Tensor]) -> None:
    """Write a checkpoint under another name and rename it; at each moment a complete one exists."""
    files.check_folder(path if path.is_dir() else path.parent)
    path = path.resolve()
    digests = digests or {name: digest(tensor) for name, tensor in tensors.items()}
    plain = {f"{_PLAIN}{rank}": part for rank, part in enumerate(ranks)}
    digests = digests | {name: digest(part) for name, part in plain.items()}
    tensors = {**tensors, **plain, _DIGESTS: _as_bytes({"digests": digests})}
    if path.is_file():
        raise CheckpointError(_is_a_file(path))
    others = [file.name for file in path.glob("*") if file.suffix != ".distcp" and file.name != ".metadata"]
    if others:
        raise CheckpointError(f"{path} has other files, such as {others[0]}, and is not replaced: choose another path")
    new, previous = path.with_name(f".{path.name}.new"), _previous(path)
    try:
        _recover(path)
        for left in (new, previous):  # by a job that has ended while saving
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir()
        _write(new, tensors)
        if path.exists():
            path.rename(previous)
        new.rename(path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        _recover(path)
        raise
    shutil.rmtree(previous, ignore_errors=True)


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _recover(path: Path) -> None:
    if not path.exists() and _previous(path).exists():
        _previous(path).rename(path)


def _is_a_file(path: Path) -> str:
    return (
        f"{path} is a file, but a checkpoint is a folder. The format of earlier versions of torchmpi, one file for a "
        "fixed number of ranks, cannot be resumed: load its weights with "
        f"torch.load({str(path)!r})['network'], begin a new run with them, and save it under another path."
    )


def _write(folder: Path, tensors: dict[str, Tensor]) -> None:
    # The steps of dcp.save(). That function warns without a process group of torch.distributed, and with one it
    # involves the other ranks.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    trees: dict[str, Any] = {}
    for name, tensor in tensors.items():
        tree, _, key = name.partition(".")
        trees.setdefault(tree, {})[key] = tensor
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
    planner.set_up_planner(trees, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def _load(path: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the tensors of a checkpoint, verified, and the other state of each rank."""
    folder = path if path.exists() else _previous(path.resolve())
    if folder.is_file():
        raise CheckpointError(_is_a_file(path))
    if not folder.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    try:
        tensors = _read(folder)
    except CheckpointError:
        raise
    except Exception as error:  # of the storage, or of pickle
        raise CheckpointError(f"{path} is not a checkpoint or is truncated: {type(error).__name__}: {error}") from error

    def plain(name: str) -> dict[str, Any]:
        raw = tensors.pop(name).numpy().tobytes()
        return archive.parse(path, raw, mark=_MARK, what="checkpoint of an engine")

    digests = plain(_DIGESTS).get("digests")
    if not isinstance(digests, dict) or digests.keys() != tensors.keys():
        raise CheckpointError(f"{path} is damaged: it does not have the tensors that were saved")
    for name, expected in digests.items():
        if digest(tensors[name]) != expected:
            raise CheckpointError(f"{path} is damaged: {name!r} differs from the saved value")
    return tensors, [plain(f"{_PLAIN}{rank}") for rank in range(sum(name.startswith(_PLAIN) for name in tensors))]


def _read(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in a folder. Only `_write` has made the files: each tensor is one part of one of them.

    The reader of torch.distributed.checkpoint would open any file that the metadata name, and allocate any size.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with files.open_input(folder / ".metadata", _MOST_METADATA_BYTES) as file:
        metadata = _Metadata(file).load()
    entries, parts = metadata.state_dict_metadata, metadata.storage_data
    if _DIGESTS not in entries or len(parts) != len(entries):
        raise CheckpointError(f"{folder} is a checkpoint of torch.distributed.checkpoint, but not of an engine")
    tensors: dict[str, Tensor] = {}
    for index, part in parts.items():
        path, entry = folder / part.relative_path, entries[index.fqn]
        if path.parent != folder:
            raise CheckpointError(f"{folder} is damaged: its metadata name {path}, a file outside the folder")
        with files.open_input(path, sys.maxsize) as file:
            file.seek(part.offset)
            raw = file.read(min(part.length, os.fstat(file.fileno()).st_size))
        tensor = archive.load(f"{index.fqn!r} in {path}", raw)
        if not isinstance(entry, TensorStorageMetadata) or not isinstance(tensor, Tensor) or tensor.shape != entry.size:
            raise CheckpointError(f"{folder} is damaged: {index.fqn} is not the tensor of its metadata")
        tensors[index.fqn] = tensor
    return tensors


class _Metadata(pickle._Unpickler):
    """Reads metadata of torch.distributed.checkpoint, whose own reader would call any function that the file names.

    In Python: the one in C allocates as much memory as numbers in a damaged file say.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the metadata; refuse everything else."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _METADATA.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which no checkpoint needs and was not run")


def _member(kind: type, name: str) -> Any:
    """Return a member of an enumeration; some releases of Python 3.11 pickle it as ``getattr(class, name)``."""
    if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"its metadata reads the attribute {name!r} of {kind!r}, which no checkpoint needs")


_METADATA = {
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # in Python 3.13
    "torch": ("Size",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",),
}  # fmt: skip
