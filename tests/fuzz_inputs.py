"""Fuzzing of all that reads a file or listens on a socket: the true data are returned, or the documented error raised.

    python tests/fuzz_inputs.py --cases 100000 --seed 1

The same for what listens on a socket: the content of a file is sent to it.

A case takes the files of one target, damages one of them, and reads it: with bytes replaced, removed, inserted, cut off
or random; with other values in its structure, under right checksums; as a pipe, a folder, a loop of links, or a file of
a terabyte. It fails if the reader raises another error, returns altered data although a checksum exists, takes more
than 256 MB, or does not end: then the stack is printed. The cases run in a process of their own. A failure prints the
seed and the number of its case; ``--seed S --first CASE --cases 1`` repeats it.

A target is a row of TARGETS.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gzip
import io
import json
import logging
import math
import os
import pickle
import random
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from torchmpi import files
from torchmpi.backends import saved_tables
from torchmpi.backends.selection_table import Table, checked, keys
from torchmpi.cli import flight_analysis, flight_commands, torch_traces, trace_commands
from torchmpi.cli.bench import bench_report
from torchmpi.cli.top.job_history import JobHistory, pace_of
from torchmpi.communicators.flight_record import OF_MESSAGES, FlightRecord, read_live
from torchmpi.communicators.message_record import Channels
from torchmpi.datasets import data_format
from torchmpi.engine import checkpoint
from torchmpi.engine.coordination import SingleProcess
from torchmpi.errors import ArgumentError, CheckpointError, LaunchError, TorchMPIError
from torchmpi.launch import meeting
from torchmpi.launch.launcherless import mesh, signed_entries
from torchmpi.launch.launcherless.step_file import StepFile
from torchmpi.parameterserver import shard_checkpoint
from torchmpi.parameterserver.runs import run_record
from torchmpi.parameterserver.runs.run_record import RunRecord
from torchmpi.parameterserver.shards import chunk_numel
from torchmpi.shared_memory.compiler import native_code
from torchmpi.supervision import prometheus
from torchmpi.tensors import archive
from torchmpi.timeline.clocks import ClockSample
from torchmpi.timeline.events import CallRecord, GroupInfo, Origin
from torchmpi.timeline.merging import merge
from torchmpi.timeline.trace_reader import WRONG_EVENTS, read_folder
from torchmpi.timeline.trace_writer import TraceWriter, path_for

MOST_MORE_BYTES = 256 << 20
CASE_SECONDS = 30.0
_HUGE_BYTES = 1 << 40
_ODD_NUMBERS = (0, -1, 1, 7, 255, 2**20, 2**24, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 2**64, 10**12, 10**30)
_ODD_VALUES = (*_ODD_NUMBERS, math.nan, math.inf, 1e300, 0.5, True, None, "", "\x1b[2J\n", "../../x", "9" * 5000, [])

Mutator = Callable[[random.Random, bytes], bytes]


class Target(NamedTuple):
    """Something that reads files."""

    name: str
    prepare: Callable[[Path], None]
    """Writes the files to an empty folder."""
    read: Callable[[Path], Any]
    """Reads them."""
    errors: tuple[type[Exception], ...]
    """What `read` may raise."""
    is_right: Callable[[Any, Any], bool] = lambda found, true: True
    """Whether what was read is right, given what the undamaged files have; any, where there is no checksum."""
    structured: Mapping[str, tuple[Mutator, ...]] = {}
    """Further ways to damage the files whose names end like this."""


# --- damage -----------------------------------------------------------------------------------------------------------


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    """Replace, remove, insert or cut off some bytes."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at = rng.randrange(len(result) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(result):
            result[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(result):
            result[at] = rng.randrange(256)
        elif kind == 2:
            del result[at:]
        elif kind == 3:
            del result[at : at + rng.randint(1, 64)]
        elif kind == 4:
            result[at:at] = rng.randbytes(rng.randint(1, 64))
        elif kind == 5:  # a number
            at -= at % 8
            result[at : at + 8] = (rng.choice(_ODD_NUMBERS) % 2**64).to_bytes(8, "little")
        else:  # another part of the same file
            start = rng.randrange(len(result) + 1)
            part = result[start : start + rng.randint(1, 4096)]
            result[at : at + len(part)] = part
    return bytes(result)


def flip_bit(rng: random.Random, data: bytes) -> bytes:
    """Change one bit, as a disk or a network may."""
    result = bytearray(data)
    result[rng.randrange(len(result))] ^= 1 << rng.randrange(8)
    return bytes(result)


def random_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return other bytes, some with the beginning of the file."""
    return data[: rng.choice((0, 4, 64, 4096))] + rng.randbytes(rng.choice((0, 1, 100, 5000)))


def damage_json(rng: random.Random, data: bytes) -> bytes:
    """Put another value somewhere into a JSON text."""
    return json.dumps(_with_another_value(rng, json.loads(data))).encode()


def deep_json(rng: random.Random, data: bytes) -> bytes:
    """Return lists in lists."""
    return rng.choice((b"[", b'{"a":')) * rng.choice((90, 1000, 200_000))


def _with_another_value(rng: random.Random, value: Any) -> Any:
    if rng.random() < 0.2 or not value or not isinstance(value, (dict, list)):
        return rng.choice((*_ODD_VALUES, [value] * 3, {"a": value}))
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    changed = value.copy()
    if rng.random() < 0.2:
        del changed[key]
    else:
        changed[key] = _with_another_value(rng, value[key])
    return changed


def damage_pages(rng: random.Random, data: bytes) -> bytes:
    """Put another value into a text of a flight record."""
    places = [match.start() for match in re.finditer(rb'\{"', data)]
    if not places:
        return data
    at = rng.choice(places)
    end = data.index(b"\0", at)
    text = rng.choice((damage_json, damage_json, deep_json))(rng, data[at:end])[: 4096 - 128]
    return data[:at] + text.ljust(4096 - 128, b"\0") + data[at + 4096 - 128 :]


def damage_lines(rng: random.Random, data: bytes) -> bytes:
    """Put other values into events of a trace, under right checksums."""
    lines = gzip.decompress(data).decode().split("\n")
    for _ in range(rng.choice((1, 1, 3))):
        number = rng.randrange(len(lines))
        with contextlib.suppress(ValueError):
            event = json.loads(lines[number].rstrip(","))
            lines[number] = json.dumps(_with_another_value(rng, event)) + ","
    if rng.random() < 0.1:
        del lines[rng.randrange(len(lines))]
    return gzip.compress("\n".join(lines).encode(), 1)


def expanding_trace(rng: random.Random, data: bytes) -> bytes:
    """Return a trace of a megabyte that expands to a gigabyte: one line, or many."""
    line = gzip.compress((b" " if rng.random() < 0.5 else b"[\n") * (1 << 20), 9)
    return data + line * 1024


def damage_metadata(rng: random.Random, data: bytes) -> bytes:
    """Change the values of the metadata of a checkpoint."""
    if rng.random() < 0.1:  # a place in the memo far beyond what the file needs
        return b"\x80\x04Nr" + (2**31 - 1).to_bytes(4, "little") + b"."
    metadata = pickle.loads(data)
    index, part = rng.choice(list(metadata.storage_data.items()))
    entry = metadata.state_dict_metadata[index.fqn]
    kind = rng.randrange(6)
    if kind == 0:
        part.relative_path = rng.choice(("../x", "/etc/passwd", "/dev/zero", ".", "..", "", "a/../__0_0.distcp", 3))
    elif kind == 1:
        part.offset = rng.choice(_ODD_NUMBERS)
    elif kind == 2:
        part.length = rng.choice(_ODD_NUMBERS)
    elif kind == 3:
        entry.size = torch.Size(rng.choice(((1 << 40,), (0,), (1 << 20, 1 << 20), ())))
    elif kind == 4:
        metadata.storage_data[index] = rng.choice(list(metadata.storage_data.values()))
    else:
        rng.choice((metadata.storage_data, metadata.state_dict_metadata)).clear()
    return pickle.dumps(metadata)


def damage_archive(rng: random.Random, data: bytes) -> bytes:
    """Damage a part of a file of torch.save(), under right checksums, or compress it."""
    with zipfile.ZipFile(io.BytesIO(data)) as whole:
        parts = {name: whole.read(name) for name in whole.namelist()}
    name = rng.choice([name for name in parts if not name.endswith("/data/0")])
    parts[name] = damage_bytes(rng, parts[name])
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as other:
        for each, content in parts.items():
            other.writestr(each, content)
        if method == zipfile.ZIP_DEFLATED:
            other.writestr("archive/data/9", bytes(64 << 20))
    return buffer.getvalue()


def put_in_the_way(rng: random.Random, path: Path) -> None:
    """Replace a file by something that is none."""
    path.unlink()
    kind = rng.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        path.touch()
        os.truncate(path, _HUGE_BYTES)
    else:
        path.symlink_to("/dev/zero")


# --- targets ----------------------------------------------------------------------------------------------------------

JOB = saved_tables.describe_job([0, 0], 2, 2, "Some MPI 1.0")


def prepare_tuning(folder: Path) -> None:
    table = Table()
    for key in list(keys())[:3]:
        table[key] = checked(key, [(None, "mpi")])
    saved_tables.save(folder / "tuning.json", JOB, table)


def read_tuning(folder: Path) -> Any:
    table, reason = saved_tables.load(folder / "tuning.json", JOB)
    assert table is not None or reason
    return table


def prepare_run(folder: Path) -> None:
    nan = math.nan
    events = [
        (0, rank, "w 0", "add", 10 * rank + step, 10 * rank + step + 1, 2.0 * step + rank, 1.0, 16, nan, -1, 0)
        for rank in range(2)
        for step in range(4)
    ]
    events += [(3, 0, "", "", step, step + 1, float(step), nan, 0, nan, -1, 0) for step in range(3)]
    RunRecord.of(events, num_ranks=2).save(folder / "run.npz")


def read_run(folder: Path) -> Any:
    record = run_record.read_run(folder / "run.npz")
    return record.text(), record.csv()


def one_rank() -> Any:
    server = SimpleNamespace(is_saved=True, name="s", shape=(40,), dtype=torch.float32, numel=40, parts=[(0, 40)])
    server.own_shards = range(1)
    server.shards = SimpleNamespace(chunk_numel=chunk_numel(4, 4))
    return SimpleNamespace(servers={0: server}, group=SimpleNamespace(rank=0, size=1, where="rank 0"))


def prepare_shards(folder: Path) -> None:
    index = dict([shard_checkpoint._FORMAT]) | {"token": "abcd", "size": 2, "job": 5, "ranks": [0, 1]}
    index["servers"] = [{"name": "s", "shape": [40], "dtype": "float32"}]
    (folder / "servers.json").write_text(json.dumps(index, indent=1))
    for rank in range(2):
        counts = {name: torch.ones(1, dtype=torch.int64) for name in ("versions", "steps", "row_steps")}
        content = {"token": "abcd", "rank": rank, "0": {"values": torch.arange(20.0) + 20 * rank, **counts}}
        archive.write(folder / f"shards-abcd-{rank}.pt", dict([shard_checkpoint._FORMAT]) | content)


def read_shards(folder: Path) -> Any:
    context = one_rank()
    index = shard_checkpoint._read_index(folder, context)
    (parts,) = shard_checkpoint._read_shards(folder, index, context)
    return [(begin, saved["values"].tolist(), saved["versions"].tolist()) for begin, saved in parts]


def swap_ranks(rng: random.Random, data: bytes) -> bytes:
    """Return the file of the other rank, which is of the same length."""
    with tempfile.TemporaryDirectory() as name:
        prepare_shards(Path(name))
        both = [path.read_bytes() for path in sorted(Path(name).glob("*.pt"))]
    return both[data == both[0]]


def prepare_checkpoint(folder: Path) -> None:
    saver = checkpoint.Saver(SingleProcess())
    net = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}
    saver.save(folder / "run", checkpoint.Content({"epoch": 1}, {"kept": {"a": 2}}, {"network": net}))
    saver.close()


def read_checkpoint(folder: Path) -> Any:
    saved = checkpoint.read(folder / "run", SingleProcess())
    return saved.common, saved.ranks, {name: each.tolist() for name, each in saved.trees["network"].items()}


def prepare_records(folder: Path) -> None:
    for rank in range(2):
        about = {"rank": rank, "size": 3, "host": "h", "process": 9, "program": "p", "on_host": "0-1"}
        record = FlightRecord(str(folder), about)
        ring = record.ring(1, "world", [0, 1, 2])
        for seq in range(1, 6 + rank):
            ring.enter(seq, 0x101, (3, 4))
            ring.leave(seq)
        channels = Channels(lambda record=record: record.ring(1, "world", [0, 1, 2], OF_MESSAGES))
        channels.channel(1 - rank, is_receive=bool(rank)).begin(1, 8)
        record.close()
        path = folder / f"rank{rank}.flight"
        os.truncate(path, (1 << 16) + 2 * 135168)  # without the unused part of the block


def read_records(folder: Path) -> Any:
    records = flight_commands.read_folder(folder)
    live = {}
    for path in sorted(folder.glob("*.flight")):
        with path.open("rb") as file:
            found = read_live(file)
            live[found.about["rank"]] = found
    history = JobHistory(live)
    history.add(live, 1e18)
    assert history.num_parts <= 120 and history.waits().shape == (len(live),) * 2
    for each in live.values():
        pace_of(each, 1e18)
    text = flight_analysis.report(records)
    assert all(each.isprintable() or each == "\n" for each in text), text
    json.dumps(flight_analysis.as_json(records))
    torch_traces.write(records, folder / "torch")
    return None


def prepare_traces(folder: Path) -> None:
    for rank in range(2):
        job = {"rank": rank, "size": 2, "host": "h", "leader": 0}
        writer = TraceWriter(path_for(folder, rank), job, [ClockSample(0, 0, 0)], flush_seconds=3600.0)
        group = GroupInfo(7, "world", rank, (0, 1), 1)
        for seq in range(1, 12):
            about = "sum", "float32", -1, 4096, "shm", "whole slots"
            times = 10_000 * seq + rank, 10_000 * seq + 5000
            writer.read(CallRecord(group, seq, "allreduce", *about, *times, 1, Origin(0, "train.py:3", ""), ""))
            if seq % 4 == 0:
                writer.flush()
        writer.close()


def read_traces(folder: Path) -> Any:
    found = {}
    for trace in read_folder(folder):
        calls = [(each.seq, each.collective, each.num_bytes, round(each.begin * 1e9)) for each in trace.calls]
        found[trace.rank] = calls, trace.is_complete
    return found


def is_part_of_traces(found: Any, true: Any) -> bool:
    """Whether each trace has the first calls of the true one, and says so; that of another rank may be missing."""
    return found.keys() <= true.keys() and all(
        calls == true[rank][0][: len(calls)] and (not is_complete or calls == true[rank][0])
        for rank, (calls, is_complete) in found.items()
    )


def read_report(folder: Path) -> Any:
    _, text = trace_commands.report_on(folder, str(folder / "bench.json"))
    assert all(each.isprintable() or each == "\n" for each in text), text
    with trace_commands._explained(folder):
        merge(read_folder(folder), folder / "merged.json.gz")
    return None


def prepare_report(folder: Path) -> None:
    prepare_traces(folder)
    row = {"ranks": 2, "verb": "allreduce", "dtype": "float32", "mode": "sync", "contestant": "auto"}
    rows = [row | {"payload_bytes": size, "median_us": 1.0 + size} for size in (4, 4096)]
    bench_report.save(bench_report.new_report("collectives", [{"rows": rows}], {}), str(folder / "bench.json"))


def prepare_code(folder: Path) -> None:
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    native_code.Compiler()._write("part", "recipe", bytes(range(256)) * 8)


def read_code(folder: Path) -> Any:
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    return native_code.Compiler()._read("part", "recipe")


def prepare_metrics(folder: Path) -> None:
    (folder / "metrics.json").write_text(json.dumps({
        "rank": 0, "host": "h", "stalls": 1, "steps": {}, "messages": {}, "in_flight": {"world": 1}, "updates": {},
        "calls": {"world": {"allreduce": dict.fromkeys(("calls", "bytes", "seconds", "waited", "moved", "stalls"), 1)}},
    }))  # fmt: skip


def read_metrics(folder: Path) -> Any:
    """Write names and numbers as metrics: each line is a comment or a sample, whatever the names have in them."""
    metrics = files.parse_json(files.read(folder / "metrics.json", files.MOST_JSON_BYTES))
    for line in prometheus.text_of(metrics).split("\n")[:-1]:
        assert line.startswith("# ") or _SAMPLE.fullmatch(line), line


_SAMPLE = re.compile(r'\w+\{\w+="(?:[^"\\\n]|\\.)*"(?:,\w+="(?:[^"\\\n]|\\.)*")*\} \S+')


def rename(rng: random.Random, data: bytes) -> bytes:
    """Put any text for a name into metrics."""
    name = json.dumps("".join(chr(rng.choice((10, 13, 27, 34, 44, 92, 125, 0x2028, 65))) for _ in range(8)))
    return data.replace(rng.choice((b'"world"', b'"allreduce"', b'"h"')), name.encode())


def is_equal(found: Any, true: Any) -> bool:
    """Whether a reader that compares checksums has returned what was written."""
    return bool(found == true)


def prepare_data(folder: Path) -> None:
    value = {"x": torch.arange(6.0).view(2, 3), "y": [np.arange(3), "text", None], "pair": (1, 2.5)}
    with files.replacing(folder / "x.data") as file:
        data_format.write(file.fileno(), data_format.describe(value))


def read_data(folder: Path) -> Any:
    value = data_format.read(data_format.open_file(folder / "x.data"))
    return repr(value)


def damage_header(rng: random.Random, data: bytes) -> bytes:
    """Change the header of shared data, under a right checksum."""
    (length,) = struct.unpack_from("<Q", data, 16)
    text = rng.choice((damage_json, deep_json, damage_bytes))(rng, data[32 : 32 + length])
    header = data[:16] + struct.pack("<QI", len(text), zlib.crc32(text)) + data[28:32] + text
    return header + data[32 + length :]


IN_JSON = (damage_json, deep_json)

# --- sockets and the store of a rendezvous ----------------------------------------------------------------------------

_KEY = bytes(range(16))
_SOCKET_SECONDS = 20.0


def content_of(place: Path, name: str) -> bytes:
    with files.open_input(place / name, 1 << 20) as file:
        return file.read()


def prepare_greeting(place: Path) -> None:
    """A hello, and a proof, which cannot be right: its random numbers are not those of the answer."""
    (place / "greeting").write_bytes(struct.pack("<8sII16s", b"torchmpi", 1, 0, bytes(16)) + bytes(32))


def read_greetings(place: Path) -> list[int]:
    """Return which rank is accepted where a stranger says the content of the file, before rank 1 comes."""
    content = content_of(place, "greeting")
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(meeting.listen_nearby(4))
        stranger = opened.enter_context(socket.socket(socket.AF_UNIX))
        stranger.settimeout(_SOCKET_SECONDS)
        stranger.connect(listener.getsockname())
        stranger.sendall(content[: 64 << 10])
        targets = {0: listener.getsockname().decode()}
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(meeting.meet, 1, _KEY, [], targets, [], timeout_seconds=_SOCKET_SECONDS)
            met = meeting.meet(0, _KEY, [listener], {}, [1], timeout_seconds=_SOCKET_SECONDS)
            opened.callback(met.close)
            opened.callback(other.result().close)
        (sock,) = met.sockets.values()
        other.result().sockets[0].send(b"rank 1")
        sock.settimeout(_SOCKET_SECONDS)
        return [*met.sockets, sock.recv(100) == b"rank 1"]


def prepare_answer(place: Path) -> None:
    (place / "answer").write_bytes(bytes(48) + b"\1")


def read_answers(place: Path) -> list[int]:
    """Return the ranks that are reached where a stranger listens, and answers with the content of the file."""
    content = content_of(place, "answer")
    with meeting.listen_nearby(4) as listener, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.settimeout(_SOCKET_SECONDS)
                sock.sendall(content)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1000):
                    pass

        answered = pool.submit(answer)
        met = meeting.meet(1, _KEY, [], {0: listener.getsockname().decode()}, [], timeout_seconds=0.1)
        met.close()
        answered.result()
        return list(met.sockets)


def prepare_request(place: Path) -> None:
    (place / "request").write_bytes(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nUser-Agent: x\r\n\r\n")


def read_requests(place: Path) -> bytes:
    """Return the status with which the server of the metrics answers."""
    content = content_of(place, "request")
    metrics = {"rank": 0, "host": "h", "stalls": 0, **{part: {} for part in _PARTS_OF_METRICS}}
    exporter = prometheus.ServerExporter(0, lambda: metrics, "127.0.0.1", 0).attach()
    try:
        with socket.create_connection(exporter._listener.getsockname()[:2], timeout=_SOCKET_SECONDS) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(content)
                sock.shutdown(socket.SHUT_WR)
                return sock.recv(12, socket.MSG_WAITALL)
        return b""
    finally:
        exporter.close()


_PARTS_OF_METRICS = ("calls", "steps", "messages", "in_flight", "updates")
_STATUSES = (b"", b"HTTP/1.1 200", b"HTTP/1.1 404", b"HTTP/1.1 431", b"HTTP/1.1 501")


def mesh_of_rank_1(store: object) -> mesh.Mesh:
    return mesh.Mesh(store, 1, 2, 0.2, key=_KEY, is_one_host=False)


def prepare_store(place: Path) -> None:
    own = ["h", "net", "memory", "name", ["10.0.0.1/24"], [0, 1]]
    entry = signed_entries.signed(_KEY, mesh_of_rank_1(None)._label("place", 0), [own, "00" * 16])
    (place / "table.json").write_bytes(f"[{entry}]".encode())


def read_store(place: Path) -> object:
    """Return the entry of rank 0 in the store, as rank 1 takes it."""
    content = content_of(place, "table.json")
    store = SimpleNamespace(wait=lambda keys, limit: None, get=lambda key: content, check=lambda keys: True)
    reader = mesh_of_rank_1(store)
    entries = reader._get("table", "place")
    if not isinstance(entries, list) or not entries:
        raise LaunchError("no table")
    return reader._checked("place", 0, entries[0])


def prepare_step(place: Path) -> None:
    (place / "step.json").write_bytes(json.dumps([28000, "00" * 32]).encode())


def read_step(place: Path) -> object:
    """Return what a rank of a step of Slurm finds in the home folder."""
    step = StepFile("1.0.0")
    step.path = place / "step.json"
    with contextlib.suppress(OSError):
        os.chmod(step.path, 0o600, follow_symlinks=True)
    return step.read(1, limit_seconds=0.1)


TARGETS = (
    Target("tuning file", prepare_tuning, read_tuning, (), structured={".json": IN_JSON}),
    Target(
        "shards", prepare_shards, read_shards, (CheckpointError,), is_equal,
        {".json": IN_JSON, ".pt": (swap_ranks,)},
    ),
    Target(
        "shards with right checksums", prepare_shards, read_shards, (CheckpointError,),
        structured={".pt": (damage_archive,)},
    ),
    Target(
        "checkpoint", prepare_checkpoint, read_checkpoint, (CheckpointError,), is_equal,
        {".metadata": (damage_metadata,)},
    ),
    Target(
        "flight records", prepare_records, read_records, (TorchMPIError,), structured={".flight": (damage_pages,)},
    ),
    Target(
        "traces", prepare_traces, read_traces, (ArgumentError, OSError), is_part_of_traces,
        {".gz": (flip_bit, flip_bit, flip_bit, flip_bit, expanding_trace)},
    ),
    Target(
        "events with right checksums", prepare_report, read_report, (ArgumentError, OSError),
        structured={".gz": (damage_lines,), ".json": IN_JSON},
    ),
    Target(
        "record of a run", prepare_run, read_run, (ArgumentError, OSError), structured={".npz": (damage_archive,)},
    ),
    Target("machine code", prepare_code, read_code, (), lambda found, true: found in (None, true)),
    Target("greetings", prepare_greeting, read_greetings, (OSError,), is_equal),
    Target("answers", prepare_answer, read_answers, (OSError,), is_equal),
    Target("requests", prepare_request, read_requests, (OSError,), lambda found, true: found in _STATUSES),
    Target("store", prepare_store, read_store, (LaunchError, OSError), is_equal, {".json": IN_JSON}),
    Target("step of Slurm", prepare_step, read_step, (LaunchError,), structured={".json": IN_JSON}),
    Target(
        "shared data", prepare_data, read_data, (ValueError, OSError), structured={".data": (damage_header,)},
    ),
    Target("metrics", prepare_metrics, read_metrics, (OSError, *WRONG_EVENTS), structured={".json": (rename,)}),
)  # fmt: skip


# --- cases ------------------------------------------------------------------------------------------------------------


class Fuzzer:
    """Runs cases in folders of its own."""

    def __init__(self, folder: Path, targets: Sequence[Target] = TARGETS) -> None:
        self.targets, self._folder = targets, folder
        self._files: dict[str, dict[Path, bytes]] = {}
        self._true: dict[str, Any] = {}
        for target in targets:
            place = self._place(target)
            place.mkdir(parents=True)
            target.prepare(place)
            found = [path for path in place.rglob("*") if path.is_file()]
            self._files[target.name] = {path.relative_to(place): path.read_bytes() for path in found}
            self._true[target.name] = target.read(place)

    def _place(self, target: Target) -> Path:
        return self._folder / target.name.replace(" ", "-")

    def run(self, seed: int, number: int) -> str:
        """Run a case; return the problem, or ''."""
        rng = random.Random(f"{seed} {number}")
        target = self.targets[number % len(self.targets)]
        place, written = self._place(target), self._files[target.name]
        shutil.rmtree(place)
        for name, content in written.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        name = rng.choice(sorted(written))
        how = self._damage(rng, target, place / name)
        case = f"{target.name}: {how} of {name}"
        try:
            found = target.read(place)
        except target.errors as error:
            return "" if str(error) else f"{case}: {error!r} says nothing"
        except BaseException:
            return f"{case}:\n{traceback.format_exc(limit=-6)}"
        is_right = target.is_right(found, self._true[target.name])
        return "" if is_right else f"{case}: altered data were read: {str(found)[:500]}"

    @staticmethod
    def _damage(rng: random.Random, target: Target, path: Path) -> str:
        structured = [each for end, known in target.structured.items() if path.name.endswith(end) for each in known]
        if rng.random() < 0.1:
            put_in_the_way(rng, path)
            return "put_in_the_way"
        if structured and rng.random() < 0.5:
            mutate = rng.choice(structured)
        else:
            mutate = rng.choice((damage_bytes, damage_bytes, damage_bytes, random_bytes))
        path.write_bytes(mutate(rng, path.read_bytes()))
        return mutate.__name__


def most_resident_bytes() -> int:
    """Return the most memory that this process has had; getrusage() may return that of the process that started it."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def run_cases(seed: int, first: int, count: int) -> int:
    """Run cases in this process; print the problems, and return their number."""
    warnings.simplefilter("ignore")  # of torch, about damaged pickles
    logging.getLogger("torchmpi").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    num_problems = 0
    with tempfile.TemporaryDirectory(prefix="torchmpi-fuzz-") as name:
        fuzzer = Fuzzer(Path(name))
        before = most_resident_bytes()
        # What a damaged number asks for is then an error that fails the case, and does not take the machine's memory.
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 4 * MOST_MORE_BYTES, resource.RLIM_INFINITY))
        for number in range(first, first + count):
            faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
            problem = fuzzer.run(seed, number)
            faulthandler.cancel_dump_traceback_later()
            more = most_resident_bytes() - before
            if more > MOST_MORE_BYTES:
                before += more
                problem += f"\nit took {more >> 20} MB"
            if problem:
                num_problems += 1
                target = fuzzer.targets[number % len(fuzzer.targets)].name
                print(f"seed {seed}, case {number}, {target}: {problem}", flush=True)
    return num_problems


def main() -> int:
    """Run the cases in another process, so that its end is noticed too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--here", action="store_true", help="run the cases in this process")
    options = parser.parse_args()
    if options.here:
        return 1 if run_cases(options.seed, options.first, options.cases) else 0
    done = subprocess.run([sys.executable, *sys.argv, "--here"], check=False)
    if done.returncode == 0:
        print(f"{options.cases} cases of {len(TARGETS)} targets: each was read as written, or refused with its error")
    elif done.returncode != 1:
        print(f"the process of the cases has ended with status {done.returncode}: a hang or a crash, see above")
    return 0 if done.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
