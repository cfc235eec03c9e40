"""To whoever counts microseconds: which calls are machine code, with the results of the way through Python."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import contract
from helpers.functions_entered import python_calls
from helpers.interrupts import fails_or_is_interrupted
from helpers.joint import try_together
from helpers.outcomes import error_of
from helpers.shm_rig import BY_PYTHON, start, stopped
from hypothesis import strategies
from mpi4py import MPI
from torch.overrides import TorchFunctionMode

import torchmpi as mpi
from torchmpi import errors
from torchmpi.shared_memory import fast_path
from torchmpi.shared_memory.fast_path import Name

__all__ = ["stopped"]

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
SHAPES = ((), (1,), (5,), (3, 4), (0, 3), (2, 1, 7), (9000,))


@pytest.fixture(autouse=True)
def _need_fast_paths() -> None:
    if fast_path.allreduce is fast_path._not_built:
        pytest.skip("this Python or this PyTorch has no fast path")
    if mpi.collective_availability()["shm", "allreduce", "cpu", "sync"] != "available":
        pytest.skip("no shared memory here")


def entered(collective: str, *arguments: Any) -> bool:
    """Make a call by its fast path; return whether the fast path made the call."""
    return getattr(fast_path, collective)(*arguments, None, None) is not None


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 3 + rank).to(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_collectives_in_place_equal_those_through_python(agree, shape, dtype):
    rank, root = mpi.rank(), mpi.size() - 1
    for _ in range(2):  # the first one is cached
        mpi.allreduce(values(shape, dtype, rank))
        mpi.broadcast(values(shape, dtype, rank), root)
        mpi.reduce(values(shape, dtype, rank), root)
    quick, plain = values(shape, dtype, rank), values(shape, dtype, rank)
    went = entered("allreduce", quick, None, "sum")
    mpi.allreduce(plain, backend=BY_PYTHON)
    sent = values(shape, dtype, rank)
    went_too = entered("broadcast", sent, None, root)
    reduced, as_before = values(shape, dtype, rank), values(shape, dtype, rank)
    went_as_well = entered("reduce", reduced, None, fast_path.joint_key("sum", root))
    mpi.reduce(as_before, root, backend=BY_PYTHON)
    agree(went and went_too and went_as_well, "not by the fast path")
    agree.bits(reduced, as_before, "reduce")
    agree.bits(quick, plain, "allreduce")
    agree.bits(sent, values(shape, dtype, root), "broadcast")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES[:-1], (5000,)], ids=str)
def test_collectives_into_a_target_equal_those_in_place(agree, shape, dtype):
    rank, root = mpi.rank(), mpi.size() - 1
    source, total = values(shape, dtype, rank), mpi.allreduce(values(shape, dtype, rank), backend=BY_PYTHON)
    for _ in range(2):  # the first one is cached
        mpi.allreduce(source, torch.empty_like(source))
        mpi.broadcast(source, root, torch.empty_like(source))
    summed, sent = torch.empty_like(source), torch.empty_like(source)
    version = summed._version
    went = entered("allreduce_into", source, summed, "sum") and entered("broadcast_into", source, sent, root)
    agree(went, "not by the fast path")
    agree.bits(summed, total, "allreduce")
    agree.bits(sent, values(shape, dtype, root), "broadcast")
    agree.bits(source, values(shape, dtype, rank), "source")
    agree(summed._version > version, "autograd does not notice the write")
    with torch.inference_mode():
        summed = torch.empty_like(source)
    agree.bits(mpi.allreduce(source, summed), total, "into a tensor of inference mode")


def test_targets_that_python_must_check(agree):
    memory = torch.arange(8.0)
    for _ in range(2):
        mpi.allreduce(memory[:4].clone(), torch.empty(4))
    for source, out in (
        (memory[:4], memory[2:6]),  # overlapping
        (memory[:4], torch.empty(8)[::2]),
        (memory[:4], torch.empty(2, 2)),
        (memory[:4], torch.empty(5)),
        (memory[:4], torch.empty(4, dtype=torch.float64)),
        (torch.ones((1 << 18) + 1), torch.empty((1 << 18) + 1)),  # too long to be copied while other threads wait
    ):
        agree(not entered("allreduce_into", source, out, "sum"), f"{source.shape} into {out.shape} by the fast path")
    out = memory[2:6]
    mpi.allreduce(memory[:4], out)
    agree.equal(out, torch.arange(4.0) * mpi.size(), "overlapping")


def test_barriers_use_the_fast_path(agree):
    own = mpi.communicator(mpi.push_communicator("all"))
    mpi.set_communicator(0)
    for _ in range(2):
        mpi.barrier()
        mpi.barrier(own)
    went = [fast_path.barrier(None, None, None, comm, None) is not None for comm in (None, own)]
    agree.equal(went, [True, True], "not by the fast path")
    if mpi.size() > 1:
        with pytest.raises(errors.MismatchError) as raised:
            if mpi.rank() == 0:
                mpi.barrier()
            else:
                mpi.allreduce(torch.ones(3))
        agree("barrier()" in str(raised.value) or "aborted it" in str(raised.value), str(raised.value))
        with pytest.raises(errors.MismatchError):
            mpi.allreduce(torch.ones(4 if mpi.rank() else 5), torch.empty(4 if mpi.rank() else 5))
    handle = mpi.allreduce_async(torch.ones(1 << 20))
    mpi.barrier()
    agree(handle.done(), "the barrier did not wait for the call before it")
    mpi.barrier()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape and 0 not in shape], ids=str)
def test_collectives_with_a_target_equal_those_through_python(agree, shape):
    rank, size = mpi.rank(), mpi.size()
    source = values(shape, torch.float32, rank)
    rows = values((size * shape[0] + 1, *shape[1:]), torch.float32, rank)
    everything = torch.zeros(size * shape[0], *shape[1:])
    part = torch.zeros(shape[0] + (rank == 0), *shape[1:])
    parts = torch.zeros(size * part.shape[0], *shape[1:])
    for _ in range(2):
        mpi.allgather(source, everything)
        mpi.reduce_scatter(rows, part)
        mpi.alltoall(rows, parts)
    went = [
        entered("allgather", source, everything.zero_(), 0),
        entered("reduce_scatter", rows, part.zero_(), "sum"),
        entered("alltoall", rows, parts.zero_(), 0),
    ]
    agree.equal(went, [True] * 3, "by the fast path")
    agree.equal(everything, mpi.allgather(source, backend=BY_PYTHON), "allgather")
    agree.equal(part, mpi.reduce_scatter(rows, backend=BY_PYTHON), "reduce_scatter")
    agree.equal(parts, mpi.alltoall(rows, backend=BY_PYTHON), "alltoall")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.uint8), ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape and 0 not in shape], ids=str)
def test_collectives_with_a_root_equal_those_through_python(agree, shape, dtype):
    rank, size = mpi.rank(), mpi.size()
    source = values(shape, dtype, rank)
    rows = values((size * shape[0] + size - 1, *shape[1:]), dtype, rank + 1)
    everything = torch.zeros(size * shape[0], *shape[1:], dtype=dtype)
    part = torch.zeros(shape[0] + (rank < size - 1), *shape[1:], dtype=dtype)
    for root in range(size):
        gathered, scattered = (everything, rows) if rank == root else (None, None)
        collect, divide = ("gather", "scatter") if rank == root else ("give", "receive")
        for _ in range(2):
            mpi.gather(source, root, gathered)
            mpi.scatter(scattered, root, part)
        version = source._version
        went = [
            entered(collect, source, None if gathered is None else gathered.zero_(), root),
            entered(divide, scattered, part.zero_(), root),
        ]
        agree.equal(went, [True] * 2, "by the fast path")
        agree(mpi.gather(source, root, gathered) is gathered and mpi.scatter(scattered, root, part) is part, "returned")
        agree.equal(source._version, version, "what is only read is as it was for autograd")
        agree.equal(gathered, mpi.gather(source, root, backend=BY_PYTHON), "gather")
        agree.equal(part, mpi.scatter(scattered, root, backend=BY_PYTHON), "scatter")


def test_ranks_with_and_without_a_target(agree):
    """One takes the fast path, the other the path through Python."""
    rank, size = mpi.rank(), mpi.size()
    for numel in (1, 5, 5000):
        rows, part = torch.arange(float(size * numel)), torch.zeros(numel)
        expected = rows[rank * numel : (rank + 1) * numel]
        for turn in range(2 * size):
            out = part.zero_() if turn < 2 or turn % size != rank else None
            result = mpi.scatter(rows if rank == 0 else None, 0, out)
            agree.equal(result, expected, f"scatter {numel}, turn {turn}")
            total = torch.zeros(size * numel) if turn < 2 or turn % 2 else None
            result = mpi.gather(expected, 0, total if rank == 0 else None)
            agree.equal(result, rows if rank == 0 else None, f"gather {numel}, turn {turn}")


def test_targets_with_a_wrong_number_of_rows_are_refused(agree):
    rank, size = mpi.rank(), mpi.size()
    fitting = torch.zeros(3, 2)
    for _ in range(3):
        mpi.scatter(torch.ones(3 * size, 2) if rank == 0 else None, 0, fitting)
    wrong = (torch.ones(3 * size, 3), torch.ones(2 * size, 2), torch.ones(6 * size), torch.ones(3 * size, 2).double())
    for rows in wrong:
        message = ""
        try:
            out = fitting.zero_()
            mpi.scatter(*((rows, 0, out.to(rows.dtype)) if rank == 0 else (None, 0, out)))
        except (errors.ArgumentError, errors.DtypeError) as error:
            message = str(error)
        is_right = rank == 0 and rows.dtype is torch.float64  # it has seen to that
        agree(is_right or "out" in message, f"{list(rows.shape)} {rows.dtype}: {message!r}")
        agree.equal(fitting, torch.zeros(3, 2), "unchanged")
        again = mpi.scatter(torch.ones(3 * size, 2) if rank == 0 else None, 0, fitting)
        agree.equal(again, torch.ones(3, 2), "and the next call works")


def test_scatter_does_not_cache_tensors_of_other_ranks(agree):
    """Regression: rows were written past the end of a target that was allocated for the rows of an ignored tensor."""
    rank, size = mpi.rank(), mpi.size()
    memory = torch.zeros(40)
    for _ in range(3):
        mpi.scatter(torch.ones(10 * size), 0, memory[:10])  # all ranks pass a tensor; only that of rank 0 is used
    memory.fill_(-1.0)
    message = error_of(mpi.scatter, torch.ones((20 if rank == 0 else 10) * size), 0, memory[: 20 if rank == 0 else 10])
    agree("out" in message or rank == 0, f"refused: {message!r}")
    agree(bool((memory[20 if rank == 0 else 10 :] == -1.0).all()), "written past the end")
    agree.equal(mpi.scatter(torch.ones(10 * size), 0, memory[:10]), torch.ones(10), "and the next call works")


def test_a_scatter_into_a_conjugated_view(agree):
    rank, size = mpi.rank(), mpi.size()
    rows = torch.full((2 * size,), 1 + 2j)
    for turn in range(3):
        out = torch.zeros(2, dtype=torch.complex64).conj()
        mpi.scatter(rows if rank == 0 else None, 0, out)
        agree.equal(out.resolve_conj(), torch.full((2,), 1 + 2j), f"turn {turn}")


def test_a_target_of_a_dtype_without_a_plan_is_refused_after_the_call(agree):
    rank, size = mpi.rank(), mpi.size()
    for turn in range(3):
        out = torch.empty(2) if rank == 0 else torch.empty(2, dtype=torch.float8_e8m0fnu)
        message = error_of(mpi.scatter, torch.ones(2 * size) if rank == 0 else None, 0, out)
        agree(bool(message) == (rank != 0), f"turn {turn}: {message!r}")
        agree.equal(mpi.allreduce(torch.ones(2)), torch.full((2,), float(size)), "all ranks agree")


def test_a_gather_of_different_lengths(agree):
    rank, size = mpi.rank(), mpi.size()
    total = torch.zeros(3 * size)
    for _ in range(3):
        mpi.gather(torch.ones(3), 0, total if rank == 0 else None)
    expected = torch.cat([torch.full((3 + (other == 0) - (other == size - 1),), float(other)) for other in range(size)])
    mine = torch.full((3 + (rank == 0) - (rank == size - 1),), float(rank))
    result = mpi.gather(mine, 0, total[: len(expected)] if rank == 0 else None)
    agree.equal(result, expected if rank == 0 else None, "gather")


def test_tensors_that_are_not_plain_use_python(agree):
    mpi.stop()
    mpi.start()  # only the calls made here are cached
    rank, size = mpi.rank(), mpi.size()
    ones = torch.ones(4)
    everything = torch.empty(4 * size)
    for _ in range(2):
        mpi.allreduce(ones)
        mpi.allgather(ones, everything)
        mpi.broadcast(ones, 0)
        mpi.reduce(ones, 0)
        mpi.alltoall(torch.ones(size), torch.empty(size))
        for root in range(size):
            mpi.gather(ones, root, everything if rank == root else None)
            mpi.scatter(everything if rank == root else None, root, torch.ones(4))
    complex_number = torch.tensor([1j])
    negative = complex_number.conj().imag  # contiguous, since it has one element
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)  # as FSDP does with gathered parameters
    cases = {
        "negative": ("allreduce", negative, None, "sum"),
        "no memory": ("allreduce", freed, None, "sum"),
        "a length that is not its own hash": ("allreduce", torch.empty(0, 1 << 62), None, "sum"),
        "parameter": ("allreduce", torch.nn.Parameter(torch.ones(4)), None, "sum"),
        "another dtype": ("allreduce", torch.ones(4, dtype=torch.complex64), None, "sum"),
        "sparse": ("allreduce", ones.to_sparse(), None, "sum"),
        "meta": ("allreduce", torch.ones(4, device="meta"), None, "sum"),
        "another operation": ("allreduce", torch.ones(4), None, "prod"),
        "out": ("allreduce", torch.ones(4), torch.ones(4), "sum"),
        "a number": ("allreduce", 3.0, None, "sum"),
        "a bool for a root": ("broadcast", torch.ones(4), None, True),
        "another root": ("reduce", torch.ones(4), None, fast_path.joint_key("sum", size)),
        "a bool with an operation": ("reduce", torch.ones(4), None, fast_path.joint_key("sum", False)),
        "no out": ("allgather", ones, None, 0),
        "out of another shape": ("allgather", ones, torch.empty(4 * size + 1), 0),
        "out of another dtype": ("allgather", ones, torch.empty(4 * size, dtype=torch.float64), 0),
        "out over the source": ("allgather", everything[1:5], everything, 0),
        "strided out": ("allgather", ones, torch.empty(4 * size, 2)[:, 0], 0),
        "nothing in a row": ("alltoall", torch.empty(size, 0), torch.empty(size, 0), 0),
        "out with a row too many": ("alltoall", torch.ones(size), torch.empty(size + 1), 0),
        "gather without out on the root": ("give", ones, None, rank),
        "gather with out elsewhere": ("gather", ones, everything, (rank + 1) % size if size > 1 else size),
        "None from the root": ("receive", None, ones, rank),
        "rows from another": ("scatter", everything, ones, (rank + 1) % size if size > 1 else size),
        "to be written in another dtype": ("receive", None, ones.double(), 0),
    }
    went = [name for name, arguments in cases.items() if entered(*arguments)]
    result = mpi.allreduce(negative, torch.empty(1))
    with pytest.raises(errors.ArgumentError, match="no memory"):
        mpi.allreduce(freed)
    agree.equal(went, [], "by the fast path")
    agree.equal(result, torch.full((1,), -1.0 * size), "negative")
    agree.equal(rank, mpi.rank(), "rank")


def test_autograd_detects_writes(agree):
    x = torch.ones(3, requires_grad=True)
    saved = x * 2
    square = saved * saved  # which keeps `saved` for its backward
    version = saved._version
    for _ in range(3):
        mpi.allreduce(saved.detach())
    with torch.inference_mode():
        unversioned = mpi.allreduce(torch.ones(3))
    try:
        square.sum().backward()
        problem = "a stale value was used"
    except RuntimeError as error:
        problem = "" if "modified by an inplace operation" in str(error) else str(error)
    agree(saved._version >= version + 3, f"version {saved._version}, it was {version}")
    agree.equal(problem, "", "backward")
    agree.equal(unversioned, torch.full((3,), float(mpi.size())), "a tensor without a version")


def test_another_communicator_and_another_table(agree):
    """A block, a thread, another default communicator and another selection table invalidate cached calls."""
    size = mpi.size()
    alone = mpi.push_communicator(str(mpi.rank()))
    mpi.set_communicator(0)
    try:
        for _ in range(3):
            mpi.allreduce(torch.ones(2))
        with mpi.use(alone):
            went, inside = entered("allreduce", torch.ones(2), None, "sum"), mpi.allreduce(torch.ones(2))
        outside = mpi.allreduce(torch.ones(2))
        mpi.set_communicator(alone)
        invalidate, default = not entered("allreduce", torch.ones(2), None, "sum"), mpi.allreduce(torch.ones(2))
        mpi.set_communicator(0)
        for _ in range(2):
            mpi.allreduce(torch.ones(2))
        mpi.collective_selector.set("allreduce", "mpi", span="host")
        invalidate = invalidate and not entered("allreduce", torch.ones(2), None, "sum")
        by_mpi = mpi.allreduce(torch.ones(2))
    finally:
        mpi.collective_selector.reset()
        mpi.set_communicator(0)
    agree(not went, "the fast path ignored use()")
    agree(invalidate, "the fast path ignored another default or table")
    agree.equal(inside, torch.ones(2), "inside use()")
    agree.equal(default, torch.ones(2), "on another default")
    for result in (outside, by_mpi):
        agree.equal(result, torch.full((2,), float(size)), "on the world")


def test_rows_that_differ_in_number(agree):
    """Some ranks detect different numbers of rows in the kernel; the result is then computed through Python."""
    rank, size = mpi.rank(), mpi.size()
    even = torch.empty(2 * size)
    for _ in range(2):
        mpi.allgather(torch.ones(2), even)
    rows = torch.full((3 if rank == 0 and size > 1 else 2,), float(rank))
    expected = torch.cat([torch.full((3 if other == 0 and size > 1 else 2,), float(other)) for other in range(size)])
    fits = torch.empty_like(expected)
    mpi.allgather(rows, fits)
    if size > 1:
        with pytest.raises(errors.ArgumentError, match="out has shape"):
            mpi.allgather(rows, torch.empty(rows.numel() * size))
    sent = [torch.arange(float(2 * size + (other == 0))) + 100 * other for other in range(size)]
    received = torch.cat([contract.rows(theirs, rank, size) for theirs in sent])
    room = torch.empty_like(received)
    for _ in range(2):
        mpi.alltoall(torch.ones(2 * size), torch.empty(2 * size))
    mpi.alltoall(sent[rank], room)
    after = mpi.allreduce(torch.ones(1))
    agree.equal(fits, expected, "allgather")
    agree.equal(room, received, "alltoall")
    agree.equal(after, torch.full((1,), float(size)), "the call after it")


@pytest.mark.min_ranks(2)
def test_mismatches_raise(agree):
    for _ in range(2):
        mpi.allreduce(torch.ones(4))
        mpi.allreduce(torch.ones(5))
    with pytest.raises(errors.MismatchError) as raised:
        mpi.allreduce(torch.ones(5 if mpi.rank() == 0 else 4))
    mpi.barrier()
    after = mpi.allreduce(torch.ones(4))
    agree("allreduce(float32 [5], sum)" in str(raised.value) or "aborted it" in str(raised.value), str(raised.value))
    agree.equal(after, torch.full((4,), float(mpi.size())), "the call after it")


def test_pending_calls_run_first(agree):
    big = torch.ones(1 << 20)
    for _ in range(2):
        mpi.allreduce(torch.ones(1))
    handles, results = [], []
    for _ in range(5):
        handles.append(mpi.allreduce_async(big))
        results.append(float(mpi.allreduce(torch.ones(1))))
    for handle in handles:
        handle.wait()
    agree.equal(results, [float(mpi.size())] * 5, "between asynchronous ones")
    agree.equal(float(big[0]), float(mpi.size() ** 5), "asynchronous")


def test_two_threads_share_a_communicator(agree):
    """The machine code enters without waiting; the path through Python waits until the machine code has left."""
    results: dict[str, list[float]] = {"fast": [], "python": []}

    def call(name: str, backend: str | None) -> None:
        # Ranks may differ in which of two threads runs first: both make the same calls.
        for _ in range(200):
            results[name].append(float(mpi.allreduce(torch.ones(3), backend=backend)[0]))

    for _ in range(2):
        mpi.allreduce(torch.ones(3))
    threads = [threading.Thread(target=call, args=each) for each in (("fast", None), ("python", "shm"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    agree.equal(results, {name: [float(mpi.size())] * 200 for name in results}, "from two threads")


@pytest.mark.min_ranks(2)
def test_the_watchdog_reports_a_call_of_the_fast_path(agree):
    group = mpi.communicator().intra
    for _ in range(2):
        mpi.allreduce(torch.ones(6))
    seen: list[Any] = []

    def look() -> None:
        limit = time.monotonic() + 60
        while mpi.rank() and not seen and time.monotonic() < limit:
            current = group.call_log.current
            if current is not None:
                seen.append(current)
        MPI.COMM_WORLD.Barrier()

    mpi.barrier()
    watcher = threading.Thread(target=look)
    watcher.start()
    if mpi.rank() == 0:  # the other ranks wait for this rank until they have been seen
        watcher.join()
    mpi.allreduce(torch.ones(6))
    seq = group.call_log.seq
    watcher.join()
    mpi.barrier()
    if mpi.rank() != 0:
        agree.equal([(number, shape) for number, _, shape in seen], [(seq, (6,))], "while it waited")
    agree.equal(group.call_log.current, None, "after all calls")


@pytest.mark.min_ranks(2)
def test_an_interrupt_leaves_the_queue_usable(agree):
    """Ctrl-C while the kernel waits, which then ends without a result, before Python has taken over the call."""
    # On a communicator of its own, since rank 0 calls something else.
    level = mpi.push_communicator("all")
    own = mpi.communicator(level)
    mpi.set_communicator(0)
    for _ in range(2):
        mpi.allreduce(torch.ones(4), comm=own)
        mpi.allreduce(torch.ones(5), comm=own)
    # The signal arrives while the other ranks wait for rank 0, which then makes another call.
    fails_or_is_interrupted(own, lambda: mpi.allreduce(torch.ones(5 if mpi.rank() == 0 else 4), comm=own))
    agree(not own.intra.call_queue.run_lock.locked(), "the run lock is held")
    agree.equal(own.intra.call_log.current, None, "after the call")


def test_results_are_the_same_with_the_fast_path_disabled(agree, stopped):
    """The setting ``fast_path``, also after a run in which calls were cached, and before another one."""
    root = 0
    for enabled in (True, False, True):
        start(fast_path=enabled)
        rank, size = mpi.rank(), mpi.size()
        source, everything, part = values((6,), torch.float32, rank), torch.zeros(6 * size), torch.zeros(2)
        parts = torch.zeros(2 * size)
        rows = values((2 * size,), torch.float32, rank)
        for _ in range(3):
            agree.bits(mpi.allreduce(source.clone()), mpi.allreduce(source.clone(), backend="mpi"), "allreduce")
            agree.bits(mpi.broadcast(source.clone(), root), values((6,), torch.float32, root), "broadcast")
            agree.bits(mpi.allgather(source, everything), mpi.allgather(source, backend="mpi"), "allgather")
            agree.bits(mpi.reduce_scatter(rows, part), mpi.reduce_scatter(rows, backend="mpi"), "reduce_scatter")
            agree.bits(mpi.alltoall(rows, parts), mpi.alltoall(rows, backend="mpi"), "alltoall")
            agree.bits(mpi.reduce(source.clone(), root), mpi.reduce(source.clone(), root, backend="mpi"), "reduce")
        agree.equal(entered("allreduce", source.clone(), None, "sum"), enabled, "whether calls are cached")
        mpi.stop()


class _InterruptedMode(TorchFunctionMode):
    """A mode during whose first function Ctrl-C is pressed."""

    is_over = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not self.is_over:
            self.is_over = True
            signal.raise_signal(signal.SIGINT)
        return func(*args, **(kwargs or {}))


def test_an_interrupt_in_a_mode_of_torch_is_raised(agree):
    """Regression: the fast path asks a tensor for its negative bit, and swallowed a Ctrl-C in Python code of a mode."""
    tensor = torch.ones(2)
    for _ in range(3):
        mpi.allreduce(torch.ones(2))
    raised = None
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _InterruptedMode():
            mpi.allreduce(tensor)
    except KeyboardInterrupt as error:
        raised = type(error)
    finally:
        signal.signal(signal.SIGINT, previous)
    agree.equal(raised, KeyboardInterrupt, "the interrupt")
    agree.equal(tensor, torch.ones(2), "the tensor of the call that was not made")
    agree.equal(mpi.allreduce(torch.ones(2)), torch.full((2,), float(mpi.size())), "the next call")


NUMBERS = (
    strategies.booleans(),
    strategies.integers(-(1 << 60), 1 << 60),
    strategies.floats(allow_nan=False),
    strategies.complex_numbers(allow_nan=False, allow_infinity=False, max_magnitude=1e100),
)


def test_numbers_by_the_fast_path(agree):
    rank, size = mpi.rank(), mpi.size()

    def check(numbers):
        own, root = numbers[rank], size - 1
        total = numbers[0]
        for number in numbers[1:size]:
            total += number
        found = [
            (mpi.allreduce(own), +total),
            (mpi.reduce(own, root), +total if rank == root else +own),
            (mpi.broadcast(own, root), numbers[root]),
            (mpi.allgather(own), numbers[:size]),
            (mpi.gather(own, root), numbers[:size] if rank == root else None),
        ]
        for actual, expected in found:
            assert (str(actual), type(actual)) == (str(expected), type(expected))

    try_together(check, strategies.one_of(*[strategies.lists(each, min_size=3, max_size=3) for each in NUMBERS]))
    went = [
        fast_path.function_for("allreduce", Name("sum", dtype)) is not None for dtype in (torch.int64, torch.float64)
    ]
    went.append(fast_path.function_for("allgather_made", Name(0, torch.float64)) is not None)
    agree.equal(went, [True] * 3)


@pytest.mark.min_ranks(2)
def test_a_number_is_sent_by_the_backend_that_is_given(agree):
    for _ in range(2):  # the first one is cached
        mpi.allreduce(1.5)
    functions, total = python_calls(partial(mpi.allreduce, 1.5, backend="mpi"))
    agree.equal(total, 1.5 * mpi.size())
    agree("mpi.py" in {Path(code.co_filename).name for code in functions}, [code.co_name for code in functions])


def test_a_number_within_a_call_with_a_number(agree):
    """A callback that runs in the thread that waits: the outer call has its number in memory of its own."""
    seen = []
    mpi.allreduce(1.0)
    handle = mpi.allreduce_async(torch.ones(3))
    handle.when_done(lambda: seen.append(mpi.allreduce(3.0)))
    agree.equal(mpi.allreduce(2.0), 2.0 * mpi.size())
    handle.wait()
    agree.equal(seen, [3.0 * mpi.size()])


def test_calls_with_a_backend(agree):
    """Those of one that machine code runs; the same name as another object is left to Python."""
    tensor, rows = torch.ones(3), torch.ones(2, 3)
    for _ in range(2):
        mpi.allreduce(tensor.fill_(1), backend="shm")
        mpi.allgather(rows, backend="shm")
        mpi.allreduce_many([tensor, rows.clone()], backend="shm")
    names, _ = ("shm", "p2p", BY_PYTHON), tensor.fill_(1)
    went = [fast_path.allreduce(tensor, None, "sum", None, name) is not None for name in names]
    agree.equal(went, [True, False, False], "allreduce")
    agree.equal(tensor, torch.full((3,), float(mpi.size())), "result")
    lists = [fast_path.allreduce_many([tensor, rows.clone()], None, "sum", None, each) for each in ("shm", BY_PYTHON)]
    agree.equal([each is None for each in lists], [False, True], "lists")
    agree(fast_path.function_for("allgather_made", Name(0, torch.float32, None, "shm")) is not None, "allgather")
    find = fast_path.finders["allreduce", True, False][0]
    agree(find(tensor, None, "sum", None, "shm") is not None, "asynchronous")
    gathered = mpi.allgather_async(rows, backend="shm").wait()
    agree.equal(gathered, torch.ones(2 * mpi.size(), 3), "asynchronous allgather")


@pytest.mark.parametrize("backend", ("mpi", "p2p"))
def test_python_runs_calls_that_machine_code_compares(agree, backend):
    rank, size = mpi.rank(), mpi.size()
    rows, ones = torch.arange(2.0 * size) + rank, torch.ones(3)
    for _ in range(3):
        agree.equal(mpi.allreduce(ones.clone(), backend=backend), torch.full((3,), float(size)), "allreduce")
        agree.equal(mpi.allreduce(ones, torch.zeros(3), backend=backend), torch.full((3,), float(size)), "into another")
        agree.equal(mpi.allgather(rows[: 1 + rank], backend=backend).numel(), size * (size + 1) // 2, "uneven rows")
        agree.equal(mpi.reduce_scatter(rows, backend=backend)[0], 2.0 * rank * size + size * (size - 1) / 2, "part")
        agree.equal(mpi.allreduce(torch.ones(6)[::2], backend=backend), torch.full((3,), float(size)), "gaps")
    went = fast_path.function_for("allreduce", Name("sum", torch.float32, None, backend)) is not None
    agree(went or size == 1, "not by the fast path")
    if size > 1:
        with pytest.raises(errors.MismatchError):  # on all ranks, before the library has the call
            mpi.allreduce(torch.ones(3 + rank), backend=backend)
    agree.equal(mpi.allreduce(ones.clone(), backend=backend), torch.full((3,), float(size)), "after it")


def test_results_in_memory_made_for_them(agree):
    """Without `out`; also if the ranks differ in the number of rows, which only the call finds."""
    rank, size = mpi.rank(), mpi.size()
    for _ in range(2):
        for lengths in ([2] * size, [2 + r for r in range(size)], [2 * r for r in range(size)]):
            parts = [contract.values((length, 3), torch.float32, r) for r, length in enumerate(lengths)]
            agree.equal(mpi.allgather(parts[rank]), torch.cat(parts), f"allgather {lengths}")
            gathered = mpi.gather(parts[rank], size - 1)
            agree.equal(gathered, torch.cat(parts) if rank == size - 1 else None, f"gather {lengths}")
            rows = [contract.values((length * size + 1, 3), torch.float32, r) for r, length in enumerate(lengths)]
            expected = [torch.tensor_split(part, size)[rank] for part in rows]
            agree.equal(mpi.alltoall(rows[rank]), torch.cat(expected), f"alltoall {lengths}")
        rows = [contract.values((2 * size + 1, 3), torch.float32, r) for r in range(size)]
        part = torch.tensor_split(contract.reduced(rows, "sum"), size)[rank]
        agree.equal(mpi.reduce_scatter(rows[rank]), part, "reduce_scatter")
    names = [("allgather_made", 0), ("alltoall_made", 0), ("reduce_scatter_made", "sum")]
    went = [fast_path.function_for(which, Name(key, torch.float32)) is not None for which, key in names]
    agree.equal(went, [True] * 3, "not by the fast path")


LENGTHS = (0, 1, 3, 15, 16, 17, 64, 1000, 5000, 70_000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lists_equal_those_through_python(agree, dtype):
    """Also if one rank takes the fast path and the other one does not."""
    rank, size, went = mpi.rank(), mpi.size(), []
    for op in ("sum", "max"):
        for _ in range(2):  # the first one is cached
            mpi.allreduce_many([values((3,), dtype, rank), values((4,), dtype, rank)], op=op)

    def check(example):
        shapes, is_sum, python_rank = example
        op = "sum" if is_sum else "max"  # the same object as above, unlike one from another rank
        inputs = [[values(shape, dtype, r + seed) for seed, shape in enumerate(shapes)] for r in range(size)]
        expected = [contract.reduced(list(parts), op) for parts in zip(*inputs, strict=True)]
        tensors = inputs[rank]
        versions = [tensor._version for tensor in tensors]
        if rank == python_rank:
            mpi.allreduce_many(tensors, op=op, backend=BY_PYTHON)
        else:
            went.append(fast_path.allreduce_many(tensors, None, op, None, None) is tensors)
        assert all(tensor._version == before + 1 for tensor, before in zip(tensors, versions, strict=True))
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert contract.same_bits(tensor, wanted)

    dims = strategies.tuples(strategies.sampled_from(LENGTHS)) | strategies.sampled_from(SHAPES)
    lists = strategies.lists(dims, min_size=2, max_size=40).filter(lambda shapes: any(0 not in each for each in shapes))
    ranks = strategies.sampled_from((-1, 0, 1))
    try_together(check, strategies.tuples(lists, strategies.booleans(), ranks), max_examples=15)
    agree(all(went), "not by the fast path")


def test_lists_that_share_memory_are_left_to_python(agree):
    """The ranges in any order, some of them below or above all that come before them."""
    memory = torch.zeros(64)
    for _ in range(2):
        mpi.allreduce_many([memory[:2].clone(), memory[2:4].clone()])

    def check(ranges):
        tensors = [memory[begin : begin + length] for begin, length in ranges]
        taken = sorted((begin, begin + length) for begin, length in ranges if length)
        overlaps = any(end > begin for (_, end), (begin, _) in itertools.pairwise(taken))
        went = fast_path.allreduce_many(tensors, None, "sum", None, None) is not None
        assert went == (bool(taken) and not overlaps)

    ranges = strategies.tuples(strategies.integers(0, 55), strategies.integers(0, 8))
    try_together(check, strategies.lists(ranges, min_size=2, max_size=12), max_examples=150)


def test_lists_that_python_must_reduce(agree):
    tensors = [torch.ones(3), torch.ones(4)]
    for _ in range(2):
        mpi.allreduce_many(tensors)
    for given in (
        [torch.ones(3)],
        [],
        [torch.ones(3), torch.ones(4, dtype=torch.float64)],
        [torch.ones(3), torch.ones(8)[::2]],
        [torch.ones(3), torch.nn.Parameter(torch.ones(3))],
        [torch.ones(3), torch._neg_view(torch.ones(3))],
        [torch.ones(3), 2.0],
        tuple(tensors),
        [torch.ones(1) for _ in range(513)],
    ):
        agree(fast_path.allreduce_many(given, None, "sum", None, None) is None, f"{len(given)} by the fast path")
    agree(fast_path.allreduce_many(tensors, None, "sum", None, "mpi") is None, "another backend")
    many = mpi.allreduce_many([torch.ones(1) for _ in range(513)])
    agree(all(tensor.item() == mpi.size() for tensor in many), "a long list")


def test_lists_that_differ_are_refused(agree):
    for _ in range(2):
        mpi.allreduce_many([torch.ones(3), torch.ones(50_000)])
    if mpi.size() > 1:
        lengths = (3, 50_000) if mpi.rank() else (50_000, 3)
        with pytest.raises(errors.MismatchError, match="allreduce_many"):
            mpi.allreduce_many([torch.ones(length) for length in lengths])
    tensors = mpi.allreduce_many([torch.ones(3), torch.ones(50_000)])
    agree(all(bool((tensor == mpi.size()).all()) for tensor in tensors), "after it")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_with_gaps_are_packed(agree, dtype):
    rank, root, went = mpi.rank(), mpi.size() - 1, []
    for _ in range(2):
        mpi.allreduce(values((3,), dtype, rank))
        mpi.broadcast(values((3,), dtype, rank), root)
        mpi.reduce(values((3,), dtype, rank), root)

    def with_gaps(example, of_rank):
        lengths, steps, order = example
        whole = values(tuple(length * step for length, step in zip(lengths, steps, strict=True)), dtype, of_rank)
        return whole[tuple(slice(0, None, step) for step in steps)].permute(order)

    def check(example):
        inputs = [with_gaps(example, r) for r in range(mpi.size())]
        total = contract.reduced([each.contiguous() for each in inputs], "sum")
        summed, sent, reduced = (with_gaps(example, rank) for _ in range(3))
        version = summed._version
        went.append(entered("allreduce", summed, None, "sum"))
        went.append(entered("broadcast", sent, None, root))
        went.append(entered("reduce", reduced, None, fast_path.joint_key("sum", root)))
        assert summed._version == version + 1
        assert contract.same_bits(summed.contiguous(), total)
        assert contract.same_bits(sent.contiguous(), inputs[root].contiguous())
        assert contract.same_bits(reduced.contiguous(), total if rank == root else inputs[rank].contiguous())

    num_dims = strategies.shared(strategies.integers(1, 4))
    example = num_dims.flatmap(
        lambda dims: strategies.tuples(
            strategies.lists(strategies.integers(1, (19, 19, 11, 5)[dims - 1]), min_size=dims, max_size=dims),
            strategies.lists(strategies.integers(1, 3), min_size=dims, max_size=dims),
            strategies.permutations(range(dims)),
        )
    )
    try_together(check, example, max_examples=40)
    agree(all(went), "not by the fast path")


def test_a_call_with_gaps_is_cached(agree):
    own = mpi.group(range(mpi.size()))
    for _ in range(2):
        mpi.allreduce(torch.ones(8)[::2], comm=own)
    agree(fast_path.function_for("allreduce", Name("sum", torch.float32, own)) is not None, "not by the fast path")
    own.free()


def test_tensors_with_gaps_that_python_must_check(agree):
    for _ in range(2):
        mpi.allreduce(torch.ones(3))
    for tensor in (torch.ones(1).expand(4), torch.ones(1 << 20)[::2], torch.ones(0, 4)[:, ::2]):
        agree(not entered("allreduce", tensor, None, "sum"), f"{tuple(tensor.shape)} by the fast path")
    agree.raises(errors.ArgumentError, lambda: mpi.allreduce(torch.ones(1).expand(4)), "expanded")
    around = torch.zeros(8)
    mpi.allreduce(around[::2].fill_(1.0))
    agree.equal(around, torch.tensor([mpi.size(), 0.0] * 4), "what is between the elements")
    if mpi.size() > 1:
        with pytest.raises(errors.MismatchError):
            mpi.allreduce(torch.ones(8 + 2 * mpi.rank())[::2])
        strided = torch.ones(8)[::2]
        agree.equal(mpi.allreduce(strided), torch.full((4,), float(mpi.size())), "after it")


def test_a_freed_group_leaves_the_calls_of_others(agree):
    def known(comm):
        names = [("allreduce", Name("sum", torch.float32, comm)), ("barrier", Name(None, None, comm))]
        return [fast_path.function_for(*name) is not None for name in names]

    groups = [mpi.group(range(mpi.size())) for _ in range(3)]
    for comm in (groups[0], None, *groups[1:]):
        for dtype in (torch.float32, torch.float64):
            mpi.allreduce(torch.ones(3, dtype=dtype), comm=comm)
        mpi.barrier(comm)
    agree(all(map(all, map(known, (None, *groups)))), "not by the fast path")
    for number in (1, 0, 2):
        groups[number].free()
        agree(not any(known(groups[number])) and all(known(None)), f"after freeing {number}")
        for comm in (None, *(group for group in groups if not group.intra.call_queue.closed)):
            tensor = torch.ones(3)
            agree(fast_path.allreduce(tensor, None, "sum", comm, None) is tensor, f"lost after freeing {number}")
            agree.equal(tensor, torch.full((3,), float(mpi.size())))


def test_the_fast_path_needs_known_hashes(monkeypatch):
    assert fast_path.has_known_hashes()
    monkeypatch.setitem(fast_path._TUPLE_HASHES, (5,), 0)
    assert not fast_path.has_known_hashes()


def test_an_asynchronous_scatter_by_a_given_backend_or_into_gaps(agree):
    """Regression: ranks that receive used the default backend, and waited for the root; and wrote to wrong places."""
    rank, size = mpi.rank(), mpi.size()
    rows = torch.arange(2.0 * size)
    for out in (torch.zeros(2), torch.zeros(4)[::2]):
        for backend in (None, "mpi", None, "mpi"):
            mpi.scatter_async(rows if rank == 0 else None, out=out.zero_(), backend=backend).wait()
            agree.equal(out, rows[2 * rank : 2 * rank + 2], f"backend={backend}, stride {out.stride()}")
