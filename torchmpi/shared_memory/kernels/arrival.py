"""Waiting for fields of other ranks, and the synchronization at the beginning of a call.

Algorithm of a call with sequence number `seq`:

1. `begin` publishes ENTERED = seq and waits until this rank's ring entry may be written: the entry is reused after
   RING_LENGTH calls, when all ranks have entered a call after its previous use. After an aborted call, `begin` waits
   until all ranks are past that call, because the slots are written before the ranks synchronize.
2. The kernel writes the payload of the entry, and often the first chunk into its slot.
3. `arrive` writes the signature and publishes the sequence number of the entry; then it waits for the entries of all
   other ranks and compares signatures. No rank passes before all have arrived, so every rank detects a mismatch.
4. The kernel moves the data; `leave` stores LEFT.

Memory order: the release store of the entry's sequence number publishes signature, payload and the first chunk; the
acquire load in `wait` precedes all reads of them. READY and REDUCED work in the same way for later chunks. ABORTED of
another rank (REFUSED in its block) is read with acquire after a fence where data was read outside the slots.

A wait polls SPINS times with a pause instruction, YIELDS times with `sched_yield`, and then sleeps. Aborted calls and
the time limit are checked between sleeps and at some yields: on a busy machine a yield takes milliseconds. A wait that
is not over after the first polls is measured, and added to the call log.
"""

from __future__ import annotations

from ..memory_layout import (
    CORE,
    ENTERED,
    IN_RING,
    LEFT,
    LOG_ALGORITHM,
    LOG_WAITED,
    REDUCED,
    REFUSED,
    RING_LENGTH,
    SEQUENCE,
    SIGNATURE,
    signed_chunks,
)
from .access import block_of, entry_of, fail_check, outcome, own_block, peer_at, ring_field, set_counter
from .compilation import inlined, inner
from .intrinsics import (
    fence,
    field_address,
    give_way,
    load_acquire,
    load_field,
    load_field_acquire,
    now,
    pause,
    sleep,
    store_field,
    store_field_release,
    this_core,
)
from .kernel_sets import ENABLE_CHECKS
from .records import (
    ABORTED,
    CALL_LOG_FIELDS,
    CHECK_SEQUENCE,
    CHUNKS,
    CROWDED,
    CURRENT_SEQ,
    EXPIRED,
    FREE_UNTIL,
    LAST_ABORTED,
    MISMATCH,
    RANK,
    SIZE,
    SPINS,
    TIMEOUT,
    YIELDS,
)

_LONGEST_SLEEP_MICROSECONDS = 1000
_SHORTEST_SLEEP_MICROSECONDS = 20
_YIELDS_PER_CHECK = 16
_FIRST_POLLS = 50  # about a microsecond: readings of the clock would prolong a shorter wait
_RING_REUSE = RING_LENGTH - 1

sign_chunks = inner(signed_chunks)  # Python computes the same for an aborted call


@inner
def has_aborted(group, rank):
    """Return whether a rank will not finish the current call.

    True if the rank has aborted this call, or a later call without taking part in this one.
    """
    seq = load_field(group, CURRENT_SEQ)
    refused = load_field_acquire(block_of(group, rank), REFUSED)
    if refused <= seq:
        return refused == seq
    mine, theirs = entry_of(group, load_field(group, RANK), seq), entry_of(group, rank, seq)
    return load_field(mine, SEQUENCE) == seq and (
        load_field(theirs, SEQUENCE) != seq or load_field(theirs, SIGNATURE) != load_field(mine, SIGNATURE)
    )


@inner
def check_reads(group):
    """Check for aborts after reading other ranks' tensors: 0, or ABORTED and a rank that may have modified its tensor.

    A rank publishes the abort before its program continues, so one check afterwards suffices.
    """
    fence()
    for rank in range(load_field(group, SIZE)):
        if rank != load_field(group, RANK) and has_aborted(group, rank):
            return ABORTED + rank
    return 0


@inner
def end_of_wait(group, address, value):
    """Return the status with which a wait must end, because a rank aborts or the call times out: 0 if it continues.

    A rank that aborts after a step of all ranks has seen them arrive. If this rank has looked for arrivals before, it
    looks again: otherwise it would end the step with an error, and the others would go on.
    """
    status = TIMEOUT if load_field_acquire(group, EXPIRED) == load_field(group, CURRENT_SEQ) else 0
    for rank in range(load_field(group, SIZE)):
        if has_aborted(group, rank):
            status = ABORTED + rank
            break
    return status if status != 0 and load_acquire(address) < value else 0


@inner
def wait_asleep(group, address, value):
    """Yield, then sleep with growing intervals; end with a status if a rank aborts or the call times out."""
    for count in range(load_field(group, YIELDS)):
        if load_acquire(address) >= value:
            return 0
        if count % _YIELDS_PER_CHECK == _YIELDS_PER_CHECK - 1:
            status = end_of_wait(group, address, value)
            if status != 0:
                return status
        give_way()
    duration = _SHORTEST_SLEEP_MICROSECONDS
    while load_acquire(address) < value:
        status = end_of_wait(group, address, value)
        if status != 0:
            return status
        sleep(duration)
        duration = min(duration + duration // 4, _LONGEST_SLEEP_MICROSECONDS)
    return 0


@inner
def wait_long(group, address, value, spins):
    """Poll, then wait asleep, and add the time to that of the call: return 0, or a status on failure."""
    begin = now()
    for _ in range(spins):
        if load_acquire(address) >= value:
            break
        pause()
    status = wait_asleep(group, address, value)
    call_log = load_field(group, CALL_LOG_FIELDS)
    if call_log != 0:
        store_field(call_log, LOG_WAITED, load_field(call_log, LOG_WAITED) + now() - begin)
    return status


@inner
def wait(group, address, value):
    """Wait until a field of a rank on another core has reached a value: return 0, or a status on failure."""
    spins = load_field(group, SPINS)
    for _ in range(min(spins, _FIRST_POLLS)):
        if load_acquire(address) >= value:
            return 0
        pause()
    return wait_long(group, address, value, spins)


@inner
def wait_core(group, field, value):
    """Wait for a field in the blocks of the ranks on this core, which run only when this rank yields: do not poll."""
    rank, size, core = load_field(group, RANK), load_field(group, SIZE), this_core()
    store_field(block_of(group, rank), CORE, core)
    for shift in range(1, size):
        other = peer_at(rank, size, shift)
        if load_field(block_of(group, other), CORE) == core:
            status = wait_long(group, field_address(block_of(group, other), field), value, 0)
            if status != 0:
                return status
    return 0


@inlined
def wait_same_core(group, field, value):
    """Wait for the ranks on this core first, where ranks share cores."""
    return wait_core(group, field, value) if load_field(group, CROWDED) != 0 else 0


@inner
def wait_all(group, field, value):
    """Wait until a field has reached a value in the blocks of all other ranks."""
    rank, size = load_field(group, RANK), load_field(group, SIZE)
    status = wait_same_core(group, field, value)
    if status != 0:
        return status
    for shift in range(1, size):
        other = peer_at(rank, size, shift)
        status = wait(group, field_address(block_of(group, other), field), value)
        if status != 0:
            return status
    return 0


@inner
def have_all(group, field, value):
    """Return whether a field has reached a value in the blocks of all other ranks."""
    for other in range(load_field(group, SIZE)):
        if other != load_field(group, RANK) and load_field_acquire(block_of(group, other), field) < value:
            return False
    return True


@inner
def set_algorithm(group, algorithm):
    """Store how the current call moves its data, for timelines."""
    call_log = load_field(group, CALL_LOG_FIELDS)
    if call_log != 0:
        store_field(call_log, LOG_ALGORITHM, algorithm)
    return 0


@inner
def end_reads(group):
    """End a call in which ranks read each other's tensors: wait until all reads are done, then tensors may be modified.

    Counts as one chunk.
    """
    status = check_reads(group)
    if status != 0:
        return status
    chunk = load_field(group, CHUNKS)
    set_counter(group, REDUCED, chunk + 1)
    store_field(group, CHUNKS, chunk + 1)
    return wait_all(group, REDUCED, chunk + 1)


@inner
def begin(group, seq):
    """Enter a call: wait until this rank's ring entry may be written and, after an aborted call, its slots."""
    if ENABLE_CHECKS and seq < load_field(group, CURRENT_SEQ):
        fail_check(group, CHECK_SEQUENCE, seq, load_field(group, CURRENT_SEQ))
    store_field(group, CURRENT_SEQ, seq)
    set_algorithm(group, IN_RING)  # unless a function for longer data sets another one
    store_field_release(own_block(group), ENTERED, seq)
    aborted = load_field(group, LAST_ABORTED)
    if aborted != 0:
        status = wait_all(group, ENTERED, aborted + 1)
        if status != 0:
            return status
        store_field(group, LAST_ABORTED, 0)
    return wait_all(group, ENTERED, seq - _RING_REUSE) if seq > load_field(group, FREE_UNTIL) else 0


@inner
def arrive(group, seq, signature):
    """Publish this rank's entry, after its payload, and wait for all other ranks; all signatures must be equal.

    The number of chunks so far is part of the signature: it differs after a call that failed on some ranks only.
    """
    rank, size = load_field(group, RANK), load_field(group, SIZE)
    signature ^= sign_chunks(load_field(group, CHUNKS))
    mine = entry_of(group, rank, seq)
    store_field(mine, SIGNATURE, signature)
    store_field_release(mine, SEQUENCE, seq)
    status = wait_same_core(group, ring_field(seq), seq)
    if status != 0:
        return status
    for shift in range(1, size):
        other = peer_at(rank, size, shift)
        theirs = entry_of(group, other, seq)
        status = wait(group, theirs, seq)
        if status != 0:
            return status
        if load_field(theirs, SIGNATURE) != signature:
            return MISMATCH + other
    store_field(group, FREE_UNTIL, seq + _RING_REUSE)  # all ranks are past the call before this one
    return 0


@inner
def leave(group, seq, status):
    """Store the end of a call, and return its status."""
    store_field(own_block(group), LEFT, seq)
    return outcome(group, status)
