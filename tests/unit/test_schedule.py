"""To a user of several hosts: plans of messages for 1 to 64 ranks give each rank its result."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchmpi.backends import plan_cost
from torchmpi.tensors import schedule
from torchmpi.tensors.schedule import Round

SIZES = range(1, 65)
Held = dict[int, set[tuple[int, int]]]
"""The blocks that each rank has: (origin, block)."""


def blocks_of(message: schedule.Message, size: int) -> list[int]:
    return [(message.first + i) % size for i in range(message.num_blocks)]


def carry_out(plans: list[list[Round]], held: Held, *, moved_as: Callable[[int, int], int]) -> int:
    """Run all plans with messages that wait for their receiver, as MPI's long ones do; returns the number of rounds.

    `moved_as(sender, block)` returns the origin of a block. Raises if a rank sends a block that it does not have, if a
    block arrives twice, or if ranks wait for each other.
    """
    size, done = len(plans), [0] * len(plans)
    waves = 0
    while any(done[rank] < len(plans[rank]) for rank in range(size)):
        current = {rank: plans[rank][done[rank]] for rank in range(size) if done[rank] < len(plans[rank])}
        ready = {
            rank
            for rank, step in current.items()
            if all(_answers(current, rank, message) for message in (*step.sends, *step.receives))
        }
        # A round ends when its messages match those of the peers' current rounds.
        assert ready, f"ranks {sorted(current)} wait for each other"
        arrived: list[tuple[int, tuple[int, int]]] = []
        for rank in ready:
            for message in current[rank].sends:
                for block in blocks_of(message, size):
                    item = (moved_as(rank, block), block)
                    assert item in held[rank], f"rank {rank} sends {item}, which it does not have"
                    arrived.append((message.peer, item))
        for rank, item in arrived:
            assert item not in held[rank], f"rank {rank} gets {item} twice"
            held[rank].add(item)
        for rank in ready:
            done[rank] += 1
        waves += 1
    return waves


def _answers(current: dict[int, Round], rank: int, message: schedule.Message) -> bool:
    """Return whether the current round of the peer contains the other end of this message."""
    peer = current.get(message.peer)
    if peer is None:
        return False
    others = peer.receives if message in current[rank].sends else peer.sends
    return (rank, message.first, message.num_blocks) in others


@pytest.mark.parametrize("size", SIZES)
def test_exchange_delivers_all_versions_of_each_block(size: int) -> None:
    held: Held = {rank: {(rank, block) for block in range(size)} for rank in range(size)}
    rounds = carry_out([[schedule.exchange(rank, size)] for rank in range(size)], held, moved_as=lambda rank, _: rank)
    for rank in range(size):
        assert {origin for origin, block in held[rank] if block == rank} == set(range(size))
        assert len(schedule.exchange(rank, size).sends) == size - 1
    assert rounds == 1


@pytest.mark.parametrize("size", SIZES)
def test_exchange_distributes_the_messages_over_the_ranks(size: int) -> None:
    """The i-th message of all ranks goes to different ranks."""
    rounds = list(zip(*(schedule.exchange(rank, size).sends for rank in range(size)), strict=True))
    assert [len({message.peer for message in messages}) for messages in rounds] == [size] * (size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_allgathers_deliver_each_block_once(size: int) -> None:
    for plan in (lambda rank: [schedule.spread(rank, size)], lambda rank: schedule.doubling(rank, size)):
        held: Held = {rank: {(rank, rank)} for rank in range(size)}
        carry_out([plan(rank) for rank in range(size)], held, moved_as=lambda _, block: block)
        assert all(held[rank] == {(block, block) for block in range(size)} for rank in range(size))
        # Each block arrives once at each other rank: the least that an allgather can send.
        assert all(sum(m.num_blocks for step in plan(rank) for m in step.sends) == size - 1 for rank in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_doubling_takes_log2_rounds_and_contiguous_memory(size: int) -> None:
    for rank in range(size):
        rounds = schedule.doubling(rank, size)
        assert len(rounds) == (size - 1).bit_length()
        have = 1
        for step in rounds:
            (received,) = step.receives
            assert (
                received.first - rank
            ) % size == have  # directly after the received blocks, counted from the own block
            have += received.num_blocks
        assert have == size


@pytest.mark.parametrize("size", SIZES)
def test_broadcasts_reach_each_rank_once(size: int) -> None:
    for root in {0, size // 2, size - 1}:
        trees = [schedule.tree(rank, size, root) for rank in range(size)]
        chains = [_one_after_the_other(schedule.chain(rank, size, root)) for rank in range(size)]
        for plans in (trees, chains):
            held: Held = {rank: {(0, 0)} if rank == root else set() for rank in range(size)}
            carry_out(plans, held, moved_as=lambda *_: 0)
            assert all(held[rank] == {(0, 0)} for rank in range(size))
            assert all(len(step.receives) <= 1 for plan in plans for step in plan)
        assert max(len(plan) for plan in trees) == (size - 1).bit_length()
        assert all(sum(len(step.sends) for step in plan) <= 1 for plan in chains)


def _one_after_the_other(step: Round) -> list[Round]:
    """The steps of a chain for one chunk: receive it, then send it on."""
    rounds = [Round(receives=step.receives)] if step.receives else []
    return [*rounds, Round(sends=step.sends)] if step.sends else rounds


@pytest.mark.parametrize("way", (1, -1))
@pytest.mark.parametrize("size", SIZES)
def test_relayed_blocks_arrive_at_their_ranks_in_log2_rounds(size: int, way: int) -> None:
    """The blocks are moved as the backend does it, from the same position of one rank to that of another."""
    plans = [schedule.relayed_exchange(rank, size, backward=way < 0) for rank in range(size)]
    held = [[(rank, (rank + way * position) % size) for position in range(size)] for rank in range(size)]
    assert {len(plan) for plan in plans} == {(size - 1).bit_length()}
    for relays in zip(*plans, strict=True):
        moved = [[held[rank][position] for position in relays[rank].positions] for rank in range(size)]
        for rank, relay in enumerate(relays):
            assert relays[relay.origin].target == rank and relays[relay.origin].positions == relay.positions
            for position, block in zip(relay.positions, moved[relay.origin], strict=True):
                held[rank][position] = block
    for rank in range(size):
        assert held[rank] == [((rank - way * position) % size, rank) for position in range(size)]
        if way < 0:
            peers = [(step.sends[0].peer, step.receives[0].peer) for step in schedule.doubling(rank, size)]
            assert [(relay.target, relay.origin) for relay in plans[rank]] == peers


@pytest.mark.parametrize("size", SIZES)
def test_cost_of_the_plans_of_an_allreduce(size: int) -> None:
    """Rounds, messages and bytes of every rank, counted in the plans, against the figures of the first rank."""
    num_bytes = 6000.0 * size
    costs = plan_cost.allreduce_plans(size, num_bytes)
    rounds = (size - 1).bit_length()
    assert costs["direct"][:3] == (2, 2 * (size - 1), 2 * (size - 1) * 6000)
    assert costs["gather"] == (rounds, rounds, (size - 1) * num_bytes, size * num_bytes)
    for rank in range(size):
        passed_on = sum(len(relay.positions) for relay in schedule.relayed_exchange(rank, size))
        assert costs["relayed"][:3] == (2 * rounds, 2 * rounds, (passed_on + size - 1) * 6000)
    # No more than half of the blocks, rounded up, move in a round.
    assert costs["relayed"].num_bytes <= (rounds * (size + 1) / 2 + size - 1) * 6000


def test_more_ranks_relay_longer_vectors() -> None:
    limits = [plan_cost.most_relayed_bytes(1 << k, 1 << 30) for k in range(1, 14)]
    assert limits == sorted(limits) and limits[0] == 0 < limits[-1]
    for k, limit in enumerate(limits, start=1):
        plans = plan_cost.allreduce_plans(1 << k, limit or 1024)
        assert (plans["relayed"].seconds() < plans["direct"].seconds()) == (limit > 0)
    slow_starts = plan_cost.Network(message=1e-3)
    assert plan_cost.allreduce_plans(8, 8192)["relayed"].seconds(slow_starts) < plan_cost.allreduce_plans(8, 8192)[
        "direct"
    ].seconds(slow_starts)


@pytest.mark.parametrize("size", SIZES)
def test_collect_delivers_all_blocks_to_the_root(size: int) -> None:
    for root in {0, size // 2, size - 1}:
        held: Held = {rank: {(rank, rank)} for rank in range(size)}
        plans = [[schedule.collect(rank, size, root)] for rank in range(size)]
        carry_out(plans, held, moved_as=lambda rank, _: rank)
        assert held[root] == {(block, block) for block in range(size)}


def test_the_simulation_detects_wrong_plans() -> None:
    good = [[schedule.spread(rank, 3)] for rank in range(3)]
    for broken in (
        [good[0], good[1], [Round(good[2][0].sends[:1], good[2][0].receives)]],  # omits a message
        [good[0], good[1], []],  # does not take part
        [[Round(receives=good[0][0].receives), Round(sends=good[0][0].sends)], *good[1:]],  # receives first
    ):
        with pytest.raises(AssertionError):
            carry_out(broken, {rank: {(rank, rank)} for rank in range(3)}, moved_as=lambda _, block: block)
