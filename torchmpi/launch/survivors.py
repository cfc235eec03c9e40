"""Agreement of the remaining ranks after a loss: which ranks are left.

Without MPI, every rank has a connection to every other one, so each remaining rank learns of a lost rank by itself, or
from the ranks that have lost their connection to it. A rank in :meth:`Survivors.agree` sends its set of lost ranks to
all, and again when the set has grown. It is done when it has received the same set from each rank that is not in it.
Sets only grow, so all ranks that are done with one set agree; a rank that is lost afterwards makes the next call fail,
and the ranks that are left meet here again. So does the set of newcomers, which join in such a meeting. With MPI, ranks
only wait here for each other (:meth:`Survivors.meet`), as its own agreement has no time limit and no names. This module
sends nothing itself, so that it can be tested without processes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import RankLostError, StallError


class View(NamedTuple):
    """What a rank in a meeting knows; both sets only grow."""

    lost: frozenset[int]
    offered: frozenset[int]


class Survivors:
    """The ranks of a job that have not been lost, as one of them knows them; by their first numbers.

    >>> ranks = [Survivors(rank, ["host"] * 3) for rank in range(3)]
    >>> ranks[0].note(2, "killed"), ranks[1].hear(0, ranks[0].own_view()), ranks[1].last_reason
    (True, True, 'killed (according to rank 0)')
    """

    def __init__(self, rank: int, networks: Sequence[str], name: Callable[[int], str] | None = None) -> None:
        """Begin with all ranks; a rank with the same key in `networks` as a remaining one is lost only if it ended.

        `name` returns a rank as the program knows it at present: by default its position among the members.
        """
        self.rank, self._networks, self._name = rank, dict(enumerate(networks)), name or self._position
        self.members = tuple(range(len(networks)))
        """The ranks that have agreed last."""
        self.exclusion = ""
        """Why the other ranks continue without this one; '' if they do not."""
        self.on_loss: Callable[[str], None] = lambda reason: None
        """Called with the reason when calls have begun to fail, by the thread that reads messages."""
        self.epoch = 0
        """A number that grows with each agreement; the same on all ranks that have made the same."""
        self._lost: dict[int, str] = {}
        self._offered: dict[int, Any] = {}
        """Newcomers, also earlier ones, with what is needed to reach them."""
        self._reached: set[int] = set()
        """Those to which this rank is connected, and on which the ranks have not agreed yet."""
        self._settled: frozenset[int] = frozenset()
        """The newcomers of which the ranks knew when they agreed last."""
        self._views: dict[int, View] = {}
        self._is_ready = False
        self._changed = threading.Condition()

    @property
    def last_reason(self) -> str:
        """The reason of the last loss."""
        return next(reversed(self._lost.values()), "")

    @property
    def is_agreed(self) -> bool:
        """Whether no rank has been lost since the ranks have agreed."""
        return not self.lost_members

    @property
    def newcomers(self) -> list[int]:
        """The newcomers to which this rank is connected, and on which the ranks have not agreed yet."""
        return [rank for rank in self._reached if rank not in self._lost]

    @property
    def lost_members(self) -> list[int]:
        """Those of the ranks that have agreed last which have been lost since."""
        return [rank for rank in self.members if rank in self._lost]

    @property
    def remaining(self) -> tuple[int, ...]:
        """The ranks that have agreed last, and newcomers, without those that have been lost since."""
        return (*(rank for rank in self.members if rank not in self._lost), *sorted(self.newcomers))

    def note(self, rank: int, reason: str) -> bool:
        """Note that a rank is lost; return whether that is new."""
        with self._changed:
            is_new = rank not in self._lost
            self._lost.setdefault(rank, reason)
            self._changed.notify_all()
        return is_new

    def offer(self, rank: int, place: Any) -> None:
        """Note that a rank, with a number that no other one has had, joins in the next meeting."""
        with self._changed:
            self._offered.setdefault(rank, place)
            self._changed.notify_all()

    @property
    def offers(self) -> frozenset[int]:
        """The newcomers of which this rank has known."""
        return frozenset(self._offered)

    def unreached(self) -> dict[int, Any]:
        """Return the newcomers to which this rank is not connected yet, with what is needed to reach them."""
        with self._changed:
            known = {*self._settled, *self._reached, *self._lost, self.rank}
            return {rank: place for rank, place in self._offered.items() if rank not in known}

    def note_reached(self, rank: int, network: str) -> None:
        """Note that this rank is connected to a newcomer, so that it takes part in the agreement."""
        with self._changed:
            self._networks[rank] = network
            self._reached.add(rank)
            self._changed.notify_all()

    def own_view(self) -> bytes:
        """Return the message for the others: whether this rank is in ``agree()``, and its lost and offered ranks.

        The former with the reasons, the latter with what is needed to reach them.
        """
        with self._changed:
            return json.dumps([self._is_ready, list(self._lost.items()), list(self._offered.items())]).encode()

    @classmethod
    def joining(cls, rank: int, networks: Mapping[int, str], members: Sequence[int], view: bytes) -> Survivors:
        """Return what a newcomer knows: the members, of which one has sent its view."""
        own = cls(rank, ())
        own._networks, own.members = dict(networks), tuple(members)
        _, lost, offered = json.loads(view)
        own._lost, own._offered = dict(lost), dict(offered)
        own._reached, own._settled = {rank}, frozenset(own._offered) - {rank}
        return own

    def hear(self, peer: int, view: bytes) -> bool:
        """Take over the message of another rank; return whether ranks are lost that were not before."""
        is_ready, items, offers = json.loads(view)
        lost: dict[int, str] = dict(items)
        offered: dict[int, Any] = dict(offers)
        with self._changed:
            if peer in self._lost:  # it may have lost this one, too; the others decide
                return False
            if self.rank in lost:
                self.exclusion = (
                    f"{self._name(peer)} has lost its connection to this rank, and the others go on without it"
                )
            num_before = len(self._lost)
            for rank, reason in lost.items():
                source = "" if "according to" in reason else f" (according to {self._name(peer)})"
                self._lost.setdefault(rank, reason + source)
            self._offered = offered | self._offered
            if is_ready:
                self._views[peer] = View(frozenset(lost), frozenset(offered))
            self._changed.notify_all()
            return len(self._lost) > num_before

    def agree(self, tell: Callable[[], object], timeout_seconds: float) -> tuple[int, ...]:
        """Return the remaining ranks when all of them are here and have lost the same ranks.

        Args:
            tell: Sends :meth:`own_view` to all ranks.
            timeout_seconds: How long to wait for the other ranks.

        Raises:
            RankLostError: The others continue without this rank, or the remaining ranks are too few.
            StallError: Some have not come in time.
        """
        with self._changed:
            limit = time.monotonic() + timeout_seconds
            self.members = self._wait_for_others(tell, timeout_seconds, limit, lambda view, own: view == own)
            self._settled, self._reached = frozenset(self._offered), set()
            self.epoch = len(self._lost) + len(self._offered)
            return self.members

    def meet(self, tell: Callable[[], object], timeout_seconds: float, limit: float) -> None:
        """Return when all remaining ranks are here; they may know of different losses, so that others must agree.

        For the arguments and errors see :meth:`agree`; `limit` is when the timeout ends.
        """
        members = frozenset(self.members)
        with self._changed:  # in an earlier view, of a loss that is over, no present member is lost
            self._wait_for_others(tell, timeout_seconds, limit, lambda view, _: bool(view.lost & members))

    def exclude(self, reason: str) -> None:
        """End the wait for the others, which continue without this rank."""
        with self._changed:
            self.exclusion = reason
            self._changed.notify_all()

    def settle(self, members: Sequence[int]) -> None:
        """Take over who is left, on which others have agreed."""
        with self._changed:
            for rank in {*self.members} - {*members}:
                self._lost.setdefault(rank, f"{self._name(rank)} is gone")
            self.members = tuple(members)

    def _wait_for_others(
        self,
        tell: Callable[[], object],
        timeout_seconds: float,
        limit: float,
        is_ready: Callable[[View, View], bool],
    ) -> tuple[int, ...]:
        """Return the remaining ranks when all of their views, compared with that of this one, are `is_ready`."""
        told = None
        self._is_ready = True
        try:
            while True:
                if self.exclusion:
                    raise RankLostError(f"{self._name(self.rank)} cannot go on: {self.exclusion}.")
                own = View(frozenset(self._lost), frozenset(self._offered))
                members = self.remaining
                self._check_number(members)
                if own != told:
                    told = own
                    self._without_lock(tell)
                    continue
                views = {rank: self._views.get(rank) for rank in members if rank != self.rank}
                late = [rank for rank, view in views.items() if view is None or not is_ready(view, own)]
                if not late:
                    return members
                if not self._changed.wait(limit - time.monotonic()) and time.monotonic() >= limit:
                    why = f"The loss: {self.last_reason}" if self._lost else "A new rank joins"
                    raise StallError(
                        f"{self._name(self.rank)}: {self._names(late)} still runs, but has not called recover() within "
                        f"{timeout_seconds:g} s. {why}."
                    )
        finally:
            self._is_ready = False

    def _without_lock(self, tell: Callable[[], object]) -> None:
        """Send the message: the thread that delivers those of others may hold a lock that this needs, and wait here."""
        self._changed.release()
        try:
            tell()
        finally:
            self._changed.acquire()

    def _check_number(self, members: tuple[int, ...]) -> None:
        """Refuse to go on if lost ranks of other hosts may have been cut off, and may go on too."""
        near = {self._networks[rank] for rank in members}
        unsure = [rank for rank in self.members if rank not in members and self._networks[rank] not in near]
        excess = 2 * len(members) - len(self.members)
        if unsure and (excess < 0 or (excess == 0 and self.members[0] not in members)):
            raise RankLostError(
                f"{self._name(self.rank)} cannot go on: {self._names(unsure)} may be alive behind a cut link, and "
                f"{len(members)} of {len(self.members)} ranks are left. Only more than half of the ranks, or the half "
                "with the lowest one, may go on. Start again from a checkpoint."
            )

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(self._name, ranks))

    def _position(self, rank: int) -> str:
        present = (*self.members, *sorted(self._reached - {*self.members}))
        return f"rank {present.index(rank)}" if rank in present else "a new rank"
