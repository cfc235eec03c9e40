"""To ranks that meet: they find each other authenticated, among strangers that send nothing or something."""

from __future__ import annotations

import fcntl
import itertools
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from torchmpi.launch import meeting, network
from torchmpi.launch.conversations import ConversationError, Conversations, exactly
from torchmpi.launch.meeting import Met, meet

KEY = os.urandom(16)
SECONDS = 30.0


@pytest.fixture
def opened():
    with ExitStack() as stack:
        yield stack


def listen(opened, is_near=True):
    listener = meeting.listen_nearby(4) if is_near else network.listen(network.loopback(), 4)
    return opened.enter_context(listener)


def address_of(listener):
    name = listener.getsockname()
    return name.decode() if isinstance(name, bytes) else name[:2]


def together(opened, *calls) -> list[Met]:
    with ThreadPoolExecutor(len(calls)) as pool:
        found = [future.result(2 * SECONDS) for future in [pool.submit(call) for call in calls]]
    for met in found:
        opened.callback(met.close)
    return found


@pytest.mark.parametrize("num_ranks", (1, 2, 3, 5, 17))
@pytest.mark.parametrize("is_near", (True, False), ids=("unix", "tcp"))
def test_all_ranks_meet_in_any_order(opened, num_ranks, is_near):
    """Each pair is connected once, and both ends know which rank is at the other one."""
    listeners = [listen(opened, is_near) for _ in range(num_ranks)]
    addresses = [address_of(each) for each in listeners]
    dials = {
        pair: (sum(pair) + pair[0]) % 2 for pair in itertools.combinations(range(num_ranks), 2)
    }  # which of the two connects

    def run(rank):
        targets = {pair[1 - way]: addresses[pair[1 - way]] for pair, way in dials.items() if pair[way] == rank}
        awaited = [pair[way] for pair, way in dials.items() if pair[1 - way] == rank]
        return meet(rank, KEY, [listeners[rank]], targets, awaited, timeout_seconds=SECONDS)

    found = together(opened, *(lambda rank=rank: run(rank) for rank in range(num_ranks)))
    for rank, met in enumerate(found):
        assert (met.sockets.keys(), met.unreachable, met.absent) == ({*range(num_ranks)} - {rank}, {}, set())
        for peer, sock in met.sockets.items():
            sock.send(b"%d %d" % (rank, peer))
    for rank, met in enumerate(found):
        for peer, sock in met.sockets.items():
            sock.settimeout(SECONDS)
            assert sock.recv(100) == b"%d %d" % (peer, rank)


@pytest.mark.parametrize("is_near", (True, False), ids=("unix", "tcp"))
def test_another_key_is_refused_at_both_ends(opened, is_near):
    listener = listen(opened, is_near)
    accepting, connecting = together(
        opened,
        lambda: meet(0, KEY, [listener], {}, [1], timeout_seconds=0.5),
        lambda: meet(1, os.urandom(16), [], {0: address_of(listener)}, [], timeout_seconds=SECONDS),
    )
    assert (accepting.sockets, accepting.absent) == ({}, {1})
    assert connecting.sockets == {}
    assert "does not know the key" in str(connecting.unreachable[0])


def test_a_relay_to_another_rank_is_refused(opened):
    """Who passes on every byte of two ranks learns nothing that opens a connection to a third one."""
    listeners = [listen(opened), listen(opened)]

    def relay():  # listens in place of rank 0, and connects to rank 1
        first, _ = listeners[0].accept()
        second = socket.socket(socket.AF_UNIX)
        with first, second:
            second.connect(address_of(listeners[1]))
            second.sendall(first.recv(100))
            first.sendall(second.recv(100))
            second.settimeout(SECONDS)
            return second.recv(100)

    relayed = ThreadPoolExecutor(1).submit(relay)
    third, connecting = together(
        opened,
        lambda: meet(1, KEY, [listeners[1]], {}, [2], timeout_seconds=0.5),
        lambda: meet(2, KEY, [], {0: address_of(listeners[0])}, [], timeout_seconds=0.5),
    )
    assert relayed.result(SECONDS) == b""
    assert third.absent == {2}
    assert isinstance(connecting.unreachable[0], OSError)


@pytest.mark.parametrize("is_near", (True, False), ids=("unix", "tcp"))
def test_strangers_delay_nobody(opened, is_near):
    """Regression: each silent connection delayed the others by 2 seconds, and many filled the queue of the listener."""
    listener = listen(opened, is_near)
    address, family = address_of(listener), listener.family
    strangers = []
    for said in [b""] * 200 + [b"x", b"GET / HTTP/1.1\r\n\r\n", b"torchmpi" + bytes(24), os.urandom(100)] * 10:
        stranger = opened.enter_context(socket.socket(family))
        stranger.setblocking(False)
        if stranger.connect_ex(address) == 0:
            stranger.send(said)
        strangers.append(stranger)
    accepting, connecting = together(
        opened,
        lambda: meet(0, KEY, [listener], {}, [1], timeout_seconds=SECONDS),
        lambda: meet(1, KEY, [], {0: address}, [], timeout_seconds=SECONDS),
    )
    assert accepting.sockets.keys() == {1}
    assert connecting.sockets.keys() == {0}


def test_a_time_limit_covers_all_strangers(opened):
    """Regression: with a limit of 3 s, the wait for a rank took 32 s."""
    listener = listen(opened)
    is_over = threading.Event()

    def disturb():
        while not is_over.wait(0.05):
            stranger = opened.enter_context(socket.socket(socket.AF_UNIX))
            stranger.setblocking(False)
            stranger.connect_ex(address_of(listener))

    disturber = threading.Thread(target=disturb)
    disturber.start()
    met = ThreadPoolExecutor(1).submit(lambda: meet(0, KEY, [listener], {}, [1], timeout_seconds=0.5))
    try:
        assert met.result(SECONDS).absent == {1}
    finally:
        is_over.set()
        disturber.join()


def test_a_full_queue_is_tried_again(opened):
    """Regression: strangers that filled the queue of a Unix socket let the start fail."""
    listener = opened.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(f"\0torchmpi-test-{os.urandom(8).hex()}")
    listener.listen(1)
    problems = set()
    for _ in range(4):
        stranger = opened.enter_context(socket.socket(socket.AF_UNIX))
        stranger.setblocking(False)
        problems.add(stranger.connect_ex(address_of(listener)))
    assert problems == {0, 11}  # the queue is full
    calling = ThreadPoolExecutor(1).submit(
        lambda: meet(1, KEY, [], {0: address_of(listener)}, [], timeout_seconds=SECONDS)
    )
    time.sleep(0.2)  # it has tried
    accepting = meet(0, KEY, [listener], {}, [1], timeout_seconds=SECONDS)
    connecting = calling.result(SECONDS)
    opened.callback(accepting.close)
    opened.callback(connecting.close)
    assert (accepting.sockets.keys(), connecting.sockets.keys()) == ({1}, {0})


def test_an_end_that_has_gone_is_reported_at_once(opened):
    closed = listen(opened)
    address = address_of(closed)
    closed.close()
    met = meet(1, KEY, [], {0: address}, [], timeout_seconds=100 * SECONDS)
    assert "refused" in str(met.unreachable[0])


def test_an_end_that_says_nothing_is_reported_at_the_limit(opened):
    silent = listen(opened)
    met = meet(1, KEY, [], {0: address_of(silent)}, [], timeout_seconds=0.2)
    assert isinstance(met.unreachable[0], TimeoutError)


def test_a_process_with_many_descriptors_accepts(opened):
    """Regression: `select()` raised a ValueError for descriptors from 1,024 on."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        listener = listen(opened, False)
        high = opened.enter_context(socket.socket(fileno=fcntl.fcntl(listener.fileno(), fcntl.F_DUPFD_CLOEXEC, 1024)))
        accepting, connecting = together(
            opened,
            lambda: meet(0, KEY, [high], {}, [1], timeout_seconds=SECONDS),
            lambda: meet(1, KEY, [], {0: address_of(listener)}, [], timeout_seconds=SECONDS),
        )
        assert (accepting.sockets.keys(), connecting.sockets.keys()) == ({1}, {0})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_without_descriptors_closes_the_oldest_stranger(opened):
    """It would otherwise call accept() in vain, and wait for a stranger's time limit."""
    listener = listen(opened)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
    spare = [os.dup(0) for _ in range(2)]

    def greet(sock):
        yield from exactly(100)

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, limits[1]))
        for number in spare:
            os.close(number)
        with Conversations({listener: greet}, limit_seconds=SECONDS, most=100) as conversations:
            for stranger in strangers:
                stranger.connect(address_of(listener))
            strangers[0].setblocking(False)
            limit, said = time.monotonic() + SECONDS, None
            while said is None and time.monotonic() < limit:
                conversations.turn(0.01)
                with suppress(BlockingIOError):
                    said = strangers[0].recv(1)
            assert said == b""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_conversations_exchange_long_answers_with_slow_readers(opened):
    listener = listen(opened)
    answer = os.urandom(4 << 20)

    def talk(sock):
        said = yield from exactly(3)
        if said != b"all":
            raise ConversationError("unknown")
        yield answer
        return "told"

    clients = [opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
    received, outcomes = [b""] * 3, []
    with Conversations({listener: talk}, limit_seconds=SECONDS, most=10) as conversations:
        for client in clients:
            client.connect(address_of(listener))
            client.send(b"a")
            client.setblocking(False)
        for _ in clients:
            assert conversations.turn(SECONDS) == []  # each has sent a part of its request
        for client, said in zip(clients, (b"ll", b"ll", b"o!"), strict=True):
            client.send(said)
        while len(outcomes) < 3:
            outcomes += conversations.turn(0.01)
            for index, client in enumerate(clients):
                with suppress(BlockingIOError):
                    received[index] += client.recv(100_000)
        for outcome in outcomes:
            outcome.sock.close()
    for index, client in enumerate(clients):
        client.settimeout(SECONDS)
        while said := client.recv(1 << 20):
            received[index] += said
    assert received == [answer, answer, b""]
    assert sorted(str(each.result) for each in outcomes) == ["None", "told", "told"]
    assert [str(each.problem) for each in outcomes if each.problem] == ["unknown"]
