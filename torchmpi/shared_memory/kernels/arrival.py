"""How ranks meet: waiting for a word of another rank, and arriving at a call."""

from __future__ import annotations

from typing import Any

import numba

from .. import memory_layout
from . import context
from .intrinsics import fence, give_way, load, load_acquire, pause, sleep, store, store_release, this_core

_LONGEST_NAP_MICROSECONDS = 1000
_SHORTEST_NAP_MICROSECONDS = 20

_numba: Any = numba

inner = _numba.njit(nogil=True, error_model="numpy")
"""How what kernels call is compiled: together with each kernel that calls it."""


kernels: dict[str, Any] = {}
"""What Python calls, by name; compiled by :mod:`torchmpi.shared_memory.kernels.compilation`."""


def kernel(function: Any) -> Any:
    """A function of addresses and numbers that Python calls, and kernels may."""
    kernels[function.__name__] = function
    return inner(function)


_ROW = memory_layout.BLOCK_BYTES
_ENTERED, _LEFT, _REFUSED = (field * 8 for field in (memory_layout.ENTERED, memory_layout.LEFT, memory_layout.REFUSED))
_CORE, _SIGNATURE, _REDUCED = (
    field * 8 for field in (memory_layout.CORE, memory_layout.SIGNATURE, memory_layout.REDUCED)
)
_RING, _ENTRY, _LAST = memory_layout.RING_START * 8, memory_layout.ENTRY_FIELDS * 8, memory_layout.RING_LENGTH - 1
PAYLOAD = memory_layout.PAYLOAD * 8


@inner
def own(ctx, field):  # type: ignore[no-untyped-def]
    """A word of the context."""
    return load(ctx + field * 8)


@inner
def row(ctx, rank):  # type: ignore[no-untyped-def]
    """Address of the row of a rank."""
    return own(ctx, context.ROWS) + rank * _ROW


@inner
def entry(ctx, rank, seq):  # type: ignore[no-untyped-def]
    """Address of the entry of a call in the ring of a rank."""
    return row(ctx, rank) + _RING + (seq & _LAST) * _ENTRY


@inner
def has_aborted(ctx, rank):  # type: ignore[no-untyped-def]
    """Whether a rank will not finish the current call: it says so, or says so of a later one, and never was in this."""
    seq = own(ctx, context.SEQUENCE)
    refused = load_acquire(row(ctx, rank) + _REFUSED)
    if refused <= seq:
        return refused == seq
    mine, theirs = entry(ctx, own(ctx, context.RANK), seq), entry(ctx, rank, seq)
    return load(mine) == seq and (load(theirs) != seq or load(theirs + _SIGNATURE) != load(mine + _SIGNATURE))


@inner
def check_reads(ctx):  # type: ignore[no-untyped-def]
    """After reading what is not in a slot: 0, or REFUSED and a rank that may have written there since, having given up.

    It says so before it goes on, so it is enough to look afterwards.
    """
    fence()
    for rank in range(own(ctx, context.SIZE)):
        if rank != own(ctx, context.RANK) and has_aborted(ctx, rank):
            return context.REFUSED + rank
    return 0


@inner
def wait_long(ctx, address, value):  # type: ignore[no-untyped-def]
    """Give way, then sleep, ever longer; ends if a rank has given up the call, or its time is over."""
    for _ in range(own(ctx, context.YIELDS)):
        if load_acquire(address) >= value:
            return 0
        give_way()
    nap = _SHORTEST_NAP_MICROSECONDS
    while load_acquire(address) < value:
        for rank in range(own(ctx, context.SIZE)):
            if has_aborted(ctx, rank):
                return context.REFUSED + rank
        if load_acquire(ctx + context.EXPIRED * 8) == own(ctx, context.SEQUENCE):
            return context.LATE
        sleep(nap)
        nap = min(nap + nap // 4, _LONGEST_NAP_MICROSECONDS)
    return 0


@inner
def wait(ctx, address, value):  # type: ignore[no-untyped-def]
    """Return when the word, of a rank on another core, has reached the value: 0, or why it never will."""
    for _ in range(own(ctx, context.SPINS)):
        if load_acquire(address) >= value:
            return 0
        pause()
    return wait_long(ctx, address, value)


@inner
def wait_beside(ctx, field, value):  # type: ignore[no-untyped-def]
    """Where ranks share cores: wait for this word in the rows of those on this core, and look for nothing meanwhile.

    They go on as soon as this rank gives way, and not before.
    """
    if own(ctx, context.CROWDED) == 0:
        return 0
    rank, size, core = own(ctx, context.RANK), own(ctx, context.SIZE), this_core()
    store(row(ctx, rank) + _CORE, core)
    for shift in range(1, size):
        other = rank + shift - size if rank + shift >= size else rank + shift
        if load(row(ctx, other) + _CORE) == core:
            status = wait_long(ctx, row(ctx, other) + field, value)
            if status != 0:
                return status
    return 0


@inner
def wait_all(ctx, counter, value):  # type: ignore[no-untyped-def]
    """Return when a counter has reached the value on all other ranks."""
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    status = wait_beside(ctx, counter, value)
    if status != 0:
        return status
    for shift in range(1, size):
        other = rank + shift - size if rank + shift >= size else rank + shift
        status = wait(ctx, row(ctx, other) + counter, value)
        if status != 0:
            return status
    return 0


@inner
def end_reads(ctx):  # type: ignore[no-untyped-def]
    """At the end of a call in which ranks have read each other's tensors, which may be written to when all are here.

    It counts as one chunk.
    """
    status = check_reads(ctx)
    if status != 0:
        return status
    chunk = own(ctx, context.CHUNKS)
    store(ctx + context.CHUNKS * 8, chunk + 1)
    store_release(row(ctx, own(ctx, context.RANK)) + _REDUCED, chunk + 1)
    return wait_all(ctx, _REDUCED, chunk + 1)


@inner
def have_all(ctx, counter, value):  # type: ignore[no-untyped-def]
    """Whether a counter has reached the value on all other ranks."""
    for other in range(own(ctx, context.SIZE)):
        if other != own(ctx, context.RANK) and load_acquire(row(ctx, other) + counter) < value:
            return False
    return True


@inner
def begin(ctx, seq):  # type: ignore[no-untyped-def]
    """Make sure that this rank's entry for a call may be written: all ranks are past the call that had it before.

    After a call that this rank has given up also that its slots may: all are past that one, and those before it.
    """
    store(ctx + context.SEQUENCE * 8, seq)
    store_release(row(ctx, own(ctx, context.RANK)) + _ENTERED, seq)
    raise_aborted = own(ctx, context.LAST_ABORTED)
    if raise_aborted != 0:
        status = wait_all(ctx, _ENTERED, raise_aborted + 1)
        if status != 0:
            return status
        store(ctx + context.LAST_ABORTED * 8, 0)
    return wait_all(ctx, _ENTERED, seq - _LAST) if seq > own(ctx, context.FREE) else 0


@inner
def arrive(ctx, seq, signature):  # type: ignore[no-untyped-def]
    """Publish this rank's entry, whose payload is written already, and wait for everybody's; all must be the same.

    Also the same number of chunks so far: it differs after a call that failed on some ranks only.
    """
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    signature ^= own(ctx, context.CHUNKS)
    mine = entry(ctx, rank, seq)
    store(mine + memory_layout.SIGNATURE * 8, signature)
    store_release(mine, seq)
    status = wait_beside(ctx, mine - row(ctx, rank), seq)
    if status != 0:
        return status
    for shift in range(1, size):
        other = rank + shift - size if rank + shift >= size else rank + shift
        theirs = entry(ctx, other, seq)
        status = wait(ctx, theirs, seq)
        if status != 0:
            return status
        if load(theirs + memory_layout.SIGNATURE * 8) != signature:
            return context.MISMATCH + other
    store(ctx + context.FREE * 8, seq + _LAST)  # all are past the call before this one
    return 0


@inner
def leave(ctx, seq):  # type: ignore[no-untyped-def]
    """Note the end of a call."""
    store(row(ctx, own(ctx, context.RANK)) + _LEFT, seq)
    return 0
