"""Measure what the search for late ranks costs a rank while nobody is late: checks in this process, without a launcher.

    python benchmarks/late_ranks_cost.py [--ranks 8]

The first line is one check of the watchdog on a rank, the second one that of rank 0, which compares all ranks of its
host. A check is made twice a second. The third line is a garbage collection without and with the notes of its time,
and the last one is a look at the stack of the main thread, of which fifty are made in a second while a rank is
suspected. Reported is the median of 300.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.call_counts import CallCounts
from torchmpi.communicators.call_log import CallLog
from torchmpi.communicators.status_board import StatusBoard
from torchmpi.shared_memory.memory_layout import BLOCK_BYTES
from torchmpi.shared_memory.segments import Segment
from torchmpi.supervision.late_ranks import LateRanks
from torchmpi.supervision.pace import place_of

_TIMES = 300


def microseconds(function: Callable[[], object]) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return 1e6 * median(times)


def checks(num_ranks: int) -> list[LateRanks]:
    """Return the checks of the ranks of a host, all in this process."""
    board = StatusBoard(Segment.create("late_ranks_cost", num_ranks * BLOCK_BYTES), num_ranks)
    made = []
    for rank in range(num_ranks):
        counts = CallCounts()
        for number in range(4):
            log = CallLog(f"group {number}", rank, num_ranks)
            counts.add(log.name, False, log)
            log.enter(call_code("barrier"), ())
            log.leave()
        world = SimpleNamespace(rank=rank, log_board=board, world_ranks=range(num_ranks))
        context: Any = SimpleNamespace(call_counts=counts, flight_record=None, hosts=[0] * num_ranks)
        exchange: Any = SimpleNamespace(world=world, host=world, heartbeat=None)
        made.append(LateRanks(context, exchange, ["host"] * num_ranks, 0.05, 0.5))
    return made


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the host")
    num_ranks = parser.parse_args().ranks
    without = microseconds(lambda: gc.collect(0))
    made = checks(num_ranks)
    for check in made:
        check.check()
    print(f"a check of a rank:                {microseconds(made[-1].check):7.1f} us")
    print(f"a check of rank 0, {num_ranks:2} ranks:      {microseconds(made[0].check):7.1f} us")
    for check in made[1:]:
        check.close()
    print(f"a collection, and one with notes: {without:7.1f} us, {microseconds(lambda: gc.collect(0)):.1f} us")
    print(f"a look at the stack:              {microseconds(lambda: place_of(sys._getframe())):7.1f} us")
    made[0].close()


if __name__ == "__main__":
    main()
