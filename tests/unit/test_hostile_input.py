"""Everything that is read from a network or a file, with random and damaged content: clear errors, no code, no hang."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import resource
import signal
import socket
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchmpi import files
from torchmpi.backends import saved_tables
from torchmpi.backends.selection_table import Table, checked, keys
from torchmpi.cli.doctor import diagnosis
from torchmpi.engine import checkpoint
from torchmpi.engine.coordination import SingleProcess
from torchmpi.errors import CheckpointError, LaunchError
from torchmpi.launch import meeting
from torchmpi.launch.launcherless import mesh
from torchmpi.launch.launcherless.endpoint import _HEAD, Endpoint
from torchmpi.launch.launcherless.requests import CommunicationError
from torchmpi.parameterserver import shard_checkpoint
from torchmpi.parameterserver.shards import chunk_numel
from torchmpi.tensors import archive

JOB = saved_tables.describe_job([0, 0], 2, 2, "Some MPI 1.0")
MARK = ("torchmpi_shards", 3)
FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
MANY = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The data with some bytes replaced, removed, inserted, or cut off."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(result) - 1, 0)))
        kind = draw(st.sampled_from(("replace", "cut", "remove", "insert")))
        if kind == "replace" and result:
            result[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del result[at:]
        elif kind == "remove":
            del result[at : at + draw(st.integers(1, 64))]
        else:
            result[at:at] = draw(st.binary(min_size=1, max_size=16))
    return bytes(result)


class Trap:
    """A pickled object whose loading makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


# --- tuning files -------------------------------------------------------------------------------------------------


def tuning_file(path: Path) -> bytes:
    table = Table()
    for key in list(keys())[:3]:
        table[key] = checked(key, [(None, "mpi")])
    saved_tables.save(path, JOB, table)
    return path.read_bytes()


@FEW
@given(st.data())
def test_a_damaged_tuning_file_is_a_reason_not_an_error(tmp_path, data):
    path = tmp_path / "tuning.json"
    path.unlink(missing_ok=True)  # the file of the previous example, to which another table would be added
    content = data.draw(st.binary(max_size=200) | damaged(tuning_file(path)))
    path.write_bytes(content)
    table, reason = saved_tables.load(path, JOB)
    assert table is not None or reason


@pytest.mark.slow
@MANY
@given(json_values, json_values, json_values)
def test_a_tuning_file_with_other_json_is_a_reason_not_an_error(tmp_path, entries, table, rule):
    path = tmp_path / "tuning.json"
    key = next(keys())
    rows = ({**key._asdict(), "rule": rule}, table)
    for content in (entries, {"format": 1, "entries": entries}, *(_with(row) for row in rows)):
        path.write_text(json.dumps(content))
        found, reason = saved_tables.load(path, JOB)
        assert found is not None or reason


def _with(row: Any) -> dict[str, Any]:
    return {"format": 1, "entries": [{"shape": JOB.shape, "versions": JOB.versions, "table": [row]}]}


def test_a_deeply_nested_tuning_file_is_a_reason_not_an_error(tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text("[" * 200_000)
    assert saved_tables.load(path, JOB)[0] is None
    saved_tables.save(path, JOB, Table())
    assert saved_tables.load(path, JOB)[0] == Table()


# --- archives: shards of parameter servers, plain state of checkpoints --------------------------------------------


def shard_bytes() -> bytes:
    buffer = io.BytesIO()
    torch.save(
        {
            MARK[0]: MARK[1],
            "token": "abcd",
            "rank": 0,
            "0": {
                "values": torch.arange(40.0),
                "versions": torch.zeros(1, dtype=torch.int64),
                "steps": torch.zeros(1, dtype=torch.int64),
                "row_steps": torch.zeros(1, dtype=torch.int64),
            },
        },
        buffer,
    )
    return buffer.getvalue()


SHARDS = shard_bytes()


@FEW
@given(st.binary(max_size=300) | damaged(SHARDS))
def test_a_damaged_archive_is_refused(raw):
    content = None
    with contextlib.suppress(CheckpointError):
        content = archive.parse(Path("shards.pt"), raw, mark=MARK, what="file of shards")
    assert content is None or torch.equal(content["0"]["values"], torch.arange(40.0)), "damaged, and not noticed"


@MANY
@given(st.data())
def test_an_archive_with_another_pickle_is_refused(data):
    """The checksums are right: only the content of the pickle is damaged."""
    with zipfile.ZipFile(io.BytesIO(SHARDS)) as good:
        parts = {name: good.read(name) for name in good.namelist()}
    (name,) = (name for name in parts if name.endswith("data.pkl"))
    parts[name] = data.draw(damaged(parts[name]))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as other:
        for each, content in parts.items():
            other.writestr(each, content)
    content = None
    with contextlib.suppress(CheckpointError):
        content = archive.parse(Path("shards.pt"), buffer.getvalue(), mark=MARK, what="file of shards")
    assert content is None or isinstance(content, dict)


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


def test_an_archive_runs_nothing(tmp_path):
    trap = tmp_path / "made"
    buffer = io.BytesIO()
    torch.save({MARK[0]: MARK[1], "0": Trap(trap)}, buffer)
    with pytest.raises(CheckpointError):
        archive.parse(Path("shards.pt"), buffer.getvalue(), mark=MARK, what="file of shards")
    assert not trap.exists()


@pytest.mark.slow
def test_an_archive_that_expands_does_not_exhaust_memory():
    """Regression: 4 MB of a file of zeros in a zip became 4 GB."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bomb:
        with zipfile.ZipFile(io.BytesIO(SHARDS)) as good:
            for name in good.namelist():
                bomb.writestr(name, good.read(name))
        with bomb.open("archive/data/9", "w", force_zip64=True) as part:
            for _ in range(1024):
                part.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        archive.parse(Path("shards.pt"), buffer.getvalue(), mark=MARK, what="file of shards")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


# --- checkpoints of parameter servers ------------------------------------------------------------------------------


def one_rank(shape: tuple[int, ...] = (40,)) -> Any:
    """What `_read_index` and `_read_shards` need of a job with one server on one rank."""
    server = SimpleNamespace(is_saved=True, name="s", shape=shape, dtype=torch.float32, numel=40, parts=[(0, 40)])
    server.shards = SimpleNamespace(chunk_numel=chunk_numel(4, 4))
    return SimpleNamespace(servers={0: server}, group=SimpleNamespace(rank=0, size=1, where="rank 0"))


INDEX = {
    "torchmpi_shards": 3,
    "token": "abcd",
    "size": 1,
    "servers": [{"name": "s", "shape": [40], "dtype": "float32"}],
}


def read_servers(folder: Path) -> None:
    context = one_rank()
    index = shard_checkpoint._read_index(folder, context)
    shard_checkpoint._read_shards(folder, index, context)


@FEW
@given(st.data())
def test_a_damaged_index_of_servers_is_refused(tmp_path, data):
    (tmp_path / "shards-abcd-0.pt").write_bytes(SHARDS)
    text = json.dumps(INDEX).encode()
    (tmp_path / "servers.json").write_bytes(text)
    read_servers(tmp_path)
    (tmp_path / "servers.json").write_bytes(data.draw(damaged(text)))
    is_refused = False
    try:
        read_servers(tmp_path)
    except CheckpointError as error:
        is_refused = "servers.json" in str(error) or "shards" in str(error)
    assert is_refused or json.loads((tmp_path / "servers.json").read_bytes()).keys() >= INDEX.keys()


@MANY
@given(st.sampled_from(sorted(INDEX)), json_values, json_values)
def test_an_index_of_servers_with_other_json_is_refused(tmp_path, name, value, whole):
    (tmp_path / "shards-abcd-0.pt").write_bytes(SHARDS)
    for content in (whole, {**INDEX, name: value}, {each: INDEX[each] for each in INDEX if each != name}):
        (tmp_path / "servers.json").write_text(json.dumps(content))
        is_refused = False
        try:
            read_servers(tmp_path)
        except CheckpointError:
            is_refused = True
        assert is_refused or {**INDEX, **content, "servers": INDEX["servers"]} == INDEX


def test_an_index_of_servers_names_no_file_outside_its_folder(tmp_path):
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "secret-0.pt").write_bytes(SHARDS)
    (folder / "servers.json").write_text(json.dumps({**INDEX, "token": "/../../secret"}))
    (folder / "shards-").mkdir()
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
    content = torch.load(io.BytesIO(SHARDS))
    content["0"] |= damage
    (tmp_path / "servers.json").write_text(json.dumps(INDEX))
    torch.save(content, tmp_path / "shards-abcd-0.pt")
    with pytest.raises(CheckpointError, match=r"is damaged: it does not have 40 values of torch\.float32"):
        read_servers(tmp_path)


# --- checkpoints of engines ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "run"
    saver = checkpoint.Saver(SingleProcess())
    net = torch.nn.Linear(3, 2)
    saver.save(path, checkpoint.Content({"epoch": 1}, {}, {"network": net.state_dict()}))
    saver.close()
    return path


def restore(path: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (path / name).write_bytes(content)


@FEW
@given(st.data())
def test_a_damaged_checkpoint_is_refused_or_right(saved, data):
    files = {file.name: file.read_bytes() for file in saved.iterdir()}
    right = checkpoint.read(saved, SingleProcess())
    name = data.draw(st.sampled_from(sorted(files)))
    (saved / name).write_bytes(data.draw(st.binary(max_size=200) | damaged(files[name])))
    found = None
    try:
        with contextlib.suppress(CheckpointError):
            found = checkpoint.read(saved, SingleProcess())
    finally:
        restore(saved, files)
    assert found is None or found.common == right.common
    assert found is None or torch.equal(found.trees["network"]["weight"], right.trees["network"]["weight"])


def test_a_checkpoint_runs_nothing(saved, tmp_path):
    files = {file.name: file.read_bytes() for file in saved.iterdir()}
    for name in files:
        (saved / name).write_bytes(pickle.dumps(Trap(tmp_path / "made")))
        try:
            with pytest.raises(CheckpointError):
                checkpoint.read(saved, SingleProcess())
        finally:
            restore(saved, files)
    assert not (tmp_path / "made").exists()


# --- messages between ranks without a launcher -----------------------------------------------------------------------

frames = st.builds(
    lambda context, length, tag, kind, body: _HEAD.pack(context, length, tag, kind) + body,
    st.integers(0, 3) | st.integers(0, 2**64 - 1),
    st.integers(0, 64) | st.integers(0, 2**64 - 1),
    st.integers(-3, 3) | st.integers(-(2**31), 2**31 - 1),
    st.sampled_from((0, 0, 0, 1, 2, 3)) | st.integers(4, 2**32 - 1),
    st.binary(max_size=80),
)


@FEW
@given(st.lists(frames | st.binary(max_size=64), max_size=6))
def test_an_endpoint_survives_any_bytes_of_a_peer(stream):
    """Receives end with a message or an error; the memory taken does not follow the announced length."""
    own, other = socket.socketpair()
    endpoint = Endpoint(0, ["here", "there"], {1: own}, 50e-6)
    endpoint._end_with = lambda *_: None  # type: ignore[method-assign]  # which ends this process
    try:
        receive = endpoint.receive(0, 1, 0, memoryview(bytearray(64)), [0, 1])
        other.settimeout(5)
        try:
            other.sendall(b"".join(stream))
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # refused
        with contextlib.suppress(CommunicationError):
            receive.Wait()
        assert endpoint._reader.is_alive() or not endpoint._links_open
    finally:
        other.close()
        endpoint.close()


@pytest.mark.parametrize("length", (2**63, 2**48, 2**40))
def test_an_announced_length_beyond_the_memory_ends_the_connection(length):
    """Regression: the reading thread died in the allocation, and later receives waited forever."""
    own, other = socket.socketpair()
    endpoint = Endpoint(0, ["here", "there"], {1: own}, 50e-6)
    try:
        other.sendall(_HEAD.pack(0, length, 5, 0))
        receive = endpoint.receive(0, 1, 0, memoryview(bytearray(8)), [0, 1])
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(CommunicationError):
            receive.Wait()
    finally:
        other.close()
        endpoint.close()


def accept(sent: list[bytes]) -> tuple[list[int], list[bool]]:
    """Let strangers send something to a rank that waits for rank 1, then rank 1 connect; return who was taken in."""
    key = bytes(range(16))
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(meeting.listen_nearby(4))
        others = [opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in sent]
        for other, content in zip(others, sent, strict=True):
            other.connect(listener.getsockname())
            other.sendall(content)
            other.shutdown(socket.SHUT_WR)
        targets = {0: listener.getsockname().decode()}
        with ThreadPoolExecutor(1) as pool:
            right = pool.submit(meeting.meet, 1, key, [], targets, [], timeout_seconds=20)
            met = meeting.meet(0, key, [listener], {}, [1], timeout_seconds=20)
            opened.callback(met.close)
            opened.callback(right.result().close)
        return list(met.sockets), [is_closed(other) for other in others]


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(5)
    try:
        while sock.recv(100):  # the answer to a hello
            pass
        return True
    except ConnectionResetError:  # it had more to read
        return True


HELLO = struct.pack("<8sII16s", b"torchmpi", 1, 0, bytes(16))


@FEW
@given(st.lists(st.binary(max_size=40) | st.binary(max_size=40).map(HELLO.__add__), max_size=4))
def test_strangers_are_not_taken_for_a_rank(sent):
    assert accept(sent) == ([1], [True] * len(sent))


@MANY
@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_a_store_with_other_content_is_an_error_of_the_launch(content):
    """Another program that uses the same store: the message names the rank."""
    store = SimpleNamespace(wait=lambda keys, limit: None, get=lambda key: content, set=lambda key, value: None)
    with pytest.raises(LaunchError):
        mesh.Mesh(store, 1, 2, 0.2, key=b"", is_one_host=False).run()


# --- output of trial processes --------------------------------------------------------------------------------------


@MANY
@given(st.text(max_size=60), json_values)
def test_messages_of_trial_processes_in_any_output(noise, value):
    mark = diagnosis._MESSAGE_MARK
    found = diagnosis.messages(f"{noise}\n{mark}{noise}\n{mark}{json.dumps({'value': str(value)})}")
    assert {"value": str(value)} in found
