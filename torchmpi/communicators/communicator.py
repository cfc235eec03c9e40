"""Communicators: the intra and inter group of this rank on one level."""

from __future__ import annotations

from functools import cached_property

from . import splits
from .group import Group


class Communicator:
    """One level: the intra group of the ranks with the same key, and the inter group across those groups."""

    def __init__(
        self,
        level: int,
        name: str,
        intra: Group,
        inter: Group | None,
        *,
        split: splits.Split,
        parent: Communicator | None,
    ) -> None:
        self.level, self.name, self.intra, self.inter = level, name, intra, inter
        self.split, self.parent = split, parent

    @property
    def rank(self) -> int:
        """This rank in the intra group."""
        return self.intra.rank

    @property
    def size(self) -> int:
        """The number of ranks in the intra group."""
        return self.intra.size

    @property
    def groups(self) -> dict[str, Group]:
        """The groups of this rank, by kind."""
        return {"intra": self.intra} if self.inter is None else {"intra": self.intra, "inter": self.inter}

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

    def __repr__(self) -> str:
        structure = "cartesian" if self.is_cartesian else "tree"
        inter = f"inter {self.inter.rank}/{self.inter.size}" if self.inter is not None else "no inter"
        return f"<Communicator level {self.level} {self.name!r}: intra {self.rank}/{self.size}, {inter}, {structure}>"
