"""Checkpoint files: one file for all ranks, replaced atomically and verified when read.

State that is equal on all ranks (parameters, optimizer state) is stored once, as on rank 0. Other state is stored for
each rank: random numbers, meters, the position in the data, and tensors that are not replicated, such as the running
statistics of batch norm or the shards of a model-parallel layer. The file is an ordinary ``torch.save`` archive of
plain values, so that reading it cannot run code: ``torch.load(path)["network"]`` returns the weights.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..tensors import archive as archive_file
from .coordination import Coordinator

_MARK = ("torchmpi_checkpoint", 1)
T = TypeVar("T")
Tree = dict[Any, Any]
"""A state dict. Keys are names, or ``("state", index)`` for the state of one parameter in an optimizer."""


class Stateful(Protocol):
    """An object whose state is stored in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Restore the state."""


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint for one rank.

    `common` is equal on all ranks, `own` belongs to this rank, and `trees` are the state dicts of tensors.
    """

    common: dict[str, Any]
    own: dict[str, Any]
    trees: dict[str, Tree]


def write(path: Path, saved: Saved, coordinator: Coordinator) -> None:
    """Write a checkpoint of all ranks. Collective; an error on one rank is raised on all.

    write(Path("run.ckpt"), Saved({"epoch": 1}, {}, {"network": net.state_dict()}), SingleProcess())
    """
    for problem in coordinator.gather(_unreadable(saved.own)):
        if problem is not None:
            raise CheckpointError(problem)
    differing = _different_from_rank_0(saved.trees, coordinator)
    own = coordinator.gather({"own": saved.own, "trees": differing})
    archive = {
        _MARK[0]: _MARK[1],
        "size": coordinator.size,
        "common": saved.common,
        "ranks": own,
        **saved.trees,
    }
    _on_rank_0(coordinator, lambda: archive_file.write(path, archive))


def read(path: Path, coordinator: Coordinator) -> Saved:
    """Read a checkpoint. Collective: only rank 0 reads the file.

    saved = read(Path("run.ckpt"), SingleProcess())
    """
    raw = _on_rank_0(coordinator, path.read_bytes)
    archive = archive_file.parse(path, raw, mark=_MARK, what="checkpoint of an engine")
    if archive["size"] != coordinator.size:
        raise CheckpointError(
            f"{path} was written by {archive['size']} rank(s) and cannot be resumed by {coordinator.size}, as each "
            "rank has its own position in the data. Start the job with as many, or load only the weights with "
            f"torch.load({str(path)!r})['network']."
        )
    mine = archive["ranks"][coordinator.rank]
    trees = {name: {**archive[name], **changed} for name, changed in mine["trees"].items()}
    return Saved(archive["common"], mine["own"], trees)


def _on_rank_0(coordinator: Coordinator, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result, or raise its failure, on all ranks."""
    outcome: tuple[T | None, str | None] = (None, None)
    if coordinator.rank == 0:
        try:
            outcome = (action(), None)
        except Exception as error:  # of any kind: the other ranks wait for the outcome
            outcome = (None, f"checkpoint, on rank 0: {type(error).__name__}: {error}")
    result: T
    result, failure = coordinator.broadcast(outcome)
    if failure is not None:
        raise CheckpointError(failure)
    return result


def _different_from_rank_0(trees: dict[str, Tree], coordinator: Coordinator) -> dict[str, Tree]:
    """Return the entries whose bits differ from those on rank 0."""
    if coordinator.size == 1:
        return {name: {} for name in trees}
    mine = {name: {key: digest(value) for key, value in tree.items()} for name, tree in trees.items()}
    reference = coordinator.broadcast(mine)
    return {
        name: {key: value for key, value in tree.items() if mine[name][key] != reference[name].get(key)}
        for name, tree in trees.items()
    }


def digest(value: Any) -> bytes:
    """Return a hash that is equal for equal bits, types and shapes, also of nested containers.

    >>> digest([torch.zeros(2), 1]) == digest([torch.zeros(2), 1.0])
    False
    """
    hasher = hashlib.blake2b(digest_size=16)
    _feed(hasher, value)
    return hasher.digest()


def _feed(hasher: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, Tensor):
        hasher.update(f"{value.dtype} {tuple(value.shape)}".encode())
        hasher.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
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


def _unreadable(own: dict[str, Any]) -> str | None:
    """Return an error message if some state could be saved but not read back."""
    for name, state in {"iterator": own.get("iterator"), **own.get("kept", {})}.items():
        buffer = io.BytesIO()
        try:
            torch.save(state, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:  # state_dict() may return objects that fail in any way
            return (
                f"state_dict() of {name!r} holds an object that a checkpoint cannot hold: only numbers, strings, "
                f"tensors and lists, tuples and dicts of them can be read back without running code ({error})"
            )
    return None
