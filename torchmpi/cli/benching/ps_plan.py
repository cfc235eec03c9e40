"""Which jobs ``torchmpi bench ps`` starts: what each measures, with how many ranks and which settings. Pure."""

from __future__ import annotations

import argparse
from typing import NamedTuple

PARTS = ("speed", "idle", "storm", "link")
STORM = "storm"
WITHOUT_SHARED_MEMORY = {"TORCHMPI_SLOT_BYTES": "0"}
"""Then each rank has a thread that serves, as between hosts."""
_DEFAULT_RANKS = (2,)
_NUM_IDLE = 3  # without a server, with one, and the peer


class Planned(NamedTuple):
    """A job to start."""

    ranks: int
    task: argparse.Namespace
    seconds: float
    """What it should take, apart from starting."""


def jobs(options: argparse.Namespace) -> list[Planned]:
    """One job for each number of ranks, one more for threads that serve on one host, and one for the storm.

    >>> options = argparse.Namespace(parts=PARTS, ranks=None, seconds=60.0, idle=10.0, storm_ranks=4)
    >>> [(job.ranks, job.task.parts, job.seconds) for job in jobs(options)]
    [(2, ('speed', 'idle', 'link'), 90.0), (2, ('idle',), 10.0), (4, ('storm',), 60.0)]
    """
    quiet_parts = tuple(part for part in options.parts if part != STORM)
    planned = []
    for number in options.ranks or _DEFAULT_RANKS:
        if quiet_parts:
            planned.append(_planned(options, number, quiet_parts, {}))
        if "idle" in quiet_parts:
            planned.append(_planned(options, number, ("idle",), WITHOUT_SHARED_MEMORY))
    if STORM in options.parts:
        planned.append(_planned(options, options.storm_ranks, (STORM,), {}))
    return planned


def _planned(options: argparse.Namespace, ranks: int, parts: tuple[str, ...], settings: dict[str, str]) -> Planned:
    task = argparse.Namespace(**vars(options) | {"parts": parts, "settings": settings})
    durations = {"speed": options.seconds, "storm": options.seconds, "link": 0.0, "idle": _NUM_IDLE * options.idle}
    if settings:
        durations["idle"] = options.idle
    return Planned(ranks, task, sum(durations[part] for part in parts))
