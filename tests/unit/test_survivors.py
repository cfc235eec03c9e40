"""To whoever loses a rank: the others agree who is left, in any order of messages."""

from __future__ import annotations

import random
import threading
import time
from collections import deque

import pytest

from torchmpi.errors import RankLostError, StallError
from torchmpi.launch.survivors import Survivors


class Wires:
    """Ranks in threads, with a first-in-first-out wire between each pair; a lost rank neither sends nor receives."""

    def __init__(self, networks: list[str], seed: int = 0) -> None:
        self.ranks = [Survivors(rank, networks) for rank in range(len(networks))]
        self.random, self.lock = random.Random(seed), threading.RLock()
        self.queues: dict[tuple[int, int], deque[bytes]] = {}
        self.killed: set[int] = set()
        self.results: dict[int, object] = {}

    def tell(self, sender: int) -> None:
        with self.lock:
            for newcomer in self.ranks[sender].unreached():
                if newcomer in self.killed:
                    self.ranks[sender].note(newcomer, "cannot be reached")
                else:
                    self.ranks[sender].note_reached(newcomer, "host")
            view = self.ranks[sender].own_view()
            for receiver in range(len(self.ranks)):
                if sender not in self.killed and receiver != sender:
                    self.queues.setdefault((sender, receiver), deque()).append(view)

    def kill(self, rank: int) -> None:
        """The others see the end of their connections, each at a moment of its own."""
        with self.lock:
            self.killed.add(rank)
            for receiver in range(len(self.ranks)):
                self.queues.setdefault((rank, receiver), deque()).append(b"end")

    def cut(self, one: int, other: int) -> None:
        for sender, receiver in ((one, other), (other, one)):
            self.queues.setdefault((sender, receiver), deque()).append(b"end")

    def deliver_one(self) -> bool:
        with self.lock:
            full = [pair for pair, queue in self.queues.items() if queue and pair[1] not in self.killed]
            if not full:
                return False
            sender, receiver = self.random.choice(full)
            view, rank = self.queues[sender, receiver].popleft(), self.ranks[receiver]
            is_new = rank.note(sender, "killed") if view == b"end" else rank.hear(sender, view)
        if is_new:
            self.tell(receiver)
        return True

    def agree(self, next_victim: int | None = None) -> None:
        """Let all ranks that are not killed agree, while messages arrive and perhaps one more is killed."""
        in_call: set[int] = set()
        over = threading.Event()

        def run(rank: int) -> None:
            try:
                while rank not in self.killed:
                    self.results[rank] = self.ranks[rank].agree(lambda: self.tell(rank), 20)
                    in_call.add(rank)
                    while self.ranks[rank].is_agreed and not over.is_set():
                        time.sleep(1e-3)  # in a call, which fails if another one is lost
                    in_call.discard(rank)
                    if self.ranks[rank].is_agreed:
                        return
            except (RankLostError, StallError) as error:
                self.results[rank] = error

        alive = [rank for rank in range(len(self.ranks)) if rank not in self.killed]
        threads = [threading.Thread(target=run, args=(rank,)) for rank in alive]
        for thread in threads:
            thread.start()
        num_before = self.random.randrange(12)
        while any(thread.is_alive() for thread in threads):
            has_delivered = self.deliver_one()
            num_before -= has_delivered
            if not has_delivered:
                if in_call.issuperset(rank for rank, thread in zip(alive, threads, strict=True) if thread.is_alive()):
                    over.set()
                time.sleep(1e-3)
            if num_before < 0 and next_victim is not None and not over.is_set():
                self.kill(next_victim)
                self.ranks[next_victim].exclusion = "killed"  # ends its thread, which the next line wakes
                self.ranks[next_victim].note(next_victim, "killed")
                next_victim = None
        while self.deliver_one():
            pass


@pytest.mark.parametrize("seed", range(12))
def test_all_remaining_ranks_agree(seed):
    wires = Wires(["host"] * 5, seed)
    *victims, last = wires.random.sample(range(5), 2 + seed % 3)
    for victim in victims:
        wires.kill(victim)
    while not all(wires.ranks[rank].last_reason for rank in range(5) if rank not in wires.killed):
        wires.deliver_one()  # recover() is called by ranks that have noticed something
    wires.agree(last)
    remaining = tuple(rank for rank in range(5) if rank not in wires.killed)
    assert {rank: wires.results[rank] for rank in remaining} == dict.fromkeys(remaining, remaining)


@pytest.mark.parametrize("victim", [None, 0, 4, "before"])
@pytest.mark.parametrize("seed", range(3))
def test_new_ranks_join_one_after_the_other(seed, victim):
    """While the second one joins, one of the ranks may be lost, the first new one among them, or it may have ended."""
    wires = Wires(["host"] * 4, seed)
    wires.kill(1)
    while wires.deliver_one():
        pass
    wires.agree()
    members = (0, 2, 3)
    for newcomer in (4, 5):
        for rank in members:
            wires.ranks[rank].offer(newcomer, "place")
        view = wires.ranks[members[0]].own_view()
        new = Survivors.joining(newcomer, dict.fromkeys((*members, newcomer), "host"), members, view)
        wires.ranks.append(new)
        if (newcomer, victim) == (5, "before"):
            wires.killed.add(5)
        wires.agree(victim if newcomer == 5 and victim != "before" else None)
        members = tuple(rank for rank in (*members, newcomer) if rank not in wires.killed)
        assert {rank: wires.results[rank] for rank in members} == dict.fromkeys(members, members)
    assert len({wires.ranks[rank].epoch for rank in members}) == 1


def test_messages_are_heard_while_a_rank_tells_the_others():
    """Regression: the rank held its lock meanwhile, for which the thread waited that delivered a message."""
    one, other = (Survivors(rank, ["host"] * 3) for rank in range(2))
    for each in (one, other):
        each.note(2, "killed")
    delivered = []

    def tell() -> None:
        thread = threading.Thread(target=lambda: one.hear(1, other.own_view()), daemon=True)
        thread.start()
        thread.join(5)
        delivered.append(not thread.is_alive())

    other._is_ready = True
    assert one.agree(tell, 20) == (0, 1)
    assert delivered == [True]


def test_a_rank_that_cannot_be_reached_by_one_is_excluded_by_all_and_told():
    wires = Wires(["a", "b", "c"])
    wires.cut(1, 2)
    while wires.deliver_one():
        pass
    wires.agree()
    excluded = [rank for rank, result in wires.results.items() if isinstance(result, RankLostError)]
    assert len(excluded) == 1 and excluded[0] in (1, 2), wires.results
    assert "go on without it" in str(wires.results[excluded[0]])
    left = tuple(rank for rank in range(3) if rank not in excluded)
    assert [wires.results[rank] for rank in left] == [left, left]


def test_of_two_halves_of_the_hosts_one_goes_on():
    wires = Wires(["a", "a", "b", "b"])
    for one in (0, 1):
        for other in (2, 3):
            wires.cut(one, other)
    while wires.deliver_one():
        pass
    wires.agree()
    assert [wires.results[rank] for rank in (0, 1)] == [(0, 1), (0, 1)]
    for rank in (2, 3):
        assert "may be alive behind a cut link" in str(wires.results[rank])


def test_ranks_of_one_host_go_on_in_any_number():
    wires = Wires(["a", "a", "a"])
    wires.kill(0)
    wires.kill(1)
    while wires.deliver_one():
        pass
    wires.agree()
    assert wires.results == {2: (2,)}


def test_a_rank_that_does_not_come_is_named():
    ranks = Survivors(0, ["a"] * 3)
    ranks.note(2, "rank 2 is gone")
    with pytest.raises(StallError, match=r"rank 1 still runs, but has not called recover\(\) within 0.05 s.*rank 2 is"):
        ranks.agree(lambda: None, 0.05)


def met(rank: Survivors, seconds: float = 20) -> None:
    rank.meet(lambda: None, seconds, time.monotonic() + seconds)


def view_of(rank: int, lost: int, *, ready: bool = True) -> bytes:
    other = Survivors(rank, ["host"] * 4)
    other.note(lost, "killed")
    other._is_ready = ready
    return other.own_view()


def test_ranks_are_named_as_the_program_numbers_them():
    """Regression: by their first numbers, and with spare ranks by other positions."""
    rank = Survivors(2, ["a"] * 4)
    rank.note(0, "killed")
    rank.settle((1, 2, 3))
    rank.note(1, "killed")
    with pytest.raises(StallError, match=r"^rank 1: rank 2 still runs"):
        met(rank, 0.05)
    replaced = Survivors(2, ["a"] * 3, {0: "spare rank 0", 1: "rank 1", 2: "rank 0"}.__getitem__)
    replaced.note(0, "killed")
    with pytest.raises(StallError, match=r"^rank 0: rank 1 still runs"):
        met(replaced, 0.05)


def test_ranks_that_meet_may_know_of_different_losses():
    rank = Survivors(0, ["host"] * 4)
    rank.note(2, "killed")
    rank.hear(1, view_of(1, lost=2))
    rank.hear(2, view_of(2, lost=3))  # no view of a lost rank counts
    rank.note(3, "killed")
    met(rank)
    rank.settle((0, 1))
    assert rank.members == (0, 1) and rank.is_agreed


def test_a_view_of_an_earlier_loss_and_a_rank_that_is_not_ready_do_not_count():
    rank = Survivors(0, ["host"] * 4)
    rank.note(3, "killed")
    for other in (1, 2):
        rank.hear(other, view_of(other, lost=3))
    met(rank)
    rank.settle((0, 1, 2))
    rank.note(2, "killed")
    with pytest.raises(StallError, match="rank 1 still runs"):
        met(rank, 0.1)
    rank.hear(1, view_of(1, lost=2, ready=False))
    with pytest.raises(StallError, match="rank 1 still runs"):
        met(rank, 0.1)
    rank.hear(1, view_of(1, lost=2))
    met(rank)


def test_a_rank_that_others_miss_is_lost_when_that_is_settled():
    rank = Survivors(0, ["host"] * 3)
    rank.settle((0, 2))
    assert rank.members == (0, 2) and rank.last_reason == "rank 1 is gone"
