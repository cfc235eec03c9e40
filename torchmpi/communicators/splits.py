"""Pure functions that compute groups of ranks and the steps of hierarchical collectives.

Every rank calls them with the same gathered arguments (keys, host names) and gets the same result without further
communication.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from ..collective_specs import SPECS
from .algorithms import FIRST_RANKS, SLICES

GroupKind = Literal["intra", "inter"]
CollectiveName = Literal["allreduce", "reduce", "broadcast", "barrier", "reduce_scatter", "allgather", "gather"]


# --- splitting a group by keys ---------------------------------------------------------------------------


class Member(NamedTuple):
    """The groups of one parent rank in a `Split`. Groups contain parent ranks.

    `group` is the number of its intra group, `intra` that group and `intra_rank` its rank there. `inter` is
    its inter group, None if it is in none; its rank there is `group`, since each group sends one member.
    """

    group: int
    intra: tuple[int, ...]
    intra_rank: int
    inter: tuple[int, ...] | None


class Split(NamedTuple):
    """A parent group split into intra groups by key, and the inter groups between them.

    `groups` are in order of their smallest parent rank, `members` is indexed by parent rank.
    """

    groups: tuple[tuple[int, ...], ...]
    members: tuple[Member, ...]
    is_cartesian: bool

    @property
    def roots(self) -> tuple[int, ...]:
        """The parent rank of the first member of each group.

        >>> plan_split("abba", cartesian=False).roots
        (0, 1)
        """
        return tuple(group[0] for group in self.groups)


def plan_split(keys: Sequence[Hashable], *, cartesian: bool) -> Split:
    """Group the ranks of a parent by key; `keys` is indexed by the rank in the parent.

    With `cartesian` and equal group sizes, rank i of every group forms an inter group: a grid. Otherwise only
    the roots (intra rank 0) form one: a tree. A single group is a grid in both cases.

    >>> split = plan_split(["left", "right", "left", "right"], cartesian=True)
    >>> split.groups, split.is_cartesian
    (((0, 2), (1, 3)), True)
    >>> split.members[3]
    Member(group=1, intra=(1, 3), intra_rank=1, inter=(2, 3))
    >>> split = plan_split(["left", "right", "left"], cartesian=True)     # uneven, therefore a tree
    >>> [member.inter for member in split.members]
    [(0, 1), (0, 1), None]
    """
    return _plan_split(tuple(keys), cartesian)


@lru_cache(maxsize=8)
def _plan_split(keys: tuple[Hashable, ...], cartesian: bool) -> Split:
    """Do as plan_split(); simulated workers of one process, and groups of the same ranks, share the result."""
    by_key: dict[Hashable, list[int]] = {}
    for rank, key in enumerate(keys):
        by_key.setdefault(key, []).append(rank)
    groups = tuple(tuple(ranks) for ranks in by_key.values())
    even = len({len(group) for group in groups}) == 1
    is_cartesian = even and (cartesian or len(groups) == 1)
    num_inter_groups = len(groups[0]) if is_cartesian else min(1, len(groups))
    inter_groups = [tuple(group[i] for group in groups) for i in range(num_inter_groups)]
    placed = {
        rank: Member(number, group, i, inter_groups[i] if i < num_inter_groups else None)
        for number, group in enumerate(groups)
        for i, rank in enumerate(group)
    }
    return Split(groups, tuple(placed[rank] for rank in range(len(keys))), is_cartesian)


# --- steps of a collective over several levels -----------------------------------------------------------


class Step(NamedTuple):
    """One flat collective that a rank takes part in: on the intra or inter group of a level.

    `root` is a rank in that group; None for collectives without a root.
    """

    level: int
    group: GroupKind
    collective: CollectiveName
    root: int | None = None


class _LevelGroup(NamedTuple):
    """The group of one rank on one level, with the splits of the levels below."""

    level: int
    rank: int
    size: int
    splits: tuple[Split, ...]

    @property
    def split(self) -> Split:
        return self.splits[0]

    @property
    def member(self) -> Member:
        return self.split.members[self.rank]

    def below(self) -> _LevelGroup:
        return _LevelGroup(self.level + 1, self.member.intra_rank, len(self.member.intra), self.splits[1:])

    def inter_step(self, collective: CollectiveName, root: int | None = None) -> Iterator[Step]:
        """Yield the step between the groups one level down, if this rank is in it and there are several groups."""
        if self.member.inter is not None and len(self.split.groups) > 1:
            yield Step(self.level + 1, "inter", collective, root)


def _allreduce(group: _LevelGroup, root: int) -> Iterator[Step]:
    if group.split.is_cartesian:
        yield from _steps("allreduce", group.below(), 0)
        yield from group.inter_step("allreduce")
    else:
        yield from _steps("reduce", group.below(), 0)
        yield from group.inter_step("allreduce")
        yield from _steps("broadcast", group.below(), 0)


def _reduce(group: _LevelGroup, root: int) -> Iterator[Step]:
    home = group.split.members[root]
    if group.split.is_cartesian:
        # The grid has an inter group through the root itself: collect in that one.
        yield from _steps("reduce", group.below(), home.intra_rank)
        if group.member.intra_rank == home.intra_rank:
            yield from group.inter_step("reduce", home.group)
    elif group.member.group == home.group:
        # The root's own group is last: its first member contributes the partial results of the other groups
        # together with its own value, so that any member can be the root without a further step.
        yield from group.inter_step("reduce", home.group)
        yield from _steps("reduce", group.below(), home.intra_rank)
    else:
        yield from _steps("reduce", group.below(), 0)
        yield from group.inter_step("reduce", home.group)


def _broadcast(group: _LevelGroup, root: int) -> Iterator[Step]:
    home = group.split.members[root]
    if group.split.is_cartesian:
        if group.member.intra_rank == home.intra_rank:
            yield from group.inter_step("broadcast", home.group)
        yield from _steps("broadcast", group.below(), home.intra_rank)
    elif group.member.group == home.group:
        yield from _steps("broadcast", group.below(), home.intra_rank)
        yield from group.inter_step("broadcast", home.group)
    else:
        yield from group.inter_step("broadcast", home.group)
        yield from _steps("broadcast", group.below(), 0)


def _barrier(group: _LevelGroup, root: int) -> Iterator[Step]:
    yield from _steps("barrier", group.below(), 0)
    yield from group.inter_step("barrier")
    if not group.split.is_cartesian:  # the other members wait until their root has returned
        yield from _steps("barrier", group.below(), 0)


_NESTED: dict[CollectiveName, Callable[[_LevelGroup, int], Iterator[Step]]] = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "barrier": _barrier,
}


def _steps(collective: CollectiveName, group: _LevelGroup, root: int) -> Iterator[Step]:
    if group.size == 1:
        return
    if group.splits:
        yield from _NESTED[collective](group, root)
    else:
        yield Step(group.level, "intra", collective, root if SPECS[collective].is_rooted else None)


def steps_for(collective: CollectiveName, rank: int, splits: Sequence[Split], *, root: int = 0) -> tuple[Step, ...]:
    """Return the steps of `rank` for a collective on its group of the outermost level, 0, in order.

    `splits` are the splits of this rank's group of that level, of its intra group one level down, and so on to the end
    of the span. `rank` and `root` are ranks in the outermost group. A `reduce` step leaves its partial result in the
    root's buffer and no useful value in the others'; the input of each step is the result of the previous one. Groups
    with a single member take no step.

    >>> tree = plan_split(["a", "a", "b"], cartesian=False)
    >>> for step in steps_for("allreduce", 0, [tree]): print(step)
    Step(level=1, group='intra', collective='reduce', root=0)
    Step(level=1, group='inter', collective='allreduce', root=None)
    Step(level=1, group='intra', collective='broadcast', root=0)
    >>> steps_for("allreduce", 2, [tree])         # alone in its group
    (Step(level=1, group='inter', collective='allreduce', root=None),)
    >>> grid = plan_split(["a", "b", "a", "b"], cartesian=True)
    >>> for step in steps_for("broadcast", 2, [grid], root=2): print(step)
    Step(level=1, group='inter', collective='broadcast', root=0)
    Step(level=1, group='intra', collective='broadcast', root=1)
    """
    return tuple(_steps(collective, _LevelGroup(0, rank, len(splits[0].members), tuple(splits)), root))


# --- steps of a collective over hosts --------------------------------------------------------------------

ALLREDUCES: dict[tuple[int, bool], tuple[tuple[GroupKind, CollectiveName], ...]] = {
    (FIRST_RANKS, False): (("intra", "reduce"), ("inter", "allreduce"), ("intra", "broadcast")),
    (FIRST_RANKS, True): (
        ("intra", "reduce"), ("inter", "reduce_scatter"), ("inter", "allgather"), ("intra", "broadcast"),
    ),
    (SLICES, False): (("intra", "reduce_scatter"), ("inter", "allreduce"), ("intra", "allgather")),
    (SLICES, True): (
        ("intra", "reduce_scatter"), ("inter", "reduce_scatter"), ("inter", "allgather"), ("intra", "allgather"),
    ),
}  # fmt: skip
"""The steps of an allreduce over hosts, by the number of the algorithm, and by whether the hosts send results in place
of some of the partial results, which are wider. Slices, of which each rank of a host exchanges one, need hosts with
equal numbers of ranks.
"""


def allreduce_over_hosts(algorithm: tuple[int, bool], rank: int, split: Split) -> tuple[Step, ...]:
    """Return the steps of `rank` in an allreduce by one of `ALLREDUCES`.

    After a reduce within the hosts, only their first ranks take part between them.

    >>> grid = plan_split("aabb", cartesian=True)
    >>> [step.collective for step in allreduce_over_hosts((FIRST_RANKS, False), 1, grid)]
    ['reduce', 'broadcast']
    >>> [step.collective for step in allreduce_over_hosts((SLICES, False), 1, grid)]
    ['reduce_scatter', 'allreduce', 'allgather']
    """
    member, steps, is_at_first = split.members[rank], [], False
    for group, collective in ALLREDUCES[algorithm]:
        spec = SPECS[collective]
        is_at_first |= spec.reduces_to_root
        if len(member.intra) > 1 if group == "intra" else member.inter and not (is_at_first and member.intra_rank):
            steps.append(Step(1, group, collective, 0 if spec.is_rooted else None))
    return tuple(steps)


def reduce_group_by_group(rank: int, split: Split, root: int) -> tuple[Step, ...]:
    """Return the steps of a reduce over one level that adds the groups in order, as an allreduce does.

    On a tree, `steps_for` avoids a step to a root that is not the first of its group by adding the other groups before
    the own one, which gives different bits. Here the group of the root broadcasts the result.

    >>> for step in reduce_group_by_group(1, plan_split("aab", cartesian=False), 1): print(step)
    Step(level=1, group='intra', collective='reduce', root=0)
    Step(level=1, group='intra', collective='broadcast', root=0)
    """
    if split.is_cartesian:
        return steps_for("reduce", rank, [split], root=root)
    member, home = split.members[rank], split.members[root]
    steps = []
    if len(member.intra) > 1:
        steps.append(Step(1, "intra", "reduce", 0))
    if member.inter is not None:
        steps.append(Step(1, "inter", "reduce", home.group))
    if len(member.intra) > 1 and member.group == home.group and home.intra_rank != 0:
        steps.append(Step(1, "intra", "broadcast", 0))
    return tuple(steps)


def steps_around_messages(collective: str, rank: int, split: Split, root: int) -> tuple[Step, ...]:
    """Return the steps of `rank` before and after the messages between the first ranks of the hosts, of a short call.

    Before them the first rank of a host gets what its host gives; after them it passes on what the host receives. A
    barrier takes the place of a step without data: all ranks of a host compare their calls in both. Ranks that are
    alone on their host take none.

    >>> split = plan_split("aabb", cartesian=True)
    >>> [step.collective for step in steps_around_messages("allgather", 0, split, 0)]
    ['gather', 'broadcast']
    >>> for step in steps_around_messages("broadcast", 3, split, 3): print(step)
    Step(level=1, group='intra', collective='broadcast', root=1)
    Step(level=1, group='intra', collective='barrier', root=None)
    >>> [step.collective for step in steps_around_messages("reduce", 0, split, 3)]
    ['reduce', 'barrier']
    """
    spec, member, home = SPECS[collective], split.members[rank], split.members[root]
    if len(member.intra) == 1:
        return ()
    # At home, a root that is not the first rank of its host gives or receives in a step within it.
    place = home.intra_rank if spec.is_rooted and member.group == home.group else 0
    names: tuple[CollectiveName, CollectiveName] = "reduce" if spec.reduces else "gather", "broadcast"
    if not spec.tensors:
        names = "barrier", "barrier"
    elif spec.flow == "all to root":
        names = names[0], "broadcast" if place else "barrier"
    elif spec.flow == "root to all":
        names = ("broadcast", "barrier") if place else ("barrier", "broadcast")
    roots = place if spec.flow == "root to all" else 0, 0
    return tuple(
        Step(1, "intra", name, first if SPECS[name].is_rooted else None)
        for name, first in zip(names, roots, strict=True)
    )


# --- hosts -----------------------------------------------------------------------------------------------


def host_keys(names: Sequence[str]) -> list[int]:
    """Number the hosts in order of first appearance; `names` are the host names by rank.

    >>> host_keys(["node7", "node7", "node2", "node7"])
    [0, 0, 1, 0]
    """
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]
