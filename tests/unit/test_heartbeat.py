"""To whoever loses a host: the connections between hosts notice it, tell all ranks, and end the job once."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from torchmpi.communicators.rank_status import LastCall, RankStatus, await_answers
from torchmpi.launch import network
from torchmpi.supervision import heartbeat as heartbeat_module
from torchmpi.supervision.heartbeat import Heartbeat
from torchmpi.supervision.host_ring import connections, next_hop

PLACEMENTS = [[0, 1], [0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 0, 3], [*range(7)]]
WAIT_SECONDS = 20.0


@pytest.mark.parametrize("hosts", PLACEMENTS, ids=str)
def test_messages_reach_every_rank_and_end_at_a_gap_of_the_ring(hosts):
    pairs = connections(hosts)
    assert len(set(pairs)) == len(pairs)
    ring = [pair for pair in pairs if hosts[pair[0]] != hosts[pair[1]]]
    assert len(ring) == (1 if len(set(hosts)) == 2 else len(set(hosts)))
    for lost in [None, *ring] if len(ring) > 1 else [None]:
        for begin in range(len(hosts)):
            for end in set(range(len(hosts))) - {begin}:
                before, at, steps = begin, begin, 0
                while at != end:
                    closed = {other for pair in ring if pair == lost and at in pair for other in pair}
                    hop = next_hop(hosts, at, end, closed | {before})
                    if hop is None:
                        assert lost is not None
                        break
                    assert (min(at, hop), max(at, hop)) in pairs
                    before, at, steps = at, hop, steps + 1
                    assert steps <= len(hosts) + 2
                assert lost is not None or steps <= len(set(hosts)) // 2 + 2


def status_of(rank: int) -> RankStatus:
    return RankStatus("barrier()", 2.5, f"at line {rank}", calls={7: LastCall(rank, rank % 2 == 0)}, blocked=(7, rank))


def ask(heartbeat: Heartbeat, ranks: set[int], patience_seconds: float = WAIT_SECONDS) -> dict[int, RankStatus]:
    return await_answers(heartbeat.ask(ranks), patience_seconds)


class Ranks:
    """The heartbeats of all ranks, connected by TCP, with their ends."""

    def __init__(self, hosts: list[int], limit_seconds: float = 30.0) -> None:
        self.ends: queue.Queue[tuple[int, str, int]] = queue.Queue()
        self.saved: queue.Queue[tuple[int, str]] = queue.Queue()
        self.heartbeats: list[Heartbeat] = []
        sockets: list[dict[int, socket.socket]] = [{} for _ in hosts]
        for low, high in connections(hosts):
            with network.listen(network.loopback(), 4) as listener:
                sockets[high][low] = socket.create_connection(listener.getsockname()[:2])
                sockets[low][high] = listener.accept()[0]
        self.sockets = sockets
        for rank, own in enumerate(sockets):
            heartbeat = Heartbeat(
                rank,
                hosts,
                [f"h{host}" for host in hosts],
                own,
                limit_seconds=limit_seconds,
                own_status=partial(status_of, rank),
                location=lambda: "at train.py:8",
                end_job=self._end_of(rank),
                save_record=self._save_of(rank),
            )
            self.heartbeats.append(heartbeat)

    def _end_of(self, rank: int) -> Callable[[str, int], None]:
        def end(message: str, status: int) -> None:
            self.ends.put((rank, message, status))
            if message:
                self.heartbeats[rank].announce_end(status)
            while not self.heartbeats[rank]._is_closing:  # the real function ends the process
                time.sleep(0.01)

        return end

    def _save_of(self, rank: int) -> Callable[[str], None]:
        return lambda folder: self.saved.put((rank, folder))

    def next_end(self) -> tuple[int, str, int]:
        return self.ends.get(timeout=WAIT_SECONDS)

    def close(self) -> None:
        for heartbeat in self.heartbeats:
            heartbeat.close()


@pytest.mark.parametrize("hosts", PLACEMENTS, ids=str)
def test_each_rank_asks_all_others(hosts):
    ranks = Ranks(hosts)
    for rank, heartbeat in enumerate(ranks.heartbeats):
        others = set(range(len(hosts))) - {rank}
        assert ask(heartbeat, others) == {other: status_of(other) for other in others}
    ranks.close()
    assert ranks.ends.empty()


def test_the_kernel_watches_the_connections_between_hosts_only():
    """Ranks of one host need no probes, and a stopped process must not look like a lost host."""
    ranks = Ranks([0, 0, 1, 1, 2], limit_seconds=42.0)
    for rank, own in enumerate(ranks.sockets):
        for peer, sock in own.items():
            is_far = ranks.heartbeats[rank]._hosts[rank] != ranks.heartbeats[rank]._hosts[peer]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == is_far
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 42000 * is_far
    ranks.close()


def test_threads_that_ask_at_once_get_their_own_replies():
    """Regression: a request discarded the replies to another one, which then waited until its time limit."""
    ranks = Ranks([0, 0, 1, 1])
    start = threading.Barrier(4)

    def ask_often(others: set[int]) -> bool:
        start.wait(WAIT_SECONDS)
        expected = {other: status_of(other) for other in others}
        return all(ask(ranks.heartbeats[0], others) == expected for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask_often, ({1, 2, 3}, {1, 2, 3}, {2}, {3})))
    ranks.close()


def test_a_rank_that_waits_tells_rank_0():
    ranks = Ranks([0, 0, 1, 1, 2])
    for rank in (3, 0):
        ranks.heartbeats[rank].announce_stall()
        limit = time.monotonic() + WAIT_SECONDS
        while not ranks.heartbeats[0].is_stalled and time.monotonic() < limit:
            time.sleep(0.01)
        assert [heartbeat.is_stalled for heartbeat in ranks.heartbeats] == [True, False, False, False, False]
        ranks.heartbeats[0].is_stalled = False
    ranks.close()


@pytest.mark.parametrize("hosts", PLACEMENTS, ids=str)
def test_each_rank_of_the_other_hosts_saves_its_record_once(hosts):
    ranks = Ranks(hosts)
    for folder in ("first", "second"):
        for rank in (rank for rank, host in enumerate(hosts) if host == hosts[-1]):
            ranks.heartbeats[rank].ask_for_records({"folder": folder, "number": folder})
        others = [rank for rank, host in enumerate(hosts) if host != hosts[-1]]
        assert sorted(ranks.saved.get(timeout=WAIT_SECONDS) for _ in others) == [(rank, folder) for rank in others]
    ranks.close()
    assert ranks.saved.empty() and ranks.ends.empty()


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 2]], ids=str)
def test_notices_replace_each_other_by_subject_and_rank(hosts):
    ranks, last = Ranks(hosts), len(hosts) - 1
    for number in range(3):
        ranks.heartbeats[last].send_notice(0, "pace", [number], of=1)
    ranks.heartbeats[0].send_notice(last, "look", 7)
    limit = time.monotonic() + WAIT_SECONDS
    expected = {0: {("pace", 1): [2]}, last: {("look", 0): 7}}
    while any(ranks.heartbeats[rank].notices != each for rank, each in expected.items()) and time.monotonic() < limit:
        time.sleep(0.001)
    assert {rank: heartbeat.notices for rank, heartbeat in enumerate(ranks.heartbeats) if heartbeat.notices} == expected
    ranks.close()


def test_the_first_rank_of_each_host_knows_the_round_trip_to_the_next_one():
    ranks = Ranks([0, 0, 1, 2])
    trips = [heartbeat.ask_round_trip() for heartbeat in ranks.heartbeats]
    assert [trip > 0 for trip in trips] == [True, False, True, True]
    assert max(trips) < 1e6 * WAIT_SECONDS
    ranks.close()


def test_a_goodbye_is_no_loss():
    ranks = Ranks([0, 0, 1, 2])
    links = [link for heartbeat in ranks.heartbeats for link in heartbeat._links.values() if link.peer == 2]
    ranks.heartbeats[2].close()
    limit = time.monotonic() + WAIT_SECONDS
    while not all(link.is_closed for link in links) and time.monotonic() < limit:
        time.sleep(0.001)
    assert [(link.said_goodbye, link.is_closed) for link in links] == [(True, True)] * 2
    assert all(heartbeat._end_at == float("inf") for heartbeat in ranks.heartbeats)
    ranks.close()


@pytest.fixture
def quick(monkeypatch):
    """A quarter of the times for which ranks wait for each other, and for the launcher, before they end."""
    for name in ("_LOSS_SECONDS", "_GONE_SECONDS", "_GRACE_SECONDS"):
        monkeypatch.setattr(heartbeat_module, name, getattr(heartbeat_module, name) / 4)


def test_a_rank_that_ends_without_a_goodbye_is_reported_once(quick):
    ranks = Ranks([0, 0, 1, 1, 2])
    ranks.heartbeats[2]._is_closing = True
    for own in ranks.sockets[2].values():
        own.shutdown(socket.SHUT_RDWR)  # as when its process is killed
    ends = [ranks.next_end() for _ in range(4)]
    # Rank 3 had no other connection; a launcher would have ended it before it reports too.
    reports = [message for rank, message, _ in ends if message and rank != 3]
    assert len(reports) == 1
    assert "rank 2 on host h1 has ended without mpi.stop()" in reports[0]
    assert "Rank 0 was at train.py:8" in reports[0]
    assert {rank: status for rank, _, status in ends} == {0: 1, 1: 1, 3: 1, 4: 1}
    ranks.heartbeats[2].abandon()  # close() has no effect on it
    ranks.close()


def test_all_ranks_end_with_the_status_of_the_first(quick):
    ranks = Ranks([0, 0, 1, 1])
    ranks.heartbeats[3].announce_end(143)
    assert sorted(ranks.next_end() for _ in range(3)) == [(0, "", 143), (1, "", 143), (2, "", 143)]
    ranks.close()


def test_a_forked_child_does_not_keep_the_connections(quick):
    ranks = Ranks([0, 1])
    child = os.fork()
    if child == 0:
        time.sleep(WAIT_SECONDS)
        os._exit(0)
    ranks.sockets[1][0].shutdown(socket.SHUT_RDWR)
    assert ranks.next_end()[0] in (0, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    ranks.close()


def test_another_rank_reports_if_the_lowest_one_that_noticed_does_not(monkeypatch):
    """For example since that one is stopped, or lost as well."""
    for name in ("_GRACE_SECONDS", "_GONE_SECONDS"):
        monkeypatch.setattr(heartbeat_module, name, 0.2)
    ranks = Ranks([0, 1, 2, 3])
    silent = threading.Event()
    ranks.heartbeats[1]._end_job = lambda message, status: silent.wait(WAIT_SECONDS)
    ranks.heartbeats[2]._is_closing = True
    for own in ranks.sockets[2].values():
        own.shutdown(socket.SHUT_RDWR)
    ends = {rank: (message, status) for rank, message, status in (ranks.next_end() for _ in range(2))}
    assert ends.keys() == {0, 3} and {status for _, status in ends.values()} == {1}
    assert any("rank 2 on host h2 has ended" in message for message, _ in ends.values())
    silent.set()
    ranks.heartbeats[2].abandon()
    ranks.close()


def test_a_rank_behind_one_that_does_not_reply_is_reported_as_such():
    """Rank 3 is asked through rank 2, the first one of its host."""
    ranks, replies = Ranks([0, 0, 1, 1]), threading.Event()
    ranks.heartbeats[2]._own_status = lambda: replies.wait(WAIT_SECONDS) and status_of(2)
    for patience in (0.5, WAIT_SECONDS / 2):  # on a busy machine the first rank may take long
        found = ask(ranks.heartbeats[0], {1, 2, 3}, patience_seconds=patience)
        if 1 in found:
            break
    replies.set()
    assert found == {1: status_of(1), 3: RankStatus(problem="cannot be asked, since rank 2 does not reply")}
    ranks.close()


def test_a_rank_behind_ended_connections_is_reported_at_once():
    ranks = Ranks([0, 1, 2])
    for link in ranks.heartbeats[0]._links.values():
        link.is_closed = True
    status = RankStatus(problem="cannot be asked: a connection between the hosts has ended")
    assert ask(ranks.heartbeats[0], {1, 2}) == {1: status, 2: status}
    ranks.close()


@pytest.mark.parametrize(("grace_seconds", "ends"), [(3600.0, False), (0.01, True)])
def test_a_rank_leaves_the_launcher_time_to_end_it(monkeypatch, grace_seconds, ends):
    monkeypatch.setattr(heartbeat_module, "_GRACE_SECONDS", grace_seconds)
    ranks = Ranks([0, 1])
    ranks.heartbeats[1].announce_end(143)
    if ends:
        assert ranks.next_end() == (0, "", 143)
    else:
        limit = time.monotonic() + WAIT_SECONDS
        while ranks.heartbeats[0]._quiet_status is None and time.monotonic() < limit:
            time.sleep(0.01)
        ranks.heartbeats[0].close()  # waits for its thread
        assert ranks.heartbeats[0]._quiet_status == 143 and ranks.ends.empty()
        assert ranks.heartbeats[0]._end_at > time.monotonic()
    ranks.close()
