"""To whoever shares a host: links, pipes, folders, code and locks of others are not followed, run or awaited."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.processes import output_of
from helpers.strangers import STRANGER, error_of, needs_root, running

from torchmpi import files
from torchmpi.backends import saved_tables
from torchmpi.backends.selection_table import Table
from torchmpi.cli import flight_commands
from torchmpi.cli.bench import bench_report
from torchmpi.communicators.flight_record import FlightRecord
from torchmpi.datasets import data_format
from torchmpi.engine import checkpoint
from torchmpi.engine.coordination import SingleProcess
from torchmpi.errors import CheckpointError, TorchMPIError
from torchmpi.parameterserver import shard_checkpoint
from torchmpi.shared_memory import kernels
from torchmpi.shared_memory.compiler import native_code
from torchmpi.shared_memory.read_only import ReadOnlyMemory, anonymous_file
from torchmpi.supervision import prometheus, report
from torchmpi.tensors import archive
from torchmpi.timeline.clocks import ClockSample
from torchmpi.timeline.trace_writer import TraceWriter, path_for

ANOTHER = STRANGER + 1
RANK_START = Path(files.__file__).parent / "cli" / "rank_start.py"


pytestmark = needs_root


@pytest.fixture
def public(tmp_path) -> Path:
    """A folder like /tmp."""
    for folder in (*[each for each in tmp_path.parents if each.name.startswith("pytest-")], tmp_path):
        folder.chmod(0o755)
    folder = tmp_path / "public"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def owned(path: Path, user: int) -> Path:
    os.lchown(path, user, user)
    return path


# --- outputs ----------------------------------------------------------------------------------------------------------


def write_timeline(folder: Path) -> None:
    job = {"rank": 0, "size": 1, "host": "h"}
    TraceWriter(path_for(folder, 0), job, [ClockSample(0, 0, 0)]).close()


def write_metrics(folder: Path) -> None:
    read = {"rank": 0, "host": "h", "stalls": 0}
    read |= {name: {} for name in ("calls", "steps", "messages", "in_flight", "updates")}
    exporter = prometheus.FileExporter(0, lambda: read, folder / prometheus.FILE_NAME.format(0), 0.01).attach()
    limit = time.monotonic() + 20
    while (folder / "torchmpi_rank0.prom").is_symlink() and time.monotonic() < limit:
        time.sleep(0.01)
    exporter.close()


def write_log(folder: Path) -> None:
    command = [sys.executable, RANK_START, "--log-dir", folder, "--", "echo", "text"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_servers(folder: Path) -> None:
    group = SimpleNamespace(rank=0, size=1, world_ranks=(0,), context=SimpleNamespace(job=1))
    shard_checkpoint._write_index(folder, "abcd", SimpleNamespace(group=group, servers={}))
    archive.write(folder / "shards-abcd-0.pt", {})


def write_flight_record(folder: Path) -> None:
    FlightRecord(str(folder), {"rank": 0, "size": 1}).close()


JOB = saved_tables.describe_job([0, 0], 2, 2, "Some MPI 1.0")
OUTPUTS = {
    "rank0.json.gz": write_timeline,
    "torchmpi_rank0.prom": write_metrics,
    "torchmpi_rank0.part": write_metrics,
    "report.json": lambda folder: report.write(str(folder / "report.json"), {}, {}),
    "rank0.log": write_log,
    "servers.json": write_servers,
    ".servers.json.lock": write_servers,
    ".servers.json.tmp": write_servers,
    "shards-abcd-0.pt": write_servers,
    "rank0.flight": write_flight_record,
    "tuning.json": lambda folder: saved_tables.save(folder / "tuning.json", JOB, Table()),
    "bench.json": lambda folder: bench_report.save({}, str(folder / "bench.json")),
}


@pytest.mark.parametrize("is_public", [True, False], ids=["in a public folder", "in the folder of the stranger"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_follow_no_link_of_another_user(public, name, is_public):
    victim = public.parent / "precious"
    victim.write_text("precious")
    folder = public
    if not is_public:  # for which the user has a reason: it is not in a folder in which everyone may write
        folder = public.parent / "of the stranger"
        folder.mkdir()
        owned(folder, STRANGER)
    owned_link = folder / name
    owned_link.symlink_to(victim)
    owned(owned_link, STRANGER)
    with contextlib.suppress(OSError, TorchMPIError, subprocess.CalledProcessError):
        OUTPUTS[name](folder)
    assert victim.read_text() == "precious" and stat.S_IMODE(victim.stat().st_mode) == 0o644


@pytest.mark.parametrize("name", ["rank0.json.gz", "report.json", "rank0.log", "servers.json", "bench.json"])
def test_outputs_do_not_wait_for_the_reader_of_a_pipe(public, name):
    os.mkfifo(public / name)
    owned(public / name, STRANGER)

    def write() -> None:
        signal.alarm(60)  # a hang ends this process only
        OUTPUTS[name](public)

    status, output = output_of(write)
    assert status == 0 or "not used: " in output, (status, output)


WRITERS = {
    "write": lambda path: files.write(path, "text", make_folder=True),
    "create": lambda path: os.close(files.create(path)),
    "append": lambda path: os.close(files.append(path)),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_folder_that_another_user_has_made_in_a_public_one_is_refused(public, writer, mode):
    folder = public / "traces"
    folder.mkdir()
    folder.chmod(mode)
    owned(folder, STRANGER)
    with pytest.raises(PermissionError, match="user 54321 has made traces in a folder in which everyone may write"):
        WRITERS[writer](folder / "file")
    assert list(folder.iterdir()) == []
    owned(folder, ANOTHER)
    assert error_of(ANOTHER, lambda: WRITERS[writer](folder / "file")) == ""  # its own
    own = folder / "of root"
    own.mkdir()
    WRITERS[writer](own / "file")


def test_a_link_of_another_user_leads_only_to_folders_of_that_user(tmp_path):
    for name, user in (("own", 0), ("theirs", STRANGER)):
        (tmp_path / name).mkdir()
        owned(tmp_path / name, user)
        (tmp_path / f"to {name}").symlink_to(tmp_path / name)
        owned(tmp_path / f"to {name}", STRANGER)
    files.write(tmp_path / "to theirs" / "file", "text")
    with pytest.raises(PermissionError, match="a link of user 54321 leads to it"):
        files.write(tmp_path / "to own" / "file", "text")
    assert list((tmp_path / "own").iterdir()) == []


def test_folders_of_a_group_and_of_other_users_are_used(tmp_path):
    """Root in the folder of a user, a project folder of a group, and a volume in which everyone may write."""
    tmp_path.parent.chmod(0o755)
    tmp_path.chmod(0o755)
    for name, user, mode in (("home", STRANGER, 0o700), ("project", STRANGER, 0o2775), ("volume", 0, 0o777)):
        folder = tmp_path / name
        folder.mkdir()
        owned(folder, user)
        folder.chmod(mode)
        for writer in WRITERS.values():
            writer(folder / "below" / "file")
    (tmp_path / "project").chmod(0o2777)
    assert error_of(ANOTHER, lambda: files.write(tmp_path / "project" / "file", "text")) == ""


def test_what_another_user_has_put_into_a_public_folder_is_not_replaced(public):
    for name in ("file", "link"):
        (public / name).symlink_to("nowhere") if name == "link" else (public / name).write_text("theirs")
        owned(public / name, STRANGER)
    for name in ("file", "link"):
        for writer in WRITERS.values():
            error = error_of(ANOTHER, lambda name=name, writer=writer: writer(public / name))
            assert "not used: " in error or "Permission denied" in error
    assert sorted(os.listdir(public)) == ["file", "link"] and (public / "file").read_text() == "theirs"


def test_a_log_is_not_appended_to_a_file_with_two_names(tmp_path):
    (tmp_path / "precious").write_text("precious")
    os.link(tmp_path / "precious", tmp_path / "rank0.log")
    with pytest.raises(PermissionError, match="not a file of its own name"):
        files.append(tmp_path / "rank0.log")
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_file_that_is_mounted_is_written_to(tmp_path):
    """Such as /dev/termination-log of Kubernetes, or a file of the host in a container."""
    for name in ("of the host", "mounted"):
        (tmp_path / name).write_text("old and long")
    mount = ["mount", "--bind", tmp_path / "of the host", tmp_path / "mounted"]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        files.write(tmp_path / "mounted", "new")
        with pytest.raises(OSError, match="busy"):
            files.create(tmp_path / "mounted")
    finally:
        subprocess.run(["umount", tmp_path / "mounted"], check=True)
    assert (tmp_path / "of the host").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["mounted", "of the host"]


def test_standard_output_is_written_to_whoever_reads_it(capfd):
    """Such as a pipe of the user who has called sudo."""
    reader, writer = os.pipe()
    os.fchown(writer, STRANGER, STRANGER)
    files.write(f"/dev/fd/{writer}", "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    os.close(writer)
    for name, stream in (("/dev/stdout", 0), ("/dev/stderr", 1)):
        report.write(name, {"reason": name}, {})
        assert f'"reason": "{name}"' in capfd.readouterr()[stream]


def test_a_checkpoint_does_not_replace_what_a_link_of_another_user_names(public):
    def save(path: Path) -> None:
        saver = checkpoint.Saver(SingleProcess())
        try:
            saver.save(path, checkpoint.Content({"epoch": 1}, {}, {}))
        finally:
            saver.close()

    precious = public.parent / "precious.ckpt"
    save(precious)
    before = (precious / ".metadata").stat().st_ino
    (public / "run.ckpt").symlink_to(precious)
    owned(public / "run.ckpt", STRANGER)
    with pytest.raises(CheckpointError, match=r"user 54321 has made|a link of user 54321"):
        save(public / "run.ckpt")
    assert (precious / ".metadata").stat().st_ino == before


# --- machine code -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    native_code._report.cache_clear()
    native_code.Compiler()._write("part", "recipe", b"image")
    return tmp_path / "cache"


def test_machine_code_is_written_for_this_user_only(cache):
    (path,) = cache.iterdir()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (cache, path)] == [0o700, 0o600]
    assert native_code.Compiler()._read("part", "recipe") == b"image"


@pytest.mark.parametrize("of_folder", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize("how", ["owner", "group", "everyone"])
def test_machine_code_that_others_may_have_written_is_not_run(cache, how, of_folder, capsys):
    (path,) = cache.iterdir()
    changed = cache if of_folder else path
    if how == "owner":
        owned(changed, STRANGER)
    else:
        os.chown(changed, 0, STRANGER)
        changed.chmod(0o770 if how == "group" else 0o777)
    compiler = native_code.Compiler()
    assert compiler._read("part", "recipe") is None and compiler._read("part", "recipe") is None
    assert (compiler.folder is None) == of_folder
    (line,) = capsys.readouterr().err.splitlines()
    assert f"compiled code in {changed} is not run" in line and "NUMBA_CACHE_DIR" in line


def test_machine_code_of_the_owner_of_the_package_is_run(cache, monkeypatch):
    """Of an administrator who is not root; the sources are of the same user."""
    (path,) = cache.iterdir()
    package = cache.parent / "package"
    package.mkdir()
    for each in (package, cache, path):
        owned(each, STRANGER)
    monkeypatch.setattr(native_code, "_PACKAGE", package)
    assert native_code.Compiler()._read("part", "recipe") == b"image"


# --- locks ------------------------------------------------------------------------------------------------------------


def test_a_lock_that_another_user_holds_ends_the_wait(tmp_path, monkeypatch, capsys):
    """Regression: start() waited as long as another user held the lock."""
    for folder in (*[each for each in tmp_path.parents if each.name.startswith("pytest-")], tmp_path):
        folder.chmod(0o755)
    path = tmp_path / "lock"
    path.touch(0o644)
    held = []

    def hold() -> None:
        held.append(path.open())
        fcntl.flock(held[0], fcntl.LOCK_EX)

    monkeypatch.setattr(kernels, "_LOCK_SECONDS", 0.2)
    with running(STRANGER, hold), files.open_lock(path) as lock:
        assert not kernels._may_compile(lock, path, waits=False)
        assert kernels._may_compile(lock, path, waits=True)
    assert f"another process has locked {path} for 0.2 s" in capsys.readouterr().err
    assert "Permission denied" in error_of(STRANGER, path.open)  # from now on


# --- flight records of processes of others ----------------------------------------------------------------------------


def dumped(process: int, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchmpi", "dump", str(process), "--out", folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_root_dumps_a_process_that_holds_anything_under_the_name_of_a_record(public):
    names = {kind: str(public / f"{kind}.flight") for kind in ("pipe", "sparse", "device", "folder", "false")}
    kept: list[Any] = []

    def hold() -> None:
        os.mkfifo(names["pipe"])
        kept.append(os.open(names["pipe"], os.O_RDWR))
        kept.append(os.open(names["sparse"], os.O_RDWR | os.O_CREAT))
        os.truncate(names["sparse"], 1 << 40)
        os.mkdir(names["folder"])
        kept.append(os.open(names["folder"], os.O_RDONLY))
        kept.append(os.open(names["false"], os.O_RDWR | os.O_CREAT))
        os.write(kept[-1], b"\0" * (1 << 20))
        about = {"rank": 0, "size": 1, "on_host": "0", "host": "\x1b[2J\x07evil\nrank 9", "process": 1}
        kept.append(FlightRecord("", about))
        kept[-1].ring(1, "\x1b]0;title\x07", [0]).enter(1, 0, ())

    with running(STRANGER, hold) as process:
        done = dumped(process, public.parent / "out")
    assert done.returncode == 0, done.stderr
    assert "last calls of 1 rank" in done.stdout and "evil" in done.stdout
    assert not [each for each in done.stdout + done.stderr if not each.isprintable() and each != "\n"]
    assert "rank 9" not in [line[:6] for line in done.stdout.splitlines()]
    assert os.listdir(public.parent / "out") == ["rank0.flight"]


def test_root_dumps_no_file_that_the_user_of_the_process_may_not_read(public):
    record = FlightRecord(str(public), {"rank": 0, "size": 1})  # of root, in a folder that all may search
    kept = []
    with running(STRANGER, lambda: kept.append(os.open(public / "rank0.flight", os.O_PATH))) as process:
        with pytest.raises(TorchMPIError, match="is a rank between"):
            flight_commands.dump(process, public.parent / "out")
    record.close()
    assert not (public.parent / "out").exists()


def test_the_records_of_ones_own_process_are_dumped_as_before(tmp_path):
    record = FlightRecord(str(tmp_path / "records"), {"rank": 0, "size": 1})
    os.chown(tmp_path / "records" / "rank0.flight", STRANGER, STRANGER)  # as on NFS, for root
    (found,) = flight_commands.dump(os.getpid(), tmp_path / "out")
    record.close()
    assert found.rank == 0 and os.listdir(tmp_path / "out") == ["rank0.flight"]


# --- shared data ------------------------------------------------------------------------------------------------------


def test_another_user_cannot_open_shared_data():
    file = anonymous_file("test")
    data_format.write(file, data_format.describe([torch.ones(3)]))
    memory = ReadOnlyMemory.sealed(file)
    assert "Permission denied" in error_of(STRANGER, lambda: os.open(memory.ticket.path, os.O_RDONLY))
    assert memory.tensor(4096, torch.float32, (3,)).tolist() == [1, 1, 1]


def test_shared_data_of_another_user_are_not_read(public):
    for path, user, mode in ((public / "theirs", STRANGER, 0o644), (public / "writable", 0, 0o666)):
        with files.replacing(path, mode=mode) as file:
            data_format.write(file.fileno(), data_format.describe([torch.ones(3)]))
        owned(path, user).chmod(mode)
    with pytest.raises(PermissionError, match=f"it belongs to user {STRANGER}"):
        data_format.open_file(public / "theirs")
    with pytest.raises(PermissionError, match="everyone may write to it"):
        data_format.open_file(public / "writable")
