"""To a user of ``mpi.metrics()``: exact counts and bytes of calls by every path, also on freed communicators."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import torchmpi as mpi
import torchmpi.parameterserver as ps
from torchmpi.config import Config
from torchmpi.engine import AllReduceSGDEngine, SGDEngine, TensorBoard
from torchmpi.errors import MismatchError
from torchmpi.shared_memory.memory_layout import LogFields

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3)]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def counts(kind: str = "calls") -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes by communicator and collective."""
    return {
        (name, collective): (each["calls"], each["bytes"])
        for name, collectives in mpi.metrics()[kind].items()
        for collective, each in collectives.items()
    }


def since(before: dict[tuple[str, str], tuple[int, int]], kind: str = "calls") -> dict[str, tuple[int, int]]:
    """What has been added, by collective, or by the name of the communicator and collective outside the world."""
    found = {}
    for (name, collective), (calls, num_bytes) in counts(kind).items():
        known = before.get((name, collective), (0, 0))
        if calls > known[0]:
            key = collective if name == "world" else f"{name}: {collective}"
            found[key] = (calls - known[0], num_bytes - known[1])
    return found


@pytest.mark.usefixtures("world")
def test_calls_by_all_paths_are_counted_with_their_bytes(agree):
    before, seconds = counts(), mpi.metrics()["seconds"]
    tensor, transposed = torch.ones(3), torch.ones(3, 2).t()
    for _ in range(10):
        mpi.allreduce(tensor)  # by the fast path from the second call on, where it applies
        mpi.barrier()
    mpi.allreduce(tensor, backend="mpi")
    mpi.allreduce(transposed)
    handles = [mpi.allreduce_async(tensor), mpi.broadcast_async(torch.ones(5, dtype=torch.int64))]
    for handle in handles:
        handle.wait()
    mpi.allreduce_many([torch.ones(4), torch.ones(4)], backend="mpi")
    expected = {"allreduce": (13, 12 * 12 + 24), "barrier": (10, 0), "broadcast": (1, 40), "allreduce_many": (1, 32)}
    agree.equal(since(before), expected)
    agree(mpi.metrics()["seconds"] > seconds, "no time")


@pytest.mark.usefixtures("world")
def test_all_collectives_count_the_tensor_that_the_rank_passes(agree):
    before, size = counts(), mpi.size()
    row, rows, part = torch.ones(1, 2), torch.ones(size, 2), torch.empty(1, 2)
    for _ in range(3):  # through Python, then by the fast path
        mpi.allgather(row, out=torch.empty(size, 2))
        mpi.gather(row, out=torch.empty(size, 2) if RANK == 0 else None)
        mpi.reduce_scatter(rows, out=part)
        mpi.alltoall(rows, out=torch.empty(size, 2))
        mpi.scatter(rows if RANK == 0 else None, out=part)
        mpi.alltoall(rows, splits=[1] * size)
    mpi.scatter(rows if RANK == 0 else None)
    found, own = since(before), 8 * size if RANK == 0 else 8
    agree.equal(found["allgather"], (3, 3 * 8))
    agree.equal(found["gather"], (3, 3 * 8))
    agree.equal(found["reduce_scatter"], (3, 3 * 8 * size))
    agree.equal(found["alltoall"], (6, 6 * 8 * size))
    agree.equal(found["scatter"], (4, 4 * own))
    agree.equal(found["alltoall_splits"], (3, 3 * 8 * size))


@pytest.mark.usefixtures("world")
def test_a_fast_call_that_continues_in_python_is_counted_once(agree):
    """Ranks with different lengths leave the machine code of an allgather; the time before is counted too."""
    tensor = torch.ones(2)
    for _ in range(2):
        mpi.allgather(tensor, out=torch.empty(2 * mpi.size()))
    before = mpi.metrics()["calls"]["world"]["allgather"]
    own = torch.ones(2 + (RANK == 0))
    mpi.allgather(own, out=torch.empty(2 * mpi.size() + 1))
    after = mpi.metrics()["calls"]["world"]["allgather"]
    agree.equal((after["calls"] - before["calls"], after["bytes"] - before["bytes"]), (1, own.nbytes))
    agree(after["seconds"] > before["seconds"], f"{before} {after}")


def with_late_rank(call: Callable[[], object], comm: mpi.Communicator, late: int = 0) -> float:
    """Make a call that rank `late` enters last; return how many seconds the others have then been in it, at least."""
    call_log, alone = comm.intra.call_log, 0.0
    seq = call_log.seq

    def tell_when_entered() -> None:
        while call_log.seq == seq:
            time.sleep(0.001)
        MPI.COMM_WORLD.Barrier()

    mpi.barrier()
    teller = threading.Thread(target=MPI.COMM_WORLD.Barrier if late == RANK else tell_when_entered)
    teller.start()
    if late == RANK:
        teller.join()
        begin = time.monotonic()
        time.sleep(0.1)
        alone = time.monotonic() - begin
    call()
    teller.join()
    return mpi.allgather_object(alone)[late]


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("world")
def test_the_wait_for_a_late_rank_is_measured_apart(agree):
    """By the fast path, through Python, and in a comparison of calls that MPI runs."""
    comm, tensor = mpi.group(range(mpi.size()), name="late"), torch.ones(3)
    for _ in range(2):
        mpi.allreduce(tensor, comm=comm)
    calls = (lambda: mpi.allreduce(tensor, comm=comm), lambda: mpi.allgather(tensor, comm=comm))
    _, alone = (with_late_rank(call, comm) for call in calls)
    found = mpi.metrics()["calls"]["late"]
    comm.free()
    for each in (found["allreduce"], found["allgather"]):
        agree.equal(round(each["waited"] + each["moved"], 9), round(each["seconds"], 9))
        agree(0 <= each["waited"] <= each["seconds"], f"{each}")
        if RANK != 0:  # a rank that another program delays may have waited for less
            agree(each["waited"] > 0, f"{each}")
    if RANK != 0:
        agree(found["allgather"]["waited"] >= alone, f"{found}, {alone}")


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("world")
def test_a_failed_call_leaves_no_wait_behind(agree):
    comm = mpi.group(range(mpi.size()), name="fails")
    if RANK == 0:
        time.sleep(0.1)
    agree.raises(MismatchError, lambda: mpi.allreduce(torch.ones(2 + RANK), comm=comm))
    agree.equal(comm.intra.call_log.log_fields[LogFields.waited], 0)
    mpi.barrier(comm=comm)
    comm.free()


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("backend", ["mpi", "p2p", "gloo"])
def test_the_wait_for_a_late_rank_is_measured_where_a_library_waits(agree, backend):
    comm, tensor = mpi.group(range(mpi.size()), name=f"late {backend}"), torch.ones(3)
    mpi.allreduce(tensor, comm=comm, backend=backend)  # connects
    before = mpi.metrics()["calls"][f"late {backend}"]["allreduce"]
    alone = with_late_rank(lambda: mpi.allreduce(tensor, comm=comm, backend=backend), comm)
    after = mpi.metrics()["calls"][f"late {backend}"]["allreduce"]
    comm.free()
    found = {name: after[name] - before[name] for name in after}
    agree.equal(round(after["waited"] + after["moved"], 9), round(after["seconds"], 9))
    agree(0 <= found["waited"] <= found["seconds"], f"{found}")
    if RANK != 0:
        agree(found["waited"] >= alone, f"{found}, {alone}")


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("world")
def test_a_rank_waits_for_those_whose_data_it_needs(agree):
    """A rank of a broadcast for the root, and the root of a gather for all; the others of these for nobody."""
    size = mpi.size()
    comm, last = mpi.group(range(size), name="rooted"), size - 1
    for collective in (mpi.broadcast, mpi.gather):
        alone = with_late_rank(partial(collective, torch.ones(3), 0, comm=comm, backend="mpi"), comm, late=last)
    found = mpi.metrics()["calls"]["rooted"]
    comm.free()
    if RANK in (0, last):
        agree.equal(found["broadcast"]["waited"], 0, f"{found}")
    if RANK == 0:
        agree(found["gather"]["waited"] >= alone, f"{found}, {alone}")
    else:
        agree.equal(found["gather"]["waited"], 0, f"{found}")


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("world")
def test_messages_are_counted(agree):
    size = mpi.size()
    comm = mpi.group(range(size), name="messages")
    right, left = (RANK + 1) % size, (RANK - 1) % size
    for _ in range(2):
        handles = mpi.send_async(torch.ones(3), right, comm=comm), mpi.recv_async(torch.empty(3), left, comm=comm)
        for handle in handles:
            handle.wait()
    mpi.sendreceive(torch.ones(5), left, right, comm=comm)
    found = mpi.metrics()["messages"]["messages"]
    comm.free()
    numbers = {kind: (each["calls"], each["bytes"], each["stalls"]) for kind, each in found.items()}
    agree.equal(numbers, {"send": (2, 24, 0), "recv": (2, 24, 0), "sendreceive": (1, 20, 0)})
    agree(all(each["seconds"] > 0 for each in found.values()), f"{found}")
    for kind in ("recv", "sendreceive"):
        each = found[kind]
        agree.equal(round(each["waited"] + each["moved"], 9), round(each["seconds"], 9))
    agree.equal(found["send"]["waited"] + found["send"]["moved"], 0)


@pytest.mark.usefixtures("world")
def test_freed_communicators_keep_their_counts(agree):
    before = counts()
    for _ in range(2):
        comm = mpi.group(range(mpi.size()), name="to be freed")
        mpi.allreduce(torch.ones(2), comm=comm)
        comm.free()
    found = since(before)
    agree.equal(found["to be freed: allreduce"], (2, 16))
    agree("to be freed" not in mpi.metrics()["in_flight"])


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("world")
def test_calls_that_fail_are_not_counted(agree):
    before = counts()
    for _ in range(2):
        agree.raises(MismatchError, lambda: mpi.allreduce(torch.ones(2 + RANK)))
    agree.equal(since(before), {})
    mpi.barrier()


@pytest.mark.usefixtures("world")
def test_queued_calls_are_in_flight(agree):
    comm = mpi.group(range(mpi.size()), name="in flight")
    comm.intra.call_queue.run_lock.acquire()  # as a call that runs
    handles = [mpi.allreduce_async(torch.ones(2), comm=comm) for _ in range(3)]
    found = mpi.metrics()["in_flight"]["in flight"]
    comm.intra.call_queue.run_lock.release()
    for handle in handles:
        handle.wait()
    agree.equal(found, 3)
    comm.free()


@pytest.mark.usefixtures("world")
def test_updates_with_servers_report_their_metrics(agree):
    network = torch.nn.Linear(2, 1)
    with ps.DownpourUpdate(network, lr=0.1, update_frequency=1, init_delay=0) as update:
        for _ in range(3):
            network(torch.ones(1, 2)).sum().backward()
            update.update()
        second = ps.DownpourUpdate(network, lr=0.1, update_frequency=1)  # of the same name
        second.start()
        found = mpi.metrics()["updates"]
        agree.equal([found[name]["num_sends"] for name in ("parameters", "parameters 2")], [update.num_sends, 0])
        second.free()


def test_torch_distributed_is_counted(agree):
    was_running = mpi.is_started()
    if not was_running:
        mpi.start()
    dist.init_process_group("torchmpi")
    before = counts()
    dist.all_reduce(torch.ones(6))
    work = dist.all_reduce(torch.ones(6), async_op=True)
    work.wait()
    agree.equal(since(before), {"process group: allreduce": (2, 48)})
    if SIZE > 1:
        known = dict(mpi.metrics()["messages"].get("process group", {}))
        works = [dist.isend(torch.ones(6), (RANK + 1) % SIZE), dist.irecv(torch.empty(6), (RANK - 1) % SIZE)]
        for work in works:
            work.wait()
        for kind, each in mpi.metrics()["messages"]["process group"].items():
            earlier = known.get(kind, {"calls": 0, "bytes": 0})
            agree.equal((each["calls"] - earlier["calls"], each["bytes"] - earlier["bytes"]), (1, 24), kind)
    dist.destroy_process_group()
    if not was_running:
        mpi.stop()


@pytest.mark.skipif(SIZE < 3, reason="two hosts with several ranks on one")
def test_steps_of_hierarchical_calls_are_counted_apart(agree):
    was_running = mpi.is_started()
    mpi.stop()
    mpi.start(config=dataclasses.replace(Config.from_environment(), host_name="aabb"[RANK], hierarchical="on"))
    before, steps = counts(), counts("steps")
    mpi.allreduce(torch.ones(100_000))
    agree.equal(since(before), {"allreduce": (1, 400_000)})
    names = {key.split(":")[0] for key in since(steps, "steps")}
    expected = {"world on one host"} if "aabb"[:SIZE].count("aabb"[RANK]) > 1 else set()
    agree(expected <= names <= {"world on one host", "world across hosts"}, f"{names}")
    found = mpi.metrics()
    calls = [each["seconds"] for collectives in found["calls"].values() for each in collectives.values()]
    agree.equal(found["seconds"], sum(calls))
    for each in found["steps"].get("world across hosts", {}).values():  # whose clocks differ
        agree.equal((each["waited"], each["moved"]), (0, 0), f"{found}")
    mpi.stop()
    if was_running:
        mpi.start()


@pytest.mark.parametrize("hosts", ["abcd", "aabb"])
def test_the_comparison_between_hosts_measures_the_wait_for_a_late_rank(agree, hosts):
    """By the fast path, through Python, in a comparison before the steps of a longer call, and before a call of MPI."""
    if len(set(hosts[:SIZE])) == 1:
        pytest.skip("needs two hosts")
    was_running = mpi.is_started()
    mpi.stop()
    mpi.start(config=dataclasses.replace(Config.from_environment(), host_name=hosts[RANK]))
    short, long = torch.ones(3), torch.ones(100_000)
    for number, call in enumerate(
        (
            lambda comm: mpi.allreduce(short, comm=comm),
            lambda comm: mpi.allreduce_async(short, comm=comm).wait(),
            lambda comm: mpi.allreduce(long, comm=comm),
            lambda comm: mpi.allreduce(short, comm=comm, backend="mpi"),
        )
    ):
        comm = mpi.group(range(SIZE), name=f"late {number}")
        for _ in range(2):
            call(comm)
        before = mpi.metrics()["calls"][comm.intra.name]["allreduce"]
        alone = with_late_rank(partial(call, comm), comm)
        after = mpi.metrics()["calls"][comm.intra.name]["allreduce"]
        comm.free()
        found = {name: after[name] - before[name] for name in after}
        agree.equal(round(after["waited"] + after["moved"], 9), round(after["seconds"], 9), f"{number}")
        agree(found["waited"] > 0 and after["waited"] <= after["seconds"], f"{number}: {found}, {after}")
        # The rate of the processor's ticks, in which the fast path counts, is known better at each reading.
        agree(found["waited"] <= found["seconds"] * (1 + 1e-4), f"{number}: {found}")
        if RANK != 0:
            agree(found["waited"] >= alone, f"{number}: {found}, {alone}")
    mpi.stop()
    if was_running:
        mpi.start()


class Writer:
    """The scalars of each name, with their steps."""

    def __init__(self):
        self.values = {}

    def add_scalar(self, name, value, step):
        self.values.setdefault(name, []).append((step, value))


OF_CALLS = ("seconds/calls", "seconds/waited", "seconds/moved", "bytes/calls", "stalls")


def sums_of_calls() -> dict[str, float]:
    found = mpi.metrics()
    numbers = [each for calls in found["calls"].values() for each in calls.values()]
    steps = [each for calls in found["steps"].values() for each in calls.values()]
    waited, moved = (sum(each[name] for each in numbers + steps) for name in ("waited", "moved"))
    sums = found["seconds"], waited, moved, sum(each["bytes"] for each in numbers), found["stalls"]
    return dict(zip(OF_CALLS, sums, strict=True))


def train_with(target) -> list[dict[str, float]]:
    """Train with one late rank; return the sums over the calls of this rank before the first and after each update."""
    engine, sums = AllReduceSGDEngine(progress=False), []
    engine.add(TensorBoard(target))
    engine.hooks.on_start.append(lambda state: sums.append(sums_of_calls()))
    engine.hooks.on_update.append(lambda state: sums.append(sums_of_calls()))
    engine.hooks.on_forward.append(lambda state: time.sleep(0.02 * (RANK == SIZE - 1)))
    batches = [(torch.ones(2, 3), torch.ones(2, 1)) for _ in range(4)]
    engine.train(network=torch.nn.Linear(3, 1), criterion=torch.nn.MSELoss(), iterator=batches, lr=0.1)
    return sums


@pytest.mark.usefixtures("world")
def test_tensorboard_gets_the_calls_of_each_update_on_rank_0_only(agree):
    writer = Writer()
    sums = train_with(writer)
    agree.equal(bool(writer.values), RANK == 0)
    for name, values in writer.values.items():
        agree.equal([step for step, _ in values], [1, 2, 3, 4], name)
    if RANK == 0:
        for name in OF_CALLS:
            added = [after[name] - before[name] for before, after in pairwise(sums)]
            for (_, value), expected, total in zip(writer.values[name], added, sums[1:], strict=True):
                # The rate of the processor's ticks is known better at each reading, which moves the whole sum.
                agree(abs(value - expected) <= 1e-4 * total[name], f"{name}: {value}, {expected} of {total[name]}")
        agree(all(value >= 16 for _, value in writer.values["bytes/calls"]), f"{writer.values}")
        agree(all(value > 0 for _, value in writer.values["seconds/calls"]), f"{writer.values}")
        agree(SIZE == 1 or all(value > 0 for _, value in writer.values["seconds/waited"]), f"{writer.values}")


@pytest.mark.usefixtures("world")
def test_tensorboard_gets_bytes_and_staleness_of_updates_with_servers(agree):
    network, engine, writer, lasts, moved = torch.nn.Linear(3, 1), SGDEngine(progress=False), Writer(), [], []
    with ps.DownpourUpdate(network, lr=0.1, update_frequency=1, init_delay=0, name="dense") as update:
        engine.hooks.on_start.append(lambda state: moved.append(update.bytes_sent + update.bytes_received))
        engine.hooks.on_update.append(lambda state: update.update())
        engine.add(TensorBoard(writer))
        engine.hooks.on_update.append(lambda state: lasts.append((state.t, update.staleness.last)))
        engine.hooks.on_update.append(lambda state: moved.append(update.bytes_sent + update.bytes_received))
        batches = [(torch.ones(2, 3), torch.ones(2, 1)) for _ in range(8)]
        engine.train(network=network, criterion=torch.nn.MSELoss(), iterator=batches, lr=0.1)
    known = [(step, last) for step, last in lasts if last == last]
    agree(len(known) > 2, f"{lasts}")
    agree.equal(writer.values.get("staleness/dense", []), known if RANK == 0 else [])
    added = [after - before for before, after in pairwise(moved)]
    agree.equal(writer.values.get("bytes/dense", []), list(enumerate(added, 1)) if RANK == 0 else [])
    agree(sum(added) > 0, f"{added}")
