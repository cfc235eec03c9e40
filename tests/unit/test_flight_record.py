"""To whoever reads flight records: files, rings, and the comparison of the ranks are right, without processes."""

from __future__ import annotations

import argparse
import fcntl
import json
import mmap
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path, PosixPath

import pytest
from helpers import processes
from hypothesis import given
from hypothesis import strategies as some

from torchmpi.cli import flight_commands
from torchmpi.cli.flight_analysis import analyze, report
from torchmpi.communicators import flight_record
from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.call_log import Call, CallLog
from torchmpi.communicators.flight_record import (
    FIRST_NS,
    FIRST_TICKS,
    LAST_NS,
    LAST_TICKS,
    OF_MESSAGES,
    FlightRecord,
    GroupCalls,
    LoggedCall,
    RankCalls,
    Ring,
    as_ranges,
    ask_for_records,
    from_ranges,
    read,
)
from torchmpi.communicators.message_record import ANY_RANK, MANY_TAGS, NO_TAG, Channels
from torchmpi.errors import TorchMPIError
from torchmpi.shared_memory.memory_layout import MAX_LOG_DIMS, RECORD_LENGTH, RecordFields

BARRIER, SUM = call_code("barrier"), call_code("allreduce", "sum", 1)
_PAGE_FIELDS = mmap.PAGESIZE // 8


def record_of(folder: Path, rank: int = 0) -> FlightRecord:
    return FlightRecord(str(folder), {"rank": rank, "size": 2, "host": "h", "process": 5, "program": "p"})


def log_of(record: FlightRecord, rank: int, key: int = 7, name: str = "world") -> CallLog:
    return CallLog(name, rank, 2, ring=record.ring(key, name, [0, 1]))


def call(log: CallLog, code: int = SUM, shape: tuple[int, ...] = (3,), *, ends: bool = True) -> None:
    log.enter(code, shape)
    if ends:
        log.leave()


def records(*kinds: list[tuple[int, tuple[int, ...], bool]]) -> list[RankCalls]:
    """Records of ranks that made these calls on one group: code, shape, and whether the call has ended."""
    return [
        RankCalls(
            rank, {"rank": rank, "size": len(kinds), "host": "h"}, False, 0,
            [GroupCalls(1, "world", tuple(range(len(kinds))), False, [
                LoggedCall(seq, code, shape, False, seq * 1e9, seq * 1e9 + 5e8 if ended else 0.0)
                for seq, (code, shape, ended) in enumerate(calls, 1)
            ])],
        )
        for rank, calls in enumerate(kinds)
    ]  # fmt: skip


def test_waits_last_until_the_last_reading_of_the_clock(tmp_path):
    """Regression: a job that hung had waited for 0 s by the report, since its last event was the begin of the wait."""
    ranks = records([(SUM, (3,), False)], [(SUM, (3,), False)])
    assert "for 0 s" in report(ranks)
    ranks[1] = ranks[1]._replace(last_ns=13 * 10**9)
    assert "for 12 s" in report(ranks)
    record = record_of(tmp_path)
    record.note_ticks()  # as the watchdog does, here without a fast path
    assert 0 < read(tmp_path / "rank0.flight").last_ns <= time.monotonic_ns()


def test_a_file_has_the_last_calls_also_if_the_process_never_closes_it(tmp_path):
    record = record_of(tmp_path)
    log = log_of(record, 0)
    for numel in range(RECORD_LENGTH + 10):
        call(log, shape=(numel,))
    call(log, BARRIER, (), ends=False)
    found = read(tmp_path / "rank0.flight")
    assert (found.rank, found.has_ended, found.about["program"]) == (0, False, "p")
    (group,) = found.groups
    assert (group.key, group.name, group.ranks, group.is_freed) == (7, "world", (0, 1), False)
    assert [each.seq for each in group.calls] == list(range(12, RECORD_LENGTH + 12))
    assert [each.shape for each in group.calls[:-1]] == [(each.seq - 1,) for each in group.calls[:-1]]
    assert all(0 < each.begin <= each.end for each in group.calls[:-1])
    assert (group.calls[-1].code, group.calls[-1].end) == (BARRIER, 0)
    record.close()
    assert read(tmp_path / "rank0.flight").has_ended


def test_the_file_of_an_earlier_job_is_kept(tmp_path):
    for numel in (1, 2):
        record = record_of(tmp_path)
        call(log_of(record, 0), shape=(numel,))
        record.close()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["rank0.flight", "rank0.flight.previous"]
    assert read(tmp_path / "rank0.flight.previous").groups[0].calls[0].shape == (1,)


def test_times_of_the_fast_path_are_converted_from_ticks(tmp_path):
    record = record_of(tmp_path)
    record.read_ticks = lambda: 1000
    record.note_ticks()
    ring = record.ring(1, "world", [0])
    fields = ring.fields
    at = _PAGE_FIELDS + 1 * RecordFields.FIELDS  # the entry of call 1, as machine code writes it
    for field, value in (
        (RecordFields.code, BARRIER),
        (RecordFields.begin, 2000),
        (RecordFields.end, 3000),
        (RecordFields.sequence, 1),
    ):
        fields[at + field] = value
    record.read_ticks = lambda: 3000
    record.note_ticks()
    first, last = record._fields[FIRST_NS], record._fields[LAST_NS]
    assert (record._fields[FIRST_TICKS], record._fields[LAST_TICKS]) == (1000, 3000)
    (found,) = read(tmp_path / "rank0.flight").groups[0].calls
    assert found.end == last
    assert found.begin == pytest.approx((first + last) / 2)


def test_rings_of_freed_groups_are_used_again(tmp_path):
    record = record_of(tmp_path)
    for number in range(60):
        ring = record.ring(number, f"group {number}", [0, 1])
        ring.enter(1, BARRIER, ())
        record.free(ring)
    groups = read(tmp_path / "rank0.flight").groups
    assert len(groups) == 16  # of one block of the file
    assert {group.name for group in groups} == {f"group {number}" for number in range(44, 60)}
    assert all(group.is_freed and len(group.calls) == 1 for group in groups)


def test_without_memory_for_files_the_calls_stay_in_the_process(monkeypatch):
    def refuse(*_):
        raise OSError("no memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    record = FlightRecord("", {"rank": 0})
    log = log_of(record, 0)
    call(log)
    assert log.recent() == [Call(1, SUM, (3,))]
    record.free(log.ring)
    record.close()


def test_a_folder_that_cannot_be_made_is_refused_with_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TorchMPIError, match=r"file/sub/rank0\.flight.*TORCHMPI_FLIGHT_RECORD"):
        record_of(tmp_path / "file" / "sub")


def test_shapes_with_more_dimensions_than_an_entry(tmp_path):
    record, shape = record_of(tmp_path), tuple(range(1, MAX_LOG_DIMS + 5))
    log = log_of(record, 0)
    call(log, shape=shape, ends=False)
    assert log.recent() == [Call(1, SUM, shape)]
    assert read(tmp_path / "rank0.flight").groups[0].calls[0].shape == shape[:MAX_LOG_DIMS]


@given(some.lists(some.integers(0, 100), max_size=20))
def test_ranges_are_read_as_written(ranks):
    assert from_ranges(as_ranges(ranks)) == tuple(ranks)


def test_missing_ranks_are_named_with_their_last_call():
    done = (SUM, (3,), True)
    findings = analyze(records([done, (BARRIER, (), False)], [done], [done, (BARRIER, (), False)]))
    assert [found.kind for found in findings] == ["missing"]
    assert findings[0].text == (
        "ranks 0, 2 are in barrier(), call #2 on world, for 0 s. "
        "Not arrived: rank 1, which ended allreduce(float32 [3], sum), call #1, 0.5 s before."
    )


def in_two_groups(*ranks: tuple[int, int, bool, tuple[int, int]]) -> list[RankCalls]:
    """Records of ranks, each with its numbers of calls on the groups 1 and 2, how its last call is, and `blocked`."""
    found = []
    for rank, (first, second, has_failed, blocked) in enumerate(ranks):
        groups = []
        for key, last in ((1, first), (2, second)):
            begun = [LoggedCall(seq, SUM, (3,), False, seq, seq + 0.5) for seq in range(1, last)]
            if last:
                is_open = blocked == (key, last)
                end = last + 0.5 if has_failed or not is_open else 0.0
                begun.append(LoggedCall(last, SUM, (3,), False, last, end, has_failed and is_open))
            groups.append(GroupCalls(key, f"group {key}", (0, 1, 2), False, begun))
        about = {"rank": rank, "size": len(ranks), "host": "h"}
        found.append(RankCalls(rank, about, False, 0, groups, 0, (), blocked))
    return found


@pytest.mark.parametrize("has_failed", [False, True], ids=["inside", "after its error"])
def test_ranks_that_wait_for_each_other_are_named(has_failed):
    """The search of the running job: rank 2 takes no part in the circle of the others."""
    ranks = (4, 3, has_failed, (1, 4)), (3, 4, has_failed, (2, 4)), (3, 3, False, (0, 0))
    found = analyze(in_two_groups(*ranks))
    assert [each.kind for each in found] == ["deadlock", "missing", "missing"]
    assert found[0].text == (
        "rank 0 waits for rank 1, which waits for rank 0, in calls on different communicators: none can end. Make the "
        "calls on all communicators in the same order on all ranks."
    )
    assert (found[0].group, found[0].ranks, {rank: last.seq for rank, last in found[0].states.items()}) == (
        "group 1", (0, 1), {0: 4, 1: 4},
    )  # fmt: skip


@pytest.mark.parametrize(
    "ranks",
    [
        ((4, 3, False, (1, 4)), (3, 3, False, (0, 0))),  # rank 1 may make the call
        ((4, 3, False, (1, 4)), (3, 5, False, (2, 4))),  # rank 1 has made another one since
        ((4, 4, False, (1, 4)), (3, 4, False, (2, 4))),  # rank 1 only waits for rank 2, of which there is no record
    ],
    ids=["not blocked", "ended", "arrived"],
)
def test_ranks_that_can_continue_are_in_no_circle(ranks):
    assert "deadlock" not in [found.kind for found in analyze(in_two_groups(*ranks))]


def test_the_call_in_which_a_rank_is_blocked_is_in_the_file(tmp_path):
    record = record_of(tmp_path)
    call(log_of(record, 0, key=2**32 - 1), ends=False)
    assert read(tmp_path / "rank0.flight").blocked == (0, 0)
    record.note_blocked((2**32 - 1, 1))
    assert read(tmp_path / "rank0.flight").blocked == (2**32 - 1, 1)


def test_different_calls_come_first():
    found = analyze(records([(SUM, (3,), True), (SUM, (4,), False)], [(SUM, (3,), True), (BARRIER, (), False)]))[0]
    assert found.kind == "different"
    assert found.text == (
        "call #2 on world is not the same on all ranks: rank 0 made allreduce(float32 [4], sum); rank 1 made barrier()."
    )


def test_all_ranks_in_a_call_and_in_none():
    inside, ended = (BARRIER, (), False), (BARRIER, (), True)
    assert "ranks 0, 1 are in barrier(), call #1 on world, for 0 s: all ranks have arrived" in (
        analyze(records([inside], [inside]))[0].text
    )
    assert "rank 1 has ended it" in analyze(records([inside], [ended]))[0].text
    assert analyze(records([ended], [ended]))[0].kind == "idle"


def test_ranks_without_a_record_are_named():
    text = report(records([(BARRIER, (), False)], [])[:1])
    assert "No record of rank 1." in text
    assert "There is no record of rank 1." in text


@pytest.mark.parametrize("num_ranks", range(1, 65))
def test_any_number_of_ranks(num_ranks):
    done, inside = (SUM, (3,), True), (BARRIER, (), False)
    late = num_ranks // 2
    findings = analyze(records(*([done] if rank == late else [done, inside] for rank in range(num_ranks))))
    assert findings[0].kind == ("missing" if num_ranks > 1 else "idle")
    assert f"Not arrived: rank {late}," in findings[0].text or num_ranks == 1


def failing(seq: int, seconds: float = 2.0) -> LoggedCall:
    return LoggedCall(seq, SUM, (3,), False, seq * 1e9, (seq + seconds) * 1e9, has_failed=True)


def test_a_failed_call_is_shown_as_failed(tmp_path):
    log = log_of(record_of(tmp_path), 0)
    call(log)
    log.enter(BARRIER, ())
    log.abandon()
    call(log)
    (group,) = read(tmp_path / "rank0.flight").groups
    assert [each.has_failed for each in group.calls] == [False, True, False]
    assert 0 < group.calls[1].begin <= group.calls[1].end and group.calls[1].shape == ()
    assert "  world #2 barrier(): failed after " in report([read(tmp_path / "rank0.flight")])


def test_a_call_that_found_no_room_does_not_mark_an_older_one(tmp_path):
    ring = record_of(tmp_path).ring(1, "world", [0])
    ring.enter(1, BARRIER, ())
    ring.fail(1 + RECORD_LENGTH)
    assert [(each.seq, each.has_failed, each.end) for each in ring.calls()] == [(1, False, 0)]


@pytest.mark.parametrize(
    ("last", "kind", "words"),
    [
        ((failing(2), failing(2)), "failed", "ranks 0, 1 failed in allreduce(float32 [3], sum), call #2 on world, "
         "after 2 s: all ranks have arrived."),
        ((failing(2), None), "missing", "rank 0 failed in allreduce(float32 [3], sum), call #2 on world, after 2 s. "
         "Not arrived: rank 1, which ended barrier(), call #1, 2.5 s before."),
        ((failing(2), failing(2)._replace(end=0.0, has_failed=False)), "inside", "rank 1 is in allreduce("
         "float32 [3], sum), call #2 on world, for 2 s; rank 0 has failed in it: all ranks have arrived."),
        ((failing(2), failing(2)._replace(has_failed=False)), "failed", "after 2 s; rank 1 has ended it."),
    ],
)  # fmt: skip
def test_ranks_that_failed_in_the_last_call_are_named(last, kind, words):
    found = records(*([(BARRIER, (), True)] for _ in last))
    for record, each in zip(found, last, strict=True):
        record.groups[0].calls.extend([each] if each else [])
    (finding,) = analyze(found)
    assert finding.kind == kind and words in finding.text


def messages(rank: int, *channels: tuple[object, ...]) -> RankCalls:
    """The record of a rank with channels: peer, whether they receive, tag, and the numbers of messages."""
    with tempfile.TemporaryDirectory() as folder:
        record = record_of(Path(folder), rank)
        of_group = Channels(lambda: record.ring(7, "world", [0, 1], OF_MESSAGES))
        for peer, is_receive, tag, num_begun, num_ended in channels:
            channel = of_group.channel(peer, is_receive=is_receive, tag=tag)
            for _ in range(num_begun):
                channel.begin(1, 40)
            for _ in range(num_ended):
                channel.end()
        found = read(Path(folder) / f"rank{rank}.flight")
        record.close()
    return found


@pytest.mark.parametrize(
    ("channels", "words"),
    [
        (((1, True, 3, 1, 0),), "rank 0 waits for a message with tag 3 from rank 1, for S s; rank 1 has sent none."),
        (((1, True, NO_TAG, 3, 1), (1, True, 4, 2, 2)), "rank 0 waits for 2 messages from rank 1, for S s; rank 1 has "
         "sent 2 of 3."),
        (((1, True, 5, 1, 0),), "from rank 1, for S s; rank 1 has sent it."),
        (((1, True, 5, 2, 0), (ANY_RANK, True, 5, 1, 1)), "rank 1 has sent 1 in all."),
        (((ANY_RANK, True, 3, 1, 0),), "rank 0 waits for a message with tag 3 from any rank, for S s."),
        (((1, False, NO_TAG, 2, 1),), "rank 0 sends a message to rank 1, for S s; rank 1 has received none."),
        (((2, True, NO_TAG, 1, 0),), "; there is no record of rank 2."),
        (((1, False, 6, 3, 2),), "to rank 1, for S s; rank 1 has received 2 from any rank."),
    ],
)  # fmt: skip
def test_awaited_messages_are_named(channels, words):
    there = messages(1, (0, False, NO_TAG, 2, 2), (0, False, 4, 2, 2), (0, False, 5, 1, 1), (ANY_RANK, True, 6, 2, 2))
    (finding,) = analyze([messages(0, *channels), there])
    assert " (float32, 40 bytes) on world, " in finding.text
    text = re.sub(r" \(float32, 40 bytes\) on world, for \S+ s", ", for S s", finding.text)
    assert (finding.kind, text[-len(words) :]) == ("message", words)


def test_messages_that_have_ended_are_shown_and_awaited_by_nobody():
    text = report([messages(0, (1, True, 3, 2, 2)), messages(1, (0, False, 3, 2, 2))])
    assert "* " not in text
    assert "  world message #2, recv from rank 1, tag 3 (float32, 40 bytes): ended " in text


@pytest.mark.slow
def test_any_number_of_channels_is_recorded():
    found = messages(0, *((peer, True, 3, peer + 1, peer) for peer in range(RECORD_LENGTH + 3))).messages
    assert [(each.peer, each.num_begun, each.num_ended) for each in found] == [
        (peer, peer + 1, peer) for peer in range(RECORD_LENGTH + 3)
    ]


def test_ever_new_tags_share_a_channel():
    """Its messages have no number that both ranks know, and the analysis claims nothing about the other rank."""
    many = [(1, True, tag, 1, 1) for tag in range(5000)]
    received = messages(0, *many, (1, True, NO_TAG, 1, 1), (1, True, 3, 2, 1))
    own = {each.tag: each.num_begun for each in received.messages}
    assert len(own) == 258 and own[3] == 3 and own[255] == 1 and own[NO_TAG] == 1 and own[MANY_TAGS] == 5000 - 256
    sent = messages(1, *((0, False, tag, 1, 1) for tag in (*range(3), *range(4, 5000))), (0, False, NO_TAG, 1, 1))
    (finding,) = analyze([received, sent])
    assert "with tag 3 from rank 1" in finding.text and "rank 1 has" not in finding.text
    (finding,) = analyze([messages(0, *many, (1, True, 4999, 1, 0)), sent])
    assert "waits for a message with one of many tags from rank 1" in finding.text and "rank 1 has" not in finding.text


def test_a_message_that_ends_after_its_group_is_freed_changes_no_other_record(tmp_path):
    record = record_of(tmp_path)
    channels = Channels(lambda: record.ring(7, "world", [0, 1], OF_MESSAGES))
    channel = channels.channel(1, is_receive=True, tag=3)
    channel.begin(1, 40)
    (ring,) = channels.close()
    record.free(ring)
    before = bytes(ring.memory)
    channel.end()
    assert bytes(ring.memory) == before
    assert read(tmp_path / "rank0.flight").messages == []


def test_channels_made_after_the_group_is_freed_change_no_other_record(tmp_path):
    record = record_of(tmp_path)
    channels = Channels(lambda: record.ring(7, "world", [0, 1], OF_MESSAGES))
    channels.channel(1, is_receive=True, tag=3)
    (ring,) = channels.close()
    before = bytes(ring.memory)
    channels.channel(1, is_receive=True, tag=4).begin(1, 40)
    assert bytes(ring.memory) == before


def test_threads_get_separate_rings(tmp_path, monkeypatch):
    """The first messages of two groups, by two threads: one makes a ring while the other one does."""
    record = record_of(tmp_path)
    map_memory = record._map

    def map_slowly(start: int, num_bytes: int) -> memoryview:
        time.sleep(0.1)
        return map_memory(start, num_bytes)

    monkeypatch.setattr(record, "_map", map_slowly)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: record.ring(key, f"group {key}", [0, 1]), (1, 2)))
    assert {group.name for group in read(tmp_path / "rank0.flight").groups} == {"group 1", "group 2"}


def test_a_copy_never_replaces_the_record_and_leaves_no_other_file(tmp_path):
    record = record_of(tmp_path / "records")
    (tmp_path / "link").symlink_to("records")
    file = (tmp_path / "records" / "rank0.flight").stat().st_ino
    record.save(tmp_path / "link")
    assert [(each.name, each.stat().st_ino) for each in (tmp_path / "records").iterdir()] == [("rank0.flight", file)]
    (tmp_path / "out" / "rank0.flight").mkdir(parents=True)
    (tmp_path / "out" / "rank0.part").symlink_to(tmp_path / "other")
    with pytest.raises(OSError):
        record.save(tmp_path / "out")
    assert not (tmp_path / "other").exists()
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["rank0.flight", "rank0.part"]


def test_a_record_is_closed_while_it_is_saved(tmp_path):
    class Folder(PosixPath):
        def exists(self, **how: bool) -> bool:
            record.close()  # as the thread of stop() may do
            return super().exists(**how)

    record = record_of(tmp_path)
    record.save(Folder(tmp_path / "out"))
    assert read(tmp_path / "out" / "rank0.flight").about == read(tmp_path / "rank0.flight").about


def ask(path: Path, folder: Path, request: int) -> None:
    with path.open("r+b") as record:
        ask_for_records(record, folder, request)


def test_requests_that_are_damaged_are_left_out(tmp_path):
    record, path = record_of(tmp_path), tmp_path / "rank0.flight"
    ask(path, tmp_path / "out", 5)
    assert record.take_request() == {"folder": str(tmp_path / "out"), "number": 5}
    assert record.take_request() == {}
    for number, values in enumerate(({"number": 6}, {"folder": 1, "number": 6}, {"folder": "out", "number": "6"}), 6):
        ask(path, tmp_path / "out", number)
        text = json.dumps({**values, "kind": "ending"}).encode()
        with path.open("r+b") as file:
            file.seek(4096 + 128)
            file.write(text.ljust(1000, b"\0"))
        assert record.take_request() == {}


def test_long_texts_keep_what_others_rely_on(tmp_path):
    about = {"rank": 0, "size": 2, "program": "p" * 5000, "on_host": as_ranges(range(0, 600, 2))}
    record = FlightRecord(str(tmp_path), about)
    assert read(tmp_path / "rank0.flight").about == {**about, "program": "p" * 500}
    with pytest.raises(TorchMPIError, match="its name is too long"):
        ask(tmp_path / "rank0.flight", tmp_path / ("n" * 4000), 1)
    assert record.take_request() == {}


def other_process(folder: str, about: dict[str, object]) -> AbstractContextManager[int]:
    """The number of a process with a flight record."""
    return processes.child(lambda: kept.append(FlightRecord(folder, about)))


kept: list[FlightRecord] = []
"""In the other process, its record: the file is open as long as the record exists."""


def dump(process: int, folder: Path) -> None:
    options = argparse.Namespace(command="dump", process=process, folder=folder, torch=None, json=False)
    assert flight_commands.run(options) == 0


def test_a_dump_into_the_folder_of_the_records_changes_nothing(tmp_path, capsys):
    path = tmp_path / "rank0.flight"
    with other_process(str(tmp_path), {"rank": 0, "size": 2, "on_host": "0"}) as process:
        before = path.stat(), path.read_bytes()
        dump(process, tmp_path)
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before[0].st_ino, before[0].st_mtime_ns)
        assert path.read_bytes() == before[1]
    assert "1 of 2 ranks; " in capsys.readouterr().out


def test_a_dump_takes_the_record_that_has_not_ended(tmp_path):
    """Regression: a worker that was forked before stop() and start() has the file of the earlier record open."""

    def work() -> None:
        earlier = FlightRecord("", {"rank": 0, "size": 9})
        fcntl.fcntl(earlier._file, fcntl.F_DUPFD, 200)
        earlier.close()
        kept.append(FlightRecord("", {"rank": 0, "size": 2}))

    with processes.child(work) as process:
        (found,) = flight_commands.dump(process, tmp_path / "out")
    assert found.about["size"] == 2 and not found.has_ended


def test_a_dump_from_a_second_host_misses_the_ranks_of_others_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(flight_commands, "_GATHER_SECONDS", 0.2)
    for rank, on_host in ((0, "0-1"), (2, "2")):
        with other_process("", {"rank": rank, "size": 3, "on_host": on_host}) as process:
            dump(process, tmp_path / "out")
    first, second = capsys.readouterr().out.split("The last calls of 1 rank of this host: ")[1:]
    assert "No record has come from rank 2 on other hosts in 0.2 s: " in first
    assert "No record has come from ranks 0, 1 on other hosts in 0.2 s: " in second


def test_a_full_disk_is_an_error_with_the_remedy(tmp_path):
    """The limit on the size of files has the effect of a full disk."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))
        record = record_of(tmp_path)
        record.ring(1, "world", [0, 1]).enter(1, 0, ())
        record.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with pytest.raises(TorchMPIError) as refused:
            record_of(tmp_path)
        print(refused.value)

    status, output = processes.output_of(work)
    path = tmp_path / "rank0.flight"
    assert status == 0 and f"torchmpi: the calls on communicator world are not in {path}: " in output, output
    assert f"cannot be written to {path}: " in output and "room for 3 MB per rank" in output, output
    assert [each.name for each in tmp_path.iterdir()] == ["rank0.flight.previous"]


def test_an_empty_folder_and_a_process_that_is_no_rank_are_refused(tmp_path):
    with pytest.raises(TorchMPIError, match=r"no file \*\.flight.*TORCHMPI_FLIGHT_RECORD"):
        flight_commands.read_folder(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with pytest.raises(TorchMPIError, match="is a rank between"):
            flight_commands.dump(process.pid, tmp_path / "out")
        process.communicate(b"\n")
    with pytest.raises(TorchMPIError, match="There is no process"):
        flight_commands.dump(1 << 22, tmp_path / "out")


def test_a_private_ring_is_read_by_the_call_log():
    log = CallLog("alone", 0, 1, ring=Ring.private())
    for numel in range(20):
        call(log, shape=(numel,))
    assert log.recent(3) == [Call(seq, SUM, (seq - 1,)) for seq in (18, 19, 20)]


def test_times_in_entries_are_ticks_or_with_a_minus_nanoseconds():
    head = [0] * 64
    head[flight_record.FIRST_TICKS], head[flight_record.FIRST_NS] = 1000, 50
    head[flight_record.LAST_TICKS], head[flight_record.LAST_NS] = 3000, 450
    time_of = flight_record._clock(head)
    assert [time_of(stored) for stored in (-7, 0, 1000, 2000, 3000)] == [7, 0, 50, 250, 450]
    head[flight_record.LAST_TICKS] = 1000  # the clock has not advanced
    assert [flight_record._clock(head)(stored) for stored in (-7, 0, 1000)] == [7, 0, 1000]


def test_the_length_of_a_tick(tmp_path):
    record = FlightRecord(str(tmp_path), {"rank": 0, "size": 1})
    assert record.seconds_per_tick() == 0
    first = record._fields[flight_record.FIRST_TICKS]
    for ticks, is_known in ((0, False), (1, True), (1 << 40, True)):
        record.read_ticks = lambda ticks=ticks: first + ticks
        assert (record.seconds_per_tick() > 0) == is_known
    record.close()
