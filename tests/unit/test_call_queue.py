"""To whoever waits for a call: the calls of a queue run once, in their order, and errors and interrupts arrive."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import sys
import threading
import time
import weakref
from collections import deque
from functools import partial

import pytest
import torch
from helpers.interrupts import interrupted

from torchmpi import errors
from torchmpi.communicators.call_queue import CallQueue, LeftToHelper
from torchmpi.communicators.handle import Handle, JoinedHandle
from torchmpi.shared_memory import memory_layout

ENTERED = memory_layout.LockFields.entered


def test_a_queue_runs_in_order_of_submission():
    call_queue, seen = CallQueue("test"), []
    handles = [call_queue.submit(lambda i=i: seen.append(i), "task") for i in range(100)]
    call_queue.run(lambda: seen.append("sync"))
    assert seen == [*range(100), "sync"]
    assert all(handle.done() for handle in handles)
    call_queue.close()


def test_a_synchronous_call_on_an_idle_queue_stays_in_its_thread():
    call_queue = CallQueue("test")
    assert call_queue.run(threading.get_ident) == threading.get_ident()
    assert call_queue.submit(threading.get_ident, "task").wait() != threading.get_ident()
    assert call_queue.run(threading.get_ident) == threading.get_ident()
    call_queue.close()


def test_a_thread_that_waits_runs_the_calls_before_its_own_in_their_order():
    call_queue, seen = CallQueue("test"), []
    with call_queue.run_lock:  # keeps the helper from a call until all are queued
        handles = [call_queue.submit(partial(seen.append, i), "call", in_any_thread=i != 2) for i in range(5)]
    handles[4].wait()
    assert seen == [0, 1, 2, 3, 4] and all(handle.done() for handle in handles)
    call_queue.close()


def test_calls_for_which_the_program_waits_at_once_need_no_other_thread():
    call_queue, here = CallQueue("test"), threading.get_ident()
    threads = [call_queue.submit(threading.get_ident, "call", in_any_thread=True).wait() for _ in range(200)]
    assert threads.count(here) > 100  # the helper may come first in some
    assert here not in [call_queue.submit(threading.get_ident, "task").wait() for _ in range(5)]
    call_queue.close()


def test_a_call_that_a_thread_which_waits_must_not_run_is_run_by_the_helper_before_the_next():
    call_queue, seen, here = CallQueue("test"), [], threading.get_ident()

    def call(number):
        if number % 2 and call_queue.is_run_by_waiter:
            raise LeftToHelper
        seen.append((number, threading.get_ident() == here))

    for turn in range(0, 200, 4):
        handles = [call_queue.submit(partial(call, turn + each), "call", in_any_thread=True) for each in range(4)]
        handles[3].wait()
        assert call_queue.pending == 0 and all(handle.done() for handle in handles)
    assert [number for number, _ in seen] == list(range(200))
    assert not any(is_here for number, is_here in seen if number % 2) and any(is_here for _, is_here in seen)
    handle = call_queue.submit(lambda: None, "call", in_any_thread=True)
    nested = []
    handle.when_done(lambda: nested.append(call_queue.is_run_by_waiter))
    handle.wait()
    call_queue.close()  # the helper may call back after wait() has returned here
    assert nested == [False]


def test_the_helper_leaves_the_calls_to_a_thread_that_waits():
    """It has begun the first one, and nobody has waited for the calls before."""
    call_queue, begun, release = CallQueue("test"), threading.Event(), threading.Event()

    def first():
        begun.set()
        release.wait(20)
        return threading.get_ident()

    def end_it():
        while not call_queue._waiting:
            time.sleep(0.001)
        release.set()

    handles = [call_queue.submit(first, "call", in_any_thread=True)]
    assert begun.wait(20)
    handles += [call_queue.submit(threading.get_ident, "call", in_any_thread=True) for _ in range(3)]
    thread = threading.Thread(target=end_it)
    thread.start()
    handles[2].wait()
    thread.join()
    threads = [handle.wait() for handle in handles]
    assert threads[0] != threading.get_ident() and threads[1:3] == [threading.get_ident()] * 2
    call_queue.close()


def test_a_call_of_a_thread_that_waits_elsewhere_is_run_by_the_helper():
    """The first thread waits for a call in a mode of torch, in which it runs none."""
    call_queue = CallQueue("test")
    with torch.inference_mode():
        for _ in range(5):
            assert call_queue.submit(threading.get_ident, "call", in_any_thread=True).wait() != threading.get_ident()
    call_queue.close()


class ChangingCalls(deque):
    """Calls of which another thread takes or adds one while this thread begins to look at them."""

    def __iter__(self):
        found = super().__iter__()
        self.append(None)
        self.pop()
        return found


def test_a_call_is_taken_while_a_waiting_thread_looks_at_the_head():
    """Regression: "RuntimeError: deque mutated during iteration" of wait(), on a busy machine."""
    call_queue = CallQueue("test")
    call_queue._entries = ChangingCalls()
    assert [call_queue.submit(lambda: 1, "call", in_any_thread=True).wait() for _ in range(20)] == [1] * 20
    call_queue.close()


def test_many_threads_take_the_calls_of_a_queue_one_by_one():
    call_queue, numbers, submitting, seen = CallQueue("test"), itertools.count(), threading.Lock(), []
    running, errors_seen, before = threading.Lock(), [], sys.getswitchinterval()

    def call(number):
        assert running.acquire(blocking=False)
        seen.append(number)
        running.release()
        return number

    def work(seed):
        generator = random.Random(seed)
        try:
            for _ in range(500):
                with submitting:
                    number = next(numbers)
                    in_any_thread = generator.random() < 0.7
                    handle = call_queue.submit(partial(call, number), "call", in_any_thread=in_any_thread)
                assert handle.wait(generator.choice((None, None, 30))) == number
        except BaseException as error:
            errors_seen.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not errors_seen and seen == list(range(2000))
    call_queue.close()


@pytest.mark.parametrize("watch", ("nothing", "done", "when_done", "a limit"))
def test_a_call_for_which_nobody_waits_ends(watch):
    """The helper looks for it, although the program has waited for all calls before."""
    call_queue, ended = CallQueue("test"), threading.Event()
    for _ in range(50):
        call_queue.submit(lambda: None, "call", in_any_thread=True).wait()
    handle = call_queue.submit(ended.set, "call", in_any_thread=True)
    if watch == "done":
        while not handle.done():
            time.sleep(0.0001)
    elif watch == "when_done":
        handle.when_done(lambda: None)
    elif watch == "a limit":
        handle.wait(timeout=20)
    assert ended.wait(20)
    call_queue.close()


def test_a_call_made_by_a_call_that_the_waiting_thread_runs_comes_first():
    call_queue, seen = CallQueue("test"), []

    def call():
        call_queue.submit(lambda: seen.append("inner"), "inner", in_any_thread=True).wait()
        call_queue.run(lambda: seen.append("synchronous"))
        seen.append("outer")

    for _ in range(10):
        handle = call_queue.submit(call, "outer", in_any_thread=True)
        last = call_queue.submit(lambda: seen.append("last"), "last", in_any_thread=True)
        last.wait()
        handle.wait()
    assert seen == ["inner", "synchronous", "outer", "last"] * 10
    call_queue.close()


def test_an_error_is_raised_by_wait_and_the_queue_continues():
    call_queue = CallQueue("test")
    handle = call_queue.submit(lambda: 1 / 0, "division")
    assert call_queue.submit(lambda: "next", "task").wait() == "next"
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            handle.wait()
    call_queue.close()


def test_a_closed_queue_refuses():
    call_queue = CallQueue("test")
    call_queue.close()
    with pytest.raises(errors.CommunicatorError, match="closed"):
        call_queue.submit(lambda: None, "task")


def test_a_nested_call_that_fails_is_not_kept():
    """Regression: the handle in `failed` kept a traceback, and through it the tensors of the call."""
    call_queue = CallQueue("test", threaded=False)
    with pytest.raises(ZeroDivisionError):
        call_queue.run(lambda: call_queue.run(lambda: 1 // 0))
    assert not call_queue.failed
    call_queue.close()
    with pytest.raises(errors.CommunicatorError, match="closed"):
        call_queue.run(lambda: None)


def test_a_call_submitted_while_the_queue_closes_is_refused_or_runs():
    """Regression: the call was queued behind the end of the queue, and its wait() never returned."""
    for _ in range(30):
        call_queue, handles = CallQueue("test"), []

        def submit(call_queue=call_queue, handles=handles):
            with contextlib.suppress(errors.CommunicatorError):
                while True:
                    handles.append(call_queue.submit(lambda: None, "task"))

        thread = threading.Thread(target=submit)
        thread.start()
        call_queue.close()
        thread.join()
        assert [handle.wait(timeout=10) for handle in handles] == [None] * len(handles)


def test_a_queue_without_its_thread_raises_and_goes_on(monkeypatch):
    """Regression: after "can't start new thread" all later calls waited for the thread, also those of stop()."""
    call_queue = CallQueue("test")

    def refused(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"):
            call_queue.submit(lambda: 1, "task")
    assert call_queue.pending == 0 and call_queue.run(threading.get_ident) == threading.get_ident()
    assert call_queue.submit(lambda: 2, "task").wait(timeout=10) == 2
    call_queue.close()


def test_a_worker_keeps_no_tensor_alive():
    import weakref

    call_queue, tensor = CallQueue("test"), torch.ones(3)
    reference = weakref.ref(tensor)
    call_queue.submit(lambda tensor=tensor: None, "task").wait()
    del tensor
    limit = time.monotonic() + 60
    while reference() is not None and time.monotonic() < limit:
        time.sleep(0.01)
    assert reference() is None
    call_queue.close()


def test_without_threads_a_queue_runs_at_submission():
    call_queue = CallQueue("test", threaded=False)
    handle = call_queue.submit(threading.get_ident, "task")
    assert handle.done() and handle.wait() == threading.get_ident()


def test_waiting_with_a_limit():
    handle = Handle("slow call")
    for timeout in (0.01, 0, -0.3, -1):
        with pytest.raises(errors.StallError, match="slow call"):
            handle.wait(timeout)
    handle.end(5)
    assert handle.wait(timeout=1) == handle.wait(timeout=math.inf) == 5 and handle.done()


def test_many_threads_may_wait_on_one_handle():
    handle, results = Handle(), []
    threads = [threading.Thread(target=lambda: results.append(handle.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    handle.end(1)
    for thread in threads:
        thread.join()
    assert results == [1] * 8


def test_a_callback_that_fails_is_logged_and_the_queue_continues(capsys):
    """Regression: the exception ended the worker thread, and later calls never ended."""
    call_queue, release = CallQueue("test"), threading.Event()
    handle = call_queue.submit(release.wait, "first")
    handle.when_done(lambda: 1 // 0)
    release.set()
    assert call_queue.submit(lambda: "next", "task").wait(timeout=10) == "next" and handle.wait() is True
    handle.when_done(lambda: {}["missing"])
    call_queue.close()
    logged = capsys.readouterr().err
    assert logged.count("first: a callback of when_done() failed:\nTraceback") == 2
    assert "ZeroDivisionError" in logged and "KeyError: 'missing'" in logged


def test_sys_exit_in_a_callback_is_left_to_the_hook_of_threads(monkeypatch):
    """Regression: without a hook that ends the job, all later calls waited for the thread, which had ended."""
    failures, release = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", failures.append)
    call_queue = CallQueue("test")
    call_queue.submit(release.wait, "first").when_done(sys.exit)
    release.set()
    assert call_queue.submit(lambda: "next", "task").wait(timeout=10) == "next"
    call_queue.close()
    assert [(failure.exc_type, failure.thread.name) for failure in failures] == [(SystemExit, "torchmpi test")]


def test_sys_exit_in_a_callback_ends_the_same_way_in_a_thread_that_waits(monkeypatch):
    failures, call_queue = [], CallQueue("test")
    monkeypatch.setattr(threading, "excepthook", failures.append)
    with call_queue.run_lock:
        call_queue.submit(lambda: None, "first", in_any_thread=True).when_done(sys.exit)
        last = call_queue.submit(lambda: "next", "task", in_any_thread=True)
    assert last.wait() == "next"
    call_queue.close()
    assert [(failure.exc_type, failure.thread.name) for failure in failures] == [(SystemExit, "torchmpi test")]


@pytest.mark.parametrize("entered", [0, 1])
@pytest.mark.parametrize("how", ["run", "wait", "acquire", "run with it"])
def test_an_interrupt_at_any_moment_leaves_no_lock_taken(how, entered):
    """Regression: a lock that had just been taken stayed taken, and the next call hung. `entered`: by the fast path."""
    for place in itertools.count(1):
        call_queue, ran = CallQueue("test"), []
        lock, task = call_queue.run_lock, partial(ran.append, 1)
        call_queue.submit(list, "first").wait()
        with lock:
            handle = call_queue.submit(list, "task", in_any_thread=True) if how == "wait" else Handle("none")
        calls = {
            "run": partial(call_queue.run, task),
            "wait": handle.wait,
            "acquire": partial(lock.acquire, bool(entered)),
            "run with it": partial(lock.run, task, blocking=bool(entered)),
        }
        lock.fields[ENTERED] = entered
        if entered:
            threading.Timer(0.001, partial(lock.fields.__setitem__, ENTERED, 0)).start()
        is_over = len(interrupted(calls[how], place)) < place
        if how == "acquire" and is_over:
            lock.release()
        assert lock.mutex.acquire(timeout=10), f"interrupted at {place}"
        lock.release()
        assert call_queue.submit(lambda: "next", "task").wait(timeout=10) == "next"
        call_queue.close()
        if is_over:
            break
    assert place > 1


def test_an_interrupt_in_a_callback_reaches_the_main_thread():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Handle.completed(1).when_done(interrupt)


def test_an_error_that_was_raised_does_not_keep_the_tensors_of_its_call():
    """Regression: until the next error of the queue."""
    call_queue = CallQueue("test")

    def fails():
        tensor = torch.ones(3)
        kept.append(weakref.ref(tensor))
        raise ValueError("fails")

    kept = []
    with pytest.raises(ValueError, match="fails"):
        call_queue.submit(fails, "first").wait()
    call_queue.submit(lambda: None, "second").wait()
    gc.collect()
    assert kept[0]() is None
    call_queue.submit(fails, "third")
    call_queue.submit(lambda: None, "fourth").wait()
    assert [str(handle.unseen_error) for handle in call_queue.failed] == ["fails"]
    call_queue.close()


def test_a_joined_handle_ends_with_the_last_of_its_calls():
    first, second, seen = Handle(), Handle(), []
    joined = JoinedHandle([first, second], "both", "two calls")
    joined.when_done(lambda: seen.append(joined.failed))
    with pytest.raises(errors.StallError, match="two calls"):
        joined.wait(timeout=0.01)
    second.end(error=ValueError("second"))
    assert not seen and not joined.done()
    first.end(error=KeyError("first"))
    assert seen == [True] and joined.done() and isinstance(joined.unseen_error, KeyError)
    with pytest.raises(KeyError, match="first"):
        joined.wait()
    assert joined.unseen_error is None and isinstance(joined.error, KeyError)
    assert JoinedHandle([Handle.completed(1)], "one", "a call").wait() == "one"


@pytest.mark.parametrize("watch", ("wait", "a limit", "done", "when_done"))
def test_the_calls_of_a_joined_handle_end_however_it_is_watched(watch):
    call_queue, ended = CallQueue("test"), threading.Event()
    for _ in range(10):  # the helper is not woken by the next ones
        call_queue.submit(lambda: None, "call", in_any_thread=True).wait()
    parts = [call_queue.submit(threading.get_ident, "call", in_any_thread=True) for _ in range(2)]
    joined = JoinedHandle(parts, "both", "two calls")
    if watch == "when_done":
        joined.when_done(ended.set)
        assert ended.wait(20)
    while watch == "done" and not joined.done():
        time.sleep(0.0001)
    assert joined.wait(20 if watch == "a limit" else None) == "both"
    call_queue.close()
