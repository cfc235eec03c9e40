"""To whoever reads a report: what a rank tells of itself, whom it asks how, and who waits for whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.call_log import CallLog
from torchmpi.communicators.rank_status import NO_ANSWER, LastCall, RankStatus
from torchmpi.communicators.status_board import StatusBoard
from torchmpi.shared_memory import memory_layout
from torchmpi.shared_memory.segments import Segment
from torchmpi.supervision.deadlock import find_circle, waits_of
from torchmpi.supervision.status_exchange import CallTimes, StatusExchange

BARRIER = call_code("barrier")
WAIT_SECONDS = 20.0


@given(some.lists(some.sets(some.integers(0, 6)), min_size=7, max_size=7))
def test_a_circle_is_found_if_and_only_if_there_is_one(edges):
    waits = {rank: sorted(others - {rank}) for rank, others in enumerate(edges)}
    reached = {rank: set(others) for rank, others in waits.items()}
    for _ in waits:
        reached = {rank: others.union(*(reached[other] for other in others)) for rank, others in reached.items()}
    for through in (None, *waits):
        circle = find_circle(waits, through)
        in_circles = [rank for rank in waits if rank in reached[rank]]
        assert bool(circle) == (bool(in_circles) if through is None else through in in_circles)
        assert not circle or through in (None, circle[0])
        assert all(after in waits[before] for before, after in zip(circle, [*circle[1:], *circle[:1]], strict=True))


def test_a_rank_waits_for_those_that_are_known_to_be_behind():
    there = {5: LastCall(2, True)}
    states = {
        0: RankStatus(calls=there, blocked=(5, 2)),
        1: RankStatus(calls={5: LastCall(1)}),  # behind
        2: RankStatus(calls=there),  # has arrived
        3: RankStatus(calls={6: LastCall(1)}),  # no rank is ahead of it on that group
        4: NO_ANSWER,
        5: RankStatus(calls={5: LastCall(0)}, blocked=(6, 2)),
    }
    assert waits_of(states) == {0: [1, 5], 1: [], 2: [], 3: [], 4: [], 5: [3]}


class Group(SimpleNamespace):
    """What the exchange reads of a group."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class Ranks:
    """Ranks of one host, on a group of all and one of the first two, whose "watchdogs" are called by the test."""

    def __init__(self) -> None:
        segments = [Segment.create("exchange", 3 * memory_layout.BLOCK_BYTES) for _ in range(2)]
        self.boards = [StatusBoard(segment, 3) for segment in segments]
        for segment in segments:
            segment.withdraw()
        self.exchanges = [self._exchange_of(rank) for rank in range(3)]

    def _exchange_of(self, rank: int) -> StatusExchange:
        context: Any = SimpleNamespace(hosts=(0, 0, 0), groups=[], failure="")
        for key, ranks in ((1, (0, 1, 2)), (2, (0, 1))):
            if rank not in ranks:
                continue
            board = self.boards[key - 1]
            log = CallLog(f"group {key}", rank, len(ranks), board)
            context.groups.append(Group(
                key=key, name=log.name, rank=rank, size=len(ranks), world_ranks=ranks, log_board=board, call_log=log,
                intra_host=None, inter_host=None, peer_queues={},
            ))  # fmt: skip
        return StatusExchange(context, context.groups[0])

    def enter(self, rank: int, group: int) -> None:
        log = self.exchanges[rank].context.groups[group].call_log
        log.enter(BARRIER, ())
        log.announce()

    def close(self) -> None:
        for board in self.boards:
            board.close()


@pytest.fixture
def ranks(monkeypatch) -> Iterator[Ranks]:
    monkeypatch.setattr(CallLog, "publish", None)
    found = Ranks()
    yield found
    found.close()


def test_a_rank_tells_its_call_and_the_groups_on_which_it_is_behind(ranks):
    ranks.enter(0, 1)
    ranks.enter(1, 0)
    statuses = [exchange.own() for exchange in ranks.exchanges]
    assert [status.doing for status in statuses] == [
        "barrier(), call #1 on communicator group 2", "barrier(), call #1 on communicator group 1", "not in a call",
    ]  # fmt: skip
    behind = [{1: LastCall(0)}, {2: LastCall(0)}, {1: LastCall(0)}]
    assert [dict(status.calls) for status in statuses] == behind
    assert all("test_status_exchange" in status.line for status in statuses)
    ranks.exchanges[2].context.failure = "failed too, at train.py:7: ValueError"
    assert str(ranks.exchanges[2].own()) == "failed too, at train.py:7: ValueError"


def test_a_rank_answers_while_it_waits_for_an_answer(ranks):
    """Otherwise two watchdogs that ask each other would wait in vain."""
    found: dict[int, dict[int, RankStatus]] = {}
    first, second, _ = ranks.exchanges

    def ask(own: int, other: int) -> None:
        exchange = ranks.exchanges[own]
        found[own] = exchange.ask(exchange.context.groups[1], [other], WAIT_SECONDS)

    threads = [threading.Thread(target=ask, args=each) for each in ((0, 1), (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # the other one may have asked when its own answer had arrived
            first.answer_all()
            second.answer_all()
            thread.join(0.01)
    assert {own: [*answers] for own, answers in found.items()} == {0: [1], 1: [0]}
    assert all(status.doing == "not in a call" for answers in found.values() for status in answers.values())


def test_of_everyone_also_those_without_an_answer_are_known(ranks):
    first, second, third = ranks.exchanges
    answering = threading.Event()

    def answer() -> None:
        while not answering.wait(0.01):
            second.answer_all()

    thread = threading.Thread(target=answer)
    thread.start()
    third.context.groups[0].call_log.close()  # as in stop()
    for patience in (0.3, WAIT_SECONDS):  # on a busy machine the second one may take long
        states = first.ask_everyone(patience)
        if states[1] != NO_ANSWER:
            break
    answering.set()
    thread.join()
    assert {rank: status.doing or status.problem for rank, status in states.items()} == {
        1: "not in a call", 2: NO_ANSWER.problem,
    }  # fmt: skip


def test_a_call_is_late_from_when_it_was_first_seen():
    times, large = CallTimes(), 10**9
    subject: Any = type("Subject", (), {})()
    assert times.begin(subject, large) and not times.begin(subject, int(str(large)))
    time.sleep(0.01)
    assert times.seconds(subject, large) >= 0.01 and times.longest([subject]) >= 0.01
    assert times.seconds(subject, large + 1) == 0
    assert times.begin(subject, "send(1)") and times.begin(subject, "".join(["send", "(1)"]))  # a second message
    times.end(subject)
    assert times.longest([subject]) == 0
