"""Works and futures of torch.distributed over torchmpi, and calls on several groups in any order."""

from __future__ import annotations

import random
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import torch_rig
from helpers.functions_entered import python_calls
from helpers.joint import try_together
from helpers.outcomes import error_of
from helpers.torch_rig import CALLS, Setting, wrong
from hypothesis import strategies
from torch.overrides import TorchFunctionMode

from torchmpi.session import runtime
from torchmpi.shared_memory import fast_path

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.ranks(1, 3),
    pytest.mark.usefixtures("default_group"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:.*will be deprecated"),
]


def test_methods_of_a_group_accept_single_tensors_without_options(agree):
    """As torch's bindings of ProcessGroup do; the works are those of asynchronous calls, with the results."""
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    limit, last, ranks = timedelta(seconds=50), size - 1, [torch.tensor([float(each)]) for each in range(size)]
    mine, total = ranks[rank], torch.tensor([float(sum(range(size)))])

    def done(work):
        work.wait()
        return work.get_future().value()[0]

    agree.equal(done(group.broadcast(mine.clone(), last)), ranks[last])
    agree.equal(done(group.broadcast(mine.clone(), root=last, timeout=limit)), ranks[last])
    agree.equal(done(group.allreduce(mine.clone())), total)
    agree.equal(done(group.allreduce(mine.clone(), op=dist.ReduceOp.MAX, timeout=limit)), ranks[last])
    agree.equal(done(group.allreduce([mine.clone()], dist.ReduceOp.MAX, limit)), ranks[last])
    reduced = done(group.reduce(mine.clone(), last, op=dist.ReduceOp.SUM))
    agree.equal(reduced, total if rank == last else mine)
    gathered = [torch.zeros(1) for _ in range(size)]
    group.allgather(gathered, mine, timeout=limit).wait()
    agree.equal(torch.cat(gathered), torch.cat(ranks), "allgather")
    gathered = [torch.zeros(1) for _ in range(size)] if rank == last else []
    group.gather(gathered, mine, root=last).wait()
    agree.equal(torch.cat([*gathered, mine]), torch.cat([*(ranks if rank == last else []), mine]), "gather")
    agree.equal(done(group.scatter(torch.zeros(1), ranks if rank == last else [], last)), mine)
    agree.equal(done(group.reduce_scatter(torch.zeros(1), ranks, op=dist.ReduceOp.SUM)), mine * size)
    received = [torch.zeros(1) for _ in range(size)]
    group.alltoall(received, ranks, limit).wait()
    agree.equal(torch.cat(received), torch.full((size,), float(rank)))
    agree(group.barrier(timeout=limit).wait())


IN_MACHINE_CODE = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "gather_single", "all_to_all", "all_to_all_even", "all_to_all_single",
    "all_to_all_single_uneven", "barrier",
)  # fmt: skip


def has_machine_code() -> bool:
    is_built = fast_path.allreduce is not fast_path._not_built and runtime.current().config.fast_path
    group = dist.group.WORLD._group
    return is_built and group.shared is not None and not group.is_strict


def test_an_asynchronous_all_reduce_takes_few_python_calls(agree):
    """Calls of this package in the caller's thread, after warming up."""
    tensor = torch.ones(8)
    for _ in range(2):
        dist.all_reduce(tensor, async_op=True).wait()
    made, work = python_calls(lambda: dist.all_reduce(tensor, async_op=True))
    agree(0 < len(made) <= 8, [code.co_name for code in made])
    agree(len({code.co_filename for code in made}) <= 8, sorted({code.co_filename for code in made}))
    begun, _ = python_calls(work.get_future)
    ended, _ = python_calls(work.wait)
    through_python = "perform" in {code.co_name for code in (*begun, *ended)}
    agree(not (through_python and has_machine_code()), "the thread that waits runs it in machine code")


@pytest.mark.parametrize("name", IN_MACHINE_CODE)
def test_a_repeated_call_on_plain_tensors_runs_in_machine_code(agree, name):
    """Those of the table of calls, with lists that are not adjacent too, in the caller or in a thread that waits.

    Python checks no arguments before.
    """
    if not has_machine_code():
        pytest.skip("no fast path, or no shared memory, or calls are compared by messages")

    def play(asynchronous: bool) -> None:
        work, _ = CALLS[name](Setting(None, asynchronous=asynchronous))
        if work is not None:
            work.wait()

    for asynchronous in (False, True):
        play(asynchronous)
        functions, _ = python_calls(partial(play, asynchronous))
        names = [code.co_name for code in functions]
        agree("perform" not in names, names)
        if name not in ("all_to_all", "all_to_all_single_uneven"):  # Python looks at the lengths of parts
            agree("_on_plain" not in names and "check_sizes" not in names, names)


def test_chained_futures(agree):
    """As in PowerSGD: the callback makes further calls and waits for their results."""
    size = dist.get_world_size()
    first, second, third = torch.ones(3), torch.ones(5), torch.ones(7)

    def reduce_second(future):
        return [future.value()[0], dist.all_reduce(second, async_op=True).get_future().wait()[0]]

    def reduce_third(future):
        dist.all_reduce(third)
        dist.barrier()
        return [*future.value(), third]

    future = dist.all_reduce(first, async_op=True).get_future().then(reduce_second).then(reduce_third)
    after = torch.full((2,), 3.0)
    results = future.wait()
    dist.all_reduce(after)
    agree(results[0] is first and results[2] is third, "the future's tensors are not those of the calls")
    for tensor in results:
        agree.equal(tensor, torch.full_like(tensor, float(size)))
    agree.equal(after, torch.full((2,), 3.0 * size))


def test_an_error_in_a_callback_belongs_to_its_future(agree):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future().then(lambda future: 1 / 0)
    raised = error_of(future.wait)
    work.wait()
    again = torch.ones(3)
    dist.all_reduce(again)
    agree("division by zero" in raised, f"the callback's error: {raised!r}")
    agree.equal(tensor, again)


def test_a_tensor_stays_alive_until_its_call_has_ended(agree):
    size, numel = dist.get_world_size(), 300_000
    works, references = [], []
    for number in range(8):
        tensor = torch.full((numel,), float(number))
        references.append(weakref.ref(tensor))
        works.append(dist.all_reduce(tensor, async_op=True))
        del tensor
    others = [torch.full((numel,), -1.0) for _ in range(8)]  # would reuse the memory if it had been freed
    for number, work in enumerate(works):
        work.wait()
        agree.equal(work.result()[0], torch.full((numel,), float(number * size)), f"call {number}")
    del others, works, work
    dist.barrier(async_op=True).wait()  # the group's thread has released the earlier calls
    for _ in range(2000):  # the watchdog may be reading the stacks, if a rank has kept the others waiting for a second
        if all(reference() is None for reference in references):
            break
        time.sleep(0.005)
    agree(all(reference() is None for reference in references), "a tensor outlives its work")


def test_calls_on_one_tensor_keep_their_order(agree):
    """A call reads and writes its tensors when it runs in the queue, also if it needs a copy first."""
    rank, size, numel = dist.get_rank(), dist.get_world_size(), 150_000
    total = float(sum(range(1, size + 1)))
    summed, column = torch.full((numel,), rank + 1.0), torch.full((numel, 2), rank + 1.0)[:, 0]
    listed = [torch.full((numel,), rank + 1.0) for _ in range(size)]
    scattered, exchanged, gathered = torch.empty(numel), torch.empty(numel, 1), torch.empty(numel * size)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (summed, column, *listed)]
    works.append(dist.all_reduce(summed, dist._make_nccl_premul_sum(0.5), async_op=True))
    works.append(torch_rig.all_gather_single(gathered, column, async_op=True))
    works.append(dist.reduce_scatter(scattered, listed, async_op=True))
    rows = numel // size
    sizes = [rows] * (size - 1) + [numel - rows * (size - 1)]
    received = torch.empty(sizes[rank] * size, 1)
    works.append(dist.all_to_all_single(received, column.unsqueeze(1), [sizes[rank]] * size, sizes, async_op=True))
    works.append(dist.scatter(exchanged, [part.unsqueeze(1) for part in listed] if rank == 0 else None, async_op=True))
    for work in works:
        work.wait()
    for name, actual, expected in (
        ("factor", summed, total * size * 0.5),
        ("gathered", gathered, total),
        ("scattered sums", scattered, total * size),
        ("exchanged", received, total),
        ("scattered", exchanged, total),
    ):
        agree.equal(actual, torch.full_like(actual, expected), name)


def test_unreferenced_works_are_executed(agree):
    size, tensor = dist.get_world_size(), torch.ones(10)
    for _ in range(6):
        dist.all_reduce(tensor, async_op=True)
        dist.all_gather([torch.empty(1000) for _ in range(size)], torch.ones(1000), async_op=True)
    dist.barrier()
    agree.equal(tensor, torch.full((10,), float(size**6)))


# --- any order -------------------------------------------------------------------------------------------------------

LENGTHS = (0, 1, 3, 28, 113, 1025, 20_001)
STEPS = strategies.tuples(
    strategies.sampled_from([*CALLS, "all_reduce", "all_reduce"]),
    strategies.integers(0, 2),
    strategies.sampled_from(LENGTHS),
    strategies.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.int32)),
    strategies.integers(0, 11),
)
BLOCKS = strategies.lists(
    strategies.tuples(strategies.booleans(), strategies.lists(STEPS, min_size=1, max_size=6)), min_size=2, max_size=6
)


@pytest.fixture(scope="module")
def groups(default_group):
    """The world, every second rank, and neighbors in pairs; None where this rank is no member."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group(list(range(first, min(first + 2, size)))) for first in range(0, size, 2)]
    return [None, dist.new_group(list(range(0, size, 2))) if size > 1 else None, pairs[rank // 2]]


def test_any_sequence_of_calls_on_several_groups(groups):
    """Asynchronous calls may be made in a different order of groups on each rank, and waited for in any order.

    A block is made either in one order by all, where some ranks call synchronously, or asynchronously in an order of
    each rank's own, which keeps that within a group.
    """
    rank = dist.get_rank()

    def make(number, step, asynchronous):
        name, index, numel, dtype, seed = step
        setting = Setting(groups[index], dtype, (numel,), seed, asynchronous=asynchronous)
        work, pairs = CALLS[name](setting)
        return f"call {number} of group {index}: {name}", setting, work, pairs

    def run(example):
        blocks, seed = example
        own = random.Random(seed * 100 + rank)
        made = []
        for is_shuffled, steps in blocks:
            numbered = [entry for entry in enumerate(steps) if is_member(groups[entry[1][1]])]
            if is_shuffled:
                numbered = merged(numbered, own)
            made += [make(number, step, is_shuffled or own.random() < 0.5) for number, step in numbered]
            if own.random() < 0.3 and made[-1:] and made[-1][2] is not None:
                made[-1][2].wait()
        own.shuffle(made)
        problems = []
        for name, setting, work, pairs in made:
            if work is not None:
                work.wait()
            problems += wrong(name, setting, pairs)
        assert not problems, problems

    try_together(run, strategies.tuples(BLOCKS, strategies.integers(0, 1 << 20)))


def is_member(group) -> bool:
    return group is not dist.GroupMember.NON_GROUP_MEMBER


def merged(numbered, choice):
    """Another order of the same calls, which keeps the order of the calls on each group."""
    order = [step[1] for _, step in numbered]
    choice.shuffle(order)
    queues = {index: iter([entry for entry in numbered if entry[1][1] == index]) for index in set(order)}
    return [next(queues[index]) for index in order]


def test_several_groups_from_several_threads(agree):
    if not runtime.current().threads_allowed:
        pytest.skip("this MPI library takes one thread at a time")
    own_groups = [dist.new_group() for _ in range(4)]
    problems: list[str] = []

    def work(index: int) -> None:
        choice = random.Random(index)
        try:
            for _ in range(30):
                name = choice.choice(list(CALLS))
                asynchronous = choice.random() < 0.4
                setting = Setting(own_groups[index], shape=(choice.choice(LENGTHS),), seed=choice.randrange(9))
                made, pairs = CALLS[name](setting._replace(asynchronous=asynchronous))
                if made is not None:
                    made.wait()
                problems.extend(wrong(name, setting, pairs))
        except Exception as error:
            problems.append(f"thread {index}: {error!r}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in own_groups:
        dist.destroy_process_group(group)
    agree(not problems, "; ".join(problems[:5]))


def test_coalesced_calls_with_lists_of_different_lengths_start_nothing(agree):
    """Regression: the first call ran before the lengths were compared, and other ranks waited in the second."""
    group, size = dist.group.WORLD, dist.get_world_size()
    before, errors = group._group.call_log.seq, []
    for outputs in ([torch.empty(size)], [torch.empty(size)] * 3):
        try:
            group.all_gather_single_coalesced(outputs, [torch.ones(1)] * 2)
        except ValueError as error:
            errors.append(error)
    agree.equal((group._group.call_log.seq - before, len(errors)), (0, 2))


class Watching(TorchFunctionMode):
    """A mode of the program, as PyTorch's tests have one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_program_does_not_see_the_tensors_of_a_call(agree):
    """Torch 2.14 compiles such a mode and returns one attribute of a tensor for another: broadcast found it nested."""
    size, mode = dist.get_world_size(), Watching()
    one, whole = torch.ones(4), torch.empty(4 * size)
    with mode:
        mode.seen.clear()
        dist.group.WORLD.broadcast(one, 0).wait()
        dist.group.WORLD.allreduce([one]).wait()
        dist.group.WORLD._allgather_base(whole, one).wait()
        seen = list(mode.seen)
    agree(seen == [], str(seen))
    agree.equal(whole, torch.full_like(whole, size))
