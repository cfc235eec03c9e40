"""To whoever waits for a start: a rank that has ended before all have called start() is reported."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from torchmpi.launch import start_watch


def test_ranks_that_end_after_the_first_one_are_not_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: rank 2 ends a second after it has seen the end of rank 1, perhaps before rank 0 reports it."""
    process = start_watch._Process(1, "S", 0)
    seen = [([0, 2], {1: process}), ([0, 2], {}), ([0], {})]  # in start(), and not there yet

    def ranks_of_host() -> Any:
        return start_watch._Ranks(*seen.pop(0))

    messages: list[str] = []
    watch = start_watch.StartWatch()
    monkeypatch.setattr(start_watch, "_PERIOD_SECONDS", 0.001)
    monkeypatch.setattr(start_watch, "_ranks_of_host", ranks_of_host)
    monkeypatch.setattr(start_watch, "quiet_seconds", lambda: 0.0)
    place = SimpleNamespace(rank=0, num_ranks=3, local_size=3, has_mpi_interface=False)
    monkeypatch.setattr(watch, "_launcher", place)
    monkeypatch.setattr(watch, "_num_ranks", 3)
    monkeypatch.setattr(watch, "_lowest", 0)
    monkeypatch.setattr(watch, "_end_job", lambda message: (messages.append(message), watch._has_started.set()))
    thread = threading.Thread(target=watch._watch, daemon=True)
    thread.start()
    thread.join(10)
    assert messages == ["rank 1 ended before all ranks had called start(), in which rank 0 waits. That ends the job."]
    shown = capsys.readouterr().err.splitlines()  # one line in ten seconds
    assert shown == ["torchmpi: start(): 2/3 ranks of this host are there, 0 s"]
