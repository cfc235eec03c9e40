"""To a user of levels, groups and spans: they have the planned ranks, and are freed on all ranks together."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

import torchmpi as mpi
from torchmpi import errors
from torchmpi.communicators.group import Group
from torchmpi.session import runtime

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usefixtures("world")]

PATTERNS = {
    "even and odd": lambda rank: rank % 2,
    "halves": lambda rank: rank // 2,
    "first alone": lambda rank: int(rank > 0),
    "abba": lambda rank: (0, 1, 1, 0)[rank % 4],
    "everybody alone": lambda rank: rank,
    "all together": lambda rank: 0,
}


@pytest.fixture(autouse=True)
def back_to_the_world():
    yield
    mpi.set_communicator(0)
    mpi.set_collective_span(0, 0)


@pytest.mark.parametrize("name", PATTERNS)
def test_ranks_with_one_key_form_a_group(agree, name):
    key = PATTERNS[name]
    rank, size = mpi.rank(), mpi.size()
    mine = [other for other in range(size) if key(other) == key(rank)]
    sizes = {key(other): sum(key(third) == key(other) for third in range(size)) for other in range(size)}
    level = mpi.push_communicator(key(rank), name=name)
    agree.equal(mpi.rank(), mine.index(rank))
    agree.equal(mpi.size(), len(mine))
    agree.equal(mpi.communicator().intra.world_ranks, tuple(mine))
    agree.equal(mpi.is_cartesian_communicator(), len(set(sizes.values())) == 1)
    agree.equal(mpi.num_nodes_in_communicator(), len(set(mpi.allgather_object(mpi.host_name()))))
    total = mpi.allreduce(torch.tensor([rank]))
    mpi.set_communicator(0)
    agree.equal(int(total), sum(mine))
    agree.equal(mpi.allreduce(rank, comm=level), sum(mine))
    agree(name in mpi.communicator_names())


@pytest.mark.parametrize("collective", ("allreduce", "reduce", "broadcast", "barrier"))
@pytest.mark.parametrize("name", PATTERNS)
def test_a_span_gives_the_result_of_the_flat_collective(agree, name, collective):
    rank, size = mpi.rank(), mpi.size()
    level = mpi.push_communicator(PATTERNS[name](rank))
    mpi.set_communicator(0)
    mpi.set_collective_span(0, level)
    if collective == "barrier":
        agree.equal(mpi.barrier(), None)
    for root in range(size):
        value = torch.full((5,), 1.0 + rank)
        if collective == "broadcast":
            agree.equal(mpi.broadcast(value, root), torch.full((5,), 1.0 + root), f"root {root}")
        elif collective == "reduce":
            expected = torch.full((5,), size * (size + 1) / 2) if rank == root else torch.full((5,), 1.0 + rank)
            agree.equal(mpi.reduce(value, root), expected, f"root {root}")
        elif collective == "allreduce":
            agree.equal(mpi.allreduce(value, op="avg"), torch.full((5,), (size + 1) / 2))
            half = mpi.allreduce(torch.full((5,), 256.0 if rank == root else 0.75, dtype=torch.bfloat16))
            exact = torch.tensor(256.0 + 0.75 * (size - 1)).bfloat16()
            agree.equal(half, exact.expand(5), "16 bits are rounded once, not at each level")


def test_the_steps_of_a_span_compare_shapes(agree):
    """Regression: with ``check="board"`` over several hosts they are the only comparison."""
    level = mpi.push_communicator("all")
    mpi.set_communicator(0)
    mpi.set_collective_span(0, level)
    mpi.allreduce(torch.ones(5))
    known = [item for group in runtime.current().context.groups for item in group.plans.items()]
    # Those of a span have a backend and a mode; others belong to the comparison of calls over hosts.
    plans = [plan for key, plan in known if key[0] == "step" and isinstance(key[-1], tuple)]
    has_steps = bool(plans) or mpi.size() == 1  # one rank has no steps
    agree(has_steps and all(plan.shape_of is None for plan in plans), f"{plans}")


def test_a_span_of_three_levels_and_its_steps(agree):
    """Also a regression test: plans made before set_collective_span() stayed flat."""
    rank, size = mpi.rank(), mpi.size()
    mpi.allreduce(torch.ones(3))
    outer = mpi.push_communicator(rank // 2)
    inner = mpi.push_communicator(rank % 2)
    mpi.set_communicator(0)
    mpi.set_collective_span(0, inner)
    groups = runtime.current().communicators.span.groups
    before = {key: group.call_log.seq for key, group in groups.items()}
    result = mpi.allreduce(torch.ones(3))
    steps = sum(group.call_log.seq - before[key] for key, group in groups.items())
    agree.equal(result, torch.full((3,), float(size)))
    agree((steps > 0) == (size > 1), f"{steps} steps")
    agree({level for level, _ in groups} == {outer, inner}, str(groups))


@pytest.mark.min_ranks(4)
def test_inter_groups_are_ordered_by_group_and_not_by_rank(agree):
    """Regression: with keys a b b a the inter group of the first members was in the order of the world."""
    rank = mpi.rank()
    level = mpi.push_communicator("abba"[rank % 4] if rank < 4 else "a")
    inter = mpi.communicator(level).inter
    mpi.set_communicator(0)
    if mpi.size() == 4 and inter is not None:
        agree.equal(inter.world_ranks, {0: (0, 1), 1: (0, 1), 2: (3, 2), 3: (3, 2)}[rank])


def test_asynchronous_calls_over_a_span_do_not_mix_with_calls_on_its_levels(agree):
    """Regression: the steps ran on the user's own groups, mixed with the user's calls in any order."""
    rank, size = mpi.rank(), mpi.size()
    level = mpi.push_communicator(rank % 2)
    mpi.set_communicator(0)
    mpi.set_collective_span(0, level)
    group_size = mpi.communicator(level).size
    for _ in range(20):
        handle = mpi.allreduce_async(torch.ones(1000))
        within = mpi.allreduce(torch.ones(10), comm=level)
        agree.equal(handle.wait()[0].item(), float(size))
        agree.equal(within[0].item(), float(group_size))


def test_queued_calls_over_a_span_end_before_the_span_changes(agree):
    """Regression: the groups of the steps were freed before the next step."""
    level = mpi.push_communicator(mpi.rank() % 2)
    mpi.set_communicator(0)
    for _ in range(10):
        mpi.set_collective_span(0, level)
        handles = [mpi.allreduce_async(torch.ones(5000)) for _ in range(5)]
        mpi.set_collective_span(0, 0)
        agree.equal([handle.wait()[0].item() for handle in handles], [float(mpi.size())] * 5)


def test_use_is_for_one_thread_only(agree):
    level = mpi.push_communicator(mpi.rank())
    mpi.set_communicator(0)
    seen = []
    with mpi.use(level):
        thread = threading.Thread(target=lambda: seen.append(mpi.size()))
        thread.start()
        thread.join()
        inside = mpi.size()
        with mpi.use(0):
            nested = mpi.size()
    agree.equal((inside, nested, seen, mpi.size()), (1, mpi.communicator(0).size, [mpi.communicator(0).size], nested))


def test_independent_communicators_may_be_used_in_any_order(agree):
    """Two queues: each rank starts its asynchronous calls, and waits for them, in a different order.

    A thread that waits runs the call itself, and the other ranks wait for the call that it has not begun.
    """
    size = mpi.size()
    first, second = mpi.push_communicator(0), mpi.push_communicator(0)
    mpi.set_communicator(0)
    order = (first, second) if mpi.rank() % 2 else (second, first)
    for numel in (10_000, 3, 3, 3, 3, 3):
        handles = [mpi.allreduce_async(torch.ones(numel), comm=level) for level in order]
        for handle in handles:
            agree.equal(handle.wait()[0].item(), float(size))
        for level in (first, second):  # after which no call wakes the helper
            for _ in range(5):
                mpi.allreduce_async(torch.ones(3), comm=level).wait()


def test_messages_of_a_pair_keep_their_order(agree):
    rank, size = mpi.rank(), mpi.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    sends = [mpi.send_async(torch.full((1000 * (i + 1),), float(i)), right) for i in range(6)]
    receives = [mpi.recv_async(torch.empty(1000 * (i + 1)), left) for i in range(6)]
    for i, handle in enumerate(receives):
        agree.equal(handle.wait(), torch.full((1000 * (i + 1),), float(i)))
    for handle in sends:
        handle.wait()


def test_sendreceive_shifts(agree):
    rank, size = mpi.rank(), mpi.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e5m2):
        tensor = torch.full((300, 7), float(rank % 2)).to(dtype).t()
        agree(mpi.sendreceive(tensor, left, right) is tensor)
        agree(bool((tensor.to(torch.complex64) == left % 2).all()), str(dtype))
    agree.equal(mpi.sendreceive(rank, left, right), left)
    big = torch.full((1_000_000,), float(rank))
    agree.equal(mpi.sendreceive_async(big, left, right).wait(), torch.full((1_000_000,), float(left)))


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("length", [3, 5000])  # in one message, and in several
def test_exchanges_and_other_messages_do_not_wait_for_the_opposite_direction(agree, length):
    """MPI allows these orders: a receive may wait for an exchange that follows it, an exchange for a later send."""
    if not runtime.current().threads_allowed:
        pytest.skip("this MPI library takes one thread at a time")
    values = partial(torch.full, (length,))
    if mpi.rank() == 0:
        earlier = mpi.recv_async(values(0.0), 1)
        exchanged = mpi.sendreceive(values(1.0), 1, 1)
        agree.equal(earlier.wait(), values(2.0))
        agree.equal(exchanged, values(3.0))
        exchange, later = mpi.sendreceive_async(values(4.0), 1, 1), mpi.send_async(values(5.0), 1)
        agree.equal(exchange.wait(), values(6.0))
        later.wait()
        sent = mpi.send_async(values(7.0), 1)
        agree.equal(mpi.sendreceive(values(8.0), 1, 1), values(9.0))
        sent.wait()
    elif mpi.rank() == 1:
        received = [mpi.recv(values(0.0), 0)]
        mpi.send(values(2.0), 0)
        mpi.send(values(3.0), 0)
        received += [mpi.recv(values(0.0), 0) for _ in range(2)]
        mpi.send(values(6.0), 0)
        mpi.send(values(9.0), 0)
        received += [mpi.recv(values(0.0), 0) for _ in range(2)]
        agree.equal([int(each[-1]) for each in received], [1, 4, 5, 7, 8])


@pytest.mark.min_ranks(2)
def test_a_message_that_does_not_fit_is_refused_and_the_next_one_arrives(agree):
    if mpi.rank() == 0:
        mpi.send(torch.ones(3), 1)
        mpi.send(torch.ones(3, dtype=torch.int32), 1)
        mpi.send(torch.full((4,), 7.0), 1)
    if mpi.rank() == 1:
        for _ in range(2):
            agree.raises(errors.MismatchError, lambda: mpi.recv(torch.empty(4), 0), "rank 0 sent")
        agree.equal(mpi.recv(torch.empty(4), 0), torch.full((4,), 7.0))
    mpi.barrier()


def test_asynchronous_calls_progress_while_the_caller_computes(agree):
    """No thread waits, and this thread makes no MPI call: the results must arrive."""
    import time

    tensors = [torch.ones(200_000) for _ in range(5)]
    handles = [mpi.allreduce_async(tensor) for tensor in tensors]
    limit = time.monotonic() + 30
    while not all(handle.done() for handle in handles) and time.monotonic() < limit:
        torch.ones(100, 100) @ torch.ones(100, 100)
        time.sleep(0.01)
    agree(all(handle.done() for handle in handles), "no progress without wait()")
    for handle in handles:
        agree.equal(handle.wait()[0].item(), float(mpi.size()))


@pytest.mark.ranks(2, 4)
def test_hundreds_of_groups_are_freed_by_all_of_their_ranks_together(agree):
    """Regression: each rank freed the oldest, in an order and at a moment of its own, although this is collective."""
    from mpi4py import MPI

    freed: list[tuple[tuple[int, ...], int]] = []
    keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: freed.append(value))
    world, context = MPI.COMM_WORLD, runtime.current().context
    ranks = range(world.size)
    subsets = [tuple(rank for rank in ranks if bits >> rank & 1) for bits in range(1, 1 << min(world.size, 3))]
    # Under MPICH a rank has at most 2048 communicators at a time: the groups below need more, beside these, for which
    # no rank waits.
    others = [MPI.COMM_SELF.Dup() for _ in range(1400 if MPI.get_vendor()[0] == "MPICH" else 0)]
    for number in range(480):
        members = subsets[number * number % 7 % len(subsets)]  # not as many for each rank
        if world.rank in members:
            comm = world.Create_group(world.group.Incl(members), 7)
            group = Group(comm, "many", members, context, check="off")
            group.side_comm.Set_attr(keyval, (members, number))
            status = MPI.Status()
            if group.side_comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                agree.equal(status.tag, number, "a message of another group")
            if group.size > 1 and number % 50 == 0:  # a message that nobody receives
                group.side_comm.Isend(bytearray(8), (group.rank + 1) % group.size, number).Wait()
                group.messages.add(1)
            group.free()
    for comm in others:
        comm.Free()
    everybodys = world.allgather(freed)
    agree(len(freed) > 100 or world.rank > 2, f"{len(freed)} were freed")
    agree(all(number % 50 or len(members) == 1 for members, number in freed), "freed with a message")
    for members in subsets:
        orders = [[value for value in everybodys[rank] if value[0] == members] for rank in members]
        agree(all(order == orders[0] for order in orders), f"{members}: {[len(order) for order in orders]} freed")
    MPI.Comm.Free_keyval(keyval)
