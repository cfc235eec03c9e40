"""To a user of torchmpi top: who waits for whom, the late rank and its cause, the table and the page are right."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.live_job import SECOND, running_job
from torch import nn

from torchmpi.cli.top import late_cause, rank_processes, top_screen, top_server, top_text
from torchmpi.cli.top.call_waits import bytes_of, split_calls
from torchmpi.cli.top.far_ranks import FarRank
from torchmpi.cli.top.job_history import JobHistory, Shares
from torchmpi.cli.top.job_view import page_of, view_of
from torchmpi.cli.top.rank_processes import ProcessWatch, RankProcess, least_delay
from torchmpi.cli.top.run_report import RunReport
from torchmpi.cli.top.top_command import watch
from torchmpi.cli.top.watched_job import WatchedJob, find_jobs
from torchmpi.communicators import flight_record, progress
from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.flight_record import FlightRecord, LiveGroup, look, read_live
from torchmpi.engine import SGDEngine
from torchmpi.errors import ArgumentError, NotStartedError, TorchMPIError
from torchmpi.session.reported_progress import report_progress
from torchmpi.supervision.lateness import Pace
from torchmpi.supervision.program_lines import activity

SUM, BARRIER = call_code("allreduce", "sum", 1), call_code("barrier")
BROADCAST, REDUCE = (call_code(name, None if name == "broadcast" else "sum", 1) for name in ("broadcast", "reduce"))


def group(*calls: tuple[int, int, float, float], ranks=(0, 1, 2)) -> LiveGroup:
    """Calls of one rank: number, code, begin, end."""
    seq, code, begin, end = (np.array(each) for each in zip(*calls, strict=True)) if calls else (np.zeros(0),) * 4
    shape = np.zeros((len(calls), 12), np.int64)
    shape[:, :2] = 1, 10
    return LiveGroup(9, "world", ranks, seq.astype(np.int64), code.astype(np.int64), shape, begin * 1.0, end * 1.0)


def watched(**keeping: bool) -> WatchedJob:
    """Return the job of `running_job` in this process, in which other tests may have left records."""
    (found,) = ((name, ranks) for name, ranks in find_jobs(os.getpid()).items() if name[0] == "7")
    return WatchedJob(*found, **keeping)


# --- waits


def test_ranks_wait_for_the_last_one_to_arrive():
    parts = [(0, group((1, SUM, 10, 50))), (1, group((1, SUM, 40, 50))), (2, group((1, SUM, 20, 50)))]
    found = split_calls(parts, 0, 100)
    waits = {rank: (begin, arrived, end) for rank, begin, arrived, end in zip(*found[:1], *found[3:6], strict=True)}
    assert waits == {0: (10, 40, 50), 1: (40, 40, 50), 2: (20, 40, 50)}
    assert dict(zip(found.rank.tolist(), found.awaited.tolist(), strict=True)) == {0: 1, 1: -1, 2: 1}


def test_ranks_wait_for_the_one_that_has_not_arrived_until_now():
    parts = [
        (0, group((1, SUM, 10, 20), (2, SUM, 30, math.inf))),
        (1, group((1, SUM, 10, 20))),
        (2, group((1, SUM, 10, 20), (2, SUM, 90, math.inf))),
    ]
    found = split_calls(parts, 25, 80)
    assert found.rank.tolist() == [0, 2]
    assert found.awaited.tolist() == [1, -1]  # rank 2 has come after the present of this look
    assert (found.begin[0], found.arrived[0], found.end[0], bool(found.has_ended[0])) == (30, 80, 80, False)


def test_in_rooted_calls_only_those_wait_who_need_others():
    def calls(code):
        return [(0, group((1, code, 50, 60))), (1, group((1, code, 10, 60))), (2, group((1, code, 70, 90)))]

    for code, expected in ((BROADCAST, {0: -1, 1: 0, 2: -1}), (REDUCE, {0: 2, 1: -1, 2: -1})):
        found = split_calls(calls(code), 0, 100)
        assert dict(zip(found.rank.tolist(), found.awaited.tolist(), strict=True)) == expected
    missing = [(0, group()), (1, group((1, BROADCAST, 10, math.inf)))]
    assert split_calls(missing, 0, 100).awaited.tolist() == [0]


def test_calls_that_no_rank_made_are_no_error():
    assert len(split_calls([(0, group()), (1, group())], 0, 100).rank) == 0


def test_bytes_follow_from_the_signature_where_it_has_the_shape():
    assert bytes_of(group((1, SUM, 1, 2), (2, BARRIER, 3, 4))).tolist()[:1] == [40]
    assert math.isnan(bytes_of(group((1, BARRIER, 3, 4)))[0])


# --- history


def test_the_late_rank_is_found_and_the_others_wait_for_it():
    with running_job(4, late=lambda rank, step: 0.03 * (rank == 2)):
        job = watched()
        assert job.read()
        view = page_of(job)
        job.close()
    assert view["late"]["rank"] == 2
    assert view["late"]["share"] == pytest.approx(0.3, abs=0.03)
    assert view["late"]["text"].startswith("rank 2 is late by ")
    shares = {each["rank"]: (each["computing"], each["communicating"], each["waiting"]) for each in view["ranks"]}
    for rank, expected in ((0, (0.6, 0.1, 0.3)), (2, (0.9, 0.1, 0.0))):
        assert shares[rank] == pytest.approx(expected, abs=0.04)
    waits = np.array(view["waits"]["seconds"])
    assert waits[:, 2][[0, 1, 3]].min() > 15 and np.delete(waits, 2, axis=1).sum() < 0.1
    (call,) = view["calls"]
    assert (call["group"], call["call"]) == ("world", "allreduce")
    assert call["calls"] > 2000 and call["bytes"] == call["calls"] * 100e6
    pace = view["ranks"][0]
    assert (pace["step"], pace["step_seconds"]) == (600, pytest.approx(0.1, rel=0.02))
    assert pace["samples_per_second"] == pytest.approx(320, rel=0.02)


def test_a_late_rank_whose_process_has_ended_is_still_named():
    """Regression: between two looks at a rank, its process may end, and /proc has no facts of it."""
    with running_job(3, late=lambda rank, step: 0.03 * (rank == 2)):
        job = watched()
        job.read()
        job.facts.clear()
        view = view_of(job)
        job.close()
    assert view["late"]["rank"] == 2


def test_a_report_keeps_the_ranks_that_end_before_others():
    """Regression: the report of 64 ranks that ended within seconds had 20 of them, and no late one."""
    with running_job(3, late=lambda rank, step: 0.03 * (rank == 2)) as records:
        job = watched(keeps_ended=True)
        assert job.read()
        records[2]._fields[flight_record._ENDED] = 1
        assert job.read()
        view = view_of(job)
        job.close()
    assert view["late"]["rank"] == 2 and all(each["memory_bytes"] for each in view["ranks"])
    assert [each["rank"] for each in view["ranks"]] == [0, 1, 2]


def test_even_ranks_are_not_late():
    noise = np.random.default_rng(0).random((6, 600)) * 0.02
    with running_job(6, late=lambda rank, step: noise[rank, step]):
        job = watched()
        job.read()
        view = view_of(job)
        job.close()
    assert view["late"] is None
    assert "no rank is late" in top_text.page(view, 80)


def test_the_page_says_that_messages_count_as_computing():
    with running_job(2) as records:
        texts = []
        for _ in range(2):
            job = watched()
            job.read()
            texts.append(top_text.page(view_of(job), 80))
            job.close()
            records[1].ring(5, "world", range(2), flight_record.OF_MESSAGES)
    assert ["Messages count as computing" in text for text in texts] == [False, True]


def test_a_rank_that_never_comes_is_late():
    with running_job(3, open_on=(0, 2)):
        job = watched()
        job.read()
        job.now += 20 * SECOND
        job.history.add({rank: each.live for rank, each in job.ranks.items()}, job.now)
        view = view_of(job)
        job.close()
    assert view["late"]["rank"] == 1 and view["late"]["text"].startswith("the other ranks wait for rank 1, for ")
    in_call = "allreduce(float32, sum) on world"
    assert [each["call"] for each in view["ranks"]] == [in_call, "", in_call]
    assert view["ranks"][0]["call_seconds"] > 19


def test_a_history_of_a_whole_run_keeps_its_sums_in_longer_parts():
    with running_job(2, late=lambda rank, step: 0.02 * rank):
        kept, live = [], watched()
        for merges in (False, True):
            history = JobHistory((0, 1), most_parts=32 if merges else 400, merges=merges)
            ranks = {rank: each.live for rank, each in live.ranks.items()}
            for seconds in range(40, -1, -3):
                history.add(ranks, time.monotonic_ns() - seconds * SECOND)
            kept.append(history)
        live.close()
    long, short = kept
    assert short.num_parts <= 32 and short.part_seconds == 0.5 * 2 ** round(math.log2(short.part_seconds / 0.5)) > 0.5
    covered = [history.num_parts * history.part_seconds for history in kept]
    assert 16 <= covered[1] <= covered[0]
    assert short.shares().waiting.sum() <= long.shares().waiting.sum()
    assert short.shares().waiting[0].sum() == pytest.approx(0.2 * covered[1], rel=0.1)


def test_calls_that_have_been_overwritten_are_not_taken_for_computing():
    with running_job(1, num_steps=3000, step_seconds=0.02):
        job = watched()
        job.read()
        shares = job.history.shares()
        job.close()
    assert shares.known.sum() < 1024 * 0.02 + 1.5
    assert shares.communicating.sum() == pytest.approx(shares.known.sum() * 0.1, rel=0.15)


# --- causes


@pytest.mark.parametrize(
    ("facts", "works", "expected"),
    [
        (RankProcess("T"), (), "stopped"),
        (RankProcess("R", main_delayed=0.4, neighbors=2), ("data loading",), "beside 2 other busy processes"),
        (RankProcess("R", main_delayed=0.4, neighbors=1), (), "beside 1 other busy process"),
        (RankProcess("D", faults_per_second=300.0), (), "300 pages a second"),
        (RankProcess("S", main_delayed=0.0), ("data loading", "", "data loading"), "data loading, train.py:3 in load"),
        (RankProcess("D"), ("",), "a disk"),
        (RankProcess("S", main_busy=0.1, busy=0.1), ("",), "sleeps"),
        (RankProcess("R", main_busy=0.9, busy=0.9), (), "computes longer"),
    ],
)
def test_causes(facts, works, expected):
    others = {rank: RankProcess("R", main_delayed=0.02, main_busy=1.0, busy=1.0) for rank in (0, 2)}
    assert expected in late_cause.cause_of(1, {1: facts, **others}, [("train.py:3 in load", work) for work in works])


def test_the_cause_is_where_the_late_rank_differs_from_the_others():
    """Regression: the line in which all ranks are most of the time was named."""
    asleep = {rank: RankProcess("S", main_delayed=0.0, main_busy=0.1, busy=0.1) for rank in range(3)}
    common, loading = ("train.py:9 in <module>", ""), ("train.py:3 in load", "data loading")
    looks, others = [common] * 6 + [loading] * 4, [common] * 19 + [loading]
    assert late_cause.cause_of(1, asleep, looks, others) == "data loading, train.py:3 in load"
    own = [common] * 6 + [("train.py:5 in augment", "")] * 4
    assert late_cause.cause_of(1, asleep, own, others).endswith("process, train.py:5 in augment")


def test_ranks_that_all_wait_for_a_core_are_not_late_for_that():
    facts = {rank: RankProcess("R", main_delayed=0.4, main_busy=0.6, busy=0.6, neighbors=3) for rank in range(3)}
    assert "computes longer" in late_cause.cause_of(1, facts, ())
    crowded = {rank: RankProcess("R", main_delayed=0.6, main_busy=0.3, busy=0.3) for rank in range(3)}
    assert "computes longer" in late_cause.cause_of(1, crowded, ())  # it does not sleep


def test_half_of_the_ranks_are_not_one_late_rank():
    known, nothing = np.ones((6, 40)), np.zeros((6, 40))
    halves, one = nothing.copy(), nothing + 0.3
    halves[:3], one[4] = 0.3, 0.0
    assert late_cause.find_late(Shares(known, nothing, halves), 0.5, 10) is None
    late = late_cause.find_late(Shares(known, nothing, one), 0.5, 10)
    assert late is not None and (late.rank, late.share, late.seconds) == (4, pytest.approx(0.3), 20)
    uneven = known * np.array([[0.42], [0.3], [0.36], [0.24], [0.15], [0.4]])
    assert late_cause.find_late(Shares(known, nothing, uneven), 0.5, 10) is None  # the others differ as much
    one[:, :30] = 0.3
    late = late_cause.find_late(Shares(known, nothing, one), 0.5, 10)
    assert late is not None and late.seconds == 5


def test_processes_are_seen_in_proc():
    watch_of = ProcessWatch()
    watch_of.look([os.getpid()])
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    facts = watch_of.look([os.getpid(), 2**22 + 5])
    assert set(facts) == {os.getpid()}
    own = facts[os.getpid()]
    assert own.memory_bytes is not None and own.memory_bytes > 1 << 20
    assert own.cores == frozenset(os.sched_getaffinity(0))
    assert own.busy is not None and own.busy > 0
    assert own.neighbors is None or (own.main_delayed or 0.0) >= least_delay([])  # all processes are not read otherwise


def test_busy_processes_are_looked_for_when_a_rank_waits_for_its_core(monkeypatch):
    watch_of = ProcessWatch()
    monkeypatch.setattr(rank_processes, "_schedule_of", lambda pid: (0.0, time.monotonic()))  # always waiting
    monkeypatch.setattr(rank_processes, "_OTHERS_SECONDS", 0.3)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        os.sched_setaffinity(other.pid, os.sched_getaffinity(0))
        found: list[int | None] = []
        while len(found) < 100 and not (found and found[-1]):
            found.append(watch_of.look([os.getpid()])[os.getpid()].neighbors)
            time.sleep(0.1)
        other.kill()
    assert found[:2] == [None, None] and found[-1], found


# --- text


def test_the_table_fits_into_80_columns_and_marks_the_late_rank(monkeypatch):
    with running_job(64, late=lambda rank, step: 0.03 * (rank == 40), num_steps=100, hosts=2):
        job = watched()
        job.read()
        view = view_of(job)
        job.close()
    text = top_text.page(view, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    (marked,) = [line for line in text.splitlines() if line.startswith("*")]
    assert re.match(r"\* +40 node1 ", marked)
    _, rows = top_text.table(view, 80, "w")
    assert rows[0].text.startswith("*") and rows[0].style == "late"
    assert top_text.painted(rows[0], color=True).startswith("\x1b[")
    monkeypatch.setenv("TERM", "xterm")
    assert top_text.wants_color(True) and not top_text.wants_color(False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not top_text.wants_color(True)


def test_the_screen_obeys_keys_and_restores_the_terminal(monkeypatch):
    controller, terminal = pty.openpty()
    output: list[bytes] = []

    def read_all() -> None:
        while data := os.read(controller, 1 << 16):
            output.append(data)
            if top_screen._LEAVE.encode() in b"".join(output):
                return

    reader = threading.Thread(target=read_all)
    reader.start()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with running_job(30, late=lambda rank, step: 0.03 * (rank == 3), num_steps=100), open(terminal, "r+b", 0) as file:
        job = watched()
        with open(file.fileno(), closefd=False) as own_in, open(file.fileno(), "w", closefd=False) as own_out:
            monkeypatch.setattr(sys, "stdin", own_in)
            monkeypatch.setattr(sys, "stdout", own_out)
            before = top_screen.termios.tcgetattr(terminal)
            keys = iter(["w", "\x1b[6~", " ", "q"])

            def read_key(seconds: float) -> str:
                os.write(controller, next(keys).encode())
                return pressed(1.0)

            pressed = top_screen._read_key
            monkeypatch.setattr(top_screen, "_read_key", read_key)
            assert top_screen.Screen([job], 0.01).run() == 0
            assert top_screen.termios.tcgetattr(terminal) == before
        job.close()
        reader.join(20)
    frames = b"".join(output).decode().split(top_screen._TOP)
    assert frames[0] == top_screen._ENTER and frames[-1].endswith(top_screen._LEAVE)
    assert "by rank" in frames[1] and "\x1b[1;33m*" in frames[1]
    assert "by waiting, least first" in frames[2]
    assert "STOPPED" in frames[-1]
    os.close(controller)


# --- finding


def test_jobs_of_this_host_are_found_and_errors_say_where_to_look():
    with running_job(2):
        assert [each.rank for each in find_jobs(os.getpid())["7", "train.py"]] == [0, 1]
        assert ("7", "train.py") in find_jobs()
    assert ("7", "train.py") not in find_jobs()
    with subprocess.Popen(["sleep", "60"]) as other:
        with pytest.raises(TorchMPIError, match=f"among process {other.pid} .* as the user of the job"):
            watch(other.pid)
        other.kill()
    with pytest.raises(TorchMPIError, match="no process 4194304 on this host"):
        watch(1 << 22)


@contextmanager
def running_on_two_hosts():
    """The job of `running_job` whose ranks 2 and 3 are on another host."""
    with running_job(2) as records:
        for rank, record in enumerate(records):
            values = {"rank": rank, "size": 4, "process": os.getpid(), "job": 7, "on_host": "0-1"}
            flight_record._write_text(record._head[: flight_record._PAGE_BYTES], values)
        job = watched()
        yield job, records[0]
        job.close()


@pytest.mark.parametrize(
    "is_with_first, hint", [(1, "have not told rank 0 of themselves"), (0, "on the host of rank 0")]
)
def test_ranks_of_other_hosts_that_say_nothing_are_named(is_with_first, hint):
    with running_on_two_hosts() as (job, _):
        if not is_with_first:
            job.ranks.pop(0).close()
        job.read()
        view = view_of(job)
    assert view["job"]["elsewhere"] == [2, 3]
    assert "ranks 2, 3 are on other hosts" in view["job"]["note"] and hint in view["job"]["note"]


def test_ranks_of_other_hosts_are_shown_by_what_they_tell_rank_0():
    """The others wait for rank 2, which loads data."""
    with running_on_two_hosts() as (job, record):
        begin = time.monotonic_ns()
        for second in range(9):
            values = {}
            for rank in range(4):
                waited = 0 if rank == 2 else 0.6
                told = {
                    "step": 10 * second, "samples": 40 * second, "loss": 0.5, "call": "", "call_seconds": 0.0,
                    "line": "at /home/me/train.py:31 in load: x = next(batches)", "work": "data loading",
                    "memory_bytes": 1 << 20, "cores": [0, 1], "ran": second * SECOND // 2, "queued": 0,
                }  # fmt: skip
                pace = Pace(
                    second * SECOND, 10 * second, int((waited + 0.1) * second * SECOND), int(waited * second * SECOND)
                )
                values[str(rank)] = ["far\x1b" if rank > 1 else "near", list(pace), told if rank == 2 else {}]
            record.tell_of_all(values)
            with pytest.MonkeyPatch.context() as patch:
                clock = SimpleNamespace(monotonic_ns=lambda now=begin + second * SECOND: now)
                patch.setattr("torchmpi.cli.top.watched_job.time", clock)
                assert job.read()
        view, page = view_of(job), page_of(job)
    assert view["job"]["elsewhere"] == [] and not view["job"]["note"]
    far = view["ranks"][2]
    assert (far["host"], far["step"], far["step_seconds"], far["samples_per_second"]) == ("far\\x1b", 80, 0.1, 40)
    assert (round(far["computing"], 2), round(far["communicating"], 2), far["waiting"]) == (0.9, 0.1, 0)
    assert round(view["ranks"][3]["waiting"], 2) == round(view["ranks"][0]["waiting"], 2) == 0.6
    assert view["late"]["rank"] == 2 and "data loading, train.py:31" in view["late"]["text"]
    assert (job.facts[2].main_busy, job.facts[2].main_delayed, job.facts[2].memory_bytes) == (0.5, 0, 1 << 20)
    assert "train.py:31" in top_text.page(view, 120) and max(page["lanes"]["2"]["computing"]) == 0.9


@pytest.mark.parametrize("told", [None, [], ["a", [1], "b"], ["a", ["x"] * 9, {}], ["a", [1] * 9, {"step": []}]])
def test_what_is_no_word_of_a_rank_is_ignored(told):
    rank = FarRank(0)
    rank.take(told, 0.0)
    assert rank.times().shape == (0, 4) and rank.entry()["host"] == ""


def test_what_ranks_tell_ends_where_there_is_no_room():
    with running_job(1) as (record,):
        record.tell_of_all({str(rank): ["x" * 1000, [], {}] for rank in range(100)})
        (found,) = (each.live for each in watched().ranks.values())
    assert 20 < len(found.told_of_all) < 40 and found.told_of_all["0"][0] == "x" * 1000


@pytest.mark.parametrize("damage", [b"\xff" * 64, b"{}" * 300, bytes(4000)])
def test_damaged_records_are_refused_or_empty(damage):
    with running_job(1) as (record,):
        file = open(f"/proc/self/fd/{record._file}", "r+b", 0)  # noqa: SIM115
        os.pwrite(file.fileno(), damage, 0)
        with pytest.raises(TorchMPIError, match="no flight record"):
            read_live(file)
        file.close()


# --- what a rank tells


def test_a_rank_tells_where_it_is_only_while_somebody_looks(tmp_path):
    record = FlightRecord(str(tmp_path), {"rank": 0, "size": 1})
    path = tmp_path / "rank0.flight"
    assert not record.is_looked_at()
    with path.open("r+b") as file:
        for seconds, expected in ((5.0, True), (-1.0, False), (1e6, False)):
            look(file, seconds)
            assert record.is_looked_at() is expected
        record.tell(activity())
        told = read_live(file).told
        assert told["work"] == "" and "test_top.py" in told["line"] and told["is_inside"] is False
        assert 0 < told["at"] <= time.monotonic_ns()
    record.close()


def test_data_loading_is_seen_in_the_stack(monkeypatch):
    namespace: dict[str, object] = {"activity": activity}
    exec(compile("def fetch(): return activity()", "/site/torch/utils/data/_utils/fetch.py", "exec"), namespace)
    told = namespace["fetch"]()
    assert told["work"] == "data loading" and not told["is_inside"]


def test_engines_and_programs_report_their_steps(tmp_path):
    record = FlightRecord(str(tmp_path), {"rank": 0, "size": 1})
    batches = [(torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64))] * 3
    SGDEngine(progress=False).train(
        network=nn.Linear(4, 3), criterion=nn.CrossEntropyLoss(), iterator=batches, lr=0.1, max_epochs=2
    )
    with (tmp_path / "rank0.flight").open("rb") as file:
        steps = read_live(file).steps
    assert steps.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert steps.samples.tolist() == [5, 10, 15, 20, 25, 30]
    assert np.isfinite(steps.loss).all() and (np.diff(steps.ns) >= 0).all()
    record.close()
    progress.progress.note(progress.BY_PROGRAM)  # nowhere
    with pytest.raises(NotStartedError):
        report_progress(samples=3)


def test_the_last_steps_are_kept_in_order():
    memory, own = memoryview(bytearray(progress.NUM_BYTES)), progress.Progress()
    own.attach(memory)
    own.note(progress.BY_GRADIENTS)
    own.note(progress.BY_OPTIMIZER)  # the same step
    for _ in range(1000):
        own.note(progress.BY_GRADIENTS)
        own.note(progress.BY_OPTIMIZER)
    steps = progress.steps_in(memory)
    assert steps.step.tolist() == list(range(1002 - len(steps.step), 1002))
    assert progress.LENGTH - 1 <= len(steps.step) <= progress.LENGTH


def test_of_several_optimizers_the_one_that_makes_most_steps_counts():
    memory, own = memoryview(bytearray(progress.NUM_BYTES)), progress.Progress()
    parameter = nn.Parameter(torch.ones(1))
    generator, critic = (torch.optim.SGD([parameter], lr=0.1) for _ in range(2))
    own.attach(memory)
    try:
        generator.step()
        for _ in range(10):
            for _ in range(5):
                critic.step()
            generator.step()
        assert own.last()[0] == 50  # the first one of the critic came after that of the generator
    finally:
        own.detach()
    critic.step()
    assert own.last()[0] is None


# --- the page


@pytest.fixture
def pages():
    """The data of the page of 64 ranks, of which one is late."""
    with running_job(64, late=lambda rank, step: 0.03 * (rank == 37), num_steps=150, hosts=2, program="</script>x.py"):
        job = watched()
        job.read()
        found = page_of(job)
        job.close()
    return [found]


def test_the_page_is_one_file_and_its_data_cannot_end_the_script(pages):
    text = top_server.page(pages)
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://""", text)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert json.loads(data)[0]["job"]["program"] == "</script>x.py"
    assert len(text) < 300_000
    assert 'id="data">null</script>' in top_server.page(None)


def test_the_server_answers_only_who_knows_the_address(pages):
    server = top_server.PageServer(0, lambda: json.dumps(pages).encode())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]

    def get(path: str, host: str = f"127.0.0.1:{port}") -> tuple[int, bytes, dict[str, str]]:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": host})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, error.read(), dict(error.headers)

    token = server.token
    assert server.server_address[0] == "127.0.0.1" and len(token) >= 32
    status, body, headers = get(f"/{token}/")
    assert status == 200 and body == top_server.page(None).encode() and headers["Cache-Control"] == "no-store"
    assert json.loads(get(f"/{token}/data")[1]) == json.loads(json.dumps(pages))
    for path, host in (
        ("/", f"127.0.0.1:{port}"), ("/data", f"127.0.0.1:{port}"), (f"/{token[:-1]}/data", f"127.0.0.1:{port}"),
        (f"/{token}/data", "attacker.example"), (f"/{token}/../etc/passwd", f"127.0.0.1:{port}"),
    ):  # fmt: skip
        status, body, _ = get(path, host)
        assert status == 404 and token.encode() not in body
    with socket.create_connection(("127.0.0.1", port)) as silent:  # delays nobody
        assert get(f"/{token}/")[0] == 200
        silent.close()
    server.shutdown()
    server.server_close()
    with pytest.raises(ArgumentError, match=r"--port 99999: .*Name another one"):
        top_server.serve([], 99999, 1.0)


@pytest.mark.slow
def test_the_page_is_drawn_in_a_browser_without_the_network(pages, tmp_path):
    """The script of the page ends without an error, for which the table of calls, its last part, is evidence."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium: apt-get install chromium")
    pages[0]["job"]["program"] = "train.py"
    (tmp_path / "page.html").write_text(top_server.page(pages))
    command = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}",
        f"file://{tmp_path / 'page.html'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    body = done.stdout.partition("<body>")[2].partition('<script type="application/json"')[0]
    assert "rank 37 is late by " in body
    calls = body.partition('id="calls"')[2]
    assert "allreduce" in calls and "GB" in calls
    assert body.partition('id="ranks"')[2].partition("</table>")[0].count("<tr") == 65


def test_a_report_needs_its_folder_before_the_run(tmp_path, logged):
    with pytest.raises(ArgumentError, match="the folder does not exist"):
        RunReport(tmp_path / "none" / "report.html")
    with RunReport(Path(tmp_path / "report.html")):
        pass
    assert "no rank on this host was seen" in "".join(logged)
    assert not (tmp_path / "report.html").exists()
