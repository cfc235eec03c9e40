"""To a user of messages of torch.distributed: they arrive whole and in order, also if longer than MPI counts."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import contract
from helpers.outcomes import error_of
from helpers.torch_rig import LAYOUTS, Setting
from mpi4py import MPI

import torchmpi as mpi
from torchmpi.backends.ring_transport import RingTransport
from torchmpi.collectives.message_handle import MessageHandle, transport_of
from torchmpi.distributed.transfers import MAX_TAG
from torchmpi.session import runtime
from torchmpi.shared_memory import fast_path

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
NEXT, PREVIOUS = (RANK + 1) % SIZE, (RANK - 1) % SIZE
# Nothing, less than a block of 64 bytes, one, a little more, many.
LENGTHS = (0, 1, 15, 16, 17, 33, 5_000)
LONG = 600_000
"""Elements that no MPI library sends before they are received."""

pytestmark = pytest.mark.skipif(SIZE == 1, reason="torch refuses messages to oneself")


@pytest.fixture(scope="module", params=("one host", "a host each", "in blocks"), autouse=True)
def torch_world(request) -> Iterator[str]:
    """torch's default group; torchmpi is restarted for the group, and restored for the other files."""
    was_running = runtime.is_running()
    mpi.stop()
    settings = {"message_bytes": 64} if request.param == "in blocks" else {}
    settings |= {} if request.param == "one host" else {"host_name": str(RANK)}
    mpi.start(config=dataclasses.replace(mpi.Config.from_environment(), verbose=False, **settings))
    dist.init_process_group("torchmpi")
    yield request.param
    dist.destroy_process_group()
    mpi.stop()
    if was_running:
        mpi.start()


def numbers(numel: int, seed: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + 1000.0 * seed


def test_every_dtype_and_layout_around_the_ring(agree):
    for number, dtype in enumerate(contract.MOVABLE):
        for shape in contract.SHAPES:
            setting = Setting(None, dtype, shape, number, layout=LAYOUTS[number % len(LAYOUTS)])
            target, expected = setting.blank(setting.value(PREVIOUS)), setting.value(PREVIOUS)
            works = [dist.irecv(target, PREVIOUS), dist.isend(setting.laid(setting.value(RANK)), NEXT)]
            for work in works:
                work.wait()
            agree(contract.same_bits(target.detach(), expected), f"{dtype} {shape} {setting.layout}")


def test_blocking_calls(agree):
    """Around the ring without its last link if that is odd: even ranks send first, odd ones receive first."""
    for numel in (*LENGTHS, LONG // 100):
        target = torch.empty(numel)
        for turn in (0, 1):
            if turn == RANK % 2 and (0 if SIZE % 2 else -1) != NEXT:
                dist.send(numbers(numel, RANK), NEXT)
            elif turn == PREVIOUS % 2 and (0 if SIZE % 2 else -1) != RANK:
                source = dist.recv(target, PREVIOUS)
                agree.equal(source, PREVIOUS)
                agree.equal(target, numbers(numel, PREVIOUS), f"{numel} elements")


def test_messages_of_a_pair_keep_their_order(agree):
    sent = [numbers(LENGTHS[number % len(LENGTHS)], number) for number in range(40)]
    works = [dist.isend(tensor, NEXT) for tensor in sent]
    received = [torch.empty_like(tensor) for tensor in sent]
    works += [dist.irecv(tensor, PREVIOUS) for tensor in received]
    for work in reversed(works):
        work.wait()
    for number, tensor in enumerate(received):
        agree.equal(tensor, sent[number], f"message {number}")


def test_tags_distinguish_messages(agree):
    tags = (0, 5, 3, MAX_TAG)
    received = {tag: torch.empty(20) for tag in tags}
    works = [dist.irecv(received[tag], PREVIOUS, tag=tag) for tag in reversed(tags)]
    works += [dist.isend(numbers(20, index + RANK), NEXT, tag=tag) for index, tag in enumerate(tags)]
    for work in works:
        work.wait()
    for index, tag in enumerate(tags):
        agree.equal(received[tag], numbers(20, index + PREVIOUS), f"tag {tag}")


@pytest.mark.parametrize("numel", (3, 40), ids=("short", "longer"))
def test_from_any_rank(agree, numel):
    """Several receives at the same time, each from any rank."""
    if RANK == 0:
        targets = [torch.empty(numel) for _ in range(2 * (SIZE - 1))]
        works = [dist.irecv(target) for target in targets]
        problems = [error_of(work.wait) for work in works]
        agree(not any(problems), f"{problems}")
        sources = [work._source_rank() for work, problem in zip(works, problems, strict=True) if not problem]
        seen: dict[int, int] = {}
        for source, target in zip(sources, targets, strict=False):
            turn = seen[source] = seen.get(source, -1) + 1
            agree.equal(target, numbers(numel, 10 * source + turn), f"message {turn} from {source}")
        agree.equal(sorted(sources), sorted(2 * list(range(1, SIZE))))
    else:
        for turn in range(2):
            dist.send(numbers(numel, 10 * RANK + turn), 0)
    dist.barrier()  # otherwise the last message might be received in place of another one
    if RANK == 0:
        last = torch.empty(numel)
        agree.equal(dist.recv(last), SIZE - 1)
        agree.equal(last, numbers(numel, SIZE - 1))
    elif RANK == SIZE - 1:
        dist.send(numbers(numel, RANK), 0)


def test_a_send_progresses_while_its_rank_is_in_a_collective(agree):
    """The receiver calls the collective after it has received the message."""
    total = torch.ones(3)
    numel = LONG if runtime.current().config.message_bytes > 64 else 4_000
    if RANK % 2 == 0 and RANK + 1 < SIZE:
        work = dist.isend(numbers(numel, RANK), NEXT)
        dist.all_reduce(total)
        work.wait()
    else:
        target = torch.empty(numel)
        if RANK % 2:
            dist.recv(target, PREVIOUS)
            agree.equal(target, numbers(numel, PREVIOUS))
        dist.all_reduce(total)
    agree.equal(total, torch.full((3,), float(SIZE)))


def test_works_and_tensors_that_are_dropped_arrive(agree):
    for number in range(4):
        dist.isend(numbers(2_000, number), NEXT)
    _others = [torch.full((2_000,), -1.0) for _ in range(8)]
    for number in range(4):
        target = torch.empty(2_000)
        dist.recv(target, PREVIOUS)
        agree.equal(target, numbers(2_000, number), f"message {number}")


def test_a_work_completes_without_being_waited_for(agree):
    target = torch.empty(100)
    works = [dist.irecv(target, PREVIOUS), dist.isend(numbers(100, RANK), NEXT)]
    limit = time.monotonic() + 20
    while not all(work.is_completed() for work in works) and time.monotonic() < limit:
        time.sleep(0.002)
    agree(all(work.is_completed() and work.is_success() for work in works), "is_completed() never became true")
    agree.equal(target, numbers(100, PREVIOUS))
    agree(works[0].result()[0] is target)


@pytest.mark.parametrize("is_there", (False, True), ids=("before it arrives", "when it has arrived"))
def test_a_callback_may_query_its_message(agree, is_there):
    """Regression: the callback waited for the test of the message that had called it."""
    sources = []

    def receive():
        work = dist.irecv(torch.zeros(3))
        return work.get_future().then(lambda _: sources.append(work.source_rank()))

    future = receive() if RANK == 1 and not is_there else None
    sent = dist.isend(torch.ones(3), 1) if RANK == 0 and is_there else None
    dist.barrier()
    if RANK == 0 and not is_there:
        sent = dist.isend(torch.ones(3), 1)
    if RANK == 1:
        (future or receive()).wait()
    if sent is not None:
        sent.wait()
    agree.equal(sources, [0] if RANK == 1 else [])


def test_a_wait_with_a_timeout_raises_and_can_be_repeated(agree):
    target = torch.empty(3)
    work = dist.irecv(target, PREVIOUS)
    dist.barrier()
    raised = error_of(work.wait, timedelta(milliseconds=20))
    dist.barrier()
    dist.send(numbers(3, RANK), NEXT)
    work.wait()
    agree(f"recv(float32 [3]) from rank {PREVIOUS}" in raised, f"raised {raised!r}")
    agree.equal(target, numbers(3, PREVIOUS))


@pytest.mark.parametrize(("sent", "room"), [(3, 4), (4, 3), (0, 3), (3, 0), (48, 32), (32, 48), (48, 33), (20, 40)])
def test_a_message_of_another_length_raises_on_the_receiver(agree, sent, room):
    """The next message is correct; also in blocks of 16 elements, where lengths may differ by whole blocks."""
    pair = dist.new_group([0, 1])
    if RANK == 0:
        works = [dist.isend(numbers(sent, 1), 1, group=pair), dist.isend(numbers(5, 2), 1, tag=1, group=pair)]
        for work in works:
            work.wait()
    elif RANK == 1:
        wrong, right = torch.empty(room), torch.empty(5)
        problem = error_of(dist.recv, wrong, 0, group=pair)
        agree("rank 1" in problem and "rank 0" in problem, problem)
        dist.recv(right, 0, tag=1, group=pair)
        agree.equal(right, numbers(5, 2), "the next message")
    if RANK < 2:
        unreceived = torch.tensor(pair._group.messages.value)
        dist.all_reduce(unreceived, group=pair)
        agree.equal(unreceived.item(), 0, "the communicator of the group would never be freed")
        dist.destroy_process_group(pair)


@pytest.mark.min_ranks(3)
def test_in_a_group_ranks_have_numbers_of_their_own(agree):
    """torch takes ranks in the world, or ranks in the group if the name of the argument contains group."""
    backwards = dist.new_group([rank for rank in range(SIZE) if rank > 0])
    if RANK > 0:
        target = torch.empty(4)
        following, before = RANK % (SIZE - 1) + 1, (RANK - 2) % (SIZE - 1) + 1
        work = dist.isend(numbers(4, RANK), following, group=backwards)
        source = dist.recv(target, group_src=before - 1, group=backwards)
        work.wait()
        agree.equal(target, numbers(4, before))
        agree.equal(source, before)
        work = dist.isend(numbers(4, RANK), group_dst=following - 1, group=backwards)
        source = dist.recv(target, group=backwards)
        work.wait()
        agree.equal(source, before, "from any rank")
    if RANK > 0:
        dist.destroy_process_group(backwards)


ONES = torch.ones(3)
REFUSED = {
    "negative tag": (lambda: dist.isend(ONES, NEXT, tag=-1), "tag=-1"),
    "tag too large": (lambda: dist.isend(ONES, NEXT, tag=MAX_TAG + 1), f"tag={MAX_TAG + 1}"),
    "tag of a receive": (lambda: dist.irecv(ONES, PREVIOUS, tag=1 << 30), f"tag={1 << 30}"),
    "to no rank": (lambda: dist.send(ONES, SIZE), f"{SIZE}"),
    "to a negative rank": (lambda: dist.group.WORLD.send([ONES], -1, 0), "-1"),
    "from a negative rank": (lambda: dist.group.WORLD.recv([ONES], -1, 0), "-1"),
    "from no rank": (lambda: dist.group.WORLD.recv([ONES], SIZE, 0), f"{SIZE}"),
    "two tensors": (lambda: dist.group.WORLD.send([ONES, ONES], NEXT, 0), "2 tensors"),
    "sparse": (lambda: dist.send(ONES.to_sparse(), NEXT), "to_dense"),
    "meta": (lambda: dist.recv(ONES.to("meta"), PREVIOUS), "meta"),
    "expanded": (lambda: dist.recv(torch.ones(1).expand(3), PREVIOUS), "expanded"),
}
"""By name: an invalid call, and a part of the error message."""


@pytest.mark.parametrize(("call", "remedy"), REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_is_sent(agree, call, remedy):
    problem = error_of(call)
    agree(remedy in problem, problem)


# --- Repeated messages, which machine code makes --------------------------------------------------------------------


def in_rings() -> bool:
    """Return whether messages go through shared memory."""
    return isinstance(transport_of(dist.group.WORLD._group), RingTransport)


@pytest.fixture
def num_handles(monkeypatch, torch_world) -> list[int]:
    """How many messages Python has begun."""
    passes_through_python = torch_world == "in blocks" or runtime.current().context.sleeps_before_mpi
    if not fast_path.takes_calls() or passes_through_python:
        pytest.skip("messages of these ranks all pass through Python")
    made, make = [0], MessageHandle.__init__

    def count(*arguments, **named) -> None:
        made[0] += 1
        make(*arguments, **named)

    monkeypatch.setattr(MessageHandle, "__init__", count)
    return made


@pytest.mark.parametrize("numel", (0, 1, 300, 40_000))
def test_repeated_messages_have_the_same_bits(agree, num_handles, numel):
    """The progress thread begins some of them in Python."""
    # The MPI library may wait for the receiver of a message that is not very short.
    by_code, num_made = numel <= 1 or in_rings(), []
    for turn in itertools.count():
        before, sent, target = num_handles[0], numbers(numel, RANK + turn), torch.empty(numel)
        work = dist.isend(sent, NEXT, tag=9)
        dist.barrier()
        received = dist.irecv(target, PREVIOUS, tag=9)
        received.wait()
        work.wait()
        num_made.append(num_handles[0] - before)
        agree.equal(target, numbers(numel, PREVIOUS + turn), f"turn {turn}")
        agree.equal((sent._version, target._version), (0, 1), f"turn {turn}")
        agree(received.is_completed() and work.is_success() and received.result()[0] is target, f"turn {turn}")
        agree.equal((received.source_rank(), work.source_rank()), (PREVIOUS, RANK))
        agree(work.get_future().wait()[0] is sent and received.get_future().wait()[0] is target)
        dist.barrier()  # the ring has no message of another turn
        # On a busy core a message may take so long that Python continues it, turn after turn.
        if turn % 30 == 29 and (turn > 600 or not by_code or MPI.COMM_WORLD.allreduce(0 in num_made, MPI.LAND)):
            break
    agree(0 in num_made or not by_code, f"no turn was made by machine code: {num_made}")


def test_repeated_messages_keep_their_order(agree, num_handles):
    """Regression: a message that had made way for one with another tag was overtaken by the next with its own."""
    for turn in range(6):
        works = [dist.isend(numbers(40, 100 * turn + number), NEXT, tag=number % 2) for number in range(4)]
        dist.barrier()
        for number in (1, 0, 2, 3):
            target = torch.empty(40)
            dist.recv(target, PREVIOUS, tag=number % 2)
            agree.equal(target, numbers(40, 100 * turn + number), f"turn {turn}, message {number}")
        for work in works:
            work.wait()
        dist.barrier()


def test_receives_that_wait_in_any_order(agree, num_handles):
    """Of the same tag and of others, some from any rank, with messages that begin in between."""
    orders = random.Random(5)
    for turn in range(20):
        tags = [orders.randrange(3) for _ in range(6)]
        from_any = [orders.random() < 0.2 for _ in tags]
        order = orders.sample(range(len(tags)), len(tags))
        targets = [torch.empty(50) for _ in tags]
        works, sends = [], []
        for number, tag in enumerate(tags):
            source = None if from_any[number] and SIZE == 2 else PREVIOUS
            works.append(dist.irecv(targets[number], source, tag=tag))
            if turn % 2:
                sends.append(dist.isend(numbers(50, 10 * turn + number), NEXT, tag=tag))
        if not turn % 2:
            sends = [dist.isend(numbers(50, 10 * turn + number), NEXT, tag=tag) for number, tag in enumerate(tags)]
        for number in order:
            works[number].wait()
        for work in sends:
            work.wait()
        for number, target in enumerate(targets):
            agree.equal(target, numbers(50, 10 * turn + number), f"turn {turn}, message {number}")


def test_a_repeated_message_of_another_length_raises(agree, num_handles):
    for turn in range(4):
        length = 3 if turn == 2 else 5
        work = dist.isend(numbers(length, turn), NEXT, tag=2)
        dist.barrier()
        target = torch.zeros(5)
        error = error_of(dist.irecv(target, PREVIOUS, tag=2).wait)
        work.wait()
        agree("MismatchError" in error and f"rank {PREVIOUS}" in error if turn == 2 else not error, f"{turn}: {error}")
        if turn != 2:
            agree.equal(target, numbers(5, turn))
        elif in_rings():  # MPI writes a shorter message into the memory of the tensor
            agree.equal(target, torch.zeros(5))


def test_a_receive_that_nobody_waits_for_does_not_keep_its_sender(agree, num_handles):
    """The sender calls the collective after its message has left, which is longer than the ring."""
    for _ in range(3):
        target = torch.empty(LONG)
        work = dist.irecv(target, PREVIOUS)
        dist.isend(numbers(LONG, RANK), NEXT).wait()
        dist.barrier()
        work.wait()
        agree.equal(target, numbers(LONG, PREVIOUS))


def test_a_receive_ends_at_the_timeout_of_its_group(agree, num_handles):
    hasty, set_timeout = dist.new_group(), dist.distributed_c10d._set_pg_timeout
    for turn in range(3):
        if RANK == 0:
            set_timeout(timedelta(seconds=0.3), hasty)
            error = error_of(dist.irecv(torch.empty(2), 1, group=hasty).wait)
            agree("StallError" in error and "0.3 s" in error, error)
            set_timeout(timedelta(seconds=60), hasty)
        dist.barrier()
        if RANK == 1:
            dist.send(numbers(2, turn), 0, group=hasty)
        if RANK == 0:
            target = torch.empty(2)
            dist.recv(target, 1, group=hasty)
            agree.equal(target, numbers(2, turn), "the message after that")
    dist.barrier()
    dist.destroy_process_group(hasty)


def test_a_receive_of_a_destroyed_group_raises(agree, num_handles):
    if not in_rings():
        pytest.skip("what MPI has begun to receive does not end with the group")
    short = dist.new_group()
    work = dist.irecv(torch.empty(2), PREVIOUS, group=short)
    dist.barrier()
    dist.destroy_process_group(short)
    error = error_of(work.wait)
    agree("CommunicatorError" in error and "destroyed" in error, error)


def test_threads_that_receive_at_the_same_time(agree, num_handles):
    received: dict[int, torch.Tensor] = {}

    def receive(tag: int) -> None:
        for turn in range(40):
            target = received[tag] = torch.empty(16)
            dist.recv(target, PREVIOUS, tag=tag)
            if not torch.equal(target, numbers(16, 100 * tag + turn)):
                return

    threads = [threading.Thread(target=receive, args=(tag,)) for tag in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(40):
        for tag in range(3):
            dist.send(numbers(16, 100 * tag + turn), NEXT, tag=tag)
    for thread in threads:
        thread.join()
    for tag in range(3):
        agree.equal(received[tag], numbers(16, 100 * tag + 39), f"tag {tag}")
