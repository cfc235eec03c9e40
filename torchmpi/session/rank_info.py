"""The information that the ranks exchange when torchmpi starts, and the conditions that it must meet."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .. import files
from .._version import __version__
from ..config import Config
from ..config import shared_settings as settings_of
from ..errors import ConfigError
from ..shared_memory import process_vm


class RankPlace(NamedTuple):
    """Keys that are equal on ranks which share something."""

    host: str
    """The host under its name, which also its containers may have: numbers the local ranks."""
    memory: str
    """Processes that can open each other's memory."""
    machine: str
    """The cores, also of containers under different names."""
    is_unique: bool = True
    """Whether the keys distinguish hosts of the same name."""


class RankInfo(NamedTuple):
    """The information that each rank contributes at start."""

    place: RankPlace
    cores: frozenset[int]
    settings: dict[str, object]
    has_cuda: bool
    process: process_vm.Probe
    has_rdma: bool
    """Whether the host has a device for a network such as InfiniBand."""


def has_rdma() -> bool:
    """Return whether this host has a device through which an MPI library may send without TCP."""
    for kind in ("infiniband", "cxi"):  # also RoCE, Omni-Path and EFA; Slingshot
        with suppress(OSError):
            if any(Path("/sys/class", kind).iterdir()):
                return True
    return False


def place_of(config: Config, first: int | None = None) -> RankPlace:
    """Return the keys of this rank; host names alone are not unique.

    `first`: the first of the ranks that share memory according to the MPI library, where Linux has no boot identifier.
    It is not used elsewhere: Debian's MPICH 5.0 reports each rank as alone, and a library in a container may do so.
    """
    if config.host_name:
        return RankPlace(config.host_name, config.host_name, config.host_name)
    boot = files.text_of("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot or first}"
    try:
        # Shared memory is opened through /proc, which shows only the processes of the own namespace.
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        processes = ""
    return RankPlace(host, f"{host} {processes}", boot or host, bool(boot) or first is not None)


def shared_settings(config: Config, **arguments: object) -> dict[str, object]:
    """Return the settings and arguments of `start()` that must be the same on all ranks."""
    return settings_of(config) | arguments | {"version": __version__}


def check_settings(settings: list[dict[str, object]]) -> None:
    """Raise if ranks were started with different settings, given those of each rank."""
    for rank, other in enumerate(settings):
        for name, value in settings[0].items():
            if other[name] != value:
                raise ConfigError(
                    f"The ranks were started with different settings: {name} is {value!r} on rank 0 and "
                    f"{other[name]!r} on rank {rank}. Use one value on all ranks (mpirun -x, or start(config=...))."
                )
