"""Flight records of a job that seems to run in this process: real files in memory, with calls at chosen times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torchmpi.communicators import flight_record, progress
from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.flight_record import STARTS, WRITERS, FlightRecord, as_ranges
from torchmpi.shared_memory.memory_layout import RECORD_LENGTH

SUM = call_code("allreduce", "sum", 1)
SECOND = 1_000_000_000
Late = Callable[[int, int], float]
"""The seconds by which a rank is late in a step."""


@contextmanager
def running_job(
    size: int,
    *,
    late: Late = lambda rank, step: 0.0,
    step_seconds: float = 0.1,
    num_steps: int = 600,
    open_on: Sequence[int] = (),
    program: str = "train.py",
    hosts: int = 1,
    loss: bool = True,
) -> Iterator[list[FlightRecord]]:
    """Context manager with the records of ranks that have made one allreduce per step until now.

    Args:
        size: The number of ranks.
        late: How late each one is in each step.
        step_seconds: The length of a step.
        num_steps: The number of steps.
        open_on: Ranks that are in one more call; the others have not arrived there.
        program: The name of the program.
        hosts: The number of hosts among which the ranks are divided.
        loss: Whether the ranks report a loss.
    """
    delays = [[int(late(rank, step) * SECOND) for rank in range(size)] for step in range(num_steps)]
    latest = [max(each) for each in delays]
    now = time.monotonic_ns()
    records = []
    for rank in range(size):
        about = {
            "rank": rank, "size": size, "host": f"node{rank * hosts // size}", "process": os.getpid(), "job": 7,
            "program": program, "on_host": as_ranges(range(size)),
        }  # fmt: skip
        record = FlightRecord("", about)
        begun = now - int(num_steps * step_seconds * SECOND) - SECOND
        record._fields[flight_record.FIRST_NS], record._fields[flight_record.LAST_NS] = begun, now
        records.append(record)
    moved = int(0.1 * step_seconds * SECOND)
    for rank, record in enumerate(records):
        ring = record.ring(5, "world", range(size))
        own = progress.Progress()
        start = flight_record._PROGRESS_START
        memory = record._head[start : start + progress.NUM_BYTES]
        own.attach(memory)
        for step in range(num_steps):
            due = now - int((num_steps - step) * step_seconds * SECOND)
            begin, end, seq = due + delays[step][rank], due + latest[step] + moved, step + 1
            WRITERS[1](ring.memory, STARTS[seq & (RECORD_LENGTH - 1)], seq, SUM, 1, -begin, -end, 25_000_000)
            own.note(progress.BY_PROGRAM, seq, 32, 2.3 / (1 + step / 200) if loss else float("nan"))
            at = 8 * progress._FIELDS_BEFORE + (seq - 1) % progress.LENGTH * progress._ENTRY.size
            memory[at : at + 8] = end.to_bytes(8, "little")
        own.detach()
        memory.release()
        if rank in open_on:
            ring.enter(num_steps + 1, SUM, (25_000_000,))
    try:
        yield records
    finally:
        for record in records:
            record.close()
