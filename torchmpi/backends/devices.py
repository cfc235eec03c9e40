"""Which GPU each rank has, and whose memory it can open: gathered once at start, so that nobody need ask later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError


class RankDevice(NamedTuple):
    """The device of one rank, as the others need to know it."""

    host: int
    """The number of the rank's host."""
    uuid: str = ""
    """Of the GPU; empty: the rank computes on the CPU."""
    reaches: frozenset[str] = frozenset()
    """Of the GPUs that this rank sees and whose memory its own can read, itself included. What a scheduler hides from
    a process, the process cannot open."""


class Devices(tuple[RankDevice, ...]):
    """The devices of all ranks of the world, by world rank.

    >>> two = Devices([RankDevice(0, "GPU-a", frozenset({"GPU-a"})), RankDevice(0, "GPU-a", frozenset({"GPU-a"}))])
    >>> two.first_sharing([0, 1]), two.reaches(0, 1)
    ((0, 1), True)
    """

    @classmethod
    def gather(cls, world: Any, hosts: Sequence[int], device: torch.device, *, has_cuda: bool) -> Devices:
        """Of all ranks, from what each says of its own `device`. Collective, if any rank `has_cuda`: ask nobody else.

        `hosts` has the number of each rank's host; `has_cuda` must be the same on all ranks.
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

        >>> Devices([RankDevice(0, "a", frozenset("a")), RankDevice(1, "a", frozenset("a"))]).reaches(0, 1)
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
    numbers = ipc_groups(peer_access())
    own = numbers[device.index or 0]
    return " ".join(uuid_of(index) for index, number in enumerate(numbers) if number == own)


def ipc_groups(access: Sequence[Sequence[bool]]) -> list[int]:
    """Number the groups of devices that all reach each other; `access[i][j]`: device i can read device j.

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


def device_index(local_rank: int, num_visible_devices: int) -> int | None:
    """The GPU of a rank, round robin over those it can see; None without any.

    A scheduler that shows each rank one GPU of its own makes that 0 everywhere, which is right.

    >>> [device_index(local_rank, 2) for local_rank in range(4)], device_index(3, 1), device_index(0, 0)
    ([0, 1, 0, 1], 0, None)
    """
    return local_rank % num_visible_devices if num_visible_devices > 0 else None
