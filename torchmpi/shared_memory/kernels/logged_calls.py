"""Signatures, entries and counters of calls, as Python makes them too: hashes of shapes, the flight record."""

from __future__ import annotations

from ..memory_layout import (
    COUNTED_BYTES,
    COUNTED_CALLS,
    COUNTED_NS,
    COUNTED_TICKS,
    COUNTED_WAITED_NS,
    COUNTER_FIELDS,
    LOG_ACTIVE,
    LOG_ALGORITHM,
    LOG_BEGUN,
    LOG_BYTES,
    LOG_COUNTERS,
    LOG_LAST_CHUNK,
    LOG_RECORD,
    LOG_SEQUENCE,
    LOG_WAITED,
    RECORD_BEGIN,
    RECORD_CODE,
    RECORD_DIMS,
    RECORD_END,
    RECORD_FIELDS,
    RECORD_LENGTH,
    RECORD_NUM_DIMS,
    RECORD_SEQUENCE,
    RUN_LOCK_ENTERED,
)
from .compilation import inner, kernel
from .intrinsics import load_field, now, store_field, store_field_release, ticks
from .records import (
    CODE_SHIFT,
    FIRST_NOTE,
    IS_ORIGIN,
    IS_OWN,
    KNOWN_CODES,
    NOTE_FIELDS,
    NOTED_CODE,
    NOTED_INFO,
    NOTED_NUMBERS,
    NOTED_OFFSET,
    NOTED_PLAN,
    NOTED_THREAD,
    NUM_CODES,
    NUM_NOTED,
    NUM_NOTES,
    NUM_NUMBERS,
    NUM_TAKEN,
    ORIGIN_CODE,
    ORIGIN_OFFSET,
    ORIGIN_QUEUED,
)

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
def record_of(call_log, seq):
    """Return the entry of the flight record for a call."""
    return load_field(call_log, LOG_RECORD) + (seq & (RECORD_LENGTH - 1)) * (RECORD_FIELDS * 8)


@inner
def open_entry(call_log, seq):
    """Begin to write the entry of a call that begins now; return its address."""
    record = record_of(call_log, seq)
    store_field_release(record, RECORD_SEQUENCE, 0)  # until the entry is complete, for readers in other processes
    return record


@inner
def set_dim(record, index, number):
    """Write a dimension of the shape of a call."""
    store_field(record, RECORD_DIMS + index, number)
    return 0


@inner
def close_entry(call_log, record, seq, code, num_dims, num_bytes):
    """Complete the entry of a call, and enter the call into the call log."""
    store_field(record, RECORD_NUM_DIMS, num_dims)
    store_field(record, RECORD_CODE, code)
    store_field(record, RECORD_END, 0)
    store_field(record, RECORD_BEGIN, ticks())
    store_field_release(record, RECORD_SEQUENCE, seq)
    store_field(call_log, LOG_BYTES, num_bytes)
    store_field(call_log, LOG_ACTIVE, seq)
    store_field(call_log, LOG_SEQUENCE, seq)
    return 0


@inner
def count(counters, field, number):
    """Add to a counter of a collective."""
    store_field(counters, field, load_field(counters, field) + number)


@inner
def count_call(call_log):
    """End the call that has been entered, and count it."""
    record, end = record_of(call_log, load_field(call_log, LOG_SEQUENCE)), ticks()
    store_field(record, RECORD_END, end)
    counters = call_log + (LOG_COUNTERS + (load_field(record, RECORD_CODE) & 0xFF) * COUNTER_FIELDS) * 8
    count(counters, COUNTED_CALLS, 1)
    count(counters, COUNTED_BYTES, load_field(call_log, LOG_BYTES))
    waited = load_field(call_log, LOG_WAITED)
    if waited < 0:
        count(counters, COUNTED_NS, now() + waited)
    else:
        count(counters, COUNTED_TICKS, end - load_field(record, RECORD_BEGIN))
        count(counters, COUNTED_WAITED_NS, waited)
    store_field(call_log, LOG_WAITED, 0)
    store_field(call_log, LOG_ACTIVE, 0)
    return 0


@kernel
def end_call(call_log, run_lock):
    """End the call that `begin_call` has entered, count it, and release the run lock."""
    count_call(call_log)
    store_field(run_lock, RUN_LOCK_ENTERED, 0)
    return 0


@inner
def known_code(notes, code):
    return load_field(notes, KNOWN_CODES + ((code >> CODE_SHIFT) & (NUM_CODES - 1)))


@kernel
def is_own_code(notes, code):
    """Return whether code is known to be of torchmpi or torch, and not of the program."""
    return known_code(notes, code) == code + IS_OWN


@kernel
def note_call(call_log, noted):
    """Write number, begin, end, bytes, code and algorithm of the call that has just ended."""
    seq = load_field(call_log, LOG_SEQUENCE)
    record = record_of(call_log, seq)
    begin = load_field(record, RECORD_BEGIN)
    if load_field(call_log, LOG_LAST_CHUNK) == seq:
        begin = -load_field(call_log, LOG_BEGUN)
    store_field(noted, 0, seq)
    store_field(noted, 1, begin)
    store_field(noted, 2, load_field(record, RECORD_END))
    store_field(noted, 3, load_field(call_log, LOG_BYTES))
    store_field(noted, 4, load_field(record, RECORD_CODE))
    store_field(noted, 5, load_field(call_log, LOG_ALGORITHM))
    return 0


@kernel
def note_interval(begin, noted):
    """Write begin and end of an interval that ends now, in the fields of a call."""
    store_field(noted, 0, 0)
    store_field(noted, 1, begin)
    store_field(noted, 2, now())
    for index in range(3, NUM_NUMBERS):
        store_field(noted, index, 0)
    return 0


@kernel
def note_origin(notes, code, offset, noted):
    """Write the fields of an origin, with the time of now; 1 if the code is not known to be of the program."""
    if known_code(notes, code) != code:
        return 1
    store_field(noted, ORIGIN_QUEUED, now())
    store_field(noted, ORIGIN_CODE, code)
    store_field(noted, ORIGIN_OFFSET, offset)
    return 0


@kernel
def add_note(notes, info, plan, code, offset, thread, numbers):
    """Note a call that has ended; 1 if there is no room, or if the code is not known to be of the program."""
    noted = load_field(notes, NUM_NOTED)
    if noted - load_field(notes, NUM_TAKEN) >= NUM_NOTES:
        return 1
    if offset != IS_ORIGIN and known_code(notes, code) != code:
        return 1
    note = notes + (FIRST_NOTE + (noted & (NUM_NOTES - 1)) * NOTE_FIELDS) * 8
    store_field(note, NOTED_INFO, info)
    store_field(note, NOTED_PLAN, plan)
    store_field(note, NOTED_CODE, code)
    store_field(note, NOTED_OFFSET, offset)
    store_field(note, NOTED_THREAD, thread)
    for index in range(NUM_NUMBERS):
        store_field(note, NOTED_NUMBERS + index, load_field(numbers, index))
    store_field(notes, NUM_NOTED, noted + 1)
    return 0


@kernel
def read_ticks():
    return ticks()
