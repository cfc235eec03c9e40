"""To a user of short messages: order, tags, any source, lengths and ends, among threads, in rings of shared memory.

The transport and its kernels are those of a job; the messages are plain objects, and the ranks are threads.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchmpi.backends.message_transport import Received
from torchmpi.backends.ring_transport import MOST_DIMS, RingTransport
from torchmpi.communicators.call_queue import RunLock
from torchmpi.communicators.status_board import StatusBoard
from torchmpi.errors import CommunicatorError
from torchmpi.shared_memory import memory_layout
from torchmpi.shared_memory.memory_layout import FOR_ARRIVALS, FOR_ROOM, LockFields
from torchmpi.shared_memory.segments import Segment

LIMIT_SECONDS = 30.0
NO_TAG = -1


class Posted:
    """A message to send, or room for one."""

    def __init__(self, values: np.ndarray, peer: int | None, tag: int = NO_TAG, *, is_receive: bool = False) -> None:
        self.values, self.peer, self.tag, self.is_receive = values, peer, tag, is_receive
        self.what, self.code, self.shape = f"message with tag {tag}", 1, tuple(values.shape)
        self.num_bytes, self.address, self.is_elsewhere = values.nbytes, values.ctypes.data, False
        self.compares_shape = tag == NO_TAG
        self.call_queue: Any = SimpleNamespace(run_lock=RunLock())
        self.waited_until, self.records = 0, []
        self.received: Received | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()

    def begin_record(self) -> None:
        self.records.append("begin")

    def end_record(self) -> None:
        self.records.append("end")

    def finish(self, received: Received | None) -> None:
        assert not self.ended.is_set(), f"{self.what} has ended twice"
        self.received = received
        if received is not None and received.memory is not None and received.num_bytes == self.num_bytes:
            self.values.view(np.uint8).reshape(-1)[:] = received.memory
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.ended.set()

    def pause(self, seconds: float) -> None:
        self.ended.wait(seconds)


class Rank:
    """A rank, which is a thread."""

    def __init__(self, rank: int, size: int, segment: Segment) -> None:
        board, context = StatusBoard(segment, size), SimpleNamespace(is_crowded=True)
        group: Any = SimpleNamespace(rank=rank, size=size, name="threads", status_board=board, context=context)
        self.rank, self.board, self.transport = rank, board, RingTransport(group)

    def send(self, values: np.ndarray, peer: int, tag: int = NO_TAG) -> Posted:
        return self.post(Posted(values, peer, tag))

    def receive(self, room: np.ndarray, peer: int | None, tag: int = NO_TAG) -> Posted:
        return self.post(Posted(room, peer, tag, is_receive=True))

    def post(self, message: Posted) -> Posted:
        self.transport.post(message)
        return message

    def wait(self, *messages: Posted) -> None:
        """Wait until they have ended; then nothing of them is under way."""
        limit = time.monotonic() + LIMIT_SECONDS
        for message in messages:
            turn = 0
            while not message.ended.is_set():
                assert time.monotonic() < limit, f"{message.what} has not ended"
                self.transport.proceed(message, turn)
                turn += 1
            assert message.call_queue.run_lock.fields[LockFields.pending] == 0


class Ranks:
    def __init__(self, size: int) -> None:
        self.segment = Segment.create("rings", memory_layout.segment_bytes(size, 4096))
        self.segment.withdraw()
        self.members = [Rank(rank, size, self.segment) for rank in range(size)]

    def together(self, work: Any) -> list[Any]:
        with ThreadPoolExecutor(len(self.members)) as pool:
            return [future.result(LIMIT_SECONDS) for future in [pool.submit(work, each) for each in self.members]]

    def close(self) -> None:
        for member in self.members:
            member.transport.close()
            member.board.fields.release()
        self.segment.close()


@pytest.fixture(params=[1, 2, 3, 17, 70])
def ranks(request):
    made = Ranks(request.param)
    yield made
    made.close()


@pytest.fixture
def pair():
    made = Ranks(2)
    yield made
    made.close()


def numbers(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, length).astype(np.uint8)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 5_000, 70_000, 2_300_000])
def test_around_a_ring_of_ranks(ranks, length):
    """Longer than the rings, and around their ends."""
    size = len(ranks.members)
    if size > 3:
        length = min(length, 200_000)

    def work(rank: Rank) -> list[np.ndarray]:
        rooms = [np.zeros(length, np.uint8) for _ in range(3)]
        for turn, room in enumerate(rooms):
            sent = rank.send(numbers(length, 10 * rank.rank + turn), (rank.rank + 1) % size)
            rank.wait(rank.receive(room, (rank.rank - 1) % size), sent)
            assert sent.records == ["begin", "end"]
        return rooms

    for rank, rooms in enumerate(ranks.together(work)):
        for turn, room in enumerate(rooms):
            expected = numbers(length, 10 * ((rank - 1) % size) + turn)
            np.testing.assert_array_equal(room, expected, f"rank {rank} turn {turn}")


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_tags_sources_and_lengths(seed):
    """Messages of a pair and a tag arrive in their order, whatever each rank posts when."""
    size, tags, most = 3, (NO_TAG, 0, 7), 12
    ranks, random_of_all = Ranks(size), random.Random(seed)
    plan = [
        (random_of_all.randrange(size), random_of_all.randrange(size), random_of_all.choice(tags),
         random_of_all.choice([0, 1, 100, 5_000, 600_000]))
        for _ in range(most * size)
    ]  # fmt: skip

    def work(rank: Rank) -> list[tuple[int, np.ndarray, Posted]]:
        own = random.Random(seed * 100 + rank.rank)
        todo = [("send", index) for index, (source, *_) in enumerate(plan) if source == rank.rank]
        wanted = [("receive", index) for index, (_, target, *_) in enumerate(plan) if target == rank.rank]
        # In any order of pairs and tags, but in the order of each.
        directions: dict[Any, list[tuple[str, int]]] = {}
        for action, index in todo + wanted:
            source, target, tag, _ = plan[index]
            directions.setdefault((action, source, target, tag), []).append((action, index))
        posted, received = [], []
        while directions:
            key = own.choice(sorted(directions))
            action, index = directions[key].pop(0)
            if not directions[key]:
                del directions[key]
            source, target, tag, length = plan[index]
            if action == "send":
                posted.append(rank.send(numbers(length, index), target, tag))
            else:
                room = np.zeros(length, np.uint8)
                posted.append(rank.receive(room, source, tag))
                received.append((index, room, posted[-1]))
        own.shuffle(posted)
        rank.wait(*posted)
        return received

    try:
        for rank, received in enumerate(ranks.together(work)):
            for index, room, message in received:
                np.testing.assert_array_equal(room, numbers(plan[index][3], index), f"rank {rank}: {plan[index]}")
                assert message.received.source == plan[index][0] and message.records == ["begin", "end"]
    finally:
        ranks.close()


def test_a_message_that_ends_while_another_tag_is_found_is_not_forgotten():
    """Regression: the kernel returned for the tag, and passed over the ended message until another one ended."""
    ranks = Ranks(3)
    first, second, third = ranks.members
    waiting, other = second.receive(np.zeros(4, np.uint8), 0), second.receive(np.zeros(4, np.uint8), 2)
    sent = [third.send(numbers(3_000_000, 1), 1, 3), third.send(numbers(4, 2), 1)]  # the first part of the long one
    first.wait(first.send(numbers(4, 3), 1))
    second.wait(waiting)
    late = second.receive(np.zeros(3_000_000, np.uint8), 2, 3)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(third.wait, *sent)
        second.wait(late, other)
        sending.result()
    np.testing.assert_array_equal(waiting.values, numbers(4, 3))
    np.testing.assert_array_equal(late.values, numbers(3_000_000, 1))
    np.testing.assert_array_equal(other.values, numbers(4, 2))
    ranks.close()


def test_from_any_rank(ranks):
    size = len(ranks.members)

    def work(rank: Rank) -> list[tuple[int, int]]:
        if rank.rank:
            rank.wait(rank.send(np.full(9_000, rank.rank, np.uint8), 0, 5))
            return []
        rooms = [np.zeros(9_000, np.uint8) for _ in range(size - 1)]
        messages = [rank.receive(room, None, 5) for room in rooms]
        rank.wait(*messages)
        assert all((room == room[0]).all() for room in rooms)
        return [(message.received.source, int(room[0])) for message, room in zip(messages, rooms, strict=True)]

    found = ranks.together(work)[0]
    assert sorted(found) == [(rank, rank) for rank in range(1, size)]


def test_a_message_that_does_not_fit_is_dropped_and_described(pair):
    first, second = pair.members
    sent = [first.send(np.zeros((3, 5), np.uint8), 1), first.send(numbers(300_000, 1), 1), first.send(numbers(4, 2), 1)]
    rooms = [np.ones(15, np.uint8), np.ones(7, np.uint8), np.ones(4, np.uint8)]
    messages = [second.receive(room, 0) for room in rooms]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.wait, *sent)
        second.wait(*messages)
        waiting.result()
    assert messages[0].received[1:4] == (15, 1, (3, 5)) and messages[1].received[1:4] == (300_000, 1, (300_000,))
    assert (rooms[0] == 1).all() and (rooms[1] == 1).all()
    np.testing.assert_array_equal(rooms[2], numbers(4, 2))


def test_a_shape_of_all_dimensions_that_torch_permits(pair):
    first, second = pair.members
    shape = (1,) * (MOST_DIMS // 2 - 1) + (2,)  # numpy permits 64 only in version 2
    values, room = numbers(2, 3).reshape(shape), np.zeros(shape, np.uint8)
    sent, message = first.send(values, 1), second.receive(room, 0)
    second.wait(message)
    first.wait(sent)
    assert message.received.shape == shape
    np.testing.assert_array_equal(room, values)


def test_a_withdrawn_receive_takes_no_message(pair):
    first, second = pair.members
    late, room = second.receive(np.zeros(4, np.uint8), 0), np.zeros(4, np.uint8)
    assert second.transport.cancel(late)
    sent, message = first.send(numbers(4, 1), 1), second.receive(room, 0)
    second.wait(message)
    first.wait(sent)
    assert not late.ended.is_set() and not second.transport.cancel(message)
    np.testing.assert_array_equal(room, numbers(4, 1))


def test_a_group_that_is_closed_fails_what_waits(pair):
    second = pair.members[1]
    waiting, unexpected = second.receive(np.zeros(4, np.uint8), 0), pair.members[0].send(numbers(8, 1), 1, 3)
    pair.members[0].wait(unexpected)
    second.transport.test(waiting)  # the message with the other tag arrives meanwhile
    second.transport.close()
    assert isinstance(waiting.error, CommunicatorError)
    with pytest.raises(CommunicatorError, match="has been destroyed"):
        second.receive(np.zeros(4, np.uint8), 0)


@pytest.mark.parametrize("reason", [FOR_ARRIVALS, FOR_ROOM])
def test_a_rank_that_sleeps_is_woken_by_what_it_waits_for(pair, reason):
    """Sleeps that end by themselves would together last longer than a wait may."""
    first, second = pair.members
    sleeper, other = (second, first) if reason == FOR_ARRIVALS else (first, second)
    transport = sleeper.transport
    asleep = ctypes.c_int64.from_address(transport.ring(sleeper.rank, sleeper.rank).asleep)
    values = numbers(100 if reason == FOR_ARRIVALS else transport.capacity + 1, 1)
    seconds = 0.9
    limit = time.monotonic() + LIMIT_SECONDS
    with ThreadPoolExecutor(1) as pool:
        for turn in range(int(LIMIT_SECONDS / seconds) + 1):
            room, ended = np.zeros(len(values), np.uint8), []
            awaited = second.receive(room, 0) if reason == FOR_ARRIVALS else first.send(values, 1)
            sleeping = pool.submit(transport.lock.run, transport._continue, ended, 1, 1, int(seconds * 1e9))
            while asleep.value != reason:
                assert time.monotonic() < limit, f"it does not sleep in turn {turn}"
            moved = first.send(values, 1) if reason == FOR_ARRIVALS else second.receive(room, 0)
            sleeping.result()
            transport._end(ended)
            sleeper.wait(awaited)
            other.wait(moved)
            assert time.monotonic() < limit, f"nobody wakes it in turn {turn}"
            np.testing.assert_array_equal(room, values)


def test_the_rings_of_many_ranks_are_bounded():
    for size in (1, 2, 8, 64):
        assert memory_layout.rings_bytes(size) <= 66 << 20
        capacity = memory_layout.ring_capacity(size)
        assert capacity & (capacity - 1) == 0 and capacity // 4 > 8 * (5 + MOST_DIMS)
