"""The GPU of each rank, and the GPUs whose memory that rank can open: gathered once at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError


class RankDevice(NamedTuple):
    """The device of one rank, as other ranks see it."""

    host: int
    """Number of the rank's host."""
    uuid: str = ""
    """UUID of the GPU; empty if the rank computes on the CPU."""
    reaches: frozenset[str] = frozenset()
    """UUIDs of the visible GPUs whose memory the rank's own GPU can read, itself included. A process cannot open the
    memory of a GPU that a scheduler hides from it."""


class Devices(tuple[RankDevice, ...]):
    """The devices of all ranks of the world, by world rank.

    >>> two = Devices([RankDevice(0, "GPU-a", frozenset({"GPU-a"})), RankDevice(0, "GPU-a", frozenset({"GPU-a"}))])
    >>> two.first_sharing([0, 1]), two.reaches(0, 1)
    ((0, 1), True)
    """

    @classmethod
    def gather(cls, world: Any, hosts: Sequence[int], device: torch.device, *, has_cuda: bool) -> Devices:
        """Gather the devices of all ranks. Collective if `has_cuda`, which must be the same on all ranks.

        `world` is an MPI communicator, `hosts` has the number of each rank's host, `device` is this rank's device.
        """
        if not has_cuda:
            return cls(map(RankDevice, hosts))
        own = RankDevice(hosts[world.rank])
        if device.type == "cuda":
            access = peer_access()
            index = device.index or 0
            reaches = frozenset(uuid_of(i) for i, can in enumerate(access[index]) if can)
            own = RankDevice(own.host, uuid_of(index), reaches)
        return cls(world.allgather(own))

    @property
    def hosts(self) -> tuple[int, ...]:
        """Number of the host of each rank."""
        return tuple(device.host for device in self)

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUID of the GPU of each rank, '' without one."""
        return tuple(device.uuid for device in self)

    @property
    def num_hosts(self) -> int:
        """Number of hosts of the job."""
        return len(set(self.hosts))

    def reaches(self, rank: int, other: int) -> bool:
        """Return whether a rank can open memory on the GPU of another rank.

        >>> Devices([RankDevice(0, "a", frozenset("a")), RankDevice(1, "a", frozenset("a"))]).reaches(0, 1)
        False
        """
        return self[rank].host == self[other].host and self[other].uuid in self[rank].reaches

    def first_sharing(self, ranks: Sequence[int]) -> tuple[int, int] | None:
        """Return the first two of these ranks that share a GPU; ranks without one share none."""
        seen: dict[tuple[int, str], int] = {}
        for rank in filter(lambda rank: self[rank].uuid, ranks):
            known = seen.setdefault((self[rank].host, self[rank].uuid), rank)
            if known != rank:
                return known, rank
        return None


def uuid_of(index: int) -> str:
    """Return the UUID of a visible GPU, which is the same in all processes."""
    return str(torch.cuda.get_device_properties(index).uuid)


def index_of(uuid: str) -> int:
    """Return the index of a visible GPU in this process."""
    return next(index for index in range(torch.cuda.device_count()) if uuid_of(index) == uuid)


def peer_access() -> list[list[bool]]:
    """Return whether visible GPU i can read the memory of visible GPU j, for all i and j."""
    count = torch.cuda.device_count()
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]


def ipc_key(device: torch.device) -> str:
    """Return a key that is the same for ranks whose GPUs can all access each other."""
    numbers = ipc_groups(peer_access())
    own = numbers[device.index or 0]
    return " ".join(uuid_of(index) for index, number in enumerate(numbers) if number == own)


def ipc_groups(access: Sequence[Sequence[bool]]) -> list[int]:
    """Number the groups of devices that can all access each other; `access[i][j]`: device i can read device j.

    Access must be mutual, and is not always transitive (two PCIe switches, a virtual machine's subset). In
    order of their index, devices join the first group with whose every member they share access.

    >>> ipc_groups([[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    [0, 0, 1]
    >>> ipc_groups([[1, 1, 0], [1, 1, 1], [0, 1, 1]])     # 1 reaches 2, but 0 does not
    [0, 0, 1]
    """
    if any(len(row) != len(access) for row in access):
        raise ArgumentError("the peer access matrix must be square: one row and one column per device.")
    cliques: list[list[int]] = []
    for device, row in enumerate(access):
        for clique in cliques:
            if all(row[other] and access[other][device] for other in clique):
                clique.append(device)
                break
        else:
            cliques.append([device])
    number_of = {device: number for number, clique in enumerate(cliques) for device in clique}
    return [number_of[device] for device in range(len(access))]
