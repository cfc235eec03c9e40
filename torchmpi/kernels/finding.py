"""Where everybody's tensors are, if they are shared: announced with the call, and found in what is mapped here."""

from __future__ import annotations

from . import context
from .meeting import PAYLOAD, entry, inner, own
from .memory import load, store

MIXED, ALL_SHARED = 1, 2


@inner
def shared_segment(ctx, address, num_bytes):  # type: ignore[no-untyped-def]
    """The own shared segment that holds all these bytes, as the address of its words; 0 if none does."""
    segments = own(ctx, context.OWN_SEGMENTS)
    for index in range(load(segments)):
        segment = segments + 8 + index * context.SEGMENT_WORDS * 8
        begins_before = load(segment + context.SEGMENT_BEGIN * 8) <= address
        if begins_before and address + num_bytes <= load(segment + context.SEGMENT_END * 8):
            return segment
    return 0


@inner
def announce_memory(ctx, seq, address, num_bytes):  # type: ignore[no-untyped-def]
    """Say in the payload where this rank's tensor is, if others can get at it; gives whether they can."""
    payload = entry(ctx, own(ctx, context.RANK), seq) + PAYLOAD
    segment = shared_segment(ctx, address, num_bytes)
    if segment == 0:
        store(payload, 0)
        return 0
    store(payload, load(segment + context.SEGMENT_KEY * 8))
    store(payload + 8, load(segment + context.SEGMENT_FILE * 8))
    store(payload + 16, load(segment + context.SEGMENT_END * 8) - load(segment + context.SEGMENT_BEGIN * 8))
    store(payload + 24, address - load(segment + context.SEGMENT_BEGIN * 8))
    return 1


@inner
def mapped(ctx, rank, key):  # type: ignore[no-untyped-def]
    """Where a segment of another rank is mapped in this process; 0 if it is not."""
    pairs = own(ctx, context.MAPPINGS) + rank * context.MAPPINGS_PER_RANK * 16
    for index in range(context.MAPPINGS_PER_RANK):
        if load(pairs + index * 16) == key:
            return load(pairs + index * 16 + 8)
    return 0


@inner
def find_memory(ctx, seq, address):  # type: ignore[no-untyped-def]
    """Note where everybody's tensor is: ALL_SHARED, MIXED, 0 if all are private, or UNMAPPED and a rank."""
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    num_shared = 0
    for other in range(size):
        num_shared += load(entry(ctx, other, seq) + PAYLOAD) != 0
    if num_shared < size:
        return MIXED if num_shared else 0
    for other in range(size):
        payload = entry(ctx, other, seq) + PAYLOAD
        base = mapped(ctx, other, load(payload))
        if other != rank and base == 0:
            return context.UNMAPPED + other
        store(ctx + (context.POINTERS + size + other) * 8, address if other == rank else base + load(payload + 24))
    return ALL_SHARED
