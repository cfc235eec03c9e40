"""To a user of benchmarks/: options, plans, tables, sums and sections of pages are right, without a job."""

from __future__ import annotations

import argparse
import doctest
import importlib
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.bench_rows import FACTS, cells_of, figures, row

from torchmpi.cli.bench import bench_report as report
from torchmpi.cli.bench import timing

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

import leaks  # noqa: E402
import measure_costs  # noqa: E402
import memory  # noqa: E402
import rpc_peer  # noqa: E402
import server  # noqa: E402
import server_parts  # noqa: E402
import starts  # noqa: E402
import usage  # noqa: E402
from server_parts import ALL  # noqa: E402


def parsed(*given: str) -> argparse.Namespace:
    return server.make_parser().parse_args(given)


@pytest.mark.parametrize("name", [*sorted(path.stem for path in BENCHMARKS.glob("*.py")), "measure_costs"])
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


# --- the command line and the plan


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--parts", "speed,slowness"], "'slowness' is no part; choose among speed, rows, idle, storm, link"),
        (["--peers", "gloo"], "'gloo' is no peer; choose among rpc, none"),
        (["--gbit", "0"], "no speed of a link in Gbit/s"),
        (["--gbit", "fast"], "no speed of a link in Gbit/s"),
        (["--storm-ranks", "0"], "no number of at least 1"),
        (["--idle", "-1"], "is no time"),
    ],
)
def test_errors_about_arguments_name_the_allowed_values(given, words, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(*given)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_jobs_for_each_part():
    def plan(*given: str) -> list[tuple[int, tuple[str, ...], bool]]:
        return [(job.ranks, job.task.parts, bool(job.task.settings)) for job in server.planned_jobs(parsed(*given))]

    assert plan("--parts", "storm", "--storm-ranks", "3") == [(3, ("storm",), False)]
    assert plan("--parts", "link") == [(2, ("link",), False)]
    assert plan("--parts", "idle,speed", "-n", "1,4") == [
        (1, ("idle", "speed"), False), (1, ("idle",), True), (4, ("idle", "speed"), False), (4, ("idle",), True),
    ]  # fmt: skip


# --- figures


def speed(contestant: str, median: float | None, *, collective: str = ALL, num_bytes: int = 4096) -> dict:
    moved = (1 if contestant == "copy" else 2) * num_bytes
    head = {"part": "speed", "ranks": 2, "verb": collective, "dtype": "float32", "mode": "sync", "bytes": num_bytes}
    return head | {"contestant": contestant, "payload_bytes": moved} | figures(median)


def made(*rows: dict) -> dict:
    return report.new_report("ps", [{"facts": FACTS, "rows": list(rows)}], {"seconds": 1})


CELL = [speed("torchmpi", 10.0), speed("rpc", 600.0), speed("rpc script", 400.0), speed("rpc one call", 300.0),
        speed("copy", 2.5)]  # fmt: skip


def test_speed_is_compared_with_each_form_of_rpc_and_with_the_copy():
    text = server.as_text(made(*CELL))
    line = next(cells for cells in cells_of(text) if cells[:1] == ["4K"])
    # 8192 bytes in 10 us; 600 / 10, 400 / 10, 300 / 10; a copy takes 2.5 us for half of the bytes.
    assert line[-5:] == ["0.82", "60.0", "40.0", "30.0", "50%"], text
    assert ALL in text and "Some MPI 1.0" in text and "no figures" not in text


def test_idle_and_storm():
    idle = [{"part": "idle", "ranks": 2, "rank": rank, "seconds": 10.0, "what": "server, no thread",
             "share": 0.001 * (rank + 1)} for rank in range(2)]  # fmt: skip
    storm = {"part": "storm", "ranks": 4, "bytes": 8192, "seconds": 30.0, "updates": 3000, "updates_per_second": 100.0,
             "is_exact": True, "resident_bytes_before": 300 << 20, "resident_bytes_after": 301 << 20}  # fmt: skip
    text = server.as_text(made(*idle, storm, storm | {"is_exact": False}))
    assert ["server,", "no", "thread", "2", "10", "0.10", "0.20"] in cells_of(text), text
    assert ["8K", "4", "30.0", "3000", "100", "exact", "300.0", "301.0"] in cells_of(text), text
    assert text.count("WRONG") == 1


def test_link_with_and_without_hosts():
    head = {"part": "link", "ranks": 2}
    row = head | {"bytes": 64_000_000, "gbit": 1.0, "what": "send", "bytes_per_second": 1e8, "low": 9e7, "high": 1.1e8,
                  "is_exact": True}  # fmt: skip
    text = server.as_text(made(row, row | {"what": "receive", "gbit": None, "is_exact": False}))
    assert ["send", "2", "64.0", "100.0", "90.0", "to", "110.0", "80%"] in cells_of(text), text
    assert "receive: WRONG" in text
    assert server.as_text(made(head | {"why_not": "alone"})).endswith("link: alone")


def test_expected_values_after_the_storm():
    ranks = [server_parts.Storm(SimpleNamespace(rank=rank, size=3), 256) for rank in range(3)]
    total = torch.zeros(32, dtype=torch.int64)
    for storm, rounds in zip(ranks, (4, 0, 5), strict=True):
        for _ in range(rounds):
            for gradient in storm._gradients:
                total += gradient
    assert total.unique().numel() > 1
    assert all(torch.equal(storm._total([4, 0, 5]), total) for storm in ranks)
    assert not torch.equal(ranks[0]._total([4, 1, 5]), total)


class Alone:
    """The part of a communicator that the clock uses, with one rank."""

    def Barrier(self) -> None:
        pass

    def Allreduce(self, mine, result, op) -> None:
        result[:] = mine


def test_times_of_another_process(monkeypatch):
    monkeypatch.setattr(timing.mpi_library, "load", lambda: SimpleNamespace(MAX=None))
    asked = []

    def timed(num_calls: int) -> float:
        asked.append(num_calls)
        return num_calls * 1e-3

    call = timing.TimedCall("far away", (lambda: pytest.fail("called here"),), lambda: None, timed)
    (sample,) = timing.measure_calls([call], Alone(), seconds=0.01, one_clock=True)
    assert sample.median_us == pytest.approx(1000) and sample.calls_per_batch == asked[-1] == 3


# --- starts, leaks, memory


def test_starts():
    jobs = [
        {"facts": FACTS, "rows": [row("auto", time, start=number)]}
        for number, time in enumerate((100.0, 110.0, 300.0), 1)
    ]
    text = starts.as_text(report.new_report("starts", jobs, {}))
    assert "1 of 3 starts is far slower" in text and text.count("0 | 1") >= 3
    assert "none of 2 starts are far slower" in starts.verdict([row("auto", 1.0), row("auto", 1.1)])
    assert starts.verdict([]) == "No start was measured."


def test_leaks():
    names = "resident_bytes", "shared_resident_bytes", "segment_bytes", "dev_shm_bytes"
    growth = dict.fromkeys((*names, "descriptors", "threads", "mappings"), 0)
    found = {f"{name}_growth": value for name, value in (growth | {"resident_bytes": 4096, "descriptors": 2}).items()}
    found["before"] = growth | {"resident_bytes": 3 << 20, "descriptors": 7}
    rows = [{"ranks": 2, "rank": 0, "part": "4 B", "calls": 100, "seconds": 0.1} | found]
    text = leaks.as_text(report.new_report("leaks", [{"facts": FACTS, "rows": rows}], {}))
    right = ["0", "4", "B", "100", "0.1", "3.0", "+4", "7+2", "0+0", "0+0", "+0", "+0"]
    assert any(cells == right for cells in cells_of(text)), text


def test_memory():
    mib = 1 << 20

    def stage(resident: int, shared: int):
        return {"resident_bytes": resident * mib, "shared_resident_bytes": shared * mib, "segment_bytes": shared * mib}

    stages = {"torch and mpi4py": stage(200, 0), "import torchmpi": stage(203, 0), "start()": stage(300, 16)}
    rows = memory.memory_rows(2, 1, stages)
    assert [line["part"] for line in rows] == [*stages, "torchmpi altogether"]
    text = memory.as_text(report.new_report("memory", [{"facts": FACTS, "rows": rows}], {}))
    assert any(cells[-4:] == ["300", "+100.0", "+16.0", "16.0"] for cells in cells_of(text)), text


def test_usage_of_this_process():
    before = usage.usage()
    held = mmap.mmap(-1, 64 << 20)
    held.write(bytes(64 << 20))
    with open("/proc/self/status"):
        after = usage.usage()
    held.close()
    assert after["resident_bytes"] - before["resident_bytes"] > 32 << 20
    assert after["descriptors"] == before["descriptors"] + 1


def test_segments_are_counted_also_when_deleted():
    maps = (
        "1000-3000 rw-s 00000000 00:19 5          /dev/shm/torchmpi-x (deleted)\n"
        "4000-5000 rw-s 00000000 00:01 9          /memfd:torchmpi (deleted)\n"
        "6000-9000 r-xp 00000000 08:01 7          /usr/lib/libc.so.6\n"
    )
    assert usage.segment_bytes(maps) == 0x3000


# --- the process with torch.distributed.rpc

needs_rpc = pytest.mark.skipif(not torch.distributed.rpc.is_available(), reason="this torch was built without RPC")
COMMAND = [sys.executable, "-c", rpc_peer._BOOTSTRAP, str(BENCHMARKS)]


def ask(process: subprocess.Popen[str], command: str, **values: object) -> dict:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"do": command, **values}) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@pytest.mark.slow
@needs_rpc
def test_a_server_that_is_its_own_client(tmp_path):
    process = subprocess.Popen([*COMMAND, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert ask(process, "hello") == {"why_not": None}
        started = ask(process, "start", rank=0, size=1, address=(tmp_path / "rpc").as_uri(), threads=1,
                      cores=sorted(os.sched_getaffinity(0)))  # fmt: skip
        assert {*started["forms"], *started["why_not"]} == {*rpc_peer.FORMS} and "rpc" in started["forms"]
        for shape, index in (([5, 1], []), ([4, 3], [0, 2])):  # all values, or some rows
            assert ask(process, "make", shape=shape) == ask(process, "find", shape=shape, index=index) == {}
            assert ask(process, "touch", value=2.0) == {}
            for form in started["forms"]:
                assert ask(process, "run", form=form, calls=2)["seconds"] > 0
            right = 4.0 * len(started["forms"])
            assert ask(process, "look") == {"low": right, "high": right}
        assert "KeyError" in ask(process, "run", form="telegraph", calls=1)["error"]
        assert ask(process, "idle", seconds=0.05)["share"] >= 0
        assert ask(process, "drop") == ask(process, "leave") == {}
        process.stdin.close()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_stopped_process_ends_with_its_rank():
    rank = subprocess.Popen(
        [sys.executable, "-c", _RANK, *COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    child = int(rank.stdout.readline())
    assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    rank.kill()
    rank.communicate()
    limit = time.monotonic() + 30
    with suppress(FileNotFoundError):  # a zombie until init has reaped the process
        while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
            if time.monotonic() > limit:
                os.kill(child, signal.SIGKILL)
                pytest.fail("still there")
            time.sleep(0.02)


_RANK = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([*sys.argv[1:], str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdin.write('{"do": "hello"}\\n')
child.stdin.flush()
child.stdout.readline()
child.send_signal(signal.SIGSTOP)
os.waitpid(child.pid, os.WUNTRACED)
print(child.pid, flush=True)
time.sleep(600)
"""


# --- scripts/measure_costs.py


def test_single_sections_of_a_page_are_measured_again(tmp_path, monkeypatch):
    """The others stay as they are, and in their order."""
    commands: list[list[str]] = []

    def measured(environment: Path, command: list[str]) -> str:
        commands.append(command)
        return f"title\n  2 ranks    {environment.name} 1.0, bound\n\ntimes {len(commands)}"

    monkeypatch.setattr(measure_costs, "measured", measured)
    page, output = measure_costs.PAGES["costs"], tmp_path / "page.md"
    output.write_text(f"# old\n\n## {page.sections['calls'].title}\n\nold times\n\n## no section now\n\nothers\n")
    measure_costs.main(["--sections", "nn,native", "--ranks", "2,4", "--seconds", "3", "--output", str(output)])
    assert [command[command.index("-n") :] for command in commands[::2]] == [
        ["-n", n, "--seconds", "3"] for n in "2424"
    ]
    found = measure_costs.sections_of(output.read_text())
    assert list(found) == [page.sections[name].title for name in ("native", "nn", "calls")]
    assert "old times" in found[page.sections["calls"].title] and "others" not in output.read_text()
    for name, numbers in (("nn", (1, 2, 3, 4)), ("native", (5, 6, 7, 8))):
        text = found[page.sections[name].title]
        assert re.findall(r"^times (\d)$", text, re.MULTILINE) == list(map(str, numbers))
        assert f"### {page.sections[name].title}: openmpi 1.0, 2 ranks\n" in text and "-n 2|4 --seconds 3`" in text


def test_sections_that_a_page_does_not_have_are_refused(capsys):
    with pytest.raises(SystemExit):
        measure_costs.main(["--page", "server", "--sections", "rows,hvd"])
    assert "--sections: no hvd among whole, rows" in capsys.readouterr().err


def test_calls_between_hosts_are_measured_on_every_placement():
    commands = [section.command for section in measure_costs.PAGES["hosts"].sections.values()]
    placements = [command.partition("--hosts ")[2].split()[0] for command in commands]
    assert placements == ["h0:1,h1:1", "h0:2,h1:2", "h0:2,h1:2,h2:2,h3:2"]
