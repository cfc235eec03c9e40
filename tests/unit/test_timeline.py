"""To a user of timelines: the recorder, the trace file, phases, and parts of a step are right, without processes."""

from __future__ import annotations

import _thread
import gzip
import json
import os
import resource
import sys
import threading
import time
import tracemalloc

import psutil
import pytest
from helpers import bench_rows
from helpers.timeline_records import EXACT, MAIN, MILLISECOND, call, job, message, plain, step

from torchmpi.cli import main
from torchmpi.cli.bench import bench_report
from torchmpi.communicators.call_queue import CallQueue, ShownTask
from torchmpi.errors import ArgumentError
from torchmpi.timeline import events, observer, trace_writer
from torchmpi.timeline.aligned_calls import AlignedCalls, earliest_result
from torchmpi.timeline.bench_times import BenchTimes
from torchmpi.timeline.clocks import ClockSample
from torchmpi.timeline.events import CallRecord, GroupInfo, MessageNumber, SliceRecord
from torchmpi.timeline.merging import merge, merged_events
from torchmpi.timeline.message_waits import MessageWaits
from torchmpi.timeline.step_report import StepReport
from torchmpi.timeline.step_times import CallSite, call_sites, late_ranks, step_spans, times_of_steps
from torchmpi.timeline.trace_reader import read_folder
from torchmpi.timeline.trace_writer import TraceWriter, path_for


def write(folder, records, samples=EXACT):
    """Write the records of each rank, and read them."""
    for rank, of_rank in enumerate(records):
        writer = TraceWriter(path_for(folder, rank), job(rank, len(records)), samples[rank])
        for record in of_rank:
            writer.read(record)
        writer.close()
    return read_folder(folder)


def test_parts_come_before_their_calls(tmp_path):
    """Regression: only the last 1,000 parts of a flush were written, and each call searched them all."""
    count = 3 * trace_writer._MOST_PARTS
    parts = [SliceRecord("combining", events.PART, "", 10 * k + 2, 10 * k + 5, MAIN, {}) for k in range(count)]
    calls = [call(0, k + 1, 0, 0)._replace(begin=10 * k, end=10 * k + 9) for k in range(count)]
    alone = SliceRecord("combining", events.PART, "", 10 * count, 10 * count + 1, MAIN, {})
    (trace, _) = write(tmp_path, [[*parts, *calls, alone], []])
    found = [each["args"]["call"] for each in trace.events if each.get("cat") == events.PART]
    assert found == list(range(1, count + 1))


def test_a_closed_file_is_json_and_has_all_events(tmp_path):
    write(tmp_path, [[call(0, seq, seq, seq + 1) for seq in range(1, 101)], []])
    with gzip.open(tmp_path / "rank0.json.gz", "rt") as file:
        found = json.load(file)
    calls = [each for each in found if each["ph"] == "X"]
    assert [each["args"]["call"] for each in calls] == list(range(1, 101))
    assert calls[4]["ts"] == 5000 and calls[4]["dur"] == 1000 and calls[4]["args"]["backend"] == "shm"


def test_a_file_cut_at_any_byte_can_be_read(tmp_path):
    write(tmp_path, [[], []])
    writer = TraceWriter(path_for(tmp_path, 0), job(0, 2), EXACT[0], flush_seconds=3600.0)
    for seq in range(1, 11):
        writer.read(call(0, seq, seq, seq + 1))
        writer.flush()
    writer.close()
    path = tmp_path / "rank0.json.gz"
    whole = path.read_bytes()
    first_member = whole.index(b"\x1f\x8b\x08", 1)
    for length in (0, 10):  # nothing but the beginning of the first event: the trace of the other rank is there
        path.write_bytes(whole[:length])
        assert [trace.rank for trace in read_folder(tmp_path)] == [1]
    counts = set()
    for length in range(first_member, len(whole), 7):
        path.write_bytes(whole[:length])
        trace = read_folder(tmp_path)[0]
        assert not trace.is_complete
        counts.add(len(trace.calls))
    assert counts == set(range(11))


def test_a_full_disk_ends_the_file_and_not_the_job(tmp_path, capsys):
    """Regression: close() raised, and so did stop(); a file that could not be begun stayed open."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "full.json").symlink_to("/dev/full")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space left"):
        TraceWriter(tmp_path / "full.json", job(0), EXACT[0])
    assert os.listdir("/proc/self/fd") == before
    writer = TraceWriter(path_for(tmp_path, 0), job(0, 1), EXACT[0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size, limit[1]))
    try:
        writer.read(call(0, 1, 1, 2, size=1))
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert capsys.readouterr().err.count("rank0.json.gz is not complete: [Errno 27] File too large") == 1
    assert not read_folder(tmp_path)[0].is_complete and os.listdir("/proc/self/fd") == before


def test_events_that_were_flushed_are_there_without_close(tmp_path, monkeypatch):
    monkeypatch.setattr(observer, "PERIOD_SECONDS", 0.01)
    writer = TraceWriter(path_for(tmp_path, 0), job(0, 1), [ClockSample(0, 0, 0)])
    writer.read(call(0, 1, 1, 2, size=1))
    for _ in range(1000):
        if (traces := read_folder(tmp_path)) and traces[0].calls:
            break
        threading.Event().wait(0.01)
    assert len(traces[0].calls) == 1 and not traces[0].is_complete
    writer.close()
    assert read_folder(tmp_path)[0].is_complete


def test_a_plain_record_has_all_fields_of_a_call():
    record = call(0, 3, 1, 2, root=1, queued=1, label="bucket 0")
    assert events.call_record(plain(record)) == record._replace(algorithm="shm 5")
    assert events.call_record(plain(record._replace(num_bytes=8))).backend == "other"


def test_a_million_calls_do_not_fill_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(observer, "PERIOD_SECONDS", 3600.0)  # as on a machine that never runs the thread
    monkeypatch.setattr(events, "MOST_EVENTS", 10_000)
    writer = TraceWriter(path_for(tmp_path, 0), job(0, 1), [ClockSample(0, 0, 0)])
    record, process = plain(call(0, 1, 1, 2, size=1)), psutil.Process()
    before = process.memory_info().rss
    for _ in range(1_000_000):
        writer.read((*record,))
    assert process.memory_info().rss - before < 32 << 20
    writer.close()
    trace = read_folder(tmp_path)[0]
    assert len(trace.calls) == 10_000 and trace.num_lost == 990_000


def test_phases_and_the_late_rank(tmp_path):
    traces = write(tmp_path, [[call(0, 1, 0, 12), call(0, 2, 20, 21)], [call(1, 1, 10, 12), call(1, 2, 20, 21)]])
    aligned = AlignedCalls(traces)
    assert aligned[0].awaited(0) == aligned[0].awaited(1) == 1
    assert [aligned[0].ready(rank) for rank in (0, 1)] == pytest.approx([0.010, 0.010])
    (late,) = late_ranks(aligned)
    assert (late.rank, late.num_calls) == (1, 1) and late.seconds == pytest.approx(0.010)
    assert earliest_result(aligned) == pytest.approx(0.001)
    merge(traces, tmp_path / "merged.json.gz")
    with gzip.open(tmp_path / "merged.json.gz", "rt") as file:
        merged = json.load(file)
    assert min(each["tid"] for each in merged) > max(each["pid"] for each in merged)  # or Perfetto drops slices
    names = [(each["pid"], each["name"], each["dur"]) for each in merged if each.get("cat") == "phase"]
    assert (0, "waiting for rank 1", 10000.0) in names and (0, "moving", 2000.0) in names
    flows = [(each["ph"], each["pid"], each["id"]) for each in merged if each.get("cat") == "call"]
    assert flows[:2] == [("s", 0, 1), ("f", 1, 1)] and len(flows) == 4


@pytest.mark.parametrize(
    ("collective", "expected"),
    [("broadcast", (None, 0)), ("scatter", (None, 0)), ("reduce", (1, None)), ("gather", (1, None))],
)
def test_ranks_wait_for_those_whose_data_they_need(tmp_path, collective, expected):
    parts = [[call(rank, 1, rank, 5, collective=collective, root=0)] for rank in range(2)]
    (aligned,) = AlignedCalls(write(tmp_path, parts))
    assert (aligned.awaited(0), aligned.awaited(1)) == expected


@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_a_rank_that_is_alone_in_its_group_waits_for_nobody(tmp_path, collective):
    root = 0 if collective == "broadcast" else -1
    (aligned,) = AlignedCalls(write(tmp_path, [[call(0, 1, 3, 5, size=1, collective=collective, root=root)]]))
    assert aligned.awaited(0) is None and aligned.ready(0) == pytest.approx(0.003)


def test_clocks_of_hosts_are_aligned(tmp_path):
    """The clock of rank 1 is 5 ms ahead, and drifts by 1 ms in a second."""
    samples = [[ClockSample(0, 0, 0)], [ClockSample(0, -5 * MILLISECOND, 10), ClockSample(10**9, -6 * MILLISECOND, 10)]]
    traces = write(tmp_path, [[call(0, 1, 500, 510)], [call(1, 1, 510, 516)]], samples)
    (aligned,) = AlignedCalls(traces)
    assert aligned.calls[1].begin == pytest.approx(0.50449)
    assert aligned.last == 1 and traces[1].error_seconds == pytest.approx(250_012e-9)  # 500 ppm of half a second


def test_ends_are_aligned_like_begins(tmp_path):
    """Regression: ends were aligned begins and local durations, so that the second call was inside the first one."""
    samples = [[ClockSample(0, 0, 10), ClockSample(10**9, -5 * MILLISECOND, 10)]]
    wait = SliceRecord("wait", "wait", "", 0, 1000 * MILLISECOND, MAIN, {})
    part = SliceRecord("combining", events.PART, "", 500 * MILLISECOND, 1000 * MILLISECOND, MAIN, {})
    records = [part, call(0, 1, 0, 1000, size=1), call(0, 2, 1001, 2000, size=1), wait]
    (trace,) = write(tmp_path, [records], samples)
    assert trace.calls.end.tolist() == pytest.approx([0.995, 1.995]) and not trace.calls.is_step.any()
    assert trace.intervals("wait").end.tolist() == pytest.approx([0.995])
    assert call_sites(AlignedCalls([trace]))[0].num_calls == 2
    assert trace.error_seconds == pytest.approx(500_012e-9)  # 500 ppm of the second after the last sample
    found = [each for each in merged_events([trace]) if each["ph"] == "X"]
    spans = {(each["cat"], each["ts"], each["ts"] + each["dur"]) for each in found}
    both = {("collective", 0, 995_000), ("collective", 996_000, 1_995_000)}
    assert spans == both | {(events.PART, 497_500, 995_000), ("wait", 0, 995_000)}


def test_a_folder_is_merged_while_the_job_records(tmp_path):
    """Regression: a KeyError for the parts of calls that were recorded after the calls had been read."""
    part = SliceRecord("combining", events.PART, "", 21 * MILLISECOND, 22 * MILLISECOND, MAIN, {})
    traces = write(tmp_path, [[call(0, 1, 0, 10, size=1)]])
    write(tmp_path, [[call(0, 1, 0, 10, size=1), part, call(0, 2, 20, 30, size=1)]])
    parts = [each for each in merged_events(traces) if each.get("cat") == events.PART]
    assert [(each["ts"], each["dur"]) for each in parts] == [(21_000, 1000)]


def test_parts_of_a_step(tmp_path):
    """A step of 100 ms: 20 ms of a queued call hidden, then 30 ms blocked, of which 10 ms wait for rank 1."""
    ranks = []
    for rank, begin in enumerate((60, 70)):
        hidden = call(rank, 1, 20, 40, queued=20, thread=1)
        ranks.append([step(0), hidden, call(rank, 2, begin, 90), step(100), step(200)])
    traces = write(tmp_path, ranks)
    assert [time for span in step_spans(traces[0]) for time in span] == pytest.approx([0.0, 0.1, 0.1, 0.2])
    first, second = times_of_steps(traces[0], AlignedCalls(traces), MessageWaits(traces))
    assert first[2:] == pytest.approx((0.070, 0.020, 0.010, 0.020))
    assert second[2:] == pytest.approx((0.1, 0, 0, 0))


def test_the_wait_of_torchs_reducer_for_its_last_bucket_is_exposed(tmp_path):
    """It waits in C++: from the last bucket on, all gradients exist."""
    buckets = [
        call(0, 1, 20, 40, size=1, queued=20, label=f"bucket 0 {events.OF_DDP}", thread=1),
        call(0, 2, 40, 60, size=1, queued=30, label=f"bucket 0 {events.OF_DDP}", thread=1),
    ]
    (trace,) = write(tmp_path, [[step(0), *buckets, step(100)]])
    (times,) = times_of_steps(trace, AlignedCalls([trace]), MessageWaits([trace]))
    assert times[2:] == pytest.approx((0.070, 0.030, 0, 0.010))


def test_steps_of_a_hierarchical_call_are_not_counted_twice(tmp_path):
    outer = call(0, 1, 0, 10, size=1)
    inner = call(0, 9, 2, 8, size=1)
    inner = inner._replace(group=inner.group._replace(key=8, name="world on one host"))
    (trace,) = write(tmp_path, [[inner, outer]])
    (site,) = call_sites(AlignedCalls([trace]))
    assert (site.num_calls, site.line, site.seconds) == (1, "train.py:3", pytest.approx(0.010))


def steps_of(rank, *, late=0, num_calls=1, num_bytes=1 << 20, backend="shm", num_hosts=1, size=4):
    """Ten steps of 100 ms with allreduces; rank 2 arrives `late` ms later than the others."""
    records = [step(0)]
    for number in range(10):
        for index in range(num_calls):
            begin = 100 * number + 40 + 2 * index + (late if rank == 2 else 0)
            end = 100 * number + 41 + 2 * index + late
            record = call(rank, number * num_calls + index + 1, begin, end, size=size)
            group = record.group._replace(num_hosts=num_hosts)
            records.append(record._replace(group=group, num_bytes=num_bytes, backend=backend))
        records.append(step(100 * (number + 1)))
    return records


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({}, "communication is not the problem"),
        ({"late": 30}, "Rank 2 on host host2 is slow: it arrives last at 10 calls, 100% of all waiting"),
        ({"num_calls": 20, "num_bytes": 4096}, "20 calls of 4.0 KB at train.py:3: the buckets are too small"),
        ({"num_hosts": 2, "backend": "mpi"}, "run flat (backend mpi)"),
    ],
)
def test_the_report_names_the_fault(tmp_path, fault, words):
    report = StepReport.of(write(tmp_path, [steps_of(rank, **fault) for rank in range(4)], EXACT * 2))
    assert words in report.advice()
    assert report.num_steps == 10 and "train.py:3" in report.text()


def test_flat_calls_are_named_also_if_most_calls_are_short(tmp_path):
    """Regression: allreduces of flags and losses, which are always flat, were counted."""
    flat, short = {"num_hosts": 2, "backend": "mpi"}, {"num_hosts": 2, "backend": "mpi", "num_bytes": 8}
    records = [[*steps_of(rank, **flat), *steps_of(rank, num_calls=3, **short)] for rank in range(4)]
    for of_rank in records:
        of_rank[:] = [each._replace(seq=n) if isinstance(each, CallRecord) else each for n, each in enumerate(of_rank)]
    assert "run flat (backend mpi)" in StepReport.of(write(tmp_path / "both", records, EXACT * 2)).advice()
    only_short = [steps_of(rank, **short) for rank in range(4)]
    assert "run flat" not in StepReport.of(write(tmp_path / "short", only_short, EXACT * 2)).advice()


def test_the_report_has_the_ranges_that_lie_within_steps(tmp_path):
    def part(name, begin, end, thread=MAIN):
        return SliceRecord(name, "range", "", begin * MILLISECOND, end * MILLISECOND, thread, {})

    ranges = [part("forward", 10, 40), part("forward", 110, 120), part("load", 50, 60, thread=1), part("epoch", 1, 150)]
    report = StepReport.of(write(tmp_path, [[step(0), *ranges, step(100), step(200)]]))
    ((name, count, seconds),) = report.ranges
    assert (name, count, seconds) == ("forward", 1.0, pytest.approx(0.020))
    assert "forward                               20 ms    20%\n" in report.text()


def test_no_rank_is_named_if_both_are_late_by_turns(tmp_path):
    records = []
    for rank in range(2):
        calls = [call(rank, n, 100 * n + 40 + 30 * (n % 2 == rank), 100 * n + 71) for n in range(11)]
        records.append([step(0), *calls, step(1100), step(1101)])
    advice = StepReport.of(write(tmp_path, records)).advice()
    assert "by turns" in advice and "is slow" not in advice


def message_part(rank, name, peer, number, begin, end, *, queued=0):
    """A message of rank `rank`, the `number`-th to or from `peer`."""
    sent = MessageNumber(peer, number) if name != "recv" else None
    received = MessageNumber(peer, number) if name != "send" else None
    return message(rank, name, peer, begin, end, sent=sent, received=received, queued=queued)


def test_the_report_names_the_sender_for_which_a_receive_waited(tmp_path):
    """Regression: it said that no rank was waited for. Rank 1 is late by 6 ms; rank 2 waits for rank 0, which waits."""
    records = [[], [], []]
    for k in range(10):
        at = 10 * k
        records[0] += [message_part(0, "recv", 1, k + 1, at, at + 7), message_part(0, "send", 2, k + 1, at + 7, at + 8)]
        records[1] += [message_part(1, "send", 0, k + 1, at + 6, at + 7)]
        records[2] += [message_part(2, "recv", 0, k + 1, at + 1, at + 9)]
    report = StepReport.of(write(tmp_path / "known", records, EXACT * 2))
    ((rank, count, seconds), (other, _, of_other)) = report.late
    assert (rank, count, other) == (1, 10, 0)
    assert (seconds, of_other) == (pytest.approx(0.060), pytest.approx(0.010))
    assert [(each.collective, each.num_calls) for each in report.sites] == [("recv", 7), ("send", 7)]
    assert report.sites[0].waiting == pytest.approx((0.060 + 0.060) / 3)
    text = report.text()
    assert "3 ranks, 1 steps, 0 calls, 40 sends and receives" in text
    assert "Rank 1 on host host1 is slow: it arrives last at 10 calls, 86% of all waiting" in text
    assert "register_async_backward" not in text and "No rank was waited for" not in text

    unmatched = [records[0], [], records[2]]  # the sends are in no trace: their receives waited for that rank
    report = StepReport.of(write(tmp_path / "unknown", unmatched, EXACT * 2))
    assert report.late[0] == (1, 10, pytest.approx(0.070))
    path_for(tmp_path / "unknown", 1).unlink()  # nor has the rank a trace
    assert "Rank 1 is slow" in StepReport.of(read_folder(tmp_path / "unknown")).advice()


def test_a_receive_in_the_background_waits_only_while_the_program_does(tmp_path):
    wait = SliceRecord("wait", "wait", "", 15 * MILLISECOND, 20 * MILLISECOND, MAIN, {})
    own = [message_part(0, "recv", 1, 1, 1, 20, queued=1), wait]
    report = StepReport.of(write(tmp_path, [own, [message_part(1, "send", 0, 1, 18, 20)]]))
    assert report.late == [(1, 1, pytest.approx(0.003))]
    (times,) = report.steps[0]
    assert times[2:] == pytest.approx((0.014, 0.002, 0.003, 0.014))


def test_a_report_on_nothing_and_on_sends_alone_claims_no_more_than_it_knows(tmp_path):
    assert "There is nothing to judge" in StepReport.of(write(tmp_path / "nothing", [[]])).advice()
    text = StepReport.of(write(tmp_path / "sends", [[message_part(0, "send", 1, 1, 1, 9)], []])).text()
    assert "Sends that wait for their receivers are not judged." in text and "No rank was" not in text
    assert "begin calls and messages" in text and "Sends that wait for a late receiver are part of it." in text
    assert "register_async_backward" not in text


def test_the_steps_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    report = StepReport.of(write(tmp_path, [steps_of(0, size=1)]))
    report.plot(tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    StepReport.of(write(tmp_path / "empty", [[]])).plot(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_reports_and_merges(tmp_path, capsys):
    write(tmp_path, [steps_of(rank, size=2) for rank in range(2)])
    assert main(["timeline", "report", str(tmp_path)]) == 0
    assert "2 ranks, 10 steps, 10 calls" in capsys.readouterr().out
    assert main(["timeline", "merge", str(tmp_path), "--out", str(tmp_path / "all.json.gz")]) == 0
    assert (tmp_path / "all.json.gz").exists()
    assert main(["timeline", "report", str(tmp_path / "none")]) == 1
    assert "TORCHMPI_TIMELINE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("collective", "num_bytes"),
    [("allreduce", 4096), ("broadcast", 4096), ("reduce", 4096), ("reduce_scatter", 4096), ("alltoall", 4096),
     ("allgather", 2048), ("gather", 2048), ("scatter", 3072), ("barrier", 0)],
)  # fmt: skip
def test_calls_of_every_collective_are_compared_with_the_benchmark(tmp_path, collective, num_bytes):
    """Regression: only allreduce, broadcast and reduce were. The benchmark states the size of the larger tensor."""
    own = {"collective": collective, "num_bytes": num_bytes, "dtype": "" if collective == "barrier" else "float32"}
    of_ranks = [
        [each._replace(**own) if isinstance(each, CallRecord) else each for each in steps_of(rank, size=2)]
        for rank in range(2)
    ]
    (site,) = call_sites(AlignedCalls(write(tmp_path, of_ranks)))
    sizes = (0, 0) if collective == "barrier" else (2048, 4096, 8192)
    rows = [
        bench_rows.row("auto", 250.0 * (size or 4096) / 4096, num_bytes=size, verb=collective, dtype=own["dtype"])
        for size in sizes
    ]
    assert BenchTimes(rows).share(site) == pytest.approx(0.25)
    assert BenchTimes(bench_rows.row("auto", 1.0, verb="sendreceive") for _ in sizes).share(site) is None


@pytest.mark.slow
def test_a_report_needs_little_memory(tmp_path):
    """Regression: it took 2.5 KB for each call of each rank."""
    num_calls = 6_000
    for rank in range(2):
        calls = (call(rank, seq, 3 * seq, 3 * seq + 1 + rank) for seq in range(num_calls))
        writer = TraceWriter(path_for(tmp_path, rank), job(rank), EXACT[rank])
        for each in calls:
            writer.read(each)
            if each.seq % 10 == 0:
                writer.read(step(3 * each.seq + 2))
        writer.close()
    tracemalloc.start()
    try:
        report = StepReport.of(read_folder(tmp_path))
        text = report.text()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.num_steps == num_calls // 10 - 1 and f"{num_calls} calls" in text
    assert peak < 300 * 2 * num_calls + (1 << 20)


def test_the_report_compares_calls_with_a_benchmark(tmp_path, capsys):
    """Calls of 4 KB move data for 1 ms; in the benchmark they take 250 us."""
    write(tmp_path, [steps_of(rank, size=2, num_bytes=4096) for rank in range(2)])
    measured = [bench_rows.row("auto", 250.0), bench_rows.row("torchmpi mpi", 1.0)]
    jobs = [{"facts": bench_rows.FACTS, "rows": measured}]
    bench_report.save(bench_report.new_report("collectives", jobs, {}), str(tmp_path / "bench.json"))
    assert main(["timeline", "report", str(tmp_path), "--bench", str(tmp_path / "bench.json")]) == 0
    header, line = capsys.readouterr().out.partition("per rank:\n")[2].splitlines()[:2]
    assert "of bench" in header and "25%  allreduce (shm: whole slots) at train.py:3" in line
    other = [{"facts": bench_rows.FACTS, "rows": [bench_rows.row("auto", 250.0, ranks=4)]}]
    bench_report.save(bench_report.new_report("collectives", other, {}), str(tmp_path / "bench.json"))
    assert main(["timeline", "report", str(tmp_path), "--bench", str(tmp_path / "bench.json")]) == 0
    assert "-  allreduce (shm: whole slots) at train.py:3" in capsys.readouterr().out
    bench_report.save(bench_report.new_report("train", other, {}), str(tmp_path / "bench.json"))
    assert main(["timeline", "report", str(tmp_path), "--bench", str(tmp_path / "bench.json")]) == 1
    assert "bench collectives --json" in capsys.readouterr().err


def test_the_order_of_arrival_at_a_step_of_a_hierarchical_call_makes_no_rank_late(tmp_path):
    records = []
    for rank, begin in enumerate((2, 6)):
        inner = call(rank, 9, begin, 8)
        inner = inner._replace(group=inner.group._replace(key=8, name="world on one host"))
        records.append([step(0), call(rank, 1, 1, 10), inner, step(20)])
    traces = write(tmp_path, records)
    assert StepReport.of(traces).late == []
    assert [late.rank for late in late_ranks(AlignedCalls(traces))] == [1]


def test_a_time_without_samples_hides_no_late_rank_of_other_times(tmp_path):
    """Regression: waits had to be longer than the largest error of the recording."""
    samples = [[ClockSample(0, 0, 0)], [ClockSample(local, 0, 1000) for local in (0, 10**9, 10**11)]]
    records = [[step(0), step(99_000)] for _ in range(2)]
    for rank, of_rank in enumerate(records):
        of_rank[1:1] = [call(rank, n, begin + 10 * rank, begin + 11) for n, begin in enumerate((500, 50_000))]
    (late,) = StepReport.of(write(tmp_path, records, samples)).late
    assert (late.rank, late.num_calls) == (1, 1) and late.seconds == pytest.approx(0.010)


def test_files_of_an_earlier_larger_job_are_ignored(tmp_path):
    write(tmp_path, [[], []])
    traces = write(tmp_path, [[]])
    assert [trace.rank for trace in traces] == [0]


def test_a_folder_without_traces_is_an_error_with_the_remedy(tmp_path):
    with pytest.raises(ArgumentError, match="TORCHMPI_TIMELINE"):
        read_folder(tmp_path)


def test_readers_are_added_and_removed():
    states, found, queue = [], [], events.EventQueue()

    def note_state():
        states.append(None if events.recorder is None else events.recorder.readers)

    events.when_changed.append(note_state)
    try:
        assert events.recorder is None
        events.add_reader(queue.put)
        events.add_reader(found.append)
        assert events.recorder is not None
        events.recorder.slice("forward", "range", events.now())
        events.remove_reader(found.append)
        events.remove_reader(queue.put)
        events.remove_reader(queue.put)
        assert events.recorder is None and states == [(queue.put,), (queue.put, found.append), (queue.put,), None]
    finally:
        events.when_changed.remove(note_state)
    assert [each.name for each in found] == [each.name for each in queue] == ["forward"]


def test_the_line_of_the_program_is_found():
    def here():
        return events.origin_of(events.Recorder().origin(5)).line

    assert here() == f"{__file__}:{here.__code__.co_firstlineno + 1}"
    names = {"events": events}
    source = "def public_function(): return events.origin_of(events.Recorder().origin(0)).line"
    exec(compile(source, events.__file__, "exec"), names)
    for _ in range(3):  # the first one finds its line in another way
        assert names["public_function"]() == f"{__file__}:{sys._getframe().f_lineno}"
    found = []
    names["found"] = found
    exec(compile("def record(): found.append(events.Recorder().origin(0))", events.__file__, "exec"), names)
    _thread.start_new_thread(names["record"], ())  # of which no frame is the program's
    while not found:
        time.sleep(0.001)
    assert events.origin_of(found[0]).line == ""


def test_the_profiler_is_told_the_call_of_a_task(monkeypatch):
    shown = events.ShownCall(GroupInfo(7, "world", 0, (0, 1), 1), ("allreduce", "sum", "float32", -1), 3, 3)
    call_queue, told = CallQueue("example"), []
    monkeypatch.setattr(events, "show_task", lambda description, call, task: told.append((description, call)) or task)
    tasks = (ShownTask(call_queue, lambda: 1, shown), None), (lambda: 1, lambda: shown), (lambda: 1, None)
    for task, describe in tasks:
        assert call_queue.submit(task, "a call", call=describe).wait() == 1
    assert told == [("a call", shown)] * 2 + [("a call", None)]
    call_queue.close()


def test_the_bandwidth_of_calls_that_only_waited_is_zero():
    site = CallSite("a.py:1", "allreduce", "shm", 3, 100, 2.0, 0.5, 2, "float32")
    assert site.bytes_per_second == 200 and site._replace(waiting=2.0).bytes_per_second == 0


def test_the_line_that_takes_most_time_comes_first(tmp_path):
    records = []
    for number, (line, begin, end) in enumerate((("a.py:1", 0, 10), ("b.py:2", 20, 50), ("c.py:3", 60, 61))):
        each = call(0, number + 1, begin, end, size=1)
        records.append(each._replace(origin=each.origin._replace(line=line)))
    (trace,) = write(tmp_path, [records])
    assert [site.line for site in call_sites(AlignedCalls([trace]))] == ["b.py:2", "a.py:1", "c.py:3"]


def test_calls_are_found_by_their_index(tmp_path):
    """Also if a group has only some of the ranks."""
    parts = [[call(rank, seq, 10 * seq + rank, 10 * seq + 5) for seq in (1, 2, 3)] for rank in range(2)]
    aligned = AlignedCalls(write(tmp_path, parts))
    assert len(aligned) == 3
    for index in (0, 1, 2, -1):
        found = aligned[index]
        seq = range(1, 4)[index]
        assert sorted(found.calls) == [0, 1] and {each.seq for each in found.calls.values()} == {seq}
        assert found.ready(0) == pytest.approx((10 * seq + 1) / 1000) and found.awaited(0) == 1
    assert aligned.wait_error().tolist() == [0.0] * 6
