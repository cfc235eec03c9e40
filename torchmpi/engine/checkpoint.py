"""Checkpoint files: one file for all ranks, written whole or not at all, and checked when read.

What is equal on all ranks (parameters, optimizer state) is stored once, as rank 0 has it. What differs is
stored for each rank: random numbers, meters, the place in the data, and whatever tensors are not replicas,
such as the running statistics of batch norm or the parts of a model-parallel layer. The file is an ordinary
``torch.save`` archive of plain values, so that reading it cannot run code: ``torch.load(path)["network"]``
gives the weights.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from torchmpi.errors import CheckpointError
from torchmpi.tensors import archive as archive_file

from .ranks import Ranks

_MARK = ("torchmpi_checkpoint", 1)
T = TypeVar("T")
Tree = dict[Hashable, Any]


class Stateful(Protocol):
    """An object whose state goes into checkpoints."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class Saved:
    """A checkpoint as one rank sees it: `common` to all, `own` of this one, and the `trees` of tensors."""

    common: dict[str, Any]
    own: dict[str, Any]
    trees: dict[str, Tree]


def write(path: Path, saved: Saved, ranks: Ranks) -> None:
    """Write a checkpoint from what each rank has. Collective; fails on all ranks alike.

    write(Path("run.ckpt"), Saved(common={"epoch": 1}, own={}, trees={"network": net.state_dict()}),
    OneRank())
    """
    for problem in ranks.gather(_problem_of_reading_back(saved.own)):
        if problem is not None:
            raise CheckpointError(problem)
    unlike = _unlike_rank_0(saved.trees, ranks)
    own = ranks.gather({"own": saved.own, "trees": unlike})
    archive = {
        _MARK[0]: _MARK[1],
        "size": ranks.size,
        "common": saved.common,
        "ranks": own,
        **saved.trees,
    }
    _on_rank_0(ranks, lambda: archive_file.write(path, archive))


def read(path: Path, ranks: Ranks) -> Saved:
    """Read a checkpoint. Collective: rank 0 reads the file, so that only it needs to see it.

    saved = read(Path("run.ckpt"), OneRank())
    """
    raw = _on_rank_0(ranks, path.read_bytes)
    archive = archive_file.parse(path, raw, mark=_MARK, what="checkpoint of an engine")
    if archive["size"] != ranks.size:
        raise CheckpointError(
            f"{path} was written by {archive['size']} rank(s) and cannot be resumed by {ranks.size}, as each "
            "rank has its own place in the data. Start the job with as many, or load only the weights with "
            f"torch.load({str(path)!r})['network']."
        )
    mine = archive["ranks"][ranks.rank]
    trees = {name: {**archive[name], **changed} for name, changed in mine["trees"].items()}
    return Saved(archive["common"], mine["own"], trees)


def _on_rank_0(ranks: Ranks, action: Callable[[], T]) -> T:
    """Act on rank 0 and give the result, or the failure, to all ranks."""
    outcome: tuple[T | None, str | None] = (None, None)
    if ranks.rank == 0:
        try:
            outcome = (action(), None)
        except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
            outcome = (None, f"checkpoint, on rank 0: {type(error).__name__}: {error}")
    result, failure = ranks.broadcast(outcome)
    if failure is not None:
        raise CheckpointError(failure)
    return result  # type: ignore[no-any-return]


def _unlike_rank_0(trees: dict[str, Tree], ranks: Ranks) -> dict[str, Tree]:
    """The entries whose bits differ from those on rank 0."""
    if ranks.size == 1:
        return {name: {} for name in trees}
    mine = {name: {key: digest(value) for key, value in tree.items()} for name, tree in trees.items()}
    reference = ranks.broadcast(mine)
    return {
        name: {key: value for key, value in tree.items() if mine[name][key] != reference[name].get(key)}
        for name, tree in trees.items()
    }


def digest(value: Any) -> bytes:
    """Equal for equal bits, types and shapes, in nested containers too.

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


def _problem_of_reading_back(own: dict[str, Any]) -> str | None:
    for name, state in {"iterator": own.get("iterator"), **own.get("kept", {})}.items():
        buffer = io.BytesIO()
        try:
            torch.save(state, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:  # what state_dict() gave may fail in any way
            return (
                f"state_dict() of {name!r} holds something a checkpoint cannot: only numbers, strings, "
                f"tensors and lists, tuples and dicts of them can be read back without running code ({error})"
            )
    return None
