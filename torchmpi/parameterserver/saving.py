"""Shards on disk: saved by each rank, loaded by as many or as few ranks as there are then.

A save is a file per rank and, written last, `servers.json`, which says what there is; until then the save before
stands. Files are those of ``torch.save`` and hold nothing but tensors and numbers.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..communicators.group import Group
from ..communicators.levels import Comm
from ..errors import CheckpointError
from ..session import runtime
from ..shared_memory.kernels.shard_layout import MOST_STATES, STEPS, VERSION
from ..tensors import archive
from ..tensors.dtypes import short_name
from ..tensors.partition import even_partition
from .servers import Server
from .service import Service, call_on_servers, service_of

_MARK = ("torchmpi_shards", 1)
_INDEX = "servers.json"
_KINDS = ("values", *(f"state {number}" for number in range(1, MOST_STATES + 1)))
T = TypeVar("T")


def save(folder: str | os.PathLike[str], comm: Comm = None) -> None:
    """Write the shards of all servers of a communicator into a folder that all ranks see. Collective.

    Everything that was sent before is in it; do not send while it runs.

        ps.save("run/servers")
    """
    group = runtime.communicator(comm).intra
    _collectively(group, "server_save", partial(_save, Path(folder), group))


def load(folder: str | os.PathLike[str], comm: Comm = None) -> None:
    """Read what `save` wrote into the servers that there are, also on another number of ranks. Collective.

    The servers must be those that were saved: as many, made in the same order, with the same shapes and dtypes. States
    of optimizers are restored too; where chunks are cut differently their step count is the largest of those they are
    made of.

        ps.load("run/servers")
    """
    group = runtime.communicator(comm).intra
    _collectively(group, "server_load", partial(_load, Path(folder), group))


def _collectively(group: Group, collective: str, action: Callable[[Service], None]) -> None:
    service = service_of(group)
    if service is None:
        raise CheckpointError(
            f"{group.where}: communicator {group.name} has no servers. Call parameterserver.init first."
        )
    call_on_servers(group, collective, "all servers", partial(_undisturbed, service, action))


def _undisturbed(service: Service, action: Callable[[Service], None]) -> None:
    service.call_queue.drain()
    with service.call_queue.run_lock:  # other threads of this rank wait until it is done
        service.comm.Barrier()  # nobody has anything under way
        try:
            action(service)
        finally:
            service.comm.Barrier()


def _agree(service: Service, action: Callable[[], T]) -> T:
    """Do something on each rank; if it fails on one, all raise."""
    problem, result = "", None
    try:
        result = action()
    except (OSError, CheckpointError, ValueError, KeyError) as error:
        problem = (
            f"{service.group.where}: {type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        )
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(service.comm.allgather(problem)) if text]
    if problems:
        raise CheckpointError(
            f"{service.group.where}: parameterserver checkpoint: {'; '.join(sorted(set(problems))[:4])}"
        )
    return result  # type: ignore[return-value]


def _servers(service: Service) -> list[Server]:
    return [server for _, server in sorted(service.servers.items()) if server.is_saved]


def _describe(service: Service) -> list[dict[str, Any]]:
    return [
        {"name": server.name, "shape": list(server.shape), "dtype": short_name(server.dtype)}
        for server in _servers(service)
    ]


# ---- saving


def _save(folder: Path, group: Group, service: Service) -> None:
    token = service.comm.bcast(secrets.token_hex(4))
    _agree(service, partial(_write_own, folder, token, service))
    _agree(service, partial(_write_index, folder, token, service) if group.rank == 0 else lambda: None)


def _file_name(token: str, rank: int) -> str:
    return f"shards-{token}-{rank}.pt"


def _write_own(folder: Path, token: str, service: Service) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    index = service.near_ranks.index(service.group.rank)
    content: dict[str, Any] = {_MARK[0]: _MARK[1]}
    for place, server in enumerate(_servers(service)):
        headers = server.shards.headers(index)
        # States that no rule has written to are left where they are: nowhere.
        arrays = 1 + (MOST_STATES if headers[:, STEPS].any() else 0)
        content[str(place)] = {
            "versions": headers[:, VERSION].clone(),
            "steps": headers[:, STEPS].clone(),
            **{_KINDS[array]: server.shards.array(index, array).clone() for array in range(arrays)},
        }
    archive.write(folder / _file_name(token, service.group.rank), content)


def _write_index(folder: Path, token: str, service: Service) -> None:
    index = {_MARK[0]: _MARK[1], "token": token, "size": service.group.size, "servers": _describe(service)}
    temporary = folder / f".{_INDEX}.tmp"
    temporary.write_text(json.dumps(index, indent=1))
    os.replace(temporary, folder / _INDEX)
    for old in folder.glob("shards-*.pt"):
        if not old.name.startswith(f"shards-{token}-"):
            old.unlink(missing_ok=True)


# ---- loading


def _load(folder: Path, group: Group, service: Service) -> None:
    index = _agree(service, partial(_read_index, folder, service))
    parts = _agree(service, partial(_read_parts, folder, index, service))
    mine = service.near_ranks.index(group.rank)
    for server, pieces in zip(_servers(service), parts, strict=True):
        _fill(server, mine, pieces)


def _read_index(folder: Path, service: Service) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((folder / _INDEX).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"there is no {folder / _INDEX}: nothing was saved there, or not to the end") from None
    except ValueError as error:
        raise CheckpointError(f"{folder / _INDEX} is damaged: {error}") from None
    if index.get(_MARK[0]) != _MARK[1]:
        raise CheckpointError(f"{folder / _INDEX} is not of this version of torchmpi (format {_MARK[1]})")
    own = _describe(service)
    # Names that were not given are numbers, which a program that made and freed others before would not meet again.
    saved, there = ([(item["shape"], item["dtype"]) for item in items] for items in (index["servers"], own))
    if saved != there:
        raise CheckpointError(
            f"{folder} holds {len(saved)} servers {saved[:4]}, but there are {len(there)} {there[:4]}. "
            "Make the same ones, in the same order, before loading"
        )
    return index


def _read_parts(folder: Path, index: dict[str, Any], service: Service) -> list[list[tuple[int, dict[str, Any]]]]:
    """Of each server what overlaps with this rank's shard: the first element, and arrays."""
    servers = _servers(service)
    found: list[list[tuple[int, dict[str, Any]]]] = [[] for _ in servers]
    old_parts = [even_partition(server.numel, index["size"]) for server in servers]
    for rank in range(index["size"]):
        wanted = [
            place
            for place, server in enumerate(servers)
            if _overlap(old_parts[place][rank], server.parts[service.group.rank])
        ]
        if wanted:
            path = folder / _file_name(index["token"], rank)
            content = archive.parse(path, path.read_bytes(), mark=_MARK, what="file of shards")
            for place in wanted:
                found[place].append((old_parts[place][rank][0], content[str(place)]))
    return found


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return max(first[0], second[0]) < min(sum(first), sum(second))


def _fill(server: Server, mine: int, pieces: list[tuple[int, dict[str, Any]]]) -> None:
    headers = server.shards.headers(mine)
    own_begin, own_numel = server.parts[server.group.rank]
    if headers[:, STEPS].any() or any(_KINDS[1] in saved for _, saved in pieces):
        for array in range(1, 1 + MOST_STATES):
            server.shards.array(mine, array).zero_()
    headers[:, VERSION:] = 0
    for begin, saved in pieces:
        numel = saved["values"].numel()
        first, last = max(begin, own_begin), min(begin + numel, own_begin + own_numel)
        for array, kind in enumerate(_KINDS):
            if kind in saved:
                target = server.shards.array(mine, array)[first - own_begin : last - own_begin]
                target.copy_(saved[kind][first - begin : last - begin])
        for old, new in _common_chunks(server.shards.chunk_numel, (begin, own_begin), (first, last)):
            headers[new, VERSION] = max(int(headers[new, VERSION]), int(saved["versions"][old]))
            headers[new, STEPS] = max(int(headers[new, STEPS]), int(saved["steps"][old]))


def _common_chunks(chunk: int, begins: tuple[int, int], span: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Numbers of the chunks of two shards, beginning at `begins`, that share an element in `span`.

    >>> list(_common_chunks(10, (0, 15), (15, 40)))
    [(1, 0), (2, 0), (2, 1), (3, 1), (3, 2)]
    """
    element = span[0]
    while element < span[1]:
        old, new = ((element - begin) // chunk for begin in begins)
        yield old, new
        element = min((old + 1) * chunk + begins[0], (new + 1) * chunk + begins[1])


__all__ = ["load", "save"]
