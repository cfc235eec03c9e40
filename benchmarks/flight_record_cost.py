"""Measure what the flight record costs a call on the fast path: loops in machine code, without ranks.

    python benchmarks/flight_record_cost.py

The first line is all that the fast path does to enter and end a call besides its kernel: run lock, entry of the record,
signature, counters of `mpi.metrics()`. So it bounds the cost of the record. The second one is the largest part of the
record, two readings of the clock. The third one is the record of the two messages of an exchange, without readings of
the clock. Reported is the fastest of 30 loops.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from torchmpi.communicators.call_codes import call_code
from torchmpi.communicators.call_log import CallLog
from torchmpi.shared_memory.compiler import compilation, native_code
from torchmpi.shared_memory.kernels import function_at, source_digest
from torchmpi.shared_memory.kernels.fast_path_code import begin_call
from torchmpi.shared_memory.kernels.intrinsics import ticks
from torchmpi.shared_memory.kernels.logged_calls import end_call
from torchmpi.shared_memory.kernels.messages import begin_message, end_message
from torchmpi.shared_memory.kernels.records import Arguments, CachedCallRecord, DLTensor
from torchmpi.shared_memory.memory_layout import ChannelFields, LockFields, LogFields
from torchmpi.shared_memory.typed_records import Words

_PREFIX, _CALLS, _LOOPS = "torchmpi_bench_", 100_000, 30


@compilation.kernel
def enter_and_end(cached_call: CachedCallRecord, tensor: DLTensor, arguments: Arguments, count: int) -> int:
    """Enter and end calls."""
    for _ in range(count):
        begin_call(cached_call, tensor, 4, arguments)
        end_call(cached_call.call_log, cached_call.run_lock)
    return 0


@compilation.kernel
def read_clock_twice(count: int) -> int:
    """Read the clock of the record twice for each call."""
    total = 0
    for _ in range(count):
        total ^= ticks() ^ (ticks() << 1)
    return total


@compilation.kernel
def count_messages(channels: ChannelFields, log: LogFields, count: int) -> int:
    """Count the messages of exchanges, to one rank and from another."""
    other = channels[1]
    for index in range(count):
        number = begin_message(channels, index, 1, 4) | begin_message(other, index, 1, 4) << 32
        log.algorithm = number
        end_message(channels, index)
        end_message(other, index)
    return 0


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    names = ("enter_and_end", "read_clock_twice", "count_messages")
    wrappers = [compilation.plain(_PREFIX + name, compilation.kernels[name]) for name in names]
    compiler = native_code.compiler()
    compiler.build(f"{_PREFIX}record", source_digest(), compilation.link(_PREFIX, wrappers))
    enter, read, count = (function_at(name, compiler.find(_PREFIX + name)) for name in names)
    log, code = CallLog("example", 0, 1), call_code("allreduce", "sum", 1)
    lock, arguments, tensor, cached_call = LockFields.new(), Arguments.new(8), DLTensor.new(), CachedCallRecord.new()
    shape = Words.new(1)
    shape[0] = 1
    tensor.shape, tensor.num_dims_and_dtype = shape, 1
    cached_call.call_log, cached_call.run_lock = LogFields(log.log_fields.buffer_info()[0]), lock
    cached_call.code = code
    addresses = [int(each) for each in (cached_call, tensor, arguments)]
    show("enter and end a call of one dimension", lambda: enter(*addresses, _CALLS))
    show("two readings of the clock", lambda: read(_CALLS))
    channels = ChannelFields.new(ChannelFields.FIELDS)
    places = int(channels), log.log_fields.buffer_info()[0]
    show("count the messages of an exchange", lambda: count(*places, _CALLS))
    last = log.ring.read(_LOOPS * _CALLS)
    assert last is not None and last[:3] == (log.seq, code, (1,))


def show(name: str, run: Callable[[], int]) -> None:
    """Print the time of a part of the fastest loop, in nanoseconds."""
    times = []
    for _ in range(_LOOPS):
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    print(f"{name:40} {min(times) / _CALLS:6.1f} ns a call")


if __name__ == "__main__":
    main()
