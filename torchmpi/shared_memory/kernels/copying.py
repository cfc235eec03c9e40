"""Copies into the slots: through the caches, or with non-temporal stores where the ranks' cores share no cache.

Cores that share a cache exchange cache lines at 10 GB/s and more. Between cores without a common cache (another socket,
another part of the chip, or virtual cores placed on them), reading a line that the other core has just written is
slower than memory: 2 GB/s were measured, and 10 after non-temporal stores. The placement may change while a program
runs, so the ranks measure continuously:

1. `begin_measuring` decides at the beginning of a call: bypass the caches if any rank has found them slow
   (`fetches_slowly` in its block), except in the calls in which the caches are tried again.
2. `note_put` and `note_time` add up the time of copies and reductions without waits; `note_chunk` keeps the best chunk.
3. After _TRIAL_CHUNKS chunks, or at the end of a shorter call, `judge` compares it with thresholds, and stores the
   result in `fetches_slowly`; from then on all ranks bypass the caches.
4. After _TRIAL_CHUNKS chunks with non-temporal stores, `compare` reverts the decision if they were no faster.

Memory order: `fetches_slowly` is a hint, read and written without order; ranks may write differently, since
`kept` (see reduce_kernels) determines where a result is. Non-temporal stores are not ordered, hence the fence in
`publish`.
"""

from __future__ import annotations

from ..compiler.compilation import inner
from .access import block_of, is_in_slot, own_block, set_counter
from .intrinsics import (
    claim_lines,
    copy,
    copy_lines,
    copy_lines_past,
    fence,
    field_address,
    load,
    now,
    prefetch_lines,
    store,
)
from .kernel_sets import ENABLE_CHECKS
from .records import GroupRecord

_LINE_BYTES = 64
_BLOCK_BYTES = 1 << 10  # copied to two places while it is in the first-level cache
_MIN_CHUNKS = 4  # in a call with fewer chunks all are measured
_MIN_BYTES = 16 << 10  # shorter copies do not measure memory
_SLOW_NANOSECONDS = 180  # per KiB, in the best chunk. Measured: 80 to 120 with a common cache, 200 to 500 without
_SLOW_PUT_NANOSECONDS = 250  # the same for copying into a slot. Measured: 60 to 130, and 400 to 550
_WARM_CHUNKS = 16  # before, the system still allocates the pages of the slots: several chunks are needed
_PROBE_EVERY = 128  # calls, in the end
_MAX_TRIALS = 7  # counted trials: 2 to this power is _PROBE_EVERY
_LONG_CHUNKS = 32  # calls of so many chunks can afford trials more often,
_PROBE_EVERY_CHUNKS = 256  # every eighth call of 32 chunks, every call of 256
_SCRAMBLER = 0x9E3779B1
_TRIAL_CHUNKS = 6  # measured before a decision
_BYPASS_ALWAYS = 2
LONG_BYTES = 4 << 20  # more than a core's share of the caches
_WRITE_AHEAD_BYTES = 2 << 10  # distance of prefetches for writing
_READ_AHEAD_BYTES = 4 << 10  # and for reading: hardware prefetchers stop at the end of a page


@inner
def copy_past(target, source, num_bytes):
    """Copy with non-temporal stores, for targets that are not in the caches: a third less memory traffic.

    Prefetches beyond the end, because long copies are made in consecutive blocks.
    """
    head = min(-target & (_LINE_BYTES - 1), num_bytes)
    copy(target, source, head)
    done = head
    while done + 4 * _LINE_BYTES <= num_bytes:
        prefetch_lines(source + done + _READ_AHEAD_BYTES)
        copy_lines_past(target + done, source + done)
        done += 4 * _LINE_BYTES
    copy(target + done, source + done, num_bytes - done)
    return 0


@inner
def copy_near(target, source, num_bytes):
    """Copy through the caches to lines that other cores have just read, with prefetches, unlike memcpy."""
    done = 0
    while done + 4 * _LINE_BYTES <= num_bytes:
        if done + _READ_AHEAD_BYTES < num_bytes:
            prefetch_lines(source + done + _READ_AHEAD_BYTES)
        if done + _WRITE_AHEAD_BYTES < num_bytes:
            claim_lines(target + done + _WRITE_AHEAD_BYTES)
        copy_lines(target + done, source + done)
        done += 4 * _LINE_BYTES
    copy(target + done, source + done, num_bytes - done)
    return 0


@inner
def copy_into_slot(group: GroupRecord, target, source, num_bytes):
    """Copy to a slot of this rank."""
    if ENABLE_CHECKS and not is_in_slot(group, target, num_bytes):
        return 0
    if group.cache_bypass != 0:
        copy_past(target, source, num_bytes)
    else:
        copy_near(target, source, num_bytes)
    return 0


@inner
def copy_into_slot_and(group: GroupRecord, target, also, source, num_bytes):
    """Copy to a slot and, with non-temporal stores, to a second target; the source is read from memory once."""
    done = 0
    while done < num_bytes:
        block = min(_BLOCK_BYTES + (-(also + done) & (_LINE_BYTES - 1)), num_bytes - done)
        copy_into_slot(group, target + done, source + done, block)
        copy_past(also + done, source + done, block)
        done += block
    return 0


@inner
def publish(group: GroupRecord, counter, value):
    """Publish `ready` or `reduced` after writing slots, with or without non-temporal stores."""
    if group.cache_bypass != 0:
        fence()
    set_counter(group, counter, value)
    return 0


# --- the decision -----------------------------------------------------------------------------------------------


@inner
def slow_trials(group: GroupRecord):
    """Return the highest number of consecutive slow trials of any rank."""
    most = 0
    for rank in range(group.size):
        most = max(most, block_of(group, rank).fetches_slowly)
    return most


@inner
def phase_of_call(group: GroupRecord, every):
    """Return a number below `every`, equal on all ranks, that decides in which calls an alternative is tried."""
    # Scrambled, so that programs whose calls repeat every 16 or 128 do not always try the same calls.
    return (group.current_seq * _SCRAMBLER >> 16) % every


@inner
def is_trial(group: GroupRecord, every):
    """Return whether the current call is one of the calls, one in `every`, that try an alternative."""
    return phase_of_call(group, every) == 0


@inner
def begin_measuring(group: GroupRecord, num_chunks, always_bypass):
    """Choose how a call with chunks writes its slots: around the caches if any rank was slow, except in a trial."""
    every = _PROBE_EVERY if num_chunks < _LONG_CHUNKS else -(-_PROBE_EVERY_CHUNKS // num_chunks)
    # The first repetition is early, since the call may have been slow for another reason, such as new memory.
    trials = slow_trials(group)
    bypass = trials > 0 and not is_trial(group, min(every, 1 << trials))
    group.cache_bypass = _BYPASS_ALWAYS if always_bypass else bypass
    group.call_chunks = num_chunks
    group.fragmented = group.cached_pace = group.num_measured = 0  # a call that failed may have left values
    group.spent[0] = group.spent[1] = 0
    reset_paces(group)
    return 0


@inner
def reset_paces(group: GroupRecord):
    group.pace = 0
    group.put_pace = 0
    return 0


@inner
def note_time(group: GroupRecord, chunk, since):
    """Add the time since `since`, in which this rank did not wait, to a chunk."""
    group.spent[chunk & 1] += now() - since
    return 0


@inner
def note_best(group: GroupRecord, field, index, nanoseconds, num_bytes):
    """Keep the pace of a chunk if it is the best of the call, since slower chunks may have been interrupted.

    In calls of four chunks and more the first use of each slot is ignored, up to half of the chunks: if the program has
    worked on other data since the last call, the slots have left the caches and are written quickly, also with cores
    that share no cache.
    """
    if group.fragmented != 0:
        return 0
    num_first = min(group.num_slots, group.call_chunks // 2)
    if num_bytes < _MIN_BYTES or (index < num_first and group.call_chunks >= _MIN_CHUNKS):
        return 0
    pace, best = nanoseconds * 1024 // num_bytes + 1, load(field_address(group, field))
    if best == 0 or pace < best:
        store(field_address(group, field), pace)
    return 0


@inner
def note_put(group: GroupRecord, chunk, since, num_bytes):
    """Record the copy of a chunk into the slot.

    Before writing, a core must invalidate the lines in the caches of their readers: without a common cache this may be
    slow even if reading is fast.
    """
    note_best(group, GroupRecord.put_pace, chunk - group.chunks, now() - since, num_bytes)
    return 0


@inner
def judge(group: GroupRecord):
    """Store in this rank's block whether the chunks that went through the caches were slow."""
    pace, put_pace = group.pace, group.put_pace
    is_warm = group.chunks >= _WARM_CHUNKS or group.num_measured >= _TRIAL_CHUNKS
    if pace + put_pace != 0 and is_warm and group.cache_bypass == 0:
        is_slow = pace > _SLOW_NANOSECONDS or put_pace > _SLOW_PUT_NANOSECONDS
        block = own_block(group)
        trials = block.fetches_slowly
        is_believed = is_slow and (is_trial(group, 1 << group.rejected) or trials > 0)
        block.fetches_slowly = min(trials + 1, _MAX_TRIALS) if is_believed else 0
        group.cached_pace = pace + put_pace if is_believed else 0
        if not is_slow:
            group.rejected = 0
    return 0


@inner
def compare(group: GroupRecord):
    """Revert the decision for non-temporal stores if they were no faster, because memory itself is slow."""
    cached, pace = group.cached_pace, group.pace + group.put_pace
    if cached != 0 and pace != 0:
        is_no_better = pace * 8 >= cached * 7  # the best of six chunks against the best of two or three
        rejected = min(group.rejected + 1, _MAX_TRIALS)
        group.rejected = rejected if is_no_better else 0
        if is_no_better:
            own_block(group).fetches_slowly = 0
    return 0


@inner
def note_chunk(group: GroupRecord, chunk, num_bytes):
    """Record a finished chunk; decide how to write the next ones after the first chunks of either kind."""
    num_measured = group.num_measured + 1
    note_best(group, GroupRecord.pace, num_measured - 1, group.spent[chunk & 1], num_bytes)
    group.spent[chunk & 1] = 0
    group.num_measured = num_measured
    if num_measured == _TRIAL_CHUNKS:
        judge(group)
    elif num_measured == _TRIAL_CHUNKS + 1:  # written partly before, partly after the decision
        reset_paces(group)
    elif num_measured == 2 * _TRIAL_CHUNKS + 1:
        compare(group)
    if num_measured >= _TRIAL_CHUNKS and group.cache_bypass != _BYPASS_ALWAYS:
        group.cache_bypass = slow_trials(group) > 0
    return 0


@inner
def end_measuring(group: GroupRecord):
    """Decide at the end of a call that was too short for an earlier decision."""
    if group.num_measured < _TRIAL_CHUNKS:
        judge(group)
    return 0
