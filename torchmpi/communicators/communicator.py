"""Communicators: the intra and inter group of this rank on one level, or a group of ranks of its own."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NoReturn

from ..errors import CommunicatorError
from . import splits
from .group import Group
from .release import FAILURE

NO_LEVEL = -1
"""The level of communicators that are not on the stack of levels."""


class NullCommunicator:
    """A communicator on a rank that is not one of its ranks.

    It is false in a condition. Calls with ``comm=`` refuse it; ``free()`` and a ``with`` block do nothing.

    Attributes:
        name: The name of the communicator in messages.
        ranks: Its ranks, as numbers in the world.
        size: The number of its ranks.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], where: str) -> None:
        self.name, self.ranks, self.size = name, ranks, len(ranks)
        self._where = where

    def __bool__(self) -> Literal[False]:
        return False

    @property
    def rank(self) -> int:
        """Raise, because this rank has no number in the communicator."""
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise, because this rank is not a rank of the communicator."""
        if not self.ranks:
            raise CommunicatorError(
                f"{self._where}: there is no communicator {self.name}: inter groups connect the groups of a level that "
                "push_communicator() has made."
            )
        raise CommunicatorError(
            f"{self._where} is not a rank of communicator {self.name}, which has the ranks {list(self.ranks)}. Make "
            "the call on these ranks only: `if communicator:` is false on the others."
        )

    def free(self) -> None:
        """Do nothing."""

    def __enter__(self) -> NullCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __repr__(self) -> str:
        return f"<NullCommunicator {self.name!r}: ranks {self.ranks}, without this one>"


class Communicator:
    """The ranks that call collectives together: a level, or the ranks of :func:`torchmpi.group`.

    On a level, the intra group has the ranks with the same key, and the inter group connects those groups.

    Attributes:
        level: The number of the level; -1 if it is not a level.
        name: The name in messages.
        intra: The group in which calls with ``comm=`` this communicator run.
        inter: The inter group of this rank; a :class:`NullCommunicator`, which is false, if this rank is in none.
        split: The groups of the level.
        parent: The communicator from which the level was split.
    """

    def __init__(
        self,
        level: int,
        name: str,
        intra: Group,
        inter: Group | NullCommunicator | None,
        *,
        split: splits.Split,
        parent: Communicator | None,
        can_be_freed: bool = False,
    ) -> None:
        self.level, self.name, self.intra = level, name, intra
        self.inter = NullCommunicator(f"{name} inter", (), intra.where) if inter is None else inter
        self.split, self.parent = split, parent
        self._can_be_freed = can_be_freed
        intra.communicator = self

    @classmethod
    def of(cls, group: Group, *, can_be_freed: bool = False) -> Communicator:
        """Return the communicator of which a group is the intra group; a new one, if there is none."""
        known: Communicator | None = group.communicator
        if known is not None:
            return known
        is_on_one_host = len(group.hosts) == 1
        split = group.placement if is_on_one_host else splits.plan_split([0] * group.size, cartesian=True)
        return cls(NO_LEVEL, group.name, group, None, split=split, parent=None, can_be_freed=can_be_freed)

    @property
    def rank(self) -> int:
        """This rank in the intra group."""
        return self.intra.rank

    @property
    def size(self) -> int:
        """The number of ranks in the intra group."""
        return self.intra.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the intra group, as numbers in the world and in the order of their numbers in the group."""
        return self.intra.ranks

    @property
    def groups(self) -> dict[str, Group]:
        """The groups of this rank, by kind."""
        return {"intra": self.intra, "inter": self.inter} if self.inter else {"intra": self.intra}

    @cached_property
    def tree_split(self) -> splits.Split:
        """The split into the same intra groups, with only their first members in an inter group."""
        keys = [member.group for member in self.split.members]
        return splits.plan_split(keys, cartesian=False)

    @property
    def is_cartesian(self) -> bool:
        """Whether all intra groups of this level have the same size."""
        return self.split.is_cartesian

    @property
    def num_nodes(self) -> int:
        """The number of hosts on which the ranks of the intra group run."""
        return len(self.intra.hosts)

    def free(self) -> None:
        """Release the memory, threads and MPI communicators of a communicator made by :func:`torchmpi.group`.

        Collective over its ranks. Calls that were started before end first; later calls raise. A second call does
        nothing.

        Raises:
            CommunicatorError: The communicator was not made by :func:`torchmpi.group`: levels exist until
                :func:`torchmpi.stop`.
            MismatchError: Other ranks make a different call.

        Example:
            ::

                pair = mpi.group([0, 1])
                pair.free()
        """
        group = self.intra
        if not self._can_be_freed:
            raise CommunicatorError(
                f"{group.where}: communicator {self.name} cannot be freed; it exists until stop(). mpi.group() makes "
                "communicators that can be freed."
            )
        if group.call_queue.closed:
            return
        if group.call_queue.runs_here():
            raise CommunicatorError(
                f"{group.where}: communicator {self.name} cannot be freed by a callback of one of its calls. Free it "
                "in the thread that waits for the call."
            )
        for call_queue in list(group.peer_queues.values()):  # a message that waits in a queue is not in the balance
            call_queue.drain()
        group.finish_messages()
        failures = FAILURE if group.call_log.last_aborted else 0
        (balance,) = group.call_exchange("free", lambda: group.reduce([group.messages.value + failures], "sum"))
        group.free(together=balance == 0)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After an exception the other ranks may not arrive, and freeing is collective: stop() frees it.
        if kind is None:
            self.free()

    def __repr__(self) -> str:
        if self.level == NO_LEVEL:
            return f"<Communicator {self.name!r}: rank {self.rank} of {self.size}, ranks {self.ranks}>"
        structure = "cartesian" if self.is_cartesian else "tree"
        inter = f"inter {self.inter.rank}/{self.inter.size}" if self.inter else "no inter"
        return f"<Communicator level {self.level} {self.name!r}: intra {self.rank}/{self.size}, {inter}, {structure}>"
