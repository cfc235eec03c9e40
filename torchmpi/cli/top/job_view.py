"""What is shown of a job, as one dictionary: for the terminal, ``--json`` and the page."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ...communicators.call_codes import describe
from ...communicators.flight_record import LiveRank, is_step
from ...supervision.report import named
from ..formatting import core_list, duration
from .job_history import SECOND, StepPace, pace_of
from .late_cause import cause_of, find_late
from .rank_processes import RankProcess
from .watched_job import WatchedJob

WINDOW_SECONDS = 10.0
_MOST_CALLS = 30
_STUCK = 0.95
"""The share of the time from which the others do nothing but wait, so that there are no steps to be late in."""
_OF_MESSAGES = "Messages count as computing: a timeline shows for whom they wait."
_SHARES = ("computing", "communicating", "waiting")


def view_of(job: WatchedJob) -> dict[str, Any]:
    """Return the state of a job: about the job, one entry per rank, and the late rank with its cause."""
    history = job.history
    shares = history.shares(WINDOW_SECONDS)
    known = shares.known.sum(axis=1)
    parts = {name: getattr(shares, name).sum(axis=1) for name in _SHARES}
    ranks = []
    for row, number in enumerate(history.ranks):
        if number in job.ranks:
            facts = job.facts.get(number, RankProcess())
            entry = _rank(job.ranks[number].live, job.ranks[number].process, facts, job.now)
        elif number in job.told:
            entry = _entry(**job.told[number].entry())
        else:
            continue
        entry.update({name: _share(each[row], known[row]) for name, each in parts.items()})
        ranks.append(entry)
    elsewhere = [rank for rank in job.elsewhere if rank not in job.told]
    late = _late(job, ranks)
    view = {
        "job": {
            "program": job.name[1], "size": job.size, "seen": len(ranks), "elsewhere": elsewhere,
            "note": " ".join(filter(None, (
                _note(elsewhere, is_with_first=0 in job.ranks) if elsewhere else "",
                _OF_MESSAGES if any(rank.live.has_messages for rank in job.ranks.values()) else "",
            ))),
        },
        "time": time.time(), "window_seconds": min(WINDOW_SECONDS, history.num_parts * history.part_seconds),
        "ranks": ranks, "late": late,
    }  # fmt: skip
    for each in ranks:
        each["late"] = late is not None and each["rank"] == late["rank"]
    return view


def _note(elsewhere: list[int], *, is_with_first: bool) -> str:
    where = f"{named(elsewhere)} {'are' if len(elsewhere) > 1 else 'is'} on other hosts"
    if not is_with_first:
        return f"{where}: call `torchmpi top` on the host of rank 0, which shows all of them."
    return (
        f"{where}, and have not told rank 0 of themselves: they do so within seconds, unless late_rank_share or "
        "heartbeat_seconds is 0. `torchmpi top` on their hosts shows them."
    )


def _share(part: float, known: float) -> float | None:
    return float(part / known) if known > 0 else None


def _rank(live: LiveRank, process: int, facts: RankProcess, now: float) -> dict[str, Any]:
    call, seconds = _call(live, now)
    return _entry(
        live.about["rank"], str(live.about.get("host", "")), process, facts, pace_of(live, now), call, seconds,
        str(live.told.get("line", "")), str(live.told.get("work", "")),
    )  # fmt: skip


def _entry(
    rank: int,
    host: str,
    process: int | None,
    facts: RankProcess,
    pace: StepPace,
    call: str,
    call_seconds: float,
    line: str,
    work: str,
) -> dict[str, Any]:
    return {
        "rank": rank, "host": host, "process": process,
        "cores": core_list(facts.cores), "memory_bytes": facts.memory_bytes, "state": facts.state,
        **_pace(pace), "call": call, "call_seconds": call_seconds,
        "line": line, "place": place_of(line), "work": work,
    }  # fmt: skip


def _pace(pace: StepPace) -> dict[str, Any]:
    return {
        "step": pace.step, "step_seconds": pace.step_seconds, "samples_per_second": pace.samples_per_second,
        "loss": pace.loss,
    }  # fmt: skip


def _call(live: LiveRank, now: float) -> tuple[str, float]:
    """Return the call of the program that has not ended, and for how long; '' without one."""
    for group in live.groups:
        if len(group.seq) and np.isinf(group.end[-1]) and not is_step(group.name):
            try:
                text = describe(int(group.code[-1]))
            except (IndexError, ValueError):  # a damaged record
                text = "unknown call"
            return f"{text} on {group.name}", max(0.0, (now - float(group.begin[-1])) / SECOND)
    return "", 0.0


def _late(job: WatchedJob, ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    history = job.history
    found = find_late(history.shares(), history.part_seconds, WINDOW_SECONDS)
    if found is None or (rank := history.ranks[found.rank]) not in (job.ranks.keys() | job.told.keys()):
        return None
    looks = {each: [(_short(line), work) for line, work in job.looks(each)] for each in job.ranks.keys() | job.told}
    cause = cause_of(rank, job.facts, looks.pop(rank), [look for each in looks.values() for look in each])
    step_seconds = next((each["step_seconds"] for each in ranks if each["rank"] == rank), None)
    if found.share >= _STUCK:
        text = f"the other ranks wait for rank {rank}"
    elif step_seconds:
        text = f"rank {rank} is late by {duration(found.share * step_seconds)} a step"
    else:
        text = f"rank {rank} is late by {found.share:.0%} of the time"
    return {
        "rank": rank, "share": found.share, "seconds": found.seconds, "cause": cause,
        "text": f"{text}, for {found.seconds:.0f} s: {cause}",
    }  # fmt: skip


def _short(line: str) -> str:
    """Return a line of the program with the name of its file, without folder and without its text.

    >>> _short("at /home/me/train.py:31 in load: x = next(batches)")
    'train.py:31 in load'
    """
    place = line.removeprefix("at ").rpartition("/")[2] if line.startswith("at ") else line
    head, colon, rest = place.partition(":")
    return f"{head}:{rest.partition(': ')[0]}" if colon else place


def place_of(line: str) -> str:
    """Return file and number of a line of the program.

    >>> place_of("at /home/me/train.py:31 in load: x = next(batches)")
    'train.py:31'
    """
    return _short(line).partition(" in ")[0]


def page_of(job: WatchedJob, *, seconds: float | None = 60.0) -> dict[str, Any]:
    """Return what the page shows in addition: the last seconds of each rank, waits, steps, losses and calls.

    Args:
        job: The job.
        seconds: Of how much time; None for all of it.
    """
    history = job.history
    shares = history.shares(seconds)
    view = view_of(job)
    here = [row for row, rank in enumerate(history.ranks) if rank not in job.elsewhere]  # others are not recorded here
    by_time = sorted(history.calls.items(), key=lambda item: -item[1].seconds)[:_MOST_CALLS]
    return {
        **view,
        "part_seconds": history.part_seconds,
        "lanes": {
            str(number): {
                name: np.round(getattr(shares, name)[row] / history.part_seconds, 3).tolist() for name in _SHARES
            }
            for row, number in enumerate(history.ranks)
        },
        "waits": {
            "ranks": [history.ranks[row] for row in here],
            "seconds": history.waits(seconds)[np.ix_(here, here)].round(4).tolist(),
        },
        "steps": _series(job, view, -np.inf if seconds is None else job.now - seconds * SECOND),
        "calls": [
            {
                "group": group, "call": name, "calls": each.calls, "seconds": each.seconds, "waited": each.waited,
                "bytes": each.num_bytes if np.isfinite(each.num_bytes) else None,
            }
            for (group, name), each in by_time
        ],
    }  # fmt: skip


def _series(job: WatchedJob, view: dict[str, Any], since: float) -> dict[int, Any]:
    """Return step times and losses of two ranks: the late one, or else the first, and the first that reports a loss."""
    late = view["late"]
    losing = (each["rank"] for each in view["ranks"] if each["loss"] is not None and each["rank"] in job.ranks)
    first = min(job.ranks, default=-1) if late is None or late["rank"] not in job.ranks else late["rank"]
    series = {}
    for number in dict.fromkeys((first, next(losing, first))):
        steps = job.ranks[number].live.steps
        recent = steps.ns >= since
        ns, step, loss = steps.ns[recent], steps.step[recent], steps.loss[recent]
        took = np.diff(ns) / SECOND / np.maximum(1, np.diff(step)) if len(ns) > 1 else np.zeros(0)
        series[number] = {
            "at": ((ns - job.now) / SECOND).round(3).tolist(), "took": took.round(6).tolist(),
            "loss": [float(value) if np.isfinite(value) else None for value in loss],
        }  # fmt: skip
    return series
