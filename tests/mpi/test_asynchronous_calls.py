"""To a user of asynchronous collectives: they keep their order, whichever thread runs them, and end unawaited too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.functions_entered import python_calls
from helpers.interrupts import fails_or_is_interrupted

import torchmpi as mpi
from torchmpi import errors
from torchmpi.shared_memory import fast_path

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


def has_machine_code() -> bool:
    group = mpi.communicator(0).intra
    return fast_path.allreduce is not fast_path._not_built and group.shared is not None and not group.is_strict


def calls_of_this_rank() -> dict[str, Callable[[str], Any]]:
    """Return calls of all collectives with both forms, each given the end of their names."""
    rank, size = mpi.rank(), mpi.size()
    part, rows, all_rows = torch.empty(2), torch.arange(2.0 * size) + rank, torch.empty(2 * size)
    mine = torch.tensor([1.0, rank])
    is_root = rank == size - 1

    def of(name: str, *arguments: Any, **options: Any) -> Callable[[str], Any]:
        return lambda form: getattr(mpi, f"{name}{form}")(*arguments, **options)

    return {
        "allreduce": lambda form: getattr(mpi, f"allreduce{form}")(mine.clone(), op="max"),
        "allreduce into": of("allreduce", mine, torch.empty(2)),
        "broadcast": lambda form: getattr(mpi, f"broadcast{form}")(mine.clone(), size - 1),
        "broadcast into": of("broadcast", mine, size - 1, torch.empty(2)),
        "reduce": lambda form: getattr(mpi, f"reduce{form}")(mine.clone(), size - 1),
        "allgather": of("allgather", mine, all_rows),
        "gather": of("gather", mine, size - 1, all_rows if is_root else None),
        "scatter": of("scatter", rows if is_root else None, size - 1, part),
        "reduce_scatter": of("reduce_scatter", rows, part),
        "alltoall": of("alltoall", rows, all_rows),
        "allgather with a new result": of("allgather", mine),
        "gather with a new result": of("gather", mine, size - 1),
        "reduce_scatter with a new result": of("reduce_scatter", rows),
        "number": of("allreduce", 1.5 + rank),
        "list": lambda form: getattr(mpi, f"allreduce_many{form}")([mine.clone(), rows.clone()], op="max"),
    }


def copied(result: Any) -> torch.Tensor | None:
    """Return a result as one tensor that no later call changes."""
    if isinstance(result, list):
        return torch.cat(result)
    return None if result is None else torch.as_tensor(result).clone()


def test_asynchronous_calls_equal_blocking_ones(agree):
    """The first and the later ones, waited for at once, and with several under way."""
    calls = calls_of_this_rank()
    expected = {name: copied(call("")) for name, call in calls.items()}
    for turn in range(4):
        for name, call in calls.items():
            agree.equal(copied(call("_async").wait()), expected[name], f"{name}, turn {turn}")
    handles = {name: call("_async") for name, call in calls.items()}
    agree(not [name for name in calls if name not in expected])
    for name in ("allreduce", "broadcast", "reduce", "number", "list"):  # others share memory for their results
        agree.equal(copied(handles[name].wait()), expected[name], f"{name} of several")
    for handle in handles.values():
        handle.wait()


def test_a_scatter_into_memory_with_gaps(agree):
    """Regression: the ranks that pass nothing took the plan of plain memory, and wrote to the gaps."""
    rank, size = mpi.rank(), mpi.size()
    rows, room = torch.arange(4.0 * size), torch.zeros(4, 2)
    for turn in range(3):
        for out in (torch.zeros(4), room[:, 0]):
            part = mpi.scatter_async(rows if rank == 0 else None, 0, out).wait()
            agree.equal(part.clone(), rows[4 * rank : 4 * rank + 4], f"turn {turn}")
    agree.equal(room[:, 1], torch.zeros(4), "the gaps")


def test_a_table_with_two_rules(agree):
    """The asynchronous form has a plan of its own then, whatever blocking calls have cached."""
    rank, size = mpi.rank(), mpi.size()
    rows, part = torch.arange(2.0 * size), torch.zeros(2)
    group = mpi.communicator(0).intra
    for collective, call in {
        "scatter": lambda form: getattr(mpi, f"scatter{form}")(rows if rank == 0 else None, 0, part),
        "allreduce": lambda form: getattr(mpi, f"allreduce{form}")(part.fill_(1.0)),
    }.items():
        for _ in range(3):
            call("")
            call("_async").wait()
        mpi.collective_selector.set(collective, "mpi", mode="async")
        try:
            for turn in range(3):
                call("")
                call("_async").wait()
                expected = rows[2 * rank : 2 * rank + 2] if collective == "scatter" else torch.full((2,), float(size))
                agree.equal(part, expected, f"{collective}, turn {turn}")
        finally:
            mpi.collective_selector.reset()
    agree(group.call_log.current is None, "a call is open")


def test_a_thread_that_waits_runs_calls_in_machine_code(agree):
    """Also those before its own."""
    if not has_machine_code():
        pytest.skip("no fast path, or no shared memory, or calls are compared by messages")
    calls = calls_of_this_rank()
    for _ in range(5):  # the helper is not needed any more
        for call in calls.values():
            call("")
            call("_async").wait()
    for name, call in calls.items():
        for number in (1, 4):
            handles, functions = [call("_async") for _ in range(number)], []
            for handle in handles:
                functions += python_calls(handle.wait)[0]
            names = [code.co_name for code in functions]
            # A preempted thread may leave a call to the helper.
            agree("perform" not in names, f"{name}, {number} under way: {names}")


def test_a_blocking_call_behind_others_is_machine_code(agree):
    if not has_machine_code():
        pytest.skip("no fast path, or no shared memory, or calls are compared by messages")
    tensor, rows, names = torch.ones(3), torch.ones(mpi.size()), []
    for _ in range(20):
        handles = [mpi.allreduce_async(tensor.fill_(1.0)) for _ in range(2)]
        functions, (summed, moved) = python_calls(lambda: (mpi.allreduce(torch.ones(5)), mpi.alltoall(rows)))
        names.append([code.co_name for code in functions])
        agree.equal(handles[1].wait(), torch.full((3,), float(mpi.size() ** 2)))
        agree.equal(summed, torch.full((5,), float(mpi.size())))
        agree.equal(moved, rows)
    # A thread that ends a call at this moment makes the queue look busy for longer.
    agree(sum("perform" not in each for each in names) > len(names) // 2, str(names))


def test_calls_of_both_forms_are_recorded_alike(agree):
    group = mpi.communicator(0).intra
    calls = calls_of_this_rank()
    for form in ("", "_async"):
        for _ in range(3):
            for call in calls.values():
                result = call(form)
                if form:
                    result.wait()
    recorded, counts = {}, {}
    for form in ("", "_async"):
        first, before = group.call_log.seq, group.context.call_counts.read()
        results = [call(form) for call in calls.values()]
        if form:
            for handle in results:
                handle.wait()
        entries = [group.call_log.ring.read(first + 1 + number) for number in range(len(calls))]
        recorded[form] = [(entry.code, entry.shape, entry.end >= entry.begin > 0) for entry in entries]
        after = group.context.call_counts.read()
        counts[form] = {
            key: (count.calls - before[key].calls, count.bytes - before[key].bytes)
            for key, count in after.items()
            if key in before and count.calls != before[key].calls
        }
    agree.equal(recorded["_async"], recorded[""], "entries of the flight record")
    agree.equal(counts["_async"], counts[""], "counts")


def test_blocking_calls_end_after_the_calls_before_them(agree):
    size = mpi.size()
    tensor, results = torch.ones(3), []
    for _ in range(50):
        handles = [mpi.allreduce_async(tensor, op="max") for _ in range(3)]
        results.append(float(mpi.allreduce(tensor)[0]))
        for handle in handles:
            handle.wait()
        tensor.fill_(1.0)
    agree.equal(results, [float(size)] * 50)


@pytest.mark.parametrize("watch", ("nothing", "done", "when_done", "a limit"))
def test_a_repeated_call_for_which_nobody_waits_ends(agree, watch):
    tensor = torch.ones(4)
    for _ in range(10):
        mpi.allreduce_async(tensor, op="max").wait()
    ended = threading.Event()
    handle = mpi.allreduce_async(tensor)
    handle.when_done(ended.set, soon=False)
    if watch == "done":
        while not handle.done():
            time.sleep(0.0002)
    elif watch == "when_done":
        handle.when_done(lambda: None)
    elif watch == "a limit":
        handle.wait(60)
    agree(ended.wait(60), "it has not ended")
    agree.equal(tensor, torch.full((4,), float(mpi.size())))


def test_calls_of_a_callback_come_first(agree):
    """In machine code too: the thread runs a call of the queue."""
    size, seen = mpi.size(), []
    inner, outer, last = torch.ones(2), torch.ones(3), torch.ones(4)

    def call_back() -> None:
        seen.append(float(mpi.allreduce(inner.fill_(1.0))[0]))
        seen.append(float(mpi.allreduce_async(inner.fill_(2.0)).wait()[0]))

    for _ in range(20):
        with mpi.communicator(0).intra.call_queue.run_lock:  # the callback is attached before the call can begin
            first = mpi.allreduce_async(outer.fill_(1.0))
            first.when_done(call_back, soon=False)
        second = mpi.allreduce_async(last.fill_(1.0))
        agree.equal(second.wait(), torch.full((4,), float(size)))
        first.wait()
    agree.equal(seen, [float(size), 2.0 * size] * 20)


def test_two_communicators_in_different_orders(agree):
    """Each rank waits first for another one; the other call ends beside it."""
    other = mpi.communicator(mpi.push_communicator("crossing"))
    mpi.set_communicator(0)
    size, one, two = mpi.size(), torch.ones(2), torch.ones(3)
    for turn in range(30):
        begin = [partial(mpi.allreduce_async, one.fill_(1.0)), partial(mpi.allreduce_async, two.fill_(1.0), comm=other)]
        handles = [each() for each in (begin if (mpi.rank() + turn) % 2 else reversed(begin))]
        for handle in handles:
            handle.wait()
        agree.equal((float(one[0]), float(two[0])), (float(size),) * 2, f"turn {turn}")


def test_a_chosen_communicator_is_that_of_the_begin(agree):
    """A repeated call that is waited for elsewhere does not run on another communicator."""
    other = mpi.communicator(mpi.push_communicator("chosen"))
    mpi.set_communicator(0)
    tensor = torch.ones(2)
    for _ in range(3):
        for comm in (None, other):
            mpi.allreduce(tensor, comm=comm, op="max")
            mpi.allreduce_async(tensor, comm=comm, op="max").wait()
    default, chosen = mpi.communicator(0).intra.call_log, other.intra.call_log
    before = default.seq, chosen.seq
    with mpi.use(other):
        inside = mpi.allreduce_async(tensor, op="max")
    inside.wait()
    agree.equal((default.seq, chosen.seq), (before[0], before[1] + 1), "begun with a chosen one")
    outside = mpi.allreduce_async(tensor, op="max")
    with mpi.use(other):
        outside.wait()
    agree.equal((default.seq, chosen.seq), (before[0] + 1, before[1] + 1), "waited for with a chosen one")


def test_arguments_are_refused_at_the_call(agree):
    tensor = torch.ones(2, 2)
    for _ in range(3):
        mpi.allreduce_async(tensor).wait()
        mpi.allreduce_async(tensor, torch.empty(2, 2)).wait()
    agree.raises(errors.ArgumentError, lambda: mpi.allreduce_async(tensor, torch.empty(3)), "out has shape")
    agree.raises(errors.DtypeError, lambda: mpi.allreduce_async([1.0]), "not a tensor")
    agree.raises(errors.ArgumentError, lambda: mpi.reduce_async(tensor, mpi.size()), "root=")
    agree.raises(errors.ArgumentError, lambda: mpi.allreduce_async(tensor, op="median"), "median")
    agree.equal(mpi.allreduce_async(tensor.fill_(1.0)).wait(), torch.full((2, 2), float(mpi.size())))


def test_a_call_that_is_over_holds_no_tensor(agree):
    """Nor does the order of calls while the next one is under way."""
    import weakref

    for _ in range(3):
        mpi.allgather_async(torch.ones(2), torch.empty(2 * mpi.size())).wait()
    source = torch.ones(2)
    seen = weakref.ref(source)
    handle = mpi.allgather_async(source, torch.empty(2 * mpi.size()))
    del source
    handle.wait()
    agree(seen() is None, "the tensor lives")


@pytest.mark.min_ranks(2)
def test_mismatches_are_raised_by_wait(agree):
    for _ in range(4):
        mpi.allreduce_async(torch.ones(4)).wait()
        mpi.allreduce_async(torch.ones(5)).wait()
    handle, after = mpi.allreduce_async(torch.ones(5 if mpi.rank() == 0 else 4)), mpi.allreduce_async(torch.ones(3))
    with pytest.raises(errors.MismatchError) as raised:
        handle.wait()
    agree("allreduce(float32 [5], sum)" in str(raised.value) or "aborted it" in str(raised.value), str(raised.value))
    agree.equal(after.wait(), torch.full((3,), float(mpi.size())), "the call after it")


@pytest.mark.min_ranks(2)
def test_an_interrupt_of_a_wait_is_raised_and_the_queue_goes_on(agree):
    """Ctrl-C while the waiting thread runs the call, on a communicator of its own: rank 0 calls something else."""
    own = mpi.communicator(mpi.push_communicator("interrupted"))
    mpi.set_communicator(0)
    for _ in range(4):
        mpi.allreduce_async(torch.ones(4), comm=own).wait()
        mpi.allreduce_async(torch.ones(5), comm=own).wait()
    tensor = torch.ones(5 if mpi.rank() == 0 else 4)
    fails_or_is_interrupted(own, lambda: mpi.allreduce_async(tensor, comm=own).wait())
    agree(not own.intra.call_queue.run_lock.locked(), "the run lock is held")
    agree.equal((own.intra.call_log.current, own.intra.call_queue.pending), (None, 0), "after the call")
