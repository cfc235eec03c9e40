"""To a user of torch.distributed: errors raise on the caller and name the cause, and the job ends or goes on."""

from __future__ import annotations

import pytest

any_mpi = pytest.mark.any_mpi
# The watchdog runs twice a second by default, for which these tests would wait.
QUICK = {"TORCHMPI_VERBOSE": "0", "TORCHMPI_WATCHDOG_PERIOD_SECONDS": "0.05"}

START = """
import os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
import torchmpi.distributed
torchmpi.distributed.register()
dist.init_process_group("torchmpi")
rank, size = dist.get_rank(), dist.get_world_size()
ones = torch.ones(3)
dist.barrier()
if rank == 0:
    open(__file__ + ".running", "w").close()  # launchers lose unread output when a rank dies
dist.barrier()

NO_ERROR = "nothing was raised"

def error_of(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return NO_ERROR

def report(name, good, *details):
    sys.stdout.write(f"{name} is {'right' if good else f'wrong on rank {rank}: {details}'}\\n")
    sys.stdout.flush()
"""


def all_right(result, cases: int, ranks: int) -> None:
    assert "wrong" not in result.stdout and result.returncode == 0, result.output
    assert result.stdout.count(" is right") == cases * ranks, result.output


@pytest.fixture
def failing(job, tmp_path):
    """``failing("code", n=3)``: the result of a job that fails after START."""

    def run(code: str, *, n: int = 3):
        result = job(n, START + code, env=QUICK)
        assert result.returncode != 0, result.output
        assert (tmp_path / "job.py.running").exists(), result.output
        return result

    return run


@any_mpi
def test_a_mismatch_of_two_threads_names_them(failing):
    """Regression: the hint was a call under `if rank == ...`."""
    code = """
def log():
    for _ in range(200):
        if rank:
            time.sleep(0.002)
        dist.all_reduce(torch.ones(7))

threading.Thread(target=log, name="logger").start()
for _ in range(10000):
    dist.all_reduce(ones)
"""
    result = failing(code, n=2)
    assert "Several threads of this rank are in calls (MainThread, logger)" in result.stderr, result.output
    assert "a group of its own: dist.new_group()" in result.stderr


# --- the end of a job -------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_rank_that_raises_ends_the_job_with_its_traceback(failing):
    """torch installs an exception hook at each init; the other ranks would wait for half an hour."""
    code = """
dist.destroy_process_group()
dist.init_process_group("torchmpi")
if rank == 1: raise ValueError("no such file")
dist.all_reduce(ones)
"""
    result = failing(code, n=2)
    assert result.stderr.count("Traceback") == 1, result.output
    assert result.stderr.count("ValueError: no such file") == 1, result.output
    assert "rank 1 of 2 failed" in result.stderr and "job.py" in result.stderr, result.output


@any_mpi
def test_a_rank_whose_call_was_aborted_lets_the_aborting_rank_report(failing):
    """Regression: it ended the job before a slower rank could print the reason.

    Here the call of rank 0 times out, which its message says; rank 2 can only report that rank 0 aborted the call.
    """
    code = """
from torchmpi.supervision import failure
failure._OUTPUT_SECONDS = 100.0  # for which the others wait; on a busy machine, rank 0 may need more than a second
group = dist.new_group(timeout=timedelta(seconds=0.5 if rank == 0 else 100))
if rank == 1:
    time.sleep(100)
try:
    dist.all_reduce(ones, group=group)
except RuntimeError:
    time.sleep(0.2 if rank == 0 else 0)
    raise
"""
    result = failing(code)
    assert "rank 0 of 3 failed" in result.stderr and "rank 0 has aborted it" not in result.stderr, result.output
    assert "StallError" in result.stderr and "rank 1, after" in result.stderr, result.output


def test_leaving_with_unmatched_work_ends_the_job(failing):
    result = failing("if rank == 1: work = dist.all_reduce(ones, async_op=True)\nelse: dist.barrier()", n=2)
    assert "allreduce(float32 [3], sum)" in result.stderr and "barrier()" in result.stderr, result.output


@any_mpi
def test_an_interrupt_in_a_wait_ends_the_job(failing):
    code = """
import traceback
def interrupt(main):
    while "work.wait()" not in "".join(traceback.format_stack(sys._current_frames()[main])): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
work = dist.all_reduce(ones, async_op=True) if rank == 0 else None
if rank == 0:
    threading.Thread(target=interrupt, args=(threading.get_ident(),)).start()
    work.wait()
time.sleep(100)
"""
    result = failing(code, n=2)
    assert result.stderr.count("KeyboardInterrupt") >= 1 and "work.wait()" in result.stderr, result.output


# --- mismatched calls -------------------------------------------------------------------------------------------------

MISMATCHES = """
two, many = torch.ones(2), 300000
CASES = {
    "verb": (lambda g: dist.barrier(g), lambda g: dist.all_reduce(ones, group=g)),
    "shape": (lambda g: dist.all_reduce(two, group=g), lambda g: dist.all_reduce(ones, group=g)),
    "long shape": (
        lambda g: dist.all_reduce(torch.ones(many), group=g), lambda g: dist.all_reduce(torch.ones(many + 1), group=g),
    ),
    "dtype": (lambda g: dist.all_reduce(ones.int(), group=g), lambda g: dist.all_reduce(ones, group=g)),
    "operation": (
        lambda g: dist.all_reduce(ones, dist.ReduceOp.MAX, group=g), lambda g: dist.all_reduce(ones, group=g),
    ),
    "root": (lambda g: dist.broadcast(ones, 1, group=g), lambda g: dist.broadcast(ones, 0, group=g)),
    "asynchronous": (
        lambda g: dist.all_reduce(two, group=g, async_op=True).wait(),
        lambda g: dist.all_reduce(ones, group=g, async_op=True).wait(),
    ),
    "future": (
        lambda g: dist.all_reduce(two, group=g, async_op=True).get_future().wait(),
        lambda g: dist.all_reduce(ones, group=g, async_op=True).get_future().wait(),
    ),
    "one asynchronous": (
        lambda g: dist.all_reduce(two, group=g), lambda g: dist.all_reduce(ones, group=g, async_op=True).wait(),
    ),
    "gather": (
        lambda g: dist.gather(two, group=g),
        lambda g: dist.gather(ones, [ones] * size if rank == 0 else None, group=g),
    ),
    "all_gather": (
        lambda g: dist.all_gather([two] * size, two, group=g), lambda g: dist.all_gather([ones] * size, ones, group=g),
    ),
    "lengths of all_to_all": (
        lambda g: dist.all_to_all([torch.empty(1) for _ in range(size)], [torch.ones(1) for _ in range(size)], group=g),
        lambda g: dist.all_to_all([torch.empty(2) for _ in range(size)], [torch.ones(2) for _ in range(size)], group=g),
    ),
    "scattered": (
        lambda g: dist.scatter(torch.empty(2), None, group=g),
        lambda g: dist.scatter(torch.empty(3), [ones] * size if rank == 0 else None, group=g),
    ),
    "shape of sparse": (
        lambda g: dist.all_reduce(torch.ones(9).to_sparse(), group=g),
        lambda g: dist.all_reduce(torch.ones(2).to_sparse(), group=g),
    ),
    "lists of reduce_scatter": (
        lambda g: dist.reduce_scatter(torch.empty(2), [torch.ones(4), torch.ones(2), torch.ones(1)], group=g),
        lambda g: dist.reduce_scatter(torch.empty((2, 4, 1)[rank]), [torch.ones(n) for n in (2, 4, 1)], group=g),
    ),
    "lists of all_reduce_coalesced": (
        lambda g: dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)], group=g),
        lambda g: dist.all_reduce_coalesced([torch.ones(3), torch.ones(2)], group=g),
    ),
    "dtype of the scattered tensors": (
        lambda g: dist.scatter(torch.empty(3).int(), None, group=g),
        lambda g: dist.scatter(torch.empty(3), [ones] * size if rank == 0 else None, group=g),
    ),
}
for name, (first, second) in CASES.items():
    group = dist.new_group(timeout=timedelta(seconds=20))
    raised = error_of(lambda: (first if rank == 1 else second)(group))
    good = "Mismatch" in raised or "made different calls" in raised
    dist.barrier()
    total = torch.ones(5)
    dist.all_reduce(total, group=group)
    report(name, good and total.tolist() == [float(size)] * 5, raised, total)
"""


@any_mpi
def test_calls_that_differ_raise_on_all_ranks(job):
    """The next call on that group returns the correct result."""
    result = job(3, START + MISMATCHES, env=QUICK)
    all_right(result, 17, 3)


# --- missing ranks ----------------------------------------------------------------------------------------------------

MISSING = """
from torchmpi.distributed import monitored_barrier

def case(name, early, expected="at {file}", late=None):
    # The last rank arrives when the others have aborted; `late` is its call, which raises too.
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    dist.barrier()
    if rank < size - 1:
        while not store.add(f"rendezvous {rendezvous.number}", 0):  # the last rank is there
            time.sleep(0.01)
        raised = error_of(lambda: early(group))
        wanted = [text.format(file=__file__, last=size - 1) for text in expected.split("|")]
        good = all(text in raised for text in wanted) or "has aborted it" in raised
    rendezvous()  # the last rank has arrived
    if rank == size - 1:
        raised = error_of(lambda: (late or early)(group)) if late is not False else ""
        good = late is False or NO_ERROR != raised
    dist.barrier()
    report(name, good, raised)

def rendezvous():
    # By the store: no call of torchmpi's, in which the watchdog would find the missing rank.
    number = rendezvous.number
    rendezvous.number += 1
    if store.add(f"rendezvous {number}", 1) == size:
        store.set(f"met {number}", "1")
    store.wait([f"met {number}"])
rendezvous.number, store = 0, dist.distributed_c10d._get_default_store()

case("all_reduce", lambda g: dist.all_reduce(ones, group=g), "StallError|rank {last}, after|in rendezvous")
case("asynchronous", lambda g: dist.all_reduce(ones, group=g, async_op=True).wait(), "StallError|rank {last}, after")
case("future", lambda g: dist.all_reduce(ones, group=g, async_op=True).get_future().wait(), "rank {last}, after")
case("broadcast", lambda g: dist.broadcast(ones, size - 1, group=g), "StallError|rank {last}, after")
case("barrier with a limit", lambda g: dist.barrier(g, timeout=timedelta(seconds=0.3)), "StallError|0.3 s|rank {last}")
case("recv", lambda g: dist.recv(torch.ones(3), size - 1, group=g), "StallError|recv(float32 [3]) from rank 2", False)
case("monitored_barrier", lambda g: monitored_barrier(g, timedelta(seconds=0.5)), "StallError|ank 0", False)

# A timeout of wait(): the call continues and succeeds.
group = dist.new_group()
dist.barrier()
if rank == size - 1:
    rendezvous()
work = dist.all_reduce(ones, group=group, async_op=True)
raised = error_of(lambda: work.wait(timedelta(seconds=0.2))) if rank < size - 1 else "StallError"
if rank < size - 1:
    rendezvous()
work.wait()
report("wait with a limit", "StallError" in raised and ones.tolist() == [float(size)] * 3, raised, ones)
"""


@any_mpi
def test_a_missing_rank_is_named(job):
    """The late rank gets an error too, and no data of a call that the others have aborted."""
    result = job(3, START + MISSING, env=QUICK)
    all_right(result, 8, 3)


AFTERWARDS = """
group = dist.new_group(timeout=timedelta(seconds=4))
target = torch.zeros(3)
dist.barrier()
if rank == 0:
    raised = error_of(lambda: dist.recv(torch.ones(3), 1, group=group))
dist.barrier()
if rank == 1:
    for number in (7.0, 8.0):
        dist.send(torch.full((3,), number), 0, group=group)
if rank == 0:
    dist.recv(target, 1, group=group)
dist.barrier()
report("the message after one that was not sent", rank or (target[0] == 7 and "StallError" in raised), target)
if rank == 0:
    dist.recv(target, 1, group=group)

from torchmpi.distributed import monitored_barrier
group = dist.new_group()
first = second = ""
if rank == 0:
    first = error_of(lambda: monitored_barrier(group, timedelta(seconds=0.3)))
dist.barrier()
if rank == 1:
    error_of(lambda: monitored_barrier(group, timedelta(seconds=0.1)))
dist.barrier()
if rank == 0:
    second = error_of(lambda: monitored_barrier(group, timedelta(seconds=0.3)))
dist.barrier()
good = rank or ("rank 1" in first.lower() and "rank 1" in second.lower())
report("an arrival at a barrier that has timed out", good, first, second)

# Rejected on one rank only, which is then at another call than the others: no rank may get data of a failed call.
group = dist.new_group(timeout=timedelta(seconds=1))
raised = error_of(lambda: dist.all_gather([ones] * (size - (rank == 1)), ones, group=group))
ended_well = []
for number in range(4):
    tensor = torch.full((3,), 10.0 * number + rank)
    if error_of(lambda: dist.all_reduce(tensor, group=group)) == NO_ERROR:  # other errors may quote this line
        ended_well.append(tensor.tolist())
everywhere = [None] * size
dist.all_gather_object(everywhere, ended_well)
report("calls after a refusal on one rank", "Error" in raised and everywhere[0] == everywhere[1], raised, everywhere)
"""


@any_mpi
def test_calls_after_a_failed_call_do_not_receive_its_data(job):
    result = job(2, START + AFTERWARDS, env=QUICK)
    all_right(result, 3, 2)


# --- forks ------------------------------------------------------------------------------------------------------------

FORK = """
dist.all_reduce(ones)
dist.broadcast(ones, 0)
dist.all_reduce(ones, async_op=True).wait()
sys.stdout.flush()
child = os.fork()
if child == 0:
    peer, row = (rank + 1) % size, torch.ones(size)
    calls = {
        "all_reduce": lambda: dist.all_reduce(ones),
        "asynchronous": lambda: dist.all_reduce(ones, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(ones, 0), "barrier": lambda: dist.barrier(),
        "all_gather": lambda: dist.all_gather([ones] * size, ones),
        "all_to_all": lambda: dist.all_to_all_single(row, row.clone()),
        "objects": lambda: dist.broadcast_object_list([1]),
        "send": lambda: dist.send(ones, peer), "irecv": lambda: dist.irecv(ones, peer).wait(timedelta(seconds=1)),
        "monitored_barrier": lambda: torchmpi.distributed.monitored_barrier(timeout=timedelta(seconds=1)),
    }
    raised = {name: error_of(call) for name, call in calls.items()}
    wrong = {name: text for name, text in raised.items() if "forked" not in text}
    report("forked child", not wrong, wrong)
    dist.destroy_process_group()
    os._exit(0)
status = os.waitpid(child, 0)[1]
total = torch.ones(3)
dist.all_reduce(total)
report("parent", status == 0 and total.tolist() == [float(size)] * 3, status, total)

data = torch.utils.data.TensorDataset(torch.arange(64.0))
sampler = torch.utils.data.DistributedSampler(data)
total = torch.zeros(())
for (batch,) in torch.utils.data.DataLoader(data, 8, sampler=sampler, num_workers=2, multiprocessing_context="fork"):
    part = batch.sum()
    dist.all_reduce(part)
    total += part
report("loader", total.item() == sum(range(64)), total)
"""


@any_mpi
def test_a_forked_process_is_no_rank(job):
    result = job(2, START + FORK, env=QUICK)
    all_right(result, 3, 2)


@any_mpi
@pytest.mark.parametrize("n", (1, 2))
def test_the_report_explains_an_error_of_torch_in_a_job_of_ours(job, n):
    """`DistributedSampler(dataset)` of torch, and the remedy that the report names."""
    code = """
import torch
import torchmpi as mpi
mpi.start()
{more}
sampler = torch.utils.data.DistributedSampler(range(8))
print("sampled", sorted(mpi.allgather_object(list(sampler))), flush=True)
mpi.stop()
"""
    failed = job(n, code.format(more=""), env=QUICK)
    assert failed.returncode != 0 and failed.stderr.count("Default process group has not been") == 1, failed.output
    remedy = "torch.distributed.init_process_group('torchmpi')"
    assert failed.stderr.count(remedy) == 1, failed.output
    assert "torchmpi.nn.DistributedSampler(dataset)" in failed.stderr, failed.output
    right = job(n, code.format(more=remedy), env=QUICK)
    assert right.returncode == 0 and right.stdout.count("sampled") == n, right.output
