"""Which rank makes the others wait, and why: pure functions of what ranks tell of themselves.

The time of a rank is divided into three parts: outside of calls, waiting for other ranks in calls, and moving data
there. A late rank spends more time outside than the others, who wait as much longer. Both must be so: a rank that only
moves more than others, as the first one of a host does, waits less too, and one that waits for nobody may just make
fewer calls. The decision needs no seconds and no thresholds of time: only shares, their median, and their spread.
docs/design/late-ranks.md has the reasons.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Literal, NamedTuple

NUM_WINDOWS = 12
"""The windows of a verdict."""
PERIODS_PER_WINDOW = 2
"""The least number of times that the ranks tell of themselves in a window."""
_HALF = NUM_WINDOWS // 2
"""Those of a suspicion."""
_PAST = 120
"""The windows before those of a verdict, from which the noise is known."""
_LEAST_PARTS = 4
"""So many parts of the past are needed to know how they differ."""
_CERTAINTY = 4.0
"""By how many standard errors the median of a late rank is above 0."""
_FAR = 4.0
"""So many times as long the round trips of hosts may be, as some are behind more switches than others."""
_TO_SIGMA, _OF_MEDIAN = 1.4826, 1.2533
"""From the median deviation to the standard deviation, and from that of a mean to that of a median."""


class Pace(NamedTuple):
    """What a rank has done since its start; nanoseconds, unless something else is said."""

    now: int = 0
    """The clock of the rank."""
    calls: int = 0
    """The number of calls that have ended."""
    inside: int = 0
    """Time in calls, and in messages."""
    waited: int = 0
    """The part of it in which the rank has waited for others."""
    throttled: int = 0
    """Time for which the control group has had no more CPU time."""
    in_kernel: int = 0
    """CPU time of the process in the kernel."""
    faults: int = 0
    """The number of page faults without a disk,"""
    disk_faults: int = 0
    """and of those that have read a page from a disk: from a file, or from swap."""
    collecting: int = 0
    """Time of garbage collections of Python."""

    def since(self, earlier: Pace) -> Pace:
        """Return what the rank has done since an earlier time."""
        return Pace(*(after - before for after, before in zip(self, earlier, strict=True)))

    @property
    def share_outside(self) -> float:
        """The share of the time that was spent outside of calls, of a difference of two times.

        A call counts when it ends, and may be longer than the window in which it does.
        """
        return max(0.0, 1 - self.inside / self.now)

    @property
    def share_waited(self) -> float:
        """The share of the time in which the rank has waited for others."""
        return min(1.0, self.waited / self.now)


class Looks(NamedTuple):
    """Where the main thread of a rank was, while another thread looked at it again and again."""

    num: int = 0
    """How often it was looked at."""
    queued: float = 0.0
    """The share of the time in which it was outside of calls, could have run, and had no core."""
    places: Mapping[str, int] = MappingProxyType({})
    """How often it was at a place outside of calls: ``phase<TAB>line of the program``."""


class Verdict(NamedTuple):
    """What has become known of a rank or a host."""

    kind: Literal["suspected", "late", "over"]
    number: int
    """Of the rank, or the place of the host in the ring."""
    share: float
    """The share of the time for which the others wait for it."""
    seconds: float
    """For how long it has been late."""
    of: Literal["rank", "host"] = "rank"


def lateness(window: Mapping[int, Pace]) -> dict[int, float]:
    """Return for each rank the share of a window for which the others have waited for it; below 0 if it was early.

    >>> even, late = Pace(100, 5, 30, 20), Pace(100, 5, 12, 2)
    >>> {rank: round(share, 2) for rank, share in lateness({0: even, 1: late, 2: even}).items()}
    {0: -0.09, 1: 0.18, 2: -0.09}
    >>> lateness({0: even, 1: Pace(100, 5, 30, 2)})[1]  # it waits less, because it moves more
    0.0
    """
    outside = {rank: each.share_outside for rank, each in window.items()}
    waited = {rank: each.share_waited for rank, each in window.items()}
    found = {}
    for rank in window:
        more = outside[rank] - median([share for other, share in outside.items() if other != rank])
        less = median([share for other, share in waited.items() if other != rank]) - waited[rank]
        found[rank] = max(0.0, min(more, less)) + min(0.0, max(more, less))
    return found


def is_late(shares: Sequence[float], least: float, noise: float) -> bool:
    """Return whether a rank stays late, given the share of each window for which the others have waited for it.

    `shares`: of each window; `noise`: by how much medians over windows vary among even ranks (:func:`variation`).

    The median must be at least `least`, and far above the noise. In three quarters of the windows, the rank must be
    late by half of `least` or more: a burst is over before that.

    >>> is_late([0.08, 0.11, 0.09, 0.1, 0.12, 0.07, 0.1, 0.09], 0.05, 0.02)
    True
    >>> is_late([0.0, 0.4, 0.0, 0.01, 0.3, 0.0, 0.02, 0.0], 0.05, 0.02)
    False
    """
    middle = median(shares)
    spread = _TO_SIGMA * _OF_MEDIAN * median([abs(share - middle) for share in shares])
    error = max(noise, spread / math.sqrt(len(shares)))
    num_late = sum(share >= least / 2 for share in shares)
    return middle >= max(least, _CERTAINTY * error) and 4 * num_late >= 3 * len(shares)


def variation(shares: Mapping[int, Sequence[float]]) -> float:
    """Return the standard deviation of the median over half of the windows of a verdict.

    `shares`: of each window of the past, by rank; with few of them, their spread is taken as if all were one.

    The spread of single windows would not do: on a machine that others use, a rank may be slow for ten seconds, and
    what comes in bursts does not average out. A rank that is always late does not vary.

    >>> variation({0: [0.1] * 40, 1: [0.0] * 40})
    0.0
    """
    deviations: list[float] = []
    for of_rank in shares.values():
        parts = [of_rank[at : at + _HALF] for at in range(0, len(of_rank) - _HALF + 1, _HALF)]
        if len(parts) < _LEAST_PARTS:
            middle = median(of_rank)
            spread = _TO_SIGMA * median([abs(share - middle) for share in of_rank])
            deviations.append(_OF_MEDIAN * spread)
        else:
            middle = median([median(part) for part in parts])
            deviations += [median(part) - middle for part in parts]
    return math.sqrt(sum(each**2 for each in deviations) / len(deviations))


class Verdicts:
    """Decides who is late, given the share of each window for which each one has kept the others waiting.

    Args:
        least: The least share that counts as late.
        of: What the numbers in the verdicts are.
    """

    def __init__(self, least: float, of: Literal["rank", "host"] = "rank") -> None:
        self._least, self._of = least, of
        self._begins: deque[int] = deque(maxlen=NUM_WINDOWS)
        self._clear({})

    def _clear(self, shares: Mapping[int, float]) -> None:
        self._shares: dict[int, deque[float]] = {each: deque(maxlen=NUM_WINDOWS + _PAST) for each in shares}
        """Of the windows of a verdict, and of those before."""
        self._begins.clear()
        self._since: dict[int, int] = {}
        """When each one that has been reported has begun to be late."""
        self._suspected: dict[int, int] = {}
        """At which window each one was suspected."""
        self._num_windows = 0

    def add(self, shares: Mapping[int, float], begin: int, now: int) -> list[Verdict]:
        """Take the shares of a window from `begin` to `now`, and return what follows; others begin anew."""
        if shares.keys() != self._shares.keys():
            self._clear(shares)
        self._begins.append(begin)
        self._num_windows += 1
        for each, share in shares.items():
            self._shares[each].append(share)
        if self._num_windows < _HALF or not shares:
            return []
        recent = [list(each)[-_HALF:] for each in self._shares.values()]
        if not self._since and not self._suspected and all(median(half) < self._least for half in recent):
            return []  # the usual case, and no more work than that
        noise = variation({each: list(known)[:-NUM_WINDOWS] or list(known) for each, known in self._shares.items()})
        return [verdict for each in sorted(shares) for verdict in self._of_one(each, now, noise)]

    def _of_one(self, each: int, now: int, noise: float) -> list[Verdict]:
        shares = list(self._shares[each])[-NUM_WINDOWS:]
        half = shares[-_HALF:]
        if each in self._since:
            if median(half) >= self._least / 2:
                return []
            begin = self._since.pop(each)
            self._suspected.pop(each, None)
            return [Verdict("over", each, median(half), (now - begin) / 1e9, self._of)]
        if each not in self._suspected:
            if not is_late(half, self._least, noise / 2):
                return []
            self._suspected[each] = self._num_windows
            return [Verdict("suspected", each, median(half), 0.0, self._of)]
        # As long after the suspicion as it takes to learn the cause.
        num_since = self._num_windows - self._suspected[each]
        if median(half) < self._least / 2:
            del self._suspected[each]
            return []
        if num_since < _HALF or len(shares) < NUM_WINDOWS or not is_late(shares, self._least, noise):
            return []
        begin = self._since[each] = self._begins[0]
        return [Verdict("late", each, median(shares), (now - begin) / 1e9, self._of)]


class LateWatch:
    """Finds late ranks and hosts in what all ranks tell of themselves, and when they are late no longer.

    `least` is the least share of the time for which the others wait, to be reported.

    >>> watch, ns = LateWatch(0.05), 1_000_000_000
    >>> found = []
    >>> for second in range(30):  # rank 0 waits for an eighth of the time
    ...     now, late = second * ns, second * ns // 8
    ...     found += watch.add({0: Pace(now, second, 2 * late, late), 1: Pace(now, second, late)})
    >>> [(verdict.kind, verdict.number, round(verdict.share, 2)) for verdict in found]
    [('suspected', 1, 0.12), ('late', 1, 0.12)]
    """

    def __init__(self, least: float) -> None:
        self._of_ranks, self._of_hosts = Verdicts(least), Verdicts(least, "host")
        self._begin: dict[int, Pace] = {}
        self._last: dict[int, Pace] = {}
        self._num_periods = 0
        self._windows: deque[dict[int, Pace]] = deque(maxlen=NUM_WINDOWS)
        """The pace of each rank at the begin of each window."""

    def add(self, paces: Mapping[int, Pace], round_trips: Sequence[float] = ()) -> list[Verdict]:
        """Take what the ranks have told; return what follows.

        A window ends when each rank has told of itself and has ended a call since its begin, so that windows are as
        long as steps of the program, if these are long. All ranks must be known; other sets of ranks begin anew.

        Args:
            paces: Of each rank.
            round_trips: Of the links between neighboring hosts (:func:`host_lateness`), 0 if one is not known.
        """
        if len(paces) < 2:
            return []
        if paces.keys() != self._begin.keys():
            self._begin, self._last, self._num_periods = dict(paces), dict(paces), 0
            self._windows.clear()
            return []
        has_ended = all(each.calls > self._begin[rank].calls for rank, each in paces.items())
        self._num_periods += all(each.now > self._last[rank].now for rank, each in paces.items())
        self._last = dict(paces)
        if self._num_periods < PERIODS_PER_WINDOW or not has_ended:
            return []
        window = {rank: each.since(self._begin[rank]) for rank, each in paces.items()}
        begin, now = (of[min(paces)].now for of in (self._begin, paces))
        self._windows.append(self._begin)
        self._begin, self._num_periods = dict(paces), 0
        found = self._of_ranks.add(lateness(window), begin, now)
        if len(round_trips) > 2 and all(round_trips):
            share_inside = 1 - max(each.share_outside for each in window.values())
            found += self._of_hosts.add(host_lateness(round_trips, share_inside), begin, now)
        return found

    def pace(self, rank: int) -> Pace:
        """Return what a rank has done in the windows of a verdict."""
        return self._begin[rank].since(self._windows[0][rank])


# --- the network of a host --------------------------------------------------------------------------------------------


def compared_round_trips(round_trips: Sequence[float]) -> list[tuple[float, float]]:
    """Return for each host the shorter round trip of its two links, and the median of the links of other hosts.

    Args:
        round_trips: Of the link from each host to the next one of the ring: three or more.

    >>> compared_round_trips([0.2, 50.0, 60.0, 0.3])  # between hosts 0 and 1, 1 and 2, 2 and 3, 3 and 0
    [(0.2, 55.0), (0.2, 30.15), (50.0, 0.25), (0.3, 25.1)]
    """
    links = len(round_trips)
    return [
        (
            min(round_trips[host - 1], round_trips[host]),
            median([round_trips[link] for link in range(links) if link not in (host, (host - 1) % links)]),
        )
        for host in range(links)
    ]


def host_lateness(round_trips: Sequence[float], share_inside: float) -> dict[int, float]:
    """Return for each host the share of a window that its slow network costs all ranks, as far as can be known.

    A message that takes longer, or waits in a queue behind others, delays the calls between hosts for all ranks alike,
    so that no rank is later than others. A host is slow if both of its links are. With two hosts, that is not known.

    Args:
        round_trips: Of the link from each host to the next one of the ring: three or more.
        share_inside: The share of the window for which all ranks were in calls.

    >>> host_lateness([0.2, 50.0, 60.0, 0.2], 0.5)
    {0: 0.0, 1: 0.0, 2: 0.492, 3: 0.0}
    """
    return {
        host: share_inside * max(0.0, 1 - _FAR * others / own)
        for host, (own, others) in enumerate(compared_round_trips(round_trips))
    }


# --- causes ----------------------------------------------------------------------------------------------------------

LOADING, FORWARD, BACKWARD, OPTIMIZER, SAVING, ENGINE, ELSEWHERE = (
    "data loading", "the forward pass", "the backward pass", "the optimizer", "saving a checkpoint", "the engine",
    "a line of the program",
)  # fmt: skip
"""Phases of a program, in which a rank may be longer than the others."""
_EXPLAINS = 0.5
"""The part of the lateness that a cause must explain."""
_MOST_LONGER_PHASES = 2
SEPARATOR = "\t"
_FAULTS_PER_SECOND, _DISK_FAULTS_PER_SECOND = 1000, 10


class Evidence(NamedTuple):
    """What a rank tells of the time in which it, or another rank, was late."""

    pace: Pace
    looks: Looks = Looks()


def likely_cause(share: float, own: Evidence, others: Sequence[Evidence]) -> str:
    """Return the likely cause of a lateness: the first one that explains half of it.

    `share` is that of the time for which the others wait for the rank. The line of the program that takes longer than
    on the other ranks is named, if one is known.

    What is counted comes before what the looks show, since a thread without a core is slow in every phase.

    >>> usual = Looks(100, 0.0, {f"{LOADING}{SEPARATOR}at train.py:3": 5})
    >>> more = Looks(100, 0.0, {f"{LOADING}{SEPARATOR}at train.py:3": 30})
    >>> fast, slow = (Evidence(Pace(now=10**9), looks) for looks in (usual, more))
    >>> likely_cause(0.2, slow, [fast, fast])
    'data loading, 30 % of its time instead of 5 %, at train.py:3'
    >>> likely_cause(0.2, Evidence(slow.pace, more._replace(queued=0.2)), [fast, fast])
    'other processes run on its cores, 20 % of the time'
    """

    def more(part: Callable[[Evidence], float]) -> float:
        """Return by how much something is larger than on the other ranks."""
        return part(own) - (median([part(each) for each in others]) if others else 0.0)

    def rate(name: str) -> Callable[[Evidence], float]:
        return lambda each: getattr(each.pace, name) / max(1, each.pace.now)

    enough = _EXPLAINS * share
    queued = more(lambda each: each.looks.queued)
    collecting, in_kernel = (more(rate(name)) for name in ("collecting", "in_kernel"))
    disk_faults, faults = (more(rate(name)) * 1e9 for name in ("disk_faults", "faults"))
    if collecting >= enough:
        return f"garbage collection of Python, {100 * collecting:.0f} % of the time"
    if queued >= enough:
        # The ranks of a host may share a control group, and be stopped together.
        if rate("throttled")(own) >= enough:
            return f"the CPU limit of its control group, which stops it {100 * queued:.0f} % of the time"
        return f"other processes run on its cores, {100 * queued:.0f} % of the time"
    if disk_faults >= _DISK_FAULTS_PER_SECOND:
        return f"page faults that read from a disk or from swap, {disk_faults:.0f} in a second"
    if in_kernel >= enough and faults >= _FAULTS_PER_SECOND:
        return f"page faults, {faults:.0f} in a second"
    return _longer_phase(share, own.looks, [each.looks for each in others if each.looks.num]) or "not known"


def _longer_phase(share: float, own: Looks, others: Sequence[Looks]) -> str:
    """Return the phase that takes more of the time than on the other ranks, and its line; '' if there is none."""
    phases, lines = _excess(own, others, whole=False), _excess(own, others, whole=True)
    if not phases:
        return ""
    phase, (excess, usual) = max(phases.items(), key=lambda item: item[1])
    if excess < _EXPLAINS * share / 2:  # there are a few hundred looks
        return ""
    if sum(more >= _EXPLAINS * excess for more, _ in phases.values()) > _MOST_LONGER_PHASES:
        return "all parts of a step take longer, as on slower cores"
    place = max((name for name in lines if name.startswith(f"{phase}{SEPARATOR}")), key=lambda name: lines[name])
    if phase == ELSEWHERE:
        excess, usual = lines[place]
    percent = f"{100 * (excess + usual):.0f} % of its time instead of {100 * usual:.0f} %"
    return ", ".join(text for text in (phase, percent, place.partition(SEPARATOR)[2]) if text)


def _excess(own: Looks, others: Sequence[Looks], *, whole: bool) -> dict[str, tuple[float, float]]:
    """Return for each place, or each phase, by how much its share is larger than on the others, and theirs."""

    def shares(looks: Looks) -> dict[str, float]:
        found: dict[str, float] = {}
        for place, count in looks.places.items():
            name = place if whole else place.partition(SEPARATOR)[0]
            found[name] = found.get(name, 0.0) + count / looks.num
        return found

    mine, theirs = shares(own), [shares(each) for each in others]
    usual = {name: median([each.get(name, 0.0) for each in theirs]) if theirs else 0.0 for name in mine}
    return {name: (value - usual[name], usual[name]) for name, value in mine.items()}
