"""Which GPU each rank has, and whose memory it can open: gathered once at start, so that nobody need ask later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import topology


class Device(NamedTuple):
    """The device of one rank, as the others need to know it."""

    host: int
    """The number of the rank's host."""
    uuid: str = ""
    """Of the GPU; empty: the rank computes on the CPU."""
    reaches: frozenset[str] = frozenset()
    """Of the GPUs that this rank sees and whose memory its own can read, itself included. What a scheduler hides from
    a process, the process cannot open."""


class Devices(tuple[Device, ...]):
    """The devices of all ranks of the world, by world rank.

    >>> two = Devices([Device(0, "GPU-a", frozenset({"GPU-a"})), Device(0, "GPU-a", frozenset({"GPU-a"}))])
    >>> two.first_sharing([0, 1]), two.reaches(0, 1)
    ((0, 1), True)
    """

    @classmethod
    def gather(cls, world: Any, hosts: Sequence[int], device: torch.device, *, has_cuda: bool) -> Devices:
        """Of all ranks, from what each says of its own `device`. Collective, if any rank `has_cuda`: ask nobody else.

        `hosts` has the number of each rank's host; `has_cuda` must be the same on all ranks.
        """
        if not has_cuda:
            return cls(map(Device, hosts))
        own = Device(hosts[world.rank])
        if device.type == "cuda":
            access = peer_access()
            index = device.index or 0
            reaches = frozenset(uuid_of(i) for i, can in enumerate(access[index]) if can)
            own = Device(own.host, uuid_of(index), reaches)
        return cls(world.allgather(own))

    @property
    def hosts(self) -> tuple[int, ...]:
        """The number of the host of each rank."""
        return tuple(device.host for device in self)

    @property
    def uuids(self) -> tuple[str, ...]:
        """The GPU of each rank, '' without one."""
        return tuple(device.uuid for device in self)

    @property
    def num_hosts(self) -> int:
        """Hosts of the job."""
        return len(set(self.hosts))

    def reaches(self, rank: int, other: int) -> bool:
        """Whether a rank can open memory on the GPU of another one.

        >>> Devices([Device(0, "a", frozenset("a")), Device(1, "a", frozenset("a"))]).reaches(0, 1)
        False
        """
        return self[rank].host == self[other].host and self[other].uuid in self[rank].reaches

    def first_sharing(self, ranks: Sequence[int]) -> tuple[int, int] | None:
        """The first two of these ranks that have one GPU."""
        seen: dict[tuple[int, str], int] = {}
        for rank in ranks:
            known = seen.setdefault((self[rank].host, self[rank].uuid), rank)
            if known != rank:
                return known, rank
        return None


def uuid_of(index: int) -> str:
    """What identifies a GPU that this process sees, wherever it is seen from."""
    return str(torch.cuda.get_device_properties(index).uuid)


def index_of(uuid: str) -> int:
    """The number that this process has for a GPU that it sees."""
    return next(index for index in range(torch.cuda.device_count()) if uuid_of(index) == uuid)


def peer_access() -> list[list[bool]]:
    """Whether GPU i, of those that this process sees, can read the memory of GPU j."""
    count = torch.cuda.device_count()
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]


def ipc_key(device: torch.device) -> str:
    """The same for ranks whose GPUs all reach each other."""
    numbers = topology.ipc_groups(peer_access())
    own = numbers[device.index or 0]
    return " ".join(uuid_of(index) for index, number in enumerate(numbers) if number == own)
