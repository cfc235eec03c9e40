"""The decisions of the failure handling about an error, and the line that a stall report shows."""

from __future__ import annotations

import gc
import io
import os
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import torchmpi
from torchmpi.errors import MismatchError
from torchmpi.session import deadlock, failure, launcher, program_lines, report


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
    activities = {rank: report.Activity(f"call #{rank}", 0.0, f"at line {rank % 500}") for rank in range(2000)}
    lines = [*report.shortened("line\n" * 1000).splitlines(), *report.about_others(activities)]
    assert len(lines) <= 38  # two more name the process and announce the messages of the launcher
    assert lines[-1].endswith("ranks elsewhere") and sum("call #" in line for line in lines) == 12
    odd = {rank: report.Activity("barrier()", 0.0, "") for rank in range(1, 2000, 2)}
    (line,) = report.about_others(odd)
    assert line.startswith("  ranks 1, 3, 5") and len(line) < 120, line


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
