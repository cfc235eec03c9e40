"""Sending, receiving and waiting over real sockets, and what happens when a rank goes away. Ranks are threads."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from sockets_rig import mesh, on_all, world

from torchmpi.distributed.sockets.datatypes import DATATYPES
from torchmpi.distributed.sockets.intracomm import Intracomm
from torchmpi.distributed.sockets.requests import ANY, NOBODY, UNDEFINED, CommunicationError, Request, Status
from torchmpi.distributed.sockets.socket_endpoint import Endpoint

BYTE = DATATYPES["BYTE"]
BIG = 20_000_000


@pytest.fixture(params=[(False, 0.0), (True, 0.0), (False, 50e-6)], ids=("unix", "tcp", "eager"))
def pair(request):
    tcp, eager_seconds = request.param
    with world(2, tcp=tcp, eager_seconds=eager_seconds) as comms:
        yield comms


@pytest.fixture
def trio():
    with world(3) as comms:
        yield comms


def pattern(rank, length=BIG):
    return np.random.default_rng(rank).integers(0, 256, length, np.uint8)


def test_both_may_send_much_before_they_receive(pair):
    def swap(comm):
        other, received = 1 - comm.rank, np.zeros(BIG, np.uint8)
        comm.Send((pattern(comm.rank), BYTE), other, 1)
        comm.Recv((received, BYTE), other, 1)
        return bool((received == pattern(other)).all())

    assert on_all(pair, swap) == [True, True]


def test_sent_memory_may_be_changed_after_send(pair):
    def send(comm):
        memory = np.zeros(100_000, np.uint8)
        for step in range(50):
            memory[:] = step
            comm.Send((memory, BYTE), 1, 1)

    def receive(comm):
        memory, wrong = np.zeros(100_000, np.uint8), 0
        for step in range(50):
            comm.Recv((memory, BYTE), 0, 1)
            wrong += int((memory != step).sum())
        return wrong

    assert on_all(pair, lambda comm: receive(comm) if comm.rank else send(comm)) == [None, 0]


def test_messages_move_while_nobody_waits(pair):
    """The peer is inside no call: its thread takes everything off."""
    sender, receiver = pair
    data = pattern(0)
    sender.Send((data, BYTE), 1, 1)
    received = np.zeros(BIG, np.uint8)
    receiver.Recv((received, BYTE), 0, 1)
    assert (received == data).all()


def test_a_posted_receive_ends_while_nobody_waits(pair):
    sender, receiver = pair
    received = np.zeros(BIG, np.uint8)
    request = receiver.Irecv((received, BYTE), 0, 1)
    sender.Send((pattern(0), BYTE), 1, 1)
    limit = time.monotonic() + 30
    while not request.is_done and time.monotonic() < limit:
        time.sleep(0.01)
    assert request.is_done and (received == pattern(0)).all()


def test_many_threads_of_a_rank_at_once(pair):
    """Each has its own tag, in both directions, long and short messages mixed."""

    def talk(place):
        comm, tag = pair[place % 2], place // 2
        wrong, received = 0, np.zeros(200_000, np.uint8)
        for step in range(30):
            length = (1, 100, 200_000)[step % 3]
            request = comm.Isend((np.full(length, tag + step, np.uint8), BYTE), 1 - comm.rank, tag)
            status = Status()
            comm.Recv((received, BYTE), 1 - comm.rank, tag, status)
            wrong += status.Get_count(BYTE) != length or int((received[:length] != tag + step).sum())
            request.Wait()
        return wrong

    results = on_all([*range(8)], talk)
    assert results == [0] * 8, results


def test_to_oneself(pair):
    comm, received = pair[0], np.zeros(5, np.uint8)
    comm.Send((np.arange(5, dtype=np.uint8), BYTE), 0, 1)
    comm.Recv((received, BYTE), 0, 1)
    request = comm.Irecv((received, BYTE), 0, 2)
    threading.Timer(0.05, comm.Send, ((np.full(5, 9, np.uint8), BYTE), 0, 2)).start()
    request.Wait()
    assert received.tolist() == [9] * 5


def test_sendrecv_and_nobody(pair):
    def shift(comm):
        received, status = np.full(3, 7, np.uint8), Status()
        dest, source = (1, NOBODY) if comm.rank == 0 else (NOBODY, 0)
        comm.Sendrecv((np.arange(3, dtype=np.uint8), BYTE), dest, 1, (received, BYTE), source, 1, status)
        return received.tolist(), status.Get_source(), status.Get_count()

    assert on_all(pair, shift) == [([7, 7, 7], NOBODY, 0), ([0, 1, 2], 0, 3)]


def test_probe(trio):
    comm = trio[0]
    assert not comm.Iprobe(ANY, 5)
    trio[2].send({"a": 1}, 0, 5)
    status, limit = Status(), time.monotonic() + 30
    while not comm.iprobe(ANY, 5, status) and time.monotonic() < limit:
        pass
    assert (status.Get_source(), status.Get_tag()) == (2, 5) and status.Get_count() > 0
    assert not comm.Iprobe(1, 5) and not comm.Iprobe(ANY, 6)
    assert comm.recv(source=2, tag=5) == {"a": 1}
    assert not comm.Iprobe(ANY, 5)


def test_testing_ends(pair):
    request = pair[1].Irecv((np.zeros(5, np.uint8), BYTE), 0, 1)
    assert not request.Test() and not Request.Testall([request])
    pair[0].Send((np.zeros(5, np.uint8), BYTE), 1, 1)
    limit = time.monotonic() + 30
    while not request.Test() and time.monotonic() < limit:
        pass
    assert request.Test() and Request.Testall([request])


def test_waitany_gives_each_once(trio):
    memory = [np.zeros(1, np.uint8) for _ in range(3)]
    requests = [trio[0].Irecv((part, BYTE), ANY, tag) for tag, part in enumerate(memory)]
    order = []
    for tag in (2, 0, 1):
        threading.Timer(0.02, trio[1].Send, ((np.ones(1, np.uint8), BYTE), 0, tag)).start()
        order.append(Request.Waitany(requests))
    assert order == [2, 0, 1]
    assert Request.Waitany(requests) == UNDEFINED


def test_ranks_that_do_not_exist_are_refused(pair):
    with pytest.raises(CommunicationError, match="no rank 2 among 2"):
        pair[0].Isend((np.zeros(1, np.uint8), BYTE), 2)
    with pytest.raises(CommunicationError, match="no rank -7 among 2"):
        pair[0].Irecv((np.zeros(1, np.uint8), BYTE), -7)


# --- ranks that go


def kill(comm):
    """What the system does when a process is killed: its sockets close, and nobody says goodbye."""
    for connection in comm.endpoint._connections.values():
        with contextlib.suppress(OSError):  # closed from the other side before
            connection._socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("when", ("before", "while waiting"))
def test_a_lost_rank_is_named_by_all_that_need_it(trio, when):
    def need(comm):
        if when == "before":
            time.sleep(0.1)
        if comm.rank == 0:
            comm.Recv((np.zeros(1, np.uint8), BYTE), ANY, 1)
        comm.Barrier()

    timer = threading.Timer(0 if when == "before" else 0.1, kill, (trio[2],))
    timer.start()
    results = on_all(trio[:2], need)
    assert ["rank 2 is gone" in str(result) for result in results] == [True] * 2, results
    with pytest.raises(CommunicationError, match="rank 2 is gone"):
        trio[0].Send((np.zeros(1, np.uint8), BYTE), 2, 1)
    with pytest.raises(CommunicationError, match="rank 2 is gone"):
        trio[0].allgather(1)


def test_the_others_can_go_on_without_it(trio):
    parts = on_all(trio, lambda comm: comm.Split(comm.rank // 2, 0))
    kill(trio[2])
    assert on_all(parts[:2], lambda comm: comm.allgather(comm.rank)) == [[0, 1]] * 2
    received = np.zeros(3, np.uint8)
    trio[0].Send((np.ones(3, np.uint8), BYTE), 1, 1)
    trio[1].Recv((received, BYTE), 0, 1)
    assert received.all()


def test_a_send_under_way_fails_when_its_rank_is_lost():
    with world(2) as comms:
        while not comms[1].endpoint.poller._baton.take():  # as if stopped: it reads no more
            comms[1].endpoint.poller._ring()
        request = comms[0].Isend((pattern(0, 50_000_000), BYTE), 1, 1)
        assert not request.Test()
        kill(comms[1])
        comms[1].endpoint.poller._baton.give_back()
        with pytest.raises(CommunicationError, match="rank 1 is gone"):
            request.Wait()


def test_a_loss_is_reported_and_a_goodbye_is_not(trio):
    lost = []
    for comm in trio[:2]:
        comm.endpoint.on_loss = lambda rank, own=comm.rank: lost.append((own, rank))
    trio[1].endpoint.close()
    kill(trio[2])
    limit = time.monotonic() + 30
    while not lost and time.monotonic() < limit:
        time.sleep(0.01)
    assert lost == [(0, 2)]
    with pytest.raises(CommunicationError, match="rank 1 has left"):
        trio[0].Recv((np.zeros(1, np.uint8), BYTE), 1, 1)


def test_what_was_sent_before_closing_arrives(pair):
    data = pattern(0)
    request = pair[0].Isend((data, BYTE), 1, 1)
    pair[0].endpoint.close()
    assert request.Test()
    received = np.zeros(BIG, np.uint8)
    pair[1].Recv((received, BYTE), 0, 1)
    assert (received == data).all()


def test_closing_ends_what_waits_here(pair):
    threading.Timer(0.1, pair[0].endpoint.close).start()
    with pytest.raises(CommunicationError, match="rank 0 has closed its connections"):
        pair[0].Recv((np.zeros(1, np.uint8), BYTE), 1, 1)
    with pytest.raises(CommunicationError, match="rank 0 has closed its connections"):
        pair[0].Barrier()


def test_nothing_is_left_after_closing():
    def state():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = state()
    for _ in range(3):
        with world(4) as comms:
            on_all(comms, lambda comm: comm.Barrier())
    limit = time.monotonic() + 5
    while state() != before:  # a thread that was waited for takes a moment to go
        assert time.monotonic() < limit, (state(), before)
        time.sleep(0.05)


def test_memory_does_not_grow_with_messages_and_communicators():
    with world(2) as comms:

        def use(comm):
            part = comm.Dup()
            part.allgather(comm.rank)
            part.Free()

        for _ in range(3):
            on_all(comms, use)
        boxes = [len(comm.endpoint.inbox._boxes) for comm in comms]
        for _ in range(5):
            on_all(comms, use)
        assert [len(comm.endpoint.inbox._boxes) for comm in comms] == boxes


def test_a_forked_child_disturbs_nothing(pair):
    child = os.fork()
    if child == 0:  # a DataLoader worker: it may look, it may not speak, and its end is not ours
        try:
            pair[0].Send((np.ones(1, np.uint8), BYTE), 1, 1)
        except CommunicationError as error:
            os._exit(0 if "forked" in str(error) and _num_sockets() == 0 else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert on_all(pair, lambda comm: comm.allgather(comm.rank)) == [[0, 1]] * 2


def _num_sockets():
    names = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _exists(name)]
    return sum(name.startswith(("socket:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]")) for name in names)


def _exists(name):
    return os.path.lexists(f"/proc/self/fd/{name}")


def test_an_idle_endpoint_sleeps():
    with world(2):
        time.sleep(0.1)
        begin = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - begin < 0.05


def test_a_world_of_one():
    endpoint = Endpoint(0, 1, mesh(1)[0], eager_seconds=0)
    comm = Intracomm(endpoint, [0], 0, ["host"])
    comm.Barrier()
    assert comm.allgather(5) == [5] and comm.Dup().bcast(6) == 6
    endpoint.close()
