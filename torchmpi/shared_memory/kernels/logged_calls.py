"""Signatures, entries and counters of calls, as Python makes them too: hashes of shapes, the flight record."""

from __future__ import annotations

from ..compiler.compilation import inner, kernel
from ..memory_layout import RECORD_LENGTH, LockFields, LogFields, RecordFields
from .intrinsics import now, store, store_release, ticks

# CPython's hash of a tuple, which other ranks compute on the path through Python: xxHash, as signed numbers.
_PRIME_1, _PRIME_2, _PRIME_5 = -7046029288634856825, -4417276706812531889, 2870177450012600261
_INSTEAD_OF_MINUS_ONE = 1546275796
FIRST_HASH = _PRIME_5


@inner
def hash_step(total, value):
    """Add a number to the hash of a tuple."""
    total = total + value * _PRIME_2
    total = (total << 31) | ((total >> 33) & 0x7FFFFFFF)
    return total * _PRIME_1


@inner
def hash_end(total, length):
    """Return the hash of a tuple of this length."""
    total = total + (length ^ (_PRIME_5 ^ 3527539))
    return _INSTEAD_OF_MINUS_ONE if total == -1 else total


@inner
def record_of(call_log: LogFields, seq) -> RecordFields:
    """Return the entry of the flight record for a call."""
    return call_log.record[seq & (RECORD_LENGTH - 1)]


@inner
def open_entry(call_log: LogFields, seq) -> RecordFields:
    """Begin to write the entry of a call that begins now, and return it."""
    record = record_of(call_log, seq)
    store_release(record.sequence, 0)  # until the entry is complete, for readers in other processes
    return record


@inner
def set_dim(record: RecordFields, index, number):
    """Write a dimension of the shape of a call."""
    record.dims[index] = number
    return 0


@inner
def close_entry(call_log: LogFields, record: RecordFields, seq, code, num_dims, num_bytes):
    """Complete the entry of a call, and enter the call into the call log."""
    record.num_dims = num_dims
    record.code = code
    record.end = 0
    record.begin = ticks()
    store_release(record.sequence, seq)
    call_log.num_bytes = num_bytes
    call_log.active = seq
    call_log.sequence = seq
    return 0


@inner
def count_call(call_log: LogFields):
    """End the call that has been entered, and count it."""
    record, end = record_of(call_log, call_log.sequence), ticks()
    record.end = end
    counters = call_log.counters[record.code & 0xFF]
    counters.calls += 1
    counters.num_bytes += call_log.num_bytes
    waited = call_log.waited
    if waited < 0:
        counters.ns += now() + waited
    else:
        counters.ticks += end - record.begin
        counters.waited_ns += waited
    call_log.waited = 0
    call_log.active = 0
    return 0


@kernel
def end_call(call_log: LogFields, run_lock: LockFields):
    """End the call that `begin_call` has entered, count it, and release the run lock."""
    count_call(call_log)
    store(run_lock.entered, 0)
    return 0


@kernel
def read_ticks():
    return ticks()
