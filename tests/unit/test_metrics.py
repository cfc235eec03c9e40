"""To whoever exports metrics: counts, their files and their table are right, without ranks."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from torchmpi.collective_specs import CODES
from torchmpi.communicators import call_counts
from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.call_counts import OTHERS, CallCounts
from torchmpi.communicators.call_log import CallLog
from torchmpi.communicators.flight_record import FlightRecord
from torchmpi.config import Config
from torchmpi.shared_memory.memory_layout import MAX_COLLECTIVES
from torchmpi.supervision import job_metrics, prometheus
from torchmpi.timeline.observer import ObservedJob


def call(log, collective="allreduce", num_bytes=4):
    log.enter(call_code(collective), ())
    log.leave(num_bytes)


def test_there_are_counters_for_all_collectives():
    assert len(CODES) <= MAX_COLLECTIVES
    log = CallLog("world", 0, 1)
    for number, collective in enumerate(CODES):
        call(log, collective, number)
    assert [(name, numbers[:2]) for name, numbers in log.counters()] == [
        (collective, [1, number]) for number, collective in enumerate(CODES)
    ]


def test_parts_of_a_call_add_only_their_time():
    log = CallLog("world", 0, 1)
    log.enter(call_code("allreduce"), (3,))
    log.leave(num_calls=0)
    assert log.counters() == []
    call(log, num_bytes=12)
    ((_, (calls, num_bytes, ticks, nanoseconds, *_)),) = log.counters()
    assert (calls, num_bytes, ticks) == (1, 12, 0)
    assert nanoseconds > 0


def test_a_call_that_fails_is_not_counted():
    log = CallLog("world", 0, 1)
    log.enter(call_code("barrier"), ())
    log.abandon()
    assert log.counters() == []


def test_groups_of_one_name_are_counted_together_also_freed_ones():
    counts, logs = CallCounts(), [CallLog("pair", 0, 1) for _ in range(3)]
    for log in logs:
        counts.add("pair", False, log)
        call(log)
    for log in logs[:2]:
        counts.free(log)
    call(logs[2])
    assert [(*key, count[:2]) for key, count in counts.read().items()] == [("pair", False, "allreduce", (4, 16))]


def test_endless_new_names_of_freed_groups_are_counted_together(monkeypatch):
    monkeypatch.setattr(call_counts, "_MOST_NAMES", 3)
    counts = CallCounts()
    for number in (*range(10), 0):
        log = CallLog(f"group {number}", 0, 1)
        counts.add(log.name, False, log)
        call(log)
        counts.free(log)
    found = {name: count.calls for (name, *_), count in counts.read().items()}
    assert found == {"group 0": 2, "group 1": 1, "group 2": 1, OTHERS: 7}


def test_ticks_are_converted_also_without_a_file(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    record = FlightRecord("", {"rank": 0})
    assert record.seconds_per_tick() == 0
    record.read_ticks = lambda: 1000
    record.note_ticks()
    assert record.seconds_per_tick() == 0  # the clock has not advanced
    record.read_ticks = lambda: 3000
    assert 0 < record.seconds_per_tick() < 1
    record.close()


def test_ticks_that_are_the_clock_with_a_minus():
    """Regression: on aarch64, where ticks are negative, the times of the fast path were 0."""
    record = FlightRecord("", {"rank": 0})
    record.read_ticks = lambda: -1000
    record.note_ticks()
    begin, end = -2000, -7000
    record.read_ticks = lambda: -501_000
    assert (end - begin) * record.seconds_per_tick() > 0
    record.close()


@pytest.mark.parametrize("is_step", [False, True])
def test_steps_have_keys_of_their_own(is_step):
    counts, log = CallCounts(), CallLog("world across hosts", 0, 1)
    counts.add(log.name, is_step, log)
    call(log)
    assert [key[1] for key in counts.read()] == [is_step]


# --- Prometheus

SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\]|\\[\\n"])*",?)*)\} (\S+)')
LABEL = re.compile(r'([a-z]+)="((?:[^"\\]|\\[\\n"])*)"')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def parsed(text):
    """The samples of a text: (name, labels) -> value. Fails on what the format does not allow."""
    kinds, samples = {}, {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            assert len(line.split(" ", 3)) == 4
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds, "all samples of a metric are one group"
            kinds[name] = kind
        else:
            name, labels, value = SAMPLE.fullmatch(line).groups()
            assert name == list(kinds)[-1]
            assert name.endswith("_total") == (kinds[name] == "counter")
            found = {key: re.sub(r"\\.", lambda each: ESCAPES[each[0]], text) for key, text in LABEL.findall(labels)}
            key = name, tuple(sorted(found.items()))
            assert key not in samples
            samples[key] = float(value)
    return samples


def metrics_of_rank(**changes):
    nothing = {kind: {} for kind in ("calls", "steps", "messages", "in_flight", "updates")}
    return {"rank": 3, "host": "h", "stalls": 0, **nothing, **changes}


def test_the_text_has_all_metrics_with_their_labels():
    numbers = {"calls": 2, "bytes": 80, "seconds": 1.5e-05, "waited": 1e-05, "moved": 5e-06, "stalls": 1}
    update = {"bytes_sent": 1, "bytes_received": 2, "staleness_last": math.nan, "staleness_mean": 0.5}
    found = parsed(
        prometheus.text_of(
            metrics_of_rank(
                calls={"world": {"allreduce": numbers}, 'a "b"\\\n': {"barrier": numbers}},
                steps={"world across hosts": {"allreduce": numbers}},
                messages={"world": {"recv": numbers}},
                in_flight={"world": 1},
                stalls=4,
                updates={"parameters": update | {"staleness_max": math.inf}},
            )
        )
    )
    own = {"rank": "3", "host": "h"}

    def value(name, **labels):
        return found[f"torchmpi_{name}", tuple(sorted({**own, **labels}.items()))]

    for communicator, collective in (("world", "allreduce"), ('a "b"\\\n', "barrier")):
        labels = {"communicator": communicator, "collective": collective}
        names = ("calls", "bytes", "seconds", "waited_seconds", "moved_seconds", "call_stalls")
        assert [value(f"{name}_total", **labels) for name in names] == list(numbers.values())
    fields = ("bytes", "seconds", "waited_seconds", "moved_seconds", "stalls")
    names = ("messages", *(f"message_{field}" for field in fields))
    received = {"communicator": "world", "collective": "recv"}
    assert [value(f"{name}_total", **received) for name in names] == list(numbers.values())
    assert value("step_bytes_total", communicator="world across hosts", collective="allreduce") == 80
    assert (value("calls_in_flight", communicator="world"), value("stalls_total")) == (1, 4)
    assert value("update_sent_bytes_total", update="parameters") == 1
    assert math.isnan(value("update_staleness_last", update="parameters"))
    assert value("update_staleness_max", update="parameters") == math.inf
    assert len(found) == 2 * 6 + 5 + 6 + 2 + 5


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def exporting(target, read=metrics_of_rank, local_rank=0, seconds=0.02):
    job = ObservedJob(Config(metrics_seconds=seconds), 3, local_rank, "a", None, read)
    exporter = job_metrics.exporter(job, str(target)).attach()
    yield
    exporter.close()


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "torchmpi metrics"]


def get(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_the_server_answers_at_the_port_of_the_local_rank_until_the_end(logged):
    port = free_port()
    with exporting(port - 1, local_rank=1):
        assert get(port) == (prometheus.CONTENT_TYPE, prometheus.text_of(metrics_of_rank()))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(port, "/")
        with socket.create_connection(("127.0.0.1", port)) as client:  # gone without a request
            client.send(b"GET")
        assert "torchmpi_stalls_total" in get(port)[1]
    assert not threads()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port))
    for address in ("127.0.0.1", *["[::]"] * socket.has_dualstack_ipv6()):
        with exporting(f"{address}:{port}"):  # can be bound again at once
            assert get(port)[0] == prometheus.CONTENT_TYPE
    assert logged == []


def test_clients_that_send_nothing_or_slowly_delay_nobody_and_not_the_end():
    """Regression: a client that sent a byte every few seconds kept all others waiting."""
    port = free_port()
    with exporting(port), contextlib.ExitStack() as opened:
        clients = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)]
        for _ in range(3):
            for client in clients[-50:]:
                client.send(b"G")
            assert get(port)[0] == prometheus.CONTENT_TYPE
        clients[0].settimeout(30)
        assert clients[0].recv(1) == b""  # one of too many
    assert not threads()


def test_requests_that_are_too_long_or_of_another_method_are_refused():
    port = free_port()
    with exporting(port):
        for request, status in (
            (b"GET /metrics HTTP/1.1\r\nx: " + b"x" * 10000, b"431"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", b"501"),
            (b"\r\n\r\n", b"501"),
            (b"HEAD /metrics HTTP/1.0\r\n\r\n", b"200"),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                client.sendall(request)
                answer = client.recv(100000, socket.MSG_WAITALL)
                assert answer.split()[1] == status
                assert answer.endswith(b"\r\n\r\n")  # no body


def test_a_forked_process_does_not_keep_the_port():
    port = free_port()
    with exporting(port):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent closes its end
            os._exit(0)
        os.close(reader)
    with exporting(port):
        assert get(port)[0] == prometheus.CONTENT_TYPE
    os.close(writer)
    os.waitpid(child, 0)


def test_a_port_in_use_and_a_file_as_folder_are_reported(logged, tmp_path):
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for target in (listener.getsockname()[1], 65536, tmp_path / "file"):
            with exporting(target):
                assert not threads()
            assert f"rank 3: no metrics are exported to {target}: " in logged[-1]
    assert len(logged) == 3


def wait_until(condition):
    limit = time.monotonic() + 60
    while not condition() and time.monotonic() < limit:
        time.sleep(0.01)
    assert condition()


def test_the_file_is_rewritten_and_removed(tmp_path):
    calls = iter(range(1 << 30))
    path = tmp_path / "new" / "torchmpi_rank3.prom"
    with exporting(tmp_path / "new", lambda: metrics_of_rank(stalls=next(calls))):
        wait_until(path.exists)
        seen = [parsed(path.read_text())]
        wait_until(lambda: parsed(path.read_text()) != seen[0])  # always a whole text
    assert list((tmp_path / "new").iterdir()) == []
    assert not threads()


def test_the_file_stays_in_its_folder_when_the_program_changes_its_own(tmp_path, monkeypatch):
    """Regression: it was written to a folder of that name in the new one."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with exporting("new"):
        monkeypatch.chdir(tmp_path / "elsewhere")
        wait_until((tmp_path / "new" / "torchmpi_rank3.prom").exists)
    assert list((tmp_path / "new").iterdir()) == list((tmp_path / "elsewhere").iterdir()) == []


def test_failures_are_reported_once_and_the_export_goes_on(logged, tmp_path):
    path, results = tmp_path / "torchmpi_rank3.prom", iter([ValueError("not now")] * 3)

    def read():
        if error := next(results, None):
            raise error
        return metrics_of_rank()

    with exporting(tmp_path, read):
        wait_until(path.exists)
    assert logged == ["rank 3: metrics could not be exported (later failures are not reported): not now"]


# --- table


def test_the_table_names_the_ranks_with_the_least_and_the_most_seconds():
    ranks = []
    for rank, seconds in enumerate((3.0, 1.0, 2.0)):
        known = {"waited": seconds - 0.5, "moved": 0.5, "stalls": rank}
        calls = {"world": {"allreduce": {"calls": 1000, "bytes": 500_000, "seconds": seconds, **known}}}
        unknown = {"waited": 0.0, "moved": 0.0, "stalls": 0}
        if rank:
            calls["pair"] = {"barrier": {"calls": rank, "bytes": 0, "seconds": 0.5, **unknown}}
        sent = {"world": {"send": {"calls": 1, "bytes": 1000, "seconds": 0.1, **unknown}}}
        ranks.append(metrics_of_rank(rank=rank, calls=calls, messages=sent if rank == 2 else {}))
    assert job_metrics.table(ranks).splitlines() == [
        "calls of 3 ranks; the ranks named are those with the least and the most seconds:",
        "communicator  call       calls     MB  s: min   mean    max  waited  moved  stalls  ranks",
        "world         allreduce  1,000  1.500   1.000  2.000  3.000   1.500  0.500       3   1, 0",
        "pair          barrier      1-2  0.000   0.500  0.500  0.500       ?      ?       0   1, 2",
        "world         send           1  0.001   0.100  0.100  0.100       ?      ?       0   2, 2",
    ]


def test_a_long_table_is_cut():
    numbers = {"calls": 1, "bytes": 0, "seconds": 0.0, "waited": 0.0, "moved": 0.0, "stalls": 0}
    lines = job_metrics.table([metrics_of_rank(calls={f"g{i}": {"barrier": numbers} for i in range(40)})]).splitlines()
    assert len(lines) == 33
    assert lines[-1] == "and 10 more"
