"""To a user of ps.save(): shards are loaded by the same and by other ranks, and invalid files are refused."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
import torch
from helpers.outcomes import error_of

import torchmpi as mpi
import torchmpi.parameterserver as ps
from torchmpi.parameterserver import shard_checkpoint

SHAPES = ((50_001,), (7, 3), (5,), (0,))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64)
RULES = (ps.adam(0.1), ps.sgd(0.1, 0.9), "add", ps.adagrad(0.1))
pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 3), pytest.mark.usefixtures("world")]


@pytest.fixture
def folder(tmp_path):
    """A folder common to all ranks."""
    yield Path(mpi.broadcast_object(str(tmp_path / "servers")))
    ps.free_all()


def make(comm: int = 0) -> list[ps.Server]:
    return [ps.init(torch.zeros(shape, dtype=dtype), comm) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]


def step(servers: list[ps.Server], number: int, comm: int = 0) -> None:
    """Rank 0 of the communicator sends something to each server."""
    if mpi.communicator(comm).rank == 0:
        for server, rule in zip(servers, RULES, strict=True):
            values = torch.arange(server.numel) % (3 + number) + 1
            ps.send(server, values.to(server.dtype), rule).wait()
    mpi.barrier(comm)


def values(servers: list[ps.Server], comm: int = 0) -> list[torch.Tensor]:
    result = [ps.receive(server).wait() for server in servers]
    mpi.barrier(comm)
    return result


def compare(agree, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other, dtype in zip(found, expected, DTYPES, strict=True):
        agree.equal(one, other, str(dtype))


def test_training_continues_from_a_checkpoint(folder, agree):
    servers = make()
    step(servers, 0)
    step(servers, 1)
    saved = values(servers)
    ps.save(folder)
    step(servers, 2)
    expected = values(servers)
    ps.load(folder)
    compare(agree, values(servers), saved)
    step(servers, 2)  # with the saved states and step counts
    compare(agree, values(servers), expected)


def test_states_and_steps_of_rows_are_saved(folder, agree):
    """Of a table of which only rows have been sent."""
    server = ps.init(torch.zeros(40, 1000))

    def send_rows(number: int) -> torch.Tensor:
        if mpi.rank() == number % mpi.size():
            ps.send(server, torch.ones(3, 1000) * (1 + number), ps.adam(0.1), rows=[0, 17, 39 - number]).wait()
        mpi.barrier()
        result = ps.receive(server).wait()
        mpi.barrier()
        return result

    send_rows(0)
    saved = send_rows(1)
    ps.save(folder)
    expected = send_rows(2)
    send_rows(3)
    ps.load(folder)
    agree.equal(ps.receive(server).wait(), saved)
    mpi.barrier()
    agree.equal(send_rows(2), expected, "with the saved states and step count")


def test_clocks_are_not_saved(folder, agree):
    """A clock belongs to its ranks; restoring a finished one would disable it."""
    servers, clock = make(), ps.Clock(2)
    ps.save(folder)
    clock.finish()
    ps.load(folder)
    mpi.barrier()
    agree.equal(clock.read(), [None] * mpi.size())
    agree.equal(len(values(servers)), len(SHAPES))


def test_states_that_were_not_saved_are_zero(folder, agree):
    servers = make()
    ps.save(folder)
    step(servers, 0)
    first = values(servers)
    step(servers, 1)
    ps.load(folder)
    compare(
        agree, values(servers), [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]
    )
    step(servers, 0)
    compare(agree, values(servers), first)


def test_other_numbers_of_ranks(folder, agree):
    """Saved by all ranks and loaded by each of two groups; saved by one group and loaded by all ranks."""
    servers = make()
    step(servers, 0)
    ps.save(folder)
    step(servers, 1)
    expected = values(servers)
    level = mpi.push_communicator("first" if mpi.communicator(0).rank == 0 else "others")
    mpi.set_communicator(0)
    own = make(level)
    ps.load(folder, level)
    step(own, 1, level)
    compare(agree, values(own, level), expected)
    mpi.barrier(0)
    if mpi.communicator(0).rank == 0:
        ps.save(folder / "first", level)
    mpi.barrier(0)
    step(servers, 2)
    ps.load(folder / "first")
    compare(agree, values(servers), expected)


def test_groups_of_a_job_do_not_replace_the_checkpoints_of_each_other(folder, agree):
    """Regression: the files of one group were deleted, and its load returned the values of the other."""
    level = mpi.push_communicator("first" if mpi.communicator(0).rank == 0 else "others")
    mpi.set_communicator(0)
    own = make(level)
    step(own, 0, level)
    saved = values(own, level)
    messages = mpi.allgather_object(error_of(ps.save, folder, level))  # at the same time
    step(own, 1, level)
    mpi.barrier(0)
    is_saved = not messages[mpi.communicator(0).rank]
    if is_saved:
        ps.load(folder, level)
    found = values(own, level)
    for one, other in zip(found, saved, strict=True):
        agree(not is_saved or torch.equal(one, other), "the own values")
    again = mpi.allgather_object(error_of(ps.save, folder, level))
    agree.equal(again, messages)
    num_groups = min(2, mpi.communicator(0).size)
    agree.equal(len({not message for message in messages}), num_groups, str(messages))
    agree(all(not message or "Use one folder per group" in message for message in messages), str(messages))


def test_a_group_whose_files_were_removed_by_another_says_so(folder, monkeypatch, agree):
    """Regression: the error was that of the missing file, and the files of the other ranks remained."""
    rank, size = mpi.communicator(0).rank, mpi.communicator(0).size
    level = mpi.push_communicator("first" if rank == 0 else "others")
    mpi.set_communicator(0)
    make(level)
    write, arrived, index = shard_checkpoint.archive.write, folder / "arrived", folder / shard_checkpoint._INDEX

    def write_between(path, content):  # the others have looked for an owner, then the first saves
        if rank == 0:
            wait_until(lambda: size == 1 or arrived.exists())
            return write(path, content)
        folder.mkdir(exist_ok=True)
        arrived.touch()
        wait_until(index.exists)
        if rank == 1:  # what `files.remove_unfinished` of the first leads to
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return write(path, content)

    monkeypatch.setattr(shard_checkpoint.archive, "write", write_between)
    message = error_of(ps.save, folder, level)
    agree(not message if rank == 0 else "Use one folder per group" in message, message)
    mpi.barrier(0)
    agree.equal(len(list(folder.glob("shards-*.pt"))), 1)


def test_unfinished_files_of_an_earlier_job_are_removed(folder, agree):
    """Regression: those of a job that was killed while it saved remained."""
    make()
    ps.save(folder)
    left = folder / ".shards-0123abcd-0.pt.abcdefgh.tmp"
    left.touch()
    mpi.barrier(0)
    ps.save(folder)
    agree(not left.exists(), str(left))


def wait_until(is_so) -> None:
    while not is_so():
        time.sleep(0.001)


def test_invalid_checkpoints_are_rejected_on_all_ranks(folder, agree):
    agree("has no servers" in error_of(ps.save, folder, mpi.push_communicator("all")), "no servers")
    mpi.set_communicator(0)
    servers = make()
    agree("no save to this folder was completed" in error_of(ps.load, folder), "nothing there")
    ps.save(folder)
    extra = ps.init(torch.zeros(3))
    agree("holds 4 servers" in error_of(ps.load, folder), "other servers")
    ps.free(extra)
    if mpi.communicator(0).rank == 0:
        path = next(folder.glob("shards-*-0.pt"))
        path.write_bytes(path.read_bytes()[:-100])
    mpi.barrier(0)
    before = values(servers)
    agree("truncated" in error_of(ps.load, folder), "damaged")
    compare(agree, values(servers), before)


def test_a_failed_save_keeps_the_previous_one(folder, agree):
    """Also if torch reports it. Regression: such an error was raised on its rank only, and all ranks waited."""
    servers = make()
    step(servers, 0)
    expected = values(servers)
    ps.save(folder)
    step(servers, 1)

    last = mpi.communicator(0).size - 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mpi.communicator(0).rank == last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    message = error_of(ps.save, folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    agree(f"rank {last}" in message and "File too large" in message, message)
    ps.load(folder)
    compare(agree, values(servers), expected)


def test_other_numbers_of_chunks_are_refused_on_all_ranks(folder, agree):
    """Regression: the rank that found them failed, and the others waited."""
    make()
    ps.save(folder)
    if mpi.communicator(0).rank == 0:
        path = next(folder.glob("shards-*-0.pt"))
        content = torch.load(path)
        for name in ("versions", "steps"):
            content["0"][name] = content["0"][name][:-1].clone()
        torch.save(content, path)
    mpi.barrier(0)
    message = error_of(ps.load, folder)
    agree("is damaged" in message and "chunks" in message, message)
