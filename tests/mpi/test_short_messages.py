"""To a user of short messages: by the fast path, rings or MPI, results, errors and order are those of Python."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers.interrupts import interrupted
from helpers.neighbors import neighbors
from mpi4py import MPI

import torchmpi as mpi
from torchmpi import errors
from torchmpi.backends.message_transport import PACKED_BYTES, MpiTransport, Transport
from torchmpi.backends.ring_transport import RingTransport
from torchmpi.collectives.message_handle import MessageHandle, transport_of
from torchmpi.collectives.point_to_point import _part_key
from torchmpi.collectives.short_messages import exchange_later
from torchmpi.config import Config
from torchmpi.session import runtime
from torchmpi.shared_memory import fast_path
from torchmpi.shared_memory.memory_layout import LockFields

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usefixtures("placement")]

LONG = PACKED_BYTES + 1  # of any dtype: a message of their own for the values
SHAPES = ((), (1,), (5,), (3, 4), (0, 3), (2, 1, 7), (1024,), (LONG,))


@pytest.fixture(params=("one host", "a host each"), scope="module")
def placement(request) -> Iterator[str]:
    """torchmpi, on hosts that names simulate."""
    was_running = runtime.is_running()
    mpi.stop()
    name = "" if request.param == "one host" else str(MPI.COMM_WORLD.rank)
    mpi.start(config=dataclasses.replace(Config.from_environment(), host_name=name))
    yield request.param
    try:
        mpi.stop()
    finally:
        if was_running:
            mpi.start()


@pytest.fixture(autouse=True)
def _need_fast_path(placement: str) -> None:
    mpi.sendreceive(torch.zeros(1), *neighbors())
    if fast_path.sendreceive is fast_path._not_built:
        pytest.skip("this Python or this PyTorch has no fast path")
    if runtime.current().context.sleeps_before_mpi and not in_rings():
        pytest.skip("ranks sleep before they call MPI")


def exchanged(tensor: torch.Tensor, src: int, dst: int) -> bool:
    """Exchange by the fast path; return whether the fast path made the call."""
    return fast_path.sendreceive(tensor, None, fast_path.joint_key(src, dst), None, None) is tensor


def in_rings() -> bool:
    """Return whether messages go through shared memory, where they may be long."""
    return isinstance(transport_of(mpi.communicator().intra), RingTransport)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exchanges_equal_those_through_python(agree, shape, dtype):
    left, right = neighbors()
    numel = torch.Size(shape).numel()

    def values(rank: int) -> torch.Tensor:
        return (torch.arange(numel) % 3 + rank).to(dtype).reshape(shape)

    plain = mpi.sendreceive(values(mpi.rank()), left, right)
    quick = values(mpi.rank())
    version = quick._version
    went = exchanged(quick, left, right)
    if not went:
        mpi.sendreceive(quick, left, right)
    agree(went, "not by the fast path")
    agree.bits(quick, plain, "fast path")
    agree.bits(plain, values(left), "Python")
    agree(quick._version > version, "autograd does not notice the write")


def test_both_paths_meet_in_one_order(agree):
    left, right = neighbors()
    rank = mpi.rank()
    sends = [mpi.send_async(torch.full((length,), float(rank + length)), right) for length in (3, 5000)]
    receives = [mpi.recv_async(torch.empty(length), left) for length in (3, 5000)]
    last = mpi.sendreceive(torch.full((4,), float(rank)), left, right)  # queued behind the messages before it
    received = [handle.wait() for handle in receives]
    for handle in sends:
        handle.wait()
    odd = torch.full((4,), float(rank))  # ranks of the two paths exchange messages
    if rank % 2:
        mpi.sendreceive(odd, left, right)
    else:
        mpi.sendreceive_async(odd, left, right).wait()
    agree.equal(last, torch.full((4,), float(left)))
    for each in received:
        agree.equal(each, torch.full((each.numel(),), float(left + each.numel())))
    agree.equal(odd, torch.full((4,), float(left)))


@pytest.mark.parametrize("length", [3, LONG])
def test_asynchronous_exchanges_repeat_in_one_order(agree, length):
    left, right = neighbors()
    size, rank, before = mpi.size(), mpi.rank(), mpi.metrics()["messages"]
    tensors = [torch.full((length,), float(rank + 10 * number)) for number in range(5)]
    mpi.sendreceive_async(tensors[0], left, right).wait()
    handles = [mpi.sendreceive_async(each, left, right) for each in tensors[1:4]]  # several under way
    mpi.sendreceive(tensors[4], left, right)  # after them
    handles[1].wait()
    for handle, tensor in zip(handles, tensors[1:4], strict=True):
        agree(handle.wait() is tensor)
    for number, tensor in enumerate(tensors):
        agree.equal(tensor, torch.full((length,), float(left + 10 * number)))
    for count in range(2, size + 1):  # in place, without a wait between
        agree.equal(
            mpi.sendreceive_async(tensors[0], left, right).wait(), torch.full((length,), float((rank - count) % size))
        )
    if in_rings():
        mpi.barrier()
        receive, _ = exchange_later(tensors[0], (_part_key(left), _part_key(right)), None)  # not in Python
        agree.equal(receive.wait(), torch.full((length,), float((rank - size - 1) % size)))
    counted = mpi.metrics()["messages"]["world"]["sendreceive"]["calls"]
    counted -= before.get("world", {}).get("sendreceive", {"calls": 0})["calls"]
    agree.equal(torch.tensor(counted), torch.tensor(5 + size - 1 + in_rings()))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_an_exchange_into_read_only_memory_sends_nothing(agree, tmp_path):
    """Regression: machine code had sent the copy when the receive was refused."""
    left, right = neighbors()
    (tmp_path / "zeros").write_bytes(bytes(12))
    fixed = torch.from_numpy(np.memmap(tmp_path / "zeros", np.float32, "r"))
    for number in range(3):
        received = mpi.sendreceive_async(torch.full((3,), float(number)), left, right).wait()
        agree.equal(received, torch.full((3,), float(number)))
        agree.raises(errors.ArgumentError, lambda: mpi.sendreceive_async(fixed, left, right), "cannot be written")


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("length", [5, LONG])
def test_a_message_of_another_shape_is_dropped(agree, length):
    left, right = neighbors()
    for _ in range(3):
        tensor = torch.ones(length if mpi.rank() == 0 else 4)
        if mpi.rank() in (0, 1):
            agree.raises(
                errors.MismatchError, lambda tensor=tensor: mpi.sendreceive(tensor, left, right), "sent float32"
            )
        else:
            mpi.sendreceive(tensor, left, right)
        agree.equal(mpi.sendreceive(torch.full((4,), float(mpi.rank())), left, right), torch.full((4,), float(left)))


@pytest.mark.min_ranks(2)
def test_a_waiting_exchange_is_described(agree):
    if not runtime.current().threads_allowed:
        pytest.skip("this MPI library takes one thread at a time")
    left, right = neighbors()
    descriptions: list[object] = []
    if mpi.rank() == 0:
        queue = mpi.communicator().intra.peer_queue("receive", left)
        waiting = threading.Thread(target=exchanged, args=(torch.zeros(2, 3), left, right))
        waiting.start()
        limit = time.monotonic() + 20
        while queue.doing is None and time.monotonic() < limit:
            time.sleep(0.001)
        descriptions = [queue.doing, queue.doing]
    mpi.barrier()
    if mpi.rank() == 0:
        waiting.join()
        agree.equal(str(descriptions[0]), f"sendreceive(float32 [2, 3]) from rank {left}")
        agree(descriptions[0] is descriptions[1], "another object for the same call")
        agree(queue.doing is None, "described after its end")
    else:
        mpi.sendreceive(torch.zeros(2, 3), left, right)


def test_exchanges_are_counted(agree):
    left, right = neighbors()
    comm = mpi.group(range(mpi.size()), name="exchanges")
    for length in (3, 3, 5, 7):  # the first one through Python
        mpi.sendreceive(torch.ones(length), left, right, comm=comm)
    found = mpi.metrics()["messages"]["exchanges"]["sendreceive"]
    comm.free()
    kept = mpi.metrics()["messages"]["exchanges"]["sendreceive"]
    agree.equal((found["calls"], found["bytes"]), (4, 72))
    agree(0 <= found["waited"] <= found["seconds"], f"{found}")
    agree.equal(round(found["waited"] + found["moved"], 9), round(found["seconds"], 9))
    agree.equal(kept["calls"], 4)


def test_calls_that_the_fast_path_leaves_to_python(agree):
    left, right = neighbors()
    tensor = torch.ones(4, 4)
    agree(exchanged(tensor, left, right), "not by the fast path")
    for other in (
        tensor.t(),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64),
    ):
        agree(not exchanged(other, left, right), f"{type(other)} of shape {other.shape} by the fast path")
    agree.raises(errors.ArgumentError, lambda: mpi.sendreceive(tensor, mpi.size(), right), "is not a rank")
    agree.raises(errors.ArgumentError, lambda: mpi.sendreceive(tensor, left, [right]), "is not a rank")
    agree.equal(mpi.sendreceive(mpi.rank(), left, right), left)


def values(sender: int, number: int, length: int = 6) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32) + 1000 * sender + number


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("late", ["none", "the sender", "the receiver"])
def test_messages_arrive_in_order_whoever_is_late(agree, late):
    """The fast path gives a message up to Python when the other rank is late; the next one must not overtake it."""
    rank, last = mpi.rank(), mpi.size() - 1
    for turn in range(8):
        if late != "none" and turn >= 4 and rank == (0 if late == "the sender" else last):
            time.sleep(0.01)
        if rank == 0:
            mpi.send(values(0, turn), last)
            sends = [mpi.send_async(values(0, turn + part), last) for part in (100, 200)]
            reply = mpi.recv(torch.zeros(3), last)
            agree.equal(reply, values(last, turn, 3), f"turn {turn}")
            for send in sends:
                send.wait()
        elif rank == last:
            for part in (0, 100, 200):
                agree.equal(mpi.recv(torch.zeros(6), 0), values(0, turn + part), f"turn {turn}, part {part}")
            mpi.send(values(last, turn, 3), 0)


@pytest.mark.min_ranks(2)
def test_an_exchange_with_a_late_rank_has_the_values_of_both(agree):
    left, right = neighbors()
    for turn in range(6):
        if turn >= 3 and mpi.rank() == 0:
            time.sleep(0.01)
        agree.equal(mpi.sendreceive(values(mpi.rank(), turn), left, right), values(left, turn), f"turn {turn}")


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_receive_of_another_shape_is_an_error_and_the_next_one_is_right(agree, is_late):
    rank, last = mpi.rank(), mpi.size() - 1
    for turn in range(3):
        if rank == 0:
            time.sleep(0.01 * is_late)
            mpi.send(values(0, turn, 5), last)
            mpi.send(values(0, turn), last)
        elif rank == last:
            with pytest.raises(errors.MismatchError, match=r"sent float32 \[5\]"):
                mpi.recv(torch.zeros(6), 0)
            agree.equal(mpi.recv(torch.zeros(6), 0), values(0, turn), f"turn {turn}")


@pytest.mark.min_ranks(2)
def test_messages_that_wait_for_no_rank_are_machine_code(agree, monkeypatch):
    rank, last, group, made = mpi.rank(), mpi.size() - 1, mpi.communicator().intra, []
    make = MessageHandle.__init__
    for turn in range(12):
        if turn == 2:
            monkeypatch.setattr(MessageHandle, "__init__", lambda *a, **k: (made.append(a[2]), make(*a, **k))[1])
        if rank == 0:
            mpi.send(values(0, turn), last)
        mpi.barrier()
        if rank == last:
            mpi.recv(torch.zeros(6), 0)
    agree(len(made) <= 2, f"{made}")  # a message of MPI may arrive after the barrier
    agree.equal(mpi.allreduce(group.messages.value), 0, "messages that have not been received")


def under_way(transport: Transport) -> set[MessageHandle]:
    """Return the messages that have been posted and have not ended."""
    if isinstance(transport, MpiTransport):
        return {each.message for opened in list(transport._open.values()) for each in list(opened)}
    return {each.message for each in list(transport._open) if each.message is not None}


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("has_begun", [False, True])
def test_an_interrupt_at_any_moment_loses_no_message(agree, has_begun):
    """Ctrl-C in a receive, of which nothing has arrived, or the description, but not the values.

    Regression: locks stayed taken, MPI received the next message for a receive that nobody continued, or the values of
    this one were taken for those of the next. Between the begin of a receive and the wait for it, it stayed posted.
    """
    rank, last, transport = mpi.rank(), mpi.size() - 1, transport_of(mpi.communicator().intra)
    length, world = LONG if has_begun else 6, MPI.COMM_WORLD
    if has_begun and not isinstance(transport, MpiTransport):
        pytest.skip("the description and the values are in one ring")
    for _ in range(2):  # from the second call on by the fast path
        if rank == 0:
            mpi.send(values(0, 0, length), last)
        elif rank == last:
            mpi.recv(torch.zeros(length), 0)
    for place in itertools.count(1):
        first, second = values(0, 2 * place, length), values(0, 2 * place + 1, length)
        if rank == 0:
            send = MessageHandle(transport.group, "send", first, last, is_receive=False, is_background=False)
            stage = transport._first_stage(send) if has_begun else None
            requests = [] if stage is None else [next(stage.begins)]
            is_over, is_left = world.recv(source=last)
            if stage is None:
                mpi.send(first, last)
            else:
                MPI.Request.Waitall([*requests, *stage.begins])
            if is_left:
                world.send(None, last)
            mpi.send(second, last)
        elif rank == last:
            memory = np.zeros(length, np.float32)
            is_kept = weakref.ref(memory)
            address, open_before = memory.ctypes.data, under_way(transport)
            names = interrupted(lambda there=memory: mpi.recv(torch.from_numpy(there), 0), place)
            del memory
            there, left = f"interrupted at {place}, in {names[-1]}", under_way(transport) - open_before
            if any(message.tensor.data_ptr() == address for message in left):
                agree(is_kept() is not None, f"{there}: it is received into memory that has been freed")
            if isinstance(transport, MpiTransport):
                agree(not transport._lock._is_owned(), f"{there}: the progress thread waits for the lock")
            is_over = names.count("proceed") > 5  # waiting in Python
            world.send((is_over, bool(left)), 0)
            if left:  # the description has arrived, so that the sender waits
                agree(has_begun, f"{there}: it takes a later message")
                world.recv(source=0)
            got = mpi.recv(torch.zeros(length), 0)
            if torch.equal(got, first):
                got = mpi.recv(torch.zeros(length), 0)
            else:
                agree(has_begun, f"{there}: the message after it is lost")
            agree.equal(got, second, there)
            locks = transport.lock, transport.group.peer_queue("receive", 0).run_lock
            pending = [lock.fields[LockFields.pending] - lock.fields[LockFields.ended] for lock in locks]
            agree(left or not any(pending), f"{there}: the fast path makes no messages any more")
        if rank not in (0, last) or is_over:
            break
    agree.equal(mpi.allreduce(transport.group.messages.value), 0, "messages that have not been received")


@pytest.mark.min_ranks(2)
def test_an_interrupt_in_a_receive_leaves_an_earlier_one_as_it_is(agree):
    """Ctrl-C while a thread that waits for a receive begins or ends an asynchronous one before it.

    Regression: that one never ended, or had ended at once, without its values.
    """
    rank, last, world = mpi.rank(), mpi.size() - 1, MPI.COMM_WORLD
    for place in itertools.count(1):
        first, second, third = (values(0, 3 * place + number) for number in range(3))
        if rank == 0:
            for each in (first, second, third):
                mpi.send_async(each, last).wait()
            is_over = world.recv(source=last)
        elif rank == last:
            earlier = mpi.recv_async(torch.zeros(6), 0)
            names = interrupted(lambda: mpi.recv(torch.zeros(6), 0), place)
            is_over = len(names) < place
            agree.equal(earlier.wait(20), first, f"interrupted at {place}, in {names[-1]}")
            while not torch.equal(mpi.recv(torch.zeros(6), 0), third):
                pass
            world.send(is_over, 0)
        if rank not in (0, last) or is_over:
            break
