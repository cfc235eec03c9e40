"""Measure the memory that `torchmpi timeline report` needs for each call of a timeline.

    python benchmarks/timeline_memory.py --ranks 2 --calls 1000000

The traces are written here, by the code that writes those of a job: allreduces, a wait with every second one, and a
step with every tenth. Reported is the largest resident memory of the command, less that for traces of ten calls.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from torchmpi.timeline.clocks import ClockSample
from torchmpi.timeline.events import MOST_EVENTS, CallRecord, GroupInfo, Origin, SliceRecord
from torchmpi.timeline.trace_writer import TraceWriter, path_for

_CALLS_PER_STEP = 10
_CALL_NS = 100_000
_AT_ONCE = MOST_EVENTS // 4


def main() -> None:
    """Write, read, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=1_000_000, help="of each rank (default 1,000,000)")
    options = parser.parse_args()
    results = []
    for num_calls in (_CALLS_PER_STEP, options.calls):
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(options.ranks):
                write(Path(folder), rank, options.ranks, num_calls)
            results.append(report(folder))
    least, most = results
    num_bytes = (most - least) / (options.ranks * options.calls)
    print(f"{options.ranks} ranks, {options.calls} calls each: {num_bytes:.0f} bytes a call")


def write(folder: Path, rank: int, num_ranks: int, num_calls: int) -> None:
    """Write the trace of a rank."""
    job = {"rank": rank, "size": num_ranks, "host": "host"}
    writer, thread = TraceWriter(path_for(folder, rank), job, [ClockSample(0, 0, 0)]), threading.get_ident()
    group, origin = GroupInfo(7, "world", rank, tuple(range(num_ranks)), 1), Origin(0, "train.py:3", "")
    for seq in range(1, num_calls + 1):
        begin, end = seq * _CALL_NS, seq * _CALL_NS + _CALL_NS // 2 + rank
        about = "allreduce", "sum", "float32", -1, 4096, "shm", "whole slots"
        writer.read(CallRecord(group, seq, *about, begin, end, thread, origin, ""))
        if seq % 2 == 0:
            writer.read(SliceRecord("wait", "wait", "", begin, end, thread, {"call": "rank 0: allreduce"}))
        if seq % _CALLS_PER_STEP == 0:
            writer.read(SliceRecord("step", "step", "", end, end, thread, {"optimizer": "SGD"}))
        if seq % _AT_ONCE == 0:
            writer.flush()
    writer.close()


def report(folder: str) -> int:
    """Return the largest resident memory of the command, in bytes."""
    command = [sys.executable, "-m", "torchmpi", "timeline", "report", folder]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        status = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, status.memory_info().rss)
            time.sleep(0.01)
    return peak


if __name__ == "__main__":
    main()
