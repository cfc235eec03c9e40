"""What looks at the ranks of a job from ``start()`` to ``stop()``: one table, from which the runtime starts it.

A new observer is a class in a file of its own (:class:`torchmpi.timeline.Observer`, which receives records of calls, or
:class:`torchmpi.timeline.observer.JobObserver`), a row here, and the setting that switches it on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .. import timeline
from ..timeline.observer import JobObserver, ObservedJob
from . import job_metrics


class ObserverRow(NamedTuple):
    """An observer, which runs in each job in which its setting is neither empty nor False."""

    setting: str
    """A field of :class:`torchmpi.config.Config`."""
    make: Callable[[ObservedJob, Any], JobObserver]
    """Its class, or a function: makes it for a job and the value of the setting."""


OBSERVERS = (
    ObserverRow("timeline", lambda job, folder: timeline.start(folder)),
    ObserverRow("metrics", job_metrics.exporter),
    ObserverRow("summary", job_metrics.Summary),
)


def attach_all(job: ObservedJob) -> None:
    """Start the observers that the settings switch on, in the order of the table. Collective."""
    for row in OBSERVERS:
        if value := getattr(job.config, row.setting):
            row.make(job, value).attach()
