"""Which GPU each rank has, and whose memory it can open: gathered once at start, so that nobody need ask later."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
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
    >>> two.first_sharing([0, 1]), two.first_apart([0, 1])
    ((0, 1), None)
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
    def num_hosts(self) -> int:
        """Hosts of the job."""
        return len({device.host for device in self})

    def first_without(self, ranks: Sequence[int]) -> int | None:
        """The first of these ranks that has no GPU.

        >>> Devices([Device(0, "GPU-a"), Device(0)]).first_without([0, 1])
        1
        """
        return next((rank for rank in ranks if not self[rank].uuid), None)

    def first_sharing(self, ranks: Sequence[int]) -> tuple[int, int] | None:
        """The first two of these ranks that have one GPU."""
        seen: dict[tuple[int, str], int] = {}
        for rank in ranks:
            known = seen.setdefault((self[rank].host, self[rank].uuid), rank)
            if known != rank:
                return known, rank
        return None

    def first_apart(self, ranks: Sequence[int]) -> tuple[int, int] | None:
        """The first two of these ranks of which the one cannot open memory on the GPU of the other.

        >>> Devices([Device(0, "a", frozenset("a")), Device(1, "a", frozenset("a"))]).first_apart([0, 1])
        (0, 1)
        """
        for one, other in permutations(ranks, 2):
            if self[one].host != self[other].host or self[other].uuid not in self[one].reaches:
                return one, other
        return None


def uuid_of(index: int) -> str:
    """What identifies a GPU that this process sees, wherever it is seen from."""
    return str(torch.cuda.get_device_properties(index).uuid)


def peer_access() -> list[list[bool]]:
    """Whether GPU i, of those that this process sees, can read the memory of GPU j."""
    count = torch.cuda.device_count()
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]


def ipc_key(device: torch.device) -> str:
    """The same for ranks whose GPUs all reach each other."""
    numbers = topology.ipc_groups(peer_access())
    own = numbers[device.index or 0]
    return " ".join(uuid_of(index) for index, number in enumerate(numbers) if number == own)
