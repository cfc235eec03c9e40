"""Records of timelines as a rank makes them, at times in milliseconds."""

from __future__ import annotations

import threading

from torchmpi.timeline.clocks import ClockSample
from torchmpi.timeline.events import CallRecord, GroupInfo, MessageRecord, Origin, SliceRecord

MILLISECOND = 1_000_000
MAIN = threading.main_thread().ident


def job(rank, size=2):
    return {"rank": rank, "size": size, "host": f"host{rank}"}


def call(rank, seq, begin, end, *, size=2, collective="allreduce", root=-1, queued=0, label="", thread=MAIN):
    group = GroupInfo(7, "world", rank, tuple(range(size)), 1)
    origin = Origin(queued * MILLISECOND, "train.py:3", label)
    times = begin * MILLISECOND, end * MILLISECOND
    about = "sum", "float32", root, 4096, "shm", "whole slots"
    return CallRecord(group, seq, collective, *about, *times, thread, origin, "")


class PlanOf:
    """The plan of the call of a record: the writer determines names and backend."""

    def __init__(self, record):
        self._names = record.collective, record.op, record.dtype, record.root
        self.backends = ((8, "other"), (None, record.backend))

    def names(self, code):
        assert code == 99
        return self._names

    def algorithm(self, number, backend):
        return f"{backend} {number}"


def plain(record):
    """The record as `Recorder.call` makes it."""
    code = compile("\n\npass", "train.py", "exec")
    origin = record.origin.queued, code, 2, record.origin.label
    times = record.begin, record.end, record.thread
    return (record.group, record.seq, PlanOf(record), 99, record.num_bytes, 5, *times, origin, record.error)


def message(rank, name, peer, begin, end, *, sent, received, queued=0, size=2):
    group, origin = GroupInfo(7, "world", rank, tuple(range(size)), 1), Origin(queued * MILLISECOND, "train.py:3", "")
    queue, times = f"world {name} {peer}", (begin * MILLISECOND, end * MILLISECOND)
    return MessageRecord(group, name, "float32", 4096, peer, sent, received, -1, queue, False, *times, MAIN, origin, "")


def step(end):
    return SliceRecord("step", "step", "", end * MILLISECOND, end * MILLISECOND, MAIN, {})


EXACT = [[ClockSample(0, 0, 0)]] * 2
