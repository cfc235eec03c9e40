"""To an author of observers: order and thread of records, errors, forks, and the table of a job's observers."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import signal
import threading
from types import SimpleNamespace

import pytest
from helpers.timeline_records import EXACT, MAIN, call, job, plain

from torchmpi import timeline
from torchmpi.config import Config
from torchmpi.errors import ArgumentError, NotStartedError, TorchMPIError
from torchmpi.supervision import job_observers
from torchmpi.timeline import events, observer
from torchmpi.timeline.events import MessageNumber, MessageRecord, Origin, SliceRecord
from torchmpi.timeline.observer import JobObserver, ObservedJob, Observer
from torchmpi.timeline.trace_writer import TraceWriter, path_for


class Kept(Observer):
    """Keeps its records, and the threads that bring them."""

    def __init__(self, seconds=3600.0):
        super().__init__(seconds=seconds)
        self.records, self.threads, self.num_ends = [], set(), 0

    def write(self, records):
        self.records += records
        self.threads.add(threading.get_ident())

    def end(self):
        self.num_ends += 1


class Failing(Kept):
    """Raises an error for the first records."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, records):
        if records:
            raise self.error


def wait_at(end, begin=0):
    return SliceRecord("wait", events.WAIT, "", begin, end, MAIN, {})


def report(record):
    events.recorder.report(record)


def test_records_come_in_a_thread_in_the_order_of_their_ends():
    """Regression: they came in the order of the reports, which threads make some time after the ends."""
    with Kept().attach() as kept:
        for end in (30, 10, 20):
            report(wait_at(end))
        kept.read(plain(call(0, 1, 0, 0)._replace(end=15)))
        kept.flush()
        assert [each.end for each in kept.records] == [10, 15, 20, 30]
        report(wait_at(40))
    assert [each.end for each in kept.records][4:] == [40] and kept.num_ends == 1
    assert kept.threads.isdisjoint({threading.get_ident()}) and len(kept.threads) == 1


def test_a_record_that_comes_a_moment_late_is_in_its_place():
    """Regression: it came after those that had been passed on already."""
    kept = Kept()
    end = events.now()
    kept.read(wait_at(end))
    kept._pass_on(end)  # as the thread does, long enough after the end of what it passes on
    kept.read(wait_at(end + 2))
    kept._pass_on(end + 1)
    kept.read(wait_at(end + 1))
    kept._pass_on(end + 2)
    assert [each.end - end for each in kept.records] == [0, 1, 2]


def test_an_observer_that_fails_is_reported_once_and_hurts_nobody(logged):
    with Failing(ValueError("no such column")).attach() as failing, Kept().attach() as kept:
        for _ in range(3):
            report(wait_at(10))
            failing.flush()
            kept.flush()
        assert failing.has_failed and failing.num_ends == 1 and events.recorder.readers == (kept.read,)
    (text,) = logged
    assert text.startswith("the output of Failing is not complete: Traceback") and "no such column" in text
    assert len(kept.records) == 3 and events.recorder is None


def test_a_request_that_comes_as_the_thread_ends_is_not_waited_for():
    """Regression: flush() after an error waited for ever, for a thread that had looked for requests before."""
    kept = Kept()
    kept.start()
    kept.close()
    kept._thread = SimpleNamespace(is_alive=lambda: True)
    observer._running[kept] = True
    try:
        thread = threading.Thread(target=kept.flush, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    finally:
        observer._running.pop(kept, None)


def test_an_observer_that_exits_or_cannot_write_fails_like_others(logged):
    for error in (SystemExit(1), OSError(28, "No space left")):
        with Failing(error).attach() as failing:
            report(wait_at(10))
            failing.flush()
        assert failing.has_failed and failing.num_ends == 1
    assert logged[1] == "the output of Failing is not complete: [Errno 28] No space left"


def test_an_observer_is_attached_once_and_closed_once(monkeypatch):
    kept = Kept().attach()
    assert kept.attach() is kept
    report(wait_at(1))
    kept.close()
    kept.close()
    assert len(kept.records) == 1 and kept.num_ends == 1 and events.recorder is None
    with pytest.raises(TorchMPIError, match="has been closed"):
        kept.attach()
    with pytest.raises(NotStartedError):
        timeline.add_observer(Kept())
    monkeypatch.setattr(timeline, "_job", "a job")
    with pytest.raises(ArgumentError, match="a list is no Observer"):
        timeline.add_observer([])
    with timeline.add_observer(Kept()) as added:
        report(wait_at(2))
    assert [each.end for each in added.records] == [2]


def test_a_call_that_ends_after_the_removal_is_not_reported():
    """Regression: calls in progress reported to readers that had been removed, for ever if there were none left."""
    with Kept().attach() as kept:
        recorder = events.recorder
    recorder.slice("forward", "range", 0)
    assert kept.records == [] and not kept._queue


def test_a_forked_process_neither_waits_for_the_thread_nor_writes(tmp_path):
    (tmp_path / "ends").write_text("")

    class Marked(Kept):
        def end(self):
            with open(tmp_path / "ends", "a") as file:
                file.write(f"{os.getpid()} ")

    with Marked().attach() as marked:
        report(wait_at(1))
        marked._wake._cond.acquire()  # as if its thread was waking up: nobody releases the lock in the child
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            is_silent = events.recorder is None
            marked.flush()
            observer.flush_all()
            observer.close_all()
            marked.close()
            os._exit(0 if is_silent else 1)
        marked._wake._cond.release()
        assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "ends").read_text() == f"{os.getpid()} " and len(marked.records) == 1


def test_all_observers_are_written_and_closed_together():
    class Noted(Kept):
        def end(self):
            order.append(self)

    order = []
    first, second = Noted().attach(), Noted().attach()
    report(wait_at(1))
    observer.flush_all()
    assert len(first.records) == len(second.records) == 1
    observer.meet_all()
    observer.close_all()
    assert order == [second, first] and events.recorder is None


def test_an_observer_that_does_not_return_delays_the_end_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(observer, "_LAST_SECONDS", 0.01)
    released = threading.Event()

    class Stuck(Kept):
        def write(self, records):
            released.wait()

    with Stuck().attach() as stuck:
        observer.flush_all()
        assert stuck._thread.is_alive()
        released.set()


def message(begin, end, number=1, **changed):
    group = call(0, 1, 0, 0).group
    record = MessageRecord(
        group, "send", "float32", 12, 1, MessageNumber(1, number), None, 3, "world to rank 1", True, begin, end, MAIN,
        Origin(begin, "train.py:3", ""), "",
    )  # fmt: skip
    return record._replace(**changed)


def test_messages_in_flight_together_do_not_overlap_on_their_row(tmp_path):
    """Regression: they did if two threads saw their ends at the same time. A trace viewer drops such slices."""
    writer = TraceWriter(path_for(tmp_path, 0), job(0, 1), EXACT[0], flush_seconds=3600.0)
    writer.read(message(1000, 9000, 2))
    writer.read(message(2000, 8000, 1))
    writer.read(message(2000, 9000, 3, received=MessageNumber(1, 7), error="TorchMPIError"))
    writer.read(message(3000, 8500, queue="world from rank 1", is_background=False, tag=-1, peer=-1, sent=None))
    writer.close()
    with gzip.open(writer.path, "rt") as file:
        slices = [each for each in json.load(file) if each["ph"] == "X"]
    of_row = [each for each in slices if each["cat"] == events.BACKGROUND_MESSAGE]
    assert [(each["ts"], round(each["ts"] + each["dur"], 3)) for each in of_row] == [(2, 8), (8.001, 9), (9, 9)]
    assert [each["args"]["sent"] for each in of_row] == [1, 2, 3]
    expected = {"bytes": 12, "line": "train.py:3", "dtype": "float32", "communicator": "world", "group": "7"}
    thread = {"thread": slices[0]["args"]["thread"]}
    assert of_row[0]["args"] == {**expected, "to": 1, "sent": 1, "queued": 2.0, "peer": 1, "tag": 3, **thread}
    assert of_row[2]["args"]["from"] == 1 and of_row[2]["args"]["received"] == 7
    assert of_row[2]["args"]["error"] == "TorchMPIError"
    (other,) = [each for each in slices if each["cat"] == events.MESSAGE]
    assert other["args"] == {**expected, "queued": 3.0, **thread} and other["ts"] == 3


def test_each_observer_of_the_table_has_a_setting():
    settings = [row.setting for row in job_observers.OBSERVERS]
    assert len(settings) == len(set(settings)) >= 3
    assert set(settings) <= {field.name for field in dataclasses.fields(Config)}
    assert not any(getattr(Config(), setting) for setting in settings)


def test_the_settings_start_the_observers_of_the_table(monkeypatch):
    class Noted(JobObserver):
        def __init__(self, given, value):
            made.append((given, value))

    made = []
    rows = [job_observers.ObserverRow(setting, Noted) for setting in ("metrics", "summary", "report")]
    monkeypatch.setattr(job_observers, "OBSERVERS", rows)
    given = ObservedJob(Config(metrics="8000", report="file"), 0, 0, "a", None, dict)
    job_observers.attach_all(given)
    assert made == [(given, "8000"), (given, "file")] and len(observer._running) == 2
    observer.close_all()
    assert not observer._running
