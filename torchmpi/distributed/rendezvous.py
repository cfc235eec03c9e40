"""Rendezvous of torch's ranks through MPI, without an address or port from the user.

torch needs a key-value store that all ranks can connect to. Rank 0 opens one and broadcasts its address by MPI. The
store listens on the loopback interface if all ranks are on one host, otherwise on one address that all hosts can reach.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from ipaddress import ip_interface
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlparse

import torch.distributed as dist

from ..errors import ArgumentError, LaunchError
from ..launch import launcher, mpi_library, network, tcp_store
from ..launch.start_watch import StartWatch
from ..session import recovery
from . import torch_names

_CONNECT_SECONDS = 3.0
_DEFAULT_TIMEOUT = timedelta(minutes=5)

Rendezvous = Iterator[tuple[torch_names.Store, int, int]]


def through_mpi(url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **_: Any) -> Rendezvous:
    """Handle ``mpi://``: rank and size are those of MPI's world."""
    if dist.is_torchelastic_launched() and not recovery.has_recovered():
        raise LaunchError(
            "init_method='mpi://' is for processes that an MPI launcher started; torchrun started these, and MPI would "
            "take each for a job of its own. Leave init_method out, or start with mpirun."
        )
    with StartWatch():
        MPI = mpi_library.initialize()
    world = MPI.COMM_WORLD
    _check_numbers(url, world.rank, world.size)
    yield _open_store(world, timeout), world.rank, world.size


def through_environment(
    original: Callable[..., Rendezvous], url: str, *, has_address: bool = True, **options: Any
) -> Rendezvous:
    """Handle ``env://``: as torch does if everything that it needs is given, otherwise through MPI under its launcher.

    Without any of the two, a process is alone. ``rank=0, world_size=0``, as in torch's tutorial for MPI, counts as not
    given; then MASTER_ADDR and MASTER_PORT, which that tutorial sets, do not count without RANK and WORLD_SIZE. Without
    `has_address`, an address does not count if the ranks are those of MPI.
    """
    if recovery.has_recovered():
        return through_mpi(url, **options)
    numbers = _numbers(url)
    given = {name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if os.environ.get(name)}
    if numbers.get("world_size") == 0:
        numbers, others = {}, [item for item in parse_qsl(urlparse(url).query) if item[0] not in numbers]
        url = f"env://?{urlencode(others)}"
        if not given & {"RANK", "WORLD_SIZE"}:
            given = set()
    given |= {name.upper() for name in numbers}
    found = launcher.detect()
    if launcher.is_started_by_run() or (len(given) < 4 and found.name is not None):
        return through_mpi(url, **options)
    if not has_address and found.has_mpi_interface and _chosen_numbers(numbers) == (found.rank, found.num_ranks):
        return through_mpi(url, **options)
    if not given - {"MASTER_PORT"}:
        return iter([(torch_names.HashStore(), 0, 1)])
    return original(url, **options)


def _numbers(url: str) -> dict[str, int]:
    """Return ``rank`` and ``world_size``, which init_process_group puts into the URL if they were passed."""
    return {name: int(value) for name, value in parse_qsl(urlparse(url).query) if name in ("rank", "world_size")}


def _chosen_numbers(numbers: dict[str, int]) -> tuple[int, int]:
    """Return rank and size, of the arguments or else of the environment, where both are given."""
    rank, size = (numbers.get(name, int(os.environ.get(name.upper()) or -1)) for name in ("rank", "world_size"))
    return rank, size


def _check_numbers(url: str, rank: int, size: int) -> None:
    """Raise if the arguments contradict MPI. ``rank=0, world_size=0`` is how torch's tutorial calls it under MPI."""
    given = _numbers(url)
    if given.get("world_size") == 0:
        return
    if given.get("rank", rank) not in (rank, -1) or given.get("world_size", size) not in (size, -1):
        raise ArgumentError(
            f"init_process_group was passed rank={given.get('rank')}, world_size={given.get('world_size')}, but MPI "
            f"started this process as rank {rank} of {size}. Leave both out, or set MASTER_ADDR and MASTER_PORT too."
        )


def _open_store(world: Any, timeout: timedelta) -> torch_names.Store:
    """Open torch's store on rank 0 and connect to it. Collective over MPI's world."""
    if world.size == 1:
        return torch_names.HashStore()
    hosts = world.allgather(network.namespace())
    if world.rank == 0:
        own = [network.loopback()] if len(set(hosts)) == 1 else _own_addresses()
        listeners = {address: listener for address in own if (listener := _listen(address)) is not None}
        offers = [(address, listener.getsockname()[1]) for address, listener in listeners.items()]
    offers = world.bcast(offers if world.rank == 0 else None)
    reached = [offer for offer in offers if world.rank == 0 or len(set(hosts)) == 1 or _reaches(*offer)]
    common = [offer for offer in offers if all(offer in answer for answer in world.allgather(reached))]
    if not common:
        raise LaunchError(
            f"rank {world.rank}: no address of rank 0's host can be reached by all ranks for torch's store: "
            f"{', '.join(address for address, _ in offers) or 'it has none'}. Choose the network interface "
            f"with {network.INTERFACE_VARIABLE}, or set MASTER_ADDR and MASTER_PORT, "
            "and RANK and WORLD_SIZE, to use one of your own."
        )
    address, port = common[0]
    if world.rank == 0:
        for other in listeners.keys() - {address}:
            listeners[other].close()
        own_end = listeners[address].detach()
        store = tcp_store.open_tcp_store(address, port, world.size, True, timeout, master_listen_fd=own_end)
    else:
        store = tcp_store.open_tcp_store(address, port, world.size, False, timeout)
    world.Barrier()  # if rank 0 failed before the others are connected, they would try until their timeout
    return store


def _own_addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this one: of the chosen interfaces, or of all; IPv4 first."""
    wanted = network.wanted_interfaces()
    found = sorted(map(ip_interface, network.own_interfaces(wanted)), key=lambda each: each.version)
    return [str(each.ip) for each in found if not each.is_link_local and (wanted or not each.is_loopback)]


def _listen(address: str) -> socket.socket | None:
    try:
        return socket.create_server((address, 0), family=network.family(address), backlog=2048)
    except OSError:
        return None


def _reaches(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
