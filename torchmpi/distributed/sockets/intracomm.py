"""Communicators: groups of ranks whose messages meet no other group's, and how one is made from another."""

from __future__ import annotations

from collections.abc import Sequence

from .collectives import Collective
from .messages import COLLECTIVES, CREATION, MESSAGES, packed
from .requests import UNDEFINED, CommunicationError, Request
from .socket_endpoint import Endpoint

COMM_TYPE_SHARED = 1


class RankGroup:
    """A group in MPI's sense: ranks without a communicator."""

    def __init__(self, world_ranks: Sequence[int]) -> None:
        self.world_ranks = tuple(world_ranks)

    def Incl(self, ranks: Sequence[int]) -> RankGroup:
        """Some of them, in this order."""
        return RankGroup([self.world_ranks[rank] for rank in ranks])


class Intracomm(Collective):
    """Stands where ``mpi4py.MPI.Comm`` does."""

    has_unique_context = True
    """No later communicator gets the number of this one; see :func:`torchmpi.communicators.release.release`."""

    def __init__(self, endpoint: Endpoint, world_ranks: Sequence[int], number: int, hosts: Sequence[str]) -> None:
        """`hosts` says of each rank of the world with whom it shares memory."""
        super().__init__(endpoint, world_ranks, number)
        self._hosts = hosts

    def __repr__(self) -> str:
        return f"<communicator over sockets: rank {self.rank} of {self.size}>"

    def Get_group(self) -> RankGroup:
        """Its ranks."""
        return RankGroup(self.world_ranks)

    def Dup(self) -> Intracomm:
        """The same ranks, with messages of their own. Collective."""
        return self._made(self.world_ranks, self.bcast(self._fresh_number()))

    def Split(self, color: int = 0, key: int = 0) -> Intracomm | None:
        """The ranks that gave the same colour, ordered by key; None for who gave UNDEFINED. Collective."""
        offers = self.allgather((color, key, self._fresh_number()))
        number = offers[0][2]  # of all parts: no two ranks are in more than one of them
        if color == UNDEFINED:
            return None
        ranks = sorted((theirs, rank) for rank, (other, theirs, _) in enumerate(offers) if other == color)
        return self._made([self.world_ranks[rank] for _, rank in ranks], number)

    def Split_type(self, split_type: int, key: int = 0) -> Intracomm | None:
        """The ranks that share memory with this one. Collective."""
        if split_type != COMM_TYPE_SHARED:
            raise CommunicationError(f"rank {self.rank}: Split_type knows COMM_TYPE_SHARED only, not {split_type}")
        hosts = [self._hosts[world_rank] for world_rank in self.world_ranks]
        return self.Split(hosts.index(hosts[self.rank]), key)

    def Create_group(self, group: RankGroup, tag: int = 0) -> Intracomm:
        """Some of the ranks as a communicator. Collective over these only."""
        ranks = [self.members[world_rank] for world_rank in group.world_ranks]
        if self.rank == ranks[0]:
            number = self._fresh_number()
            Request.Waitall([self._send(packed(number), rank, tag, CREATION) for rank in ranks[1:]])
        else:
            number = self._receive_object(ranks[0], tag, CREATION)
        return self._made(group.world_ranks, number)

    def Free(self) -> None:
        """Forget it."""
        for plane in (MESSAGES, COLLECTIVES, CREATION):
            self.endpoint.inbox.drop(self._context + plane)

    def Abort(self, errorcode: int = 1) -> None:
        """End all ranks of the job. Does not return."""
        self.endpoint.abort(errorcode)

    def _made(self, world_ranks: Sequence[int], number: int) -> Intracomm:
        return Intracomm(self.endpoint, world_ranks, number, self._hosts)

    def _fresh_number(self) -> int:
        """One that no communicator has: made of this rank's and how often it has been asked."""
        return next(self.endpoint.numbers) * self.endpoint.size + self.endpoint.rank
