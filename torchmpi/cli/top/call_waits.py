"""Who waits for whom: the calls of all ranks on one group, each divided into a wait and the rest. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...collective_specs import CODES, SPECS
from ...communicators.flight_record import LiveGroup
from ...shared_memory.memory_layout import RECORD_IS_NUMBER
from ...tensors import dtype_codes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class SplitCalls(NamedTuple):
    """Calls of ranks, one element per call of a rank: until `arrived` it waits, then data move."""

    rank: Ints
    code: Ints
    num_bytes: Floats
    """NaN where the record does not have them."""
    begin: Floats
    arrived: Floats
    end: Floats
    """The present where the call has not ended."""
    awaited: Ints
    """The rank that came last of those that the call needs; -1 if it waited for none."""
    has_ended: npt.NDArray[np.bool_]


def split_calls(parts: Sequence[tuple[int, LiveGroup]], since: float, now: float) -> SplitCalls:
    """Divide the calls of some ranks on one group.

    A rank whose record lacks a call, and has earlier ones only, has not arrived by now.

    Args:
        parts: Ranks, and their calls on the group.
        since: Calls that ended before this time are left out, in nanoseconds.
        now: The present, in nanoseconds; what came later has not happened.
    """
    kept = [(number, _later(group, since)) for number, group in parts]
    rank: Ints = np.concatenate([np.full(len(group.seq), number, np.int64) for number, group in kept])
    seq: Ints = np.concatenate([group.seq for _, group in kept])
    code: Ints = np.concatenate([group.code for _, group in kept])
    begin: Floats = np.concatenate([group.begin for _, group in kept])
    end: Floats = np.concatenate([group.end for _, group in kept])
    num_bytes: Floats = np.concatenate([bytes_of(group) for _, group in kept])
    order = np.lexsort((begin, seq))
    rank, seq, code = rank[order], seq[order], code[order]
    begin, end, num_bytes = begin[order], end[order], num_bytes[order]
    if not len(seq):
        nothing = np.zeros(0)
        return SplitCalls(rank, code, num_bytes, begin, nothing, end, rank, nothing > 0)
    is_first = np.r_[True, np.diff(seq) > 0]
    call = np.cumsum(is_first) - 1
    last = np.r_[np.flatnonzero(is_first)[1:], len(seq)] - 1
    arrived, awaited = begin[last], rank[last]
    latest = {number: int(group.seq[-1]) if len(group.seq) else 0 for number, group in parts}
    behind = min(latest, key=lambda number: latest[number])
    is_missing = seq[last] > latest[behind]
    arrived, awaited = np.where(is_missing, now, arrived)[call], np.where(is_missing, behind, awaited)[call]
    for each in np.unique(code).tolist():
        flow, root = _flow(each), _root(each, parts[0][1].ranks)
        of_code = code == each
        is_root = of_code & (rank == root)
        if flow == "root to all":
            came = np.full(len(last), -np.inf if latest.get(root, 0) else now)
            came[seq[last] > latest.get(root, 0)] = now
            came[call[is_root]] = begin[is_root]
            arrived[of_code], awaited[of_code] = came[call[of_code]], root
            arrived[is_root] = -np.inf
        elif flow == "all to root":
            arrived[of_code & ~is_root] = -np.inf
        elif flow == "neighbor":
            arrived[of_code] = -np.inf
    has_ended = np.isfinite(end)
    end = np.minimum(end, now)
    begin = np.minimum(begin, now)
    arrived = np.clip(arrived, begin, np.maximum(begin, end))
    return SplitCalls(
        rank, code, num_bytes, begin, arrived, np.maximum(begin, end), np.where(arrived > begin, awaited, -1), has_ended
    )


def _later(group: LiveGroup, since: float) -> LiveGroup:
    """Return the calls of a group without those that ended before a time."""
    keep = group.end > since
    return group._replace(
        seq=group.seq[keep], code=group.code[keep], shape=group.shape[keep], begin=group.begin[keep],
        end=group.end[keep],
    )  # fmt: skip


def _flow(code: int) -> str:
    number = code & 0xFF
    return SPECS[CODES[number]].flow if number < len(CODES) else "all to all"


def _root(code: int, ranks: Sequence[int]) -> int:
    return ranks[code >> 32] if 0 <= code >> 32 < len(ranks) else -1


def bytes_of(group: LiveGroup) -> Floats:
    """Return the bytes of each call; NaN where the record does not have the shape of the whole tensor."""
    found = np.full(len(group.seq), np.nan)
    for code in np.unique(group.code).tolist():
        number, dtype = code & 0xFF, dtype_codes.name_of((code >> 16) & 0x7FFF)
        if number >= len(CODES) or not dtype or SPECS[CODES[number]].compared != "shape":
            continue
        of_code = group.code == code
        num_dims, dims = group.shape[of_code, 0], group.shape[of_code, 1:]
        if CODES[number].endswith("_many"):  # elements, tensors, a checksum
            numel = dims[:, 0].astype(np.float64)
        else:
            is_dim = np.arange(dims.shape[1]) < (num_dims & (RECORD_IS_NUMBER - 1))[:, None]
            numel = np.where(is_dim, dims, 1).astype(np.float64).prod(axis=1)
        found[of_code] = np.where(num_dims & RECORD_IS_NUMBER, np.nan, numel * dtype_codes.bytes_of(dtype))
    return found


def shared_out(begin: Floats, end: Floats, edges: Floats) -> Floats:
    """Return the time that intervals have between neighboring edges.

    >>> shared_out(np.array([1.0, 2.0]), np.array([3.0, 2.5]), np.array([0.0, 2.0, 4.0])).tolist()
    [1.0, 1.5]
    """
    passed: Floats = np.diff(_passed(begin, edges) - _passed(end, edges))
    return passed


def _passed(times: Floats, edges: Floats) -> Floats:
    """Return for each edge the sum of the times by which it is later than those before it."""
    times = np.sort(times)
    sums = np.r_[0.0, np.cumsum(times - edges[0])]
    number = np.searchsorted(times, edges)
    passed: Floats = number * (edges - edges[0]) - sums[number]
    return passed
