"""To a user without a launcher: messages arrive in order, losses raise, and idle ranks sleep. Ranks are threads."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from torchmpi.errors import LaunchError
from torchmpi.launch import launcherless, mpi_library, network
from torchmpi.launch.launcherless import mesh, signed_entries
from torchmpi.launch.launcherless.endpoint import Endpoint
from torchmpi.launch.launcherless.requests import ANY, UNDEFINED, CommunicationError, Datatype, Status
from torchmpi.launch.launcherless.stand_in import Intracomm
from torchmpi.launch.survivors import Survivors

LIMIT_SECONDS = 30
BIG = 20_000_000
BYTE = Datatype(1)


def tcp_pair(address: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    with socket.create_server((address, 0), family=network.family(address)) as listener:
        one = socket.create_connection(listener.getsockname()[:2])
        return one, listener.accept()[0]


@contextmanager
def world(size: int, connect: Callable[[], Any] = socket.socketpair, silence_seconds: float = 30.0):
    """The world communicator of each of `size` ranks."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for one, other in itertools.combinations(range(size), 2):
        ends[one][other], ends[other][one] = connect()
    for sock in (sock for sockets in ends for sock in sockets.values()):
        mesh.set_options(sock, silence_seconds)
    names = [f"host{rank}" for rank in range(size)]
    with ExitStack() as opened:
        endpoints = [Endpoint(rank, names, sockets, 50e-6) for rank, sockets in enumerate(ends)]
        for endpoint in endpoints:
            opened.callback(endpoint.close)
        yield [Intracomm(endpoint, range(size), 0, ["a"] * size) for endpoint in endpoints]


def on_all(given: Any, action: Callable[[Any], Any]) -> list[Any]:
    """Run the action for all of `given` concurrently; return the results or exceptions."""
    given = list(given)
    results: list[Any] = [TimeoutError("it does not end")] * len(given)

    def run(place: int) -> None:
        try:
            results[place] = action(given[place])
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), name=str(place), daemon=True) for place in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    return results


def until(condition: Callable[[], Any]) -> None:
    limit = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def pattern(rank: int, length: int = BIG) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 256, length, np.uint8)


@pytest.fixture(params=[socket.socketpair, tcp_pair, lambda: tcp_pair("::1")], ids=("unix", "tcp", "tcp6"))
def pair(request):
    with world(2, request.param) as comms:
        yield comms


@pytest.fixture
def trio():
    with world(3) as comms:
        yield comms


# --- messages


def test_both_may_send_much_before_they_receive(pair):
    def swap(comm):
        other, received = 1 - comm.rank, np.zeros(BIG, np.uint8)
        comm.Send(pattern(comm.rank), other, 1)
        comm.Recv(received, other, 1)
        return bool((received == pattern(other)).all())

    assert on_all(pair, swap) == [True, True]


@pytest.mark.parametrize("length", (0, 5, 70_000, BIG))
@pytest.mark.parametrize("posted_first", (True, False))
def test_messages_move_while_no_rank_waits(pair, length, posted_first):
    received, data = np.zeros(length, np.uint8), pattern(0, length)
    request = pair[1].Irecv(received, 0, 1) if posted_first else None
    pair[0].Send(data, 1, 1)
    if request is None:
        request = pair[1].Irecv(received, 0, 1)
    until(lambda: request.is_done)
    assert (received == data).all()


def test_many_threads_of_a_rank_at_once(pair):
    """Each thread uses its own tag, in both directions, with alternately long and short messages."""

    def talk(place):
        comm, tag = pair[place % 2], place // 2
        wrong, received = 0, np.zeros(200_000, np.uint8)
        for step in range(30):
            length = (1, 100, 200_000)[step % 3]
            request = comm.Isend(np.full(length, tag + step, np.uint8), 1 - comm.rank, tag)
            status = Status()
            comm.Recv(received, 1 - comm.rank, tag, status)
            wrong += status.Get_elements(BYTE) != length or int((received[:length] != tag + step).sum())
            request.Wait()
        return wrong

    assert on_all(range(8), talk) == [0] * 8


def test_matching_by_source_tag_and_order(trio):
    """Messages are received in the order of their sending, also after a receive of another tag, and to oneself."""
    for source, tag, value in ((1, 5, 1), (1, 5, 2), (1, 6, 3), (2, 5, 4), (0, 5, 5)):
        trio[source].send(value, 0, tag)
        until(lambda source=source, tag=tag: trio[0].Iprobe(source, tag))
    found = [trio[0].recv(source=source, tag=tag) for source, tag in ((1, 6), (ANY, 5), (2, 5), (1, ANY), (ANY, ANY))]
    assert found == [3, 1, 4, 2, 5]
    first, second = (np.zeros(1, np.uint8) for _ in range(2))
    requests = trio[0].Irecv(first, ANY, 5), trio[0].Irecv(second, 2, 5)
    trio[2].Send(np.ones(1, np.uint8), 0, 5)
    trio[2].Send(np.full(1, 2, np.uint8), 0, 5)
    status = Status()
    requests[0].Wait(status)
    requests[1].Wait()
    assert (first[0], second[0], status.source, status.tag) == (1, 2, 2, 5)


def test_probe_and_cancel(trio):
    comm, status = trio[0], Status()
    request = comm.Irecv(np.zeros(1, np.uint8), ANY, 4)
    assert not comm.Iprobe(ANY, 5) and not request.Test()
    request.Cancel()
    request.Wait(status)
    assert status.Is_cancelled()
    trio[2].send({"a": 1}, 0, 5)
    until(lambda: comm.iprobe(ANY, 5, status))
    assert status.Get_source() == 2 and status.Get_elements(BYTE) > 0 and not comm.Iprobe(1, 5)
    assert comm.recv(source=2, tag=5) == {"a": 1} and not comm.Iprobe(ANY, 5)


def test_wrong_lengths_and_ranks_are_refused(pair):
    pair[0].Send(np.zeros(70_000, np.uint8), 1, 1)
    with pytest.raises(CommunicationError, match="truncated: rank 0 sent 70000 bytes, for which there are 5"):
        pair[1].Recv(np.zeros(5, np.uint8), 0, 1)
    with pytest.raises(CommunicationError, match="no rank 2 in a communicator of 2"):
        pair[0].Isend(np.zeros(1, np.uint8), 2)


def test_memory_by_address_is_the_memory():
    data = np.zeros(4, np.uint8)
    launcherless.StandIn.buffer.fromaddress(data.ctypes.data, 4)[1] = 7
    assert data.tolist() == [0, 7, 0, 0] and len(launcherless.StandIn.buffer.fromaddress(0, 0)) == 0


# --- communicators


@pytest.mark.parametrize("size", (1, 2, 3, 4, 7))
def test_collectives_of_objects_and_headers(size):
    def call(comm):
        headers = np.zeros((size, 2), np.int64)
        comm.Allgather((np.array([comm.rank, 5]), BYTE), (headers, BYTE))
        comm.Barrier()
        roots = [comm.bcast(("root", comm.rank), root) for root in range(size)]
        return comm.allgather({"rank": comm.rank}), roots, headers.tolist()

    ranks = range(size)
    with world(size) as comms:
        expected = [{"rank": rank} for rank in ranks], [("root", rank) for rank in ranks], [[rank, 5] for rank in ranks]
        assert on_all(comms, call) == [expected] * size


def test_communicators_are_separate(trio):
    """The same source, destination and tag in a communicator, its duplicate, a part of it and a group."""

    def call(comm):
        others = [comm.Dup(), comm.Split(0, -comm.rank), comm.Split(0 if comm.rank else UNDEFINED, 0)]
        if comm.rank:
            others[2] = comm.Create_group(comm.Get_group().Incl([2, 1]), 3)
        found = [None if other is None else other.allgather(comm.rank) for other in others]
        if comm.rank:
            apart = comm, others[0], others[2]
            for number, other in enumerate(apart):
                other.isend(number, other.size - other.rank - (other.size == 2), 1)
            found.append([other.recv(tag=1) for other in reversed(apart)])
        return found

    results = on_all(trio, call)
    assert results[0] == [[0, 1, 2], [2, 1, 0], None]
    assert results[1][:3] == results[2][:3] == [[0, 1, 2], [2, 1, 0], [2, 1]]
    assert results[1][3] == results[2][3] == [2, 1, 0]


# --- loss of ranks


def kill(comm: Intracomm) -> None:
    """Close the connections without a goodbye, as the kernel does for a killed process."""
    comm._endpoint.survivors = None  # its thread would report the loss of the others before all connections are closed
    for link in comm._endpoint._links.values():
        with contextlib.suppress(OSError):  # closed by the other rank
            link.sock.shutdown(socket.SHUT_RDWR)


def drop_everything(sock: socket.socket) -> None:
    """Let the kernel discard all packets that arrive for a socket, as if the link were cut."""
    attach_filter, drop = 26, struct.pack("HBBI", 6, 0, 0, 0)
    program = ctypes.create_string_buffer(drop)
    sock.setsockopt(socket.SOL_SOCKET, attach_filter, struct.pack("HL", 1, ctypes.addressof(program)))


@pytest.mark.parametrize("traffic", ("sending", "idle"))
def test_a_cut_link_is_noticed_within_the_limit_and_the_rank_named(traffic):
    with world(2, tcp_pair, silence_seconds=2.0) as comms:
        for comm in comms:
            drop_everything(comm._endpoint._links[1 - comm.rank].sock)
        if traffic == "sending":
            comms[0].Isend(np.zeros(BIG, np.uint8), 1, 1)
        with pytest.raises(CommunicationError, match=r"rank 1 on host host1 is gone: .*timed out"):
            comms[0].Recv(np.zeros(1, np.uint8), 1, 1)


def test_the_ranks_of_pending_receives_are_known(trio):
    """The error of a call that exceeds its timeout names them."""
    part = on_all(trio, lambda comm: comm.Dup())[0]
    requests = [trio[0].Irecv(np.zeros(9, np.uint8), source, 1) for source in (2, ANY)]
    assert trio[0].awaited() == ["rank 2 on host host2"] and part.awaited() == []
    for rank in (2, 1):
        trio[rank].Send(np.zeros(9, np.uint8), 0, 1)
    type(requests[0]).Waitall(requests)
    assert trio[0].awaited() == []


@pytest.mark.parametrize("when", ("before", "while waiting"))
def test_a_lost_rank_is_named_by_those_that_need_it(trio, when):
    parts = on_all(trio, lambda comm: comm.Split(comm.rank // 2, 0))

    def need(comm):
        time.sleep(0.1 if when == "before" else 0.0)
        comm.Recv(np.zeros(1, np.uint8), ANY if comm.rank else 2, 1)

    threading.Timer(0 if when == "before" else 0.1, kill, (trio[2],)).start()
    results = on_all(trio[:2], need)
    assert ["rank 2 on host host2 is gone" in str(result) for result in results] == [True] * 2, results
    with pytest.raises(CommunicationError, match="rank 2 on host host2 is gone"):
        trio[0].Send(np.zeros(1, np.uint8), 2, 1)
    assert on_all(parts[:2], lambda comm: comm.allgather(comm.rank)) == [[0, 1]] * 2  # without it


def test_a_loss_is_reported_and_a_goodbye_is_not(trio):
    lost = []
    for comm in trio[:2]:
        comm._endpoint.on_loss = lambda rank, problem, own=comm.rank: lost.append((own, rank))
    trio[1]._endpoint.close()
    kill(trio[2])
    until(lambda: lost)
    assert lost == [(0, 2)]
    with pytest.raises(CommunicationError, match="rank 1 on host host1 has left"):
        trio[0].Recv(np.zeros(1, np.uint8), 1, 1)


def test_a_loss_is_known_before_the_first_call_fails(trio):
    """Regression: who asked for the reason of the error was told that no rank was lost."""
    known: list[tuple[str, bool]] = []
    for comm in trio[:2]:
        endpoint = comm._endpoint
        endpoint.survivors = Survivors(comm.rank, ["a"] * 3)
        receive = comm.Irecv(np.zeros(1, np.uint8), 2, 1)
        receive.wake = lambda endpoint=endpoint: known.append((endpoint.revoked, endpoint.survivors.is_agreed))
    kill(trio[2])
    until(lambda: len(known) == 2)
    assert all("rank 2 on host host2 is gone" in reason and not is_agreed for reason, is_agreed in known), known


def test_a_send_that_fails_before_the_end_of_the_connection_is_read_is_of_a_loss():
    """Regression: no rank was lost for who asked, so the error ended the job."""
    with world(2) as (comm, other):
        endpoint = comm._endpoint
        endpoint.survivors = Survivors(0, ["a"] * 2)
        endpoint._gives_way = True
        endpoint._ring()
        until(endpoint._take_turn)  # no other thread reads now
        kill(other)
        with pytest.raises(CommunicationError, match="is gone"):
            comm.Send(np.zeros(1, np.uint8), 1, 1)
        assert not endpoint.revoked
        assert "is gone" in endpoint.loss_behind_error()
        endpoint._end_turn()


def test_a_rank_that_has_lost_all_connections_reads_from_a_new_rank():
    """Regression: the thread that reads ends without connections, so the rank waited for the new one for ever."""
    with world(2) as (comm, other):
        endpoint = comm._endpoint
        other._endpoint.close()
        endpoint._reader.join(LIMIT_SECONDS)
        own_end, other_end = socket.socketpair()
        new = Endpoint(2, ["host"] * 3, {0: other_end}, 50e-6)
        endpoint.add(2, "host", own_end)
        both = [Intracomm(each, (0, 2), 7, ["a"] * 3) for each in (endpoint, new)]
        assert on_all(both, lambda comm: comm.allgather(comm.rank)) == [[0, 1]] * 2
        assert endpoint._reader.is_alive()
        new.close()


@pytest.mark.slow
@pytest.mark.parametrize("milliseconds", (0, 1, 3, 6))
def test_the_others_communicate_after_a_loss_without_old_messages(milliseconds):
    with world(3) as comms:
        for comm in comms:
            comm._endpoint.survivors = Survivors(comm.rank, ["a"] * 3)
        comms[0].isend("old", 1, 1)
        sent, received = pattern(0).copy(), np.zeros(BIG, np.uint8)
        sending, receiving = comms[0].Isend(sent, 1, 2), comms[1].Irecv(received, 0, 2)
        waiting = comms[1].Irecv(np.zeros(1, np.uint8), 0, 9)
        time.sleep(milliseconds / 1e3)
        kill(comms[2])
        with pytest.raises(CommunicationError, match=r"rank 2( on host host2)? is gone"):
            waiting.Wait()
        for request in (sending, receiving):
            with contextlib.suppress(CommunicationError):
                request.Wait()
        had_arrived, before = not receiving.error, received.copy()
        sent[:] = 255  # the memory belongs to the caller again, also if the rest has not been sent
        until(lambda: comms[0]._endpoint.revoked)
        with pytest.raises(CommunicationError, match=r"rank 2( on host host2)? is gone"):
            comms[0].isend("too early", 1, 1)
        assert on_all(comms[:2], lambda comm: comm._endpoint.agree(LIMIT_SECONDS, lambda: None)) == [(0, 1)] * 2
        if had_arrived:
            assert (received == pattern(0)).all()

        def continue_together(comm):
            comm = Intracomm(comm._endpoint, (0, 1), 0, ["a"] * 3)
            request = comm.isend(f"new {comm.rank}", 1 - comm.rank, 1)
            found = comm.recv(None, 1 - comm.rank, 1)
            request.Wait()
            exchanged = np.zeros(BIG, np.uint8)
            comm.Sendrecv(pattern(comm.rank), 1 - comm.rank, 2, exchanged, 1 - comm.rank, 2)
            return found, bool((exchanged == pattern(1 - comm.rank)).all()), comm.Dup().allgather(comm.rank)

        assert on_all(comms[:2], continue_together) == [("new 1", True, [0, 1]), ("new 0", True, [0, 1])]
        assert (received == before).all()  # not written after the error


def test_messages_sent_before_closing_arrive(pair):
    request = pair[0].Isend(pattern(0), 1, 1)
    pair[1].Send(np.zeros(100_000, np.uint8), 0, 1)  # never received
    pair[0]._endpoint.close()
    received = np.zeros(BIG, np.uint8)
    pair[1].Recv(received, 0, 1)
    assert request.Test() and (received == pattern(0)).all()


def test_closing_ends_receives(pair):
    threading.Timer(0.1, pair[0]._endpoint.close).start()
    for call in (lambda: pair[0].Recv(np.zeros(1, np.uint8), 1, 1), pair[0].Barrier):
        with pytest.raises(CommunicationError, match="rank 0 has closed its connections"):
            call()


def test_a_forked_child_does_not_change_the_connections(pair):
    gc.collect()  # closes what earlier tests have left
    child = os.fork()
    if child == 0:
        try:
            pair[0].Send(np.ones(1, np.uint8), 1, 1)
        except CommunicationError as error:
            os._exit(0 if "forked" in str(error) and not _descriptors() else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert on_all(pair, lambda comm: comm.allgather(comm.rank)) == [[0, 1]] * 2


def _descriptors() -> list[str]:
    entries = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    names = [os.readlink(entry) for entry in entries if entry.is_symlink()]
    return [name for name in names if name.startswith(("socket:", "anon_inode:[event"))]


def test_an_idle_rank_uses_no_processor_time():
    with world(3) as comms:
        on_all(comms, Intracomm.Barrier)
        time.sleep(0.1)
        begin = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - begin < 0.05


# --- exceptions of signal handlers


@pytest.fixture
def on_alarm():
    """``on_alarm(handler)`` installs a handler of SIGALRM."""
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handler: signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def raising(error: type[BaseException]) -> Callable[..., None]:
    def handle(signum, frame):
        raise error

    return handle


def test_an_interrupted_receive_is_withdrawn(on_alarm):
    """Otherwise a later message would be written to memory that the caller has released."""
    on_alarm(raising(InterruptedError))
    with world(2) as comms:
        received = np.zeros(5, np.uint8)
        with pytest.raises(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            comms[1].Recv(received, 0, 1)
        comms[0].Send(np.ones(5, np.uint8), 1, 1)
        until(lambda: comms[1].Iprobe(0, 1))
        assert not received.any()


@pytest.mark.parametrize("error", (InterruptedError, TimeoutError, KeyboardInterrupt))
def test_an_exception_at_any_moment_neither_hangs_nor_corrupts(on_alarm, error):
    """Exceptions occur during sending, reading and matching; lost messages are reported as errors."""

    def echo(comm):
        memory = np.zeros(300_000, np.uint8)
        while True:
            comm.Recv(memory, 0, 1)
            comm.Send(memory, 0, 1)

    def talk(comm, chance):
        received = np.zeros(300_000, np.uint8)
        limit = time.monotonic() + 10
        for step in itertools.count():
            if time.monotonic() > limit:  # the handler ran in a finalizer, which drops exceptions
                raise error
            sent = np.full(chance.choice((10, 300_000)), step % 251, np.uint8)
            request = comm.Isend(sent, 1, 1)
            comm.Recv(received, 1, 1)
            request.Wait()
            assert (received == step % 251)[: len(sent)].all()

    chance, others = random.Random(5), []
    for _ in range(30):
        on_alarm(raising(error))
        with world(2) as comms:
            thread = threading.Thread(target=lambda comms=comms: others.extend(on_all(comms[1:], echo)))
            thread.start()
            try:
                with pytest.raises(error):
                    signal.setitimer(signal.ITIMER_REAL, 0.001 + chance.random() * 0.01)
                    talk(comms[0], chance)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            comms[0]._endpoint.close()
            thread.join()
            assert "rank 0 " in str(others[-1]), others


# --- rendezvous


@pytest.fixture(params=("HashStore", "FileStore", "TCPStore"))
def stores(request, tmp_path):
    """One for each rank: a client of TCPStore serves one thread at a time."""
    if request.param == "HashStore":
        return [dist.HashStore()] * 3
    if request.param == "FileStore":
        return [dist.FileStore(str(tmp_path / "store"), 3) for _ in range(3)]
    first = dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
    return [first, *(dist.TCPStore("127.0.0.1", first.port, 3, False, wait_for_workers=False) for _ in range(2))]


@pytest.mark.parametrize("hosts", ("aaa", "aba", "abc"))
@pytest.mark.parametrize("interface", ("lo", "nosuch0", "lo with IPv6"))
def test_ranks_connect_twice_through_a_store_and_leave_nothing(stores, hosts, interface, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface[:7].split()[0])
    if interface == "lo with IPv6":
        monkeypatch.setattr(network, "own_interfaces", lambda names=(): ["::1/128"])
    monkeypatch.setattr(network, "namespace", lambda: hosts[int(threading.current_thread().name)])

    def connect(rank):
        return launcherless.connect(stores[rank], rank, 3, timeout_seconds=30)

    before = len(_descriptors()), threading.active_count()
    for _ in range(2):
        ranks = on_all(range(3), connect)
        assert [type(rank).__name__ for rank in ranks] == ["StandIn"] * 3, ranks
        is_unix = {
            (rank, peer): link.sock.family == socket.AF_UNIX
            for rank, MPI in enumerate(ranks)
            for peer, link in MPI._endpoint._links.items()
        }
        assert is_unix == {pair: hosts[pair[0]] == hosts[pair[1]] for pair in itertools.permutations(range(3), 2)}
        assert on_all(ranks, lambda MPI: MPI.COMM_WORLD.allgather(MPI.COMM_WORLD.rank)) == [[0, 1, 2]] * 3
        near = on_all(ranks, lambda MPI: MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).size)
        assert near == [hosts.count(host) for host in hosts]
        assert not any(stores[0].check([f"{mesh._KEY} place{suffix}"]) for suffix in ("", " 0", " 1", " 2"))
        on_all(ranks, lambda MPI: MPI.close())
        assert ranks[0].Is_finalized()
    until(lambda: (len(_descriptors()), threading.active_count()) == before)


def test_an_unauthenticated_connection_is_dropped():
    """A connection without the secret, with too few bytes, or without any."""
    store, results = dist.HashStore(), []
    first = threading.Thread(
        target=lambda: results.append(launcherless.connect(store, 0, 2, timeout_seconds=30)), daemon=True
    )
    first.start()
    store.wait([f"{mesh._KEY} place 0"])
    text, _ = json.loads(store.get(f"{mesh._KEY} place 0"))
    place = mesh.Place(*json.loads(text)[0])
    with ExitStack() as opened:
        for said in (b"torchmpi" + bytes(24), b"hello", b""):
            stranger = opened.enter_context(socket.socket(socket.AF_UNIX))
            stranger.connect("\0" + place.unix_name)
            stranger.sendall(said)
        results.append(launcherless.connect(store, 1, 2, timeout_seconds=30))
        first.join(LIMIT_SECONDS)
    assert [MPI.COMM_WORLD.size for MPI in results] == [2, 2]
    on_all(results, lambda MPI: MPI.close())


def test_a_missing_rank_is_named():
    with pytest.raises(LaunchError, match="rank 0: rank 1 has written nothing to the store"):
        launcherless.connect(dist.HashStore(), 0, 2, timeout_seconds=0.1)
    store = dist.HashStore()
    store.set(f"{mesh._KEY} place 0", "[]")
    with pytest.raises(LaunchError, match="rank 2: rank 1 has written nothing to the store"):
        launcherless.connect(store, 2, 3, timeout_seconds=0.1)
    absent = mesh.Place("far", network.namespace(), "", "nobody", [], [0])
    store = dist.HashStore()
    entry = entry_of(1, 2, [absent, "00" * 16])
    store.set(f"{mesh._KEY} place 1", json.dumps(entry))
    with pytest.raises(LaunchError, match="rank 0: rank 1 has not connected in time"):
        launcherless.connect(store, 0, 2, timeout_seconds=0.2)
    store.set(f"{mesh._KEY} place", json.dumps([entry_of(0, 2, [absent, "00" * 16]), entry]))
    with pytest.raises(LaunchError, match=r"rank 1: rank 0 on host far cannot be reached on this host: .*refused"):
        launcherless.connect(store, 1, 2, timeout_seconds=5)


def entry_of(rank, size, value, key=b""):
    """An entry of the store that a rank with this key has signed."""
    signer = mesh.Mesh(None, rank, size, 1.0, key=key, is_one_host=False)
    return json.loads(signed_entries.signed(key, signer._label("place", rank), value))


@pytest.mark.parametrize("keys", [(b"k" * 16, b"l" * 16), (b"k" * 16, b"")], ids=("another", "none"))
def test_ranks_with_different_keys_do_not_meet(keys):
    store = dist.HashStore()

    def connect(rank):
        launcherless.connect(store, rank, 2, timeout_seconds=5, key=keys[rank])

    messages = [str(error) for error in on_all(range(2), connect)]
    assert "rank 0: the entry of rank 1 in the store is not signed with the key of this job. Give" in messages[0]
    assert "rank 1: the entry of rank 0 in the store is not signed" in messages[1]


def test_an_entry_of_somebody_else_is_refused_also_with_the_number_of_another_rank():
    """Whoever writes to the store cannot name an address, nor repeat what a rank has signed under another number."""
    key, absent = b"k" * 16, mesh.Place("far", network.namespace(), "", "nobody", [], [0])
    true = entry_of(1, 2, [absent, "00" * 16], key)
    for entry in (
        [true[0], "00" * 32],
        [true[0].replace("nobody", "thief "), true[1]],
        entry_of(0, 2, [absent, "00" * 16], key),
        entry_of(1, 3, [absent, "00" * 16], key),
        entry_of(1, 2, [absent, "00" * 16]),
    ):
        store = dist.HashStore()
        store.set(f"{mesh._KEY} place 1", json.dumps(entry))
        with pytest.raises(LaunchError, match="rank 0: the entry of rank 1 in the store is not signed"):
            launcherless.connect(store, 0, 2, timeout_seconds=5, key=key)


def test_a_system_without_namespaces(monkeypatch):
    """Regression: an UnboundLocalError."""

    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(os, "readlink", refuse)
    MPI = launcherless.connect(dist.HashStore(), 0, 1, timeout_seconds=5)
    assert MPI.COMM_WORLD.allgather(5) == [5]
    MPI.close()


def test_a_closed_world_cannot_be_started():
    MPI = launcherless.connect(dist.HashStore(), 0, 1, timeout_seconds=5)
    assert MPI.COMM_WORLD.allgather(5) == [5] and mpi_library.short_version(MPI).startswith("torchmpi messages")
    mpi_library.adopt(MPI)
    try:
        assert mpi_library.initialize() is MPI
        MPI.close()
        with pytest.raises(LaunchError, match="are closed"):
            mpi_library.initialize()
    finally:
        mpi_library.adopt(None)
