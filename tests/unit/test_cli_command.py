"""To a user of the command line: options, reports, and facts about a process."""

from __future__ import annotations

import json
import mmap
import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

import torchmpi.cli
import torchmpi.cli.facts
from torchmpi.cli import formatting, hosts, launching
from torchmpi.cli.doctor.diagnosis import messages
from torchmpi.cli.facts import ProcessFacts
from torchmpi.communicators.flight_record import FlightRecord
from torchmpi.errors import ArgumentError


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["info", "extra"],
        ["doctor", "--timeout", "-1"],
        ["--verbose"],
        ["run", "train.py"],
        ["run", "-n", "2", "--min-ranks", "1", "train.py"],
        ["run", "--hosts", "a", "--hostfile", "b", "train.py"],
        ["run", "-n", "0", "train.py"],
        ["run", "-n", "2"],
        ["run", "-n", "2", "--without-mpi", "--dry-run", "train.py"],
        ["run", "-n", "2", "--on-lost-rank", "continue", "--respawns", "1", "train.py"],
    ],
)
def test_wrong_command_lines_end_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        torchmpi.cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: torchmpi" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", (["dump", str(os.getpid()), "--out"], ["analyze", "--torch"]))
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, arguments, capsys):
    """Regression: a traceback."""
    (tmp_path / "file").touch()
    about = {"rank": 0, "size": 1, "on_host": "0"}
    record, folder = FlightRecord(str(tmp_path), about), str(tmp_path / "file" / "folder")
    assert torchmpi.cli.main([*arguments, folder, *[str(tmp_path)] * (arguments[0] == "analyze")]) == 1
    record.close()
    assert re.fullmatch(rf"torchmpi {arguments[0]}: .*Not a directory: '.*/file/?.*'\n", capsys.readouterr().err)


# --- hosts


@pytest.mark.parametrize(
    ("text", "num_ranks", "placed"),
    [
        ("a:2,b:2", None, [("a", 2), ("b", 2)]),
        ("a:2,b:2", 2, [("a", 2)]),
        ("a,b,c", 7, [("a", 3), ("b", 2), ("c", 2)]),
        ("a,b", None, [("a", 1), ("b", 1)]),
        ("a:1,b,c:2", 6, [("a", 1), ("b", 3), ("c", 2)]),
        ("a:1,b:1,a:2", None, [("a", 3), ("b", 1)]),
        ("a,a,b", None, [("a", 2), ("b", 1)]),  # as in the files of PBS and LSF
    ],
)
def test_placement(text, num_ranks, placed):
    assert hosts.place(hosts.parse_list(text), num_ranks) == placed


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a:0", "no room for a rank"),
        ("a,,b", "'' is not a host"),
        ("a:x", "'a:x' is not a host"),
        ("-Fpath", "'-Fpath' is not a host"),
        ("a;b", "'a;b' is not a host"),
        ("a,a:2", "named twice"),
        ("a:2,b:1", "4 ranks do not fit on a:2,b:1, with room for 3"),
    ],
)
def test_hosts_that_are_refused(text, complaint):
    with pytest.raises(ArgumentError, match=re.escape(complaint)):
        hosts.place(hosts.parse_list(text), 4)


def test_host_files_of_both_formats(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# nodes\n\na slots=2\nb : 3 # fast\nc\n")
    assert hosts.read_file(file) == [("a", 2), ("b", 3), ("c", None)]
    for text, complaint in (("a 2", "line 1: 'a 2'"), ("# none", "names no host"), ("-Fpath", "line 1: .-Fpath. is")):
        file.write_text(text)
        with pytest.raises(ArgumentError, match=complaint):
            hosts.read_file(file)


# --- formatting


def test_core_list():
    assert formatting.core_list([]) == ""
    assert formatting.core_list([3]) == "3"
    assert formatting.core_list([9, 0, 1, 3]) == "0-1,3,9"


def test_hanging_keeps_long_words_and_line_breaks():
    path = "/very/long" * 20
    assert formatting.hanging("name  ", f"first\n{path}") == ["name  first", f"      {path}"]
    lines = formatting.hanging("ok  ", "word " * 60)
    assert len(lines) > 2 and all(len(line) <= formatting.WIDTH for line in lines)
    assert all(line.startswith("    word") for line in lines[1:])


# --- facts


def test_facts_of_this_process_survive_json():
    facts = torchmpi.cli.facts.process_facts()
    assert ProcessFacts(**json.loads(json.dumps(asdict(facts)))) == facts
    assert facts.cores == sorted(os.sched_getaffinity(0)) and 1 <= facts.num_physical_cores <= len(facts.cores)
    assert facts.executable == sys.executable
    assert all(facts.versions.values()), facts.versions


def test_facts_contain_no_secrets(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    assert "hunter2" not in json.dumps(asdict(torchmpi.cli.facts.process_facts()))


def test_wrong_settings_are_a_fact(monkeypatch):
    monkeypatch.delenv("TORCHMPI_TUNING_FILE")
    monkeypatch.setenv("TORCHMPI_NONSENSE", "1")
    monkeypatch.setenv("TORCHMPI_BIND", "everywhere")
    facts = torchmpi.cli.facts.process_facts()
    assert facts.settings_from_environment == ["TORCHMPI_BIND", "TORCHMPI_NONSENSE"]
    for error, name in zip(facts.settings_errors, ("bind='everywhere'", "TORCHMPI_NONSENSE"), strict=True):
        assert name in error


def test_leftovers_are_old_ours_and_not_in_use(tmp_path):
    names = "torchmpi-group-old", "sem.mp-worker", "torchmpi-group-new", "something"
    old, semaphore, new, other = (tmp_path / name for name in names)
    for path in (old, semaphore, new, other):
        path.write_bytes(b"x")
    hour_ago = time.time() - 3600
    for path in (old, semaphore, other):
        os.utime(path, (hour_ago, hour_ago))
    assert torchmpi.cli.facts.leftovers(tmp_path) == [str(semaphore), str(old)]


def test_variables_that_run_sets_are_no_settings(monkeypatch):
    monkeypatch.delenv("TORCHMPI_TUNING_FILE")
    monkeypatch.setenv("TORCHMPI_RUN_PID", "1")
    monkeypatch.setenv("TORCHMPI_BIND", "none")
    assert torchmpi.cli.facts.process_facts().settings_from_environment == ["TORCHMPI_BIND"]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm to write to")
def test_a_mapped_file_is_in_use():
    path = f"/dev/shm/sm_segment.test-{os.getpid()}"  # tests/mpi allow none of torchmpi meanwhile
    with open(path, "w+b") as file:
        file.write(b"x" * 4096)
        file.flush()
        try:
            hour_ago = time.time() - 3600
            os.utime(path, (hour_ago, hour_ago))
            assert path in torchmpi.cli.facts.leftovers(Path("/dev/shm"))
            with mmap.mmap(file.fileno(), 4096):
                os.utime(path, (hour_ago, hour_ago))
                assert path not in torchmpi.cli.facts.leftovers(Path("/dev/shm"))
        finally:
            os.unlink(path)


def test_library_paths():
    maps = """7f0 r-xp 0 fd:00 1 /env/lib/libmpi.so.40
7f1 r--p 0 fd:00 1 /env/lib/libmpi.so.40
7f2 r-xp 0 fd:00 2 /usr/lib/x86_64-linux-gnu/libmpich.so.12.1.6
7f3 r-xp 0 fd:00 3 /opt/cray/lib/libmpi_cray.so.12
7f3 r-xp 0 fd:00 3 /home/a b/env/lib/libmpi.so.40
7f4 r-xp 0 fd:00 4 /usr/lib/libmpi_mpifh.so.40
7f5 r-xp 0 fd:00 5 /env/mpi4py/MPI.openmpi.cpython-311.so""".splitlines()
    assert torchmpi.cli.facts.library_paths(maps) == [
        "/env/lib/libmpi.so.40",
        "/home/a b/env/lib/libmpi.so.40",
        "/opt/cray/lib/libmpi_cray.so.12",
        "/usr/lib/x86_64-linux-gnu/libmpich.so.12.1.6",
    ]


# --- trials


@pytest.mark.parametrize(
    ("text", "library"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to", "Open MPI 4.1.4"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "MPICH 5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 2023", "Intel MPI 2021.9"),
        ("usage: mpirun", "of an unknown library"),
    ],
)
def test_library_of_a_launcher(text, library):
    assert launching.library_of(text) == library


def test_a_command_that_hangs_is_ended_with_its_children(monkeypatch):
    monkeypatch.setattr(launching, "_TERMINATION_SECONDS", 0.1)
    script = "trap '' TERM; sleep 600 & echo $!; wait"  # ignores SIGTERM, as does its child
    ended = launching.run_limited(["sh", "-c", script], seconds=0.2)
    assert ended.status is None and ended.seconds < 30
    with suppress(psutil.NoSuchProcess):  # a zombie until init has reaped the process
        limit = time.monotonic() + 10
        while psutil.Process(int(ended.stdout)).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < limit, "still there"
            time.sleep(0.01)


def test_a_command_is_run_without_a_folder_for_temporary_files(monkeypatch):
    """Regression: in a container with a read-only file system `torchmpi run` and `doctor` raised an error."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert launching.run_limited(["echo", "hello"], seconds=60).stdout == "hello\n"


def test_a_command_that_cannot_be_started():
    ended = launching.run_limited(["/no/such/mpirun"], seconds=5)
    assert ended.status == 127 and "No such file" in ended.stderr


def test_messages_are_found_in_other_output():
    output = '[1,0]<stdout>:torchmpi-probe:{"mpi": {"size": 2}}\nwarning: torchmpi-probe:{"cut\nnoise\n'
    assert messages(output) == [{"mpi": {"size": 2}}]
