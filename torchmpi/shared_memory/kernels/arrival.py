"""Waiting for fields of other ranks, and the synchronization at the beginning of a call.

Algorithm of a call with sequence number `seq`:

1. `begin` publishes `entered` = seq and waits until this rank's ring entry may be written: the entry is reused after
   RING_LENGTH calls, when all ranks have entered a call after its previous use. After an aborted call, `begin` waits
   until all ranks are past that call, because the slots are written before the ranks synchronize.
2. The kernel writes the payload of the entry, and often the first chunk into its slot.
3. `arrive` writes the signature and publishes the sequence number of the entry; then it waits for the entries of all
   other ranks and compares signatures. No rank passes before all have arrived, so every rank detects a mismatch.
4. The kernel moves the data; `leave` stores `left`.

Memory order: the release store of the entry's sequence number publishes signature, payload and the first chunk; the
acquire load in `wait` precedes all reads of them. `ready` and `reduced` work in the same way for later chunks. That
another rank has aborted (`refused` in its block) is read with acquire after a fence where data was read outside the
slots.

A wait polls `spins` times with a pause instruction, `yields` times with `sched_yield`, and then sleeps. Aborted calls
and the time limit are checked between sleeps and at some yields: on a busy machine a yield takes milliseconds. A wait
that is not over after the first polls is measured, and added to the call log.

A call that no kernel runs is published by `announce`, with the same order, and without waiting.
"""

from __future__ import annotations

from ..compiler.compilation import inlined, inner, kernel
from ..memory_layout import DIFFERENT, IN_RING, NEIGHBOR, NOT_ARRIVED, RING_LENGTH, Block, signed_chunks
from .access import block_of, entry_of, fail_check, outcome, own_block, peer_at, ring_field, set_counter
from .intrinsics import (
    fence,
    field_address,
    give_way,
    load,
    load_acquire,
    now,
    pause,
    sleep,
    store,
    store_release,
    this_core,
)
from .kernel_sets import ENABLE_CHECKS
from .records import ABORTED, CHECK_SEQUENCE, MISMATCH, TIMEOUT, GroupRecord

_LONGEST_SLEEP_MICROSECONDS = 1000
_SHORTEST_SLEEP_MICROSECONDS = 20
_YIELDS_PER_CHECK = 16
_FIRST_POLLS = 50  # about a microsecond: readings of the clock would prolong a shorter wait
_RING_REUSE = RING_LENGTH - 1

sign_chunks = inner(signed_chunks)  # Python computes the same for an aborted call


@inner
def has_aborted(group: GroupRecord, rank):
    """Return whether a rank will not finish the current call.

    True if the rank has aborted this call, or a later call without taking part in this one.
    """
    seq = group.current_seq
    refused = load_acquire(block_of(group, rank).refused)
    if refused <= seq:
        return refused == seq
    mine, theirs = entry_of(group, group.rank, seq), entry_of(group, rank, seq)
    return load(mine.sequence) == seq and (load(theirs.sequence) != seq or theirs.signature != mine.signature)


@inner
def check_reads(group: GroupRecord):
    """Check for aborts after reading other ranks' tensors: 0, or ABORTED and a rank that may have modified its tensor.

    A rank publishes the abort before its program continues, so one check afterwards suffices.
    """
    fence()
    for rank in range(group.size):
        if rank != group.rank and has_aborted(group, rank):
            return ABORTED + rank
    return 0


@inner
def end_of_wait(group: GroupRecord, address, value):
    """Return the status with which a wait must end, because a rank aborts or the call times out: 0 if it continues.

    A rank that aborts after a step of all ranks has seen them arrive. If this rank has looked for arrivals before, it
    looks again: otherwise it would end the step with an error, and the others would go on.
    """
    status = TIMEOUT if load_acquire(group.expired) == group.current_seq else 0
    for rank in range(group.size):
        if has_aborted(group, rank):
            status = ABORTED + rank
            break
    return status if status != 0 and load_acquire(address) < value else 0


@inner
def wait_asleep(group: GroupRecord, address, value):
    """Yield, then sleep with growing intervals; end with a status if a rank aborts or the call times out."""
    for count in range(group.yields):
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
def wait_long(group: GroupRecord, address, value, spins):
    """Poll, then wait asleep, and add the time to that of the call: return 0, or a status on failure."""
    begin = now()
    for _ in range(spins):
        if load_acquire(address) >= value:
            break
        pause()
    status = wait_asleep(group, address, value)
    call_log = group.call_log
    if call_log:
        call_log.waited += now() - begin
    return status


@inner
def wait(group: GroupRecord, address, value):
    """Wait until a field of a rank on another core has reached a value: return 0, or a status on failure."""
    spins = group.spins
    for _ in range(min(spins, _FIRST_POLLS)):
        if load_acquire(address) >= value:
            return 0
        pause()
    return wait_long(group, address, value, spins)


@inner
def wait_core(group: GroupRecord, field, value):
    """Wait for a field in the blocks of the ranks on this core, which run only when this rank yields: do not poll."""
    rank, size, core = group.rank, group.size, this_core()
    block_of(group, rank).core = core
    for shift in range(1, size):
        other = peer_at(rank, size, shift)
        if block_of(group, other).core == core:
            status = wait_long(group, field_address(block_of(group, other), field), value, 0)
            if status != 0:
                return status
    return 0


@inlined
def wait_same_core(group: GroupRecord, field, value):
    """Wait for the ranks on this core first, where ranks share cores."""
    return wait_core(group, field, value) if group.crowded != 0 else 0


@inner
def wait_all(group: GroupRecord, field, value):
    """Wait until a field has reached a value in the blocks of all other ranks."""
    rank, size = group.rank, group.size
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
def have_all(group: GroupRecord, field, value):
    """Return whether a field has reached a value in the blocks of all other ranks."""
    for other in range(group.size):
        if other != group.rank and load_acquire(field_address(block_of(group, other), field)) < value:
            return False
    return True


@inner
def set_algorithm(group: GroupRecord, algorithm):
    """Store how the current call moves its data, for timelines."""
    call_log = group.call_log
    if call_log:
        call_log.algorithm = algorithm
    return 0


@inner
def end_reads(group: GroupRecord):
    """End a call in which ranks read each other's tensors: wait until all reads are done, then tensors may be modified.

    Counts as one chunk.
    """
    status = check_reads(group)
    if status != 0:
        return status
    chunk = group.chunks
    set_counter(group, Block.reduced, chunk + 1)
    group.chunks = chunk + 1
    return wait_all(group, Block.reduced, chunk + 1)


@inner
def begin(group: GroupRecord, seq):
    """Enter a call: wait until this rank's ring entry may be written and, after an aborted call, its slots."""
    if ENABLE_CHECKS and seq < group.current_seq:
        fail_check(group, CHECK_SEQUENCE, seq, group.current_seq)
    group.current_seq = seq
    set_algorithm(group, IN_RING)  # unless a function for longer data sets another one
    store_release(own_block(group).entered, seq)
    aborted = group.last_aborted
    if aborted != 0:
        status = wait_all(group, Block.entered, aborted + 1)
        if status != 0:
            return status
        group.last_aborted = 0
    return wait_all(group, Block.entered, seq - _RING_REUSE) if seq > group.free_until else 0


@inner
def arrive(group: GroupRecord, seq, signature):
    """Publish this rank's entry, after its payload, and wait for all other ranks; all signatures must be equal.

    The number of chunks so far is part of the signature: it differs after a call that failed on some ranks only.
    """
    rank, size = group.rank, group.size
    signature ^= sign_chunks(group.chunks)
    mine = entry_of(group, rank, seq)
    mine.signature = signature
    store_release(mine.sequence, seq)
    status = wait_same_core(group, ring_field(seq), seq)
    if status != 0:
        return status
    for shift in range(1, size):
        other = peer_at(rank, size, shift)
        theirs = entry_of(group, other, seq)
        status = wait(group, theirs.sequence, seq)
        if status != 0:
            return status
        if theirs.signature != signature:
            return MISMATCH + other
    group.free_until = seq + _RING_REUSE  # all ranks are past the call before this one
    return 0


@inner
def leave(group: GroupRecord, seq, status):
    """Return the status of a call that ends, and store its end unless it has failed or continues in another kernel."""
    if status == 0:
        store(own_block(group).left, seq)
    return outcome(group, status)


# --- calls that no kernel runs ------------------------------------------------------------------------------------


@inner
def compared(block: Block, seq, signature):
    """Compare a call with that of another rank, if there is one: 0, or NOT_ARRIVED, or DIFFERENT."""
    if not block:
        return 0
    theirs = block.ring[seq & (RING_LENGTH - 1)]
    if load_acquire(theirs.sequence) != seq:
        return NOT_ARRIVED
    return 0 if theirs.signature == signature else DIFFERENT


@kernel
def announce(own: Block, one: Block, other: Block, seq, signature, arrived):
    """Publish a call, and compare it with those of the neighbors, of which there may be none or one.

    No rank sees the call before this rank has ended all reads of its earlier calls.

    Args:
        own: The block of this rank; 0 if the call has been published.
        one: That of a neighbor, or 0.
        other: That of the other one, or 0.
        seq: Number of the call.
        signature: Its signature.
        arrived: When this rank has entered the call; 0 if that is not to be published.

    Returns:
        The result for `one` and, times NEIGHBOR, for `other`.
    """
    if own:
        entry = own.ring[seq & (RING_LENGTH - 1)]
        if arrived != 0:
            entry.payload[0] = arrived
        entry.signature = signature
        store_release(entry.sequence, seq)
        store_release(own.entered, seq)
    return compared(one, seq, signature) + compared(other, seq, signature) * NEIGHBOR
