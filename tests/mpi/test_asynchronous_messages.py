"""To a user of asynchronous messages: they keep their order with all others, and arrive without a thread that waits."""

from __future__ import annotations

import random
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.functions_entered import python_calls
from helpers.neighbors import neighbors
from mpi4py import MPI

import torchmpi as mpi
from torchmpi import errors
from torchmpi.backends.ring_transport import RingTransport
from torchmpi.collectives.message_handle import transport_of
from torchmpi.collectives.short_messages import DeferredReceive
from torchmpi.shared_memory import fast_path

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]

LONG = 600_000  # elements: more than a ring has room for


def values(sender: int, number: int, length: int = 8) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32) + 1000 * sender + number


def test_messages_arrive_in_their_order(agree):
    """Receives waited for in any order, of short and of long messages, beside blocking ones."""
    left, right = neighbors()
    generator = random.Random(5)  # the same on all ranks
    for turn in range(12):
        lengths = [generator.choice((8, 8, 100, LONG)) for _ in range(5)]
        kinds = [generator.choice(("recv", "sendreceive")) for _ in lengths]
        if turn % 3 == 0:
            kinds = ["recv"] * len(lengths)
        sends, receives, got = [], [], {}
        for number, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
            own = values(mpi.rank(), number, length)
            if kind == "recv":
                sends.append(mpi.send_async(own, right))
                receives.append((number, mpi.recv_async(torch.zeros(length), left)))
            else:
                got[number] = mpi.sendreceive(own, left, right)
        generator.shuffle(receives)
        for number, handle in receives:
            got[number] = handle.wait()
        for handle in sends:
            handle.wait()
        for number, length in enumerate(lengths):
            agree.equal(got[number], values(left, number, length), f"turn {turn}, {kinds}, {lengths}, message {number}")


def test_a_blocking_receive_does_not_overtake_a_deferred_one(agree):
    left, right = neighbors()
    if left == mpi.rank():
        pytest.skip("a blocking receive from oneself never ends")
    first, second = torch.zeros(8), torch.zeros(8)
    for turn in range(6):
        sends = [mpi.send_async(values(mpi.rank(), number), right) for number in (2 * turn, 2 * turn + 1)]
        handle = mpi.recv_async(first, left)
        mpi.recv(second, left)
        handle.wait()
        for send in sends:
            send.wait()
        agree.equal(first, values(left, 2 * turn), f"first, turn {turn}")
        agree.equal(second, values(left, 2 * turn + 1), f"second, turn {turn}")


def test_a_message_does_not_overtake_a_receive_that_another_thread_begins(agree, monkeypatch):
    """Regression: the progress thread had taken a deferred receive, and had not posted it yet."""
    left, right = neighbors()
    begin = DeferredReceive.begin

    def slowly(receive: DeferredReceive) -> None:
        time.sleep(0.05)
        begin(receive)

    monkeypatch.setattr(DeferredReceive, "begin", slowly)
    for turn in range(3):
        send = mpi.send_async(values(mpi.rank(), turn), right)
        handle = mpi.recv_async(torch.zeros(8), left)
        time.sleep(0.02)
        got = mpi.sendreceive(values(mpi.rank(), turn + 100), left, right)
        agree.equal(handle.wait(), values(left, turn), f"deferred, turn {turn}")
        agree.equal(got, values(left, turn + 100), f"exchange, turn {turn}")
        send.wait()


@pytest.mark.min_ranks(2)
def test_a_callback_may_look_at_a_receive_that_its_thread_begins(agree, monkeypatch):
    """Regression: the receive was taken for ended."""
    transport = transport_of(mpi.communicator(0).intra)
    if fast_path.send is fast_path._not_built or not isinstance(transport, RingTransport):
        pytest.skip("no receive is deferred")
    rank, seen, handles, begin, world = mpi.rank(), [], [], DeferredReceive.begin, MPI.COMM_WORLD
    called = threading.Event()  # the thread that ends the message may call back after wait() has returned in this one

    def look() -> None:
        seen.append(handles[1].done())
        called.set()

    def while_another_is_awaited(receive: DeferredReceive) -> None:
        if receive is handles[1]:
            handles[0].when_done(look, soon=False)
            world.send("awaited", 1)
            world.recv(source=1)  # the first message has arrived
        begin(receive)

    for number in range(3):
        if rank == 0:
            mpi.recv_async(torch.zeros(8), 1).wait()
        elif rank == 1:
            mpi.send(values(1, number), 0)
    if rank == 0:
        monkeypatch.setattr(DeferredReceive, "begin", while_another_is_awaited)
        with transport.deferring:
            handles += [mpi.recv_async(torch.zeros(8), 1) for _ in range(2)]
            seen.append(handles[1].done())
        world.send("seen", 1)
        for number, handle in enumerate(handles):
            agree.equal(handle.wait(), values(1, number))
        agree(called.wait(60) and seen == [False, False], f"ended before the message: {seen}")
    elif rank == 1:
        for number in range(2):
            world.recv(source=0)
            mpi.send(values(1, number), 0)
            if number == 0:
                world.send("sent", 0)


@pytest.mark.parametrize("length", [8, 1 << 18])
def test_a_repeated_message_runs_in_machine_code(agree, length):
    if fast_path.send is fast_path._not_built or not isinstance(transport_of(mpi.communicator(0).intra), RingTransport):
        pytest.skip("no fast path, or messages of MPI")
    left, right = neighbors()
    tensor, own = torch.zeros(length), values(mpi.rank(), 0, length)
    for _ in range(5):
        mpi.send_async(own, right)
        mpi.recv_async(tensor, left).wait()
    mpi.barrier()
    functions, sent = python_calls(lambda: mpi.send_async(own, right))
    mpi.barrier()  # all messages are in the rings
    begun, handle = python_calls(lambda: mpi.recv_async(tensor, left))
    received, _ = python_calls(handle.wait)
    agree(sent.done(), "sent")
    names = [[code.co_name for code in codes] for codes in (functions, begun, received)]
    agree("post" not in names[0], f"send: {names[0]}")
    agree(len(names[1]) <= 14 and "check" not in names[1], f"begin of a receive: {names[1]}")
    # The progress thread may have looked at the receive, in a millisecond without this one.
    agree(len(names[2]) <= 12, f"receive: {names[2]}")
    agree.equal(tensor, values(left, 0, length))


@pytest.mark.parametrize("length", [8, LONG])
@pytest.mark.parametrize("watch", ("done", "when_done", "a limit", "nothing"))
def test_messages_for_which_nobody_waits_end(agree, watch, length):
    left, right = neighbors()
    tensor, ended = torch.zeros(length), []
    for turn in range(3):
        send = mpi.send_async(values(mpi.rank(), turn, length), right)
        handle = mpi.recv_async(tensor, left)
        limit = time.monotonic() + 60
        if watch == "when_done":
            handle.when_done(lambda: ended.append(1))
        if watch == "a limit":
            handle.wait(60)
        while watch != "a limit" and time.monotonic() < limit:
            is_over = {
                "done": handle.done,
                "when_done": lambda turn=turn: len(ended) > turn,
                "nothing": lambda turn=turn: bool(tensor[-1] == values(left, turn, length)[-1]),
            }[watch]()
            if is_over:
                break
            time.sleep(0.001)
        agree(time.monotonic() < limit, f"turn {turn}: it has not ended")
        send.wait(60)
        agree.equal(handle.wait(), values(left, turn, length), f"turn {turn}")


@pytest.mark.min_ranks(2)
def test_a_message_of_another_shape_is_an_error_of_wait(agree):
    left, right = neighbors()
    for turn in range(4):
        sends = [mpi.send_async(values(mpi.rank(), turn, length), right) for length in (5, 8)]
        handles = [mpi.recv_async(torch.zeros(8), left) for _ in range(2)]
        for _ in range(2):
            agree.raises(errors.MismatchError, handles[0].wait, "sent float32 [5]", "dropped")
        agree.equal(handles[1].wait(), values(left, turn), "the next one")
        for send in sends:
            send.wait()


def test_a_wait_with_a_limit_for_a_message_that_is_not_sent(agree):
    left, right = neighbors()
    tensor = torch.zeros(8)
    for turn in range(3):
        handle = mpi.recv_async(tensor, left)
        agree.raises(errors.StallError, lambda handle=handle: handle.wait(0.01), "has not ended")
        mpi.barrier()
        send = mpi.send_async(values(mpi.rank(), turn), right)
        agree.equal(handle.wait(), values(left, turn), f"turn {turn}")
        send.wait()


def test_a_group_is_freed_after_its_messages(agree):
    """Also a receive that has not begun."""
    left, right = neighbors()
    tensor = torch.zeros(8)
    for turn in range(3):
        group = mpi.group(range(mpi.size()))
        for number in range(4):
            send = mpi.send_async(values(mpi.rank(), number), right, comm=group)
            handle = mpi.recv_async(tensor, left, comm=group)
            if number < 3:
                handle.wait()
                send.wait()
        group.free()
        agree.equal(tensor, values(left, 3), f"turn {turn}")
        agree.equal(handle.wait(), values(left, 3), f"turn {turn}")
        send.wait()


def test_the_progress_thread_sleeps_while_the_program_computes(agree):
    """Regression: it looked each millisecond, which took 4 % of the core from a pipeline."""
    left, right = neighbors()

    def exchange(number: int) -> None:
        receive, send = mpi.recv_async(torch.zeros(8), left), mpi.send_async(values(mpi.rank(), number), right)
        agree.equal(receive.wait(), values(left, number))
        send.wait()

    def num_looks() -> int:
        """A look is a sleep that has ended."""
        (thread,) = (each for each in threading.enumerate() if each.name == "torchmpi messages")
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)[0])

    for number in range(10):
        exchange(number)
    before = num_looks()
    for number in range(5):
        exchange(number)
        time.sleep(0.05)  # as a computation; other ranks send nothing meanwhile
    assert num_looks() - before < 5 * 10
