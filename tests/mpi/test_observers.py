"""To an author of observers: a program sees the calls and messages of its ranks, and when they end."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torchmpi as mpi
from torchmpi.timeline import CallRecord, MessageRecord, events

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(1, 2), pytest.mark.usefixtures("world")]


class Kept(mpi.timeline.Observer):
    """Keeps the records of one kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.records = kind, []

    def write(self, records):
        self.records += [each for each in records if isinstance(each, self.kind)]


def test_calls_are_observed_with_their_fields(agree):
    with mpi.timeline.add_observer(Kept(CallRecord)) as kept:
        mpi.allreduce(torch.ones(3))
        mpi.broadcast_async(torch.ones(5), 0, backend="mpi").wait()
    mpi.allreduce(torch.ones(3))
    first, second = kept.records
    agree.equal(
        (first.collective, first.op, first.dtype, first.num_bytes, first.root), ("allreduce", "sum", "float32", 12, -1)
    )
    agree.equal((second.collective, second.backend, second.root, second.num_bytes), ("broadcast", "mpi", 0, 20))
    agree.equal((first.group.name, first.group.rank, first.seq + 1), ("world", mpi.rank(), second.seq))
    agree(not first.origin.queued and 0 < second.origin.queued <= second.begin <= second.end)
    agree(first.end <= second.begin and first.origin.line.startswith(f"{__file__}:"))
    agree(events.recorder is None)


@pytest.mark.min_ranks(2)
def test_messages_are_observed_with_their_fields(agree, default_group):
    right, left = (mpi.rank() + 1) % mpi.size(), (mpi.rank() - 1) % mpi.size()
    with mpi.timeline.add_observer(Kept(MessageRecord)) as kept:
        mpi.sendreceive(torch.ones(3), left, right)
        sent = mpi.send_async(torch.ones(4), right)
        mpi.recv(torch.empty(4), left)
        sent.wait()
        work = dist.isend(torch.ones(5), right, tag=7)
        dist.recv(torch.empty(5), tag=7)  # from any rank: the number of the message is that of no channel
        work.wait()
        mpi.send_async(torch.ones(2), right).wait()
        agree.raises(mpi.errors.MismatchError, lambda: mpi.recv(torch.empty(6), left))
    kept.records.sort(key=lambda each: (each.num_bytes, each.name))
    failing = [each for each in kept.records if each.num_bytes == 24]
    agree.equal([(each.name, each.error) for each in failing], [("recv", "MismatchError")])
    others = [each for each in kept.records if each not in failing]
    found = [(each.name, each.num_bytes, each.peer, each.tag, each.is_background, each.error) for each in others]
    agree.equal(found, [
        ("send", 8, right, -1, False, ""), ("sendreceive", 12, left, -1, False, ""), ("recv", 16, left, -1, False, ""),
        ("send", 16, right, -1, False, ""), ("recv", 20, left, 7, True, ""), ("send", 20, right, 7, True, ""),
    ])  # fmt: skip
    agree.equal([each.sent and each.sent.rank for each in others], [right, right, None, right, None, right])
    agree.equal([each.received and each.received.rank for each in others], [None, left, left, None, None, None])
    agree.equal(others[0].sent.number, others[3].sent.number + 1)
    agree.equal({(each.dtype, each.thread > 0, each.begin <= each.end) for each in others}, {("float32", True, True)})
    agree(all(each.origin.line.startswith(f"{__file__}:") for each in others))
    agree.equal([bool(each.origin.queued) for each in others], [True, False, False, True, True, True])


def test_an_observer_that_fails_leaves_the_calls_alone(agree, capsys):
    class Failing(mpi.timeline.Observer):
        def write(self, records):
            if records:
                raise ValueError("no such column")

    with mpi.timeline.add_observer(Failing()) as failing:
        for _ in range(3):
            mpi.allreduce(torch.ones(3))
            failing.flush()
    agree(failing.has_failed and events.recorder is None)
    agree.equal(capsys.readouterr().err.count(f"rank {mpi.rank()}: the output of Failing is not complete"), 1)
