"""The parts below MPI: settings, dtypes, call queues, handles, call logs, status boards, packing, numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import gc
import itertools
import math
import os
import pwd
import random
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.interrupts import interrupted
from hypothesis import given
from hypothesis import strategies as st

from torchmpi import errors, files
from torchmpi.backends import saved_tables
from torchmpi.collective_specs import CODES
from torchmpi.communicators import call_log
from torchmpi.communicators.call_queue import CallQueue, LeftToHelper
from torchmpi.communicators.group import Group
from torchmpi.communicators.handle import Handle, JoinedHandle
from torchmpi.communicators.status_board import StatusBoard
from torchmpi.config import Config
from torchmpi.launch import affinity
from torchmpi.session import runtime
from torchmpi.shared_memory import kernels, memory_layout
from torchmpi.shared_memory.compiler import native_code
from torchmpi.shared_memory.segments import Segment
from torchmpi.tensors import bucket_plan, buffers, dtypes, numbers, sparse

ENTERED = memory_layout.LockFields.entered

# --- dtypes


@pytest.mark.parametrize(
    ("dtype", "op", "size", "expected"),
    [
        (torch.int8, "sum", 2, False),
        (torch.int16, "sum", 2, False),
        (torch.int16, "bor", 3, True),
        (torch.int32, "sum", 3, True),
        (torch.float32, "sum", 2, True),
        (torch.float32, "avg", 2, True),
        (torch.float32, "sum", 3, False),
        (torch.float32, "max", 2, False),
        (torch.float32, "max", 1, True),
        (torch.complex64, "prod", 2, False),
    ],
)
def test_mpi_reduces_only_what_has_the_same_bits_in_every_order(dtype, op, size, expected):
    """Open MPI saturates sums of short integers; the order counts for floats, except for two summands."""
    assert dtypes.may_use_mpi(dtype, op, size) is expected


# --- settings


@pytest.mark.parametrize("field", dataclasses.fields(Config), ids=lambda field: field.name)
def test_every_setting_is_read_from_the_environment(field):
    given = {bool: ("0", False), int: ("7", 7), float: ("7.5", 7.5), str: ("none", "none")}[type(field.default)]
    names = {
        "check": "strict",
        "hierarchical": "off",
        "on_lost_rank": "raise",
        "backend": "p2p",
        "replica_check": "warn",
    }
    given = (names[field.name],) * 2 if field.name in names else given
    config = Config.from_environment({f"TORCHMPI_{field.name.upper()}": given[0], "HOME": "/root"})
    assert getattr(config, field.name) == given[1]
    assert dataclasses.replace(config, **{field.name: field.default}) == Config()


@pytest.mark.parametrize(
    ("variable", "text", "hint"),
    [
        ("TORCHMPI_BUKET_BYTES", "1", "TORCHMPI_BUCKET_BYTES"),
        ("TORCHMPI_VERBOSE", "maybe", "1 or 0"),
        ("TORCHMPI_THREADS", "two", "int"),
        ("TORCHMPI_THREADS", "-1", "negative"),
        ("TORCHMPI_BIND", "tight", "auto, none"),
        ("TORCHMPI_BACKEND", "tcp", "backend='tcp' is not one of auto, mpi, shm, p2p"),
        ("TORCHMPI_GPU_BACKENDS", "nccl,gloo", "list of nccl, ipc"),
        ("TORCHMPI_BUCKET_BYTES", "0", "greater than zero"),
        ("TORCHMPI_THREADS", str(1 << 70), "threads=.* less than 2147483648"),  # regression: an OverflowError of torch
        ("TORCHMPI_WATCHDOG_PERIOD_SECONDS", "1e300", "less than"),  # regressions: OverflowErrors of the waits
        ("TORCHMPI_METRICS_SECONDS", "1e300", "less than"),
        ("TORCHMPI_SLOT_BYTES", str(1 << 63), "slot_bytes=.* less than 9223372036854775808"),
        # Regressions: the watchdog ended the job with an OverflowError; no call was ever late.
        ("TORCHMPI_WATCHDOG_PERIOD_SECONDS", "inf", "greater than zero"),
        ("TORCHMPI_STALL_ABORT_SECONDS", "nan", "not negative"),
    ],
)
def test_wrong_settings_are_refused_with_a_hint(variable, text, hint):
    with pytest.raises(errors.ConfigError, match=hint):
        Config.from_environment({variable: text})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"slot_bytes": "big"}, "slot_bytes='big' is a str; expected a whole number"),
        ({"threads": 1.5}, "threads=1.5 is a float; expected a whole number"),
        ({"stall_abort_seconds": "long"}, "expected a number"),
        ({"verbose": "no"}, "verbose='no' is a str; expected True or False"),
        ({"bucket_bytes": True}, "expected a whole number"),
        ({"timeline": 3}, "timeline=3 is an int; expected a string"),
    ],
)
def test_settings_of_wrong_types_are_refused(settings, expected):
    """Regression: a TypeError of a comparison, or nothing."""
    with pytest.raises(errors.ConfigError, match=expected):
        Config(**settings)
    assert Config(timeline=Path("folder"), stall_abort_seconds=3, verbose=0).stall_abort_seconds == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"config": {"verbose": False}}, r"a dict is no Config. Pass mpi.Config\(\*\*config\)"),
        ({"config": "quiet"}, "a str is no Config"),
        ({"verbose": False, "threads": 2}, r"config=mpi.Config\(threads=2, verbose=False\)"),
        ({"with_gpu": True}, "with_cuda="),
    ],
)
def test_wrong_arguments_of_start_are_refused_before_mpi_is_loaded(arguments, expected):
    """Regression: an AttributeError of a dict, and a TypeError that names no setting."""
    with pytest.raises(errors.ArgumentError, match=expected):
        runtime.start(**arguments)


def test_variables_of_the_compiled_kernels_are_no_settings():
    """Regression: TORCHMPI_KERNEL_DELAYS was refused."""
    given = {"TORCHMPI_KERNEL_CHECKS": "1", "TORCHMPI_KERNEL_DELAYS": "1"}
    assert Config.from_environment(given) == Config()


def test_a_user_without_a_home(monkeypatch, tmp_path):
    """Regression: start() failed for a user id that is not in /etc/passwd, or wrote to ``./~/.cache``."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(native_code, "__file__", "/proc/none/native_code.py")  # an installation that others own
    assert native_code.writable_folders() == [] and saved_tables.path_for("") is None
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("HOME", "/dev/null")  # regression: a warning that a table of measurements cannot be read
    assert saved_tables.path_for("") is None


def test_compiled_code_is_read_from_a_folder_of_another_user(monkeypatch, tmp_path):
    """Regression: a user who cannot write to the package compiled what root had compiled when the image was built."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(native_code, "__file__", str(tmp_path / "package" / "native_code.py"))
    owner = native_code.Compiler()
    owner._write("part", "recipe", b"image")
    assert len(list((tmp_path / "home").rglob("*.native"))) == 1  # for other environments of this user
    shutil.rmtree(tmp_path / "home")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "package" not in str(path) and access(path, mode))
    user = native_code.Compiler()
    assert user.folder == tmp_path / "home" / "torchmpi" and user._read("part", "recipe") == b"image"
    user._write("other", "recipe", b"image")
    assert user._read("other", "recipe") == b"image" and len(list((tmp_path / "package").rglob("*.native"))) == 1


def test_a_rank_waits_for_a_lock_that_nfs_grants(monkeypatch, tmp_path):
    """Regression: all ranks compiled at the same time: NFS grants a shared lock only if the file can be read."""
    flock, needed = fcntl.flock, {fcntl.LOCK_SH: os.O_RDONLY, fcntl.LOCK_EX: os.O_WRONLY}

    def flock_of_nfs(file, operation):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE not in (needed[operation & ~fcntl.LOCK_NB], os.O_RDWR):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    ended, path = threading.Event(), tmp_path / "lock"
    with files.open_lock(path) as holder, files.open_lock(path) as other:
        assert kernels._may_compile(holder, path, waits=False)
        assert not kernels._may_compile(other, path, waits=False)
        threading.Timer(0.3, lambda: (ended.set(), holder.close())).start()
        assert kernels._may_compile(other, path, waits=True) and ended.is_set()


# --- dtypes


def test_every_dtype_and_op_is_either_in_the_table_or_refused_with_a_remedy():
    for dtype, op in itertools.product(_all_dtypes(), dtypes.OPS):
        try:
            row = dtypes.check_reduction(dtype, op)
        except errors.DtypeError as error:
            assert any(field in str(error) for field in ("Use", "Convert", "convert", "reduce", "pass"))
        else:
            assert row.accumulator is not None
            assert row.accumulator.itemsize >= min(4, dtype.itemsize) or not dtype.is_floating_point


def _all_dtypes():
    return sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def test_codes_are_unique_and_round_trip():
    known = [dtype for dtype in _all_dtypes() if dtype in dtypes._TABLE]
    assert len({dtypes.info(dtype).code for dtype in known}) == len(known) >= 16
    assert all(dtypes.from_code(dtypes.info(dtype).code) is dtype for dtype in known)
    assert dtypes.from_code(0) is None


def test_an_unknown_op_is_refused_with_the_known_ones():
    with pytest.raises(errors.ArgumentError, match="sum, avg, prod"):
        dtypes.check_reduction(torch.float32, "mean")


# --- call queues and handles


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


# --- call log and status board


@pytest.fixture(params=["in Python", "by a kernel"])
def board_of_two(request, monkeypatch):
    publish = kernels.load()["announce"] if request.param == "by a kernel" else None
    monkeypatch.setattr(call_log.CallLog, "publish", publish)
    first = Segment.create("test", 2 * memory_layout.BLOCK_BYTES)
    boards = [StatusBoard(first, 2), StatusBoard(Segment.open(first.ticket), 2)]
    first.withdraw()
    yield [call_log.CallLog("test", rank, 2, boards[rank]) for rank in range(2)]
    for log_board in boards:
        log_board.close()


def arrive(call_log, code, shape):
    call_log.enter(code, shape)
    call_log.announce()


ALLREDUCE, BARRIER = call_log.call_code("allreduce", "sum", 1), call_log.call_code("barrier")


def test_equal_calls_pass_in_either_order(board_of_two):
    for order in ((0, 1), (1, 0)) * 100:  # more calls than the ring has entries
        first, second = (board_of_two[rank] for rank in order)
        arrive(first, ALLREDUCE, (3,))
        arrive(second, ALLREDUCE, (3,))
        first.leave()
        second.leave()
    assert board_of_two[0].seq == board_of_two[1].seq == 200


def test_a_wait_for_ranks_that_have_not_arrived_can_be_ended(board_of_two):
    """Regression: only the loss of a rank ended it, not the timeout of the group."""
    first, second = board_of_two
    group = SimpleNamespace(call_log=first, _expirable=lambda: [])
    arrive(first, BARRIER, ())
    Group.end_call(group, 2, "the report on another call")
    assert first.ended_seq == 0
    Group.end_call(group, 1, "too late")
    with pytest.raises(errors.StallError, match="too late"):
        first.sleep_until_all_arrive()
    first.abandon()
    Group.end_call(group)  # there is no call
    second.enter(BARRIER, ())
    second.leave()
    for log in (second, first):
        arrive(log, BARRIER, ())
    first.sleep_until_all_arrive()  # the next call is not ended
    assert [log.leave() > 0 for log in (first, second)] == [True, True]


@pytest.mark.parametrize(
    ("code", "shape"),
    [(BARRIER, ()), (ALLREDUCE, (4,)), (ALLREDUCE | 1 << 32, (3,)), (call_log.call_code("allreduce", "max", 1), (3,))],
)
def test_the_later_rank_finds_the_difference(board_of_two, monkeypatch, code, shape):
    monkeypatch.setattr(call_log, "_STATUS_SECONDS", 0.1)  # no watchdog answers
    first, second = board_of_two
    arrive(first, ALLREDUCE, (3,))
    with pytest.raises(errors.MismatchError, match="rank 0 called") as caught:
        arrive(second, code, shape)
    assert f"rank 1 called {call_log.describe(code, shape)}" in str(caught.value)
    with pytest.raises(errors.MismatchError):
        first.leave()


def test_the_rank_that_failed_first_is_named():
    """Regression: a slow rank named a rank that had aborted the call because of the first one."""
    segment = Segment.create("test", 4 * memory_layout.BLOCK_BYTES)
    log_board = StatusBoard(segment, 4)
    segment.withdraw()
    call_logs = [call_log.CallLog("test", rank, 4, log_board) for rank in range(4)]
    for round_ in range(2):
        for own in call_logs:
            own.enter(call_log.call_code("barrier"), ())
        call_logs[2 * round_].abandon()  # a different one in each round
        first = 2 * round_
        for rank, told_by in ((1, first), (3, 1)):
            with pytest.raises(errors.MismatchError, match=f"cannot end on rank {rank}: rank {first} has aborted it"):
                call_logs[rank].raise_aborted(told_by)
    log_board.close()


def test_a_rank_that_runs_ahead_is_no_mismatch(board_of_two):
    """The root of a broadcast does not wait: its later calls must not be compared with earlier calls of this rank."""
    first, second = board_of_two
    code = call_log.call_code("broadcast", None, 1)
    for _ in range(10):
        arrive(first, code, (3,))
        first.leave()
    for _ in range(10):
        arrive(second, code, (3,))
        second.leave()
    assert (first.seq, second.seq) == (10, 10)


@given(
    st.sampled_from([collective for collective in CODES if collective != "allreduce_many"]),
    st.sampled_from([*dtypes.OPS, None]),
    st.integers(0, 63),
)
def test_descriptions_of_signatures(collective, op, root):
    text = call_log.describe(call_log.call_code(collective, op, 1) | root << 32, (2, 3))
    assert text.startswith(f"{collective}(float32 [2, 3]")
    assert op is None or op in text


# --- fusion, numbers, buffers


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.int8, torch.bfloat16]))),
    st.integers(1, 64),
)
def test_buckets_hold_every_tensor_once_and_in_order(kinds, limit):
    tensors = [torch.zeros(numel, dtype=dtype) for numel, dtype in kinds]
    buckets = bucket_plan.plan_buckets(tensors, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(tensors)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        assert len({tensors[index].dtype for index in bucket}) == 1
        sizes = [tensors[index].numel() * tensors[index].element_size() for index in bucket]
        assert sum(sizes) <= limit or len(sizes) == 1 or sum(sizes[1:]) == 0


@given(
    st.one_of(
        st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False)
    )
)
def test_numbers_round_trip(value):
    result = numbers.restore(numbers.as_tensor(value, "send"))
    assert result == value and type(result) is type(value)


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:Sparse invariant")
def test_sparse_values_of_16_bits_are_rounded_once():
    indices = torch.tensor([[0, 0, 0, 1]])
    for dtype in (torch.float16, torch.complex32):
        values = torch.tensor([2048.0, 1.0, 1.0, 3.0]).to(dtype)
        entries = sparse.entries(torch.sparse_coo_tensor(indices, values, (2,)))
        assert entries[1].dtype is dtype and entries[1].tolist() == [2050, 3]
        total = sparse.total(indices.t(), values, (2,), lambda rows: rows)
        assert total.dtype is dtype and total.values().tolist() == [2050, 3]


def test_overlap_is_found_for_strided_tensors():
    base = torch.zeros(10, 10)
    assert buffers.overlap(base[:, 0], base[5])
    assert not buffers.overlap(base[:5], base[5:])
    assert not buffers.overlap(base, torch.zeros(3))
    assert not buffers.overlap(base[:0], base)


def test_scratch_grows_and_is_reused():
    scratch = buffers.Scratch()
    small = scratch.take(4, torch.float32)
    assert scratch.take(4, torch.float32).data_ptr() == small.data_ptr()
    assert scratch.take(100, torch.bfloat16).numel() == 100


# --- the machine


def test_binding_moves_every_thread_and_can_be_undone():
    before = affinity.current()
    one = frozenset({min(before)})
    seen = []
    gate = threading.Event()
    thread = threading.Thread(target=lambda: (gate.wait(), seen.append(affinity.current())))
    thread.start()
    try:
        assert affinity.bind(one)
        gate.set()
        thread.join()
        assert affinity.current() == one and seen == [one]
    finally:
        affinity.bind(before)
    assert affinity.current() == before


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/user/job", {"cpu.max": "max 10000", "user/cpu.max": "15000 10000", "user/job/cpu.max": "max 10000"}, 1.5),
        ("0::/docker/3f", {"cpu.max": "50000 100000"}, 0.5),  # the container sees its own group only
        ("3:memory:/a\n2:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "30", "cpu/a/cpu.cfs_period_us": "10"}, 3.0),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "10"}, math.inf),
    ],
)
def test_the_least_cpu_limit_of_all_groups_around_a_process_counts(tmp_path, own, limits, expected):
    """Regression: only that of the outermost visible group was read, which is that of a container."""
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(f"{own}\n")
    assert affinity.cpu_quota(tmp_path, tmp_path / "own") == expected


def test_processes_of_different_sessions_are_in_several_autogroups():
    setting = Path("/proc/sys/kernel/sched_autogroup_enabled")
    is_enabled = setting.exists() and setting.read_text().strip() == "1"
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        try:
            assert affinity.in_several_autogroups([os.getpid(), other.pid]) == is_enabled
        finally:
            other.kill()
    assert not affinity.in_several_autogroups([os.getpid()])
