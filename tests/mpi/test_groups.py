"""To a user of mpi.group(): collectives on it are right from its creation until it is freed, and nothing is left."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.leftovers import in_use, left_files
from torch import nn

import torchmpi as mpi
from torchmpi import errors
from torchmpi.backends.ring_transport import RingTransport
from torchmpi.collectives.message_handle import transport_of
from torchmpi.session import runtime
from torchmpi.shared_memory import fast_path

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usefixtures("world")]


@pytest.fixture(autouse=True)
def back_to_the_world():
    yield
    mpi.set_communicator(0)
    mpi.set_collective_span(0, 0)


def pushed(key) -> mpi.Communicator:
    level = mpi.push_communicator(key)
    mpi.set_communicator(0)
    return mpi.communicator(level)


def subsets() -> list[list[int]]:
    """Lists of ranks: all, some, in another order, one."""
    everyone = list(range(mpi.size()))
    return [everyone, everyone[::-1], everyone[::2], everyone[1:] or [0], [everyone[-1]]]


def check_calls(agree, comm, ranks: list[int]) -> None:
    """Make every call on a group, and compare with the values that the ranks of the list give."""
    world_rank, size, rank = mpi.rank(0), len(ranks), ranks.index(mpi.rank(0))
    total, last = sum(ranks), size - 1

    def mine(numel: int = 3, value: float | None = None) -> torch.Tensor:
        return torch.full((numel,), float(world_rank if value is None else value))

    def all_values(repeats: int) -> torch.Tensor:
        return torch.tensor(ranks, dtype=torch.float32).repeat_interleave(repeats)

    agree.equal((mpi.rank(comm), mpi.size(comm), list(comm.ranks)), (rank, size, ranks))
    for _ in range(3):  # the second call is prepared, the third one takes the fast path
        mpi.barrier(comm)
        agree.equal(mpi.allreduce(mine(), comm=comm), mine(value=total))
        agree.equal(mpi.reduce(mine(), last, comm=comm), mine(value=total if rank == last else world_rank))
        agree.equal(mpi.broadcast(mine(), last, comm=comm), mine(value=ranks[last]))
        agree.equal(mpi.allgather(mine(2), comm=comm), all_values(2))
        gathered = mpi.gather(mine(2), last, comm=comm)
        agree.equal(gathered, all_values(2) if rank == last else None)
        rows = torch.arange(2.0 * size)
        agree.equal(mpi.scatter(rows if rank == last else None, last, comm=comm), rows[2 * rank : 2 * rank + 2])
        agree.equal(mpi.reduce_scatter(rows.clone(), comm=comm), rows[2 * rank : 2 * rank + 2] * size)
        agree.equal(mpi.alltoall(mine(size), comm=comm), all_values(1))
    asynchronous = {
        "allreduce": mpi.allreduce_async(mine(), comm=comm),
        "reduce": mpi.reduce_async(mine(), last, op="max", comm=comm),
        "broadcast": mpi.broadcast_async(mine(), last, comm=comm),
        "allgather": mpi.allgather_async(mine(2), comm=comm),
        "gather": mpi.gather_async(mine(2), last, comm=comm),
        "scatter": mpi.scatter_async(rows if rank == last else None, last, comm=comm),
        "reduce_scatter": mpi.reduce_scatter_async(rows.clone(), comm=comm),
        "alltoall": mpi.alltoall_async(mine(size), comm=comm),
        "many": mpi.allreduce_many_async([mine(), mine(5)], op="max", comm=comm),
    }
    expected = {
        "allreduce": mine(value=total),
        "reduce": mine(value=max(ranks) if rank == last else world_rank),
        "broadcast": mine(value=ranks[last]),
        "allgather": all_values(2),
        "gather": all_values(2) if rank == last else None,
        "scatter": rows[2 * rank : 2 * rank + 2],
        "reduce_scatter": rows[2 * rank : 2 * rank + 2] * size,
        "alltoall": all_values(1),
    }
    results = {name: handle.wait() for name, handle in asynchronous.items()}
    for name, value in expected.items():
        agree.equal(results[name], value, name)
    for tensor in (*results["many"], *mpi.allreduce_many([mine(), mine(5)], op="max", comm=comm)):
        agree.equal(tensor, mine(tensor.numel(), max(ranks)))
    agree.equal(mpi.allreduce(world_rank, comm=comm), total)
    agree.equal(mpi.broadcast_object({"from": world_rank}, last, comm=comm), {"from": ranks[last]})
    agree.equal(mpi.allgather_object(world_rank, comm=comm), ranks)
    right, left = (rank + 1) % size, (rank - 1) % size
    agree.equal(mpi.sendreceive(mine(), left, right, comm=comm), mine(value=ranks[left]))
    sent, received = mpi.send_async(mine(4), right, comm=comm), mpi.recv_async(torch.empty(4), left, comm=comm)
    agree.equal(received.wait(), mine(4, ranks[left]))
    sent.wait()
    if size > 1 and rank < 2:
        agree.equal(
            mpi.recv(torch.empty(3), 1, comm=comm) if rank == 0 else mpi.send(mine(), 0, comm=comm) or mine(),
            mine(value=ranks[1]),
        )
    agree.raises(errors.ArgumentError, lambda: mpi.broadcast(mine(), size, comm=comm), f"Use 0 to {last}")
    with mpi.use(comm):
        agree.equal((mpi.rank(), mpi.size(), mpi.allreduce(world_rank)), (rank, size, total))


# --- groups of a level -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["even and odd", "halves", "first alone", "everybody alone", "all together"])
def test_calls_on_intra_and_inter_groups(agree, pattern):
    keys = {
        "even and odd": lambda rank: rank % 2,
        "halves": lambda rank: rank // 2,
        "first alone": lambda rank: int(rank > 0),
        "everybody alone": lambda rank: rank,
        "all together": lambda rank: 0,
    }
    communicator = pushed(keys[pattern](mpi.rank()))
    check_calls(agree, communicator.intra, list(communicator.intra.world_ranks))
    if communicator.inter:
        check_calls(agree, communicator.inter, list(communicator.inter.world_ranks))
    members = mpi.allgather_object(bool(communicator.inter))
    if not communicator.inter:
        agree.equal([members[rank] for rank in communicator.inter.ranks], [True] * communicator.inter.size)


def test_a_rank_outside_the_inter_group_is_refused_with_the_ranks_inside(agree):
    """With None instead of an object of its own, the call would take place on the current communicator."""
    rank, size = mpi.rank(), mpi.size()
    inter = pushed(int(rank > 0)).inter
    agree.equal(bool(inter), rank < 2 or size < 3)
    outside = rank >= 2
    before = mpi.communicator(0).intra.call_log.seq
    if outside:
        words = f"rank {rank} is not a rank of communicator 1 inter, which has the ranks [0, 1]", "if communicator"
        t, net = torch.ones(2), nn.Linear(2, 2)
        for call in (
            lambda: mpi.allreduce(t, comm=inter),
            lambda: mpi.barrier(inter),
            lambda: mpi.broadcast_async(t, comm=inter),
            lambda: mpi.allgather_object(1, comm=inter),
            lambda: mpi.allreduce_many([t], comm=inter),
            lambda: mpi.send(t, 0, comm=inter),
            lambda: mpi.group([0], comm=inter),
            lambda: mpi.use(inter).__enter__(),
            lambda: mpi.rank(inter),
            lambda: mpi.size(inter),
            lambda: inter.rank,
            lambda: mpi.nn.synchronize_gradients(net, comm=inter),
            lambda: mpi.nn.synchronize_parameters(net, comm=inter),
            lambda: mpi.parameterserver.init(t, comm=inter),
        ):
            agree.raises(errors.CommunicatorError, call, *words)
    agree.equal(mpi.communicator(0).intra.call_log.seq, before, "it communicated")
    world = mpi.communicator(0)
    agree.raises(errors.CommunicatorError, lambda: mpi.barrier(world.inter), "no communicator world inter")


def test_an_intra_group_is_the_same_communicator_as_its_level(agree):
    """A span applies to both."""
    level = mpi.push_communicator(mpi.rank() % 2)
    mpi.set_communicator(0)
    mpi.set_collective_span(0, level)
    world = mpi.communicator(0)
    groups = runtime.current().communicators.span.groups.values()
    before = sum(group.call_log.seq for group in groups)
    agree.equal(mpi.allreduce(1, comm=world.intra), mpi.size())
    agree((sum(group.call_log.seq for group in groups) > before) == (mpi.size() > 1), "no steps")


def test_spans_that_differ_are_refused_on_all_ranks(agree):
    """Regression: the ranks made groups for different steps, and waited for each other."""
    level = mpi.push_communicator(mpi.rank() % 2)
    mpi.set_communicator(0)
    if mpi.size() > 1:
        span = level if mpi.rank() else 0
        agree.raises(errors.MismatchError, lambda: mpi.set_collective_span(0, span), "different spans", f"(0, {level})")
    agree.equal(mpi.allreduce(1), mpi.size(), "the call after it")


# --- mpi.group() -----------------------------------------------------------------------------------------


def test_calls_on_groups_of_ranks(agree):
    rank = mpi.rank()
    for ranks in subsets():
        with mpi.group(ranks) as communicator:
            agree.equal(bool(communicator), rank in ranks)
            agree.equal((communicator.size, list(communicator.ranks)), (len(ranks), ranks))
            agree.equal(communicator.name, f"group {ranks}")
            if communicator:
                check_calls(agree, communicator, ranks)
            else:
                agree.raises(errors.CommunicatorError, lambda: mpi.barrier(communicator), f"the ranks {ranks}")
                agree.raises(errors.CommunicatorError, mpi.use(communicator).__enter__, f"group {ranks}")
        agree.equal(mpi.allreduce(1), mpi.size())


def test_a_group_of_a_group(agree):
    """The ranks of the list are those of the communicator given by `comm`."""
    size = mpi.size()
    outer = mpi.group(range(size)[::-1], name="backwards")
    inner = mpi.group([size - 1], comm=outer, name="first of all")  # rank 0 of the world
    agree.equal((inner.ranks, bool(inner)), ((0,), mpi.rank() == 0))
    with mpi.use(outer):
        again = mpi.group([0])
        agree.equal(again.ranks, (size - 1,))
        agree.raises(errors.CommunicatorError, lambda: mpi.push_communicator("a"), "mpi.group()")
    agree.raises(errors.CommunicatorError, lambda: mpi.set_communicator(outer), "mpi.use(communicator)")
    agree.raises(errors.ArgumentError, lambda: mpi.autotune("allreduce", comm=outer), "on a level")
    for communicator in (again, inner, outer):
        communicator.free()


class Counted(str):
    """A name that counts how often it is received."""

    num_received = 0

    def __reduce__(self):
        return received, (str(self),)


def received(text: str) -> str:
    Counted.num_received += 1
    return text


def test_equal_lists_are_not_gathered(agree):
    """Regression: each rank received the list of every rank, 450 MB for a group of half of 10,000 ranks."""
    Counted.num_received = 0
    mpi.group(range(mpi.size()), name=Counted("counted")).free()
    agree(Counted.num_received <= 1, f"received {Counted.num_received} times")


def test_different_or_invalid_lists_are_refused_on_all_ranks(agree):
    rank, size = mpi.rank(), mpi.size()
    for ranks, words in (
        ([], "at least one rank"),
        ([size], f"{size} is not a rank of the communicator. Use 0 to {size - 1}"),
        ([-1], "-1 is not a rank"),
        ([0, 0], "occurs twice"),
        (3, "Pass a list of ranks"),
        (["0"], "Pass a list of ranks"),
    ):
        agree.raises(errors.ArgumentError, lambda: mpi.group(ranks), f"rank {rank}: group(", words)  # noqa: B023
    if size > 1:
        lists = "rank 0 called group([0]); rank 1 called group([1])"
        agree.raises(errors.MismatchError, lambda: mpi.group([rank]), f"rank {rank}: ", "asked for different", lists)
        agree.raises(errors.MismatchError, lambda: mpi.group([0] if rank else 0), "called group(0)")
        agree.raises(errors.MismatchError, lambda: mpi.group([0], name=str(rank)), "name='1'")
    agree.equal(mpi.allreduce(1), size)


@pytest.mark.min_ranks(2)
def test_different_calls_on_a_group_name_it(agree):
    with mpi.group([1, 0]) as pair:
        if pair:
            numel = 3 + mpi.rank(pair)
            agree.raises(
                errors.MismatchError,
                lambda: mpi.allreduce(torch.ones(numel), comm=pair),
                "communicator group [1, 0]",
                "rank 0 called allreduce(float32 [3], sum)",
            )
            agree.equal(mpi.allreduce(1, comm=pair), 2)


def test_the_fast_path_takes_calls_on_groups(agree):
    inter = pushed(mpi.rank()).inter
    has_fast_path = bool(fast_path._fast_paths) and inter.status_board is not None and inter.size > 1
    for comm in (inter, mpi.group(range(mpi.size()))):
        for _ in range(3):
            mpi.allreduce(torch.ones(2), comm=comm)
        known = fast_path._fast_paths["allreduce"].cached_calls if has_fast_path else {}
        agree.equal(any(name.comm is comm for name in known), has_fast_path)
    before = comm.intra.call_log.seq
    comm.free()
    agree(all(name.comm is not comm for name in known), "a cached call of a freed communicator")
    agree.raises(errors.CommunicatorError, lambda: mpi.allreduce(torch.ones(2), comm=comm), "freed")
    agree.equal(comm.intra.call_log.seq, before + 1, "calls after free()")


# --- freeing ---------------------------------------------------------------------------------------------


def test_a_freed_communicator_refuses_calls_after_those_that_were_started(agree):
    rank, size = mpi.rank(), mpi.size()
    communicator = mpi.group(range(size))
    group = communicator.intra
    handles = [mpi.allreduce_async(torch.ones(20_000), comm=communicator) for _ in range(5)]
    sent = mpi.send_async(torch.ones(5), (rank + 1) % size, comm=communicator)
    received = mpi.recv_async(torch.empty(5), (rank - 1) % size, comm=communicator)
    communicator.free()
    for handle in handles:
        agree.equal(handle.wait()[0].item(), float(size))
    agree.equal(received.wait(), torch.ones(5))
    sent.wait()
    words = f"rank {rank}: communicator group {list(range(size))} has been freed", "mpi.group()"
    for comm in (communicator, group):
        for call in (
            lambda: mpi.allreduce(torch.ones(2), comm=comm),  # noqa: B023
            lambda: mpi.barrier(comm),  # noqa: B023
            lambda: mpi.allreduce_async(torch.ones(2), comm=comm),  # noqa: B023
            lambda: mpi.send(torch.ones(2), 0, comm=comm),  # noqa: B023
            lambda: mpi.group([0], comm=comm),  # noqa: B023
            lambda: mpi.use(comm).__enter__(),  # noqa: B023
        ):
            agree.raises(errors.CommunicatorError, call, *words)
    communicator.free()  # does nothing
    agree.equal(mpi.allreduce(1), size)


def test_keys_of_groups_are_not_used_again(agree):
    """Regression: calls on groups of the same ranks were taken for calls on one group by `torchmpi analyze`."""
    ranks = range(mpi.size())
    first, second = mpi.group(ranks), mpi.group(ranks)
    keys = [first.intra.key, second.intra.key]
    first.free()
    with mpi.group(ranks) as third:
        keys.append(third.intra.key)
    second.free()
    agree.equal(len(set(keys)), 3, str(keys))
    agree.equal(mpi.allgather_object(keys), [keys] * mpi.size())


@pytest.mark.min_ranks(2)
def test_messages_that_nobody_receives_are_counted_by_free(agree, monkeypatch):
    """Regression: a message of MPI sent after the count was left on a communicator that MPI assigns again."""
    comm, freed = mpi.group(range(mpi.size())), []
    group, free = comm.intra, type(comm.intra).free
    in_rings = isinstance(transport_of(group), RingTransport)  # which end with the group
    monkeypatch.setattr(type(group), "free", lambda each, *, together=False: (freed.append(together), free(each)))
    if mpi.rank() == 0:
        mpi.send_async(torch.ones(3), 1, comm=comm)
    comm.free()
    agree.equal(freed[0], in_rings)


@pytest.mark.min_ranks(2)
def test_an_error_that_is_raised_after_freeing_has_been_seen(agree):
    """Regression: stop() raised the error again, since wait() had not been called when the group was freed."""
    communicator = mpi.group(range(mpi.size()))
    handle = mpi.allreduce_async(torch.ones(3 + mpi.rank() % 2), comm=communicator)
    communicator.free()
    context = runtime.current().context
    agree(handle in context.failed, "stop() would not report the error")
    agree.raises(errors.MismatchError, handle.wait, "float32 [3]", "float32 [4]")
    agree(all(failed.unseen_error is None for failed in context.failed), "stop() would report the error")


def test_freeing_a_communicator_in_use(agree):
    """Regression: the calls of the block would go to the default communicator."""
    communicator = mpi.group(range(mpi.size()))
    with mpi.use(communicator):
        communicator.free()
        agree.raises(errors.CommunicatorError, lambda: mpi.allreduce(1), "has been freed")
        agree.raises(errors.CommunicatorError, mpi.rank, "has been freed")
        agree("world" in mpi.communicator_names())
    agree.equal(mpi.allreduce(1), mpi.size())


def test_levels_cannot_be_freed(agree):
    level = pushed(0)
    for communicator in (mpi.communicator(0), level):
        agree.raises(errors.CommunicatorError, communicator.free, "exists until stop()", "mpi.group()")
    agree.equal(mpi.allreduce(1, comm=level), mpi.size())


def test_a_block_that_raises_does_not_free(agree):
    """Freeing is collective, and the other ranks may not have raised."""
    with pytest.raises(KeyError), mpi.group(range(mpi.size())) as communicator:
        raise KeyError
    agree.equal(mpi.allreduce(1, comm=communicator), mpi.size())
    communicator.free()


def test_a_callback_cannot_free_its_own_communicator(agree):
    communicator, found = mpi.group(range(mpi.size())), []

    def callback() -> None:
        try:
            communicator.free()
        except errors.CommunicatorError as error:
            found.append(str(error))

    held = threading.Event()
    mpi.broadcast_async(torch.ones(1), comm=communicator).when_done(held.wait)
    handle = mpi.allreduce_async(torch.ones(2), comm=communicator)
    handle.when_done(callback)
    held.set()
    handle.wait()
    communicator.free()
    agree(len(found) == 1 and "cannot be freed by a callback" in found[0], str(found))


def test_calls_of_another_thread_end_or_are_refused_while_a_communicator_is_freed(agree):
    """The other thread makes calls that do not need the other ranks."""
    size, rank = mpi.size(), mpi.rank()
    for _ in range(10):
        communicator, outcomes = mpi.group(range(size)), []
        begun = threading.Event()

        def calls(communicator=communicator, outcomes=outcomes, begun=begun) -> None:
            try:
                for number in range(1_000_000):
                    mpi.sendreceive(torch.ones(3), rank, rank, comm=communicator)
                    outcomes.append(number)
                    begun.set()
            except errors.CommunicatorError as error:
                outcomes.append(error)

        thread = threading.Thread(target=calls)
        thread.start()
        begun.wait()
        communicator.free()
        thread.join()
        agree(isinstance(outcomes[-1], errors.CommunicatorError) and len(outcomes) > 1, str(outcomes[-1]))


def test_nothing_is_left_of_freed_groups(agree):
    rank, size = mpi.rank(), mpi.size()

    def cycle(number: int) -> None:
        ranks = subsets()[number % 5]
        with mpi.group(ranks) as communicator:
            if not communicator:
                return
            mpi.allreduce(torch.ones(3), comm=communicator)
            mpi.allreduce_async(torch.ones(3000), comm=communicator).wait()
            mpi.sendreceive(rank, communicator.rank, communicator.rank, comm=communicator)

    for number in range(10):
        cycle(number)
    before, groups = in_use(), len(runtime.current().context.groups)
    for number in range(50):
        cycle(number)
    mpi.barrier()
    agree.equal(in_use(before), before, "after and before 50 cycles")
    agree.equal(len(runtime.current().context.groups), groups)
    agree.equal(left_files(), set(), "left in /dev/shm")
    agree.equal(mpi.allreduce(1), size)


@pytest.mark.parametrize("late", (0, -1))
def test_memory_and_communicators_of_a_freed_group_are_used_again(agree, late):
    """The calls of the last group, which the next one repeats, do not stand for those of a rank that is late."""
    rank, size, late = mpi.rank(), mpi.size(), late % mpi.size()
    if runtime.current().world.status_board is None:
        pytest.skip("no shared memory here")
    used = []
    for number in range(4):
        with mpi.group(range(size)) as comm:
            used.append((comm.intra.status_board.segment.address, id(comm.intra.comm), id(comm.intra.side_comm)))
            if number and rank == late:
                time.sleep(0.05)
            for length in (3, 5000, 300_000):
                total = mpi.allreduce(torch.full((length,), float(rank + number)), comm=comm)
                agree.equal(total, torch.full((length,), float(sum(range(size)) + number * size)), f"{number} {length}")
            left, right = (rank - 1) % size, (rank + 1) % size
            agree.equal(mpi.sendreceive(rank + 10 * number, left, right, comm=comm), left + 10 * number)
            agree.equal(mpi.broadcast(rank + number, size - 1, comm=comm), size - 1 + number)
    agree.equal(len(set(used[1:])), 1, "not the same memory and communicators")
    if rank == late:
        runtime.current().context.freed.close()  # as if this rank had not freed the last group yet
    with mpi.group(range(size)) as comm:
        agree.equal(comm.intra.checking, "board" if size > 1 else "off", "without shared memory")
        agree.equal(mpi.allreduce(torch.ones(3), comm=comm), torch.full((3,), float(size)))
        if size > 1:
            with pytest.raises(errors.MismatchError):
                mpi.allreduce(torch.ones(3 + rank), comm=comm)
        failed = comm.intra.comm
    with mpi.group(range(size)) as comm:
        agree(size == 1 or comm.intra.comm is not failed, "MPI may have messages of the call that has failed")
        agree.equal(mpi.allreduce(torch.ones(3), comm=comm), torch.full((3,), float(size)))


def test_messages_that_were_not_received_do_not_arrive_on_a_later_group(agree):
    """Regression: MPICH assigns the context of a freed communicator to a later one."""
    rank, size = mpi.rank(), mpi.size()
    previous, following = (rank - 1) % size, (rank + 1) % size
    if size > 1:  # on one rank, a send waits for the receive
        for _ in range(5):
            with mpi.group(range(size)) as communicator:
                mpi.send(torch.full((3,), -1.0), following, comm=communicator)
    for number in range(5):
        with mpi.group(range(size)) as communicator:
            received = mpi.sendreceive(torch.tensor([10.0 * number + rank]), previous, following, comm=communicator)
            agree.equal(received, torch.tensor([10.0 * number + previous]), f"group {number}")


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("name", ["group", "recv"])
def test_ranks_that_share_cores_sleep_while_they_wait(agree, monkeypatch, name):
    """Regression: under MPICH, ranks that polled in MPI kept threads of the awaited rank from a core for seconds."""
    context = runtime.current().context
    monkeypatch.setattr(context, "sleeps_before_mpi", True)
    processes, hosts = mpi.allgather_object(os.getpid()), context.hosts
    others = [pid for rank, pid in enumerate(processes) if rank and hosts[rank] == hosts[0]]

    def times_asleep() -> list[int]:
        """How often the main thread of each other rank has gone to sleep; one that polls, or yields, does not."""
        texts = [Path(f"/proc/{pid}/task/{pid}/status").read_text() for pid in others]
        return [int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.M)[1]) for text in texts]

    more = [0 for _ in others]
    with mpi.group(range(mpi.size())) as communicator:
        mpi.barrier(comm=communicator)
        if mpi.rank() == 0:
            before, limit = times_asleep(), time.monotonic() + 30
            while any(number < 50 for number in more) and time.monotonic() < limit:
                time.sleep(0.01)
                more = [end - begin for begin, end in zip(before, times_asleep(), strict=True)]
        if name == "group":
            mpi.group(range(mpi.size())).free()
        elif mpi.rank() == 0:
            for other in range(1, mpi.size()):
                mpi.send(torch.ones(3), other, comm=communicator)
        else:
            mpi.recv(torch.ones(3), 0, comm=communicator)
    agree(mpi.rank() != 0 or all(number >= 50 for number in more), f"waiting ranks have slept {more} times in 30 s")


def test_communicators_that_each_rank_has_freed_by_itself_are_freed_with_the_next_group(agree):
    null, world = runtime.current().MPI.COMM_NULL, runtime.current().world
    copy = world.duplicate("copy")
    comm, side_comm = copy.comm, copy.side_comm
    copy.free()
    agree(null not in (comm, side_comm), "another rank may use them still")
    world.duplicate("the next one of these ranks").free()
    agree(comm == null and side_comm == null)


@pytest.mark.release  # a minute; fewer ones are freed in test_communicators.py
@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_thousands_of_groups_fit(agree):
    """More than MPICH has communicators at a time (2048): free() frees them at once."""
    for number in range(1200):
        with mpi.group([number % mpi.size()]) as alone:
            agree.equal(bool(alone), mpi.rank() == number % mpi.size())


# --- training on groups ----------------------------------------------------------------------------------


def net_of_rank() -> nn.Sequential:
    torch.manual_seed(mpi.rank(0))
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.any_mpi
@pytest.mark.ranks(2, 3)
def test_functions_of_nn_on_a_group(agree):
    for ranks in subsets():
        with mpi.group(ranks) as comm:
            if not comm:
                continue
            net, x = net_of_rank(), torch.full((2, 4), 1.0 + mpi.rank())
            mpi.nn.synchronize_parameters(net, comm=comm)
            mpi.nn.check_with_allreduce(net, comm=comm)
            torch.manual_seed(ranks[0])
            first = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
            for mine, theirs in zip(net.parameters(), first.parameters(), strict=True):
                agree.equal(mine.detach(), theirs.detach(), f"{ranks}")
            gradients = []
            for rank in ranks:
                first.zero_grad()
                first(torch.full((2, 4), 1.0 + rank)).sum().backward()
                gradients.append([parameter.grad.clone() for parameter in first.parameters()])
            expected = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]
            net(x).sum().backward()
            mpi.nn.synchronize_gradients(net, comm=comm)
            for parameter, gradient in zip(net.parameters(), expected, strict=True):
                agree.close(parameter.grad, gradient, f"synchronize_gradients {ranks}")
            mpi.nn.register_async_backward(net, comm=comm)
            net.zero_grad()
            net(x).sum().backward()
            mpi.nn.synchronize_gradients_async(net)
            for parameter, gradient in zip(net.parameters(), expected, strict=True):
                agree.close(parameter.grad, gradient, f"register_async_backward {ranks}")
            mpi.nn.unregister_async_backward(net)


@pytest.mark.any_mpi
@pytest.mark.ranks(2, 3)
def test_join_and_the_optimizer_on_a_group(agree):
    for ranks in subsets():
        with mpi.group(ranks) as comm:
            if not comm:
                continue
            net = net_of_rank()
            mpi.nn.synchronize_parameters(net, comm=comm)
            optimizer = mpi.nn.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net, comm=comm)
            with mpi.nn.join(net):
                for _ in range(1 + comm.rank):
                    optimizer.zero_grad()
                    net(torch.ones(2, 4) * (1 + mpi.rank())).sum().backward()
                    optimizer.step()
            mpi.nn.check_with_allreduce(net, comm=comm)
            mpi.nn.unregister_async_backward(net)


def test_parameter_servers_on_groups(agree):
    ps = mpi.parameterserver
    inter = pushed(mpi.rank() % 2).inter
    for comm, ranks in ((inter, inter and inter.ranks), *((mpi.group(ranks), ranks) for ranks in subsets())):
        if not comm:
            continue
        server = ps.init(torch.zeros(7), comm=comm)
        ps.send(server, torch.full((7,), 1.0 + mpi.rank()), "add").wait()
        mpi.barrier(comm)
        agree.equal(ps.receive(server).wait(), torch.full((7,), float(sum(rank + 1 for rank in ranks))), f"{ranks}")
        mpi.barrier(comm)
        ps.free(server)
        if comm is not inter:
            comm.free()
