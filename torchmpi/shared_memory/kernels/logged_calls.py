"""Signatures, entries and counters of calls, as Python makes them too: hashes of shapes, the flight record."""

from __future__ import annotations

from ..memory_layout import RECORD_LENGTH, LockFields, LogFields, RecordFields
from .compilation import inner, kernel
from .intrinsics import copy, now, store, store_release, ticks
from .records import CODE_SHIFT, IS_ORIGIN, IS_OWN, NUM_CODES, NUM_NOTES, Noted, NoteRing, OriginRecord

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


@inner
def known_code(notes: NoteRing, code):
    return notes.known_codes[(code >> CODE_SHIFT) & (NUM_CODES - 1)]


@kernel
def is_own_code(notes: NoteRing, code):
    """Return whether code is known to be of torchmpi or torch, and not of the program."""
    return known_code(notes, code) == code + IS_OWN


@kernel
def note_call(call_log: LogFields, noted: Noted):
    """Write number, begin, end, bytes, code and algorithm of the call that has just ended."""
    seq = call_log.sequence
    record = record_of(call_log, seq)
    begin = record.begin
    if call_log.last_chunk == seq:
        begin = -call_log.begun
    noted.seq, noted.begin, noted.end = seq, begin, record.end
    noted.num_bytes, noted.code, noted.algorithm = call_log.num_bytes, record.code, call_log.algorithm
    return 0


@kernel
def note_interval(begin, noted: Noted):
    """Write begin and end of an interval that ends now, in the fields of a call."""
    noted.seq, noted.begin, noted.end = 0, begin, now()
    noted.num_bytes = noted.code = noted.algorithm = 0
    return 0


@kernel
def note_origin(notes: NoteRing, code, offset, origin: OriginRecord):
    """Write the fields of an origin, with the time of now; 1 if the code is not known to be of the program."""
    if known_code(notes, code) != code:
        return 1
    origin.queued, origin.code, origin.offset = now(), code, offset
    return 0


@kernel
def add_note(notes: NoteRing, info, plan, code, offset, thread, numbers: Noted):
    """Note a call that has ended; 1 if there is no room, or if the code is not known to be of the program."""
    noted = notes.num_noted
    if noted - notes.num_taken >= NUM_NOTES:
        return 1
    if offset != IS_ORIGIN and known_code(notes, code) != code:
        return 1
    note = notes.notes[noted & (NUM_NOTES - 1)]
    note.info, note.plan, note.code, note.offset, note.thread = info, plan, code, offset, thread
    copy(note.numbers, numbers, Noted.BYTES)
    notes.num_noted = noted + 1
    return 0


@kernel
def read_ticks():
    return ticks()
