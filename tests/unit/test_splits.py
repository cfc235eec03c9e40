"""To a user of levels: groups, hierarchical steps, cores and devices agree with their definitions."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add, or_

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmpi.backends import gpus
from torchmpi.communicators import splits
from torchmpi.communicators.splits import Split, Step, plan_split, steps_for
from torchmpi.errors import TorchMPIError
from torchmpi.launch import affinity
from torchmpi.session import devices

KEY_PATTERNS: dict[str, Callable[[int, int], object]] = {
    "one group": lambda rank, n: "all",
    "all alone": lambda rank, n: rank,
    "halves": lambda rank, n: rank * 2 // n,
    "blocks of 4": lambda rank, n: rank // 4,
    "round robin over 3": lambda rank, n: rank % 3,
    "one and the rest": lambda rank, n: rank == n // 2,
    "growing groups": lambda rank, n: (8 * rank + 1) ** 0.5 // 2,
    "falling keys": lambda rank, n: (n - rank) // 5,
}


def keys_of(pattern: str, n: int) -> list[object]:
    return [KEY_PATTERNS[pattern](rank, n) for rank in range(n)]


# --- splits ----------------------------------------------------------------------------------------------


def check_split(keys: Sequence[object], cartesian: bool) -> None:
    """Compare a split with a direct implementation of the definitions."""
    split = plan_split(keys, cartesian=cartesian)
    n = len(keys)
    assert len(split.members) == n
    sizes = Counter(keys)
    expect_cartesian = len(sizes) == 1 or (cartesian and len(set(sizes.values())) == 1)
    assert split.is_cartesian is expect_cartesian
    intra_rank_of = [sum(1 for other in range(rank) if keys[other] == keys[rank]) for rank in range(n)]
    for rank, member in enumerate(split.members):
        same_key = tuple(other for other in range(n) if keys[other] == keys[rank])
        assert member.intra == same_key == split.groups[member.group]
        assert member.intra_rank == intra_rank_of[rank] and member.intra[member.intra_rank] == rank
        if expect_cartesian or intra_rank_of[rank] == 0:
            peers = [other for other in range(n) if intra_rank_of[other] == intra_rank_of[rank]]
            peers.sort(key=lambda other: keys.index(keys[other]))
            assert member.inter == tuple(peers) and member.inter[member.group] == rank
        else:
            assert member.inter is None
    assert split.roots == tuple(sorted(split.roots)) == tuple(keys.index(key) for key in dict.fromkeys(keys))


@pytest.mark.parametrize("cartesian", [True, False])
@pytest.mark.parametrize("pattern", KEY_PATTERNS)
def test_splits_up_to_64_ranks(pattern: str, cartesian: bool) -> None:
    for n in range(1, 65):
        check_split(keys_of(pattern, n), cartesian)


@given(st.lists(st.integers(0, 6) | st.text("ab", max_size=1), min_size=1, max_size=64), st.booleans())
def test_splits_of_random_keys(keys: list[object], cartesian: bool) -> None:
    check_split(keys, cartesian)


def test_uneven_groups_are_a_tree_even_if_a_grid_is_requested() -> None:
    split = plan_split("aabbb", cartesian=True)
    assert not split.is_cartesian
    assert [member.inter for member in split.members] == [(0, 2), None, (0, 2), None, None]


# --- simulating steps ------------------------------------------------------------------------------------

Group = tuple[int, ...]


class World:
    """A group of ranks 0..n-1, split by keys, each of its groups split again, and so on."""

    def __init__(self, keys_by_level: Sequence[Sequence[object]], cartesian: Sequence[bool]) -> None:
        n = len(keys_by_level[0])
        self.splits: list[list[Split]] = [[] for _ in range(n)]
        self.groups: list[dict[tuple[int, str], Group]] = [{(0, "intra"): tuple(range(n))} for _ in range(n)]
        for level, keys in enumerate(keys_by_level, start=1):
            for parent in sorted({groups[level - 1, "intra"] for groups in self.groups}):
                split = plan_split([keys[rank] for rank in parent], cartesian=cartesian[level - 1])
                for rank, member in zip(parent, split.members, strict=True):
                    self.splits[rank].append(split)
                    self.groups[rank][level, "intra"] = tuple(parent[i] for i in member.intra)
                    if member.inter is not None:
                        self.groups[rank][level, "inter"] = tuple(parent[i] for i in member.inter)

    def plan(self, collective: splits.CollectiveName, root: int = 0) -> list[tuple[Step, ...]]:
        return [steps_for(collective, rank, own, root=root) for rank, own in enumerate(self.splits)]

    def run(
        self,
        collective: splits.CollectiveName,
        values: list[object],
        root: int = 0,
        plans: Sequence[Sequence[Step]] | None = None,
    ) -> list[object]:
        """Execute the plan of each rank; a step runs when all members of its group have reached the step."""
        plan = [list(steps) for steps in plans or self.plan(collective, root)]
        ready = list(range(len(plan)))
        while ready:
            rank = ready.pop()
            if not plan[rank]:
                continue
            step = plan[rank][0]
            group = self.groups[rank][step.level, step.group]
            if all(plan[other] and self.stands_before(plan[other][0], other, step, group) for other in group):
                execute(step, group, values)
                for other in group:
                    del plan[other][0]
                ready.extend(group)
        assert not any(plan), f"deadlock: {collective}, root {root}: {plan}"
        return values

    def stands_before(self, theirs: Step, rank: int, step: Step, group: Group) -> bool:
        return theirs == step and self.groups[rank][theirs.level, theirs.group] == group


def contribution(rank: int) -> int:
    """A separate digit for each rank: a sum that counts a rank twice or omits one differs."""
    return 1 << 8 * rank


def execute(step: Step, group: Group, values: list[object]) -> None:
    assert len(group) > 1, "a step in a group of one rank"
    assert (step.root is not None) == (step.collective in ("reduce", "broadcast"))
    if step.collective == "broadcast":
        for rank in group:
            values[rank] = values[group[step.root]]
    elif step.collective == "barrier":
        arrived = reduce(or_, (values[rank] for rank in group))
        for rank in group:
            values[rank] = arrived
    else:
        total = reduce(add, (values[rank] for rank in group))
        for rank in group:
            if step.collective == "allreduce":
                values[rank] = total
            else:
                values[rank] = total if rank == group[step.root] else None  # a second use would fail


def check_collectives(world: World, roots: Iterable[int]) -> None:
    n = len(world.splits)
    each = [contribution(rank) for rank in range(n)]
    everyone = sum(each)
    assert world.run("allreduce", list(each)) == [everyone] * n
    assert world.run("barrier", list(each)) == [everyone] * n
    for root in roots:
        assert world.run("reduce", list(each), root)[root] == everyone
        start: list[object] = [None] * n
        start[root] = "message"
        assert world.run("broadcast", start, root) == ["message"] * n


class Terms(str):
    """A sum that records the order of its additions."""

    def __add__(self, other: str) -> Terms:
        return Terms(f"({self!s} + {other!s})")


@pytest.mark.parametrize("size", range(2, 6))
def test_reduce_adds_as_allreduce_does(size: int) -> None:
    terms = [Terms(rank) for rank in range(size)]
    for keys in itertools.product("abc", repeat=size):
        if len(set(keys)) == 1:
            continue
        world = World([keys], [False])
        everywhere = world.run("allreduce", list(terms))
        assert len(set(everywhere)) == 1
        for root in range(size):
            plans = [splits.reduce_group_by_group(rank, own[0], root) for rank, own in enumerate(world.splits)]
            assert world.run("reduce", list(terms), root, plans)[root] == everywhere[0], (keys, root)


def test_a_reduce_on_a_grid_needs_no_broadcast() -> None:
    split = plan_split("abab", cartesian=True)
    for root, rank in itertools.product(range(4), repeat=2):
        collectives = [step.collective for step in splits.reduce_group_by_group(rank, split, root)]
        assert set(collectives) == {"reduce"} and len(collectives) <= 2


def some_roots(n: int) -> Iterable[int]:
    return range(n) if n <= 8 else (1, n // 2, n - 1)


@pytest.mark.parametrize("cartesian", [True, False])
@pytest.mark.parametrize("pattern", KEY_PATTERNS)
def test_collectives_over_one_level(pattern: str, cartesian: bool) -> None:
    for n in range(1, 65):
        check_collectives(World([keys_of(pattern, n)], [cartesian]), some_roots(n))


@pytest.mark.parametrize("cartesian", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("outer", KEY_PATTERNS)
def test_collectives_over_two_levels(outer: str, cartesian: tuple[bool, bool]) -> None:
    for n in (*range(1, 25), 31, 32, 33, 64):
        inner = list(KEY_PATTERNS)[n % len(KEY_PATTERNS)]
        check_collectives(World([keys_of(outer, n), keys_of(inner, n)], cartesian), some_roots(n))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_collectives_over_random_levels(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 24))
    keys = st.lists(st.integers(0, data.draw(st.integers(0, 5))), min_size=n, max_size=n)
    levels = data.draw(st.lists(st.tuples(keys, st.booleans()), min_size=1, max_size=3))
    world = World([level[0] for level in levels], [level[1] for level in levels])
    check_collectives(world, [data.draw(st.integers(0, n - 1))])


def test_a_grid_takes_two_steps_and_a_tree_three() -> None:
    keys = [rank // 4 for rank in range(16)]
    for cartesian, num_steps in ((True, 2), (False, 3)):
        world = World([keys], [cartesian])
        for collective in ("allreduce", "barrier"):
            assert len(world.plan(collective)[0]) == num_steps
        for root in range(16):  # no additional broadcast, for any root
            for collective in ("reduce", "broadcast"):
                assert max(len(steps) for steps in world.plan(collective, root)) == 2


def test_the_simulation_detects_a_wrong_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([[0, 0, 1, 1]], [False])
    right = world.plan("allreduce")
    monkeypatch.setattr(world, "plan", lambda collective, root: [steps[:-1] for steps in right])
    each = [contribution(rank) for rank in range(4)]
    assert world.run("allreduce", list(each)) != [sum(each)] * 4
    monkeypatch.setattr(world, "plan", lambda collective, root: [right[0][::-1], *right[1:]])
    with pytest.raises(AssertionError, match="deadlock"):
        world.run("allreduce", list(each))


# --- hosts, cores, devices -------------------------------------------------------------------------------


def test_host_keys_number_hosts_by_first_appearance() -> None:
    assert splits.host_keys(["b", "a", "b", "c", "a"]) == [0, 1, 0, 2, 1]
    assert splits.host_keys([]) == []


@given(
    st.integers(1, 8).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_ipc_groups_are_cliques(access: list[list[bool]]) -> None:
    groups = gpus.ipc_groups(access)
    mutual = [[access[i][j] and access[j][i] for j in range(len(access))] for i in range(len(access))]
    for j, group in enumerate(groups):
        for i in range(j):
            assert groups[i] != group or mutual[i][j]
        earlier = [i for i in range(j) if groups[i] < group]
        for number in {groups[i] for i in earlier}:  # it could not have joined an earlier group
            assert not all(mutual[i][j] for i in range(j) if groups[i] == number)
    assert sorted(set(groups)) == list(range(max(groups) + 1))


def test_ipc_groups_of_two_switches() -> None:
    access = [[i // 4 == j // 4 for j in range(8)] for i in range(8)]
    assert gpus.ipc_groups(access) == [0] * 4 + [1] * 4
    assert gpus.ipc_groups([]) == []
    with pytest.raises(TorchMPIError, match="square"):
        gpus.ipc_groups([[True, False]])


@given(st.frozensets(st.integers(0, 127), min_size=1, max_size=64), st.integers(2, 16))
def test_binding_partitions_the_common_mask(mask: frozenset[int], num_ranks: int) -> None:
    parts = affinity.plan_binding([mask] * num_ranks)
    if num_ranks > len(mask):
        assert parts is None
        return
    assert parts is not None and len(parts) == num_ranks
    assert [cpu for part in parts for cpu in sorted(part)] == sorted(mask)  # disjoint, complete, contiguous
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_bound_ranks_are_not_bound_again() -> None:
    both = frozenset({0, 1})
    assert affinity.plan_binding([]) is None
    assert affinity.plan_binding([both]) is None
    assert affinity.plan_binding([frozenset({0}), frozenset({1})]) is None
    assert affinity.plan_binding([both, frozenset({1, 2})]) is None
    assert affinity.plan_binding([frozenset({0})] * 2) is None


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_binding_keeps_the_threads_of_a_core_and_the_cores_of_a_package_together(num_ranks: int) -> None:
    # 2 packages of 4 cores with 2 threads; the numbering alternates between packages, siblings are 8 apart
    cores = {cpu: (cpu % 2, cpu % 8 // 2) for cpu in range(16)}
    parts = affinity.plan_binding([frozenset(range(16))] * num_ranks, cores=cores)
    assert parts is not None
    assert all({(cpu + 8) % 16 for cpu in part} == part for part in parts)
    if num_ranks % 2 == 0:
        assert all(len({cores[cpu][0] for cpu in part}) == 1 for part in parts)


def test_binding_splits_cores_when_there_are_fewer_than_ranks() -> None:
    cores = {cpu: (0, cpu % 2) for cpu in range(4)}
    parts = affinity.plan_binding([frozenset(range(4))] * 4, cores=cores)
    assert parts == [{0}, {2}, {1}, {3}]


def test_torch_threads() -> None:
    mask = frozenset(range(8))
    assert [affinity.torch_threads(mask, n) for n in (1, 2, 3, 8, 100)] == [8, 4, 2, 1, 1]
    siblings = {cpu: (0, cpu // 2) for cpu in mask}
    assert affinity.torch_threads(mask, 2, cores=siblings) == 2


def test_device_index() -> None:
    assert [devices.device_index(rank, 3) for rank in range(5)] == [0, 1, 2, 0, 1]
    assert {devices.device_index(rank, 1) for rank in range(8)} == {0}
    assert devices.device_index(0, 0) is None


def test_the_root_is_the_first_rank_unless_another_one_is_given():
    tree = plan_split(["a", "a", "b", "b"], cartesian=False)
    for collective in ("reduce", "broadcast"):
        for rank in range(4):
            assert steps_for(collective, rank, [tree]) == steps_for(collective, rank, [tree], root=0)


@pytest.mark.parametrize("root", range(4))
def test_group_by_group_only_another_root_than_the_first_of_a_group_gets_a_broadcast(root):
    tree = plan_split(["a", "a", "b", "b"], cartesian=False)
    for rank in range(4):
        steps = splits.reduce_group_by_group(rank, tree, root)
        is_told = root % 2 == 1 and rank // 2 == root // 2
        assert [step.collective for step in steps] == [
            "reduce", *(["reduce"] if rank % 2 == 0 else []), *(["broadcast"] if is_told else []),
        ]  # fmt: skip
