"""To whoever reads a flight record: it has each call and message, made through Python and by the fast path."""

from __future__ import annotations

import io
import os
import time

import pytest
import torch

import torchmpi as mpi
from torchmpi.communicators.call_codes import call_code, describe
from torchmpi.communicators.flight_record import parse
from torchmpi.errors import MismatchError
from torchmpi.session import runtime
from torchmpi.shared_memory.memory_layout import RECORD_LENGTH
from torchmpi.tensors.dtypes import info

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]


def own_calls(key):
    """Return the record of a group from the flight record of this rank, read as another process reads it."""
    record = runtime.current().flight_record
    record.note_ticks()
    groups = parse(io.BytesIO(os.pread(record._file, 1 << 30, 0)), "own record").groups
    (found,) = [group for group in groups if group.key == key and not group.is_freed]
    return found


def test_calls_by_all_paths_are_recorded_alike(agree):
    group, code = mpi.communicator(0).intra, call_code("allreduce", "sum", info(torch.float32).code)
    tensor = torch.ones(2, 3)
    first, begin = group.call_log.seq, time.monotonic_ns()
    for _ in range(5):
        mpi.allreduce(tensor)  # by the fast path from the second call on, where it applies
    mpi.allreduce(tensor, backend="mpi")
    mpi.allreduce_async(tensor).wait()
    end = time.monotonic_ns()
    found = own_calls(group.key)
    calls = [call for call in found.calls if first < call.seq <= first + 7]
    agree.equal((found.name, found.ranks), (group.name, group.world_ranks))
    agree.equal([(call.seq - first, call.code, call.shape) for call in calls], [(k, code, (2, 3)) for k in range(1, 8)])
    tolerance = 1e8  # the process may be preempted between the readings of the tick counter and of the clock
    times = [time for call in calls for time in (call.begin, call.end)]
    agree(begin - tolerance <= min(times) and max(times) <= end + tolerance, f"{begin} {end} {times}")
    agree(all(call.begin <= call.end for call in calls))


def test_the_last_calls_replace_the_first_ones(agree):
    group = mpi.communicator(0).intra
    tensor = torch.ones(1)
    for _ in range(RECORD_LENGTH + 5):
        mpi.broadcast(tensor)
    last, seqs = group.call_log.seq, [call.seq for call in own_calls(group.key).calls]
    agree.equal(seqs, list(range(last - RECORD_LENGTH + 1, last + 1)))


@pytest.mark.min_ranks(2)
def test_a_call_that_fails_is_marked(agree):
    group = mpi.communicator(0).intra
    if group.size > 1:
        mpi.allreduce(torch.ones(2))
        with pytest.raises(MismatchError):
            mpi.allreduce(torch.ones(2 + mpi.rank()))
        before, last = own_calls(group.key).calls[-2:]
        text = f"allreduce(float32 [{2 + mpi.rank()}], sum)"
        agree.equal((describe(last.code, last.shape), last.has_failed, before.has_failed), (text, True, False))
        agree(0 < last.begin <= last.end)
        agree(group.call_log.current is None)
        mpi.barrier()


@pytest.mark.min_ranks(2)
def test_messages_are_recorded(agree, default_group):
    """By Python and by the fast path, native and of torch.distributed, with those that have not ended."""
    rank, size = mpi.rank(), mpi.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    group = mpi.communicator(0).intra

    def own_messages(key):
        found = parse(io.BytesIO(os.pread(runtime.current().flight_record._file, 1 << 30, 0)), "own record").messages
        return {(each.is_receive, each.peer, each.tag): each for each in found if each.key == key}

    def numbers(channel):
        each = own_messages(group.key).get(channel)
        return (0, 0) if each is None else (each.num_begun, each.num_ended)

    sends, receives = (False, right, -1), (True, left, -1)
    before = numbers(sends), numbers(receives)
    for _ in range(5):
        mpi.sendreceive(torch.ones(2, 3), left, right)
    handle = mpi.send_async(torch.ones(7), right)
    mpi.recv(torch.empty(7), left)
    handle.wait()
    agree.equal([numbers(sends), numbers(receives)], [(begun + 6, ended + 6) for begun, ended in before])
    last = own_messages(group.key)[receives]
    agree.equal((last.dtype, last.num_bytes, last.group), ("float32", 28, group.name))
    agree(0 < last.begin <= last.end <= time.monotonic_ns())
    values, received = torch.ones(4, dtype=torch.int64), torch.empty(4, dtype=torch.int64)
    work = torch.distributed.irecv(received, left, tag=3)
    torch.distributed.send(values, right, tag=3)
    work.wait()
    mpi.barrier()
    work, limit = torch.distributed.irecv(received, left, tag=3), time.monotonic() + 20  # deferred, like an earlier one
    while work._handle.is_deferred and time.monotonic() < limit:  # the progress thread begins it
        time.sleep(0.001)
    mpi.barrier()
    (key,) = {each.key for each in runtime.current().context.groups if each.channels._channels.get((True, left, 3))}
    found = own_messages(key)[True, left, 3]
    agree.equal((found.num_begun - found.num_ended, found.dtype, found.num_bytes), (1, "int64", 32))
    torch.distributed.send(values, right, tag=3)
    work.wait()
    found = own_messages(key)[True, left, 3]
    agree.equal(found.num_begun, found.num_ended)


def test_freed_groups_keep_their_calls(agree):
    group = mpi.communicator(0).intra.duplicate("to be freed")
    key = group.key
    group.call_action("barrier", group.comm.Barrier)
    group.free()
    record = runtime.current().flight_record
    found = [each for each in parse(io.BytesIO(os.pread(record._file, 1 << 30, 0)), "own").groups if each.key == key]
    agree.equal([(each.is_freed, len(each.calls)) for each in found[-1:]], [(True, 1)])
