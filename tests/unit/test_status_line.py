"""To whoever waits: a bar on a terminal, at most a line every ten seconds in a file; long checkpoints show."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchmpi import status_line
from torchmpi.engine import checkpoint
from torchmpi.status_line import StatusLine


class Stream(io.StringIO):
    """A stream that is a terminal, or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def stream(request):
    return Stream(request.param)


def test_a_line_is_drawn_again_or_written_every_ten_seconds(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    seconds = 0.0
    status = StatusLine(now=lambda: seconds)
    for step in range(1, 301):
        status.show(f"{step}/300 things")
        seconds += 0.125
    status.begin("another part")
    status.clear()
    if stream.isatty():
        assert stream.getvalue().count("\r\x1b[K[") == 300 and "\n" not in stream.getvalue()
        assert "[##########----------] 150/300 things" in stream.getvalue()
        assert stream.getvalue().endswith("another part\r\x1b[K")
    else:
        numbers = [line.partition("/")[0] for line in stream.getvalue().splitlines()]
        assert numbers == ["1", "81", "161", "241", "another part"]


def test_short_work_shows_nothing(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    seconds = 0.0
    status = StatusLine(quiet_seconds=5, now=lambda: seconds)
    for _ in range(9):
        status.show("work")
        seconds += 1
    assert stream.getvalue().count("work") == (4 if stream.isatty() else 1)


def test_ranks_know_the_terminal_of_their_launcher(monkeypatch):
    """Their standard error is a pipe to the launcher; a file of the user stays a file."""
    reading, writing = os.pipe()
    monkeypatch.setattr(status_line, "_columns_of_launcher", "99")
    with open(reading, "rb"), open(writing, "w") as pipe, tempfile.TemporaryFile("w") as file:
        assert (status_line.columns(pipe), status_line.columns(file), status_line.columns(Stream(False))) == (99, 0, 0)
        monkeypatch.setattr(status_line, "_columns_of_launcher", "")
        assert status_line.columns(pipe) == 0


def test_a_line_that_cannot_be_made_ends_no_work(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(status_line, "_TELL_SECONDS", 0.001)
    asked = threading.Event()

    def text(seconds: float) -> str:
        asked.set()
        raise ValueError("no number")

    with status_line.telling(text):
        assert asked.wait(60)
    assert stream.getvalue() == ""


def test_a_checkpoint_that_takes_long_is_reported_and_its_error_raised(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(status_line, "PLAIN_PERIOD_SECONDS", 0.0)
    monkeypatch.setattr(status_line, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(status_line, "_TELL_SECONDS", 0.001)
    told = threading.Event()

    def save() -> None:
        assert told.wait(60)
        raise OSError("disk full")

    show = StatusLine.show

    def shown(self: StatusLine, text: str) -> None:
        show(self, text)
        told.set()

    monkeypatch.setattr(StatusLine, "show", shown)
    with ThreadPoolExecutor(1) as pool, pytest.raises(OSError, match="disk full"):
        checkpoint._await(pool.submit(save))
    assert "torchmpi: a checkpoint is being written, for 0 s" in stream.getvalue()
