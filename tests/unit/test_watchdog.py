"""To whoever has a job that hangs: the watchdog reports calls that wait too long, and ends them, by what ranks tell."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.call_log import CallLog
from torchmpi.communicators.rank_status import LastCall, RankStatus
from torchmpi.communicators.status_board import StatusBoard
from torchmpi.config import Config
from torchmpi.shared_memory import memory_layout
from torchmpi.shared_memory.segments import Segment
from torchmpi.supervision.status_exchange import StatusExchange
from torchmpi.supervision.watchdog import Watchdog

BARRIER = call_code("barrier")
GROUPS = {1: (0, 1, 2), 2: (0, 1)}
"""The ranks of each group, by its key; the first one is the world."""
CIRCLE = "rank 0 waits for rank 1, which waits for rank 0, in calls on different communicators: none can end. "


class Group(SimpleNamespace):
    """What the watchdog reads of a group."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class Rank:
    """A rank of a job, its watchdog, and what that has done."""

    def __init__(self, rank: int, boards: dict[int, StatusBoard], hosts: tuple[int, ...]) -> None:
        context: Any = SimpleNamespace(hosts=hosts, groups=[], failure="", loss="", num_stalls=0, flight_record=None)
        self.ended_calls: list[tuple[int, str]] = []
        self.ended_job: list[str] = []
        for key, ranks in GROUPS.items():
            if rank in ranks:
                board = boards.get(key)
                context.groups.append(Group(
                    key=key, name=f"group {key}", rank=rank, size=len(ranks), world_ranks=ranks, where=f"rank {rank}",
                    hosts=sorted({*hosts}), log_board=board, call_log=CallLog(f"group {key}", rank, len(ranks), board),
                    intra_host=None, inter_host=None, peer_queues={}, timeout_seconds=0.0, can_expire=board is not None,
                    end_call=lambda seq, report: self.ended_calls.append((seq, report)),
                ))  # fmt: skip
        self.groups: dict[int, Any] = {group.key: group for group in context.groups}
        self.exchange = StatusExchange(context, self.groups[1])
        self.watchdog = Watchdog(context, Config(), self.exchange, lambda message, _: self.ended_job.append(message))

    def wait(self, key: int, seconds: float) -> None:
        """Enter a call on a group, as if that had been so many seconds ago, and the main thread waited in it."""
        group = self.groups[key]
        group.call_log.enter(BARRIER, ())
        group.call_log.announce()
        self.exchange.times._since[group] = group.call_log.seq, time.monotonic() - seconds
        waiting_ranks: Any = self.exchange.waiting_ranks
        waiting_ranks.blocking_call = lambda: (group, group.call_log.seq)


class Job:
    """Ranks of one host; all but those that a test watches answer questions, as their watchdogs do."""

    def __init__(self) -> None:
        segments = {key: Segment.create("watchdog", 3 * memory_layout.BLOCK_BYTES) for key in GROUPS}
        self.boards = {key: StatusBoard(segment, 3) for key, segment in segments.items()}
        for segment in segments.values():
            segment.withdraw()
        self.ranks = [Rank(rank, self.boards, (0, 0, 0)) for rank in range(3)]

    def check(self, rank: int, key: int, silent: Iterable[int] = ()) -> None:
        """Let the watchdog of a rank check a group, while the others answer, but for those that are `silent`."""
        asking, others = self.ranks[rank], [each for each in range(3) if each != rank and each not in silent]
        # What a watchdog does until it has its answers: no thread of theirs can be late.
        asking.exchange.answer_all = lambda: [self.ranks[other].exchange.answer_all() for other in others]  # type: ignore
        asking.watchdog._check_group(asking.groups[key])
        del asking.exchange.answer_all

    def close(self) -> None:
        for rank in self.ranks:
            rank.watchdog._stack_requests.close()
        for board in self.boards.values():
            board.close()


@pytest.fixture
def job(monkeypatch) -> Iterator[Job]:
    monkeypatch.setattr(CallLog, "publish", None)
    found = Job()
    yield found
    found.close()


def test_ranks_of_a_host_that_wait_for_each_other_end_their_calls(job):
    job.ranks[0].wait(2, 3.0)
    job.ranks[1].wait(1, 3.0)
    job.check(0, 2)
    job.check(1, 1)
    ((seq, report),) = job.ranks[0].ended_calls
    head = r"rank 0 has waited \d+ s in barrier\(\), call #1 on communicator group 2. Not arrived:"
    assert seq == 1 and re.match(rf"{head}\n  rank 1, after 0 calls: at ", report) and CIRCLE in report, report
    ((seq, report),) = job.ranks[1].ended_calls
    assert seq == 1 and "\nrank 1 waits for rank 0, which waits for rank 1" in report, report
    assert "\n  rank 0, after 0 calls: at " in report and "\n  rank 2, after 0 calls: at " in report, report
    assert not any(rank.ended_job for rank in job.ranks)


def test_a_rank_that_does_not_answer_is_in_no_circle(job, monkeypatch):
    monkeypatch.setattr("torchmpi.supervision.watchdog._STATUS_TIMEOUT_SECONDS", 0.3)
    job.ranks[0].wait(2, 3.0)
    job.ranks[1].wait(1, 3.0)
    job.check(0, 2, silent=[1])
    assert not job.ranks[0].ended_calls and not job.ranks[0].ended_job


def test_the_lowest_waiting_rank_reports_a_stall(job, monkeypatch, logged):
    monkeypatch.setattr("torchmpi.supervision.watchdog._STATUS_TIMEOUT_SECONDS", 0.3)
    for rank in (0, 1):
        job.ranks[rank].wait(1, 31.0)
    for rank in (1, 0):
        job.check(rank, 1, silent=[2])
    (message,) = logged
    head = r"rank 0 has waited \d+ s in barrier\(\), call #1 on communicator group 1. Not arrived:"
    assert re.match(rf"{head}\n  rank 2 does not reply", message), message
    assert [rank.exchange.context.num_stalls for rank in job.ranks] == [1, 1, 0]


class Heartbeat:
    """Connections to ranks whose status is given. It is also the question to them."""

    is_this_thread, is_stalled = False, True

    def __init__(self, states: dict[int, RankStatus]) -> None:
        self.states, self.wanted = states, set[int]()

    def announce_stall(self) -> None:
        self.is_stalled = True

    def ask(self, ranks: Iterable[int]) -> Heartbeat:
        self.wanted = set(ranks)
        return self

    def is_answered(self) -> bool:
        return self.wanted <= self.states.keys()

    def answers(self) -> dict[int, RankStatus]:
        return {rank: status for rank, status in self.states.items() if rank in self.wanted}


@pytest.fixture
def far(monkeypatch) -> Iterator[Callable[[dict[int, RankStatus]], Rank]]:
    """Makes rank 0 of three hosts, given the status of the others."""
    monkeypatch.setattr("torchmpi.supervision.watchdog._REMOTE_TIMEOUT_SECONDS", 0.1)
    ranks: list[Rank] = []

    def make(states: dict[int, RankStatus]) -> Rank:
        ranks.append(Rank(0, {}, (0, 1, 2)))
        ranks[-1].exchange.heartbeat = Heartbeat(states)  # type: ignore[assignment]
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.watchdog._stack_requests.close()


def test_rank_0_ends_a_job_whose_ranks_wait_for_each_other_between_hosts(far):
    there = RankStatus("barrier(), call #1 on communicator group 1", 3.0, "at train.py:7", calls={2: LastCall(0)})
    rank = far({1: there._replace(blocked=(1, 1)), 2: RankStatus("not in a call")})
    rank.wait(2, 3.0)
    rank.watchdog._check_hosts()
    (message,) = rank.ended_job
    lines = message.split("\n")
    assert lines[0] == CIRCLE.rstrip() and lines[3].startswith("Make the calls"), message
    assert re.match(r"  rank 0: barrier\(\), call #1 on communicator group 2, for \d+ s, at ", lines[1]), message
    assert lines[2] == "  rank 1: barrier(), call #1 on communicator group 1, for 3 s, at train.py:7", message
    rank.ended_job.clear()
    rank.watchdog._check_hosts()  # no rank has told that it waits since
    assert not rank.ended_job


@pytest.mark.parametrize(
    ("states", "lines"),
    [
        (
            {1: RankStatus(line="at train.py:7", calls={1: LastCall(0)}), 2: RankStatus(calls={1: LastCall(1, True)})},
            ["  rank 1, after 0 calls: at train.py:7"],
        ),
        (
            {1: RankStatus(line="at train.py:7"), 2: RankStatus(problem="cannot be asked")},
            [
                "  rank 1, after 0 calls: this communicator does not exist there; at train.py:7",
                "  rank 2 cannot be asked",
            ],
        ),
        (
            {1: RankStatus("failed too, at train.py:7", calls={1: LastCall(0)})},
            [
                "  rank 1, after 0 calls: failed too, at train.py:7",
                "  rank 2 does not reply: it is stopped, or busy outside Python",
            ],
        ),
    ],
    ids=["missing", "no group, or no way", "failing, or silent"],
)
def test_missing_ranks_of_other_hosts_are_described(far, states, lines):
    rank = far(states)
    rank.wait(1, 5.0)
    report = rank.watchdog._report(rank.groups[1], rank.groups[1].call_log.current, 5.0)
    head = "rank 0 has waited 5 s in barrier(), call #1 on communicator group 1. Not arrived:"
    assert report.split("\n") == [head, *lines]
