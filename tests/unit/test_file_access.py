"""To whoever names a file: outputs appear whole, inputs are of limited size, and readers refuse what is not theirs."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import resource
import signal
import stat
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchmpi import files
from torchmpi.backends import saved_tables
from torchmpi.cli import flight_analysis, flight_commands
from torchmpi.communicators import flight_record
from torchmpi.communicators.flight_record import FlightRecord
from torchmpi.engine import checkpoint
from torchmpi.engine.coordination import SingleProcess
from torchmpi.errors import ArgumentError, CheckpointError, TorchMPIError
from torchmpi.parameterserver import shard_checkpoint
from torchmpi.parameterserver.shards import chunk_numel
from torchmpi.tensors import archive
from torchmpi.timeline import trace_reader
from torchmpi.timeline.clocks import ClockSample
from torchmpi.timeline.trace_reader import read_folder
from torchmpi.timeline.trace_writer import TraceWriter, path_for

JOB = saved_tables.describe_job([0, 0], 2, 2, "Some MPI 1.0")


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_at_the_end_only(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with path.open() as reader:
        with files.replacing(path) as file:
            file.write(b"new")
            assert path.read_text() == "old"
        assert reader.read() == "old" and path.read_text() == "new"
    with pytest.raises(ZeroDivisionError), files.replacing(path) as file:
        file.write(b"newer")
        _ = 1 // 0
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_modes_follow_the_umask_which_is_not_touched(tmp_path, monkeypatch):
    """Regression: the umask was 0 for a moment, in which other threads made files that everyone could write to."""
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask of all threads was changed"))
        archive.write(tmp_path / "archive", {"a": 1})
        files.write(tmp_path / "file", "text")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}


def test_links_of_ones_own_are_followed(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "folder").symlink_to("there")
    (tmp_path / "link").symlink_to("folder/file")
    (tmp_path / "loop").symlink_to("loop")
    for number, writer in enumerate((
        lambda path: files.write(path, "0"),
        lambda path: os.write(files.create(path), b"1"),
        lambda path: os.write(files.append(path), b"2"),
    )):  # fmt: skip
        writer(tmp_path / "link")
        assert (tmp_path / "there" / "file").read_text() == ("0", "1", "12")[number]
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            writer(tmp_path / "loop")
    assert (tmp_path / "link").is_symlink() and os.listdir(tmp_path / "there") == ["file"]


def test_devices_and_pipes_of_ones_own_are_written_to(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for path in (tmp_path / "null", tmp_path / "pipe"):
        files.write(path, "a")
        for descriptor in (files.create(path), files.append(path)):
            os.write(descriptor, b"b")
            os.close(descriptor)
    assert os.read(reader, 10) == b"abb"
    os.close(reader)
    with pytest.raises(OSError, match="No such device or address"):  # nobody reads it
        files.write(tmp_path / "pipe", "a")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and (tmp_path / "null").is_symlink()


def test_folders_are_made_if_that_is_wanted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.write("a/b/file", "text")
    files.write("a/b/../c/file", "text", make_folder=True)
    assert (tmp_path / "a" / "c" / "file").read_text() == "text" and os.listdir("a/b") == []
    files.make_folder("d/e")
    files.check_folder("d/e")
    with pytest.raises(FileNotFoundError):
        files.check_folder("d/f")
    for path in ("d", "."):
        with pytest.raises(OSError):
            files.write(path, "text")


def test_descriptors_are_closed_after_errors(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    before = os.listdir("/proc/self/fd")
    for path in (tmp_path / "loop", tmp_path / "loop" / "file", tmp_path / "folder", Path("/proc/none")):
        for writer in (lambda path: files.write(path, ""), files.create, files.append):
            with pytest.raises(OSError):
                writer(path)
    assert len(os.listdir("/proc/self/fd")) == len(before)


# --- inputs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["pipe", "folder", "terabyte", "/dev/zero"])
def no_file(request, tmp_path) -> Path:
    path = tmp_path / "input" / "file"
    path.parent.mkdir()
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "folder":
        path.mkdir()
    elif request.param == "terabyte":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to(request.param)
    return path


def test_what_is_no_file_of_usual_size_is_refused(no_file):
    with pytest.raises(OSError, match=r"not a regular file|Is a directory|larger than 100 bytes"):
        files.read(no_file, 100)


def test_readers_refuse_what_is_no_file(no_file, tmp_path):
    """Regression: a pipe under the name of a tuning file, or in a checkpoint, was waited for."""

    def put(name: str) -> Path:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        return no_file.rename(tmp_path / name)

    no_file = put("tuning.json")
    assert "it cannot be read" in saved_tables.load(no_file, JOB)[1]
    for name in ("servers.json", "shards-ab-0.pt"):
        write_servers(tmp_path, 1)
        (tmp_path / name).unlink()
        no_file = put(name)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_servers(tmp_path)
        no_file = no_file.rename(tmp_path / "aside")
    no_file = put("run/.metadata")
    with pytest.raises(CheckpointError):
        checkpoint.read(tmp_path / "run", SingleProcess())
    no_file = put("records/rank0.flight")
    with pytest.raises(TorchMPIError):
        flight_commands.read_folder(tmp_path / "records")
    put("traces/rank0.json.gz")
    with pytest.raises((ArgumentError, OSError)):
        read_folder(tmp_path / "traces")


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 101, "[" * 101 + "]" * 101, "[[" * 51])
def test_deep_json_is_refused_before_it_is_parsed(text):
    with pytest.raises(ValueError, match="too deeply nested"):
        files.parse_json(text)


def test_brackets_in_strings_and_flat_json_are_not_deep():
    value = [["[[[{{{" * 50, '"[' * 50, "\\"]] * 300
    assert files.parse_json(json.dumps(value)) == value
    assert files.parse_json("[" * 100 + "]" * 100)
    assert files.parse_json(f"[{'[' * 60}{']' * 60},{'[' * 60}{']' * 60}]")


@pytest.mark.parametrize(
    ("user", "group", "mode", "reason"),
    [
        (None, 54321, 0o755, ""),
        (None, 54321, 0o775, "group 54321 may write to it"),
        (None, 54321, 0o757, "everyone may write to it"),
        (None, None, 0o775, ""),  # as to the folder of the program
        (54321, None, 0o755, "it belongs to user 54321"),
    ],
)
def test_code_is_run_unless_others_may_have_written_it(user, group, mode, reason):
    like = os.stat_result((0o40775, 0, 0, 1, os.geteuid(), os.getegid(), 0, 0, 0, 0))
    owner = like.st_uid if user is None else user
    found = os.stat_result((0o100000 | mode, 0, 0, 1, owner, like.st_gid if group is None else group, 0, 0, 0, 0))
    assert files.why_not_trusted(found, like) == reason


# --- parameter servers ------------------------------------------------------------------------------------------------


def write_servers(folder: Path, size: int) -> None:
    index = dict([shard_checkpoint._FORMAT]) | {"token": "ab", "size": size}
    index["servers"] = [{"name": "s", "shape": [40], "dtype": "float32"}]
    (folder / "servers.json").write_text(json.dumps(index))
    numel = 40 // size
    for rank in range(size):
        counts = {name: torch.ones(1, dtype=torch.int64) for name in ("versions", "steps", "row_steps")}
        content = {"token": "ab", "rank": rank, "0": {"values": torch.arange(1.0 * numel) + numel * rank, **counts}}
        archive.write(folder / f"shards-ab-{rank}.pt", dict([shard_checkpoint._FORMAT]) | content)


def read_servers(folder: Path) -> torch.Tensor:
    server = SimpleNamespace(is_saved=True, name="s", shape=(40,), dtype=torch.float32, numel=40, parts=[(0, 40)])
    server.own_shards = range(1)
    server.shards = SimpleNamespace(chunk_numel=chunk_numel(4, 4))
    context = SimpleNamespace(servers={0: server}, group=SimpleNamespace(rank=0, size=1, where="rank 0"))
    index = shard_checkpoint._read_index(folder, context)
    (parts,) = shard_checkpoint._read_shards(folder, index, context)
    return torch.cat([saved["values"] for _, saved in parts])


def test_an_index_of_servers_names_no_file_outside_its_folder(tmp_path):
    folder = tmp_path / "inside"
    (folder / "shards-").mkdir(parents=True)
    write_servers(folder, 1)
    (folder / "shards-ab-0.pt").rename(tmp_path / "secret-0.pt")
    index = json.loads((folder / "servers.json").read_text())
    (folder / "servers.json").write_text(json.dumps(index | {"token": "/../../secret"}))
    with pytest.raises(CheckpointError):
        read_servers(folder)


@pytest.mark.parametrize(
    "damage",
    [
        {"versions": torch.zeros(1)},
        {"steps": torch.zeros(1, dtype=torch.int32)},
        {"versions": torch.zeros(2, dtype=torch.int64)},
        {"steps": None},
        {"row_steps": None},
        {"values": torch.arange(39.0)},
        {"values": torch.arange(40.0, dtype=torch.float64)},
    ],
    ids=str,
)
def test_a_shard_with_another_dtype_or_length_is_refused(tmp_path, damage):
    write_servers(tmp_path, 1)
    path = tmp_path / "shards-ab-0.pt"
    content = torch.load(path)
    content["0"] |= damage
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"is damaged: it does not have 40 values of torch\.float32"):
        read_servers(tmp_path)


def test_files_of_killed_writers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if (pid := os.fork()) == 0:
        try:
            archive.write(tmp_path / "shards-1-0.pt", {})
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    assert len(list(tmp_path.iterdir())) == 1
    seen = []

    def save(*_: object) -> None:
        files.remove_unfinished(tmp_path, "shards-")
        seen.extend(path.name[:14] for path in tmp_path.iterdir())

    monkeypatch.setattr(torch, "save", save)
    archive.write(tmp_path / "shards-2-0.pt", {})
    assert seen == [".shards-2-0.pt"]  # that of the running process remains


@pytest.mark.slow
def test_an_archive_that_expands_does_not_exhaust_memory(tmp_path):
    """Regression: 4 MB of a file of zeros in a zip became 4 GB."""
    write_servers(tmp_path, 1)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bomb:
        with zipfile.ZipFile(tmp_path / "shards-ab-0.pt") as good:
            for name in good.namelist():
                bomb.writestr(name, good.read(name))
        with bomb.open("archive/data/9", "w", force_zip64=True) as part:
            for _ in range(1024):
                part.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        archive.parse(Path("shards.pt"), buffer.getvalue(), mark=shard_checkpoint._FORMAT, what="file of shards")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


class Trap:
    """A pickled object whose loading makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_an_archive_runs_nothing(tmp_path):
    trap, buffer = tmp_path / "made", io.BytesIO()
    torch.save(dict([shard_checkpoint._FORMAT]) | {"0": Trap(trap)}, buffer)
    with pytest.raises(CheckpointError):
        archive.parse(Path("shards.pt"), buffer.getvalue(), mark=shard_checkpoint._FORMAT, what="file of shards")
    assert not trap.exists()


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path) -> Path:
    saver = checkpoint.Saver(SingleProcess())
    tensors = {"a": torch.zeros(4), "b": torch.ones(4)}
    saver.save(tmp_path / "run", checkpoint.Content({"epoch": 1}, {}, {"network": tensors}))
    saver.close()
    return tmp_path / "run"


def change_metadata(run: Path, change) -> None:
    metadata = pickle.loads((run / ".metadata").read_bytes())
    change(metadata, {index.fqn: part for index, part in metadata.storage_data.items()})
    (run / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", ["../other", "/etc/hostname", "sub/../../other", "", ".."])
def test_metadata_name_no_file_outside_the_folder(run, name):
    """Regression: the file was opened, and waited for if it was a pipe."""
    (run.parent / "other").write_bytes((run / "__0_0.distcp").read_bytes())
    change_metadata(run, lambda _, parts: setattr(parts["network.a"], "relative_path", name))
    with pytest.raises(CheckpointError, match=r"outside the folder|Is a directory"):
        checkpoint.read(run, SingleProcess())


def test_a_checkpoint_runs_nothing(run, tmp_path):
    for file in run.iterdir():
        before = file.read_bytes()
        file.write_bytes(pickle.dumps(Trap(tmp_path / "made")))
        with pytest.raises(CheckpointError):
            checkpoint.read(run, SingleProcess())
        file.write_bytes(before)
    assert not (tmp_path / "made").exists()


# --- flight records ---------------------------------------------------------------------------------------------------


def record_with(folder: Path, **about: object) -> Path:
    record = FlightRecord(str(folder), {"rank": 0, "size": 1, **about})
    record.ring(1, "world", [0]).enter(1, 0x101, (3,))
    record.close()
    return folder / "rank0.flight"


def write_text(path: Path, start: int, text: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start + 128)
        file.write(text.ljust(3968, b"\0")[:3968])


WRONG = [{"rank": 10**12}, {"rank": -1}, {"rank": "0"}, {"rank": True}, {"rank": 0, "size": 10**12}]
WRONG += [{"rank": 0, "size": each} for each in ("2", None, -1, [], 1.5)]


@pytest.mark.parametrize("about", WRONG, ids=str)
def test_numbers_of_ranks_that_no_job_has_are_refused(tmp_path, about):
    """Regression: a MemoryError, or another error of Python."""
    write_text(record_with(tmp_path), 0, json.dumps(about).encode())
    with pytest.raises(TorchMPIError, match="is no flight record"):
        flight_commands.read_folder(tmp_path)


@pytest.mark.parametrize("text", [b"[" * 3968, b'{"name":' * 400, b'{"name": "n", "ranks": ' + b"[" * 900])
def test_deep_texts_in_a_record_are_left_out(tmp_path, text):
    """Regression: a RecursionError."""
    path = record_with(tmp_path)
    write_text(path, 1 << 16, text)
    (record,) = flight_commands.read_folder(tmp_path)
    assert record.groups == [] and flight_analysis.report([record])
    write_text(path, 0, text)
    with pytest.raises(TorchMPIError, match="is no flight record"):
        flight_commands.read_folder(tmp_path)


def test_groups_of_ever_more_ranks_take_limited_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_record, "_MOST_RANKS", 1000)
    record = FlightRecord(str(tmp_path), {"rank": 0, "size": 1})
    for number in range(20):
        record.ring(number, "world", [0]).enter(1, 0x101, ())
        text = json.dumps({"name": "n", "ranks": f"{number}-999"}).encode()
        write_text(record.path, (1 << 16) + number * 135168, text)
    groups = flight_record.read(record.path).groups
    record.close()
    assert len(groups) == 20 and sum(len(group.ranks) for group in groups) < 4000


def test_texts_of_a_record_do_not_control_the_terminal(tmp_path):
    record_with(tmp_path, host="\x1b[2J\x9b1m", program="a\nb")
    (record,) = flight_commands.read_folder(tmp_path)
    assert record.about["host"] == r"\x1b[2J\x9b1m" and record.about["program"] == r"a\nb"


def test_only_the_used_part_of_a_sparse_record_is_read(tmp_path):
    path = record_with(tmp_path)
    with path.open("r+b") as file:
        file.seek(8)
        file.write((2**62).to_bytes(8, "little"))  # rings
    os.truncate(path, flight_record.MOST_BYTES)
    (record,) = flight_commands.read_folder(tmp_path)
    assert len(record.groups) == 1
    os.truncate(path, 1 << 40)
    with pytest.raises(TorchMPIError, match="larger than"):
        flight_commands.read_folder(tmp_path)


# --- traces -----------------------------------------------------------------------------------------------------------


def trace(folder: Path, *lines: str) -> Path:
    """Write the trace of a rank in three members."""
    job = {"rank": 0, "size": 1, "host": "h"}
    writer = TraceWriter(path_for(folder, 0), job, [ClockSample(0, 0, 0)], flush_seconds=3600.0)
    for line in lines:
        writer._lines.append(line)
        writer.flush()
    writer.close()
    return writer.path


def interval(number: int) -> str:
    event = {"ph": "X", "name": f"n{number}", "cat": "range", "pid": 0, "tid": 1000, "ts": number, "dur": 1}
    return json.dumps({**event, "args": {"thread": 1000}})


@pytest.mark.parametrize("line", [b" ", b"[\n", b'{"ph": "M", "name": "n"},\n'], ids=["space", "brackets", "events"])
def test_a_trace_that_expands_without_limit_is_refused(tmp_path, line):
    """Regression: 3 MB became 3.2 GB in memory."""
    path = trace(tmp_path)
    many = gzip.compress(line * (2 << 20), 9)
    with path.open("ab") as file:
        for _ in range(100):
            file.write(many)
    with pytest.raises(ArgumentError, match=r"expands more than 100 times|lines without events"):
        read_folder(tmp_path)


def test_a_trace_that_was_compressed_anew_is_read(tmp_path, monkeypatch):
    path = trace(tmp_path, interval(1), interval(2))
    text = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(text))
    assert read_folder(tmp_path)[0].is_complete
    monkeypatch.setattr(trace_reader, "_MOST_HELD_BYTES", 100)  # passed on before the checksum is known
    assert read_folder(tmp_path)[0].is_complete
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ArgumentError, match="its end is missing"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "[]", "3", "{}", '{"ph": "X"}', '{"ph": "X", "cat": "collective", "name": "n"}', "[" * 5000,
        interval(1).replace('"ts": 1', '"ts": "1"'),
        interval(1).replace('"ts": 1', '"ts": 1e300'), interval(1).replace('"ts": 1', '"ts": NaN'),
        '{"ph": "M", "name": "torchmpi_clock", "args": {"samples": [["a", 1, 2]]}}',
        '{"ph": "M", "name": "torchmpi_job", "args": {"rank": "0", "size": 1, "format": 2}}',
    ],
)  # fmt: skip
def test_events_that_no_rank_has_written_are_an_error_with_the_file(tmp_path, line):
    """Regression: errors of Python."""
    trace(tmp_path, line)
    with pytest.raises(ArgumentError, match=r"rank0\.json\.gz"):
        read_folder(tmp_path)
