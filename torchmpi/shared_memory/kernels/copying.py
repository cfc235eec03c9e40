"""How data goes into the slots: through the caches, or past them where the ranks' cores share none.

Cores that share a cache hand each other lines at 10 GB/s and more. Between cores that do not (another socket, another
part of the chip, or a virtual machine whose host has placed them so) fetching a line that the other core has just
written takes longer than fetching it from memory: 2 GB/s were seen, and 10 when it was written past the caches. Which
of the two holds may change while a program runs, so the ranks keep measuring.
"""

from __future__ import annotations

from .. import memory_layout
from . import context
from .arrival import inner, own, row
from .intrinsics import (
    ask_lines,
    claim_lines,
    copy,
    copy_lines,
    copy_lines_past,
    fence,
    load,
    now,
    store,
    store_release,
)

_LINE_BYTES = 64
_FETCHES_SLOWLY = memory_layout.FETCHES_SLOWLY * 8
_BLOCK_BYTES = 1 << 10  # copied to two places while it is in the first cache
_LEAST_CHUNKS = 4  # of fewer, all count
_LEAST_BYTES = 16 << 10  # less says nothing about the pace
_SLOW_NANOSECONDS = 180  # for a KB, in the best chunk. Seen: 80 to 120 with a common cache, 200 to 500 without it
_SLOW_PUT_NANOSECONDS = 250  # the same for copying into a slot. Seen: 60 to 130, and 400 to 550
_WARM_CHUNKS = 16  # before that, the system still hands out the memory of the slots: the best of a few is needed
_PROBE_EVERY = 128  # calls, in the end
_MOST_TRIALS = 7  # that are counted: two to this power is enough
_LONG_CHUNKS = 32  # so many chunks that a few may be tried more often,
_PROBE_EVERY_CHUNKS = 256  # in every eighth call of 32 chunks, in every one of 256
_SCRAMBLER = 0x9E3779B1
_TRIAL_CHUNKS = 6  # of a call that begins through the caches: then it is known whether that is slow
_PAST_ALWAYS = 2
LONG_BYTES = 4 << 20  # more than a core's share of the caches
_WRITE_AHEAD_BYTES = 2 << 10  # so far ahead of writing, lines are asked for
_READ_AHEAD_BYTES = 4 << 10  # and of reading: processors foresee what comes next, but not beyond the end of a page


@inner
def slot(ctx, rank, chunk):  # type: ignore[no-untyped-def]
    """Address of the slot of a rank for a chunk of a reduction: two of them by turns, which stay in the caches."""
    return own(ctx, context.SLOTS) + (own(ctx, context.NUM_SLOTS) * rank + (chunk & 1)) * own(ctx, context.SLOT_BYTES)


@inner
def moving_slot(ctx, rank, chunk):  # type: ignore[no-untyped-def]
    """The same for a chunk that is moved on: all slots by turns, see
    :func:`torchmpi.shared_memory.memory_layout.num_slots`.

    Two ranks change places after each turn: what one of them has read, it has in its cache, and may write to next.
    """
    num_slots = own(ctx, context.NUM_SLOTS)
    if own(ctx, context.SIZE) == 2:
        rank ^= (chunk // num_slots) & 1
    index = num_slots * rank + (chunk & (num_slots - 1))
    return own(ctx, context.SLOTS) + index * own(ctx, context.SLOT_BYTES)


@inner
def copy_past(target, source, num_bytes):  # type: ignore[no-untyped-def]
    """Copy to where nobody will look soon: for a target that is not in the caches anyway, a third less to move.

    What follows is asked for as well, since long copies are made in blocks.
    """
    head = min(-target & (_LINE_BYTES - 1), num_bytes)
    copy(target, source, head)
    done = head
    while done + 4 * _LINE_BYTES <= num_bytes:
        ask_lines(source + done + _READ_AHEAD_BYTES)
        copy_lines_past(target + done, source + done)
        done += 4 * _LINE_BYTES
    copy(target + done, source + done, num_bytes - done)
    return 0


@inner
def copy_near(target, source, num_bytes):  # type: ignore[no-untyped-def]
    """Copy to where other cores have just read: asks for the lines ahead, which the C library's memcpy does not."""
    done = 0
    while done + 4 * _LINE_BYTES <= num_bytes:
        if done + _READ_AHEAD_BYTES < num_bytes:
            ask_lines(source + done + _READ_AHEAD_BYTES)
        if done + _WRITE_AHEAD_BYTES < num_bytes:
            claim_lines(target + done + _WRITE_AHEAD_BYTES)
        copy_lines(target + done, source + done)
        done += 4 * _LINE_BYTES
    copy(target + done, source + done, num_bytes - done)
    return 0


@inner
def slow_trials(ctx):  # type: ignore[no-untyped-def]
    """How many trials in a row any rank has been slow with what went through the caches."""
    most = 0
    for rank in range(own(ctx, context.SIZE)):
        most = max(most, load(row(ctx, rank) + _FETCHES_SLOWLY))
    return most


@inner
def turn_of(ctx, every):  # type: ignore[no-untyped-def]
    """A number below `every`, the same on all ranks, by which it is decided in which calls something is tried."""
    # Scrambled: in programs whose calls repeat every 16 or 128, it would always fall on the same ones.
    return (own(ctx, context.SEQUENCE) * _SCRAMBLER >> 16) % every


@inner
def is_turn(ctx, every):  # type: ignore[no-untyped-def]
    """Whether this is one of the calls, every so many, in which something is tried."""
    return turn_of(ctx, every) == 0


@inner
def choose_way(ctx, num_chunks, always_past):  # type: ignore[no-untyped-def]
    """At the beginning of a call with chunks: past the caches if any rank was slow, unless it is time to try again."""
    every = _PROBE_EVERY if num_chunks < _LONG_CHUNKS else -(-_PROBE_EVERY_CHUNKS // num_chunks)
    # Soon again after the first time: it may have been slow for another reason, such as memory that was new.
    trials = slow_trials(ctx)
    way = trials > 0 and not is_turn(ctx, min(every, 1 << trials))
    store(ctx + context.IS_PAST * 8, _PAST_ALWAYS if always_past else way)
    store(ctx + context.CALL_CHUNKS * 8, num_chunks)
    for field in (context.FRAGMENTED, context.NEAR_PACE, context.TRIED, context.SPENT, context.SPENT + 1):
        store(ctx + field * 8, 0)  # also what a call that failed has left
    forget_paces(ctx)
    return 0


@inner
def forget_paces(ctx):  # type: ignore[no-untyped-def]
    """Begin to look for the best chunk."""
    store(ctx + context.PACE * 8, 0)
    store(ctx + context.PUT_PACE * 8, 0)
    return 0


@inner
def copy_into_slot(ctx, target, source, num_bytes):  # type: ignore[no-untyped-def]
    """Put something where other ranks will look."""
    if own(ctx, context.IS_PAST) != 0:
        copy_past(target, source, num_bytes)
    else:
        copy_near(target, source, num_bytes)
    return 0


@inner
def copy_into_slot_and(ctx, target, also, source, num_bytes):  # type: ignore[no-untyped-def]
    """The same, and past the caches to another place; what is copied is read from memory once."""
    done = 0
    while done < num_bytes:
        block = min(_BLOCK_BYTES + (-(also + done) & (_LINE_BYTES - 1)), num_bytes - done)
        copy_into_slot(ctx, target + done, source + done, block)
        copy_past(also + done, source + done, block)
        done += block
    return 0


@inner
def publish(ctx, counter, value):  # type: ignore[no-untyped-def]
    """Tell the others that something is there, however it was written."""
    if own(ctx, context.IS_PAST) != 0:
        fence()
    store_release(row(ctx, own(ctx, context.RANK)) + counter, value)
    return 0


@inner
def spent_on(ctx, chunk):  # type: ignore[no-untyped-def]
    """Address of the time that has been spent on a chunk."""
    return ctx + (context.SPENT + (chunk & 1)) * 8


@inner
def note_time(ctx, chunk, since):  # type: ignore[no-untyped-def]
    """Note what has been done for a chunk since then, in which nobody was waited for."""
    spent = spent_on(ctx, chunk)
    store(spent, load(spent) + now() - since)
    return 0


@inner
def note_best(ctx, field, index, nanoseconds, num_bytes):  # type: ignore[no-untyped-def]
    """Keep the pace of a chunk if it is the best one of the call so far: others may have been interrupted.

    In a call of four chunks and more the first use of each slot does not count, or half of the chunks. If the program
    has worked on something else since the last call, the slots have left the caches, and are quick to write to however
    far apart the cores are.
    """
    if own(ctx, context.FRAGMENTED) != 0:
        return 0
    num_first = min(own(ctx, context.NUM_SLOTS), own(ctx, context.CALL_CHUNKS) // 2)
    if num_bytes < _LEAST_BYTES or (index < num_first and own(ctx, context.CALL_CHUNKS) >= _LEAST_CHUNKS):
        return 0
    pace, best = nanoseconds * 1024 // num_bytes + 1, own(ctx, field)
    if best == 0 or pace < best:
        store(ctx + field * 8, pace)
    return 0


@inner
def note_put(ctx, chunk, since, num_bytes):  # type: ignore[no-untyped-def]
    """Note that so much of a chunk has been copied into the slot since then.

    A processor must take the lines from those who have read them before it can write there again: without a common
    cache that alone may be slow, and fetching fast.
    """
    note_best(ctx, context.PUT_PACE, chunk - own(ctx, context.CHUNKS), now() - since, num_bytes)
    return 0


@inner
def judge(ctx):  # type: ignore[no-untyped-def]
    """Tell the others whether what has gone through the caches so far was slow."""
    pace, put_pace = own(ctx, context.PACE), own(ctx, context.PUT_PACE)
    is_warm = own(ctx, context.CHUNKS) >= _WARM_CHUNKS or own(ctx, context.TRIED) >= _TRIAL_CHUNKS
    if pace + put_pace != 0 and is_warm and own(ctx, context.IS_PAST) == 0:
        is_slow = pace > _SLOW_NANOSECONDS or put_pace > _SLOW_PUT_NANOSECONDS
        field = row(ctx, own(ctx, context.RANK)) + _FETCHES_SLOWLY
        is_believed = is_slow and (is_turn(ctx, 1 << own(ctx, context.REJECTED)) or load(field) > 0)
        store(field, min(load(field) + 1, _MOST_TRIALS) if is_believed else 0)
        store(ctx + context.NEAR_PACE * 8, pace + put_pace if is_believed else 0)
        if not is_slow:
            store(ctx + context.REJECTED * 8, 0)
    return 0


@inner
def compare(ctx):  # type: ignore[no-untyped-def]
    """After some chunks past the caches: if that was no faster than through them, memory itself is slow at present."""
    near, pace = own(ctx, context.NEAR_PACE), own(ctx, context.PACE) + own(ctx, context.PUT_PACE)
    if near != 0 and pace != 0:
        is_no_better = pace * 8 >= near * 7  # the best of six chunks, against that of two or three
        rejected = min(own(ctx, context.REJECTED) + 1, _MOST_TRIALS)
        store(ctx + context.REJECTED * 8, rejected if is_no_better else 0)
        if is_no_better:
            store(row(ctx, own(ctx, context.RANK)) + _FETCHES_SLOWLY, 0)
    return 0


@inner
def note_chunk(ctx, chunk, num_bytes):  # type: ignore[no-untyped-def]
    """Note that this chunk is done. After the first ones the ranks know how they fare, and go on accordingly."""
    tried = own(ctx, context.TRIED) + 1
    spent = spent_on(ctx, chunk)
    note_best(ctx, context.PACE, tried - 1, load(spent), num_bytes)
    store(spent, 0)
    store(ctx + context.TRIED * 8, tried)
    if tried == _TRIAL_CHUNKS:
        judge(ctx)
    elif tried == _TRIAL_CHUNKS + 1:  # of which a part went by the other way
        forget_paces(ctx)
    elif tried == 2 * _TRIAL_CHUNKS + 1:
        compare(ctx)
    if tried >= _TRIAL_CHUNKS and own(ctx, context.IS_PAST) != _PAST_ALWAYS:
        store(ctx + context.IS_PAST * 8, slow_trials(ctx) > 0)
    return 0


@inner
def end_chunks(ctx):  # type: ignore[no-untyped-def]
    """At the end of a call: it may have been too short to be judged before."""
    if own(ctx, context.TRIED) < _TRIAL_CHUNKS:
        judge(ctx)
    return 0
