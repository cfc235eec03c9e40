"""To whoever reads a report: which rank reports an error, as what, and the line that a stall report shows."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import torchmpi
from torchmpi.communicators.rank_status import RankStatus
from torchmpi.errors import ArgumentError, MismatchError
from torchmpi.launch import launcher, mpi_library, stacks
from torchmpi.supervision import deadlock, failure, program_lines, report, signals


def raised(error: BaseException, cause: BaseException | None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_errors_that_only_report_an_abort():
    mismatch, raise_aborted = MismatchError("calls differ"), MismatchError("rank 0 has aborted it")
    raise_aborted.reason_is_elsewhere = True
    assert not failure._reason_is_elsewhere(None)
    assert not failure._reason_is_elsewhere(raised(ValueError(), mismatch))
    assert failure._reason_is_elsewhere(raise_aborted)
    assert failure._reason_is_elsewhere(raised(ValueError(), raised(KeyError(), raise_aborted)))


def send(number: int = signal.SIGUSR1) -> None:
    os.kill(os.getpid(), number)


def test_a_forked_child_does_not_answer_sigusr1_for_its_rank():
    requests = stacks.StackRequests()
    child = os.fork()
    if child == 0:
        send()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGUSR1
    assert not requests.take()
    requests.close()


@pytest.mark.parametrize("is_first", [True, False])
def test_the_programs_handler_of_sigusr1_is_kept(is_first):
    received: list[int] = []
    requests = None if is_first else stacks.StackRequests()
    signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        requests = requests or stacks.StackRequests()
        send()
        assert not requests.take()
        requests.close()
        send()
        assert received == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    requests = stacks.StackRequests()
    send()
    assert requests.take()
    requests.close()


def test_the_programs_handler_of_faulthandler_is_kept(tmp_path):
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            requests = stacks.StackRequests()
            send()
            requests.close()
            send()
            file.seek(0)
            assert file.read().count("Current thread") == 2 and not requests.take()
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def test_the_handler_that_mpi_init_installs_is_called_too():
    """MPICH has one."""
    code = """
import ctypes, os, signal
from torchmpi.launch import stacks
library = ctypes.CDLL(None)
count = []
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(count.append)
library.signal.argtypes = [ctypes.c_int, type(handler)]
with stacks.noting_handler_of_library():
    library.signal(signal.SIGUSR1, handler)
requests = stacks.StackRequests()
os.kill(os.getpid(), signal.SIGUSR1)
print(requests.take(), len(count))
requests.close()
os.kill(os.getpid(), signal.SIGUSR1)
print(requests.take(), len(count))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True 1\nFalse 2\n", done.stderr


def test_names_of_processes_may_be_cut_within_a_letter(monkeypatch):
    """Regression: start() raised a UnicodeDecodeError for a program in Cyrillic letters, and SIGTERM did below one."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    comm.write_bytes("обучение.py".encode()[:15])
    try:
        stacks.StackRequests().close()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(UnicodeDecodeError):
                launcher.stderr_of_mpirun()
                mpi_library.launcher_process()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        comm.write_bytes(before)


def signal_watch(called: list[str]) -> signals.SignalWatch:
    acts = {name: lambda *_, name=name: called.append(name) for name in ("terminate", "end_waits", "interrupt")}
    return signals.SignalWatch(**acts)


def wakeup_descriptor() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor


def test_stop_in_another_thread_keeps_the_descriptor_that_signals_write_to():
    """Regression: it was closed, and later signals wrote to the next file of the program."""
    called: list[str] = []
    first, second = signal_watch(called), signal_watch(called)
    first.start()
    stopping = threading.Thread(target=first.stop)
    stopping.start()
    stopping.join()
    assert stat.S_ISSOCK(os.fstat(wakeup_descriptor()).st_mode)
    child = os.fork()
    if child == 0:
        send(signal.SIGTERM)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
    second.start()
    assert signal.getsignal(signal.SIGTERM) == second._on_sigterm
    second.stop()
    assert wakeup_descriptor() == -1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not called  # the byte of the child has been read: the thread of the first watch has ended


def test_the_descriptor_of_an_event_loop_is_kept():
    watch = signal_watch([])
    watch.start()
    with socket.socket() as other:
        other.setblocking(False)
        signal.set_wakeup_fd(other.fileno())
        watch.stop()
        assert signal.set_wakeup_fd(-1) == other.fileno()


def test_an_error_may_be_its_own_cause():
    """Regression: the search for the cause did not end, and so the job did not end."""
    error, other = ValueError(), KeyError()
    assert not failure._reason_is_elsewhere(raised(error, error))
    other.__cause__, error.__cause__ = error, other
    assert not failure._reason_is_elsewhere(other)


def test_buffered_output_is_shown_once(monkeypatch):
    kept, shown = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", kept)
    monkeypatch.setattr(sys, "__stderr__", shown)
    for text in ("first\n", "second\n"):
        print(text, end="", file=sys.stderr)
        failure._flush()
    assert shown.getvalue() == "first\nsecond\n"


def test_a_job_ends_with_closed_streams(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for name in ("stdout", "stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, closed)
    failure._flush()
    for name in ("stdout", "stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, None)
    failure._flush()
    assert closed.closed


def test_a_stall_report_shows_the_line_of_the_user():
    """Regression: files beside the package with the same prefix were hidden, and files of torch were shown."""
    package, libraries = Path(torchmpi.__file__).parent, sysconfig.get_path("purelib")
    scope: dict[str, object] = {"wait": torch.no_grad()(program_lines.location)}  # called by a function of torch
    for name, callee, file in (
        ("helper", "wait", f"{libraries}/library/helper.py"),
        ("train", "helper", f"{package}-experiments/train.py"),
    ):
        exec(compile(f"def {name}(): return {callee}()", file, "exec"), scope)
    assert scope["train"]().startswith(f"at {package}-experiments/train.py:1 in train")


def test_torchrun_shows_the_first_report_as_cause(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv(launcher.ERROR_FILE_VARIABLE, str(path))
    launcher.write_error_file("rank 1 of 2 failed, which ends the job:\nValueError: bad sample 17")
    launcher.write_error_file("rank 1 received SIGTERM")
    failure = ProcessFailure(local_rank=1, pid=os.getpid(), exitcode=1, error_file=str(path))
    assert "ValueError: bad sample 17" in str(failure.message) and "SIGTERM" not in str(failure.message)
    assert abs(failure.timestamp - time.time()) < 60
    assert "ValueError: bad sample 17" in ChildFailedError("train.py", {1: failure}).format_msg()


def test_a_report_of_many_ranks_has_at_most_40_lines():
    """Also if every rank is somewhere else, and the traceback is long."""
    activities = {rank: RankStatus(f"call #{rank}", 0.0, f"at line {rank % 500}") for rank in range(2000)}
    lines = [*report.shortened("line\n" * 1000).splitlines(), *report.about_others(activities)]
    assert len(lines) <= 38  # two more name the process and announce the messages of the launcher
    assert lines[-1].endswith("ranks elsewhere") and sum("call #" in line for line in lines) == 12
    odd = {rank: RankStatus("barrier()") for rank in range(1, 2000, 2)}
    (line,) = report.about_others(odd)
    assert line.startswith("  ranks 1, 3, 5") and len(line) < 120, line


def _deep(number):
    return report_of_torchmpi() if number == 0 else _deep_too(number)


def _deep_too(number):
    return _deep(number - 1)


def report_of_torchmpi():
    from torchmpi.tensors import buffers

    buffers.check(torch.ones(2, 2).to_sparse(), "allreduce")


def test_a_long_traceback_keeps_the_frames_of_the_program():
    """Regression: "... 20 lines ..." stood in the place of the program's own functions."""
    for depth in (30, 1):
        try:
            _deep(depth)
        except ArgumentError:
            text = traceback.format_exc()
        own = [line for line in text.splitlines() if "test_failure.py" in line]
        lines = report.shortened(text).splitlines()
        assert [line for line in lines if "test_failure.py" in line] == own
        assert lines[-1] == text.splitlines()[-1] and "the tensor is sparse" in lines[-1]
        assert any("buffers.py" in line for line in lines) == (depth == 1)
        assert any("lines of torchmpi ..." in line for line in lines) == (depth == 30)


def test_stacks_are_read_without_garbage_collection(monkeypatch):
    """Regression: the watchdog took freed memory for a frame, after a finalizer had run between (Python 3.11)."""
    read, extract = [], traceback.extract_stack
    monkeypatch.setattr(traceback, "extract_stack", lambda frame: read.append(gc.isenabled()) or extract(frame))
    monkeypatch.setattr(deadlock, "_runs_program", lambda frame: read.append(gc.isenabled()) or True)
    program_lines.location()
    thread = threading.Thread(target=lambda: (started.set(), ended.wait()))
    started, ended = threading.Event(), threading.Event()
    thread.start()
    started.wait()
    try:
        deadlock.WaitingRanks(None).observe(is_late=True)
    finally:
        ended.set()
        thread.join()
    assert read == [False, False] and gc.isenabled()


def test_reading_stacks_keeps_nothing_of_a_call_alive():
    """Regression: the tensors of a late call stayed until a garbage collection, and the connections of gloo open."""

    def kept_by(read):
        def call():
            tensor = torch.ones(3)
            read()
            return weakref.ref(tensor)

        return call()()

    def observe_in_thread():
        thread = threading.Thread(target=deadlock.WaitingRanks(None).observe, kwargs={"is_late": True})
        thread.start()
        thread.join()

    gc.collect()
    with stacks.no_garbage_collection():
        assert kept_by(observe_in_thread) is None
        assert kept_by(program_lines.location) is None
