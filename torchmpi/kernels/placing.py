"""How data goes into the slots: through the caches, or past them where the cores of the ranks share none.

Cores that share a cache hand each other lines at 10 GB/s and more. Between cores that do not (another socket, another
part of the chip, or a virtual machine whose host has placed them so) fetching a line that the other core has just
written takes longer than fetching it from memory: 2 GB/s were seen, and 10 when it was written past the caches. Which
of the two holds may change while a program runs, so the ranks keep measuring.
"""

from __future__ import annotations

from .. import layout
from . import context
from .meeting import inner, own, row
from .memory import copy, copy_lines_past, fence, load, now, store, store_release

_LINE_BYTES = 64
_FETCHES_SLOWLY = layout.FETCHES_SLOWLY * 8
_LEAST_BYTES = 16 << 10  # less says nothing about the pace
_SLOW_NANOSECONDS = 180  # for a KB, in the best chunk. Seen: 80 to 120 with a common cache, 200 to 500 without it
_SLOW_PUT_NANOSECONDS = 250  # the same for copying into a slot. Seen: 60 to 130, and 400 to 550
_WARM_CHUNKS = 16  # before that, the system still hands out the memory of the slots
_PROBE_EVERY = 128  # calls: a power of two


@inner
def slot(ctx, rank, chunk):  # type: ignore[no-untyped-def]
    """Address of the slot of a rank for a chunk."""
    return own(ctx, context.SLOTS) + (2 * rank + (chunk & 1)) * own(ctx, context.SLOT_BYTES)


@inner
def copy_past(target, source, num_bytes):  # type: ignore[no-untyped-def]
    """Copy to where nobody will look soon: for a target that is not in the caches anyway, a third less to move."""
    head = min(-target & (_LINE_BYTES - 1), num_bytes)
    copy(target, source, head)
    done = head
    while done + 4 * _LINE_BYTES <= num_bytes:
        copy_lines_past(target + done, source + done)
        done += 4 * _LINE_BYTES
    copy(target + done, source + done, num_bytes - done)
    return 0


@inner
def is_probe(ctx):  # type: ignore[no-untyped-def]
    """Whether this call goes through the caches whatever was seen, to see whether it still is so: on all ranks."""
    return own(ctx, context.SEQUENCE) & (_PROBE_EVERY - 1) == 0


@inner
def choose_way(ctx):  # type: ignore[no-untyped-def]
    """At the beginning of a call with chunks: past the caches if any rank has fetched slowly what went through them."""
    is_past = 0
    if not is_probe(ctx):
        for rank in range(own(ctx, context.SIZE)):
            is_past |= load(row(ctx, rank) + _FETCHES_SLOWLY)
    store(ctx + context.IS_PAST * 8, is_past)
    store(ctx + context.PACE * 8, 0)
    store(ctx + context.PUT_PACE * 8, 0)
    store(ctx + context.SPENT * 8, 0)  # of a call that failed half way
    return 0


@inner
def copy_into_slot(ctx, target, source, num_bytes):  # type: ignore[no-untyped-def]
    """Put something where other ranks will look."""
    if own(ctx, context.IS_PAST) != 0:
        copy_past(target, source, num_bytes)
    else:
        copy(target, source, num_bytes)
    return 0


@inner
def publish(ctx, counter, value):  # type: ignore[no-untyped-def]
    """Tell the others that something is there, however it was written."""
    if own(ctx, context.IS_PAST) != 0:
        fence()
    store_release(row(ctx, own(ctx, context.RANK)) + counter, value)
    return 0


@inner
def note_time(ctx, since):  # type: ignore[no-untyped-def]
    """Note what has been done since then, in which nobody was waited for."""
    store(ctx + context.SPENT * 8, own(ctx, context.SPENT) + now() - since)
    return 0


@inner
def note_best(ctx, word, nanoseconds, num_bytes):  # type: ignore[no-untyped-def]
    """Keep a pace if it is the best one of the call so far: others may have been interrupted."""
    pace, best = nanoseconds * 1024 // max(num_bytes, 1) + 1, own(ctx, word)
    if num_bytes >= _LEAST_BYTES and (best == 0 or pace < best):
        store(ctx + word * 8, pace)
    return 0


@inner
def note_pace(ctx, num_bytes):  # type: ignore[no-untyped-def]
    """Note that this was a chunk."""
    note_best(ctx, context.PACE, own(ctx, context.SPENT), num_bytes)
    store(ctx + context.SPENT * 8, 0)
    return 0


@inner
def note_put(ctx, since, num_bytes):  # type: ignore[no-untyped-def]
    """Note that so much has been copied into the slot since then.

    A processor must take the lines from those who have read them before it can write there again: without a common
    cache that alone may be slow, and fetching fast.
    """
    note_best(ctx, context.PUT_PACE, now() - since, num_bytes)
    return 0


@inner
def judge(ctx):  # type: ignore[no-untyped-def]
    """At the end of the call: tell the others if it has gone through the caches and was slow, or has stopped to be."""
    pace, put_pace = own(ctx, context.PACE), own(ctx, context.PUT_PACE)
    verdict = row(ctx, own(ctx, context.RANK)) + _FETCHES_SLOWLY
    is_warm = own(ctx, context.CHUNKS) >= _WARM_CHUNKS
    if pace + put_pace != 0 and is_warm and own(ctx, context.IS_PAST) == 0:
        if pace > _SLOW_NANOSECONDS or put_pace > _SLOW_PUT_NANOSECONDS:
            store(verdict, 1)
        elif is_probe(ctx):
            store(verdict, 0)
    return 0
