"""To a user of shared_dataset(): made once on each host, the same memory everywhere, and errors on all ranks."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import os
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

import torchmpi as mpi
from torchmpi.config import Config
from torchmpi.datasets import shared_dataset as module
from torchmpi.errors import ArgumentError, DatasetError, MismatchError
from torchmpi.shared_memory import read_only
from torchmpi.status_line import StatusLine

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(3)]
Pair = collections.namedtuple("Pair", "first second")


def make() -> dict[str, object]:
    return {"x": torch.arange(3000.0), "pair": Pair(np.arange(5) + RANK, [torch.ones(2), "text", 3])}


def inode(tensor: torch.Tensor) -> int:
    """The file in which a tensor is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, protection, _, _, number, *_ = line.split()
        begin, end = (int(each, 16) for each in place.split("-"))
        if begin <= tensor.data_ptr() < end:
            assert protection == "r--s", line
            return int(number)
    raise AssertionError("not mapped")


def hosts_of(given: str) -> str:
    return given[:SIZE]


@contextlib.contextmanager
def started_on(hosts: str):
    """torchmpi, started on hosts of these names."""
    mpi.stop()
    mpi.start(config=dataclasses.replace(Config.from_environment(), host_name=hosts[RANK], verbose=False))
    yield
    mpi.stop()
    mpi.start()


@pytest.fixture
def folder(world, tmp_path) -> Path:
    """The same folder on all ranks."""
    return Path(mpi.broadcast_object(str(tmp_path)))


def test_one_memory_on_all_ranks(world, agree):
    calls = []
    value = mpi.shared_dataset(lambda: calls.append(1) or make())
    agree.equal(value["x"], torch.arange(3000.0))
    agree.equal(value["pair"].first.tolist(), [0, 1, 2, 3, 4], "made by rank 0")
    agree.equal((type(value["pair"]), value["pair"].second[1:]), (Pair, ["text", 3]))
    agree.equal(len(calls), int(RANK == 0))
    agree.equal(len(set(mpi.allgather_object(inode(value["x"])))), 1)
    agree.raises(ArgumentError, lambda: mpi.allreduce(value["x"]), "cannot be written", ".clone()")
    agree.equal(mpi.broadcast(value["x"] + 1), torch.arange(3000.0) + 1)


def test_a_group_shares_without_the_others(world, agree):
    with mpi.group([SIZE - 1]) as alone:
        if alone:
            agree.equal(mpi.shared_dataset(make, comm=alone)["pair"].first[0], SIZE - 1)
        else:
            agree.equal(bool(alone), False)


def test_memory_is_freed_before_stop_and_by_it(world, agree):
    def held() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("torchmpi-dataset")

    before = held()
    value = mpi.shared_dataset(make)
    kept, during = value["x"][7:], held()
    del value
    with_view = held()
    mpi.stop()
    mpi.start()
    after_stop, number = float(kept[0]), len(read_only._mapped)
    is_open = [memory.ticket for memory in read_only._mapped.values()]
    del kept
    agree.equal((during - before, with_view - before, held() - before), (1, 1, 0))
    agree.equal((after_stop, number, is_open), (7.0, 1, [None]))


@pytest.mark.parametrize("source", ["host", "rank 0"])
@pytest.mark.parametrize("with_cache", [False, True], ids=["memory", "cache"])
def test_several_hosts(folder, agree, monkeypatch, source, with_cache):
    """The ranks of a host share a memory; hosts do not. A file that one host can see is not one of another."""
    hosts = hosts_of("aab" if SIZE == 3 else "ab")
    monkeypatch.setattr(module, "_PIECE_BYTES", 5000)
    with started_on(hosts):
        cache = folder / hosts[RANK] / "data" if with_cache else None
        value = mpi.shared_dataset(make, cache=cache, source=source)
        maker = 0 if source == "rank 0" else hosts.index(hosts[RANK])
        agree.equal(value["pair"].first.tolist(), [maker + each for each in range(5)])
        agree.equal(value["x"], torch.arange(3000.0))
        files = mpi.allgather_object(inode(value["x"]))
        agree.equal([file == files[RANK] for file in files], [host == hosts[RANK] for host in hosts])
        if cache is not None:
            again = mpi.shared_dataset(make, cache=cache, source=source)
            agree.equal(inode(again["x"]), inode(value["x"]))
            agree.equal(stat.S_IMODE(cache.stat().st_mode), 0o600)


def test_hosts_with_one_file_system_make_the_file_once(folder, agree):
    with started_on("abc"[:SIZE]):
        calls = []
        value = mpi.shared_dataset(lambda: calls.append(1) or make(), cache=str(folder / "data"))
        agree.equal(mpi.allgather_object(len(calls)), [1] + [0] * (SIZE - 1))
        agree.equal(value["pair"].first[0], 0)


def test_an_existing_file_is_used_instead_of_the_function(folder, agree):
    first = mpi.shared_dataset(make, cache=folder / "data")
    expected = first["x"].clone()
    second = mpi.shared_dataset(lambda: pytest.fail("called"), cache=folder / "data")
    agree.equal(second["x"], expected)
    agree.equal(sorted(os.listdir(folder)), ["data"])


def refused(folder: Path, content: bytes = b"", mode: int = 0o600) -> Path:
    path = folder / "data"
    if RANK == 0:
        path.write_bytes(content)
        path.chmod(mode)
    mpi.barrier()
    return path


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (bytes(9000), 0o600, "does not begin as a file of shared_dataset()"),
        (b"", 0o600, "empty"),
        (bytes(9000), 0o602, "everyone may write"),
    ],
    ids=["another file", "empty", "of everyone"],
)
def test_a_wrong_file_is_an_error_on_all_ranks(folder, agree, content, mode, words):
    path = refused(folder, content, mode)
    agree.raises(
        DatasetError,
        lambda: mpi.shared_dataset(make, cache=path),
        f"rank {RANK}",
        "rank 0 on",
        words,
        "Remove the file",
    )


def fails() -> None:
    raise KeyError("no such file")


PROBLEMS = {
    "raises": (fails, None, "make() has raised KeyError: 'no such file'", "in fails: raise KeyError"),
    "cannot be shared": (lambda: {"a": {1, 2}}, None, "the value['a'] is of type set", "Return tensors"),
    "no folder": (make, "/proc/none/data", "cannot be written", "name another one"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_of_one_rank_is_an_error_on_all(world, agree, name):
    function, cache, *words = PROBLEMS[name]
    agree.raises(DatasetError, lambda: mpi.shared_dataset(function, cache=cache), f"rank {RANK}", "rank 0 on", *words)
    agree.equal(mpi.allreduce(1), SIZE, "the next call is in step")


def test_the_error_of_the_function_is_the_cause(world, agree):
    try:
        mpi.shared_dataset(fails)
    except DatasetError as error:
        agree.equal(
            (type(error.__cause__), error.reason_is_elsewhere), (KeyError, False) if RANK == 0 else (type(None), True)
        )


def test_a_collective_in_the_function_is_an_error_on_all_ranks(world, agree):
    kind, *words = (DatasetError, "rank 0 on", "must not call collectives") if RANK == 0 else (MismatchError, "barrier")
    agree.raises(kind, lambda: mpi.shared_dataset(mpi.barrier), *words)
    agree.equal(mpi.allreduce(1), SIZE, "the next call is in step")


def test_an_error_on_another_host(world, agree):
    def make_there() -> torch.Tensor:
        return torch.ones(2) if RANK == 0 else fails()

    with started_on("abb"[:SIZE]):
        agree.raises(DatasetError, lambda: mpi.shared_dataset(make_there), "rank 1 on b", "KeyError")
        agree.equal(mpi.allreduce(1), SIZE)


def test_a_full_disk_of_another_host_is_an_error_on_all_ranks(folder, agree, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with started_on("abb"[:SIZE]):
        if RANK == 1:
            monkeypatch.setattr(module.data_format, "write_bytes", full)
        call = lambda: mpi.shared_dataset(make, cache=folder / "abb"[RANK], source="rank 0")  # noqa: E731
        agree.raises(DatasetError, call, "rank 1 on b", "No space left")
        agree.equal(mpi.allreduce(1), SIZE)
        agree.equal(sorted(os.listdir(folder)), ["a"])


def test_other_arguments_are_refused_before_the_function_is_called(world, agree):
    call = lambda **options: lambda: mpi.shared_dataset(lambda: pytest.fail("called"), **options)  # noqa: E731
    agree.raises(ArgumentError, call(cache=f"/none/{RANK}"), "rank 1 passes cache='/none/1'", "'/none/0'")
    agree.raises(ArgumentError, call(source="rank 0" if RANK else "host"), "rank 1 passes source='rank 0'")
    agree.raises(ArgumentError, call(source="rank 1"), "Pass 'host' or 'rank 0'")
    agree.raises(ArgumentError, lambda: mpi.shared_dataset([1, 2]), "expected a function")


def test_rounds_are_shorter_than_a_stall(stopped, agree):
    """Regression: with stall_warning_seconds=5, each wait for a slow function was reported as a stall."""
    for settings, expected in (({"stall_warning_seconds": 1.5}, 0.5), ({"stall_abort_seconds": 0.0}, 20 / 3)):
        given = {"stall_warning_seconds": 20.0, "stall_abort_seconds": 60.0, "verbose": False} | settings
        with mpi.started(config=dataclasses.replace(Config.from_environment(), **given)):
            building = module._Building(mpi.communicator(0), make, None, "host")
            agree.equal(building.round_seconds, expected)


def test_progress_while_the_function_runs(world, agree, monkeypatch):
    """The other ranks wait in short calls, and rank 0 says what the makers are doing."""
    monkeypatch.setattr(module, "_ROUND_SECONDS", 0.02)
    lines, shown = [], threading.Event()

    def show(_: StatusLine, text: str) -> None:
        lines.append(text)
        shown.set()

    monkeypatch.setattr(StatusLine, "show", show)

    def slow() -> torch.Tensor:
        seen = shown.wait(60) if RANK == 0 else time.sleep(0.2)  # the line that is shown
        return torch.tensor([bool(seen)])

    mpi.allgather(torch.ones(1))
    before = mpi.metrics()["calls"]["world"]["allgather"]["calls"]
    value = mpi.shared_dataset(slow)
    after = mpi.metrics()["calls"]["world"]["allgather"]["calls"]
    agree.equal(value.tolist(), [True])
    agree(after - before >= 5, f"{after - before} calls")
    if RANK == 0:
        text = "\n".join(lines)
        agree("rank 0 on" in text and "is in make(), at" in text and "the line that is shown" in text, text)
