"""Checkpoints of parameter servers: saved by each rank, loaded by the same or another number of ranks.

A checkpoint consists of a file per rank and, written last, `servers.json` with their description; until then the
previous checkpoint remains valid. The files are those of ``torch.save`` and contain only tensors, numbers, and the
token of the save and the rank, by which a file that was exchanged for another one of the same length is recognized.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import files
from ..argument_types import checks_types
from ..communicators.levels import Comm
from ..errors import CheckpointError
from ..session import runtime
from ..tensors import archive
from ..tensors.dtypes import short_name
from ..tensors.partition import part_of
from .kernels.shard_layout import MOST_STATES, Header
from .servers import Server, ServerContext, call_collectively

__all__ = ["load", "save"]

_FORMAT = ("torchmpi_shards", 3)
_INDEX = "servers.json"
_MOST_RANKS = 1 << 20
_LOCK_SECONDS = 60
_MOST_MORE_BYTES = 1 << 20
"""Of a file of shards beside its values: names and headers."""
_MOST_BYTES_OF_VALUE = 16
_ARRAYS = ("values", *(f"state {number}" for number in range(1, MOST_STATES + 1)))
_Saved = tuple[int, dict[str, Any]]
"""First element of a saved shard, and the content of its file for one server."""
T = TypeVar("T")


@checks_types
def save(folder: str | os.PathLike[str], comm: Comm = None) -> None:
    """Write the shards of all servers of a communicator. Collective.

    Everything that was sent before is included. No rank may send while `save` runs.

    Args:
        folder: A folder that all ranks can access; created if needed. An old checkpoint is replaced when the new one
            is complete. Each group of a level needs a folder of its own.
        comm: Communicator, or its level. Default: the current communicator.

    Raises:
        CheckpointError: The communicator has no servers, a rank failed to write, or other ranks of this job have saved
            to the folder; raised on all ranks.

    Example:
        ps.save("run/servers")
    """
    _collectively("server_save", partial(_save, Path(folder)), comm)


@checks_types
def load(folder: str | os.PathLike[str], comm: Comm = None) -> None:
    """Load the shards of :func:`save` into the existing servers, possibly with another number of ranks. Collective.

    The servers must correspond to the saved ones: the same number, created in the same order, with the same shapes and
    dtypes. States of optimizers are restored. Where shards are divided into chunks differently, a chunk gets the
    largest of the step counts of the saved chunks that overlap with it.

    Args:
        folder: The folder that was passed to :func:`save`.
        comm: Communicator, or its level. Default: the current communicator.

    Raises:
        CheckpointError: There is no complete checkpoint, or it does not match the servers; raised on all ranks.

    Example:
        ps.load("run/servers")
    """
    _collectively("server_load", partial(_load, Path(folder)), comm)


def _collectively(collective: str, action: Callable[[ServerContext], None], comm: Comm) -> None:
    group = runtime.communicator(comm).intra
    context = ServerContext.of(group)
    if context is None:
        raise CheckpointError(
            f"{group.where}: communicator {group.name} has no servers. Call parameterserver.init first."
        )
    call_collectively(group, collective, "all servers", partial(_exclusively, context, action))


def _exclusively(context: ServerContext, action: Callable[[ServerContext], None]) -> None:
    with context.quiet():  # other threads of this rank wait
        context.comm.Barrier()  # no rank has a call in progress
        action(context)
        context.comm.Barrier()


def _together(context: ServerContext, action: Callable[[], T]) -> T:
    """Run `action`; if it fails on any rank, raise on all."""
    try:
        result, problem = action(), ""
    except Exception as error:  # of any kind: the other ranks wait
        problem = str(error) if isinstance(error, OSError | CheckpointError) else repr(error)
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(context.comm.allgather(problem)) if text]
    if problems:
        raise CheckpointError(
            f"{context.group.where}: parameterserver checkpoint: {'; '.join(sorted(set(problems))[:4])}"
        )
    return result


def _servers(context: ServerContext) -> list[Server]:
    return [server for server in context.servers.values() if server.is_saved]


def _describe(context: ServerContext) -> list[dict[str, Any]]:
    return [
        {
            "name": server.name, "shape": list(server.shape), "dtype": short_name(server.dtype),
            "shards": len(server.parts),
        }
        for server in _servers(context)
    ]  # fmt: skip


# ---- saving


def _save(folder: Path, context: ServerContext) -> None:
    token = context.comm.bcast(secrets.token_hex(4))
    _together(context, partial(_check_owner, folder, context))
    try:
        _together(context, partial(_write_shards, folder, token, context))
    except CheckpointError:
        for number in _own_files(context):
            (folder / _file_name(token, number)).unlink(missing_ok=True)
        _together(context, partial(_check_owner, folder, context))  # a group that has saved meanwhile removes files
        raise
    _together(context, partial(_write_index, folder, token, context))


def _file_name(token: str, number: int) -> str:
    return f"shards-{token}-{number}.pt"


def _num_files(context: ServerContext) -> int:
    """Return the largest number of shards of a server: more than ranks after a loss."""
    return max((len(server.parts) for server in _servers(context)), default=context.group.size)


def _own_files(context: ServerContext) -> list[int]:
    """Return the numbers of the files that this rank writes, each with the shards of that number of all servers."""
    servers = _servers(context)
    holders = [
        next((server.holders[number] for server in servers if number < len(server.parts)), number)
        for number in range(_num_files(context))
    ]
    return [number for number, rank in enumerate(holders) if rank == context.group.rank]


def _check_owner(folder: Path, context: ServerContext) -> None:
    """Raise on the first rank if other ranks of this job have saved to the folder."""
    if context.group.rank != 0:
        return
    try:
        index = files.parse_json(files.read(folder / _INDEX, files.MOST_JSON_BYTES))
        job, ranks = index["job"], index["ranks"]
    except (OSError, ValueError, LookupError, TypeError):  # none, a damaged one, or of another version
        return
    own = list(context.group.world_ranks)
    if job == context.group.context.job and ranks != own:
        raise CheckpointError(
            f"{folder} has the servers of ranks {ranks} of this job, which those of ranks {own} would replace. Use one "
            "folder per group"
        )


def _write_shards(folder: Path, token: str, context: ServerContext) -> None:
    files.make_folder(folder)
    for shard in _own_files(context):
        archive.write(folder / _file_name(token, shard), _content(token, shard, context))


def _content(token: str, shard: int, context: ServerContext) -> dict[str, Any]:
    content: dict[str, Any] = dict([_FORMAT]) | {"token": token, "rank": shard}
    for number, server in enumerate(_servers(context)):
        if shard >= len(server.parts) or not server.parts[shard][1]:
            continue
        if shard not in server.local_shards:
            raise CheckpointError(
                f"the shards {shard} of {server.name} and of an earlier server are on different hosts, as a rank was "
                "lost before one of them was made. Free one of them, or set its is_saved to False"
            )
        index = server.index_of(shard)
        headers = server.shards.headers(index)
        # Reading states that no rule has written to would allocate their memory.
        arrays = _ARRAYS if _has_states(headers) else _ARRAYS[:1]
        content[str(number)] = {
            "versions": headers[:, Header.version].clone(),
            "steps": headers[:, Header.steps].clone(),
            "row_steps": headers[:, Header.row_steps].clone(),
            **{name: server.shards.array(index, array).clone() for array, name in enumerate(arrays)},
        }
    return content


def _has_states(headers: torch.Tensor) -> bool:
    """Return whether a rule with states has been applied to a shard, to all of it or to rows."""
    return bool(headers[:, [Header.steps, Header.row_steps]].any())


def _write_index(folder: Path, token: str, context: ServerContext) -> None:
    if context.group.rank != 0:
        return
    group = context.group
    index = dict([_FORMAT]) | {"token": token, "size": _num_files(context), "servers": _describe(context)}
    index |= {"job": group.context.job, "ranks": list(group.world_ranks)}
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks, or a file of another user
            lock = stack.enter_context(files.open_lock(folder / f".{_INDEX}.lock"))
            files.lock(lock, fcntl.LOCK_EX, _LOCK_SECONDS)
        _check_owner(folder, context)  # again: the groups of a level may save at the same time
        files.write(folder / _INDEX, json.dumps(index, indent=1))
        for old in folder.glob("shards-*.pt"):
            if not old.name.startswith(f"shards-{token}-"):
                old.unlink(missing_ok=True)
        files.remove_unfinished(folder, "shards-")


# ---- loading


def _load(folder: Path, context: ServerContext) -> None:
    index = _together(context, partial(_read_index, folder, context))
    saved = _together(context, partial(_read_shards, folder, index, context))
    for server, parts in zip(_servers(context), saved, strict=True):
        for shard in server.own_shards:
            _fill(server, shard, parts)


def _read_index(folder: Path, context: ServerContext) -> dict[str, Any]:
    try:
        index: dict[str, Any] = files.parse_json(files.read(folder / _INDEX, files.MOST_JSON_BYTES))
    except FileNotFoundError:
        raise CheckpointError(f"there is no {folder / _INDEX}: no save to this folder was completed") from None
    except OSError as error:
        raise CheckpointError(f"{folder / _INDEX} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{folder / _INDEX} is damaged: {error}") from None
    if not isinstance(index, dict) or index.get(_FORMAT[0]) != _FORMAT[1]:
        raise CheckpointError(f"{folder / _INDEX} does not have format {_FORMAT[1]}, that of this version of torchmpi")
    if not _is_plausible(index):
        raise CheckpointError(f"{folder / _INDEX} is damaged: its token, size or list of servers is invalid")
    # Names are not compared: default names contain numbers, which depend on the servers that were made before.
    saved, own = (
        [(item["shape"], item["dtype"]) for item in items] for items in (index["servers"], _describe(context))
    )
    if saved != own:
        raise CheckpointError(
            f"{folder} holds {len(saved)} servers {saved[:4]}, but there are {len(own)} {own[:4]}. "
            "Create the same servers, in the same order, before loading"
        )
    return index


def _is_plausible(index: dict[str, Any]) -> bool:
    """Return whether an index has the types that `_write_index` writes, and names files inside the folder."""
    token, size, servers = (index.get(name) for name in ("token", "size", "servers"))
    return (
        isinstance(token, str)
        and re.fullmatch("[0-9a-f]+", token) is not None
        and type(size) is int
        and 0 < size <= _MOST_RANKS
        and isinstance(servers, list)
        and all(isinstance(item, dict) and {"shape", "dtype"} <= item.keys() for item in servers)
        and all(type(number := item.get("shards", size)) is int and 0 < number <= size for item in servers)
    )


def _check_shard(path: Path, saved: Any, numel: int, server: Server) -> None:
    """Raise unless a saved shard of `server` has tensors of the right types and lengths."""
    num_chunks = -(-numel // server.shards.chunk_numel)
    tensors: dict[str, Any] = saved if isinstance(saved, dict) else {}
    arrays: list[Any] = [tensors.get(name) for name in _ARRAYS if name == "values" or name in tensors]
    counts: list[Any] = [tensors.get(name) for name in ("versions", "steps", "row_steps")]
    if not (
        all(isinstance(each, torch.Tensor) and each.shape == (numel,) for each in arrays)
        and all(isinstance(each, torch.Tensor) and each.dtype == torch.int64 for each in counts)
        and all(each.shape == (num_chunks,) for each in counts)
        and arrays[0].dtype == server.dtype
    ):
        raise CheckpointError(
            f"{path} is damaged: it does not have {numel} values of {server.dtype} with the versions of {num_chunks} "
            "chunks"
        )


def _read_shards(folder: Path, index: dict[str, Any], context: ServerContext) -> list[list[_Saved]]:
    servers = _servers(context)
    found: list[list[_Saved]] = [[] for _ in servers]
    described = list(zip(servers, index["servers"], strict=True))
    for rank in range(index["size"]):
        old_parts = [_old_part(server, item, index["size"], rank) for server, item in described]
        wanted = [
            number
            for number, server in enumerate(servers)
            if any(_overlap(old_parts[number], server.parts[shard]) for shard in server.own_shards)
        ]
        if wanted:
            path = folder / _file_name(index["token"], rank)
            try:
                packed = files.read(path, _most_bytes([numel for _, numel in old_parts]))
            except OSError as error:
                raise CheckpointError(f"{path}, which the index names, cannot be read: {error.strerror}") from error
            content = archive.parse(path, packed, mark=_FORMAT, what="file of shards")
            if (content.get("token"), content.get("rank")) != (index["token"], rank):
                raise CheckpointError(f"{path} is the file of another save or rank, under a name that is not its own")
            for number in wanted:
                part = old_parts[number]
                _check_shard(path, content.get(str(number)), part[1], servers[number])
                found[number].append((part[0], content[str(number)]))
    return found


def _old_part(server: Server, item: dict[str, Any], num_files: int, shard: int) -> tuple[int, int]:
    """Return first element and length of a saved shard; 0 and 0 if the server had not so many."""
    num_shards: int = item.get("shards", num_files)
    return part_of(server.numel, num_shards, shard) if shard < num_shards else (0, 0)


def _most_bytes(lengths: list[int]) -> int:
    """Return the most bytes of a file with shards of these lengths: versions and steps take less than the values."""
    return sum(_MOST_MORE_BYTES + numel * (len(_ARRAYS) + 3) * _MOST_BYTES_OF_VALUE for numel in lengths)


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return max(first[0], second[0]) < min(sum(first), sum(second))


def _fill(server: Server, shard: int, parts: list[_Saved]) -> None:
    own = server.index_of(shard)
    headers = server.shards.headers(own)
    own_begin, own_numel = server.parts[shard]
    if _has_states(headers) or any(_ARRAYS[1] in saved for _, saved in parts):
        for array in range(1, len(_ARRAYS)):
            server.shards.array(own, array).zero_()
    headers[:, Header.version :] = 0
    for begin, saved in parts:
        first, last = max(begin, own_begin), min(begin + saved["values"].numel(), own_begin + own_numel)
        for array, name in enumerate(_ARRAYS):
            if name in saved:
                target = server.shards.array(own, array)[first - own_begin : last - own_begin]
                target.copy_(saved[name][first - begin : last - begin])
        for old, new in _common_chunks(server.shards.chunk_numel, (begin, own_begin), (first, last)):
            headers[new, Header.version] = max(int(headers[new, Header.version]), int(saved["versions"][old]))
            headers[new, Header.steps] = max(int(headers[new, Header.steps]), int(saved["steps"][old]))
        if len(headers) and len(saved["row_steps"]):  # each shard has counted them
            steps = int(saved["row_steps"][0])
            headers[0, Header.row_steps] = max(int(headers[0, Header.row_steps]), steps)


def _common_chunks(chunk: int, begins: tuple[int, int], span: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of the chunks of two shards, which begin at `begins`, that share an element of `span`.

    >>> list(_common_chunks(10, (0, 15), (15, 40)))
    [(1, 0), (2, 0), (2, 1), (3, 1), (3, 2)]
    """
    element = span[0]
    while element < span[1]:
        old, new = ((element - begin) // chunk for begin in begins)
        yield old, new
        element = min((old + 1) * chunk + begins[0], (new + 1) * chunk + begins[1])
