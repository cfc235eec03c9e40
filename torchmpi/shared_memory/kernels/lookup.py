"""Where everybody's tensors are, if they are shared: announced with the call, and found in what is mapped here."""

from __future__ import annotations

from .. import memory_layout
from . import context
from .arrival import PAYLOAD, entry, inner, own
from .intrinsics import load, load_acquire, store

MIXED, ALL_SHARED = 1, 2
_MEMORY = PAYLOAD + memory_layout.MEMORY * 8


@inner
def shared_segment(ctx, address, num_bytes):  # type: ignore[no-untyped-def]
    """The own shared segment that holds all these bytes, as the address of its words; 0 if none does."""
    segments = own(ctx, context.OWN_SEGMENTS)
    for index in range(load(segments)):
        segment = segments + 8 + index * context.SEGMENT_FIELDS * 8
        end = load_acquire(segment + context.SEGMENT_END * 8)
        is_there = load_acquire(segment + context.SEGMENT_BEGIN * 8) <= address and address + num_bytes <= end
        # Another thread may have put another segment into this place between the two looks.
        if is_there and load_acquire(segment + context.SEGMENT_END * 8) == end:
            return segment
    return 0


@inner
def announced(ctx, rank, seq):  # type: ignore[no-untyped-def]
    """Address of what a rank says of where its tensor is: key, file and length of the segment, and the place in it."""
    return entry(ctx, rank, seq) + _MEMORY


@inner
def announce_memory(ctx, seq, address, num_bytes):  # type: ignore[no-untyped-def]
    """Say in the payload where this rank's tensor is, if others can get at it; gives whether they can.

    What takes but one meeting through a slot stays there: of a tensor all must know that all have read it.
    """
    fields = announced(ctx, own(ctx, context.RANK), seq)
    segment = shared_segment(ctx, address, num_bytes) if num_bytes > own(ctx, context.WHOLE_BYTES) else 0
    if segment == 0:
        store(fields, 0)
        return False
    store(fields, load(segment + context.SEGMENT_KEY * 8))
    store(fields + 8, load(segment + context.SEGMENT_FILE * 8))
    store(fields + 16, load(segment + context.SEGMENT_END * 8) - load(segment + context.SEGMENT_BEGIN * 8))
    store(fields + 24, address - load(segment + context.SEGMENT_BEGIN * 8))
    return True


@inner
def mapped(ctx, rank, key):  # type: ignore[no-untyped-def]
    """Where a segment of another rank is mapped in this process; 0 if it is not."""
    pairs = own(ctx, context.MAPPINGS) + rank * context.MAPPINGS_PER_RANK * 16
    for index in range(context.MAPPINGS_PER_RANK):
        if load(pairs + index * 16) == key:
            return load(pairs + index * 16 + 8)
    return 0


@inner
def find_of(ctx, seq, rank):  # type: ignore[no-untyped-def]
    """Note where another rank's shared tensor is: 0, or UNMAPPED and that rank."""
    fields = announced(ctx, rank, seq)
    base = mapped(ctx, rank, load(fields))
    if base == 0:
        return context.UNMAPPED + rank
    store(ctx + (context.POINTERS + own(ctx, context.SIZE) + rank) * 8, base + load(fields + 24))
    return 0


@inner
def found(ctx, rank):  # type: ignore[no-untyped-def]
    """Address of the shared tensor of a rank, once that is known."""
    return own(ctx, context.POINTERS + own(ctx, context.SIZE) + rank)


@inner
def find_memory(ctx, seq, address):  # type: ignore[no-untyped-def]
    """Note where everybody's tensor is: ALL_SHARED, MIXED, 0 if all are private, or UNMAPPED and a rank."""
    rank, size = own(ctx, context.RANK), own(ctx, context.SIZE)
    num_shared = 0
    for other in range(size):
        num_shared += load(announced(ctx, other, seq)) != 0
    if num_shared < size:
        return MIXED if num_shared else 0
    store(ctx + (context.POINTERS + size + rank) * 8, address)
    for other in range(size):
        status = find_of(ctx, seq, other) if other != rank else 0
        if status != 0:
            return status
    return ALL_SHARED
