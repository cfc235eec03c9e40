"""Groups of torch.distributed over torchmpi: made, named, destroyed, and made again; nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.leftovers import in_use
from helpers.outcomes import refusal
from helpers.torch_rig import CALLS, Setting, wrong
from mpi4py import MPI

import torchmpi as mpi
from torchmpi.distributed import membership, torch_names
from torchmpi.errors import StallError
from torchmpi.session import runtime

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
EVERYBODY = list(range(SIZE))


pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.ranks(1, 4),
    pytest.mark.filterwarnings("ignore:.*will be deprecated"),
]


def destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def torch_world(world) -> Iterator[None]:
    dist.init_process_group("torchmpi")
    yield
    destroy()


@pytest.fixture
def nothing_runs(stopped) -> Iterator[None]:
    """Neither torchmpi nor torch.distributed is running."""
    yield
    destroy()


def total_of(group=None) -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


# --- members ----------------------------------------------------------------------------------------------------------


def test_every_subset_is_a_group(torch_world, agree):
    for bits in range(1, 1 << SIZE):
        ranks = [rank for rank in EVERYBODY if bits >> rank & 1]
        group = dist.new_group(ranks[::-1])
        if RANK not in ranks:
            agree(group is dist.GroupMember.NON_GROUP_MEMBER, f"{ranks}: {group!r}")
            agree.equal(dist.get_rank(group), -1)
            continue
        agree.equal(dist.get_process_group_ranks(group), ranks)
        agree.equal((group.rank(), group.size()), (ranks.index(RANK), len(ranks)))
        agree.equal([dist.get_group_rank(group, rank) for rank in ranks], list(range(len(ranks))))
        agree.equal([dist.get_global_rank(group, number) for number in range(len(ranks))], ranks)
        agree.equal(total_of(group), float(sum(ranks)), f"sum over {ranks}")
        agree.equal(dist.get_backend(group), "torchmpi")
        for number, (name, call) in enumerate(CALLS.items()):
            work, pairs = call(Setting(group, seed=number, asynchronous=bool(number % 2)))
            if work is not None:
                work.wait()
            for problem in wrong(name, Setting(group, seed=number), pairs):
                agree(False, f"{ranks}: {problem}")
        if bits % 3 == 0:
            dist.destroy_process_group(group)


def test_a_process_is_one_rank(torch_world, agree):
    """A thread that was to be another rank got the place of the first one."""
    options = torch_names.BackendOptions()
    options.group_rank, options.group_size, options.global_ranks_in_group = SIZE, SIZE + 1, []
    found = refusal(lambda: membership.current(options).open(options))
    agree(f"this process is rank {RANK} of {SIZE}. A process is one rank" in found, found)


def test_a_group_from_any_of_several_launch_orders(nothing_runs, agree, tmp_path):
    """Ranks in reverse order: rank 0 of torch is the last rank of MPI."""
    folder = Path(MPI.COMM_WORLD.bcast(str(tmp_path)))
    own = SIZE - 1 - RANK
    dist.init_process_group("torchmpi", init_method=f"file://{folder}/meet", rank=own, world_size=SIZE)
    gathered = [torch.empty(1) for _ in EVERYBODY]
    dist.all_gather(gathered, torch.tensor([float(own)]))
    pair = dist.new_group(sorted({0, SIZE - 1}))
    from_root = torch.tensor([float(own)])
    dist.broadcast(from_root, SIZE - 1)
    message = torch.tensor([float(own)])
    if SIZE > 1 and own == 0:
        dist.send(message, SIZE - 1)
    elif SIZE > 1 and own == SIZE - 1:
        agree.equal(dist.recv(message, 0), 0)
        agree.equal(message.item(), 0.0)
    if pair is not dist.GroupMember.NON_GROUP_MEMBER:
        agree.equal(total_of(pair), float(SIZE - 1))  # of ranks 0 and this
    agree.equal(dist.get_rank(), own)
    agree.equal([tensor.item() for tensor in gathered], [float(rank) for rank in EVERYBODY])
    agree.equal(from_root.item(), SIZE - 1.0)


# --- names ------------------------------------------------------------------------------------------------------------


def test_names(torch_world, agree):
    first, second = dist.new_group(group_desc="for tests"), dist.new_group()
    agree(first.group_name and first.group_name != second.group_name, f"{first.group_name!r}, {second.group_name!r}")
    agree.equal(first.group_desc, "for tests")
    agree.equal(dist.group.WORLD.group_desc, "default_pg")
    agree.equal(first.name(), "torchmpi")
    agree(dist.distributed_c10d._resolve_process_group(first.group_name) is first, "not found by its name")
    names = MPI.COMM_WORLD.allgather((first.group_name, second.group_name))
    agree.equal(names, [names[0]] * SIZE)
    agree.equal(dist.get_backend(), "torchmpi")
    agree.equal(dist.get_backend_config(), "cpu:torchmpi,cuda:torchmpi")


# --- the life of groups -----------------------------------------------------------------------------------------------


def test_destroyed_in_another_order_on_each_rank(torch_world, agree):
    groups = [dist.new_group() for _ in range(3)]
    for group in groups:
        agree.equal(total_of(group), float(sum(EVERYBODY)))
    for index in sorted(range(3), key=lambda index: (index + RANK) % 3):
        dist.destroy_process_group(groups[index])
    agree.equal(total_of(), float(sum(EVERYBODY)))
    agree.equal(total_of(dist.new_group()), float(sum(EVERYBODY)))


def test_ranks_of_a_destroyed_group_do_not_wait_for_each_other(torch_world, agree):
    group = dist.new_group()
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    if RANK % 2:
        dist.destroy_process_group(group)
    total = total_of()
    if RANK % 2 == 0:
        dist.destroy_process_group(group)
    agree.equal(total, float(sum(EVERYBODY)))


def test_running_work_is_completed_before_a_group_is_destroyed(torch_world, agree):
    group = dist.new_group()
    tensors = [torch.full((100_000,), float(number)) for number in range(10)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.destroy_process_group(group)
    for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        agree.equal(tensor, torch.full((100_000,), float(number * SIZE)))


def test_a_destroyed_group_refuses_every_call(torch_world, agree):
    group, ones = dist.new_group(), torch.ones(3)
    dist.all_reduce(ones, group=group)
    dist.barrier(group)
    ended = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    dist.destroy_process_group(group)
    calls = {
        "all_reduce": lambda: group.allreduce([ones]),
        "several": lambda: group.allreduce_coalesced([ones, ones]),
        "reduce": lambda: group.reduce([ones]),
        "broadcast": lambda: group.broadcast([ones], 0),
        "all_gather": lambda: group.allgather([[ones] * SIZE], [ones]),
        "all_gather_into_tensor": lambda: group._allgather_base(torch.ones(3 * SIZE), ones),
        "reduce_scatter": lambda: group._reduce_scatter_base(ones, torch.ones(3 * SIZE)),
        "all_to_all": lambda: group.alltoall_base(torch.ones(SIZE), torch.ones(SIZE), [], []),
        "gather": lambda: group.gather([[ones] * SIZE] if RANK == 0 else [], [ones]),
        "scatter": lambda: group.scatter([ones], [[ones] * SIZE] if RANK == 0 else []),
        "barrier": lambda: group.barrier(),
        "send": lambda: group.send([ones], (RANK + 1) % SIZE, 0),
        "recv": lambda: group.recv([ones], (RANK + 1) % SIZE, 0),
        "from any rank": lambda: group.recv_anysource([ones], 0),
        "monitored_barrier": lambda: group.monitored_barrier(timedelta(seconds=1)),
        "through torch": lambda: dist.broadcast(ones, 0, group=group),
    }
    for name, call in calls.items():
        said = refusal(call)
        agree("nothing" not in said, f"{name} was accepted")
        agree("closed" in said or "destroyed" in said or "not initialized in the world" in said, f"{name}: {said}")
    agree("Invalid process group" in refusal(lambda: dist.destroy_process_group(group)), "destroyed twice")
    group.shutdown()
    group.abort()
    ended.wait()
    agree.equal((group.rank(), group.size()), (RANK, SIZE))
    agree.equal(total_of(), float(sum(EVERYBODY)), "the others are as they were")


def test_a_group_shrinks_to_its_other_ranks(torch_world, agree):
    ranks = EVERYBODY[::-1]
    group = dist.new_group(ranks) if SIZE > 1 else None
    others = [rank for rank in EVERYBODY if rank != ranks[0]]
    if RANK in others:
        shrunk = dist.shrink_group([dist.get_group_rank(group, ranks[0])], group)
        agree.equal((dist.get_process_group_ranks(shrunk), total_of(shrunk)), (others, float(sum(others))))
        agree("not initialized in the world" in refusal(lambda: dist.all_reduce(torch.ones(3), group=group)))
    agree.equal(total_of(), float(sum(EVERYBODY)), "the default group is as it was")
    agree("lost" in refusal(lambda: dist.shrink_group([(RANK + 1) % SIZE])) or SIZE == 1, "no rank is lost")
    agree("without this one" in refusal(lambda: dist.shrink_group([RANK])))


def test_repeated_creation_leaves_nothing_behind(nothing_runs, agree):
    for number in range(7):
        dist.init_process_group("torchmpi")
        groups = [dist.new_group(), dist.new_group(EVERYBODY[: SIZE // 2 + 1])]
        works = [dist.all_reduce(torch.ones(50_000), async_op=True), dist.barrier(groups[0], async_op=True)]
        if SIZE > 1:
            works.append(dist.irecv(torch.empty(3), (RANK - 1) % SIZE))
            dist.barrier()  # so that the message is still in flight and the progress thread tests it
            works.append(dist.isend(torch.ones(3), (RANK + 1) % SIZE))
        for work in works:
            work.get_future().wait()
        del works, work, groups
        dist.destroy_process_group()
        agree(not runtime.is_running(), "torchmpi was started for torch and not stopped")
        # The first rounds open files that remain open: libraries, MPI's own files; and start the progress thread.
        if number == 2:
            before = in_use()
    agree.equal(in_use(before), before, "after the last round, and after the third")


def test_aborted_and_made_again(nothing_runs, agree):
    dist.init_process_group("torchmpi")
    agree.equal(total_of(), float(sum(EVERYBODY)))
    dist.distributed_c10d._abort_process_group()
    agree(not dist.is_initialized())
    dist.init_process_group("torchmpi")
    agree.equal(total_of(), float(sum(EVERYBODY)))


def test_an_aborted_group_may_be_destroyed(nothing_runs, agree):
    """Regression: it was counted twice, and torchmpi was stopped under the other groups."""
    dist.init_process_group("torchmpi")
    group = dist.new_group()
    group.abort()
    dist.destroy_process_group(group)
    agree.equal(total_of(), float(sum(EVERYBODY)))


@pytest.mark.min_ranks(2)
def test_ranks_that_occur_twice_are_refused(nothing_runs, agree):
    said = refusal(lambda: dist.init_process_group("torchmpi", store=dist.HashStore(), rank=0, world_size=SIZE))
    agree("different rank" in said, said)
    agree(not runtime.is_running(), "torchmpi was started for torch and not stopped")


@pytest.mark.min_ranks(2)
def test_abort_ends_everything_that_is_queued(torch_world, agree):
    """Calls that the other ranks never make, half an hour before their timeout."""
    group = dist.new_group()
    works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(3)] if RANK == 0 else []
    dist.distributed_c10d._abort_process_group(group)
    for work in works:
        agree("nothing" not in refusal(work.wait), "a call of one rank only succeeded")
    agree.equal(total_of(), float(sum(EVERYBODY)))


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("num_before", (0, 3))
@pytest.mark.parametrize("name", ("broadcast", "allreduce", "_allgather_base"))
def test_the_timeout_of_a_call_is_that_of_its_options(torch_world, agree, name, num_before, asynchronous):
    """Before the timeout of the group; other ranks do not call.

    Regression: an all_reduce like earlier ones, without a timeout, waited for that of the group.
    """
    group, rows = dist.new_group(), torch.ones(3 * SIZE)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=20), group)
    kinds = {"broadcast": dist.BroadcastOptions, "allreduce": dist.AllreduceOptions}
    options = kinds.get(name, torch_names.AllgatherOptions)()
    options.asyncOp = asynchronous

    def call() -> None:
        ones = torch.ones(3)
        tensors = (rows, ones) if name == "_allgather_base" else ([ones],)
        getattr(group, name)(*tensors, options).wait()

    for _ in range(num_before):
        call()
    options.timeout = timedelta(seconds=0.3)
    if RANK == SIZE - 1:  # which receives
        agree.raises(StallError, call, "0.3 s")
    total_of()
    dist.destroy_process_group(group)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("end", ("destroyed", "aborted"))
def test_group_freed_while_another_thread_is_in_a_call(torch_world, agree, end):
    """Regression: the shared memory was unmapped during the call. The call, which no other rank makes, must raise."""
    group = dist.new_group()
    dist.barrier(group)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    said: list[str] = []
    began = threading.Event()

    def call() -> None:
        tensor = torch.ones(300_000)
        began.set()
        said.append(refusal(lambda: dist.all_reduce(tensor, group=group)))

    thread = threading.Thread(target=call)
    if RANK == 0:
        thread.start()
        began.wait()
        time.sleep(0.1)
    if end == "aborted":
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)
    if RANK == 0:
        thread.join()
        agree(said and "nothing" not in said[0], f"{said}")
    agree.equal(total_of(), float(sum(EVERYBODY)))


# --- beside torchmpi itself, and other backends -----------------------------------------------------------------------


def test_torchmpi_that_runs_already_is_used_and_left_running(nothing_runs, agree):
    mpi.start()
    level = mpi.communicator(0)
    dist.init_process_group("torchmpi")
    agree.equal(total_of(), float(sum(EVERYBODY)))
    agree.equal(mpi.allreduce(RANK), sum(EVERYBODY), "torchmpi's own verbs beside torch's")
    dist.destroy_process_group()
    agree(runtime.is_running() and mpi.communicator(0) is level, "torchmpi was stopped")
    agree.equal(mpi.allreduce(RANK), sum(EVERYBODY))


def test_torchmpi_stopped_under_a_group_is_an_error_and_no_crash(nothing_runs, agree):
    mpi.start()
    dist.init_process_group("torchmpi")
    ones = torch.ones(3)
    dist.all_reduce(ones)
    mpi.stop()
    for name, call in {
        "all_reduce": lambda: dist.all_reduce(ones),
        "asynchronous": lambda: dist.all_reduce(ones, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(ones, 0),
        "barrier": lambda: dist.barrier(),
        "all_gather": lambda: dist.all_gather([ones] * SIZE, ones),
        "recv": lambda: dist.recv(ones),
    }.items():
        said = refusal(call)
        agree("stopped" in said or "destroyed" in said, f"{name}: {said}")
    mpi.start()
    dist.destroy_process_group()
    agree(runtime.is_running(), "stopped by a group of the time before")
    dist.init_process_group("torchmpi")
    agree.equal(total_of(), float(sum(EVERYBODY)))


def test_ours_beside_a_default_group_of_another_backend(nothing_runs, agree):
    """The first of ours is made by all ranks, which start torchmpi together."""
    dist.init_process_group("gloo", "mpi://")
    if SIZE > 1:
        said = refusal(lambda: dist.new_group([0], backend="torchmpi"))
        agree(RANK > 0 or ("ArgumentError" in said and "must have all ranks" in said), said)
    ours = dist.new_group(backend="torchmpi")
    first = dist.new_group([0], backend="torchmpi")
    agree.equal(total_of(ours), float(sum(EVERYBODY)))
    agree.equal(total_of(), float(sum(EVERYBODY)))
    if RANK == 0:
        agree.equal(total_of(first), 0.0)
    dist.destroy_process_group()
    agree(not runtime.is_running(), "torchmpi was started for torch and not stopped")


@pytest.mark.parametrize("mixed", ("cpu:torchmpi,cuda:gloo", "cpu:gloo,cuda:torchmpi", "cuda:nccl,cpu:torchmpi"))
def test_a_mixture_of_backends_is_refused(nothing_runs, agree, mixed):
    said = refusal(lambda: dist.init_process_group(mixed, "mpi://"))
    agree("ArgumentError" in said and f"'{mixed}' mixes" in said and "'torchmpi' alone" in said, said)
    agree(not dist.is_initialized() and not runtime.is_running(), "something was started")
    dist.init_process_group("cpu:torchmpi,cuda:torchmpi")
    mixed_group = refusal(lambda: dist.new_group(backend=mixed))
    agree("ArgumentError" in mixed_group, mixed_group)
    agree.equal(total_of(), float(sum(EVERYBODY)))


def test_a_second_default_group_is_refused(torch_world, agree):
    agree("twice" in refusal(lambda: dist.init_process_group("torchmpi")), "made twice")
    agree.equal(total_of(), float(sum(EVERYBODY)))
