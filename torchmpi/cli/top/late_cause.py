"""Which rank is late, and why: a verdict in words. Pure functions of what is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formatting import counted
from .job_history import Shares
from .rank_processes import RankProcess, least_delay

Ints = npt.NDArray[np.signedinteger[Any]]
_LEAST_SHARE = 0.03
"""The share of the time for which the other ranks wait from which a rank counts as late."""
_SPREADS = 4.0
"""How many times the spread of the others (the median of their distances from their median) a late rank is away."""
_MOST_RANKS_LATE = 0.5
"""If as many of the ranks are late, none is: these are two halves, and neither is the exception."""
_FAULTS, _SLEEPING = 20.0, 0.5
_MORE = 0.15
"""How much more often, of all looks, a late rank does what makes it late."""
Look = tuple[str, str]
"""The line of the program, and the work."""


class Late(NamedTuple):
    """The rank for which the others wait."""

    rank: int
    share: float
    """The part of the time that the others wait more than this rank."""
    seconds: float
    """How long that has been so."""


def find_late(shares: Shares, part_seconds: float, window_seconds: float) -> Late | None:
    """Return the rank for which the others wait, over a window at the end of the time; None if they are even.

    With two ranks, the one that waits less. A rank that waits as the others do is not late, whatever it does.

    Args:
        shares: The times of all ranks.
        part_seconds: The length of their parts.
        window_seconds: The length of the window.
    """
    parts = max(1, round(window_seconds / part_seconds))
    known, waited = (each[:, -parts:].sum(axis=1) for each in (shares.known, shares.waiting))
    ranks: Ints = np.flatnonzero(known > 0)
    if len(ranks) < 2:
        return None
    share = waited[ranks] / known[ranks]
    first = int(np.argmin(share))
    others = np.delete(share, first)
    lead = float(np.median(others) - share[first])
    spread = float(np.median(np.abs(others - np.median(others))))
    num_late = int((share < np.median(others) - lead / 2).sum())
    if lead < max(_LEAST_SHARE, _SPREADS * spread) or num_late >= max(2, _MOST_RANKS_LATE * len(ranks)):
        return None
    rank = int(ranks[first])
    since = _parts_late(shares, rank, ranks, most_even=max(1, parts // 2))
    return Late(rank, lead, max(since, 1) * part_seconds)


def _parts_late(shares: Shares, rank: int, ranks: Ints, most_even: int) -> int:
    """Return for how many parts, up to the last one, the others have waited more than this rank, but for short gaps."""
    share = shares.waiting / np.where(shares.known > 0, shares.known, 1.0)
    others = np.median(share[[each for each in ranks if each != rank]], axis=0)
    late = np.flatnonzero(others - share[rank] >= _LEAST_SHARE)
    if not len(late):
        return 0
    long_gaps = np.flatnonzero(np.diff(late) > most_even)
    first = int(late[long_gaps[-1] + 1] if len(long_gaps) else late[0])
    return int(share.shape[1]) - first


def cause_of(
    rank: int, facts: Mapping[int, RankProcess], looks: Sequence[Look], looks_of_others: Sequence[Look] = ()
) -> str:
    """Return why a rank is late, as far as that can be seen.

    Args:
        rank: The rank.
        facts: The processes of all ranks that were seen.
        looks: The line of its main thread at the last looks at which it was in no call, and the work; '' for nothing
            particular.
        looks_of_others: Those of all other ranks: what they do as often makes no rank late.
    """
    own = facts.get(rank, RankProcess())
    others = [each for number, each in facts.items() if number != rank]
    delays = [each.main_delayed or 0.0 for each in others]
    work, much_more = _most_more([work for _, work in looks], [work for _, work in looks_of_others])
    of_work = work and much_more >= _MORE
    line, _ = _most_more(
        [line for line, each in looks if not of_work or each == work],
        [line for line, each in looks_of_others if not of_work or each == work],
    )
    at = f", {line}" if line else ""
    if own.state in ("T", "t"):
        return "it is stopped by a signal or a debugger"
    if own.main_delayed is not None and own.main_delayed >= least_delay(delays):
        busy = f", beside {counted(own.neighbors, 'other busy process', 'es')}" if own.neighbors else ""
        return f"shared cores: it waits for a core {own.main_delayed:.0%} of the time{busy}"
    if own.faults_per_second is not None and own.faults_per_second >= _FAULTS:
        return f"memory: it reads back {own.faults_per_second:.0f} pages a second from a disk"
    if of_work:
        return f"{work}{at}"
    if own.state == "D":
        return f"it waits for a disk{at}"
    wants_to_run = (own.main_delayed or 0.0) + max(own.main_busy or 0.0, own.busy or 0.0)
    if own.main_busy is not None and wants_to_run < _SLEEPING:
        return f"it sleeps, as for a file, a device or another process{at}"
    return f"it computes longer than the others{at}"


def _most_more(own: Sequence[str], others: Sequence[str]) -> tuple[str, float]:
    """Return what a rank does more often than others, and by which part of its looks.

    >>> _most_more(["train", "load", "load", "train"], ["train"] * 8)
    ('load', 0.5)
    """
    if not own:
        return "", 0.0
    counts, of_others = Counter(own), Counter(others)
    more = {each: count / len(own) - of_others[each] / max(1, len(others)) for each, count in counts.items()}
    return max(more.items(), key=lambda item: item[1])
